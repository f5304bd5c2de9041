//! Benchmark: many files of 8 KiB, written, copied in, and read cold and warm.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

use crate::Asked;
use crate::figure::Figure;
use crate::place::{Place, Times, drop_caches, fill, rate, timed};

const BYTES: usize = 8 << 10;
const A_FOLDER: usize = 1_000;
const AGAINST: &str = "the same on the local file system";

pub(crate) const FIGURES: &[(&str, &str)] = &[
    ("small_write", "20k files of 8 KiB created, written and closed by one thread"),
    ("small_read_warm_live", "those opened, read and closed in shuffled order on the live mount, warm"),
    ("small_read_cold", "the same on a fresh mount of a snapshot, caches dropped"),
    ("small_read_warm", "the same once more"),
    ("cp_r", "`cp -r` of 100k such files from the local file system"),
];

pub(crate) fn run(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    if FIGURES[..4].iter().any(|(name, _)| asked.wants(name)) {
        write_and_read(asked, report);
    }
    if asked.wants("cp_r") {
        copy_in(asked, report);
    }
}

fn write_and_read(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let rounds = asked.sized(3, 1);
    let place = Place::new();
    let count = asked.sized(20_000, 5_000);
    let mounted = place.mount("", &[]);
    let (ours, plain) = (mounted.at().to_owned(), place.plain());
    let mut times = Times::default();
    for round in 0..rounds {
        let name = format!("set-{round}");
        nix::unistd::sync();
        times.add(write(&ours.join(&name), count), write(&plain.join(&name), count));
    }
    report(rate("datafs/small_write", "files/s", count as f64, times.pair(), AGAINST));
    if !FIGURES[1..4].iter().any(|(name, _)| asked.wants(name)) {
        return;
    }
    let order = shuffled(count);
    let mut times = Times::default();
    for round in 0..=rounds {
        let (a, b) = (read(&ours.join("set-0"), &order), read(&plain.join("set-0"), &order));
        // The first round warms the caches.
        if round > 0 {
            times.add(a, b);
        }
    }
    report(rate("datafs/small_read_warm_live", "files/s", count as f64, times.pair(), AGAINST));
    drop(mounted);
    place.snapshot("s");
    let (mut cold, mut warm) = (Times::default(), Times::default());
    let may_drop = drop_caches(3);
    for _ in 0..rounds {
        drop_caches(3);
        let control = read(&plain.join("set-0"), &order);
        let control_warm = read(&plain.join("set-0"), &order);
        let mounted = place.mount("@s", &[]);
        drop_caches(3);
        cold.add(read(&mounted.at().join("set-0"), &order), control);
        warm.add(read(&mounted.at().join("set-0"), &order), control_warm);
    }
    if may_drop {
        report(rate("datafs/small_read_cold", "files/s", count as f64, cold.pair(), AGAINST));
    } else if asked.wants("small_read_cold") {
        eprintln!("datafs/small_read_cold: skipped, dropping the kernel's caches needs root");
    }
    report(rate("datafs/small_read_warm", "files/s", count as f64, warm.pair(), AGAINST));
}

fn copy_in(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let place = Place::new();
    let count = asked.sized(100_000, 10_000);
    let source = place.path("source");
    write(&source, count);
    let mounted = place.mount("", &[]);
    let mut times = Times::default();
    let copied = |to: PathBuf| {
        nix::unistd::sync();
        copy(&source, &to)
    };
    for round in 0..asked.sized(3, 1) {
        let name = format!("copy-{round}");
        let (ours, plain) = (mounted.at().join(&name), place.plain().join(&name));
        // A disk may be slow for a while after many writes, so ours and the control take turns in going second.
        if round % 2 == 0 {
            let control = copied(plain);
            times.add(copied(ours), control);
        } else {
            times.add(copied(ours), copied(plain));
        }
    }
    report(rate("datafs/cp_r", "files/s", count as f64, times.pair(), AGAINST));
}

fn folder_of(root: &Path, i: usize) -> PathBuf {
    root.join(format!("d{}", i / A_FOLDER))
}

fn file_of(root: &Path, i: usize) -> PathBuf {
    folder_of(root, i).join(format!("f{i}"))
}

/// Writes and closes the files, without a sync.
fn write(root: &Path, count: usize) -> Duration {
    let mut block = vec![0; BYTES];
    fill(&mut block, 3);
    timed(|| {
        for i in 0..count {
            if i % A_FOLDER == 0 {
                std::fs::create_dir_all(folder_of(root, i)).unwrap();
            }
            block[..8].copy_from_slice(&i.to_le_bytes());
            File::create_new(file_of(root, i)).unwrap().write_all(&block).unwrap();
        }
    })
    .0
}

fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.shuffle(&mut StdRng::seed_from_u64(5));
    order
}

fn read(root: &Path, order: &[usize]) -> Duration {
    let mut buffer = vec![0; BYTES + 1];
    timed(|| {
        for i in order {
            let mut file = File::open(file_of(root, *i)).unwrap();
            let n = file.read(&mut buffer).unwrap();
            assert!(n == BYTES && buffer[..8] == i.to_le_bytes(), "file {i}: {n} bytes");
        }
    })
    .0
}

fn copy(from: &Path, to: &Path) -> Duration {
    let (elapsed, status) = timed(|| Command::new("cp").arg("-r").args([from, to]).status().unwrap());
    assert!(status.success());
    elapsed
}
