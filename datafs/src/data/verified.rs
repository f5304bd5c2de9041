//! Verified frames of an open object, one bit each. Frames are immutable: one check is enough while the
//! object stays open. A random read of 4 KiB then reads these bytes and not a whole frame.

use std::sync::atomic::{AtomicU64, Ordering};

use super::checksum;

/// Bytes per bit: the frame size of this build. Objects with another frame size are counted in it.
const FRAME_BYTES: u64 = checksum::FRAME_BYTES as u64;
/// Larger objects are verified at each read: the bits of all open objects stay below 32 MiB.
const DATA_BYTES_MAX: u64 = 64 << 30;

/// One bit for each frame.
#[derive(Debug)]
pub(super) struct Verified {
    words: Box<[AtomicU64]>,
    data_bytes: u64,
}

impl Verified {
    pub(super) fn new(data_bytes: u64) -> Verified {
        let frames = if data_bytes > DATA_BYTES_MAX { 0 } else { data_bytes.div_ceil(FRAME_BYTES) };
        let words = (0..frames.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Verified { words, data_bytes }
    }

    /// Marks whole frames as verified: `end` is a frame boundary or the end of the data.
    pub(super) fn add(&self, start: u64, end: u64) {
        let last = if end >= self.data_bytes { end.div_ceil(FRAME_BYTES) } else { end / FRAME_BYTES };
        for frame in start.div_ceil(FRAME_BYTES)..last {
            if let Some(word) = self.words.get((frame / 64) as usize) {
                word.fetch_or(1 << (frame % 64), Ordering::Relaxed);
            }
        }
    }

    /// Whether all frames that a range touches are verified.
    pub(super) fn covers(&self, start: u64, end: u64) -> bool {
        (start / FRAME_BYTES..end.div_ceil(FRAME_BYTES)).all(|frame| {
            let word = self.words.get((frame / 64) as usize);
            word.is_some_and(|word| word.load(Ordering::Relaxed) >> (frame % 64) & 1 == 1)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_frames_count() {
        let end = 200 * FRAME_BYTES + 5;
        let verified = Verified::new(end);
        assert!(!verified.covers(0, 1));
        verified.add(FRAME_BYTES, 3 * FRAME_BYTES);
        assert!(
            verified.covers(FRAME_BYTES, 3 * FRAME_BYTES)
                && verified.covers(FRAME_BYTES + 7, FRAME_BYTES + 8)
        );
        assert!(!verified.covers(FRAME_BYTES - 1, FRAME_BYTES + 1));
        assert!(!verified.covers(2 * FRAME_BYTES, 3 * FRAME_BYTES + 1));
        verified.add(200 * FRAME_BYTES, end);
        assert!(verified.covers(end - 1, end));
        // Part of a frame only.
        verified.add(5 * FRAME_BYTES + 1, 6 * FRAME_BYTES + 9);
        assert!(!verified.covers(5 * FRAME_BYTES + 1, 5 * FRAME_BYTES + 2));
        assert!(!Verified::new(DATA_BYTES_MAX + 1).covers(0, 1));
    }
}
