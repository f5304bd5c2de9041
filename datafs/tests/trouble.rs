//! Tests of unusable homes and full disks.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_datafs::{
    Compression, Config, Datafs, Error, FromFile, FsckOptions, MetaUrl, OpenFlags, Owner, Publish, Secret,
    View, VolumeOptions,
};
use rand::rngs::StdRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};

use crate::small_disk::SmallDisk;

#[test]
fn a_home_that_cannot_be_written_says_so() {
    // No user, not even root, can create folders in `/sys`.
    let error = Datafs::open(Path::new("/sys/millrace-home"), &Config::default()).unwrap_err();
    assert!(matches!(error, Error::NotWritable { .. }), "{error:?}");
    assert!(error.to_string().contains("/sys/millrace-home"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, b"in the way").unwrap();
    let error = Datafs::open(&file, &Config::default()).unwrap_err();
    assert!(error.to_string().contains("file"), "{error}");
    let unset = Config { lock_wait_ms: 0, ..Config::default() };
    assert!(matches!(Datafs::open(dir.path(), &unset), Err(Error::Invalid(_))));
}

#[test]
fn a_newer_format_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    drop(Datafs::open(dir.path(), &Config::default()).unwrap());
    let file = dir.path().join("datafs/meta.sqlite");
    let newer = rusqlite::Connection::open(&file).unwrap();
    let changed = newer.execute("UPDATE kv SET v = x'00000009' WHERE k = CAST('mformat' AS BLOB)", []);
    assert_eq!(changed.unwrap(), 1);
    let error = Datafs::open(dir.path(), &Config::default()).unwrap_err();
    assert!(matches!(error, Error::NewerFormat { found: 9, .. }), "{error:?}");
    assert!(error.to_string().contains("--home"), "{error}");
}

fn publish(view: &View, path: &str, bytes: &[u8]) -> Result<(), Error> {
    let mut staged = view.stage()?;
    staged.append(bytes)?;
    view.publish(Publish::new().file(path, staged.finish()?))
}

#[test]
fn a_full_disk_loses_nothing_and_recovers() {
    let Some(disk) = SmallDisk::new(12) else { return };
    let config = Config { garbage_grace_ms: 0, ..Config::default() };
    let datafs = Datafs::open(disk.path(), &config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    view.write_file("keep", b"kept").unwrap();
    // File data: files are published whole, until one does not fit.
    let bytes = vec![7; 1_500_000];
    let mut whole = 0;
    let error = loop {
        match publish(&view, &format!("big/{whole}"), &bytes) {
            Ok(()) => whole += 1,
            Err(error) => break error,
        }
        assert!(whole < 12);
    };
    assert!(matches!(error, Error::NoSpace { .. }), "{error:?}");
    assert_eq!(view.list("big").unwrap().len(), whole);
    assert!(view.read_file(&format!("big/{}", whole - 1)).unwrap() == bytes);
    // An open file keeps data that it could not flush, and flushes it when there is space.
    let owner = Owner { uid: 0, gid: 0 };
    let (_, file) = view.create(view.root(), "open".as_ref(), 0o644, owner, OpenFlags::READ_WRITE).unwrap();
    file.write_at(0, &bytes).unwrap();
    assert!(matches!(file.fsync(), Err(Error::NoSpace { .. })));
    assert!(matches!(file.fsync(), Err(Error::NoSpace { .. })), "a second one succeeds in vain");
    assert!(file.read_at(0, bytes.len()).unwrap() == bytes);
    view.remove_file("big/0").unwrap();
    view.remove_file("big/1").unwrap();
    datafs.gc().unwrap();
    file.fsync().unwrap();
    drop(file);
    assert!(view.read_file("open").unwrap() == bytes);
    // Metadata: small files fill the disk.
    let mut small = 0;
    let error = loop {
        match publish(&view, &format!("small/{small}"), &[1; 4_000]) {
            Ok(()) => small += 1,
            Err(error) => break error,
        }
        assert!(small < 5_000);
    };
    assert!(matches!(error, Error::NoSpace { .. }), "{error:?}");
    assert_eq!(view.list("small").map_or(0, |entries| entries.len()), small);
    assert_eq!(view.read_file("keep").unwrap(), b"kept"[..]);
    // Another process sees the same, and with free space everything works again.
    std::fs::remove_file(disk.path().join("ballast")).ok();
    let again = Datafs::open(disk.path(), &config);
    drop(again);
    disk.grow(32);
    publish(&view, "after", &bytes).unwrap();
    let again = Datafs::open(disk.path(), &config).unwrap();
    let view = again.view(&"v".parse().unwrap()).unwrap();
    assert!(view.read_file("after").unwrap() == bytes);
    assert_eq!(view.list("small").map_or(0, |entries| entries.len()), small);
}

#[test]
fn garbage_goes_from_a_disk_without_a_free_byte() {
    let Some(disk) = SmallDisk::new(12) else { return };
    let config = Config { garbage_grace_ms: 0, gc_interval_ms: 0, ..Config::default() };
    let datafs = Datafs::open(disk.path(), &config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let bytes = vec![7; 5_000_000];
    publish(&view, "old", &bytes).unwrap();
    view.remove_file("old").unwrap();
    let mut ballast = std::fs::File::create(disk.path().join("ballast")).unwrap();
    while ballast.write_all(&[0; 4_096]).is_ok() {}
    // A change of metadata only, which needs space as well.
    view.write_file("small", &[1; 4_000]).unwrap();
    assert_eq!(datafs.gc().unwrap().objects, 0, "it was collected at once");
    publish(&view, "new", &bytes[..2_000_000]).unwrap();
    assert_eq!(view.read_file("new").unwrap().len(), 2_000_000);
}

#[test]
fn a_metadata_server_that_never_answers_is_named() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let url = format!("postgres://me@{address}/millrace?sslmode=disable");
    let config = Config { meta_url: Some(MetaUrl::from(url)), lock_wait_ms: 500, ..Config::default() };
    let error = Datafs::open(dir.path(), &config).unwrap_err();
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error} {cause}").contains("does not answer"), "{error}: {cause}");
    drop(listener);
}

