//! Crash tests: a writer is killed at a failpoint or at a random moment, through the library or with the
//! process of its mount. Then the test checks the volume. In half of the rounds another process compacts,
//! packs, collects and makes snapshots at the same time, and is killed too.
//!
//! The rule: the volume is in the state after one of the operations' commits, with none left out and none half
//! done. It includes at least everything before the last durable call (`fsync`, snapshot) that had returned. So
//! a file holds one generation from its first byte to its last. It may be empty only where a program had
//! created or cut it and not yet written. A file that is renamed over is never missing and never empty.
//! Snapshots hold exactly the state that they were made of, the collection finds all garbage, and the scrub
//! finds no problem.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

pub(crate) mod failpoints;
mod reopening;
mod work;

use std::collections::VecDeque;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use millrace_datafs::{Datafs, FsckOptions, Name, VolumeSpec, mount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use self::work::{Hand, Op, Place, State, Story, config, ops, read_all, snapshot_name};
use crate::child;

/// Kills of a test run; `MILLRACE_KILLS` sets another number, `MILLRACE_SEED` another seed.
const KILLS: u64 = 16;
/// Operations of a round without a kill.
const OPS: u64 = 120;
/// A snapshot is deleted after this many newer ones: every check reads all that exist.
const KEPT: u64 = 200;

fn volume() -> Name {
    "v".parse().unwrap()
}

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn hand(home: &Path, seed: u64, place: Place) -> Hand {
    let datafs = Datafs::open(home, &config()).unwrap();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    Hand { place, datafs, view, seed, snapshots: Vec::new() }
}

fn say(word: &str, number: u64) {
    println!("{word} {number}");
    std::io::stdout().flush().unwrap();
}

/// The child that works through the library.
#[test]
fn worker() {
    let Some((home, seed)) = child::task() else { return };
    let mut hand = hand(&home, seed, Place::Library);
    for (i, op) in (0..).zip(ops(seed, OPS)) {
        if hand.act(i, op).unwrap() {
            say("synced", i);
        }
        say("done", i);
    }
}

/// The child that serves a mount, until its standard input ends.
#[test]
fn server() {
    let Some((home, _)) = child::task() else { return };
    let datafs = Datafs::open(&home, &config()).unwrap();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    let mount = mount::mount(view, &mount_point(&home), mount::MountOptions::default()).unwrap();
    say("mounted", 1);
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    mount.unmount().unwrap();
}

/// The child that compacts, packs, collects and makes snapshots until it is killed.
#[test]
fn maintainer() {
    let Some((home, seed)) = child::task() else { return };
    let datafs = Datafs::open(&home, &config()).unwrap();
    let mut made: VecDeque<Name> = VecDeque::new();
    for i in 0u64.. {
        datafs.compact(None, &work::ALL).unwrap();
        made.push_back(format!("{}{i}", maintained(seed)).parse().unwrap());
        datafs.snapshot_create(&volume(), &made[made.len() - 1]).unwrap();
        if made.len() > 2 {
            datafs.snapshot_delete(&volume(), &made.pop_front().unwrap()).unwrap();
        }
        datafs.gc().unwrap();
    }
}

/// The prefix of snapshot names that a round's maintenance makes.
fn maintained(seed: u64) -> String {
    format!("m{seed}-")
}

/// The maintenance process of a round. Dropping the value kills it.
struct Maintenance(Child);

impl Maintenance {
    fn start(home: &Path, seed: u64, failpoints: &[String]) -> Maintenance {
        let end = End::draw(&mut StdRng::seed_from_u64(!seed), failpoints);
        let mut command = child::command("kills::maintainer", home, seed);
        let command = command.stdout(Stdio::null()).env("MILLRACE_FAILPOINT", end.failpoint());
        Maintenance(command.spawn().unwrap())
    }

    /// Kills the process, unless its failpoint has; it must not have ended in another way.
    fn kill(mut self, what: &str) {
        self.0.kill().unwrap();
        let status = self.0.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "{what}: the maintenance failed by itself: {status}");
    }
}

impl Drop for Maintenance {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn mount_point(home: &Path) -> PathBuf {
    home.join("mnt")
}

/// The moment at which a round's process is killed.
#[derive(Debug, Clone)]
enum End {
    At(String, u64),
    /// A pause after this many operations.
    After(u64, Duration),
}

impl End {
    fn draw(random: &mut StdRng, failpoints: &[String]) -> End {
        if !cfg!(debug_assertions) || random.random_range(0..3) == 0 {
            let micros = random.random_range(0..3_000);
            return End::After(random.random_range(0..OPS / 2), Duration::from_micros(micros));
        }
        let name = failpoints[random.random_range(0..failpoints.len())].clone();
        let passes = if random.random_range(0..5) < 3 { 3 } else { 40 };
        End::At(name, random.random_range(1..=passes))
    }

