//! Twice as many requests as the server can answer: how many of them it answers in time.

use std::path::Path;
use std::time::Duration;

use millrace_serving::load::{Measured, Open, open};

use crate::Asked;
use crate::closed::capacity;
use crate::figure::{Figure, Kind};
use crate::models::LARGE;
use crate::served::Served;

/// How often what the server can do.
const TIMES: f64 = 2.0;
/// How long a client waits for an answer, which the server is told: some times what 64 clients wait who
/// wait for their answers.
const DEADLINE: Duration = Duration::from_millis(200);
/// How long the load sleeps when it has nothing to send, before it looks for answers. They come all the time, and the
/// first of them would wake it: on the cores that it shares with the server that takes more than all else it does.
const NAP: Duration = Duration::from_millis(1);

pub(crate) const FIGURES: &[(&str, &str)] = &[(
    "overload",
    "MLP 512-2048-2048-16, requests of 4 rows at twice its capacity, open loop: answered within 200 ms, per second",
)];

pub(crate) fn run(asked: &Asked, _: &Path, ours: &Served, report: &mut dyn FnMut(Figure)) {
    let (mut most, mut goodput) = (0.0f64, 0.0f64);
    for round in 0..asked.rounds() {
        let now = capacity(ours, &LARGE, asked.window());
        most = most.max(now);
        goodput = goodput.max(measure(ours, TIMES * now, asked.window(), round as u64).goodput());
    }
    report(Figure {
        name: "serving/overload",
        kind: Kind::Rate,
        unit: "requests/s",
        value: goodput,
        control: most,
        against: "what 64 clients get who wait for their answers",
    });
}

fn measure(ours: &Served, rate: f64, window: Duration, seed: u64) -> Measured {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().on_thread_park(|| std::thread::sleep(NAP)).build().unwrap();
    let load = Open {
        rate,
        connections: 8,
        deadline: Some(DEADLINE),
        // Until the line is as long as it gets.
        warm_up: 4 * DEADLINE,
        duration: window,
        seed,
    };
    let measured = runtime.block_on(open(ours.address(), &LARGE.requests(), &load)).unwrap();
    for limit in measured.limits() {
        eprintln!("serving/overload: {limit}");
    }
    // What a server says that has more to do than it can.
    let expected = ["RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"];
    assert!(measured.failed.keys().all(|status| expected.contains(status)), "{:?}", measured.failed);
    measured
}
