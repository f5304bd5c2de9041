//! Building blocks of the file-system operations inside a transaction: inodes, directory entries, links.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use super::content;
use super::open_table::{LastNames, OpenTable};
use super::orphan::{Orphan, Orphans};
use super::types::Owner;
use crate::error::{Error, Result};
use crate::meta::engine::Order;
use crate::meta::inode::{Dentry, Inode, Timestamp};
use crate::meta::keys;
use crate::meta::versioned::{Records, Writer};
use crate::node::{FileKind, ROOT_INO};
use crate::session;

/// Longest file name, in bytes.
pub(crate) const NAME_BYTES_MAX: usize = 255;
/// Name of the directory of snapshots in the root of a live view.
pub(crate) const SNAPSHOTS_NAME: &str = ".snapshots";
/// The sticky bit of a directory's mode: only owners may remove or move its entries.
const STICKY: u32 = 0o1000;
/// The set-group-ID bit of a mode.
const SET_GROUP_ID: u32 = 0o2000;
/// Most records of an inode that the unlinking transaction removes; the collector removes the rest.
const REMOVE_NOW_MAX: usize = 256;

/// Checks the name of a new or old entry.
pub(crate) fn check_name(name: &OsStr) -> Result<()> {
    let bytes = name.as_bytes();
    let invalid = |reason| Err(Error::InvalidName { name: name.to_string_lossy().into_owned(), reason });
    if bytes.len() > NAME_BYTES_MAX {
        return Err(Error::NameTooLong { bytes: bytes.len(), bytes_max: NAME_BYTES_MAX });
    }
    if bytes.is_empty() {
        return invalid("a file name has at least one byte");
    }
    if bytes.contains(&b'/') || bytes.contains(&0) {
        return invalid("a file name has no '/' and no NUL byte");
    }
    if bytes == b"." || bytes == b".." {
        return invalid("'.' and '..' are not names of entries");
    }
    Ok(())
}

/// Checks that an entry of this name may be made, removed or moved in a directory.
pub(crate) fn check_entry(parent: u64, name: &OsStr) -> Result<()> {
    check_name(name)?;
    if parent == ROOT_INO && name == SNAPSHOTS_NAME {
        return Err(Error::ReadOnly { what: format!("directory {SNAPSHOTS_NAME}") });
    }
    Ok(())
}

/// Reads an inode; [`Error::NotFound`] when it does not exist.
pub(crate) fn inode(records: &mut dyn Records, ino: u64) -> Result<Inode> {
    match records.get(&keys::attributes(ino))? {
        Some(value) => Inode::decode(&value),
        None => Err(Error::not_found(format!("inode {ino}"))),
    }
}

/// Reads an inode that must be a directory.
pub(crate) fn directory(records: &mut dyn Records, ino: u64) -> Result<Inode> {
    let inode = inode(records, ino)?;
    if inode.is_directory() { Ok(inode) } else { Err(Error::NotADirectory { what: format!("inode {ino}") }) }
}

pub(crate) fn put_inode(writer: &mut Writer<'_>, ino: u64, inode: &Inode) -> Result<()> {
    writer.put(&keys::attributes(ino), &inode.encode())
}

/// An entry of a directory, if there is one.
pub(crate) fn child(records: &mut dyn Records, parent: u64, name: &OsStr) -> Result<Option<Dentry>> {
    let value = records.get(&keys::child(parent, name.as_bytes()))?;
    value.map(|value| Dentry::decode(&value)).transpose()
}

/// Prefetches what a change of an entry reads, in one request: the directory and the entry.
pub(crate) fn prefetch_entry(records: &mut dyn Records, parent: u64, name: &OsStr) -> Result<()> {
    let wanted = || keys::child(parent, name.as_bytes());
    records.prefetch(&mut std::iter::once(keys::attributes(parent)).chain(std::iter::once_with(wanted)))
}

