//! Clients that wait for their answers: how long a request takes when nobody else asks, how many there can
//! be at most, and what they cost the server.

use std::path::Path;
use std::time::Duration;

use millrace_serving::load::{Closed, Requests, closed};

use crate::Asked;
use crate::figure::{Figure, Kind};
use crate::models::{MEDIUM, Model, TINY};
use crate::served::Served;

/// Calls before those that count: connections, caches, the clock of the processor.
const WARM_UP: Duration = Duration::from_millis(300);

pub(crate) const C1_TINY: &[(&str, &str)] = &[
    ("p50_c1_tiny", "MLP 16-64-64-4, one client: median time of a request"),
    ("cpu_c1_tiny", "the same: processor time of the server for a request"),
];
pub(crate) const C64_TINY: &[(&str, &str)] = &[
    ("rps_c64_tiny", "MLP 16-64-64-4, 64 clients, each with a connection: requests per second"),
    ("cpu_c64_tiny", "the same: processor time of the server for a request"),
];
pub(crate) const C1_MEDIUM: &[(&str, &str)] =
    &[("p50_c1_medium", "MLP 256-1024-1024-16, one client: median time of a request")];
pub(crate) const C64_MEDIUM: &[(&str, &str)] = &[
    ("rps_c64_medium", "MLP 256-1024-1024-16, 64 clients: requests per second"),
    ("cpu_c64_medium", "the same: processor time of the server for a request"),
];

type Report<'a> = &'a mut dyn FnMut(Figure);

pub(crate) fn tiny_alone(asked: &Asked, folder: &Path, ours: &Served, report: Report<'_>) {
    let against = "a bare tonic handler around one session behind a mutex";
    let control = Control { kind: "bare", against };
    let [mine, theirs] = in_turn(asked, folder, ours, &TINY, 1, &control);
    report(time("serving/p50_c1_tiny", mine.p50, theirs.p50, control.named(asked)));
    cost("serving/cpu_c1_tiny", &mine, &theirs, control.named(asked), report);
}

pub(crate) fn tiny(asked: &Asked, folder: &Path, ours: &Served, report: Report<'_>) {
    let against = "a bare tonic handler around one session behind a mutex";
    let control = Control { kind: "bare", against };
    let [mine, theirs] = in_turn(asked, folder, ours, &TINY, 64, &control);
    report(rate("serving/rps_c64_tiny", &mine, &theirs, control.named(asked)));
    cost("serving/cpu_c64_tiny", &mine, &theirs, control.named(asked), report);
}

pub(crate) fn medium_alone(asked: &Asked, folder: &Path, ours: &Served, report: Report<'_>) {
    let against = "a bare tonic handler that runs each request alone, a session for each thread";
    let control = Control { kind: "unbatched", against };
    let [mine, theirs] = in_turn(asked, folder, ours, &MEDIUM, 1, &control);
    report(time("serving/p50_c1_medium", mine.p50, theirs.p50, control.named(asked)));
}

pub(crate) fn medium(asked: &Asked, folder: &Path, ours: &Served, report: Report<'_>) {
    let against = "a bare tonic handler with one queue to one thread that runs what is there, up to 64 rows";
    let control = Control { kind: "naive", against };
    let [mine, theirs] = in_turn(asked, folder, ours, &MEDIUM, 64, &control);
    report(rate("serving/rps_c64_medium", &mine, &theirs, control.named(asked)));
    cost("serving/cpu_c64_medium", &mine, &theirs, control.named(asked), report);
}

/// Whom ours is compared with.
struct Control {
    kind: &'static str,
    against: &'static str,
}

impl Control {
    fn named(&self, asked: &Asked) -> &'static str {
        if asked.other.is_some() { "the server that --against names" } else { self.against }
    }
}

fn time(name: &'static str, value: f64, control: f64, against: &'static str) -> Figure {
    Figure { name, kind: Kind::Time, unit: "us", value: value * 1e6, control: control * 1e6, against }
}

fn rate(name: &'static str, mine: &Best, theirs: &Best, against: &'static str) -> Figure {
    Figure { name, kind: Kind::Rate, unit: "requests/s", value: mine.rate, control: theirs.rate, against }
}

/// Reports what a request costs the server, where that is known of both.
fn cost(name: &'static str, mine: &Best, theirs: &Best, against: &'static str, report: Report<'_>) {
    match (mine.cost, theirs.cost) {
        (Some(mine), Some(theirs)) => report(time(name, mine, theirs, against)),
        _ => eprintln!("{name}: skipped, --pid does not say which process the other server is"),
    }
}

/// The best of the rounds, each for itself.
#[derive(Debug)]
struct Best {
    /// Median time of a request, in seconds.
    p50: f64,
    /// Requests per second.
    rate: f64,
    /// Processor time of the server for a request, in seconds.
    cost: Option<f64>,
}

impl Best {
    fn new() -> Best {
        Best { p50: f64::INFINITY, rate: 0.0, cost: None }
    }
}

/// Ours and the control in turn; who begins changes from round to round.
fn in_turn(
    asked: &Asked,
    folder: &Path,
    ours: &Served,
    model: &Model,
    clients: usize,
    control: &Control,
) -> [Best; 2] {
    let theirs = match &asked.other {
        Some(other) => Served::other(other),
        None => Served::start(control.kind, &folder.join(model.file())),
    };
    let requests = model.requests();
    let mut best = [Best::new(), Best::new()];
    for round in 0..asked.rounds() {
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for which in order {
            measure([ours, &theirs][which], &requests, clients, asked.window(), &mut best[which]);
        }
    }
    best
}

fn measure(served: &Served, requests: &Requests, clients: usize, window: Duration, best: &mut Best) {
    // A lone client needs one thread, and hops between several would be part of its time.
    let mut builder = match clients {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    let runtime = builder.enable_all().build().unwrap();
    let (measured, used) = runtime.block_on(async {
        let load = |duration| Closed { clients, warm_up: Duration::ZERO, duration };
        closed(served.address(), requests, &load(WARM_UP)).await.unwrap();
        let before = served.processor();
        let measured = closed(served.address(), requests, &load(window)).await.unwrap();
        (measured, served.processor().zip(before).map(|(after, before)| after - before))
    });
    assert!(measured.failed.is_empty(), "{:?} of {}", measured.failed, served.address());
    best.p50 = best.p50.min(measured.latency.quantile(0.5).as_secs_f64());
    best.rate = best.rate.max(measured.rate());
    let cost = used.map(|used| used / measured.latency.count() as f64);
    best.cost = [best.cost, cost].into_iter().flatten().reduce(f64::min);
}

/// Requests per second that a server can answer at most: what clients get who wait for their answers.
pub(crate) fn capacity(served: &Served, model: &Model, window: Duration) -> f64 {
    let mut best = Best::new();
    measure(served, &model.requests(), 64, window, &mut best);
    best.rate
}
