//! Names in directories: lookup, creation and removal of files and directories.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;

use super::View;
use super::acl;
use super::file::OpenFile;
use super::tree::{self, Closing, NameChecks, SNAPSHOTS_NAME, Unlinked};
use super::types::{OpenFlags, Owner};
use crate::error::{Error, Result};
use crate::meta::engine::Durability;
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::versioned::{Reader, Records as _, Writer};
use crate::meta::{keys, snapshot};
use crate::node::{Attr, FileKind, Node, ROOT_INO, SNAPSHOTS_INO};

/// Attempts of `create` while other processes create and remove the same name.
const CREATE_ATTEMPTS: u32 = 8;

impl View {
    /// The attributes of the node that a name leads to. `.` and `..` are accepted, and so is `.snapshots` in
    /// the root of a live view, although readdir does not list it there.
    pub fn lookup(&self, parent: Node, name: &OsStr) -> Result<Attr> {
        let missing = || match self.is_snapshots_dir(parent) {
            true => Error::not_found(format!("snapshot {}", tree::display(name))),
            false => Error::not_found(tree::display(name)),
        };
        self.find(parent, name)?.ok_or_else(missing)
    }

    /// [`View::lookup`] with `None` for a missing name; [`Error::NotFound`] for a missing directory.
    pub(crate) fn find(&self, parent: Node, name: &OsStr) -> Result<Option<Attr>> {
        Ok(self.find_and(parent, name, |_, _, _| Ok(()))?.map(|(attr, ())| attr))
    }

    /// [`View::find`], with the target of a symbolic link.
    pub(crate) fn find_with_target(
        &self,
        parent: Node,
        name: &OsStr,
    ) -> Result<Option<(Attr, Option<OsString>)>> {
        self.find_and(parent, name, |reader, ino, inode| match inode.kind {
            FileKind::Symlink => Ok(reader.get(&keys::target(ino))?.map(OsString::from_vec)),
            _ => Ok(None),
        })
    }

