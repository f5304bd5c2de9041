//! Long runs while several models are in use: on threads of their own, which give way to all others.
//!
//! A run cannot be interrupted by the server, and where runs of a large model fill all processors, requests
//! for small ones wait for as long as such a run, or a slice of the kernel's, takes. Nobody could keep a
//! processor free for them without halving what the large model gets of two. So the kernel decides: it lets
//! whatever else wakes interrupt these threads, which are nicer, and they have what is left over. Measured
//! beside two threads that never rest, on two processors (Linux 6.18): one that is awake for 0.2 ms at a time,
//! 44 % of all, waits for a processor for 4.0 ms (p99), and for 0.1 ms when the two are nicer by 10; longer
//! slices for them change nothing. A hop to such a thread costs 20 to 60 µs, which only long runs can bear,
//! and only where there is somebody to give way to.
//!
//! Runs that wait for such a thread are taken by the time that their models have had (start-time fair
//! queueing, as requests in a line): a model that runs little goes first.

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::libc;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use crate::error::InferError;

/// Runs that take longer go to a thread of their own while other models are in use.
pub(super) const MICROS_MIN: usize = 150;
/// How long models count as used together after one run has followed one of another model.
const MIXED: Duration = Duration::from_millis(100);
/// How much nicer the threads are than the process: of a processor that is wanted by one other thread all
/// the time they still get a tenth.
const NICER: i32 = 10;

type Run = Box<dyn FnOnce() + Send>;

/// One model version's runs beside those of others.
#[derive(Debug)]
pub(super) struct Account {
    /// From 1 on.
    id: u64,
    /// When the last of its runs ends, on the clock of runs.
    finish: AtomicU64,
}

impl Default for Account {
    fn default() -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Account { id: IDS.fetch_add(1, Ordering::Relaxed), finish: AtomicU64::new(0) }
    }
}

/// Whether several models are in use, told from which ran after which.
#[derive(Debug)]
pub(super) struct Mix;

/// The account that ran last.
static LAST: AtomicU64 = AtomicU64::new(0);
/// When a run last followed one of another model, in microseconds since `BEGIN`; 0 when none has.
static SWITCHED: AtomicU64 = AtomicU64::new(0);
static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Mix {
    /// Notes that a model ran until `end`. While one model alone is in use this is one load.
    pub(super) fn used(account: &Account, end: Instant) {
        let last = LAST.load(Ordering::Relaxed);
        if last != account.id {
            LAST.store(account.id, Ordering::Relaxed);
            if last != 0 {
                SWITCHED.store(micros(end).max(1), Ordering::Relaxed);
            }
        }
    }

    /// Whether more than one model is in use.
    pub(super) fn is_mixed() -> bool {
        let switched = SWITCHED.load(Ordering::Relaxed);
        switched > 0 && u128::from(micros(Instant::now()).saturating_sub(switched)) < MIXED.as_micros()
    }
}

fn micros(at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(*BEGIN).as_micros()).unwrap_or(u64::MAX)
}

/// Runs on a thread that gives way, of which there are at most `threads_max`. A call that is dropped before
/// the run has begun takes it back.
///
/// # Errors
/// [`InferError::Internal`] when the run panicked.
pub(super) async fn run<T: Send + 'static>(
    account: &Account,
    micros: usize,
    threads_max: usize,
    run: impl FnOnce() -> Result<T, InferError> + Send + 'static,
) -> Result<T, InferError> {
    static BACKGROUND: Background = Background::new();
    let (done, answer) = oneshot::channel();
    let run = Box::new(move || {
        if !done.is_closed() {
            let _ = done.send(run());
        }
    });
    if let Some(run) = BACKGROUND.submit(account, micros as u64, threads_max, run) {
        run();
    }
    answer.await.unwrap_or_else(|_| Err(InferError::internal("the run broke off")))
}

/// Threads that give way, and what waits for one.
struct Background {
    state: Mutex<State>,
    came: Condvar,
}

struct State {
    /// By when they begin on the clock, then by their numbers.
    waiting: BTreeMap<(u64, u64), Run>,
    /// Counts microseconds of runs: when the one began that was taken last.
    clock: u64,
    submitted: u64,
    idle: usize,
    threads: usize,
}

