//! Tests of backup and restore, with both engines: under a newer store, beside collections, and killed at each
//! step.
#![allow(clippy::unwrap_used)]

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use millrace_datafs::{Config, Datafs, Error, FsckOptions, ProblemKind, Secret, VolumeSpec};

use crate::child;
use crate::engine::{Engine, inherited};
use millrace_testing::s3_server::S3Server;

const LIMIT: Duration = Duration::from_secs(120);
/// File sizes: one stored in the metadata, one in a pack, two in separate objects.
const FILES: [(&str, usize); 4] =
    [("d/inline", 10), ("d/small", 9_000), ("framed", 300_000), ("plain", 3_000_000)];

fn settings(config: Config) -> Config {
    Config { garbage_grace_ms: 0, gc_interval_ms: 0, session_lease_ms: 1_000, ..config }
}

fn content(version: u64, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u64 * 31 % 251 + version * 7) as u8).collect()
}

fn spec(text: &str) -> VolumeSpec {
    text.parse().unwrap()
}

/// Writes all files of a version, and one that only this version has.
fn write(datafs: &Datafs, version: u64) {
    let view = datafs.view(&spec("v")).unwrap();
    for (path, len) in FILES {
        view.write_file(path, &content(version, len)).unwrap();
    }
    view.write_file(&format!("only-{version}"), &content(version, 50_000)).unwrap();
    if version > 1 {
        view.remove_file(&format!("only-{}", version - 1)).unwrap();
    }
}

/// The version that a volume or a snapshot holds; checks that it is complete.
fn version(datafs: &Datafs, at: &str) -> u64 {
    let view = datafs.view(&spec(at)).unwrap();
    let entries = view.list("").unwrap();
    let only: Vec<u64> =
        entries.iter().filter_map(|entry| entry.name.strip_prefix("only-")?.parse().ok()).collect();
    let [version] = only[..] else { panic!("{entries:?}") };
    for (path, len) in FILES {
        assert!(view.read_file(path).unwrap() == content(version, len), "{path} of version {version}");
    }
    assert!(view.read_file(&format!("only-{version}")).unwrap() == content(version, 50_000));
    version
}

/// A home with version 1 in a snapshot, and version 2 live.
fn make(home: &Path, config: &Config) -> Datafs {
    let datafs = Datafs::open(home, config).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    write(&datafs, 1);
    datafs.snapshot_create(&"v".parse().unwrap(), &"first".parse().unwrap()).unwrap();
    write(&datafs, 2);
    datafs
}

/// Writes version 3 and removes the others, including their objects in the store.
fn move_on(datafs: &Datafs) {
    write(datafs, 3);
    datafs.snapshot_delete(&"v".parse().unwrap(), &"first".parse().unwrap()).unwrap();
    let report = datafs.gc().unwrap();
    assert!(report.objects > 4 && report.held == 0, "{report:?}");
}

fn backup(datafs: &Datafs, to: &Path) -> millrace_datafs::BackupReport {
    let report = datafs.backup(to, &|_| true).unwrap();
    assert_eq!(report.missing, 0);
    report
}

/// Restores. On a server it waits until the leases of dead processes have expired.
fn restore(home: &Path, config: &Config, from: &Path) {
    let deadline = Instant::now() + LIMIT;
    loop {
        match Datafs::restore(home, config, from, false, &|_| true) {
            Err(Error::InUse { .. }) if config.meta_url.is_some() => assert!(Instant::now() < deadline),
            restored => return assert_eq!(restored.unwrap().missing, 0),
        }
    }
}

/// Checks that fsck finds no problem except unreferenced objects, and none after their collection.
fn sound(datafs: &Datafs) {
    let check = |repair| datafs.fsck(&FsckOptions { scrub: true, repair }, &mut |_| {}).unwrap();
    let found = check(true).found;
    assert!(found.iter().all(|problem| problem.kind == ProblemKind::LostObject), "{found:?}");
    datafs.gc().unwrap();
    let report = check(false);
    assert!(report.is_sound(), "{:?}", report.found);
}

fn engine(server: bool) -> Option<Engine> {
    if server { Engine::postgres() } else { Some(Engine::sqlite()) }
}

/// Runs a test with each engine, with a separate home and schema.
fn for_each_engine(test: impl Fn(&Engine, &Config)) {
    for engine in [false, true].into_iter().filter_map(engine) {
        test(&engine, &settings(engine.config()));
    }
}

