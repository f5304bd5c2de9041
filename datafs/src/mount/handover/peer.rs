//! The process at the other end of a connection to a holder.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};

use nix::errno::Errno;

use super::authority::Rights;
use super::wire::Wire;

/// The process that made a connection.
#[derive(Debug)]
pub(super) struct Peer {
    /// The number of the connection.
    pub(super) connection: u64,
    pub(super) rights: Rights,
    /// 0 in another PID namespace.
    pub(super) pid: i32,
    /// `None` before Linux 6.5.
    process: Option<OwnedFd>,
}

impl Peer {
    /// The process that made a connection, by the kernel's word.
    pub(super) fn of(wire: &Wire, connection: u64) -> io::Result<Peer> {
        let credentials = wire.peer()?;
        Ok(Peer {
            connection,
            rights: Rights::of(credentials.uid()),
            pid: credentials.pid(),
            process: wire.peer_process(),
        })
    }

    /// A peer without a process.
    #[cfg(test)]
    pub(super) fn for_test(connection: u64, rights: Rights) -> Peer {
        Peer { connection, rights, pid: 0, process: None }
    }

    /// A handle of the process, for its end.
    pub(super) fn process(&self) -> io::Result<Option<OwnedFd>> {
        self.process.as_ref().map(OwnedFd::try_clone).transpose()
    }
}

/// Kills a process by its handle, which means that one whatever number it has.
pub(super) fn kill(process: &OwnedFd) -> io::Result<()> {
    // SAFETY: the descriptor is open, and the kernel reads no memory.
    Errno::result(unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            process.as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<libc::siginfo_t>(),
            0,
        )
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::fd::{FromRawFd as _, RawFd};
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_killed_process_is_the_one_of_the_handle() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        // SAFETY: the kernel reads no memory, and the new descriptor has no other owner.
        let process = unsafe {
            let process = Errno::result(libc::syscall(libc::SYS_pidfd_open, child.id(), 0)).unwrap();
            OwnedFd::from_raw_fd(process as RawFd)
        };
        kill(&process).unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGKILL));
        assert_eq!(kill(&process).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}
