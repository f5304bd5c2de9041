//! Measurement of visibility: how soon polling processes see a closed change, by `stat` and by opening and
//! reading.

use std::time::{Duration, SystemTime};

use super::access::Access;
use super::board::Board;
use super::{PROCESSES, Scene, access, number};
use crate::child;

/// Changes, each made once all processes have seen the previous one; `MILLRACE_ROUNDS` sets another number.
const ROUNDS: u64 = 60;
const COUNT: &str = "MILLRACE_ROUNDS";
/// Bytes that each change appends.
const STEP: u64 = 8;
/// Polling interval.
const PAUSE: Duration = Duration::from_micros(50);
const LIMIT: Duration = Duration::from_secs(60);

/// Places on the board: the time of the newest change, and the last change that each process has seen.
const CHANGED_AT: u64 = 0;
const SEEN: u64 = 1;
const FILE: &str = "grows";

/// Microseconds since 1970.
fn now_us() -> u64 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros() as u64
}

/// The polling child: even ones by `stat`, odd ones by opening.
#[test]
fn looker() {
    let Some((dir, id)) = child::task() else { return };
    let (access, board) = (access(&dir, id), Board::open(&dir));
    let mut seen = 0;
    let rounds = number(COUNT, ROUNDS);
    board.set(SEEN + id, 1);
    while seen < rounds {
        let size = if id % 2 == 0 { access.size(FILE) } else { read_len(&access) };
        let now = now_us();
        if size / STEP > seen {
            seen = size / STEP;
            println!("latency {}", now.saturating_sub(board.get(CHANGED_AT)));
            board.set(SEEN + id, seen + 1);
        }
        std::thread::sleep(PAUSE);
    }
}

fn read_len(access: &Access) -> u64 {
    access.read(FILE).map_or(0, |bytes| bytes.len() as u64)
}

fn measure(way: &str, scene: &Scene) {
    let board = Board::create(scene.dir.path(), PROCESSES);
    let writer = scene.access(0);
    let mut lookers: Vec<_> = (1..PROCESSES)
        .map(|id| child::spawn("close_to_open::visibility::looker", scene.dir.path(), id))
        .collect();
    let reports: Vec<_> = lookers.iter_mut().map(child::reports).collect();
    let readers: Vec<_> = reports
        .into_iter()
        .map(|reports| std::thread::spawn(move || reports.map(|(_, number)| number).collect::<Vec<u64>>()))
        .collect();
    for round in 0..number(COUNT, ROUNDS) {
        let begin = SystemTime::now();
        for id in 1..PROCESSES {
            while board.get(SEEN + id) <= round {
                assert!(begin.elapsed().unwrap() < LIMIT, "process {id} does not see change {round}");
                std::thread::sleep(PAUSE);
            }
        }
        // Varies the time of the change relative to the commits.
        std::thread::sleep(Duration::from_micros(round * 1_733 % 7_000));
        // Before the close, so that the latency includes it.
        board.set(CHANGED_AT, now_us());
        writer.append(FILE, &[1; STEP as usize]);
    }
    for (id, reader) in (1..PROCESSES).zip(readers) {
        let mut latencies = reader.join().unwrap();
        assert_eq!(latencies.len() as u64, number(COUNT, ROUNDS));
        latencies.sort_unstable();
        let at = |part: usize| latencies[(latencies.len() - 1) * part / 100] as f64 / 1_000.0;
        let how = if id % 2 == 0 { "stat" } else { "open" };
        println!("visibility {way} by {how}: p50 {:.2} ms, p99 {:.2} ms", at(50), at(99));
    }
    for mut looker in lookers {
        assert!(looker.wait().unwrap().success());
    }
}

#[test]
fn a_change_is_soon_seen_through_the_library() {
    measure("library", &Scene::new());
}

#[test]
fn a_change_is_soon_seen_through_mounts() {
    if let Some(scene) = Scene::mounted() {
        measure("mounts", &scene);
    }
}
