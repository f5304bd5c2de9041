//! Tests of group commit: threads of several processes at once, failures and change notifications.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::error::Error;
use crate::meta::changes::Changed;
use crate::meta::engine::{Durability, Engine, Order, Prerequisite, ReadTxn};
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::meta::sqlite::Sqlite;

/// Limit of every wait, longer than any step takes.
const LIMIT: Duration = Duration::from_secs(60);

pub(super) fn engine(dir: &Path) -> Sqlite {
    Sqlite::open(&dir.join("meta.sqlite"), LIMIT).unwrap()
}

pub(super) fn metadata(dir: &Path) -> Metadata {
    Metadata::grouped(engine(dir)).unwrap()
}

pub(crate) fn number(value: Option<Vec<u8>>) -> u64 {
    value.map_or(0, |value| u64::from_be_bytes(value.try_into().unwrap()))
}

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

/// The difference between what a transaction sees and the model. It counts only when the transaction ends: an
/// engine may show a transaction inconsistent states, and run it again.
fn check(
    txn: &mut dyn ReadTxn,
    prefix: u8,
    model: &Model,
    random: &mut StdRng,
) -> crate::Result<Option<String>> {
    let (mut start, mut end) =
        (vec![prefix, random.random_range(0..64)], vec![prefix, random.random_range(0..64)]);
    if random.random_bool(0.5) {
        (start, end) = (vec![prefix], vec![prefix + 1]);
    }
    let limit = if random.random_bool(0.5) { usize::MAX } else { random.random_range(0..20) };
    let inside = model.iter().filter(|(key, _)| **key >= start && **key < end);
    let mut expected: Vec<_> = inside.map(|(key, value)| (key.clone(), value.clone())).collect();
    let order = if random.random_bool(0.5) { Order::Ascending } else { Order::Descending };
    if order == Order::Descending {
        expected.reverse();
    }
    expected.truncate(limit);
    let scanned = txn.scan(&start, &end, order, limit)?;
    if scanned != expected {
        return Ok(Some(format!("{scanned:?} instead of {expected:?}")));
    }
    let key = [prefix, random.random_range(0..64)];
    let (found, expected) = (txn.get(&key)?, model.get(&key[..]).cloned());
    if found != expected {
        return Ok(Some(format!("{found:?} instead of {expected:?}")));
    }
    // All threads write these two together.
    let (first, last) = (txn.get(b"ma")?, txn.get(b"mz")?);
    Ok((first != last).then(|| format!("{first:?} and {last:?}")))
}

/// One thread of one process: changes keys that a model tracks, and a counter that all threads share. Returns
/// the number of successful transactions.
pub(super) fn work(meta: &Metadata, prefix: u8, seed: u64, rounds: u64) -> u64 {
    let mut random = StdRng::seed_from_u64(seed);
    let mut model = Model::new();
    let mut counted = 0;
    for round in 0..rounds {
        let durability = if random.random_ratio(1, 40) { Durability::Durable } else { Durability::Relaxed };
        let fail = random.random_ratio(1, 6);
        let ops: Vec<_> = (0..random.random_range(1..6))
            .map(|_| ([prefix, random.random_range(0..64)], random.random_bool(0.6)))
            .collect();
        let (mut after, mut wrong) = (model.clone(), None);
        let done = meta.transact(durability, |txn| {
            after.clone_from(&model);
            for (key, put) in &ops {
                if *put {
                    txn.put(key, &round.to_be_bytes())?;
                    after.insert(key.to_vec(), round.to_be_bytes().to_vec());
                } else {
                    txn.delete(key)?;
                    after.remove(&key[..]);
                }
            }
            let next = number(txn.get(b"ma")?) + 1;
            txn.put(b"ma", &next.to_be_bytes())?;
            txn.put(b"mz", &next.to_be_bytes())?;
            wrong = check(txn.as_read(), prefix, &after, &mut random)?;
            if fail { Err(Error::Unsupported("this")) } else { Ok(()) }
        });
        assert_eq!(wrong, None);
        match done {
            Ok(()) => {
                model = after;
                counted += 1;
            }
            Err(error) => assert!(fail && matches!(error, Error::Unsupported(_)), "{error:?}"),
        }
        assert_eq!(meta.view(|txn| check(txn, prefix, &model, &mut random)).unwrap(), None);
        assert_eq!(meta.view_recent(|txn| check(txn, prefix, &model, &mut random)).unwrap(), None);
    }
    counted
}

#[test]
fn threads_of_several_processes_agree_with_their_models() {
    let dir = tempfile::tempdir().unwrap();
    agree_with_their_models([metadata(dir.path()), metadata(dir.path())], 250, &|| {
        Box::new(engine(dir.path()))
    });
}

