//! Tests of the request queue: order of service, batches, limits.
use std::time::Duration;

use proptest::prelude::*;

use super::super::work::tests::{BEGIN, client, work};
use super::*;

const UNLIMITED: QueueLimits = QueueLimits { requests_max: usize::MAX, bytes_max: usize::MAX };

/// A request of a client, with four bytes for each row.
fn of(number: u16, rows: usize, at: u64) -> Work {
    Work { client: client(number), ..work(rows, 1, &[0], at) }
}

/// A queue of waiting requests, with their positions.
fn queue(works: Vec<Work>) -> (RequestQueue, Vec<Position>) {
    let mut queue = RequestQueue::default();
    let push = |work| {
        let (position, displaced) = queue.push(Job::new(work, true).0, UNLIMITED).unwrap();
        assert!(displaced.is_empty());
        position
    };
    let positions = works.into_iter().map(push).collect();
    (queue, positions)
}

/// Takes a batch of at most `rows_max` rows with `first`; no request has a deadline.
fn take_like(queue: &mut RequestQueue, first: &Job, rows_max: usize, preferred: &[usize]) -> Vec<Job> {
    queue.take_like(&first.work, rows_max, preferred, *BEGIN)
}

fn at(job: &Job) -> u128 {
    job.work.queued.duration_since(*BEGIN).as_micros()
}

fn all_at(jobs: &[Job]) -> Vec<u128> {
    jobs.iter().map(at).collect()
}

/// The order in which the queue is served; empties the queue.
fn order(mut queue: RequestQueue) -> Vec<u128> {
    let served: Vec<Job> = std::iter::from_fn(|| queue.pop()).collect();
    assert_eq!((queue.waiting(), queue.bytes(), queue.rows(), queue.backlogs.len()), (0, 0, 0, 0));
    all_at(&served)
}

/// Pushes a waiting request; returns the requests that it displaces, or the request when it is refused.
fn push(queue: &mut RequestQueue, work: Work, limits: QueueLimits) -> Result<Vec<u128>, u128> {
    let pushed = queue.push(Job::new(work, true).0, limits);
    pushed.map(|(_, displaced)| all_at(&displaced)).map_err(|job| at(&job))
}

#[test]
fn batch_takes_rows_of_the_same_shapes_for_the_same_outputs_only() {
    let (mut queue, _) = queue(vec![
        work(1, 4, &[0], 1),
        work(1, 5, &[0], 2),
        work(2, 4, &[0], 3),
        work(1, 4, &[0, 1], 4),
        work(0, 4, &[0], 5),
        work(1, 4, &[0], 6),
    ]);
    let first = queue.pop().unwrap();
    let taken = take_like(&mut queue, &first, 16, &[]);
    assert_eq!(all_at(&taken), [3, 6]);
    // The others keep their order.
    assert_eq!(order(queue), [2, 4, 5]);
}

#[test]
fn request_without_rows_is_not_batched() {
    let (mut queue, _) = queue(vec![work(0, 4, &[0], 1), work(0, 4, &[0], 2)]);
    let first = queue.pop().unwrap();
    assert!(take_like(&mut queue, &first, 16, &[]).is_empty());
    assert_eq!(queue.len(), 1);
}

#[test]
fn batch_stops_at_the_largest_preferred_size_it_reaches() {
    let taken = |preferred: &[usize], rows_max| {
        let (mut queue, _) = queue((0..7).map(|i| work(1, 4, &[0], i)).collect());
        let first = queue.pop().unwrap();
        let taken = take_like(&mut queue, &first, rows_max, preferred).len() + 1;
        assert_eq!(order(queue), (taken as u128..7).collect::<Vec<_>>());
        taken
    };
    assert_eq!(taken(&[2, 4], 16), 4);
    assert_eq!(taken(&[8], 16), 7, "none is reached");
    assert_eq!(taken(&[], 5), 5);
    assert_eq!(taken(&[], 1), 1);
}

#[test]
fn removed_request_is_not_counted() {
    let (mut queue, positions) = queue((0..4).map(|i| work(1, 4, &[0], i)).collect());
    assert_eq!(at(&queue.remove(positions[1]).unwrap()), 1);
    assert!(queue.remove(positions[1]).is_none());
    assert_eq!((queue.len(), queue.bytes()), (3, 48));
    assert_eq!(queue.rows_like(&work(1, 4, &[0], 9), 100), 3);
    assert_eq!(queue.rows_like(&work(1, 4, &[0], 9), 2), 2);
    assert_eq!(order(queue), [0, 2, 3]);
}