/// What is compressed or encrypted on a disk that fills up in the middle of a file.
#[test]
fn encoded_writes_survive_a_full_disk_and_are_flushed_once_there_is_space() {
    use std::io::Seek as _;
    for key in [None, Some("k")] {
        let Some(disk) = SmallDisk::new(24) else { return };
        let home = disk.path().join("home");
        std::fs::create_dir(&home).unwrap();
        let file = disk.path().join("key");
        std::fs::write(&file, [7; 32]).unwrap();
        let encryption_keys = [("k".to_owned(), Secret::File(FromFile { file }))].into();
        let config = Config {
            garbage_grace_ms: 0,
            gc_interval_ms: 0,
            write_buffer_bytes_max: 1 << 20,
            encryption_keys,
            ..Config::default()
        };
        let datafs = Datafs::open(&home, &config).unwrap();
        let options = VolumeOptions {
            compression: Compression::Zstd { level: 1 },
            encryption_key: key.map(str::to_owned),
        };
        datafs.volume_create_with(&"v".parse().unwrap(), &options).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        let owner = Owner { uid: 0, gid: 0 };
        let create = |name: &str| {
            view.create(view.root(), name.as_ref(), 0o644, owner, OpenFlags::READ_WRITE).unwrap().1
        };
        let mut ballast = std::fs::File::create(disk.path().join("ballast")).unwrap();
        ballast.write_all(&vec![1; 12 << 20]).unwrap();
        // One file is written from front to back, one in pieces that leave gaps.
        let mut random = StdRng::seed_from_u64(1);
        let mut piece = vec![0; 100_000];
        for (name, step) in [("in order", 100_000), ("with gaps", 150_000)] {
            let file = create(name);
            let mut content = Vec::new();
            let mut at = 0;
            let full = loop {
                random.fill_bytes(&mut piece);
                match file.write_at(at as u64, &piece) {
                    Ok(_) => content.resize(at + piece.len(), 0),
                    Err(error) => break error,
                }
                content[at..].copy_from_slice(&piece);
                at += step;
            };
            assert!(matches!(full, Error::NoSpace { .. }), "{name}: {full:?}");
            for _ in 0..3 {
                let full = file.fsync().unwrap_err();
                assert!(matches!(full, Error::NoSpace { .. }), "{name}: {full:?}");
                let full = file.write_at(at as u64, &vec![1; 2 << 20]).unwrap_err();
                assert!(matches!(full, Error::NoSpace { .. }), "{name}: {full:?}");
            }
            ballast.set_len(0).unwrap();
            file.fsync().unwrap();
            assert!(file.read_at(0, content.len() + 1).unwrap() == content, "{name}");
            drop(file);
            let again = Datafs::open(&home, &config).unwrap();
            let other = again.view(&"v".parse().unwrap()).unwrap();
            assert!(other.read_file(name).unwrap() == content, "{name}");
            drop((again, other));
            view.remove_file(name).unwrap();
            datafs.gc().unwrap();
            // A thread that looks for deleted objects may have had one open meanwhile.
            let until = Instant::now() + Duration::from_secs(30);
            loop {
                ballast.rewind().unwrap();
                match ballast.write_all(&vec![1; 12 << 20]) {
                    Ok(()) => break,
                    Err(error) => {
                        assert!(Instant::now() < until, "the space of what was removed is free: {error}")
                    }
                }
                ballast.set_len(0).unwrap();
                std::thread::yield_now();
            }
        }
    }
}

