//! Record batches of message format 2: header, checks, and walking the records inside.
//!
//! Layout (Kafka protocol guide, "Record Batch"), in this order:
//!
//! - base offset i64, length i32 (of what follows), leader epoch i32, magic i8,
//! - CRC-32C u32 (of what follows), attributes i16, last offset delta i32,
//! - base timestamp i64, max timestamp i64,
//! - producer id i64, producer epoch i16, base sequence i32,
//! - record count i32, records.
//!
//! The broker changes only the base offset and the leader epoch, both outside of the checksum.

use std::io::{BufRead, BufReader};

use parking_lot::Mutex;

/// Bytes before the records.
pub(crate) const HEADER_BYTES: usize = 61;
/// Bytes that the length field does not count: those up to its end.
const LENGTH_END: usize = 12;
/// First byte under the checksum.
const CRC_START: usize = 21;
/// Bytes that the broker rewrites: base offset, length (kept), leader epoch.
pub(crate) const REWRITTEN_BYTES: usize = 16;

/// Largest decompressed batch in bytes: the limit that librdkafka's `receive.message.max.bytes` sets for its
/// consumers.
const DECOMPRESSED_BYTES_MAX: u64 = 100_000_000;
/// Snappy decompresses a whole batch into memory; above this size, one batch at a time.
const LARGE_BYTES: usize = 8 << 20;
static LARGE: Mutex<()> = Mutex::new(());
/// Magic bytes of the header that snappy-java writes before its chunks; two version numbers follow.
const SNAPPY_JAVA: [u8; 8] = [0x82, b'S', b'N', b'A', b'P', b'P', b'Y', 0];
const SNAPPY_JAVA_HEADER_BYTES: usize = 16;

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

/// Reasons to reject bytes as a batch.
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
    #[error("the compressed records cannot be decompressed")]
    Compressed,
    #[error("compression {0} is not known")]
    Codec(i16),
    #[error("the records have more than {DECOMPRESSED_BYTES_MAX} bytes once they are decompressed")]
    Large,
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
        // The magic byte has the same position in all formats, so the error can name a foreign format.
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
        // The broker assigns the offsets, so they are dense inside a batch.
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

    /// Whether the checksum of the batch at the start of `bytes` is right; `bytes` must hold it all.
    pub(crate) fn crc_matches(&self, bytes: &[u8]) -> bool {
        crc32c::crc32c(&bytes[CRC_START..self.bytes]) == self.crc
    }
}

/// Checks a producer's bytes for one partition: exactly one whole and sound batch, neither transactional nor
/// a control batch.
pub(crate) fn check_produced(bytes: &[u8]) -> Result<Header, Malformed> {
    // Producers number from 0. The broker replaces that base offset, but a negative one is refused here.
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
    let mut expected = 0;
    let mut dense = true;
    walk(&header, bytes, |record| {
        dense = record.offset_delta == expected && expected < header.count;
        expected += 1;
        dense
    })?;
    if !dense || expected != header.count {
        return Err(Malformed::Records);
    }
    Ok(header)
}

/// Position and time of one record.
pub(crate) struct RecordPosition {
    pub(crate) offset_delta: i32,
    pub(crate) timestamp: i64,
}

/// Passes each record of a batch, decompressed, to `visit` until that returns `false`.
///
/// # Errors
/// [`Malformed`] at the first invalid record.
pub(crate) fn walk(
    header: &Header,
    batch: &[u8],
    visit: impl FnMut(RecordPosition) -> bool,
) -> Result<(), Malformed> {
    let bytes = &batch[HEADER_BYTES..header.bytes];
    match header.attributes & COMPRESSION_MASK {
        0 => walk_records(header, bytes, visit),
        1 => walk_records(header, BufReader::new(flate2::bufread::MultiGzDecoder::new(bytes)), visit),
        2 => {
            let size = snappy_bytes(bytes)?;
            let _turn = (size > LARGE_BYTES).then(|| LARGE.lock());
            walk_records(header, &snappy(bytes)?[..], visit)
        }
        3 => walk_records(header, BufReader::new(lz4_flex::frame::FrameDecoder::new(bytes)), visit),
        4 => {
            let decoder =
                zstd::stream::read::Decoder::with_buffer(bytes).map_err(|_| Malformed::Compressed)?;
            walk_records(header, BufReader::new(decoder), visit)
        }
        codec => Err(Malformed::Codec(codec)),
    }
}

/// The chunks of a Snappy payload: those that snappy-java framed, or else the whole payload.
fn snappy_chunks(bytes: &[u8]) -> impl Iterator<Item = Result<&[u8], Malformed>> {
    let (mut rest, framed) = match bytes.strip_prefix(&SNAPPY_JAVA) {
        Some(_) => (bytes.get(SNAPPY_JAVA_HEADER_BYTES..).unwrap_or_default(), true),
        None => (bytes, false),
    };
    let mut first = true;
    std::iter::from_fn(move || {
        if !framed {
            return std::mem::take(&mut first).then_some(Ok(rest));
        }
        if rest.is_empty() {
            return None;
        }
        let chunk = rest.split_first_chunk().and_then(|(length, after)| {
            let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
            after.split_at_checked(length)
        });
        let Some((chunk, after)) = chunk else {
            rest = &[];
            return Some(Err(Malformed::Compressed));
        };
        rest = after;
        Some(Ok(chunk))
    })
}

