//! Topic administration: create, delete and list topics, and read their watermarks.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;

use super::client::{ANSWER_WAIT, Context, blocking, client_config, partitions, poll_log, translate};
use super::leader::watermarks_of_partition;
use crate::config::{KafkaConfig, TopicConfig};
use crate::error::{Error, Result};

/// A topic and its size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicInfo {
    /// Topic name.
    pub name: String,
    /// Number of partitions.
    pub partitions: i32,
}

/// A client for metadata and watermarks only, which librdkafka offers on any handle.
pub(crate) fn inquirer(kafka: &KafkaConfig, context: &Context) -> Result<BaseConsumer<Context>> {
    let config = client_config(
        kafka,
        &[
            ("group.id", "millrace"),
            ("allow.auto.create.topics", "false"),
            ("check.crcs", "true"),
            ("socket.timeout.ms", "10000"),
        ],
        &[("enable.auto.commit", "false")],
    )?;
    BaseConsumer::from_config_and_context(&config, context.clone())
        .map_err(|error| translate(kafka, context, "create a client", Duration::ZERO, error))
}

/// Creates a topic when it does not exist yet; returns whether it was created. An existing topic
/// is left as it is, whatever its partition count. Replication is the cluster's default.
///
/// # Errors
/// [`Error::InvalidTopic`], [`Error::Unreachable`], [`Error::Client`].
pub async fn create_topic(kafka: &KafkaConfig, name: &str, partitions: i32) -> Result<bool> {
    if exists(kafka, name).await? {
        return Ok(false);
    }
    let context = Context::default();
    let client = admin(kafka, &context)?;
    // -1 leaves the replication to the brokers.
    let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(-1));
    let options = options();
    let started = Instant::now();
    let outcome = client
        .create_topics([&topic], &options)
        .await
        .map_err(|error| translate(kafka, &context, "create a topic", started.elapsed(), error))?;
    match outcome.into_iter().next() {
        None | Some(Ok(_)) => Ok(true),
        Some(Err((_, Code::TopicAlreadyExists))) => Ok(false),
        Some(Err((_, code @ (Code::InvalidTopic | Code::InvalidPartitions | Code::PolicyViolation)))) => {
            Err(Error::InvalidTopic { name: name.to_string(), reason: code.to_string() })
        }
        Some(Err((_, code))) => Err(translate(
            kafka,
            &context,
            &format!("create topic {name}"),
            started.elapsed(),
            KafkaError::AdminOp(code),
        )),
    }
}

/// Deletes a topic with its records; returns whether it existed.
///
/// # Errors
/// [`Error::Unreachable`], [`Error::Client`].
pub async fn delete_topic(kafka: &KafkaConfig, name: &str) -> Result<bool> {
    if !exists(kafka, name).await? {
        return Ok(false);
    }
    let context = Context::default();
    let client = admin(kafka, &context)?;
    let started = Instant::now();
    let outcome = client
        .delete_topics(&[name], &options())
        .await
        .map_err(|error| translate(kafka, &context, "delete a topic", started.elapsed(), error))?;
    match outcome.into_iter().next() {
        None | Some(Ok(_)) => Ok(true),
        Some(Err((_, Code::UnknownTopicOrPartition))) => Ok(false),
        Some(Err((_, code))) => Err(translate(
            kafka,
            &context,
            &format!("delete topic {name}"),
            started.elapsed(),
            KafkaError::AdminOp(code),
        )),
    }
}

/// Whether a topic exists. Called before a change, because an admin client that reaches no broker cannot name
/// the cause, and this client can.
async fn exists(kafka: &KafkaConfig, name: &str) -> Result<bool> {
    let (kafka, name) = (kafka.clone(), name.to_string());
    blocking(move || {
        let context = Context::default();
        let client = inquirer(&kafka, &context)?;
        let found = partitions(&kafka, &context, client.client(), Some(&name));
        Ok(!found.map_err(|error| with_logged_reason(error, &context, &client))?.is_empty())
    })
    .await
}

/// Creates those of `topics` that do not exist.
///
/// # Errors
/// As [`create_topic`]; earlier topics of the list stay created.
pub async fn ensure_topics(kafka: &KafkaConfig, topics: &[TopicConfig]) -> Result<()> {
    for topic in topics {
        if create_topic(kafka, &topic.name, topic.partitions).await? {
            tracing::info!(topic = topic.name, partitions = topic.partitions, "created topic");
        }
    }
    Ok(())
}

/// All topics by name.
///
/// # Errors
/// [`Error::Unreachable`], [`Error::Client`].
pub async fn list_topics(kafka: &KafkaConfig) -> Result<Vec<TopicInfo>> {
    let kafka = kafka.clone();
    blocking(move || {
        let context = Context::default();
        let client = inquirer(&kafka, &context)?;
        let topics = partitions(&kafka, &context, client.client(), None)
            .map_err(|error| with_logged_reason(error, &context, &client))?;
        Ok(topics.into_iter().map(|(name, partitions)| TopicInfo { name, partitions }).collect())
    })
    .await
}

/// First offset and next offset to be written, by partition.
///
/// # Errors
/// [`Error::UnknownTopic`], [`Error::Unreachable`], [`Error::Client`].
pub async fn watermarks(kafka: &KafkaConfig, topic: &str) -> Result<BTreeMap<i32, (i64, i64)>> {
    let (kafka, topic) = (kafka.clone(), topic.to_string());
    blocking(move || {
        let context = Context::default();
        let client = inquirer(&kafka, &context)?;
        watermarks_of(&kafka, &context, &client, &topic)
    })
    .await
}

/// Blocking form of [`watermarks`] over an open client.
pub(crate) fn watermarks_of(
    kafka: &KafkaConfig,
    context: &Context,
    client: &BaseConsumer<Context>,
    topic: &str,
) -> Result<BTreeMap<i32, (i64, i64)>> {
    let counts = partitions(kafka, context, client.client(), Some(topic))
        .map_err(|error| with_logged_reason(error, context, client))?;
    let count = counts.get(topic).copied().ok_or_else(|| Error::UnknownTopic {
        topic: topic.to_string(),
        bootstrap_servers: kafka.bootstrap_servers.clone(),
    })?;
    let mut marks = BTreeMap::new();
    for partition in 0..count {
        let started = Instant::now();
        let mark = watermarks_of_partition(client, topic, partition).map_err(|error| {
            let action = format!("read the offsets of topic {topic} partition {partition}");
            translate(kafka, context, &action, started.elapsed(), error)
        })?;
        marks.insert(partition, mark);
    }
    Ok(marks)
}

/// Adds the cause to an [`Error::Unreachable`] of a client that was not polled yet.
fn with_logged_reason(error: Error, context: &Context, client: &BaseConsumer<Context>) -> Error {
    match error {
        Error::Unreachable { bootstrap_servers, waited_ms, .. } => {
            poll_log(client);
            Error::Unreachable { bootstrap_servers, waited_ms, reason: context.reason() }
        }
        other => other,
    }
}

fn admin(kafka: &KafkaConfig, context: &Context) -> Result<AdminClient<Context>> {
    let config = client_config(kafka, &[("socket.timeout.ms", "10000")], &[])?;
    AdminClient::from_config_and_context(&config, context.clone())
        .map_err(|error| translate(kafka, context, "create a client", Duration::ZERO, error))
}

fn options() -> AdminOptions {
    AdminOptions::new().request_timeout(Some(ANSWER_WAIT)).operation_timeout(Some(ANSWER_WAIT))
}
