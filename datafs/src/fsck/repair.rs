//! Repairs, each in a separate transaction that verifies its problem first. What a live mount has changed
//! since the check is left alone; the next check looks at it again.

use std::collections::BTreeMap;
use std::ffi::OsStr;

use super::fix::{Fix, sum_of, version_of};
use super::objects::known_now;
use super::report::{Found, Remedy};
use crate::error::{Error, Result};
use crate::fs::content::{self, FILE_BYTES_MAX};
use crate::fs::dirty::lay_over;
use crate::fs::orphan::Orphan;
use crate::fs::shared::Shared;
use crate::fs::tree;
use crate::fs::types::Owner;
use crate::meta::codec::Encoder;
use crate::meta::engine::{Durability, ReadTxn};
use crate::meta::inode::{Dentry, Inode, Timestamp, encode_extent};
use crate::meta::keys;
use crate::meta::versioned::{At, Reader, Records as _, Writer, parts_of};
use crate::node::{FileKind, ROOT_INO};

/// The directory for inodes without a name, in the root of their volume.
const LOST_AND_FOUND: &str = "lost+found";
/// When something else has that name, `lost+found-2` is used, and so on up to this number.
const LOST_AND_FOUND_MAX: u32 = 100;

/// Applies the repairs of a pass. Returns the number of problems that were repaired, and marks them in the
/// report.
pub(super) fn apply(shared: &Shared, found: &mut Found) -> Result<u64> {
    let mut mended = 0;
    for (index, fix) in std::mem::take(&mut found.fixes) {
        let done = match fix.apply(shared) {
            Ok(done) => done,
            // The volume or the inode was deleted meanwhile.
            Err(Error::Stale { .. } | Error::NotFound { .. }) => false,
            // A record that the repair needs cannot be read; the report has that as well.
            Err(Error::Corrupt { what, reason }) => {
                tracing::warn!(what, reason, "a repair has to be left undone");
                false
            }
            Err(error) => return Err(error),
        };
        if done {
            mended += 1;
            if let Some(problem) = found.report.found.get_mut(index) {
                problem.remedy = Remedy::Repaired;
            }
        }
    }
    if mended > 0 {
        tracing::warn!(mended, "fsck has repaired the metadata");
        shared.collector.wake();
    }
    Ok(mended)
}

impl Fix {
    /// Returns whether it changed anything.
    fn apply(self, shared: &Shared) -> Result<bool> {
        let session = shared.session.id();
        let spare = match self {
            Fix::Adopt { volume, .. } => shared.allocate_inos(volume, 1)?.start,
            _ => 0,
        };
        if let Fix::Discard { object, was: None } = self
            && known_now(shared, object)?
        {
            return Ok(false);
        }
        shared.meta.transact(Durability::Relaxed, |txn| match &self {
            Fix::RemoveName { volume, record, ino } => {
                Writer::run(txn, *volume, session, |writer| remove_name(writer, record, *ino))
            }
            Fix::Adopt { volume, ino } => {
                Writer::run(txn, *volume, session, |writer| adopt(writer, *ino, spare))
            }
            Fix::Free { volume, ino } => {
                let unlinked =
                    match Reader::open(txn.as_read(), *volume, At::Live)?.get(&keys::attributes(*ino))? {
                        Some(value) => Inode::decode(&value)?.nlink == 0,
                        None => true,
                    };
                let key = keys::orphan(*volume, *ino);
                if !unlinked || txn.get(&key)?.is_some() {
                    return Ok(false);
                }
                txn.put(&key, &Orphan::free().encode())?;
                Ok(true)
            }
            Fix::NoOrphan { volume, ino } => {
                let named =
                    match Reader::open(txn.as_read(), *volume, At::Live)?.get(&keys::attributes(*ino))? {
                        Some(value) => Inode::decode(&value)?.nlink > 0,
                        None => false,
                    };
                if named {
                    txn.delete(&keys::orphan(*volume, *ino))?;
                }
                Ok(named)
            }
            Fix::SetLinks { volume, ino, sum, links } => {
                let links = |inode: &mut Inode| inode.nlink = *links;
                Writer::run(txn, *volume, session, |writer| change(writer, *ino, *sum, links))
            }
            Fix::SetParent { volume, ino, sum, parent } => {
                let parent = |inode: &mut Inode| inode.parent = *parent;
                Writer::run(txn, *volume, session, |writer| change(writer, *ino, *sum, parent))
            }
            Fix::Separate { volume, ino } => {
                Writer::run(txn, *volume, session, |writer| separate(writer, *ino))
            }
            Fix::Replace { key, was, is, beside } => {
                let same = match beside {
                    Some((key, value)) => txn.get(key)?.as_ref() == Some(value),
                    None => true,
                };
                if !same || txn.get(key)? != *was {
                    return Ok(false);
                }
                match is {
                    Some(value) => txn.put(key, value)?,
                    None => txn.delete(key)?,
                }
                Ok(true)
            }
            Fix::RaiseCounter { volume, next } => {
                let key = keys::next_ino(*volume);
                // An unreadable counter counts as 0.
                let now = txn.get(&key)?.as_deref().and_then(keys::number).unwrap_or(0);
                if now < *next {
                    txn.put(&key, &next.to_be_bytes())?;
                }
                Ok(now < *next)
            }
            Fix::AddDead { volume, key } => {
                let right = names_version(txn.as_read(), *volume, key)? == Some(true);
                if right {
                    txn.put(key, &[])?;
                }
                Ok(right)
            }
            Fix::RemoveDead { volume, key } => {
                let wrong = names_version(txn.as_read(), *volume, key)? == Some(false);
                if wrong {
                    txn.delete(key)?;
                }
                Ok(wrong)
            }
            Fix::NoGarbage { object } => {
                let used = txn.get(&keys::references(*object))?.is_some();
                if used {
                    txn.delete(&keys::garbage(*object))?;
                }
                Ok(used)
            }
            Fix::Discard { object, was } => {
                let key = keys::references(*object);
                if txn.get(&key)? != *was {
                    return Ok(false);
                }
                txn.delete(&key)?;
                let (seconds, nanos) = Timestamp::now().parts();
                txn.put(&keys::garbage(*object), &Encoder::default().i64(seconds).u32(nanos).finish())?;
                Ok(true)
            }
        })
    }
}

