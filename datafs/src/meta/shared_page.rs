//! A page of memory that the processes of a machine share through a file, and waiting on its words.
//!
//! The one place of the metadata with `unsafe` code. The page holds nothing but atomics, so a process
//! that dies at any point leaves numbers that are whole. The file must not be cut short while
//! somebody has it open; nobody does.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// Bytes of the file that the page takes.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// What is in the page; all zeroes in a new file.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Words {
    /// Says that the others are valid; stored last.
    pub(crate) magic: AtomicU64,
    /// The boot of the machine that they are valid for.
    pub(crate) boot: [AtomicU64; 2],
    /// The newest batch of which an operation was answered, or is going to be.
    pub(crate) started: AtomicU64,
    /// All batches up to this one are committed, or lost with their process.
    pub(crate) finished: AtomicU64,
    /// All batches up to this one survive a power failure.
    pub(crate) synced: AtomicU64,
    /// End of the newest entry of the change log, in bytes since its beginning.
    pub(crate) log_end: AtomicU64,
    /// Where an entry that is being written ends.
    pub(crate) log_reserved: AtomicU64,
    /// Batches that are not in the change log.
    pub(crate) log_gaps: AtomicU64,
    /// Raised with each of the two below; futex.
    pub(crate) bell: AtomicU32,
    /// Requests for the turn.
    pub(crate) wants: AtomicU32,
    /// Requests for a commit of what is pending.
    pub(crate) flushes: AtomicU32,
    /// Times that the turn was given up; futex.
    pub(crate) released: AtomicU32,
    /// Times that the turn was taken; futex.
    pub(crate) taken: AtomicU32,
    /// Raised with `finished`; futex.
    pub(crate) finish_bell: AtomicU32,
    /// Times that the numbers above were set anew.
    pub(crate) generation: AtomicU64,
}

/// The mapped page.
#[derive(Debug)]
pub(crate) struct SharedPage {
    words: NonNull<Words>,
}

// SAFETY: the pointer is to memory that stays mapped until the value is dropped, and all of it is
// atomics, which any thread may use through a shared reference.
unsafe impl Send for SharedPage {}
// SAFETY: as above.
unsafe impl Sync for SharedPage {}

impl SharedPage {
    /// Maps the first [`PAGE_BYTES`] of a file that is at least as long.
    pub(crate) fn map(file: &File) -> io::Result<SharedPage> {
        const { assert!(size_of::<Words>() <= PAGE_BYTES as usize) };
        // SAFETY: a new mapping at an address of the kernel's choice; it touches no other memory.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let words = NonNull::new(address.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(SharedPage { words })
    }

    pub(crate) fn words(&self) -> &Words {
        // SAFETY: the mapping is page-aligned, larger than `Words` and lives as long as `self`; every
        // bit pattern is a valid `Words`, and all its fields are atomics.
        unsafe { self.words.as_ref() }
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: exactly what `map` has mapped, and no reference outlives `self`.
        unsafe { libc::munmap(self.words.as_ptr().cast(), PAGE_BYTES as usize) };
    }
}

/// Sleeps until `word`, which is in a shared page, is woken, at most `timeout`; returns at once when
/// it is not `seen` any more. May also return for no reason.
pub(crate) fn wait(word: &AtomicU32, seen: u32, timeout: Option<Duration>) {
    let limit = timeout.map(|limit| libc::timespec {
        tv_sec: libc::time_t::try_from(limit.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: libc::c_long::from(limit.subsec_nanos() as i32),
    });
    let limit = limit.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word is alive and aligned for the whole call, and so is the timeout, if there is
    // one; the kernel only reads both.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, limit) };
}

/// Wakes all threads of all processes that wait on `word`.
pub(crate) fn wake(word: &AtomicU32) {
    // SAFETY: the word is alive and aligned; the kernel only uses its address.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
}

/// `fallocate(2)` of the first bytes of a file that is open; returns what the system returned.
pub(crate) fn fallocate(file: std::os::fd::RawFd, bytes: u64) -> libc::c_int {
    // SAFETY: it takes numbers and touches no memory.
    unsafe { libc::fallocate(file, 0, 0, bytes as libc::off_t) }
}

/// `flock(2)`, which locks a file for whoever has it open in the same way: two of one process exclude
/// each other as well. Returns what the system returned.
pub(crate) fn flock(file: std::os::fd::RawFd, operation: libc::c_int) -> libc::c_int {
    // SAFETY: it takes two numbers and touches no memory.
    unsafe { libc::flock(file, operation) }
}
