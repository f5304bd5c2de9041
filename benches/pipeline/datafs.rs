//! Sequential reads through a mount against the local file system.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

use millrace_datafs::mount::{self, MountOptions};
use millrace_datafs::{Config, Datafs, VolumeSpec};

use crate::figure::{Figure, Kind, in_turn, timed};

/// Size of the file that is read.
const BYTES: u64 = 1 << 30;
/// Size of one read.
const BLOCK: usize = 1 << 20;
const ROUNDS: usize = 5;

pub(crate) fn figures() -> Vec<Figure> {
    if let Err(reason) = mount::can_mount() {
        eprintln!("datafs: skipped, {reason}");
        return Vec::new();
    }
    let dir = tempfile::tempdir_in(std::env::current_dir().unwrap().join("target")).unwrap();
    let plain = dir.path().join("plain");
    let mut block = vec![0_u8; BLOCK];
    let mut file = File::create(&plain).unwrap();
    let datafs = Datafs::open(&dir.path().join("home"), &Config::default()).unwrap();
    let (volume, snapshot) = ("v".parse().unwrap(), "s".parse().unwrap());
    datafs.volume_create(&volume).unwrap();
    let live = datafs.view(&VolumeSpec { volume: volume.clone(), snapshot: None }).unwrap();
    let mut staged = live.stage().unwrap();
    for i in 0..BYTES / BLOCK as u64 {
        // Bytes that no layer can take for a hole.
        block.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at as u64 ^ i).wrapping_mul(31) as u8);
        file.write_all(&block).unwrap();
        staged.write_all(&block).unwrap();
    }
    file.sync_all().unwrap();
    live.publish(millrace_datafs::Publish::new().file("big", staged.finish().unwrap())).unwrap();
    datafs.snapshot_create(&volume, &snapshot).unwrap();
    let view = datafs.view(&VolumeSpec { volume, snapshot: Some(snapshot) }).unwrap();
    let mut figures = Vec::new();
    for (name, passthrough) in [("datafs/read_seq_1m", true), ("datafs/read_seq_1m_daemon", false)] {
        let at = dir.path().join("mount");
        let options = MountOptions { passthrough, ..MountOptions::default() };
        let mounted = mount::mount(view.clone(), &at, options).unwrap();
        let ours = at.join("big");
        let (a, b) = in_turn(ROUNDS, || read(&ours), || read(&plain));
        mounted.unmount().unwrap();
        let rate = |seconds: f64| BYTES as f64 / seconds / f64::from(1 << 30);
        figures.push(Figure {
            name,
            kind: Kind::Rate,
            unit: "GiB/s",
            value: rate(a),
            control: rate(b),
            against: "the same file on the local file system, both warm",
        });
    }
    figures
}

fn read(path: &Path) -> Duration {
    let mut buffer = vec![0_u8; BLOCK];
    let (elapsed, total) = timed(|| {
        let mut file = File::open(path).unwrap();
        let mut total = 0;
        loop {
            match file.read(&mut buffer).unwrap() {
                0 => break total,
                n => total += n as u64,
            }
        }
    });
    assert_eq!(total, BYTES);
    elapsed
}
