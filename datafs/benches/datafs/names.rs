//! Benchmark: metadata operations, in the shape of mdtest: a tree with branching 6 and depth 4, 8 files in each
//! directory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_datafs::Config;

use crate::Asked;
use crate::figure::Figure;
use crate::pg_server::Server;
use crate::place::{Place, Times, drop_caches, rate, timed};

const BRANCHING: usize = 6;
const FILES: usize = 8;

pub(crate) const FIGURES: &[(&str, &str)] = &[
    ("create", "1,555 folders with 8 empty files each, one thread (SQLite)"),
    ("stat", "each of the files, the kernel's entries dropped before"),
    ("list", "all folders read, entries per second, dropped likewise"),
    ("remove", "everything unlinked"),
];

pub(crate) const FIGURES_PG: &[(&str, &str)] = &[
    ("create_pg", "8 threads, 259 folders with 8 files each, PostgreSQL over a local socket"),
    ("stat_pg", "likewise"),
    ("list_pg", "likewise"),
    ("remove_pg", "likewise"),
];

pub(crate) fn run(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let names = ["datafs/create", "datafs/stat", "datafs/list", "datafs/remove"];
    measure(asked, &Place::new(), 1, asked.sized(4, 3), names, report);
}

/// The same on a PostgreSQL server with its default settings, so with fsync.
pub(crate) fn run_pg(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    // `start` prints the reason if there is no server.
    let Some(server) = Server::start(&[]) else { return };
    let config = Config { meta_url: Some(server.url().into()), ..Config::default() };
    let names = ["datafs/create_pg", "datafs/stat_pg", "datafs/list_pg", "datafs/remove_pg"];
    measure(asked, &Place::with(config), 8, asked.sized(3, 2), names, report);
}

fn measure(
    asked: &Asked,
    place: &Place,
    threads: usize,
    depth: usize,
    names: [&'static str; 4],
    report: &mut dyn FnMut(Figure),
) {
    let mounted = place.mount("", &[]);
    let mut phases: [Times; 4] = Default::default();
    let mut items = [0; 4];
    for round in 0..asked.sized(3, 1) {
        let name = format!("tree-{round}");
        nix::unistd::sync();
        let ours = phases_of(&mounted.at().join(&name), threads, depth);
        nix::unistd::sync();
        let control = phases_of(&place.plain().join(&name), threads, depth);
        for phase in 0..4 {
            items[phase] = ours[phase].1;
            phases[phase].add(ours[phase].0, control[phase].0);
        }
    }
    for ((name, items), times) in names.into_iter().zip(items).zip(phases) {
        let unit = if name.starts_with("datafs/list") { "entries/s" } else { "ops/s" };
        report(rate(name, unit, items as f64, times.pair(), "the same on the local file system"));
    }
}

/// The tree of one thread.
struct Tree {
    folders: Vec<PathBuf>,
    files: Vec<PathBuf>,
}

impl Tree {
    fn new(root: &Path, depth: usize) -> Tree {
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
        let files =
            |folder: &PathBuf| (0..FILES).map(|i| folder.join(format!("file.{i}"))).collect::<Vec<_>>();
        let files = folders.iter().flat_map(files).collect();
        Tree { folders, files }
    }

    fn create(&self) {
        for (i, folder) in self.folders.iter().enumerate() {
            fs::create_dir(folder).unwrap();
            for file in &self.files[i * FILES..(i + 1) * FILES] {
                File::create_new(file).unwrap();
            }
        }
    }

    fn stat(&self) {
        for file in &self.files {
            assert!(fs::symlink_metadata(file).unwrap().is_file());
        }
    }

    fn list(&self) {
        let entries = |folder: &PathBuf| fs::read_dir(folder).unwrap().map(Result::unwrap).count();
        let entries: usize = self.folders.iter().map(entries).sum();
        assert_eq!(entries, self.folders.len() + self.files.len() - 1);
    }

    fn remove(&self) {
        for file in &self.files {
            fs::remove_file(file).unwrap();
        }
        for folder in self.folders.iter().rev() {
            fs::remove_dir(folder).unwrap();
        }
    }
}

/// Time and number of items of each phase.
fn phases_of(root: &Path, threads: usize, depth: usize) -> [(Duration, usize); 4] {
    fs::create_dir(root).unwrap();
    let trees: Vec<Tree> =
        (0..threads).map(|thread| Tree::new(&root.join(format!("thread.{thread}")), depth)).collect();
    let files: usize = trees.iter().map(|tree| tree.files.len()).sum();
    let folders: usize = trees.iter().map(|tree| tree.folders.len()).sum();
    let each = |work: fn(&Tree)| {
        let all =
            || std::thread::scope(|scope| trees.iter().for_each(|tree| drop(scope.spawn(|| work(tree)))));
        timed(all).0
    };
    let create = each(Tree::create);
    drop_caches(2);
    let stat = each(Tree::stat);
    drop_caches(2);
    let list = each(Tree::list);
    let remove = each(Tree::remove);
    [(create, files + folders), (stat, files), (list, files + folders - threads), (remove, files + folders)]
}
