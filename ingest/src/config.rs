//! The `[ingest]` table of `millrace.toml`: jobs that land topics in volumes.

use millrace_datafs::Name;
use serde::{Deserialize, Serialize};

use crate::decode::{Limits, UnknownFields};
use crate::error::{Error, Result};
use crate::schema::{DeclaredSchema, Origin, Schema};

/// The `[ingest]` table.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Topics to land, one job for each.
    pub jobs: Vec<JobConfig>,
}

impl Config {
    /// Checks every job, and that no two jobs of a volume share a name or nest their folders, those of dead
    /// letters included.
    ///
    /// # Errors
    /// [`Error::InvalidJob`] with the job and the setting.
    pub fn validate(&self) -> Result<()> {
        match self.problems().into_iter().next() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// The first error of each job that has one, with the job's place in `jobs`.
    #[must_use]
    pub fn problems(&self) -> Vec<(usize, Error)> {
        let of = |at: usize| self.validate_job(at).err().map(|error| (at, error));
        (0..self.jobs.len()).filter_map(of).collect()
    }

    /// Checks one job, alone and against the valid ones before it.
    fn validate_job(&self, at: usize) -> Result<()> {
        let job = &self.jobs[at];
        let checked = job.validate()?;
        for other in self.jobs[..at].iter().filter_map(|other| other.validate().ok()) {
            if other.config.volume != checked.config.volume {
                continue;
            }
            if other.config.name == checked.config.name {
                return Err(job.invalid("another job of this volume has the same name"));
            }
            if nested(&other.path, &checked.path) || nested(&checked.path, &other.path) {
                return Err(job.invalid(format!(
                    "path {:?} and that of job {} lie inside each other: give each its own \
                     folder",
                    job.path, other.config.name
                )));
            }
            for (files, dead) in [(&checked, &other), (&other, &checked)] {
                if let DeadLetter::Directory(folder) = &dead.dead_letter
                    && (nested(&files.path, folder) || nested(folder, &files.path))
                {
                    return Err(job.invalid(format!(
                        "the dead letters of job {} would lie among the files of job {}: \
                         choose another dead_letter directory",
                        dead.config.name, files.config.name
                    )));
                }
            }
        }
        Ok(())
    }

    /// The job of that name, in any volume.
    #[must_use]
    pub fn job(&self, name: &str) -> Option<&JobConfig> {
        self.jobs.iter().find(|job| job.name == name)
    }
}

/// Whether the folder `inner` is `outer` or lies in it.
pub(crate) fn nested(outer: &str, inner: &str) -> bool {
    outer.is_empty()
        || inner == outer
        || (inner.starts_with(outer) && inner.as_bytes().get(outer.len()) == Some(&b'/'))
}

/// One topic that lands as Parquet files under one folder of a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JobConfig {
    /// Name under which the volume keeps the job's offsets; 1 to 128 of `A-Za-z0-9._-`. A job
    /// keeps its topic and path for life.
    pub name: String,
    /// Topic to read with all its partitions; a running job reads added partitions within seconds. Use a new
    /// job for a topic that was deleted and created again.
    pub topic: String,
    /// Volume to write; it must exist.
    pub volume: String,
    /// Folder of the volume that holds the files, used by this job alone.
    pub path: String,
    /// Encoding of the record values.
    pub format: Format,
    /// Columns by name (`"int64"`, or `"int64?"` for nullable). Without it the columns are inferred from the
    /// first records and then fixed in the volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schema: Option<DeclaredSchema>,
    /// Fields without a column. Default: `reject` under a declared schema, `add_column` otherwise.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unknown_fields: Option<UnknownFields>,
    /// Publish after this many records.
    pub flush_rows_max: u64,
    /// Publish after records that take this many bytes of memory: keys, values and headers, and about 100 bytes
    /// for each record. Also bounds memory: see the crate's documentation.
    pub flush_bytes_max: u64,
    /// Publish when the oldest unpublished record was read this many milliseconds ago, whether or
    /// not more records come.
    pub flush_ms: u64,
    /// Whether files go to `dt=YYYY-MM-DD/hr=HH/` folders by the records' timestamps (UTC).
    pub partition_by_time: bool,
    /// Whether files have the columns `_topic`, `_partition`, `_offset` and `_timestamp`.
    pub lineage: bool,
    /// Destination of records that do not decode.
    pub dead_letter: DeadLetter,
    /// Records without a value, which delete a key of a compacted topic or follow a delete of Debezium.
    pub tombstones: Tombstones,
    /// Compression of the Parquet pages.
    pub compression: Compression,
    /// Longest value that is decoded, in bytes; at most 64 MiB. Longer ones become dead letters.
    pub record_bytes_max: usize,
    /// Deepest nesting of a record that is decoded; at most 128.
    pub depth_max: usize,
    /// Number of records from which the schema is inferred. Fewer are used when 16 MiB of them wait,
    /// `flush_ms` is over or the topic ends before.
    pub infer_rows: usize,
}

