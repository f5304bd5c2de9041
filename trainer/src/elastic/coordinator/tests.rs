//! Tests of the coordinator's end with processes of `/bin/sh`.

use std::path::PathBuf;

use super::*;

/// No test waits longer for an event.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_ends_workers_that_have_not_greeted_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let started = folder.path().join("started");
    let config = Config::default();
    let command = WorkerCommand {
        program: PathBuf::from("/bin/sh"),
        args: vec!["-c".into(), "echo > \"$STARTED\"; exec sleep 600".into()],
        env: vec![("STARTED".into(), started.display().to_string())],
    };
    let params = CoordinatorParams {
        job: "j",
        workers: 1,
        workers_min: 1,
        config: &config,
        command: &command,
        token: "t".into(),
        assignment: "{}".into(),
        joining: None,
        hand_over: false,
        lease: None,
    };
    let stop = CancellationToken::new();
    let running = run(params, stop.clone(), |_| {});
    let stopping = async {
        while !started.exists() {
            tokio::task::yield_now().await;
        }
        stop.cancel();
        Instant::now()
    };
    let both = async { tokio::join!(running, stopping) };
    let (outcome, stopped) = tokio::time::timeout(PATIENCE, both).await.unwrap();
    assert!(outcome.unwrap().stopped);
    // After that time, workers are killed with a warning.
    assert!(stopped.elapsed() < EXIT_TIMEOUT, "{:?}", stopped.elapsed());
}
