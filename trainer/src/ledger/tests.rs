//! Tests of the ledger.

use crate::engine::ChannelMoments;

use super::{EpochError, Ledger, RowsDigest, Share, Tally};

/// The digest of the rows `0..rows`.
fn epoch_digest(rows: u64) -> u64 {
    let mut digest = RowsDigest::default();
    (0..rows).for_each(|row| digest.add(row));
    digest.0
}

/// Encodes, sums lane by lane and decodes, as a ring of workers does.
fn all_reduce(tallies: &[Tally]) -> Tally {
    let mut sum = vec![0i64; tallies[0].lanes()];
    for tally in tallies {
        let mut lanes = Vec::new();
        tally.encode(&mut lanes);
        assert_eq!(lanes.len(), tally.lanes());
        sum.iter_mut().zip(lanes).for_each(|(sum, lane)| *sum = sum.wrapping_add(lane));
    }
    tallies[0].decode(&sum).unwrap()
}

/// A tally of rows that all belong to one shard and weigh 1.
fn tally(shard: usize, first: u64, last: u64, rows: &[(u64, u64)]) -> Tally {
    let mut tally = Tally::new(first, last, 3);
    tally.shard(shard, 0.0, rows.len() as f64, 0.0);
    for (epoch, row) in rows {
        assert!(tally.count(*epoch, *row));
    }
    tally
}

#[test]
fn epochs_that_roll_over_inside_a_step_are_counted_apart() {
    let digest = epoch_digest(5);
    let mut ledger = Ledger::default();
    let mut first = tally(0, 0, 0, &[(0, 3), (0, 0)]);
    first.shard(0, 1e300, 1.0, 0.5);
    first.shard(2, 1.5, 1.0, 3e38);
    first.correct = 1;
    first.stop = 1;
    let mut second = tally(1, 0, 0, &[(0, 4)]);
    second.shard(1, -1e300, 1.0, 1e-40);
    second.leave = 1;
    let step = all_reduce(&[first, second]);
    assert_eq!((step.rows, step.correct, step.leave, step.stop), (3, 1, 1, 1));
    // The bits of each shard's loss, summed in the order of the shards.
    assert_eq!((step.mean_loss(), step.largest()), (0.5, 3e38));
    ledger.add(&step);
    ledger.add(&all_reduce(&[tally(0, 0, 1, &[(0, 2), (1, 2)]), tally(1, 0, 1, &[(0, 1)])]));
    let record = ledger.close_epoch(5, digest).unwrap();
    // Two of the three rows of the second step belong to the epoch.
    assert_eq!((record.rows, record.loss), (5, 1.5 / 5.0));
    ledger.add(&tally(0, 1, 1, &[(1, 0), (1, 1), (1, 3), (1, 4)]));
    assert_eq!(ledger.close_epoch(5, digest).unwrap().rows, 5);
    assert_eq!(ledger.epochs.len(), 2);
}

#[test]
fn step_within_several_epochs_counts_for_each_in_proportion_to_its_rows() {
    let mut ledger = Ledger::default();
    let mut within = tally(0, 0, 0, &[(0, 0), (0, 1)]);
    within.shard(0, 4.0, 2.0, 1.0);
    within.correct = 2;
    ledger.add(&within);
    // One row ends epoch 0, three are epoch 1, two begin epoch 2.
    let mut across = tally(0, 0, 2, &[(0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1)]);
    across.shard(0, 12.0, 6.0, 1.0);
    (across.correct, across.ignored) = (3, 1);
    ledger.add(&across);
    let digest = epoch_digest(3);
    let first = ledger.close_epoch(3, digest).unwrap();
    // 1/6 of the step: a loss of 2; of 3 correct rows 0.5, of 5 scored ones 0.83, both rounded down to none.
    assert_eq!((first.rows, first.loss, first.accuracy), (3, 6.0 / 3.0, 1.0));
    let second = ledger.close_epoch(3, digest).unwrap();
    // 3 of the 5 rows left: a loss of 6; 1 of 3 correct rows, 3 of 5 scored ones.
    assert_eq!((second.rows, second.loss, second.accuracy), (3, 2.0, 1.0 / 3.0));
    // Between steps nothing is left outside the checkpoint.
    let text = serde_json::to_string(&ledger).unwrap();
    let mut restored: Ledger = serde_json::from_str(&text).unwrap();
    assert_eq!(restored, ledger);
    let mut end = tally(0, 2, 2, &[(2, 2)]);
    end.shard(0, 5.0, 1.0, 1.0);
    for ledger in [&mut ledger, &mut restored] {
        ledger.add(&end);
        let third = ledger.close_epoch(3, digest).unwrap();
        // What is left of the step, 4 of its loss and 2 correct rows, and the row after it.
        assert_eq!((third.rows, third.loss, third.accuracy), (3, 9.0 / 3.0, 2.0 / 3.0));
    }
    assert_eq!(restored, ledger);
}

