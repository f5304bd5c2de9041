//! The codec of frames: compression, then encryption, between the file and the store.

use std::cell::RefCell;
use std::fmt;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce};

use super::keyring::VolumeKey;
use crate::object::Compression;

/// How the objects of a volume are written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Codec {
    pub(crate) compression: Compression,
    pub(crate) key: Option<VolumeKey>,
}

impl Codec {
    /// Whether frames are stored as they are.
    pub(crate) fn is_plain(&self) -> bool {
        self.compression == Compression::None && self.key.is_none()
    }
}

thread_local! {
    static DECOMPRESSOR: RefCell<Option<zstd::bulk::Decompressor<'static>>> = const { RefCell::new(None) };
}

/// Compressor of frames; reuses its buffer.
pub(super) struct Compressor {
    zstd: Option<zstd::bulk::Compressor<'static>>,
    compression: Compression,
    packed: Vec<u8>,
}

impl fmt::Debug for Compressor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compressor").field("compression", &self.compression).finish_non_exhaustive()
    }
}

impl Compressor {
    pub(super) fn new(compression: Compression) -> std::io::Result<Compressor> {
        let zstd = match compression {
            Compression::Zstd { level } => Some(zstd::bulk::Compressor::new(i32::from(level))?),
            _ => None,
        };
        Ok(Compressor { zstd, compression, packed: Vec::new() })
    }

    /// The frame compressed; `None` when that is no shorter.
    pub(super) fn compress(&mut self, frame: &[u8]) -> Option<&[u8]> {
        // Zstandard may not write more than the frame's length; LZ4 needs its worst case.
        self.packed.resize(
            match self.compression {
                Compression::Lz4 => lz4_flex::block::get_maximum_output_size(frame.len()),
                _ => frame.len(),
            },
            0,
        );
        let len = match (self.compression, &mut self.zstd) {
            (Compression::Lz4, _) => lz4_flex::block::compress_into(frame, &mut self.packed).ok()?,
            // Fails when the result is longer than the frame.
            (_, Some(zstd)) => zstd.compress_to_buffer(frame, &mut self.packed[..]).ok()?,
            (_, None) => return None,
        };
        (len < frame.len()).then(|| &self.packed[..len])
    }
}

/// Undoes [`Compressor::compress`]; `frame` is as long as the frame was.
pub(super) fn decompress(compression: Compression, packed: &[u8], frame: &mut [u8]) -> Result<(), String> {
    let len = match compression {
        Compression::None => return Err("a compressed frame in an object without compression".into()),
        Compression::Lz4 => {
            lz4_flex::block::decompress_into(packed, frame).map_err(|e| format!("lz4: {e}"))?
        }
        Compression::Zstd { .. } => DECOMPRESSOR.with_borrow_mut(|kept| {
            let mut zstd = match kept.take() {
                Some(zstd) => zstd,
                None => zstd::bulk::Decompressor::new().map_err(|e| format!("zstd: {e}"))?,
            };
            let done = zstd.decompress_to_buffer(packed, frame).map_err(|e| format!("zstd: {e}"));
            *kept = Some(zstd);
            done
        })?,
    };
    if len == frame.len() { Ok(()) } else { Err(format!("{len} bytes of {} came out", frame.len())) }
}

/// The nonce of a frame; unique because each object has its own key.
fn nonce(frame: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[NONCE_LEN - 8..].copy_from_slice(&frame.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Bytes that encryption adds to a frame.
pub(super) const TAG_BYTES: usize = 16;
/// The frame number in the nonce of the index; no frame has this number.
pub(super) const INDEX: u64 = u64::MAX;

/// Encrypts `bytes` in place and appends the tag.
pub(super) fn seal(key: &LessSafeKey, frame: u64, bytes: &mut Vec<u8>) -> Result<(), String> {
    key.seal_in_place_append_tag(nonce(frame), Aad::empty(), bytes).map_err(|_| "cannot encrypt".into())
}

/// Undoes [`seal`]; returns the bytes in front of the tag.
pub(super) fn open<'b>(key: &LessSafeKey, frame: u64, bytes: &'b mut [u8]) -> Result<&'b [u8], String> {
    let opened = key.open_in_place(nonce(frame), Aad::empty(), bytes);
    opened.map(|bytes| &*bytes).map_err(|_| "it does not decrypt: it was changed after it was written".into())
}

/// The proof that a process with the key wrote `index`.
pub(super) fn prove(key: &LessSafeKey, index: &[u8]) -> Option<[u8; TAG_BYTES]> {
    debug_assert_eq!(AES_256_GCM.tag_len(), TAG_BYTES);
    let tag = key.seal_in_place_separate_tag(nonce(INDEX), Aad::from(index), &mut []).ok()?;
    tag.as_ref().try_into().ok()
}
