//! Tests of the identity of snapshots: of one home, of moved, copied, new and restored ones.
use std::fs;
use std::path::Path;

use super::*;
use crate::config::Config;
use crate::datafs::Datafs;
use crate::meta::metadata::Metadata;
use crate::meta::sqlite::Sqlite;

fn config() -> Config {
    Config { gc_interval_ms: 0, ..Config::default() }
}

fn open(home: &Path) -> Datafs {
    Datafs::open(home, &config()).unwrap()
}

/// A home with the volume `v` and its snapshot `s`.
fn make(home: &Path) -> Datafs {
    let datafs = open(home);
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    datafs.view(&"v".parse().unwrap()).unwrap().write_file("f", b"content").unwrap();
    datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    datafs
}

fn id(datafs: &Datafs, spec: &str) -> SnapshotId {
    datafs.view(&spec.parse().unwrap()).unwrap().snapshot_id().unwrap().unwrap()
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn a_snapshot_keeps_its_identity_when_its_home_moves() {
    let dir = tempfile::tempdir().unwrap();
    let [home, moved] = ["home", "moved"].map(|name| dir.path().join(name));
    let datafs = make(&home);
    let first = id(&datafs, "v@s");
    assert_eq!(id(&datafs, "v@latest"), first);
    assert_eq!(id(&open(&home), "v@s"), first, "of another process");
    drop(datafs);
    fs::rename(&home, &moved).unwrap();
    assert_eq!(id(&open(&moved), "v@s"), first);
}

#[test]
fn a_live_volume_has_no_identity() {
    let dir = tempfile::tempdir().unwrap();
    let datafs = make(dir.path());
    assert_eq!(datafs.view(&"v".parse().unwrap()).unwrap().snapshot_id().unwrap(), None);
}

#[test]
fn another_snapshot_under_the_same_name_has_another_identity() {
    let dir = tempfile::tempdir().unwrap();
    let datafs = make(dir.path());
    let first = id(&datafs, "v@s");
    let (volume, snapshot) = ("v".parse().unwrap(), "s".parse().unwrap());
    datafs.snapshot_delete(&volume, &snapshot).unwrap();
    datafs.snapshot_create(&volume, &snapshot).unwrap();
    let second = id(&datafs, "v@s");
    assert_ne!(first, second);
    datafs.volume_delete(&volume).unwrap();
    datafs.volume_create(&volume).unwrap();
    datafs.snapshot_create(&volume, &snapshot).unwrap();
    assert!(![first, second].contains(&id(&datafs, "v@s")));
}

#[test]
fn another_home_at_the_same_path_has_another_identity() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let datafs = make(&home);
    let first = id(&datafs, "v@s");
    drop(datafs);
    fs::remove_dir_all(&home).unwrap();
    // The new metadata file may have the inode number of the removed one.
    assert_ne!(id(&make(&home), "v@s"), first);
}

#[test]
fn a_copied_home_has_another_identity() {
    let dir = tempfile::tempdir().unwrap();
    let [home, copied] = ["home", "copied"].map(|name| dir.path().join(name));
    let datafs = make(&home);
    let first = id(&datafs, "v@s");
    drop(datafs);
    copy(&home, &copied);
    assert_ne!(id(&open(&copied), "v@s"), first);
}

#[test]
fn a_restored_backup_has_another_identity() {
    let dir = tempfile::tempdir().unwrap();
    let [home, backup] = ["home", "backup"].map(|name| dir.path().join(name));
    let datafs = make(&home);
    let first = id(&datafs, "v@s");
    datafs.backup(&backup, &|_| true).unwrap();
    drop(datafs);
    // In place: the metadata file stays the same.
    Datafs::restore(&home, &config(), &backup, false, &|_| true).unwrap();
    assert_ne!(id(&open(&home), "v@s"), first);
}

#[test]
fn processes_that_ask_first_at_the_same_time_agree() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("meta.sqlite");
    let wait = std::time::Duration::from_secs(60);
    let open = || Metadata::grouped(Sqlite::open(&path, wait).unwrap()).unwrap();
    let opened: Vec<Metadata> = (0..4).map(|_| open()).collect();
    let numbers: Vec<u64> = std::thread::scope(|scope| {
        let threads: Vec<_> = opened.iter().map(|meta| scope.spawn(|| number_of(meta).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
}
