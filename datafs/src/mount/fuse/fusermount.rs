//! The unprivileged mount helper: `fusermount3` (setuid root) mounts and sends the descriptor of `/dev/fuse`
//! over a socket, as for libfuse's `mount.fuse3`.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::point::{Attach, READ_BYTES_MAX, in_path, run_quietly};

/// Read timeout for the descriptor of the helper.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Path of the installed helper. The variable `FUSERMOUNT_PATH` takes precedence.
pub(in crate::mount) fn program() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("FUSERMOUNT_PATH") {
        return Some(path.into()).filter(|p: &PathBuf| p.is_file());
    }
    in_path("fusermount3".as_ref()).or_else(|| in_path("fusermount".as_ref()))
}

fn command() -> io::Result<Command> {
    program()
        .map(Command::new)
        .ok_or_else(|| io::Error::new(ErrorKind::NotFound, "fusermount3 is not installed (package fuse3)"))
}

/// Mounts through the helper.
pub(in crate::mount) fn attach(at: &Path, how: &Attach<'_>) -> io::Result<OwnedFd> {
    if how.options.suid || how.options.dev {
        let reason = "set-user-ID programs and device nodes are honoured only in a mount by root: mount as root, \
                      or without --suid and --dev";
        return Err(io::Error::new(ErrorKind::PermissionDenied, reason));
    }
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_read_timeout(Some(ANSWER_MAX))?;
    // A comma would end the option.
    let source = how.source.replace(',', "_");
    let mut options = OsString::from(format!(
        "fsname={source},subtype=millrace,default_permissions,max_read={READ_BYTES_MAX},{}",
        if how.read_only { "ro" } else { "rw" }
    ));
    if how.options.allow_other {
        options.push(",allow_other");
    }
    if how.options.noexec {
        options.push(",noexec");
    }
    let mut command = command()?;
    command.arg("-o").arg(options).arg("--").arg(at);
    // The helper inherits the socket as its standard input, so close-on-exec stays set.
    command.env("_FUSE_COMMFD", "0").stdin(Stdio::from(OwnedFd::from(theirs)));
    run_quietly(&mut command)?;
    // The other end of the socket is open only in `command` and the helper, and both end here.
    drop(command);
    receive_descriptor(&ours)
}

/// Unmounts through the helper.
pub(in crate::mount) fn detach(at: &Path, lazy: bool) -> io::Result<()> {
    let mut command = command()?;
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    run_quietly(command.arg("--").arg(at).stdin(Stdio::null()))
}

/// Receives the one descriptor that the helper sends.
fn receive_descriptor(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0u8; 1];
    let mut data = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: byte.len() };
    // u64 for the alignment of cmsghdr; 32 bytes hold a header and one descriptor.
    let mut control = [0u64; 4];
    // SAFETY: msghdr is plain data for which all zeroes is a valid value.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut data;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control) as _;
    // SAFETY: the message points at live buffers of the stated sizes, and the socket is open.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if received < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: recvmsg has filled the message and its control buffer.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if received == 0 || header.is_null() {
        return Err(io::Error::other("fusermount3 ended without sending a descriptor"));
    }
    // SAFETY: the header is not null, so it lies inside the control buffer. So does its data, which the kernel
    // has cut to whole descriptors. The kernel made the descriptor ours.
    let descriptor = unsafe {
        if (*header).cmsg_level != libc::SOL_SOCKET || (*header).cmsg_type != libc::SCM_RIGHTS {
            return Err(io::Error::other("fusermount3 sent something that is no descriptor"));
        }
        let raw: RawFd = libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned();
        OwnedFd::from_raw_fd(raw)
    };
    Ok(descriptor)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::mount::fuse::point;
    use crate::mount::options::MountOptions;

    #[test]
    fn the_helper_mounts_and_unmounts() {
        if point::can_mount().is_err() || program().is_none() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = point::absolute(dir.path()).unwrap();
        let options = MountOptions { allow_other: false, ..MountOptions::default() };
        let how = Attach { source: "data@v1", read_only: true, options: &options };
        let device = attach(&at, &how).unwrap();
        assert!(point::find(&at).unwrap().is_some());
        drop(device);
        detach(&at, true).unwrap();
        assert_eq!(point::find(&at).unwrap(), None);
        assert!(attach(&at.join("none"), &how).is_err());
    }

    #[test]
    fn a_helper_that_says_nothing_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(receive_descriptor(&ours).is_err());
    }
}
