//! Tests of sums in buckets: equal bits at any timing, earlier passes, rings that break between two buckets.

use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::{Arc, Barrier, Mutex};

use tokio_util::sync::CancellationToken;

use super::*;
use crate::collective::{Collective, Error, Formation, Options};
use crate::engine::{Device, Engine, Labels, Loss, ShardBatch, ShardGradients, ShardKey};
use crate::probe::numbers;

const INPUTS: usize = 20;
const CLASSES: usize = 10;
const STEP: u64 = 3;

/// Runs `work` on every rank, each on its own thread, with its endpoint and all addresses; results in rank order.
fn on_ranks<T: Send>(world: usize, work: impl Fn(usize, &Collective, &[String]) -> T + Sync) -> Vec<T> {
    let options = Options {
        form_timeout: Duration::from_secs(20),
        exchange_timeout: Duration::from_secs(20),
        // Several frames for each bucket.
        bucket_elements_max: 100,
        doubling_bytes_max: 0,
        ..Options::new("a secret")
    };
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let bound: Vec<Collective> =
        (0..world).map(|_| Collective::bind(local, options.clone()).unwrap()).collect();
    let addresses: Vec<String> = bound.iter().map(|member| member.address().to_string()).collect();
    thread::scope(|scope| {
        let start = |(rank, collective): (usize, Collective)| {
            let (work, addresses) = (&work, &addresses);
            scope.spawn(move || work(rank, &collective, addresses))
        };
        let ranks: Vec<_> = bound.into_iter().enumerate().map(start).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn ring<'a>(
    collective: &'a Collective,
    (epoch, rank): (u64, usize),
    addresses: &[String],
    abort: &CancellationToken,
) -> Ring<'a> {
    let formation = Formation { epoch, rank, addresses: addresses.to_vec() };
    collective.form(&formation, abort.clone()).unwrap()
}

fn engine() -> Engine {
    let model = crate::init::mlp(INPUTS, &[30, 25], CLASSES, 1).unwrap();
    Engine::load(&model, Loss::CrossEntropy, Device::Cpu).unwrap()
}

/// One bucket for each layer of [`engine`].
fn layers(engine: &Engine) -> Buckets {
    let buckets = Buckets::with_limits(engine.graph(), [260, 775], |_| true);
    assert_eq!(buckets.count(), 3);
    buckets
}

/// The rows of a rank, which depend on `seed`.
fn rows(rank: usize, seed: u64) -> ShardBatch {
    let rows = 12;
    let labels = (0..rows).map(|row| ((row * 7 + rank) % CLASSES) as i64).collect();
    ShardBatch { rows, inputs: numbers(rows * INPUTS, seed + rank as u64), labels: Labels::Class(labels) }
}

fn whole(engine: &Engine, rank: usize, seed: u64) -> Vec<f32> {
    engine.gradients(&rows(rank, seed)).unwrap().grad
}

/// Computes the rows of a rank and sums the gradient meanwhile. `before` runs at the beginning, `after` when all buckets
/// have left.
fn overlapped(
    engine: &Engine,
    allreduce: &mut Allreduce,
    rank: usize,
    ring: &mut Ring<'_>,
    [before, after]: [&dyn Fn(); 2],
) -> Result<ShardGradients, ReduceError> {
    let found = allreduce.overlap(STEP, ring, |buckets, hand_over| {
        before();
        let found = engine.gradients_in_buckets(&rows(rank, 1), ShardKey::default(), 1.0, buckets, hand_over);
        after();
        found
    });
    found.map(|(found, _)| found)
}

/// The sum: the mean for a weight of 1.
fn sum(allreduce: &mut Allreduce) -> Vec<f32> {
    let mut sum = Vec::new();
    allreduce.mean(1.0, &mut sum).unwrap();
    sum
}

fn nothing() {}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn added(left: &[f32], right: &[f32]) -> Vec<f32> {
    left.iter().zip(right).map(|(left, right)| left + right).collect()
}

#[test]
fn the_time_of_buckets_changes_no_bit_of_their_sum() {
    for world in [2, 3] {
        let wholes: Vec<Vec<f32>> = (0..world).map(|rank| whole(&engine(), rank, 1)).collect();
        // The late rank begins when all others have computed; at last, none is late.
        let sums: Vec<Vec<Vec<f32>>> = (0..=world)
            .map(|late| {
                let barrier = Barrier::new(world);
                let wait = || {
                    barrier.wait();
                };
                on_ranks(world, |rank, collective, addresses| {
                    let engine = engine();
                    let mut allreduce = Allreduce::new(1, layers(&engine));
                    let mut ring = ring(collective, (1, rank), addresses, &CancellationToken::new());
                    allreduce.clear(engine.layout().elements());
                    let when: [&dyn Fn(); 2] = if late == world {
                        [&nothing, &nothing]
                    } else if late == rank {
                        [&wait, &nothing]
                    } else {
                        [&nothing, &wait]
                    };
                    let found = overlapped(&engine, &mut allreduce, rank, &mut ring, when).unwrap();
                    assert!(found.grad.is_empty() && found.weight == 12.0);
                    sum(&mut allreduce)
                })
            })
            .collect();
        for found in sums.iter().flatten() {
            assert_eq!(bits(found), bits(&sums[0][0]), "{world} ranks");
        }
        for (at, found) in sums[0][0].iter().enumerate() {
            let exact: f64 = wholes.iter().map(|whole| f64::from(whole[at])).sum();
            assert!((f64::from(*found) - exact).abs() <= 1e-5 * (1.0 + exact.abs()), "{found}, {exact}");
        }
        if world == 2 {
            assert_eq!(bits(&sums[0][0]), bits(&added(&wholes[0], &wholes[1])));
        }
    }
}

#[test]
fn one_bucket_earlier_passes_and_frozen_parameters_add_up() {
    let frozen = engine().layout().params[2].range.clone();
    let all = |_: &Range<usize>| true;
    let some = |range: &Range<usize>| *range != frozen;
    let elements = engine().layout().elements();
    let expected: Vec<Vec<f32>> =
        (0..2).map(|rank| added(&whole(&engine(), rank, 1), &whole(&engine(), rank, 50))).collect();
    let mut expected = added(&expected[0], &expected[1]);
    // The whole model fits into the first bucket of the default size.
    for is_whole in [true, false] {
        let results = on_ranks(2, |rank, collective, addresses| {
            let engine = engine();
            let buckets = match is_whole {
                true => Buckets::new(engine.graph(), all),
                false => Buckets::with_limits(engine.graph(), [1, 1], some),
            };
            assert_eq!(buckets.count() == 1, is_whole);
            let mut allreduce = Allreduce::new(2, buckets);
            let mut ring = ring(collective, (1, rank), addresses, &CancellationToken::new());
            allreduce.clear(elements);
            let mut first = engine.gradients(&rows(rank, 50)).unwrap();
            if !is_whole {
                first.grad[frozen.clone()].fill(0.0);
            }
            allreduce.add(rank, first).unwrap();
            overlapped(&engine, &mut allreduce, rank, &mut ring, [&nothing, &nothing]).unwrap();
            sum(&mut allreduce)
        });
        if !is_whole {
            expected[frozen.clone()].fill(0.0);
        }
        for found in results {
            assert_eq!(bits(&found), bits(&expected), "whole: {is_whole}");
        }
    }
}

fn hand_over_ones(buckets: &Buckets, hand_over: &mut BucketFn<'_, f32>) -> Result<(), EngineError> {
    buckets.iter().try_for_each(|bucket| hand_over(vec![1.0; bucket.elements()]))
}

/// Goes on behind the last bucket until the sum has failed.
fn until_refused<T>(hand_over: &mut BucketFn<'_, f32>) -> Result<T, EngineError> {
    loop {
        hand_over(Vec::new())?;
        thread::yield_now();
    }
}

#[test]
fn a_peer_that_dies_between_two_buckets_leaves_nothing_of_the_step() {
    let results = on_ranks(3, |rank, collective, addresses| {
        let engine = engine();
        let mut allreduce = Allreduce::new(1, layers(&engine));
        let mut broken = ring(collective, (1, rank), addresses, &CancellationToken::new());
        allreduce.clear(engine.layout().elements());
        let outcome = allreduce.overlap::<()>(STEP, &mut broken, |buckets, hand_over| {
            let mut left = 0;
            let key = ShardKey::default();
            engine.gradients_in_buckets(&rows(rank, 1), key, 1.0, buckets, &mut |values| {
                left += 1;
                if rank == 2 && left == 2 {
                    let reason = "killed".to_owned();
                    return Err(EngineError::Execution { device: Device::Cpu, reason });
                }
                hand_over(values)
            })?;
            until_refused(hand_over)
        });
        drop(broken);
        match outcome {
            Err(ReduceError::Engine(EngineError::Execution { .. })) if rank == 2 => return None,
            Err(ReduceError::Collective(error)) if rank < 2 => {
                assert_eq!(error.suspect(), Some(2), "{error}");
                assert!(error.is_retryable(), "{error}");
            }
            other => panic!("rank {rank}: {other:?}"),
        }
        // The others repeat the step in the next ring.
        let mut next = ring(collective, (2, rank), &addresses[..2], &CancellationToken::new());
        allreduce.clear(engine.layout().elements());
        overlapped(&engine, &mut allreduce, rank, &mut next, [&nothing, &nothing]).unwrap();
        Some(sum(&mut allreduce))
    });
    let expected = added(&whole(&engine(), 0, 1), &whole(&engine(), 1, 1));
    let expected = Some(bits(&expected));
    let found: Vec<_> = results.iter().map(|sum| sum.as_deref().map(bits)).collect();
    assert_eq!(found, [expected.clone(), expected, None]);
}

#[test]
fn the_end_of_the_membership_epoch_ends_the_computation() {
    let done = Barrier::new(2);
    let aborted = on_ranks(2, |rank, collective, addresses| {
        let engine = engine();
        let mut allreduce = Allreduce::new(1, layers(&engine));
        let abort = CancellationToken::new();
        let mut ring = ring(collective, (1, rank), addresses, &abort);
        let outcome = (rank == 0).then(|| {
            // The other rank is silent: the first sum waits for it.
            allreduce.overlap::<()>(STEP, &mut ring, |buckets, hand_over| {
                hand_over_ones(buckets, hand_over)?;
                abort.cancel();
                until_refused(hand_over)
            })
        });
        done.wait();
        matches!(outcome, Some(Err(ReduceError::Collective(Error::Aborted { epoch: 1 }))))
    });
    assert_eq!(aborted, [true, false]);
}

/// Links that double a bucket, as a second rank with the same gradient, up to bucket `last`. They note their calls.
struct Doubling {
    last: usize,
    calls: Arc<Mutex<Vec<(u64, usize)>>>,
}

impl GradientLinks for Doubling {
    fn sum_bucket(&mut self, step: u64, bucket: usize, values: &mut [f32]) -> Result<(), Error> {
        self.calls.lock().unwrap().push((step, bucket));
        if bucket > self.last {
            let what = format!("sum bucket {bucket} of step {step}");
            return Err(Error::Nccl { epoch: 1, what, reason: "no answer".to_owned() });
        }
        values.iter_mut().for_each(|value| *value += *value);
        Ok(())
    }
}

#[test]
fn connected_links_sum_the_buckets_in_place_of_the_ring() {
    let own = whole(&engine(), 0, 1);
    for last in [2, 0] {
        let calls = Arc::new(Mutex::new(Vec::new()));
        let outcomes = on_ranks(1, |rank, collective, addresses| {
            let engine = engine();
            let mut allreduce = Allreduce::new(1, layers(&engine));
            allreduce.connect(Some(Box::new(Doubling { last, calls: Arc::clone(&calls) })));
            let mut ring = ring(collective, (1, rank), addresses, &CancellationToken::new());
            allreduce.clear(engine.layout().elements());
            match overlapped(&engine, &mut allreduce, rank, &mut ring, [&nothing, &nothing]) {
                Ok(_) => Ok(sum(&mut allreduce)),
                Err(ReduceError::Collective(error)) if error.is_retryable() => Err(error.to_string()),
                Err(other) => panic!("{other}"),
            }
        });
        match &outcomes[0] {
            Ok(sum) => assert_eq!((last, bits(sum)), (2, bits(&added(&own, &own)))),
            Err(error) => assert!(last == 0 && error.contains("bucket 1 of step 3"), "{error}"),
        }
        let expected: Vec<(u64, usize)> = (0..=(last + 1).min(2)).map(|bucket| (STEP, bucket)).collect();
        assert_eq!(*calls.lock().unwrap(), expected);
    }
}

#[test]
fn a_computation_that_panics_ends_its_sum() {
    let results = on_ranks(2, |rank, collective, addresses| {
        let engine = engine();
        let mut allreduce = Allreduce::new(1, layers(&engine));
        let mut ring = ring(collective, (1, rank), addresses, &CancellationToken::new());
        let work = std::panic::AssertUnwindSafe(|| {
            allreduce.overlap::<()>(STEP, &mut ring, |buckets, hand_over| {
                assert!(rank != 0, "a defect");
                hand_over_ones(buckets, hand_over)?;
                until_refused(hand_over)
            })
        });
        let outcome = std::panic::catch_unwind(work);
        drop(ring);
        outcome.map(|outcome| matches!(outcome, Err(ReduceError::Collective(_)))).ok()
    });
    assert_eq!(results, [None, Some(true)]);
}

#[test]
fn division_takes_any_weight_and_names_what_is_not_finite() {
    let mut sum = [3.0, -0.5e-38, 3e38];
    divide(&mut sum, 2.0).unwrap();
    assert_eq!(sum, [1.5, -0.25e-38, 1.5e38]);
    // A reciprocal beyond f32.
    let mut sum = [1e-30, 0.0];
    divide(&mut sum, 1e-45).unwrap();
    assert_eq!(sum, [(f64::from(1e-30f32) * 1e45) as f32, 0.0]);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let error = divide(&mut [1.0, value, f32::NAN], 1.0).unwrap_err();
        assert!(matches!(error, FixedError::NonFinite { index: 1, .. }), "{error}");
    }
}
