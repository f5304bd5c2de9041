//! Compression of bodies and messages in both directions: gzip (RFC 1952) and deflate in its zlib format (RFC
//! 1950), under their names in HTTP and gRPC.

use std::io::{self, Read, Write};

use bytes::Bytes;
use flate2::bufread::MultiGzDecoder;
use flate2::write::{GzEncoder, ZlibEncoder};
use flate2::{Compression, Decompress, FlushDecompress, Status};

use crate::body_read_limit::BodyReadLimit;
use millrace_serving_core::blocking::{READ_BYTES, in_place};
use millrace_serving_core::error::InferError;

/// Size from which compression takes 1 ms or more, so that the thread hands its other tasks over.
const LONG_BYTES: usize = 128 << 10;
/// Smallest growth of the output buffer.
const GROWTH_BYTES: usize = 32 << 10;

/// A compression format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Gzip,
    Deflate,
}

impl Encoding {
    /// All formats, the preferred one first.
    pub(crate) const ALL: [Encoding; 2] = [Encoding::Gzip, Encoding::Deflate];

    /// Its name in headers.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Encoding::Gzip => "gzip",
            Encoding::Deflate => "deflate",
        }
    }

    /// The format of a name. HTTP also knows `x-gzip` for `gzip`.
    pub(crate) fn named(name: &str) -> Option<Encoding> {
        let name = name.strip_prefix("x-").filter(|name| name.eq_ignore_ascii_case("gzip")).unwrap_or(name);
        Encoding::ALL.into_iter().find(|encoding| encoding.name().eq_ignore_ascii_case(name))
    }

    /// Decompresses a body. Memory is bounded by twice `bytes_max`, whatever the body claims.
    ///
    /// # Errors
    /// [`InferError::TooLarge`] as soon as the output exceeds `bytes_max`; [`InferError::Invalid`] for a
    /// stream that is corrupt, truncated or followed by other bytes.
    pub(crate) fn decompress(self, body: &[u8], bytes_max: usize) -> Result<Vec<u8>, InferError> {
        in_place(body.len() >= LONG_BYTES, || match self {
            Encoding::Gzip => gunzip(body, bytes_max),
            Encoding::Deflate => inflate(body, bytes_max),
        })
    }

    /// [`Encoding::decompress`], within the decoding limit if the body or its output is large.
    ///
    /// # Errors
    /// As [`Encoding::decompress`], and [`InferError::Unavailable`] when the process is stopping.
    pub(crate) async fn decompress_limited(
        self,
        decode_limit: BodyReadLimit,
        body: Bytes,
        bytes_max: usize,
    ) -> Result<Vec<u8>, InferError> {
        if body.len() < READ_BYTES {
            match self.decompress(&body, bytes_max.min(READ_BYTES)) {
                Err(InferError::TooLarge { .. }) if bytes_max > READ_BYTES => {}
                done => return done,
            }
        }
        decode_limit.run(true, move || self.decompress(&body, bytes_max)).await?
    }

    /// Compresses a body at the fastest level.
    pub(crate) fn compress(self, body: &[u8]) -> io::Result<Vec<u8>> {
        in_place(body.len() >= LONG_BYTES, || match self {
            Encoding::Gzip => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(body)?;
                encoder.finish()
            }
            Encoding::Deflate => {
                let mut encoder = ZlibEncoder::new(Vec::new(), Compression::fast());
                encoder.write_all(body)?;
                encoder.finish()
            }
        })
    }
}

fn too_large(bytes_max: usize) -> InferError {
    InferError::TooLarge { bytes: bytes_max as u64 + 1, bytes_max: bytes_max as u64 }
}

fn cut_off(encoding: Encoding, body: &[u8], written: usize) -> InferError {
    InferError::invalid(format!(
        "the {} data of {} bytes is cut off: its end did not come, {written} bytes came out",
        encoding.name(),
        body.len()
    ))
}

fn corrupt(encoding: Encoding, reason: &dyn std::fmt::Display) -> InferError {
    InferError::invalid(format!("the data is no valid {}: {reason}", encoding.name()))
}

/// Decompresses gzip, which may have several members in a row.
fn gunzip(body: &[u8], bytes_max: usize) -> Result<Vec<u8>, InferError> {
    let mut plain = Vec::new();
    let decoder = MultiGzDecoder::new(body);
    match decoder.take(bytes_max as u64 + 1).read_to_end(&mut plain) {
        _ if plain.len() > bytes_max => Err(too_large(bytes_max)),
        Ok(_) => Ok(plain),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(cut_off(Encoding::Gzip, body, plain.len()))
        }
        Err(error) => Err(corrupt(Encoding::Gzip, &error)),
    }
}

/// Decompresses zlib with an explicit check for the end: the stream decoders accept a truncated stream.
fn inflate(body: &[u8], bytes_max: usize) -> Result<Vec<u8>, InferError> {
    let mut plain: Vec<u8> = Vec::new();
    let mut state = Decompress::new(true);
    loop {
        let read = usize::try_from(state.total_in()).unwrap_or(usize::MAX);
        let rest = body.get(read..).unwrap_or_default();
        if plain.len() == plain.capacity() {
            let room = (bytes_max - plain.len()).saturating_add(1);
            plain.reserve_exact(plain.len().max(GROWTH_BYTES).min(room));
        }
        let before = (state.total_in(), plain.len());
        let status = state
            .decompress_vec(rest, &mut plain, FlushDecompress::None)
            .map_err(|error| corrupt(Encoding::Deflate, &error))?;
        if plain.len() > bytes_max {
            return Err(too_large(bytes_max));
        }
        let read = usize::try_from(state.total_in()).unwrap_or(usize::MAX);
        if status == Status::StreamEnd {
            return match body.len().saturating_sub(read) {
                0 => Ok(plain),
                more => Err(corrupt(
                    Encoding::Deflate,
                    &format_args!("{more} bytes follow the end of the stream"),
                )),
            };
        }
        let stuck = before == (state.total_in(), plain.len());
        if stuck && plain.len() < plain.capacity() {
            return Err(cut_off(Encoding::Deflate, body, plain.len()));
        }
    }
}

#[cfg(test)]
mod tests;
