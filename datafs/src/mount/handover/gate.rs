//! The gate in front of the request handlers of a mount, which a planned handover closes.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

/// The gate. A request that arrives after it was closed waits until its process ends: the next server gets it
/// from the kernel again. A handover that is withdrawn opens the gate again.
#[derive(Debug, Default)]
pub(in crate::mount) struct Gate {
    requests: RwLock<()>,
    /// Locked while the gate is being closed.
    closed: Mutex<bool>,
    /// All requests come from [`super::rehearsal::Rehearsal`].
    rehearses: AtomicBool,
}

impl Gate {
    /// Passes a request, until the guard is dropped.
    pub(in crate::mount) fn enter(&self) -> RwLockReadGuard<'_, ()> {
        self.requests.read()
    }

    /// Closes the gate. Returns once all requests before have been handled, also where another thread closes it.
    pub(in crate::mount) fn close(&self) {
        let mut closed = self.closed.lock();
        if !*closed {
            std::mem::forget(self.requests.write());
            *closed = true;
        }
    }

    /// Says whether the threads of the server rehearse.
    pub(super) fn set_rehearses(&self, rehearses: bool) {
        self.rehearses.store(rehearses, Ordering::Release);
    }

    /// Whether a request is one of a rehearsal.
    pub(in crate::mount) fn rehearses(&self) -> bool {
        self.rehearses.load(Ordering::Acquire)
    }

    /// Opens the gate again: the requests that have waited go on. Only for the thread that has closed it.
    pub(in crate::mount) fn open(&self) {
        if std::mem::take(&mut *self.closed.lock()) {
            // SAFETY: `close`, on this thread, has taken the lock and forgotten its guard.
            unsafe { self.requests.force_unlock_write() };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_close_waits_for_the_requests_as_well() {
        let (gate, handled) = (Gate::default(), AtomicBool::new(false));
        let request = gate.enter();
        std::thread::scope(|scope| {
            scope.spawn(|| gate.close());
            // The first one waits for the request.
            while gate.closed.try_lock().is_some() {
                std::thread::yield_now();
            }
            let (begins, begun) = std::sync::mpsc::channel();
            let (gate, handled) = (&gate, &handled);
            scope.spawn(move || {
                begins.send(()).unwrap();
                gate.close();
                assert!(handled.load(Ordering::SeqCst), "a request is being handled");
            });
            begun.recv().unwrap();
            handled.store(true, Ordering::SeqCst);
            drop(request);
        });
        assert!(gate.requests.try_read().is_none());
    }

    #[test]
    fn a_gate_that_is_opened_again_lets_requests_pass() {
        let gate = Gate::default();
        drop(gate.enter());
        gate.close();
        gate.close();
        assert!(gate.requests.try_read().is_none());
        gate.open();
        gate.open();
        drop(gate.enter());
        gate.close();
        assert!(gate.requests.try_read().is_none());
    }
}
