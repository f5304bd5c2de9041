//! A small model at a moderate load, alone and while a large one of the same server has all it can do.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
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

pub(crate) const FIGURES: &[(&str, &str)] = &[
    (
        "mixed",
        "MLP 16-64-64-4 at 30 % of its rps_c64, open loop: 99th percentile while 16 clients saturate MLP 512-2048-2048-16",
    ),
    ("mixed_floor", "the same against an empty loop on each core that gives way to everything else"),
];

/// What a load of the small model runs beside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// As many requests of the large one as the server answers.
    Large,
    /// A loop on each core that does nothing, of the kernel's idle class: what the machine itself takes once its
    /// cores have no rest, whoever gives them none.
    Loops,
}

const ALL: [Beside; 3] = [Beside::Nothing, Beside::Large, Beside::Loops];

pub(crate) fn run(asked: &Asked, _: &Path, ours: &Served, report: &mut dyn FnMut(Figure)) {
    let rate = SHARE * capacity(ours, &TINY, asked.window());
    let mut best = [f64::INFINITY; ALL.len()];
    for round in 0..asked.rounds() {
        for turn in 0..ALL.len() {
            let which = (turn + round) % ALL.len();
            let small = measure(ours, rate, ALL[which], asked.window(), round as u64);
            best[which] = best[which].min(p99(&small));
        }
    }
    let [alone, beside, loops] = best.map(|seconds| seconds * 1e6);
    for (name, control, against) in [
        ("serving/mixed", alone, "the same load with nothing beside it"),
        (
            "serving/mixed_floor",
            loops,
            "the same load beside an empty loop of the kernel's idle class on each core",
        ),
    ] {
        report(Figure { name, kind: Kind::Time, unit: "us", value: beside, control, against });
    }
}

/// The 99th percentile in seconds; none is long enough where more than one of a hundred was refused.
fn p99(measured: &Measured) -> f64 {
    let sent = measured.latency.count() + measured.failures() + measured.unsent;
    if (measured.failures() + measured.unsent) * 100 > sent {
        return f64::INFINITY;
    }
    measured.latency.quantile(0.99).as_secs_f64()
}

fn measure(ours: &Served, rate: f64, what: Beside, window: Duration, seed: u64) -> Measured {
    let load = Open { rate, connections: 8, deadline: None, warm_up: WARM_UP, duration: window, seed };
    let beside = Closed { clients: CLIENTS, warm_up: WARM_UP, duration: window };
    let end = AtomicBool::new(false);
    let small = std::thread::scope(|scope| {
        if what == Beside::Loops {
            for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
                scope.spawn(|| idle(&end));
            }
        }
        // Clients of their own, whose threads the small model's requests do not share.
        let large = (what == Beside::Large)
            .then(|| scope.spawn(|| client().block_on(closed(ours.address(), &LARGE.requests(), &beside))));
        let small = scope.spawn(|| {
            on_time();
            client().block_on(open(ours.address(), &TINY.requests(), &load))
        });
        let small = small.join().unwrap();
        end.store(true, Ordering::Relaxed);
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

/// Keeps a core from resting until the end, and nobody from running.
fn idle(end: &AtomicBool) {
    let none = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread, and the parameter outlives the call.
    let set = unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none) };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    while !end.load(Ordering::Relaxed) {}
}

/// What a client runs on. One thread is enough for either load, and none of them waits for another one.
fn client() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}
