//! Tests of the lease: a model of several processes with their own clocks, and hostile records.

#[path = "../../../datafs/tests/postgres/server.rs"]
mod server;

use std::cell::Cell;

use millrace_datafs::{Config, Datafs, VolumeSpec};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore as _, SeedableRng as _};

use super::*;

const LEASE: Duration = Duration::from_secs(10);

/// The volume `models` of embedded metadata.
fn embedded(home: &std::path::Path) -> View {
    output(&Datafs::open(home, &Config::default()).unwrap())
}

fn output(datafs: &Datafs) -> View {
    datafs.volume_create(&"models".parse().unwrap()).unwrap();
    datafs.view(&"models".parse::<VolumeSpec>().unwrap()).unwrap()
}

fn terms(strict: bool) -> Terms {
    Terms { job: "job".into(), run: "ab".repeat(32), lease: LEASE, strict }
}

fn candidate(view: &View) -> Candidate {
    Candidate::new(view.clone(), terms(true)).unwrap()
}

fn put(view: &View, value: &[u8]) {
    view.publish(Publish::new().put_key(lease_key("job"), value)).unwrap();
}

/// Whether a write succeeds that expects a holder to be the newest one, as checkpoints and models do.
fn writes(holding: &Holding) -> bool {
    let publish = Publish::new()
        .expect_key(Checkpoints::owner_key("job"), Some(holding.owner().as_bytes().to_vec()))
        .put_key("effect", holding.owner());
    match holding.view.publish(publish) {
        Ok(()) => true,
        Err(millrace_datafs::Error::Conflict { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// A process of the model. Its clock differs from the others' and says nothing about theirs.
struct Process {
    offset: Duration,
    candidate: Candidate,
    holding: Option<Holding>,
}

/// Random interleavings of candidates and holders: they look, renew, write, release, die, and do not run for a time.
/// Sometimes another program overwrites the record.
fn model(view: &View, seed: u64, steps: usize) {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut below = |limit: u64| random.next_u64() % limit;
    let time = Cell::new(Duration::from_secs(1_000));
    let start = |offset| Process { offset, candidate: candidate(view), holding: None };
    let mut processes: Vec<Process> = (0..4).map(|i| start(Duration::from_secs(i * 7_777))).collect();
    let (mut fence, mut newest, mut taken, mut intruded) = (0, String::new(), 0, false);
    for step in 0..steps {
        time.set(time.get() + Duration::from_millis(below(LEASE.as_millis() as u64 / 8)));
        // Mostly no candidate runs late; sometimes all do.
        if below(40) == 0 {
            time.set(time.get() + LEASE + LEASE);
        }
        let at = below(processes.len() as u64) as usize;
        let offset = processes[at].offset;
        let now = || time.get() + offset;
        let process = &mut processes[at];
        let Some(holding) = &mut process.holding else {
            match process.candidate.look(None, &now).unwrap() {
                Look::Held { by, .. } => assert!(!by.is_empty()),
                Look::Failed(error) => panic!("{error}"),
                Look::Taken(holding) => {
                    let number = fence_of(holding.owner());
                    assert!(number > fence, "seed {seed}, step {step}: fence {number} after {fence}");
                    (fence, newest, taken, intruded) = (number, holding.owner().to_owned(), taken + 1, false);
                    process.holding = Some(*holding);
                    // A holder that stops at the end of its time has stopped.
                    for other in
                        processes.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, other)| other)
                    {
                        let acts = other
                            .holding
                            .as_ref()
                            .is_some_and(|held| held.valid_until() > time.get() + other.offset);
                        assert!(!acts, "seed {seed}, step {step}: two holders");
                    }
                }
            }
            continue;
        };
        let is_newest = holding.owner() == newest;
        match below(12) {
            0 => {
                let intruder = format!("{{\"format_version\":1,\"fence\":{}", fence + below(1_000));
                put(view, intruder.as_bytes());
                intruded = true;
            }
            1 => *process = start(offset),
            2 => {
                let released = holding.renew(|record| record.standing = Standing::Released, &now);
                assert_eq!(matches!(released, Renewal::Renewed), is_newest && !intruded, "{released:?}");
                *process = start(offset);
            }
            3..=5 => assert_eq!(writes(holding), is_newest, "seed {seed}, step {step}"),
            _ => match holding.renew(|_| {}, &now) {
                Renewal::Renewed => assert!(is_newest && !intruded, "seed {seed}, step {step}"),
                Renewal::Lost(reason) => {
                    assert!(!is_newest || intruded, "seed {seed}, step {step}: {reason}");
                    *process = start(offset);
                }
                Renewal::Unknown(error) => panic!("{error}"),
            },
        }
    }
    assert!(taken > 3, "seed {seed}: {taken} holders");
    // Without a holder that renews, a candidate that looks regularly takes the lease soon.
    let mut last = candidate(view);
    for _ in 0..12 {
        time.set(time.get() + LEASE / 10);
        if matches!(last.look(None, &|| time.get()).unwrap(), Look::Taken(_)) {
            return;
        }
    }
    panic!("seed {seed}: the lease stays with a holder that is gone");
}

#[test]
fn one_holder_at_a_time_in_embedded_metadata() {
    let home = tempfile::tempdir().unwrap();
    let view = embedded(home.path());
    (0..6).for_each(|seed| model(&view, seed, 250));
}

#[test]
fn one_holder_at_a_time_in_postgres() {
    let Some(server) = server::Server::shared() else { return };
    let (home, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let config = Config {
        meta_url: Some(server.url().into()),
        meta_schema: server.new_schema(),
        meta_connections_max: 4,
        store_dir: store.path().join("objects"),
        ..Config::default()
    };
    let view = output(&Datafs::open(home.path(), &config).unwrap());
    (100..106).for_each(|seed| model(&view, seed, 250));
}

#[test]
fn candidates_in_threads_take_the_lease_one_after_the_other() {
    let home = tempfile::tempdir().unwrap();
    let view = embedded(home.path());
    let mut fences: Vec<u64> = std::thread::scope(|scope| {
        let race = |_| {
            let view = view.clone();
            scope.spawn(move || {
                let mut own = candidate(&view);
                loop {
                    match own.look(None, &boot_time) {
                        Ok(Look::Taken(mut holding)) => {
                            assert!(writes(&holding));
                            let fence = fence_of(holding.owner());
                            holding.renew(|record| record.standing = Standing::Released, &boot_time);
                            return fence;
                        }
                        Ok(Look::Held { .. }) | Err(Error::Busy { .. }) => std::thread::yield_now(),
                        Ok(Look::Failed(error)) | Err(error) => panic!("{error}"),
                    }
                }
            })
        };
        let racing: Vec<_> = (0..4).map(race).collect();
        racing.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    fences.sort_unstable();
    assert_eq!(fences, [1, 2, 3, 4]);
}

fn taken(look: Look) -> Holding {
    match look {
        Look::Taken(holding) => *holding,
        Look::Held { by, .. } => panic!("held by {by}"),
        Look::Failed(error) => panic!("{error}"),
    }
}

#[test]
fn a_holder_that_is_dead_is_replaced_at_once() {
    let home = tempfile::tempdir().unwrap();
    let view = embedded(home.path());
    let now = || Duration::from_secs(5);
    let mut first = candidate(&view);
    let held = taken(first.look(None, &now).unwrap());
    let mut second = candidate(&view);
    assert!(matches!(second.look(Some("another"), &now).unwrap(), Look::Held { .. }));
    let next = taken(second.look(Some(first.holder()), &now).unwrap());
    assert_eq!((fence_of(held.owner()), fence_of(next.owner())), (1, 2));
    assert!(!writes(&held) && writes(&next));
    assert_eq!(second.predecessor.unwrap().holder, first.holder());
    // A commit whose answer was lost: the candidate finds itself in the record.
    let again = taken(first.look(Some(second.holder.as_str()), &now).unwrap());
    let found = taken(first.look(None, &now).unwrap());
    assert_eq!(again.owner(), found.owner());
    assert!(writes(&found));
}

#[test]
fn a_candidate_that_did_not_run_waits_again() {
    let mut watch = Watch::default();
    let at = |seconds: u64| (Duration::from_secs(seconds), Duration::from_secs(seconds));
    assert!(!watch.has_expired(b"a", LEASE, at(100)));
    for second in 101..110 {
        assert!(!watch.has_expired(b"a", LEASE, at(second)));
    }
    // The machine was suspended, and so may have been the holder's.
    assert!(!watch.has_expired(b"a", LEASE, at(200)));
    for second in 201..210 {
        assert!(!watch.has_expired(b"a", LEASE, at(second)));
    }
    assert!(watch.has_expired(b"a", LEASE, at(210)));
    // A clock that is set back, which this one never is, frees nothing early.
    assert!(!watch.has_expired(b"a", LEASE, at(3)));
    assert!(!watch.has_expired(b"b", LEASE, at(4)));
}

#[test]
fn hostile_records_are_waited_for_or_refused() {
    let home = tempfile::tempdir().unwrap();
    let view = embedded(home.path());
    let time = Cell::new(Duration::from_secs(5));
    let now = || time.get();
    taken(candidate(&view).look(None, &now).unwrap());
    let garbage = [&b""[..], b"\xff\xfe\0", b"{}", b"[1,2", b"{\"format_version\":1}", &[b'x'; 100_000]];
    for (fence, garbage) in (2..).zip(garbage) {
        put(&view, garbage);
        assert!(read(&view, "job").unwrap().is_none());
        let mut own = candidate(&view);
        for _ in 0..10 {
            match own.look(None, &now).unwrap() {
                Look::Held { by, .. } => assert!(by.contains("trainer/job/lease"), "{by}"),
                _ => panic!("taken from an unknown holder that may live"),
            }
            time.set(time.get() + LEASE / 10);
        }
        // The number survives in the owner key.
        let held = taken(own.look(None, &now).unwrap());
        assert_eq!(fence_of(held.owner()), fence);
    }

    put(&view, b"{\"format_version\":2,\"unknown\":[]}");
    let error = candidate(&view).look(None, &now).map(|_| ()).unwrap_err().one_line();
    assert!(error.contains("format version 2") && error.contains("trainer/job/lease"), "{error}");

    let record = |fence: u64, more: &str| {
        format!(
            "{{\"format_version\":1,\"fence\":{fence},\"holder\":\"h\",\"run\":\"r\",\"host\":\"a\\u001b[2Jb\",\"pid\":1,\
             \"lease_ms\":{},\"renewals\":0{more}}}",
            u64::MAX
        )
    };
    // A time without end is bounded, and the text cannot write to a terminal.
    put(&view, record(7_000, ",\"standing\":\"held\"").as_bytes());
    let found = read(&view, "job").unwrap().unwrap();
    assert_eq!(found.lease(), Duration::from_millis(LEASE_MS_MAX));
    assert_eq!(found.describe(), "process 1 on a[2Jb");
    // A number from the future is the one to exceed.
    put(&view, record(7_000, ",\"standing\":\"released\"").as_bytes());
    assert_eq!(fence_of(taken(candidate(&view).look(None, &now).unwrap()).owner()), 7_001);
    put(&view, record(u64::MAX, ",\"standing\":\"finished\"").as_bytes());
    let error = candidate(&view).look(None, &now).map(|_| ()).unwrap_err().one_line();
    assert!(error.contains("largest") && error.contains("another name"), "{error}");
}

#[test]
fn a_lost_lease_is_told_with_the_new_coordinator() {
    let home = tempfile::tempdir().unwrap();
    let view = embedded(home.path());
    let mut first = candidate(&view);
    let lease = Lease::start(taken(first.look(None, &boot_time).unwrap())).unwrap();
    lease.announce("a.example.org:7100".to_owned());
    let announced = || read(&view, "job").unwrap().is_some_and(|record| record.address.is_some());
    while !announced() {
        std::thread::yield_now();
    }
    assert!(lease.check().is_ok());
    let other = || Error::io("write", std::io::Error::from(std::io::ErrorKind::Other));
    assert!(matches!(lease.explain(other()), Error::Io { .. }));

    assert!(lease.is_fresh());
    lease.confirm().unwrap();

    let next = taken(candidate(&view).look(Some(first.holder()), &boot_time).unwrap());
    assert!(lease.check().is_ok(), "the loss is not noticed yet");
    let error = lease.confirm().unwrap_err();
    assert!(matches!(error, Error::Lease { .. }), "{error}");
    let Error::Lease { job, reason } = lease.explain(other()) else { panic!("no loss") };
    assert!(job == "job" && reason.contains("process ") && reason.contains("--standby"), "{reason}");
    assert!(lease.check().is_err());
    // Its end leaves the next holder alone.
    lease.release(Release::Finished);
    assert!(writes(&next));
    assert_eq!(read(&view, "job").unwrap().unwrap().standing, Standing::Held);
}

#[test]
fn a_lease_is_released_while_others_refer_to_it() {
    let home = tempfile::tempdir().unwrap();
    let view = embedded(home.path());
    let mut first = candidate(&view);
    let lease = std::sync::Arc::new(Lease::start(taken(first.look(None, &boot_time).unwrap())).unwrap());
    let other = std::sync::Arc::clone(&lease);
    lease.release(Release::Finished);
    assert_eq!(read(&view, "job").unwrap().unwrap().standing, Standing::Finished);
    // It renews nothing, and says so.
    assert!(other.check().is_err() && other.confirm().is_err());
    let next = taken(candidate(&view).look(None, &boot_time).unwrap());
    other.release(Release::Unfinished);
    assert!(writes(&next));
    assert_eq!(read(&view, "job").unwrap().unwrap().standing, Standing::Held);
}

#[test]
fn a_standby_that_waited_for_a_run_that_failed_gets_its_error() {
    let home = tempfile::tempdir().unwrap();
    let view = embedded(home.path());
    let mut first = candidate(&view);
    let lease = Lease::start(taken(first.look(None, &boot_time).unwrap())).unwrap();
    let mut standby = candidate(&view);
    let mut single = Candidate::new(view.clone(), terms(false)).unwrap();
    for waiting in [&mut standby, &mut single] {
        assert!(matches!(waiting.look(None, &boot_time).unwrap(), Look::Held { .. }));
    }
    let message = "step 3: loss is NaN\u{1b}[2J".to_owned();
    lease.release(Release::Failed(Failure { message, exit_code: 6 }));
    let Look::Failed(error) = standby.look(None, &boot_time).unwrap() else { panic!("taken") };
    let text = error.one_line();
    assert!(text.contains("step 3: loss is NaN[2J") && text.contains("process "), "{text}");
    assert!(matches!(error, Error::Worker { exit_code: 6, .. }), "{error}");
    // Its job may have been mended since.
    let held = taken(single.look(None, &boot_time).unwrap());
    assert_eq!(fence_of(held.owner()), 2);
    let record = read(&view, "job").unwrap().unwrap();
    assert_eq!((record.standing, record.failure), (Standing::Held, None));
}
