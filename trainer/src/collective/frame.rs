//! Frames of the ring protocol: a fixed header of 44 bytes, then the payload, which may be encrypted.
//!
//! Little-endian: magic `MRR1`, kind u8, version u8, sender rank u16, epoch u64, step u64,
//! bucket u32, phase u32, payload bytes u32, payload crc32c u32, crc32c u32 of the 40 bytes
//! before it.
//!
//! The highest bit of the kind marks a frame whose data lie in shared memory ([`super::shared`]). Its payload is a
//! [`Span`], the place of the data: position u64, bytes u32.
use std::io;

use tokio::io::{AsyncRead, AsyncReadExt};

pub(crate) const HEADER_BYTES: usize = 44;
/// The part of a header before its checksums.
const BOUND_BYTES: usize = 36;
/// Largest payload; senders split longer data.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 64 << 20;
/// The rank in an abort frame when the failing rank is unknown.
pub(crate) const NOBODY: u32 = u32::MAX;

const MAGIC: [u8; 4] = *b"MRR1";
/// Grows with the form of the frames and with the order of a step's sums: ranks of different versions form no ring.
const VERSION: u8 = 6;
/// The bit of the kind that marks data in shared memory.
const SHARED: u8 = 0x80;
/// Bytes of an encoded [`Span`].
pub(crate) const SPAN_BYTES: usize = 12;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    /// The first frame of a connection: a nonce. The bucket field is the intended receiver's rank.
    Hello = 1,
    /// The response to `Proof`, which ends the handshake.
    Welcome = 2,
    /// A partial sum of `i64`.
    Reduce = 3,
    /// A complete sum of `i64`.
    Gather = 4,
    /// A piece of a replica's state.
    State = 5,
    /// The ring is broken; the bucket field is the missing rank or [`NOBODY`].
    Abort = 6,
    /// The response to `Hello`: a nonce and the receiver's proof of the secret.
    Challenge = 7,
    /// The response to `Challenge`: the sender's proof of the secret.
    Proof = 8,
    /// A partial sum of `f32`.
    ReduceF32 = 9,
    /// A complete sum of `f32`.
    GatherF32 = 10,
    /// The first frame of a connection between partners, as `Hello` is that of a connection of the ring.
    Partner = 11,
    /// A partial or complete sum of `i64`, between partners.
    Double = 12,
    /// A partial or complete sum of `f32`, between partners.
    DoubleF32 = 13,
    /// The frame after `Welcome` on a connection of the ring: shared memory for the data of later frames, or none.
    Offer = 14,
    /// The response to `Offer`: whether the receiver has mapped the memory.
    Answer = 15,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Kind> {
        Some(match byte {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Reduce,
            4 => Kind::Gather,
            5 => Kind::State,
            6 => Kind::Abort,
            7 => Kind::Challenge,
            8 => Kind::Proof,
            9 => Kind::ReduceF32,
            10 => Kind::GatherF32,
            11 => Kind::Partner,
            12 => Kind::Double,
            13 => Kind::DoubleF32,
            14 => Kind::Offer,
            15 => Kind::Answer,
            _ => return None,
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) rank: u16,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    pub(crate) bucket: u32,
    pub(crate) phase: u32,
}

/// A header as received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Received {
    pub(crate) header: Header,
    pub(crate) bytes: usize,
    pub(crate) checksum: u32,
    /// Whether the payload is a [`Span`].
    pub(crate) is_shared: bool,
}

/// The place of a frame's data in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// Bytes that the sender has written to the memory before these, since the ring was formed.
    pub(crate) position: u64,
    pub(crate) bytes: u32,
}

