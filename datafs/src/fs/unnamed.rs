//! Files created without a name (`O_TMPFILE`), which can get one later.
//!
//! The transaction that creates the file also makes it an orphan (`orphan.rs`): the orphan record names the
//! creating session as keeper and holder. So the last close frees it, or the garbage collector once that
//! session is dead, and no other code needs to know about it. The transaction that gives it a name deletes
//! the record.
//!
//! The attributes tell it from a file that lost its names: its `names_version` is 0, because it never lost
//! one.

use std::ffi::OsStr;

use super::View;
use super::acl;
use super::file::OpenFile;
use super::namespace::vacant;
use super::open_table::{LastNames, Naming};
use super::orphan::Orphan;
use super::tree;
use super::types::{OpenFlags, Owner};
use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::engine::Durability;
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::keys;
use crate::meta::versioned::Writer;
use crate::node::{Attr, FileKind, Node};

impl View {
    /// Creates a file without a name and opens it, as `open` does with `O_TMPFILE`. Owner, mode and access
    /// control list are those that [`View::create`] in `directory` would give it; the directory itself does
    /// not change. No other process can open the file, and no snapshot shows it. [`OpenFile::link`] gives it
    /// a name, unless `flags.exclusive`. Without a name, dropping the last handle frees it. If the process
    /// dies before, the next garbage collection of another process does.
    ///
    /// # Errors
    /// [`Error::Invalid`] without `flags.write`; [`Error::NotADirectory`], [`Error::NotFound`] and
    /// [`Error::ReadOnly`] as from [`View::create`].
    pub fn create_unnamed(
        &self,
        directory: Node,
        mode: u32,
        owner: Owner,
        flags: OpenFlags,
    ) -> Result<(Attr, OpenFile)> {
        let parent = self.writable(directory)?;
        if !flags.write {
            return Err(Error::Invalid("a file without a name has to be open for writing".into()));
        }
        let node = Node { snapshot: 0, ino: self.spare_inos(1)?.start };
        // Registered as open before it exists, as in `create`.
        let file = OpenFile::register(self, node, flags);
        let made =
            self.write(Durability::Relaxed, |writer| add(writer, parent, node.ino, mode, owner, flags));
        failpoint::hit("unnamed-made");
        if let Some(open) = file.open_inode() {
            match &made {
                Ok(_) => open.is_born_unnamed(),
                Err(error) if !error.is_definite() => open.may_be_unnamed(),
                Err(_) => {}
            }
        }
        Ok((made?.attr(node), file))
    }
}

/// Creates an inode without a name, and the orphan record that names this session as its holder.
fn add(
    writer: &mut Writer<'_>,
    parent: u64,
    ino: u64,
    mode: u32,
    owner: Owner,
    flags: OpenFlags,
) -> Result<Inode> {
    let directory = tree::directory(writer, parent)?;
    let mut inode = tree::child_inode(&directory, FileKind::File, mode, owner);
    inode.nlink = 0;
    if flags.exclusive {
        // Marks it as having lost its last name, so that it never gets one.
        inode.lost_name();
    }
    acl::inherit(writer, (parent, &directory), ino, &mut inode, 0)?;
    writer.put_new(&keys::attributes(ino), &inode.encode())?;
    let (volume, session) = (writer.volume(), writer.session());
    writer.txn().put(&keys::orphan(volume, ino), &Orphan::held_by(session).encode())?;
    Ok(inode)
}

impl OpenFile {
    /// Gives the file another name, as [`View::link`] does. For a file of [`View::create_unnamed`] it is the
    /// first one: `linkat` with `AT_EMPTY_PATH`. The file is flushed before its first name, so that a process
    /// that opens the name sees all of it. After [`OpenFile::fsync`] its contents are durable; the name is
    /// durable after a later [`OpenFile::fsync`] or [`View::fsync_dir`].
    ///
    /// # Errors
    /// [`Error::Exists`] when the name exists; [`Error::NotFound`] for a file that was created with
    /// `exclusive` or has lost its last name. The file then stays as it was, and open.
    pub fn link(&self, parent: Node, name: &OsStr) -> Result<Attr> {
        let view = self.view();
        if self.open_inode().is_none_or(|open| open.naming() == Naming::Usual) {
            return view.link(self.node(), parent, name);
        }
        let parent = view.writable(parent)?;
        self.flush()?;
        let (table, ino) = (&view.shared.open, self.node().ino);
        let mut naming = LastNames::default();
        let named = view.write(Durability::Relaxed, |writer| {
            naming.stay();
            let mut inode = tree::inode(writer, ino)?;
            let is_first = inode.nlink == 0;
            if is_first && inode.names_version > 0 {
                return Err(Error::not_found(format!("inode {ino}")));
            }
            let directory = vacant(writer, parent, name)?;
            naming.add(table, view.volume, ino);
            inode.nlink = tree::add_links(inode.nlink, 1)?;
            inode.ctime = Timestamp::now();
            tree::add_link(writer, (parent, directory), name, ino, &inode)?;
            if is_first {
                let volume = writer.volume();
                writer.txn().delete(&keys::orphan(volume, ino))?;
            }
            Ok(inode)
        });
        failpoint::hit("unnamed-named");
        match &named {
            Ok(_) => naming.named(true),
            Err(error) if !error.is_definite() => naming.named(false),
            Err(_) => naming.stay(),
        }
        Ok(view.attr_of(self.node(), &named?))
    }
}

#[cfg(test)]
#[path = "tests/unnamed.rs"]
pub(crate) mod tests;
