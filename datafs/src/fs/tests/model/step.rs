//! The steps of the model test, and how a seed becomes a sequence of them.

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::fs::tests::reference::{NAMES, Path};

/// Files that each session may have open.
pub(super) const SLOTS: usize = 3;
/// Snapshots that may exist at a time.
const SNAPSHOTS: u8 = 4;

/// An operation of one of the two sessions.
#[derive(Debug, Clone)]
pub(super) struct Step {
    pub(super) actor: usize,
    pub(super) op: Op,
}

#[derive(Debug, Clone)]
pub(super) enum Op {
    /// Creates a file, or opens an existing one; the handle goes into a slot, if one is given.
    Create {
        path: Path,
        exclusive: bool,
        slot: Option<usize>,
    },
    /// Creates a file without a name.
    CreateUnnamed {
        directory: Path,
        exclusive: bool,
        slot: usize,
    },
    /// Gives an open file a name, its first or another one.
    Name(usize, Path),
    Mkdir(Path),
    Symlink(Path, u8),
    Mkfifo(Path),
    Unlink(Path),
    Rmdir(Path),
    Rename {
        from: Path,
        to: Path,
        no_replace: bool,
    },
    Exchange(Path, Path),
    Link(Path, Path),
    Xattr {
        path: Path,
        name: u8,
        value: Option<u8>,
        how: u8,
    },
    Chmod(Path, u32),
    Truncate(Path, u64),
    Look(Path),
    Open {
        slot: usize,
        path: Path,
        how: How,
    },
    Write {
        slot: usize,
        offset: u64,
        len: usize,
        byte: u8,
    },
    Read {
        slot: usize,
        offset: u64,
        len: usize,
    },
    SetLen(usize, u64),
    Allocate {
        slot: usize,
        offset: u64,
        len: u64,
        how: u8,
    },
    /// From a file of any session.
    Copy {
        from: (usize, usize),
        offset: u64,
        slot: usize,
        to: u64,
        len: u64,
    },
    /// From a file of a snapshot.
    CopyPast {
        offset: u64,
        slot: usize,
        to: u64,
        len: u64,
    },
    Flush(usize, bool),
    Close(usize),
    Publish {
        path: Path,
        len: usize,
        byte: u8,
    },
    Key {
        key: u8,
        value: u8,
        delete: bool,
    },
    Snapshot(u8),
    DeleteSnapshot(u8),
    ReadSnapshot(u8, Path),
    /// Opens a file of a snapshot, to be read and copied from later.
    OpenPast(u8, Path),
    ReadPast {
        offset: u64,
        len: usize,
    },
    /// Begins to read a directory, a few entries at a time.
    List(Path),
    ListOn(usize),
    Compact,
    Collect,
    SyncFolder,
    Fsck,
    LookAtAll,
    Reopen,
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Read,
    ReadWrite,
    Append,
    Truncate,
}

/// The sequence of a seed.
pub(super) fn steps(seed: u64, count: usize) -> Vec<Step> {
    let mut random = Random(StdRng::seed_from_u64(seed));
    let mut actor = 0;
    let step = |_| {
        // In runs of one actor, because passing the turn to write takes time.
        if random.one_in(6) {
            actor = 1 - actor;
        }
        Step { actor, op: random.op() }
    };
    (0..count).map(step).collect()
}

struct Random(StdRng);

impl Random {
    fn one_in(&mut self, n: u32) -> bool {
        self.0.random_range(0..n) == 0
    }

    fn path(&mut self) -> Path {
        let depth = [1, 1, 1, 2, 2, 3][self.0.random_range(0..6)];
        (0..depth).map(|_| self.0.random_range(0..NAMES.len() as u8)).collect()
    }

    fn slot(&mut self) -> usize {
        self.0.random_range(0..SLOTS)
    }

    fn byte(&mut self) -> u8 {
        self.0.random()
    }

    fn snapshot(&mut self) -> u8 {
        self.0.random_range(0..SNAPSHOTS)
    }

    fn offset(&mut self) -> u64 {
        match self.0.random_range(0..8) {
            0..=2 => self.0.random_range(0..64),
            3..=5 => self.0.random_range(0..20_000),
            6 => 4_096,
            _ => self.0.random_range(0..200_000),
        }
    }

