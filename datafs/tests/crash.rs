//! Crash tests with processes killed at seeded moments. Acknowledged data must be complete, and unacknowledged
//! data complete or absent.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millrace_datafs::{
    Config, Datafs, Error, FsckOptions, Name, OpenFlags, Owner, Publish, View, VolumeSpec,
};

use crate::child;

/// Kills of both writers; `MILLRACE_KILLS` sets another number.
const ROUNDS: u64 = 12;
const WRITERS: u64 = 2;

fn volume() -> Name {
    "v".parse().unwrap()
}

fn config() -> Config {
    Config { garbage_grace_ms: 0, write_buffer_bytes_max: 40_000, ..Config::default() }
}

fn open(home: &Path) -> (Datafs, View) {
    let datafs = Datafs::open(home, &config()).unwrap();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    (datafs, view)
}

/// Content of file `part` of step `i`: inline, small objects, and an object of several parts.
fn content(i: u64, part: u64) -> Vec<u8> {
    let len = match (i + part) % 5 {
        0 => 100,
        1 => 4_096,
        2 => 70_000,
        3 => 9_000,
        _ => 1_200_000,
    };
    let byte = (i * 7 + part) as u8;
    vec![byte; len + (i % 50) as usize]
}

fn next_of(view: &View, writer: u64) -> u64 {
    let value = view.key_get(&format!("next/{writer}")).unwrap();
    value.map_or(0, |v| u64::from_be_bytes(v.try_into().unwrap()))
}

fn say(word: &str, number: u64) {
    println!("{word} {number}");
    std::io::stdout().flush().unwrap();
}

