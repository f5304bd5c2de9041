//! Journeys through the real kernel mount: tests of a volume as programs see it.
//!
//! Where mounting is not permitted, each journey prints the reason in one line and ends.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod closing;
mod coherence;
mod contents;
mod direct;
mod extended;
mod full;
mod lifecycle;
pub(crate) mod locking;
mod names;
mod on_postgres;
mod opening;
mod options;
mod permissions;
mod semantics;
mod sharing;
mod streaming;
mod unlinked;
mod unprivileged;
mod watching;
mod writers;
mod written_back;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use millrace_datafs::Datafs;
use millrace_datafs::mount::{self, Mount, MountOptions};
use tempfile::TempDir;

/// A home with one volume, `data`, and mount points.
struct Home {
    dir: TempDir,
    datafs: Datafs,
}

impl Home {
    /// `None`, and the reason on standard error, where mounting is not permitted.
    fn new() -> Option<Home> {
        if let Err(reason) = mount::can_mount() {
            millrace_testing::skip(millrace_testing::Need::Fuse, reason);
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(&dir.path().join("home"), &on_postgres::config()).unwrap();
        datafs.volume_create(&"data".parse().unwrap()).unwrap();
        Some(Home { dir, datafs })
    }

    fn again(&self) -> Datafs {
        Datafs::open(&self.dir.path().join("home"), &on_postgres::config()).unwrap()
    }

    fn mount(&self, spec: &str) -> Mount {
        mount_of(&self.datafs, spec, &self.at(spec))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(format!("mnt-{name}"))
    }

    fn snapshot(&self, name: &str) {
        self.datafs.snapshot_create(&"data".parse().unwrap(), &name.parse().unwrap()).unwrap();
    }
}

fn mount_of(datafs: &Datafs, spec: &str, at: &Path) -> Mount {
    let view = datafs.view(&spec.parse().unwrap()).unwrap();
    mount::mount(view, at, MountOptions::default()).unwrap()
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_add(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// Polls until `done`; panics after ten seconds.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(crate::child::POLL);
    }
}
