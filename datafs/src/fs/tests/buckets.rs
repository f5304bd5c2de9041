//! Tests of small files in an object store (S3): they share packs, whatever their volume's codec, and survive
//! outages.

use std::path::Path;
use std::time::{Duration, Instant};

use super::*;
use crate::compact::Compact;
use crate::config::{FromFile, Secret};
use crate::error::Error;
use crate::fs::OpenFlags;
use crate::fsck::FsckOptions;
use crate::volume::VolumeOptions;
use millrace_testing::s3_server::S3Server;

const FILES: usize = 300;

fn cloud(server: &S3Server, home: &Path) -> Config {
    let options = server.options().into_iter().map(|(k, v)| (k.to_owned(), Secret::Text(v)));
    let file = home.join("key");
    std::fs::write(&file, [7; 32]).unwrap();
    Config {
        store_url: Some(server.url("p")),
        store_options: options.collect(),
        encryption_keys: [("main".to_owned(), Secret::File(FromFile { file }))].into(),
        cache_free_bytes_min: 0,
        garbage_grace_ms: 0,
        gc_interval_ms: 0,
        // Nothing is committed before a call asks for it.
        pack_linger_ms: 3_600_000,
        ..Config::default()
    }
}

fn contents(i: usize) -> Vec<u8> {
    (0..3_000 + i * 37).map(|k| (k * (i + 1) / 7) as u8).collect()
}

fn write(view: &View, names: std::ops::Range<usize>) {
    let folder = view.stat("d").unwrap().node;
    for i in names {
        let name = i.to_string();
        let (_, file) = view.create(folder, name.as_ref(), 0o644, owner(), OpenFlags::READ_WRITE).unwrap();
        file.write_at(0, &contents(i)).unwrap();
        file.flush().unwrap();
    }
}

fn check(view: &View, names: impl Iterator<Item = usize>) {
    names.for_each(|i| assert!(view.read_file(&format!("d/{i}")).unwrap() == contents(i), "{i}"));
}

#[test]
fn all_tools_work_on_postgres_with_an_encrypted_bucket() {
    on_postgres::on_postgres(|_| {
        let (server, home) = (S3Server::start(), tempfile::tempdir().unwrap());
        let mut config = cloud(&server, home.path());
        on_postgres::put_into(&mut config, home.path());
        let datafs = Datafs::open(home.path(), &config).unwrap();
        datafs.volume_create_with(&"v".parse().unwrap(), &options("zstd", Some("main"))).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        view.create_dir_all("d").unwrap();
        std::thread::scope(|scope| {
            for first in (0..60).step_by(10) {
                let view = &view;
                scope.spawn(move || write(view, first..first + 10));
            }
        });
        view.write_file("large", &vec![1; 3 << 20]).unwrap();
        sound(&datafs);
        (0..60).step_by(2).for_each(|i| view.remove_file(&format!("d/{i}")).unwrap());
        view.remove_file("large").unwrap();
        // Packs are emptied into others, whatever their codec.
        let all = Compact { live_percent_min: 1_000, ..Compact::default() };
        let report = datafs.compact(None, &all).unwrap();
        assert!(report.packs > 0 && report.conflicts == 0, "{report:?}");
        let gone = datafs.gc().unwrap().objects;
        assert!(gone > report.packs, "{gone}");
        check(&view, (1..60).step_by(2));
        sound(&datafs);
        // The remains of a process that dies.
        let dead = Datafs::open(home.path(), &config).unwrap();
        let mut staged = dead.view(&"v".parse().unwrap()).unwrap().stage().unwrap();
        staged.append(&[3; 10_000]).unwrap();
        let before = objects_on(&server);
        let staged = staged.finish().unwrap();
        assert_eq!(objects_on(&server), before + 1);
        drop(staged);
        drop(dead);
        datafs.gc().unwrap();
        assert_eq!(objects_on(&server), before);
        sound(&datafs);
    });
}