    fn len(&mut self) -> usize {
        match self.0.random_range(0..12) {
            0..=3 => self.0.random_range(0..64),
            4..=9 => self.0.random_range(0..9_000),
            10 => 4_096,
            _ => self.0.random_range(0..150_000),
        }
    }

    fn op(&mut self) -> Op {
        match self.0.random_range(0..136) {
            0..7 => Op::Create {
                path: self.path(),
                exclusive: self.0.random(),
                slot: (!self.one_in(3)).then(|| self.slot()),
            },
            7..12 => Op::Mkdir(self.path()),
            12 => Op::Symlink(self.path(), self.byte()),
            13 => Op::Mkfifo(self.path()),
            14..18 => Op::Unlink(self.path()),
            18..20 => Op::Rmdir(self.path()),
            20..25 => Op::Rename { from: self.path(), to: self.path(), no_replace: self.one_in(3) },
            25..27 => Op::Exchange(self.path(), self.path()),
            27..30 => Op::Link(self.path(), self.path()),
            30..33 => Op::Xattr {
                path: self.path(),
                name: self.0.random_range(0..3),
                value: (!self.one_in(4)).then(|| self.byte()),
                how: self.0.random_range(0..3),
            },
            33 => Op::Chmod(self.path(), self.0.random_range(0..0o2000)),
            34..36 => Op::Truncate(self.path(), self.offset()),
            36..42 => Op::Look(self.path()),
            42..51 => {
                let how = match self.0.random_range(0..8) {
                    0..=1 => How::Read,
                    2..=4 => How::ReadWrite,
                    5..=6 => How::Append,
                    _ => How::Truncate,
                };
                Op::Open { slot: self.slot(), path: self.path(), how }
            }
            51..65 => {
                Op::Write { slot: self.slot(), offset: self.offset(), len: self.len(), byte: self.byte() }
            }
            65..71 => Op::Read { slot: self.slot(), offset: self.offset(), len: self.len() },
            71..74 => Op::SetLen(self.slot(), self.offset()),
            74..78 => Op::Allocate {
                slot: self.slot(),
                offset: self.offset(),
                len: self.0.random_range(1..9_000),
                how: self.0.random_range(0..5),
            },
            78..82 => Op::Copy {
                from: (self.0.random_range(0..2), self.slot()),
                offset: self.offset(),
                slot: self.slot(),
                to: self.offset(),
                len: self.0.random_range(0..150_000),
            },
            82..84 => Op::CopyPast {
                offset: self.offset(),
                slot: self.slot(),
                to: self.offset(),
                len: self.0.random_range(0..150_000),
            },
            84..89 => Op::Flush(self.slot(), self.one_in(5)),
            89..92 => Op::Close(self.slot()),
            92..95 => Op::Publish { path: self.path(), len: self.len(), byte: self.byte() },
            95..97 => Op::Key { key: self.0.random_range(0..3), value: self.byte(), delete: self.one_in(3) },
            97..101 => Op::Snapshot(self.snapshot()),
            101..103 => Op::DeleteSnapshot(self.snapshot()),
            103..107 => Op::ReadSnapshot(self.snapshot(), self.path()),
            107..110 => Op::OpenPast(self.snapshot(), self.path()),
            110..113 => Op::ReadPast { offset: self.offset(), len: self.len() },
            113..116 => Op::List(if self.0.random() { Path::new() } else { self.path() }),
            116..121 => Op::ListOn(self.0.random_range(1..4)),
            121..123 => Op::Compact,
            123..125 => Op::Collect,
            125 => Op::SyncFolder,
            126..128 => Op::LookAtAll,
            130..132 => Op::CreateUnnamed {
                directory: if self.0.random() { Path::new() } else { self.path() },
                exclusive: self.one_in(4),
                slot: self.slot(),
            },
            132..136 => Op::Name(self.slot(), self.path()),
            128 if self.one_in(4) => Op::Fsck,
            128 => Op::Look(self.path()),
            _ if self.one_in(3) => Op::Reopen,
            _ => Op::Collect,
        }
    }
}
