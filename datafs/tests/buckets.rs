//! Tests of volumes on a bucket: trees through mounts, failing caches, and killed processes.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use millrace_datafs::mount::{self, Mount, MountOptions};
use millrace_datafs::{Compact, Config, Datafs, FsckOptions, OpenFlags, Owner, Secret, View};
use nix::errno::Errno;
use nix::mount::MsFlags;

use crate::child;
use crate::small_disk::SmallDisk;
use millrace_testing::s3_server::S3Server;

fn config(server: &S3Server) -> Config {
    let options = server.options().into_iter().map(|(k, v)| (k.to_owned(), Secret::Text(v)));
    Config {
        store_url: Some(server.url("p")),
        store_options: options.collect(),
        cache_free_bytes_min: 0,
        garbage_grace_ms: 0,
        ..Config::default()
    }
}

fn live(datafs: &Datafs) -> View {
    datafs.view(&"v".parse().unwrap()).unwrap()
}

fn sound(datafs: &Datafs) {
    let report = datafs.fsck(&FsckOptions { scrub: true, ..FsckOptions::default() }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "{:?}", report.found);
    assert_eq!(report.unclaimed_objects, 0);
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A tree of 120 files, up to 400 KiB.
fn make_tree(at: &Path) {
    for i in 0..120_usize {
        let folder = at.join(format!("d{}", i % 7));
        fs::create_dir_all(&folder).unwrap();
        let len = if i % 30 == 0 { 400_000 } else { i * i * 3 };
        let bytes: Vec<u8> = (0..len).map(|k| (k * (i + 3) / 11) as u8).collect();
        fs::write(folder.join(i.to_string()), bytes).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    run(Command::new("cp").arg("-r").arg(from).arg(to));
}

fn same(a: &Path, b: &Path) {
    run(Command::new("diff").arg("-r").arg(a).arg(b));
}

fn mount_at(datafs: &Datafs, at: &Path) -> Mount {
    mount::mount(live(datafs), at, MountOptions::default()).unwrap()
}

#[test]
fn trees_go_through_a_bucket_that_goes_away_to_another_mount() {
    if let Err(reason) = mount::can_mount() {
        return millrace_testing::skip(millrace_testing::Need::Fuse, reason);
    }
    let (mut server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let (home, tree) = (dir.path().join("home"), dir.path().join("tree"));
    make_tree(&tree);
    let config = Config { store_timeout_ms: 2_000, cache_dir: "cache-a".into(), ..config(&server) };
    let datafs = Datafs::open(&home, &config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let first = mount_at(&datafs, &dir.path().join("first"));
    let at = first.path();
    copy(&tree, &at.join("before"));
    fs::File::open(at.join("before/d0/0")).unwrap().sync_all().unwrap();
    server.stop();
    // Small files and names still work; an fsync, which needs the store, fails.
    fs::create_dir(at.join("during")).unwrap();
    let small: Vec<_> = (1..30).map(|i| tree.join(format!("d{}/{i}", i % 7))).collect();
    for file in &small {
        fs::copy(file, at.join("during").join(file.file_name().unwrap())).unwrap();
    }
    fs::rename(at.join("during"), at.join("renamed")).unwrap();
    let file = fs::File::create(at.join("synced")).unwrap();
    (&file).write_all(&[7; 9_000]).unwrap();
    assert_eq!(file.sync_all().unwrap_err().raw_os_error(), Some(libc::EIO));
    server.start_again();
    let begun = Instant::now();
    while let Err(error) = file.sync_all() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{error}");
    }
    drop(file);
    copy(&tree, &at.join("after"));
    // A session with a separate cache.
    let other = Datafs::open(&home, &Config { cache_dir: "cache-b".into(), ..config.clone() }).unwrap();
    let second = mount_at(&other, &dir.path().join("second"));
    same(&tree, &second.path().join("before"));
    same(&tree, &second.path().join("after"));
    small.iter().for_each(|file| same(file, &second.path().join("renamed").join(file.file_name().unwrap())));
    assert_eq!(fs::read(second.path().join("synced")).unwrap(), [7; 9_000]);
    second.unmount().unwrap();
    first.unmount().unwrap();
    sound(&datafs);
}

#[test]
fn reads_go_on_through_a_mount_whatever_becomes_of_the_cache() {
    if let Err(reason) = mount::can_mount() {
        return millrace_testing::skip(millrace_testing::Need::Fuse, reason);
    }
    let Some(disk) = SmallDisk::new(1) else { return };
    let (server, dir) = (S3Server::start(), tempfile::tempdir().unwrap());
    let (home, tree) = (dir.path().join("home"), dir.path().join("tree"));
    make_tree(&tree);
    let datafs = Datafs::open(&home, &Config { cache_bytes_max: 0, ..config(&server) }).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let mount = mount_at(&datafs, &dir.path().join("first"));
    copy(&tree, &mount.path().join("tree"));
    mount.unmount().unwrap();
    let on_disk = Config { cache_dir: disk.path().join("cache"), ..config(&server) };
    // The cache's disk is full, then read-only: reads use cached data and add nothing.
    for flags in [MsFlags::empty(), MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY] {
        if !flags.is_empty() {
            remount(disk.path(), flags);
        }
        let datafs = Datafs::open(&home, &on_disk).unwrap();
        let mount = mount_at(&datafs, &dir.path().join("second"));
        same(&tree, &mount.path().join("tree"));
        mount.unmount().unwrap();
    }
    // The cache is deleted under a live mount, between files and in the middle of one.
    let datafs = Datafs::open(&home, &Config { cache_dir: "gone".into(), ..config(&server) }).unwrap();
    let mount = mount_at(&datafs, &dir.path().join("third"));
    let at = mount.path().join("tree");
    (0..4).for_each(|d| same(&tree.join(format!("d{d}")), &at.join(format!("d{d}"))));
    fs::remove_dir_all(home.join("gone")).unwrap();
    same(&tree, &at);
    mount.unmount().unwrap();
}

/// Remounts with other flags. Retries while files are open for writing: the dropped datafs, and children of
/// other tests until they execute another program, still close them.
fn remount(path: &Path, flags: MsFlags) {
    let begun = Instant::now();
    while let Err(error) = nix::mount::mount(None::<&str>, path, None::<&str>, flags, None::<&str>) {
        assert!(error == Errno::EBUSY && begun.elapsed() < Duration::from_secs(60), "{error}");
        std::thread::yield_now();
    }
}

const OWNER: Owner = Owner { uid: 0, gid: 0 };
/// Steps of a child without a kill.
const STEPS: u64 = 64;

fn contents(round: u64, i: u64) -> Vec<u8> {
    (0..20_000 + i * 13).map(|k| (k * (i + 3) / 11 + round) as u8).collect()
}

/// The child: writes, syncs every fifth file, removes every third one, collects, compacts.
#[test]
fn bucket_worker() {
    let Some((home, round)) = child::task() else { return };
    let config = config_for_children(&home);
    let datafs = Datafs::open(&home, &config).unwrap();
    let view = live(&datafs);
    let name = |i: u64| format!("{round}-{i}");
    for i in 0..STEPS {
        let (_, file) =
            view.create(view.root(), name(i).as_ref(), 0o644, OWNER, OpenFlags::READ_WRITE).unwrap();
        file.write_at(0, &contents(round, i)).unwrap();
        if i % 5 == 4 {
            file.fsync().unwrap();
            println!("synced {i}");
            std::io::stdout().flush().unwrap();
        }
        drop(file);
        if i % 3 == 0 && i >= 3 {
            view.remove_file(&name(i - 3)).unwrap();
        }
        if i % 10 == 9 {
            datafs.gc().unwrap();
        }
        if i % 20 == 19 {
            // A limit above 100 makes compaction copy every pack.
            datafs.compact(None, &Compact { live_percent_min: 1_000, ..Compact::default() }).unwrap();
            datafs.gc().unwrap();
        }
    }
}

/// The configuration that the parent has written for its children.
fn config_for_children(home: &Path) -> Config {
    let lines = fs::read_to_string(home.join("store")).unwrap();
    let mut lines = lines.lines().map(str::to_owned);
    let store_url = lines.next();
    let option = |line: String| line.split_once('=').map(|(k, v)| (k.to_owned(), Secret::Text(v.to_owned())));
    Config {
        store_url,
        store_options: lines.filter_map(option).collect(),
        cache_free_bytes_min: 0,
        garbage_grace_ms: 0,
        gc_interval_ms: 0,
        pack_linger_ms: 5,
        ..Config::default()
    }
}

#[test]
fn a_kill_at_any_step_on_a_bucket_loses_nothing_that_was_synced() {
    let (server, home) = (S3Server::start(), tempfile::tempdir().unwrap());
    let options: Vec<_> = server.options().iter().map(|(k, v)| format!("{k}={v}")).collect();
    fs::write(home.path().join("store"), format!("{}\n{}\n", server.url("p"), options.join("\n"))).unwrap();
    let config = config_for_children(home.path());
    let datafs = Datafs::open(home.path(), &config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    drop(datafs);
    let points = [
        "pack-begun:2",
        "pack-appended:7",
        "pack-cut:2",
        "pack-synced",
        "pack-synced:4",
        "group-frozen:9",
        "group-prerequisites:8",
        "group-committed:9",
        "write-placed:11",
        "gc-object-deleted",
        "compact-pack-copied",
        "compact-pack-copied:3",
        "none",
    ];
    for (round, point) in (0..).zip(points) {
        let mut child = child::command("buckets::bucket_worker", home.path(), round)
            .env("MILLRACE_FAILPOINT", point)
            .spawn()
            .unwrap();
        let synced = child::reports(&mut child).filter(|(word, _)| word == "synced").map(|(_, i)| i).max();
        let status = child.wait().unwrap();
        assert!(
            if point == "none" { status.success() } else { status.signal() == Some(9) },
            "{point}: {status}"
        );
        let datafs = Datafs::open(home.path(), &config).unwrap();
        datafs.gc().unwrap();
        let view = live(&datafs);
        for i in 0..STEPS {
            match view.read_file(&format!("{round}-{i}")) {
                Ok(bytes) => assert!(
                    bytes == contents(round, i) || Some(i) > synced && bytes.is_empty(),
                    "{point}: {i}"
                ),
                Err(error) => {
                    assert!(error.is_not_found(), "{point}: {error}");
                    assert!(i % 3 == 0 || Some(i) > synced, "{point}: {i} was synced and is lost");
                }
            }
        }
        sound(&datafs);
    }
}
