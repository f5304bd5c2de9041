//! Shared memory page: numbers that the processes of a machine share through a file, and waits on them.
//!
//! The only part of the metadata code with `unsafe` (besides tests). The page holds only atomics, so a
//! process that dies at any point leaves whole numbers. The file must not be truncated while a process has it
//! open; no process truncates it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

/// Bytes of the file that the page takes.
pub(crate) const PAGE_BYTES: u64 = 4096;

/// Contents of the page; all zeroes in a new file.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Words {
    /// Marks the other fields as valid; stored last.
    pub(crate) magic: AtomicU64,
    /// The boot of the machine that they are valid for.
    pub(crate) boot: [AtomicU64; 2],
    /// The newest batch of which an operation was acknowledged, or is about to be.
    pub(crate) started: AtomicU64,
    /// All batches up to this one are committed, or lost with their process.
    pub(crate) finished: AtomicU64,
    /// All batches up to this one survive a power failure.
    pub(crate) synced: AtomicU64,
    /// End of the newest entry of the change log, in bytes since the log began.
    pub(crate) log_end: AtomicU64,
    /// End of an entry that is being written.
    pub(crate) log_reserved: AtomicU64,
    /// Number of batches that are missing from the change log.
    pub(crate) log_gaps: AtomicU64,
    /// Raised with each of the two below; futex.
    pub(crate) bell: AtomicU32,
    /// Requests for the writer lock.
    pub(crate) wants: AtomicU32,
    /// Requests for a commit of pending batches.
    pub(crate) flushes: AtomicU32,
    /// Number of times that the writer lock was released; futex.
    pub(crate) released: AtomicU32,
    /// Number of times that the writer lock was taken; futex.
    pub(crate) taken: AtomicU32,
    /// Raised with `finished`; futex.
    pub(crate) finish_bell: AtomicU32,
    /// Number of times that the numbers above were reset.
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
        // A mapping keeps the file open in the child of a fork, and its locks with it (`inherited.rs`).
        // SAFETY: exactly what was mapped above; it stays as it is in this process.
        if unsafe { libc::madvise(address, PAGE_BYTES as usize, libc::MADV_DONTFORK) } != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), "a child of a fork keeps the writer lock");
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

/// Sleeps until another thread wakes `word`, which is in a shared page, at most `timeout`. Returns at once if
/// its value is not `seen`. May return early.
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

/// `fallocate(2)` of the first bytes of an open file; returns what the system call returned.
pub(crate) fn fallocate(file: std::os::fd::RawFd, bytes: u64) -> libc::c_int {
    // SAFETY: it takes numbers and touches no memory.
    unsafe { libc::fallocate(file, 0, 0, bytes as libc::off_t) }
}

/// `flock(2)`, which belongs to an open file description: two of one process exclude each other as well.
/// Returns what the system call returned.
pub(crate) fn flock(file: std::os::fd::RawFd, operation: libc::c_int) -> libc::c_int {
    // SAFETY: it takes two numbers and touches no memory.
    unsafe { libc::flock(file, operation) }
}