struct Place {
    _dir: tempfile::TempDir,
    home: PathBuf,
    folder: PathBuf,
}

fn place() -> Place {
    let dir = tempfile::tempdir().unwrap();
    Place { home: dir.path().join("home"), folder: dir.path().join("backup"), _dir: dir }
}

#[test]
fn a_backup_is_restored_under_a_newer_store() {
    for_each_engine(|_, config| {
        let Place { home, folder, _dir } = &place();
        let datafs = make(home, config);
        let first = backup(&datafs, folder);
        assert!(first.objects > 6 && first.bytes > 6_000_000, "{first:?}");
        assert_eq!(backup(&datafs, folder).bytes, 0, "what is there is not copied again");
        move_on(&datafs);
        drop(datafs);
        restore(home, config, folder);
        let datafs = Datafs::open(home, config).unwrap();
        assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (2, 1));
        sound(&datafs);
        // The restored volumes change, and the backup folder follows.
        move_on(&datafs);
        assert!(backup(&datafs, folder).removed > 4);
        drop(datafs);
        restore(home, config, folder);
        let datafs = Datafs::open(home, config).unwrap();
        assert_eq!(version(&datafs, "v"), 3);
        sound(&datafs);
    });
}

#[test]
fn a_backup_of_one_engine_and_store_is_restored_into_another() {
    let mut server = S3Server::start();
    let options: Vec<_> =
        server.options().into_iter().map(|(k, v)| (k.to_owned(), Secret::Text(v))).collect();
    let bucket = |name: &str, config: &Config| Config {
        store_url: Some(server.url(name)),
        store_options: options.iter().cloned().collect(),
        cache_bytes_max: 0,
        ..config.clone()
    };
    for (i, (from, to)) in
        [(false, false), (false, true), (true, false), (true, true)].into_iter().enumerate()
    {
        let (Some(from), Some(to)) = (engine(from), engine(to)) else { continue };
        let Place { home, folder, _dir } = &place();
        let config = bucket(&format!("from-{i}"), &settings(from.config()));
        backup(&make(home, &config), folder);
        let to = settings(to.config());
        for (n, config) in [bucket(&format!("to-{i}"), &to), to.clone()].iter().enumerate() {
            let home = home.with_file_name(format!("to-{n}"));
            restore(&home, config, folder);
            let datafs = Datafs::open(&home, config).unwrap();
            assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (2, 1));
            sound(&datafs);
            move_on(&datafs);
        }
    }
    server.stop();
}

#[test]
fn what_is_deleted_during_a_backup_is_in_it_and_collected_afterwards() {
    for_each_engine(|_, config| {
        let Place { home, folder, _dir } = &place();
        let datafs = make(home, config);
        // In the role of another process.
        let other = Datafs::open(home, config).unwrap();
        let deleted = AtomicBool::new(false);
        let report = datafs.backup(folder, &|_| {
            if !deleted.swap(true, Ordering::SeqCst) {
                other.volume_delete(&"v".parse().unwrap()).unwrap();
                for collector in [&other, &datafs] {
                    let report = collector.gc().unwrap();
                    assert!(report.objects == 0 && report.held > 6, "{report:?}");
                }
            }
            true
        });
        assert_eq!(report.unwrap().missing, 0);
        let report = other.gc().unwrap();
        assert!(report.objects > 6 && report.held == 0, "{report:?}");
        drop((datafs, other));
        restore(home, config, folder);
        let datafs = Datafs::open(home, config).unwrap();
        assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (2, 1));
        sound(&datafs);
    });
}

#[test]
fn volumes_that_are_open_are_not_replaced() {
    for_each_engine(|_, config| {
        let Place { home, folder, _dir } = &place();
        let datafs = make(home, config);
        backup(&datafs, folder);
        write(&datafs, 3);
        let error = Datafs::restore(home, config, folder, false, &|_| true).unwrap_err();
        assert!(matches!(error, Error::InUse { .. }), "{error}");
        assert_eq!(version(&datafs, "v"), 3);
        write(&datafs, 4);
        assert_eq!(datafs.gc().unwrap().held, 0);
    });
}

