//! Conformance suite for metadata engines: the behavior that every engine must have.
//!
//! A case gets an [`Opener`], which opens the same map each time as another process would.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use super::engine::{Durability, Engine, Order};
use crate::error::{Error, Result};

/// Opens an engine on one and the same map, each time as another process.
pub(crate) type Opener<'a> = &'a dyn Fn() -> Box<dyn Engine>;

/// Runs all cases on an engine that has no keys in `x…`.
pub(crate) fn all(open: Opener<'_>) {
    failures_leave_nothing(open);
    scans_have_bounds_order_and_limit(open);
    a_transaction_sees_its_own_writes(open);
    counts_add_up(open);
    ranges_are_guarded(open);
    reads_are_of_one_moment(open);
    random_transactions_match_a_model(open, 7);
    a_barrier_shows_what_others_committed(open);
    large_transactions_and_values(open);
}

/// Removes everything that a case has written.
fn clear(engine: &dyn Engine) {
    loop {
        let left = engine
            .transact(Durability::Relaxed, |txn| {
                let pairs = txn.scan(b"x", b"y", Order::Ascending, 1_000)?;
                pairs.iter().try_for_each(|(key, _)| txn.delete(key))?;
                Ok(pairs.len())
            })
            .unwrap();
        if left == 0 {
            return;
        }
    }
}

fn number(value: Option<Vec<u8>>) -> u64 {
    value.map_or(0, |value| u64::from_be_bytes(value.try_into().unwrap()))
}

fn everything(engine: &dyn Engine) -> Vec<(Vec<u8>, Vec<u8>)> {
    engine.barrier().unwrap();
    engine.view(|txn| txn.scan(b"x", b"y", Order::Ascending, usize::MAX)).unwrap()
}

pub(crate) fn failures_leave_nothing(open: Opener<'_>) {
    let engine = open();
    engine.transact(Durability::Durable, |txn| txn.put(b"xa", b"1")).unwrap();
    let failed: Result<()> = engine.transact(Durability::Relaxed, |txn| {
        txn.put(b"xa", b"2")?;
        txn.delete(b"xa")?;
        txn.put(b"xb", b"2")?;
        Err(Error::Unsupported("this"))
    });
    assert!(matches!(failed, Err(Error::Unsupported(_))));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        engine.transact(Durability::Relaxed, |txn| -> Result<()> {
            txn.put(b"xa", b"3").unwrap();
            panic!("in a transaction");
        })
    }));
    assert!(panicked.is_err());
    assert_eq!(everything(engine.as_ref()), [(b"xa".to_vec(), b"1".to_vec())]);
    engine.sync().unwrap();
    clear(engine.as_ref());
}

pub(crate) fn scans_have_bounds_order_and_limit(open: Opener<'_>) {
    let engine = open();
    engine
        .transact(Durability::Relaxed, |txn| (0..10u8).try_for_each(|i| txn.put(&[b'x', i], &[i])))
        .unwrap();
    let scan = |start: u8, end: u8, order, limit| -> Vec<u8> {
        let pairs = engine.view(|txn| txn.scan(&[b'x', start], &[b'x', end], order, limit)).unwrap();
        pairs.into_iter().map(|(_, value)| value[0]).collect()
    };
    assert_eq!(scan(2, 5, Order::Ascending, 9), [2, 3, 4]);
    assert_eq!(scan(2, 9, Order::Descending, 2), [8, 7]);
    assert!(scan(5, 2, Order::Ascending, 9).is_empty());
    assert!(scan(0, 9, Order::Ascending, 0).is_empty());
    clear(engine.as_ref());
}

pub(crate) fn a_transaction_sees_its_own_writes(open: Opener<'_>) {
    let engine = open();
    engine.transact(Durability::Relaxed, |txn| (0..8u8).try_for_each(|i| txn.put(&[b'x', i], &[i]))).unwrap();
    engine
        .transact(Durability::Relaxed, |txn| {
            assert_eq!(txn.get(&[b'x', 3])?, Some(vec![3]));
            txn.delete(&[b'x', 0])?;
            txn.delete(&[b'x', 1])?;
            txn.put(&[b'x', 2], &[20])?;
            txn.put(&[b'x', 9], &[9])?;
            txn.put(&[b'x', 2, 1], &[21])?;
            assert_eq!(txn.get(&[b'x', 0])?, None);
            assert_eq!(txn.get(&[b'x', 2])?, Some(vec![20]));
            let values =
                |pairs: Vec<(Vec<u8>, Vec<u8>)>| -> Vec<u8> { pairs.iter().map(|(_, v)| v[0]).collect() };
            assert_eq!(values(txn.scan(b"x", b"y", Order::Ascending, 3)?), [20, 21, 3]);
            assert_eq!(values(txn.scan(b"x", b"y", Order::Descending, 3)?), [9, 7, 6]);
            assert_eq!(values(txn.scan(b"x", b"y", Order::Ascending, 99)?), [20, 21, 3, 4, 5, 6, 7, 9]);
            Ok(())
        })
        .unwrap();
    clear(engine.as_ref());
}

