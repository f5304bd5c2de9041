//! Tests of the garbage collector: remains of killed writers, full disks, and the end of the last handle.
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use super::*;
use crate::config::Config;
use crate::datafs::Datafs;
use crate::object::{Layout, ObjectId};

fn open(home: &Path, gc_interval_ms: u64) -> Datafs {
    Datafs::open(home, &Config { gc_interval_ms, ..Config::default() }).unwrap()
}

/// Names of the files of a store.
fn files(home: &Path) -> Vec<String> {
    let folders = std::fs::read_dir(Config::default().store_path(home)).unwrap();
    let inside = |folder: std::io::Result<std::fs::DirEntry>| std::fs::read_dir(folder.unwrap().path());
    let files = folders.filter_map(|folder| inside(folder).ok()).flatten();
    files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn what_a_killed_writer_has_half_written_goes_with_its_session() {
    let home = tempfile::tempdir().unwrap();
    let [killed, alive, collector] = [(); 3].map(|()| open(home.path(), 0));
    let begin = |datafs: &Datafs| {
        let mut writer = datafs.shared.pool.writer(&crate::data::Codec::default()).unwrap();
        writer.append(&[7; 3 << 20]).unwrap();
        std::mem::forget(writer);
    };
    begin(&killed);
    begin(&alive);
    let half_written = || files(home.path()).iter().filter(|name| name.contains('#')).count();
    let before = half_written();
    killed.shared.session.lose_lock();
    assert_eq!(collector.gc().unwrap().sessions, 1);
    assert!(before >= 2 && half_written() == before / 2, "{before}: {:?}", files(home.path()));
    // The other session is left as a kill leaves it; the leaked memory is not used again.
    std::mem::forget((killed, alive));
}

/// Different ids: the lowest bits of the number are those of the layout.
fn object(session: u64, number: u64) -> ObjectId {
    ObjectId::new(session, number << 16, Layout::Framed)
}

/// Puts a folder with a file in the place of an object, which so cannot be deleted. Returns it.
fn make_undeletable(home: &Path, object: ObjectId) -> PathBuf {
    let path = Config::default().store_path(home).join(object.data_name());
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    std::fs::write(path.join("file"), b"").unwrap();
    path
}

#[test]
fn an_object_that_cannot_be_deleted_keeps_no_other_from_its_deletion() {
    let home = tempfile::tempdir().unwrap();
    let config = Config { gc_interval_ms: 0, garbage_grace_ms: 0, ..Config::default() };
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let shared = &datafs.shared;
    let ids: Vec<_> = (0..6).map(|at| object(shared.session.id(), at)).collect();
    for id in &ids {
        let path = config.store_path(home.path()).join(id.data_name());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"").unwrap();
    }
    let freed = crate::meta::codec::Encoder::default().i64(0).u32(0).finish();
    let put = |txn: &mut dyn crate::meta::engine::WriteTxn| {
        ids.iter().try_for_each(|id| txn.put(&keys::garbage(*id), &freed))
    };
    shared.meta.transact(Durability::Durable, put).unwrap();
    let stuck = make_undeletable(home.path(), ids[0]);
    let listed = || {
        let mut count = 0;
        shared
            .meta
            .each(&keys::all_garbage(), |_, _| {
                count += 1;
                Ok(())
            })
            .unwrap();
        count
    };
    let error = datafs.gc().unwrap_err();
    let told = millrace_leaf::error_chain::one_line(&error);
    assert!(told.contains(&ids[0].data_name()), "{told}");
    assert_eq!(listed(), 1);
    // A full disk gets the space of the others, too.
    assert!(!shared.make_room() && listed() == 1);
    std::fs::remove_dir_all(stuck).unwrap();
    assert_eq!((datafs.gc().unwrap().objects, listed()), (1, 0));
}

#[test]
fn what_a_dead_session_left_and_cannot_be_deleted_is_tried_again_and_blocks_nothing() {
    let home = tempfile::tempdir().unwrap();
    let [killed, collector] = [(); 2].map(|()| open(home.path(), 0));
    let store = Config::default().store_path(home.path());
    let ids: Vec<_> = (0..4).map(|at| object(killed.shared.session.id(), at)).collect();
    for id in &ids {
        let path = store.join(id.data_name());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, b"").unwrap();
    }
    let stuck = make_undeletable(home.path(), ids[1]);
    killed.shared.session.lose_lock();
    let left = || ids.iter().filter(|id| store.join(id.data_name()).exists()).count();
    let told = millrace_leaf::error_chain::one_line(&collector.gc().unwrap_err());
    assert!(told.contains(&ids[1].data_name()), "{told}");
    assert_eq!(left(), 1);
    std::fs::remove_dir_all(&stuck).unwrap();
    std::fs::write(&stuck, b"").unwrap();
    collector.gc().unwrap();
    assert_eq!(left(), 0);
    std::mem::forget(killed);
}

#[test]
fn a_full_disk_asks_for_a_whole_collection_once_a_second() {
    let home = tempfile::tempdir().unwrap();
    let datafs = open(home.path(), 0);
    let shared = &datafs.shared;
    let asked = || shared.collector.next(Duration::ZERO).is_some_and(|busy| busy.urgent);
    asked();
    shared.make_room();
    assert!(asked());
    let began = Instant::now();
    let again = (0..100).filter(|_| !shared.make_room() && asked()).count();
    assert!(again as u64 <= began.elapsed().as_secs(), "{again} times");
}

#[test]
fn the_last_handle_waits_for_the_collection() {
    let home = tempfile::tempdir().unwrap();
    for round in 0..30 {
        let datafs = open(home.path(), 1);
        let shared = Arc::downgrade(&datafs.shared);
        datafs.shared.collector.wake();
        drop(datafs);
        assert!(shared.upgrade().is_none(), "round {round}");
    }
}
