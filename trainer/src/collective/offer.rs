//! Offers of shared memory while a ring forms: the sender of a connection creates a memory file, and the receiver opens
//! it through `/proc`.
//!
//! Two workers share memory if they run under one boot of a kernel, as one user, and see each other in `/proc`. All others
//! stay on TCP: other machines, other users, containers with process ids of their own. The nonce in the file
//! proves that the path leads to the file of the offer, since a process id has another meaning elsewhere.
//!
//! The file has no name in a file system, so nothing is left when a process dies. It is allocated as a whole
//! before it is offered, so that a full file system of memory fails here and not at a later write. At the limit of a memory
//! cgroup the kernel may end a process instead.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use super::Options;
use super::frame::PAYLOAD_BYTES_MAX;
use super::link::INLINE_BYTES_MAX;
use super::shared::{PAGE_BYTES, Reader, Writer};
use crate::proof::{NONCE_BYTES, Nonce, nonce};

/// Bytes of an encoded offer.
pub(super) const OFFER_BYTES: usize = BOOT_BYTES + 4 + 4 + 8 + NONCE_BYTES;
/// The most bytes of a ring of bytes.
pub(super) const SIZE_MAX: usize = 16 << 20;
/// Calls to allocate the file, each of which a signal may interrupt.
const ATTEMPTS: u32 = 10;
/// Length of the id of a machine's boot.
const BOOT_BYTES: usize = 36;
const BOOT_FILE: &str = "/proc/sys/kernel/random/boot_id";
/// The name of the file for the kernel's lists, and what a link in `/proc` to it says.
const NAME: &str = "millrace-ring";
const LINK: &str = "/memfd:millrace-ring (deleted)";

/// The place of a memory file: little-endian boot id, process id u32, descriptor u32, bytes of the ring u64, nonce. All
/// zeroes offer nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) boot: [u8; BOOT_BYTES],
    pub(super) process: u32,
    pub(super) descriptor: u32,
    pub(super) size: u64,
    pub(super) nonce: Nonce,
}

/// A memory that the receiver may open as long as this exists.
#[derive(Debug)]
pub(super) struct Offered {
    pub(super) offer: Offer,
    pub(super) writer: Writer,
    /// The receiver opens it through this process's table of descriptors.
    pub(super) file: File,
}

/// Bytes of the ring for these options: two buckets. `None` where no frame is large enough for it.
pub(super) fn size(options: &Options) -> Option<usize> {
    let bucket = options.bucket_elements_max.min(PAYLOAD_BYTES_MAX / 8) * 8;
    let size = (2 * bucket).next_multiple_of(PAGE_BYTES).min(SIZE_MAX);
    (options.shared_memory && size > INLINE_BYTES_MAX).then_some(size)
}

/// Creates a memory with a ring of `size` bytes.
///
/// # Errors
/// Why this machine gives none. The connection then stays on TCP.
pub(super) fn create(size: usize) -> Result<Offered, String> {
    let boot = boot().map_err(|e| format!("read {BOOT_FILE}: {e}"))?;
    let nonce = nonce().map_err(|e| e.to_string())?;
    let file = memory_file(size).map_err(|e| format!("create a memory file of {size} bytes: {e}"))?;
    let writer = Writer::new(&file, size, &nonce).map_err(|e| format!("map a memory file: {e}"))?;
    let descriptor = u32::try_from(file.as_raw_fd()).map_err(|e| e.to_string())?;
    let offer = Offer { boot, process: std::process::id(), descriptor, size: size as u64, nonce };
    Ok(Offered { offer, writer, file })
}