/// Bytes of the files below a folder.
fn stored(folder: &Path) -> u64 {
    let bytes = |entry: std::fs::DirEntry| {
        let metadata = entry.metadata().unwrap();
        if metadata.is_dir() { stored(&entry.path()) } else { metadata.len() }
    };
    std::fs::read_dir(folder).unwrap().map(|entry| bytes(entry.unwrap())).sum()
}

#[test]
fn overwriting_one_file_again_and_again_takes_bounded_space() {
    const FILE: usize = 16 << 20;
    let Some(disk) = SmallDisk::new(400) else { return };
    let config = Config { gc_interval_ms: 0, write_buffer_bytes_max: 4 << 20, ..Config::default() };
    let datafs = Datafs::open(disk.path(), &config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let owner = Owner { uid: 0, gid: 0 };
    let (_, file) = view.create(view.root(), "f".as_ref(), 0o644, owner, OpenFlags::READ_WRITE).unwrap();
    let mut content = vec![0; FILE];
    let mut random = StdRng::seed_from_u64(2);
    let mut largest = 0;
    let write = |at: usize, piece: &[u8], content: &mut Vec<u8>| {
        file.write_at(at as u64, piece).unwrap();
        content[at..at + piece.len()].copy_from_slice(piece);
    };
    // From front to back, without a flush: more than the disk holds.
    for round in 0..32 {
        for at in (0..FILE).step_by(1 << 20) {
            write(at, &vec![round; 1 << 20], &mut content);
        }
        largest = largest.max(stored(disk.path()));
    }
    assert!(largest < 220 << 20, "{largest} bytes");
    // At random places: every object keeps some bytes in use.
    let mut piece = vec![0; 64 << 10];
    for round in 0..9_000 {
        let at = random.random_range(0..FILE - piece.len());
        random.fill_bytes(&mut piece[..1_000]);
        write(at, &piece, &mut content);
        if round % 100 == 0 {
            largest = largest.max(stored(disk.path()));
        }
    }
    assert!(largest < 400 << 20, "{largest} bytes");
    assert!(file.read_at(0, FILE).unwrap() == content);
    // With a flush after each round the disk fills with garbage that is too young to be collected.
    for round in 0..40 {
        for at in (0..FILE).step_by(1 << 20) {
            write(at, &vec![round; 1 << 20], &mut content);
        }
        file.flush().unwrap();
    }
    file.fsync().unwrap();
    assert!(file.read_at(0, FILE).unwrap() == content);
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
}

/// Checks that a process started on a full disk can read, remove files and recover.
fn a_full_disk_can_be_emptied(disk: &SmallDisk) {
    const SMALL: u64 = 400;
    let home = disk.path().join("home");
    let config = Config { garbage_grace_ms: 0, ..Config::default() };
    let open = || {
        let datafs = Datafs::open(&home, &config).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        (datafs, view)
    };
    let content = |i: u64| vec![i as u8; 2_000];
    let large = vec![7; 1_500_000];
    let datafs = Datafs::open(&home, &config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    publish(&view, "large", &large).unwrap();
    publish(&view, "cut", &large).unwrap();
    for i in 0..SMALL {
        view.write_file(&format!("small/{i}"), &content(i)).unwrap();
    }
    drop((view, datafs));
    disk.fill();
    // Everything can be read, nothing can be added, and files can be removed one by one. Several processes
    // start in turn while the disk is full.
    for round in 0..4 {
        let (_datafs, view) = open();
        disk.fill();
        assert!(view.read_file("large").unwrap() == large);
        let refused = view.write_file("more", &content(1)).unwrap_err();
        assert!(matches!(refused, Error::NoSpace { .. }), "{refused:?}");
        for i in (round..SMALL).step_by(4) {
            assert_eq!(view.read_file(&format!("small/{i}")).unwrap(), content(i));
            let removed = view.remove_file(&format!("small/{i}"));
            removed.unwrap_or_else(|error| panic!("round {round}, file {i}: {error}"));
        }
    }
    let (datafs, view) = open();
    disk.fill();
    assert!(view.list("small").unwrap().is_empty());
    let file = view.open(view.stat("cut").unwrap().node, OpenFlags::READ_WRITE).unwrap();
    assert_eq!(file.set_len(1_000).unwrap().size, 1_000);
    file.set_len(0).unwrap();
    view.remove_file("large").unwrap();
    datafs.gc().unwrap();
    publish(&view, "after", &large).unwrap();
    file.fsync().unwrap();
    drop((file, view, datafs));
    let (datafs, view) = open();
    assert!(view.read_file("after").unwrap() == large);
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
}

#[test]
fn a_full_disk_can_be_emptied_after_a_restart() {
    let Some(disk) = SmallDisk::new(16) else { return };
    a_full_disk_can_be_emptied(&disk);
}

#[test]
fn a_full_disk_with_small_blocks_can_be_emptied_after_a_restart() {
    let Some(disk) = SmallDisk::with_small_blocks(24) else { return };
    a_full_disk_can_be_emptied(&disk);
}

/// The metadata file keeps its length after all removals: checks the advice of docs/volumes.md.
#[test]
fn metadata_of_which_most_was_removed_is_made_shorter_by_vacuum_and_stays_whole() {
    let dir = tempfile::tempdir().unwrap();
    let config = Config { garbage_grace_ms: 0, ..Config::default() };
    let open = || {
        let datafs = Datafs::open(dir.path(), &config).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        (datafs, view)
    };
    Datafs::open(dir.path(), &config).unwrap().volume_create(&"v".parse().unwrap()).unwrap();
    let (datafs, view) = open();
    for i in 0..200 {
        let mut publish = Publish::new();
        for part in 0..8 {
            let mut staged = view.stage().unwrap();
            staged.append(&[part; 3_000]).unwrap();
            publish = publish.file(format!("{i}/{part}"), staged.finish().unwrap());
        }
        view.publish(publish).unwrap();
    }
    for i in 1..200 {
        for part in 0..8 {
            view.remove_file(&format!("{i}/{part}")).unwrap();
        }
        view.remove_dir(&i.to_string()).unwrap();
    }
    datafs.gc().unwrap();
    drop((view, datafs));
    let file = dir.path().join("datafs/meta.sqlite");
    let bytes = || std::fs::metadata(&file).unwrap().len();
    let before = bytes();
    assert!(before > 4 << 20, "{before}");
    rusqlite::Connection::open(&file).unwrap().execute_batch("VACUUM").unwrap();
    assert!(bytes() < 1 << 20, "{before} bytes, then {}", bytes());
    let (datafs, view) = open();
    for part in 0..8 {
        assert_eq!(view.read_file(&format!("0/{part}")).unwrap(), vec![part; 3_000]);
    }
    view.write_file("after", b"written").unwrap();
    assert_eq!(view.list("").unwrap().len(), 2);
    let report = datafs.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
}
