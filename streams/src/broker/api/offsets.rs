//! ListOffsets requests: the first offset, the next offset, or the first offset at or after a time.

use kafka_protocol::messages::list_offsets_response::{
    ListOffsetsPartitionResponse, ListOffsetsTopicResponse,
};
use kafka_protocol::messages::{ListOffsetsRequest, ListOffsetsResponse};

use super::{Context, Reply};
use crate::broker::code;
use crate::broker::log::{Partition, Refused};

const LATEST: i64 = -1;
const EARLIEST: i64 = -2;

pub(super) fn answer(context: &Context<'_>, request: ListOffsetsRequest) -> Reply {
    let mut topics = Vec::with_capacity(request.topics.len());
    for topic in request.topics {
        let partitions = topic.partitions.iter().map(|asked| {
            let partition = context.shared.store.partition(&topic.name, asked.partition_index);
            let found = match &partition {
                None => Err(Refused::new(code::UNKNOWN_TOPIC_OR_PARTITION, "no such partition")),
                Some(_) if asked.current_leader_epoch > 0 => {
                    Err(Refused::new(code::UNKNOWN_LEADER_EPOCH, "a later leader epoch"))
                }
                Some(partition) => find(partition, asked.timestamp),
            };
            let answer = ListOffsetsPartitionResponse::default().with_partition_index(asked.partition_index);
            match found {
                // The leader epoch exists from version 4 on; leaving it unset is valid in all versions.
                Ok((offset, timestamp)) => answer.with_offset(offset).with_timestamp(timestamp),
                Err(refused) => answer.with_error_code(refused.code).with_offset(-1).with_timestamp(-1),
            }
        });
        let partitions = partitions.collect();
        topics.push(ListOffsetsTopicResponse::default().with_name(topic.name).with_partitions(partitions));
    }
    context.reply(&ListOffsetsResponse::default().with_topics(topics))
}

fn find(partition: &Partition, timestamp: i64) -> Result<(i64, i64), Refused> {
    match timestamp {
        LATEST => Ok((partition.high_watermark(), -1)),
        EARLIEST => Ok((partition.start_offset(), -1)),
        0.. => Ok(partition.by_time(timestamp)?.unwrap_or((-1, -1))),
        _ => Err(Refused::new(code::UNSUPPORTED_VERSION, "only times, earliest and latest are known")),
    }
}
