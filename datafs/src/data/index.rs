//! Frame index of an object: where each frame is stored and how it is checked. Readers need nothing else to
//! read an object of any layout.

use std::ops::Range;

use super::checksum::Sums;
use super::encoded::EncodedIndex;

/// The frames of a complete object.
#[derive(Debug)]
pub(super) enum Index {
    /// Stored unchanged, one after the other.
    Plain(Sums),
    /// Compressed, encrypted or both, each frame separately.
    Encoded(Box<EncodedIndex>),
}

impl Index {
    /// Bytes of data in the object.
    pub(super) fn data_bytes(&self) -> u64 {
        match self {
            Self::Plain(sums) => sums.data_bytes(),
            Self::Encoded(encoded) => encoded.data_bytes(),
        }
    }

    /// Bytes of data in each frame but the last.
    pub(super) fn frame_bytes(&self) -> u64 {
        match self {
            Self::Plain(sums) => sums.frame_bytes(),
            Self::Encoded(encoded) => encoded.frame_bytes(),
        }
    }

    /// How many frames there are.
    pub(super) fn frames(&self) -> u64 {
        self.data_bytes().div_ceil(self.frame_bytes())
    }

    /// The frames that hold a range of the data.
    pub(super) fn frames_of(&self, start: u64, end: u64) -> Range<u64> {
        let first = start / self.frame_bytes();
        first..end.div_ceil(self.frame_bytes()).max(first)
    }

    /// Which bytes of the data a frame holds.
    pub(super) fn data(&self, frame: u64) -> Range<u64> {
        let start = frame * self.frame_bytes();
        start..(start + self.frame_bytes()).min(self.data_bytes())
    }

    /// The byte range of the object where these frames are stored.
    pub(super) fn stored(&self, frames: Range<u64>) -> Range<u64> {
        match self {
            Self::Plain(sums) => {
                let at = |frame: u64| (frame * sums.frame_bytes()).min(sums.data_bytes());
                at(frames.start)..at(frames.end)
            }
            Self::Encoded(encoded) => encoded.stored(frames),
        }
    }

    /// Whether the checksum of a frame's stored bytes is right.
    pub(super) fn check(&self, frame: u64, stored: &[u8]) -> bool {
        match self {
            Self::Plain(sums) => sums.check(frame, stored),
            Self::Encoded(encoded) => encoded.check(frame, stored),
        }
    }

    /// The first of `frames` whose checksum is wrong; `stored` holds the bytes of all of them.
    pub(super) fn first_wrong(&self, frames: Range<u64>, stored: &[u8]) -> Option<u64> {
        let from = self.stored(frames.clone()).start;
        frames.into_iter().find(|frame| {
            let at = self.stored(*frame..*frame + 1);
            let bytes = stored.get((at.start - from) as usize..(at.end - from) as usize);
            !bytes.is_some_and(|bytes| self.check(*frame, bytes))
        })
    }

    /// Copies a frame's bytes that belong into `buffer` (the data from `offset` on). The caller has verified
    /// `stored`.
    pub(super) fn deliver(
        &self,
        frame: u64,
        stored: &[u8],
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<(), String> {
        let data = self.data(frame);
        let (from, to) = (data.start.max(offset), data.end.min(offset + buffer.len() as u64));
        if from >= to {
            return Ok(());
        }
        let into = &mut buffer[(from - offset) as usize..(to - offset) as usize];
        let inside = (from - data.start) as usize..(to - data.start) as usize;
        match self {
            Self::Plain(_) => into.copy_from_slice(&stored[inside]),
            Self::Encoded(encoded) if inside.len() as u64 == data.end - data.start => {
                encoded.decode(frame, stored, into)?;
            }
            Self::Encoded(encoded) => {
                let mut whole = vec![0; (data.end - data.start) as usize];
                encoded.decode(frame, stored, &mut whole)?;
                into.copy_from_slice(&whole[inside]);
            }
        }
        Ok(())
    }
}
