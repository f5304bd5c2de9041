//! Messages between holder and servers: JSON with file descriptors over a SEQPACKET Unix socket.
//!
//! One packet is one message of at most [`MESSAGE_BYTES_MAX`] bytes and [`FDS_MAX`] descriptors. A longer packet
//! is an error, and all of its descriptors are closed: the kernel closes those beyond the control buffer, and
//! [`Wire::receive`] those that the kernel has installed.
#![allow(unsafe_code)]

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, UnixCredentials, connect,
    getsockopt, sendmsg, setsockopt, socket, sockopt,
};
use nix::sys::stat::Mode;
use nix::sys::time::TimeVal;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message.
pub(super) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Most descriptors of a message.
pub(super) const FDS_MAX: usize = 4;

/// Bytes of the buffer for [`FDS_MAX`] descriptors.
// SAFETY: only computes.
const CONTROL_BYTES: usize = unsafe { libc::CMSG_SPACE((FDS_MAX * size_of::<RawFd>()) as u32) } as usize;

/// The buffer for descriptors, aligned for the headers in it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_BYTES]);

/// One end of a connection.
#[derive(Debug)]
pub(super) struct Wire(OwnedFd);

impl Wire {
    pub(super) fn new(socket: OwnedFd) -> Wire {
        Wire(socket)
    }

    /// Connects to a listening socket.
    pub(super) fn connect(path: &Path) -> io::Result<Wire> {
        let socket = seqpacket()?;
        with_address(path, |address| Ok(connect(socket.as_raw_fd(), address)?))?;
        Ok(Wire(socket))
    }

    /// The user and the process at the other end, when it connected. The process is 0 in another PID namespace.
    pub(super) fn peer(&self) -> io::Result<UnixCredentials> {
        Ok(getsockopt(&self.0, sockopt::PeerCredentials)?)
    }

    /// A handle (pidfd) of the process at the other end, when it connected; `None` before Linux 6.5.
    pub(super) fn peer_process(&self) -> Option<OwnedFd> {
        let mut handle: RawFd = -1;
        let mut len = size_of::<RawFd>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes, the size of the value.
        let answered = unsafe {
            libc::getsockopt(
                self.0.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERPIDFD,
                (&raw mut handle).cast(),
                &raw mut len,
            )
        };
        // SAFETY: the kernel has just installed this descriptor for this process.
        (answered == 0 && handle >= 0).then(|| unsafe { OwnedFd::from_raw_fd(handle) })
    }

    /// Whether the other end is closed.
    pub(super) fn is_closed(&self) -> bool {
        let mut polled = [PollFd::new(self.0.as_fd(), PollFlags::empty())];
        let closed = PollFlags::POLLHUP | PollFlags::POLLERR;
        poll(&mut polled, PollTimeout::ZERO).is_ok()
            && polled[0].revents().is_some_and(|events| events.intersects(closed))
    }

