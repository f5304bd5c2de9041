//! Tests of the ledger.

use super::{Ledger, Tally, epoch_digest};

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

fn tally(first: u64, last: u64, rows: &[(u64, u64)]) -> Tally {
    let mut tally = Tally::new(first, last, 3);
    for (epoch, row) in rows {
        assert!(tally.count(*epoch, *row));
    }
    tally
}

#[test]
fn epochs_that_roll_over_inside_a_step_are_counted_apart() {
    let digest = epoch_digest(5);
    let mut ledger = Ledger::default();
    let mut first = tally(0, 0, &[(0, 3), (0, 0)]);
    first.shard(0, 1e300, 0.5);
    first.shard(2, 1.5, 3e38);
    first.correct = 1;
    first.stop = 1;
    let mut second = tally(0, 0, &[(0, 4)]);
    second.shard(1, -1e300, 1e-40);
    second.leave = 1;
    let step = all_reduce(&[first, second]);
    assert_eq!((step.rows, step.correct, step.leave, step.stop), (3, 1, 1, 1));
    // The bits of each shard's loss, summed in the order of the shards.
    assert_eq!((step.mean_loss(), step.largest()), (0.5, 3e38));
    ledger.add(&step);
    ledger.add(&all_reduce(&[tally(0, 1, &[(0, 2), (1, 2)]), tally(0, 1, &[(0, 1)])]));
    let record = ledger.close_epoch(5, digest).unwrap();
    assert_eq!((record.rows, record.loss), (5, 1.5 / 6.0));
    ledger.add(&tally(1, 1, &[(1, 0), (1, 1), (1, 3), (1, 4)]));
    assert_eq!(ledger.close_epoch(5, digest).unwrap().rows, 5);
    assert_eq!(ledger.epochs.len(), 2);
}

#[test]
fn lost_and_doubled_rows_are_found() {
    let digest = epoch_digest(3);
    let close = |rows: &[(u64, u64)]| {
        let mut ledger = Ledger::default();
        ledger.add(&tally(0, 0, rows));
        ledger.close_epoch(3, digest)
    };
    assert!(close(&[(0, 0), (0, 1), (0, 2)]).is_ok());
    assert!(close(&[(0, 0), (0, 1)]).unwrap_err().contains("2 rows"));
    assert!(close(&[(0, 0), (0, 1), (0, 1)]).unwrap_err().contains("twice"));
    assert!(!Tally::new(4, 5, 1).count(3, 0));
    assert!(!Tally::new(4, 5, 1).count(6, 0));
    assert!(Tally::new(0, 0, 1).decode(&[0; 3]).is_none());
}

#[test]
fn ledger_round_trips_as_json() {
    let mut ledger = Ledger::default();
    let mut step = tally(0, 1, &[(0, 0), (0, 1), (1, 1)]);
    step.shard(1, 0.1 + 0.2, 1.0);
    ledger.add(&step);
    ledger.close_epoch(2, epoch_digest(2)).unwrap();
    ledger.add(&step);
    let text = serde_json::to_string(&ledger).unwrap();
    assert_eq!(serde_json::from_str::<Ledger>(&text).unwrap(), ledger);
}
