//! Tests of close-to-open consistency with four processes on one volume. What one process has closed, every
//! other one must find at its next open. They also measure how soon a polling process sees a change.
//!
//! The processes use the library, or a mount each. They note closed generations on a board beside the volume,
//! so the check does not depend on the tested file system.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod access;
mod board;
mod sizes;
mod visibility;

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use millrace_datafs::{Config, Datafs, mount};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use self::access::{Access, Rewrite};
use self::board::Board;
use crate::child;

/// Processes that use the volume.
const PROCESSES: u64 = 4;
/// Files of the volume.
const FILES: u64 = 12;
/// One in this number of operations writes; the others open and read.
const WRITES: u32 = 12;
/// Opens that a test checks.
const CHECKED: u64 = 6_000;
const COUNT: &str = "MILLRACE_OPENS";
const SEED: &str = "MILLRACE_SEED";

/// A number from an environment variable, or a default.
pub(crate) fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

/// A home with a volume, and the servers of its mounts.
struct Scene {
    dir: tempfile::TempDir,
    servers: Vec<Server>,
}

impl Scene {
    fn new() -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(&dir.path().join("home"), &Config::default()).unwrap();
        datafs.volume_create(&"v".parse().unwrap()).unwrap();
        Scene { dir, servers: Vec::new() }
    }

    /// A scene with a mount for each process; `None`, and the reason on standard error, where mounting is not
    /// permitted.
    fn mounted() -> Option<Scene> {
        if let Err(reason) = mount::can_mount() {
            millrace_testing::skip(millrace_testing::Need::Fuse, reason);
            return None;
        }
        let mut scene = Scene::new();
        scene.servers = (0..PROCESSES).map(|id| Server::start(scene.dir.path(), id)).collect();
        Some(scene)
    }

    fn access(&self, id: u64) -> Access {
        access(self.dir.path(), id)
    }

    fn spawn(&self, function: &str) -> Vec<Child> {
        (0..PROCESSES).map(|id| child::spawn(function, self.dir.path(), id)).collect()
    }
}

fn mount_point(dir: &Path, id: u64) -> PathBuf {
    dir.join(format!("mnt-{id}"))
}

/// The mount of a process if there is one, otherwise the library.
fn access(dir: &Path, id: u64) -> Access {
    let at = mount_point(dir, id);
    if at.exists() { Access::mount(&at) } else { Access::library(&dir.join("home")) }
}

/// A process that serves a mount until its standard input ends.
struct Server {
    child: Child,
    at: PathBuf,
    /// Kept open while the child may print.
    _reports: Box<dyn Iterator<Item = (String, u64)>>,
}

impl Server {
    fn start(dir: &Path, id: u64) -> Server {
        let mut command = child::command("close_to_open::server", dir, id);
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let mut reports = child::reports(&mut child);
        let mounted = reports.any(|(word, _)| word == "mounted");
        let server = Server { child, at: mount_point(dir, id), _reports: Box::new(reports) };
        assert!(mounted, "mount {id} did not come up");
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait();
        // A child that has died leaves its mount behind.
        let _ = mount::umount(&self.at);
        if !std::thread::panicking() {
            assert!(status.unwrap().success(), "a mount has failed");
        }
    }
}

/// The child that serves a mount.
#[test]
fn server() {
    let Some((dir, id)) = child::task() else { return };
    let datafs = Datafs::open(&dir.join("home"), &Config::default()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let mount = mount::mount(view, &mount_point(&dir, id), mount::MountOptions::default()).unwrap();
    println!("mounted {id}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    mount.unmount().unwrap();
}

/// The content of a generation of a file; the lengths use all forms of storage.
fn content(generation: u64) -> Vec<u8> {
    let words = [3, 1_024, 40, 9_000][generation as usize % 4];
    generation.to_le_bytes().repeat(words)
}

fn name(file: u64) -> String {
    format!("file-{file}")
}

/// Reads a file after a process has noted a closed generation; panics if the content is older.
fn check_open(access: &Access, board: &Board, file: u64) {
    let closed = board.closed(file);
    let found = access.read(&name(file));
    // The file may also hold a generation begun since, or parts of it. A mount may read zeroes where the file
    // was cut during the read.
    let begun = board.begun(file);
    let stale = match &found {
        None => (begun == closed).then(|| "not found".to_owned()),
        Some(bytes) if begun == closed => (*bytes != content(closed)).then(|| describe(bytes)),
        Some(bytes) => {
            let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
            let fits = |word| word == 0 || (closed..=begun).contains(&word);
            (!words.into_iter().all(fits)).then(|| describe(bytes))
        }
    };
    if let Some(what) = stale {
        panic!("file {file}: closed {closed}, begun {begun}, {what}");
    }
}

fn describe(bytes: &[u8]) -> String {
    let mut words: Vec<u64> =
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
    words.dedup();
    words.truncate(8);
    format!("{} bytes of {words:?}", bytes.len())
}

/// The child: opens and reads, and writes now and then.
#[test]
fn worker() {
    let Some((dir, id)) = child::task() else { return };
    let (access, board) = (access(&dir, id), Board::open(&dir));
    let mut random = StdRng::seed_from_u64(number(SEED, 1) * PROCESSES + id);
    let mut checked = 0;
    while checked < number(COUNT, CHECKED) / PROCESSES {
        let file = random.random_range(0..FILES);
        if random.random_range(0..WRITES) > 0 {
            check_open(&access, &board, file);
            checked += 1;
            continue;
        }
        let Some(turn) = board.try_turn(file) else { continue };
        let generation = board.begin(file);
        let rewrite = Rewrite::ALL[random.random_range(0..Rewrite::ALL.len())];
        access.rewrite(&name(file), &content(generation), rewrite, &format!("draft-{id}"));
        board.close(file, generation);
        drop(turn);
        // The rule holds for a process's own closes, too.
        check_open(&access, &board, file);
    }
    println!("checked {checked}");
}

fn no_open_is_stale(scene: &Scene) {
    let board = Board::create(scene.dir.path(), FILES);
    let first = scene.access(0);
    for file in 0..FILES {
        let generation = board.begin(file);
        first.rewrite(&name(file), &content(generation), Rewrite::Create, "draft");
        board.close(file, generation);
    }
    drop(first);
    let mut checked = 0;
    // Waits for all workers first: a failed one would end the scene, and with it the mounts of the others.
    let workers = scene.spawn("close_to_open::worker");
    let outputs: Vec<_> = workers.into_iter().map(|worker| worker.wait_with_output().unwrap()).collect();
    for output in outputs {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}");
        let line = text.lines().filter_map(|line| line.rsplit_once("checked ")).next_back();
        checked += line.and_then(|(_, count)| count.trim().parse::<u64>().ok()).unwrap();
    }
    let generations: u64 = (0..FILES).map(|file| board.closed(file)).sum();
    println!("{checked} opens checked, {generations} generations");
    assert!(checked >= number(COUNT, CHECKED) / PROCESSES * PROCESSES);
}

/// `MILLRACE_OPENS` sets the number of opens.
#[test]
fn no_open_is_stale_through_the_library() {
    no_open_is_stale(&Scene::new());
}

#[test]
fn no_open_is_stale_through_four_mounts() {
    if let Some(scene) = Scene::mounted() {
        no_open_is_stale(&scene);
    }
}
