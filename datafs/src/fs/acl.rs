//! POSIX access control lists, as ext4 has them. They are kept in the attributes `system.posix_acl_access`
//! and `system.posix_acl_default`, in step with the mode. New inodes inherit them from their directory.
//!
//! The kernel checks permissions for a mount; this module only keeps lists and modes consistent.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use super::tree;
use crate::error::{Error, Result};
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::keys;
use crate::meta::versioned::{Records as _, Writer};
use crate::node::FileKind;

/// Name of the attribute with the list of a node.
pub(crate) const ACCESS: &str = "system.posix_acl_access";
/// Name of the attribute with the list that a directory passes on to new inodes.
pub(crate) const DEFAULT: &str = "system.posix_acl_default";
/// Version of the attributes' format, which is the kernel's.
const VERSION: u32 = 2;
/// Most entries of a list: an attribute has no room for more.
const ENTRIES_MAX: usize = 8_000;
const UNDEFINED_ID: u32 = u32::MAX;

const USER_OBJ: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP_OBJ: u16 = 0x04;
const GROUP: u16 = 0x08;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A valid list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Acl(Vec<Entry>);

impl Acl {
    /// `None` for a list without entries, which stands for no list.
    pub(crate) fn decode(value: &[u8]) -> Result<Option<Acl>> {
        let invalid = |reason: &str| Err(Error::Invalid(format!("access control list: {reason}")));
        let Some((version, rest)) = value.split_at_checked(4) else { return invalid("it is too short") };
        if version != VERSION.to_le_bytes() {
            return Err(Error::Unsupported("this version of access control lists"));
        }
        if rest.len() % 8 != 0 || rest.len() / 8 > ENTRIES_MAX {
            return invalid("its length is that of no list");
        }
        let entry = |bytes: &[u8]| Entry {
            tag: u16::from_le_bytes([bytes[0], bytes[1]]),
            perm: u16::from_le_bytes([bytes[2], bytes[3]]),
            id: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        };
        let list: Vec<Entry> = rest.chunks_exact(8).map(entry).collect();
        if list.is_empty() {
            return Ok(None);
        }
        // Tags are in the order in which they are checked.
        if !list.is_sorted_by_key(|entry| entry.tag) || list.iter().any(|entry| entry.perm > 7) {
            return invalid("its entries are not in order, or allow what does not exist");
        }
        let count = |tag| list.iter().filter(|entry| entry.tag == tag).count();
        let known = [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER].map(count);
        let [user_obj, users, group_obj, groups, masks, others] = known;
        let named = users + groups;
        if known.iter().sum::<usize>() != list.len()
            || (user_obj, group_obj, others) != (1, 1, 1)
            || masks > 1
            || (named > 0 && masks == 0)
        {
            return invalid("an entry is missing, double or unknown");
        }
        let named = list.iter().filter(|entry| matches!(entry.tag, USER | GROUP));
        let mut ids: Vec<_> = named.map(|entry| (entry.tag, entry.id)).collect();
        ids.sort_unstable();
        let whole = ids.len();
        ids.dedup();
        if ids.len() != whole || ids.iter().any(|(_, id)| *id == UNDEFINED_ID) {
            return invalid("a user or group is named twice, or is none");
        }
        Ok(Some(Acl(list)))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_le_bytes().to_vec();
        for entry in &self.0 {
            value.extend_from_slice(&entry.tag.to_le_bytes());
            value.extend_from_slice(&entry.perm.to_le_bytes());
            let id = if matches!(entry.tag, USER | GROUP) { entry.id } else { UNDEFINED_ID };
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    /// Whether a mode expresses all of the list.
    fn is_mode(&self) -> bool {
        self.0.len() == 3
    }

    /// The entry that the group's bits of the mode stand for: the mask, if there is one.
    fn group_class(&self) -> u16 {
        if self.0.iter().any(|entry| entry.tag == MASK) { MASK } else { GROUP_OBJ }
    }

    /// Calls `change` with the permissions of each of the three classes of the mode, and the shift of the
    /// class's bits.
    fn classes(&mut self, mut change: impl FnMut(&mut u16, u32)) {
        let group = self.group_class();
        for entry in &mut self.0 {
            match entry.tag {
                USER_OBJ => change(&mut entry.perm, 6),
                OTHER => change(&mut entry.perm, 0),
                tag if tag == group => change(&mut entry.perm, 3),
                _ => {}
            }
        }
    }

    /// The permission bits of a mode that stand for the list.
    fn mode(&self) -> u32 {
        let mut mode = 0;
        self.clone().classes(|perm, shift| mode |= u32::from(*perm) << shift);
        mode
    }

    /// Applies a `chmod` to the list.
    fn set_mode(&mut self, mode: u32) {
        self.classes(|perm, shift| *perm = (mode >> shift & 7) as u16);
    }

    /// Restricts the list of a new node to the mode that the creating process asked for.
    fn narrow(&mut self, mode: u32) {
        self.classes(|perm, shift| *perm &= (mode >> shift & 7) as u16);
    }
}

/// Whether an attribute is one of the two lists.
pub(crate) fn is_acl(name: &OsStr) -> bool {
    name == ACCESS || name == DEFAULT
}

/// Sets a list of a node, whose inode the caller has read; an empty list removes it. With `keeps_group` the
/// caller may leave the set-group-ID bit on.
pub(crate) fn set(
    writer: &mut Writer<'_>,
    ino: u64,
    mut inode: Inode,
    name: &OsStr,
    value: &[u8],
    keeps_group: bool,
) -> Result<()> {
    const SET_GROUP_ID: u32 = 0o2000;
    let record = keys::xattr(ino, name.as_bytes());
    if inode.kind == FileKind::Symlink {
        return Err(Error::Unsupported("an access control list of a symbolic link"));
    }
    let acl = Acl::decode(value)?;
    if name == DEFAULT && !inode.is_directory() && acl.is_some() {
        return Err(Error::NotWritable {
            place: format!("inode {ino}").into(),
            source: std::io::Error::other("only directories pass an access control list on"),
        });
    }
    match acl {
        Some(acl) => {
            if name == ACCESS {
                inode.mode = inode.mode & !0o777 | acl.mode();
                if !keeps_group {
                    inode.mode &= !SET_GROUP_ID;
                }
            }
            if name == ACCESS && acl.is_mode() {
                writer.delete(&record)?;
            } else {
                writer.put(&record, &acl.encode())?;
            }
        }
        None => writer.delete(&record)?,
    }
    writer.settle(ino, &mut inode);
    inode.ctime = Timestamp::now();
    tree::put_inode(writer, ino, &inode)
}

/// Updates the list of a node whose mode has changed.
pub(crate) fn follow_mode(writer: &mut Writer<'_>, ino: u64, inode: &Inode) -> Result<()> {
    if !writer.has_xattrs(ino, inode) {
        return Ok(());
    }
    let record = keys::xattr(ino, ACCESS.as_bytes());
    let Some(value) = writer.get(&record)? else { return Ok(()) };
    match Acl::decode(&value)? {
        Some(mut acl) => {
            acl.set_mode(inode.mode);
            writer.put(&record, &acl.encode())
        }
        None => Ok(()),
    }
}

/// Applies the directory's default list to a new node. Without a default list, the umask applies to the mode.
pub(crate) fn inherit(
    writer: &mut Writer<'_>,
    (parent, directory): (u64, &Inode),
    ino: u64,
    inode: &mut Inode,
    umask: u32,
) -> Result<()> {
    let default = match writer.has_xattrs(parent, directory) {
        true => writer.get(&keys::xattr(parent, DEFAULT.as_bytes()))?,
        false => None,
    };
    let default = default.map_or(Ok(None), |value| Acl::decode(&value))?;
    let Some(mut acl) = default else {
        inode.mode &= !(umask & 0o777);
        return Ok(());
    };
    if inode.is_directory() {
        writer.put(&keys::xattr(ino, DEFAULT.as_bytes()), &acl.encode())?;
    }
    acl.narrow(inode.mode);
    inode.mode = inode.mode & !0o777 | acl.mode();
    if !acl.is_mode() {
        writer.put(&keys::xattr(ino, ACCESS.as_bytes()), &acl.encode())?;
    }
    writer.settle(ino, inode);
    Ok(())
}

#[cfg(test)]
#[path = "tests/acl.rs"]
mod tests;
