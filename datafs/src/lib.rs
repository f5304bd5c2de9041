//! Volumes with snapshots: POSIX semantics, metadata engines, file data in an object store, and the FUSE mount.
//!
//! A volume is a tree of files with application keys beside it. Programs read and write it in three ways,
//! which all see the same: through [`View`] (by path, or at the level of inodes), as an
//! [`object_store::ObjectStore`], and as a mount. A snapshot is a volume as of one moment; creating one costs
//! the same whatever the size, and its content never changes.
//!
//! Out of scope: file formats and topics; a server (processes share a home folder through the metadata
//! engine); permission checks (for a mount, the kernel does them).
//!
//! Invariants:
//!  - a name on disk never points at data that is not durable: objects are synced before the commit of their
//!    extents, or as a step of it;
//!  - a change is never lost once `fsync`, [`View::sync`] or a durable call has returned for it. Other
//!    changes are visible to all processes at once. They are committed in groups, in order, at most a few
//!    milliseconds later (5 ms, plus the commit). A killed process may lose the last group as a whole; a
//!    power failure may lose all changes since the last durable call;
//!  - each change of names, and each [`View::publish`] with any number of files and keys, is one transaction:
//!    all or nothing, for every process and after every crash;
//!  - every object belongs to an extent of the live tree or of a snapshot, or to a live process that has not
//!    published it yet. Any other object is recorded as garbage, or found through its session, and collected;
//!  - reads return only bytes that match the checksums stored with them, except through a file image that the
//!    mount passes to the kernel;
//!  - a format that is newer than this build is refused before anything is written.
//!
//! ```
//! use millrace_datafs::{Config, Datafs, Publish, VolumeSpec};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let home = tempfile::tempdir()?;
//! let datafs = Datafs::open(home.path(), &Config::default())?;
//! datafs.volume_create(&"digits".parse()?)?;
//! let live = datafs.view(&"digits".parse()?)?;
//!
//! // A file and a key become visible in one step.
//! let mut staged = live.stage()?;
//! staged.append(b"0 1 2 3")?;
//! live.publish(Publish::new().file("train/part-0", staged.finish()?).put_key("next", "4"))?;
//!
//! // A snapshot stays what it is.
//! datafs.snapshot_create(&"digits".parse()?, &"v1".parse()?)?;
//! live.write_file("train/part-0", b"changed")?;
//! let spec: VolumeSpec = "digits@v1".parse()?;
//! let v1 = datafs.view(&spec)?;
//! assert_eq!(&v1.read_file("train/part-0")?[..], b"0 1 2 3");
//! assert_eq!(v1.key_get("next")?, Some(b"4".to_vec()));
//! # Ok(())
//! # }
//! ```

mod backup;
mod collector;
mod compact;
mod config;
mod data;
mod datafs;
mod deletion;
mod deletion_lock;
mod deletion_record;
mod derived;
mod election;
mod error;
mod failpoint;
pub mod fs;
mod fsck;
#[doc(hidden)]
pub mod fuzzing;
mod garbage;
mod gc;
mod identity;
mod inherited;
mod meta;
mod meta_url;
mod metrics;
pub mod mount;
mod name;
mod node;
mod object;
mod publish;
mod random;
mod session;
mod slice;
mod snapshot_id;
#[cfg(test)]
mod store_tests;
mod store_view;
mod sweep;
mod transfer;
mod upkeep;
mod view;
mod volume;
mod warmup;

pub use backup::{BackupReport, RestoreReport};
pub use compact::{Compact, CompactReport};
pub use config::{Config, FromEnvironment, FromFile, PUBLIC_STORE_OPTIONS, Secret, is_public_store_option};
pub use datafs::Datafs;
pub use derived::{DERIVED_BYTES_MAX, DERIVED_ENTRIES_MAX, DERIVED_NAME_BYTES_MAX};
pub use error::{Error, Result};
pub use fs::{
    Allocate, Blocker, FileLock, LOCK_END_MAX, LockFamily, LockOwner, Locking, NodeEntry, OpenFile,
    OpenFlags, Owner, SetAttr, SetTime, SetXattr, StatFs, View, XATTR_NAME_BYTES_MAX, XATTR_NAMES_BYTES_MAX,
    XATTR_VALUE_BYTES_MAX,
};
pub use fsck::{FsckOptions, FsckProgress, FsckReport, Problem, ProblemKind, Remedy};
pub use gc::GcReport;
pub use inherited::close_inherited_locks;
pub use meta::closing::Closing;
pub use meta_url::MetaUrl;
pub use name::{Name, VolumeSpec};
pub use node::{Attr, FileKind, Node};
pub use object::Compression;
pub use publish::{KEY_BYTES_MAX, PUBLISH_STEPS_MAX, Publish, StagedFile, StagedWriter, VALUE_BYTES_MAX};
pub use snapshot_id::SnapshotId;
pub use transfer::{CopyOptions, CopyProgress, CopyReport, Endpoint};
pub use upkeep::UpkeepReport;
pub use view::{DirEntry, READ_FILE_BYTES_MAX, Stat};
pub use volume::{SnapshotInfo, Usage, VolumeInfo, VolumeList, VolumeOptions};
pub use warmup::Warmup;