#[test]
fn damaged_objects_come_back_and_damaged_backups_are_refused() {
    let (config, Place { home, folder, _dir }) = (settings(Config::default()), place());
    let datafs = make(&home, &config);
    backup(&datafs, &folder);
    drop(datafs);
    for (i, file) in files_below(&home.join("datafs/objects")).into_iter().enumerate() {
        match i % 3 {
            0 => std::fs::remove_file(file).unwrap(),
            1 => std::fs::write(file, "damaged").unwrap(),
            _ => {
                let len = std::fs::metadata(&file).unwrap().len();
                std::fs::write(file, vec![7; len as usize]).unwrap();
            }
        }
    }
    restore(&home, &config, &folder);
    let datafs = Datafs::open(&home, &config).unwrap();
    assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (2, 1));
    sound(&datafs);
    drop(datafs);

    // A missing object, and truncated metadata.
    let elsewhere = home.with_file_name("elsewhere");
    std::fs::remove_file(&files_below(&folder.join("objects"))[0]).unwrap();
    let error = Datafs::restore(&elsewhere, &config, &folder, false, &|_| true).unwrap_err();
    assert!(error.to_string().contains("is missing there and in the object store"), "{error}");
    let metadata = std::fs::read(folder.join("metadata.sqlite")).unwrap();
    std::fs::write(folder.join("metadata.sqlite"), &metadata[..metadata.len() / 2]).unwrap();
    let error = Datafs::restore(&home, &config, &folder, false, &|_| true).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    assert_eq!(version(&Datafs::open(&home, &config).unwrap(), "v"), 2);
}

#[test]
fn objects_of_a_bucket_with_other_bytes_of_the_same_length_are_replaced() {
    let server = S3Server::start();
    let options = server.options().into_iter().map(|(k, v)| (k.to_owned(), Secret::Text(v))).collect();
    let config = settings(Config {
        store_url: Some(server.url("b")),
        store_options: options,
        cache_bytes_max: 0,
        ..Config::default()
    });
    let Place { home, folder, _dir } = place();
    let datafs = make(&home, &config);
    backup(&datafs, &folder);
    drop(datafs);
    let again = || Datafs::restore(&home, &config, &folder, false, &|_| true).unwrap();
    assert_eq!(again().bytes, 0, "nothing differs");
    let mut damaged = 0;
    for name in server.names("b").iter().filter(|name| name.contains('/')) {
        let path = server.folder().join("b").join(name);
        let len = std::fs::metadata(&path).unwrap().len();
        std::fs::write(&path, vec![7; len as usize]).unwrap();
        damaged += len;
    }
    let report = again();
    assert!(report.bytes > 0 && report.bytes <= damaged, "{report:?} of {damaged}");
    let datafs = Datafs::open(&home, &config).unwrap();
    assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (2, 1));
    sound(&datafs);
    drop(datafs);

    // A damaged copy in the backup replaces nothing.
    for file in files_below(&folder.join("objects")) {
        let mut bytes = std::fs::read(&file).unwrap();
        bytes[0] ^= 1;
        std::fs::write(&file, bytes).unwrap();
    }
    assert_eq!(again().bytes, 0);
    let datafs = Datafs::open(&home, &config).unwrap();
    assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (2, 1));
    sound(&datafs);
}

/// The files in the folders below `root`.
fn files_below(root: &Path) -> Vec<PathBuf> {
    let below = |folder: &Path| std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let folders: Vec<_> = below(root).filter(|path| path.is_dir()).collect();
    folders.iter().flat_map(|folder| below(folder)).collect()
}

#[test]
fn folders_that_are_no_backups_of_this_store_are_left_alone() {
    let (config, Place { home, folder, _dir }) = (settings(Config::default()), place());
    let datafs = make(&home, &config);
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("letter"), "dear").unwrap();
    let error = datafs.backup(&folder, &|_| true).unwrap_err().to_string();
    assert!(error.contains("no backup"), "{error}");
    assert!(Datafs::restore(&home, &config, &folder, false, &|_| true).unwrap_err().is_not_found());
    std::fs::remove_file(folder.join("letter")).unwrap();
    backup(&datafs, &folder);
    let other = make(&home.with_file_name("other"), &config);
    let error = other.backup(&folder, &|_| true).unwrap_err().to_string();
    assert!(error.contains("another object store"), "{error}");
}