/// Runs three threads in each of two processes; `reopen` then opens the data.
pub(crate) fn agree_with_their_models(
    processes: [Metadata; 2],
    rounds: u64,
    reopen: &dyn Fn() -> Box<dyn Engine>,
) {
    let counted: u64 = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6u8)
            .map(|i| {
                let meta = &processes[usize::from(i % 2)];
                scope.spawn(move || work(meta, b'a' + i, u64::from(i), rounds))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    for meta in &processes {
        assert_eq!(number(meta.view(|txn| txn.get(b"ma")).unwrap()), counted);
    }
    drop(processes);
    let engine = reopen();
    assert_eq!(number(engine.view(|txn| txn.get(b"ma")).unwrap()), counted, "what was answered is committed");
}

#[test]
fn large_batches_stay_in_bounds_and_scans_pass_through_all_layers() {
    let dir = tempfile::tempdir().unwrap();
    let meta = metadata(dir.path());
    for chunk in 0..60u32 {
        meta.transact(Durability::Relaxed, |txn| {
            (0..1_000).try_for_each(|i| txn.put(&(i * 60 + chunk).to_be_bytes(), &[7; 100]))
        })
        .unwrap();
        meta.transact(Durability::Relaxed, |txn| txn.delete(&chunk.to_be_bytes())).unwrap();
    }
    let (start, end) = (0u32.to_be_bytes(), 60_000u32.to_be_bytes());
    for order in [Order::Ascending, Order::Descending] {
        let all = meta.view(|txn| txn.scan(&start, &end, order, usize::MAX)).unwrap();
        assert_eq!(all.len(), 60_000 - 60);
        assert!(all.is_sorted_by(|a, b| (a.0 < b.0) == (order == Order::Ascending)));
    }
}

#[test]
fn what_one_process_was_answered_the_other_sees() {
    let dir = tempfile::tempdir().unwrap();
    let processes = [metadata(dir.path()), metadata(dir.path())];
    for i in 0..300u64 {
        let (writer, reader) = if i % 3 == 0 { (1, 0) } else { (0, 1) };
        processes[writer].transact(Durability::Relaxed, |txn| txn.put(b"x", &i.to_be_bytes())).unwrap();
        assert_eq!(number(processes[reader].view(|txn| txn.get(b"x")).unwrap()), i);
        processes[reader].barrier().unwrap();
        assert_eq!(number(processes[reader].view_recent(|txn| txn.get(b"x")).unwrap()), i);
    }
}

#[test]
fn listeners_are_told_what_others_changed() {
    let dir = tempfile::tempdir().unwrap();
    let [own, other] = [metadata(dir.path()), metadata(dir.path())];
    let (told, changes) = mpsc::channel();
    let subscription = own.on_change(Box::new(move |changed| drop(told.send(changed.clone())))).unwrap();
    own.transact(Durability::Relaxed, |txn| txn.put(&keys::live(7, b"own"), b"1")).unwrap();
    other
        .transact(Durability::Relaxed, |txn| {
            txn.put(b"xunversioned", b"1")?;
            txn.put(&keys::live(7, b"record"), b"1")
        })
        .unwrap();
    let changed = changes.recv_timeout(LIMIT).unwrap();
    assert_eq!(changed, Changed::records(vec![(7, b"record".to_vec())]));
    // More than one entry of the change log holds.
    other
        .transact(Durability::Durable, |txn| {
            (0..30_000u32)
                .try_for_each(|i| txn.put(&keys::live(7, &[&[0; 40][..], &i.to_be_bytes()].concat()), b""))
        })
        .unwrap();
    assert!(changes.recv_timeout(LIMIT).unwrap().anything);
    drop(subscription);
    other.transact(Durability::Durable, |txn| txn.put(&keys::live(7, b"record"), b"2")).unwrap();
    // The thread ends, and its sender with it.
    assert_eq!(changes.recv_timeout(LIMIT), Err(mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn a_commit_that_fails_for_good_is_told_to_everybody() {
    let dir = tempfile::tempdir().unwrap();
    let meta = metadata(dir.path());
    meta.transact(Durability::Durable, |txn| txn.put(b"xa", b"1")).unwrap();
    // Written without the writer lock.
    engine(dir.path())
        .write(Durability::Durable, &mut |txn| txn.put(keys::BATCH, &99u64.to_be_bytes()))
        .unwrap();
    let failed = meta.transact(Durability::Durable, |txn| txn.put(b"xb", b"1")).unwrap_err();
    assert!(failed.to_string().contains("meta.sqlite") && failed.to_string().contains("turn"), "{failed}");
    let refused = [
        meta.view(|txn| txn.get(b"xa")).map(drop),
        meta.transact(Durability::Relaxed, |txn| txn.put(b"xc", b"1")),
        meta.sync(),
    ];
    assert!(refused.iter().all(|result| matches!(result, Err(Error::Failed { .. }))), "{refused:?}");
    // Another process is not affected.
    let other = metadata(dir.path());
    other.transact(Durability::Durable, |txn| txn.put(b"xd", b"1")).unwrap();
    let all = other.view(|txn| txn.scan(b"x", b"y", Order::Ascending, 9)).unwrap();
    assert_eq!(all.iter().map(|(key, _)| key.as_slice()).collect::<Vec<_>>(), [b"xa", b"xd"]);
}

#[test]
fn a_sync_that_fails_does_not_say_that_nothing_was_committed() {
    let dir = tempfile::tempdir().unwrap();
    let meta = metadata(dir.path());
    meta.transact(Durability::Durable, |txn| txn.put(b"xa", b"1")).unwrap();
    let (log, aside) = (dir.path().join("meta.sqlite-wal"), dir.path().join("aside"));
    std::fs::rename(&log, &aside).unwrap();
    std::os::unix::fs::symlink(&log, &log).unwrap();
    let failed = meta.transact(Durability::Durable, |txn| txn.put(b"xb", b"1")).unwrap_err();
    assert!(matches!(failed, Error::Failed { .. }) && !failed.is_definite(), "{failed}");
    std::fs::rename(&aside, &log).unwrap();
    drop(meta);
    assert!(metadata(dir.path()).view(|txn| txn.get(b"xb")).unwrap().is_some());
}

/// Counts its calls, and checks that the record that requires it is not committed yet.
#[derive(Debug)]
struct Data {
    path: std::path::PathBuf,
    synced: std::sync::atomic::AtomicU64,
    fail: bool,
}

impl Prerequisite for Data {
    fn make_durable(&self) -> crate::Result<()> {
        let engine: Box<dyn Engine> = Box::new(engine(&self.path));
        assert_eq!(engine.view(|txn| txn.get(b"pointer"))?, None, "committed before its data is durable");
        self.synced.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        if self.fail { Err(Error::io("sync", "data", std::io::Error::other("broken"))) } else { Ok(()) }
    }
}

#[test]
fn data_is_durable_before_the_commit_that_points_at_it() {
    for fail in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let meta = metadata(dir.path());
        let data = Arc::new(Data { path: dir.path().to_owned(), synced: 0.into(), fail });
        let failed = meta.transact(Durability::Relaxed, |txn| {
            txn.require(data.clone())?;
            Err::<(), _>(Error::Unsupported("this"))
        });
        assert!(failed.is_err());
        let committed = meta.transact(Durability::Durable, |txn| {
            txn.require(data.clone())?;
            txn.require(data.clone())?;
            txn.put(b"pointer", b"1")
        });
        assert_eq!(committed.is_err(), fail);
        assert_eq!(data.synced.load(std::sync::atomic::Ordering::Relaxed), 1);
        drop(meta);
        let meta = metadata(dir.path());
        assert_eq!(meta.view(|txn| txn.get(b"pointer")).unwrap().is_none(), fail);
    }
}

#[test]
fn a_process_that_is_locked_out_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let meta = metadata(dir.path());
    let impatient =
        Metadata::grouped(Sqlite::open(&dir.path().join("meta.sqlite"), Duration::from_millis(30)).unwrap())
            .unwrap();
    meta.transact(Durability::Relaxed, |txn| {
        txn.put(b"xa", b"1")?;
        // This process has the writer lock, and keeps it while the transaction runs.
        let busy = impatient.transact(Durability::Relaxed, |txn| txn.put(b"xb", b"1")).unwrap_err();
        assert!(matches!(busy, Error::Busy { .. }), "{busy:?}");
        assert_eq!(impatient.view_recent(|txn| txn.get(b"xa"))?, None);
        Ok(())
    })
    .unwrap();
    impatient.transact(Durability::Relaxed, |txn| txn.put(b"xb", b"1")).unwrap();
    assert_eq!(meta.view(|txn| txn.get(b"xb")).unwrap(), Some(b"1".to_vec()));
}

/// Runs `call` on a separate thread, which must end in time.
fn in_time<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || drop(done.send(call())));
    result.recv_timeout(LIMIT).expect("the call ends")
}

