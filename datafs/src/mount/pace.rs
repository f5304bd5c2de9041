//! How the serving threads of a mount wait for the next request: one of them leads, the others keep away
//! while it copes.
//!
//! A program that works in a mount sends its next request some microseconds after the last answer, while
//! waking a thread on a core that has gone to sleep takes tens of them (more in a virtual machine). So
//! whoever leads looks for the next request again and again for a moment before it sleeps. And a thread
//! that sleeps in the kernel is woken by every request, mostly in vain, on the core that the program
//! needs: the others therefore wait outside of it. They come back when requests pile up, take long, or
//! the leader is stuck in one.
//!
//! Measured on two cores with one program: 8 KiB files written 4.4k a second with two threads that both
//! look, 6.1k so; names looked up 36k and 45k; on PostgreSQL with eight programs 1.2k files created with
//! two threads, 2.1k with eight.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use parking_lot::{Condvar, Mutex};

/// How long the leader looks for a request.
const LOOK: Duration = Duration::from_micros(50);
/// Requests after which it does not look, at most, once looking was in vain.
const SKIPS_MAX: u32 = 31;
/// A request that took so long waited for something, and others may do so beside it.
const SLOW: Duration = Duration::from_micros(300);
/// So many requests after a slow one nobody keeps away.
const SLOW_LASTS: u32 = 32;
/// Requests that were there already when the last one was answered, weighed against those that were not:
/// from here on one thread is not enough.
const CROWD: u32 = 8;
const CROWD_MAX: u32 = 16;
/// How often one of those who keep away sees whether the leader is stuck.
const TICK: Duration = Duration::from_millis(1);
/// Ticks without any request after which it sleeps too.
const IDLE_TICKS: u32 = 100;

static TOKENS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static TOKEN: u64 = TOKENS.fetch_add(1, Ordering::Relaxed);
    static LUCK: Cell<Luck> = const { Cell::new(Luck { skip: 0, next_skip: 1 }) };
    static SERVES: RefCell<Option<Serves>> = const { RefCell::new(None) };
}

/// What this thread has learnt from looking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Luck {
    /// So many more requests are not followed by looking.
    skip: u32,
    /// How many will not be after the next time in vain.
    next_skip: u32,
}

impl Luck {
    fn after(self, found: bool) -> Luck {
        match found {
            true => Luck { skip: 0, next_skip: 1 },
            false => Luck { skip: self.next_skip, next_skip: (2 * self.next_skip + 1).min(SKIPS_MAX) },
        }
    }
}

/// A thread that serves a mount. When the first of them ends so do all: nobody keeps away any more.
struct Serves(Arc<Shared>);

impl Drop for Serves {
    fn drop(&mut self) {
        self.0.away.lock().ended = true;
        self.0.back.notify_all();
    }
}

/// How the threads of one mount wait.
#[derive(Debug)]
pub(super) struct Pace {
    device: File,
    /// Zero on one core, where whoever sends a request has to run first.
    look: Duration,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// The token of the thread that leads; once there is one it stays the same.
    leader: AtomicU64,
    /// Moves whenever the leader takes up or answers a request.
    steps: AtomicU64,
    /// The leader waits in the kernel: it is not stuck.
    asleep: AtomicBool,
    crowd: AtomicU32,
    /// So many keep away although there is a crowd.
    away_min: usize,
    slow: AtomicU32,
    /// Nobody ticks, though somebody keeps away.
    untimed: AtomicBool,
    away: Mutex<Away>,
    back: Condvar,
}

/// Threads that keep away from the kernel.
#[derive(Debug, Default)]
struct Away {
    count: usize,
    /// One of them watches the leader.
    watched: bool,
    /// So many shall come back.
    called: usize,
    ended: bool,
}

impl Pace {
    /// `device` is where the kernel's requests come from, of any of the `threads` of the mount.
    pub(super) fn new(device: File, threads: usize) -> Pace {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let look = if cores > 1 { LOOK } else { Duration::ZERO };
        // More than this can do nothing for requests that never wait.
        let away_min = threads.saturating_sub(cores);
        Pace { device, look, shared: Arc::new(Shared { away_min, ..Shared::default() }) }
    }

    /// A request has come.
    pub(super) fn begins(&self) {
        if self.leads() {
            self.shared.steps.fetch_add(1, Ordering::Relaxed);
            // In one order with what the watching thread does before it sleeps: one sees the other.
            if self.shared.asleep.swap(false, Ordering::SeqCst) && self.shared.untimed.load(Ordering::SeqCst)
            {
                drop(self.shared.away.lock());
                self.shared.back.notify_all();
            }
        }
    }

