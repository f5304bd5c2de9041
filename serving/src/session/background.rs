//! Long runs: on threads of their own, which give way to all others while several models are in use.
//!
//! A thread of the server that runs for long answers nobody meanwhile. Having the runtime make another one take its
//! place each time leaves more threads than processors that wake each other, and processors idle until the kernel has
//! spread them (seen: a tenth less capacity with runs of 7 ms on two processors).
//!
//! A run cannot be interrupted by the server, and where runs of a large model fill all processors, requests
//! for small ones wait for as long as such a run, or a slice of the kernel's, takes. Nobody could keep a
//! processor free for them without halving what the large model gets of two. So the kernel decides: these
//! threads are of its idle class, so that whatever else wakes interrupts them at once, and have what is left
//! over. Being nicer is not enough: a thread that has just been given a processor keeps it until the next
//! tick (4 ms), however nice it is. Measured beside a model that is saturated, on two processors (Linux
//! 6.18): half of all requests for a small one take 1.1 ms where the long runs are nicer by 10, and 0.25 ms
//! where they are of the idle class; alone 0.15 ms. A hop to such a thread costs 20 to 60 µs, so that
//! runs have to be longer for it where there is nobody to give way to; a thread that has finished one takes the next
//! of the same line itself.
//!
//! What is left over may be nothing. A run that took far longer than it should has all long runs go to
//! threads that are only nicer for a while, which get a tenth of a processor that others want all the time.
//!
//! Runs that wait for such a thread are taken by the time that their models have had (start-time fair
//! queueing, as requests in a line): a model that runs little goes first.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::libc;
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;

use super::mix::{Account, Mix};
use crate::error::InferError;

/// Runs that take longer go to a thread of their own while other models are in use. Such a hop costs 20 to 60 us.
pub(super) const MIXED_MICROS_MIN: usize = 150;
/// Runs that take longer always do. With shorter ones the hop and the caches of the other processor cost more than it
/// is worth that the thread answers meanwhile (seen: runs of 1 ms for 64 clients, an eighth fewer answers).
pub(super) const MICROS_MIN: usize = 2000;
/// How much nicer than the process the threads are that must not starve: of a processor that is wanted by one
/// other thread all the time they still get a tenth.
const NICER: i32 = 10;
/// A run starves that takes so many times as long as it does typically, and longer than [`STARVING_MIN`].
const STARVING_TIMES: u64 = 10;
/// Above what the kernel or a host takes from a thread by chance.
const STARVING_MIN: Duration = Duration::from_millis(50);
/// How long runs have their tenth once one of them has starved.
const FED: Duration = Duration::from_secs(10);

type Run = Box<dyn FnOnce() + Send>;

static BACKGROUND: Background = Background::new(Mix::is_mixed);

/// Runs on a thread for long runs, of which at most `threads_max` run at a time. A call that is dropped before the
/// run has begun takes it back.
///
/// # Errors
/// [`InferError::Internal`] when the run panicked.
pub(super) async fn run<T: Send + 'static>(
    account: &Account,
    micros: usize,
    threads_max: usize,
    run: impl FnOnce() -> Result<T, InferError> + Send + 'static,
) -> Result<T, InferError> {
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

/// Whether this is a thread for long runs, in a run after which it has nothing to do yet: [`follow`] gives it that.
pub(super) fn is_free_next() -> bool {
    FREE_NEXT.get()
}

/// Has this thread do another run after its own, or another thread if what other models have waiting goes first.
/// Nobody is woken for it, and nobody waits for it.
pub(super) fn follow(account: &Account, micros: usize, run: impl FnOnce() + Send + 'static) {
    debug_assert!(FREE_NEXT.get(), "nobody would do it");
    FREE_NEXT.set(false);
    BACKGROUND.state.lock().put(account, micros as u64, Box::new(run));
}

/// Lets no long run begin any more, and waits for those under way, at most so long; whether they have ended.
pub(super) fn end(patience: Duration) -> bool {
    BACKGROUND.end(patience)
}

thread_local! {
    /// Whether this thread may be given its next run by the one that it does.
    static FREE_NEXT: Cell<bool> = const { Cell::new(false) };
}

/// How a thread gives way to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// As they do to it.
    Equal,
    /// To all of them, always.
    Idle,
    /// For most of the time.
    Nice,
}

const WAYS: [Way; 3] = [Way::Equal, Way::Idle, Way::Nice];

/// Threads for long runs, and what waits for one.
struct Background {
    state: Mutex<State>,
    /// For each way.
    came: [Condvar; WAYS.len()],
    /// A run has ended, for who waits until none is under way.
    ended: Condvar,
    /// Whether there is somebody to give way to.
    is_mixed: fn() -> bool,
}

struct State {
    /// By when they begin on the clock, then by their numbers; each with the microseconds that it takes.
    waiting: BTreeMap<(u64, u64), (u64, Run)>,
    /// Counts microseconds of runs: when the one began that was taken last.
    clock: u64,
    submitted: u64,
    /// For each way.
    threads: [Threads; WAYS.len()],
    /// When nobody needs to be fed any more.
    fed_until: Option<Instant>,
    /// Runs under way.
    running: usize,
    /// No more runs begin.
    ending: bool,
}

