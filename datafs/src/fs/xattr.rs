//! Extended attributes: named values of an inode, each in a separate versioned record, so that snapshots keep
//! them.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use super::View;
use super::acl;
use super::open_table::Unflushed;
use super::tree;
use crate::error::{Error, Result};
use crate::meta::engine::{Durability, Order};
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::keys;
use crate::meta::versioned::{Records, Writer};
use crate::node::{FileKind, Node};

/// Longest name of an extended attribute, in bytes, with its namespace (`user.`).
pub const XATTR_NAME_BYTES_MAX: usize = 255;
/// Longest value of an extended attribute, in bytes.
pub const XATTR_VALUE_BYTES_MAX: usize = 65_536;
/// Most bytes of all attribute names of one inode, each with a NUL byte after it: the kernel's limit for a
/// list.
pub const XATTR_NAMES_BYTES_MAX: usize = 65_536;
/// Names read by one scan.
const PAGE: usize = 64;
/// The attribute that gives a program privileges. A change of the program removes it.
const CAPABILITY: &str = "security.capability";
/// The set-user-ID bit of a mode.
const SET_USER_ID: u32 = 0o4000;
/// The set-group-ID bit of a mode; it grants privileges only if the group may execute.
const SET_GROUP_ID: u32 = 0o2000;
const GROUP_EXECUTES: u32 = 0o010;

/// Whether an extended attribute may or must exist when it is set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum SetXattr {
    /// Set it whether it exists or not.
    #[default]
    Any,
    /// Fail with [`Error::Exists`] when it exists.
    Create,
    /// Fail with [`Error::NoAttribute`] when it does not exist.
    Replace,
}

impl View {
    /// Sets an extended attribute. Names begin with `user.` (files and directories only), `trusted.` or
    /// `security.`, or are those of the two access control lists in `system.`. A list changes the mode too.
    /// Other names are [`Error::Unsupported`]. The kernel checks for a mount whether a process may set the
    /// name; library users are not checked.
    ///
    /// # Errors
    /// [`Error::NameTooLong`] and [`Error::TooLarge`] beyond [`XATTR_NAME_BYTES_MAX`] and
    /// [`XATTR_VALUE_BYTES_MAX`], [`Error::NoSpace`] beyond [`XATTR_NAMES_BYTES_MAX`].
    pub fn xattr_set(&self, node: Node, name: &OsStr, value: &[u8], how: SetXattr) -> Result<()> {
        if acl::is_acl(name) {
            return self.acl_set(node, name, value, true);
        }
        let ino = self.writable(node)?;
        check_name(name)?;
        if value.len() > XATTR_VALUE_BYTES_MAX {
            let max = XATTR_VALUE_BYTES_MAX as u64;
            return Err(Error::TooLarge { what: "extended attribute in bytes", max });
        }
        let record = keys::xattr(ino, name.as_bytes());
        self.write_attributes(ino, |writer, unflushed| {
            let mut inode = tree::inode(writer, ino)?;
            drop_pending(writer, ino, &mut inode, unflushed)?;
            let user = name.as_bytes().starts_with(b"user.");
            if user && !matches!(inode.kind, FileKind::File | FileKind::Directory) {
                return Err(Error::NotPermitted {
                    operation: "a user attribute",
                    what: format!("inode {ino}, which is neither file nor directory"),
                });
            }
            match (writer.get(&record)?.is_some(), how) {
                (true, SetXattr::Create) => return Err(Error::Exists { what: tree::display(name) }),
                (false, SetXattr::Replace) => return Err(missing(name)),
                (true, _) => {}
                (false, _) => {
                    let used: usize = names(writer, ino)?.iter().map(|name| name.len() + 1).sum();
                    if used + name.len() + 1 > XATTR_NAMES_BYTES_MAX {
                        return Err(Error::NoSpace {
                            place: format!("the attributes of inode {ino}"),
                            quota: false,
                        });
                    }
                }
            }
            writer.put(&record, value)?;
            writer.settle(ino, &mut inode);
            inode.ctime = Timestamp::now();
            tree::put_inode(writer, ino, &inode)
        })
    }

    /// Sets an access control list; an empty one removes it. With `keeps_group` the caller may leave the
    /// set-group-ID bit on.
    pub(crate) fn acl_set(&self, node: Node, name: &OsStr, value: &[u8], keeps_group: bool) -> Result<()> {
        let ino = self.writable(node)?;
        self.write_attributes(ino, |writer, unflushed| {
            let mut inode = tree::inode(writer, ino)?;
            drop_pending(writer, ino, &mut inode, unflushed)?;
            acl::set(writer, ino, inode, name, value, keeps_group)
        })
    }

