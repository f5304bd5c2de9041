//! Tests of locks whose release fails.
#![allow(clippy::unwrap_used)]

use super::super::convert::Inodes;
use super::super::handles::NO_HANDLE;
use super::*;
use crate::fs::tests::setup;
use crate::meta::faulty::{self, Fault, Faults, Place};

/// A handle without an open file in [`Handles`].
const CLOSED: u64 = NO_HANDLE;
const OWNER: LockOwner = LockOwner { family: LockFamily::Flock, id: 7 };

#[test]
fn a_lock_whose_release_failed_at_the_last_close_is_given_up_later() {
    let faults = Faults::new(1, u32::MAX, &Fault::CLEAR, Place::Around);
    let (_home, datafs, view) = faulty::with(&faults, setup);
    let node = view.create(view.root(), "f".as_ref(), 0o644, crate::fs::tests::owner(), OPEN).unwrap().0.node;
    let handles = Arc::new(Handles::new(view.clone()));
    let coherence = Arc::new(Coherence::new(&view, Inodes::new(view.root())));
    let watch = Watch::new("v", std::path::Path::new("/none"), &handles);
    let locks = Arc::new(Locks::new(coherence, Arc::new(watch)));
    locks.start(&handles).unwrap();
    let lock = |owner| FileLock { owner, exclusive: true, start: 0, end: LOCK_END_MAX, pid: 1 };
    let take = || {
        assert!(matches!(view.lock(node, lock(OWNER)).unwrap(), Locking::Held(_)));
        assert!(locks.took(&handles, (node, OWNER), CLOSED, None).is_none());
    };
    let other = LockOwner { id: 8, ..OWNER };
    let is_free = || view.lock_in_the_way(node, lock(other)).unwrap().is_none();

    take();
    faults.set_away(true);
    locks.released(&handles, node, CLOSED, Some(OWNER.id));
    assert!(locks.has(node), "it is held still");
    faults.set_away(false);
    let until = Instant::now() + Duration::from_secs(10);
    while !is_free() || locks.has(node) {
        assert!(Instant::now() < until, "the lock stays");
        std::thread::yield_now();
    }

    // An owner that has taken the lock again keeps it.
    take();
    faults.set_away(true);
    locks.released(&handles, node, CLOSED, Some(OWNER.id));
    locks.left.lock().retain(|left| *left != (node, OWNER));
    faults.set_away(false);
    assert!(locks.give_up_left(&handles) && !is_free());
    locks.stop();
    drop(datafs);
}

const OPEN: crate::fs::OpenFlags = crate::fs::OpenFlags::READ_WRITE;
