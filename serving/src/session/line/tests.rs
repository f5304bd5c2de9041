//! The line against its promises: who is next, who runs with whom, who gets a place.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use std::sync::LazyLock;

use super::*;
use crate::tensor::Tensor;

static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
const ROOMY: Room = Room { requests_max: usize::MAX, bytes_max: usize::MAX };

fn client(number: u16) -> Option<SocketAddr> {
    Some(SocketAddr::from(([127, 0, 0, 1], number)))
}

/// A request of client 1 that is known by `at`.
fn work(rows: usize, width: i64, outputs: &[usize], at: u64) -> Work {
    let count = rows.max(1) * width as usize;
    let input = Tensor::fp32("x", vec![rows.max(1) as i64, width], vec![0.0; count]).unwrap();
    Work {
        inputs: vec![Held::Alone(input)],
        outputs: outputs.to_vec(),
        stays: Vec::new(),
        rows,
        queued: *BEGIN + Duration::from_micros(at),
        deadline: None,
        answer_by: None,
        level: 1,
        client: client(1),
        beside: false,
    }
}

/// A request of a client; four bytes for each row.
fn of(number: u16, rows: usize, at: u64) -> Work {
    Work { client: client(number), ..work(rows, 1, &[0], at) }
}

fn sizes(rows_max: usize, preferred: &[usize]) -> Sizes {
    Sizes { rows_max, preferred: preferred.to_vec() }
}

/// The line, where they wait, and those who wait.
fn line(jobs: Vec<Work>) -> (Line, Vec<Place>, Vec<oneshot::Receiver<Turn>>) {
    let mut line = Line::default();
    let waiting = jobs.into_iter().map(|work| {
        let (job, turn) = Job::new(work);
        let (place, leaving) = line.admit(job, ROOMY).unwrap();
        assert!(leaving.is_empty());
        (place, turn)
    });
    let (places, turns) = waiting.unzip();
    (line, places, turns)
}

fn next(line: &mut Line) -> Option<Job> {
    let mut late = Vec::new();
    let next = line.next(&mut late);
    assert!(late.is_empty());
    next
}

fn at(job: &Job) -> u128 {
    job.work.queued.duration_since(*BEGIN).as_micros()
}

fn all_at(jobs: &[Job]) -> Vec<u128> {
    jobs.iter().map(at).collect()
}

fn rest(mut line: Line) -> Vec<u128> {
    let served: Vec<Job> = std::iter::from_fn(|| next(&mut line)).collect();
    assert_eq!((line.len(), line.bytes(), line.backlogs.len()), (0, 0, 0));
    all_at(&served)
}

/// The line with one more, and those who left for it; the one that was refused.
fn admit(line: &mut Line, work: Work, room: Room) -> Result<Vec<u128>, u128> {
    let (job, _) = Job::new(work);
    line.admit(job, room).map(|(_, leaving)| all_at(&leaving)).map_err(|job| at(&job))
}

#[test]
fn only_rows_of_the_same_shapes_for_the_same_outputs_run_together() {
    let (mut line, _, _turns) = line(vec![
        work(1, 4, &[0], 1),
        work(1, 5, &[0], 2),
        work(2, 4, &[0], 3),
        work(1, 4, &[0, 1], 4),
        work(0, 4, &[0], 5),
        work(1, 4, &[0], 6),
    ]);
    let first = next(&mut line).unwrap();
    let taken = line.take_like(&first.work, &sizes(16, &[]));
    assert_eq!(all_at(&taken), [3, 6]);
    // The others keep their order.
    assert_eq!(rest(line), [2, 4, 5]);
}

#[test]
fn a_request_without_rows_takes_nobody_along() {
    let (mut line, _, _turns) = line(vec![work(0, 4, &[0], 1), work(0, 4, &[0], 2)]);
    let first = next(&mut line).unwrap();
    assert!(line.take_like(&first.work, &sizes(16, &[])).is_empty());
    assert_eq!(line.len(), 1);
}

#[test]
fn a_preferred_size_is_kept_to_where_it_is_reached() {
    let taken = |preferred: &[usize], rows_max| {
        let (mut line, _, _turns) = line((0..7).map(|i| work(1, 4, &[0], i)).collect());
        let first = next(&mut line).unwrap();
        let taken = line.take_like(&first.work, &sizes(rows_max, preferred)).len() + 1;
        assert_eq!(rest(line), (taken as u128..7).collect::<Vec<_>>());
        taken
    };
    assert_eq!(taken(&[2, 4], 16), 4);
    assert_eq!(taken(&[8], 16), 7, "none is reached");
    assert_eq!(taken(&[], 5), 5);
    assert_eq!(taken(&[], 1), 1);
}

#[test]
fn who_has_gone_leaves_nothing_behind() {
    let (mut line, places, _turns) = line((0..4).map(|i| work(1, 4, &[0], i)).collect());
    assert_eq!(at(&line.remove(places[1]).unwrap()), 1);
    assert!(line.remove(places[1]).is_none());
    assert_eq!((line.len(), line.bytes()), (3, 48));
    assert_eq!(line.rows_like(&work(1, 4, &[0], 9), 100), 4);
    assert_eq!(line.rows_like(&work(1, 4, &[0], 9), 2), 2);
    assert_eq!(rest(line), [0, 2, 3]);
}

