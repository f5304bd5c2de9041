//! Servers of a snapshot are killed under load.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::{Held, Seeded, kills};

const FILES: u64 = 40;
const SMALL: usize = 10_000;
const LARGE: usize = 3 << 20;

fn content(number: u64) -> Vec<u8> {
    let len = if number.is_multiple_of(10) { LARGE } else { SMALL };
    (0..len as u64).map(|i| ((i + number).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Drops the pages of a file, so that the next read asks the server.
fn drop_pages(file: &File) {
    nix::fcntl::posix_fadvise(file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
}

#[test]
fn killed_servers_of_a_snapshot_cost_no_error() {
    let Some(held) = Held::new() else { return };
    let live = held.datafs.view(&"data".parse().unwrap()).unwrap();
    live.create_dir_all("many").unwrap();
    for number in 0..FILES {
        live.write_file(&format!("f{number}"), &content(number)).unwrap();
        live.write_file(&format!("many/n{number}"), b"x").unwrap();
    }
    held.snapshot("s");
    let first = held.server("data@s");
    let at = held.at();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let goes_on = || !stop.load(Ordering::Relaxed);
    let last = thread::scope(|scope| {
        let mut server = first;
        for worker in 0..3u64 {
            let (at, rounds, goes_on) = (&at, &rounds, &goes_on);
            scope.spawn(move || {
                let mut seeded = Seeded(worker);
                // Open from the first server to the last.
                let open: Vec<_> =
                    (0..FILES).map(|number| File::open(at.join(format!("f{number}"))).unwrap()).collect();
                while goes_on() {
                    let number = seeded.below(FILES);
                    let whole = content(number);
                    let from = seeded.below(whole.len() as u64);
                    let len = (whole.len() - from as usize).min(200_000);
                    drop_pages(&open[number as usize]);
                    let mut read = vec![0; len];
                    open[number as usize].read_exact_at(&mut read, from).unwrap();
                    assert!(read == whole[from as usize..][..len], "file {number} from {from}");
                    let again = fs::read(at.join(format!("f{number}"))).unwrap();
                    assert!(again == whole, "file {number}");
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let (at, goes_on) = (&at, &goes_on);
        scope.spawn(move || {
            while goes_on() {
                let mut names = 0;
                for entry in fs::read_dir(at.join("many")).unwrap() {
                    let entry = entry.unwrap();
                    assert_eq!(entry.metadata().unwrap().len(), 1);
                    names += 1;
                }
                assert_eq!(names, FILES);
                nix::sys::statvfs::statvfs(at).unwrap();
            }
        });
        let mut seeded = Seeded(36);
        for _ in 0..kills() {
            let before = rounds.load(Ordering::Relaxed);
            let until = Instant::now() + Duration::from_secs(30);
            let wanted = 1 + seeded.below(20);
            while rounds.load(Ordering::Relaxed) < before + wanted {
                assert!(Instant::now() < until, "the programs do not go on");
                thread::sleep(crate::child::POLL);
            }
            server.kill();
            server = held.server("data@s");
        }
        stop.store(true, Ordering::Relaxed);
        server
    });
    assert!(rounds.load(Ordering::Relaxed) > kills());
    held.unmount();
    last.ends();
}