    /// Limits how long [`Wire::receive`] waits; `None` for no limit.
    pub(super) fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        let time = patience.map_or(0, |patience| patience.as_secs().max(1)) as i64;
        Ok(setsockopt(&self.0, sockopt::ReceiveTimeout, &TimeVal::new(time, 0))?)
    }

    /// Sends a message.
    pub(super) fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(io::Error::other("the message is too long"));
        }
        let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[][..] } else { &rights[..] };
        loop {
            let sent = sendmsg::<()>(
                self.0.as_raw_fd(),
                &[IoSlice::new(&bytes)],
                control,
                MsgFlags::MSG_NOSIGNAL,
                None,
            );
            match sent {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// Receives a message and its descriptors; `None` when the other end is closed.
    pub(super) fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        let mut bytes = vec![0; MESSAGE_BYTES_MAX];
        let (len, is_cut, fds) = loop {
            match self.receive_packet(&mut bytes) {
                Ok(received) => break received,
                Err(Errno::EINTR) => {}
                Err(Errno::ECONNRESET) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        };
        if is_cut {
            let what = format!("a message has at most {MESSAGE_BYTES_MAX} bytes and {FDS_MAX} descriptors");
            return Err(io::Error::new(ErrorKind::InvalidData, what));
        }
        if len == 0 {
            return Ok(None);
        }
        Ok(Some((serde_json::from_slice(&bytes[..len])?, fds)))
    }

    /// Receives one packet: its length, whether it was cut, and the descriptors that fit.
    fn receive_packet(&self, bytes: &mut [u8]) -> nix::Result<(usize, bool, Vec<OwnedFd>)> {
        let mut control = Control([0; CONTROL_BYTES]);
        let mut into = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
        // SAFETY: all bits zero are a valid header without buffers.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = &raw mut into;
        header.msg_iovlen = 1;
        header.msg_control = (&raw mut control).cast();
        header.msg_controllen = CONTROL_BYTES as _;
        // SAFETY: the header points to buffers of the given lengths, which outlive the call.
        let len = Errno::result(unsafe {
            libc::recvmsg(self.0.as_raw_fd(), &raw mut header, libc::MSG_CMSG_CLOEXEC)
        })?;
        let mut fds = Vec::new();
        // SAFETY: the kernel has filled the control buffer and set its length in the header.
        let mut next = unsafe { libc::CMSG_FIRSTHDR(&raw const header) };
        // SAFETY: null or a header within the control buffer, which is aligned for it.
        while let Some(message) = unsafe { next.as_ref() } {
            if (message.cmsg_level, message.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                // SAFETY: only computes.
                let head = unsafe { libc::CMSG_LEN(0) } as usize;
                let whole: usize = message.cmsg_len as _;
                // SAFETY: the data follows the header.
                let data = unsafe { libc::CMSG_DATA(message) }.cast::<RawFd>();
                for index in 0..whole.saturating_sub(head) / size_of::<RawFd>() {
                    // SAFETY: within the length of the message; the kernel has just installed this descriptor
                    // for this process, also in a message that it has cut.
                    fds.push(unsafe { OwnedFd::from_raw_fd(data.add(index).read_unaligned()) });
                }
            }
            // SAFETY: as for the first.
            next = unsafe { libc::CMSG_NXTHDR(&raw const header, next) };
        }
        let is_cut = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
        Ok((len as usize, is_cut, fds))
    }
}

impl AsFd for Wire {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A new SEQPACKET socket.
pub(super) fn seqpacket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Runs `work` with the address of a socket file. The folder may have a path of any length.
pub(super) fn with_address<T>(path: &Path, work: impl FnOnce(&UnixAddr) -> io::Result<T>) -> io::Result<T> {
    let (folder, Some(name)) = (path.parent(), path.file_name()) else {
        return Err(ErrorKind::InvalidInput.into());
    };
    let folder = folder.filter(|folder| !folder.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    let folder = open(folder, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
    let path = Path::new("/proc/self/fd").join(folder.as_raw_fd().to_string()).join(name);
    work(&UnixAddr::new(&path)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::Read as _;

    use nix::sys::socket::socketpair;

    use super::*;

    fn pair() -> (Wire, Wire) {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (one, other) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        (Wire::new(one), Wire::new(other))
    }

    /// A pipe whose read end tells at once whether all its write ends are closed.
    fn pipe() -> (std::fs::File, OwnedFd) {
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
        (read.into(), write)
    }

    #[test]
    fn too_many_descriptors_are_refused_and_all_closed() {
        for sent in [FDS_MAX + 1, 3 * FDS_MAX, 64] {
            let ((one, other), (mut read, write)) = (pair(), pipe());
            one.send(&"message", &vec![write.as_fd(); sent]).unwrap();
            drop(write);
            assert!(other.receive::<String>().is_err(), "{sent} descriptors");
            assert_eq!(read.read(&mut [0]).unwrap(), 0, "a descriptor of {sent} is still open");
        }
    }

    #[test]
    fn a_closed_end_is_seen_without_reading() {
        let (one, other) = pair();
        one.send(&"message", &[]).unwrap();
        assert!(!other.is_closed());
        drop(one);
        assert!(other.is_closed());
        assert_eq!(other.receive::<String>().unwrap().unwrap().0, "message");
    }

    #[test]
    fn descriptors_of_a_message_arrive() {
        for sent in [0, 1, FDS_MAX] {
            let ((one, other), (mut read, write)) = (pair(), pipe());
            one.send(&"message", &vec![write.as_fd(); sent]).unwrap();
            drop(write);
            let (text, fds) = other.receive::<String>().unwrap().unwrap();
            assert_eq!((text.as_str(), fds.len()), ("message", sent));
            drop(fds);
            assert_eq!(read.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn descriptors_of_a_message_that_is_too_long_or_no_message_are_closed() {
        for content in [vec![b'x'; MESSAGE_BYTES_MAX + 1], b"{".to_vec()] {
            let ((one, other), (mut read, write)) = (pair(), pipe());
            let rights = [write.as_raw_fd()];
            let control = [ControlMessage::ScmRights(&rights)];
            let (to, from) = (one.0.as_raw_fd(), [IoSlice::new(&content)]);
            sendmsg::<()>(to, &from, &control, MsgFlags::empty(), None).unwrap();
            drop(write);
            assert!(other.receive::<String>().is_err());
            assert_eq!(read.read(&mut [0]).unwrap(), 0);
        }
    }
}
