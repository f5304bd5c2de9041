//! Tests of the counters, without connections and without a clock.
use super::*;

const PLENTY: usize = usize::MAX;

fn quota(unsent_max: usize, all: &Answers) -> Quota {
    Quota::new(unsent_max, all).0
}

fn refusal(held: Result<UnsentGuard, Refusal>) -> (u16, String) {
    let refusal = held.unwrap_err();
    (refusal.status.as_u16(), refusal.reason)
}

#[test]
fn cancelled_calls_are_bounded_by_a_rate() {
    let start = Instant::now();
    let mut bucket = Bucket { left: CANCELLED_PER_SECOND_MAX as f64, at: start };
    let mut taken = |now: Instant| (0..2 * CANCELLED_PER_SECOND_MAX).take_while(|_| bucket.take(now)).count();
    assert_eq!(taken(start), CANCELLED_PER_SECOND_MAX);
    let half = taken(start + Duration::from_millis(500));
    assert!((CANCELLED_PER_SECOND_MAX / 2 - 2..=CANCELLED_PER_SECOND_MAX / 2).contains(&half), "{half}");
}

#[tokio::test]
async fn flood_of_cancelled_calls_ends_the_connection() {
    let (quota, mut watch) = Quota::new(PLENTY, &Answers::new(PLENTY));
    // On any machine the bucket runs empty: each of these cancellations takes far less than 100 µs.
    for _ in 0..100 * CANCELLED_PER_SECOND_MAX {
        quota.cancelled();
    }
    assert_eq!(watch.exceeded(Duration::from_secs(3600)).await, "cancelled too many calls");
}

#[test]
fn answers_of_all_connections_have_a_common_bound() {
    let all = Answers::new(10 * SMALL_BYTES);
    let (one, two) = (quota(PLENTY, &all), quota(PLENTY, &all));
    let first = one.hold(9 * SMALL_BYTES).unwrap();
    let (status, reason) = refusal(two.hold(2 * SMALL_BYTES));
    assert!(status == 503 && reason.contains("limits.answer_bytes_max"), "{status} {reason}");
    assert_eq!((one.unsent(), two.unsent()), ((9 * SMALL_BYTES, 9 * SMALL_BYTES), (0, 9 * SMALL_BYTES)));
    let second = two.hold(SMALL_BYTES).unwrap();
    assert_eq!(refusal(one.hold(1)).0, 503, "the bound is reached");
    drop(first);
    let third = two.hold(9 * SMALL_BYTES).unwrap();
    drop((second, third));
    assert_eq!(two.unsent(), (0, 0));
}

#[test]
fn small_answers_are_not_refused_because_of_large_ones() {
    let all = Answers::new(SMALL_BYTES);
    let (one, two) = (quota(PLENTY, &all), quota(PLENTY, &all));
    let _large = one.hold(100 * SMALL_BYTES).expect("the only one may have any size");
    let _first = two.hold(SMALL_BYTES - 1).unwrap();
    let _second = two.hold(1).unwrap();
    assert_eq!(refusal(two.hold(1)).0, 503, "many small ones are as a large one");
    assert_eq!(refusal(one.hold(1)).0, 503);
    quota(PLENTY, &all).hold(1).unwrap();
}

#[test]
fn error_of_the_limit_of_a_connection_names_that_limit() {
    let quota = quota(10, &Answers::new(PLENTY));
    let _first = quota.hold(100).unwrap();
    let (status, reason) = refusal(quota.hold(1));
    assert!(status == 429 && reason.contains("limits.unsent_bytes_max"), "{status} {reason}");
}

#[test]
fn client_that_reads_nothing_in_a_period_is_disconnected() {
    let quota = quota(PLENTY, &Answers::new(PLENTY));
    let looked = quota.end_period(quota.look()).unwrap();
    let held = quota.hold(10).unwrap();
    let looked = quota.end_period(looked).expect("the period has not been whole");
    quota.took();
    let looked = quota.end_period(looked).expect("it took something");
    assert_eq!(quota.end_period(looked).unwrap_err(), "read none of its answers");
    drop(held);
    quota.end_period(quota.look()).unwrap();
}

#[test]
fn slow_client_keeps_the_answers_that_it_reads_in_turn() {
    let quota = quota(PLENTY, &Answers::new(PLENTY));
    let answers: Vec<Arc<AnswerProgress>> = std::iter::repeat_with(Arc::default).take(10).collect();
    for answer in &answers {
        quota.follow(answer);
        answer.gave(quota.period());
    }
    let mut looked = quota.look();
    let mut take = |answer: &AnswerProgress| {
        answer.took(quota.period());
        quota.took();
        answer.gave(quota.period());
        quota.end_period(looked).inspect(|now| looked = *now).err()
    };
    for answer in answers.iter().cycle().take(50) {
        assert_eq!(take(answer), None, "one piece in a period");
    }
    let left_out = (0..20).find_map(|_| take(&answers[0]));
    assert_eq!(left_out, Some("did not read the rest of an answer"));
}

#[test]
fn answers_behind_others_of_their_stream_cannot_be_read() {
    let quota = quota(PLENTY, &Answers::new(PLENTY));
    let mut waiting = quota.hold_behind(10).unwrap();
    let mut looked = quota.look();
    for _ in 0..5 {
        looked = quota.end_period(looked).expect("the client has nothing to take");
    }
    assert_eq!(quota.unsent(), (10, 10), "they count as the others do");
    let part = waiting.split(4);
    let looked = quota.end_period(looked).unwrap();
    assert_eq!(quota.end_period(looked).unwrap_err(), "read none of its answers", "a part can be taken");
    drop((part, waiting));
    assert_eq!((quota.unsent(), quota.look().to_take), ((0, 0), 0));
}

#[test]
fn ended_answers_are_not_tracked() {
    let quota = quota(PLENTY, &Answers::new(PLENTY));
    let kept: Vec<Arc<AnswerProgress>> = std::iter::repeat_with(Arc::default).take(10).collect();
    for answer in &kept {
        quota.follow(answer);
    }
    for _ in 0..10_000 {
        quota.follow(&Arc::default());
    }
    let followed = quota.0.followed.lock();
    assert!(followed.answers.len() <= FOLLOWED_MIN, "{}", followed.answers.len());
    assert_eq!(followed.answers.iter().filter_map(Weak::upgrade).count(), kept.len());
}
