//! Journeys with cached pages and modes in the kernel, after changes that bypass its pages.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::unistd::{Uid, setfsuid};

use super::Home;
use super::sharing::Stop;

const BYTES: usize = 64 * 1024;

/// A page-aligned buffer for direct I/O.
#[repr(C, align(4096))]
struct Pages([u8; BYTES]);

/// The kernel's structure of an asynchronous write request.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    event_fd: u32,
}

/// `IOCB_CMD_PWRITE`.
const WRITE: u16 = 1;

/// A context of asynchronous I/O.
struct Aio(u64);

impl Aio {
    fn new() -> Aio {
        let mut context = 0u64;
        // SAFETY: the kernel writes the context to the variable.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut context) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
        Aio(context)
    }

    /// Writes to the beginning of a file and waits for the completion.
    fn write(&self, file: &File, pages: &Pages) {
        let request = Iocb {
            opcode: WRITE,
            fd: file.as_raw_fd() as u32,
            buffer: pages.0.as_ptr() as u64,
            bytes: BYTES as u64,
            ..Iocb::default()
        };
        let requests = [&raw const request];
        let mut event = [0u64; 4];
        // SAFETY: request and buffer live until the write has ended, which the second call waits for; the event has
        // the kernel's size.
        unsafe {
            let sent = libc::syscall(libc::SYS_io_submit, self.0, 1, requests.as_ptr());
            assert_eq!(sent, 1, "{}", io::Error::last_os_error());
            let none = std::ptr::null::<libc::timespec>();
            let ended = libc::syscall(libc::SYS_io_getevents, self.0, 1, 1, event.as_mut_ptr(), none);
            assert_eq!(ended, 1, "{}", io::Error::last_os_error());
        }
        assert_eq!(event[2], BYTES as u64, "the bytes that were written");
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: the context is not used any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

fn open_direct(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).unwrap()
}

#[test]
fn readers_see_what_asynchronous_direct_writes_have_written() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("f");
    fs::write(&path, vec![0; BYTES]).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    fs::read(&path).unwrap();
                }
            });
        }
        let _done = Stop(&done);
        let (aio, file) = (Aio::new(), open_direct(&path));
        let mut stale = 0;
        let mut pages = Box::new(Pages([0; BYTES]));
        for round in 1..=1_000u32 {
            pages.0.fill(round as u8);
            aio.write(&file, &pages);
            let read = fs::read(&path).unwrap();
            stale += u32::from(read.len() != BYTES || read.iter().any(|byte| *byte != round as u8));
        }
        assert_eq!(stale, 0, "rounds in which a fresh open read something older");
    });
}

/// The permission bits alone, which the kernel serves from its cache while they are valid.
fn mode(path: &Path) -> u32 {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: all zeroes is a valid value, the path is terminated, and the kernel fills the structure.
    let found = unsafe {
        let mut found = std::mem::zeroed::<libc::statx>();
        let done = libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, libc::STATX_MODE, &raw mut found);
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
        found
    };
    u32::from(found.stx_mode) & 0o7777
}

/// A change that a program makes to an open file.
type Change<'a> = &'a dyn Fn(&File);

#[test]
fn a_mode_alone_shows_that_a_change_has_taken_the_privileges_of_a_program() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root can become another user");
    }
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    for folder in [home.dir.path(), mount.path()] {
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    }
    let path = mount.path().join("program");
    let source = mount.path().join("source");
    fs::write(&source, vec![3; BYTES]).unwrap();
    let allocate = |file: &File, mode: i32| {
        // SAFETY: the descriptor is open.
        let done = unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, BYTES as i64) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    };
    let pages = Box::new(Pages([7; BYTES]));
    let changes: [(&str, Change<'_>); 7] = [
        ("a direct write", &|file| {
            std::os::unix::fs::FileExt::write_all_at(file, &pages.0, 0).unwrap();
        }),
        ("an asynchronous direct write", &|file| Aio::new().write(file, &pages)),
        ("fallocate", &|file| allocate(file, 0)),
        ("punching a hole", &|file| allocate(file, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)),
        ("zeroing", &|file| allocate(file, libc::FALLOC_FL_ZERO_RANGE)),
        ("copy_file_range", &|file| {
            let from = File::open(&source).unwrap();
            let none = std::ptr::null_mut();
            let (from, to) = (from.as_raw_fd(), file.as_raw_fd());
            // SAFETY: both descriptors are open, and null stands for their own offsets.
            let copied = unsafe { libc::copy_file_range(from, none, to, none, BYTES, 0) };
            assert_eq!(copied, BYTES as isize, "{}", io::Error::last_os_error());
        }),
        ("opening with O_TRUNC", &|_| drop(File::create(&path).unwrap())),
    ];
    for (what, change) in changes {
        fs::write(&path, vec![1; BYTES]).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o6777)).unwrap();
        assert_eq!(mode(&path), 0o6777, "{what}");
        // The kernel checks the file-system user of the thread, and drops root's capabilities with it.
        setfsuid(Uid::from_raw(1_001));
        let file = open_direct(&path);
        change(&file);
        setfsuid(Uid::from_raw(0));
        assert_eq!(mode(&path), 0o777, "{what}");
        drop(file);
        assert_eq!(mode(&path), 0o777, "{what}, and the file is closed");
    }
}