/// Encoding of record values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// One JSON object per record (RFC 8259).
    #[default]
    Json,
}

/// Destination of dead letters.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeadLetter {
    /// Parquet files in `<directory>/<job>/` of the same volume, exactly once.
    Directory(String),
    /// Records of a topic, at least once. Each has the key `topic/partition/offset` of the record that
    /// failed, so that readers (or compaction) recognize copies. A dead letter beyond the size limit of
    /// records leaves out the value, key and headers of the record; `millrace.value_bytes` has the value's
    /// size.
    Topic(String),
}

impl Default for DeadLetter {
    fn default() -> Self {
        Self::Directory("dead_letters".to_owned())
    }
}

/// Handling of records without a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tombstones {
    /// Each becomes a dead letter.
    #[default]
    DeadLetters,
    /// None of them lands. The report and a metric count them, and offsets pass them as any other record.
    Skip,
}

/// Compression of Parquet pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Compression {
    /// Zstandard, level 1.
    #[default]
    Zstd,
    /// Snappy.
    Snappy,
    /// None.
    Uncompressed,
}

impl Default for JobConfig {
    fn default() -> Self {
        Self {
            name: String::new(),
            topic: String::new(),
            volume: String::new(),
            path: String::new(),
            format: Format::Json,
            schema: None,
            unknown_fields: None,
            flush_rows_max: 1_000_000,
            flush_bytes_max: 128 << 20,
            flush_ms: 10_000,
            partition_by_time: false,
            lineage: true,
            dead_letter: DeadLetter::default(),
            tombstones: Tombstones::default(),
            compression: Compression::Zstd,
            record_bytes_max: Limits::default().record_bytes_max,
            depth_max: Limits::default().depth_max,
            infer_rows: 1000,
        }
    }
}

/// Longest record that a job may accept, in bytes.
const RECORD_BYTES_MAX: usize = 64 << 20;
/// Deepest nesting that a job may accept.
const DEPTH_MAX: usize = 128;

impl JobConfig {
    /// A job with defaults for everything else.
    #[must_use]
    pub fn new(name: &str, topic: &str, volume: &str, path: &str) -> Self {
        Self {
            name: name.to_owned(),
            topic: topic.to_owned(),
            volume: volume.to_owned(),
            path: path.to_owned(),
            ..Self::default()
        }
    }

    pub(crate) fn invalid(&self, reason: impl ToString) -> Error {
        Error::InvalidJob { job: self.name.clone(), reason: reason.to_string() }
    }

