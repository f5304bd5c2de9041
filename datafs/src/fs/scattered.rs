//! The files that this process may have scattered into many small extents: the background pass compacts them.

use std::collections::HashSet;

use parking_lot::Mutex;

/// Files with more extents than this count as scattered.
pub(crate) const EXTENTS_MIN: usize = 64;
/// Most files that are remembered until the next background pass.
const NOTED_MAX: usize = 4_096;

/// Volume and inode number of each such file.
#[derive(Debug, Default)]
pub(crate) struct Scattered(Mutex<HashSet<(u64, u64)>>);

impl Scattered {
    /// Notes a file that may have become scattered.
    pub(crate) fn note(&self, volume: u64, ino: u64) {
        let mut noted = self.0.lock();
        if noted.len() < NOTED_MAX {
            noted.insert((volume, ino));
        }
    }

    /// Takes the noted files.
    pub(crate) fn take(&self) -> HashSet<(u64, u64)> {
        std::mem::take(&mut *self.0.lock())
    }
}
