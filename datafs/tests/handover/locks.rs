//! Servers are killed while programs hold, release and wait for locks of ranges. The locks belong to open files
//! (`F_OFD_SETLK`), so that one process can have several owners.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::unistd::gettid;

use super::Held;

fn opened(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn range(kind: i32) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 10,
        l_len: 10,
        l_pid: 0,
    }
}

/// Takes or releases a lock without waiting. Returns whether it was free.
fn set(file: &File, kind: i32) -> bool {
    match fcntl(file, FcntlArg::F_OFD_SETLK(&range(kind))) {
        Ok(_) => true,
        Err(Errno::EAGAIN | Errno::EACCES) => false,
        Err(errno) => panic!("{errno}"),
    }
}

fn is_asleep(thread: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    stat.rsplit_once(") ").is_some_and(|(_, state)| state.starts_with(['S', 'D']))
}

#[test]
fn answered_locks_and_releases_survive_a_kill() {
    let Some(held) = Held::new() else { return };
    let mut server = held.server("data");
    let path = held.at().join("locked");
    let [one, other] = [opened(&path), opened(&path)];
    // Each kill comes right after an answer.
    for round in 0..5 {
        assert!(set(&one, libc::F_WRLCK));
        server.kill();
        server = held.server("data");
        assert!(!set(&other, libc::F_WRLCK), "round {round}: the lock is lost");
        assert!(set(&one, libc::F_UNLCK));
        server.kill();
        server = held.server("data");
        assert!(set(&other, libc::F_WRLCK), "round {round}: the released lock is held");
        assert!(set(&other, libc::F_UNLCK));
    }
    drop((one, other));
    held.unmount();
    server.ends();
}

#[test]
fn a_program_that_waits_for_a_lock_gets_it_from_a_later_server() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    let path = held.at().join("locked");
    let [one, other] = [opened(&path), opened(&path)];
    assert!(set(&one, libc::F_WRLCK));
    let server = thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let waits = scope.spawn(move || {
            tell.send(gettid().as_raw()).unwrap();
            fcntl(&other, FcntlArg::F_OFD_SETLKW(&range(libc::F_WRLCK))).unwrap();
            other
        });
        let waiter = told.recv().unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while !is_asleep(waiter) {
            assert!(Instant::now() < until, "the program does not wait");
            thread::yield_now();
        }
        // One crash, and one planned handover.
        server.kill();
        let second = held.server("data");
        assert!(!waits.is_finished());
        let third = held.server("data");
        second.ends();
        assert!(!waits.is_finished());
        assert!(set(&one, libc::F_UNLCK));
        let other = waits.join().unwrap();
        assert!(!set(&one, libc::F_WRLCK), "two owners have the lock");
        assert!(set(&other, libc::F_UNLCK));
        third
    });
    drop(one);
    held.unmount();
    server.ends();
}

/// The kernel does not report the close of a file that is only read, but for its release.
#[test]
fn a_close_releases_the_locks_of_an_earlier_server() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    let path = held.at().join("locked");
    let writer = opened(&path);
    let [reader, keeper] = [File::open(&path).unwrap(), File::open(&path).unwrap()];
    assert!(set(&reader, libc::F_RDLCK) && set(&keeper, libc::F_RDLCK));
    server.kill();
    let server = held.server("data");
    assert!(!set(&writer, libc::F_WRLCK));
    drop(reader);
    assert!(set(&keeper, libc::F_UNLCK));
    // The kernel reports the release after `close` has returned.
    let until = Instant::now() + Duration::from_secs(30);
    while !set(&writer, libc::F_WRLCK) {
        assert!(Instant::now() < until, "the lock of a closed file is held");
        thread::yield_now();
    }
    drop((keeper, writer));
    held.unmount();
    server.ends();
}