#[test]
fn late_request_is_neither_next_nor_batched() {
    let with = |deadline, at| Work { deadline: Some(deadline), ..work(1, 4, &[0], at) };
    let (past, future) = (*BEGIN, Instant::now() + Duration::from_secs(3600));
    let (mut queue, _) =
        queue(vec![with(past, 0), with(future, 1), with(past, 2), work(1, 4, &[0], 3), with(past, 4)]);
    let (mut late, now) = (Vec::new(), Instant::now());
    queue.expire(now, &mut late);
    let first = queue.pop().unwrap();
    assert_eq!((at(&first), all_at(&late)), (1, vec![0]));
    let taken = queue.take_like(&first.work, 16, &[], now);
    assert_eq!(all_at(&taken), [3]);
    queue.expire(now, &mut late);
    assert!(queue.pop().is_none());
    assert_eq!(all_at(&late), [0, 2, 4]);
    assert_eq!((queue.len(), queue.bytes(), queue.backlogs.len()), (0, 0, 0));
}

#[test]
fn clients_take_turns_by_rows() {
    let mut jobs: Vec<Work> = (0..6).map(|at| of(1, 1, at)).collect();
    jobs.push(of(2, 3, 10));
    jobs.push(of(2, 1, 11));
    jobs.push(of(3, 1, 20));
    let (queue, _) = queue(jobs);
    // Client 2 has had three rows with its first request, and waits until client 1 has had as many.
    assert_eq!(order(queue), [0, 10, 20, 1, 2, 3, 11, 4, 5]);
}

#[test]
fn rows_before_a_new_request_are_counted_up_to_a_bound() {
    let (mut queue, positions) = queue((0..100).map(|at| of(1, 2, at)).collect());
    assert_eq!(queue.rows_before(&of(1, 1, 100)), 200);
    assert_eq!(queue.rows_before(&of(2, 1, 100)), 0, "too many to look at");
    for position in &positions[40..] {
        queue.remove(*position).unwrap();
    }
    assert_eq!(queue.rows_before(&of(2, 1, 100)), 2, "the first one, which begins as early");
    assert_eq!(queue.rows_before(&Work { level: 0, ..of(2, 1, 100) }), 0);
    assert_eq!(queue.rows_before(&Work { level: 2, ..of(2, 1, 100) }), 80);
}

#[test]
fn higher_level_is_served_first_and_keeps_its_order() {
    let level = |level, number, at| Work { level, ..of(number, 1, at) };
    let (queue, _) =
        queue(vec![level(3, 1, 0), level(2, 1, 1), level(1, 1, 2), level(1, 1, 3), level(2, 2, 4)]);
    assert_eq!(order(queue), [2, 3, 1, 4, 0]);
}

#[test]
fn client_that_fills_the_queue_is_displaced_by_others() {
    let limits = QueueLimits { requests_max: 4, bytes_max: usize::MAX };
    let (mut queue, _) = queue((0..4).map(|at| of(1, 1, at)).collect());
    assert_eq!(push(&mut queue, of(1, 1, 4), limits), Err(4), "its own older requests come first");
    assert_eq!(push(&mut queue, of(2, 1, 10), limits), Ok(vec![3]));
    assert_eq!(push(&mut queue, of(2, 1, 11), limits), Ok(vec![2]));
    // Both clients have the same number waiting now.
    assert_eq!(push(&mut queue, of(2, 1, 12), limits), Err(12));
    assert_eq!(push(&mut queue, of(1, 1, 5), limits), Err(5));
    assert_eq!(push(&mut queue, of(3, 1, 20), limits), Ok(vec![11]));
    // A request of a higher level displaces one of the lowest.
    let urgent = Work { level: 0, ..of(1, 1, 30) };
    assert_eq!(push(&mut queue, urgent, limits), Ok(vec![1]));
    assert_eq!(order(queue), [30, 0, 10, 20]);
    let nowhere = QueueLimits { requests_max: 0, bytes_max: usize::MAX };
    assert_eq!(push(&mut RequestQueue::default(), of(1, 1, 0), nowhere), Err(0));
}

