//! Sessions of a version that are free, by the device that they run on.

use super::Session;

/// Sessions that are free; of each device as many when all are.
#[derive(Debug)]
pub(super) struct Free {
    /// By the places of their devices. Who came back last goes first: what it uses is in the caches still.
    by_device: Vec<Vec<Session>>,
}

impl Free {
    /// All sessions of a version, on each device as many.
    pub(super) fn new(sessions: Vec<Session>) -> Free {
        let devices = sessions.iter().map(|session| session.place + 1).max().unwrap_or(0);
        let mut free = Free { by_device: (0..devices).map(|_| Vec::new()).collect() };
        sessions.into_iter().for_each(|session| free.put(session));
        free
    }

    /// How many are free.
    pub(super) fn len(&self) -> usize {
        self.by_device.iter().map(Vec::len).sum()
    }

    /// Takes one on the device with the fewest runs under way.
    pub(super) fn take(&mut self) -> Option<Session> {
        self.by_device.iter_mut().max_by_key(|sessions| sessions.len())?.pop()
    }

    /// Takes the first that is like that.
    pub(super) fn take_if(&mut self, mut is_meant: impl FnMut(&mut Session) -> bool) -> Option<Session> {
        self.by_device.iter_mut().find_map(|sessions| {
            let place = sessions.iter_mut().position(&mut is_meant)?;
            Some(sessions.remove(place))
        })
    }

    /// Puts one back.
    pub(super) fn put(&mut self, session: Session) {
        self.by_device[session.place].push(session);
    }

    /// Each of them.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Session> {
        self.by_device.iter_mut().flatten()
    }
}
