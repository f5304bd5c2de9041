#![allow(clippy::unwrap_used)]

use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn work(rows: usize, width: i64, outputs: &[usize], at: u64) -> Work {
    let count = rows.max(1) * width as usize;
    let input = Tensor::fp32("x", vec![rows.max(1) as i64, width], vec![0.0; count]).unwrap();
    let begin = *BEGIN;
    Work { inputs: vec![input], outputs: outputs.to_vec(), rows, queued: begin + Duration::from_micros(at) }
}

static BEGIN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

fn sizes(rows_max: usize, preferred: &[usize]) -> Sizes {
    Sizes { rows_max, preferred: preferred.to_vec() }
}

/// The line, what was put in, and those who wait.
fn line(jobs: Vec<Work>) -> (Line, Vec<oneshot::Receiver<Turn>>) {
    let mut line = Line::default();
    let turns = jobs
        .into_iter()
        .map(|work| {
            let (job, turn) = Job::new(work);
            line.push(job);
            turn
        })
        .collect();
    (line, turns)
}

fn queued(jobs: &[Job]) -> Vec<u128> {
    jobs.iter().map(|job| job.work.queued.duration_since(*BEGIN).as_micros()).collect()
}

#[test]
fn only_rows_of_the_same_shapes_for_the_same_outputs_run_together() {
    let (mut line, _turns) = line(vec![
        work(1, 4, &[0], 1),
        work(1, 5, &[0], 2),
        work(2, 4, &[0], 3),
        work(1, 4, &[0, 1], 4),
        work(0, 4, &[0], 5),
        work(1, 4, &[0], 6),
    ]);
    let first = line.next().unwrap();
    let taken = line.take_like(&first.work, &sizes(16, &[]));
    assert_eq!(queued(&taken), [3, 6]);
    // The others keep their order.
    let rest: Vec<Job> = std::iter::from_fn(|| line.next()).collect();
    assert_eq!(queued(&rest), [2, 4, 5]);
    assert_eq!(line.bytes(), 0);
}

#[test]
fn a_request_without_rows_takes_nobody_along() {
    let (mut line, _turns) = line(vec![work(0, 4, &[0], 1), work(0, 4, &[0], 2)]);
    let first = line.next().unwrap();
    assert!(line.take_like(&first.work, &sizes(16, &[])).is_empty());
    assert_eq!(line.len(), 1);
}

#[test]
fn a_preferred_size_is_kept_to_where_it_is_reached() {
    let jobs = || (0..7).map(|i| work(1, 4, &[0], i)).collect();
    let taken = |preferred: &[usize], rows_max| {
        let (mut line, _turns) = line(jobs());
        let first = line.next().unwrap();
        let taken = line.take_like(&first.work, &sizes(rows_max, preferred)).len() + 1;
        let rest: Vec<Job> = std::iter::from_fn(|| line.next()).collect();
        assert_eq!(queued(&rest), (taken as u128..7).collect::<Vec<_>>());
        taken
    };
    assert_eq!(taken(&[2, 4], 16), 4);
    assert_eq!(taken(&[8], 16), 7, "none is reached");
    assert_eq!(taken(&[], 5), 5);
    assert_eq!(taken(&[], 1), 1);
}

#[test]
fn who_has_gone_is_not_served() {
    let (mut line, mut turns) = line((0..4).map(|i| work(1, 4, &[0], i)).collect());
    drop(turns.remove(0));
    drop(turns.remove(1));
    assert_eq!(line.rows_like(&work(1, 4, &[0], 9), 100), 3);
    let first = line.next().unwrap();
    assert_eq!(queued(&[first]), [1]);
    line.purge();
    assert_eq!((line.len(), line.bytes()), (1, 16));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Nobody is lost or served twice, no run is too large, and of those that are alike the older ones
    /// run first.
    #[test]
    fn all_are_served_once_and_in_order(
        jobs in proptest::collection::vec((0usize..4, 4i64..6, any::<bool>(), any::<bool>()), 0..40),
        rows_max in 1usize..9,
        preferred in proptest::collection::vec(1usize..9, 0..3),
    ) {
        let works = jobs.iter().enumerate().map(|(at, (rows, width, both, _))| {
            work(*rows, *width, if *both { &[0, 1] } else { &[0] }, at as u64)
        });
        let (mut line, turns) = line(works.collect());
        let mut expected: Vec<u128> = Vec::new();
        let mut waiting = Vec::new();
        for (at, turn) in turns.into_iter().enumerate() {
            if jobs[at].3 { drop(turn); } else { expected.push(at as u128); waiting.push(turn); }
        }
        let sizes = sizes(rows_max, &preferred);
        let mut served = Vec::new();
        while let Some(first) = line.next() {
            let taken = line.take_like(&first.work, &sizes);
            let rows: usize = first.work.rows + taken.iter().map(|job| job.work.rows).sum::<usize>();
            prop_assert!(taken.is_empty() || rows <= rows_max);
            prop_assert!(taken.iter().all(|job| first.work.is_like(&job.work)));
            let mut run = queued(&[first]);
            run.extend(queued(&taken));
            prop_assert!(run.is_sorted());
            served.extend(run);
        }
        served.sort_unstable();
        prop_assert_eq!(served, expected);
        prop_assert_eq!((line.len(), line.bytes()), (0, 0));
    }
}