fn objects_on(server: &S3Server) -> usize {
    server.names("p/objects").len()
}

fn sound(datafs: &Datafs) {
    let report = datafs.fsck(&FsckOptions { scrub: true, ..FsckOptions::default() }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
}

fn options(compression: &str, key: Option<&str>) -> VolumeOptions {
    VolumeOptions { compression: compression.parse().unwrap(), encryption_key: key.map(str::to_owned) }
}

#[test]
fn small_files_share_packs_in_every_codec() {
    for (compression, key) in [("none", None), ("zstd", None), ("none", Some("main")), ("lz4", Some("main"))]
    {
        let server = S3Server::start();
        let home = tempfile::tempdir().unwrap();
        let config = cloud(&server, home.path());
        let datafs = Datafs::open(home.path(), &config).unwrap();
        datafs.volume_create_with(&"v".parse().unwrap(), &options(compression, key)).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        let puts = server.faults.count("put");
        view.create_dir_all("d").unwrap();
        write(&view, 0..FILES);
        // No object was sent, and every file can be read.
        assert_eq!(server.faults.count("put"), puts);
        check(&view, 0..FILES);
        datafs.shared.meta.sync().unwrap();
        let stored = objects_on(&server);
        assert!((1..=3).contains(&stored), "{stored} objects for {FILES} files");
        check(&view, 0..FILES);
        sound(&datafs);
        drop((view, datafs));
        // With an empty cache, in shuffled order.
        std::fs::remove_dir_all(home.path().join("datafs/cache")).unwrap();
        let gets = server.faults.count("get");
        let datafs = Datafs::open(home.path(), &config).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        check(&view, (0..FILES).map(|i| i * 7 % FILES));
        let gets = server.faults.count("get") - gets;
        assert!(gets < 40, "{gets} requests for {FILES} files");
        // The few bytes in use of each pack are copied, and the packs are deleted.
        for i in (0..FILES).filter(|i| i % 8 != 0) {
            view.remove_file(&format!("d/{i}")).unwrap();
        }
        let report = datafs.compact(None, &Compact::default()).unwrap();
        assert_eq!(report.packs as usize, stored, "{report:?}");
        assert_eq!(datafs.gc().unwrap().objects as usize, stored);
        assert_eq!(objects_on(&server), 1);
        check(&view, (0..FILES).step_by(8));
        sound(&datafs);
    }
}

/// Repeats a call that fails because the store is unavailable; on a busy machine it may stay so for a moment.
fn eventually<T>(mut call: impl FnMut() -> Result<T, Error>) -> T {
    let begun = Instant::now();
    loop {
        match call() {
            Err(Error::StoreAway { .. }) if begun.elapsed() < Duration::from_secs(240) => {
                std::thread::sleep(Duration::from_millis(20));
            }
            other => return other.unwrap(),
        }
    }
}

fn is_away<T: std::fmt::Debug>(result: Result<T, Error>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::StoreAway { .. }), "{error:?}");
    assert!(error.to_string().contains("s3://bucket/p"), "{error}");
}