/// Commits `count` batches and closes the file; returns the path of a copy.
fn write_batches(dir: &Path, count: u64) -> std::path::PathBuf {
    let meta = metadata(dir);
    for i in 0..count {
        meta.transact(Durability::Durable, |txn| txn.put(b"x", &i.to_be_bytes())).unwrap();
    }
    drop(meta);
    let copy = dir.join(format!("copy-{count}"));
    std::fs::copy(dir.join("meta.sqlite"), &copy).unwrap();
    copy
}

/// Replaces the file by a copy, in a new inode or in the old one.
fn put_in_place(dir: &Path, copy: &Path, rename: bool) {
    let path = dir.join("meta.sqlite");
    for suffix in ["-wal", "-shm"] {
        let mut beside = path.clone().into_os_string();
        beside.push(suffix);
        let _ = std::fs::remove_file(beside);
    }
    if rename {
        std::fs::copy(copy, dir.join("new")).unwrap();
        std::fs::rename(dir.join("new"), &path).unwrap();
    } else {
        std::fs::copy(copy, &path).unwrap();
    }
}

#[test]
fn an_older_or_newer_copy_of_the_file_opens_and_goes_on() {
    for rename in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_owned();
        let older = write_batches(&home, 3);
        let newer = write_batches(&home, 9);
        for (copy, value) in [(older, 2), (newer, 8)] {
            put_in_place(&home, &copy, rename);
            let home = home.clone();
            in_time(move || {
                let processes = [metadata(&home), metadata(&home)];
                for meta in &processes {
                    assert_eq!(number(meta.view(|txn| txn.get(b"x")).unwrap()), value);
                }
                for i in 100..110u64 {
                    let [writer, reader] = [i as usize % 2, 1 - i as usize % 2];
                    let put = |txn: &mut dyn crate::meta::engine::WriteTxn| txn.put(b"x", &i.to_be_bytes());
                    processes[writer].transact(Durability::Durable, put).unwrap();
                    assert_eq!(number(processes[reader].view(|txn| txn.get(b"x")).unwrap()), i);
                }
            });
        }
    }
}

