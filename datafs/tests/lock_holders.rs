//! Tests of lock release after a crash: three processes contend for the locks of one file, and one is killed
//! while it holds them. The others get the locks then and not before, and none waits forever.
//!
//! The processes use the library, or a mount each, on both metadata engines. They note the holder of each lock
//! on a board beside the volume.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use millrace_datafs::{
    Config, Datafs, FileLock, LOCK_END_MAX, LockFamily, LockOwner, Locking, Node, View, mount,
};

use crate::child;
use crate::engine::{self, Engine};
use crate::mount_journeys::locking::{fcntl, flock};

const PLACES: u64 = 3;
/// Times that each contender takes its lock.
const ROUNDS: u64 = 15;
/// Number of killed holders.
const DEATHS: u64 = 3;
/// Lease time on a server; a live process renews its lease at a third of it.
const LEASE: Duration = Duration::from_secs(6);
/// Longest wait of a test on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);
const FAMILIES: [LockFamily; 2] = [LockFamily::Fcntl, LockFamily::Flock];

fn config() -> Config {
    Config { session_lease_ms: LEASE.as_millis() as u64, ..engine::inherited() }
}

/// Access to the locked file.
enum Access {
    Mount(File),
    Library { view: View, node: Node, _open: Datafs },
}

impl Access {
    /// The mount of a place if there is one, otherwise the library.
    fn open(dir: &Path, place: u64) -> Access {
        let at = mount_point(dir, place);
        if at.exists() {
            return Access::Mount(File::options().read(true).write(true).open(at.join("file")).unwrap());
        }
        let datafs = Datafs::open(&dir.join("home"), &config()).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        let node = view.stat("file").unwrap().node;
        Access::Library { view, node, _open: datafs }
    }

    fn lock(&self, family: LockFamily) {
        match self {
            Access::Mount(file) if family == LockFamily::Fcntl => {
                fcntl(file, libc::F_WRLCK, 0, 0, true).unwrap();
            }
            Access::Mount(file) => flock(file, libc::LOCK_EX).unwrap(),
            Access::Library { view, node, .. } => {
                while let Locking::Blocked(_) = view.lock(*node, whole(family)).unwrap() {
                    std::thread::park_timeout(Duration::from_millis(1));
                }
            }
        }
    }

    fn unlock(&self, family: LockFamily) {
        match self {
            Access::Mount(file) if family == LockFamily::Fcntl => {
                fcntl(file, libc::F_UNLCK, 0, 0, false).unwrap();
            }
            Access::Mount(file) => flock(file, libc::LOCK_UN).unwrap(),
            Access::Library { view, node, .. } => {
                assert!(view.unlock(*node, whole(family).owner, 0, LOCK_END_MAX).unwrap());
            }
        }
    }
}

fn whole(family: LockFamily) -> FileLock {
    let owner = LockOwner { family, id: std::process::id().into() };
    FileLock { owner, exclusive: true, start: 0, end: LOCK_END_MAX, pid: std::process::id() }
}

fn mount_point(dir: &Path, place: u64) -> PathBuf {
    dir.join(format!("mnt-{place}"))
}

/// The file with the process ID of a mount.
fn serving(dir: &Path, place: u64) -> PathBuf {
    dir.join(format!("serving-{place}"))
}

/// The holder of the lock of each family, as two process IDs: the holder's, and that of the process whose end
/// releases the lock. The second is its mount or the holder itself. Both are 0 for a free lock.
struct Board {
    file: File,
    own: [u32; 2],
}

impl Board {
    fn open(dir: &Path, place: u64) -> Board {
        let file =
            File::options().read(true).write(true).create(true).truncate(false).open(dir.join("board"));
        let own = std::process::id();
        let serving = fs::read_to_string(serving(dir, place)).map_or(own, |pid| pid.parse().unwrap());
        Board { file: file.unwrap(), own: [own, serving] }
    }

