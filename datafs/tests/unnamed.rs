//! Tests of files created without a name, through the public interface, on both metadata engines. Programs
//! finish, are killed at every step, or run beside other processes.
//!
//! The rule: a name leads to the whole file or does not exist. Once synced, the name exists. A file without a
//! name goes with the process that created it, and no other process collects it before.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::io::{BufRead as _, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use millrace_datafs::{Config, Datafs, FsckOptions, Node, OpenFile, OpenFlags, Owner, View};

use crate::child;
use crate::engine::{self, Engine};
use crate::kills::failpoints;

const OWNER: Owner = Owner { uid: 0, gid: 0 };
const RW: OpenFlags = OpenFlags::READ_WRITE;
/// File sizes: stored in the metadata, in a pack, and in a separate object.
const SIZES: [usize; 3] = [100, 8_192, 600_000];
/// Lease time after which the other processes on a server consider a process dead.
const LEASE: Duration = Duration::from_secs(6);
/// Longest wait of a test on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Settings without automatic collection.
fn config(engine: Config) -> Config {
    Config {
        garbage_grace_ms: 0,
        gc_interval_ms: 0,
        session_lease_ms: LEASE.as_millis() as u64,
        write_buffer_bytes_max: 40_000,
        ..engine
    }
}

fn open(home: &Path, config: &Config) -> (Datafs, View) {
    let datafs = Datafs::open(home, config).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

fn make(view: &View) -> OpenFile {
    view.create_unnamed(view.root(), 0o644, OWNER, RW).unwrap().1
}

fn contents(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Files of the volume, with a name or without.
fn files(datafs: &Datafs) -> u64 {
    datafs.volume_show(&"v".parse().unwrap()).unwrap().usage.unwrap().files
}

fn names(view: &View) -> Vec<String> {
    view.list("").unwrap().into_iter().map(|entry| entry.name).collect()
}

fn objects(home: &Path) -> usize {
    let folders = std::fs::read_dir(home.join("datafs/objects")).unwrap();
    let objects = folders.flat_map(|folder| std::fs::read_dir(folder.unwrap().path()).into_iter().flatten());
    let names = objects.map(|object| object.unwrap().file_name().into_string().unwrap());
    // Collection deletes partly written objects by age.
    names.filter(|name| !name.ends_with(".sums") && !name.contains('#')).count()
}

fn assert_sound(datafs: &Datafs, what: &str) {
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{what}: {:#?}", report.found);
}

/// The child: creates a file and names it, and reports each step. It continues on an order, or when its
/// standard input has ended.
#[test]
fn maker() {
    let Some((home, len)) = child::task() else { return };
    let (_datafs, view) = open(&home, &Config { gc_interval_ms: 20, ..config(engine::inherited()) });
    let mut orders = std::io::stdin().lock().lines();
    let mut come_to = |step: &str| {
        println!("{step} 1");
        std::io::stdout().flush().unwrap();
        let _ = orders.next();
    };
    let contents = contents(len as usize);
    let (front, back) = contents.split_at(contents.len() / 2);
    let file = make(&view);
    file.write_at(0, front).unwrap();
    file.fsync().unwrap();
    come_to("made");
    assert!(file.read_at(0, contents.len()).unwrap() == front);
    file.write_at(front.len() as u64, back).unwrap();
    file.link(view.root(), "f".as_ref()).unwrap();
    come_to("named");
    file.fsync().unwrap();
    come_to("synced");
}

struct Maker {
    child: Child,
    steps: Box<dyn Iterator<Item = (String, u64)>>,
}

impl Maker {
    /// Starts a child that waits for orders; with a failpoint it runs until it dies there.
    fn start(engine: &Engine, home: &Path, len: usize, failpoint: Option<&str>) -> Maker {
        let mut command = child::command("unnamed::maker", home, len as u64);
        engine.tell(&mut command);
        let orders = if failpoint.is_some() { Stdio::null() } else { Stdio::piped() };
        command.stdin(orders).env("MILLRACE_FAILPOINT", failpoint.unwrap_or("none"));
        let mut child = command.spawn().unwrap();
        let steps = Box::new(child::reports(&mut child));
        Maker { child, steps }
    }

    fn reach(&mut self, step: &str) {
        assert!(self.steps.any(|(word, _)| word == step), "it does not come to {step}");
    }

    fn go_on(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn finish(mut self) {
        drop(self.child.stdin.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Maker {
    /// Ends the child of a failed test.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A home with an empty volume.
fn home(engine: &Engine) -> (tempfile::TempDir, Config) {
    let home = tempfile::tempdir().unwrap();
    let config = config(engine.config());
    Datafs::open(home.path(), &config).unwrap().volume_create(&"v".parse().unwrap()).unwrap();
    (home, config)
}

/// Checks the state that a maker has left; `is_there` says whether its file must have a name or must not.
fn assert_whole(home: &Path, config: &Config, len: usize, is_there: Option<bool>, what: &str) {
    let (datafs, view) = open(home, config);
    let named = !names(&view).is_empty();
    assert!(is_there.is_none_or(|is_there| is_there == named), "{what}: there: {named}");
    if named {
        assert!(view.read_file("f").unwrap() == contents(len), "{what}: it is not whole");
    }
    // On a server the process counts as dead once its lease has expired.
    let until = Instant::now() + PATIENCE;
    while files(&datafs) != u64::from(named) || (objects(home) > 0) != (named && len > 4_096) {
        assert!(Instant::now() < until, "{what}: {} files, {} objects", files(&datafs), objects(home));
        std::thread::sleep(child::POLL * 20);
        datafs.gc().unwrap();
    }
    assert_eq!(names(&view), if named { vec!["f"] } else { vec![] }, "{what}");
    assert_sound(&datafs, what);
}

fn killed_at(engine: &Engine, step: &str, is_there: Option<bool>) {
    let (home, config) = home(engine);
    let mut maker = Maker::start(engine, home.path(), SIZES[2], None);
    for to in ["made", "named", "synced"] {
        maker.reach(to);
        if to == step {
            break;
        }
        maker.go_on();
    }
    maker.kill();
    assert_whole(home.path(), &config, SIZES[2], is_there, step);
}

fn killed_at_each_step(fresh: impl Fn() -> Option<Engine>) {
    // On a server each of them waits for a lease.
    std::thread::scope(|scope| {
        for (step, is_there) in [("made", Some(false)), ("named", None), ("synced", Some(true))] {
            let Some(engine) = fresh() else { return };
            scope.spawn(move || killed_at(&engine, step, is_there));
        }
    });
}

#[test]
fn one_that_is_killed_leaves_a_whole_file_or_none() {
    killed_at_each_step(|| Some(Engine::sqlite()));
}

#[test]
fn one_that_is_killed_leaves_a_whole_file_or_none_on_postgres() {
    killed_at_each_step(Engine::postgres);
}

#[test]
fn at_whatever_line_it_is_killed() {
    if !cfg!(debug_assertions) {
        // Release builds have no failpoints.
        return;
    }
    let engine = Engine::sqlite();
    let places = ["group-", "object-", "pack-", "unnamed-", "write-"];
    let failpoints = failpoints::all();
    let failpoints = failpoints.iter().filter(|name| places.iter().any(|place| name.starts_with(place)));
    let (mut killed, mut came_to) = (0, Vec::new());
    for (i, failpoint) in failpoints.enumerate() {
        for pass in 1..=3 {
            let len = SIZES[(i + pass) % SIZES.len()];
            let what = format!("{failpoint} the {pass}. time, {len} bytes");
            let (home, config) = home(&engine);
            let place = format!("{failpoint}:{pass}");
            let mut maker = Maker::start(&engine, home.path(), len, Some(&place));
            let said: Vec<String> = maker.steps.by_ref().map(|(word, _)| word).collect();
            let status = maker.child.wait().unwrap();
            let said = |step: &str| said.iter().any(|word| word == step);
            if status.success() {
                assert!(said("synced"), "{what}");
                let (_datafs, view) = open(home.path(), &config);
                assert!(view.read_file("f").unwrap() == contents(len), "{what}");
                continue;
            }
            assert_eq!(status.signal(), Some(9), "{what}: it failed by itself");
            killed += 1;
            came_to.push(failpoint.clone());
            let is_there = if said("synced") { Some(true) } else { None };
            assert_whole(home.path(), &config, len, is_there, &what);
        }
    }
    came_to.dedup();
    for place in places {
        assert!(came_to.iter().any(|name| name.starts_with(place)), "none at {place}: {came_to:?}");
    }
    println!("{killed} kills at {} places", came_to.len());
}

fn others_collect_and_do_not_take_it(engine: &Engine) {
    let (home, config) = home(engine);
    let (datafs, view) = open(home.path(), &config);
    let len = SIZES[2];
    let mut maker = Maker::start(engine, home.path(), len, None);
    maker.reach("made");
    assert_eq!((names(&view).len(), files(&datafs)), (0, 1));
    // The collector asks the maker's process about this file, and the process answers that it does not use it.
    view.write_file("removed", &contents(10_000)).unwrap();
    view.remove_file("removed").unwrap();
    let until = Instant::now() + PATIENCE;
    while datafs.gc().unwrap().inodes == 0 {
        assert!(Instant::now() < until, "it does not answer");
        std::thread::sleep(child::POLL);
    }
    datafs.gc().unwrap();
    assert_eq!((names(&view).len(), files(&datafs), objects(home.path())), (0, 1, 1));
    assert_sound(&datafs, "while it has no name");
    datafs.snapshot_create(&"v".parse().unwrap(), &"before".parse().unwrap()).unwrap();
    maker.go_on();
    maker.reach("named");
    // A process that finds the name finds the whole file, before any sync.
    assert!(view.read_file("f").unwrap() == contents(len));
    maker.go_on();
    maker.reach("synced");
    datafs.gc().unwrap();
    assert!(view.read_file("f").unwrap() == contents(len));
    // A removal by another process makes it an unlinked file, not an unnamed one.
    let node = view.stat("f").unwrap().node;
    view.remove_file("f").unwrap();
    maker.finish();
    let until = Instant::now() + PATIENCE;
    while files(&datafs) > 0 {
        assert!(Instant::now() < until, "what is unlinked is not freed");
        std::thread::sleep(child::POLL);
        datafs.gc().unwrap();
    }
    let before = datafs.view(&"v@before".parse().unwrap()).unwrap();
    assert!(names(&before).is_empty());
    let past = Node { snapshot: before.root().snapshot, ..node };
    assert!(before.open(past, OpenFlags::READ).unwrap_err().is_not_found());
    drop(before);
    datafs.snapshot_delete(&"v".parse().unwrap(), &"before".parse().unwrap()).unwrap();
    datafs.gc().unwrap();
    assert_eq!(objects(home.path()), 0);
    assert_sound(&datafs, "in the end");
}

#[test]
fn other_processes_leave_it_and_find_it_whole() {
    others_collect_and_do_not_take_it(&Engine::sqlite());
}

#[test]
fn other_processes_leave_it_and_find_it_whole_on_postgres() {
    let Some(engine) = Engine::postgres() else { return };
    others_collect_and_do_not_take_it(&engine);
}

fn racers_for_one_name(engine: &Engine) {
    const RACERS: usize = 4;
    let (home, config) = home(engine);
    let opened: Vec<_> = (0..2).map(|_| open(home.path(), &config)).collect();
    for round in 0..10 {
        let name = format!("f{round}");
        let won: Vec<usize> = std::thread::scope(|scope| {
            let race = |racer: usize| {
                let (view, name) = (&opened[racer % 2].1, &name);
                move || {
                    let file = make(view);
                    file.write_at(0, &vec![racer as u8; 5_000]).unwrap();
                    match file.link(view.root(), name.as_ref()) {
                        Ok(attr) => assert_eq!((attr.nlink, attr.size), (1, 5_000)),
                        Err(millrace_datafs::Error::Exists { .. }) => return None,
                        Err(error) => panic!("{error}"),
                    }
                    Some(racer)
                }
            };
            let racers: Vec<_> = (0..RACERS).map(|racer| scope.spawn(race(racer))).collect();
            racers.into_iter().filter_map(|racer| racer.join().unwrap()).collect()
        });
        assert_eq!(won.len(), 1, "round {round}");
        assert!(opened[0].1.read_file(&name).unwrap() == vec![won[0] as u8; 5_000]);
    }
    // The losers have left nothing behind, not even garbage for a collection.
    assert_eq!(files(&opened[0].0), 10);
    assert_sound(&opened[0].0, "after the races");
}

#[test]
fn of_many_one_gets_the_name() {
    racers_for_one_name(&Engine::sqlite());
}

#[test]
fn of_many_one_gets_the_name_on_postgres() {
    let Some(engine) = Engine::postgres() else { return };
    racers_for_one_name(&engine);
}