#[test]
fn a_home_that_is_moved_away_and_back_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let (home, away) = (dir.path().join("home"), dir.path().join("away"));
    std::fs::create_dir(&home).unwrap();
    let meta = metadata(&home);
    let put = |number: u64| {
        meta.transact(Durability::Durable, |txn| txn.put(b"x", &number.to_be_bytes())).unwrap();
    };
    put(1);
    std::fs::rename(&home, &away).unwrap();
    put(2);
    std::fs::rename(&away, &home).unwrap();
    put(3);
    drop(meta);
    assert_eq!(number(metadata(&home).view(|txn| txn.get(b"x")).unwrap()), 3);
}

#[test]
fn a_process_whose_file_was_replaced_writes_and_reads_nothing_more() {
    for opened_again in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path().to_owned();
        let copy = write_batches(&home, 3);
        write_batches(&home, 9);
        let meta = metadata(&home);
        meta.transact(Durability::Durable, |txn| txn.put(b"x", &50u64.to_be_bytes())).unwrap();
        put_in_place(&home, &copy, true);
        let other = opened_again.then(|| metadata(&home));
        in_time(move || {
            let put = |txn: &mut dyn crate::meta::engine::WriteTxn| txn.put(b"x", &51u64.to_be_bytes());
            let error = meta.transact(Durability::Durable, put).unwrap_err();
            assert!(error.to_string().contains("meta.sqlite"), "{error}");
            assert!(error.to_string().contains("replaced by another file"), "{error}");
            meta.view(|txn| txn.get(b"x")).unwrap_err();
        });
        let other = other.unwrap_or_else(|| metadata(&home));
        assert_eq!(number(other.view(|txn| txn.get(b"x")).unwrap()), 2);
    }
}

#[test]
fn closing_waits_for_a_thread_that_still_reads() {
    let dir = tempfile::tempdir().unwrap();
    let meta = Arc::new(metadata(dir.path()));
    let closing = meta.open_mark().closing();
    let (reading, is_reading) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel::<()>();
    let reader = std::thread::spawn({
        let meta = Arc::clone(&meta);
        move || {
            meta.view(|_| {
                reading.send(()).unwrap();
                may_go_on.recv_timeout(LIMIT).unwrap();
                Ok(())
            })
        }
    });
    is_reading.recv_timeout(LIMIT).unwrap();
    drop(meta);
    assert!(!closing.wait(Duration::ZERO));
    go_on.send(()).unwrap();
    assert!(closing.wait(LIMIT));
    assert!(!is_open_here(dir.path()));
    reader.join().unwrap().unwrap();
}

/// Whether this process has a file below `dir` open.
fn is_open_here(dir: &Path) -> bool {
    let dir = dir.canonicalize().unwrap();
    let links =
        std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|entry| entry.ok()?.path().read_link().ok());
    links.into_iter().any(|link| link.starts_with(&dir))
}
