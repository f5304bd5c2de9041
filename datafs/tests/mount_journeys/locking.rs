//! Journeys with locks between mounts: they exclude, they wait, and the next holder sees the previous holder's
//! writes.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use millrace_datafs::mount::{self, MountOptions, TraceOptions};

use super::{Home, errno, eventually, mount_of};
use crate::child;

const ROUNDS: u64 = 40;

fn done(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

pub(crate) fn fcntl(file: &File, kind: i32, start: i64, len: i64, wait: bool) -> io::Result<()> {
    // SAFETY: a lock record is plain numbers; the descriptor is open and the record lives.
    unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        (lock.l_type, lock.l_start, lock.l_len) = (kind as i16, start, len);
        done(libc::fcntl(file.as_raw_fd(), if wait { libc::F_SETLKW } else { libc::F_SETLK }, &lock))
    }
}

pub(crate) fn flock(file: &File, how: i32) -> io::Result<()> {
    // SAFETY: the descriptor is open.
    done(unsafe { libc::flock(file.as_raw_fd(), how) })
}

fn edit(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn finish(mut child: Child) {
    let status = child.wait().unwrap();
    assert!(status.success(), "{status}");
}

/// The child: adds to a number in a file, under a lock each time.
#[test]
fn counter() {
    let Some((path, kind)) = child::task() else { return };
    // Kept open, so only the lock makes the kernel refresh its data.
    let file = edit(&path);
    for _ in 0..ROUNDS {
        match kind {
            0 => fcntl(&file, libc::F_WRLCK, 0, 0, true).unwrap(),
            _ => flock(&file, libc::LOCK_EX).unwrap(),
        }
        let mut number = [0; 8];
        let _ = file.read_at(&mut number, 0).unwrap();
        file.write_all_at(&(u64::from_le_bytes(number) + 1).to_le_bytes(), 0).unwrap();
        match kind {
            0 => fcntl(&file, libc::F_UNLCK, 0, 0, false).unwrap(),
            _ => flock(&file, libc::LOCK_UN).unwrap(),
        }
    }
}

#[test]
pub(super) fn who_locks_sees_what_the_last_holder_wrote_on_another_mount() {
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let mounts = [home.mount("data"), mount_of(&other, "data", &home.at("other"))];
    for kind in 0..2 {
        let name = format!("counter-{kind}");
        let children: Vec<_> = mounts
            .iter()
            .flat_map(|mount| {
                let path = mount.path().join(&name);
                [path.clone(), path]
            })
            .map(|path| child::spawn("mount_journeys::locking::counter", &path, kind))
            .collect();
        let count = children.len() as u64;
        children.into_iter().for_each(finish);
        for mount in &mounts {
            let number = fs::read(mount.path().join(&name)).unwrap();
            assert_eq!(u64::from_le_bytes(number.try_into().unwrap()), count * ROUNDS);
        }
    }
}

/// The child: writes a database that another process writes through another mount.
#[test]
fn inserter() {
    let Some((path, id)) = child::task() else { return };
    let db = rusqlite::Connection::open(path).unwrap();
    db.busy_timeout(std::time::Duration::from_secs(60)).unwrap();
    for round in 0..ROUNDS {
        db.execute_batch("BEGIN IMMEDIATE").unwrap();
        let rows: i64 = db.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).unwrap();
        db.execute("INSERT INTO t VALUES (?1, ?2, ?3)", (rows, id as i64, round as i64)).unwrap();
        db.execute_batch("COMMIT").unwrap();
    }
    let sound: String = db.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(sound, "ok");
}

/// The child: creates the table, and checks its number of rows.
#[test]
fn keeper() {
    let Some((path, rows)) = child::task() else { return };
    let db = rusqlite::Connection::open(path).unwrap();
    db.busy_timeout(std::time::Duration::from_secs(60)).unwrap();
    db.execute_batch("CREATE TABLE IF NOT EXISTS t (number INTEGER PRIMARY KEY, id, round)").unwrap();
    let found: i64 = db.query_row("SELECT count(*) FROM t", [], |row| row.get(0)).unwrap();
    assert_eq!(found, rows as i64);
}

#[test]
pub(super) fn a_database_is_written_alternately_from_two_mounts() {
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let mounts = [home.mount("data"), mount_of(&other, "data", &home.at("other"))];
    let db = |i: usize| mounts[i].path().join("db");
    finish(child::spawn("mount_journeys::locking::keeper", &db(0), 0));
    let children = [0, 1].map(|i| child::spawn("mount_journeys::locking::inserter", &db(i), i as u64));
    children.into_iter().for_each(finish);
    for i in 0..2 {
        finish(child::spawn("mount_journeys::locking::keeper", &db(i), 2 * ROUNDS));
    }
}

/// The child: takes the lock with its number, reports it, and on an order requests the other's lock.
#[test]
fn crossing() {
    let Some((path, first)) = child::task() else { return };
    let file = edit(&path);
    fcntl(&file, libc::F_WRLCK, first as i64, 1, true).unwrap();
    println!("locked 1");
    io::stdout().flush().unwrap();
    io::stdin().read_line(&mut String::new()).unwrap();
    let error = match fcntl(&file, libc::F_WRLCK, 1 - first as i64, 1, true) {
        Ok(()) => 0,
        Err(error) => error.raw_os_error().unwrap(),
    };
    println!("got {error}");
}

/// Whether a process is in a system call that waits for a lock.
fn waits_for_lock(child: &Child) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap();
    let calls = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("syscall")));
    let waits = format!("{} ", libc::SYS_fcntl);
    calls.filter_map(Result::ok).any(|call| {
        call.starts_with(&waits) && call.split(' ').nth(2) == Some(&format!("0x{:x}", libc::F_SETLKW))
    })
}

