//! Metadata requests: this broker, and topics with their partitions. A request may create a missing topic.

use std::collections::HashSet;

use kafka_protocol::messages::metadata_response::{
    MetadataResponseBroker, MetadataResponsePartition, MetadataResponseTopic,
};
use kafka_protocol::messages::{MetadataRequest, MetadataResponse, TopicName};
use kafka_protocol::protocol::StrBytes;

use super::{Context, Reply};
use crate::broker::code;

/// Id of this broker, the only node.
const NODE: i32 = 0;

pub(super) fn answer(context: &Context<'_>, request: MetadataRequest) -> Reply {
    let store = &context.shared.store;
    let config = &context.shared.config;
    // Version 0 has no null; an empty list means all topics there.
    let all = match &request.topics {
        None => true,
        Some(topics) => topics.is_empty() && context.version == 0,
    };
    let mut topics = Vec::new();
    if all {
        topics.extend(store.list().into_iter().map(|(name, partitions)| known(name.into(), partitions)));
    } else {
        let mut seen = HashSet::new();
        for asked in request.topics.into_iter().flatten() {
            let name = asked.name.unwrap_or_default().0;
            // Each distinct name is answered once, so that repeated names do not inflate the response.
            if !seen.insert(name.clone()) {
                continue;
            }
            if store.partition_count(&name).is_none()
                && config.auto_create_topics
                && request.allow_auto_topic_creation
            {
                let created = tokio::task::block_in_place(|| store.create(&name, config.partitions_default));
                match created {
                    // Another request may have created it meanwhile.
                    Ok(()) => {}
                    Err(refused) if refused.code == code::TOPIC_ALREADY_EXISTS => {}
                    Err(refused) => {
                        topics.push(failed(name, refused.code));
                        continue;
                    }
                }
            }
            topics.push(match store.partition_count(&name) {
                Some(partitions) => known(name, partitions),
                None => failed(name, code::UNKNOWN_TOPIC_OR_PARTITION),
            });
        }
    }
    let host = match config.advertised_host.as_str() {
        "" => context.local.ip().to_string(),
        host => host.to_string(),
    };
    let broker = MetadataResponseBroker::default()
        .with_node_id(NODE.into())
        .with_host(StrBytes::from_string(host))
        .with_port(i32::from(context.local.port()));
    context.reply(
        &MetadataResponse::default()
            .with_brokers(vec![broker])
            .with_cluster_id(Some(StrBytes::from_string(store.cluster_id().to_string())))
            .with_controller_id(NODE.into())
            .with_topics(topics),
    )
}

fn known(name: StrBytes, partitions: usize) -> MetadataResponseTopic {
    let partitions = (0..partitions as i32).map(|index| {
        MetadataResponsePartition::default()
            .with_partition_index(index)
            .with_leader_id(NODE.into())
            .with_leader_epoch(0)
            .with_replica_nodes(vec![NODE.into()])
            .with_isr_nodes(vec![NODE.into()])
    });
    MetadataResponseTopic::default().with_name(Some(TopicName(name))).with_partitions(partitions.collect())
}

fn failed(name: StrBytes, error_code: i16) -> MetadataResponseTopic {
    MetadataResponseTopic::default().with_name(Some(TopicName(name))).with_error_code(error_code)
}
