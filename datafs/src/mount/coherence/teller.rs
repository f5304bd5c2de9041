//! How a mount tells the kernel what it must drop, and the process that does so for a held mount.
//!
//! The kernel may block in a notification until it has an answer to a request: one of contents waits for the locks of
//! pages that are being read, one of a name for the lock of the directory. A thread in there cannot be killed. In a
//! held mount, where the death of a server answers nothing, such a thread would keep its dead process from ending, and
//! the next server, which could answer, waits for that end. So a process of its own sends these notifications there:
//! it has no other files, and may outlive the server until the next one has answered.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use parking_lot::Mutex;

/// FUSE notification codes.
const INVAL_INODE: i32 = 2;
const INVAL_ENTRY: i32 = 3;
const STORE: i32 = 4;
/// The flag of [`INVAL_ENTRY`] that expires a name instead of invalidating it: the library does not support it.
const EXPIRE_ONLY: u32 = 1;
/// Bytes of the header: length, code, and request 0, because a notification answers no request.
const HEADER: usize = 16;
/// The longest notification is that of a name, of at most 255 bytes.
const MESSAGE_MAX: usize = 512;

/// Sends notifications to the kernel.
#[derive(Debug)]
pub(in crate::mount) struct Teller {
    device: File,
    /// In a held mount.
    relay: Option<Relay>,
}

impl Teller {
    /// For a mount whose kernel side ends with this process.
    pub(in crate::mount) fn new(device: File) -> Teller {
        Teller { device, relay: None }
    }

    /// For a mount that outlives this process.
    pub(in crate::mount) fn apart(device: File) -> io::Result<Teller> {
        let relay = Some(Relay::start(&device)?);
        Ok(Teller { device, relay })
    }

    /// Makes the kernel request attributes again. Does not block.
    pub(super) fn drop_attributes(&self, ino: u64) -> io::Result<()> {
        self.send(&inode_message(ino, -1))
    }

    /// Makes the kernel drop the pages and attributes of a file. Waits for reads in progress.
    pub(super) fn drop_contents(&self, ino: u64) -> io::Result<()> {
        self.send_blocking(&inode_message(ino, 0))
    }

    /// Expires a name: the kernel looks it up before it uses it again. Waits for changes of the directory in progress.
    pub(super) fn expire(&self, parent: u64, name: &[u8]) -> io::Result<()> {
        let mut body = parent.to_ne_bytes().to_vec();
        body.extend_from_slice(&(name.len() as u32).to_ne_bytes());
        body.extend_from_slice(&EXPIRE_ONLY.to_ne_bytes());
        body.extend_from_slice(name);
        body.push(0);
        match self.send_blocking(&message(INVAL_ENTRY, &body)) {
            // The kernel does not know the name.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            sent => sent,
        }
    }

    /// Puts one byte into the kernel's pages of a file. Waits for reads in progress.
    pub(super) fn store(&self, ino: u64, offset: u64, byte: u8) -> io::Result<()> {
        let mut body = ino.to_ne_bytes().to_vec();
        body.extend_from_slice(&offset.to_ne_bytes());
        // The number of bytes, and padding.
        body.extend_from_slice(&1u32.to_ne_bytes());
        body.extend_from_slice(&0u32.to_ne_bytes());
        body.push(byte);
        self.send_blocking(&message(STORE, &body))
    }

    fn send(&self, message: &[u8]) -> io::Result<()> {
        (&self.device).write_all(message)
    }

    fn send_blocking(&self, message: &[u8]) -> io::Result<()> {
        match self.relay.as_ref().and_then(|relay| relay.send(message)) {
            Some(sent) => sent,
            None => self.send(message),
        }
    }
}

fn inode_message(ino: u64, offset: i64) -> Vec<u8> {
    let mut body = ino.to_ne_bytes().to_vec();
    body.extend_from_slice(&offset.to_ne_bytes());
    // To the end of the file.
    body.extend_from_slice(&0i64.to_ne_bytes());
    message(INVAL_INODE, &body)
}

fn message(code: i32, body: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(HEADER + body.len());
    message.extend_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    message.extend_from_slice(&code.to_ne_bytes());
    message.extend_from_slice(&0u64.to_ne_bytes());
    message.extend_from_slice(body);
    message
}

/// A process that writes messages to the device, one at a time.
#[derive(Debug)]
struct Relay {
    /// `None` once the process has ended. It ends when this is closed.
    socket: Mutex<Option<File>>,
    process: Pid,
}

