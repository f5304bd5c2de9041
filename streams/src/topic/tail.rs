//! Rule for the end of a log that comes before the offset that a reader expects.
//!
//! The client library reports the end of a partition once it has read all that the log holds. The last offsets before
//! the expected one may hold no record: transaction markers, aborted transactions, compacted records. A reader then
//! continues at the expected offset.
//!
//! The log may also be shorter than it was: after a power loss of a broker, after an unclean election of a leader, or
//! because another topic has that name now. New records get the lost offsets, and a reader that has passed them would
//! miss these records. A position therefore moves only where the log still holds the offsets that it passes.

use rdkafka::consumer::BaseConsumer;
use rdkafka::error::KafkaResult;

use super::client::Context;
use super::leader::watermarks_of_partition;

/// What a reader does about the end of a partition before the offset that it expects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TailAction {
    /// Read from the position again. The report may be older than the log as it is now: a log that has lost records may
    /// have new ones, and a new leader may know the end of its log later.
    ReadAgain,
    /// Continue at the expected offset: no record is before it.
    Pass,
    /// Fail: the log is shorter. It holds `low` up to before `high`.
    Fail { low: i64, high: i64 },
}

/// Decides about the end of a partition before `end`. `is_confirmed`: the log held all offsets before `end` at a check
/// that came before the read from the position.
///
/// Asks the brokers, and waits for as long as [`watermarks_of_partition`].
///
/// # Errors
/// The client library's.
pub(crate) fn at_end(
    client: &BaseConsumer<Context>,
    (topic, partition): (&str, i32),
    end: i64,
    is_confirmed: bool,
) -> KafkaResult<TailAction> {
    let marks = watermarks_of_partition(client, topic, partition)?;
    Ok(decide(marks, end, is_confirmed))
}

