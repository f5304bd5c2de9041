//! Servers of a live volume are killed: synced data stays, lost writes are reported, everything else goes on.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};

use super::{Held, Seeded, kills};

fn read_write(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

fn is_eio<T: std::fmt::Debug>(result: std::io::Result<T>) -> bool {
    result.unwrap_err().raw_os_error() == Some(libc::EIO)
}

#[test]
fn exactly_the_files_with_lost_writes_report_them() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    let at = held.at();
    let [synced, unsynced, reader, idle] =
        ["synced", "unsynced", "reader", "idle"].map(|name| read_write(&at.join(name)));
    for file in [&synced, &unsynced, &reader, &idle] {
        file.write_all_at(b"first", 0).unwrap();
        file.sync_all().unwrap();
    }
    let other = read_write(&at.join("unsynced"));
    unsynced.write_all_at(b"other", 0).unwrap();
    server.kill();
    let server = held.server("data");

    // The lost write is reported by every call, until the file is closed.
    for _ in 0..2 {
        assert!(is_eio(unsynced.write_at(b"more", 0)));
        assert!(is_eio(unsynced.sync_all()));
    }
    assert!(nix::unistd::close(unsynced).is_err(), "close reports it too");
    // A handle through which nothing was written reports it once, and is of use.
    other.write_all_at(b"third", 0).unwrap();
    assert!(is_eio(other.sync_all()));
    other.sync_all().unwrap();
    for file in [&synced, &reader, &idle] {
        let mut read = [0; 5];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"first");
        file.write_all_at(b"again", 0).unwrap();
        file.sync_all().unwrap();
    }
    assert_eq!(fs::read(at.join("unsynced")).unwrap(), b"third");
    drop((synced, reader, idle, other));
    held.unmount();
    server.ends();
}

#[test]
fn every_descriptor_of_a_file_reports_lost_writes_once() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    let path = held.at().join("file");
    let (writer, idle) = (read_write(&path), read_write(&held.at().join("idle")));
    for file in [&writer, &idle] {
        file.write_all_at(b"A", 0).unwrap();
        file.sync_all().unwrap();
    }
    let [checkpointer, quiet] = [(); 2].map(|()| read_write(&path));
    let reader = File::open(&path).unwrap();
    writer.write_all_at(b"B", 0).unwrap();
    server.kill();
    let server = held.server("data");
    // The next server dies before any program has asked.
    server.kill();
    let server = held.server("data");
    let later = read_write(&path);
    for file in [&checkpointer, &reader, &later] {
        assert!(is_eio(file.sync_data()));
        file.sync_data().unwrap();
    }
    // The loss was told: a descriptor that is opened now has lost nothing.
    read_write(&path).sync_all().unwrap();
    idle.sync_all().unwrap();
    // A planned handover waits for all answers, and keeps what was told and what was not.
    let next = held.server("data");
    server.ends();
    for file in [&checkpointer, &reader, &later, &read_write(&path)] {
        file.sync_all().unwrap();
    }
    nix::unistd::close(quiet).unwrap();
    nix::unistd::close(reader).unwrap();
    assert!(is_eio(writer.sync_all()) && is_eio(writer.write_at(b"more", 0)));
    drop((writer, checkpointer, later, idle));
    held.unmount();
    next.ends();
}

#[test]
fn a_file_opened_after_its_last_descriptor_lost_writes_reports_them_once() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    let path = held.at().join("file");
    let writer = read_write(&path);
    writer.write_all_at(b"A", 0).unwrap();
    writer.sync_all().unwrap();
    writer.write_all_at(b"B", 0).unwrap();
    server.kill();
    let server = held.server("data");
    // Closed without fsync: the error of a close often reaches no program.
    assert!(nix::unistd::close(writer).is_err());
    let next = read_write(&path);
    assert!(is_eio(next.sync_all()));
    next.sync_all().unwrap();
    read_write(&path).sync_all().unwrap();
    drop(next);
    held.unmount();
    server.ends();
}

