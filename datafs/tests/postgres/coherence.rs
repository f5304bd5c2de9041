//! Tests of close-to-open consistency between processes on PostgreSQL, checked at each operation, and a
//! measurement of visibility.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use millrace_datafs::Datafs;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::processes::{URL, command, config, say, view};
use super::server::Server;
use crate::child;

const PROCESSES: u64 = 4;

/// Numbers that processes share outside the volume, one per slot.
struct Slots(File);

impl Slots {
    fn open(home: &Path) -> Slots {
        let path = home.join("slots");
        Slots(File::options().read(true).write(true).create(true).truncate(false).open(path).unwrap())
    }

    fn get(&self, slot: u64) -> u64 {
        let mut bytes = [0; 8];
        let read = self.0.read_at(&mut bytes, slot * 8).unwrap();
        if read == 8 { u64::from_le_bytes(bytes) } else { 0 }
    }

    fn set(&self, slot: u64, number: u64) {
        self.0.write_all_at(&number.to_le_bytes(), slot * 8).unwrap();
    }
}

/// The content of a version, small or larger: one number repeated.
fn content(version: u64) -> Vec<u8> {
    version.to_le_bytes().repeat(1 + (version as usize % 3) * 600)
}

fn version(bytes: &[u8]) -> u64 {
    let version = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    assert!(bytes == content(version), "torn");
    version
}

/// The child: writes its file in several ways and notes each close. It opens the files of the others, which
/// must hold the noted version or a newer one.
#[test]
fn checker() {
    let Some((home, argument)) = child::task() else { return };
    let (id, operations) = (argument % PROCESSES, argument / PROCESSES);
    let (_datafs, view) = view(&home, &std::env::var(URL).unwrap());
    let slots = Slots::open(&home);
    let mut random = StdRng::seed_from_u64(argument);
    let mut own = 0;
    for _ in 0..operations {
        if own == 0 || random.random_ratio(1, 3) {
            own += 1;
            let name = format!("file-{id}");
            if own % 4 == 0 {
                view.write_file(&format!("new-{id}"), &content(own)).unwrap();
                view.rename_path(&format!("new-{id}"), &name).unwrap();
            } else {
                view.write_file(&name, &content(own)).unwrap();
            }
            slots.set(id, own);
        } else {
            let other = (id + random.random_range(1..PROCESSES)) % PROCESSES;
            let closed = slots.get(other);
            if closed > 0 {
                let found = version(&view.read_file(&format!("file-{other}")).unwrap());
                assert!(found >= closed, "{closed} was closed, {found} was opened");
            }
        }
    }
    say("done", operations);
}

fn check(operations: u64) {
    let Some(server) = Server::start(&["fsync=off"]) else { return };
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &config(&server.url())).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let children: Vec<_> = (0..PROCESSES)
        .map(|id| {
            let argument = operations / PROCESSES * PROCESSES + id;
            command("postgres::coherence::checker", home.path(), argument, &server.url()).spawn().unwrap()
        })
        .collect();
    let done = children.into_iter().map(|mut child| {
        let done = child::reports(&mut child).filter(|(word, _)| word == "done").last();
        assert!(child.wait().unwrap().success());
        done.unwrap().1
    });
    assert_eq!(done.sum::<u64>(), operations / PROCESSES * PROCESSES);
}

#[test]
fn no_open_of_four_processes_is_stale() {
    check(10_000);
}

#[test]
#[ignore = "takes long: cargo test --release -p millrace-datafs --test datafs postgres::coherence -- --ignored --nocapture"]
fn no_open_of_four_processes_is_stale_in_a_million() {
    check(1_000_000);
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

/// Slots of the writer and of the watcher.
const CLOSED: u64 = 0;
const CLOSED_AT_NS: u64 = 1;
const SEEN: u64 = 2;

/// The child: polls for changes without a pause, and reports the delay from each close until it saw the change.
#[test]
fn watcher() {
    let Some((home, rounds)) = child::task() else { return };
    let (_datafs, view) = view(&home, &std::env::var(URL).unwrap());
    let slots = Slots::open(&home);
    let mut delays_us = Vec::new();
    slots.set(SEEN, 1);
    for round in 2..rounds + 2 {
        while version(&view.read_file("beat").unwrap()) < round {}
        let seen_at = now_ns();
        let deadline = Instant::now() + Duration::from_secs(60);
        while slots.get(CLOSED) < round {
            assert!(Instant::now() < deadline);
        }
        delays_us.push(seen_at.saturating_sub(slots.get(CLOSED_AT_NS)) / 1_000);
        slots.set(SEEN, round);
    }
    delays_us.sort_unstable();
    for (word, percent) in [("p50_us", 50), ("p99_us", 99), ("max_us", 100)] {
        say(word, delays_us[(delays_us.len() * percent / 100).min(delays_us.len() - 1)]);
    }
}

#[test]
#[ignore = "prints figures: cargo test --release -p millrace-datafs --test datafs postgres::coherence -- --ignored --nocapture"]
fn changes_are_seen_soon() {
    let Some(server) = Server::start(&["fsync=off"]) else { return };
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &config(&server.url())).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let (_own, view) = view(home.path(), &server.url());
    let slots = Slots::open(home.path());
    view.write_file("beat", &content(1)).unwrap();
    const ROUNDS: u64 = 2_000;
    let mut child =
        command("postgres::coherence::watcher", home.path(), ROUNDS, &server.url()).spawn().unwrap();
    for round in 2..ROUNDS + 2 {
        while slots.get(SEEN) + 1 < round {
            assert!(child.try_wait().unwrap().is_none(), "the other process has ended");
            std::thread::sleep(Duration::from_micros(100));
        }
        view.write_file("beat", &content(round)).unwrap();
        slots.set(CLOSED_AT_NS, now_ns());
        slots.set(CLOSED, round);
    }
    for (word, number) in child::reports(&mut child).filter(|(word, _)| word.ends_with("_us")) {
        println!("visible after the close, {word}: {number}");
    }
    assert!(child.wait().unwrap().success());
}
