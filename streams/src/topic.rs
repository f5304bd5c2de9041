//! Topics of any broker that speaks the Kafka protocol.
//!
//! - [`Producer`]: idempotent and pipelined; a delivery names the offset.
//! - [`Consumer`]: explicit assignment from given offsets (or a consumer group on a Kafka
//!   cluster), records as Arrow batches ([`batch`]).
//! - [`create_topic`], [`delete_topic`], [`list_topics`], [`watermarks`].

mod admin;
pub mod batch;
mod client;
mod consumer;
mod headers;
mod leader;
mod producer;
mod span;
mod tail;

pub use admin::{TopicInfo, create_topic, delete_topic, ensure_topics, list_topics, watermarks};
pub use batch::{Records, blank_record, schema};
pub(crate) use client::blocking;
pub use client::wrong_properties;
pub use consumer::{Consumer, EARLIEST, LATEST};
pub use producer::{Delivery, OutRecord, Producer, Sent};
pub(crate) use span::{Isolation, Record, SpanReader};
