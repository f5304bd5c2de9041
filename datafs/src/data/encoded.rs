//! Encoded objects: each frame of 64 KiB is compressed, encrypted or both on its own. A read decodes only the
//! frames that it touches.
//!
//! Format, all integers little-endian, `n = ceil(data_bytes / frame_bytes)`: the stored frames one after the
//! other; `n ×` (`u32` stored length, its highest bit set when the frame is not compressed; `u32` CRC-32C of
//! the stored bytes); then a footer of 136 bytes: `u32` CRC-32C of the table and of the rest of the footer;
//! `u32` frame_bytes; `u64` data_bytes; 16 bytes object id; `u8` compression (0 none, 1 lz4, 2 zstd); `u8`
//! length of the key's name, 0 when not encrypted; 6 bytes 0; 64 bytes key name; 8 bytes key check; 16 bytes
//! proof; 8 bytes magic.
//!
//! Encryption is AES-256-GCM with a key per object (HKDF-SHA256 of the volume's key, the object's id as salt)
//! and the frame's number as nonce. The proof is the tag over table and footer: it detects exchanged, missing
//! and truncated frames. The lengths of frames, and so of files, are not hidden.

use std::ops::Range;

use ring::aead::LessSafeKey;

use super::checksum::{FRAME_BYTES, OBJECT_BYTES_MAX};
use super::codec::{Codec, Compressor, TAG_BYTES, decompress, open, prove, seal};
use super::error::ObjectError;
use super::keyring::{KEY_NAME_BYTES_MAX, Keyring};
use crate::object::{CHECK_BYTES, Compression, KeyIdentity, ObjectId};

/// Length of the footer.
pub(super) const FOOTER_BYTES: usize = 136;
/// Length of a frame's entry in the table.
const ENTRY_BYTES: usize = 8;

const MAGIC: &[u8; 8] = b"MRenc\x00v1";
const NOT_COMPRESSED: u32 = 1 << 31;
const NAME_AT: usize = 40;
const CHECK_AT: usize = NAME_AT + KEY_NAME_BYTES_MAX;
const PROOF_AT: usize = CHECK_AT + CHECK_BYTES;

/// The frame index of an encoded object, with the key to decode the frames.
pub(super) struct EncodedIndex {
    id: ObjectId,
    frame_bytes: u64,
    data_bytes: u64,
    /// Start of each stored frame, and the end of the last one.
    offsets: Box<[u64]>,
    /// Stored length with the [`NOT_COMPRESSED`] flag, and checksum.
    entries: Box<[(u32, u32)]>,
    compression: Compression,
    key: Option<LessSafeKey>,
    /// The volume key that `key` is derived from.
    sealed_with: Option<KeyIdentity>,
}

impl std::fmt::Debug for EncodedIndex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EncodedIndex").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Length of table and footer, from the footer; the error says which field is wrong.
pub(super) fn trailer_bytes(footer: &[u8; FOOTER_BYTES]) -> Result<u64, String> {
    if &footer[FOOTER_BYTES - 8..] != MAGIC {
        return Err("the footer is not that of an encoded object (torn or overwritten)".into());
    }
    let (frame_bytes, data_bytes) = (u32_at(footer, 4), u64_at(footer, 8));
    if !frame_bytes.is_power_of_two()
        || !(4096..=16 << 20).contains(&frame_bytes)
        || data_bytes > OBJECT_BYTES_MAX
    {
        return Err("the footer holds impossible sizes".into());
    }
    let frames = data_bytes.div_ceil(u64::from(frame_bytes));
    Ok(frames * ENTRY_BYTES as u64 + FOOTER_BYTES as u64)
}