/// Most bytes that a byte of Snappy yields: three bytes copy 64.
const SNAPPY_GROWTH_MAX: usize = 22;

/// Size of the decompressed payload. The decompressor reserves what a chunk announces, so that must be possible.
fn snappy_bytes(bytes: &[u8]) -> Result<usize, Malformed> {
    let mut total = 0;
    for chunk in snappy_chunks(bytes) {
        let chunk = chunk?;
        let announced = snap::raw::decompress_len(chunk).map_err(|_| Malformed::Compressed)?;
        total += announced;
        if total as u64 > DECOMPRESSED_BYTES_MAX {
            return Err(Malformed::Large);
        }
        if announced / SNAPPY_GROWTH_MAX > chunk.len() {
            return Err(Malformed::Compressed);
        }
    }
    Ok(total)
}

fn snappy(bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
    let mut all = Vec::new();
    for chunk in snappy_chunks(bytes) {
        let part = snap::raw::Decoder::new().decompress_vec(chunk?).map_err(|_| Malformed::Compressed)?;
        all.extend_from_slice(&part);
    }
    Ok(all)
}

fn walk_records(
    header: &Header,
    bytes: impl BufRead,
    mut visit: impl FnMut(RecordPosition) -> bool,
) -> Result<(), Malformed> {
    let mut fields = Fields { bytes, left: DECOMPRESSED_BYTES_MAX };
    while !fields.is_at_end()? {
        // The fields of a record fill exactly its announced length.
        let length = fields.length()?.ok_or(Malformed::Records)?;
        let after = fields.left.checked_sub(length).ok_or(Malformed::Large)?;
        fields.skip(1)?; // attributes
        let timestamp_delta = fields.varint()?;
        let offset_delta = i32::try_from(fields.varint()?).map_err(|_| Malformed::Records)?;
        fields.skip_bytes()?; // key
        fields.skip_bytes()?; // value
        let headers = fields.length()?.ok_or(Malformed::Records)?;
        for _ in 0..headers {
            let name = fields.length()?.ok_or(Malformed::Records)?;
            fields.skip(name)?;
            fields.skip_bytes()?;
        }
        if fields.left != after {
            return Err(Malformed::Records);
        }
        let timestamp = header.base_timestamp.saturating_add(timestamp_delta);
        if !visit(RecordPosition { offset_delta, timestamp }) {
            break;
        }
    }
    Ok(())
}

/// The fields of records, read from memory or from a decompressor.
struct Fields<R> {
    bytes: R,
    /// Bytes that may still be read under the limit.
    left: u64,
}

impl<R: BufRead> Fields<R> {
    fn is_at_end(&mut self) -> Result<bool, Malformed> {
        Ok(self.bytes.fill_buf().map_err(|_| Malformed::Compressed)?.is_empty())
    }

    fn skip(&mut self, count: u64) -> Result<(), Malformed> {
        self.left = self.left.checked_sub(count).ok_or(Malformed::Large)?;
        let mut count = usize::try_from(count).map_err(|_| Malformed::Large)?;
        while count > 0 {
            let there = self.bytes.fill_buf().map_err(|_| Malformed::Compressed)?.len().min(count);
            if there == 0 {
                return Err(Malformed::Records);
            }
            self.bytes.consume(there);
            count -= there;
        }
        Ok(())
    }

    /// Zigzag variable-length integer of at most 10 bytes.
    fn varint(&mut self) -> Result<i64, Malformed> {
        let mut value = 0u64;
        for index in 0..10 {
            let mut byte = [0];
            self.bytes.read_exact(&mut byte).map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => Malformed::Records,
                _ => Malformed::Compressed,
            })?;
            self.left = self.left.checked_sub(1).ok_or(Malformed::Large)?;
            value |= u64::from(byte[0] & 0x7f) << (7 * index);
            if byte[0] & 0x80 == 0 {
                return Ok((value >> 1) as i64 ^ -((value & 1) as i64));
            }
        }
        Err(Malformed::Records)
    }

    /// A length or a count; `None` is the -1 of an absent field.
    fn length(&mut self) -> Result<Option<u64>, Malformed> {
        match self.varint()? {
            -1 => Ok(None),
            length => u64::try_from(length).map(Some).map_err(|_| Malformed::Records),
        }
    }

    fn skip_bytes(&mut self) -> Result<(), Malformed> {
        match self.length()? {
            Some(length) => self.skip(length),
            None => Ok(()),
        }
    }
}