/// Threads of several processes increment one shared key, and one key per thread.
pub(crate) fn counts_add_up(open: Opener<'_>) {
    const ROUNDS: u64 = 60;
    let engines = [open(), open()];
    std::thread::scope(|scope| {
        for (process, engine) in engines.iter().enumerate() {
            for thread in 0..3 {
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        engine
                            .transact(Durability::Relaxed, |txn| {
                                for key in [b"x".to_vec(), format!("x{process}-{thread}").into_bytes()] {
                                    let next = number(txn.get(&key)?) + 1;
                                    txn.put(&key, &next.to_be_bytes())?;
                                }
                                Ok(())
                            })
                            .unwrap();
                    }
                });
            }
        }
    });
    let all = everything(engines[0].as_ref());
    assert_eq!(all.len(), 7);
    assert_eq!(number(Some(all[0].1.clone())), 6 * ROUNDS);
    assert!(all[1..].iter().all(|(_, value)| number(Some(value.clone())) == ROUNDS));
    clear(engines[0].as_ref());
}

/// Each transaction takes the number after the last one in the range; no number may be taken twice.
pub(crate) fn ranges_are_guarded(open: Opener<'_>) {
    const ROUNDS: u8 = 20;
    let engines = [open(), open()];
    std::thread::scope(|scope| {
        for engine in &engines {
            for _ in 0..2 {
                scope.spawn(move || {
                    for _ in 0..ROUNDS {
                        engine
                            .transact(Durability::Relaxed, |txn| {
                                let last = txn.scan(b"x", b"y", Order::Descending, 1)?.pop();
                                let next = last.map_or(0, |(key, _)| key[1] + 1);
                                txn.put(&[b'x', next], b"")
                            })
                            .unwrap();
                    }
                });
            }
        }
    });
    assert_eq!(everything(engines[1].as_ref()).len(), usize::from(4 * ROUNDS));
    clear(engines[0].as_ref());
}

/// Money moves between accounts; no reader ever sees a wrong sum.
pub(crate) fn reads_are_of_one_moment(open: Opener<'_>) {
    const ACCOUNTS: u8 = 6;
    let engines = [open(), open(), open()];
    engines[0]
        .transact(Durability::Relaxed, |txn| {
            (0..ACCOUNTS).try_for_each(|i| txn.put(&[b'x', i], &100u64.to_be_bytes()))
        })
        .unwrap();
    engines.iter().for_each(|engine| engine.barrier().unwrap());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = engines[..2]
            .iter()
            .enumerate()
            .map(|(seed, engine)| {
                scope.spawn(move || {
                    let mut random = StdRng::seed_from_u64(seed as u64);
                    for _ in 0..60 {
                        let (from, to) = (random.random_range(0..ACCOUNTS), random.random_range(0..ACCOUNTS));
                        if from == to {
                            continue;
                        }
                        engine
                            .transact(Durability::Relaxed, |txn| {
                                let (a, b) = (number(txn.get(&[b'x', from])?), number(txn.get(&[b'x', to])?));
                                if a == 0 {
                                    return Ok(());
                                }
                                txn.put(&[b'x', from], &(a - 1).to_be_bytes())?;
                                txn.put(&[b'x', to], &(b + 1).to_be_bytes())
                            })
                            .unwrap();
                    }
                })
            })
            .collect();
        for engine in &engines[1..] {
            let done = &done;
            scope.spawn(move || {
                while !done.load(Ordering::Acquire) {
                    let by_key = engine
                        .view(|txn| {
                            (0..ACCOUNTS).map(|i| Ok(number(txn.get(&[b'x', i])?))).sum::<Result<u64>>()
                        })
                        .unwrap();
                    assert_eq!(by_key, 100 * u64::from(ACCOUNTS));
                    let mixed = engine
                        .view(|txn| {
                            let first = number(txn.get(&[b'x', 0])?);
                            let rest = txn.scan(&[b'x', 1], b"y", Order::Ascending, 99)?;
                            Ok(first + rest.into_iter().map(|(_, value)| number(Some(value))).sum::<u64>())
                        })
                        .unwrap();
                    assert_eq!(mixed, 100 * u64::from(ACCOUNTS));
                }
            });
        }
        let ended: Vec<_> = writers.into_iter().map(std::thread::ScopedJoinHandle::join).collect();
        done.store(true, Ordering::Release);
        ended.into_iter().for_each(|end| end.unwrap());
    });
    clear(engines[0].as_ref());
}

