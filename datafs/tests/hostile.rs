//! A stress test of concurrent maintenance: compaction, collection, snapshots, warmup and copies run beside the
//! writing threads of two sessions. Each writer checks what it has written. A seed determines the operations.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millrace_datafs::{
    Allocate, Compact, Config, CopyOptions, Datafs, Endpoint, Error, FileKind, FsckOptions, Name, OpenFile,
    OpenFlags, Owner, View, VolumeSpec,
};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// Operations of each writer; `MILLRACE_STEPS` sets another number, `MILLRACE_SEED` another seed.
const STEPS: u64 = 250;
const WRITERS: u64 = 4;
const FILES: usize = 6;
const OWNER: Owner = Owner { uid: 0, gid: 0 };
const EAGER: Compact = Compact { extents_min: 2, extent_bytes_min: 1 << 20, live_percent_min: 90 };

fn number(variable: &str, otherwise: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

fn volume() -> Name {
    "v".parse().unwrap()
}

fn open(home: &Path) -> Datafs {
    let config = Config {
        garbage_grace_ms: 500,
        gc_interval_ms: 10,
        write_buffer_bytes_max: 30_000,
        ..Config::default()
    };
    Datafs::open(home, &config).unwrap()
}

fn live(datafs: &Datafs) -> View {
    datafs.view(&VolumeSpec::live(volume())).unwrap()
}

/// The files of a thread with their expected contents; some of them are open.
struct Writer {
    view: View,
    folder: String,
    random: StdRng,
    files: BTreeMap<usize, Vec<u8>>,
    handles: BTreeMap<usize, OpenFile>,
}

impl Writer {
    fn path(&self, file: usize) -> String {
        format!("{}/{file}", self.folder)
    }

    fn handle(&mut self, file: usize) -> &OpenFile {
        if !self.handles.contains_key(&file) {
            let parent = self.view.stat(&self.folder).unwrap().node;
            let name = file.to_string();
            let made = self.view.create(parent, name.as_ref(), 0o644, OWNER, OpenFlags::READ_WRITE);
            self.handles.insert(file, made.unwrap().1);
            self.files.entry(file).or_default();
        }
        &self.handles[&file]
    }

    fn step(&mut self) {
        let file = self.random.random_range(0..FILES);
        let (offset, len): (usize, usize) =
            (self.random.random_range(0..120_000), self.random.random_range(1..40_000));
        match self.random.random_range(0..20) {
            0..8 => {
                let byte: u8 = self.random.random();
                let data: Vec<u8> = (0..len).map(|i| byte.wrapping_add((i % 251) as u8)).collect();
                self.handle(file).write_at(offset as u64, &data).unwrap();
                let bytes = self.files.get_mut(&file).unwrap();
                bytes.resize(bytes.len().max(offset + len), 0);
                bytes[offset..offset + len].copy_from_slice(&data);
            }
            8 => {
                self.handle(file).set_len(offset as u64).unwrap();
                self.files.get_mut(&file).unwrap().resize(offset, 0);
            }
            9 => {
                let node = self.handle(file).node();
                self.view.allocate(node, offset as u64, len as u64, Allocate::PunchHole).unwrap();
                let bytes = self.files.get_mut(&file).unwrap();
                let (start, end) = (offset.min(bytes.len()), (offset + len).min(bytes.len()));
                bytes[start..end].fill(0);
            }
            10 => {
                let to = (file + 1) % FILES;
                let source = self.handle(file).node();
                self.handle(to);
                let from = self.view.open(source, OpenFlags::READ).unwrap();
                let whole = self.files[&file].clone();
                self.handles[&to].set_len(0).unwrap();
                // A copy may stop early, as a read may.
                let mut done = 0;
                while done < whole.len() as u64 {
                    done += from.copy_to(done, &self.handles[&to], done, whole.len() as u64 - done).unwrap();
                }
                self.files.insert(to, whole);
            }
            11 => drop(self.handles.remove(&file)),
            12 => self.handle(file).flush().unwrap(),
            13 => self.handle(file).fsync().unwrap(),
            14 => {
                self.handles.remove(&file);
                if self.files.remove(&file).is_some() {
                    self.view.remove_file(&self.path(file)).unwrap();
                }
            }
            15 => {
                let to = (file + 1) % FILES;
                let both = [self.handles.remove(&file), self.handles.remove(&to)];
                drop(both);
                if let Some(bytes) = self.files.remove(&file) {
                    self.view.rename_path(&self.path(file), &self.path(to)).unwrap();
                    self.files.insert(to, bytes);
                }
            }
            16 => {
                self.handles.remove(&file);
                let bytes = vec![len as u8; len];
                self.view.write_file(&self.path(file), &bytes).unwrap();
                self.files.insert(file, bytes);
            }
            _ => self.check(file),
        }
    }

    fn check(&self, file: usize) {
        let read = self.view.read_file(&self.path(file));
        match self.files.get(&file) {
            None => assert!(read.unwrap_err().is_not_found()),
            Some(bytes) => {
                let read = read.unwrap();
                let differs = read.iter().zip(bytes).position(|(a, b)| a != b);
                assert!(
                    read.len() == bytes.len() && differs.is_none(),
                    "{}: {} bytes instead of {}, the first that differs is {differs:?}",
                    self.path(file),
                    read.len(),
                    bytes.len()
                );
            }
        }
    }
}

type Tree = BTreeMap<String, Vec<u8>>;

fn read_tree(view: &View) -> Tree {
    let mut tree = Tree::new();
    for folder in view.list("").unwrap() {
        for entry in view.list(&folder.name).unwrap() {
            assert_eq!(entry.stat.kind, FileKind::File);
            let path = format!("{}/{}", folder.name, entry.name);
            let bytes = view.read_file(&path).unwrap().to_vec();
            tree.insert(path, bytes);
        }
    }
    tree
}

/// Makes snapshots, reads and copies them, reads them again and deletes them.
fn keep_snapshots(datafs: &Datafs, dir: &Path, writing: &AtomicU64) -> u64 {
    let mut kept: Vec<(Name, Tree)> = Vec::new();
    let mut made = 0;
    while writing.load(Ordering::Acquire) > 0 {
        let name: Name = format!("h{made}").parse().unwrap();
        datafs.snapshot_create(&volume(), &name).unwrap();
        let view = datafs.view(&VolumeSpec::at(volume(), name.clone())).unwrap();
        let tree = read_tree(&view);
        let out = dir.join(format!("out-{made}"));
        let options = CopyOptions { recursive: true, parallel: 2 };
        let from = Endpoint::Volume(view, "".into());
        let report = datafs.copy(&from, &Endpoint::Local(out.clone()), &options, &|_| true).unwrap();
        assert_eq!(report.failures, 0, "{:?}", report.failed);
        for (path, bytes) in &tree {
            assert!(
                std::fs::read(out.join(path)).unwrap() == *bytes,
                "{path} of {name} was copied otherwise"
            );
        }
        std::fs::remove_dir_all(&out).unwrap();
        kept.push((name, tree));
        made += 1;
        if kept.len() > 2 {
            let (name, tree) = kept.remove((made % 2) as usize);
            let view = datafs.view(&VolumeSpec::at(volume(), name.clone())).unwrap();
            assert!(read_tree(&view) == tree, "{name} has changed");
            datafs.snapshot_delete(&volume(), &name).unwrap();
        }
    }
    for (name, tree) in kept {
        let view = datafs.view(&VolumeSpec::at(volume(), name.clone())).unwrap();
        assert!(read_tree(&view) == tree, "{name} has changed");
        datafs.snapshot_delete(&volume(), &name).unwrap();
    }
    made
}

#[test]
fn upkeep_beside_writers_changes_nothing_that_they_see() {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let sessions = [open(&home), open(&home)];
    sessions[0].volume_create(&volume()).unwrap();
    let writing = AtomicU64::new(WRITERS);
    let (steps, seed) = (number("MILLRACE_STEPS", STEPS), number("MILLRACE_SEED", 1));
    std::thread::scope(|scope| {
        let [one, other] = &sessions;
        let writing = &writing;
        for id in 0..WRITERS {
            let view = live(if id % 2 == 0 { one } else { other });
            scope.spawn(move || {
                // Also when this thread panics, so that the other threads end.
                let _done = Done(writing);
                let folder = format!("w{id}");
                view.create_dir_all(&folder).unwrap();
                let random = StdRng::seed_from_u64(seed * WRITERS + id);
                let (files, handles) = (BTreeMap::new(), BTreeMap::new());
                let mut writer = Writer { view, folder, random, files, handles };
                (0..steps).for_each(|_| writer.step());
                (0..FILES).for_each(|file| writer.check(file));
                writer.handles.clear();
                (0..FILES).for_each(|file| writer.check(file));
            });
        }
        let go_on = move || writing.load(Ordering::Acquire) > 0;
        scope.spawn(move || {
            while go_on() {
                one.compact(None, &EAGER).unwrap();
            }
        });
        scope.spawn(move || {
            while go_on() {
                other.gc().unwrap();
                std::thread::yield_now();
            }
        });
        scope.spawn(move || {
            while go_on() {
                match live(one).warmup("", &mut |_| ()) {
                    // Writers remove files during the warmup.
                    Ok(_) | Err(Error::NotFound { .. } | Error::Stale { .. }) => {}
                    Err(error) => panic!("{error:?}"),
                }
            }
        });
        let made = scope.spawn(|| keep_snapshots(other, dir.path(), writing));
        println!("{} snapshots made and deleted", made.join().unwrap());
    });
    for datafs in &sessions {
        let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
        assert!(report.is_sound(), "{:#?}", report.found);
    }
    let [one, other] = sessions;
    one.volume_delete(&volume()).unwrap();
    drop((one, other));
    assert_nothing_is_left(&home);
}

struct Done<'a>(&'a AtomicU64);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

fn assert_nothing_is_left(home: &Path) {
    let datafs = open(home);
    let begin = Instant::now();
    loop {
        datafs.gc().unwrap();
        let mut left = Vec::new();
        for directory in std::fs::read_dir(home.join("datafs/objects")).unwrap() {
            let files = std::fs::read_dir(directory.unwrap().path()).into_iter().flatten();
            left.extend(files.map(|file| file.unwrap().file_name()));
        }
        if left.is_empty() {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{left:?}");
        std::thread::sleep(crate::child::POLL);
    }
}