fn decide((low, high): (i64, i64), end: i64, is_confirmed: bool) -> TailAction {
    if high < end {
        TailAction::Fail { low, high }
    } else if is_confirmed {
        TailAction::Pass
    } else {
        TailAction::ReadAgain
    }
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;
    use std::path::Path;
    use std::sync::atomic::AtomicBool;
    use std::time::{Duration, Instant};

    use tempfile::TempDir;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::broker::{self, Broker};
    use crate::config::KafkaConfig;
    use crate::error::Error;
    use crate::topic::{Consumer, EARLIEST, Isolation, OutRecord, Producer, SpanReader};

    /// Records in topic `t`.
    const END: i64 = 1_000;

    #[test]
    fn only_offsets_that_the_log_still_holds_are_passed() {
        for is_confirmed in [false, true] {
            assert_eq!(decide((0, 9), 10, is_confirmed), TailAction::Fail { low: 0, high: 9 });
        }
        for marks in [(0, 10), (0, 11), (10, 10)] {
            assert_eq!(decide(marks, 10, false), TailAction::ReadAgain, "a lost record may be there again");
            assert_eq!(decide(marks, 10, true), TailAction::Pass);
        }
    }

    async fn start(dir: &Path, port: u16) -> Broker {
        let config = broker::Config { listen: ([127, 0, 0, 1], port).into(), ..broker::Config::default() };
        Broker::start(config, dir, CancellationToken::new()).await.unwrap()
    }

    /// A broker with [`END`] records in at least 100 batches, and a client that fetches one batch at a time.
    async fn broker_with_records(dir: &Path) -> (Broker, KafkaConfig) {
        let broker = start(dir, 0).await;
        let mut kafka = KafkaConfig::new(broker.addr().to_string());
        for (key, value) in [
            ("reconnect.backoff.ms", "20"),
            ("reconnect.backoff.max.ms", "20"),
            ("queued.min.messages", "1"),
            ("fetch.message.max.bytes", "1"),
        ] {
            kafka.properties.insert(key.to_owned(), value.into());
        }
        let producer = Producer::connect(&kafka).await.unwrap();
        for _ in 0..END / 10 {
            producer.send_all((0..10).map(|_| OutRecord::new("t", "v"))).await.unwrap();
        }
        (broker, kafka)
    }

    /// Restarts the broker without the second half of its log, as a power loss may leave it. Returns the new end.
    async fn lose_half(broker: Broker, dir: &Path) -> (Broker, i64) {
        let port = broker.addr().port();
        broker.stop().await.unwrap();
        let path = dir.join("topics/t/0/00000000000000000000.log");
        let bytes = std::fs::read(&path).unwrap();
        let mut at = 0;
        while at < bytes.len() / 2 {
            let length = bytes[at + 8..].first_chunk().copied().map(u32::from_be_bytes).unwrap();
            at += 12 + length as usize;
        }
        let high = bytes[at..].first_chunk().copied().map(i64::from_be_bytes).unwrap();
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(at as u64).unwrap();
        (start(dir, port).await, high)
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_consumer_does_not_pass_offsets_that_the_log_has_lost() {
        let dir = TempDir::new().unwrap();
        let (broker, kafka) = broker_with_records(dir.path()).await;
        let mut consumer = Consumer::assign(&kafka, &[("t".to_owned(), 0, EARLIEST)]).await.unwrap();
        // The consumer waits for its caller, long before the end.
        let (broker, high) = lose_half(broker, dir.path()).await;
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut rows = 0;
        let error = loop {
            assert!(Instant::now() < deadline, "{rows} records");
            match consumer.next(100, 1 << 20, Duration::from_millis(200)).await {
                Ok(batch) => rows += batch.map_or(0, |batch| batch.num_rows() as i64),
                Err(error) if error.is_retryable() => {}
                Err(error) => break error,
            }
            assert_eq!(consumer.positions()[&("t".to_owned(), 0)], rows, "it passed offsets that are gone");
        };
        assert_eq!(rows, high);
        match error {
            Error::OffsetOutOfRange { partition: 0, requested: END, low: 0, high: found, .. } => {
                assert_eq!(found, high);
            }
            other => panic!("{other:?}"),
        }
        // Reading on from the position finds the records that got the lost offsets.
        let producer = Producer::connect(&kafka).await.unwrap();
        producer.send_all((0..5).map(|_| OutRecord::new("t", "new"))).await.unwrap();
        let mut consumer = Consumer::assign(&kafka, &[("t".to_owned(), 0, rows)]).await.unwrap();
        while rows < high + 5 {
            assert!(Instant::now() < deadline, "{rows} records");
            let batch = consumer.next(100, 1 << 20, Duration::from_millis(200)).await.unwrap();
            rows += batch.map_or(0, |batch| batch.num_rows() as i64);
        }
        broker.stop().await.unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_range_whose_last_records_are_lost_is_not_read_as_whole() {
        let dir = TempDir::new().unwrap();
        let (broker, kafka) = broker_with_records(dir.path()).await;
        let runtime = tokio::runtime::Handle::current();
        let path = dir.path().to_owned();
        let read = tokio::task::spawn_blocking(move || {
            let mut reader = SpanReader::connect(&kafka, "t", Isolation::Committed).unwrap();
            let (mut broker, mut lost, mut rows) = (Some(broker), None, 0);
            let outcome = reader.read(0, 0..END, &AtomicBool::new(false), &mut |_| {
                rows += 1;
                if let Some(broker) = broker.take() {
                    lost = Some(runtime.block_on(lose_half(broker, &path)));
                }
                Ok(ControlFlow::Continue(()))
            });
            (outcome, lost.unwrap(), rows)
        });
        let (outcome, (broker, high), rows) = read.await.unwrap();
        match outcome {
            Err(Error::RecordsRemoved { partition: 0, next: END, low: 0, high: found, .. }) => {
                assert_eq!((found, rows), (high, high));
            }
            other => panic!("{other:?} after {rows} records"),
        }
        broker.stop().await.unwrap();
    }
}
