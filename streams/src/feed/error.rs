//! Errors of datasets and of the feed: one variant for each distinct reaction of the caller.

use std::sync::Arc;

use crate::feed::PlanId;

/// The result of feed and dataset operations.
pub type Result<T, E = FeedError> = std::result::Result<T, E>;

/// An error of the feed or of the dataset behind it.
///
/// It is `Clone` because one decoding serves every batch that waits for it, failures included.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FeedError {
    /// The path of the dataset does not exist, or holds no file that is data.
    #[error("dataset {path}: no data file found: {}", no_files_words(*.ignored))]
    NoFiles {
        /// Path inside the store.
        path: String,
        /// Files below the path that are not data (other suffixes, hidden names).
        ignored: usize,
    },
    /// The path of the dataset holds files of several formats.
    #[error(
        "dataset {path}: {first} but {other}; a dataset has files of one format: name the format in front, for example \
         {format}:VOLUME@SNAPSHOT:/PATH, or move the others away"
    )]
    MixedFormats {
        /// Path inside the store.
        path: String,
        /// A file and its format.
        first: String,
        /// Another file and its format.
        other: String,
        /// Name of the first file's format.
        format: &'static str,
    },
    /// The data files hold no rows.
    #[error("dataset {path}: its data files ({files}) hold no row; nothing to feed")]
    NoRows {
        /// Path inside the store.
        path: String,
        /// How many data files were found.
        files: usize,
    },
    /// The selection selects no row of the dataset.
    #[error(
        "dataset {path}: none of its {rows} rows is selected by {selection}; check the condition and the part"
    )]
    NothingSelected {
        /// Path inside the store.
        path: String,
        /// Rows of the dataset.
        rows: u64,
        /// The selection in canonical form.
        selection: String,
    },
    /// A filter that cannot be parsed.
    #[error("where {text:?}, character {at}: {reason}")]
    Filter {
        /// The filter; a long one is cut around the place.
        text: String,
        /// Number of the character, from 1.
        at: usize,
        /// What is wrong there.
        reason: String,
    },
    /// The dataset is beyond a limit of the plan.
    #[error("dataset {path}: {what} exceeds the limit of {limit}; split the dataset into several paths")]
    TooLarge {
        /// Path inside the store.
        path: String,
        /// The quantity that exceeds the limit.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// Two files of one dataset disagree about the type of a column.
    #[error(
        "column {column:?} is {first_type} in {first_file} but {file_type} in {file}; a dataset has one type per column"
    )]
    SchemaConflict {
        /// Name of the column.
        column: String,
        /// The first file that has the column.
        first_file: String,
        /// Its type there.
        first_type: String,
        /// The file that disagrees.
        file: String,
        /// Its type there.
        file_type: String,
    },
    /// A requested column is in none of the files.
    #[error("column {column:?} is not in the dataset; it has {available}")]
    NoColumn {
        /// The requested name.
        column: String,
        /// The names that exist, comma separated.
        available: String,
    },
    /// A file cannot be understood: truncated, corrupt, or not of the format its name promises.
    #[error(
        "read {file}: {what} is truncated or corrupt; write the file again, or remove it and take a new snapshot"
    )]
    Corrupt {
        /// Path of the file inside the store.
        file: String,
        /// The damaged part of the file.
        what: String,
        /// The decoder's error.
        #[source]
        source: Arc<dyn std::error::Error + Send + Sync>,
    },
    /// A row or a member of a file that cannot be read.
    #[error("read {file}, {place}: {reason}; correct it and take a new snapshot")]
    Row {
        /// Path of the file inside the store.
        file: String,
        /// The row, for example `line 7`.
        place: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A part of a file that can only be decoded as a whole takes more memory than the feed may use for it.
    #[error(
        "read {file}: {what} takes {bytes} bytes once it is decoded, more than the {limit} that a feed takes \
         (record_batch_bytes_max); write the file again with smaller record batches or rows"
    )]
    Oversized {
        /// Path of the file inside the store.
        file: String,
        /// The part of the file that is too large.
        what: String,
        /// Its size once decoded, as far as the file says.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A file uses a feature of its format that this program does not read.
    #[error("read {file}: {what} cannot be read by this program ({reason}); write the file again without it")]
    Unsupported {
        /// Path of the file inside the store.
        file: String,
        /// The part of the file that uses the feature.
        what: String,
        /// The decoder's message.
        reason: String,
    },
    /// A file changed after the plan was made.
    #[error("{file} changed since the plan was made ({what}); feed from a snapshot, or make a new plan")]
    Changed {
        /// Path of the file inside the store.
        file: String,
        /// What differs.
        what: String,
    },
    /// The object store failed. Transient unless the file is gone.
    #[error("read {file}")]
    Store {
        /// Path of the file or directory inside the store.
        file: String,
        /// The store's error.
        #[source]
        source: Arc<object_store::Error>,
    },
    /// Arrow could not assemble decoded columns into a batch.
    #[error("assemble rows of {file}")]
    Assemble {
        /// Path of the file (or files) concerned.
        file: String,
        /// Arrow's error.
        #[source]
        source: Arc<arrow::error::ArrowError>,
    },
    /// An image of a row that cannot become a tensor.
    #[error("decode image column {column:?} in {place}: {reason}")]
    Image {
        /// Name of the column.
        column: String,
        /// The row: its file, row group and number.
        place: String,
        /// What is wrong with the image, and what to do.
        reason: String,
    },
    /// An option, path, slot range or step that is invalid or out of bounds.
    #[error("{what}")]
    Invalid {
        /// The option, its value and the allowed values.
        what: String,
    },
    /// A file with two columns of one name: reading by name would drop one of them.
    #[error("{file} has two columns {column:?}; rename one and write the file again")]
    DuplicateColumn {
        /// Name of the columns.
        column: String,
        /// The file.
        file: String,
    },
    /// A dataset specification that cannot be parsed.
    #[error("dataset {text:?}: {reason}; write VOLUME[@SNAPSHOT]:/PATH, for example digits@v1:/train")]
    InvalidSpec {
        /// The text as given.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The specification of a topic that cannot be parsed.
    #[error(
        "topic {text:?}: {reason}; write topic:NAME@UNTIL with latest, a number of records or a time, for example \
         topic:clicks@2026-11-28T06:00:00Z"
    )]
    InvalidTopicSpec {
        /// The text as given, or its beginning.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A topic cannot be read as a dataset.
    #[error("read topic {topic} as a dataset")]
    Topic {
        /// Name of the topic.
        topic: String,
        /// The error of the topic.
        #[source]
        source: Arc<crate::Error>,
    },
    /// The volume or its snapshot cannot be opened.
    #[error("open dataset {spec}")]
    Volume {
        /// The requested dataset.
        spec: String,
        /// The volume's error.
        #[source]
        source: Arc<millrace_datafs::Error>,
    },
    /// A cursor of another plan: resuming from it would repeat and skip rows.
    #[error(
        "cursor belongs to plan {cursor}, this feed runs plan {plan}; resume with the same snapshot, seed, lanes, window and batch size, or start a new run"
    )]
    OtherPlan {
        /// The plan of the cursor.
        cursor: PlanId,
        /// The plan of the feed.
        plan: PlanId,
    },
    /// A position in another order of rows: resuming from it would repeat and skip rows.
    #[error(
        "the state belongs to order {order}, this feed reads order {plan}; resume with the same snapshots, rows, seed and weights, or start anew"
    )]
    OtherOrder {
        /// The order of the state.
        order: PlanId,
        /// The order of the feed.
        plan: PlanId,
    },
    /// A dataset that was made again under its name, with other files of the same sizes and numbers of rows.
    #[error(
        "dataset {dataset} was replaced since the feed was opened, or a file of it was written again; open the feed anew"
    )]
    OtherContent {
        /// The dataset.
        dataset: String,
    },
    /// Sources of a mixture that do not have the same columns.
    #[error(
        "mixture: column {column:?} is {first}, and {other}; name the columns to read, or write one of the datasets anew"
    )]
    MixedColumns {
        /// The column.
        column: String,
        /// Its type in the first source, or that it is missing, with the source.
        first: String,
        /// Its type in the other source, or that it is missing, with the source.
        other: String,
    },
    /// A stored plan that cannot be used by this program.
    #[error("stored plan is unusable: {what}; make it again from the snapshot")]
    UnusablePlan {
        /// What is wrong with it.
        what: String,
    },
    /// A device on which batches are staged cannot be used, or has no memory left.
    #[error("stage batches on {device}: {reason}")]
    Device {
        /// The device, for example `cuda:0`.
        device: String,
        /// What is wrong with it, and what to do.
        reason: String,
    },
    /// The reader holds all slots of a ring.
    #[error(
        "stage batches on {device}: the program holds batches in all {slots} slots of {bytes} bytes, and let go of none \
         within {seconds} s; drop batches, keep copies of them (tensor.clone(), array.copy()), or leave device out"
    )]
    SlotsHeld {
        /// The device.
        device: String,
        /// Slots of the ring.
        slots: usize,
        /// Bytes of a slot.
        bytes: u64,
        /// How long the ring has waited.
        seconds: u64,
    },
    /// The runtime shut down (or the feed was dropped) while a decoding was under way.
    #[error("feed stopped while reading {file}")]
    Stopped {
        /// Path of the file being read.
        file: String,
    },
}