    /// [`View::find`], with what `more` reads of the inode in the same transaction. `more` does not run for
    /// `.`, `..`, `.snapshots` and the entries of `.snapshots`.
    fn find_and<T: Default>(
        &self,
        parent: Node,
        name: &OsStr,
        mut more: impl FnMut(&mut Reader<'_>, u64, &Inode) -> Result<T>,
    ) -> Result<Option<(Attr, T)>> {
        let alone = |attr| Some((attr, T::default()));
        if name == "." {
            return self.getattr(parent).map(alone);
        }
        if name == ".." {
            return self.getattr(self.parent_of(parent)?).map(alone);
        }
        tree::check_name(name)?;
        if self.is_snapshots_dir(parent) {
            return Ok(self.find_snapshot(name)?.and_then(alone));
        }
        if parent == Node::LIVE_ROOT && name == SNAPSHOTS_NAME {
            return self.getattr(Node { snapshot: 0, ino: SNAPSHOTS_INO }).map(alone);
        }
        self.read(parent, |reader| {
            let Some(dentry) = tree::child(reader, parent.ino, name)? else {
                return tree::directory(reader, parent.ino).map(|_| None);
            };
            let inode = tree::inode(reader, dentry.ino)?;
            let more = more(reader, dentry.ino, &inode)?;
            Ok(Some((self.attr_of(Node { snapshot: parent.snapshot, ino: dentry.ino }, &inode), more)))
        })
    }

    fn find_snapshot(&self, name: &OsStr) -> Result<Option<Attr>> {
        let Some(name) = name.to_str() else { return Ok(None) };
        let Some(number) = self.shared.meta.view(|txn| snapshot::find(txn, self.volume, name))? else {
            return Ok(None);
        };
        self.getattr(Node { snapshot: number, ino: ROOT_INO }).map(Some)
    }

    /// The directory that `..` of a directory leads to.
    pub(crate) fn parent_of(&self, node: Node) -> Result<Node> {
        if self.is_snapshots_dir(node) {
            return Ok(self.root());
        }
        let inode = self.read(node, |reader| tree::directory(reader, node.ino))?;
        Ok(self.parent_in(node, &inode))
    }

    /// [`View::parent_of`] for a directory whose inode the caller has read.
    pub(crate) fn parent_in(&self, node: Node, inode: &Inode) -> Node {
        if node == self.root() {
            return node;
        }
        if node.ino == ROOT_INO {
            // The root of a snapshot, seen in a live view.
            return Node { snapshot: 0, ino: SNAPSHOTS_INO };
        }
        Node { snapshot: node.snapshot, ino: inode.parent }
    }

    /// Makes an empty file, pipe, socket or device node.
    pub fn mknod(
        &self,
        parent: Node,
        name: &OsStr,
        kind: FileKind,
        mode: u32,
        rdev: u32,
        owner: Owner,
    ) -> Result<Attr> {
        self.mknod_masked(parent, name, kind, (mode, 0), rdev, owner)
    }

    /// [`View::mknod`] with the umask of the calling process. The umask applies unless the directory has a
    /// default access control list.
    pub(crate) fn mknod_masked(
        &self,
        parent: Node,
        name: &OsStr,
        kind: FileKind,
        (mode, umask): (u32, u32),
        rdev: u32,
        owner: Owner,
    ) -> Result<Attr> {
        if matches!(kind, FileKind::Directory | FileKind::Symlink) {
            return Err(Error::Invalid("mknod makes no directories and no links".into()));
        }
        let rdev = if matches!(kind, FileKind::BlockDevice | FileKind::CharDevice) { rdev } else { 0 };
        self.make(parent, name, &New { kind, mode, umask, rdev, owner })
    }

    /// Makes an empty directory.
    pub fn mkdir(&self, parent: Node, name: &OsStr, mode: u32, owner: Owner) -> Result<Attr> {
        self.mkdir_masked(parent, name, mode, 0, owner)
    }

    /// [`View::mkdir`] with the umask of the calling process.
    pub(crate) fn mkdir_masked(
        &self,
        parent: Node,
        name: &OsStr,
        mode: u32,
        umask: u32,
        owner: Owner,
    ) -> Result<Attr> {
        self.make(parent, name, &New { kind: FileKind::Directory, mode, umask, rdev: 0, owner })
    }

    fn make(&self, parent: Node, name: &OsStr, new: &New) -> Result<Attr> {
        let parent_ino = self.writable(parent)?;
        let ino = self.spare_inos(1)?.start;
        let inode = self.write(Durability::Relaxed, |writer| {
            tree::prefetch_entry(writer, parent_ino, name)?;
            add_new(writer, parent_ino, name, ino, new)
        })?;
        Ok(inode.attr(Node { snapshot: 0, ino }))
    }

    /// Creates and opens a file; opens an existing one unless `flags.exclusive`.
    pub fn create(
        &self,
        parent: Node,
        name: &OsStr,
        mode: u32,
        owner: Owner,
        flags: OpenFlags,
    ) -> Result<(Attr, OpenFile)> {
        self.create_masked(parent, name, mode, 0, owner, flags)
    }

    /// [`View::create`] with the umask of the calling process.
    pub(crate) fn create_masked(
        &self,
        parent: Node,
        name: &OsStr,
        mode: u32,
        umask: u32,
        owner: Owner,
        flags: OpenFlags,
    ) -> Result<(Attr, OpenFile)> {
        let parent_ino = self.writable(parent)?;
        let new = New { kind: FileKind::File, mode, umask, rdev: 0, owner };
        for _ in 0..CREATE_ATTEMPTS {
            let node = Node { snapshot: 0, ino: self.spare_inos(1)?.start };
            // Registered as open before it exists, so that an unlink in between cannot free it.
            let file = OpenFile::register(self, node, flags);
            let made = self.write(Durability::Relaxed, |writer| {
                tree::check_entry(parent_ino, name)?;
                tree::prefetch_entry(writer, parent_ino, name)?;
                match tree::child(writer, parent_ino, name)? {
                    Some(dentry) if !flags.exclusive => Ok(Err(dentry)),
                    _ => add_new(writer, parent_ino, name, node.ino, &new).map(Ok),
                }
            })?;
            match made {
                Ok(inode) => {
                    file.has_name();
                    return Ok((inode.attr(node), file));
                }
                Err(dentry) => match self.open(Node { snapshot: 0, ino: dentry.ino }, flags) {
                    // Unlinked since the transaction: try to create it again.
                    Err(Error::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                    Ok(file) => return Ok((file.attr()?, file)),
                },
            }
        }
        Err(Error::not_found(tree::display(name)))
    }

    /// Removes a name of anything but a directory. The last name frees the inode; while this or another
    /// process has it open, the last close does.
    pub fn unlink(&self, parent: Node, name: &OsStr) -> Result<()> {
        self.unlink_by(parent, name, NameChecks::NONE).map(drop)
    }

    /// [`View::unlink`] with the caller's checks in the same transaction.
    pub(crate) fn unlink_by(&self, parent: Node, name: &OsStr, checks: NameChecks<'_>) -> Result<Unlinked> {
        let parent_ino = self.writable(parent)?;
        self.write_closing(Durability::Relaxed, |writer, closing| {
            tree::prefetch_entry(writer, parent_ino, name)?;
            checks.check(writer, parent_ino, name)?;
            self.unlink_in(writer, parent_ino, name, closing)
        })
    }

    /// [`View::unlink`] inside a transaction.
    pub(crate) fn unlink_in<'a>(
        &'a self,
        writer: &mut Writer<'_>,
        parent: u64,
        name: &OsStr,
        closing: &mut Closing<'a>,
    ) -> Result<Unlinked> {
        tree::check_entry(parent, name)?;
        tree::prefetch_entry(writer, parent, name)?;
        let dentry = tree::existing(writer, parent, name)?;
        if dentry.kind == FileKind::Directory {
            return Err(Error::IsADirectory { what: tree::display(name) });
        }
        let now = Timestamp::now();
        let mut directory = tree::directory(writer, parent)?;
        tree::touch_directory(&mut directory, 0, now)?;
        tree::put_inode(writer, parent, &directory)?;
        tree::delete_child(writer, parent, name)?;
        let inode = tree::inode(writer, dentry.ino)?;
        tree::drop_link(writer, dentry.ino, inode, now, &self.shared.open, closing)
    }

    /// Removes an empty directory.
    pub fn rmdir(&self, parent: Node, name: &OsStr) -> Result<()> {
        self.rmdir_by(parent, name, NameChecks::NONE).map(drop)
    }

    /// [`View::rmdir`] with the caller's checks in the same transaction.
    pub(crate) fn rmdir_by(&self, parent: Node, name: &OsStr, checks: NameChecks<'_>) -> Result<Unlinked> {
        let parent_ino = self.writable(parent)?;
        if name == "." {
            return Err(Error::Invalid("'.' cannot be removed".into()));
        }
        if name == ".." {
            return Err(Error::NotEmpty { what: "..".into() });
        }
        self.write(Durability::Relaxed, |writer| {
            tree::check_entry(parent_ino, name)?;
            checks.check(writer, parent_ino, name)?;
            let dentry = tree::existing(writer, parent_ino, name)?;
            let removed = remove_directory(writer, dentry.ino, name)?;
            let mut directory = tree::directory(writer, parent_ino)?;
            tree::touch_directory(&mut directory, -1, removed.inode.ctime)?;
            tree::put_inode(writer, parent_ino, &directory)?;
            tree::delete_child(writer, parent_ino, name)?;
            Ok(removed)
        })
    }

    /// A write transaction that may remove the last name of an inode.
    pub(crate) fn write_closing<'a, T>(
        &'a self,
        durability: Durability,
        mut body: impl FnMut(&mut Writer<'_>, &mut Closing<'a>) -> Result<T>,
    ) -> Result<T> {
        let mut closing = Closing::default();
        let result = self.write(durability, |writer| {
            closing.undo();
            body(writer, &mut closing)
        });
        match result {
            Ok(_) => closing.committed(&self.shared.orphans),
            Err(_) => closing.undo(),
        }
        if closing.collect {
            self.shared.collector.wake();
        }
        result
    }