    fn get(&self, family: LockFamily) -> [u32; 2] {
        let mut bytes = [0; 8];
        let _ = self.file.read_at(&mut bytes, family as u64 * 8).unwrap();
        let (numbers, _) = bytes.as_chunks();
        [0, 1].map(|i| u32::from_le_bytes(numbers[i]))
    }

    fn set(&self, family: LockFamily, who: [u32; 2]) {
        let bytes = who.map(u32::to_le_bytes);
        self.file.write_all_at(bytes.as_flattened(), family as u64 * 8).unwrap();
    }

    /// Notes a lock that this process has just got. The previous holder must have released it, or be dead or
    /// dying.
    fn take(&self, family: LockFamily) {
        let before = self.get(family);
        let is_free = before == [0, 0] || before.into_iter().any(is_dying);
        assert!(is_free, "{family:?} was taken from {before:?}, which live");
        self.set(family, self.own);
    }

    fn leave(&self, family: LockFamily) {
        assert_eq!(self.get(family), self.own, "{family:?} was taken by another");
        self.set(family, [0, 0]);
    }
}

/// Whether a process is exiting. It sets that flag before it closes any file.
fn is_dying(pid: u32) -> bool {
    const PF_EXITING: u64 = 4;
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { return true };
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[6].parse::<u64>().unwrap() & PF_EXITING != 0
}

