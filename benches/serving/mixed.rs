//! A small model at a moderate load, alone and while a large one of the same server has all it can do.

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
    let (mut alone, mut beside) = (f64::INFINITY, f64::INFINITY);
    for round in 0..asked.rounds() {
        for busy in [round % 2 == 1, round % 2 == 0] {
            let small = measure(ours, rate, busy, asked.window(), round as u64);
            let best = if busy { &mut beside } else { &mut alone };
            *best = best.min(p99(&small));
        }
    }
    report(Figure {
        name: "serving/mixed",
        kind: Kind::Time,
        unit: "us",
        value: beside * 1e6,
        control: alone * 1e6,
        against: "the same load with nothing beside it",
    });
}

/// The 99th percentile in seconds; none is long enough where more than one of a hundred was refused.
fn p99(measured: &Measured) -> f64 {
    let sent = measured.latency.count() + measured.failures() + measured.unsent;
    if (measured.failures() + measured.unsent) * 100 > sent {
        return f64::INFINITY;
    }
    measured.latency.quantile(0.99).as_secs_f64()
}

fn measure(ours: &Served, rate: f64, busy: bool, window: Duration, seed: u64) -> Measured {
    let load = Open { rate, connections: 8, deadline: None, warm_up: WARM_UP, duration: window, seed };
    let beside = Closed { clients: CLIENTS, warm_up: WARM_UP, duration: window };
    let small = std::thread::scope(|scope| {
        // Clients of their own, whose threads the small model's requests do not share.
        let large = busy
            .then(|| scope.spawn(|| client().block_on(closed(ours.address(), &LARGE.requests(), &beside))));
        let small = client().block_on(open(ours.address(), &TINY.requests(), &load));
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

/// What a client runs on. One thread is enough for either load, and none of them waits for another one.
fn client() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}
