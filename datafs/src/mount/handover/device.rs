//! The FUSE device of a held mount: the recorded INIT exchange, the replacement of a socket by the device, and
//! the request to resend.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::{fstat, major, minor};

/// Device number of `/dev/fuse`.
const FUSE_DEVICE: (u64, u64) = (10, 229);
/// The smallest buffer that the kernel accepts for a read of the device.
const READ_BYTES: usize = 8 << 10;
/// Bytes of a request header and of a reply header.
pub(super) const REQUEST_HEADER: usize = 40;
const REPLY_HEADER: usize = 16;
/// Offsets behind the headers: `flags` and `flags2` of the request and of the reply.
const REQUEST_FLAGS: [usize; 2] = [REQUEST_HEADER + 12, REQUEST_HEADER + 16];
const REPLY_FLAGS: [usize; 2] = [REPLY_HEADER + 12, REPLY_HEADER + 32];
/// The flag that says that `flags2` is valid.
const INIT_EXT: u32 = 1 << 30;
/// Operation code of INIT.
const INIT: u32 = 26;
/// `FUSE_NOTIFY_RESEND`.
const NOTIFY_RESEND: i32 = 7;

/// Reads the kernel's INIT request, which waits in the device of a new mount.
pub(super) fn read_init(device: &OwnedFd) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; READ_BYTES];
    let len = File::from(device.try_clone()?).read(&mut bytes)?;
    bytes.truncate(len);
    match word(&bytes, 4) {
        Some(INIT) if len > REQUEST_FLAGS[0] + 4 => Ok(bytes),
        _ => Err(io::Error::new(ErrorKind::InvalidData, "the kernel's first request is no INIT")),
    }
}

/// The INIT request with only those capabilities that the recorded reply has accepted: a later server then
/// negotiates what the kernel already does.
pub(super) fn narrowed(init: &[u8], reply: Option<&[u8]>) -> Vec<u8> {
    let mut init = init.to_vec();
    let Some(reply) = reply else { return init };
    for (index, (at, granted)) in REQUEST_FLAGS.into_iter().zip(REPLY_FLAGS).enumerate() {
        if let (Some(offered), Some(granted)) = (word(&init, at), word(reply, granted)) {
            let kept = if index == 0 { INIT_EXT } else { 0 };
            let flags = offered & (granted | kept);
            init[at..at + 4].copy_from_slice(&flags.to_ne_bytes());
        }
    }
    init
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Gives the kernel the answer to INIT. A server that died just after it did the same is no error.
pub(super) fn write_reply(mut device: &File, reply: &[u8]) -> io::Result<()> {
    match device.write_all(reply) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        written => written,
    }
}

/// Puts the device in the place of another open descriptor of this process.
pub(super) fn replace(place: RawFd, device: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open. Whoever owns `place` goes on owning it; it refers to the device then.
    Errno::result(unsafe { libc::dup3(device.as_raw_fd(), place, libc::O_CLOEXEC) })?;
    Ok(())
}

/// Makes the kernel send again the requests that an earlier server has read and not answered. `false` when the
/// kernel cannot (before Linux 6.9).
pub(super) fn resend(mut device: &File) -> io::Result<bool> {
    let mut message = [0; REPLY_HEADER];
    message[..4].copy_from_slice(&(REPLY_HEADER as u32).to_ne_bytes());
    message[4..8].copy_from_slice(&NOTIFY_RESEND.to_ne_bytes());
    match device.write_all(&message) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether the connection behind a device has ended: unmounted or aborted.
pub(super) fn has_ended(device: &OwnedFd) -> bool {
    let mut polled = [PollFd::new(device.as_fd(), PollFlags::empty())];
    poll(&mut polled, PollTimeout::ZERO).is_ok_and(|_| {
        polled[0].revents().is_some_and(|events| events.intersects(PollFlags::POLLERR | PollFlags::POLLHUP))
    })
}

/// The number of the connection behind a device, which is the minor number of its mount. `None` where the kernel does
/// not tell it (before Linux 6.16).
pub(super) fn connection(device: &OwnedFd) -> Option<u64> {
    let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", device.as_raw_fd())).ok()?;
    told.lines().find_map(|line| line.strip_prefix("fuse_connection:"))?.trim().parse().ok()
}

/// Whether a descriptor is the FUSE device.
pub(super) fn is_fuse(device: &OwnedFd) -> bool {
    fstat(device).is_ok_and(|stat| (major(stat.st_rdev), minor(stat.st_rdev)) == FUSE_DEVICE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_servers_are_offered_what_the_first_has_accepted() {
        let mut init = vec![0; REQUEST_HEADER + 64];
        init[REQUEST_FLAGS[0]..][..4].copy_from_slice(&(INIT_EXT | 0b111).to_ne_bytes());
        init[REQUEST_FLAGS[1]..][..4].copy_from_slice(&0b11u32.to_ne_bytes());
        let mut reply = vec![0; REPLY_HEADER + 64];
        reply[REPLY_FLAGS[0]..][..4].copy_from_slice(&0b101u32.to_ne_bytes());
        reply[REPLY_FLAGS[1]..][..4].copy_from_slice(&0b10u32.to_ne_bytes());
        let narrow = narrowed(&init, Some(&reply));
        assert_eq!(word(&narrow, REQUEST_FLAGS[0]), Some(INIT_EXT | 0b101));
        assert_eq!(word(&narrow, REQUEST_FLAGS[1]), Some(0b10));
        assert_eq!(narrowed(&init, None), init);
        // A reply that is cut short changes nothing.
        assert_eq!(narrowed(&init, Some(&reply[..20])), init);
    }
}
