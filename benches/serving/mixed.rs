//! A small model at a moderate load, alone and while a large one of the same server has all it can do.
#![allow(unsafe_code)]

use std::path::Path;
use std::time::Duration;

use millrace_serving::load::{Closed, Measured, Open, closed, open};

use crate::Asked;
use crate::closed::capacity;
use crate::figure::{Figure, Kind};
use crate::models::{LARGE, TINY};
use crate::served::Served;

/// Part of what the server can do with the small model alone.
const SHARE: f64 = 0.3;
/// Clients of the large model that wait for their answers.
const CLIENTS: usize = 16;
const WARM_UP: Duration = Duration::from_millis(500);

pub(crate) const FIGURES: &[(&str, &str)] = &[(
    "mixed",
    "MLP 16-64-64-4 at 30 % of its rps_c64, open loop: 99th percentile while 16 clients saturate MLP 512-2048-2048-16",
)];

pub(crate) fn run(asked: &Asked, _: &Path, ours: &Served, report: &mut dyn FnMut(Figure)) {
    let rate = SHARE * capacity(ours, &TINY, asked.window());
    // Without and with the load of the large model.
    let mut best = [f64::INFINITY; 2];
    for round in 0..asked.rounds() {
        for turn in 0..best.len() {
            let which = (turn + round) % best.len();
            let small = measure(ours, rate, which == 1, asked.window(), round as u64);
            best[which] = best[which].min(p99(&small));
        }
    }
    let [control, value] = best.map(|seconds| seconds * 1e6);
    let against = "the same load with nothing beside it";
    report(Figure { name: "serving/mixed", kind: Kind::Time, unit: "us", value, control, against });
}

/// The 99th percentile in seconds; none is long enough where more than one of a hundred was refused.
fn p99(measured: &Measured) -> f64 {
    let sent = measured.latency.count() + measured.failures() + measured.unsent;
    if (measured.failures() + measured.unsent) * 100 > sent {
        return f64::INFINITY;
    }
    measured.latency.quantile(0.99).as_secs_f64()
}

/// The small model's load, with or without that of the large one.
fn measure(ours: &Served, rate: f64, with_large: bool, window: Duration, seed: u64) -> Measured {
    let load = Open { rate, connections: 8, deadline: None, warm_up: WARM_UP, duration: window, seed };
    let beside = Closed { clients: CLIENTS, warm_up: WARM_UP, duration: window };
    let small = std::thread::scope(|scope| {
        // Clients of their own, whose threads the small model's requests do not share.
        let large = with_large
            .then(|| scope.spawn(|| client().block_on(closed(ours.address(), &LARGE.requests(), &beside))));
        let small = scope.spawn(|| {
            on_time();
            client().block_on(open(ours.address(), &TINY.requests(), &load))
        });
        let small = small.join().unwrap();
        if let Some(large) = large {
            let large = large.join().unwrap().unwrap();
            assert!(large.failed.is_empty() && large.latency.count() > 0, "large: {:?}", large.failed);
        }
        small
    });
    let small = small.unwrap();
    if !small.failed.is_empty() {
        eprintln!("serving/mixed: refused {:?}, answered {}", small.failed, small.latency.count());
    }
    for limit in small.limits() {
        eprintln!("serving/mixed: {limit}");
    }
    small
}

/// Has this thread send its requests when they are due, whatever else runs: by the real-time class, where the process
/// may use it. What is measured is the server's time then, and not how long the generator waited for a processor.
fn on_time() {
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 is the calling thread, and the parameter outlives the call.
    let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &raw const lowest) };
    if set != 0 {
        let error = std::io::Error::last_os_error();
        eprintln!(
            "serving/mixed: the generator is not of the real-time class and may be late itself: {error}"
        );
    }
}

/// What a client runs on. One thread is enough for either load, and none of them waits for another one.
fn client() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}
