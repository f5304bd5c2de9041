//! The rehearsal of a server before it gets the device: it answers INIT, and each of its threads gets its memory.
//!
//! The kernel copies a request into the buffer of a thread. If the process is killed while it does so and a page
//! of the buffer is not there yet, the copy fails, and the program that waits gets EIO: the kernel does not send
//! that request again (`fuse_dev_do_read`). So no thread may read the device before its buffer is in memory. The
//! library makes the buffers; a thread learns where its own is from a request in it. This process sends one to
//! each thread through the socket that stands in for the device.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;

use millrace_leaf::error_chain;
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, setsockopt, socketpair, sockopt};
use nix::sys::time::{TimeVal, TimeValLike as _};
use nix::unistd::{SysconfVar, geteuid, sysconf};

use super::device::REQUEST_HEADER;

/// The most bytes of the answer to INIT.
const REPLY_BYTES: usize = 8 << 10;
/// How long a thread may take for its memory. Not all threads may have started: the system limits their number.
const PATIENCE_S: i64 = 60;
/// Operation code of IOCTL: its input shows where the buffer is, and its handler is on no hot path.
const IOCTL: u32 = 39;
/// Bytes of an IOCTL request between the header and the input, and of the input.
const IOCTL_FIXED: usize = 32;
const INPUT: usize = 8;

/// The socket in the place of the device.
#[derive(Debug)]
pub(super) struct Rehearsal {
    socket: File,
}

impl Rehearsal {
    /// Also returns the server's end, in which the recorded INIT request waits.
    pub(super) fn new(init: &[u8]) -> io::Result<(OwnedFd, Rehearsal)> {
        let (theirs, mine) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        setsockopt(&mine, sockopt::ReceiveTimeout, &TimeVal::seconds(PATIENCE_S))?;
        let mut socket = File::from(mine);
        socket.write_all(init)?;
        Ok((theirs, Rehearsal { socket }))
    }

    /// The server's answer to INIT.
    pub(super) fn reply(&self) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; REPLY_BYTES];
        let len = (&self.socket).read(&mut bytes)?;
        bytes.truncate(len);
        Ok(bytes)
    }

    /// Has each of the server's threads get its memory. A thread that has answered must wait at the closed gate,
    /// so that the next request meets another one.
    pub(super) fn prepare(&self, threads: usize) -> io::Result<()> {
        let request = request();
        for ready in 0..threads {
            (&self.socket).write_all(&request)?;
            match self.reply() {
                Ok(reply) if reply.is_empty() => {
                    return Err(io::Error::other("the threads of the server have ended"));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Err(io::Error::other(format!(
                        "only {ready} of {threads} threads of the server are ready after {PATIENCE_S} s: raise the \
                         limit of processes (ulimit -u, pids.max)"
                    )));
                }
                answered => drop(answered?),
            }
        }
        Ok(())
    }
}

/// A request that only a rehearsal sends.
fn request() -> Vec<u8> {
    let mut bytes = vec![0; REQUEST_HEADER + IOCTL_FIXED + INPUT];
    let mut put = |at: usize, value: u32| bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    put(0, (REQUEST_HEADER + IOCTL_FIXED + INPUT) as u32);
    put(4, IOCTL);
    // The number of the request, which the kernel never gives.
    put(8, 1);
    // The root, on behalf of this user.
    put(16, 1);
    put(24, geteuid().as_raw());
    put(REQUEST_HEADER + 24, INPUT as u32);
    bytes
}

/// Gets the memory of the buffer in which a request of a rehearsal has arrived. `input` is the request's input,
/// `bytes` is the size of the largest request. A fork would share the memory, which undoes this until the next request;
/// servers of held mounts do not fork.
pub(in crate::mount) fn claim(input: &[u8], bytes: usize) {
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096) as usize;
    let begin = input.as_ptr().addr() - REQUEST_HEADER - IOCTL_FIXED;
    let aligned = begin / page * page;
    let len = begin + bytes - aligned;
    let at = std::ptr::without_provenance_mut(aligned);
    // SAFETY: the call changes no content, and fails where nothing is mapped.
    let claimed = unsafe { libc::madvise(at, len, libc::MADV_POPULATE_WRITE) };
    if let Err(error) = Errno::result(claimed) {
        tracing::warn!(
            error = error_chain::one_line(&error),
            "no memory for the requests of a mount: if this process is killed, a program may get an error"
        );
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_memory_of_a_buffer_is_there_after_the_claim() {
        let bytes = 16 * 4096;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, as the library gets it for a buffer of this size. It stays until the test ends.
        let buffer = unsafe {
            let start = libc::mmap(std::ptr::null_mut(), bytes, prot, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            std::slice::from_raw_parts(start.cast::<u8>(), bytes)
        };
        let is_there = || {
            let mut there = vec![0u8; 16];
            let start = buffer.as_ptr().cast_mut().cast();
            // SAFETY: `there` has a byte for each page.
            Errno::result(unsafe { libc::mincore(start, bytes, there.as_mut_ptr()) }).unwrap();
            there
        };
        assert_eq!(is_there(), [0; 16]);
        claim(&buffer[REQUEST_HEADER + IOCTL_FIXED..][..INPUT], bytes);
        assert_eq!(is_there(), [1; 16]);
    }

    #[test]
    fn a_server_without_threads_is_an_error() {
        let (theirs, rehearsal) = Rehearsal::new(b"init").unwrap();
        drop(theirs);
        assert!(rehearsal.prepare(1).is_err());
    }
}
