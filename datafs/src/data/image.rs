//! The file of a cache image, written through the page cache or with direct I/O.
//!
//! Large blocks use direct I/O while the disk keeps up. No reader needs them in the page cache soon, because
//! the reader that fetched them has them in memory. Allocating a page per 4 KiB is the largest cost of a
//! buffered write: 1.4 ms for 1 MiB in a virtual machine that gets its memory at first use. Direct writes
//! cost less than 0.1 ms of processor time.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};

use parking_lot::Mutex;

/// Alignment in memory and in the file for direct writes, on common disks.
pub(super) const ALIGN: usize = 4096;
/// Smaller blocks come from single reads, whose pages are soon read again: they are written buffered.
pub(super) const DIRECT_BYTES_MIN: usize = 1024 * 1024;

/// A file of the cache that is open for reading and writing.
#[derive(Debug)]
pub(super) struct Image {
    file: File,
    direct: Mutex<Direct>,
}

/// The same file, opened for direct writes.
#[derive(Debug)]
enum Direct {
    Untried,
    Open(File),
    /// The file system does not support them.
    Refused,
}

impl Image {
    pub(super) fn new(file: File) -> Image {
        Image { file, direct: Mutex::new(Direct::Untried) }
    }

    /// The file for buffered reads.
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Writes all of `bytes` at `at`, with direct I/O where that is possible and `directly` is set. Returns
    /// how many bytes were written that way. Readers see all bytes; nothing is synced.
    pub(super) fn write(&self, bytes: &[u8], at: u64, directly: bool) -> io::Result<usize> {
        let direct = if directly { self.write_directly(bytes, at)? } else { 0 };
        self.file.write_all_at(&bytes[direct..], at + direct as u64)?;
        Ok(direct)
    }

    /// Writes a prefix of `bytes` with direct I/O; returns its length, 0 when that is not possible.
    fn write_directly(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        let whole = bytes.len() / ALIGN * ALIGN;
        let aligned = at.is_multiple_of(ALIGN as u64) && (bytes.as_ptr() as usize).is_multiple_of(ALIGN);
        if whole < DIRECT_BYTES_MIN || !aligned {
            return Ok(0);
        }
        let mut direct = self.direct.lock();
        if matches!(&*direct, Direct::Untried) {
            *direct = open_directly(&self.file).map_or(Direct::Refused, Direct::Open);
        }
        let Direct::Open(file) = &*direct else { return Ok(0) };
        match file.write_all_at(&bytes[..whole], at) {
            Ok(()) => Ok(whole),
            // Some file systems refuse only the write, and some disks need more than `ALIGN`.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => {
                *direct = Direct::Refused;
                Ok(0)
            }
            Err(error) => Err(error),
        }
    }
}

/// Reopens the same file, even if its name now refers to another one.
fn open_directly(file: &File) -> io::Result<File> {
    let itself = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().write(true).custom_flags(libc::O_DIRECT).open(itself)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::remote::room;

    const BLOCK: usize = DIRECT_BYTES_MIN;

    fn aligned(len: usize, seed: u8) -> bytes::Bytes {
        let mut bytes = room(len);
        bytes.extend((0..len).map(|i| (i / 7) as u8 ^ seed));
        bytes.freeze()
    }

    fn image(dir: &std::path::Path, len: u64) -> Image {
        let file = File::options().read(true).write(true).create_new(true).open(dir.join("image")).unwrap();
        file.set_len(len).unwrap();
        Image::new(file)
    }

    fn read(image: &Image) -> Vec<u8> {
        let mut bytes = vec![0; image.file().metadata().unwrap().len() as usize];
        image.file().read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn readers_see_at_once_what_goes_past_the_pages_even_where_they_have_read_a_hole() {
        let dir = tempfile::tempdir().unwrap();
        let image = image(dir.path(), 3 * BLOCK as u64 + 5);
        assert!(read(&image).iter().all(|byte| *byte == 0));
        let (middle, end) = (aligned(BLOCK, 1), aligned(BLOCK + 5, 2));
        image.write(&middle, BLOCK as u64, true).unwrap();
        // Not a multiple of `ALIGN`.
        image.write(&end, 2 * BLOCK as u64, true).unwrap();
        assert!(read(&image)[BLOCK..] == [&middle[..], &end[..]].concat());
        // Over dirty pages.
        image.write(&aligned(BLOCK, 3), 0, false).unwrap();
        image.write(&aligned(BLOCK, 4), 0, true).unwrap();
        assert!(read(&image)[..BLOCK] == aligned(BLOCK, 4)[..]);
        assert_eq!(read(&image).len(), 3 * BLOCK + 5);
    }

    #[test]
    fn what_cannot_go_directly_goes_through_the_pages() {
        let dir = tempfile::tempdir().unwrap();
        let image = image(dir.path(), 0);
        let bytes = aligned(BLOCK + ALIGN, 9);
        let (small, shifted) = (&bytes[..BLOCK - ALIGN], &bytes[1..=BLOCK]);
        for (bytes, at, directly) in
            [(small, 0, true), (shifted, 0, true), (&bytes[..], 512, true), (&bytes[..], 0, false)]
        {
            assert_eq!(image.write(bytes, at, directly).unwrap(), 0);
            assert!(read(&image)[at as usize..][..bytes.len()] == *bytes);
        }
        *image.direct.lock() = Direct::Refused;
        assert_eq!(image.write(&bytes, 0, true).unwrap(), 0);
        assert!(read(&image)[..bytes.len()] == bytes[..]);
        // A disk error is returned and does not count as missing support.
        *image.direct.lock() = Direct::Open(File::open("/dev/null").unwrap());
        assert!(image.write(&bytes, 0, true).is_err());
    }
}
