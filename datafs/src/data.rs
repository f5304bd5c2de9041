//! File data as objects: an object is written once, front to back, and what was written never changes.
//!
//! Invariants:
//!  - [`ObjectWriter::complete`] says what has to be synced before the object is durable (file and
//!    directory on a local store), so that a pointer committed after that never dangles.
//!  - Every read is verified against the checksums of the frames that it touches; what comes back
//!    is what was written, or an error that names the object and the byte.
//!  - An unfinished object is never readable: it has no name on the store before it is complete. Packs
//!    of small files are the exception: they grow under their name, piece by piece.
//!
//! What it is not: it knows no files, no volumes and no references; who points at an object, and
//! when nobody does any more, is metadata.

mod access_time;
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
mod extent;
mod fetch;
mod gather;
#[cfg(test)]
mod gcs_tests;
mod image;
mod index;
mod keyring;
mod local;
mod local_data;
mod local_file;
mod marker;
mod object;
mod pack;
mod pack_ahead;
mod pack_reader;
mod pack_writer;
mod pool;
mod raw;
mod reader;
mod remote;
mod remote_open;
mod retry;
mod runtime;
#[cfg(test)]
#[path = "../tests/support/s3_server.rs"]
pub(crate) mod s3_server;
#[cfg(test)]
mod s3_tests;
mod segment;
#[cfg(test)]
mod speed;
mod store;
#[cfg(test)]
mod tests;
mod upload;
mod verified;
mod writer;

pub(crate) use codec::Codec;
pub use codec::Compression;
pub(crate) use error::{ObjectError, no_space};
pub(crate) use extent::Extent;
pub(crate) use gather::{GATHER_BYTES, Gathered};
pub(crate) use keyring::{ExpectedKeys, KeyIdentity};
pub(crate) use local_file::Unsynced;
pub(crate) use object::{ObjectId, StoredObject};
pub(crate) use pack::{PACK_BYTES, PIECE_BYTES_MAX};
pub(crate) use pack_writer::{LocalPack, Pack, Packed, Packs};
pub(crate) use pool::ObjectPool;
pub(crate) use raw::{Copied, sync_names};
pub(crate) use runtime::{Io, Pending};
pub(crate) use writer::{Finished, ObjectWriter};
