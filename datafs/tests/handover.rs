//! Mount handover: servers of a mount are killed or replaced while programs use it.
//!
//! The test process is the holder and the programs; each server is a process of its own. A shell starts the
//! servers: a new process of the test would close the files that the test has open in the mount, and so wait for
//! the server that it is to become. A test kills
//! `MILLRACE_HANDOVER_KILLS` servers, by default [`KILLS`].

mod clients;
mod detached;
mod live;
mod locks;
mod names;
mod planned;
mod snapshots;
mod volumes;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use millrace_datafs::mount::{self, End, HeldMount, Holder, HolderOptions, MountOptions};
use millrace_datafs::{Config, Datafs};
use tempfile::TempDir;

use crate::child;

/// Kills of one test.
const KILLS: u64 = 20;
const SPEC: &str = "MILLRACE_TEST_SPEC";
const SOCKET: &str = "MILLRACE_TEST_SOCKET";
const AT: &str = "MILLRACE_TEST_AT";

fn kills() -> u64 {
    std::env::var("MILLRACE_HANDOVER_KILLS").ok().map_or(KILLS, |kills| kills.parse().unwrap())
}

/// A home with one volume, `data`, a holder, and a mount point.
struct Held {
    dir: TempDir,
    datafs: Datafs,
    holder: RefCell<Option<Holder>>,
    launcher: RefCell<Launcher>,
}

/// The shell that starts servers.
struct Launcher {
    shell: Child,
    said: Box<dyn Iterator<Item = (String, u64)>>,
    /// Exit codes of servers that have ended.
    ended: VecDeque<u64>,
}

impl Launcher {
    fn start(home: &Path) -> Launcher {
        let script = "while read -r line; do eval \"($line; echo ended \\$?) </dev/null &\"; done";
        let mut shell = child::command("handover::server", home, 0);
        let program = std::mem::replace(&mut shell, Command::new("sh"));
        shell.args(["-c", script]);
        shell.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let mut shell = shell.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let said = Box::new(child::reports(&mut shell));
        Launcher { shell, said, ended: VecDeque::new() }
    }

    /// The number that the next report of this word carries.
    fn hear(&mut self, wanted: &str) -> u64 {
        loop {
            let (word, number) = self.said.next().expect("the shell has ended");
            if word == "ended" {
                self.ended.push_back(number);
            }
            if word == wanted {
                return number;
            }
            assert!(wanted != "serves" || word != "ended" || [0, 137].contains(&number), "a server failed");
        }
    }

    /// The exit code of the first server whose end was not told yet.
    fn exit_code(&mut self) -> u64 {
        if self.ended.is_empty() {
            self.hear("ended");
        }
        self.ended.pop_front().unwrap()
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // The end of its input ends the shell.
        drop(self.shell.stdin.take());
        let _ = self.shell.wait();
    }
}

impl Held {
    /// `None`, and the reason on standard error, where mounting is not permitted.
    fn new() -> Option<Held> {
        if let Err(reason) = mount::can_mount() {
            millrace_testing::skip(millrace_testing::Need::Fuse, reason);
            return None;
        }
        if !nix::unistd::geteuid().is_root() {
            millrace_testing::skip(millrace_testing::Need::Root, "only root may keep backing files");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(&dir.path().join("home"), &Config::default()).unwrap();
        datafs.volume_create(&"data".parse().unwrap()).unwrap();
        let launcher = RefCell::new(Launcher::start(&dir.path().join("home")));
        let held = Held { dir, datafs, holder: RefCell::default(), launcher };
        held.start_holder();
        Some(held)
    }

    fn start_holder(&self) {
        *self.holder.borrow_mut() = Some(Holder::start(&self.socket(), &HolderOptions::default()).unwrap());
    }

    fn end_holder(&self) {
        drop(self.holder.borrow_mut().take());
    }

    fn mounts(&self) -> Vec<HeldMount> {
        self.holder.borrow().as_ref().unwrap().mounts()
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("holder.sock")
    }

    fn at(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// Starts a server, and returns once it serves.
    fn server(&self, spec: &str) -> Server<'_> {
        self.server_with(spec, "none")
    }

    /// [`Held::server`] that is killed at a fail point.
    fn server_with(&self, spec: &str, failpoint: &str) -> Server<'_> {
        let quoted = |path: &Path| format!("'{}'", path.display());
        let program = std::env::current_exe().unwrap();
        let line = format!(
            "MILLRACE_FAILPOINT={failpoint} {SPEC}='{spec}' {SOCKET}={} {AT}={} {} --exact handover::server --nocapture --test-threads=1\n",
            quoted(&self.socket()),
            quoted(&self.at()),
            quoted(&program),
        );
        let mut launcher = self.launcher.borrow_mut();
        launcher.shell.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
        Server { pid: launcher.hear("serves"), held: self }
    }

    fn snapshot(&self, name: &str) {
        self.datafs.snapshot_create(&"data".parse().unwrap(), &name.parse().unwrap()).unwrap();
    }

    fn unmount(&self) {
        mount::umount(&self.at()).unwrap();
    }
}

/// One server, in a child process.
#[test]
fn server() {
    let Some((home, _)) = child::task() else { return };
    let of = |name: &str| std::env::var(name).unwrap();
    let (spec, socket, at) = (of(SPEC), of(SOCKET), of(AT));
    let datafs = Datafs::open(&home, &Config::default()).unwrap();
    let view = datafs.view(&spec.parse().unwrap()).unwrap();
    let options = MountOptions { allow_other: true, ..MountOptions::default() };
    let mount = mount::mount_held(view, Path::new(&at), options, Path::new(&socket)).unwrap();
    println!("serves {}", std::process::id());
    match mount.wait() {
        End::HandedOver => std::process::exit(0),
        End::Unmounted | End::Stopped => mount.join().unwrap(),
    }
}

/// A process that serves.
struct Server<'a> {
    pid: u64,
    held: &'a Held,
}

impl Server<'_> {
    fn kill(self) {
        let pid = nix::unistd::Pid::from_raw(self.pid as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        self.was_killed();
    }

    /// Waits for the end of a server that is killed.
    fn was_killed(self) {
        assert_eq!(self.held.launcher.borrow_mut().exit_code(), 137);
    }

    /// Waits for the end of a server that ends by itself.
    fn ends(self) {
        assert_eq!(self.held.launcher.borrow_mut().exit_code(), 0);
    }
}

/// A sequence of numbers that looks random; the same for the same seed.
struct Seeded(u64);

impl Seeded {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
