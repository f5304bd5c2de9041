//! Pool of inference threads, shared by all models of the process.
//!
//! Each task runs one batch of one model version. Tasks start in the order of submission while fewer tasks than the
//! configured threads keep processors busy. A version with more requests submits its next batch behind the batches of
//! other versions, so that versions take turns.
//!
//! A run may take forever, and the pool cannot interrupt it. So that one version cannot stop the others, a version
//! without a running task may always start one: then more threads than processors are busy. Tasks on GPUs wait for
//! their device, so each session on a GPU may have a thread. The number of threads is therefore bounded by
//! `threads_max`, plus one for each version on the processor, plus one for each session on GPUs. Idle threads end
//! after [`IDLE_MAX`].

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

type Task = Box<dyn FnOnce() + Send>;

/// A thread without a task ends after this time. Starting a thread takes about 50 us.
const IDLE_MAX: Duration = Duration::from_secs(60);

static SHARED: Executor = Executor::new();

thread_local! {
    /// Whether this is an inference thread.
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// A model version whose tasks run on the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Owner(u64);

impl Owner {
    /// A new, unique owner.
    pub(super) fn new() -> Owner {
        static OWNERS: AtomicU64 = AtomicU64::new(0);
        Owner(OWNERS.fetch_add(1, Ordering::Relaxed))
    }
}

/// Limits on the running tasks of a version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskLimits {
    /// A task may start while fewer tasks than this keep processors busy.
    pub(super) threads_max: usize,
    /// A task may also start while its version runs fewer tasks than this.
    pub(super) own: usize,
    /// Whether the tasks keep processors busy; false if they wait for a GPU.
    pub(super) is_on_cpu: bool,
}

impl TaskLimits {
    /// Whether a task may start when `busy` tasks keep processors busy and `own` tasks of its version run.
    fn allows(&self, busy: usize, own: usize) -> bool {
        busy < self.threads_max || own < self.own
    }
}

/// A pool that starts threads on demand, up to a bound.
pub(super) struct Executor {
    state: Mutex<PoolState>,
    submitted: Condvar,
    finished: Condvar,
}

struct Queued {
    owner: Owner,
    share: TaskLimits,
    task: Task,
}

struct PoolState {
    tasks: VecDeque<Queued>,
    /// Running tasks by version; versions without a running task are left out.
    running: BTreeMap<Owner, usize>,
    /// Running tasks that keep processors busy.
    busy: usize,
    threads: usize,
    /// Threads that wait for a task.
    idle: usize,
    /// Threads that were started or woken and have not yet looked for a task.
    searching: usize,
    /// No further task starts.
    closed: bool,
}

impl PoolState {
    fn running_of(&self, owner: Owner) -> usize {
        self.running.get(&owner).copied().unwrap_or(0)
    }

    /// Counts the tasks that may start now in addition to the running ones, up to `enough`.
    fn startable(&self, enough: usize) -> usize {
        let (mut busy, mut started) = (self.busy, Vec::new());
        if self.closed {
            return 0;
        }
        for Queued { owner, share, .. } in &self.tasks {
            if started.len() >= enough {
                break;
            }
            let own = self.running_of(*owner) + started.iter().filter(|other| *other == owner).count();
            if share.allows(busy, own) {
                busy += usize::from(share.is_on_cpu);
                started.push(*owner);
            }
        }
        started.len()
    }

    /// Starts the oldest task that may start.
    fn start_next(&mut self) -> Option<Queued> {
        let may_start = |queued: &Queued| queued.share.allows(self.busy, self.running_of(queued.owner));
        let index = self.tasks.iter().position(may_start)?;
        self.start(index)
    }

    fn start(&mut self, index: usize) -> Option<Queued> {
        if self.closed {
            return None;
        }
        let queued = self.tasks.remove(index)?;
        *self.running.entry(queued.owner).or_default() += 1;
        self.busy += usize::from(queued.share.is_on_cpu);
        Some(queued)
    }

    fn finish(&mut self, owner: Owner, share: TaskLimits) {
        let left = self.running_of(owner).saturating_sub(1);
        match left {
            0 => self.running.remove(&owner),
            _ => self.running.insert(owner, left),
        };
        self.busy -= usize::from(share.is_on_cpu);
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor").finish_non_exhaustive()
    }
}

impl Executor {
    pub(super) const fn new() -> Executor {
        let state = PoolState {
            tasks: VecDeque::new(),
            running: BTreeMap::new(),
            busy: 0,
            threads: 0,
            idle: 0,
            searching: 0,
            closed: false,
        };
        Executor { state: Mutex::new(state), submitted: Condvar::new(), finished: Condvar::new() }
    }

