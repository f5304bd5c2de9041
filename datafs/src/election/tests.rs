//! Tests of the election: a model of several processes with their own clocks, and records of other programs.
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::*;
use crate::meta::sqlite::Sqlite;

const INTERVAL: Duration = Duration::from_secs(30);

fn metadata(dir: &tempfile::TempDir) -> Metadata {
    let path = dir.path().join("meta.sqlite");
    Metadata::grouped(Sqlite::open(&path, Duration::from_secs(10)).unwrap()).unwrap()
}

fn set_row(meta: &Metadata, session: u64, is_there: bool) {
    let key = keys::session(session);
    meta.transact(Durability::Relaxed, |txn| if is_there { txn.put(&key, b"") } else { txn.delete(&key) })
        .unwrap();
}

fn is_valid(meta: &Metadata, turn: &Turn) -> bool {
    match meta.transact(Durability::Relaxed, |txn| turn.check(txn.as_read())) {
        Ok(()) => true,
        Err(Error::Stale { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// A process of the model. Its clock differs from the others' and says nothing about theirs.
struct Process {
    session: u64,
    clock: Duration,
    candidate: Candidate,
    turn: Option<Turn>,
    /// Ticks for which it does not run.
    stopped: u32,
}

impl Process {
    fn new(session: u64, clock: Duration) -> Process {
        Process { session, clock, candidate: Candidate::new(session, INTERVAL), turn: None, stopped: 0 }
    }
}

/// Random interleavings of processes that look, renew, stop, and die. At any time at most one turn is valid, a turn
/// that was lost stays lost, and without stops and deaths somebody is elected within the time of a lease.
#[test]
fn at_most_one_turn_is_valid_and_somebody_gets_it() {
    for seed in 0..12 {
        let dir = tempfile::tempdir().unwrap();
        let meta = metadata(&dir);
        let mut random = StdRng::seed_from_u64(seed);
        let mut next_session = 1;
        let mut spawn = |random: &mut StdRng| {
            let session = next_session;
            next_session += 1;
            set_row(&meta, session, true);
            Process::new(session, Duration::from_secs(random.random_range(0..1_000_000)))
        };
        let mut processes: Vec<Process> = (0..4).map(|_| spawn(&mut random)).collect();
        let (mut lost, mut fence, mut vacant) = (Vec::new(), 0, 0);
        for step in 0..400 {
            let calm = step % 100 >= 60;
            for process in &mut processes {
                process.clock += INTERVAL;
                if process.stopped > 0 {
                    process.stopped -= 1;
                    continue;
                }
                match random.random_range(0..40) {
                    0 if !calm => {
                        process.stopped = random.random_range(1..12);
                        continue;
                    }
                    1 if !calm => {
                        // It dies, and its session's end is noticed now or never.
                        set_row(&meta, process.session, random.random_bool(0.5));
                        lost.extend(process.turn.take());
                        *process = spawn(&mut random);
                    }
                    _ => {}
                }
                match &process.turn {
                    Some(turn) => {
                        if meta.transact(Durability::Relaxed, |txn| turn.renew(txn)).is_err() {
                            assert!(turn.is_lost());
                            lost.extend(process.turn.take());
                        }
                    }
                    None => {
                        let clock = process.clock;
                        process.turn = process.candidate.look_at(&meta, None, &|| clock).unwrap();
                        if let Some(turn) = &process.turn {
                            assert!(turn.fence() > fence, "seed {seed}, step {step}");
                            fence = turn.fence();
                        }
                    }
                }
            }
            let valid = processes.iter().filter_map(|process| process.turn.as_ref());
            let valid = valid.filter(|turn| is_valid(&meta, turn)).count();
            assert!(valid <= 1, "seed {seed}, step {step}: {valid} turns are valid");
            // Those of processes that died stay in force until they expire, without a user.
            vacant = if valid == 0 && calm { vacant + 1 } else { 0 };
            assert!(vacant <= 12, "seed {seed}, step {step}: no process is elected");
        }
        let newest = lost.iter().filter(|turn| is_valid(&meta, turn)).map(Turn::fence).max();
        assert!(newest.is_none_or(|newest| newest == fence), "seed {seed}: a lost turn is valid again");
    }
}

#[test]
fn a_turn_passes_on_at_once_when_its_session_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let meta = metadata(&dir);
    [1, 2].iter().for_each(|session| set_row(&meta, *session, true));
    let look = |candidate: &mut Candidate| candidate.look_at(&meta, None, &|| Duration::ZERO).unwrap();
    let (mut first, mut second) = (Candidate::new(1, INTERVAL), Candidate::new(2, INTERVAL));
    let turn = look(&mut first).unwrap();
    assert!(look(&mut second).is_none() && is_valid(&meta, &turn));
    set_row(&meta, 1, false);
    assert!(!is_valid(&meta, &turn), "its session was declared dead");
    let next = look(&mut second).unwrap();
    assert_eq!((turn.fence(), next.fence()), (1, 2));
    // A process that stopped between its check and the next transaction changes nothing.
    set_row(&meta, 1, true);
    assert!(!is_valid(&meta, &turn) && turn.is_lost() && is_valid(&meta, &next));
    assert!(meta.transact(Durability::Relaxed, |txn| turn.renew(txn)).is_err());
}

/// The elected process has no row in the schema's table of clients, only a file that it keeps locked.
#[test]
fn on_one_machine_the_lock_of_a_session_file_decides_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let meta = metadata(&dir);
    let sessions = dir.path().join("sessions");
    std::fs::create_dir(&sessions).unwrap();
    let [killed, other] = [(); 2].map(|()| crate::session::Session::start(&meta, &sessions).unwrap());
    let turn = Candidate::new(killed.id(), INTERVAL).look(&meta, Some(&sessions)).unwrap().unwrap();
    let mut candidate = Candidate::new(other.id(), INTERVAL);
    assert!(candidate.look(&meta, Some(&sessions)).unwrap().is_none());
    killed.lose_lock();
    let next = candidate.look(&meta, Some(&sessions)).unwrap().unwrap();
    assert!(!is_valid(&meta, &turn) && is_valid(&meta, &next));
}

#[test]
fn a_candidate_that_looks_seldom_follows_a_holder_with_a_short_lease() {
    for seldom in [Duration::from_secs(20), LEASE_MAX] {
        let dir = tempfile::tempdir().unwrap();
        let meta = metadata(&dir);
        [1, 2].iter().for_each(|session| set_row(&meta, *session, true));
        let turn = Candidate::new(1, Duration::from_secs(1)).look_at(&meta, None, &|| Duration::ZERO);
        let turn = turn.unwrap().unwrap();
        let mut candidate = Candidate::new(2, seldom);
        let mut look = |at| candidate.look_at(&meta, None, &|| LEASE_MAX + seldom * at).unwrap();
        for at in 0..10 {
            meta.transact(Durability::Relaxed, |txn| turn.renew(txn)).unwrap();
            assert!(look(at).is_none(), "the holder renews its turn");
        }
        // The holder has been killed, and its row stays.
        assert!((10..20).find_map(look).is_some_and(|next| is_valid(&meta, &next)), "{seldom:?}");
    }
}

#[test]
fn a_record_that_cannot_be_read_expires_like_any_other() {
    for record in [&b""[..], b"?", &[0xff; 8], &[0xff; 4_000], &[0xff; 33]] {
        let dir = tempfile::tempdir().unwrap();
        let meta = metadata(&dir);
        set_row(&meta, 1, true);
        set_row(&meta, u64::MAX, true);
        meta.transact(Durability::Relaxed, |txn| txn.put(keys::ELECTED, record)).unwrap();
        let mut candidate = Candidate::new(1, INTERVAL);
        let lease = if record.len() < 32 { INTERVAL * 3 } else { LEASE_MAX };
        let mut looked = 0;
        let mut clock = Duration::from_secs(1_000_000);
        let turn = loop {
            if let Some(turn) = candidate.look_at(&meta, None, &|| clock).unwrap() {
                break turn;
            }
            clock += lease / 4;
            looked += 1;
            assert!(looked < 10, "{record:?}");
        };
        assert!(looked >= 4 && is_valid(&meta, &turn), "{record:?} after {looked} looks");
    }
}