impl EncodedIndex {
    /// Parses table and footer, which are the end of an object of `stored_bytes`.
    pub(super) fn parse(
        trailer: &[u8],
        stored_bytes: u64,
        id: ObjectId,
        keys: &Keyring,
    ) -> Result<EncodedIndex, ObjectError> {
        let corrupt =
            |reason: &str| ObjectError::Corrupt { id, byte: stored_bytes, reason: reason.to_owned() };
        let Some((table, footer)) = trailer.split_last_chunk::<FOOTER_BYTES>() else {
            return Err(corrupt("too short for a footer"));
        };
        let expected = trailer_bytes(footer).map_err(|reason| corrupt(&reason))?;
        if expected != trailer.len() as u64 {
            return Err(corrupt("its table of frames is cut short"));
        }
        if crc32c::crc32c_append(crc32c::crc32c(table), &footer[4..]) != u32_at(footer, 0) {
            return Err(corrupt("its table of frames does not match its checksum"));
        }
        if footer[16..32] != id.to_bytes() {
            return Err(corrupt("the footer is that of another object"));
        }
        let compression = Compression::from_byte(footer[32])
            .ok_or_else(|| corrupt("it is compressed in a way that this build does not know"))?;
        let mut sealed_with = None;
        let key = match footer[33] {
            0 => None,
            len => {
                let name = footer.get(NAME_AT..NAME_AT + usize::from(len)).filter(|name| name.len() <= 64);
                let name = name.and_then(|name| std::str::from_utf8(name).ok());
                let name = name.ok_or_else(|| corrupt("the name of its key is damaged"))?;
                let wrong = |missing| ObjectError::Key { id, key: name.to_owned(), missing };
                let key = keys.get(name).ok_or_else(|| wrong(true))?;
                let identity = key.identity();
                if identity.1 != footer[CHECK_AT..PROOF_AT] {
                    return Err(wrong(false));
                }
                sealed_with = Some(identity);
                let key = key.for_object(id).ok_or_else(|| wrong(false))?;
                if prove(&key, &proven(table, footer)).as_ref().map(|tag| &tag[..])
                    != Some(&footer[PROOF_AT..PROOF_AT + TAG_BYTES])
                {
                    return Err(corrupt("its table of frames was changed after it was written"));
                }
                Some(key)
            }
        };
        let (frame_bytes, data_bytes) = (u64::from(u32_at(footer, 4)), u64_at(footer, 8));
        let entries: Box<[(u32, u32)]> =
            table.chunks_exact(ENTRY_BYTES).map(|entry| (u32_at(entry, 0), u32_at(entry, 4))).collect();
        let mut end = 0;
        let ends = entries.iter().map(|(len, _)| {
            end += u64::from(len & !NOT_COMPRESSED);
            end
        });
        let offsets: Box<[u64]> = std::iter::once(0).chain(ends).collect();
        let longest = frame_bytes + TAG_BYTES as u64;
        if end + expected != stored_bytes
            || entries.iter().any(|(len, _)| u64::from(len & !NOT_COMPRESSED) > longest)
        {
            return Err(corrupt("its frames are not as long as its table says"));
        }
        Ok(EncodedIndex { id, frame_bytes, data_bytes, offsets, entries, compression, key, sealed_with })
    }

    /// The volume key that the object is encrypted with.
    pub(super) fn sealed_with(&self) -> Option<&KeyIdentity> {
        self.sealed_with.as_ref()
    }

    pub(super) fn frame_bytes(&self) -> u64 {
        self.frame_bytes
    }

    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    pub(super) fn stored(&self, frames: Range<u64>) -> Range<u64> {
        let last = self.offsets.len() - 1;
        let at = |frame: u64| self.offsets[usize::try_from(frame).unwrap_or(last).min(last)];
        at(frames.start)..at(frames.end)
    }

    pub(super) fn check(&self, frame: u64, stored: &[u8]) -> bool {
        let entry = usize::try_from(frame).ok().and_then(|frame| self.entries.get(frame));
        entry.is_some_and(|(_, sum)| *sum == crc32c::crc32c(stored))
    }

    /// Decodes the stored bytes of a frame into `data`, which has the length of the frame's data.
    pub(super) fn decode(&self, frame: u64, stored: &[u8], data: &mut [u8]) -> Result<(), String> {
        let entry = usize::try_from(frame).ok().and_then(|frame| self.entries.get(frame));
        let (len, _) = entry.ok_or("there is no such frame")?;
        let mut sealed;
        let packed = match &self.key {
            None => stored,
            Some(key) => {
                sealed = stored.to_vec();
                open(key, frame, &mut sealed)?
            }
        };
        if len & NOT_COMPRESSED == 0 {
            return decompress(self.compression, packed, data);
        }
        if packed.len() != data.len() {
            return Err("the frame has another length than it should".into());
        }
        data.copy_from_slice(packed);
        Ok(())
    }
}

