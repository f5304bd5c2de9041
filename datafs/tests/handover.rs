//! Mount handover: servers of a mount are killed or replaced while programs use it.
//!
//! The test process is the holder and the programs; each server is a child process. A test kills
//! `MILLRACE_HANDOVER_KILLS` servers, by default [`KILLS`].

mod clients;
mod live;
mod planned;
mod snapshots;

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use millrace_datafs::mount::{self, End, Holder, HolderOptions, MountOptions};
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
    holder: Option<Holder>,
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
        let mut held = Held { dir, datafs, holder: None };
        held.start_holder();
        Some(held)
    }

    fn start_holder(&mut self) {
        self.holder = Some(Holder::start(&self.socket(), &HolderOptions::default()).unwrap());
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("holder.sock")
    }

    fn at(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// Starts a server, and returns once it serves.
    fn server(&self, spec: &str) -> Server {
        let mut process = child::command("handover::server", &self.dir.path().join("home"), 0)
            .env(SPEC, spec)
            .env(SOCKET, self.socket())
            .env(AT, self.at())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut said = child::reports(&mut process);
        assert!(said.any(|(word, _)| word == "serves"), "a server did not begin to serve");
        Server { process, _said: Box::new(said) }
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
        End::Unmounted => mount.join().unwrap(),
    }
}

/// A child that serves.
struct Server {
    process: Child,
    /// Its output stays open, so that it can end without an error.
    _said: Box<dyn Iterator<Item = (String, u64)>>,
}

impl Server {
    fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Waits for the end of a server that nobody kills.
    fn ends(mut self) {
        assert!(self.process.wait().unwrap().success());
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