/// An entry of a directory; [`Error::NotFound`] when it does not exist.
pub(crate) fn existing(records: &mut dyn Records, parent: u64, name: &OsStr) -> Result<Dentry> {
    match child(records, parent, name)? {
        Some(dentry) => Ok(dentry),
        None => {
            directory(records, parent)?;
            Err(Error::not_found(display(name)))
        }
    }
}

/// The inode that a name leads to, inside a transaction.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NameTarget<'a> {
    pub(crate) parent: u64,
    pub(crate) name: &'a OsStr,
    pub(crate) ino: u64,
    pub(crate) inode: &'a Inode,
}

/// The caller's checks inside a transaction that changes names.
#[derive(Clone, Copy)]
pub(crate) struct NameChecks<'a> {
    /// The user id for the check of sticky directories; `None` skips the check.
    pub(crate) user: Option<u32>,
    /// Whether a name may be removed, moved or replaced while it leads to this target.
    pub(crate) expects: &'a dyn Fn(&NameTarget<'_>) -> bool,
}

fn expects_anything(_: &NameTarget<'_>) -> bool {
    true
}

impl NameChecks<'_> {
    /// No checks: the caller may change every name.
    pub(crate) const NONE: NameChecks<'static> = NameChecks { user: None, expects: &expects_anything };

    /// Checks a name that is going to be removed or moved. A missing name passes.
    pub(crate) fn check(self, records: &mut dyn Records, parent: u64, name: &OsStr) -> Result<()> {
        check_sticky(records, parent, name, self.user)?;
        match child(records, parent, name)? {
            Some(dentry) => self.check_target(records, parent, name, dentry.ino),
            None => Ok(()),
        }
    }

    /// Checks a name that is going to be replaced. Any file may be replaced in one step; only a directory has
    /// to be the expected one.
    pub(crate) fn check_replaced(self, records: &mut dyn Records, parent: u64, name: &OsStr) -> Result<()> {
        check_sticky(records, parent, name, self.user)?;
        match child(records, parent, name)? {
            Some(dentry) if dentry.kind == FileKind::Directory => {
                self.check_target(records, parent, name, dentry.ino)
            }
            _ => Ok(()),
        }
    }

    fn check_target(self, records: &mut dyn Records, parent: u64, name: &OsStr, ino: u64) -> Result<()> {
        let inode = inode(records, ino)?;
        if (self.expects)(&NameTarget { parent, name, ino, inode: &inode }) {
            return Ok(());
        }
        Err(Error::Stale { what: format!("what {} led to", display(name)) })
    }
}

/// Checks that `user` may remove or move a name in a sticky directory; `None` always may. The kernel checks
/// this for the inode in its cache, which another process may have replaced since.
fn check_sticky(records: &mut dyn Records, parent: u64, name: &OsStr, user: Option<u32>) -> Result<()> {
    let Some(user) = user else { return Ok(()) };
    let directory = directory(records, parent)?;
    if directory.mode & STICKY == 0 || directory.uid == user {
        return Ok(());
    }
    match child(records, parent, name)? {
        Some(dentry) if inode(records, dentry.ino)?.uid != user => {
            let what = format!("{} of another user in a sticky directory", display(name));
            Err(Error::NotPermitted { operation: "removing or moving", what })
        }
        _ => Ok(()),
    }
}

pub(crate) fn put_child(
    writer: &mut Writer<'_>,
    parent: u64,
    name: &OsStr,
    ino: u64,
    kind: FileKind,
) -> Result<()> {
    writer.put(&keys::child(parent, name.as_bytes()), &Dentry { ino, kind }.encode())
}

pub(crate) fn delete_child(writer: &mut Writer<'_>, parent: u64, name: &OsStr) -> Result<()> {
    writer.delete(&keys::child(parent, name.as_bytes()))
}

/// Whether a directory has no entries.
pub(crate) fn is_empty(records: &mut dyn Records, ino: u64) -> Result<bool> {
    let prefix = keys::children(ino);
    let some = records.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, 1)?;
    Ok(some.is_empty())
}

