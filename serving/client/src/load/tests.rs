//! Open-loop tests on a virtual clock, which advances when all tasks wait: measurements are exact on any machine.
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::oneshot;
use tonic::Code;

use super::client::Server;
use super::clock::Clock;
use super::open::{UNANSWERED_MAX, drive, rounded_up};
use super::*;

/// More yields to the runtime than the longest chain of wake-ups in these tests.
const TURNS: usize = 64;

#[derive(Debug, Default)]
struct Virtual {
    now: Duration,
    /// Moments that tasks wait for, each with the number of its waiter.
    waiting: BinaryHeap<Reverse<(Duration, u64)>>,
    wake: std::collections::HashMap<u64, oneshot::Sender<()>>,
    next: u64,
}

#[derive(Debug, Clone, Default)]
struct VirtualClock(Arc<Mutex<Virtual>>);

impl Clock for VirtualClock {
    fn now(&self) -> Duration {
        self.0.lock().now
    }

    async fn until(&self, at: Duration) {
        let woken = {
            let mut time = self.0.lock();
            if at <= time.now {
                return;
            }
            let (wake, woken) = oneshot::channel();
            let number = time.next;
            time.next += 1;
            time.waiting.push(Reverse((at, number)));
            time.wake.insert(number, wake);
            woken
        };
        woken.await.unwrap();
    }
}

impl VirtualClock {
    /// Advances the time forever, from one awaited moment to the next.
    async fn run(self) {
        loop {
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
            let mut time = self.0.lock();
            if let Some(Reverse((at, number))) = time.waiting.pop() {
                time.now = time.now.max(at);
                // A waiter that was dropped is not woken.
                if let Some(wake) = time.wake.remove(&number) {
                    wake.send(()).ok();
                }
            }
        }
    }
}

/// Answers each request at once, except during a stall from `from` to `to`, whose requests it answers at its end.
#[derive(Debug, Clone)]
struct Stalls {
    clock: VirtualClock,
    from: Duration,
    to: Duration,
}

impl Server for Stalls {
    async fn call(&mut self, _: u64, timeout: Option<Duration>) -> Result<(), Code> {
        let now = self.clock.now();
        if !(self.from..self.to).contains(&now) {
            return Ok(());
        }
        match timeout {
            Some(timeout) if now + timeout < self.to => {
                self.clock.until(now + timeout).await;
                Err(Code::DeadlineExceeded)
            }
            _ => {
                self.clock.until(self.to).await;
                Ok(())
            }
        }
    }
}

fn load(rate: f64, deadline: Option<Duration>) -> Open {
    Open {
        rate,
        connections: 1,
        deadline,
        warm_up: Duration::from_secs(1),
        duration: Duration::from_secs(10),
        seed: 11,
    }
}

fn measure(load: Open, from: Duration, to: Duration) -> Measured {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let clock = VirtualClock::default();
        let passing = tokio::spawn(clock.clone().run());
        let server = Stalls { clock: clock.clone(), from, to };
        let measured = drive(clock, vec![server], &load).await;
        passing.abort();
        measured
    })
}

/// Scheduled times of the counted requests.
fn scheduled(load: &Open) -> Vec<Duration> {
    let end = load.warm_up + load.duration;
    let counted = |at: &Duration| *at >= load.warm_up;
    Poisson::new(load.rate, load.seed).take_while(|at| *at < end).filter(counted).collect()
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn stall_counts_for_each_request_scheduled_during_it() {
    let load = load(200.0, None);
    let (from, to) = (4 * SECOND, 6 * SECOND);
    let measured = measure(load, from, to);
    let scheduled = scheduled(&load);
    let mut times: Vec<Duration> =
        scheduled.iter().map(|at| if (from..to).contains(at) { to - *at } else { Duration::ZERO }).collect();
    times.sort();
    assert_eq!(measured.latency.count(), scheduled.len() as u64);
    assert_eq!(measured.latency.longest(), times[times.len() - 1]);
    for quantile in [0.5, 0.9, 0.99, 0.999] {
        let truth = times[(quantile * times.len() as f64).ceil() as usize - 1].as_nanos();
        let found = measured.latency.quantile(quantile).as_nanos();
        assert!(truth <= found && found - truth <= truth / 128, "{quantile}: {found}, the truth is {truth}");
    }
    // A client that waits for its response would have measured the stall once: one of two thousand requests.
    assert!(measured.latency.quantile(0.9) > SECOND / 2);
    assert_eq!((measured.failures(), measured.unsent, measured.late.longest()), (0, 0, Duration::ZERO));
    assert!((measured.rate() - 200.0).abs() < 10.0, "{}", measured.rate());
}

#[test]
fn deadlines_count_from_when_a_request_was_to_be_sent() {
    let deadline = SECOND / 2;
    let load = load(200.0, Some(deadline));
    let (from, to) = (4 * SECOND, 6 * SECOND);
    let measured = measure(load, from, to);
    let scheduled = scheduled(&load);
    let missed = scheduled.iter().filter(|at| (from..to - deadline).contains(*at)).count() as u64;
    assert!(missed > 200);
    assert_eq!(measured.failed.get("DEADLINE_EXCEEDED"), Some(&missed));
    assert_eq!(measured.failures(), missed);
    assert_eq!(measured.in_time, scheduled.len() as u64 - missed);
    assert!(measured.latency.longest() <= deadline);
}

#[test]
fn unanswered_and_unsent_requests_are_reported() {
    // A server that never answers: the maximum number of requests waits, and the rest is not sent.
    let load = load(3000.0, None);
    let measured = measure(load, 2 * SECOND, 1000 * SECOND);
    let scheduled = scheduled(&load);
    let answered = scheduled.iter().filter(|at| **at < 2 * SECOND).count() as u64;
    assert_eq!(measured.latency.count(), answered);
    assert_eq!(measured.failed.get("no answer"), Some(&(UNANSWERED_MAX as u64)));
    assert_eq!(measured.unsent, scheduled.len() as u64 - answered - UNANSWERED_MAX as u64);
    assert!(measured.limits().iter().any(|limit| limit.contains("were not sent")), "{:?}", measured.limits());
}

#[test]
fn late_generator_is_reported() {
    let mut measured = Measured { elapsed: SECOND, ..Measured::default() };
    for _ in 0..100 {
        measured.late.record(Duration::from_micros(900));
        measured.latency.record(Duration::from_millis(1));
    }
    assert!(measured.limits().is_empty(), "the timer's own lateness is none");
    for _ in 0..10 {
        measured.late.record(Duration::from_millis(30));
        measured.latency.record(Duration::from_millis(31));
    }
    assert!(measured.limits()[0].contains("30."), "{:?}", measured.limits());
    measured.late = Histogram::default();
    measured.processor = SECOND * 10_000;
    assert!(measured.limits()[0].contains("the generator itself used"), "{:?}", measured.limits());
}

#[test]
fn times_are_rounded_up_to_a_part_of_the_deadline() {
    let micros = Duration::from_micros;
    for (at, grain, expected) in
        [(0, 7, 0), (1, 7, 7), (7, 7, 7), (8, 7, 14), (5, 0, 5), (1_000_001, 1_000, 1_001_000)]
    {
        assert_eq!(rounded_up(micros(at), micros(grain)), micros(expected), "{at} {grain}");
    }
}
