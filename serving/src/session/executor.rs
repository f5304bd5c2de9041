//! Pool of inference threads, shared by all models of the process.
//!
//! Tasks start in the order in which they were submitted. Each runs one batch of one model, and a model that has more
//! requests submits its next batch behind those of the other models, so that models take turns.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

type Task = Box<dyn FnOnce() + Send>;

static SHARED: Executor = Executor::new();

thread_local! {
    /// Whether this is an inference thread.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A pool of threads that starts as many as it needs, up to a bound.
pub(super) struct Executor {
    state: Mutex<State>,
    submitted: Condvar,
    finished: Condvar,
}

struct State {
    tasks: VecDeque<Task>,
    threads: usize,
    idle: usize,
    running: usize,
    /// No more tasks start.
    closed: bool,
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor").finish_non_exhaustive()
    }
}

impl Executor {
    pub(super) const fn new() -> Executor {
        let state = State { tasks: VecDeque::new(), threads: 0, idle: 0, running: 0, closed: false };
        Executor { state: Mutex::new(state), submitted: Condvar::new(), finished: Condvar::new() }
    }

    /// The pool of the process.
    pub(super) fn shared() -> &'static Executor {
        &SHARED
    }

    /// Submits a task to at most `threads_max` threads; with 0 it stays queued for [`Executor::run_next`]. Runs it on
    /// this thread when the system refuses even the first thread.
    pub(super) fn submit(&'static self, threads_max: usize, task: Task) {
        let mut state = self.state.lock();
        state.tasks.push_back(task);
        // An inference thread takes the next task as soon as it has finished its own.
        let queued = state.tasks.len() - usize::from(IS_WORKER.get());
        if queued <= state.idle || state.threads >= threads_max {
            if queued > 0 {
                self.submitted.notify_one();
            }
            return;
        }
        match std::thread::Builder::new().name("inference".into()).spawn(move || self.work()) {
            Ok(_) => state.threads += 1,
            Err(error) => {
                tracing::warn!(%error, threads = state.threads, "no further inference thread can be started");
                if state.threads == 0 {
                    drop(state);
                    while self.run_next() {}
                }
            }
        }
    }

    /// Runs the oldest task on this thread; false when none may start.
    pub(super) fn run_next(&self) -> bool {
        let task = {
            let mut state = self.state.lock();
            if state.closed {
                return false;
            }
            let Some(task) = state.tasks.pop_front() else { return false };
            state.running += 1;
            task
        };
        // The panic hook has reported it, and callers learn it by their closed channels.
        let _ = catch_unwind(AssertUnwindSafe(task));
        let mut state = self.state.lock();
        state.running -= 1;
        if state.running == 0 {
            self.finished.notify_all();
        }
        true
    }

    fn work(&self) {
        IS_WORKER.set(true);
        loop {
            while self.run_next() {}
            let mut state = self.state.lock();
            if state.closed {
                return;
            }
            if state.tasks.is_empty() {
                state.idle += 1;
                self.submitted.wait(&mut state);
                state.idle -= 1;
            }
        }
    }

    /// Lets no more tasks start and waits for those that run, at most for `patience`; whether all have finished.
    pub(super) fn close(&self, patience: Duration) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        self.submitted.notify_all();
        !self.finished.wait_while_for(&mut state, |state| state.running > 0, patience).timed_out()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::sync::mpsc;

    use super::*;

    fn executor() -> &'static Executor {
        Box::leak(Box::new(Executor::new()))
    }

    #[test]
    fn tasks_start_in_order_on_one_thread() {
        let executor = executor();
        let (tell, told) = mpsc::channel();
        for number in 0..100 {
            let tell = tell.clone();
            executor.submit(1, Box::new(move || tell.send((number, std::thread::current().id())).unwrap()));
        }
        let first = told.recv().unwrap();
        assert_eq!(first.0, 0);
        for number in 1..100 {
            assert_eq!(told.recv().unwrap(), (number, first.1));
        }
    }

    #[test]
    fn tasks_run_at_once_on_as_many_threads_as_allowed() {
        let executor = executor();
        let (tell, told) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        let blocked = {
            let tell = tell.clone();
            move || {
                tell.send("blocked").unwrap();
                gate.recv().unwrap();
                tell.send("released").unwrap();
            }
        };
        executor.submit(2, Box::new(blocked));
        assert_eq!(told.recv().unwrap(), "blocked");
        executor.submit(2, Box::new(move || tell.send("other").unwrap()));
        assert_eq!(told.recv().unwrap(), "other", "it does not wait for the first");
        go.send(()).unwrap();
        assert_eq!(told.recv().unwrap(), "released");
        assert_eq!(executor.state.lock().threads, 2);
    }

    #[test]
    fn task_that_panics_leaves_its_thread_to_the_next() {
        let executor = executor();
        let (tell, told) = mpsc::channel();
        executor.submit(1, Box::new(|| panic!("on purpose")));
        executor.submit(1, Box::new(move || tell.send(()).unwrap()));
        told.recv().unwrap();
    }

    #[test]
    fn task_submitted_by_a_task_runs_after_it() {
        let executor = executor();
        let (tell, told) = mpsc::channel();
        let next = tell.clone();
        let task = move || {
            executor.submit(1, Box::new(move || next.send("second").unwrap()));
            tell.send("first").unwrap();
        };
        executor.submit(1, Box::new(task));
        assert_eq!([told.recv().unwrap(), told.recv().unwrap()], ["first", "second"]);
    }

    #[test]
    fn closing_waits_for_the_running_task_and_starts_no_other() {
        let executor = executor();
        let (go, gate) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let started = tell.clone();
        let run = move || {
            started.send("started").unwrap();
            gate.recv().unwrap();
        };
        executor.submit(1, Box::new(run));
        assert_eq!(told.recv().unwrap(), "started");
        assert!(!executor.close(Duration::from_millis(1)), "it runs");
        executor.submit(1, Box::new(move || tell.send("another").unwrap()));
        go.send(()).unwrap();
        assert!(executor.close(Duration::from_secs(60)));
        assert!(!executor.run_next());
        assert!(told.try_recv().is_err(), "it must not start");
    }
}
