//! Links, hard and symbolic.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use super::View;
use super::namespace::vacant;
use super::path::PATH_BYTES_MAX;
use super::tree;
use super::types::Owner;
use crate::error::{Error, Result};
use crate::meta::engine::Durability;
use crate::meta::inode::Timestamp;
use crate::meta::keys;
use crate::meta::versioned::Records as _;
use crate::node::{Attr, FileKind, Node};

impl View {
    /// Gives a file, link, pipe, socket or device node another name.
    pub fn link(&self, node: Node, parent: Node, name: &OsStr) -> Result<Attr> {
        let ino = self.writable(node)?;
        let parent_ino = self.writable(parent)?;
        let inode = self.write(Durability::Relaxed, |writer| {
            let mut inode = tree::inode(writer, ino)?;
            if inode.is_directory() {
                return Err(Error::NotPermitted {
                    operation: "a hard link",
                    what: format!("directory {ino}"),
                });
            }
            if inode.nlink == 0 {
                return Err(Error::not_found(format!("inode {ino}")));
            }
            let directory = vacant(writer, parent_ino, name)?;
            inode.nlink = tree::add_links(inode.nlink, 1)?;
            inode.ctime = Timestamp::now();
            tree::add_link(writer, (parent_ino, directory), name, ino, &inode)?;
            Ok(inode)
        })?;
        Ok(self.attr_of(node, &inode))
    }

    /// Creates a symbolic link; the target has 1 to 4095 bytes and no NUL byte.
    pub fn symlink(&self, parent: Node, name: &OsStr, target: &OsStr, owner: Owner) -> Result<Attr> {
        let bytes = target.as_bytes();
        if bytes.len() > PATH_BYTES_MAX {
            return Err(Error::NameTooLong { bytes: bytes.len(), bytes_max: PATH_BYTES_MAX });
        }
        if bytes.is_empty() || bytes.contains(&0) {
            return Err(Error::InvalidName {
                name: tree::display(target),
                reason: "a link target has at least one byte and no NUL byte",
            });
        }
        let parent_ino = self.writable(parent)?;
        let ino = self.spare_inos(1)?.start;
        let inode = self.write(Durability::Relaxed, |writer| {
            let directory = vacant(writer, parent_ino, name)?;
            let mut inode = tree::child_inode(&directory, FileKind::Symlink, 0o777, owner);
            inode.size = bytes.len() as u64;
            writer.put_new(&keys::target(ino), bytes)?;
            tree::add_child(writer, (parent_ino, directory), name, ino, &inode)?;
            Ok(inode)
        })?;
        Ok(inode.attr(Node { snapshot: 0, ino }))
    }

    /// The target of a symbolic link.
    pub fn readlink(&self, node: Node) -> Result<OsString> {
        if self.is_snapshots_dir(node) {
            return Err(Error::Invalid("a directory is no symbolic link".into()));
        }
        self.read(node, |reader| match reader.get(&keys::target(node.ino))? {
            Some(target) => Ok(OsString::from_vec(target)),
            None => {
                tree::inode(reader, node.ino)?;
                Err(Error::Invalid(format!("inode {} is no symbolic link", node.ino)))
            }
        })
    }
}
