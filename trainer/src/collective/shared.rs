//! Shared memory between two workers of one machine: a ring of bytes in a memory file that has no name.
//!
//! One process writes the data of frames ([`Writer`]), the other one copies them out ([`Reader`]). The frames go over TCP
//! and say where their data lie, so waits, timeouts and aborts are those of the connection. The writer never waits for
//! room: a frame that does not fit carries its data itself.
//!
//! The first page holds the nonce of the offer, 32 bytes at offset 0, and the reader's position, a u64 at offset 64. The
//! ring of bytes follows. A position counts the bytes since the ring was formed and never wraps around. Data have no
//! checksum: memory is no network.
//!
//! Safety. The other process may be hostile and write any byte at any time.
//! - No reference to the mapped bytes exists, except to the atomic position. Bytes are copied with raw pointers from and
//!   to own memory. Any bytes are valid data, so that a concurrent write can only make them wrong.
//! - Offsets and lengths follow from the size and from positions that each process counts itself. The reader's position
//!   in the page only decides whether a frame fits, after a check of its range.
//! - The mapping lives as long as its value. Seals keep the file from shrinking, which would end a process that
//!   touches the lost bytes ([`super::offer`] checks them).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use super::frame::Span;
use crate::proof::{NONCE_BYTES, Nonce};

/// Bytes before the ring of bytes.
pub(super) const PAGE_BYTES: usize = 4096;
/// Offset of the reader's position, in a cache line of its own.
const READ_AT: usize = 64;

/// A mapped memory file.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    /// Bytes of the ring, at least 1.
    size: usize,
}

