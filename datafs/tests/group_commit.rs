//! Crash tests of group commit: writers are killed at every step. Synced files are complete, the others exist
//! up to one point and not beyond, and other processes continue at once.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeSet;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;

use millrace_datafs::{Config, Datafs, Node, OpenFlags, Owner, View};

use crate::child;

const OWNER: Owner = Owner { uid: 0, gid: 0 };
/// Failpoints of a group commit, in order.
const STEPS: [&str; 9] = [
    "group-start",
    "group-frozen",
    "group-prerequisites",
    "group-logged",
    "group-written",
    "group-committed",
    "group-finished",
    "group-sync",
    "group-synced",
];
/// The pass of the step at which the process is killed: while opening, and while working.
const PASSES: [u64; 3] = [1, 5, 20];

fn content(i: u64) -> Vec<u8> {
    i.to_be_bytes().repeat(2 + (i as usize % 3) * 400)
}

fn make(view: &View, parent: Node, i: u64) {
    let flags = OpenFlags { exclusive: true, ..OpenFlags::READ_WRITE };
    let (_, file) = view.create(parent, format!("{i}").as_ref(), 0o644, OWNER, flags).unwrap();
    file.write_at(0, &content(i)).unwrap();
}

/// The child: creates files, and syncs the folder after every tenth.
#[test]
fn killed_writer() {
    let Some((home, round)) = child::task() else { return };
    let datafs = Datafs::open(&home, &Config::default()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let folder = view.mkdir(view.root(), format!("round-{round}").as_ref(), 0o755, OWNER).unwrap().node;
    for i in 0..20_000 {
        make(&view, folder, i);
        if i % 10 == 9 {
            view.fsync_dir(folder).unwrap();
            println!("synced {i}");
            std::io::stdout().flush().unwrap();
        }
    }
}

#[test]
fn writers_killed_at_each_step_lose_only_what_was_not_synced() {
    if !cfg!(debug_assertions) {
        // Release builds have no failpoints.
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let own = view.mkdir(view.root(), "own".as_ref(), 0o755, OWNER).unwrap().node;
    let rounds = STEPS.iter().flat_map(|step| PASSES.map(|pass| (step, pass)));
    for (round, (step, pass)) in (0u64..).zip(rounds) {
        let mut command = child::command("group_commit::killed_writer", dir.path(), round);
        let mut child = command.env("MILLRACE_FAILPOINT", format!("{step}:{pass}")).spawn().unwrap();
        let reports: Vec<_> = child::reports(&mut child).collect();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{step}:{pass} was not reached");
        // This process continues, and sees the state that the other one has left.
        make(&view, own, round);
        let synced = reports.iter().filter(|(word, _)| word == "synced").map(|(_, i)| *i).max();
        let folder = format!("round-{round}");
        let there: BTreeSet<u64> = match view.list(&folder) {
            Ok(entries) => entries.iter().map(|entry| entry.name.parse().unwrap()).collect(),
            Err(error) => {
                assert!(error.is_not_found() && synced.is_none(), "{step}:{pass}: {error}");
                continue;
            }
        };
        let count = there.len() as u64;
        assert!(there.iter().copied().eq(0..count), "{step}:{pass}: {there:?}");
        assert!(synced.is_none_or(|synced| synced < count), "{step}:{pass}: {synced:?} of {count}");
        for i in there {
            let read = view.read_file(&format!("{folder}/{i}")).unwrap();
            let kept = synced.is_some_and(|synced| i <= synced);
            assert!(read == content(i) || (read.is_empty() && !kept), "{step}:{pass}: file {i}");
        }
    }
    datafs.gc().unwrap();
    drop((view, datafs));
    let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    assert_eq!(view.list("own").unwrap().len(), STEPS.len() * PASSES.len());
}

const PROCESSES: u64 = 3;
const FILES: u64 = 400;

/// The child: creates its files in the common folder.
#[test]
fn steady_writer() {
    let Some((home, id)) = child::task() else { return };
    let datafs = Datafs::open(&home, &Config::default()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let folder = view.stat("common").unwrap().node;
    for i in 0..FILES {
        make(&view, folder, id * FILES + i);
        // The process sees every change that was acknowledged to it, like all others.
        assert_eq!(view.read_file(&format!("common/{}", id * FILES + i)).unwrap(), content(id * FILES + i));
    }
}

#[test]
fn processes_take_turns_and_lose_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(dir.path(), &Config::default()).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    view.create_dir_all("common").unwrap();
    let children: Vec<_> =
        (0..PROCESSES).map(|id| child::spawn("group_commit::steady_writer", dir.path(), id)).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    }
    let names: BTreeSet<u64> =
        view.list("common").unwrap().iter().map(|entry| entry.name.parse().unwrap()).collect();
    assert!(names.into_iter().eq(0..PROCESSES * FILES));
}
