use millrace_testing::s3_server::{Fault, S3Server};

use super::*;
use crate::config::{Config, Secret};
use crate::datafs::Datafs;
use crate::fs::tests::{rows, volume};

/// Returns the objects of the only record, which is a late one, and ends its time.
fn expire(datafs: &Datafs) -> Vec<u8> {
    let prefix = keys::deletions();
    let expired = datafs.shared.meta.transact(Durability::Durable, |txn| {
        let records = txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, usize::MAX)?;
        let [(key, objects)] = &records[..] else { panic!("{} records", records.len()) };
        assert_eq!(owner(key)?.0, LATE);
        assert!(end_of(owner(key)?.1) > seconds());
        txn.delete(key)?;
        txn.put(&keys::deletion(LATE, 1 << COUNT_BITS), objects)?;
        Ok(objects.clone())
    });
    expired.unwrap()
}

#[test]
fn a_restore_relies_on_no_object_that_a_late_request_may_delete() {
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let (home, backup) = (dir.path().join("home"), dir.path().join("backup"));
    let options = server.options().into_iter().map(|(k, v)| (k.to_owned(), Secret::Text(v)));
    let config = Config {
        store_url: Some(server.url("p")),
        store_options: options.collect(),
        cache_bytes_max: 0,
        garbage_grace_ms: 0,
        gc_interval_ms: 0,
        ..Config::default()
    };
    let open = || Datafs::open(&home, &config).unwrap();
    let restore = || Datafs::restore(&home, &config, &backup, false, &|_| true);
    let bytes = vec![1; 3 << 20];

    let datafs = open();
    let view = volume(&datafs);
    view.write_file("file", &bytes).unwrap();
    datafs.backup(&backup, &|_| true).unwrap();
    view.remove_file("file").unwrap();
    // The bucket is asked twice.
    server.faults.next("delete", 1, Fault::Status(503));
    assert_eq!((datafs.gc().unwrap().objects, rows(&datafs, b'u')), (1, 1));
    drop((view, datafs));
    let refused = restore().unwrap_err().to_string();
    assert!(refused.contains("may still reach the bucket") && refused.contains("60 min"), "{refused}");

    let datafs = open();
    let objects = expire(&datafs);
    drop(datafs);
    restore().unwrap();

    // The record of a killed process.
    let datafs = open();
    assert_eq!(rows(&datafs, b'u'), 0);
    let record = keys::deletion(0x71, OF_BUCKET);
    datafs.shared.meta.transact(Durability::Durable, |txn| txn.put(&record, &objects)).unwrap();
    drop(datafs);
    let refused = restore().unwrap_err().to_string();
    assert!(refused.contains("may still reach the bucket"), "{refused}");
    let datafs = open();
    expire(&datafs);
    drop(datafs);
    restore().unwrap();
    let datafs = open();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    assert!(view.read_file("file").unwrap() == bytes);
}

#[test]
fn late_records_go_with_time() {
    let (_home, datafs, _view) = crate::fs::tests::setup();
    let meta = &datafs.shared.meta;
    let keep = || meta.transact(Durability::Durable, |txn| keep_late(txn, &[7; 16])).unwrap();
    keep();
    keep();
    assert_eq!(rows(&datafs, b'u'), 2);
    let old = |count: u64| keys::deletion(LATE, (5_u64 << COUNT_BITS) + count);
    meta.transact(Durability::Durable, |txn| (0..3).try_for_each(|i| txn.put(&old(i), &[7; 16]))).unwrap();
    keep();
    assert_eq!(rows(&datafs, b'u'), 3);
    // Those of a folder need no such time.
    let record = keys::deletion(0x71, 0);
    meta.transact(Durability::Durable, |txn| txn.put(&record, &[7; 16])).unwrap();
    meta.transact(Durability::Durable, |txn| forget(txn, 0x71)).unwrap();
    assert_eq!(rows(&datafs, b'u'), 3);
}