/// The child: publishes, appends to a log with fsync, makes and deletes snapshots, collects.
#[test]
fn writer() {
    let Some((home, id)) = child::task() else { return };
    let (datafs, view) = open(&home);
    let owner = Owner { uid: 0, gid: 0 };
    let name = format!("log-{id}");
    let (_, log) = view.create(view.root(), name.as_ref(), 0o644, owner, OpenFlags::READ_WRITE).unwrap();
    for i in next_of(&view, id).. {
        let mut publish = Publish::new();
        for part in 0..2 {
            let mut staged = view.stage().unwrap();
            staged.append(&content(i, part)).unwrap();
            publish = publish.file(format!("out-{id}/{i}/part-{part}"), staged.finish().unwrap());
        }
        let old = view.key_get(&format!("next/{id}")).unwrap();
        publish = publish
            .expect_key(format!("next/{id}"), old)
            .put_key(format!("next/{id}"), (i + 1).to_be_bytes().to_vec());
        // Also replaces a file each time, to create garbage.
        let mut staged = view.stage().unwrap();
        staged.append(&content(i, 2)).unwrap();
        view.publish(publish.file(format!("current-{id}"), staged.finish().unwrap())).unwrap();
        say("published", i);
        let record = [i.to_be_bytes(), (!i).to_be_bytes()].concat().repeat(1_000);
        log.write_at(i * record.len() as u64, &record).unwrap();
        log.fsync().unwrap();
        say("logged", i);
        // Renamed over, so the file is never missing.
        let draft = format!("draft-{id}");
        view.write_file(&draft, &content(i, 3)).unwrap();
        view.rename_path(&draft, &format!("state-{id}")).unwrap();
        if i % 4 == id {
            let snapshot = format!("s-{id}-{i}").parse().unwrap();
            datafs.snapshot_create(&volume(), &snapshot).unwrap();
            say("snapshot", i);
            if i >= 8 {
                match datafs.snapshot_delete(&volume(), &format!("s-{id}-{}", i - 8).parse().unwrap()) {
                    Ok(()) | Err(Error::NotFound { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            datafs.gc().unwrap();
        }
    }
}

/// Checks that every step below `next` of a writer is complete, and that there are no others.
fn check(view: &View, writer: u64) -> u64 {
    let next = next_of(view, writer);
    let steps: BTreeSet<u64> = match view.list(&format!("out-{writer}")) {
        Ok(entries) => entries.iter().map(|entry| entry.name.parse().unwrap()).collect(),
        Err(error) if error.is_not_found() && next == 0 => return 0,
        Err(error) => panic!("{error}"),
    };
    assert!(steps.into_iter().eq(0..next), "writer {writer}: steps up to {next}");
    // Contents of the newest steps only: earlier rounds have checked the older ones.
    for i in (0..next).rev().take(12) {
        let entries = view.list(&format!("out-{writer}/{i}")).unwrap();
        assert_eq!(entries.len(), 2);
        for part in 0..2 {
            let read = view.read_file(&format!("out-{writer}/{i}/part-{part}")).unwrap();
            assert!(read == content(i, part), "step {i} part {part}");
        }
    }
    if next > 0 {
        let current = view.read_file(&format!("current-{writer}")).unwrap();
        assert!(current == content(next - 1, 2));
    }
    next
}

/// Checks that every record with an acknowledged sync is in the log. Any other is complete, or was never
/// flushed.
fn check_log(view: &View, writer: u64, logged: &BTreeSet<u64>) {
    let log = view.read_file(&format!("log-{writer}")).unwrap();
    let record = 16_000;
    assert_eq!(log.len() % record, 0, "a flush is whole or not there");
    let count = (log.len() / record) as u64;
    assert!(logged.last().is_none_or(|last| *last < count), "a synced record is lost");
    for (i, bytes) in (0..count).zip(log.chunks(record)) {
        let expected = [i.to_be_bytes(), (!i).to_be_bytes()].concat();
        let there = bytes.chunks(16).all(|chunk| chunk == expected);
        let absent = bytes.iter().all(|b| *b == 0);
        assert!(there || (absent && !logged.contains(&i)), "record {i}");
    }
}

#[test]
fn kills_leave_everything_whole() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let (datafs, _view) = {
        let datafs = Datafs::open(home, &config()).unwrap();
        datafs.volume_create(&volume()).unwrap();
        open(home)
    };
    let rounds = std::env::var("MILLRACE_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(ROUNDS);
    let mut logged = [const { BTreeSet::new() }; WRITERS as usize];
    for seed in 0..rounds {
        let mut children: Vec<_> = (0..WRITERS).map(|id| child::spawn("crash::writer", home, id)).collect();
        // Kills after this number of reports from both writers, and a short pause.
        let moment = 2 + seed * 7 % 23;
        let while_more = Duration::from_micros(seed * 1_733 % 6_000);
        let count = AtomicU64::new(0);
        let readers: Vec<_> = children.iter_mut().map(child::reports).collect();
        let published = std::thread::scope(|scope| {
            let threads: Vec<_> = readers
                .into_iter()
                .map(|reports| {
                    let count = &count;
                    scope.spawn(move || {
                        let (mut published, mut logged) = (None, BTreeSet::new());
                        for (word, number) in reports {
                            match word.as_str() {
                                "published" => published = Some(number),
                                "logged" => drop(logged.insert(number)),
                                _ => {}
                            }
                            count.fetch_add(1, Ordering::Relaxed);
                        }
                        (published, logged)
                    })
                })
                .collect();
            let deadline = Instant::now() + Duration::from_secs(60);
            while count.load(Ordering::Relaxed) < moment {
                assert!(Instant::now() < deadline, "the writers report nothing");
                std::thread::yield_now();
            }
            let at = Instant::now() + while_more;
            while Instant::now() < at {
                std::hint::spin_loop();
            }
            for child in &mut children {
                child.kill().unwrap();
                let status = child.wait().unwrap();
                assert_eq!(status.signal(), Some(9), "round {seed}: a writer failed by itself");
            }
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        for (id, (_, now)) in published.iter().enumerate() {
            logged[id].extend(now);
        }
        let verify = |when: &str| {
            let (datafs, view) = open(home);
            for (id, (published, _)) in (0..WRITERS).zip(&published) {
                let next = check(&view, id);
                if let Some(published) = published {
                    assert!(next > *published, "round {seed} {when}: {published} is lost");
                }
                if view.stat(&format!("log-{id}")).is_ok() {
                    check_log(&view, id, &logged[id as usize]);
                }
            }
            for snapshot in datafs.snapshot_list(&volume()).unwrap() {
                let spec = VolumeSpec::at(volume(), snapshot.name);
                let at = datafs.view(&spec).unwrap();
                for id in 0..WRITERS {
                    check(&at, id);
                }
            }
        };
        verify("after the kill");
        datafs.gc().unwrap();
        verify("after the collection");
        let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
        assert!(report.is_sound(), "round {seed}: {:#?}", report.found);
    }
    // No object is left once the volume is deleted.
    datafs.volume_delete(&volume()).unwrap();
    datafs.gc().unwrap();
    let mut left = Vec::new();
    for directory in std::fs::read_dir(home.join("datafs/objects")).unwrap() {
        for file in std::fs::read_dir(directory.unwrap().path()).into_iter().flatten() {
            let name = file.unwrap().file_name().into_string().unwrap();
            // Partly written files have separate names, and collection deletes them by age.
            if !name.contains('#') {
                left.push(name);
            }
        }
    }
    assert!(left.is_empty(), "{left:?}");
    let sessions = std::fs::read_dir(home.join("datafs/meta.sqlite-sessions")).unwrap().count();
    assert_eq!(sessions, 1);
}
