//! The codec of frames: compression, then encryption, between the file and the store.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce};

use super::keyring::VolumeKey;

/// How a volume's file data is compressed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Compression {
    /// No compression.
    #[default]
    None,
    /// LZ4: fast, for data that shrinks easily.
    Lz4,
    /// Zstandard at a level from 1 (fast) to 19 (small).
    Zstd {
        /// The level.
        level: u8,
    },
}

/// The level when none is named.
const ZSTD_LEVEL: u8 = 3;

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Lz4 => f.write_str("lz4"),
            Self::Zstd { level } => write!(f, "zstd:{level}"),
        }
    }
}

impl FromStr for Compression {
    type Err = String;

    /// `none`, `lz4`, `zstd` or `zstd:LEVEL`.
    fn from_str(text: &str) -> Result<Compression, String> {
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            None if text == "lz4" => Ok(Self::Lz4),
            None if text == "zstd" => Ok(Self::Zstd { level: ZSTD_LEVEL }),
            Some(("zstd", level)) => match level.parse() {
                Ok(level @ 1..=19) => Ok(Self::Zstd { level }),
                _ => Err(format!("zstd has levels from 1 to 19, not {level:?}")),
            },
            _ => Err(format!("{text:?} is no compression: write none, lz4, zstd or zstd:LEVEL")),
        }
    }
}

impl serde::Serialize for Compression {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl Compression {
    /// The algorithm's code in the formats; readers do not need the level.
    pub(crate) fn to_byte(self) -> u8 {
        match self {
            Self::None => 0,
            Self::Lz4 => 1,
            Self::Zstd { .. } => 2,
        }
    }

    /// The level of Zstandard, else 0.
    pub(crate) fn level(self) -> u8 {
        if let Self::Zstd { level } = self { level } else { 0 }
    }

    pub(crate) fn from_parts(byte: u8, level: u8) -> Option<Compression> {
        match Self::from_byte(byte)? {
            Self::Zstd { .. } => (1..=19).contains(&level).then_some(Self::Zstd { level }),
            other => (level == 0).then_some(other),
        }
    }

    pub(crate) fn from_byte(byte: u8) -> Option<Compression> {
        match byte {
            0 => Some(Self::None),
            1 => Some(Self::Lz4),
            2 => Some(Self::Zstd { level: ZSTD_LEVEL }),
            _ => None,
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressions_are_named() {
        for (text, compression) in [
            ("none", Compression::None),
            ("lz4", Compression::Lz4),
            ("zstd", Compression::Zstd { level: 3 }),
            ("zstd:19", Compression::Zstd { level: 19 }),
        ] {
            assert_eq!(text.parse(), Ok(compression));
            assert_eq!(compression.to_string().parse(), Ok(compression));
        }
        for wrong in ["", "gzip", "zstd:0", "zstd:20", "zstd:x", "lz4:3"] {
            assert!(wrong.parse::<Compression>().is_err(), "{wrong}");
        }
    }
}
