//! Tests of the garbage collector: remains of killed writers, full disks, and the end of the last handle.
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use super::*;
use crate::config::Config;
use crate::datafs::Datafs;

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
