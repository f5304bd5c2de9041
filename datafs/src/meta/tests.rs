//! Tests of the SQLite engine and of versioned records.
mod faults;
pub(crate) mod group;
mod space;

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::test_runner::Config as Cases;

use super::engine::{Durability, Engine, Order};
use super::inode::Timestamp;
use super::keys;
use super::snapshot;
use super::sqlite::{FORMAT_VERSION, Sqlite};
use super::suite;
use super::versioned::{At, Reader, Records, VolumeRow, Writer};
use crate::error::Error;

const VOLUME: u64 = 3;

fn engine(dir: &tempfile::TempDir) -> Box<dyn Engine> {
    Box::new(Sqlite::open(&dir.path().join("meta.sqlite"), Duration::from_secs(10)).unwrap())
}

#[test]
fn sqlite_passes_the_suite() {
    let dir = tempfile::tempdir().unwrap();
    suite::all(&|| engine(&dir));
}

#[test]
fn a_newer_format_is_refused_untouched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.sqlite");
    engine(&dir)
        .transact(Durability::Durable, |txn| txn.put(keys::FORMAT, &(FORMAT_VERSION + 1).to_be_bytes()))
        .unwrap();
    let error = Sqlite::open(&path, Duration::from_secs(1)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::NewerFormat { found, .. } if found == FORMAT_VERSION + 1));
    assert!(text.contains("meta.sqlite") && text.contains("version 2"), "{text}");
}

#[test]
fn what_is_no_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.sqlite");
    std::fs::write(&path, vec![7; 10_000]).unwrap();
    let error = Sqlite::open(&path, Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error:?}");
    let error = Sqlite::open(&dir.path().join("no/such/dir"), Duration::from_secs(1)).unwrap_err();
    assert!(matches!(error, Error::NotWritable { .. }), "{error:?}");
}

#[derive(Debug, Clone)]
enum Op {
    Put(u8, u8),
    Delete(u8),
    Snapshot,
    DeleteSnapshot(usize),
    /// Completes one of the pending deletions.
    Free(usize),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0u8..12, any::<u8>()).prop_map(|(k, v)| Op::Put(k, v)),
        4 => (0u8..12).prop_map(Op::Delete),
        3 => Just(Op::Snapshot),
        2 => any::<usize>().prop_map(Op::DeleteSnapshot),
        2 => any::<usize>().prop_map(Op::Free),
    ]
}

/// Record keys of several lengths; some are prefixes of each other up to the terminator.
fn record(key: u8) -> Vec<u8> {
    keys::application(&"ab".repeat(usize::from(key / 2) + 1)[..usize::from(key) + 1])
}

type Model = BTreeMap<Vec<u8>, Vec<u8>>;

fn check(engine: &dyn Engine, at: At, model: &Model) {
    let expected: Vec<_> = model.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    engine
        .view(|txn| {
            let mut reader = Reader::open(txn, VOLUME, at)?;
            for key in 0..12 {
                assert_eq!(reader.get(&record(key))?, model.get(&record(key)).cloned());
            }
            let (start, end) = (b"k".to_vec(), b"l".to_vec());
            assert_eq!(reader.scan(&start, &end, Order::Ascending, 100)?, expected);
            let mut reversed = reader.scan(&start, &end, Order::Descending, 100)?;
            reversed.reverse();
            assert_eq!(reversed, expected);
            // In pages, each of which begins after the last key of the one before.
            let (mut start, mut paged) = (start, Vec::new());
            loop {
                let page = reader.scan(&start, &end, Order::Ascending, 2)?;
                let Some((last, _)) = page.last() else { break };
                start = [last.as_slice(), &[0]].concat();
                paged.extend(page);
            }
            assert_eq!(paged, expected);
            Ok(())
        })
        .unwrap();
}

proptest! {
    #![proptest_config(Cases { cases: 48, failure_persistence: None, ..Cases::default() })]
    #[test]
    fn snapshots_see_what_was(ops in prop::collection::vec(op(), 1..120)) {
        let dir = tempfile::tempdir().unwrap();
        let engine = engine(&dir);
        let write = |body: &mut dyn FnMut(&mut Writer<'_>)| {
            engine.transact(Durability::Relaxed, |txn| {
                Writer::run(txn, VOLUME, 1, |writer| {
                    body(writer);
                    Ok(())
                })
            }).unwrap();
        };
        let row = VolumeRow {
            name: "v".into(), created: Timestamp::now(), epoch: 1, last_snapshot: 0, deleting: false,
            compression: crate::object::Compression::Zstd { level: 7 },
            key: Some(("main".into(), [1; 8])), former_keys: Some(vec![("old".into(), [2; 8])]),
        };
        engine.transact(Durability::Relaxed, |txn| txn.put(&keys::volume(VOLUME), &row.encode())).unwrap();
        let mut live = Model::new();
        let mut snapshots: Vec<(u64, Model)> = Vec::new();
        let mut deleting: Vec<u64> = Vec::new();
        for op in ops {
            match op {
                Op::Put(key, value) => {
                    write(&mut |w| w.put(&record(key), &[value]).unwrap());
                    live.insert(record(key), vec![value]);
                }
                Op::Delete(key) => {
                    write(&mut |w| w.delete(&record(key)).unwrap());
                    live.remove(&record(key));
                }
                Op::Snapshot => {
                    let name = format!("s{}", snapshots.len() + deleting.len());
                    let made = engine.transact(Durability::Relaxed, |txn| {
                        let name = format!("{name}-{}", VolumeRow::get(txn.as_read(), VOLUME)?.epoch);
                        snapshot::create(txn, VOLUME, &name)
                    }).unwrap();
                    snapshots.push((made.0, live.clone()));
                }
                Op::DeleteSnapshot(i) if !snapshots.is_empty() => {
                    let (number, _) = snapshots.remove(i % snapshots.len());
                    engine.transact(Durability::Relaxed, |txn| {
                        let row = snapshot::SnapshotRow::get(txn.as_read(), VOLUME, number)?;
                        snapshot::begin_delete(txn, VOLUME, &row.name)
                    }).unwrap();
                    deleting.push(number);
                }
                Op::Free(i) if !deleting.is_empty() => {
                    let number = deleting.remove(i % deleting.len());
                    while !engine.transact(Durability::Relaxed, |txn| snapshot::free_batch(txn, VOLUME, number)).unwrap() {}
                }
                Op::DeleteSnapshot(_) | Op::Free(_) => {}
            }
        }
        check(engine.as_ref(), At::Live, &live);
        for (number, model) in &snapshots {
            check(engine.as_ref(), At::Snapshot(*number), model);
        }
        // Without snapshots there is no history.
        for (number, _) in snapshots.drain(..).rev() {
            engine.transact(Durability::Relaxed, |txn| {
                let row = snapshot::SnapshotRow::get(txn.as_read(), VOLUME, number)?;
                snapshot::begin_delete(txn, VOLUME, &row.name)
            }).unwrap();
            deleting.push(number);
        }
        for number in deleting {
            while !engine.transact(Durability::Relaxed, |txn| snapshot::free_batch(txn, VOLUME, number)).unwrap() {}
        }
        for table in [b'h', b'd', b's', b't'] {
            let left = engine.view(|txn| txn.scan(&[table], &[table + 1], Order::Ascending, 9)).unwrap();
            prop_assert!(left.is_empty(), "{left:?}");
        }
        check(engine.as_ref(), At::Live, &live);
    }
}
