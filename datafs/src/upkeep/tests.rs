//! Tests of the background work: its requests per interval, and a model of processes that die in the middle of it.
use std::collections::BTreeMap;
use std::path::Path;

use rand::rngs::StdRng;
use rand::{Rng as _, RngCore as _, SeedableRng as _};

use super::*;
use crate::config::Config;
use crate::datafs::Datafs;
use crate::fs::tests::{objects, rows};
use crate::fs::{OpenFlags, View};
use crate::fsck::FsckOptions;
use crate::meta::counting::{self, Counts};
use crate::meta::faulty::{self, Fault, Faults, Place};
use crate::meta::keys;
use crate::meta::references::References;
use crate::object::{Layout, ObjectId};

const INTERVAL: Duration = Duration::from_secs(30);
/// A fifth of the usual bound, so that a test needs fewer files.
const LIMITS: Limits = Limits { listed: Limits::BACKGROUND.listed / 5, ..Limits::BACKGROUND };

fn config() -> Config {
    Config { gc_interval_ms: 0, garbage_grace_ms: 0, write_buffer_bytes_max: 40_000, ..Config::default() }
}

/// Opens a home whose processes commit each transaction at once, as those with faults do: they cannot be mixed with
/// processes that commit in groups.
fn open(home: &Path) -> Datafs {
    counting::with(&Arc::default(), || open_alone(home))
}

fn open_alone(home: &Path) -> Datafs {
    Datafs::open(home, &config()).unwrap()
}

fn keeper(datafs: &Datafs) -> Keeper {
    Keeper::new(&datafs.shared, INTERVAL)
}

/// Adds objects that an extent references, as files without data.
fn add_objects(datafs: &Datafs, home: &Path, session: u64, count: u64) {
    let store = Config::default().store_path(home);
    (0..=u8::MAX).for_each(|i| std::fs::create_dir_all(store.join(format!("{i:02x}"))).unwrap());
    let row = References { extents: 1, bytes: 100 }.encode();
    let all: Vec<_> = (0..count)
        .map(|i| ObjectId::new(session, i.wrapping_mul(0x9e37_79b9_7f4a_7c15), Layout::Framed))
        .collect();
    for some in all.chunks(10_000) {
        some.iter().for_each(|object| drop(std::fs::File::create(store.join(object.data_name())).unwrap()));
        let put = |txn: &mut dyn crate::meta::engine::WriteTxn| {
            some.iter().try_for_each(|object| txn.put(&keys::references(*object), &row))
        };
        datafs.shared.meta.transact(Durability::Relaxed, put).unwrap();
    }
}

/// Requests to the metadata and listings of the store in each of some intervals, of all processes together.
fn per_interval(objects: u64, processes: usize, intervals: usize) -> Vec<(u64, u64)> {
    let home = tempfile::tempdir().unwrap();
    let counts = Arc::<Counts>::default();
    let all: Vec<Datafs> =
        counting::with(&counts, || (0..processes).map(|_| open_alone(home.path())).collect());
    add_objects(&all[0], home.path(), 77, objects);
    let mut keepers: Vec<Keeper> = all.iter().map(keeper).collect();
    let mut found = Vec::new();
    let mut listed = 0;
    for _ in 0..intervals {
        let (before, mut lists) = (counts.requests(), 0);
        for (keeper, datafs) in keepers.iter_mut().zip(&all) {
            let done = keeper.tick(&datafs.shared, LIMITS).unwrap().unwrap_or_default();
            lists += done.lists;
            listed += done.listed;
        }
        if listed == 0 {
            keepers[0].next_pass = Some(Instant::now());
        }
        found.push((counts.requests() - before, lists));
    }
    assert!(keepers[1..].iter().all(|keeper| keeper.turn.is_none()), "several are elected");
    assert_eq!(listed, objects.min((intervals as u64 - 1) * LIMITS.listed));
    assert_eq!(objects_in(home.path()), objects, "a live object was deleted");
    found
}

fn objects_in(home: &Path) -> u64 {
    objects(home) as u64
}

