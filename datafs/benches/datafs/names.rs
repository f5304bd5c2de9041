//! Names alone, in the shape of mdtest: a tree with branching 6 and depth 4, 8 files a folder.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Asked;
use crate::figure::{Figure, timed};
use crate::place::{Place, Times, drop_caches, rate};

const BRANCHING: usize = 6;
const FILES: usize = 8;

pub(crate) const FIGURES: &[(&str, &str)] = &[
    ("create", "1,555 folders with 8 empty files each, one thread (SQLite)"),
    ("stat", "each of the files, the kernel's entries dropped before"),
    ("list", "all folders read, entries per second, dropped likewise"),
    ("remove", "everything unlinked"),
];

pub(crate) fn run(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let place = Place::new();
    let mounted = place.mount("", &[]);
    let depth = asked.sized(4, 3);
    let mut phases: [Times; 4] = Default::default();
    let mut items = [0; 4];
    for round in 0..asked.sized(3, 1) {
        let name = format!("tree-{round}");
        nix::unistd::sync();
        let ours = phases_of(&mounted.at().join(&name), depth);
        nix::unistd::sync();
        let control = phases_of(&place.plain().join(&name), depth);
        for phase in 0..4 {
            items[phase] = ours[phase].1;
            phases[phase].add(ours[phase].0, control[phase].0);
        }
    }
    let names = ["datafs/create", "datafs/stat", "datafs/list", "datafs/remove"];
    for ((name, items), times) in names.into_iter().zip(items).zip(phases) {
        let unit = if name == "datafs/list" { "entries/s" } else { "ops/s" };
        report(rate(name, unit, items as f64, times.pair(), "the same on the local file system"));
    }
}

/// Time and number of items of each phase.
fn phases_of(root: &Path, depth: usize) -> [(Duration, usize); 4] {
    let mut folders = vec![root.to_owned()];
    let mut last = 0..1;
    for _ in 0..depth {
        let next = folders.len();
        for parent in last {
            for i in 0..BRANCHING {
                folders.push(folders[parent].join(format!("dir.{i}")));
            }
        }
        last = next..folders.len();
    }
    let files: Vec<PathBuf> =
        folders.iter().flat_map(|folder| (0..FILES).map(|i| folder.join(format!("file.{i}")))).collect();
    let all = folders.len() + files.len();
    let (create, ()) = timed(|| {
        for (i, folder) in folders.iter().enumerate() {
            fs::create_dir(folder).unwrap();
            for file in &files[i * FILES..(i + 1) * FILES] {
                File::create_new(file).unwrap();
            }
        }
    });
    drop_caches(2);
    let (stat, ()) = timed(|| {
        for file in &files {
            assert!(fs::symlink_metadata(file).unwrap().is_file());
        }
    });
    drop_caches(2);
    let (list, entries) = timed(|| {
        folders.iter().map(|folder| fs::read_dir(folder).unwrap().map(Result::unwrap).count()).sum::<usize>()
    });
    assert_eq!(entries, all - 1);
    let (remove, ()) = timed(|| {
        for file in &files {
            fs::remove_file(file).unwrap();
        }
        for folder in folders.iter().rev() {
            fs::remove_dir(folder).unwrap();
        }
    });
    [(create, all), (stat, files.len()), (list, entries), (remove, all)]
}