#[test]
fn request_that_found_a_session_does_not_count_towards_the_limits() {
    let limits = QueueLimits { requests_max: 1, bytes_max: 8 };
    let mut queue = RequestQueue::default();
    let mut push =
        |work, waits| queue.push(Job::new(work, waits).0, limits).map(|(_, displaced)| displaced.len());
    assert!(matches!(push(of(1, 9, 0), false), Ok(0)), "beyond both limits");
    assert!(matches!(push(of(1, 2, 1), true), Ok(0)), "the first that waits");
    assert!(push(of(1, 1, 2), true).is_err());
    // Only requests that wait are displaced.
    assert!(matches!(push(Work { level: 0, ..of(1, 1, 3) }, true), Ok(1)));
    assert!(push(Work { level: 0, ..of(2, 3, 4) }, true).is_err(), "too many bytes");
    assert_eq!((queue.len(), queue.waiting(), queue.bytes(), queue.rows()), (2, 1, 4, 10));
    assert_eq!(order(queue), [3, 0]);
}

#[test]
fn client_claims_bytes_of_others_up_to_its_share() {
    let limits = QueueLimits { requests_max: usize::MAX, bytes_max: 40 };
    // Ten rows fill the queue.
    let (mut queue, _) = queue((0..5).map(|at| of(1, 2, at)).collect());
    assert_eq!(queue.bytes(), 40);
    assert_eq!(push(&mut queue, of(2, 6, 10), limits), Err(10), "more than half");
    assert_eq!(push(&mut queue, of(2, 5, 11), limits), Ok(vec![4, 3, 2]));
    assert_eq!((queue.len(), queue.bytes()), (3, 36));
    assert_eq!(push(&mut queue, of(2, 11, 12), limits), Err(12), "more than there is");
    assert_eq!(push(&mut queue, of(1, 1, 13), limits), Ok(Vec::new()), "there is room");
    assert_eq!(order(queue), [0, 11, 1, 13]);
}

/// One step of a random test.
#[derive(Debug, Clone)]
enum Step {
    Come { client: u16, level: usize, rows: usize, width: i64, both: bool },
    Go { which: usize },
    Run,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let come = (1u16..4, 1usize..4, 0usize..4, 4i64..6, any::<bool>())
        .prop_map(|(client, level, rows, width, both)| Step::Come { client, level, rows, width, both });
    let go = (0usize..100).prop_map(|which| Step::Go { which });
    proptest::collection::vec(prop_oneof![4 => come, 1 => go, 2 => Just(Step::Run)], 0..80)
}

/// A queued request in the model.
#[derive(Debug, Clone, PartialEq)]
struct Plain {
    at: u64,
    /// Level and client.
    key: (usize, u16),
    start: u64,
    bytes: usize,
    rows: usize,
    like: (i64, bool),
}

