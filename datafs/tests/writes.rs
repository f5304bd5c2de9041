//! Tests of the write path, with processes killed at failpoints and processes that append to one file.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;

use millrace_datafs::{Compact, Config, Datafs, FsckOptions, Name, OpenFlags, Owner, View, VolumeSpec};

use crate::child;

const OWNER: Owner = Owner { uid: 0, gid: 0 };
/// Failpoints that kill the process, and on which pass.
const PLACES: &[(&str, u64)] = &[
    ("pack-begun", 1),
    ("pack-begun", 2),
    ("pack-appended", 7),
    ("pack-written", 4),
    ("pack-synced", 5),
    ("object-written", 2),
    ("object-named", 3),
    ("write-placed", 6),
    ("write-placed", 23),
    ("write-committed", 11),
    ("compact-file-copied", 1),
    ("compact-pack-copied", 1),
    ("gc-object-deleted", 2),
];

fn volume() -> Name {
    "v".parse().unwrap()
}

fn open(home: &Path) -> (Datafs, View) {
    let config = Config { garbage_grace_ms: 0, gc_interval_ms: 0, ..Config::default() };
    let datafs = Datafs::open(home, &config).unwrap();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    (datafs, view)
}

fn say(word: &str, number: u64) {
    println!("{word} {number}");
    std::io::stdout().flush().unwrap();
}

fn content(step: u64, part: usize) -> Vec<u8> {
    let len = [9_000, 300, 200_000, 1_200_000, 5 << 20][part] + step as usize;
    (0..len as u64)
        .map(|i| (i.wrapping_mul(0x9e37_79b9) >> 11) as u8 ^ (step * 5 + part as u64) as u8)
        .collect()
}

/// The child: writes and syncs files of every kind, removes those of the step before the last, fragments one,
/// compacts, and collects.
#[test]
fn writer() {
    let Some((home, _)) = child::task() else { return };
    let (datafs, view) = open(&home);
    for step in 0.. {
        for part in 0..5 {
            let name = format!("{step}-{part}");
            let flags = OpenFlags::READ_WRITE;
            let (_, file) = view.create(view.root(), name.as_ref(), 0o644, OWNER, flags).unwrap();
            for (i, piece) in content(step, part).chunks(700_000).enumerate() {
                file.write_at(i as u64 * 700_000, piece).unwrap();
            }
            file.fsync().unwrap();
            // Overwrites, which fragment the file and turn its older data into garbage.
            for i in 0..if part == 2 { 70 } else { 0 } {
                let at = (i * 2_801) % 190_000;
                file.write_at(at as u64, &content(step, part)[at..at + 900]).unwrap();
                file.flush().unwrap();
            }
            file.fsync().unwrap();
            for i in 0..60 {
                let name = format!("filler-{part}-{i}-{step}");
                let flags = OpenFlags::READ_WRITE;
                let (_, file) = view.create(view.root(), name.as_ref(), 0o644, OWNER, flags).unwrap();
                file.write_at(0, &content(step, 0)).unwrap();
                drop(file);
                if i % 10 > 0 {
                    view.remove_file(&name).unwrap();
                }
            }
            if step >= 2 {
                view.remove_file(&format!("{}-{part}", step - 2)).unwrap();
            }
        }
        say("synced", step);
        datafs.compact(None, &Compact::default()).unwrap();
        datafs.gc().unwrap();
        // A failpoint that is never reached would test nothing.
        assert!(step < 60);
    }
}

#[test]
fn a_kill_at_any_step_loses_nothing_that_was_synced() {
    for (place, count) in PLACES {
        let dir = tempfile::tempdir().unwrap();
        let home = dir.path();
        let config = Config { gc_interval_ms: 0, ..Config::default() };
        Datafs::open(home, &config).unwrap().volume_create(&volume()).unwrap();
        let mut command = child::command("writes::writer", home, 0);
        let mut child = command.env("MILLRACE_FAILPOINT", format!("{place}:{count}")).spawn().unwrap();
        let synced = child::reports(&mut child).filter(|(word, _)| word == "synced").last();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "{place}:{count} was not reached");
        let (datafs, view) = open(home);
        let verify = |when: &str| {
            if let Some((_, step)) = synced {
                for part in 0..5 {
                    let read = view.read_file(&format!("{step}-{part}")).unwrap();
                    assert!(read == content(step, part), "{place}:{count} {when}: {step}-{part}");
                }
            }
            let report = datafs.fsck(&FsckOptions::default(), &mut |_| {}).unwrap();
            assert!(report.is_sound(), "{place}:{count} {when}: {:?}", report.found);
            report
        };
        verify("after the kill");
        datafs.gc().unwrap();
        let report = verify("after the collection");
        assert_eq!(report.unclaimed_objects, 0, "{place}:{count}");
        datafs.compact(None, &Compact::default()).unwrap();
        datafs.gc().unwrap();
        verify("after a compaction");
    }
}

const LINES: u64 = 300;

/// The child: appends numbered lines, each with a flush or fsync.
#[test]
fn appender() {
    let Some((home, id)) = child::task() else { return };
    let (_datafs, view) = open(&home);
    let node = view.stat("log").unwrap().node;
    let file = view.open(node, OpenFlags { append: true, ..OpenFlags::READ_WRITE }).unwrap();
    for i in 0..LINES {
        let line = format!("{id} {i} {}\n", "x".repeat((i * 37 % 200) as usize));
        file.write_at(0, line.as_bytes()).unwrap();
        if i % 10 == 0 { file.fsync().unwrap() } else { file.flush().unwrap() }
    }
}

#[test]
fn processes_that_append_to_one_file_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { gc_interval_ms: 0, ..Config::default() };
    Datafs::open(dir.path(), &config).unwrap().volume_create(&volume()).unwrap();
    let (_datafs, view) = open(dir.path());
    view.write_file("log", b"").unwrap();
    let children: Vec<_> = (0..3).map(|id| child::spawn("writes::appender", dir.path(), id)).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    let log = String::from_utf8(view.read_file("log").unwrap().to_vec()).unwrap();
    let mut next = [0; 3];
    for line in log.lines() {
        let mut words = line.split(' ');
        let id: usize = words.next().unwrap().parse().unwrap();
        let i: u64 = words.next().unwrap().parse().unwrap();
        assert_eq!(words.next().unwrap().len() as u64, i * 37 % 200, "a torn line");
        assert_eq!(i, next[id], "process {id}");
        next[id] += 1;
    }
    assert_eq!(next, [LINES; 3]);
}