#[test]
fn flocks_and_files_without_a_name_survive_a_kill() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    let at = held.at();
    let path = at.join("locked");
    let lock = Flock::lock(read_write(&path), FlockArg::LockExclusive).unwrap();
    let unlinked = read_write(&at.join("unlinked"));
    unlinked.write_all_at(b"nameless", 0).unwrap();
    unlinked.sync_all().unwrap();
    fs::remove_file(at.join("unlinked")).unwrap();
    let ino = unlinked.metadata().unwrap().ino();
    // The removal is in the metadata file.
    File::open(&at).unwrap().sync_all().unwrap();
    let mut server = Some(server);
    for round in 0..3 {
        server.take().unwrap().kill();
        server = Some(held.server("data"));
        let other = read_write(&path);
        let refused = Flock::lock(other, FlockArg::LockExclusiveNonblock);
        assert!(refused.is_err(), "round {round}: the flock is free");
        let mut read = [0; 8];
        unlinked.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(&read, b"nameless");
        unlinked.write_all_at(b"nameless", 0).unwrap();
        unlinked.sync_all().unwrap();
        assert_eq!(unlinked.metadata().unwrap().ino(), ino);
    }
    drop(lock.unlock().unwrap());
    drop(Flock::lock(read_write(&path), FlockArg::LockExclusiveNonblock).unwrap());
    drop(unlinked);
    held.unmount();
    server.unwrap().ends();
    let report = held.datafs.fsck(&millrace_datafs::FsckOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(report.problems, 0, "{report:?}");
}

/// Writers append numbered lines, sync some of them, and check after an error what is there.
#[test]
fn synced_lines_survive_killed_servers_under_load() {
    let Some(held) = Held::new() else { return };
    let first = held.server("data");
    let at = held.at();
    fs::create_dir(at.join("lines")).unwrap();
    File::open(at.join("lines")).unwrap().sync_all().unwrap();
    File::open(&at).unwrap().sync_all().unwrap();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let (errors, others) = (AtomicU64::new(0), AtomicU64::new(0));
    let last = thread::scope(|scope| {
        for worker in 0..3u64 {
            let (at, stop, rounds, errors, others) = (&at, &stop, &rounds, &errors, &others);
            scope.spawn(move || {
                let mut seeded = Seeded(worker);
                let path = at.join(format!("lines/w{worker}"));
                let mut synced = String::new();
                while !stop.load(Ordering::Relaxed) {
                    // From what is certain on.
                    let mut file = match OpenOptions::new()
                        .read(true)
                        .write(true)
                        .create(true)
                        .truncate(false)
                        .open(&path)
                    {
                        Ok(file) => file,
                        Err(error) => {
                            eprintln!("open: {error}");
                            others.fetch_add(1, Ordering::Relaxed);
                            continue;
                        }
                    };
                    let found = fs::read_to_string(&path).unwrap();
                    assert!(found.starts_with(&synced), "worker {worker}: synced lines are gone");
                    let mut pending = synced.clone();
                    let mut run =
                        |file: &mut File, pending: &mut String, synced: &mut String| -> std::io::Result<()> {
                            file.set_len(synced.len() as u64)?;
                            std::io::Seek::seek(file, std::io::SeekFrom::End(0))?;
                            for line in 0..20 {
                                let text = format!("{worker} {} {line}\n", seeded.below(1_000_000));
                                file.write_all(text.as_bytes())?;
                                pending.push_str(&text);
                                if seeded.below(4) == 0 {
                                    file.sync_all()?;
                                    synced.clone_from(pending);
                                }
                                rounds.fetch_add(1, Ordering::Relaxed);
                            }
                            Ok(())
                        };
                    if let Err(error) = run(&mut file, &mut pending, &mut synced) {
                        assert_eq!(error.raw_os_error(), Some(libc::EIO), "worker {worker}: {error}");
                        errors.fetch_add(1, Ordering::Relaxed);
                    }
                    // The length after the next synced line is certain again.
                    drop(file);
                    if synced.len() > 200_000 {
                        synced.clear();
                        let file = read_write(&path);
                        // A crash meanwhile, or one of before, is reported once.
                        while let Err(error) = file.set_len(0).and_then(|()| file.sync_all()) {
                            assert_eq!(error.raw_os_error(), Some(libc::EIO), "worker {worker}: {error}");
                        }
                    }
                }
            });
        }
        let mut seeded = Seeded(7);
        let mut server = first;
        for _ in 0..kills() {
            let before = rounds.load(Ordering::Relaxed);
            let until = Instant::now() + Duration::from_secs(30);
            let wanted = 1 + seeded.below(200);
            while rounds.load(Ordering::Relaxed) < before + wanted {
                assert!(Instant::now() < until, "the programs do not go on");
                thread::sleep(crate::child::POLL);
            }
            server.kill();
            server = held.server("data");
        }
        stop.store(true, Ordering::Relaxed);
        server
    });
    assert_eq!(others.load(Ordering::Relaxed), 0);
    eprintln!("{} writers saw a lost write", errors.load(Ordering::Relaxed));
    held.unmount();
    last.ends();
    let report = held.datafs.fsck(&millrace_datafs::FsckOptions::default(), &mut |_| {}).unwrap();
    assert_eq!(report.problems, 0, "{report:?}");
}
