//! Tests of derived data: shared by homes on one metadata, bounded, verified, and gone with its snapshot.
use std::path::Path;

use super::*;
use crate::config::{Config, FromFile, Secret};
use crate::datafs::Datafs;
use crate::fs::tests::rows;
use crate::meta::engine::WriteTxn;
use crate::meta::keys;
use crate::meta::postgres::tests::server::Server;
use crate::publish::Publish;
use crate::volume::VolumeOptions;

const NAME: &str = "feed/1/dataset/0123";

fn config() -> Config {
    Config { gc_interval_ms: 0, garbage_grace_ms: 0, ..Config::default() }
}

/// Metadata and store of one home, for a process with another one.
fn of_home(home: &Path) -> Config {
    Config { meta_file: home.join("datafs/meta.sqlite"), store_dir: home.join("datafs/objects"), ..config() }
}

/// A volume `v` with the snapshots `v@a` and `v@b`.
fn fill(datafs: &Datafs) {
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let live = datafs.view(&"v".parse().unwrap()).unwrap();
    live.write_file("f", b"first").unwrap();
    for name in ["a", "b"] {
        datafs.snapshot_create(&"v".parse().unwrap(), &name.parse().unwrap()).unwrap();
    }
}

fn view(datafs: &Datafs, spec: &str) -> View {
    datafs.view(&spec.parse().unwrap()).unwrap()
}

fn home() -> (tempfile::TempDir, Datafs) {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &config()).unwrap();
    fill(&datafs);
    (home, datafs)
}

fn change(datafs: &Datafs, change: impl Fn(&mut dyn WriteTxn)) {
    let change = |txn: &mut dyn WriteTxn| {
        change(txn);
        Ok(())
    };
    datafs.shared.meta.transact(Durability::Relaxed, change).unwrap();
}

fn pairs(datafs: &Datafs) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut pairs = Vec::new();
    let keep = |key: &[u8], value: &[u8]| {
        pairs.push((key.to_vec(), value.to_vec()));
        Ok(())
    };
    datafs.shared.meta.each(&keys::derived(), keep).unwrap();
    pairs
}

/// The life of an entry, seen from two homes on one metadata.
fn life_of_an_entry(one: &Datafs, other: &Datafs) {
    fill(one);
    let [of_one, of_other] = [one, other].map(|datafs| view(datafs, "v@a"));
    assert_eq!(of_other.derived_get(NAME).unwrap(), None);
    assert!(of_one.derived_put(NAME, b"content").unwrap());
    assert_eq!(of_other.derived_get(NAME).unwrap().as_deref(), Some(&b"content"[..]));
    assert_eq!(of_other.derived_get("another name").unwrap(), None);
    assert_eq!(view(other, "v@b").derived_get(NAME).unwrap(), None);
    assert!(of_other.derived_put(NAME, b"content").unwrap());
    assert!(of_other.derived_put(NAME, b"replaced").unwrap());
    assert_eq!(of_one.derived_get(NAME).unwrap().as_deref(), Some(&b"replaced"[..]));
    assert!(view(one, "v@b").derived_put(NAME, b"of b").unwrap());
    assert_eq!(pairs(one).len(), 3);

    let (volume, a) = ("v".parse().unwrap(), "a".parse().unwrap());
    one.snapshot_delete(&volume, &a).unwrap();
    let late = of_other.derived_put(NAME, b"too late").unwrap_err();
    assert!(matches!(late, Error::Stale { .. }), "{late}");
    one.gc().unwrap();
    assert_eq!(pairs(other).len(), 2);
    // The same name, another snapshot.
    one.snapshot_create(&volume, &a).unwrap();
    assert_eq!(view(other, "v@a").derived_get(NAME).unwrap(), None);
    assert_eq!(view(other, "v@b").derived_get(NAME).unwrap().as_deref(), Some(&b"of b"[..]));

    let of_b = view(other, "v@b");
    one.volume_delete(&volume).unwrap();
    let late = of_b.derived_put(NAME, b"too late").unwrap_err();
    assert!(matches!(late, Error::Stale { .. }), "{late}");
    one.gc().unwrap();
    assert_eq!(pairs(other), []);
}

#[test]
fn an_entry_is_shared_by_two_homes_and_goes_with_its_snapshot() {
    let homes = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let config = of_home(homes[0].path());
    let [one, other] = homes.each_ref().map(|home| Datafs::open(home.path(), &config).unwrap());
    life_of_an_entry(&one, &other);
}

