//! Benchmark: a directory with a million entries. Measures listing time, the memory of the mount, and reopening
//! the volume.

use std::fs::File;
use std::time::Duration;

use millrace_datafs::{OpenFlags, Owner, VolumeSpec};

use crate::Asked;
use crate::figure::{Figure, Kind, median};
use crate::place::{Place, Times, drop_caches, timed, volume};

const MIB: f64 = (1 << 20) as f64;
/// Wait after dropping the kernel's caches: it frees millions of entries in the background, on both cores.
const FREEING: Duration = Duration::from_secs(1);

pub(crate) const FIGURES: &[(&str, &str)] = &[
    ("mount_idle", "memory of the process of a mount nobody uses; the control is the limit"),
    ("dir_1m_first", "first entry of a folder of 10^6 files (10^5 under --quick), entries dropped"),
    ("dir_1m_all", "all of its entries"),
    ("dir_1m_memory", "memory of the mount after that; the control is the limit"),
    ("reopen_1m", "opening the volume of that folder, up to the root's attributes; the control is the limit"),
];

pub(crate) fn run(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let place = Place::new();
    {
        let mounted = place.mount("", &[]);
        std::fs::metadata(mounted.at()).unwrap();
        report(memory("datafs/mount_idle", mounted.resident_bytes(), 40.0));
    }
    if !FIGURES[1..].iter().any(|(name, _)| asked.wants(name)) {
        return;
    }
    let count = asked.sized(1_000_000, 100_000);
    {
        let datafs = place.datafs();
        let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
        let owner = Owner { uid: 0, gid: 0 };
        let folder = view.mkdir(view.root(), "huge".as_ref(), 0o755, owner).unwrap().node;
        let plain = place.plain().join("huge");
        std::fs::create_dir(&plain).unwrap();
        for i in 0..count {
            let name = format!("file-{i}");
            view.create(folder, name.as_ref(), 0o644, owner, OpenFlags::READ_WRITE).unwrap();
            File::create_new(plain.join(name)).unwrap();
        }
    }
    let (opened, _datafs) = timed(|| {
        let datafs = place.datafs();
        let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
        view.getattr(view.root()).unwrap();
        datafs
    });
    let (mut first, mut all) = (Times::default(), Times::default());
    let mut resident_bytes = 0;
    for _ in 0..asked.sized(5, 1) {
        // A new mount has nothing of the directory in its caches.
        let mounted = place.mount("", &[]);
        drop_caches(2);
        std::thread::sleep(FREEING);
        let ours = list(&mounted.at().join("huge"), count);
        let control = list(&place.plain().join("huge"), count);
        first.add(ours.0, control.0);
        all.add(ours.1, control.1);
        resident_bytes = mounted.resident_bytes().max(resident_bytes);
    }
    let against = "the same on the local file system";
    for (name, times) in [("datafs/dir_1m_first", first), ("datafs/dir_1m_all", all)] {
        let (mut ours, mut control) = times.pair();
        let (value, control) = (median(&mut ours) * 1e3, median(&mut control) * 1e3);
        report(Figure { name, kind: Kind::Time, unit: "ms", value, control, against });
    }
    report(memory("datafs/dir_1m_memory", resident_bytes, 512.0));
    report(Figure {
        name: "datafs/reopen_1m",
        kind: Kind::Time,
        unit: "ms",
        value: opened.as_secs_f64() * 1e3,
        control: 1e3,
        against: "the limit",
    });
}

fn memory(name: &'static str, bytes: u64, limit_mib: f64) -> Figure {
    let value = bytes as f64 / MIB;
    Figure { name, kind: Kind::Time, unit: "MiB", value, control: limit_mib, against: "the limit" }
}

/// Times until the first entry and until the last.
fn list(folder: &std::path::Path, count: usize) -> (Duration, Duration) {
    let (all, (first, entries)) = timed(|| {
        let (first, mut entries) = timed(|| {
            let mut entries = std::fs::read_dir(folder).unwrap();
            entries.next().unwrap().unwrap();
            entries
        });
        (first, entries.by_ref().map(Result::unwrap).count() + 1)
    });
    assert_eq!(entries, count);
    (first, all)
}