    /// It was answered after `took`. Returns when the thread should ask the kernel for the next one.
    pub(super) fn answered(&self, took: Duration) {
        let slow = self.shared.slow.load(Ordering::Relaxed);
        if took >= SLOW {
            self.shared.slow.store(SLOW_LASTS, Ordering::Relaxed);
        } else if slow > 0 {
            // A lost count among several threads does not matter.
            self.shared.slow.store(slow - 1, Ordering::Relaxed);
        }
        if self.leads() { self.lead() } else { self.shared.keep_away() }
    }

    /// Whether this thread leads; the first that asks does.
    fn leads(&self) -> bool {
        let token = TOKEN.with(|token| *token);
        let leader = self.shared.leader.load(Ordering::Relaxed);
        if leader != 0 && SERVES.with_borrow(Option::is_some) {
            return leader == token;
        }
        SERVES.set(Some(Serves(Arc::clone(&self.shared))));
        let first = self.shared.leader.compare_exchange(0, token, Ordering::Relaxed, Ordering::Relaxed);
        first.is_ok()
    }

    /// Looks for a request, unless that was in vain lately.
    fn lead(&self) {
        let shared = &self.shared;
        let luck = LUCK.get();
        let found = if luck.skip > 0 {
            LUCK.set(Luck { skip: luck.skip - 1, ..luck });
            false
        } else {
            let found = self.finds();
            LUCK.set(luck.after(found));
            found
        };
        match found {
            true => shared.steps.fetch_add(1, Ordering::Relaxed),
            false => u64::from(shared.asleep.swap(true, Ordering::SeqCst)),
        };
    }

    /// Whether there is a request (or the mount has ended) before [`LOOK`] is over.
    fn finds(&self) -> bool {
        if self.is_waiting() {
            self.shared.crowds();
            return true;
        }
        let crowd = self.shared.crowd.load(Ordering::Relaxed);
        self.shared.crowd.store(crowd.saturating_sub(1), Ordering::Relaxed);
        let begin = Instant::now();
        while begin.elapsed() < self.look {
            std::thread::yield_now();
            if self.is_waiting() {
                return true;
            }
        }
        false
    }

    fn is_waiting(&self) -> bool {
        let mut device = [PollFd::new(self.device.as_fd(), PollFlags::POLLIN)];
        poll(&mut device, PollTimeout::ZERO) != Ok(0)
    }
}

impl Shared {
    /// A request was there already: where that is so again and again, somebody is called back.
    fn crowds(&self) {
        let crowd = (self.crowd.load(Ordering::Relaxed) + 2).min(CROWD_MAX);
        self.crowd.store(crowd, Ordering::Relaxed);
        if crowd >= CROWD {
            let mut away = self.away.lock();
            if away.count > self.away_min + away.called {
                away.called += 1;
                self.back.notify_one();
            }
        }
    }

