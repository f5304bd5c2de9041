//! Idle sessions of a model version, by device.

use super::Runner;

/// Idle sessions; when all are idle, each device has the same number.
#[derive(Debug)]
pub(super) struct IdleSessions<R> {
    /// By device index. The session returned last is used first: its memory is still in the processor's caches.
    by_device: Vec<Vec<R>>,
}

impl<R: Runner> IdleSessions<R> {
    /// All sessions of a version.
    pub(super) fn new(sessions: Vec<R>) -> IdleSessions<R> {
        let devices = sessions.iter().map(|session| session.device() + 1).max().unwrap_or(0);
        let mut idle = IdleSessions { by_device: (0..devices).map(|_| Vec::new()).collect() };
        sessions.into_iter().for_each(|session| idle.put(session));
        idle
    }

    pub(super) fn len(&self) -> usize {
        self.by_device.iter().map(Vec::len).sum()
    }

    /// Takes a session from the device with the most idle sessions, that is, the fewest runs.
    pub(super) fn take(&mut self) -> Option<R> {
        self.by_device.iter_mut().max_by_key(|sessions| sessions.len())?.pop()
    }

    /// Takes the first session that `accepts` accepts.
    pub(super) fn take_if(&mut self, mut accepts: impl FnMut(&mut R) -> bool) -> Option<R> {
        self.by_device.iter_mut().find_map(|sessions| {
            let index = sessions.iter_mut().position(&mut accepts)?;
            Some(sessions.remove(index))
        })
    }

    /// Returns a session.
    pub(super) fn put(&mut self, session: R) {
        self.by_device[session.device()].push(session);
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut R> {
        self.by_device.iter_mut().flatten()
    }
}
