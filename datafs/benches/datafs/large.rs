//! Benchmark: one large file, read and written alternately with the same file on the local file system.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::Asked;
use crate::figure::Figure;
use crate::place::{Place, Times, drop_caches, fill, rate, timed};

/// Size of one sequential read or write.
const BLOCK: usize = 1 << 20;
/// Size of one random read or write.
const SMALL: usize = 4096;
const GIB: f64 = (1_u64 << 30) as f64;

pub(crate) const READS: &[(&str, &str)] = &[
    ("read_seq_1m_first", "1 GiB of a snapshot through a fresh mount, 1 MiB reads, caches dropped"),
    ("read_seq_1m", "the same once more: warm"),
    ("read_rand_4k", "4 KiB at random places of it, warm, one at a time"),
    ("read_seq_1m_daemon", "1 MiB reads with O_DIRECT, without passthrough: through the daemon"),
    ("read_rand_4k_daemon", "4 KiB at random places, likewise"),
];

pub(crate) const WRITES: &[(&str, &str)] = &[
    ("write_seq_1g_fsync", "a new file of 1 GiB, 1 MiB writes, fsync included"),
    ("write_rand_4k", "4 KiB over random places of an existing file of 1 GiB, one fsync included"),
];

pub(crate) fn reads(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let place = Place::new();
    let bytes = asked.sized(1_u64 << 30, 256 << 20);
    let rounds = asked.sized(5, 2);
    // A round takes a tenth of a second, so one disturbance spoils it; hence the many rounds.
    let warm_rounds = asked.sized(25, 2);
    let plain = place.plain().join("big");
    write(&plain, bytes, 1);
    {
        let live = place.mount("", &[]);
        write(&live.at().join("big"), bytes, 1);
    }
    place.snapshot("s");
    if asked.wants("read_seq_1m_first") {
        let mut times = Times::default();
        if drop_caches(3) {
            for _ in 0..rounds {
                let mounted = place.mount("@s", &[]);
                drop_caches(3);
                let ours = read(&mounted.at().join("big"), bytes, 0);
                drop(mounted);
                drop_caches(3);
                times.add(ours, read(&plain, bytes, 0));
            }
            let against = "the same file on the local file system, both cold";
            report(rate("datafs/read_seq_1m_first", "GiB/s", bytes as f64 / GIB, times.pair(), against));
        } else {
            eprintln!("datafs/read_seq_1m_first: skipped, dropping the kernel's caches needs root");
        }
    }
    let warm = "the same file on the local file system, both warm";
    let cached = "the same file on the local file system, from the kernel's cache";
    for (seq, random, options, flags, against) in [
        ("datafs/read_seq_1m", "datafs/read_rand_4k", &[][..], 0, warm),
        ("datafs/read_seq_1m_daemon", "datafs/read_rand_4k_daemon", &["daemon"][..], libc::O_DIRECT, cached),
    ] {
        if !asked.wants(&seq[7..]) && !asked.wants(&random[7..]) {
            continue;
        }
        let mounted = place.mount("@s", options);
        let ours = mounted.at().join("big");
        read(&ours, bytes, flags);
        read(&plain, bytes, 0);
        let mut times = Times::default();
        for _ in 0..warm_rounds {
            times.add(read(&ours, bytes, flags), read(&plain, bytes, 0));
        }
        report(rate(seq, "GiB/s", bytes as f64 / GIB, times.pair(), against));
        let count = asked.sized(100_000, 20_000);
        let mut times = Times::default();
        for seed in 0..warm_rounds as u64 {
            times.add(
                read_random(&ours, bytes, count, seed, flags),
                read_random(&plain, bytes, count, seed, 0),
            );
        }
        report(rate(random, "IOPS", count as f64, times.pair(), against));
    }
}

pub(crate) fn writes(asked: &Asked, report: &mut dyn FnMut(Figure)) {
    let place = Place::new();
    let bytes = asked.sized(1_u64 << 30, 256 << 20);
    let rounds = asked.sized(5, 2);
    let mounted = place.mount("", &[]);
    let (ours, plain) = (mounted.at().join("big"), place.plain().join("big"));
    if asked.wants("write_seq_1g_fsync") {
        let mut times = Times::default();
        for seed in 0..rounds as u64 {
            std::fs::remove_file(&ours).ok();
            std::fs::remove_file(&plain).ok();
            // After this both sides get recently used memory, see docs/notes/volume-figures.md.
            place.collect();
            nix::unistd::sync();
            times.add(write(&ours, bytes, seed), write(&plain, bytes, seed));
        }
        let against = "the same on the local file system";
        report(rate("datafs/write_seq_1g_fsync", "GiB/s", bytes as f64 / GIB, times.pair(), against));
    } else {
        write(&ours, bytes, 1);
        write(&plain, bytes, 1);
    }
    if asked.wants("write_rand_4k") {
        let count = asked.sized(65_536, 8_192);
        let mut times = Times::default();
        for seed in 0..rounds as u64 {
            nix::unistd::sync();
            times.add(write_random(&ours, bytes, count, seed), write_random(&plain, bytes, count, seed));
        }
        let against = "the same on the local file system";
        report(rate("datafs/write_rand_4k", "IOPS", count as f64, times.pair(), against));
    }
}

/// A buffer, and its offset of page-aligned memory for O_DIRECT.
fn aligned(len: usize) -> (Vec<u8>, usize) {
    let buffer = vec![0; len + 4096];
    let skip = buffer.as_ptr().align_offset(4096);
    (buffer, skip)
}

fn read(path: &Path, bytes: u64, flags: i32) -> Duration {
    let (mut buffer, skip) = aligned(BLOCK);
    let (elapsed, total) = timed(|| {
        let mut file = File::options().read(true).custom_flags(flags).open(path).unwrap();
        let mut total = 0;
        loop {
            match file.read(&mut buffer[skip..skip + BLOCK]).unwrap() {
                0 => break total,
                n => total += n as u64,
            }
        }
    });
    assert_eq!(total, bytes);
    elapsed
}

fn read_random(path: &Path, bytes: u64, count: usize, seed: u64, flags: i32) -> Duration {
    let (mut buffer, skip) = aligned(SMALL);
    let mut random = StdRng::seed_from_u64(seed);
    let file = File::options().read(true).custom_flags(flags).open(path).unwrap();
    timed(|| {
        for _ in 0..count {
            let at = random.random_range(0..bytes / SMALL as u64) * SMALL as u64;
            file.read_exact_at(&mut buffer[skip..skip + SMALL], at).unwrap();
        }
    })
    .0
}

/// Writes a new file, with an fsync.
fn write(path: &Path, bytes: u64, seed: u64) -> Duration {
    let mut block = vec![0_u8; BLOCK];
    fill(&mut block, seed);
    timed(|| {
        let mut file = File::create_new(path).unwrap();
        for i in 0..bytes / BLOCK as u64 {
            block[..8].copy_from_slice(&i.to_le_bytes());
            file.write_all(&block).unwrap();
        }
        file.sync_all().unwrap();
    })
    .0
}

fn write_random(path: &Path, bytes: u64, count: usize, seed: u64) -> Duration {
    let mut block = vec![0_u8; SMALL];
    fill(&mut block, seed);
    let mut random = StdRng::seed_from_u64(seed);
    let file = File::options().write(true).open(path).unwrap();
    timed(|| {
        for _ in 0..count {
            let at = random.random_range(0..bytes / SMALL as u64) * SMALL as u64;
            file.write_all_at(&block, at).unwrap();
        }
        file.sync_all().unwrap();
    })
    .0
}
