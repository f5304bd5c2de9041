//! Tests of files that lose their name in one session while another has them open.
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::datafs::Datafs;
use crate::fs::tests::{objects, open, rows, volume};
use crate::fs::{OpenFile, OpenFlags, View};

const RW: OpenFlags = OpenFlags::READ_WRITE;

/// Two sessions with the same volume.
fn two(home: &Path) -> [(Datafs, View); 2] {
    let one = open(home);
    let view = volume(&one);
    [(one, view), again(home)]
}

fn again(home: &Path) -> (Datafs, View) {
    let datafs = open(home);
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

fn counts(datafs: &Datafs, home: &Path) -> (usize, usize) {
    (rows(datafs, b'o'), objects(home))
}

#[test]
pub(crate) fn a_file_unlinked_elsewhere_stays_until_the_last_close() {
    let home = tempfile::tempdir().unwrap();
    let [(a, at_a), (b, at_b)] = two(home.path());
    for path in ["removed", "replaced"] {
        at_a.write_file(path, &[1; 10_000]).unwrap();
    }
    let files = ["removed", "replaced"].map(|path| at_b.open(at_b.stat(path).unwrap().node, RW).unwrap());
    at_a.remove_file("removed").unwrap();
    at_a.write_file("other", &[2; 10_000]).unwrap();
    at_a.rename_path("other", "replaced").unwrap();
    for _ in 0..2 {
        assert_eq!(a.gc().unwrap().inodes, 0);
        assert_eq!(b.gc().unwrap().inodes, 0);
    }
    assert_eq!(counts(&a, home.path()), (2, 3));
    for file in &files {
        assert_eq!(file.read_at(0, 20_000).unwrap(), vec![1; 10_000]);
        file.write_at(5_000, &[3; 9_000]).unwrap();
        file.fsync().unwrap();
        let mut expected = vec![1; 14_000];
        expected[5_000..].fill(3);
        assert_eq!(file.read_at(0, 20_000).unwrap(), expected);
        let attr = file.attr().unwrap();
        assert_eq!((attr.nlink, attr.size), (0, 14_000));
        // As by `/proc/self/fd`: the session that has it open may open it again, no other session may.
        assert_eq!(at_b.open(file.node(), RW).unwrap().read_at(0, 1).unwrap(), vec![1]);
        assert!(at_a.open(file.node(), RW).unwrap_err().is_not_found());
    }
    assert_eq!(at_b.read_file("replaced").unwrap(), vec![2; 10_000]);
    drop(files);
    // The session that closes it last asks the others before it frees the file.
    assert_eq!(b.gc().unwrap().inodes, 0);
    a.gc().unwrap();
    assert_eq!(b.gc().unwrap().inodes, 2);
    b.gc().unwrap();
    assert_eq!(counts(&a, home.path()), (0, 1));
}

#[test]
pub(crate) fn an_orphan_is_opened_as_long_as_it_is_there() {
    let home = tempfile::tempdir().unwrap();
    let [(a, at_a), (b, at_b)] = two(home.path());
    at_a.write_file("file", &[1; 10_000]).unwrap();
    let node = at_b.stat("file").unwrap().node;
    assert!(at_b.open_orphan(node).unwrap_err().is_not_found(), "it has a name");
    at_a.remove_file("file").unwrap();
    assert!(at_b.open(node, OpenFlags::READ).unwrap_err().is_not_found());
    let (one, two) = (at_b.open_orphan(node).unwrap(), at_b.open_orphan(node).unwrap());
    for _ in 0..3 {
        assert_eq!((a.gc().unwrap().inodes, b.gc().unwrap().inodes), (0, 0));
    }
    drop(one);
    // No session is asked twice: the record says which session has it open.
    assert_eq!(at_b.open(node, OpenFlags::READ).unwrap().read_at(0, 20_000).unwrap(), vec![1; 10_000]);
    assert_eq!(two.read_at(0, 20_000).unwrap(), vec![1; 10_000]);
    drop(two);
    for _ in 0..3 {
        a.gc().unwrap();
        b.gc().unwrap();
    }
    assert_eq!(counts(&a, home.path()), (0, 0));
    assert!(at_b.open_orphan(node).unwrap_err().is_not_found());
}

#[test]
pub(crate) fn orphans_are_whole_while_they_are_opened_and_let_go_at_once() {
    let home = tempfile::tempdir().unwrap();
    let [(a, at_a), (b, at_b)] = two(home.path());
    let done = AtomicBool::new(false);
    let opened = std::sync::atomic::AtomicUsize::new(0);
    at_a.write_file("file", &[0; 6_000]).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let node = at_b.stat("file").unwrap().node;
                    let file = match at_b.open(node, OpenFlags::READ) {
                        Err(error) if error.is_not_found() => at_b.open_orphan(node),
                        opened => opened,
                    };
                    match file {
                        Ok(file) => {
                            let bytes = file.read_at(0, 10_000).unwrap();
                            assert!(bytes.len() == 6_000 && bytes.iter().all(|byte| *byte == bytes[0]));
                            opened.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => assert!(error.is_not_found(), "{error}"),
                    }
                }
            });
        }
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                a.gc().unwrap();
                b.gc().unwrap();
            }
        });
        for n in 0..500 {
            at_a.write_file("new", &[n as u8; 6_000]).unwrap();
            at_a.rename_path("new", "file").unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert!(opened.into_inner() > 0);
    for _ in 0..4 {
        a.gc().unwrap();
        b.gc().unwrap();
    }
    assert_eq!(counts(&a, home.path()), (0, 1), "orphans, and objects");
}