/// Cost of requests.
fn cost(plain: &[Plain]) -> u64 {
    plain.iter().map(|other| other.rows.max(1) as u64).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Compares the queue with a model: a list that is sorted at every step.
    #[test]
    fn queue_agrees_with_a_list_sorted_at_every_step(
        steps in steps(),
        rows_max in 1usize..9,
        preferred in proptest::collection::vec(1usize..9, 0..3),
        requests_max in 1usize..12,
    ) {
        let limits = QueueLimits { requests_max, bytes_max: usize::MAX };
        let (mut queue, mut plain) = (RequestQueue::default(), Vec::<Plain>::new());
        let (mut positions, mut finishes) = (HashMap::new(), HashMap::<(usize, u16), u64>::new());
        let mut clocks = [0u64; 4];
        for (at, step) in steps.into_iter().enumerate() {
            let at = at as u64;
            match step {
                Step::Come { client: number, level, rows, width, both } => {
                    let key = (level, number);
                    let start = finishes.get(&key).copied().unwrap_or(0).max(clocks[level]);
                    let outputs: &[usize] = if both { &[0, 1] } else { &[0] };
                    let work = Work { level, client: client(number), ..work(rows, width, outputs, at) };
                    let bytes = work.bytes();
                    plain.push(Plain { at, key, start, bytes, rows, like: (width, both) });
                    plain.sort_by_key(|other| (other.key.0, other.start, other.at));
                    let left = (plain.len() > requests_max).then(|| plain.pop()).flatten();
                    if left.as_ref().is_none_or(|left| left.at != at) {
                        finishes.insert(key, start + rows.max(1) as u64);
                    }
                    match (queue.push(Job::new(work, true).0, limits), left) {
                        (Ok((position, displaced)), left) => {
                            positions.insert(at, position);
                            let left: Vec<u128> = left.iter().map(|left| left.at.into()).collect();
                            prop_assert_eq!(all_at(&displaced), left);
                        }
                        (Err(_), Some(left)) => prop_assert_eq!(left.at, at),
                        (Err(_), None) => prop_assert!(false, "refused where there is room"),
                    }
                }
                Step::Go { which } => if !plain.is_empty() {
                    let gone = plain.remove(which % plain.len());
                    let job = queue.remove(positions[&gone.at]);
                    prop_assert_eq!(job.map(|job| super::tests::at(&job)), Some(gone.at.into()));
                },
                Step::Run => {
                    let first = queue.pop();
                    prop_assert_eq!(first.is_some(), !plain.is_empty());
                    let Some(first) = first else { continue };
                    let lead = plain.remove(0);
                    prop_assert_eq!(super::tests::at(&first), u128::from(lead.at));
                    clocks[lead.key.0] = clocks[lead.key.0].max(lead.start);
                    let (mut rows, mut run, mut best) = (lead.rows, Vec::new(), None);
                    for other in &plain {
                        let fits = other.rows > 0 && other.like == lead.like && rows + other.rows <= rows_max;
                        if lead.rows > 0 && fits {
                            rows += other.rows;
                            run.push(u128::from(other.at));
                            if preferred.contains(&rows) {
                                best = Some(run.len());
                            }
                        }
                    }
                    run.truncate(best.unwrap_or(run.len()));
                    let taken = take_like(&mut queue, &first, rows_max, &preferred);
                    prop_assert_eq!(all_at(&taken), run.clone());
                    plain.retain(|other| !run.contains(&other.at.into()));
                }
            }
            // A client without queued requests starts at the level's clock again.
            finishes.retain(|key, _| plain.iter().any(|other| other.key == *key));
            prop_assert_eq!(queue.len(), plain.len());
            prop_assert_eq!(queue.bytes(), plain.iter().map(|other| other.bytes).sum::<usize>());
            prop_assert_eq!(queue.rows(), cost(&plain));
            for (level, number) in [(1, 1), (2, 3)] {
                let start = finishes.get(&(level, number)).copied().unwrap_or(0).max(clocks[level]);
                let before = plain.partition_point(|other| (other.key.0, other.start) <= (level, start));
                let next = Work { level, client: client(number), ..work(1, 4, &[0], 0) };
                prop_assert_eq!(queue.rows_before(&next), cost(&plain[..before]));
            }
        }
        let expected: Vec<u128> = plain.iter().map(|other| other.at.into()).collect();
        prop_assert_eq!(order(queue), expected);
    }

    /// Between two clients that always have requests queued, rows served differ by at most one request of each.
    #[test]
    fn no_client_gets_ahead_of_another(
        jobs in proptest::collection::vec((1u16..5, 1usize..9), 1..120),
    ) {
        let largest = |number: u16| {
            jobs.iter().filter(|(client, _)| *client == number).map(|(_, rows)| *rows).max().unwrap_or(0)
        };
        let works = jobs.iter().enumerate().map(|(at, (number, rows))| of(*number, *rows, at as u64));
        let (mut queue, _) = queue(works.collect());
        let mut served = [0usize; 5];
        let mut waiting = [0usize; 5];
        jobs.iter().for_each(|(number, _)| waiting[usize::from(*number)] += 1);
        while waiting.iter().filter(|waiting| **waiting > 0).count() > 1 {
            let job = queue.pop().unwrap();
            let number = usize::from(jobs[at(&job) as usize].0);
            served[number] += job.work.rows;
            waiting[number] -= 1;
            for a in 1..5u16 {
                for b in 1..5u16 {
                    let (i, j) = (usize::from(a), usize::from(b));
                    if waiting[i] > 0 && waiting[j] > 0 {
                        prop_assert!(served[i] <= served[j] + largest(a) + largest(b), "{served:?}");
                    }
                }
            }
        }
    }
}