fn no_files_words(ignored: usize) -> String {
    match ignored {
        0 => "there is no file at or below this path; see millrace ls, or ingest into it first".to_owned(),
        count => format!(
            "the names of the files there ({count}) tell no format; write it in front, for example \
             csv:VOLUME@SNAPSHOT:/PATH, or folder:VOLUME@SNAPSHOT:/PATH for files in one folder a class"
        ),
    }
}

impl FeedError {
    /// True when a retry of the same call may succeed.
    pub fn is_retryable(&self) -> bool {
        match self {
            FeedError::Store { source, .. } => !matches!(
                **source,
                object_store::Error::NotFound { .. }
                    | object_store::Error::InvalidPath { .. }
                    | object_store::Error::NotSupported { .. }
                    | object_store::Error::PermissionDenied { .. }
                    | object_store::Error::Unauthenticated { .. }
            ),
            FeedError::Topic { source, .. } => source.is_retryable(),
            _ => false,
        }
    }

    pub(crate) fn topic(topic: &str, source: crate::Error) -> Self {
        FeedError::Topic { topic: topic.to_owned(), source: Arc::new(source) }
    }

    pub(crate) fn invalid(what: impl Into<String>) -> Self {
        FeedError::Invalid { what: what.into() }
    }

    pub(crate) fn store(file: impl Into<String>, source: object_store::Error) -> Self {
        match source {
            object_store::Error::Precondition { .. } => FeedError::Changed {
                file: file.into(),
                what: "it changed after planning; feed a snapshot".to_string(),
            },
            source => Self::of_store(file.into(), source),
        }
    }

