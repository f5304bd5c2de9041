//! Tests of file locks between owners, sessions and dead processes; byte ranges against a model.
use super::*;
use crate::config::LOCK_WAIT_MS_MAX;
use crate::{Config, Datafs, OpenFlags, Owner, session};

const NOBODY: Owner = Owner { uid: 0, gid: 0 };

fn lock(id: u64, exclusive: bool, start: u64, end: u64) -> FileLock {
    FileLock { owner: LockOwner { family: LockFamily::Fcntl, id }, exclusive, start, end, pid: id as u32 }
}

fn open(home: &std::path::Path) -> (Datafs, View) {
    let datafs = Datafs::open(home, &Config { gc_interval_ms: 0, ..Config::default() }).unwrap();
    let _ = datafs.volume_create(&"v".parse().unwrap());
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

fn is_held(locking: Locking) -> bool {
    matches!(locking, Locking::Held(_))
}

#[test]
fn locks_exclude_owners_and_processes_but_not_families() {
    let home = tempfile::tempdir().unwrap();
    let (_one, view) = open(home.path());
    let (_two, other) = open(home.path());
    let (attr, _file) = view.create(view.root(), "f".as_ref(), 0o644, NOBODY, OpenFlags::READ_WRITE).unwrap();
    let node = attr.node;
    assert!(is_held(view.lock(node, lock(1, true, 10, 19)).unwrap()));
    // The same owner number in another process is another owner.
    for (view, id, is_local) in [(&view, 2, true), (&other, 1, false)] {
        let Locking::Blocked(by) = view.lock(node, lock(id, false, 19, 30)).unwrap() else { panic!() };
        assert_eq!(by, [Blocker { lock: lock(1, true, 10, 19), is_local }]);
        assert_eq!(view.lock_in_the_way(node, lock(id, false, 0, 10)).unwrap(), Some(by[0]));
        assert!(is_held(view.lock(node, lock(id, true, 20 * id, 20 * id)).unwrap()));
    }
    let flock = LockOwner { family: LockFamily::Flock, id: 2 };
    assert!(is_held(view.lock(node, FileLock { owner: flock, ..lock(2, true, 0, LOCK_END_MAX) }).unwrap()));
    assert!(view.unlock(node, flock, 0, LOCK_END_MAX).unwrap());
    assert!(!view.unlock(node, flock, 0, LOCK_END_MAX).unwrap());
    // An owner's locks never conflict with its requests; shared locks do not conflict with each other.
    assert!(is_held(view.lock(node, lock(1, false, 0, 15)).unwrap()));
    assert!(is_held(other.lock(node, lock(1, false, 0, 15)).unwrap()));
    assert!(!is_held(other.lock(node, lock(1, false, 0, 16)).unwrap()));
    // An invalid range is refused and changes nothing.
    for (start, end) in [(5, 4), (LOCK_END_MAX, 0), (0, LOCK_END_MAX + 1), (0, u64::MAX)] {
        assert!(matches!(view.lock(node, lock(1, false, start, end)), Err(Error::Invalid(_))));
        assert!(matches!(view.lock_in_the_way(node, lock(1, true, start, end)), Err(Error::Invalid(_))));
        let error = view.unlock(node, lock(1, false, 0, 0).owner, start, end).unwrap_err().to_string();
        assert!(error.contains(&start.to_string()) && error.contains(&end.to_string()), "{error}");
    }
    assert!(!is_held(other.lock(node, lock(1, true, 0, 0)).unwrap()));
}

#[test]
fn locks_go_with_their_session() {
    let home = tempfile::tempdir().unwrap();
    let (_one, view) = open(home.path());
    let (two, other) = open(home.path());
    let node = view.root();
    assert!(is_held(other.lock(node, lock(1, true, 0, LOCK_END_MAX)).unwrap()));
    assert!(!is_held(view.lock(node, lock(1, true, 0, 0)).unwrap()));
    two.shared.session.lose_lock();
    let report = view.shared.collect().unwrap();
    assert_eq!(report.sessions, 1);
    assert!(is_held(view.lock(node, lock(1, true, 0, 0)).unwrap()));
    // The locks of a session that ends in order go as well.
    let (three, other) = open(home.path());
    assert!(is_held(other.lock(node, lock(1, true, 1, 1)).unwrap()));
    drop((three, other));
    assert!(is_held(view.lock(node, lock(2, true, 1, 1)).unwrap()));
}

#[test]
fn who_finds_the_lock_of_a_dead_process_in_the_way_takes_it_and_the_rest_is_collected() {
    let home = tempfile::tempdir().unwrap();
    let (_one, view) = open(home.path());
    let (two, other) = open(home.path());
    let node = view.root();
    for byte in 0..2 {
        assert!(is_held(other.lock(node, lock(1, true, byte, byte)).unwrap()));
    }
    two.shared.session.lose_lock();
    assert!(is_held(view.lock(node, lock(1, true, 0, 0)).unwrap()));
    assert_eq!(view.lock_in_the_way(node, lock(1, true, 1, 1)).unwrap(), None);
    view.unlock(node, lock(1, true, 0, 0).owner, 0, LOCK_END_MAX).unwrap();
    assert_eq!(session::files(&view.shared.sessions_dir).unwrap().len(), 2);
    view.shared.collect().unwrap();
    assert_eq!(session::files(&view.shared.sessions_dir).unwrap(), [view.shared.session.id()]);
    let left = view.shared.meta.view(|txn| {
        let all = |prefix: Vec<u8>, txn: &mut dyn ReadTxn| {
            txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, 10)
        };
        Ok((all(keys::all_locks(), txn)?, all(keys::sessions_in_cleanup(), txn)?))
    });
    assert_eq!(left.unwrap(), (Vec::new(), Vec::new()));
}

