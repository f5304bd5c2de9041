//! Fault injection tests: a fault must leave no effect, or end in an explicit error.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::group::{agree_with_their_models, engine, metadata, number};
use super::suite;
use crate::error::Error;
use crate::meta::engine::{Durability, Engine, Order};
use crate::meta::faulty::{self, Fault, Faults, Faulty, Place};
use crate::meta::metadata::Metadata;

/// Number of seeds for each test.
const SEEDS: u64 = 4;

#[test]
fn a_faulty_engine_passes_the_suite() {
    for seed in 0..SEEDS {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::new(seed, 5, &Fault::CLEAR, Place::Around);
        suite::all(&|| Box::new(Faulty::new(Box::new(engine(dir.path())), Arc::clone(&faults))));
        assert!(faults.drawn() > 20);
    }
}

#[test]
fn groups_agree_with_their_models_whatever_happens_to_commits() {
    let dir = tempfile::tempdir().unwrap();
    // The faults after which the outcome of a commit is known.
    let kinds = [Fault::Conflict, Fault::Timeout, Fault::LostAfter];
    let faults = Faults::new(11, 3, &kinds, Place::Inside);
    let processes = faulty::with(&faults, || [metadata(dir.path()), metadata(dir.path())]);
    agree_with_their_models(processes, 100, &|| Box::new(engine(dir.path())));
    assert!(faults.drawn() > 0);
}

#[test]
fn a_faulty_engine_agrees_with_the_models_of_groups() {
    let dir = tempfile::tempdir().unwrap();
    let faults = Faults::new(12, 6, &Fault::CLEAR, Place::Around);
    let processes = faulty::with(&faults, || [metadata(dir.path()), metadata(dir.path())]);
    agree_with_their_models(processes, 40, &|| Box::new(engine(dir.path())));
    assert!(faults.drawn() > 20);
}

/// Each transaction increments a count and writes a key with its number, until one fails. Every acknowledged
/// transaction must be there, each must have counted exactly once, and every call after the failure must
/// fail.
fn fails_loudly(meta: &Metadata, reopen: &dyn Fn() -> Box<dyn Engine>) {
    let mut answered = Vec::new();
    let mut attempted = 0u64;
    let failure = loop {
        attempted += 1;
        assert!(attempted < 10_000, "nothing ever failed");
        let done = meta.transact(Durability::Durable, |txn| {
            let next = number(txn.get(b"x")?) + 1;
            txn.put(b"x", &next.to_be_bytes())?;
            txn.put(&[b"x".as_slice(), &attempted.to_be_bytes()].concat(), b"")
        });
        match done {
            Ok(()) => answered.push(attempted),
            Err(error) => break error,
        }
    };
    assert!(matches!(failure, Error::Failed { .. }), "{failure:?}");
    let after = [
        meta.view(|txn| txn.get(b"x")).map(drop),
        meta.transact(Durability::Relaxed, |txn| txn.put(b"x", b"")),
        meta.sync(),
    ];
    assert!(after.iter().all(|result| matches!(result, Err(Error::Failed { .. }))), "{after:?}");
    let engine = reopen();
    let pairs = engine.view(|txn| txn.scan(b"x", b"y", Order::Ascending, usize::MAX)).unwrap();
    let there: BTreeSet<u64> = pairs.iter().skip(1).map(|(key, _)| number(Some(key[1..].to_vec()))).collect();
    assert!(answered.iter().all(|answer| there.contains(answer)), "what was answered is lost");
    assert!(there.iter().all(|key| *key <= attempted));
    let count = pairs.first().map_or(0, |(_, value)| number(Some(value.clone())));
    assert_eq!(count, there.len() as u64, "a transaction was applied in part, or twice");
}

#[test]
fn what_nobody_can_know_fails_loudly() {
    for seed in 0..SEEDS {
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::new(seed, 9, &Fault::ALL, Place::Around);
        let meta = faulty::with(&faults, || metadata(dir.path()));
        fails_loudly(&meta, &|| Box::new(engine(dir.path())));
        // Group commit can find that a commit took place, but not that a missing one never will.
        let dir = tempfile::tempdir().unwrap();
        let faults = Faults::new(seed, 9, &Fault::CLEAR, Place::Inside);
        let meta = faulty::with(&faults, || metadata(dir.path()));
        fails_loudly(&meta, &|| Box::new(engine(dir.path())));
        let other = metadata(dir.path());
        other.transact(Durability::Durable, |txn| txn.put(b"x", b"another process goes on")).unwrap();
    }
}
