//! Tests of the metadata file on a full disk, or with a full quota.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Once;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rusqlite::ffi;

use super::group::{engine, metadata};
use crate::error::Error;
use crate::meta::engine::{Durability, Engine};
use crate::meta::faulty::{self, Fault, Faults, Place};
use crate::meta::metadata::Metadata;
use crate::meta::sqlite::Sqlite;

thread_local! {
    /// The error that SQLite's writes on this thread get, if any.
    static REFUSED: Cell<Option<Errno>> = const { Cell::new(None) };
}

fn refuse() -> Option<isize> {
    REFUSED.get().map(|errno| {
        errno.set();
        -1
    })
}

unsafe extern "C" fn write(file: c_int, bytes: *const c_void, len: usize) -> isize {
    // SAFETY: as the caller says.
    refuse().unwrap_or_else(|| unsafe { libc::write(file, bytes, len) })
}

unsafe extern "C" fn pwrite(file: c_int, bytes: *const c_void, len: usize, at: libc::off_t) -> isize {
    // SAFETY: as the caller says.
    refuse().unwrap_or_else(|| unsafe { libc::pwrite(file, bytes, len, at) })
}

/// Puts the two functions above between SQLite and the system.
fn intercept() {
    static ONCE: Once = Once::new();
    type Call = unsafe extern "C" fn();
    ONCE.call_once(|| {
        // SAFETY: the default file system of SQLite is there for ever; it casts what it is given back to the
        // type that the call has in C, which is that of the functions above.
        unsafe {
            let system = ffi::sqlite3_vfs_find(std::ptr::null());
            let set = (*system).xSetSystemCall.unwrap();
            let write = std::mem::transmute::<*const (), Call>(write as *const ());
            let pwrite = std::mem::transmute::<*const (), Call>(pwrite as *const ());
            for (name, call) in [(c"write", write), (c"pwrite", pwrite), (c"pwrite64", pwrite)] {
                set(system, name.as_ptr(), Some(call));
            }
        }
    });
}

#[test]
fn what_the_system_says_of_space_is_passed_on() {
    intercept();
    let dir = tempfile::tempdir().unwrap();
    let engine: Box<dyn Engine> = Box::new(engine(dir.path()));
    let put = |key: &[u8]| engine.transact(Durability::Durable, |txn| txn.put(key, &[1; 5_000]));
    put(b"xa").unwrap();
    for (errno, quota) in [(Errno::EDQUOT, true), (Errno::ENOSPC, false)] {
        REFUSED.set(Some(errno));
        let full = put(b"xb").unwrap_err();
        assert!(matches!(full, Error::NoSpace { quota: told, .. } if told == quota), "{errno}: {full:?}");
        assert!(full.to_string().contains("meta.sqlite"), "{full}");
        assert!(engine.view(|txn| txn.get(b"xa")).unwrap().is_some());
    }
    REFUSED.set(Some(Errno::EIO));
    let broken = put(b"xb").unwrap_err();
    assert!(matches!(broken, Error::Metadata { .. }), "{broken:?}");
    REFUSED.set(None);
    assert_eq!(engine.view(|txn| txn.get(b"xb")).unwrap(), None);
    put(b"xb").unwrap();
    assert!(engine.view(|txn| txn.get(b"xb")).unwrap().is_some());
}

#[test]
fn what_was_answered_is_committed_once_there_is_space_however_long_it_takes() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::new(1, u32::MAX, &Fault::CLEAR, Place::Inside);
    let wait = Duration::from_millis(30);
    let meta = faulty::with(&faults, || {
        Metadata::grouped(Sqlite::open(&dir.path().join("meta.sqlite"), wait).unwrap()).unwrap()
    });
    let put = |durability, key: &[u8]| meta.transact(durability, |txn| txn.put(key, b"1"));
    put(Durability::Durable, b"xa").unwrap();
    faults.set_full(true);
    // Acknowledged before the failure is known.
    put(Durability::Relaxed, b"xb").unwrap();
    let waits = meta.sync().unwrap_err();
    assert!(
        matches!(waits, Error::NoSpace { quota: true, .. } | Error::NoSpaceToCommit { quota: true, .. }),
        "{waits:?}"
    );
    // Longer than a wait for a lock.
    let until = Instant::now() + wait * 5;
    while Instant::now() < until {
        for refused in [put(Durability::Relaxed, b"xc"), put(Durability::Durable, b"xd"), meta.sync()] {
            assert!(matches!(refused, Err(Error::NoSpace { quota: true, .. })), "{refused:?}");
        }
        assert!(meta.view(|txn| txn.get(b"xb")).unwrap().is_some());
    }
    faults.set_full(false);
    while matches!(put(Durability::Durable, b"xd"), Err(Error::NoSpace { .. })) {
        std::thread::yield_now();
    }
    let other = metadata(dir.path());
    let there = |key: &[u8]| other.view(|txn| txn.get(key)).unwrap().is_some();
    assert_eq!([b"xa", b"xb", b"xc", b"xd"].map(|key| there(key)), [true, true, false, true]);
    // A commit with an unknown outcome must not report that nothing was changed.
    faults.set_full(true);
    let waits = put(Durability::Durable, b"xe").unwrap_err();
    assert!(matches!(waits, Error::NoSpaceToCommit { .. }) && !waits.is_definite(), "{waits:?}");
    faults.set_full(false);
    while meta.sync().is_err() {
        std::thread::yield_now();
    }
    assert!(there(b"xe"));
}

#[test]
fn the_file_has_the_space_of_a_commit_before_that_is_answered() {
    const VALUES: u8 = 50;
    let dir = tempfile::tempdir().unwrap();
    let sqlite = engine(dir.path());
    let on_disk = |name: &str| {
        let found = std::fs::metadata(dir.path().join(name)).unwrap();
        (found.len(), found.blocks() * 512)
    };
    let all = u64::from(VALUES) * 5_000;
    let engine: &dyn Engine = &sqlite;
    for i in 1..=VALUES {
        engine.transact(Durability::Relaxed, |txn| txn.put(&[b'x', i], &[i; 5_000])).unwrap();
        let (len, allocated) = on_disk("meta.sqlite");
        // The pages are only in the log.
        assert!(len < 5_000 && allocated >= u64::from(i) * 5_000, "{i}: {allocated} of {len} bytes");
    }
    let (log, _) = on_disk("meta.sqlite-wal");
    assert!(log > all);
    sqlite.empty_log().unwrap();
    assert!(on_disk("meta.sqlite").0 >= all);
    assert_eq!(on_disk("meta.sqlite-wal").0, 0);
    for i in 1..=VALUES {
        assert_eq!(engine.view(|txn| txn.get(&[b'x', i])).unwrap(), Some(vec![i; 5_000]));
    }
}
