//! Messages between holder and servers: JSON with file descriptors over a SEQPACKET Unix socket.
//!
//! One packet is one message of at most [`MESSAGE_BYTES_MAX`] bytes and [`FDS_MAX`] descriptors. A longer packet
//! is an error, and its descriptors are closed.
#![allow(unsafe_code)]

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    UnixCredentials, connect, getsockopt, recvmsg, sendmsg, setsockopt, socket, sockopt,
};
use nix::sys::stat::Mode;
use nix::sys::time::TimeVal;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Longest message.
pub(super) const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Most descriptors of a message.
pub(super) const FDS_MAX: usize = 4;

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
        let mut control = nix::cmsg_space!([RawFd; FDS_MAX]);
        let (len, flags, fds) = loop {
            let mut into = [IoSliceMut::new(&mut bytes)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            match recvmsg::<()>(self.0.as_raw_fd(), &mut into, Some(&mut control), flags) {
                Ok(received) => {
                    let mut fds = Vec::new();
                    // With a cut list of descriptors the iterator refuses; the kernel has closed those then.
                    for message in received.cmsgs().into_iter().flatten() {
                        if let ControlMessageOwned::ScmRights(raw) = message {
                            // SAFETY: the kernel has just installed these descriptors for this process.
                            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                        }
                    }
                    break (received.bytes, received.flags, fds);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::ECONNRESET) => return Ok(None),
                Err(errno) => return Err(errno.into()),
            }
        };
        if flags.intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC) {
            return Err(io::Error::new(ErrorKind::InvalidData, "the message is too long"));
        }
        if len == 0 {
            return Ok(None);
        }
        Ok(Some((serde_json::from_slice(&bytes[..len])?, fds)))
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