/// The child that serves a mount, until its standard input ends or it is killed.
#[test]
fn server() {
    let Some((dir, place)) = child::task() else { return };
    let datafs = Datafs::open(&dir.join("home"), &config()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let mount = mount::mount(view, &mount_point(&dir, place), mount::MountOptions::default()).unwrap();
    fs::write(serving(&dir, place), std::process::id().to_string()).unwrap();
    println!("mounted {place}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
    mount.unmount().unwrap();
}

/// The child that takes both locks, and keeps them until it is killed.
#[test]
fn holder() {
    let Some((dir, place)) = child::task() else { return };
    let (access, board) = (Access::open(&dir, place), Board::open(&dir, place));
    for family in FAMILIES {
        access.lock(family);
        board.take(family);
    }
    println!("holds {}", std::process::id());
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink()).unwrap();
}

/// The child that takes one of the locks again and again.
#[test]
fn contender() {
    let Some((dir, argument)) = child::task() else { return };
    let family = FAMILIES[(argument % 2) as usize];
    let (access, board) = (Access::open(&dir, argument / 2), Board::open(&dir, argument / 2));
    println!("wants {argument}");
    for round in 0..ROUNDS {
        access.lock(family);
        board.take(family);
        println!("held {round}");
        board.leave(family);
        access.unlock(family);
    }
    println!("done {argument}");
}

/// A child and its reports.
struct Running {
    what: &'static str,
    child: Child,
    said: Receiver<(String, u64)>,
}

impl Running {
    fn start(what: &'static str, mut command: Command) -> Running {
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let (sender, said) = channel();
        let reports = child::reports(&mut child);
        std::thread::spawn(move || reports.for_each(|report| drop(sender.send(report))));
        Running { what, child, said }
    }

    /// Waits until the child reports a word.
    fn says(&self, word: &str) {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.said.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((said, _)) if said == word => return,
                Ok(_) => {}
                Err(error) => panic!("{} does not say that it {word}: {error}", self.what),
            }
        }
    }

    fn end(mut self) {
        drop(self.child.stdin.take());
        let status = self.child.wait().unwrap();
        assert!(status.success(), "{} has failed: {status}", self.what);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A home with a volume, and the servers of its mounts.
struct Scene {
    servers: Vec<Option<Running>>,
    dir: tempfile::TempDir,
    engine: Engine,
}

impl Scene {
    fn new(engine: Engine, mounted: bool) -> Scene {
        let dir = tempfile::tempdir().unwrap();
        let mut scene = Scene { servers: Vec::new(), dir, engine };
        let mut maker = scene.child("maker", "lock_holders::maker", 0);
        assert!(maker.child.wait().unwrap().success());
        if mounted {
            scene.servers.extend((0..PLACES).map(|_| None));
            (0..PLACES).for_each(|place| scene.serve(place));
        }
        scene
    }

    fn child(&self, what: &'static str, function: &str, argument: u64) -> Running {
        let mut command = child::command(function, self.dir.path(), argument);
        self.engine.tell(&mut command);
        Running::start(what, command)
    }

    fn serve(&mut self, place: u64) {
        let server = self.child("a mount", "lock_holders::server", place);
        server.says("mounted");
        self.servers[place as usize] = Some(server);
    }

    /// Kills a holder; with `with_mount` first kills the mount that holds its locks.
    fn kill(&mut self, place: u64, holder: Running, with_mount: bool) {
        let server = self.servers.get_mut(place as usize).filter(|_| with_mount).and_then(Option::take);
        let had_mount = server.is_some();
        drop(server);
        drop(holder);
        if had_mount {
            mount::umount(&mount_point(self.dir.path(), place)).unwrap();
            self.serve(place);
        }
    }

    /// How long a holder lives, so that a faulty takeover of its lock would happen before.
    fn hold_for(&self) -> Duration {
        if self.engine.is_server() { LEASE * 5 / 4 } else { Duration::from_millis(1_200) }
    }

    fn others_get_what_the_dead_have_held(&mut self, deaths: u64) {
        for death in 0..deaths {
            let place = death % PLACES;
            let holder = self.child("the holder", "lock_holders::holder", place);
            holder.says("holds");
            let others = (0..PLACES).filter(|other| *other != place);
            let contenders: Vec<_> = others
                .flat_map(|other| [2 * other, 2 * other + 1])
                .map(|argument| self.child("one of the others", "lock_holders::contender", argument))
                .collect();
            contenders.iter().for_each(|contender| contender.says("wants"));
            std::thread::sleep(self.hold_for());
            self.kill(place, holder, death % 2 == 0);
            contenders.iter().for_each(|contender| contender.says("done"));
            contenders.into_iter().for_each(Running::end);
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        for (place, server) in self.servers.drain(..).enumerate() {
            drop(server);
            let _ = mount::umount(&mount_point(self.dir.path(), place as u64));
        }
    }
}

/// The child that creates the volume and the file.
#[test]
fn maker() {
    let Some((dir, _)) = child::task() else { return };
    let datafs = Datafs::open(&dir.join("home"), &config()).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    datafs.view(&"v".parse().unwrap()).unwrap().write_file("file", b"locked").unwrap();
}

#[test]
fn others_get_the_locks_of_a_dead_process_through_the_library() {
    Scene::new(Engine::sqlite(), false).others_get_what_the_dead_have_held(DEATHS);
}

#[test]
fn others_get_the_locks_of_a_dead_process_or_mount_through_three_mounts() {
    if let Some(()) = mountable() {
        Scene::new(Engine::sqlite(), true).others_get_what_the_dead_have_held(DEATHS);
    }
}

#[test]
fn others_get_the_locks_of_a_dead_process_through_the_library_on_postgres() {
    let Some(engine) = Engine::postgres() else { return };
    Scene::new(engine, false).others_get_what_the_dead_have_held(1);
}

#[test]
fn others_get_the_locks_of_a_dead_process_or_mount_through_three_mounts_on_postgres() {
    let Some(()) = mountable() else { return };
    let Some(engine) = Engine::postgres() else { return };
    Scene::new(engine, true).others_get_what_the_dead_have_held(2);
}

/// `None`, and the reason on standard error, where mounting is not permitted.
fn mountable() -> Option<()> {
    mount::can_mount().inspect_err(|reason| millrace_testing::skip(millrace_testing::Need::Fuse, reason)).ok()
}
