//! The semantics of a file system: what POSIX programs rely on, as a library at the level of inodes.
//!
//! The operations are methods of [`View`](crate::View) and [`OpenFile`]; the mount is an adapter over
//! them. Permissions are not checked here: the kernel does that for a mount, and a library user has
//! the home folder anyway.
//!
//! Invariants:
//!  - each operation on names is one metadata transaction: it happened or it did not;
//!  - what was written through an open file is visible to this process at once, to others after a
//!    flush, and survives a power failure after an fsync that returned `Ok`;
//!  - a file that is made without a name goes with its last close, or with whoever made it, unless it was
//!    given one;
//!  - a file that is unlinked or replaced while it is open, here or in another process, stays readable and
//!    writable until the last close.

pub(crate) mod acl;
mod allocate;
mod attributes;
pub(crate) mod content;
mod copy;
mod directory;
pub(crate) mod dirty;
mod file;
mod link;
pub(crate) mod lock;
mod namespace;
pub(crate) mod open_table;
pub(crate) mod orphan;
pub(crate) mod path;
mod rename;
pub(crate) mod tree;
pub(crate) mod types;
mod unnamed;
mod whole_directory;
pub(crate) mod xattr;

pub use allocate::Allocate;
pub(crate) use directory::Page;
pub use file::OpenFile;
pub(crate) use file::{ReadBuffer, WriteAges};
pub use lock::{Blocker, FileLock, LOCK_END_MAX, LockFamily, LockOwner, Locking};
pub(crate) use rename::Moved;
pub(crate) use tree::{NameChecks, NameTarget, Unlinked};
pub use types::{Attr, FileKind, Node, NodeEntry, OpenFlags, Owner, SetAttr, SetTime, StatFs};
pub(crate) use whole_directory::Found;
pub use xattr::{SetXattr, XATTR_NAME_BYTES_MAX, XATTR_NAMES_BYTES_MAX, XATTR_VALUE_BYTES_MAX};

#[cfg(test)]
pub(crate) mod tests;
