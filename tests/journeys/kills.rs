//! Tests of `kill -9` at seeded moments: the next run loses no record and duplicates none.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::support::{Home, Service, until};

/// Kill times as fractions of an undisturbed run; they cover produce, ingest, train and serve.
const MOMENTS: [f64; 10] = [0.04, 0.10, 0.17, 0.26, 0.35, 0.47, 0.58, 0.71, 0.83, 0.94];

/// Fields that must be equal after a disturbed and an undisturbed run.
const FIELDS: [&str; 10] = [
    "produced",
    "landed",
    "dead_letters",
    "rows_per_epoch",
    "epochs",
    "predicted_grpc",
    "predicted_topic",
    "repeated_topic",
    "model_sha256",
    "accuracy",
];

#[test]
fn pipeline_killed_at_ten_moments_completes_without_loss() {
    let calm = Home::new();
    let started = Instant::now();
    let reference = calm.json(["quickstart", "--free-ports"]);
    let whole = started.elapsed();

    let mut killed = 0;
    for moment in MOMENTS {
        let home = Home::new();
        // Once on an empty home, once on the data that the first kill left.
        for part in [moment, moment / 2.0] {
            let mut run = Service::spawn(home.command().args(["quickstart", "--free-ports", "--json"]));
            let at = Instant::now() + whole.mul_f64(part);
            while Instant::now() < at && run.is_running() {
                std::thread::park_timeout(Duration::from_millis(2));
            }
            if run.is_running() {
                run.signal(Signal::SIGKILL);
                killed += 1;
            }
            run.wait();
            // Workers exit when their coordinator is gone.
            until("the workers are gone", || home.processes() == 0);
        }
        let report = home.json(["quickstart", "--free-ports"]);
        for field in FIELDS {
            assert_eq!(report[field], reference[field], "{field} after kills at {moment}: {report}");
        }
    }
    assert!(killed >= MOMENTS.len(), "only {killed} runs were alive at their moment");
}
