//! Fetch requests: whole batches from an offset on; the broker waits until enough bytes are ready.
//!
//! No fetch sessions: a client that asks for one gets session 0, which means "none", and continues to name
//! all of its partitions in each request.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::select_all;
use kafka_protocol::messages::fetch_response::{FetchableTopicResponse, PartitionData};
use kafka_protocol::messages::{FetchRequest, FetchResponse, TopicName};
use tokio::sync::watch;
use tokio::time::Instant;

use super::{Context, Reply};
use crate::broker::code;
use crate::broker::log::{Partition, Refused};
use crate::metrics;

const WAIT_MAX: Duration = Duration::from_secs(300);

/// One partition of a request.
struct PartitionRequest {
    index: i32,
    offset: i64,
    bytes_max: usize,
    partition: Result<Arc<Partition>, Refused>,
}

pub(super) async fn answer(context: &Context<'_>, request: FetchRequest) -> Reply {
    if request.session_id != 0 {
        return context.reply(&FetchResponse::default().with_error_code(code::FETCH_SESSION_ID_NOT_FOUND));
    }
    let shared = context.shared;
    let bytes_max = usize::try_from(request.max_bytes).unwrap_or(0).min(shared.config.fetch_bytes_max);
    let bytes_min = usize::try_from(request.min_bytes).unwrap_or(0).min(bytes_max);
    let wait = Duration::from_millis(u64::try_from(request.max_wait_ms).unwrap_or(0)).min(WAIT_MAX);
    let mut requested: Vec<(TopicName, Vec<PartitionRequest>)> = Vec::with_capacity(request.topics.len());
    for topic in request.topics {
        let partitions = topic.partitions.iter().map(|asked| PartitionRequest {
            index: asked.partition,
            offset: asked.fetch_offset,
            bytes_max: usize::try_from(asked.partition_max_bytes).unwrap_or(0),
            partition: match shared.store.partition(&topic.topic, asked.partition) {
                None => Err(Refused::new(code::UNKNOWN_TOPIC_OR_PARTITION, "no such partition")),
                // The only leader epoch is 0.
                Some(_) if asked.current_leader_epoch > 0 => {
                    Err(Refused::new(code::UNKNOWN_LEADER_EPOCH, "a later leader epoch"))
                }
                Some(partition) => Ok(partition),
            },
        });
        let partitions = partitions.collect();
        requested.push((topic.topic, partitions));
    }

    let ready = wait_for(context, &requested, bytes_min, bytes_max, wait).await;

    // Responses count against the memory of all connections until they are sent. They count twice, because
    // the encoded frame is a copy. Records that came during the wait are left for the next fetch.
    let mut bytes = ready.min(bytes_max);
    let mut held = shared.memory.reserve(bytes.saturating_mul(2)).await;
    let mut answered = read(&requested, bytes, false);
    if answered.is_blocked {
        // The client makes progress also where its limits are below a batch. The memory is released first, so
        // that no response holds memory that another one waits for.
        drop(held);
        bytes = bytes.max(first_batch_bytes(&requested));
        held = shared.memory.reserve(bytes.saturating_mul(2)).await;
        answered = read(&requested, bytes, true);
    }
    metrics::BROKER_FETCHED_BYTES.inc_by(answered.bytes as u64);
    context.reply_holding(&answered.response, held)
}

/// Bytes of the first batch of the first partition that has records for the request; 0 without one.
fn first_batch_bytes(requested: &[(TopicName, Vec<PartitionRequest>)]) -> usize {
    let all = requested.iter().flat_map(|(_, partitions)| partitions);
    let bytes = |asked: &PartitionRequest| asked.partition.as_ref().ok()?.batch_bytes(asked.offset).ok();
    all.filter_map(bytes).find(|bytes| *bytes > 0).unwrap_or(0)
}

/// Waits until `bytes_min` can be read, a partition fails, `wait` is over, or the broker stops. Returns about
/// how many bytes can be read.
async fn wait_for(
    context: &Context<'_>,
    requested: &[(TopicName, Vec<PartitionRequest>)],
    bytes_min: usize,
    bytes_max: usize,
    wait: Duration,
) -> usize {
    let deadline = Instant::now() + wait;
    let all = || requested.iter().flat_map(|(_, partitions)| partitions);
    // Subscribed before the first check, so that no append in between is missed.
    let mut watches: Vec<watch::Receiver<i64>> = all()
        .filter_map(|requested| requested.partition.as_ref().ok())
        .map(|partition| partition.watch())
        .collect();
    loop {
        for watch in &mut watches {
            watch.mark_unchanged();
        }
        let (mut ready, mut wrong) = (0usize, false);
        for requested in all() {
            let bytes = requested
                .partition
                .as_ref()
                .map_err(Refused::clone)
                .and_then(|partition| partition.bytes_from(requested.offset, bytes_max as u64));
            match bytes {
                Ok(bytes) => {
                    ready = ready.saturating_add(
                        usize::try_from(bytes).unwrap_or(usize::MAX).min(requested.bytes_max.max(1)),
                    )
                }
                Err(_) => wrong = true,
            }
        }
        if wrong || ready >= bytes_min || watches.is_empty() {
            return ready;
        }
        let changed = select_all(watches.iter_mut().map(|watch| Box::pin(watch.changed())));
        tokio::select! {
            _ = changed => {}
            () = tokio::time::sleep_until(deadline) => return ready,
            () = context.shared.stopping.cancelled() => return ready,
        }
    }
}

/// Outcome of a read.
struct Answered {
    response: FetchResponse,
    /// Bytes of the records.
    bytes: usize,
    /// Whether the first partition with records gave none: its first batch is larger than the limits.
    is_blocked: bool,
}

/// Reads `bytes_max` at most. With `at_least_one`, the first batch of the first partition with records may be larger.
fn read(requested: &[(TopicName, Vec<PartitionRequest>)], bytes_max: usize, at_least_one: bool) -> Answered {
    let mut bytes = 0;
    let mut is_blocked = false;
    let mut topics = Vec::with_capacity(requested.len());
    for (topic, partitions) in requested {
        let mut answers = Vec::with_capacity(partitions.len());
        for requested in partitions {
            let answer = PartitionData::default().with_partition_index(requested.index);
            let read = requested.partition.as_ref().map_err(Refused::clone).and_then(|partition| {
                // The watermark is read before the records, so that it is never ahead of the log that they
                // come from.
                let high = partition.high_watermark();
                let limit = bytes_max.saturating_sub(bytes).min(requested.bytes_max);
                let records = partition.read(requested.offset, limit, at_least_one && bytes == 0)?;
                Ok((high, partition.start_offset(), records))
            });
            answers.push(match read {
                Ok((high, start, records)) => {
                    is_blocked |= bytes == 0 && records.is_empty() && requested.offset < high;
                    bytes += records.len();
                    answer
                        .with_high_watermark(high)
                        .with_last_stable_offset(high)
                        .with_log_start_offset(start)
                        .with_records(Some(Bytes::from(records)))
                }
                Err(refused) => answer
                    .with_error_code(refused.code)
                    .with_high_watermark(-1)
                    .with_log_start_offset(-1)
                    .with_records(Some(Bytes::new())),
            });
        }
        topics.push(FetchableTopicResponse::default().with_topic(topic.clone()).with_partitions(answers));
    }
    Answered { response: FetchResponse::default().with_responses(topics), bytes, is_blocked }
}