#[test]
fn requests_per_interval_depend_neither_on_objects_nor_on_processes() {
    let few = per_interval(10_000, 2, 5);
    let many = per_interval(100_000, 20, 5);
    println!("requests to the metadata and listings of the store per interval: {few:?}, {many:?}");
    // Without the first interval: it has the election.
    let requests =
        |found: &[(u64, u64)]| found[1..].iter().map(|(requests, _)| *requests).collect::<Vec<_>>();
    assert_eq!(requests(&few), requests(&many));
    let pages = LIMITS.listed / 1_000;
    assert!(many.iter().all(|(requests, lists)| *requests <= 2 * pages + 16 && *lists <= 64), "{many:?}");
}

#[test]
fn an_idle_home_costs_a_process_that_is_not_elected_nothing() {
    let home = tempfile::tempdir().unwrap();
    let counts = Arc::<Counts>::default();
    let elected = open(home.path());
    let mut first = keeper(&elected);
    assert!(first.tick(&elected.shared, Limits::BACKGROUND).unwrap().is_some());
    let other = counting::with(&counts, || Datafs::open(home.path(), &config()).unwrap());
    let mut second = keeper(&other);
    let before = counts.requests();
    for _ in 0..100 {
        assert!(second.tick(&other.shared, Limits::BACKGROUND).unwrap().is_none());
        other.shared.answer_recent_round().unwrap();
    }
    assert_eq!(counts.requests(), before);
    // The end of the elected process passes its turn on.
    drop((first, elected));
    assert!(second.tick(&other.shared, Limits::BACKGROUND).unwrap().is_some());
}

/// A process of the model: a handle whose metadata fails from a random call on, as after a kill.
struct Mortal {
    datafs: Datafs,
    view: View,
    keeper: Keeper,
    faults: Arc<Faults>,
}

impl Mortal {
    fn open(home: &Path, seed: u64) -> Option<Mortal> {
        let faults = Faults::new(seed, 70, &[Fault::Unknown], Place::Around);
        let datafs = faulty::with(&faults, || Datafs::open(home, &config())).ok()?;
        let view = match datafs.view(&"v".parse().unwrap()) {
            Ok(view) => view,
            Err(_) => {
                Mortal::bury(datafs);
                return None;
            }
        };
        let keeper = keeper(&datafs);
        Some(Mortal { datafs, view, keeper, faults })
    }

    /// Leaves everything as a kill does. The leaked memory is not used again.
    fn bury(datafs: Datafs) {
        datafs.shared.session.lose_lock();
        std::mem::forget(datafs);
    }

    fn die(self) {
        std::mem::forget((self.view, self.keeper));
        Mortal::bury(self.datafs);
    }
}

fn bytes(random: &mut StdRng) -> Vec<u8> {
    let len = match random.random_range(0..4) {
        0 => random.random_range(1..200),
        1 => random.random_range(5_000..30_000),
        _ => random.random_range(30_000..120_000),
    };
    let mut bytes = vec![0; len];
    random.fill_bytes(&mut bytes);
    bytes
}

type Content = BTreeMap<String, Vec<u8>>;

fn check(view: &View, model: &Content, what: &str) {
    let names: Vec<String> = view.list("").unwrap().into_iter().map(|entry| entry.name).collect();
    assert!(names.iter().eq(model.keys()), "{what}: {names:?}");
    for (name, bytes) in model {
        assert!(view.read_file(name).unwrap() == bytes, "{what}: {name}");
    }
}