// SAFETY: the memory stays mapped until the value is dropped, and belongs to no thread.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference, only the atomic position is used and bytes are read. Races with the other process
// are part of the argument above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a file of [`PAGE_BYTES`] and `size` bytes.
    fn map(file: &File, size: usize) -> io::Result<Mapping> {
        let bytes = size.checked_add(PAGE_BYTES).filter(|_| size > 0).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping at an address of the kernel's choice; it touches no other memory.
        let address = unsafe {
            libc::mmap(
                ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Mapping { start, size })
    }

    fn nonce(&self) -> Nonce {
        let mut nonce = [0; NONCE_BYTES];
        // SAFETY: the first page is mapped and longer than a nonce; the target is own memory.
        unsafe { ptr::copy_nonoverlapping(self.start.as_ptr(), nonce.as_mut_ptr(), NONCE_BYTES) };
        nonce
    }

    fn set_nonce(&mut self, nonce: &Nonce) {
        // SAFETY: as in `nonce`, in the other direction.
        unsafe { ptr::copy_nonoverlapping(nonce.as_ptr(), self.start.as_ptr(), NONCE_BYTES) };
    }

    /// The reader's position.
    fn read(&self) -> &AtomicU64 {
        // SAFETY: the first page is mapped as long as `self` lives; a mapping begins at a page, so the word is aligned.
        unsafe { AtomicU64::from_ptr(self.start.as_ptr().add(READ_AT).cast()) }
    }

    /// The parts of the ring that hold `bytes` bytes from `position` on: the offset of the first one in the mapping, and
    /// its length. The second one begins at [`PAGE_BYTES`]. `None` if the ring is shorter.
    fn parts(&self, position: u64, bytes: usize) -> Option<(usize, usize)> {
        let at = (position % self.size as u64) as usize;
        (bytes <= self.size).then(|| (PAGE_BYTES + at, bytes.min(self.size - at)))
    }

    /// Copies `from` into the ring. `None` if the ring is shorter.
    fn copy_in(&mut self, position: u64, from: &[u8]) -> Option<()> {
        let (at, first) = self.parts(position, from.len())?;
        let (start, from, rest) = (self.start.as_ptr(), from.as_ptr(), from.len() - first);
        // SAFETY: `parts` keeps both parts in the mapping, and both together have the length of the source. That is
        // own memory, which does not overlap the mapping.
        unsafe {
            ptr::copy_nonoverlapping(from, start.add(at), first);
            ptr::copy_nonoverlapping(from.add(first), start.add(PAGE_BYTES), rest);
        }
        Some(())
    }

    /// Fills `into` from the ring. `None` if the ring is shorter.
    fn copy_out(&self, position: u64, into: &mut [u8]) -> Option<()> {
        let (at, first) = self.parts(position, into.len())?;
        let (start, rest) = (self.start.as_ptr(), into.len() - first);
        let into = into.as_mut_ptr();
        // SAFETY: as in `copy_in`, in the other direction.
        unsafe {
            ptr::copy_nonoverlapping(start.add(at), into, first);
            ptr::copy_nonoverlapping(start.add(PAGE_BYTES), into.add(first), rest);
        }
        Some(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` has mapped, and no reference outlives `self`.
        unsafe { libc::munmap(self.start.as_ptr().cast(), PAGE_BYTES + self.size) };
    }
}

/// The side of a shared memory that writes data.
#[derive(Debug)]
pub(super) struct Writer {
    memory: Mapping,
    written: u64,
}

/// The side of a shared memory that copies data out.
#[derive(Debug)]
pub(super) struct Reader {
    memory: Mapping,
    read: u64,
}

impl Writer {
    /// Maps a new file of [`PAGE_BYTES`] and `size` bytes, which holds zeroes, and writes the nonce into it.
    pub(super) fn new(file: &File, size: usize, nonce: &Nonce) -> io::Result<Writer> {
        let mut memory = Mapping::map(file, size)?;
        memory.set_nonce(nonce);
        Ok(Writer { memory, written: 0 })
    }

    /// Writes the data of a frame, which may wrap around the end of the ring. Returns their place, `None` without room.
    pub(super) fn place(&mut self, data: &[u8]) -> Option<Span> {
        // Acquire: the reader has copied all before its position when these bytes replace them.
        let read = self.memory.read().load(Ordering::Acquire);
        if data.len() > room(self.memory.size, self.written, read) {
            return None;
        }
        let span = Span { position: self.written, bytes: u32::try_from(data.len()).ok()? };
        let written = self.written.checked_add(u64::from(span.bytes))?;
        self.memory.copy_in(self.written, data)?;
        self.written = written;
        // The frame follows over TCP. The kernel's locks of the socket order both processes, and so does this fence with
        // that of the reader.
        fence(Ordering::Release);
        Some(span)
    }

    /// Bytes that were written since the ring was formed.
    pub(super) fn written(&self) -> u64 {
        self.written
    }
}

impl Reader {
    /// Maps a file of [`PAGE_BYTES`] and `size` bytes. `None` if it does not hold the nonce.
    pub(super) fn open(file: &File, size: usize, nonce: &Nonce) -> io::Result<Option<Reader>> {
        let memory = Mapping::map(file, size)?;
        let is_offered = memory.nonce() == *nonce;
        Ok(is_offered.then_some(Reader { memory, read: 0 }))
    }

    /// Replaces what `into` holds by the data of the next frame, and gives their place free.
    ///
    /// # Errors
    /// The violation of the protocol, if these data are not the next ones or longer than the ring.
    pub(super) fn take(&mut self, span: Span, into: &mut Vec<u8>) -> Result<(), String> {
        let Span { position, bytes } = span;
        if position != self.read {
            return Err(format!("sent data at position {position} of shared memory, not {}", self.read));
        }
        let too_long = || format!("sent {bytes} bytes in a shared memory of {}", self.memory.size);
        // Before any memory is taken.
        if bytes as usize > self.memory.size {
            return Err(too_long());
        }
        let read = self.read.checked_add(u64::from(bytes)).ok_or_else(too_long)?;
        into.resize(bytes as usize, 0);
        // With the fence of the writer.
        fence(Ordering::Acquire);
        self.memory.copy_out(position, into).ok_or_else(too_long)?;
        self.read = read;
        // Release: the copy is complete when the writer sees the position.
        self.memory.read().store(read, Ordering::Release);
        Ok(())
    }

    /// Bytes that were copied out since the ring was formed.
    pub(super) fn copied(&self) -> u64 {
        self.read
    }
}

/// Bytes that fit into a ring of `size` bytes: none where the reader's position is impossible.
fn room(size: usize, written: u64, read: u64) -> usize {
    match written.checked_sub(read) {
        Some(unread) if unread <= size as u64 => size - unread as usize,
        _ => 0,
    }
}

/// Access of tests to both sides of a shared memory.
#[cfg(test)]
pub(super) mod tests_support {
    use super::{Ordering, Reader, Writer};

    impl Writer {
        /// An address in the mapping.
        pub(crate) fn address(&self) -> usize {
            self.memory.start.as_ptr() as usize
        }
    }

    impl Reader {
        /// An address in the mapping.
        pub(crate) fn address(&self) -> usize {
            self.memory.start.as_ptr() as usize
        }

        /// Tells the writer this position, as a hostile reader may.
        pub(crate) fn claim(&self, position: u64) {
            self.memory.read().store(position, Ordering::Release);
        }

        /// The data at this place, without a check and without giving the place free.
        pub(crate) fn peek(&self, span: super::Span) -> Vec<u8> {
            let mut data = vec![0; span.bytes as usize];
            self.memory.copy_out(span.position, &mut data).unwrap();
            data
        }
    }
}