/// Whether an entry of a dead list names an existing version; `None` when that version is too short to tell.
fn names_version(txn: &mut dyn ReadTxn, volume: u64, dead: &[u8]) -> Result<Option<bool>> {
    let Some((version, since)) = version_of(volume, dead) else { return Ok(Some(false)) };
    let there = txn.get(&version)?;
    Ok(there.map_or(Some(false), |version| parts_of(&version).map(|(written, _)| written == since)))
}

fn remove_name(writer: &mut Writer<'_>, record: &[u8], ino: u64) -> Result<bool> {
    let Some(value) = writer.get(record)? else { return Ok(false) };
    let dentry = Dentry::decode(&value)?;
    let parent = keys::node_of(record).map_or(0, |(parent, _)| parent);
    let right = match writer.get(&keys::attributes(ino))? {
        // Only a directory's second name is removed; the one in its parent stays.
        Some(value) => Inode::decode(&value)?.parent == parent && ino != ROOT_INO,
        None => false,
    };
    if dentry.ino != ino || right {
        return Ok(false);
    }
    writer.delete(record)?;
    if dentry.kind == FileKind::Directory {
        let mut directory = tree::directory(writer, parent)?;
        tree::touch_directory(&mut directory, -1, Timestamp::now())?;
        tree::put_inode(writer, parent, &directory)?;
    }
    Ok(true)
}

/// Makes the extents of a file disjoint. Where two overlap, the one that begins later stays whole.
///
/// The one that begins later is the newer write: a write cuts every extent that begins in its range. So an
/// extent that begins inside another one was written after it, or the compaction that made the other one
/// missed it.
fn separate(writer: &mut Writer<'_>, ino: u64) -> Result<bool> {
    let old = content::extents_within(writer, ino, 0, FILE_BYTES_MAX, usize::MAX)?;
    let mut new = BTreeMap::new();
    for extent in &old {
        lay_over(&mut new, *extent);
    }
    if new.values().eq(&old) {
        return Ok(false);
    }
    for extent in old.iter().filter(|extent| !new.contains_key(&extent.file_offset)) {
        writer.delete(&keys::extent(ino, extent.file_offset))?;
    }
    for extent in new.values() {
        writer.put(&keys::extent(ino, extent.file_offset), &encode_extent(extent))?;
    }
    Ok(true)
}

fn change(writer: &mut Writer<'_>, ino: u64, sum: u32, change: impl Fn(&mut Inode)) -> Result<bool> {
    let Some(value) = writer.get(&keys::attributes(ino))? else { return Ok(false) };
    if sum_of(&value) != sum {
        return Ok(false);
    }
    let mut inode = Inode::decode(&value)?;
    change(&mut inode);
    tree::put_inode(writer, ino, &inode)?;
    Ok(true)
}

/// Gives an inode a name in `lost+found`. The link count of a non-directory becomes 1.
fn adopt(writer: &mut Writer<'_>, ino: u64, spare: u64) -> Result<bool> {
    let Some(value) = writer.get(&keys::attributes(ino))? else { return Ok(false) };
    let mut inode = Inode::decode(&value)?;
    let folder = lost_and_found(writer, spare)?;
    let name = format!("#{ino}");
    let name: &OsStr = name.as_ref();
    if inode.nlink == 0 || tree::child(writer, folder, name)?.is_some() {
        return Ok(false);
    }
    if inode.is_directory() {
        inode.parent = folder;
    } else {
        inode.nlink = 1;
    }
    let directory = tree::directory(writer, folder)?;
    tree::add_link(writer, (folder, directory), name, ino, &inode)?;
    Ok(true)
}

/// The `lost+found` directory: the first of its names that leads to a directory, or that is free; then
/// creates it.
fn lost_and_found(writer: &mut Writer<'_>, spare: u64) -> Result<u64> {
    for count in 1..=LOST_AND_FOUND_MAX {
        let name = if count == 1 { LOST_AND_FOUND.to_owned() } else { format!("{LOST_AND_FOUND}-{count}") };
        let name: &OsStr = name.as_ref();
        match tree::child(writer, ROOT_INO, name)? {
            Some(dentry) if dentry.kind == FileKind::Directory => {
                tree::directory(writer, dentry.ino)?;
                return Ok(dentry.ino);
            }
            Some(_) => {}
            None => {
                let root = tree::directory(writer, ROOT_INO)?;
                let owner = Owner { uid: root.uid, gid: root.gid };
                let inode = tree::child_inode(&root, FileKind::Directory, 0o700, owner);
                tree::add_directory(writer, (ROOT_INO, root), name, spare, inode)?;
                return Ok(spare);
            }
        }
    }
    Err(Error::not_found(format!("a free name like {LOST_AND_FOUND} in the root of the volume")))
}