    /// The pool of the process.
    pub(super) fn shared() -> &'static Executor {
        &SHARED
    }

    /// Submits a task. A task whose share is zero stays queued for [`Executor::run_next`]. Runs the queue on this
    /// thread when the system refuses even the first thread.
    pub(super) fn submit(&'static self, owner: Owner, share: TaskLimits, task: Task) {
        let mut state = self.state.lock();
        state.tasks.push_back(Queued { owner, share, task });
        // An inference thread looks for the next task as soon as it has finished its current one.
        if !IS_WORKER.get() && !self.wake(&mut state) && state.threads == 0 {
            drop(state);
            while self.run_next() {}
        }
    }

    /// Wakes or starts a thread for each task that may start; false when the system refuses a thread.
    fn wake(&'static self, state: &mut PoolState) -> bool {
        while state.startable(state.searching + 1) > state.searching {
            if state.idle > 0 {
                state.idle -= 1;
                state.searching += 1;
                self.submitted.notify_one();
                continue;
            }
            match std::thread::Builder::new().name("inference".into()).spawn(move || self.work()) {
                Ok(_) => {
                    state.threads += 1;
                    state.searching += 1;
                }
                Err(error) => {
                    tracing::warn!(%error, threads = state.threads, "no further inference thread can be started");
                    return false;
                }
            }
        }
        true
    }

    /// Runs the oldest task on this thread, regardless of its share; false when the queue is empty or the pool is
    /// closed.
    pub(super) fn run_next(&self) -> bool {
        let Some(queued) = self.state.lock().start(0) else { return false };
        self.perform(queued);
        true
    }

    fn perform(&self, Queued { owner, share, task }: Queued) {
        // The panic hook has reported a panic; callers see their channels closed.
        let _ = catch_unwind(AssertUnwindSafe(task));
        let mut state = self.state.lock();
        state.finish(owner, share);
        if state.running.is_empty() {
            self.finished.notify_all();
        }
    }

    fn work(&'static self) {
        IS_WORKER.set(true);
        let mut state = self.state.lock();
        state.searching -= 1;
        loop {
            if let Some(queued) = state.start_next() {
                // Another task may start too. If no thread can be started for it, it waits until a thread is free.
                self.wake(&mut state);
                drop(state);
                self.perform(queued);
                state = self.state.lock();
                continue;
            }
            if state.closed {
                state.threads -= 1;
                return;
            }
            state.idle += 1;
            let waited = self.submitted.wait_for(&mut state, IDLE_MAX);
            // A woken thread counts as looking. If all idle threads were woken while this wait timed out, this one
            // looks.
            if waited.timed_out() && state.idle > 0 {
                state.idle -= 1;
                state.threads -= 1;
                return;
            }
            state.searching -= 1;
        }
    }

    /// Stops the start of tasks and waits up to `patience` for running ones; returns whether all have finished.
    pub(super) fn close(&self, patience: Duration) -> bool {
        let mut state = self.state.lock();
        state.closed = true;
        state.searching += std::mem::take(&mut state.idle);
        self.submitted.notify_all();
        !self.finished.wait_while_for(&mut state, |state| !state.running.is_empty(), patience).timed_out()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const OWNER: Owner = Owner(u64::MAX);

    /// A share with `threads_max` threads for all versions and none reserved for a version.
    fn share(threads_max: usize) -> TaskLimits {
        TaskLimits { threads_max, own: 0, is_on_cpu: true }
    }

    fn executor() -> &'static Executor {
        Box::leak(Box::new(Executor::new()))
    }

    #[test]
    fn tasks_start_in_order_on_one_thread() {
        let executor = executor();
        let (sender, receiver) = mpsc::channel();
        for number in 0..100 {
            let sender = sender.clone();
            executor.submit(
                OWNER,
                share(1),
                Box::new(move || sender.send((number, std::thread::current().id())).unwrap()),
            );
        }
        let first = receiver.recv().unwrap();
        assert_eq!(first.0, 0);
        for number in 1..100 {
            assert_eq!(receiver.recv().unwrap(), (number, first.1));
        }
    }

    #[test]
    fn tasks_run_at_once_on_as_many_threads_as_allowed() {
        let executor = executor();
        let (sender, receiver) = mpsc::channel();
        let (go, gate) = mpsc::channel::<()>();
        let blocked = {
            let sender = sender.clone();
            move || {
                sender.send("blocked").unwrap();
                gate.recv().unwrap();
                sender.send("released").unwrap();
            }
        };
        executor.submit(OWNER, share(2), Box::new(blocked));
        assert_eq!(receiver.recv().unwrap(), "blocked");
        executor.submit(OWNER, share(2), Box::new(move || sender.send("other").unwrap()));
        assert_eq!(receiver.recv().unwrap(), "other", "it does not wait for the first");
        go.send(()).unwrap();
        assert_eq!(receiver.recv().unwrap(), "released");
        assert_eq!(executor.state.lock().threads, 2);
    }

    #[test]
    fn task_that_panics_leaves_its_thread_to_the_next() {
        let executor = executor();
        let (sender, receiver) = mpsc::channel();
        executor.submit(OWNER, share(1), Box::new(|| panic!("on purpose")));
        executor.submit(OWNER, share(1), Box::new(move || sender.send(()).unwrap()));
        receiver.recv().unwrap();
    }

    #[test]
    fn task_submitted_by_a_task_runs_after_it() {
        let executor = executor();
        let (sender, receiver) = mpsc::channel();
        let next = sender.clone();
        let task = move || {
            executor.submit(OWNER, share(1), Box::new(move || next.send("second").unwrap()));
            sender.send("first").unwrap();
        };
        executor.submit(OWNER, share(1), Box::new(task));
        assert_eq!([receiver.recv().unwrap(), receiver.recv().unwrap()], ["first", "second"]);
    }

    #[test]
    fn closing_waits_for_the_running_task_and_starts_no_other() {
        let executor = executor();
        let (go, gate) = mpsc::channel::<()>();
        let (sender, receiver) = mpsc::channel();
        let started = sender.clone();
        let run = move || {
            started.send("started").unwrap();
            gate.recv().unwrap();
        };
        executor.submit(OWNER, share(1), Box::new(run));
        assert_eq!(receiver.recv().unwrap(), "started");
        assert!(!executor.close(Duration::from_millis(1)), "it runs");
        executor.submit(OWNER, share(1), Box::new(move || sender.send("another").unwrap()));
        go.send(()).unwrap();
        assert!(executor.close(Duration::from_secs(60)));
        assert!(!executor.run_next());
        assert!(receiver.try_recv().is_err(), "it must not start");
    }

    /// A task that sends `name` and blocks, with the sender that unblocks it.
    fn blocked(sender: &mpsc::Sender<&'static str>, name: &'static str) -> (mpsc::Sender<()>, Task) {
        let (go, gate) = mpsc::channel();
        let sender = sender.clone();
        let task = move || {
            sender.send(name).unwrap();
            gate.recv().unwrap();
        };
        (go, Box::new(task))
    }

    #[test]
    fn version_that_holds_all_threads_does_not_stop_another() {
        let executor = executor();
        let share = TaskLimits { threads_max: 2, own: 1, is_on_cpu: true };
        let (greedy, other) = (Owner::new(), Owner::new());
        let (sender, receiver) = mpsc::channel();
        let mut gates = Vec::new();
        for name in ["first", "second", "third"] {
            let (go, task) = blocked(&sender, name);
            executor.submit(greedy, share, task);
            gates.push(go);
        }
        let mut started = [receiver.recv().unwrap(), receiver.recv().unwrap()];
        started.sort_unstable();
        assert_eq!(started, ["first", "second"]);
        let (go, task) = blocked(&sender, "other");
        executor.submit(other, share, task);
        assert_eq!(receiver.recv().unwrap(), "other");
        assert_eq!(executor.state.lock().threads, 3);
        assert_eq!(executor.state.lock().tasks.len(), 1);
        // As many tasks as threads are still busy: the third task of the first version waits.
        go.send(()).unwrap();
        gates.remove(0).send(()).unwrap();
        assert_eq!(receiver.recv().unwrap(), "third");
        gates.into_iter().for_each(|go| go.send(()).unwrap());
        assert!(executor.close(Duration::from_secs(60)));
    }

    #[test]
    fn tasks_that_wait_for_gpus_take_no_threads_of_the_processor() {
        let executor = executor();
        let on_gpu = TaskLimits { threads_max: 1, own: 2, is_on_cpu: false };
        let (sender, receiver) = mpsc::channel();
        let mut gates = Vec::new();
        for owner in [Owner::new(), Owner::new()] {
            for _ in 0..2 {
                let (go, task) = blocked(&sender, "gpu");
                executor.submit(owner, on_gpu, task);
                gates.push(go);
                assert_eq!(receiver.recv().unwrap(), "gpu");
            }
        }
        let (go, task) = blocked(&sender, "cpu");
        executor.submit(OWNER, share(1), task);
        assert_eq!(receiver.recv().unwrap(), "cpu");
        gates.into_iter().chain([go]).for_each(|go| go.send(()).unwrap());
        assert!(executor.close(Duration::from_secs(60)));
    }
}