impl Background {
    const fn new() -> Background {
        let state = State { waiting: BTreeMap::new(), clock: 0, submitted: 0, idle: 0, threads: 0 };
        Background { state: Mutex::new(state), came: Condvar::new() }
    }

    /// Has a run done that takes about so long. Comes back with it when there is no thread and none can be
    /// made.
    fn submit(&'static self, account: &Account, micros: u64, threads_max: usize, run: Run) -> Option<Run> {
        let mut state = self.state.lock();
        let begin = account.finish.load(Ordering::Relaxed).max(state.clock);
        // All stores are made under the lock.
        account.finish.store(begin.saturating_add(micros), Ordering::Relaxed);
        let place = (begin, state.submitted);
        state.submitted += 1;
        state.waiting.insert(place, run);
        if state.waiting.len() <= state.idle || state.threads >= threads_max.max(1) {
            self.came.notify_one();
            return None;
        }
        let thread = std::thread::Builder::new().name("long-runs".into());
        match thread.spawn(move || self.work()) {
            Ok(_) => state.threads += 1,
            Err(error) => {
                tracing::warn!(%error, "no thread for long runs can be made");
                if state.threads == 0 {
                    return state.waiting.remove(&place);
                }
            }
        }
        None
    }

    fn work(&self) {
        if let Err(error) = give_way() {
            tracing::debug!(%error, "long runs have the priority of all others");
        }
        let mut state = self.state.lock();
        loop {
            let Some(((begin, _), run)) = state.waiting.pop_first() else {
                state.idle += 1;
                self.came.wait(&mut state);
                state.idle -= 1;
                continue;
            };
            state.clock = state.clock.max(begin);
            drop(state);
            // What broke is told by the panic itself, and to the caller by the missing answer.
            let _ = catch_unwind(AssertUnwindSafe(run));
            state = self.state.lock();
        }
    }
}

/// Lets every other thread of the process come before this one.
fn give_way() -> io::Result<()> {
    let nice = niceness().saturating_add(NICER).min(19);
    // SAFETY: 0 is the calling thread, of which alone Linux sets the priority; no memory is involved.
    let set = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How nice this thread is.
fn niceness() -> i32 {
    // SAFETY: 0 is the calling thread, for which this cannot fail; no memory is involved.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn a_model_that_has_run_little_goes_first() {
        let background: &'static Background = Box::leak(Box::new(Background::new()));
        let (large, small) = (Account::default(), Account::default());
        let (go, gate) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let submit = |account: &Account, micros, run: Run| {
            assert!(background.submit(account, micros, 1, run).is_none());
        };
        // Holds the only thread, so that the others wait.
        submit(&large, 10_000, Box::new(move || gate.recv().unwrap()));
        for (account, name, micros, runs) in [(&large, "large", 10_000, 3), (&small, "small", 200, 4)] {
            for run in 0..runs {
                let tell = tell.clone();
                submit(account, micros, Box::new(move || tell.send((name, run)).unwrap()));
            }
        }
        go.send(()).unwrap();
        let order: Vec<_> = (0..7).map(|_| told.recv().unwrap()).collect();
        let small: Vec<_> = (0..4).map(|run| ("small", run)).collect();
        let large: Vec<_> = (0..3).map(|run| ("large", run)).collect();
        assert_eq!(order, [small, large].concat());
    }

    #[test]
    fn a_run_that_panics_leaves_its_thread_to_the_others() {
        let background: &'static Background = Box::leak(Box::new(Background::new()));
        let account = Account::default();
        let (tell, told) = mpsc::channel();
        background.submit(&account, 1, 1, Box::new(|| panic!("on purpose")));
        background.submit(&account, 1, 1, Box::new(move || tell.send(niceness()).unwrap()));
        let there = told.recv().unwrap();
        // A sandbox may forbid what any Linux allows.
        if std::thread::spawn(give_way).join().unwrap().is_ok() {
            assert_eq!(there, (niceness() + NICER).min(19));
        }
    }
}