#[test]
fn an_entry_is_shared_by_two_homes_on_postgres() {
    let Some(server) = Server::shared() else { return };
    let homes = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let config = Config {
        meta_url: Some(server.url().into()),
        meta_schema: server.new_schema(),
        meta_connections_max: 3,
        ..of_home(homes[0].path())
    };
    let [one, other] = homes.each_ref().map(|home| Datafs::open(home.path(), &config).unwrap());
    life_of_an_entry(&one, &other);
}

#[test]
fn damaged_entries_are_ignored_and_replaced() {
    let (_home, datafs) = home();
    let at = view(&datafs, "v@a");
    let put = || {
        assert!(at.derived_put(NAME, b"content").unwrap());
        assert_eq!(at.derived_get(NAME).unwrap().as_deref(), Some(&b"content"[..]));
    };
    put();
    let whole = pairs(&datafs);
    assert_eq!(whole.len(), 2);
    for (is_slot, (key, value)) in whole.iter().enumerate() {
        for at_byte in 0..value.len() {
            let mut damaged = value.clone();
            damaged[at_byte] ^= 0x40;
            // Of the list, the first byte then is the format of a newer program.
            if is_slot == 0 && at_byte == 0 {
                continue;
            }
            change(&datafs, |txn| txn.put(key, &damaged).unwrap());
            assert_eq!(at.derived_get(NAME).unwrap(), None, "byte {at_byte} of {key:?}");
        }
        for len in 0..value.len() {
            change(&datafs, |txn| txn.put(key, &value[..len]).unwrap());
            assert_eq!(at.derived_get(NAME).unwrap(), None, "{len} bytes of {key:?}");
        }
        change(&datafs, |txn| txn.delete(key).unwrap());
        assert_eq!(at.derived_get(NAME).unwrap(), None);
        put();
        assert_eq!(pairs(&datafs).len(), 2);
    }
}

#[test]
fn what_a_newer_program_keeps_is_left_alone() {
    let (_home, datafs) = home();
    let at = view(&datafs, "v@a");
    at.derived_put(NAME, b"content").unwrap();
    let whole = pairs(&datafs);
    let [(list, _), (slot, value)] = &whole[..] else { panic!("not a list and a slot") };
    let newer_slot = [&[2][..], &value[1..]].concat();
    change(&datafs, |txn| txn.put(slot, &newer_slot).unwrap());
    assert_eq!(at.derived_get(NAME).unwrap(), None);
    change(&datafs, |txn| txn.put(list, &[2, 7, 7]).unwrap());
    let before = pairs(&datafs);
    assert_eq!(at.derived_get(NAME).unwrap(), None);
    assert!(!at.derived_put(NAME, b"other").unwrap());
    datafs.snapshot_delete(&"v".parse().unwrap(), &"a".parse().unwrap()).unwrap();
    datafs.gc().unwrap();
    assert_eq!(pairs(&datafs), before);
    datafs.volume_delete(&"v".parse().unwrap()).unwrap();
    datafs.gc().unwrap();
    assert_eq!(pairs(&datafs), []);
}

#[test]
fn the_oldest_entries_of_a_volume_are_replaced() {
    let (_home, datafs) = home();
    let views = ["v@a", "v@b"].map(|spec| view(&datafs, spec));
    let name = |number: usize| format!("name {number}");
    for number in 0..2 * DERIVED_ENTRIES_MAX {
        views[number % 2].derived_put(&name(number), &[number as u8; 100]).unwrap();
        // An entry that is written again counts as new.
        if number >= 10 {
            views[0].derived_put(&name(0), &[number as u8; 90]).unwrap();
        }
    }
    assert_eq!(rows(&datafs, b'c'), DERIVED_ENTRIES_MAX + 1);
    let found = |number: usize| views[number % 2].derived_get(&name(number)).unwrap().is_some();
    let kept: Vec<usize> = (0..2 * DERIVED_ENTRIES_MAX).filter(|number| found(*number)).collect();
    let expected: Vec<usize> =
        std::iter::once(0).chain(DERIVED_ENTRIES_MAX + 1..2 * DERIVED_ENTRIES_MAX).collect();
    assert_eq!(kept, expected);
}