/// Processes that do background work die at random calls to the metadata, beside a writer, snapshots and compaction.
/// Nothing live is ever deleted, and in the end all garbage is.
fn model(seed: u64) {
    let home = tempfile::tempdir().unwrap();
    let mut random = StdRng::seed_from_u64(seed);
    let writer = open(home.path());
    writer.volume_create(&"v".parse().unwrap()).unwrap();
    let view = writer.view(&"v".parse().unwrap()).unwrap();
    let (mut model, mut snapshots) = (Content::new(), BTreeMap::<String, Content>::new());
    let mut made = 0;
    for round in 0..8 {
        let what = format!("seed {seed}, round {round}");
        let mut mortals: Vec<Mortal> =
            (0..2).filter_map(|i| Mortal::open(home.path(), seed * 1_000 + round * 10 + i)).collect();
        for _ in 0..random.random_range(5..40) {
            let name = random.random_range(0..8).to_string();
            match random.random_range(0..10) {
                0..4 => {
                    let bytes = bytes(&mut random);
                    view.write_file(&name, &bytes).unwrap();
                    model.insert(name, bytes);
                }
                4 => {
                    // Through an open file, into packs and several extents.
                    if let Some(content) = model.get_mut(&name) {
                        let node = view.stat(&name).unwrap().node;
                        let file = view.open(node, OpenFlags::READ_WRITE).unwrap();
                        let piece = bytes(&mut random);
                        file.write_at(content.len() as u64, &piece).unwrap();
                        file.flush().unwrap();
                        content.extend_from_slice(&piece);
                    }
                }
                5 => {
                    let there = model.remove(&name).map(|_| view.remove_file(&name));
                    there.unwrap_or(Ok(())).unwrap();
                }
                6 => {
                    made += 1;
                    let name = format!("s{made}");
                    writer.snapshot_create(&"v".parse().unwrap(), &name.parse().unwrap()).unwrap();
                    snapshots.insert(name, model.clone());
                }
                7 => {
                    if let Some((name, _)) = snapshots.pop_first() {
                        writer.snapshot_delete(&"v".parse().unwrap(), &name.parse().unwrap()).unwrap();
                    }
                }
                8 => drop(writer.compact(None, &crate::compact::Compact::default()).unwrap()),
                _ => {}
            }
            for mortal in &mut mortals {
                match random.random_range(0..3) {
                    // It has staged an object that it never publishes, or is in the middle of one.
                    0 => {
                        let mut staged = mortal.view.stage().ok();
                        if let Some(staged) = &mut staged {
                            let _ = staged.append(&bytes(&mut random));
                        }
                        std::mem::forget(staged);
                    }
                    _ => {
                        let limits = Limits {
                            transactions: random.random_range(1..8),
                            listed: random.random_range(1..12),
                            deleted: random.random_range(1..6),
                            packs: 1,
                        };
                        // Sometimes as if the last pass was long ago.
                        if random.random_bool(0.3) {
                            mortal.keeper.next_pass = Some(Instant::now());
                        }
                        let _ = mortal.keeper.tick(&mortal.datafs.shared, limits);
                    }
                }
            }
            let (dead, alive) = mortals.into_iter().partition(|mortal: &Mortal| mortal.faults.drawn() > 0);
            let dead: Vec<Mortal> = dead;
            mortals = alive;
            dead.into_iter().for_each(Mortal::die);
        }
        check(&view, &model, &what);
        for (name, model) in &snapshots {
            let at = writer.view(&format!("v@{name}").parse().unwrap()).unwrap();
            check(&at, model, &format!("{what}, {name}"));
        }
        mortals.into_iter().for_each(Mortal::die);
    }
    drop(view);
    drop(writer);
    let last = open(home.path());
    let mut keeper = keeper(&last);
    // A pass of the sweep begins where the last one was, so two passes see everything.
    let limits = Limits { transactions: 64, listed: 100, deleted: 100, packs: 4 };
    for _ in 0..30 {
        keeper.tick(&last.shared, limits).unwrap().unwrap();
    }
    let table = |prefix: Vec<u8>| rows(&last, prefix[0]);
    assert_eq!(table(keys::sessions_in_cleanup()), 0, "seed {seed}");
    assert_eq!(table(keys::all_garbage()), 0, "seed {seed}");
    assert_eq!(table(keys::sessions()), 1, "seed {seed}");
    let report = last.fsck(&FsckOptions { scrub: true, repair: false }, &mut |_| {}).unwrap();
    assert!(report.is_sound(), "seed {seed}: {:?}", report.found);
    assert_eq!(report.unclaimed_objects, 0, "seed {seed}");
    let view = last.view(&"v".parse().unwrap()).unwrap();
    check(&view, &model, &format!("seed {seed}, at the end"));
    let unfinished = walk(home.path()).iter().filter(|name| name.contains('#')).count();
    assert_eq!(unfinished, 0, "seed {seed}");
}

