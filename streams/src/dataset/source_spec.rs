//! Specification of what a feed reads: a dataset of a volume, or a bounded range of a topic.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use millrace_datafs::{Datafs, Name};
use serde::{Deserialize, Serialize};

use super::topic::TopicSpec;
use super::{DatasetSpec, OpenDataset};
use crate::config::KafkaConfig;
use crate::feed::error::{FeedError, Result};

/// A dataset of a volume, or a range of a topic, by its text.
///
/// `topic:` begins the specification of a topic, unless a slash follows: that is the volume of this name.
///
/// ```
/// use millrace_streams::dataset::SourceSpec;
/// let spec: SourceSpec = "digits@v1:/train".parse()?;
/// assert!(matches!(spec, SourceSpec::Dataset(_)));
/// let spec: SourceSpec = "topic:clicks@10000".parse()?;
/// assert!(matches!(spec, SourceSpec::Topic(_)));
/// # Ok::<(), millrace_streams::feed::FeedError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SourceSpec {
    /// Files of a volume.
    Dataset(DatasetSpec),
    /// Records of a topic.
    Topic(TopicSpec),
}

impl SourceSpec {
    /// The volume of a dataset; none for a topic.
    pub fn volume(&self) -> Option<&Name> {
        self.dataset().map(|dataset| &dataset.source.volume)
    }

    /// The dataset of a volume; none for a topic.
    pub fn dataset(&self) -> Option<&DatasetSpec> {
        match self {
            SourceSpec::Dataset(dataset) => Some(dataset),
            SourceSpec::Topic(_) => None,
        }
    }

    /// The range of a topic; none for a dataset of a volume.
    pub fn topic(&self) -> Option<&TopicSpec> {
        match self {
            SourceSpec::Dataset(_) => None,
            SourceSpec::Topic(topic) => Some(topic),
        }
    }

    /// Whether opening it again later can give other rows: the newest snapshot, or a topic without offsets.
    pub fn is_moving(&self) -> bool {
        match self {
            SourceSpec::Dataset(dataset) => dataset.source.is_latest(),
            SourceSpec::Topic(topic) => topic.range.is_none(),
        }
    }

    /// Opens it, as [`DatasetSpec::open`] and [`TopicSpec::open`] do. `kafka` are the brokers, where there are some.
    ///
    /// # Errors
    /// Those of the two; [`FeedError::Invalid`] for a topic without brokers.
    pub async fn open(&self, datafs: &Datafs, kafka: Option<&KafkaConfig>) -> Result<OpenDataset> {
        match self {
            SourceSpec::Dataset(dataset) => dataset.open(datafs).await,
            SourceSpec::Topic(topic) => {
                let kafka = kafka.ok_or_else(|| {
                    FeedError::invalid(format!(
                        "read topic {}: no broker is known here; set streams.bootstrap_servers",
                        topic.topic
                    ))
                })?;
                topic.open(kafka, datafs.home()).await
            }
        }
    }
}

impl TopicSpec {
    /// Opens the topic at brokers. Resolves bounds without offsets: reads the records between them once, and the
    /// opened dataset has a specification with offsets. With offsets, reads nothing until it is planned.
    ///
    /// `home` keeps what a scan has found.
    ///
    /// # Errors
    /// [`FeedError::Topic`]: see [`crate::Error`].
    pub async fn open(&self, kafka: &KafkaConfig, home: &Path) -> Result<OpenDataset> {
        let opened = super::topic::OpenTopic::open(self, kafka, home).await;
        Ok(OpenDataset::of_topic(opened.map_err(|error| FeedError::topic(&self.topic, error))?))
    }
}

impl FromStr for SourceSpec {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<Self> {
        match text.strip_prefix("topic:") {
            Some(rest) if !rest.starts_with('/') => text.parse().map(SourceSpec::Topic),
            _ => text.parse().map(SourceSpec::Dataset),
        }
    }
}

impl fmt::Display for SourceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceSpec::Dataset(dataset) => dataset.fmt(f),
            SourceSpec::Topic(topic) => topic.fmt(f),
        }
    }
}

impl TryFrom<String> for SourceSpec {
    type Error = FeedError;
    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<SourceSpec> for String {
    fn from(spec: SourceSpec) -> String {
        spec.to_string()
    }
}

impl From<DatasetSpec> for SourceSpec {
    fn from(dataset: DatasetSpec) -> SourceSpec {
        SourceSpec::Dataset(dataset)
    }
}