#[test]
fn processes_that_keep_the_same_at_once_all_succeed() {
    let (home, first) = home();
    let others: Vec<Datafs> = (0..4).map(|_| Datafs::open(home.path(), &config()).unwrap()).collect();
    let content = &vec![7; DERIVED_BYTES_MAX];
    std::thread::scope(|scope| {
        for datafs in &others {
            scope.spawn(move || {
                for _ in 0..5 {
                    assert!(view(datafs, "v@a").derived_put(NAME, content).unwrap());
                    assert!(view(datafs, "v@a").derived_get(NAME).unwrap().as_ref() == Some(content));
                }
            });
        }
    });
    assert_eq!(pairs(&first).len(), 2);
}

#[test]
fn what_an_earlier_program_left_behind_is_collected() {
    let (_home, datafs) = home();
    let at = view(&datafs, "v@b");
    at.derived_put(NAME, b"kept").unwrap();
    change(&datafs, |txn| {
        // A snapshot and a volume whose rows went without their derived data.
        derived::put(txn, at.volume, 99, NAME, b"left").unwrap();
        derived::put(txn, 98, 1, NAME, b"left").unwrap();
    });
    assert_eq!(pairs(&datafs).len(), 5);
    datafs.gc().unwrap();
    assert_eq!(pairs(&datafs).len(), 2);
    assert_eq!(at.derived_get(NAME).unwrap().as_deref(), Some(&b"kept"[..]));
}

#[test]
fn snapshots_keys_and_backups_do_not_have_it() {
    let (_home, datafs) = home();
    let live = view(&datafs, "v");
    live.publish(Publish::new().put_key("mine", "1")).unwrap();
    view(&datafs, "v@a").derived_put(NAME, b"content").unwrap();
    datafs.snapshot_create(&"v".parse().unwrap(), &"c".parse().unwrap()).unwrap();
    for spec in ["v", "v@c"] {
        let keys: Vec<String> =
            view(&datafs, spec).key_scan("").unwrap().into_iter().map(|(key, _)| key).collect();
        assert_eq!(keys, ["mine"], "{spec}");
    }
    assert_eq!(view(&datafs, "v@c").derived_get(NAME).unwrap(), None);

    let dir = tempfile::tempdir().unwrap();
    let [other, folder] = ["other", "backup"].map(|name| dir.path().join(name));
    datafs.backup(&folder, &|_| true).unwrap();
    Datafs::restore(&other, &config(), &folder, false, &|_| true).unwrap();
    let restored = Datafs::open(&other, &config()).unwrap();
    assert_eq!(&view(&restored, "v@a").read_file("f").unwrap()[..], b"first");
    assert_eq!(view(&restored, "v@a").derived_get(NAME).unwrap(), None);
    assert_eq!(pairs(&restored), []);
    assert!(datafs.fsck(&crate::FsckOptions::default(), &mut |_| {}).unwrap().is_sound());
}

#[test]
fn what_cannot_be_kept_is_refused() {
    let (_home, datafs) = home();
    let at = view(&datafs, "v@a");
    for refused in [
        view(&datafs, "v").derived_put(NAME, b"x"),
        at.derived_put("", b"x"),
        at.derived_put(&"n".repeat(DERIVED_NAME_BYTES_MAX + 1), b"x"),
    ] {
        assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
    }
    let large = at.derived_put(NAME, &vec![0; DERIVED_BYTES_MAX + 1]);
    assert!(matches!(large, Err(Error::TooLarge { .. })), "{large:?}");
    assert!(view(&datafs, "v").derived_get(NAME).is_err());
    assert_eq!(pairs(&datafs), []);
    assert!(at.derived_put(&"n".repeat(DERIVED_NAME_BYTES_MAX), &vec![0; DERIVED_BYTES_MAX]).unwrap());
}

#[test]
fn an_encrypted_volume_has_none() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("key");
    std::fs::write(&file, [1; 32]).unwrap();
    let encryption_keys = [("main".to_owned(), Secret::File(FromFile { file }))].into();
    let datafs = Datafs::open(home.path(), &Config { encryption_keys, ..config() }).unwrap();
    let (name, snapshot) = ("v".parse().unwrap(), "a".parse().unwrap());
    let options = VolumeOptions { encryption_key: Some("main".to_owned()), ..VolumeOptions::default() };
    datafs.volume_create_with(&name, &options).unwrap();
    datafs.snapshot_create(&name, &snapshot).unwrap();
    let at = view(&datafs, "v@a");
    assert!(!at.derived_put(NAME, b"which rows").unwrap());
    assert_eq!(at.derived_get(NAME).unwrap(), None);
    assert_eq!(pairs(&datafs), []);
}
