//! Tests of deletions by a process that is suspended between its decision and the deletion.
use std::sync::Arc;

use super::*;
use crate::datafs::Datafs;
use crate::fs::shared::Shared;
use crate::fs::tests::{objects, open, rows, setup};
use crate::meta::engine::WriteTxn;
use crate::session;
use crate::slice::Limits;
use crate::upkeep::Keeper;

/// A home with two objects on the garbage list, and a second session.
fn two_due() -> (tempfile::TempDir, Datafs, Datafs) {
    let (home, datafs, view) = setup();
    for name in ["one", "two"] {
        view.write_file(name, &[1; 10_000]).unwrap();
        view.remove_file(name).unwrap();
    }
    let other = open(home.path());
    assert_eq!((objects(home.path()), rows(&datafs, b'g')), (2, 2));
    (home, datafs, other)
}

fn hold(shared: &Shared, is_held: bool) {
    let key = keys::hold(shared.session.id());
    let set = |txn: &mut dyn WriteTxn| if is_held { txn.put(&key, b"") } else { txn.delete(&key) };
    shared.meta.transact(Durability::Durable, set).unwrap();
}

#[test]
pub(crate) fn a_decision_expires_while_its_process_is_suspended() {
    for (place, deleted, held) in [("gc-deletion-durable", 0, 0), ("gc-object-deleted", 1, 1)] {
        let (home, datafs, other) = two_due();
        let shared = Arc::clone(&other.shared);
        failpoint::suspend_at(place, move || {
            hold(&shared, true);
            SLEPT.set(DECIDED_MAX * 2);
        });
        let report = datafs.gc().unwrap();
        SLEPT.set(Duration::ZERO);
        assert_eq!((report.objects, report.held), (deleted, held), "{place}");
        let left = 2 - deleted as usize;
        assert_eq!(
            (objects(home.path()), rows(&datafs, b'g'), rows(&datafs, b'u')),
            (left, left, 0),
            "{place}"
        );
        hold(&other.shared, false);
        assert_eq!(datafs.gc().unwrap().objects, left as u64, "{place}");
        assert_eq!((objects(home.path()), rows(&datafs, b'g'), rows(&datafs, b'u')), (0, 0, 0), "{place}");
    }
}

#[test]
pub(crate) fn a_process_that_lost_its_session_decides_nothing() {
    let (home, datafs, other) = two_due();
    let (shared, lost) = (Arc::clone(&other.shared), datafs.shared.session.id());
    failpoint::suspend_at("gc-garbage-due", move || {
        session::end_dead(&shared.meta, lost, |_| Ok(())).unwrap()
    });
    assert!(matches!(datafs.gc(), Err(Error::Stale { .. })));
    assert!(!datafs.shared.make_room());
    assert_eq!((objects(home.path()), rows(&other, b'g'), rows(&other, b'u')), (2, 2, 0));
}

#[test]
pub(crate) fn a_process_that_lost_its_turn_decides_nothing() {
    let (home, datafs, other) = two_due();
    let mut keeper = Keeper::new(&datafs.shared, Duration::from_secs(30));
    let shared = Arc::clone(&other.shared);
    failpoint::suspend_at("gc-garbage-due", move || {
        shared.meta.transact(Durability::Relaxed, |txn| txn.delete(keys::ELECTED)).unwrap();
    });
    assert_eq!(keeper.tick(&datafs.shared, Limits::BACKGROUND).unwrap().unwrap().deleted, 0);
    assert_eq!((objects(home.path()), rows(&datafs, b'g'), rows(&datafs, b'u')), (2, 2, 0));
    // It is elected anew.
    assert_eq!(keeper.tick(&datafs.shared, Limits::BACKGROUND).unwrap().unwrap().deleted, 2);
    assert_eq!((objects(home.path()), rows(&datafs, b'g'), rows(&datafs, b'u')), (0, 0, 0));
}
