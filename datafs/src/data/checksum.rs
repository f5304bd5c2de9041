//! Checksums of an object: one CRC-32C per 64 KiB frame, and the table that stores them.
//!
//! Format, all integers little-endian, `n = ceil(data_bytes / frame_bytes)`:
//! `n × u32` CRC-32C of each frame, then a footer of 48 bytes: `u32` CRC-32C of the table and of
//! the rest of the footer, `u32` frame_bytes, `u64` data_bytes, 16 bytes object id, `u64` reserved
//! (0), 8 bytes magic.

use crate::object::ObjectId;

/// Bytes per checksum. A random 4 KiB read checks one frame: 64 KiB cost about 10 µs.
pub(crate) const FRAME_BYTES: u32 = 64 * 1024;
/// Length of the footer.
pub(crate) const FOOTER_BYTES: u64 = 48;
/// Most bytes that one object may hold (1 TiB): bounds the table at 64 MiB.
pub(crate) const OBJECT_BYTES_MAX: u64 = 1 << 40;

/// Most bytes of table and footer of an object with `data_bytes_max` bytes of data.
pub(super) const fn trailer_bytes_max(data_bytes_max: u64) -> u64 {
    data_bytes_max.div_ceil(FRAME_BYTES as u64) * 4 + FOOTER_BYTES
}

const MAGIC: &[u8; 8] = b"MRobj\x00v1";
/// Bounds of a valid frame size, which is a power of two.
const FRAME_BYTES_RANGE: std::ops::RangeInclusive<u32> = 4096..=16 * 1024 * 1024;

/// Computes the checksums of an object while it is written.
#[derive(Debug, Clone, Default)]
pub(crate) struct Summer {
    sums: Vec<u32>,
    frame_sum: u32,
    frame_filled: u32,
    data_bytes: u64,
}

impl Summer {
    /// Takes the next bytes.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        self.data_bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = (FRAME_BYTES - self.frame_filled) as usize;
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            self.frame_sum = crc32c::crc32c_append(self.frame_sum, now);
            // `now` is at most one frame long.
            self.frame_filled += now.len() as u32;
            if self.frame_filled == FRAME_BYTES {
                self.sums.push(std::mem::take(&mut self.frame_sum));
                self.frame_filled = 0;
            }
            bytes = rest;
        }
    }

    /// Bytes taken so far.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// The table and footer for an object of this id.
    pub(crate) fn finish(mut self, id: ObjectId) -> Vec<u8> {
        if self.frame_filled > 0 {
            self.sums.push(self.frame_sum);
        }
        let mut out = Vec::with_capacity(self.sums.len() * 4 + FOOTER_BYTES as usize);
        for sum in &self.sums {
            out.extend_from_slice(&sum.to_le_bytes());
        }
        let mut rest = Vec::with_capacity(FOOTER_BYTES as usize - 4);
        rest.extend_from_slice(&FRAME_BYTES.to_le_bytes());
        rest.extend_from_slice(&self.data_bytes.to_le_bytes());
        rest.extend_from_slice(&id.to_bytes());
        rest.extend_from_slice(&0u64.to_le_bytes());
        rest.extend_from_slice(MAGIC);
        let sum = crc32c::crc32c_append(crc32c::crc32c(&out), &rest);
        out.extend_from_slice(&sum.to_le_bytes());
        out.extend_from_slice(&rest);
        out
    }
}

/// The checksums of a complete object.
#[derive(Debug)]
pub(crate) struct Sums {
    frame_bytes: u32,
    data_bytes: u64,
    sums: Box<[u32]>,
}

/// The fields of a footer, bounded but not yet checked against its checksum.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Footer {
    sum: u32,
    frame_bytes: u32,
    data_bytes: u64,
}

impl Footer {
    /// Parses a footer of the object `id`; the error says which field is wrong.
    pub(crate) fn parse(bytes: &[u8; FOOTER_BYTES as usize], id: ObjectId) -> Result<Self, String> {
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap_or([0; 4]));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or([0; 8]));
        if &bytes[40..48] != MAGIC {
            return Err("the footer is not that of an object (torn or overwritten)".into());
        }
        let footer = Footer { sum: u32_at(0), frame_bytes: u32_at(4), data_bytes: u64_at(8) };
        if bytes[16..32] != id.to_bytes() {
            return Err("the footer is that of another object".into());
        }
        if !FRAME_BYTES_RANGE.contains(&footer.frame_bytes)
            || !footer.frame_bytes.is_power_of_two()
            || footer.data_bytes > OBJECT_BYTES_MAX
        {
            return Err("the footer holds impossible sizes".into());
        }
        Ok(footer)
    }

    /// Length of the checksum table before the footer.
    pub(crate) fn table_bytes(&self) -> u64 {
        self.data_bytes.div_ceil(u64::from(self.frame_bytes)) * 4
    }
}

impl Sums {
    /// Parses the table that belongs to a footer; `raw_footer` holds the bytes that `footer` was parsed from.
    pub(crate) fn parse(
        table: &[u8],
        raw_footer: &[u8; FOOTER_BYTES as usize],
        footer: Footer,
    ) -> Result<Sums, String> {
        if table.len() as u64 != footer.table_bytes() {
            return Err("the checksum table is cut short".into());
        }
        if crc32c::crc32c_append(crc32c::crc32c(table), &raw_footer[4..]) != footer.sum {
            return Err("the checksum table does not match its own checksum".into());
        }
        let sums =
            table.chunks_exact(4).map(|c| u32::from_le_bytes(c.try_into().unwrap_or([0; 4]))).collect();
        Ok(Sums { frame_bytes: footer.frame_bytes, data_bytes: footer.data_bytes, sums })
    }

    /// Parses the table and footer at the end of `bytes`.
    pub(crate) fn parse_end(bytes: &[u8], id: ObjectId) -> Result<Sums, String> {
        let Some((before, raw)) = bytes.split_last_chunk::<{ FOOTER_BYTES as usize }>() else {
            return Err("too short for a footer".into());
        };
        let footer = Footer::parse(raw, id)?;
        let table_at = (before.len() as u64).checked_sub(footer.table_bytes());
        let table_at = table_at.ok_or("too short for its checksum table")?;
        Sums::parse(&before[table_at as usize..], raw, footer)
    }

    /// Bytes of data in the object.
    pub(crate) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Length of table and footer on the store.
    pub(crate) fn trailer_bytes(&self) -> u64 {
        self.sums.len() as u64 * 4 + FOOTER_BYTES
    }

    /// Bytes of each frame but the last.
    pub(super) fn frame_bytes(&self) -> u64 {
        u64::from(self.frame_bytes)
    }

    /// Whether the checksum of a frame's bytes is right.
    pub(super) fn check(&self, frame: u64, bytes: &[u8]) -> bool {
        let sum = usize::try_from(frame).ok().and_then(|frame| self.sums.get(frame));
        sum == Some(&crc32c::crc32c(bytes))
    }

    /// The smallest run of whole frames around `start..end` (which lie inside the object).
    pub(crate) fn window(&self, start: u64, end: u64) -> (u64, u64) {
        let frame = u64::from(self.frame_bytes);
        let from = start / frame * frame;
        let to = end.div_ceil(frame).saturating_mul(frame).min(self.data_bytes);
        (from, to)
    }
}
