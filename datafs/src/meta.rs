//! Metadata: an ordered key-value store with transactions, and the versioned records on top of it.
//!
//! Invariants:
//!  - every record of a volume (inode, entry, extent, application key) goes through [`versioned`], so that a
//!    snapshot covers all of them. What programs derive from a snapshot ([`derived`]) is beside the volume;
//!  - an object counts as referenced from the commit of the first extent that points at it until its last
//!    extent leaves the live tree and every snapshot. The same transaction then puts it on the garbage list.

mod change_log;
pub(crate) mod changes;
mod checkpoint;
pub(crate) mod closing;
pub(crate) mod codec;
mod committer;
pub(crate) mod derived;
pub(crate) mod engine;
mod file_space;
mod group;
mod group_state;
pub(crate) mod inode;
mod key_hash;
pub(crate) mod keys;
mod known_names;
mod layer;
mod merge;
pub(crate) mod metadata;
mod overlay;
pub(crate) mod postgres;
mod prerequisites;
mod record_cache;
pub(crate) mod references;
pub(crate) mod reserve;
mod shared_page;
pub(crate) mod snapshot;
pub(crate) mod sqlite;
pub(crate) mod versioned;
mod writer_lock;

#[cfg(test)]
pub(crate) mod counting;
#[cfg(test)]
pub(crate) mod faulty;
#[cfg(test)]
mod suite;
#[cfg(test)]
pub(crate) mod tests;