    /// Makes the entries of a directory durable.
    pub fn fsync_dir(&self, node: Node) -> Result<()> {
        // The entries of a snapshot became durable with it.
        if node.is_live() && !self.is_snapshots_dir(node) { self.shared.meta.sync() } else { Ok(()) }
    }
}

/// Removes the inode of a directory, which must be empty.
pub(super) fn remove_directory(writer: &mut Writer<'_>, ino: u64, name: &OsStr) -> Result<Unlinked> {
    let mut inode = tree::inode(writer, ino)?;
    if !inode.is_directory() {
        return Err(Error::NotADirectory { what: tree::display(name) });
    }
    if !tree::is_empty(writer, ino)? {
        return Err(Error::NotEmpty { what: tree::display(name) });
    }
    tree::remove_empty(writer, ino, &inode)?;
    (inode.nlink, inode.ctime) = (0, Timestamp::now());
    Ok(Unlinked { ino, inode, target: None })
}

/// Kind, mode and owner of a new inode.
struct New {
    kind: FileKind,
    mode: u32,
    /// Bits that are cleared from the mode, unless the directory has a default access control list.
    umask: u32,
    rdev: u32,
    owner: Owner,
}

/// Creates an inode and its name; [`Error::Exists`] when the name is taken.
fn add_new(writer: &mut Writer<'_>, parent: u64, name: &OsStr, ino: u64, new: &New) -> Result<Inode> {
    let directory = vacant(writer, parent, name)?;
    let mut inode = tree::child_inode(&directory, new.kind, new.mode, new.owner);
    inode.rdev = new.rdev;
    acl::inherit(writer, (parent, &directory), ino, &mut inode, new.umask)?;
    if new.kind == FileKind::Directory {
        return tree::add_directory(writer, (parent, directory), name, ino, inode);
    }
    tree::add_child(writer, (parent, directory), name, ino, &inode)?;
    Ok(inode)
}

/// Reads the inode of a name's directory; [`Error::Exists`] when the name is taken.
pub(super) fn vacant(writer: &mut Writer<'_>, parent: u64, name: &OsStr) -> Result<Inode> {
    if parent == ROOT_INO && name == SNAPSHOTS_NAME {
        return Err(Error::Exists { what: SNAPSHOTS_NAME.into() });
    }
    tree::check_entry(parent, name)?;
    let directory = tree::directory(writer, parent)?;
    if tree::child(writer, parent, name)?.is_some() {
        return Err(Error::Exists { what: tree::display(name) });
    }
    Ok(directory)
}
