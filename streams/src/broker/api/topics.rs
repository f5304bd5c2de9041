//! CreateTopics and DeleteTopics requests. The broker refuses settings per topic and more than one replica.

use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::messages::create_topics_response::CreatableTopicResult;
use kafka_protocol::messages::delete_topics_response::DeletableTopicResult;
use kafka_protocol::messages::{
    CreateTopicsRequest, CreateTopicsResponse, DeleteTopicsRequest, DeleteTopicsResponse,
};
use kafka_protocol::protocol::StrBytes;

use super::{Context, Reply};
use crate::broker::code;
use crate::broker::log::Refused;

pub(super) fn create(context: &Context<'_>, request: CreateTopicsRequest) -> Reply {
    let mut topics = Vec::with_capacity(request.topics.len());
    for topic in request.topics {
        let outcome = partitions_of(context, &topic).and_then(|partitions| {
            if request.validate_only {
                context.shared.store.check_new(&topic.name, partitions)
            } else {
                tokio::task::block_in_place(|| context.shared.store.create(&topic.name, partitions))
            }
        });
        let result = CreatableTopicResult::default().with_name(topic.name);
        topics.push(match outcome {
            Ok(()) => result,
            Err(refused) => result
                .with_error_code(refused.code)
                .with_error_message(Some(StrBytes::from_string(refused.reason))),
        });
    }
    context.reply(&CreateTopicsResponse::default().with_topics(topics))
}

/// Number of partitions of a new topic; refuses settings that a single node cannot honor.
fn partitions_of(context: &Context<'_>, topic: &CreatableTopic) -> Result<i32, Refused> {
    if let Some(config) = topic.configs.first() {
        return Err(Refused::new(
            code::INVALID_CONFIG,
            format!(
                "the embedded broker has no settings per topic, {} among them; retention is set by \
                 streams.broker.retention_ms and streams.broker.retention_bytes_max",
                config.name.as_str()
            ),
        ));
    }
    if !topic.assignments.is_empty() {
        let here = topic
            .assignments
            .iter()
            .all(|assignment| assignment.broker_ids.iter().all(|broker| broker.0 == 0));
        if !here || topic.num_partitions != -1 {
            return Err(Refused::new(code::INVALID_REPLICA_ASSIGNMENT, "there is one broker, 0"));
        }
        return Ok(topic.assignments.len() as i32);
    }
    if !matches!(topic.replication_factor, -1 | 1) {
        return Err(Refused::new(code::INVALID_REPLICATION_FACTOR, "there is one broker, so one replica"));
    }
    Ok(match topic.num_partitions {
        -1 => context.shared.config.partitions_default,
        partitions => partitions,
    })
}

pub(super) fn delete(context: &Context<'_>, request: DeleteTopicsRequest) -> Reply {
    let results = request.topic_names.into_iter().map(|name| {
        let outcome = tokio::task::block_in_place(|| context.shared.store.delete(&name));
        let code = outcome.map_or_else(|refused| refused.code, |()| code::NONE);
        DeletableTopicResult::default().with_name(Some(name)).with_error_code(code)
    });
    let results = results.collect();
    context.reply(&DeleteTopicsResponse::default().with_responses(results))
}
