//! Rename and exchange: one transaction moves a name and replaces the file or empty directory at the target,
//! or swaps two names.

use std::ffi::OsStr;

use super::View;
use super::namespace::remove_directory;
use super::tree::{self, Closing, NameChecks, Unlinked};
use crate::error::{Error, Result};
use crate::meta::engine::Durability;
use crate::meta::inode::{Dentry, Timestamp};
use crate::meta::versioned::Writer;
use crate::node::{Node, ROOT_INO};

/// A name in a directory.
#[derive(Debug, Clone, Copy)]
struct Place<'n> {
    parent: u64,
    name: &'n OsStr,
}

/// An inode that got another name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moved {
    pub(crate) ino: u64,
    /// The value after the rename.
    pub(crate) names_version: u32,
}

/// The outcome of a rename.
#[derive(Debug)]
pub(crate) struct Renamed {
    /// `None` when both names lead to one inode, which keeps both.
    pub(crate) moved: Option<Moved>,
    pub(crate) replaced: Option<Unlinked>,
}

impl View {
    /// Moves a name. A file or an empty directory at the target is replaced in the same step, unless
    /// `no_replace`, which fails with [`Error::Exists`].
    pub fn rename(
        &self,
        parent: Node,
        name: &OsStr,
        new_parent: Node,
        new_name: &OsStr,
        no_replace: bool,
    ) -> Result<()> {
        self.rename_by((parent, name), (new_parent, new_name), no_replace, NameChecks::NONE).map(drop)
    }

    /// [`View::rename`] with the caller's checks in the same transaction.
    pub(crate) fn rename_by(
        &self,
        (parent, name): (Node, &OsStr),
        (new_parent, new_name): (Node, &OsStr),
        no_replace: bool,
        checks: NameChecks<'_>,
    ) -> Result<Renamed> {
        let from = Place { parent: self.writable(parent)?, name };
        let to = Place { parent: self.writable(new_parent)?, name: new_name };
        self.write_closing(Durability::Relaxed, |writer, closing| {
            checks.check(writer, from.parent, from.name)?;
            checks.check_replaced(writer, to.parent, to.name)?;
            self.rename_in(writer, from, to, no_replace, closing)
        })
    }

    fn rename_in<'a>(
        &'a self,
        writer: &mut Writer<'_>,
        from: Place<'_>,
        to: Place<'_>,
        no_replace: bool,
        closing: &mut Closing<'a>,
    ) -> Result<Renamed> {
        tree::check_entry(from.parent, from.name)?;
        tree::check_entry(to.parent, to.name)?;
        let moved = tree::existing(writer, from.parent, from.name)?;
        let mut inode = tree::inode(writer, moved.ino)?;
        tree::directory(writer, to.parent)?;
        if inode.is_directory() {
            refuse_loop(writer, moved.ino, to.parent)?;
        }
        let replaced = tree::child(writer, to.parent, to.name)?;
        if let Some(replaced) = replaced {
            if no_replace {
                return Err(Error::Exists { what: tree::display(to.name) });
            }
            if replaced.ino == moved.ino {
                // Two names of one inode: POSIX keeps both.
                return Ok(Renamed { moved: None, replaced: None });
            }
        }
        let now = Timestamp::now();
        let mut links = [0, 0];
        if inode.is_directory() {
            links = [-1, 1];
        }
        let mut unlinked = None;
        if let Some(replaced) = replaced {
            let replaced = self.replace(writer, inode.is_directory(), replaced, to, now, closing)?;
            links[1] -= i32::from(replaced.inode.is_directory());
            unlinked = Some(replaced);
        }
        tree::delete_child(writer, from.parent, from.name)?;
        tree::put_child(writer, to.parent, to.name, moved.ino, moved.kind)?;
        inode.ctime = now;
        inode.lost_name();
        if inode.is_directory() {
            inode.parent = to.parent;
        }
        tree::put_inode(writer, moved.ino, &inode)?;
        for (ino, links) in [(from.parent, links[0]), (to.parent, links[1])] {
            let mut directory = tree::directory(writer, ino)?;
            tree::touch_directory(&mut directory, links, now)?;
            tree::put_inode(writer, ino, &directory)?;
        }
        let moved = Moved { ino: moved.ino, names_version: inode.names_version };
        Ok(Renamed { moved: Some(moved), replaced: unlinked })
    }

    /// Removes the file or empty directory at the target.
    fn replace<'a>(
        &'a self,
        writer: &mut Writer<'_>,
        by_directory: bool,
        replaced: Dentry,
        to: Place<'_>,
        now: Timestamp,
        closing: &mut Closing<'a>,
    ) -> Result<Unlinked> {
        let inode = tree::inode(writer, replaced.ino)?;
        let what = || tree::display(to.name);
        match (by_directory, inode.is_directory()) {
            (true, true) => remove_directory(writer, replaced.ino, to.name),
            (true, false) => Err(Error::NotADirectory { what: what() }),
            (false, true) => Err(Error::IsADirectory { what: what() }),
            (false, false) => tree::drop_link(writer, replaced.ino, inode, now, &self.shared.open, closing),
        }
    }
}

