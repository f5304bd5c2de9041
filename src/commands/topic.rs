//! `millrace topic list|delete`: the topics of the broker.

use anyhow::Result;
use millrace_streams::KafkaConfig;
use millrace_streams::topic;

use crate::cli::TopicCommand;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output::count;

/// Runs the command.
pub(crate) async fn run(context: &Context, command: TopicCommand) -> Result<()> {
    let session = context.topics().await?;
    match command {
        TopicCommand::List => list(context, &session.kafka).await,
        TopicCommand::Delete { name, yes } => delete(context, &session.kafka, &name, yes).await,
    }
}

async fn list(context: &Context, kafka: &KafkaConfig) -> Result<()> {
    let (mut objects, mut rows) = (Vec::new(), Vec::new());
    for found in topic::list_topics(kafka).await? {
        for (partition, (low, high)) in topic::watermarks(kafka, &found.name).await? {
            objects.push(serde_json::json!({
                "topic": found.name, "partition": partition, "first": low, "next": high
            }));
            let (low, high) = (low.max(0) as u64, high.max(0) as u64);
            rows.push(vec![found.name.clone(), partition.to_string(), count(low), count(high)]);
        }
    }
    let object = serde_json::json!({ "partitions": objects });
    context.out.table(&object, &["topic", "partition", "first offset", "next offset"], rows)
}

async fn delete(context: &Context, kafka: &KafkaConfig, name: &str, yes: bool) -> Result<()> {
    let marks = match topic::watermarks(kafka, name).await {
        Err(millrace_streams::Error::UnknownTopic { .. }) => {
            let message =
                format!("cannot delete topic {name}: no topic has this name; see millrace topic list");
            return fail(Exit::NotFound, message);
        }
        marks => marks?,
    };
    let records: i64 = marks.values().map(|(low, high)| high - low).sum();
    // Also if no record can be read: a damaged partition may hold more.
    if !yes {
        let records = count(records.max(0) as u64);
        return fail(
            Exit::Usage,
            format!("topic {name} holds {records} records that can be read: add --yes to delete it for good"),
        );
    }
    topic::delete_topic(kafka, name).await?;
    context.out.table(
        &serde_json::json!({ "deleted": name }),
        &[],
        [vec![format!("topic {name} is deleted")]],
    )
}
