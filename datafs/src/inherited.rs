//! Files with locks of this process that a forked child must close.
//!
//! A lock of `flock` belongs to the open file, which a child inherits, and holds while any process has that file open.
//! A child that outlives its killed parent would keep the writer lock and the session of its parent.

use std::fs::File;
use std::os::fd::{AsRawFd as _, RawFd};

use parking_lot::Mutex;

static HELD: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

/// An entry for the descriptor of a file with locks. To be dropped before the file.
#[derive(Debug)]
pub(crate) struct Held(RawFd);

impl Held {
    pub(crate) fn new(file: &File) -> Held {
        let descriptor = file.as_raw_fd();
        HELD.lock().push(descriptor);
        Held(descriptor)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut held = HELD.lock();
        if let Some(at) = held.iter().position(|descriptor| *descriptor == self.0) {
            held.swap_remove(at);
        }
    }
}

/// Closes the files whose locks this process has inherited. For a child of a fork, as its first call of this crate.
/// Nothing that its parent had open may be used or dropped in it.
pub fn close_inherited_locks() {
    // A thread of the parent that has the list locked is not here. The child then keeps the files.
    let Some(mut held) = HELD.try_lock() else { return };
    for descriptor in held.drain(..) {
        // Closing does not unlock: the parent's copy keeps the lock.
        nix::unistd::close(descriptor).ok();
    }
}