/// Updates a directory's inode after a change of its entries; `subdirectories` is the change of their number.
pub(crate) fn touch_directory(inode: &mut Inode, subdirectories: i32, now: Timestamp) -> Result<()> {
    inode.nlink = add_links(inode.nlink, subdirectories)?;
    inode.mtime = now;
    inode.ctime = now;
    Ok(())
}

/// A link count plus `change`; an error when that overflows.
pub(crate) fn add_links(nlink: u32, change: i32) -> Result<u32> {
    nlink.checked_add_signed(change).ok_or_else(|| Error::TooManyLinks { what: "the inode".into() })
}

/// State of a transaction that removes names: the inodes whose opens and closes wait, and the work after the
/// commit.
#[derive(Debug, Default)]
pub(crate) struct Closing<'a> {
    last_names: LastNames<'a>,
    /// An inode with too many records for one transaction is left to the collector.
    pub(crate) collect: bool,
    /// Other sessions have to be asked whether they have an inode open.
    asks: bool,
}

impl<'a> Closing<'a> {
    /// Adds an inode whose last name this transaction or an earlier one removes. Returns whether this process
    /// has it open.
    pub(super) fn orphan(&mut self, open: &'a OpenTable, volume: u64, ino: u64) -> bool {
        self.last_names.add(open, volume, ino)
    }

    /// Others have to be asked whether they have an inode open.
    pub(super) fn ask(&mut self) {
        self.asks = true;
    }

    /// The transaction was committed.
    pub(crate) fn committed(&mut self, orphans: &Orphans) {
        self.last_names.gone();
        if self.asks {
            orphans.note();
        }
    }

    /// The transaction was rolled back: the inodes are no orphans.
    pub(crate) fn undo(&mut self) {
        self.last_names.stay();
        (self.collect, self.asks) = (false, false);
    }
}

/// An inode that has lost a name, as it is afterwards.
#[derive(Debug)]
pub(crate) struct Unlinked {
    pub(crate) ino: u64,
    pub(crate) inode: Inode,
    /// The target of a symbolic link.
    pub(crate) target: Option<Vec<u8>>,
}

/// Removes one link of a file. The last one frees the inode. If this process has the file open, or others
/// may, the last close frees it.
pub(crate) fn drop_link<'a>(
    writer: &mut Writer<'_>,
    ino: u64,
    mut inode: Inode,
    now: Timestamp,
    open: &'a OpenTable,
    closing: &mut Closing<'a>,
) -> Result<Unlinked> {
    writer.txn().makes_room();
    let target = match inode.kind {
        FileKind::Symlink => writer.get(&keys::target(ino))?,
        _ => None,
    };
    inode.nlink = inode.nlink.saturating_sub(1);
    inode.ctime = now;
    inode.lost_name();
    if inode.nlink > 0 {
        put_inode(writer, ino, &inode)?;
        return Ok(Unlinked { ino, inode, target });
    }
    let (volume, session) = (writer.volume(), writer.session());
    let is_others = inode.kind == FileKind::File && !session::is_alone(writer.txn().as_read(), session)?;
    let records = if is_others { Vec::new() } else { records_of(writer, ino, &inode, REMOVE_NOW_MAX)? };
    let orphan = match closing.orphan(open, volume, ino) {
        true => Orphan::held_by(session),
        false if is_others => {
            closing.asks = true;
            Orphan::of(session)
        }
        false => {
            records.iter().try_for_each(|record| writer.delete(record))?;
            if records.len() >= REMOVE_NOW_MAX {
                closing.collect = true;
                writer.txn().put(&keys::orphan(volume, ino), &Orphan::free().encode())?;
            }
            return Ok(Unlinked { ino, inode, target });
        }
    };
    put_inode(writer, ino, &inode)?;
    writer.txn().put(&keys::orphan(volume, ino), &orphan.encode())?;
    Ok(Unlinked { ino, inode, target })
}

/// Removes the records of an inode that has no entries.
pub(crate) fn remove_empty(writer: &mut Writer<'_>, ino: u64, inode: &Inode) -> Result<()> {
    writer.txn().makes_room();
    records_of(writer, ino, inode, usize::MAX)?.iter().try_for_each(|record| writer.delete(record))
}

