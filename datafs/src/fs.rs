//! POSIX file-system semantics as a library, at the level of inodes.
//!
//! The operations are methods of [`View`] and [`OpenFile`]; the mount is an adapter over them.
//! Permissions are not checked here, except sticky directories for the mount. The kernel checks them for a
//! mount, and a library user can access the home directory anyway.
//!
//! Invariants:
//!  - each operation on names is one metadata transaction: it happens whole or not at all;
//!  - bytes written through an open file are visible to this process at once and to others after a flush;
//!    they survive a power failure after an fsync that returned `Ok`;
//!  - a file that was created without a name is freed at its last close, or after its process has died,
//!    unless it got a name;
//!  - a file that is unlinked or replaced while this or another process has it open stays readable and
//!    writable until the last close.

pub(crate) mod acl;
mod allocate;
mod attributes;
pub(crate) mod content;
mod copy;
mod directory;
pub(crate) mod dirty;
mod file;
pub(crate) mod fresh_object;
mod link;
pub(crate) mod lock;
mod namespace;
pub(crate) mod open_table;
pub(crate) mod orphan;
pub(crate) mod path;
mod rename;
pub(crate) mod scattered;
pub(crate) mod shared;
mod takeover;
pub(crate) mod tree;
pub(crate) mod types;
mod unnamed;
mod view;
pub(crate) mod watch;
mod whole_directory;
pub(crate) mod xattr;

pub use crate::node::{Attr, FileKind, Node};
pub use allocate::Allocate;
pub(crate) use directory::Page;
pub use file::OpenFile;
pub(crate) use file::{ReadBuffer, WriteAges};
pub use lock::{Blocker, FileLock, LOCK_END_MAX, LockFamily, LockOwner, Locking};
pub(crate) use rename::Moved;
pub(crate) use takeover::RequestMark;
pub(crate) use tree::{NameChecks, NameTarget, Unlinked};
pub use types::{NodeEntry, OpenFlags, Owner, SetAttr, SetTime, StatFs};
pub use view::View;
pub(crate) use whole_directory::Found;
pub use xattr::{SetXattr, XATTR_NAME_BYTES_MAX, XATTR_NAMES_BYTES_MAX, XATTR_VALUE_BYTES_MAX};

#[cfg(test)]
pub(crate) mod tests;
