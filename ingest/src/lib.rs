//! Ingest: topics into Parquet files of a volume, exactly once.
//!
//! What is here: [`run()`] reads a topic from the offsets that a volume holds, decodes records into
//! Arrow columns ([`decode`], [`schema`]), streams them into staged Parquet files, and publishes
//! files and offsets in one metadata transaction. Records that do not decode become dead letters
//! with the reason. [`offsets`] tells up to where a volume (or a snapshot of it) holds a topic.
//!
//! What is not here: consumer groups (a restart reads its offsets from the volume alone), readers
//! of the files (that is `streams::feed`), volumes themselves.
//!
//! # Invariants
//!
//! - A record below the committed offset of its partition is in exactly one visible file, or is a
//!   dead letter, or is a tombstone that the job skips; a record at or above it is in none. Files, dead
//!   letters of a directory, offsets and schema become visible together or not at all.
//! - A second ingester on the same job takes it over; the first one's next publish fails as
//!   [`Error::Fenced`] and changes nothing.
//! - Offsets may have gaps: the committed position is the offset after the last one read, transaction
//!   markers included.
//! - Nothing is dropped: `records = landed + dead letters`, whatever bytes a topic holds. Only a job with
//!   [`Tombstones::Skip`] leaves out records without a value, and counts them. A batch that cannot be decoded
//!   counts as one record and is one dead letter, which names its offsets.
//!
//! - A folder of files or dead letters belongs to one job, with all below it; another one is refused as
//!   [`Error::FolderTaken`], also when both start at the same time.
//!
//! A topic that was deleted and created again is refused. While a partition is shorter than the committed
//! offset, the error is [`Error::OffsetLost`]. Otherwise it is [`Error::TopicReplaced`]: each start reads the
//! last landed record of each partition again and compares it. The check misses the change where that record
//! was removed from the topic meanwhile, and where the topic grows beyond the position within seconds while a
//! run reads it. Land such a topic under a new job name and path.
//!
//! A broker may lose its last records: a power loss with `flush = "os"`, an unclean election of a leader. Where
//! they had not landed yet, the run fails as [`Error::TopicShorter`], and the next run continues.
//!
//! # Files
//!
//! `<path>/[dt=YYYY-MM-DD/hr=HH/]<partition>-<first offset>-<last offset>.parquet` with row groups
//! of 4 to 16 MiB (the last one of a file may be smaller), page index, and the columns of the
//! record followed by `_topic`, `_partition`, `_offset` and `_timestamp`. Dead letters are in
//! `<directory>/<job>/` under names of the same form, with the unchanged record and `_reason`.
//!
//! # Records
//!
//! A record value is one JSON object (RFC 8259) in UTF-8. Each field must have the type of its column
//! ([`schema::Type`]) and fit it without loss. A value that does not fit makes the record a dead letter,
//! which gives the reason: a number out of range, an integer that a float cannot hold, a fraction in an
//! integer, a fixed list of another length, or `null` in a required column or inside a list. So does a
//! missing required field, a field that occurs twice, a value over `record_bytes_max` or nested deeper than
//! `depth_max`, or no value at all (a tombstone, unless the job skips it). So does a field without a column
//! under a declared schema. An inferred schema gets a new nullable column instead, typed by that first value.
//!
//! # Memory
//!
//! Reading stops while the landing thread is busy: besides the consumer's queue (32 MiB) there are at most
//! three batches of 4 MiB. A file under construction holds at most one row group and two upload parts (about
//! 8 + 8 MiB). All files together hold no more than their share of `flush_bytes_max` of records, because a
//! publish completes them. The memory of each record is counted
//! ([`Records::memory`](millrace_streams::topic::Records::memory)), so that tiny ones are bounded, too.
//!
//! ```no_run
//! use millrace_datafs::{Config as DatafsConfig, Datafs};
//! use millrace_ingest::{JobConfig, Until, run};
//! use millrace_streams::KafkaConfig;
//! use tokio_util::sync::CancellationToken;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let datafs = Datafs::open("/var/lib/millrace".as_ref(), &DatafsConfig::default())?;
//! let job = JobConfig::new("digits", "digits", "digits", "train");
//! let kafka = KafkaConfig::new("127.0.0.1:9092");
//! let report = run(&job, &datafs, &kafka, CancellationToken::new(), Until::CaughtUp).await?;
//! assert_eq!(report.records, report.landed + report.dead_letters);
//! # Ok(())
//! # }
//! ```

pub mod config;
pub mod decode;
pub mod error;
pub mod metrics;
pub mod schema;

mod land;
mod progress;
mod run;
mod state;

pub use config::{Config, DeadLetter, JobConfig, Tombstones};
pub use error::{Error, FolderOwner, Result};
pub use progress::{IngestReport, Progress, partition_lag};
pub use run::{Until, run, run_with_progress};
pub use state::{Offsets, offsets, offsets_by_job};
