//! Errors of landing: one variant for each distinct reaction of the caller.

use millrace_leaf::error_chain;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A job and the folder that belongs to it.
#[derive(Debug, PartialEq, Eq)]
pub struct FolderOwner {
    /// Job.
    pub job: String,
    /// Topic of the job.
    pub topic: String,
    /// The folder.
    pub folder: String,
}

impl std::fmt::Display for FolderOwner {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} belongs to job {} (topic {})", self.folder, self.job, self.topic)
    }
}

/// Errors of ingest. After any error the volume holds complete publishes only: a later run continues at the
/// committed offsets, without loss and without duplicates.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting is not usable: correct the configuration.
    #[error("ingest job {job:?}: {reason}")]
    InvalidJob {
        /// Job name as configured.
        job: String,
        /// The setting, and the values that it allows.
        reason: String,
    },
    /// The topic does not exist: create it.
    #[error(
        "ingest job {job}: topic {topic} does not exist at {bootstrap_servers}; create it, \
         produce to it, or correct the job's topic"
    )]
    TopicMissing {
        /// Job.
        job: String,
        /// Topic.
        topic: String,
        /// The brokers that were asked.
        bootstrap_servers: String,
    },
    /// The volume does not exist: create it.
    #[error(
        "ingest job {job}: volume {volume} does not exist; create it with: millrace volume create \
         {volume}"
    )]
    VolumeMissing {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
    },
    /// Another ingester took the job over; this one must stop.
    #[error(
        "ingest job {job} of volume {volume} is fenced: another ingester took it over, and only \
         one can run"
    )]
    Fenced {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
    },
    /// The declared columns do not fit the existing files.
    #[error("ingest job {job}: the declared schema does not fit volume {volume}: {reason}")]
    SchemaMismatch {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
        /// The column, and the remedy.
        reason: String,
    },
    /// The records have no columns in common: most would be dead letters under an inferred schema.
    #[error(
        "ingest job {job}: {dead} of the first {records} records of topic {topic} would be dead letters \
         (the first: {reason}); correct the job's topic, or declare its columns to land the rest: give the job a schema \
         under [[ingest.jobs]], where the type json takes any value, and run millrace ingest --job {job}"
    )]
    MostlyDead {
        /// Job.
        job: String,
        /// Topic.
        topic: String,
        /// Records in the sample.
        records: usize,
        /// Those that do not decode.
        dead: usize,
        /// Reason for the first of them.
        reason: String,
    },
    /// The volume knows the job with another topic or folder.
    #[error("ingest job {job} of volume {volume} {what}: use another job name, or delete the volume")]
    JobChanged {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
        /// What changed.
        what: String,
    },
    /// A folder of the job belongs to another job: files of both would replace each other.
    #[error(
        "ingest job {job} of volume {volume} cannot use folder {folder}: {owner}; \
         choose another path or dead_letter directory for one of them"
    )]
    FolderTaken {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
        /// Folder that the job wants, for files or for dead letters.
        folder: String,
        /// The owner of a folder in it or around it.
        owner: Box<FolderOwner>,
    },
    /// The topic was deleted and created again: continuing would skip its first records and mix the two.
    #[error(
        "ingest job {job}: topic {topic} was deleted and created again: at offset {offset} of partition \
         {partition} it holds another record than the one that landed in volume {volume}; land it under a \
         new job name and path, or in another volume"
    )]
    TopicReplaced {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
        /// Topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// Offset of the last record that landed.
        offset: i64,
    },
    /// The committed offset is not in the topic any more: records were deleted before they landed, or the
    /// topic was created again. Landing would lose or mix records.
    #[error(
        "ingest job {job}: topic {topic} partition {partition} holds offsets {low} to {high}, but \
         the volume continues at {committed}: {why}; land under a new job name and path"
    )]
    OffsetLost {
        /// Job.
        job: String,
        /// Topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// Next offset by the volume.
        committed: i64,
        /// First offset of the topic.
        low: i64,
        /// Offset after the topic's last.
        high: i64,
        /// The cause.
        why: &'static str,
    },
    /// The topic lost records that had not landed yet: they were in it when the run began. Nothing that landed is
    /// missing in the topic, and the next run continues at the committed offset.
    #[error(
        "ingest job {job}: topic {topic} partition {partition} ended at offset {end} when the run began and ends at \
         {high} now: the brokers lost records, or the topic was created again; run again to check it and to continue"
    )]
    TopicShorter {
        /// Job.
        job: String,
        /// Topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// Offset after the topic's last as the run began.
        end: i64,
        /// Offset after the topic's last now.
        high: i64,
    },
    /// The disk is full; nothing half-written is visible. Free space and run again.
    #[error(
        "ingest job {job}: no space left while landing in volume {volume}; none of its rows \
         are visible; free space and run again to continue at the committed offsets"
    )]
    NoSpace {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
        /// The underlying error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The state of the job in the volume is damaged.
    #[error("volume {volume}: key {key:?} of ingest is damaged: {reason}")]
    CorruptState {
        /// Volume.
        volume: String,
        /// Application key.
        key: String,
        /// The damage that was found.
        reason: String,
    },
    /// The volume failed.
    #[error("ingest job {job}: volume {volume}")]
    Volume {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
        /// The volume's error.
        #[source]
        source: Box<millrace_datafs::Error>,
    },
    /// Reading a volume's ingest state failed.
    #[error("read the ingest state")]
    State(#[source] Box<millrace_datafs::Error>),
    /// The brokers failed.
    #[error("ingest job {job}: topic {topic}")]
    Topic {
        /// Job.
        job: String,
        /// Topic.
        topic: String,
        /// The client's error.
        #[source]
        source: Box<millrace_streams::Error>,
    },
    /// A Parquet file could not be written.
    #[error("ingest job {job}: write a Parquet file in volume {volume}")]
    Parquet {
        /// Job.
        job: String,
        /// Volume.
        volume: String,
        /// The writer's error.
        #[source]
        source: Box<parquet::errors::ParquetError>,
    },
    /// Arrow rejected columns that the decoder built.
    #[error("ingest job {job}: build a record batch")]
    Arrow {
        /// Job.
        job: String,
        /// Arrow's error.
        #[source]
        source: Box<arrow::error::ArrowError>,
    },
    /// The landing thread ended without a result, or the runtime is shutting down.
    #[error("ingest job {job}: the landing thread stopped")]
    Stopped {
        /// Job.
        job: String,
    },
}

impl Error {
    /// Whether the same run may succeed later without a change of the configuration.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NoSpace { .. } | Self::TopicShorter { .. } => true,
            Self::Topic { source, .. } => source.is_retryable(),
            Self::Volume { source, .. } | Self::State(source) => source.is_retryable(),
            _ => false,
        }
    }
}

/// Whether a full disk is in the chain of causes.
pub(crate) fn is_no_space(error: &(dyn std::error::Error + 'static)) -> bool {
    for error in error_chain::causes(error) {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            if matches!(io.kind(), std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded) {
                return true;
            }
            // The payload of io::Error::other is not its source().
            if io.get_ref().is_some_and(|inner| is_no_space(inner)) {
                return true;
            }
        }
        if let Some(millrace_datafs::Error::NoSpace { .. } | millrace_datafs::Error::NoSpaceToCommit { .. }) =
            error.downcast_ref()
        {
            return true;
        }
        if let Some(parquet::errors::ParquetError::External(inner)) = error.downcast_ref()
            && is_no_space(inner.as_ref())
        {
            return true;
        }
    }
    false
}
