//! Lifetimes of names and attributes in the kernel.

use std::time::Duration;

use crate::node::{Attr, FileKind};

/// Lifetime of attributes and names of a snapshot, which never changes, and of attributes that the mount can
/// revoke.
pub(in crate::mount) const FOREVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// A reply older than this has arrived in the kernel.
pub(in crate::mount) const IN_FLIGHT: Duration = Duration::from_millis(100);
/// Lifetime of a directory's name in the kernel. A lookup costs about 15 µs.
const DIRECTORY_NAME_LIFETIME: Duration = Duration::from_secs(2);
/// Lifetime of other names. An open checks whether a file has lost a name.
const NAME_LIFETIME: Duration = Duration::from_secs(60);

/// Lifetime of the name of a node whose attributes the kernel may cache.
pub(in crate::mount) fn name_lifetime(attr: &Attr) -> Duration {
    match attr.kind {
        _ if !attr.node.is_live() => FOREVER,
        FileKind::Directory => DIRECTORY_NAME_LIFETIME,
        _ => NAME_LIFETIME,
    }
}
