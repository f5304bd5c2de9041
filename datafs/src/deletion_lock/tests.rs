use super::*;
use crate::datafs::Datafs;
use crate::fs::tests::{open, rows, setup};

/// Leaves a deletion record of a session.
fn put(datafs: &Datafs, session: u64) {
    let put = |txn: &mut dyn crate::meta::engine::WriteTxn| txn.put(&keys::deletion(session, 0), &[7; 16]);
    datafs.shared.meta.transact(Durability::Durable, put).unwrap();
}

fn files(home: &Path) -> usize {
    fs::read_dir(folder(home)).map_or(0, Iterator::count)
}

/// Opens the home again; returns how many records are left.
fn left(home: &Path) -> usize {
    rows(&open(home), b'u')
}

pub(crate) fn records_of_a_killed_process_go_when_its_home_is_opened_again() {
    let (home, datafs, view) = setup();
    let (home, meta) = (home.path(), &datafs.shared.meta);
    let (killed, copied, booted) = (0x71, 0x72, 0x73);
    let lock = take(meta, home, killed).unwrap();
    put(&datafs, killed);
    assert_eq!((left(home), files(home)), (1, 1), "its process lives");
    drop(lock);
    assert_eq!((left(home), files(home)), (0, 0));

    // A copy of the file of a process that lives, and a file from before the machine started.
    let lock = take(meta, home, killed).unwrap();
    fs::copy(folder(home).join(name(killed)), folder(home).join(name(copied))).unwrap();
    let before = lock_file(&folder(home), booted).unwrap();
    before.write_all_at(&[0xff; 16], 0).unwrap();
    drop(before);
    fs::write(folder(home).join(format!("{}.new", name(9))), "").unwrap();
    [killed, copied, booted].iter().for_each(|session| put(&datafs, *session));
    assert_eq!((left(home), files(home)), (3, 1), "no proof");
    drop(lock);
    assert_eq!((left(home), files(home)), (2, 0));

    // A restore may have read the records, and writes them back at its end.
    let lock = take(meta, home, killed).unwrap();
    put(&datafs, killed);
    drop(lock);
    let hold = keys::hold(datafs.shared.session.id());
    meta.transact(Durability::Durable, |txn| txn.put(&hold, &[0; 12])).unwrap();
    assert_eq!((left(home), files(home)), (3, 1));
    meta.transact(Durability::Durable, |txn| txn.delete(&hold)).unwrap();
    assert_eq!((left(home), files(home)), (2, 0));

    // A process that deletes has a file, also while it lives.
    view.write_file("file", &[1; 10_000]).unwrap();
    view.remove_file("file").unwrap();
    datafs.gc().unwrap();
    left(home);
    assert_eq!(files(home), 1);
}

#[test]
fn a_home_with_file_locks_needs_no_file() {
    let (home, datafs, view) = setup();
    view.write_file("file", &[1; 10_000]).unwrap();
    view.remove_file("file").unwrap();
    datafs.gc().unwrap();
    assert!(take(&datafs.shared.meta, home.path(), 1).is_none());
    assert!(!folder(home.path()).exists());
}
