//! Read-ahead in packs. A process that reads one small file usually reads its neighbors soon, in any order;
//! one large request takes the disk no longer than a few small ones.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

/// Bytes of one read-ahead request.
pub(super) const STRIDE_BYTES: u64 = 4 << 20;
/// Strides of one pack that have a bit in [`Strides`].
const STRIDES_MAX: u64 = 64;
/// Read-ahead allowed before any read has earned it, in bytes.
const FREE_BYTES: u64 = 256 << 20;
/// Beyond that, read-ahead bytes per byte read. A data set larger than memory, of which a few files are read,
/// must not saturate the disk with read-ahead.
const RATIO_MAX: u64 = 4;

/// The read-ahead budget of all packs of a pool.
#[derive(Debug, Default)]
pub(super) struct Budget {
    asked_bytes: AtomicU64,
    read_bytes: AtomicU64,
}

impl Budget {
    fn is_left(&self) -> bool {
        let earned = self.read_bytes.load(Ordering::Relaxed).saturating_mul(RATIO_MAX);
        self.asked_bytes.load(Ordering::Relaxed) < FREE_BYTES.saturating_add(earned)
    }
}

/// The strides of one open pack that were requested from the disk, one bit each.
#[derive(Debug, Default)]
pub(super) struct Strides(AtomicU64);

impl Strides {
    /// Requests the stride of the byte `at`, where a read of `len` bytes begins; does not wait for the disk.
    pub(super) fn ask(&self, budget: &Budget, file: &File, path: &Path, at: u64, len: u64) {
        budget.read_bytes.fetch_add(len, Ordering::Relaxed);
        let Some(start) = self.wants(budget, at) else { return };
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        if let Err(error) = posix_fadvise(file, start as libc::off_t, STRIDE_BYTES as libc::off_t, advice) {
            tracing::debug!(%error, path = %path.display(), "read-ahead of a pack");
        }
    }

    /// Where the stride of a byte begins, if it should be requested now.
    fn wants(&self, budget: &Budget, at: u64) -> Option<u64> {
        let stride = at / STRIDE_BYTES;
        let bit = 1_u64.checked_shl(u32::try_from(stride).ok()?).filter(|_| stride < STRIDES_MAX)?;
        if self.0.load(Ordering::Relaxed) & bit != 0 || !budget.is_left() {
            return None;
        }
        self.0.fetch_or(bit, Ordering::Relaxed);
        budget.asked_bytes.fetch_add(STRIDE_BYTES, Ordering::Relaxed);
        Some(stride * STRIDE_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stride_is_asked_for_once_and_what_is_read_pays_for_it() {
        let (budget, strides) = (Budget::default(), Strides::default());
        assert_eq!(strides.wants(&budget, 7), Some(0));
        assert_eq!(strides.wants(&budget, STRIDE_BYTES - 1), None);
        assert_eq!(strides.wants(&budget, STRIDE_BYTES), Some(STRIDE_BYTES));
        assert_eq!(strides.wants(&budget, u64::MAX), None);
        let free = FREE_BYTES / STRIDE_BYTES;
        let others = (0..).take_while(|_| Strides::default().wants(&budget, 0).is_some()).count();
        assert_eq!(others as u64, free - 2);
        budget.read_bytes.fetch_add(STRIDE_BYTES, Ordering::Relaxed);
        let earned = (0..).take_while(|_| Strides::default().wants(&budget, 0).is_some()).count();
        assert_eq!(earned as u64, RATIO_MAX);
        assert_eq!(strides.wants(&budget, 2 * STRIDE_BYTES), None);
    }
}