#[test]
pub(crate) fn what_nobody_has_open_goes_when_all_have_answered() {
    let home = tempfile::tempdir().unwrap();
    let [(a, at_a), (b, _)] = two(home.path());
    for n in 0..200 {
        at_a.write_file(&format!("{n}"), &[1; 5_000]).unwrap();
    }
    for n in 0..200 {
        at_a.remove_file(&format!("{n}")).unwrap();
    }
    assert_eq!(a.gc().unwrap().inodes, 0);
    // A session that starts later cannot have them open.
    let late = again(home.path());
    assert_eq!(a.gc().unwrap().inodes, 0);
    b.gc().unwrap();
    assert_eq!(a.gc().unwrap().inodes, 200);
    assert_eq!(a.shared.meta.view(round_number).unwrap(), 1, "one question about all");
    assert_eq!((rows(&a, b'o'), rows(&a, b'r')), (0, 1));
    // In a session that is alone again, the last name frees the file.
    drop((late, b));
    at_a.write_file("file", b"x").unwrap();
    at_a.remove_file("file").unwrap();
    assert_eq!((rows(&a, b'o'), rows(&a, b'r')), (0, 1));
}

#[test]
fn a_holder_that_dies_holds_nothing() {
    let home = tempfile::tempdir().unwrap();
    let [(a, at_a), (b, at_b)] = two(home.path());
    at_a.write_file("file", &[1; 10_000]).unwrap();
    let file = at_b.open(at_a.stat("file").unwrap().node, RW).unwrap();
    at_a.remove_file("file").unwrap();
    a.gc().unwrap();
    b.gc().unwrap();
    assert_eq!(a.gc().unwrap().inodes, 0);
    b.shared.session.lose_lock();
    assert_eq!(a.gc().unwrap().inodes, 1);
    assert_eq!(counts(&a, home.path()), (0, 0));
    assert!(file.read_at(0, 1).is_err());
}

#[test]
fn the_orphans_of_a_dead_keeper_are_kept_for_who_has_them_open() {
    let home = tempfile::tempdir().unwrap();
    let [(a, at_a), (b, at_b)] = two(home.path());
    let (c, _) = again(home.path());
    at_a.write_file("file", &[1; 10_000]).unwrap();
    at_a.write_file("other", &[2; 10_000]).unwrap();
    let node = at_a.stat("file").unwrap().node;
    let [ours, theirs] = [&at_a, &at_b].map(|view| view.open(node, RW).unwrap());
    at_a.remove_file("file").unwrap();
    at_a.remove_file("other").unwrap();
    a.shared.session.lose_lock();
    // No round had been started.
    assert_eq!(c.gc().unwrap().sessions, 1);
    b.gc().unwrap();
    assert_eq!(c.gc().unwrap().inodes, 1, "the one that nobody has open");
    assert_eq!(theirs.read_at(0, 20_000).unwrap(), vec![1; 10_000]);
    drop(theirs);
    assert_eq!(b.gc().unwrap().inodes, 0, "it is asked for first");
    c.gc().unwrap();
    assert_eq!(b.gc().unwrap().inodes, 1);
    assert_eq!(rows(&b, b'o'), 0);
    drop(ours);
}

