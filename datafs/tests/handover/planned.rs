//! Planned handovers: a new server takes a mount over from one that serves, under load, without loss.

use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Held, kills};

/// Writers never sync and keep their files open: every line that was written must be there in the end.
#[test]
fn planned_handovers_lose_nothing_and_cost_no_error() {
    let Some(held) = Held::new() else { return };
    let first = held.server("data");
    let at = held.at();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let unlinked = {
        let path = at.join("unlinked");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
        file.write_all_at(b"never synced", 0).unwrap();
        file
    };
    let last = thread::scope(|scope| {
        let mut writers = Vec::new();
        for worker in 0..3u64 {
            let (at, stop, rounds) = (&at, &stop, &rounds);
            writers.push(scope.spawn(move || {
                let path = at.join(format!("w{worker}"));
                let mut file = OpenOptions::new().append(true).create_new(true).open(&path).unwrap();
                let mut written = String::new();
                let mut number = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    let line = format!("{worker} {number}\n");
                    file.write_all(line.as_bytes()).unwrap();
                    written.push_str(&line);
                    if number.is_multiple_of(10) {
                        // Names come and go: a request that was carried out is not carried out twice.
                        let [from, to] = ["from", "to"].map(|name| at.join(format!("{name}-{worker}")));
                        fs::write(&from, b"x").unwrap();
                        fs::rename(&from, &to).unwrap();
                        fs::create_dir(at.join(format!("dir-{worker}"))).unwrap();
                        fs::remove_dir(at.join(format!("dir-{worker}"))).unwrap();
                        fs::remove_file(&to).unwrap();
                    }
                    number += 1;
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
                (path, written)
            }));
        }
        let mut server = first;
        for _ in 0..kills() {
            let before = rounds.load(Ordering::Relaxed);
            let until = Instant::now() + Duration::from_secs(30);
            while rounds.load(Ordering::Relaxed) < before + 50 {
                assert!(Instant::now() < until, "the programs do not go on");
                thread::sleep(crate::child::POLL);
            }
            let next = held.server("data");
            server.ends();
            server = next;
        }
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            let (path, written) = writer.join().unwrap();
            assert!(fs::read_to_string(&path).unwrap() == written, "{}", path.display());
        }
        server
    });
    let mut read = [0; 12];
    unlinked.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(&read, b"never synced");
    drop(unlinked);
    held.unmount();
    last.ends();
}

/// The holder ends and comes back: the mount goes on meanwhile, and can be handed over again afterwards.
#[test]
fn a_mount_outlives_its_holder() {
    let Some(held) = Held::new() else { return };
    let server = held.server("data");
    let at = held.at();
    let file = File::create_new(at.join("file")).unwrap();
    file.write_all_at(b"first", 0).unwrap();
    held.end_holder();
    file.write_all_at(b"other", 0).unwrap();
    fs::write(at.join("without"), b"a holder").unwrap();
    held.start_holder();
    let until = Instant::now() + Duration::from_secs(10);
    while held.mounts().is_empty() {
        assert!(Instant::now() < until, "the server does not come back");
        thread::sleep(crate::child::POLL);
    }
    let next = held.server("data");
    server.ends();
    file.write_all_at(b"third", 0).unwrap();
    assert_eq!(fs::read(at.join("file")).unwrap(), b"third");
    drop(file);
    let mounts = held.mounts();
    assert!(mounts.len() == 1 && mounts[0].is_served && mounts[0].servers == 2, "{mounts:?}");
    let run = fs::read_dir(held.dir.path().join("home/run")).unwrap();
    let sockets =
        run.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("mount-"));
    assert_eq!(sockets.count(), 1, "the control socket of the server before is left");
    held.unmount();
    next.ends();
}
