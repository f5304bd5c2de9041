//! On-disk log of a partition: segment files of record batches, their recovery, and the table of idempotent
//! producers.

pub(crate) mod batch;
mod checkpoint;
pub(crate) mod partition;
mod producers;
mod recovery;
mod segment;
pub(crate) mod segments;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use partition::{Partition, Refused};
