//! The work of the crash tests: operations that follow from a seed, and every state of the volume after each of
//! their commits.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millrace_datafs::{Compact, Config, Datafs, Error, OpenFile, OpenFlags, Owner, View};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

const OWNER: Owner = Owner { uid: 0, gid: 0 };
const FILES: u64 = 10;
const DRAFT: &str = "draft";

/// Compaction settings that rewrite everything that may be rewritten.
pub(super) const ALL: Compact = Compact { extents_min: 1, extent_bytes_min: 1 << 20, live_percent_min: 100 };

/// Files and their contents.
pub(super) type State = BTreeMap<String, Arc<Vec<u8>>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    /// Truncate (or create) the file and write it.
    Write(u64, u64),
    /// Write over the content, at the same length.
    Over(u64, u64),
    Append(u64, u64),
    /// Write a draft and rename it over the file.
    Replace(u64, u64),
    Unlink(u64),
    Cut(u64),
    Sync(u64),
    SyncFolder,
    Snapshot,
    DropSnapshot,
    Collect,
    Compact,
}

pub(super) fn config() -> Config {
    Config { garbage_grace_ms: 0, gc_interval_ms: 20, write_buffer_bytes_max: 40_000, ..Config::default() }
}

/// The operations of a seed; their contents differ between seeds.
pub(super) fn ops(seed: u64, count: u64) -> Vec<Op> {
    let mut random = StdRng::seed_from_u64(seed);
    let op = |i| {
        let (file, generation) = (random.random_range(0..FILES), seed * 1_000 + i);
        match random.random_range(0..100) {
            0..30 => Op::Write(file, generation),
            30..44 => Op::Over(file, generation),
            44..54 => Op::Append(file, generation),
            54..68 => Op::Replace(file, generation),
            68..74 => Op::Unlink(file),
            74..78 => Op::Cut(file),
            78..86 => Op::Sync(file),
            86..89 => Op::SyncFolder,
            89..92 => Op::Snapshot,
            92..94 => Op::DropSnapshot,
            94..97 => Op::Collect,
            _ => Op::Compact,
        }
    };
    (0..count).map(op).collect()
}

fn name(file: u64) -> String {
    format!("f{file}")
}

/// Content of a generation: mostly 8 KiB; some sizes are stored in the metadata, some in separate objects.
fn content(generation: u64) -> Vec<u8> {
    let words = [2, 1_024, 1_024, 1_024, 1_024, 1_024, 12_500, 40_000][generation as usize % 8];
    generation.to_le_bytes().repeat(words)
}

fn line(generation: u64) -> Vec<u8> {
    generation.to_le_bytes().repeat(40)
}

/// The bytes that replace old ones: the same number, of another generation.
fn over(old: &[u8], generation: u64) -> Vec<u8> {
    old.iter().enumerate().map(|(i, _)| generation.to_le_bytes()[i % 8]).collect()
}

/// Every state from the first on, and the index of the state after each operation.
pub(super) struct Story {
    pub(super) states: Vec<State>,
    pub(super) ends: Vec<usize>,
}

impl Story {
    pub(super) fn new(first: State, ops: &[Op]) -> Story {
        let mut story = Story { states: vec![first], ends: Vec::new() };
        for op in ops {
            story.tell(*op);
        }
        story
    }

    fn last(&self) -> State {
        self.states.last().unwrap().clone()
    }

    fn put(&mut self, name: &str, bytes: Vec<u8>) {
        let mut state = self.last();
        state.insert(name.to_owned(), Arc::new(bytes));
        self.states.push(state);
    }

    fn tell(&mut self, op: Op) {
        let old = |story: &Story, file| story.last().get(&name(file)).map(|bytes| bytes.to_vec());
        match op {
            Op::Write(file, generation) => {
                self.put(&name(file), Vec::new());
                self.put(&name(file), content(generation));
            }
            Op::Over(file, generation) => {
                if let Some(old) = old(self, file) {
                    self.put(&name(file), over(&old, generation));
                }
            }
            Op::Append(file, generation) => {
                let old = old(self, file).unwrap_or_else(|| {
                    self.put(&name(file), Vec::new());
                    Vec::new()
                });
                self.put(&name(file), [old, line(generation)].concat());
            }
            Op::Replace(file, generation) => {
                self.put(DRAFT, Vec::new());
                self.put(DRAFT, content(generation));
                let mut state = self.last();
                state.remove(DRAFT);
                state.insert(name(file), Arc::new(content(generation)));
                self.states.push(state);
            }
            Op::Unlink(file) => {
                let mut state = self.last();
                if state.remove(&name(file)).is_some() {
                    self.states.push(state);
                }
            }
            Op::Cut(file) => {
                if let Some(mut old) = old(self, file) {
                    old.truncate(old.len() / 2);
                    self.put(&name(file), old);
                }
            }
            Op::Sync(_) | Op::SyncFolder | Op::Snapshot | Op::DropSnapshot | Op::Collect | Op::Compact => {}
        }
        self.ends.push(self.states.len() - 1);
    }
}

/// The access path of the operations.
pub(super) enum Place {
    Library,
    Mount(PathBuf),
}

/// The executor of the operations.
pub(super) struct Hand {
    pub(super) place: Place,
    /// For operations outside a mount: snapshots, collections, compactions.
    pub(super) datafs: Datafs,
    pub(super) view: View,
    pub(super) seed: u64,
    /// Snapshots of this seed, oldest first, by the operation that made them.
    pub(super) snapshots: Vec<u64>,
}

