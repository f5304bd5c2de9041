//! Decompression of text files, within a bound.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;

use super::{BOM, PLAIN_BYTES_MAX};
use crate::dataset::Compression;

/// The text of a file. The first buffer has a whole byte order mark, if the text has one: a decompressor may give any
/// number of bytes.
pub(super) fn reader<'r>(
    reader: impl BufRead + 'r,
    compression: Option<Compression>,
) -> io::Result<Box<dyn BufRead + 'r>> {
    let mut reader: Box<dyn BufRead + 'r> = match compression {
        None => Box::new(reader),
        Some(Compression::Gzip) => Box::new(bounded(MultiGzDecoder::new(reader))),
        Some(Compression::Zstd) => Box::new(bounded(zstd::stream::read::Decoder::with_buffer(reader)?)),
    };
    let mut head = Vec::with_capacity(BOM.len());
    (&mut reader).take(BOM.len() as u64).read_to_end(&mut head)?;
    Ok(Box::new(io::Cursor::new(head).chain(reader)))
}

fn bounded<R: Read>(reader: R) -> BufReader<Bounded<R>> {
    BufReader::new(Bounded { reader, left: PLAIN_BYTES_MAX })
}

/// Fails where a file turns out to be too large.
struct Bounded<R> {
    reader: R,
    left: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.left = self.left.checked_sub(read as u64).ok_or_else(|| {
            io::Error::other(format!(
                "it has more than {PLAIN_BYTES_MAX} bytes once it is decompressed, and can only be read from its \
                 beginning; split it, or store it without compression"
            ))
        })?;
        Ok(read)
    }
}
