//! Errors of starting and running a pipe, which reads records from one topic and writes predictions to another.

use millrace_serving_core::InferError;

/// Result of a pipe.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of starting or running a pipe.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration is invalid, or a part of the server failed.
    #[error(transparent)]
    Server(#[from] millrace_serving_core::Error),
    /// The volume that holds the progress failed.
    #[error("the volume failed")]
    Datafs(#[from] millrace_datafs::Error),
    /// The streams crate failed to access topics.
    #[error("the topics failed")]
    Streams(#[from] millrace_streams::Error),
    /// An inference request failed for a reason other than its record. Bad records become dead letters instead.
    #[error("inference failed")]
    Infer(#[from] InferError),
    /// Another process runs the same pipe.
    #[error(
        "pipe {name} is run by another process, which committed {topic} partition {partition} in between: give this one another name"
    )]
    Fenced {
        /// Name of the pipe.
        name: String,
        /// Input topic.
        topic: String,
        /// Partition.
        partition: i32,
    },
    /// The input of a pipe is not the topic that the pipe has read before, or lacks records that it has not
    /// yet read.
    #[error(
        "pipe {name}: topic {topic} partition {partition} does not continue at the position of the pipe: {reason}; \
         if the topic was deleted and created again, or its records removed on purpose, give the pipe another name (--name of \
         millrace pipe, name in [[serving.pipes]]), under which it begins at the first record"
    )]
    InputChanged {
        /// Name of the pipe.
        name: String,
        /// Input topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// The difference.
        reason: String,
    },
    /// No record of the first batch of a bounded run fits the model: a field has another name, or the topic is another
    /// one. Nothing was written or committed.
    #[error(
        "pipe {name}: no record of the first batch of topic {topic} fits model {model} ({records} were read): {reason}; \
         nothing was written and the position has not moved; name the field with --input of millrace pipe or columns in \
         [[serving.pipes]], or make dead letters of these records with --allow-unfit"
    )]
    Unfit {
        /// Name of the pipe.
        name: String,
        /// Input topic.
        topic: String,
        /// Model.
        model: String,
        /// Number of records in the batch.
        records: usize,
        /// The first record's place, fault and fields.
        reason: String,
    },
}

impl Error {
    /// True if the same call may succeed later without any change.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Server(source) => source.is_retryable(),
            Error::Datafs(source) => source.is_retryable(),
            Error::Streams(source) => source.is_retryable(),
            Error::Infer(source) => source.is_retryable(),
            Error::Fenced { .. } | Error::InputChanged { .. } | Error::Unfit { .. } => false,
        }
    }

    pub(crate) fn config(reason: String) -> Error {
        Error::Server(millrace_serving_core::Error::Config { reason })
    }
}
