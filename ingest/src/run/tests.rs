//! Tests of the start offsets of a run, and of partitions that appear later.

use super::*;

fn job() -> Job {
    JobConfig::new("job", "events", "records", "data").validate().unwrap()
}

fn marks(entries: &[(i32, i64, i64)]) -> Marks {
    entries.iter().map(|(p, low, high)| (*p, (*low, *high))).collect()
}

#[test]
fn run_starts_at_committed_offsets_or_at_first_record() {
    let marks = marks(&[(0, 0, 10), (1, 5, 10), (2, 3, 3)]);
    let committed = BTreeMap::from([(0, 7), (2, 3)]);
    let positions = start(&job(), &committed, &marks).unwrap();
    assert_eq!(positions, BTreeMap::from([(0, 7), (1, 5), (2, 3)]));
    // A committed offset at the end of the partition is in range.
    assert_eq!(start(&job(), &BTreeMap::from([(0, 10)]), &marks).unwrap()[&0], 10);
}

#[test]
fn offsets_that_the_topic_lacks_are_refused() {
    let marks = marks(&[(0, 5, 10)]);
    for (partition, committed, why) in [
        (0, 4, "deleted before they landed"),
        (0, 11, "created again or truncated"),
        (1, 1, "created again or truncated"),
    ] {
        let committed = BTreeMap::from([(partition, committed)]);
        let error = start(&job(), &committed, &marks).unwrap_err();
        assert!(matches!(error, Error::OffsetLost { .. }), "{error:?}");
        assert!(error.to_string().contains(why), "{error}");
    }
}

#[test]
fn new_partitions_are_read_from_their_first_record() {
    let (inputs, _received) = mpsc::channel(1);
    let (progress, watched) = watch::channel(Progress::default());
    let mut reader = Reader {
        job: Arc::new(job()),
        kafka: KafkaConfig::new("127.0.0.1:1"),
        positions: BTreeMap::from([(0, 8)]),
        inputs,
        progress,
    };
    assert!(reader.adopt(&marks(&[(0, 0, 10)])).is_empty());
    assert_eq!(reader.adopt(&marks(&[(0, 0, 12), (1, 2, 6)])), [1]);
    assert_eq!(reader.positions, BTreeMap::from([(0, 8), (1, 2)]));
    assert!(!reader.has_reached(&BTreeMap::from([(0, 8), (1, 3)])));
    assert!(reader.has_reached(&BTreeMap::from([(0, 8), (1, 2)])));
    assert_eq!(watched.borrow().lag(), 12 + 4);
}

#[test]
fn records_lost_beyond_the_position_let_the_next_run_continue() {
    let (inputs, _received) = mpsc::channel(1);
    let (progress, _) = watch::channel(Progress::default());
    let reader = Reader {
        job: Arc::new(job()),
        kafka: KafkaConfig::new("127.0.0.1:1"),
        positions: BTreeMap::from([(0, 8)]),
        inputs,
        progress,
    };
    let lost = |requested, low, high| {
        let (topic, partition) = ("events".to_owned(), 0);
        reader.failed(millrace_streams::Error::OffsetOutOfRange { topic, partition, requested, low, high })
    };
    let shorter = lost(20, 0, 8);
    assert!(matches!(shorter, Error::TopicShorter { partition: 0, end: 20, high: 8, .. }), "{shorter:?}");
    assert!(shorter.is_retryable(), "nothing that landed is lost");
    for lost in [lost(20, 0, 7), lost(8, 9, 20)] {
        assert!(matches!(lost, Error::OffsetLost { .. }), "{lost:?}");
    }
    let ends = BTreeMap::from([(0, 20)]);
    assert!(reader.check_ends(&ends, &marks(&[(0, 0, 20)])).is_ok());
    for shorter in [marks(&[(0, 0, 19)]), marks(&[])] {
        let error = reader.check_ends(&ends, &shorter).unwrap_err();
        assert!(matches!(error, Error::TopicShorter { end: 20, .. }), "{error:?}");
    }
}

#[tokio::test]
async fn cancellation_does_not_wait_for_brokers() {
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let job = JobConfig::new("job", "events", "records", "data");
    // A port without a listener.
    let kafka = KafkaConfig::new("127.0.0.1:1");
    let cancel = CancellationToken::new();
    cancel.cancel();
    let report = run(&job, &datafs, &kafka, cancel, Until::Forever).await.unwrap();
    assert_eq!(report, IngestReport::default());
}