#[derive(Debug, Clone, Copy)]
struct Threads {
    all: usize,
    idle: usize,
}

impl State {
    /// Has a run wait that takes about so long; comes back with its place.
    fn put(&mut self, account: &Account, micros: u64, run: Run) -> (u64, u64) {
        let begin = account.finish.load(Ordering::Relaxed).max(self.clock);
        // All stores are made under the lock.
        account.finish.store(begin.saturating_add(micros), Ordering::Relaxed);
        let place = (begin, self.submitted);
        self.submitted += 1;
        self.waiting.insert(place, (micros, run));
        place
    }
}

impl Background {
    const fn new(is_mixed: fn() -> bool) -> Background {
        let state = State {
            waiting: BTreeMap::new(),
            clock: 0,
            submitted: 0,
            threads: [Threads { all: 0, idle: 0 }; WAYS.len()],
            fed_until: None,
            running: 0,
            ending: false,
        };
        let came = [const { Condvar::new() }; WAYS.len()];
        Background { state: Mutex::new(state), came, ended: Condvar::new(), is_mixed }
    }

    /// How runs give way at this moment.
    fn way(&self, state: &State) -> Way {
        match state.fed_until {
            _ if !(self.is_mixed)() => Way::Equal,
            Some(until) if Instant::now() < until && state.threads[Way::Nice as usize].all > 0 => Way::Nice,
            _ => Way::Idle,
        }
    }

    /// Has a run done that takes about so long. Comes back with it when there is no thread and none can be
    /// made.
    fn submit(&'static self, account: &Account, micros: u64, threads_max: usize, run: Run) -> Option<Run> {
        let mut state = self.state.lock();
        let place = state.put(account, micros, run);
        let way = self.way(&state);
        let threads = state.threads[way as usize];
        if state.waiting.len() > threads.idle && threads.all < threads_max.max(1) {
            // One of each, from here: a thread that gives way cannot make one that gives way less.
            for way in WAYS {
                let thread = std::thread::Builder::new().name("long-runs".into());
                match thread.spawn(move || self.work(way)) {
                    Ok(_) => state.threads[way as usize].all += 1,
                    Err(error) => tracing::warn!(%error, "no thread for long runs can be made"),
                }
            }
        }
        if state.threads[way as usize].all == 0 {
            return state.waiting.remove(&place).map(|(_, run)| run);
        }
        self.came[way as usize].notify_one();
        None
    }

    fn work(&'static self, way: Way) {
        if let Err(error) = way.give() {
            tracing::debug!(%error, "long runs have the priority of all others");
        }
        let mut state = self.state.lock();
        loop {
            let turn = match self.way(&state) {
                turn if state.threads[turn as usize].all == 0 => way,
                turn => turn,
            };
            if turn != way && !state.waiting.is_empty() {
                self.came[turn as usize].notify_one();
            }
            let next = if turn == way && !state.ending { state.waiting.pop_first() } else { None };
            let Some(((begin, _), (micros, run))) = next else {
                state.threads[way as usize].idle += 1;
                self.came[way as usize].wait(&mut state);
                state.threads[way as usize].idle -= 1;
                continue;
            };
            state.clock = state.clock.max(begin);
            state.running += 1;
            drop(state);
            let began = Instant::now();
            FREE_NEXT.set(true);
            // What broke is told by the panic itself, and to the caller by the missing answer.
            let _ = catch_unwind(AssertUnwindSafe(run));
            FREE_NEXT.set(false);
            let end = Instant::now();
            state = self.state.lock();
            state.running -= 1;
            self.ended.notify_all();
            let starving = Duration::from_micros(micros.saturating_mul(STARVING_TIMES)).max(STARVING_MIN);
            if way == Way::Idle && end.duration_since(began) > starving {
                state.fed_until = Some(end + FED);
            }
        }
    }

    fn end(&self, patience: Duration) -> bool {
        let mut state = self.state.lock();
        state.ending = true;
        !self.ended.wait_while_for(&mut state, |state| state.running > 0, patience).timed_out()
    }
}

impl Way {
    /// Lets other threads come before this one.
    fn give(self) -> io::Result<()> {
        if self == Way::Equal {
            return Ok(());
        }
        if self == Way::Idle {
            let none = libc::sched_param { sched_priority: 0 };
            // SAFETY: 0 is the calling thread, and the parameter outlives the call.
            if unsafe { libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const none) } == 0 {
                return Ok(());
            }
        }
        let nice = niceness().saturating_add(NICER).min(19);
        // SAFETY: 0 is the calling thread, of which alone Linux sets the priority; no memory is involved.
        let set = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

/// How nice this thread is.
fn niceness() -> i32 {
    // SAFETY: 0 is the calling thread, for which this cannot fail; no memory is involved.
    unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) }
}

#[cfg(test)]
mod tests;