#[test]
fn who_closes_a_circle_of_waiting_processes_is_told() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let local = home.dir.path().join("local");
    let setlk = || mount.stats().operations.into_iter().find(|of| of.op == "setlk").unwrap_or_default();
    // Lock requests that the mount has received, including waiting ones.
    let asked = || {
        let setlk = setlk();
        setlk.latency.count() + setlk.in_flight
    };
    for path in [local, mount.path().join("file")] {
        let on_mount = path.starts_with(mount.path());
        let mut both = [0, 1].map(|first| {
            let mut command = child::command("mount_journeys::locking::crossing", &path, first);
            let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
            let mut reports = child::reports(&mut child);
            assert!(reports.any(|(word, _)| word == "locked"));
            (child, reports)
        });
        writeln!(both[0].0.stdin.as_mut().unwrap(), "go on").unwrap();
        eventually("the first one waits", || waits_for_lock(&both[0].0) && (!on_mount || asked() == 3));
        writeln!(both[1].0.stdin.as_mut().unwrap(), "go on").unwrap();
        let got = both.map(|(child, mut reports)| {
            let got = reports.find(|(word, _)| word == "got").map(|(_, error)| error as i32);
            reports.for_each(drop);
            finish(child);
            got
        });
        assert_eq!(got, [Some(0), Some(libc::EDEADLK)], "{}", path.display());
    }
    assert_eq!(setlk().errors, 1, "{:?}", setlk());
}

#[test]
fn replies_to_waiting_lock_requests_are_traced_as_sent() {
    let Some(home) = Home::new() else { return };
    let trace = home.dir.path().join("trace");
    let view = home.datafs.view(&"data".parse().unwrap()).unwrap();
    let options = MountOptions {
        trace: Some(TraceOptions { file: trace.clone(), file_bytes_max: 1 << 20 }),
        ..MountOptions::default()
    };
    let mount = mount::mount(view, &home.at("traced"), options).unwrap();
    let path = mount.path().join("file");
    let [held, other] = [edit(&path), edit(&path)];
    flock(&held, libc::LOCK_EX).unwrap();
    assert_eq!(errno(flock(&other, libc::LOCK_EX | libc::LOCK_NB)), libc::EWOULDBLOCK);
    let results = || {
        let text = fs::read_to_string(&trace).unwrap();
        let lines = text.lines().filter(|line| line.contains(" op=setlk "));
        lines
            .map(|line| line.split(" result=").nth(1).unwrap().split(' ').next().unwrap().to_owned())
            .collect()
    };
    eventually("both requests are traced", || {
        let results: Vec<String> = results();
        results.len() >= 2
    });
    assert_eq!(results(), ["ok", "EAGAIN"]);
    let setlk = mount.stats().operations.into_iter().find(|of| of.op == "setlk").unwrap();
    // A lock that is taken is no failure of the mount.
    assert_eq!((setlk.latency.count(), setlk.in_flight, setlk.errors), (2, 0, 0));
}

/// The child: waits for a lock until it is killed.
#[test]
fn waiter() {
    let Some((path, _)) = child::task() else { return };
    let file = edit(&path);
    println!("waits 1");
    io::stdout().flush().unwrap();
    fcntl(&file, libc::F_WRLCK, 0, 0, true).unwrap();
}

#[test]
fn who_waits_can_be_killed_and_the_rest_go_on() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    let file = edit(&path);
    fcntl(&file, libc::F_WRLCK, 0, 0, false).unwrap();
    let mut waiters: Vec<_> =
        (0..4).map(|_| child::spawn("mount_journeys::locking::waiter", &path, 0)).collect();
    for waiter in &mut waiters {
        assert!(child::reports(waiter).any(|(word, _)| word == "waits"));
    }
    // The mount serves other requests while these wait.
    fs::write(mount.path().join("elsewhere"), b"is served").unwrap();
    for mut waiter in waiters {
        waiter.kill().unwrap();
        waiter.wait().unwrap();
    }
    fcntl(&file, libc::F_UNLCK, 0, 0, false).unwrap();
    fcntl(&file, libc::F_WRLCK, 0, 0, false).unwrap();
}

#[test]
fn families_are_apart_and_a_close_gives_up_what_the_process_had() {
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let mounts = [home.mount("data"), mount_of(&other, "data", &home.at("other"))];
    let path = |i: usize| -> PathBuf { mounts[i].path().join("file") };
    let file = edit(&path(0));
    // One process takes both kinds on the whole file, like mail programs.
    flock(&file, libc::LOCK_EX).unwrap();
    fcntl(&file, libc::F_WRLCK, 0, 0, false).unwrap();
    let there = edit(&path(1));
    assert_eq!(errno(flock(&there, libc::LOCK_EX | libc::LOCK_NB)), libc::EAGAIN);
    assert_eq!(errno(fcntl(&there, libc::F_RDLCK, 5, 1, false)), libc::EAGAIN);
    fcntl(&file, libc::F_UNLCK, 0, 0, false).unwrap();
    fcntl(&there, libc::F_RDLCK, 5, 1, false).unwrap();
    drop(file);
    eventually("the lock goes with the open file", || flock(&there, libc::LOCK_EX | libc::LOCK_NB).is_ok());
    flock(&there, libc::LOCK_UN).unwrap();
    // The kernel reports the close of a read-only file late.
    let reader = File::open(path(0)).unwrap();
    fcntl(&reader, libc::F_RDLCK, 5, 1, false).unwrap();
    assert_eq!(errno(fcntl(&there, libc::F_WRLCK, 0, 0, false)), libc::EAGAIN);
    drop(reader);
    eventually("a read lock goes with its file", || fcntl(&there, libc::F_WRLCK, 0, 0, false).is_ok());
}