/// A store that is unavailable for `away` loses nothing, reports it within bounds, and needs no reopening.
fn store_away(store_timeout_ms: u64, away: Duration) {
    let mut server = S3Server::start();
    let home = tempfile::tempdir().unwrap();
    let config = Config {
        store_timeout_ms,
        pack_linger_ms: 1,
        pack_buffers_bytes_max: 1 << 20,
        lock_wait_ms: 240_000,
        ..cloud(&server, home.path())
    };
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let view = volume(&datafs);
    view.create_dir_all("d").unwrap();
    write(&view, 0..20);
    datafs.shared.meta.sync().unwrap();
    view.write_file("large", &vec![9; 3 << 20]).unwrap();
    datafs.shared.pool.settle_cache().unwrap();
    server.stop();
    let stopped = Instant::now();
    // Changes of names and small files go on; a call that needs them in the store gets an error.
    write(&view, 20..40);
    view.remove_file("d/0").unwrap();
    view.create_dir_all("e").unwrap();
    let folder = view.stat("d").unwrap().node;
    let create =
        |name: &str| view.create(folder, name.as_ref(), 0o644, owner(), OpenFlags::READ_WRITE).unwrap().1;
    let synced = create("40");
    synced.write_at(0, &contents(40)).unwrap();
    let begun = Instant::now();
    is_away(synced.fsync());
    assert!(begun.elapsed() < Duration::from_secs(120));
    is_away(synced.fsync());
    assert!(synced.read_at(0, 1 << 20).unwrap() == contents(40));
    check(&view, 1..40);
    is_away(datafs.snapshot_create(&"v".parse().unwrap(), &"s".parse().unwrap()));
    // Data that is too large for a pack, or for the memory for waiting packs, stays with the open file.
    let large = create("large");
    large.write_at(0, &vec![5; 1 << 20]).unwrap();
    is_away(large.flush());
    let piece = vec![3; 200_000];
    let (mut waiting, mut kept) = (0, Vec::new());
    let (refused, error) = loop {
        let file = create(&format!("w{waiting}"));
        file.write_at(0, &piece).unwrap();
        match file.flush() {
            Ok(()) => waiting += 1,
            Err(error) => break (file, error),
        }
        kept.push(file);
        assert!(waiting < 20, "more waits than there is room for");
    };
    is_away::<()>(Err(error));
    std::thread::sleep(away.saturating_sub(stopped.elapsed()));
    assert!(view.read_file("d/30").unwrap() == contents(30));
    server.start_again();
    eventually(|| synced.fsync());
    eventually(|| large.fsync());
    eventually(|| refused.fsync());
    eventually(|| datafs.shared.meta.sync());
    eventually(|| datafs.snapshot_create(&"v".parse().unwrap(), &"t".parse().unwrap()));
    check(&view, 1..41);
    sound(&datafs);
    drop((refused, large, synced, kept));
    drop((view, datafs));
    // As if on another machine.
    std::fs::remove_dir_all(home.path().join("datafs/cache")).unwrap();
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    check(&view, 1..41);
    assert!(view.stat("d/0").unwrap_err().is_not_found());
    assert!(view.read_file("d/large").unwrap() == vec![5; 1 << 20]);
    (0..=waiting).for_each(|i| assert!(view.read_file(&format!("d/w{i}")).unwrap() == piece));
    assert_eq!(view.read_file("large").unwrap().len(), 3 << 20);
}

#[test]
fn a_store_that_is_away_takes_nothing_and_comes_back() {
    store_away(1_500, Duration::ZERO);
}

#[test]
fn a_streamed_file_is_whole_once_the_store_is_back() {
    for (compression, key) in [("none", None), ("lz4", Some("main"))] {
        let mut server = S3Server::start();
        let home = tempfile::tempdir().unwrap();
        let config = Config { store_timeout_ms: 1_500, ..cloud(&server, home.path()) };
        let datafs = Datafs::open(home.path(), &config).unwrap();
        datafs.volume_create_with(&"v".parse().unwrap(), &options(compression, key)).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        let bytes = pattern(24 << 20);
        let flags = OpenFlags::READ_WRITE;
        let (_, file) = view.create(view.root(), "large".as_ref(), 0o644, owner(), flags).unwrap();
        let write = |at: usize| file.write_at(at as u64, &bytes[at..at + (1 << 20)]);
        (0..12 << 20).step_by(1 << 20).for_each(|at| assert_eq!(eventually(|| write(at)), 1 << 20));
        server.stop();
        let mut at = 12 << 20;
        while at < 22 << 20 {
            match write(at) {
                Ok(_) => at += 1 << 20,
                Err(error) => {
                    is_away::<()>(Err(error));
                    break;
                }
            }
        }
        is_away(file.fsync());
        is_away(file.fsync());
        // Over bytes that wait for the store, and after them.
        let over = vec![1; 1 << 20];
        file.write_at(3 << 20, &over).unwrap();
        write(22 << 20).unwrap();
        is_away(file.fsync());
        server.start_again();
        eventually(|| file.fsync());
        (at..24 << 20).step_by(1 << 20).for_each(|at| assert_eq!(eventually(|| write(at)), 1 << 20));
        eventually(|| file.fsync());
        let mut expected = bytes.clone();
        expected[3 << 20..4 << 20].copy_from_slice(&over);
        assert!(file.read_at(0, 32 << 20).unwrap() == expected);
        drop((file, view, datafs));
        std::fs::remove_dir_all(home.path().join("datafs/cache")).unwrap();
        let datafs = Datafs::open(home.path(), &config).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        assert!(view.read_file("large").unwrap() == expected);
        datafs.gc().unwrap();
        sound(&datafs);
        assert_eq!(server.loose_parts(), 0);
    }
}

