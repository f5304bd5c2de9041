//! Tests of the identity check of stores and encryption keys.
use std::path::Path;

use super::*;
use crate::config::{Config, FromFile, Secret};
use crate::datafs::Datafs;
use crate::meta::sqlite::Sqlite;
use crate::volume::VolumeOptions;

const LARGE: usize = 2 << 20;

fn config(store: &str) -> Config {
    Config { store_dir: store.into(), gc_interval_ms: 0, ..Config::default() }
}

fn write(datafs: &Datafs, name: &str) {
    datafs.view(&"v".parse().unwrap()).unwrap().write_file(name, &[7; LARGE]).unwrap();
}

fn read(datafs: &Datafs, name: &str) -> usize {
    datafs.view(&"v".parse().unwrap()).unwrap().read_file(name).unwrap().len()
}

fn make(home: &Path) {
    let datafs = Datafs::open(home, &config("store")).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    write(&datafs, "f");
}

/// Turns a home into one of a build without identities.
fn make_old(home: &Path) {
    let meta = Metadata::grouped(Sqlite::open(&home.join("datafs/meta.sqlite"), LIMIT).unwrap()).unwrap();
    meta.transact(Durability::Durable, |txn| {
        txn.delete(keys::STORE)?;
        txn.delete(&keys::encryption_key("main"))
    })
    .unwrap();
    std::fs::remove_file(home.join("store/store.json")).unwrap();
}

const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);

#[test]
fn another_store_is_refused_and_the_own_one_goes_on() {
    let home = tempfile::tempdir().unwrap();
    make(home.path());
    let error = Datafs::open(home.path(), &config("elsewhere")).unwrap_err().to_string();
    assert!(error.contains("elsewhere") && error.contains("store_url"), "{error}");
    // A store that belongs to another home.
    let other = tempfile::tempdir().unwrap();
    make(other.path());
    let theirs = Config {
        store_url: Some(format!("file://{}", other.path().join("store").display())),
        ..config("store")
    };
    let error = Datafs::open(home.path(), &theirs).unwrap_err().to_string();
    assert!(error.contains("has the number"), "{error}");
    let datafs = Datafs::open(home.path(), &config("store")).unwrap();
    assert_eq!(read(&datafs, "f"), LARGE);
    write(&datafs, "g");
    // A refused process leaves nothing that has to be cleaned up.
    assert_eq!(datafs.gc().unwrap().sessions, 0);
    drop(datafs);
    // The store may move with its marker.
    std::fs::rename(home.path().join("store"), home.path().join("moved")).unwrap();
    assert_eq!(read(&Datafs::open(home.path(), &config("moved")).unwrap(), "g"), LARGE);
}

#[test]
fn a_home_from_before_is_recorded_with_its_own_store() {
    let home = tempfile::tempdir().unwrap();
    make(home.path());
    make_old(home.path());
    // As if the disk of the store were not mounted.
    let error = Datafs::open(home.path(), &config("elsewhere")).unwrap_err().to_string();
    assert!(error.contains("is empty") && error.contains("mounted"), "{error}");
    assert_eq!(read(&Datafs::open(home.path(), &config("store")).unwrap(), "f"), LARGE);
    std::fs::remove_file(home.path().join("store/store.json")).unwrap();
    let error = Datafs::open(home.path(), &config("store")).unwrap_err().to_string();
    assert!(error.contains("has no number"), "{error}");
}

#[test]
fn many_who_open_a_new_home_at_once_agree() {
    for _ in 0..10 {
        let home = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            let open = || Datafs::open(home.path(), &config("store"));
            let all: Vec<_> = (0..6).map(|_| scope.spawn(open)).collect();
            let all: Vec<_> = all.into_iter().map(|one| one.join().unwrap().unwrap()).collect();
            let row = all[0].shared.meta.view(StoreRow::get).unwrap().unwrap();
            assert_eq!((row.marked, StoreId::of(&all[0].shared.pool).unwrap()), (true, Some(row.id)));
        });
    }
}

#[test]
fn another_key_of_a_known_name_is_refused() {
    let home = tempfile::tempdir().unwrap();
    let with_key = |byte: u8| {
        let file = home.path().join(format!("key-{byte}"));
        std::fs::write(&file, [byte; 32]).unwrap();
        let keys = [("main".to_owned(), Secret::File(FromFile { file }))];
        Config { encryption_keys: keys.into(), ..config("store") }
    };
    let encrypted = VolumeOptions { encryption_key: Some("main".into()), ..VolumeOptions::default() };
    let datafs = Datafs::open(home.path(), &with_key(1)).unwrap();
    datafs.volume_create_with(&"v".parse().unwrap(), &encrypted).unwrap();
    write(&datafs, "f");
    drop(datafs);
    for old in [false, true] {
        if old {
            make_old(home.path());
            // Records the store and the key.
            drop(Datafs::open(home.path(), &with_key(1)).unwrap());
        }
        let error = Datafs::open(home.path(), &with_key(2)).unwrap_err();
        assert!(matches!(error, Error::WrongKey { .. }) && error.to_string().contains("main"), "{error}");
        // Without a key, the other volumes can be used.
        assert_eq!(
            Datafs::open(home.path(), &config("store")).unwrap().volume_list().unwrap().volumes.len(),
            1
        );
    }
    // The name stays reserved after the volume is deleted.
    let datafs = Datafs::open(home.path(), &with_key(1)).unwrap();
    datafs.volume_delete(&"v".parse().unwrap()).unwrap();
    drop(datafs);
    assert!(matches!(Datafs::open(home.path(), &with_key(2)), Err(Error::WrongKey { .. })));
}
