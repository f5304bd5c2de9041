//! Leaders of partitions, which change when brokers restart or fail.
//!
//! A broker that does not lead a partition says so at once. For a partition without a leader, the client library says that
//! the partition does not exist, and keeps to it until metadata are read again. Neither ends a read: brokers are asked again
//! for as long as a call may take.

use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, KafkaResult};
use rdkafka::types::RDKafkaErrorCode as Code;

use super::client::{ANSWER_WAIT, Context};
use crate::error::is_leader_change;

/// Pause before brokers are asked again for the offsets of a partition whose leader changes.
const PAUSE: Duration = Duration::from_millis(100);

/// The leader of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Leader {
    /// Number and address of the broker.
    Broker(String),
    /// No broker leads the partition at present.
    Missing,
}

/// The leader of a partition as a broker tells it within `wait`; none if there is no such partition. The client library
/// uses that leader from then on.
///
/// # Errors
/// The client library's.
pub(crate) fn leader_of(
    client: &BaseConsumer<Context>,
    topic: &str,
    partition: i32,
    wait: Duration,
) -> KafkaResult<Option<Leader>> {
    let metadata = client.client().fetch_metadata(Some(topic), wait)?;
    let found = metadata.topics().iter().find(|found| found.name() == topic && found.error().is_none());
    let Some(found) = found.and_then(|found| found.partitions().iter().find(|found| found.id() == partition))
    else {
        return Ok(None);
    };
    let broker = metadata.brokers().iter().find(|broker| broker.id() == found.leader());
    Ok(Some(broker.map_or(Leader::Missing, |broker| {
        Leader::Broker(format!("broker {} at {}:{}", broker.id(), broker.host(), broker.port()))
    })))
}

/// First offset and next offset to be written of a partition, from its leader. Brokers are asked again while it changes.
///
/// Blocks up to about [`ANSWER_WAIT`].
///
/// # Errors
/// The client library's; [`Code::LeaderNotAvailable`] for a partition that no broker leads.
pub(crate) fn watermarks_of_partition(
    client: &BaseConsumer<Context>,
    topic: &str,
    partition: i32,
) -> KafkaResult<(i64, i64)> {
    let started = Instant::now();
    loop {
        let left = ANSWER_WAIT.saturating_sub(started.elapsed()).max(PAUSE);
        let error = match client.fetch_watermarks(topic, partition, left) {
            Ok(marks) => return Ok(marks),
            Err(error) => error,
        };
        let error = match error.rdkafka_error_code() {
            Some(Code::UnknownPartition) if leader_of(client, topic, partition, left)?.is_some() => {
                KafkaError::MetadataFetch(Code::LeaderNotAvailable)
            }
            _ => error,
        };
        let is_passing = error.rdkafka_error_code().is_some_and(is_leader_change);
        if !is_passing || started.elapsed() >= ANSWER_WAIT {
            return Err(error);
        }
        std::thread::sleep(PAUSE);
    }
}