    fn failpoint(&self) -> String {
        match self {
            End::At(name, pass) => format!("{name}:{pass}"),
            End::After(..) => "none".into(),
        }
    }

    /// Kills a process from a thread of the test, once this many operations are done.
    fn kill(&self, child: &Child, done: u64) {
        if let End::After(count, pause) = *self
            && done == count
        {
            let pid = Pid::from_raw(child.id() as i32);
            std::thread::spawn(move || {
                std::thread::sleep(pause);
                let _ = kill(pid, Signal::SIGKILL);
            });
        }
    }
}

/// The last operations that a writer has reported.
#[derive(Debug, Default, Clone, Copy)]
struct Reached {
    done: Option<u64>,
    synced: Option<u64>,
}

impl Reached {
    fn note(&mut self, i: u64, synced: bool) {
        self.done = Some(i);
        self.synced = if synced { Some(i) } else { self.synced };
    }
}

fn through_library(home: &Path, seed: u64, end: &End) -> (Reached, ExitStatus) {
    let mut command = child::command("kills::worker", home, seed);
    let mut child = command.env("MILLRACE_FAILPOINT", end.failpoint()).spawn().unwrap();
    let mut reached = Reached::default();
    for (word, i) in child::reports(&mut child) {
        match word.as_str() {
            "synced" => reached.synced = Some(i),
            "done" => {
                reached.done = Some(i);
                end.kill(&child, i);
            }
            _ => {}
        }
    }
    (reached, child.wait().unwrap())
}

fn through_mount(home: &Path, seed: u64, end: &End) -> (Reached, ExitStatus) {
    let mut command = child::command("kills::server", home, seed);
    let command = command.stdin(Stdio::piped()).env("MILLRACE_FAILPOINT", end.failpoint());
    let mut child = command.spawn().unwrap();
    let mut reports = child::reports(&mut child);
    let mut reached = Reached::default();
    if reports.any(|(word, _)| word == "mounted") {
        let mut hand = hand(home, seed, Place::Mount(mount_point(home)));
        for (i, op) in (0..).zip(ops(seed, OPS)) {
            let Ok(synced) = hand.act(i, op) else { break };
            reached.note(i, synced);
            end.kill(&child, i);
        }
    }
    drop(child.stdin.take());
    let status = child.wait().unwrap();
    // A killed process leaves its mount behind.
    let _ = mount::umount(&mount_point(home));
    (reached, status)
}

/// The snapshots that must exist, and those that may.
fn snapshots_after(ops: &[Op], reached: Reached) -> (Vec<u64>, Vec<u64>) {
    let (mut must, mut may) = (Vec::new(), Vec::new());
    let count = reached.done.map_or(0, |done| done + 1);
    for (i, op) in (0..=count).zip(ops) {
        let in_flight = i == count;
        match op {
            Op::Snapshot if in_flight => may.push(i),
            Op::Snapshot => must.push(i),
            Op::DropSnapshot if must.len() > 1 => {
                let dropped = must.remove(0);
                may.extend(in_flight.then_some(dropped));
            }
            _ => {}
        }
    }
    (must, may)
}

/// Checks the files and the snapshots. Returns the state of the volume.
fn verify(datafs: &Datafs, seed: u64, first: &State, reached: Reached, what: &str) -> State {
    let ops = ops(seed, OPS);
    let story = Story::new(first.clone(), &ops);
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    let actual = read_all(&view);
    let least = reached.synced.map_or(0, |i| story.ends[i as usize]);
    let most = reached.done.map_or(0, |done| done as usize + 1).min(ops.len() - 1);
    let most = story.ends[most];
    if !story.states[least..=most].contains(&actual) {
        let elsewhere = story.states.iter().position(|state| *state == actual);
        let lens: Vec<_> = actual.iter().map(|(name, bytes)| (name, bytes.len(), bytes.first())).collect();
        panic!("{what}: none of the states {least} to {most} ({elsewhere:?} instead): {lens:?}");
    }
    let (must, may) = snapshots_after(&ops, reached);
    let prefix = snapshot_name(seed, 0).replace("-0", "-");
    let there: Vec<String> =
        datafs.snapshot_list(&volume()).unwrap().into_iter().map(|info| info.name.to_string()).collect();
    for i in &must {
        assert!(there.contains(&snapshot_name(seed, *i)), "{what}: snapshot {i} is lost");
    }
    for name in there.iter().filter(|name| name.starts_with(&prefix)) {
        let i: u64 = name[prefix.len()..].parse().unwrap();
        assert!(must.contains(&i) || may.contains(&i), "{what}: snapshot {i} is there");
        let at = datafs.view(&VolumeSpec::at(volume(), name.parse().unwrap())).unwrap();
        let held = read_all(&at);
        // A snapshot in progress may have been completed after the kill, beside the mount.
        let fits = held == story.states[story.ends[i as usize]] || (may.contains(&i) && held == actual);
        assert!(fits, "{what}: snapshot {i} has changed");
    }
    for name in there.iter().filter(|name| name.starts_with(&maintained(seed))) {
        let at = datafs.view(&VolumeSpec::at(volume(), name.parse().unwrap())).unwrap();
        assert!(story.states.contains(&read_all(&at)), "{what}: snapshot {name} holds no state that was");
    }
    actual
}

fn kills_leave_everything_whole(count: u64) {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path();
    let mounts = mount::can_mount().inspect_err(|reason| eprintln!("without mounts: {reason}")).is_ok();
    Datafs::open(home, &config()).unwrap().volume_create(&volume()).unwrap();
    let (mut killed, mut longest, mut seed) = ([0, 0, 0], Duration::ZERO, number("MILLRACE_SEED", 1));
    let failpoints = failpoints::all();
    let mut before = State::new();
    while killed.iter().sum::<u64>() < count {
        let end = End::draw(&mut StdRng::seed_from_u64(seed), &failpoints);
        let mounted = mounts && seed % 2 == 1;
        let what = format!("seed {seed}, {end:?}, {}", if mounted { "mount" } else { "library" });
        // In every third round another session keeps the volume open.
        let bystander = (seed % 3 == 0).then(|| Datafs::open(home, &config()).unwrap());
        let beside = (seed % 4 < 2).then(|| Maintenance::start(home, seed, &failpoints));
        let run = if mounted { through_mount } else { through_library };
        let (reached, status) = run(home, seed, &end);
        killed[2] += u64::from(beside.is_some());
        if let Some(maintenance) = beside {
            maintenance.kill(&what);
        }
        assert!(status.success() || status.signal() == Some(9), "{what}: failed by itself");
        let was_killed = status.signal().is_some();
        killed[usize::from(mounted)] += u64::from(was_killed);
        let reached = if was_killed { reached } else { Reached { synced: reached.done, ..reached } };
        if let Some(bystander) = bystander {
            verify(&bystander, seed, &before, reached, &format!("{what}, seen by another"));
        }
        let begin = Instant::now();
        let datafs = Datafs::open(home, &config()).unwrap();
        datafs.view(&VolumeSpec::live(volume())).unwrap().list("").unwrap();
        longest = longest.max(begin.elapsed());
        let after = verify(&datafs, seed, &before, reached, &what);
        datafs.gc().unwrap();
        assert!(verify(&datafs, seed, &before, reached, &what) == after, "{what}: the collection changed it");
        let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
        assert!(report.is_sound(), "{what}: {:#?}", report.found);
        // Of older rounds, one snapshot in four stays for a while.
        let snapshots = datafs.snapshot_list(&volume()).unwrap();
        let newest = snapshots.iter().map(|info| info.id).max().unwrap_or(0);
        for info in snapshots {
            if info.id % 4 > 0 || info.id + KEPT < newest {
                datafs.snapshot_delete(&volume(), &info.name).unwrap();
            }
        }
        before = after;
        seed += 1;
        if seed.is_multiple_of(50) {
            println!("{killed:?} kills (library, mounts, maintenance), reopening took at most {longest:?}");
        }
    }
    println!("{killed:?} kills (library, mounts, maintenance), reopening took at most {longest:?}");
    assert_nothing_is_left(home);
}

/// Checks that no object is left once the volume is deleted.
fn assert_nothing_is_left(home: &Path) {
    let datafs = Datafs::open(home, &config()).unwrap();
    datafs.volume_delete(&volume()).unwrap();
    datafs.gc().unwrap();
    let mut left = Vec::new();
    for directory in std::fs::read_dir(home.join("datafs/objects")).unwrap() {
        for file in std::fs::read_dir(directory.unwrap().path()).into_iter().flatten() {
            left.push(file.unwrap().file_name().into_string().unwrap());
        }
    }
    // Partly written files have separate names, and collection deletes them by age.
    left.retain(|name| !name.contains('#'));
    assert!(left.is_empty(), "{left:?}");
    let sessions = std::fs::read_dir(home.join("datafs/meta.sqlite-sessions")).unwrap().count();
    assert_eq!(sessions, 1);
}

#[test]
fn writers_and_mounts_that_are_killed_leave_a_state_that_was() {
    kills_leave_everything_whole(number("MILLRACE_KILLS", KILLS));
}

#[test]
#[ignore = "takes a quarter of an hour: cargo test -p millrace-datafs --test datafs a_thousand_kills -- --ignored --nocapture"]
fn a_thousand_kills_leave_a_state_that_was() {
    kills_leave_everything_whole(number("MILLRACE_KILLS", 1_000));
}