#[test]
#[ignore = "takes five minutes: cargo test -p millrace-datafs --lib store_that_is_away_for_five -- --ignored"]
fn a_store_that_is_away_for_five_minutes_takes_nothing() {
    store_away(Config::default().store_timeout_ms, Duration::from_secs(300));
}

/// Rates of 8 KiB files through the library on a local S3 server, one thread.
#[test]
#[ignore = "prints figures: cargo test --release -p millrace-datafs --lib small_files_per_second_on_a_bucket -- --ignored --nocapture"]
#[allow(clippy::print_stderr)]
fn small_files_per_second_on_a_bucket() {
    const FILES: usize = 4_000;
    let (server, home) = (S3Server::start(), tempfile::tempdir().unwrap());
    let config = Config { pack_linger_ms: 50, ..cloud(&server, home.path()) };
    let datafs = Datafs::open(home.path(), &config).unwrap();
    let view = volume(&datafs);
    view.create_dir_all("d").unwrap();
    let folder = view.stat("d").unwrap().node;
    let bytes = pattern(8 << 10);
    let write = |names: std::ops::Range<usize>, sync: bool| {
        let (begun, puts, files) = (Instant::now(), server.faults.count("put"), names.len());
        for i in names {
            let name = i.to_string();
            let (_, file) =
                view.create(folder, name.as_ref(), 0o644, owner(), OpenFlags::READ_WRITE).unwrap();
            file.write_at(0, &bytes).unwrap();
            if sync { file.fsync().unwrap() } else { file.flush().unwrap() }
        }
        datafs.shared.meta.sync().unwrap();
        let puts = server.faults.count("put") - puts;
        let what = if sync { "fsynced" } else { "closed" };
        eprintln!("{what}: {:.0} files/s, {puts} puts", files as f64 / begun.elapsed().as_secs_f64());
    };
    write(0..400, true);
    write(400..400 + FILES, false);
    for (what, step, cache_bytes_max) in
        [("in order", 1, 1 << 30), ("shuffled", 1_237, 1 << 30), ("shuffled, no cache", 1_237, 0)]
    {
        let cache_dir = what.replace(", ", "-").into();
        let other =
            Datafs::open(home.path(), &Config { cache_dir, cache_bytes_max, ..config.clone() }).unwrap();
        let view = other.view(&"v".parse().unwrap()).unwrap();
        let (begun, gets) = (Instant::now(), server.faults.count("get"));
        for i in 0..FILES {
            assert!(view.read_file(&format!("d/{}", 400 + i * step % FILES)).unwrap() == bytes);
        }
        let gets = server.faults.count("get") - gets;
        eprintln!("cold, {what}: {:.0} files/s, {gets} gets", FILES as f64 / begun.elapsed().as_secs_f64());
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}
