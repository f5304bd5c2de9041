//! The unprivileged mount helper: `fusermount3` (setuid root) mounts and sends the descriptor of `/dev/fuse`
//! over a socket, as for libfuse's `mount.fuse3`.
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::point::{Attach, READ_BYTES_MAX, in_path};

/// Read timeout for the descriptor of the helper.
const ANSWER_MAX: Duration = Duration::from_secs(20);

/// Time limit of the helper, which hangs where a file system on the path does not answer.
const RUN_MAX: Duration = Duration::from_secs(30);
/// Time for a killed helper to end.
const DYING_MAX: Duration = Duration::from_secs(1);
/// First and longest pause between looks at the helper.
const PAUSE_MIN: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(20);

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
    run(&mut command, RUN_MAX)?;
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
    run(command.arg("--").arg(at).stdin(Stdio::null()), RUN_MAX)
}

/// Runs a program to its end, and kills it at the time limit. The error is the last line of its standard error.
fn run(command: &mut Command, limit: Duration) -> io::Result<()> {
    // Unlike a pipe, a file in memory does not end later than the program.
    let mut errors = File::from(memfd_create("fusermount", MFdFlags::MFD_CLOEXEC)?);
    let mut child = command.stdout(Stdio::null()).stderr(errors.try_clone()?).spawn()?;
    let Some(status) = wait(&mut child, limit)? else {
        child.kill()?;
        if wait(&mut child, DYING_MAX)?.is_none() {
            tracing::warn!(pid = child.id(), "a killed mount helper has not ended");
        }
        let program = Path::new(command.get_program()).display();
        let reason = format!(
            "{program} did not end within {} s and was killed; check that the file systems on the path answer",
            limit.as_secs_f64()
        );
        return Err(io::Error::new(ErrorKind::TimedOut, reason));
    };
    if status.success() {
        return Ok(());
    }
    let mut text = Vec::new();
    errors.rewind()?;
    errors.read_to_end(&mut text)?;
    let text = String::from_utf8_lossy(&text);
    Err(io::Error::other(text.lines().last().unwrap_or("it gave no reason").to_owned()))
}

/// Waits for the end of a program; `None` at the time limit.
fn wait(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let (deadline, mut pause) = (Instant::now() + limit, PAUSE_MIN);
    loop {
        let ended = child.try_wait()?;
        if ended.is_some() || Instant::now() >= deadline {
            return Ok(ended);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
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
    fn a_helper_that_hangs_is_killed_at_the_time_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pid");
        let mut command = Command::new("/bin/sh");
        // The shell becomes `sleep`, with the same process id.
        command.args(["-c", "echo $$ > \"$0\"; exec sleep 600"]).arg(&path).stdin(Stdio::null());
        let begun = Instant::now();
        let error = run(&mut command, Duration::from_secs(2)).unwrap_err();
        assert!(begun.elapsed() < Duration::from_secs(60));
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(error.to_string().contains("/bin/sh did not end within 2 s and was killed"), "{error}");
        let pid = std::fs::read_to_string(&path).unwrap();
        assert!(!Path::new("/proc").join(pid.trim()).exists(), "it runs on");
    }

    #[test]
    fn the_last_line_of_a_helper_is_its_error() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "echo first >&2; echo last >&2; exit 3"]).stdin(Stdio::null());
        assert_eq!(run(&mut command, RUN_MAX).unwrap_err().to_string(), "last");
        let mut command = Command::new("/bin/sh");
        assert!(run(command.args(["-c", "echo ignored >&2"]).stdin(Stdio::null()), RUN_MAX).is_ok());
    }

    #[test]
    fn a_helper_that_says_nothing_is_an_error() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(receive_descriptor(&ours).is_err());
    }
}