impl View {
    /// Exchanges the inodes of two existing names in one step.
    pub fn exchange(&self, parent: Node, name: &OsStr, other_parent: Node, other_name: &OsStr) -> Result<()> {
        self.exchange_by((parent, name), (other_parent, other_name), NameChecks::NONE).map(drop)
    }

    /// [`View::exchange`] with the caller's checks in the same transaction. Returns the inode that moved from
    /// the first name to the other, then the one that moved back. `None` when both names lead to one inode.
    pub(crate) fn exchange_by(
        &self,
        (parent, name): (Node, &OsStr),
        (other_parent, other_name): (Node, &OsStr),
        checks: NameChecks<'_>,
    ) -> Result<Option<[Moved; 2]>> {
        let one = Place { parent: self.writable(parent)?, name };
        let other = Place { parent: self.writable(other_parent)?, name: other_name };
        self.write(Durability::Relaxed, |writer| {
            tree::check_entry(one.parent, one.name)?;
            tree::check_entry(other.parent, other.name)?;
            checks.check(writer, one.parent, one.name)?;
            checks.check(writer, other.parent, other.name)?;
            let at_one = tree::existing(writer, one.parent, one.name)?;
            let at_other = tree::existing(writer, other.parent, other.name)?;
            if at_one.ino == at_other.ino {
                return Ok(None);
            }
            let now = Timestamp::now();
            let (from_one, links_to_other) = put_at(writer, at_one, other, now)?;
            let (from_other, links_to_one) = put_at(writer, at_other, one, now)?;
            let change = links_to_one - links_to_other;
            for (ino, links) in [(one.parent, change), (other.parent, -change)] {
                let links = if one.parent == other.parent { 0 } else { links };
                let mut directory = tree::directory(writer, ino)?;
                tree::touch_directory(&mut directory, links, now)?;
                tree::put_inode(writer, ino, &directory)?;
            }
            Ok(Some([from_one, from_other]))
        })
    }
}

/// Points a name at an inode that had another name. Returns by how much the links of the name's directory
/// grow: 1 for a directory, else 0.
fn put_at(writer: &mut Writer<'_>, moved: Dentry, to: Place<'_>, now: Timestamp) -> Result<(Moved, i32)> {
    let mut inode = tree::inode(writer, moved.ino)?;
    let directory = inode.is_directory();
    if directory {
        refuse_loop(writer, moved.ino, to.parent)?;
        inode.parent = to.parent;
    }
    inode.ctime = now;
    inode.lost_name();
    tree::put_inode(writer, moved.ino, &inode)?;
    tree::put_child(writer, to.parent, to.name, moved.ino, moved.kind)?;
    Ok((Moved { ino: moved.ino, names_version: inode.names_version }, i32::from(directory)))
}

/// Refuses to move a directory into itself or below itself.
fn refuse_loop(writer: &mut Writer<'_>, moved: u64, to: u64) -> Result<()> {
    let mut ancestor = to;
    while ancestor != ROOT_INO {
        if ancestor == moved {
            return Err(Error::Invalid("a directory cannot be moved below itself".into()));
        }
        ancestor = tree::directory(writer, ancestor)?.parent;
    }
    Ok(())
}