#[test]
fn who_is_late_is_neither_next_nor_taken_along() {
    let with = |deadline, at| Work { deadline: Some(deadline), ..work(1, 4, &[0], at) };
    let (past, future) = (*BEGIN, Instant::now() + Duration::from_secs(3600));
    let (mut line, _, _turns) =
        line(vec![with(past, 0), with(future, 1), with(past, 2), work(1, 4, &[0], 3), with(past, 4)]);
    let mut late = Vec::new();
    let first = line.next(&mut late).unwrap();
    assert_eq!((at(&first), all_at(&late)), (1, vec![0]));
    let taken = line.take_like(&first.work, &sizes(16, &[]));
    assert_eq!(all_at(&taken), [3]);
    assert!(line.next(&mut late).is_none());
    assert_eq!(all_at(&late), [0, 2, 4]);
    assert_eq!((line.len(), line.bytes(), line.backlogs.len()), (0, 0, 0));
}

#[test]
fn a_run_has_to_begin_while_its_answer_is_wanted() {
    let at = |millis| *BEGIN + Duration::from_millis(millis);
    for (deadline, answer_by, run, expected) in [
        (None, None, 5, None),
        (Some(30), None, 5, Some(30)),
        (None, Some(30), 5, Some(22)),
        (Some(20), Some(30), 5, Some(20)),
        (Some(30), Some(30), 5, Some(22)),
    ] {
        let (deadline, answer_by) = (deadline.map(at), answer_by.map(at));
        let mut work = Work { deadline, answer_by, ..work(1, 4, &[0], 0) };
        work.allow_for(Duration::from_millis(run));
        assert_eq!(work.deadline, expected.map(at));
    }
    let mut work = Work { answer_by: Some(*BEGIN), ..work(1, 4, &[0], 0) };
    work.allow_for(Duration::MAX);
    assert!(work.is_late());
}

#[test]
fn clients_take_turns_by_their_rows() {
    let mut jobs: Vec<Work> = (0..6).map(|at| of(1, 1, at)).collect();
    jobs.push(of(2, 3, 10));
    jobs.push(of(2, 1, 11));
    jobs.push(of(3, 1, 20));
    let (line, _, _turns) = line(jobs);
    // Client 2 has had three rows with its first request, and waits until the first one has, too.
    assert_eq!(rest(line), [0, 10, 20, 1, 2, 3, 11, 4, 5]);
}

#[test]
fn a_client_is_told_what_is_served_before_it_and_few_are_looked_at_for_that() {
    let (mut line, places, _turns) = line((0..100).map(|at| of(1, 2, at)).collect());
    assert_eq!(line.rows_before(&of(1, 1, 100)), 200);
    assert_eq!(line.rows_before(&of(2, 1, 100)), 0, "too many to look at");
    for place in &places[40..] {
        line.remove(*place).unwrap();
    }
    assert_eq!(line.rows_before(&of(2, 1, 100)), 2, "the first one, which begins as early");
    assert_eq!(line.rows_before(&Work { level: 0, ..of(2, 1, 100) }), 0);
    assert_eq!(line.rows_before(&Work { level: 2, ..of(2, 1, 100) }), 80);
}

#[test]
fn a_higher_level_is_served_first_and_keeps_its_own_order() {
    let level = |level, number, at| Work { level, ..of(number, 1, at) };
    let (line, _, _turns) =
        line(vec![level(3, 1, 0), level(2, 1, 1), level(1, 1, 2), level(1, 1, 3), level(2, 2, 4)]);
    assert_eq!(rest(line), [2, 3, 1, 4, 0]);
}

#[test]
fn who_floods_a_full_line_gives_way_to_the_others() {
    let room = Room { requests_max: 4, bytes_max: usize::MAX };
    let (mut line, _, _turns) = line((0..4).map(|at| of(1, 1, at)).collect());
    assert_eq!(admit(&mut line, of(1, 1, 4), room), Err(4), "his own come first");
    assert_eq!(admit(&mut line, of(2, 1, 10), room), Ok(vec![3]));
    assert_eq!(admit(&mut line, of(2, 1, 11), room), Ok(vec![2]));
    // Both have as much waiting now.
    assert_eq!(admit(&mut line, of(2, 1, 12), room), Err(12));
    assert_eq!(admit(&mut line, of(1, 1, 5), room), Err(5));
    assert_eq!(admit(&mut line, of(3, 1, 20), room), Ok(vec![11]));
    // A higher level takes its place from the lowest.
    let urgent = Work { level: 0, ..of(1, 1, 30) };
    assert_eq!(admit(&mut line, urgent, room), Ok(vec![1]));
    assert_eq!(rest(line), [30, 0, 10, 20]);
    let nowhere = Room { requests_max: 0, bytes_max: usize::MAX };
    assert_eq!(admit(&mut Line::default(), of(1, 1, 0), nowhere), Err(0));
}