    /// Returns when the leader does not cope: at once, mostly, where it does not now.
    fn keep_away(&self) {
        if self.slow.load(Ordering::Relaxed) > 0 {
            return;
        }
        let mut away = self.away.lock();
        if self.crowd.load(Ordering::Relaxed) >= CROWD && away.count >= self.away_min {
            return;
        }
        away.count += 1;
        let mut watches = false;
        let (mut seen, mut idle) = (self.steps.load(Ordering::Relaxed), 0);
        while !away.ended && away.called == 0 {
            watches |= !std::mem::replace(&mut away.watched, true);
            if !watches {
                self.back.wait(&mut away);
                continue;
            }
            if idle >= IDLE_TICKS {
                self.untimed.store(true, Ordering::SeqCst);
                if self.asleep.load(Ordering::SeqCst) {
                    self.back.wait(&mut away);
                }
                self.untimed.store(false, Ordering::SeqCst);
                idle = 0;
            } else if self.back.wait_for(&mut away, TICK).timed_out() {
                if self.asleep.load(Ordering::Relaxed) {
                    idle += 1;
                    continue;
                }
                idle = 0;
                let steps = self.steps.load(Ordering::Relaxed);
                if std::mem::replace(&mut seen, steps) == steps {
                    break; // Stuck.
                }
            }
        }
        away.count -= 1;
        away.called = away.called.saturating_sub(1);
        if watches {
            away.watched = false;
            // Somebody else watches from now on.
            self.back.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{PipeWriter, Write as _};

    use super::*;

    fn pace(away_min: usize) -> (Arc<Pace>, PipeWriter) {
        let (reader, writer) = std::io::pipe().unwrap();
        let device = File::from(std::os::fd::OwnedFd::from(reader));
        (
            Arc::new(Pace { device, look: LOOK, shared: Arc::new(Shared { away_min, ..Shared::default() }) }),
            writer,
        )
    }

    fn request(pace: &Pace, took: Duration) {
        pace.begins();
        pace.answered(took);
    }

    const QUICK: Duration = Duration::from_micros(5);

    /// A thread that answers one request and returns from waiting only when it is wanted.
    fn follower(pace: &Arc<Pace>) -> std::thread::JoinHandle<()> {
        let other = Arc::clone(pace);
        std::thread::spawn(move || {
            request(&other, QUICK);
            // As if it were in the kernel: that it ends calls nobody back.
            std::mem::forget(SERVES.take());
        })
    }

    /// Some of them, once they wait.
    fn followers(pace: &Arc<Pace>, count: usize) -> Vec<std::thread::JoinHandle<()>> {
        let threads = (0..count).map(|_| follower(pace)).collect();
        wait_for(|| away(pace) == count);
        threads
    }

    fn away(pace: &Pace) -> usize {
        pace.shared.away.lock().count
    }

    fn wait_for(what: impl Fn() -> bool) {
        let begin = Instant::now();
        while !what() {
            assert!(begin.elapsed() < Duration::from_secs(60), "never happened");
            std::thread::yield_now();
        }
    }

    #[test]
    fn who_finds_nothing_looks_more_rarely_and_one_request_makes_up_for_it() {
        let (pace, mut writer) = pace(0);
        let skips = || LUCK.get().skip;
        LUCK.set(Luck { skip: 0, next_skip: 1 });
        request(&pace, QUICK);
        assert_eq!(skips(), 1);
        request(&pace, QUICK);
        assert_eq!(skips(), 0, "the one after a look in vain is not followed by another");
        for round in [3, 7, 15, 31, 31] {
            request(&pace, QUICK);
            assert_eq!(skips(), round);
            (0..round).for_each(|_| request(&pace, QUICK));
        }
        assert!(pace.shared.asleep.load(Ordering::SeqCst));
        writer.write_all(b"x").unwrap();
        request(&pace, QUICK);
        assert_eq!(LUCK.get(), Luck { skip: 0, next_skip: 1 });
        assert!(!pace.shared.asleep.load(Ordering::SeqCst));
    }

    #[test]
    fn others_keep_away_until_the_leader_is_stuck() {
        let (pace, _writer) = pace(0);
        request(&pace, QUICK);
        let threads = followers(&pace, 3);
        // The leader waits in the kernel, however long: nobody is needed, and nobody ticks.
        wait_for(|| pace.shared.untimed.load(Ordering::SeqCst));
        assert_eq!(away(&pace), 3);
        // It takes up a request and does not come back: all others do, one after the other.
        pace.begins();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(away(&pace), 0);
        assert!(!pace.shared.away.lock().watched);
    }

    #[test]
    fn requests_that_pile_up_call_one_more_at_a_time() {
        let (pace, mut writer) = pace(0);
        request(&pace, QUICK);
        let threads = followers(&pace, 2);
        LUCK.set(Luck { skip: 0, next_skip: 1 });
        writer.write_all(b"x").unwrap();
        for _ in 0..CROWD / 2 - 1 {
            request(&pace, QUICK);
        }
        assert_eq!((away(&pace), pace.shared.away.lock().called), (2, 0));
        request(&pace, QUICK);
        wait_for(|| away(&pace) == 1);
        request(&pace, QUICK);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        // And so it stays while there are as many.
        follower(&pace).join().unwrap();
    }

    #[test]
    fn no_more_than_there_are_cores_are_called() {
        let (pace, mut writer) = pace(1);
        request(&pace, QUICK);
        let threads = followers(&pace, 2);
        LUCK.set(Luck { skip: 0, next_skip: 1 });
        writer.write_all(b"x").unwrap();
        (0..CROWD).for_each(|_| request(&pace, QUICK));
        wait_for(|| away(&pace) == 1);
        (0..CROWD).for_each(|_| request(&pace, QUICK));
        assert_eq!((away(&pace), pace.shared.away.lock().called), (1, 0));
        pace.begins();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn nobody_keeps_away_after_slow_requests() {
        let (pace, _writer) = pace(0);
        request(&pace, SLOW);
        for _ in 0..SLOW_LASTS - 1 {
            follower(&pace).join().unwrap();
        }
        let thread = follower(&pace);
        wait_for(|| away(&pace) == 1);
        pace.begins();
        thread.join().unwrap();
    }

    #[test]
    fn all_come_back_when_a_serving_thread_ends() {
        let (pace, _writer) = pace(0);
        let leader = Arc::clone(&pace);
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let (led, leads) = std::sync::mpsc::channel();
        let leader = std::thread::spawn(move || {
            request(&leader, QUICK);
            led.send(()).unwrap();
            let _ = ended.recv();
        });
        leads.recv().unwrap();
        let threads = followers(&pace, 3);
        drop(end);
        leader.join().unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(away(&pace), 0);
    }
}
