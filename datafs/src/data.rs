//! Object storage for file data: an object is written once, front to back, and its bytes never change.
//!
//! Invariants:
//!  - [`ObjectWriter::complete`] returns what must be synced before the object is durable (file and directory
//!    on a local store). A pointer that is committed after that sync never dangles.
//!  - Reads are verified against the checksums of the frames that they touch. A read returns the bytes that
//!    were written, or an error that names the object and the byte.
//!  - An unfinished object is not readable: it gets its name in the store when it is complete. Packs of small
//!    files are the exception: they grow under their name, piece by piece.
//!
//! This module knows no files, no volumes and no references. The metadata records which files point at an object.

mod access_time;
mod backend;
mod cache;
#[cfg(test)]
mod cache_tests;
mod checksum;
mod codec;
#[cfg(test)]
pub(crate) mod codec_tests;
mod deleted;
mod durable;
mod encoded;
mod error;
mod evict;
mod fetch;
pub(crate) mod fuzzing;
#[cfg(test)]
mod gcs_tests;
mod image;
mod index;
pub(crate) mod keyring;
mod listing;
mod local;
mod local_data;
mod local_file;
mod local_pack;
mod marker;
mod pack;
mod pack_ahead;
mod pack_reader;
mod pack_writer;
mod pool;
mod raw;
mod reader;
mod remote;
mod remote_open;
mod remote_pack;
mod retry;
mod runtime;
#[cfg(test)]
mod s3_tests;
mod segment;
mod space;
#[cfg(test)]
mod speed;
mod store;
#[cfg(test)]
mod tests;
mod upload;
mod verified;
mod writer;

pub(crate) use cache::boot_of_machine;
pub(crate) use codec::Codec;
pub(crate) use error::ObjectError;
pub(crate) use listing::{ListPage, Listed, Part};
pub(crate) use local_file::Unsynced;
pub(crate) use local_pack::LocalPack;
pub(crate) use pack::{PACK_BYTES, PIECE_BYTES_MAX, Piece};
pub(crate) use pack_writer::{Pack, Packed, Packs};
pub(crate) use pool::ObjectPool;
pub(crate) use raw::{Copied, sync_names};
pub(crate) use remote_pack::{GATHER_BYTES, RemotePack};
pub(crate) use runtime::{Io, Pending};
pub(crate) use store::problems as store_problems;
pub(crate) use writer::{Finished, ObjectWriter};