    /// An error of a topic is told as that: its records are read as files, and their names say nothing to users.
    fn of_store(file: String, source: object_store::Error) -> Self {
        match source {
            object_store::Error::NotFound { source, .. } | object_store::Error::Generic { source, .. }
                if source.is::<crate::Error>() =>
            {
                let topic = file.split('/').next().unwrap_or_default();
                match source.downcast::<crate::Error>() {
                    Ok(error) => FeedError::topic(topic, *error),
                    Err(source) => {
                        let source = object_store::Error::Generic { store: "topic", source };
                        FeedError::Store { file, source: Arc::new(source) }
                    }
                }
            }
            source => FeedError::Store { file, source: Arc::new(source) },
        }
    }

    pub(crate) fn corrupt(
        file: impl Into<String>,
        what: impl Into<String>,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        FeedError::Corrupt { file: file.into(), what: what.into(), source: Arc::new(source) }
    }

    pub(crate) fn assemble(file: impl Into<String>, source: arrow::error::ArrowError) -> Self {
        FeedError::Assemble { file: file.into(), source: Arc::new(source) }
    }

    /// Separates a failed store from a bad file and an unsupported feature: all arrive as Parquet errors.
    pub(crate) fn from_parquet(
        file: &str,
        what: impl Into<String>,
        error: parquet::errors::ParquetError,
    ) -> Self {
        match error {
            parquet::errors::ParquetError::External(inner) => match inner.downcast::<object_store::Error>() {
                Ok(store) => FeedError::store(file, *store),
                Err(other) => {
                    FeedError::Corrupt { file: file.to_string(), what: what.into(), source: Arc::from(other) }
                }
            },
            parquet::errors::ParquetError::NYI(reason) => {
                FeedError::Unsupported { file: file.to_string(), what: what.into(), reason }
            }
            other => FeedError::corrupt(file, what, other),
        }
    }
}
