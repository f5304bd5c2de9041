//! Record batches of message format 2: header, checks, and walking the records inside.
//!
//! Layout (Kafka protocol guide, "Record Batch"): base offset i64, length i32 (of what follows),
//! leader epoch i32, magic i8, CRC-32C u32 (of what follows), attributes i16, last offset delta
//! i32, base timestamp i64, max timestamp i64, producer id i64, producer epoch i16, base sequence
//! i32, record count i32, records. The broker changes only the base offset and the leader epoch,
//! both outside of the checksum.

/// Bytes before the records.
pub(crate) const HEADER_BYTES: usize = 61;
/// Bytes before what the length field counts.
const LENGTH_END: usize = 12;
/// First byte under the checksum.
const CRC_START: usize = 21;
/// Bytes that the broker rewrites: base offset, length (kept), leader epoch.
pub(crate) const REWRITTEN_BYTES: usize = 16;

const COMPRESSION_MASK: i16 = 0x07;
const TRANSACTIONAL: i16 = 0x10;
const CONTROL: i16 = 0x20;

/// A batch header, fields as in the layout above.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) base_offset: i64,
    /// Size of the whole batch in bytes.
    pub(crate) bytes: usize,
    pub(crate) crc: u32,
    pub(crate) attributes: i16,
    pub(crate) last_offset_delta: i32,
    pub(crate) base_timestamp: i64,
    pub(crate) max_timestamp: i64,
    pub(crate) producer_id: i64,
    pub(crate) producer_epoch: i16,
    pub(crate) base_sequence: i32,
    pub(crate) count: i32,
}

/// Why bytes are not a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("the batch is cut short")]
    Short,
    #[error("message format {0}, only 2 is accepted")]
    Magic(i8),
    #[error("impossible batch header")]
    Header,
    #[error("checksum mismatch")]
    Crc,
    #[error("the records do not match the batch header")]
    Records,
    #[error("more than one batch for a partition")]
    Several,
    #[error("control and transactional batches are not accepted")]
    Control,
}

fn be<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

impl Header {
    /// Reads the header at the start of `bytes`, which may end anywhere after it.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        if bytes.len() < HEADER_BYTES {
            return Err(Malformed::Short);
        }
        // The magic byte is at the same place in all formats, so a foreign one is named as such.
        let magic = bytes[16] as i8;
        if magic != 2 {
            return Err(Malformed::Magic(magic));
        }
        let length = i32::from_be_bytes(be(bytes, 8));
        let header = Self {
            base_offset: i64::from_be_bytes(be(bytes, 0)),
            bytes: usize::try_from(length).map_err(|_| Malformed::Header)? + LENGTH_END,
            crc: u32::from_be_bytes(be(bytes, 17)),
            attributes: i16::from_be_bytes(be(bytes, 21)),
            last_offset_delta: i32::from_be_bytes(be(bytes, 23)),
            base_timestamp: i64::from_be_bytes(be(bytes, 27)),
            max_timestamp: i64::from_be_bytes(be(bytes, 35)),
            producer_id: i64::from_be_bytes(be(bytes, 43)),
            producer_epoch: i16::from_be_bytes(be(bytes, 51)),
            base_sequence: i32::from_be_bytes(be(bytes, 53)),
            count: i32::from_be_bytes(be(bytes, 57)),
        };
        // The broker numbers records itself, so that offsets inside a batch are dense.
        let dense = header.count >= 1 && header.last_offset_delta == header.count - 1;
        if header.bytes < HEADER_BYTES || !dense || header.base_offset < 0 {
            return Err(Malformed::Header);
        }
        Ok(header)
    }

    /// Offset after the last record.
    pub(crate) fn next_offset(&self) -> i64 {
        self.base_offset.saturating_add(i64::from(self.last_offset_delta) + 1)
    }

    pub(crate) fn is_compressed(&self) -> bool {
        self.attributes & COMPRESSION_MASK != 0
    }

    /// Whether the checksum of the batch at the start of `bytes` is right; `bytes` must hold it all.
    pub(crate) fn crc_matches(&self, bytes: &[u8]) -> bool {
        crc32c::crc32c(&bytes[CRC_START..self.bytes]) == self.crc
    }
}

/// Checks what a producer sent for one partition: exactly one whole batch, sound, and not one of
/// the kinds that only brokers write.
pub(crate) fn check_produced(bytes: &[u8]) -> Result<Header, Malformed> {
    // Producers number from 0; whatever stands there is replaced, but must not confuse the checks.
    let header = Header::parse(bytes)?;
    match bytes.len().cmp(&header.bytes) {
        std::cmp::Ordering::Less => return Err(Malformed::Short),
        std::cmp::Ordering::Greater => return Err(Malformed::Several),
        std::cmp::Ordering::Equal => {}
    }
    if !header.crc_matches(bytes) {
        return Err(Malformed::Crc);
    }
    if header.attributes & (CONTROL | TRANSACTIONAL) != 0 {
        return Err(Malformed::Control);
    }
    if header.producer_id >= 0 && (header.producer_epoch < 0 || header.base_sequence < 0) {
        return Err(Malformed::Header);
    }
    // Compressed records pass through unopened; their consumers check them.
    if !header.is_compressed() {
        let mut walk = Records::new(&header, bytes);
        let dense =
            (0..header.count).all(|delta| walk.next().is_some_and(|record| record.offset_delta == delta));
        if !dense || !walk.rest.is_empty() {
            return Err(Malformed::Records);
        }
    }
    Ok(header)
}

/// Position and time of one record.
pub(crate) struct RecordPlace {
    pub(crate) offset_delta: i32,
    pub(crate) timestamp: i64,
}

/// The records of an uncompressed batch; ends early at anything malformed.
pub(crate) struct Records<'a> {
    base_timestamp: i64,
    rest: &'a [u8],
}

impl<'a> Records<'a> {
    pub(crate) fn new(header: &Header, batch: &'a [u8]) -> Self {
        Self { base_timestamp: header.base_timestamp, rest: &batch[HEADER_BYTES..header.bytes] }
    }
}

impl Iterator for Records<'_> {
    type Item = RecordPlace;

    fn next(&mut self) -> Option<RecordPlace> {
        let mut at = self.rest;
        let length = usize::try_from(varint(&mut at)?).ok()?;
        let (mut record, rest) = at.split_at_checked(length)?;
        self.rest = rest;
        record = record.get(1..)?; // attributes
        let timestamp_delta = varint(&mut record)?;
        let offset_delta = i32::try_from(varint(&mut record)?).ok()?;
        Some(RecordPlace { offset_delta, timestamp: self.base_timestamp.saturating_add(timestamp_delta) })
    }
}

/// Zigzag variable-length integer of at most 10 bytes.
fn varint(bytes: &mut &[u8]) -> Option<i64> {
    let mut value = 0u64;
    for (index, &byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            *bytes = &bytes[index + 1..];
            return Some((value >> 1) as i64 ^ -((value & 1) as i64));
        }
    }
    None
}