pub(super) fn snapshot_name(seed: u64, op: u64) -> String {
    format!("s{seed}-{op}")
}

impl Hand {
    /// Runs an operation; true when everything before it is durable now.
    pub(super) fn act(&mut self, i: u64, op: Op) -> io::Result<bool> {
        match op {
            Op::Snapshot => {
                let name = snapshot_name(self.seed, i).parse().unwrap();
                self.datafs.snapshot_create(&super::volume(), &name).unwrap();
                self.snapshots.push(i);
                return self.is_served().map(|()| true);
            }
            Op::DropSnapshot => {
                if self.snapshots.len() > 1 {
                    let name = snapshot_name(self.seed, self.snapshots.remove(0)).parse().unwrap();
                    self.datafs.snapshot_delete(&super::volume(), &name).unwrap();
                    return self.is_served().map(|()| true);
                }
            }
            Op::Collect => drop(self.datafs.gc().unwrap()),
            Op::Compact => {
                self.datafs.compact(None, &ALL).unwrap();
            }
            of_files => {
                return match &self.place {
                    Place::Library => Ok(act_in(&self.view, of_files).unwrap()),
                    Place::Mount(at) => act_on(at, of_files),
                };
            }
        }
        self.is_served().map(|()| false)
    }

    /// Fails when the mount is dead. An operation outside the mount succeeds without it, and then says nothing
    /// about earlier operations through it.
    fn is_served(&self) -> io::Result<()> {
        match &self.place {
            Place::Library => Ok(()),
            // `statvfs` always sends a request to the serving process.
            Place::Mount(at) => Ok(nix::sys::statvfs::statvfs(at).map(drop)?),
        }
    }
}

/// Runs an operation on files through the library.
fn act_in(view: &View, op: Op) -> Result<bool, Error> {
    let root = view.root();
    let create = |name: &str, flags: OpenFlags| -> Result<OpenFile, Error> {
        Ok(view.create(root, name.as_ref(), 0o644, OWNER, flags)?.1)
    };
    let open = |file: u64| match view.lookup(root, name(file).as_ref()) {
        Ok(attr) => view.open(attr.node, OpenFlags::READ_WRITE).map(Some),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    };
    let write = |name: &str, bytes: &[u8]| {
        let file = create(name, OpenFlags { truncate: true, ..OpenFlags::READ_WRITE })?;
        file.write_at(0, bytes)?;
        file.flush()
    };
    match op {
        Op::Write(file, generation) => write(&name(file), &content(generation))?,
        Op::Over(file, generation) => {
            if let Some(file) = open(file)? {
                let old = file.read_at(0, 1 << 24)?;
                file.write_at(0, &over(&old, generation))?;
                file.flush()?;
            }
        }
        Op::Append(file, generation) => {
            let file = create(&name(file), OpenFlags { append: true, ..OpenFlags::READ_WRITE })?;
            file.write_at(0, &line(generation))?;
            file.flush()?;
        }
        Op::Replace(file, generation) => {
            write(DRAFT, &content(generation))?;
            view.rename_path(DRAFT, &name(file))?;
        }
        Op::Unlink(file) => match view.remove_file(&name(file)) {
            Err(Error::NotFound { .. }) => {}
            other => other?,
        },
        Op::Cut(file) => {
            if let Some(file) = open(file)? {
                file.set_len(file.attr()?.size / 2)?;
            }
        }
        Op::Sync(file) => {
            let file = open(file)?;
            file.iter().try_for_each(OpenFile::fsync)?;
            return Ok(file.is_some());
        }
        _ => {
            view.fsync_dir(root)?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// Runs an operation on files through a mount; errors mean that its process was killed.
fn act_on(at: &Path, op: Op) -> io::Result<bool> {
    let path = |file: u64| at.join(name(file));
    let some = |opened: io::Result<File>| match opened {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    };
    let open = |file: u64| some(OpenOptions::new().read(true).write(true).open(path(file)));
    match op {
        Op::Write(file, generation) => fs::write(path(file), content(generation))?,
        Op::Over(file, generation) => {
            if let Some(mut file) = open(file)? {
                let mut old = Vec::new();
                io::Read::read_to_end(&mut file, &mut old)?;
                std::os::unix::fs::FileExt::write_all_at(&file, &over(&old, generation), 0)?;
            }
        }
        Op::Append(file, generation) => {
            let mut file = OpenOptions::new().append(true).create(true).open(path(file))?;
            file.write_all(&line(generation))?;
        }
        Op::Replace(file, generation) => {
            fs::write(at.join(DRAFT), content(generation))?;
            fs::rename(at.join(DRAFT), path(file))?;
        }
        Op::Unlink(file) => match fs::remove_file(path(file)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        },
        Op::Cut(file) => {
            if let Some(file) = open(file)? {
                file.set_len(file.metadata()?.len() / 2)?;
            }
        }
        Op::Sync(file) => {
            let file = open(file)?;
            file.iter().try_for_each(File::sync_all)?;
            return Ok(file.is_some());
        }
        _ => {
            File::open(at)?.sync_all()?;
            return Ok(true);
        }
    }
    Ok(false)
}

/// All files of a view.
pub(super) fn read_all(view: &View) -> State {
    let entries = view.list("").unwrap();
    let read = |name: String| {
        let bytes = view.read_file(&name).unwrap().to_vec();
        (name, Arc::new(bytes))
    };
    entries.into_iter().map(|entry| read(entry.name)).collect()
}
