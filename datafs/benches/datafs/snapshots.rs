//! Benchmark: the time to make a snapshot, with an increasing number of files in the volume.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::time::Duration;

use millrace_datafs::{Node, OpenFlags, Owner, SetAttr, View, VolumeSpec};

use crate::Asked;
use crate::figure::{Figure, Kind};
use crate::place::{Place, timed, volume};

const SNAPSHOTS: usize = 200;

pub(crate) const FIGURES: &[(&str, &str)] = &[
    ("snapshot_p99_1e3", "99th percentile of 200 snapshots, a change before each, at 10^3 files"),
    ("snapshot_p99_1e5", "at 10^5"),
    ("snapshot_p99_1e6", "at 10^6 (not under --quick)"),
];

pub(crate) fn run(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let place = Place::new();
    let datafs = place.datafs();
    let view = datafs.view(&VolumeSpec::live(volume())).unwrap();
    let control = File::create_new(place.plain().join("synced")).unwrap();
    let mut made = Made { folder: view.root(), files: 0, last: view.root() };
    let sizes = [("datafs/snapshot_p99_1e3", 1_000), ("datafs/snapshot_p99_1e5", 100_000)];
    let largest = (!asked.quick).then_some(("datafs/snapshot_p99_1e6", 1_000_000));
    for (name, files) in sizes.into_iter().chain(largest) {
        if !asked.wants(&name[7..]) {
            continue;
        }
        made.grow(&view, files);
        view.sync().unwrap();
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for i in 0..SNAPSHOTS {
            let change = SetAttr { mode: Some(0o600 + i as u32 % 2), ..SetAttr::default() };
            view.setattr(made.last, &change).unwrap();
            let snapshot = format!("s{files}-{i}").parse().unwrap();
            ours.push(timed(|| datafs.snapshot_create(&volume(), &snapshot).unwrap()).0);
            theirs.push(
                timed(|| control.write_all_at(&[i as u8; 4096], 0).and_then(|()| control.sync_all())).0,
            );
        }
        report(Figure {
            name,
            kind: Kind::Time,
            unit: "ms",
            value: p99(&mut ours),
            control: p99(&mut theirs),
            against: "4 KiB written and fsynced on the local file system, 99th percentile",
        });
    }
}

fn p99(times: &mut [Duration]) -> f64 {
    times.sort();
    times[times.len() * 99 / 100].as_secs_f64() * 1e3
}

/// The files made so far, a thousand in each folder.
struct Made {
    folder: Node,
    files: usize,
    last: Node,
}

impl Made {
    fn grow(&mut self, view: &View, files: usize) {
        let owner = Owner { uid: 0, gid: 0 };
        while self.files < files {
            if self.files.is_multiple_of(1_000) {
                let name = format!("d{}", self.files / 1_000);
                self.folder = view.mkdir(view.root(), name.as_ref(), 0o755, owner).unwrap().node;
            }
            let name = format!("f{}", self.files);
            let made = view.create(self.folder, name.as_ref(), 0o644, owner, OpenFlags::READ_WRITE);
            self.last = made.unwrap().0.node;
            self.files += 1;
        }
    }
}