#[test]
fn shares_of_a_step_sum_to_it() {
    let whole = Share { rows: 11, correct: 7, ignored: 3, loss: 5.5, weight: 11.0 };
    let mut left = whole;
    let shares = [4, 0, 6, 1].map(|rows| left.take(rows));
    assert_eq!(left, Share::default());
    let sum = |of: fn(&Share) -> u64| shares.iter().map(of).sum::<u64>();
    assert_eq!((sum(|s| s.rows), sum(|s| s.correct), sum(|s| s.ignored)), (11, 7, 3));
    for share in shares {
        assert_eq!((share.weight, share.loss), (share.rows as f64, share.rows as f64 / 2.0));
        assert!(share.correct + share.ignored <= share.rows, "{share:?}");
    }
}

#[test]
fn lost_and_doubled_rows_are_found() {
    let digest = epoch_digest(3);
    let close = |rows: &[(u64, u64)]| {
        let mut ledger = Ledger::default();
        ledger.add(&tally(0, 0, 0, rows));
        ledger.close_epoch(3, digest)
    };
    assert!(close(&[(0, 0), (0, 1), (0, 2)]).is_ok());
    assert!(close(&[(0, 0), (0, 1)]).unwrap_err().to_string().contains("2 rows"));
    assert!(close(&[(0, 0), (0, 1), (0, 1)]).unwrap_err().to_string().contains("twice"));
    assert!(!Tally::new(4, 5, 1).count(3, 0));
    assert!(!Tally::new(4, 5, 1).count(6, 0));
    assert!(Tally::new(0, 0, 1).decode(&[0; 3]).is_none());
}

#[test]
fn ledger_round_trips_as_json() {
    let mut ledger = Ledger::default();
    let mut step = tally(0, 0, 1, &[(0, 0), (0, 1), (1, 1)]);
    step.shard(1, 0.1 + 0.2, 0.25, 1.0);
    step.ignored = 1;
    ledger.add(&step);
    ledger.close_epoch(2, epoch_digest(2)).unwrap();
    ledger.add(&step);
    let text = serde_json::to_string(&ledger).unwrap();
    assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap(), ledger);
}

#[test]
fn weights_and_ignored_rows_divide_the_figures_of_an_epoch() {
    let mut ledger = Ledger::default();
    let mut step = tally(0, 0, 0, &[(0, 0), (0, 1), (0, 2)]);
    step.shard(0, 3.0, 0.5, 1.0);
    (step.correct, step.ignored) = (1, 1);
    assert_eq!(all_reduce(&[step.clone()]).mean_loss(), 6.0);
    ledger.add(&step);
    let record = ledger.close_epoch(3, epoch_digest(3)).unwrap();
    assert_eq!((record.rows, record.loss, record.accuracy), (3, 6.0, 0.5));
    // The next epoch starts anew, and one without any weight has no loss.
    let mut nothing = tally(0, 1, 1, &[(1, 0), (1, 1), (1, 2)]);
    nothing.shard(0, 0.0, 0.0, 0.0);
    nothing.ignored = 3;
    assert_eq!(nothing.mean_loss(), 0.0);
    ledger.add(&nothing);
    assert_eq!(ledger.close_epoch(3, epoch_digest(3)), Err(EpochError::Weightless));
}

#[test]
fn ledgers_of_earlier_programs_are_read_and_written_alike() {
    let text = r#"{"epochs":[{"rows":5,"loss":0.25,"accuracy":0.5}],"open":{"1":{"rows":2,"digest":9}},"rows":2,"correct":1,"loss":0.125}"#;
    let ledger: Ledger = serde_json::from_str(text).unwrap();
    assert_eq!(serde_json::to_string(&ledger).unwrap(), text);
}

#[test]
fn statistics_of_shards_keep_their_bits_in_the_sum() {
    let moments = |mean, variance| ChannelMoments { mean, variance };
    let empty = || Tally::new(0, 0, 3).with_channels(2);
    let (mut first, mut second) = (empty(), empty());
    first.record_moments(0, &[moments(-0.0, 1e-40), moments(f32::MAX, 0.1)]);
    second.record_moments(1, &[moments(-3.5, f32::MIN_POSITIVE), moments(0.0, 7.0)]);
    second.record_moments(2, &[moments(1e-45, 0.0), moments(f32::NAN, f32::INFINITY)]);
    // Of another number of channels, or of a shard that does not exist.
    second.record_moments(0, &[moments(1.0, 1.0)]);
    second.record_moments(3, &[moments(1.0, 1.0); 2]);
    let total = all_reduce(&[first.clone(), second.clone()]);
    // NaN is not equal to itself.
    assert_eq!(format!("{total:?}"), format!("{:?}", all_reduce(&[second.clone(), first.clone()])));
    let bits =
        |tally: &Tally| -> Vec<u64> { tally.moments().flatten().map(|found| found.to_bits()).collect() };
    let expected: Vec<u64> = bits(&first)[..2].iter().chain(&bits(&second)[2..]).copied().collect();
    assert_eq!(bits(&total), expected);
    assert_eq!(Tally::new(0, 0, 3).moments().count(), 0);
}