/// Compares random transactions of two processes, one after the other, with a map in memory.
pub(crate) fn random_transactions_match_a_model(open: Opener<'_>, seed: u64) {
    let engines = [open(), open()];
    let mut random = StdRng::seed_from_u64(seed);
    let mut model = BTreeMap::<Vec<u8>, Vec<u8>>::new();
    for round in 0..150u32 {
        let engine = &engines[random.random_range(0..2)];
        engine.barrier().unwrap();
        let fails = random.random_ratio(1, 5);
        let durability = if random.random_ratio(1, 8) { Durability::Durable } else { Durability::Relaxed };
        let plan: Vec<(u8, Vec<u8>)> = (0..random.random_range(1..8))
            .map(|_| (random.random_range(0..5), vec![b'x', random.random_range(0..20u8)]))
            .collect();
        let mut after = model.clone();
        let result = engine.transact(durability, |txn| {
            after = model.clone();
            for (what, key) in &plan {
                match what {
                    0 | 1 => {
                        let value = [round.to_be_bytes().as_slice(), key].concat();
                        txn.put(key, &value)?;
                        after.insert(key.clone(), value);
                    }
                    2 => {
                        txn.delete(key)?;
                        after.remove(key);
                    }
                    3 => assert_eq!(txn.get(key)?.as_ref(), after.get(key)),
                    _ => {
                        let limit = usize::from(key[1] % 5) + 1;
                        let expected: Vec<_> = after
                            .range(key.clone()..)
                            .take(limit)
                            .map(|(k, v)| (k.clone(), v.clone()))
                            .collect();
                        assert_eq!(txn.scan(key, b"y", Order::Ascending, limit)?, expected);
                        let expected: Vec<_> = after
                            .range(..key.clone())
                            .rev()
                            .take(limit)
                            .map(|(k, v)| (k.clone(), v.clone()))
                            .collect();
                        assert_eq!(txn.scan(b"x", key, Order::Descending, limit)?, expected);
                    }
                }
            }
            if fails { Err(Error::Unsupported("this")) } else { Ok(()) }
        });
        match result {
            Ok(()) => model = after,
            Err(Error::Unsupported(_)) if fails => {}
            Err(error) => panic!("{error:?}"),
        }
        let expected: Vec<_> = model.iter().map(|(k, v)| (k.clone(), v.clone())).collect();
        assert_eq!(everything(engines[random.random_range(0..2)].as_ref()), expected);
    }
    clear(engines[0].as_ref());
}

pub(crate) fn a_barrier_shows_what_others_committed(open: Opener<'_>) {
    let [writer, reader] = [open(), open()];
    for round in 1..40u64 {
        let key = [b'x', (round % 3) as u8];
        reader.view(|txn| txn.get(&key)).unwrap();
        writer.transact(Durability::Relaxed, |txn| txn.put(&key, &round.to_be_bytes())).unwrap();
        reader.barrier().unwrap();
        assert_eq!(number(reader.view(|txn| txn.get(&key)).unwrap()), round);
    }
    clear(writer.as_ref());
}

/// A listener learns of another process's commit soon, and what it then reads is not older than that commit.
/// For engines that support [`Engine::on_change`].
pub(crate) fn listeners_hear_of_others(open: Opener<'_>) {
    let key = super::keys::live(7, b"heard");
    let writer = open();
    let reader = Arc::new(open());
    let seen = Arc::new(AtomicU64::new(0));
    let told = Arc::new(Mutex::new(Vec::new()));
    let subscription = reader
        .on_change({
            let (reader, seen, told) = (Arc::downgrade(&reader), Arc::clone(&seen), Arc::clone(&told));
            let key = key.clone();
            Box::new(move |changed| {
                told.lock().push(changed.clone());
                if let Some(reader) = reader.upgrade() {
                    seen.store(number(reader.view(|txn| txn.get(&key)).unwrap()), Ordering::Release);
                }
            })
        })
        .unwrap();
    for round in 1..=10u64 {
        writer.transact(Durability::Relaxed, |txn| txn.put(&key, &round.to_be_bytes())).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while seen.load(Ordering::Acquire) < round {
            assert!(Instant::now() < deadline, "commit {round} was not heard of");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    // From the first commit on, each is told by its record: only then can a mount revoke names.
    let record = (7, b"heard".to_vec());
    for changed in told.lock().iter() {
        assert!(!changed.anything && changed.records.iter().all(|told| *told == record), "{changed:?}");
    }
    assert!(!told.lock().is_empty());
    drop(subscription);
    writer.transact(Durability::Relaxed, |txn| txn.delete(&key)).unwrap();
}

pub(crate) fn large_transactions_and_values(open: Opener<'_>) {
    let [writer, reader] = [open(), open()];
    let value = vec![7; 300_000];
    writer
        .transact(Durability::Durable, |txn| {
            txn.put(b"x", &value)?;
            (0..3_000u32).try_for_each(|i| txn.put(&[b"x".as_slice(), &i.to_be_bytes()].concat(), b"small"))
        })
        .unwrap();
    assert_eq!(everything(reader.as_ref()).len(), 3_001);
    assert_eq!(reader.view(|txn| txn.get(b"x")).unwrap().unwrap(), value);
    clear(writer.as_ref());
}
