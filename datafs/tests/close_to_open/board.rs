//! A board that the processes of a test share outside the volume: a file of numbers on the local file system.
//! Each number is stored with its complement, so that a torn read is detected. A lock for each file of the
//! volume lets one process at a time write it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};

const NUMBER_BYTES: usize = 16;

pub(super) struct Board {
    dir: PathBuf,
    numbers: File,
}

/// The exclusive right to write a file.
pub(super) struct Turn(#[expect(dead_code, reason = "held")] Flock<File>);

impl Board {
    /// A new board for this number of files; all numbers are 0.
    pub(super) fn create(dir: &Path, files: u64) -> Board {
        let numbers = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(dir.join("board"))
            .unwrap();
        let board = Board { dir: dir.to_owned(), numbers };
        (0..2 * files).for_each(|place| board.set(place, 0));
        board
    }

    pub(super) fn open(dir: &Path) -> Board {
        let numbers = OpenOptions::new().read(true).write(true).open(dir.join("board")).unwrap();
        Board { dir: dir.to_owned(), numbers }
    }

    /// Takes the right to write a file; `None` while another process holds it.
    pub(super) fn try_turn(&self, file: u64) -> Option<Turn> {
        let path = self.dir.join(format!("turn-{file}"));
        let lock = OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
        Flock::lock(lock, FlockArg::LockExclusiveNonblock).ok().map(Turn)
    }

    /// The newest generation of a file that was closed before this call.
    pub(super) fn closed(&self, file: u64) -> u64 {
        self.get(2 * file)
    }

    /// The newest generation that a process may have begun to write.
    pub(super) fn begun(&self, file: u64) -> u64 {
        self.get(2 * file + 1)
    }

    /// Begins the next generation, before the first step of writing it. The caller holds the turn.
    pub(super) fn begin(&self, file: u64) -> u64 {
        let generation = self.begun(file) + 1;
        self.set(2 * file + 1, generation);
        generation
    }

    /// Notes that a generation is closed.
    pub(super) fn close(&self, file: u64, generation: u64) {
        self.set(2 * file, generation);
    }

    pub(super) fn get(&self, place: u64) -> u64 {
        loop {
            let mut bytes = [0; NUMBER_BYTES];
            self.numbers.read_exact_at(&mut bytes, place * NUMBER_BYTES as u64).unwrap();
            let [number, complement] =
                [&bytes[..8], &bytes[8..]].map(|half| u64::from_le_bytes(half.try_into().unwrap()));
            if number == !complement {
                return number;
            }
        }
    }

    pub(super) fn set(&self, place: u64, number: u64) {
        let bytes = [number.to_le_bytes(), (!number).to_le_bytes()].concat();
        self.numbers.write_all_at(&bytes, place * NUMBER_BYTES as u64).unwrap();
    }
}