impl Relay {
    fn start(device: &File) -> io::Result<Relay> {
        let (mine, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let process = fork(&theirs, device)?;
        Ok(Relay { socket: Mutex::new(Some(File::from(mine))), process })
    }

    /// Has the process write a message, and waits until the kernel has processed it. `None` when the process has
    /// ended, which only a signal makes it do.
    fn send(&self, message: &[u8]) -> Option<io::Result<()>> {
        let mut socket = self.socket.lock();
        let mut answer = [0; 4];
        let open = socket.as_mut()?;
        let answered = open.write_all(message).and_then(|()| open.read_exact(&mut answer));
        if let Err(error) = answered {
            tracing::warn!(%error, "the process that tells the kernel of changes has ended");
            *socket = None;
            return None;
        }
        Some(match i32::from_ne_bytes(answer) {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        *self.socket.get_mut() = None;
        // Nothing in there blocks any more: the kernel's side of the mount has ended.
        let _ = waitpid(self.process, None);
    }
}

/// Makes the process that writes to the device what it gets from the socket.
fn fork(socket: &OwnedFd, device: &File) -> io::Result<Pid> {
    let (socket, device) = (socket.as_raw_fd(), device.as_raw_fd());
    // SAFETY: the child is a copy of one thread of many.
    match Errno::result(unsafe { libc::fork() })? {
        // SAFETY: this is the child.
        0 => unsafe { relay(socket, device) },
        process => Ok(Pid::from_raw(process)),
    }
}

/// The process. It keeps no other file, folder or terminal of its parent, and takes no signal but SIGKILL.
///
/// # Safety
/// To be called in the child of a fork alone. As the child of one thread of many, it makes system calls only: it takes
/// no lock, allocates nothing, and never returns.
unsafe fn relay(socket: RawFd, device: RawFd) -> ! {
    let mut message = [0u8; MESSAGE_MAX];
    // SAFETY: system calls with pointers to values of this function.
    unsafe {
        let mut signals = std::mem::zeroed();
        libc::sigfillset(&raw mut signals);
        libc::sigprocmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_NAME, c"datafs-tell".as_ptr());
        libc::chdir(c"/".as_ptr());
        let (low, high) = (socket.min(device) as u32, socket.max(device) as u32);
        for (first, end) in [(0, low), (low + 1, high), (high + 1, u32::MAX)] {
            if first < end {
                libc::syscall(libc::SYS_close_range, first, end - 1, 0);
            }
        }
        loop {
            let len = libc::recv(socket, message.as_mut_ptr().cast(), MESSAGE_MAX, 0);
            if len <= 0 {
                libc::_exit(0);
            }
            let written = libc::write(device, message.as_ptr().cast(), len as usize);
            let code: i32 = if written < 0 { *libc::__errno_location() } else { 0 };
            libc::send(socket, (&raw const code).cast(), size_of::<i32>(), libc::MSG_NOSIGNAL);
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use nix::fcntl::OFlag;
    use nix::sys::signal::{Signal, kill};

    use super::*;

    /// A teller whose messages can be read.
    fn teller() -> (Teller, File) {
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
        (Teller::apart(File::from(write)).unwrap(), File::from(read))
    }

    fn read(mut told: &File) -> Vec<u8> {
        let mut bytes = vec![0; 2 * MESSAGE_MAX];
        let len = told.read(&mut bytes).unwrap();
        bytes.truncate(len);
        bytes
    }

    #[test]
    fn a_message_is_written_when_the_call_returns() {
        let (teller, told) = teller();
        for name in [&b"x"[..], &[b'n'; 255]] {
            teller.expire(7, name).unwrap();
            let bytes = read(&told);
            assert_eq!(bytes.len(), HEADER + 16 + name.len() + 1);
            assert_eq!(bytes[..4], (bytes.len() as u32).to_ne_bytes());
            assert_eq!(&bytes[HEADER + 16..][..name.len()], name);
        }
        teller.drop_contents(9).unwrap();
        assert_eq!(read(&told), inode_message(9, 0));
        teller.store(9, 1, 2).unwrap();
        assert_eq!(read(&told).len(), HEADER + 25);
        teller.drop_attributes(9).unwrap();
        assert_eq!(read(&told), inode_message(9, -1));
    }

    #[test]
    fn errors_of_the_device_come_back() {
        let (teller, told) = teller();
        drop(told);
        // SIGPIPE is blocked in the process.
        assert_eq!(teller.drop_contents(1).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
        assert_eq!(teller.store(1, 0, 0).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }

    #[test]
    fn the_process_has_no_other_files() {
        let (teller, _told) = teller();
        teller.drop_contents(1).unwrap();
        let process = teller.relay.as_ref().unwrap().process;
        assert_eq!(std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count(), 2);
        assert_eq!(std::fs::read_link(format!("/proc/{process}/cwd")).unwrap(), std::path::Path::new("/"));
        drop(teller);
        assert!(!std::path::Path::new(&format!("/proc/{process}")).exists());
    }

    #[test]
    fn nothing_is_lost_when_the_process_is_killed() {
        let (teller, told) = teller();
        kill(teller.relay.as_ref().unwrap().process, Signal::SIGKILL).unwrap();
        for ino in 1..4 {
            teller.drop_contents(ino).unwrap();
            assert_eq!(read(&told), inode_message(ino, 0));
        }
    }
}