    /// Commits a change of a node's attributes. `body` gets the effects of unflushed writes on them and
    /// applies those first ([`drop_pending`]). No flush runs meanwhile.
    fn write_attributes<T>(
        &self,
        ino: u64,
        mut body: impl FnMut(&mut Writer<'_>, Option<Unflushed>) -> Result<T>,
    ) -> Result<T> {
        let open = self.shared.open.get(self.volume, ino);
        let _dirty = open.as_ref().map(|open| open.dirty.lock());
        let unflushed = open.as_ref().and_then(|open| open.unflushed());
        let changed = self.write(Durability::Relaxed, |writer| body(writer, unflushed))?;
        if let Some(open) = &open {
            open.attributes_set(None);
        }
        Ok(changed)
    }

    /// Whether an unflushed write has removed this attribute.
    fn is_taken(&self, node: Node, name: &OsStr) -> bool {
        name == CAPABILITY
            && node.is_live()
            && self
                .shared
                .open
                .get(self.volume, node.ino)
                .is_some_and(|open| open.unflushed().is_some_and(|unflushed| unflushed.drop_capabilities))
    }

    /// The value of an extended attribute; [`Error::NoAttribute`] when there is none of that name.
    pub fn xattr_get(&self, node: Node, name: &OsStr) -> Result<Vec<u8>> {
        check_name(name)?;
        if self.is_snapshots_dir(node) || self.is_taken(node, name) {
            return Err(missing(name));
        }
        self.read(node, |reader| {
            // Most files have none, and the kernel asks before each first write.
            if tree::inode(reader, node.ino)?.xattrs == 0 {
                return Err(missing(name));
            }
            reader.get(&keys::xattr(node.ino, name.as_bytes()))?.ok_or_else(|| missing(name))
        })
    }

    /// The names of all extended attributes, in byte order.
    pub fn xattr_list(&self, node: Node) -> Result<Vec<OsString>> {
        if self.is_snapshots_dir(node) {
            return Ok(Vec::new());
        }
        let mut names = self.read(node, |reader| match tree::inode(reader, node.ino)?.xattrs {
            0 => Ok(Vec::new()),
            _ => names(reader, node.ino),
        })?;
        names.retain(|name| !self.is_taken(node, name));
        Ok(names)
    }

    /// Removes an extended attribute; [`Error::NoAttribute`] when there is none of that name and it is not an
    /// access control list.
    pub fn xattr_remove(&self, node: Node, name: &OsStr) -> Result<()> {
        let ino = self.writable(node)?;
        check_name(name)?;
        let record = keys::xattr(ino, name.as_bytes());
        self.write_attributes(ino, |writer, unflushed| {
            let mut inode = tree::inode(writer, ino)?;
            drop_pending(writer, ino, &mut inode, unflushed)?;
            if writer.get(&record)?.is_none() {
                // As on ext4, removing a missing list succeeds.
                return if acl::is_acl(name) { Ok(()) } else { Err(missing(name)) };
            }
            writer.delete(&record)?;
            writer.settle(ino, &mut inode);
            inode.ctime = Timestamp::now();
            tree::put_inode(writer, ino, &inode)
        })
    }
}

/// The mode of a non-directory without the set-user-ID bit, and without the set-group-ID bit if the group may
/// execute.
pub(crate) fn without_privileges(mode: u32) -> u32 {
    let mode = mode & !SET_USER_ID;
    if mode & GROUP_EXECUTES == 0 { mode } else { mode & !SET_GROUP_ID }
}

/// Removes the capabilities of a file whose content or owner changes.
pub(crate) fn drop_capabilities(writer: &mut Writer<'_>, ino: u64, inode: &Inode) -> Result<()> {
    if inode.kind == FileKind::File && writer.has_xattrs(ino, inode) {
        writer.delete(&keys::xattr(ino, CAPABILITY.as_bytes()))
    } else {
        Ok(())
    }
}

/// Applies what unflushed writes do to a file's privileges. A local file system applies it at the write, so
/// privileges that are set after the write stay.
pub(crate) fn drop_pending(
    writer: &mut Writer<'_>,
    ino: u64,
    inode: &mut Inode,
    unflushed: Option<Unflushed>,
) -> Result<()> {
    let Some(unflushed) = unflushed else { return Ok(()) };
    if unflushed.drop_privileges {
        inode.mode = without_privileges(inode.mode);
    }
    if unflushed.drop_capabilities {
        drop_capabilities(writer, ino, inode)?;
        writer.settle(ino, inode);
    }
    Ok(())
}

fn missing(name: &OsStr) -> Error {
    Error::NoAttribute { name: tree::display(name) }
}

fn check_name(name: &OsStr) -> Result<()> {
    let bytes = name.as_bytes();
    if bytes.len() > XATTR_NAME_BYTES_MAX {
        return Err(Error::NameTooLong { bytes: bytes.len(), bytes_max: XATTR_NAME_BYTES_MAX });
    }
    if acl::is_acl(name) {
        return Ok(());
    }
    let spaces: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    let Some(space) = spaces.into_iter().find(|space| bytes.starts_with(space)) else {
        return Err(Error::Unsupported("an attribute outside of user., trusted. and security."));
    };
    if bytes.len() == space.len() || bytes.contains(&0) {
        return Err(Error::InvalidName {
            name: tree::display(name),
            reason: "an attribute has a name behind its namespace, without NUL bytes",
        });
    }
    Ok(())
}

fn names(records: &mut dyn Records, ino: u64) -> Result<Vec<OsString>> {
    let mut start = keys::xattrs(ino);
    let end = keys::after_prefix(&start);
    let mut found = Vec::new();
    loop {
        let page = records.scan(&start, &end, Order::Ascending, PAGE)?;
        for (record, _) in &page {
            let name = keys::xattr_name(record)
                .ok_or_else(|| Error::corrupt("extended attribute", "its key has no name"))?;
            found.push(OsString::from_vec(name.to_vec()));
        }
        match page.into_iter().next_back() {
            Some((last, _)) if found.len() % PAGE == 0 => {
                start = last;
                start.push(0);
            }
            _ => return Ok(found),
        }
    }
}