fn walk(home: &Path) -> Vec<String> {
    let folders = std::fs::read_dir(Config::default().store_path(home)).unwrap();
    let inside = |folder: std::io::Result<std::fs::DirEntry>| std::fs::read_dir(folder.unwrap().path());
    let files = folders.filter_map(|folder| inside(folder).ok()).flatten();
    files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn processes_that_die_in_background_work_lose_nothing_and_leave_nothing() {
    let seeds = std::env::var("MILLRACE_SEEDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    (1..=seeds).for_each(model);
}

/// Prints the requests per interval of 20 processes with 10⁶ objects, counted at the store and at PostgreSQL.
#[test]
#[ignore = "prints figures, takes minutes: cargo test -p millrace-datafs --lib a_million_objects -- --ignored --nocapture"]
fn a_million_objects_on_postgres() {
    use crate::meta::postgres::tests::server::Server;

    let count = |variable: &str, otherwise: u64| {
        std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
    };
    let (objects, processes) = (count("MILLRACE_OBJECTS", 1_000_000), count("MILLRACE_PROCESSES", 20));
    // The log has each statement as soon as it has ended; the server's statistics lag by seconds.
    const SETTINGS: [&str; 4] =
        ["fsync=off", "max_connections=200", "log_min_duration_statement=0", "log_parameter_max_length=0"];
    let Some(server) = Server::start(&SETTINGS) else { return };
    let home = tempfile::tempdir().unwrap();
    let config = Config {
        meta_url: Some(server.url().into()),
        meta_schema: "upkeep".into(),
        meta_connections_max: 3,
        ..config()
    };
    let all: Vec<Datafs> = (0..processes).map(|_| Datafs::open(home.path(), &config).unwrap()).collect();
    add_objects(&all[0], home.path(), 77, objects);
    server.sql("ANALYZE upkeep.kv");
    let mut keepers: Vec<Keeper> = all.iter().map(keeper).collect();
    let statements = || {
        let log = std::fs::read(server.folder().join("log")).unwrap();
        let log = String::from_utf8_lossy(&log);
        let is_statement = |line: &&str| line.contains(" ms  execute ") || line.contains(" ms  statement: ");
        log.lines().filter(is_statement).count() as i64
    };
    // Long enough for what processes do when they hear of a commit; as long for each figure.
    let in_window = |work: &mut dyn FnMut()| {
        let (before, began) = (statements(), Instant::now());
        work();
        std::thread::sleep(Duration::from_secs(9).saturating_sub(began.elapsed()));
        statements() - before
    };
    for interval in 0..4 {
        let idle = in_window(&mut || {});
        let (mut work, mut took) = (Done::default(), Duration::ZERO);
        let with_work = in_window(&mut || {
            let began = Instant::now();
            for (keeper, datafs) in keepers.iter_mut().zip(&all) {
                if interval == 1 && keeper.turn.is_some() {
                    keeper.next_pass = Some(Instant::now());
                }
                work = keeper.tick(&datafs.shared, Limits::BACKGROUND).unwrap().unwrap_or(work);
            }
            took = began.elapsed();
        });
        println!(
            "{objects} objects, {processes} processes, interval {interval}: {with_work} statements in 9 s, {idle} \
             without work; {} directories read, {} files listed, {} transactions, in {took:?}",
            work.lists, work.listed, work.transactions
        );
    }
    assert!(keepers[1..].iter().all(|keeper| keeper.turn.is_none()));
}

#[test]
fn what_a_dead_session_left_stays_in_cleanup_until_it_can_be_deleted() {
    let home = tempfile::tempdir().unwrap();
    let [killed, other] = [(); 2].map(|()| open(home.path()));
    let store = Config::default().store_path(home.path());
    let [stuck, free] = [1, 2].map(|number: u64| {
        let object = ObjectId::new(killed.shared.session.id(), number << 16, Layout::Framed);
        store.join(object.data_name())
    });
    // A folder with a file cannot be deleted as an object.
    std::fs::create_dir_all(stuck.join("inside")).unwrap();
    std::fs::create_dir_all(free.parent().unwrap()).unwrap();
    std::fs::write(&free, b"").unwrap();
    killed.shared.session.lose_lock();
    let mut keeper = keeper(&other);
    let failures = (0..4).filter(|_| keeper.tick(&other.shared, LIMITS).is_err()).count();
    assert!(failures >= 2 && stuck.exists() && !free.exists(), "{failures} failures");
    assert_eq!(other.shared.cleanups().unwrap().len(), 1);
    std::fs::remove_dir_all(&stuck).unwrap();
    std::fs::write(&stuck, b"").unwrap();
    for _ in 0..4 {
        keeper.tick(&other.shared, LIMITS).unwrap();
    }
    assert!(!stuck.exists() && other.shared.cleanups().unwrap().is_empty());
    std::mem::forget(killed);
}