/// A sealed memory file of [`PAGE_BYTES`] and `size` bytes.
fn memory_file(size: usize) -> io::Result<File> {
    let bytes = (PAGE_BYTES + size) as u64;
    // Beyond the limit, the kernel ends the process with SIGXFSZ.
    if getrlimit(Resource::RLIMIT_FSIZE)?.0 < bytes {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let create = |flags| memfd_create(NAME, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING | flags);
    // Kernels before 6.3 do not know this flag, which later ones may demand.
    let not_executable = MFdFlags::from_bits_retain(libc::MFD_NOEXEC_SEAL);
    let file = File::from(create(not_executable).or_else(|_| create(MFdFlags::empty()))?);
    let mut attempts = ATTEMPTS;
    loop {
        attempts -= 1;
        match fallocate(&file, FallocateFlags::empty(), 0, bytes as libc::off_t) {
            // The kernel does not go on by itself after a signal.
            Err(Errno::EINTR) if attempts > 0 => {}
            allocated => break allocated?,
        }
    }
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}

/// The id of this boot of the machine. All its containers have the same.
fn boot() -> io::Result<[u8; BOOT_BYTES]> {
    let text = fs::read_to_string(BOOT_FILE)?;
    text.trim_end().as_bytes().try_into().map_err(|_| io::ErrorKind::InvalidData.into())
}

impl Offer {
    pub(super) fn encode(&self) -> [u8; OFFER_BYTES] {
        let parts: [&[u8]; 5] = [
            &self.boot,
            &self.process.to_le_bytes(),
            &self.descriptor.to_le_bytes(),
            &self.size.to_le_bytes(),
            &self.nonce,
        ];
        let mut out = [0; OFFER_BYTES];
        let mut at = 0;
        for part in parts {
            out[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        out
    }

    /// `None` if nothing is offered.
    pub(super) fn decode(bytes: &[u8; OFFER_BYTES]) -> Option<Offer> {
        if bytes.iter().all(|byte| *byte == 0) {
            return None;
        }
        let (boot, rest) = bytes.split_first_chunk()?;
        let (process, rest) = rest.split_first_chunk()?;
        let (descriptor, rest) = rest.split_first_chunk()?;
        let (size, rest) = rest.split_first_chunk()?;
        Some(Offer {
            boot: *boot,
            process: u32::from_le_bytes(*process),
            descriptor: u32::from_le_bytes(*descriptor),
            size: u64::from_le_bytes(*size),
            nonce: rest.try_into().ok()?,
        })
    }

    /// Opens and maps the offered memory.
    ///
    /// # Errors
    /// Why this process cannot or must not use it.
    pub(super) fn open(&self) -> Result<Reader, String> {
        let own = boot().map_err(|e| format!("read {BOOT_FILE}: {e}"))?;
        if self.boot != own {
            return Err("it is on another machine".to_owned());
        }
        let size = usize::try_from(self.size).unwrap_or(usize::MAX);
        if size == 0 || size > SIZE_MAX {
            return Err(format!("it has {} bytes (limit {SIZE_MAX})", self.size));
        }
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        // Reads the link alone: another file may be on a file system that does not answer.
        let link = fs::read_link(&path).map_err(|e| format!("read the link {path}: {e}"))?;
        if link.as_os_str() != LINK {
            return Err(format!("{path} is {}", link.display()));
        }
        // The standard library adds O_CLOEXEC.
        let open = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        let file = open.map_err(|e| format!("open {path}: {e}"))?;
        let metadata = file.metadata().map_err(|e| format!("stat {path}: {e}"))?;
        if !metadata.is_file() || metadata.len() != (PAGE_BYTES + size) as u64 {
            return Err(format!("{path} has {} bytes, not {}", metadata.len(), PAGE_BYTES + size));
        }
        if metadata.uid() != nix::unistd::geteuid().as_raw() {
            return Err(format!("{path} belongs to user {}", metadata.uid()));
        }
        // A file of huge pages looks the same. Its pages may be missing when they are touched, which ends the process.
        let system = fstatfs(&file).map_err(|e| format!("read the file system of {path}: {e}"))?;
        if system.filesystem_type() != TMPFS_MAGIC {
            return Err(format!("{path} is not on a file system of memory"));
        }
        let seals =
            fcntl(&file, FcntlArg::F_GET_SEALS).map_err(|e| format!("read the seals of {path}: {e}"))?;
        if !SealFlag::from_bits_retain(seals).contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW) {
            return Err(format!("{path} may change its size"));
        }
        let reader = Reader::open(&file, size, &self.nonce).map_err(|e| format!("map {path}: {e}"))?;
        reader.ok_or_else(|| format!("{path} is another memory"))
    }
}
