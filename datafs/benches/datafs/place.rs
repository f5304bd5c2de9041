//! Benchmark fixture: a folder on the disk under test, with a home for volumes and a folder of plain files.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use millrace_datafs::{Config, Datafs, Name};
use tempfile::TempDir;

use crate::figure::{Figure, Kind, median};
use crate::served::Served;

/// The measured volume.
pub(crate) const VOLUME: &str = "v";

pub(crate) struct Place {
    dir: TempDir,
    config: Config,
}

impl Place {
    /// A new home with an empty volume.
    pub(crate) fn new() -> Place {
        Place::with(Config::default())
    }

    pub(crate) fn with(config: Config) -> Place {
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        fs::create_dir(dir.path().join("plain")).unwrap();
        let place = Place { dir, config };
        place.datafs().volume_create(&volume()).unwrap();
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn home(&self) -> PathBuf {
        self.path("home")
    }

    /// A folder of the local file system.
    pub(crate) fn plain(&self) -> PathBuf {
        self.path("plain")
    }

    pub(crate) fn datafs(&self) -> Datafs {
        Datafs::open(&self.home(), &self.config).unwrap()
    }

    /// Deletes the objects of removed files at once.
    pub(crate) fn collect(&self) {
        let config = Config { garbage_grace_ms: 0, ..self.config.clone() };
        Datafs::open(&self.home(), &config).unwrap().gc().unwrap();
    }

    pub(crate) fn snapshot(&self, name: &str) {
        self.datafs().snapshot_create(&volume(), &name.parse().unwrap()).unwrap();
    }

    /// Mounts the live volume, or with `@NAME` a snapshot, in a child process.
    pub(crate) fn mount(&self, spec: &str, options: &[&str]) -> Served {
        let spec = format!("{VOLUME}{spec}");
        Served::start(&self.home(), &self.config, &spec, &self.path("mnt"), options)
    }
}

pub(crate) fn volume() -> Name {
    VOLUME.parse().unwrap()
}

/// Drops the kernel's caches: `2` entries and inodes, `3` also pages. False without permission.
pub(crate) fn drop_caches(what: u8) -> bool {
    nix::unistd::sync();
    File::options()
        .write(true)
        .open("/proc/sys/vm/drop_caches")
        .and_then(|mut file| write!(file, "{what}"))
        .is_ok()
}

/// Time of one call.
pub(crate) fn timed<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let started = Instant::now();
    let result = work();
    (started.elapsed(), result)
}

/// Fills a block with bytes that no layer can compress or store as a hole.
pub(crate) fn fill(block: &mut [u8], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for chunk in block.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        chunk.copy_from_slice(&state.to_le_bytes()[..chunk.len()]);
    }
}

/// A rate per second: `amount` divided by the median time, of ours and of the control.
pub(crate) fn rate(
    name: &'static str,
    unit: &'static str,
    amount: f64,
    (mut ours, mut control): (Vec<f64>, Vec<f64>),
    against: &'static str,
) -> Figure {
    let (value, control) = (amount / median(&mut ours), amount / median(&mut control));
    Figure { name, kind: Kind::Rate, unit, value, control, against }
}

/// Times of ours and of the control, measured alternately.
#[derive(Debug, Default)]
pub(crate) struct Times {
    ours: Vec<f64>,
    control: Vec<f64>,
}

impl Times {
    pub(crate) fn add(&mut self, ours: Duration, control: Duration) {
        self.ours.push(ours.as_secs_f64());
        self.control.push(control.as_secs_f64());
    }

    pub(crate) fn pair(self) -> (Vec<f64>, Vec<f64>) {
        (self.ours, self.control)
    }
}