#[test]
fn bytes_of_others_are_claimed_up_to_a_clients_share() {
    let room = Room { requests_max: usize::MAX, bytes_max: 40 };
    // Ten rows fill the line.
    let (mut line, _, _turns) = line((0..5).map(|at| of(1, 2, at)).collect());
    assert_eq!(line.bytes(), 40);
    assert_eq!(admit(&mut line, of(2, 6, 10), room), Err(10), "more than half");
    assert_eq!(admit(&mut line, of(2, 5, 11), room), Ok(vec![4, 3, 2]));
    assert_eq!((line.len(), line.bytes()), (3, 36));
    assert_eq!(admit(&mut line, of(2, 11, 12), room), Err(12), "more than there is");
    assert_eq!(admit(&mut line, of(1, 1, 13), room), Ok(Vec::new()), "there is room");
    assert_eq!(rest(line), [0, 11, 1, 13]);
}

/// What a random test does.
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

/// One that waits, as a list without any cleverness knows it.
#[derive(Debug, Clone, PartialEq)]
struct Plain {
    at: u64,
    /// Its level, and its client.
    key: (usize, u16),
    start: u64,
    bytes: usize,
    rows: usize,
    like: (i64, bool),
}

/// What some of them take of their clients' shares.
fn cost(plain: &[Plain]) -> u64 {
    plain.iter().map(|other| other.rows.max(1) as u64).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// The line does what a list does that is sorted at every step.
    #[test]
    fn a_list_that_is_sorted_anew_at_every_step_agrees(
        steps in steps(),
        rows_max in 1usize..9,
        preferred in proptest::collection::vec(1usize..9, 0..3),
        requests_max in 1usize..12,
    ) {
        let sizes = sizes(rows_max, &preferred);
        let room = Room { requests_max, bytes_max: usize::MAX };
        let (mut line, mut plain) = (Line::default(), Vec::<Plain>::new());
        let (mut places, mut finishes) = (HashMap::new(), HashMap::<(usize, u16), u64>::new());
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
                    let (job, _) = Job::new(work);
                    match (line.admit(job, room), left) {
                        (Ok((place, leaving)), left) => {
                            places.insert(at, place);
                            let left: Vec<u128> = left.iter().map(|left| left.at.into()).collect();
                            prop_assert_eq!(all_at(&leaving), left);
                        }
                        (Err(_), Some(left)) => prop_assert_eq!(left.at, at),
                        (Err(_), None) => prop_assert!(false, "refused where there is room"),
                    }
                }
                Step::Go { which } => if !plain.is_empty() {
                    let gone = plain.remove(which % plain.len());
                    let job = line.remove(places[&gone.at]);
                    prop_assert_eq!(job.map(|job| super::tests::at(&job)), Some(gone.at.into()));
                },
                Step::Run => {
                    let first = next(&mut line);
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
                    let taken = line.take_like(&first.work, &sizes);
                    prop_assert_eq!(all_at(&taken), run.clone());
                    plain.retain(|other| !run.contains(&other.at.into()));
                }
            }
            // Of whom nothing waits begins anew.
            finishes.retain(|key, _| plain.iter().any(|other| other.key == *key));
            prop_assert_eq!(line.len(), plain.len());
            prop_assert_eq!(line.bytes(), plain.iter().map(|other| other.bytes).sum::<usize>());
            prop_assert_eq!(line.rows(), cost(&plain));
            for (level, number) in [(1, 1), (2, 3)] {
                let start = finishes.get(&(level, number)).copied().unwrap_or(0).max(clocks[level]);
                let before = plain.partition_point(|other| (other.key.0, other.start) <= (level, start));
                let next = Work { level, client: client(number), ..work(1, 4, &[0], 0) };
                prop_assert_eq!(line.rows_before(&next), cost(&plain[..before]));
            }
        }
        let expected: Vec<u128> = plain.iter().map(|other| other.at.into()).collect();
        prop_assert_eq!(rest(line), expected);
    }

    /// Whoever waits all the time is served as many rows as any other client, but for one request of each.
    #[test]
    fn no_client_gets_ahead_of_another(
        jobs in proptest::collection::vec((1u16..5, 1usize..9), 1..120),
    ) {
        let largest = |number: u16| {
            jobs.iter().filter(|(client, _)| *client == number).map(|(_, rows)| *rows).max().unwrap_or(0)
        };
        let works = jobs.iter().enumerate().map(|(at, (number, rows))| of(*number, *rows, at as u64));
        let (mut line, _, _turns) = line(works.collect());
        let mut served = [0usize; 5];
        let mut waiting = [0usize; 5];
        jobs.iter().for_each(|(number, _)| waiting[usize::from(*number)] += 1);
        while waiting.iter().filter(|waiting| **waiting > 0).count() > 1 {
            let job = next(&mut line).unwrap();
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