#[test]
fn ranges_are_cut_and_merged_as_bytes_would_be() {
    const BYTES: usize = 24;
    let mut state = 7u64;
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    for _ in 0..200 {
        let mut held = Vec::new();
        let mut model = [[None; BYTES]; 2];
        for _ in 0..30 {
            let owner = random(2);
            let (a, b) = (random(BYTES as u64), random(BYTES as u64));
            let wanted = lock(owner, random(2) == 0, a.min(b), a.max(b));
            let bytes = wanted.start as usize..=wanted.end as usize;
            cut(&mut held, 1, wanted.owner, wanted.start, wanted.end);
            model[owner as usize][bytes.clone()].fill(None);
            if random(3) > 0 {
                insert(&mut held, 1, wanted);
                model[owner as usize][bytes].fill(Some(wanted.exclusive));
            }
            let mut shown = [[None; BYTES]; 2];
            for Held { lock, .. } in &held {
                for byte in lock.start..=lock.end {
                    let cell: &mut Option<bool> = &mut shown[lock.owner.id as usize][byte as usize];
                    assert_eq!(cell.replace(lock.exclusive), None, "one lock for each byte");
                }
            }
            assert_eq!(shown, model);
            assert_eq!(decode(&encode(&held)).unwrap(), held);
            // Neighbors that could be merged are merged.
            for one in &held {
                assert!(!held.iter().any(|two| {
                    two.lock.owner == one.lock.owner
                        && two.lock.exclusive == one.lock.exclusive
                        && two.lock.start == one.lock.end + 1
                }));
            }
        }
    }
}

#[test]
fn a_wait_without_bounds_is_refused() {
    let home = tempfile::tempdir().unwrap();
    for lock_wait_ms in [0, LOCK_WAIT_MS_MAX + 1, u64::MAX] {
        let refused = Datafs::open(home.path(), &Config { lock_wait_ms, ..Config::default() });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("lock_wait_ms") && error.contains(&lock_wait_ms.to_string()), "{error}");
    }
    Datafs::open(home.path(), &Config { lock_wait_ms: LOCK_WAIT_MS_MAX, ..Config::default() }).unwrap();
}