#[test]
pub(crate) fn who_could_open_a_file_can_read_it_while_others_replace_it() {
    let home = tempfile::tempdir().unwrap();
    let [(a, at_a), (b, at_b)] = two(home.path());
    at_a.write_file("file", &[0; 9_000]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..60u8 {
                at_a.write_file("file", &[n; 9_000]).unwrap();
                a.gc().unwrap();
            }
            done.store(true, Ordering::Release);
        });
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                b.gc().unwrap();
            }
        });
        while !done.load(Ordering::Acquire) {
            let Ok(stat) = at_b.stat("file") else { continue };
            let Ok(file) = at_b.open(stat.node, RW) else { continue };
            for _ in 0..5 {
                let bytes = file.read_at(0, 10_000).unwrap();
                assert!(bytes.len() == 9_000 && bytes.iter().all(|byte| *byte == bytes[0]));
            }
            file.write_at(0, &[bytes_of(&file)]).unwrap();
            file.flush().unwrap();
        }
    });
    // A round has to end before the next one covers later orphans.
    for _ in 0..20 {
        if counts(&a, home.path()) == (0, 1) {
            break;
        }
        a.gc().unwrap();
        b.gc().unwrap();
    }
    assert_eq!(counts(&a, home.path()), (0, 1));
}

fn bytes_of(file: &crate::fs::OpenFile) -> u8 {
    file.read_at(0, 1).unwrap()[0]
}

/// Where the process that serves a mount is stopped for good, in the protocol about its open file.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Stopped {
    BeforeTheRemoval,
    BeforeTheQuestion,
    BeforeTheAnswer,
    AfterTheAnswer,
}

/// A server of a mount dies, or is suspended for good, while another session removes or replaces a file that it has
/// open. Its successor has the content, at whichever step of the protocol the server stopped.
#[test]
pub(crate) fn a_successor_keeps_open_files_that_another_session_removes() {
    use Stopped::{AfterTheAnswer, BeforeTheAnswer, BeforeTheQuestion, BeforeTheRemoval};
    for stopped in [BeforeTheRemoval, BeforeTheQuestion, BeforeTheAnswer, AfterTheAnswer] {
        for is_replaced in [false, true] {
            let case = format!("{stopped:?}, replaced: {is_replaced}");
            let home = tempfile::tempdir().unwrap();
            let [(remover, at_remover), (old, at_old)] = two(home.path());
            at_remover.write_file("file", &[1; 10_000]).unwrap();
            at_remover.write_file("other", &[2; 10_000]).unwrap();
            let node = at_old.stat("file").unwrap().node;
            let file = at_old.open(node, RW).unwrap();
            let remove = || match is_replaced {
                true => at_remover.rename_path("other", "file").unwrap(),
                false => at_remover.remove_file("file").unwrap(),
            };
            if stopped != BeforeTheRemoval {
                remove();
            }
            if stopped == BeforeTheAnswer || stopped == AfterTheAnswer {
                assert_eq!(remover.shared.tend_orphans().unwrap(), 0, "{case}");
            }
            if stopped == AfterTheAnswer {
                old.shared.answer_round().unwrap();
            }
            // Its memory and its locks stay as they are, as those of a suspended process do.
            let session = old.shared.session.id();
            std::mem::forget(file);

            let (new, at_new) = again(home.path());
            // Its thread may answer before the files are open.
            new.shared.answer_round().unwrap();
            let inherited = OpenFile::inherit(&at_new, node, RW);
            new.shared.take_over_orphans(session).unwrap();
            assert_eq!(remover.shared.tend_orphans().unwrap(), 0, "{case}");
            new.shared.end_taken_over(session).unwrap();
            if stopped == BeforeTheRemoval {
                remove();
            }
            assert!(inherited.is_inherited().unwrap(), "{case}");
            for _ in 0..3 {
                for datafs in [&remover, &new] {
                    datafs.shared.answer_round().unwrap();
                    assert_eq!(datafs.shared.tend_orphans().unwrap(), 0, "{case}");
                }
            }
            assert_eq!(inherited.read_at(0, 20_000).unwrap(), vec![1; 10_000], "{case}");
            inherited.write_at(0, &[3]).unwrap();
            inherited.fsync().unwrap();
            drop(inherited);
            for _ in 0..3 {
                for datafs in [&remover, &new] {
                    datafs.shared.answer_round().unwrap();
                    datafs.shared.tend_orphans().unwrap();
                }
            }
            assert_eq!(rows(&remover, b'o'), 0, "{case}");
            std::mem::forget((old, at_old));
        }
    }
}

#[test]
fn records_round_trip_and_refuse_damage() {
    for orphan in [Orphan::free(), Orphan::of(7), Orphan { keeper: 7, holders: vec![8, 9] }] {
        assert_eq!(Orphan::decode(&orphan.encode()).unwrap(), orphan);
    }
    assert!(Orphan::decode(&[]).is_err() && Orphan::decode(&[1; 9]).is_err());
}