/// Encoder for the data of one object, frame by frame.
#[derive(Debug)]
pub(super) struct Encoder {
    codec: Codec,
    id: ObjectId,
    key: Option<LessSafeKey>,
    compressor: Compressor,
    frame: Vec<u8>,
    table: Vec<u8>,
    frames: u64,
    data_bytes: u64,
}

impl Encoder {
    pub(super) fn new(codec: &Codec, id: ObjectId) -> Result<Encoder, String> {
        let key = match &codec.key {
            None => None,
            Some(key) => Some(key.for_object(id).ok_or("the key of the object cannot be derived")?),
        };
        Ok(Encoder {
            compressor: Compressor::new(codec.compression).map_err(|e| format!("zstd: {e}"))?,
            codec: codec.clone(),
            id,
            key,
            frame: Vec::with_capacity(FRAME_BYTES as usize),
            table: Vec::new(),
            frames: 0,
            data_bytes: 0,
        })
    }

    /// Bytes taken so far.
    pub(super) fn data_bytes(&self) -> u64 {
        self.data_bytes
    }

    /// Encodes the next bytes; appends each finished frame to `out`.
    pub(super) fn update(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) -> Result<(), String> {
        self.data_bytes += bytes.len() as u64;
        while !bytes.is_empty() {
            let room = FRAME_BYTES as usize - self.frame.len();
            let (now, rest) = bytes.split_at(room.min(bytes.len()));
            self.frame.extend_from_slice(now);
            if self.frame.len() == FRAME_BYTES as usize {
                self.end_frame(out)?;
            }
            bytes = rest;
        }
        Ok(())
    }

    fn end_frame(&mut self, out: &mut Vec<u8>) -> Result<(), String> {
        let (packed, flag) = match self.compressor.compress(&self.frame) {
            Some(packed) => (packed, 0),
            None => (&self.frame[..], NOT_COMPRESSED),
        };
        let at = out.len();
        match &self.key {
            None => out.extend_from_slice(packed),
            Some(key) => {
                let mut sealed = packed.to_vec();
                seal(key, self.frames, &mut sealed)?;
                out.extend_from_slice(&sealed);
            }
        }
        let stored = &out[at..];
        // At most a frame and a tag.
        self.table.extend_from_slice(&(stored.len() as u32 | flag).to_le_bytes());
        self.table.extend_from_slice(&crc32c::crc32c(stored).to_le_bytes());
        self.frames += 1;
        self.frame.clear();
        Ok(())
    }

    /// Appends the last frame, the table and the footer to `out`.
    pub(super) fn finish(mut self, out: &mut Vec<u8>) -> Result<(), String> {
        if !self.frame.is_empty() {
            self.end_frame(out)?;
        }
        let mut footer = [0; FOOTER_BYTES];
        footer[4..8].copy_from_slice(&FRAME_BYTES.to_le_bytes());
        footer[8..16].copy_from_slice(&self.data_bytes.to_le_bytes());
        footer[16..32].copy_from_slice(&self.id.to_bytes());
        footer[32] = self.codec.compression.to_byte();
        footer[FOOTER_BYTES - 8..].copy_from_slice(MAGIC);
        if let (Some(volume_key), Some(key)) = (&self.codec.key, &self.key) {
            let name = volume_key.name().as_bytes();
            footer[33] = name.len() as u8;
            footer[NAME_AT..NAME_AT + name.len()].copy_from_slice(name);
            footer[CHECK_AT..PROOF_AT].copy_from_slice(&volume_key.check());
            let proof = prove(key, &proven(&self.table, &footer)).ok_or("the table cannot be sealed")?;
            footer[PROOF_AT..PROOF_AT + TAG_BYTES].copy_from_slice(&proof);
        }
        let sum = crc32c::crc32c_append(crc32c::crc32c(&self.table), &footer[4..]);
        footer[..4].copy_from_slice(&sum.to_le_bytes());
        out.extend_from_slice(&self.table);
        out.extend_from_slice(&footer);
        Ok(())
    }
}

/// The input of the proof: the table, and the footer without checksum and proof.
fn proven(table: &[u8], footer: &[u8; FOOTER_BYTES]) -> Vec<u8> {
    [table, &footer[4..PROOF_AT], MAGIC].concat()
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}