impl Span {
    pub(crate) fn encode(&self) -> [u8; SPAN_BYTES] {
        let mut out = [0; SPAN_BYTES];
        out[..8].copy_from_slice(&self.position.to_le_bytes());
        out[8..].copy_from_slice(&self.bytes.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Span> {
        let (position, bytes) = bytes.split_first_chunk()?;
        let (position, bytes) = (u64::from_le_bytes(*position), u32::from_le_bytes(bytes.try_into().ok()?));
        Some(Span { position, bytes })
    }
}

/// Why a frame could not be read.
#[derive(Debug)]
pub(crate) enum Fault {
    Closed(io::Error),
    Malformed(String),
}

impl Received {
    /// What the header says, as bytes: encryption binds the payload to them.
    pub(crate) fn bound(&self) -> [u8; BOUND_BYTES] {
        self.header.bound(self.bytes, self.is_shared)
    }
}

impl Header {
    /// What a header says beside a payload of `bytes` bytes: the part before its checksums.
    pub(crate) fn bound(&self, bytes: usize, is_shared: bool) -> [u8; BOUND_BYTES] {
        let mut out = [0u8; BOUND_BYTES];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&MAGIC);
        let mark = if is_shared { SHARED } else { 0 };
        put(&[self.kind as u8 | mark, VERSION]);
        put(&self.rank.to_le_bytes());
        put(&self.epoch.to_le_bytes());
        put(&self.step.to_le_bytes());
        put(&self.bucket.to_le_bytes());
        put(&self.phase.to_le_bytes());
        // Senders split data at PAYLOAD_BYTES_MAX, far below u32::MAX.
        put(&(bytes as u32).to_le_bytes());
        out
    }

    pub(crate) fn encode(&self, payload: &[u8]) -> [u8; HEADER_BYTES] {
        self.encode_as(payload, false)
    }

    /// The header of a frame with this payload, which is the place of its data if `is_shared`.
    pub(crate) fn encode_as(&self, payload: &[u8], is_shared: bool) -> [u8; HEADER_BYTES] {
        let mut out = [0u8; HEADER_BYTES];
        out[..BOUND_BYTES].copy_from_slice(&self.bound(payload.len(), is_shared));
        out[BOUND_BYTES..HEADER_BYTES - 4].copy_from_slice(&crc32c::crc32c(payload).to_le_bytes());
        let checksum = crc32c::crc32c(&out[..HEADER_BYTES - 4]);
        out[HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Received, String> {
        if bytes[..4] != MAGIC {
            return Err("not a ring frame".to_owned());
        }
        if bytes[5] != VERSION {
            return Err(format!("ring protocol version {} (this is {VERSION})", bytes[5]));
        }
        if u32_at(bytes, 40) != crc32c::crc32c(&bytes[..40]) {
            return Err("header checksum mismatch".to_owned());
        }
        let kind = Kind::from_byte(bytes[4] & !SHARED).ok_or_else(|| format!("frame kind {}", bytes[4]))?;
        let length = u32_at(bytes, 32) as usize;
        if length > PAYLOAD_BYTES_MAX {
            return Err(format!("payload of {length} bytes (limit {PAYLOAD_BYTES_MAX})"));
        }
        Ok(Received {
            header: Header {
                kind,
                rank: u16::from_le_bytes([bytes[6], bytes[7]]),
                epoch: u64_at(bytes, 8),
                step: u64_at(bytes, 16),
                bucket: u32_at(bytes, 24),
                phase: u32_at(bytes, 28),
            },
            bytes: length,
            checksum: u32_at(bytes, 36),
            is_shared: bytes[4] & SHARED != 0,
        })
    }
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    let mut word = [0u8; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    let mut word = [0u8; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

/// Reads one header. Not cancel safe: a cancelled read loses its place in the stream.
pub(crate) async fn read_header<R: AsyncRead + Unpin>(from: &mut R) -> Result<Received, Fault> {
    let mut bytes = [0u8; HEADER_BYTES];
    from.read_exact(&mut bytes).await.map_err(Fault::Closed)?;
    Header::decode(&bytes).map_err(Fault::Malformed)
}

/// Reads the payload of `received` into `into` and checks it. Not cancel safe.
pub(crate) async fn read_payload<R: AsyncRead + Unpin>(
    from: &mut R,
    received: &Received,
    into: &mut Vec<u8>,
) -> Result<(), Fault> {
    into.resize(received.bytes, 0);
    from.read_exact(into).await.map_err(Fault::Closed)?;
    if crc32c::crc32c(into) != received.checksum {
        return Err(Fault::Malformed("payload checksum mismatch".to_owned()));
    }
    Ok(())
}