/// Removes at most `limit` records of an inode, its attributes among the first. Returns how many there
/// were: fewer than `limit` when none is left.
pub(crate) fn remove_records(writer: &mut Writer<'_>, ino: u64, limit: usize) -> Result<usize> {
    writer.txn().makes_room();
    let records = node_records(writer, ino, limit)?;
    records.iter().try_for_each(|record| writer.delete(record))?;
    Ok(records.len())
}

/// At most `limit` record keys of an inode without entries. Most files need no scan.
fn records_of(writer: &mut Writer<'_>, ino: u64, inode: &Inode, limit: usize) -> Result<Vec<Vec<u8>>> {
    let mut records = vec![keys::attributes(ino)];
    let sole = match inode.kind {
        _ if writer.has_xattrs(ino, inode) => None,
        FileKind::File => {
            let stored_bytes = writer.stored_bytes(ino, inode);
            content::sole_record(writer, ino, stored_bytes)?
        }
        FileKind::Symlink => Some(Some(keys::target(ino))),
        _ => Some(None),
    };
    match sole {
        Some(sole) => records.extend(sole),
        None => records = node_records(writer, ino, limit)?,
    }
    Ok(records)
}

/// At most `limit` record keys of an inode.
fn node_records(writer: &mut Writer<'_>, ino: u64, limit: usize) -> Result<Vec<Vec<u8>>> {
    let prefix = keys::node(ino);
    let records = writer.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, limit)?;
    Ok(records.into_iter().map(|(record, _)| record).collect())
}

/// A name for an error message.
pub(crate) fn display(name: &OsStr) -> String {
    name.to_string_lossy().into_owned()
}

/// A new inode in a directory. It inherits the group of a set-group-ID directory; a new directory inherits
/// the bit too.
pub(crate) fn child_inode(directory: &Inode, kind: FileKind, mode: u32, owner: Owner) -> Inode {
    let mut inode = Inode::new(kind, mode, owner.uid, owner.gid);
    if directory.mode & SET_GROUP_ID != 0 {
        inode.gid = directory.gid;
        if kind == FileKind::Directory {
            inode.mode |= SET_GROUP_ID;
        }
    }
    inode
}

/// Adds a new directory to its parent, which the caller has just read, under a free name.
pub(crate) fn add_directory(
    writer: &mut Writer<'_>,
    parent: (u64, Inode),
    name: &OsStr,
    ino: u64,
    mut inode: Inode,
) -> Result<Inode> {
    inode.nlink = 2;
    inode.parent = parent.0;
    add_child(writer, parent, name, ino, &inode)?;
    Ok(inode)
}

/// Adds a new inode to its parent, which the caller has just read, under a free name.
pub(crate) fn add_child(
    writer: &mut Writer<'_>,
    parent: (u64, Inode),
    name: &OsStr,
    ino: u64,
    inode: &Inode,
) -> Result<()> {
    writer.put_new(&keys::attributes(ino), &inode.encode())?;
    add_name(writer, parent, name, ino, inode)
}

/// Writes a changed inode and gives it a free name in a directory, which the caller has just read.
pub(crate) fn add_link(
    writer: &mut Writer<'_>,
    parent: (u64, Inode),
    name: &OsStr,
    ino: u64,
    inode: &Inode,
) -> Result<()> {
    put_inode(writer, ino, inode)?;
    add_name(writer, parent, name, ino, inode)
}

fn add_name(
    writer: &mut Writer<'_>,
    (parent, mut directory): (u64, Inode),
    name: &OsStr,
    ino: u64,
    inode: &Inode,
) -> Result<()> {
    touch_directory(&mut directory, i32::from(inode.is_directory()), inode.ctime)?;
    let dentry = Dentry { ino, kind: inode.kind };
    writer.put_new(&keys::child(parent, name.as_bytes()), &dentry.encode())?;
    put_inode(writer, parent, &directory)
}
