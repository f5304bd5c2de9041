//! Bounded ranges of topics as datasets: the specification, the range in offsets, and its records as JSON lines.
//!
//! A topic grows, and a plan needs rows that stay. The bound of a specification is therefore resolved once into offsets
//! of each partition ([`TopicRange`]), with a digest of the records between them. A scan cuts each partition into blocks
//! of bounded size. The store shows each block as a file of JSON lines, whose name says its offsets and its digest. Order,
//! splits, filters and positions are those of files.
//!
//! Invariants:
//! - The range decides the rows. Records that arrive later change nothing.
//! - Each record of the range is one row, or, with [`BadRecords::Skip`], counted as skipped. Offsets without a record
//!   (transaction markers, aborted transactions, compaction) are no rows.
//! - The bytes of a block are those of the scan, or reading it is an error.

mod block;
mod bound;
mod log;
mod open;
mod range;
mod render;
mod resolve;
mod spec;
mod store;

#[cfg(test)]
mod tests;

pub use bound::{Since, Until};
pub use range::{PartitionRange, TopicRange};
pub use spec::{BadRecords, TopicSpec};

pub(crate) use open::OpenTopic;
