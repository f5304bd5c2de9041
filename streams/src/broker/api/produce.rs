//! Produce requests: the broker appends the batches and answers once they are as durable as configured.

use std::sync::Arc;

use kafka_protocol::messages::produce_response::{PartitionProduceResponse, TopicProduceResponse};
use kafka_protocol::messages::{ProduceRequest, ProduceResponse};
use kafka_protocol::protocol::StrBytes;

use super::{Context, Reply};
use crate::broker::code;
use crate::broker::log::{Partition, Refused};
use crate::broker::memory::MemoryReservation;

pub(super) async fn answer(
    context: &Context<'_>,
    request: ProduceRequest,
    reservation: MemoryReservation,
) -> Reply {
    let acks = request.acks;
    let whole = if !(-1..=1).contains(&acks) {
        Some(Refused::new(code::INVALID_REQUIRED_ACKS, "acks must be -1, 0 or 1"))
    } else if request.transactional_id.is_some() {
        Some(Refused::new(code::INVALID_REQUEST, "the embedded broker has no transactions"))
    } else {
        None
    };
    let mut failed = None;
    let mut topics = Vec::with_capacity(request.topic_data.len());
    for topic in request.topic_data {
        let mut partitions = Vec::with_capacity(topic.partition_data.len());
        for data in topic.partition_data {
            let records = data.records.unwrap_or_default();
            let appended = match (&whole, context.shared.store.partition(&topic.name, data.index)) {
                (Some(refused), _) => Err(refused.clone()),
                (None, None) => Err(Refused::new(
                    code::UNKNOWN_TOPIC_OR_PARTITION,
                    format!("there is no partition {} of topic {}", data.index, topic.name.as_str()),
                )),
                (None, Some(partition)) => append(&partition, &records).await,
            };
            partitions.push(result(data.index, &appended, &topic.name, context.version));
            failed = failed.or(appended.err());
        }
        topics
            .push(TopicProduceResponse::default().with_name(topic.name).with_partition_responses(partitions));
    }
    drop(reservation);
    match (acks, failed) {
        // Without acknowledgements, closing the connection is the only way to report a failure.
        (0, Some(refused)) => {
            Reply::Close(format!("a produce request without acknowledgement failed: {}", refused.reason))
        }
        (0, None) => Reply::Nothing,
        _ => context.reply(&ProduceResponse::default().with_responses(topics)),
    }
}

async fn append(partition: &Arc<Partition>, records: &[u8]) -> Result<(i64, i64), Refused> {
    let base_offset = partition.append(records)?;
    partition.wait_durable().await?;
    Ok((base_offset, partition.start_offset()))
}

fn result(
    index: i32,
    appended: &Result<(i64, i64), Refused>,
    topic: &str,
    version: i16,
) -> PartitionProduceResponse {
    let response = PartitionProduceResponse::default().with_index(index).with_log_append_time_ms(-1);
    match appended {
        Ok((base_offset, start)) => response.with_base_offset(*base_offset).with_log_start_offset(*start),
        Err(refused) => {
            tracing::debug!(
                topic,
                partition = index,
                code = refused.code,
                reason = refused.reason,
                "refused a batch"
            );
            let response =
                response.with_error_code(refused.code).with_base_offset(-1).with_log_start_offset(-1);
            if version >= 8 {
                response.with_error_message(Some(StrBytes::from_string(refused.reason.clone())))
            } else {
                response
            }
        }
    }
}
