//! Topics as Arrow batches, the embedded broker, and the feed from snapshots to trainers.
//!
//! What is here:
//! - [`topic`]: producers and consumers of any broker that speaks the Kafka protocol; consumed
//!   records come as Arrow record batches.
//! - [`broker`]: a single-node broker inside this process, so that a laptop needs no server.
//! - [`dataset`] and [`feed`]: a dataset at a snapshot as batches in a seeded global order, cut
//!   into shards for any number of readers, resumable from two numbers.
//!
//! What is not here: decoding of record values (that is `ingest`), durable consumer offsets (the landing side
//! keeps them beside the data), and training.
//!
//! Invariants:
//! - A producer is idempotent: a record that it reports as delivered is in the log exactly once.
//! - A consumer hands out the records of a partition in offset order, never one below the offset
//!   that it was asked to start from. Offsets may have gaps.
//! - The broker answers a produce request only when its batches survive a `kill -9` of the process.
//!
//! ```no_run
//! use millrace_streams::config::KafkaConfig;
//! use millrace_streams::topic::{self, Consumer, EARLIEST, OutRecord, Producer};
//! use std::time::Duration;
//!
//! # async fn example() -> millrace_streams::Result<()> {
//! let kafka = KafkaConfig::new("127.0.0.1:9092");
//! topic::create_topic(&kafka, "digits", 1).await?;
//! let producer = Producer::connect(&kafka).await?;
//! let delivery = producer.send(OutRecord::new("digits", r#"{"id":1}"#)).await?;
//! println!("partition {} offset {}", delivery.partition, delivery.offset);
//!
//! let start = [("digits".to_string(), 0, EARLIEST)];
//! let mut consumer = Consumer::assign(&kafka, &start).await?;
//! if let Some(batch) = consumer.next(10_000, 8 << 20, Duration::from_secs(1)).await? {
//!     println!("{} records", batch.num_rows());
//! }
//! # Ok(())
//! # }
//! ```

pub mod broker;
pub mod config;
pub mod dataset;
pub mod error;
pub mod feed;
#[doc(hidden)]
pub mod fuzzing;
pub mod metrics;
pub mod topic;

pub use config::{Config, KafkaConfig, PUBLIC_SECURITY_PROPERTIES, TopicConfig, is_public_property};
pub use error::{Error, Result};