    /// Checks the settings of this job alone.
    pub(crate) fn validate(&self) -> Result<Job> {
        if self.name.is_empty() {
            return Err(self.invalid("a job needs a name"));
        }
        let name: Result<Name, _> = self.name.parse();
        name.map_err(|e| self.invalid(e))?;
        let topic = self.topic.as_str();
        let topic_char = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if topic.is_empty() || topic.len() > 249 || !topic.bytes().all(topic_char) {
            return Err(self.invalid(format!("{topic:?} is not a topic name")));
        }
        let volume: Name = self.volume.parse().map_err(|e| self.invalid(e))?;
        let path = self.folder("path", &self.path)?;
        if path.is_empty() {
            return Err(self.invalid("path must name a folder of the volume"));
        }
        let dead_letter = match &self.dead_letter {
            DeadLetter::Directory(directory) => {
                let folder = format!("{}/{}", self.folder("dead_letter", directory)?, self.name);
                let folder = folder.trim_start_matches('/').to_owned();
                if nested(&path, &folder) || nested(&folder, &path) {
                    return Err(self.invalid("dead letters cannot lie in the folder of the files"));
                }
                DeadLetter::Directory(folder)
            }
            DeadLetter::Topic(dead) if *dead == self.topic => {
                return Err(self.invalid("dead letters cannot go to the topic that is read"));
            }
            DeadLetter::Topic(dead) => DeadLetter::Topic(dead.clone()),
        };
        for (setting, zero) in [
            ("flush_rows_max", self.flush_rows_max == 0),
            ("flush_bytes_max", self.flush_bytes_max == 0),
            ("flush_ms", self.flush_ms == 0),
            ("infer_rows", self.infer_rows == 0),
        ] {
            if zero {
                return Err(self.invalid(format!("{setting} must be at least 1")));
            }
        }
        if self.record_bytes_max == 0 || self.record_bytes_max > RECORD_BYTES_MAX {
            return Err(self.invalid(format!("record_bytes_max must be 1 to {RECORD_BYTES_MAX}")));
        }
        if self.depth_max == 0 || self.depth_max > DEPTH_MAX {
            return Err(self.invalid(format!("depth_max must be 1 to {DEPTH_MAX}")));
        }
        if self.flush_bytes_max > 4 << 30 {
            return Err(self.invalid("flush_bytes_max must be at most 4 GiB"));
        }
        let declared = match &self.schema {
            Some(declared) => Some(declared.schema().map_err(|e| self.invalid(e))?),
            None => None,
        };
        let unknown = self.unknown_fields.unwrap_or(match declared {
            Some(_) => UnknownFields::Reject,
            None => UnknownFields::AddColumn,
        });
        if declared.is_some() && unknown == UnknownFields::AddColumn {
            return Err(self.invalid(
                "unknown_fields = \"add_column\" needs an inferred schema: declare the columns, or \
                 leave out the schema",
            ));
        }
        Ok(Job {
            config: self.clone(),
            volume,
            path,
            dead_letter,
            declared,
            unknown,
            limits: Limits {
                record_bytes_max: self.record_bytes_max,
                depth_max: self.depth_max,
                ..Limits::default()
            },
        })
    }

    /// A folder without slashes at its ends.
    fn folder(&self, setting: &str, folder: &str) -> Result<String> {
        let trimmed = folder.trim_matches('/');
        let bad = |part: &str| {
            part.is_empty() || part == "." || part == ".." || part == ".snapshots" || part.len() > 255
        };
        if !trimmed.is_empty() && trimmed.split('/').any(bad) || trimmed.len() > 2048 {
            return Err(self.invalid(format!("{setting} {folder:?} is not a folder of a volume")));
        }
        Ok(trimmed.to_owned())
    }
}

/// A job whose settings were checked.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) config: JobConfig,
    pub(crate) volume: Name,
    /// Without slashes at its ends, not empty.
    pub(crate) path: String,
    /// A directory ends with the job's name: `<directory>/<job>`.
    pub(crate) dead_letter: DeadLetter,
    pub(crate) declared: Option<Schema>,
    pub(crate) unknown: UnknownFields,
    pub(crate) limits: Limits,
}

impl Job {
    pub(crate) fn name(&self) -> &str {
        &self.config.name
    }

    pub(crate) fn topic(&self) -> &str {
        &self.config.topic
    }

    /// Whether the job leaves out a record with that value.
    pub(crate) fn skips(&self, value: Option<&[u8]>) -> bool {
        value.is_none() && self.config.tombstones == Tombstones::Skip
    }

    /// The schema to start with, given the stored one; `None`: infer it from records.
    pub(crate) fn resolve_schema(&self, stored: Option<&Schema>) -> Result<Option<Schema>> {
        let Some(declared) = &self.declared else {
            // A job that stops declaring continues with the columns it has, and may add some.
            return Ok(
                stored.map(|stored| Schema { origin: Origin::Inferred, fields: stored.fields.clone() })
            );
        };
        match stored {
            None => Ok(Some(declared.clone())),
            Some(stored) => stored.evolve(declared).map(Some).map_err(|e| Error::SchemaMismatch {
                job: self.name().to_owned(),
                volume: self.config.volume.clone(),
                reason: e.to_string(),
            }),
        }
    }
}
