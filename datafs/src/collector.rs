//! The signal between operations and the background thread that collects garbage.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use nix::fcntl::Flock;
use parking_lot::{Condvar, Mutex};

use crate::error::{Error, Result};

/// Longest wait for a running collection to stop.
const STOP_MAX: Duration = Duration::from_secs(5);

/// The state of the background collection of one open datafs.
#[derive(Debug, Default)]
pub(crate) struct Collector {
    state: Mutex<State>,
    changed: Condvar,
    /// The lock that shows the end of this process, if it has one.
    end: OnceLock<Option<Flock<File>>>,
}

#[derive(Debug)]
struct State {
    wanted: bool,
    /// A full collection in this process is requested, whichever process is elected.
    urgent: bool,
    stopped: bool,
    /// The thread holds the datafs open at this moment.
    busy: bool,
}

impl Default for State {
    /// The first collection starts at once: it cleans up after processes that died before.
    fn default() -> State {
        State { wanted: true, urgent: false, stopped: false, busy: false }
    }
}

impl Collector {
    /// Takes the lock that shows the end of this process, before its first deletion (`deletion_lock.rs`).
    pub(crate) fn show_end(&self, take: impl FnOnce() -> Option<Flock<File>>) {
        self.end.get_or_init(take);
    }

    /// Requests a collection soon, if this process is the elected one.
    pub(crate) fn wake(&self) {
        self.state.lock().wanted = true;
        self.changed.notify_all();
    }

    /// Requests a full collection in this process soon, even if another one is elected: space is needed.
    pub(crate) fn wake_here(&self) {
        self.state.lock().urgent = true;
        self.changed.notify_all();
    }

    /// Ends the thread. A running collection stops after its current transaction or deletion.
    pub(crate) fn stop(&self) {
        self.state.lock().stopped = true;
        self.changed.notify_all();
    }

    /// Waits after [`Collector::stop`], up to [`STOP_MAX`], until the thread does not hold the datafs open.
    /// Otherwise the process could end first and leave its session behind. That thread must not call this.
    pub(crate) fn wait_for_stop(&self) {
        let mut state = self.state.lock();
        let until = Instant::now() + STOP_MAX;
        while state.busy && !self.changed.wait_until(&mut state, until).timed_out() {}
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.state.lock().stopped
    }

    /// Fails once the datafs below `home` is being closed: a collection may stop anywhere.
    pub(crate) fn go_on(&self, home: &Path) -> Result<()> {
        if !self.is_stopped() {
            return Ok(());
        }
        Err(Error::io("collect garbage of", home, io::ErrorKind::Interrupted.into()))
    }

    /// For the thread: waits for a request, at most `wait`. `None` once it has to end. Otherwise the thread
    /// counts as busy until the returned guard is dropped.
    pub(crate) fn next(&self, wait: Duration) -> Option<Busy<'_>> {
        let mut state = self.state.lock();
        if !state.wanted && !state.urgent && !state.stopped {
            self.changed.wait_for(&mut state, wait);
        }
        if state.stopped {
            return None;
        }
        state.busy = true;
        let wanted = std::mem::take(&mut state.wanted);
        let urgent = std::mem::take(&mut state.urgent);
        Some(Busy { collector: self, wanted, urgent })
    }
}

/// A turn of the background thread. Its drop reports that the thread does not hold the datafs open any more:
/// create it before the reference that does.
#[derive(Debug)]
pub(crate) struct Busy<'a> {
    collector: &'a Collector,
    /// Whether a collection was requested.
    pub(crate) wanted: bool,
    /// Whether a full collection in this process was requested.
    pub(crate) urgent: bool,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.collector.state.lock().busy = false;
        self.collector.changed.notify_all();
    }
}