#[test]
fn a_store_of_another_home_is_taken_only_on_demand_and_then_refused_there() {
    let Place { home, folder, _dir } = &place();
    let store = home.with_file_name("store");
    let config = settings(Config { store_dir: store, ..Config::default() });
    let datafs = make(home, &config);
    backup(&datafs, folder);
    write(&datafs, 3);
    let other = home.with_file_name("other");
    let error = Datafs::restore(&other, &config, folder, false, &|_| true).unwrap_err().to_string();
    assert!(error.contains("another home") && error.contains("--take-store"), "{error}");
    assert_eq!(version(&datafs, "v"), 3);
    drop(datafs);
    Datafs::restore(&other, &config, folder, true, &|_| true).unwrap();
    let taken = Datafs::open(&other, &config).unwrap();
    assert_eq!((version(&taken, "v"), version(&taken, "v@first")), (2, 1));
    assert!(Datafs::open(home, &config).is_err(), "two homes share the objects of one store");
}

#[test]
fn a_restored_home_has_a_store_of_its_own() {
    let (config, Place { home, folder, _dir }) = (settings(Config::default()), place());
    let datafs = make(&home, &config);
    backup(&datafs, &folder);
    let other = home.with_file_name("other");
    restore(&other, &config, &folder);
    let restored = Datafs::open(&other, &config).unwrap();
    let error = restored.backup(&folder, &|_| true).unwrap_err().to_string();
    assert!(error.contains("another object store"), "{error}");
    assert_eq!(restored.gc().unwrap().sessions, 0, "sessions of the first home are not of this one");
    assert_eq!(version(&datafs, "v"), 2);
}

const FOLDER: &str = "MILLRACE_TEST_BACKUP";

/// The child: makes (0) or restores (1) a backup.
#[test]
fn worker() {
    let Some((home, task)) = child::task() else { return };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    let config = settings(inherited());
    match task {
        0 => drop(backup(&Datafs::open(&home, &config).unwrap(), &folder)),
        _ => restore(&home, &config, &folder),
    }
}

/// Runs a child that ends at a failpoint.
fn killed(engine: &Engine, place: &Place, task: u64, point: &str) {
    let mut command = child::command("backup::worker", &place.home, task);
    engine.tell(&mut command);
    let command = command.env(FOLDER, &place.folder).env("MILLRACE_FAILPOINT", point);
    let status = command.stdout(std::process::Stdio::null()).status().unwrap();
    assert_eq!(status.signal(), Some(9), "{point}: {status}");
}

#[test]
fn a_killed_backup_leaves_the_old_or_the_new_and_holds_nothing() {
    for step in ["begun", "held", "metadata-copied", "objects-copied", "finished"] {
        for_each_engine(|engine, config| {
            let (place, point) = (place(), format!("backup-{step}"));
            let datafs = make(&place.home, config);
            backup(&datafs, &place.folder);
            write(&datafs, 3);
            drop(datafs);
            killed(engine, &place, 0, &point);
            // Collection continues as soon as the process is known to be dead.
            let datafs = Datafs::open(&place.home, config).unwrap();
            write(&datafs, 4);
            let deadline = Instant::now() + LIMIT;
            while datafs.gc().unwrap().held > 0 {
                assert!(Instant::now() < deadline, "{point}");
                std::thread::sleep(child::POLL * 20);
            }
            drop(datafs);
            restore(&place.home, config, &place.folder);
            let datafs = Datafs::open(&place.home, config).unwrap();
            let expected = if point == "backup-finished" { 3 } else { 2 };
            assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (expected, 1), "{point}");
            sound(&datafs);
            write(&datafs, expected + 1);
            backup(&datafs, &place.folder);
        });
    }
}

#[test]
fn a_killed_restore_leaves_the_old_or_the_new() {
    let points = [
        "restore-held",
        "restore-objects-copied",
        "restore-marked",
        "replace-deleted",
        "replace-written",
        "replace-committed",
        "restore-finished",
    ];
    for point in points {
        for_each_engine(|engine, config| {
            if engine.is_server() && point == "replace-committed" {
                return;
            }
            let place = place();
            let datafs = make(&place.home, config);
            backup(&datafs, &place.folder);
            move_on(&datafs);
            drop(datafs);
            killed(engine, &place, 1, point);
            let datafs = Datafs::open(&place.home, config).unwrap();
            let new = ["replace-committed", "restore-finished"].contains(&point);
            assert_eq!(version(&datafs, "v"), if new { 2 } else { 3 }, "{point}");
            sound(&datafs);
            drop(datafs);
            restore(&place.home, config, &place.folder);
            let datafs = Datafs::open(&place.home, config).unwrap();
            assert_eq!((version(&datafs, "v"), version(&datafs, "v@first")), (2, 1), "{point}");
            sound(&datafs);
        });
    }
}
