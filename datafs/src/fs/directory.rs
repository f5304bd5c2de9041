//! Directory reading (readdir), with cursors that stay valid while entries come and go.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use super::View;
use super::tree;
use super::types::NodeEntry;
use crate::error::{Error, Result};
use crate::meta::engine::{Order, Pair};
use crate::meta::inode::Dentry;
use crate::meta::versioned::{Reader, Records as _};
use crate::meta::{keys, snapshot};
use crate::node::{Attr, FileKind, Node, ROOT_INO};

/// Cursor behind `.`.
const AFTER_DOT: u64 = 1;
/// Cursor behind `..`; those of entries are [`keys::HASH_MIN`] and up.
const AFTER_DOT_DOT: u64 = 2;

/// Some entries of a directory, in order, with their attributes if requested.
#[derive(Debug, Default)]
pub(crate) struct Page {
    pub(crate) entries: Vec<(NodeEntry, Option<Attr>)>,
    /// No entries follow; may be false although none do.
    pub(crate) is_last: bool,
}

impl Page {
    /// The entries of a page that begins after `cursor`, each with the cursor to continue from after it. Of
    /// entries that share a cursor, only the last one may move the reader past it.
    pub(crate) fn with_cursors(&self, cursor: u64) -> impl Iterator<Item = (&NodeEntry, Option<&Attr>, u64)> {
        let mut before = cursor;
        self.entries.iter().enumerate().map(move |(i, (entry, attr))| {
            let shared = self.entries.get(i + 1).is_some_and(|(next, _)| next.cursor == entry.cursor);
            if !shared {
                before = entry.cursor;
            }
            (entry, attr.as_ref(), before)
        })
    }
}

impl View {
    /// Entries of a directory after `cursor` (0 is the start): `.` and `..` first, then the others by the
    /// hash of their names. Continue with the cursor of the last entry; an empty result is the end. An entry
    /// that exists the whole time is returned exactly once. Returns about `entries_max` (at least 1).
    pub fn readdir(&self, node: Node, cursor: u64, entries_max: usize) -> Result<Vec<NodeEntry>> {
        let page = self.read_page(node, cursor, entries_max, false)?;
        Ok(page.entries.into_iter().map(|(entry, _)| entry).collect())
    }

    /// [`View::readdir`] with the attributes of each entry. `..` has those of the directory itself when the
    /// parent is in another tree.
    pub fn readdir_attrs(
        &self,
        node: Node,
        cursor: u64,
        entries_max: usize,
    ) -> Result<Vec<(NodeEntry, Attr)>> {
        let page = self.read_page(node, cursor, entries_max, true)?;
        Ok(page.entries.into_iter().filter_map(|(entry, attr)| Some((entry, attr?))).collect())
    }

    /// [`View::readdir`] that also reports the end, with attributes if `attrs`.
    pub(crate) fn read_page(&self, node: Node, cursor: u64, entries_max: usize, attrs: bool) -> Result<Page> {
        let limit = entries_max.max(1);
        if self.is_snapshots_dir(node) {
            return self.read_snapshots(node, cursor, limit, attrs);
        }
        self.read(node, |reader| {
            let mut entries = Vec::new();
            let inode = tree::directory(reader, node.ino)?;
            let own = self.attr_of(node, &inode);
            if cursor < AFTER_DOT {
                entries.push((dot(".", node, AFTER_DOT), Some(own)));
            }
            if cursor < AFTER_DOT_DOT {
                let parent = self.parent_in(node, &inode);
                let same_tree = parent.snapshot == node.snapshot && !self.is_snapshots_dir(parent);
                let attr = if same_tree && attrs { self.attr_in(reader, parent)? } else { own };
                entries.push((dot("..", parent, AFTER_DOT_DOT), Some(attr)));
            }
            let room = limit.saturating_sub(entries.len());
            if room == 0 {
                return Ok(Page { entries, is_last: false });
            }
            let page = children(reader, node.ino, cursor, room)?;
            if attrs {
                let inos = page.iter().filter_map(|(_, value)| Some(Dentry::decode(value).ok()?.ino));
                reader.prefetch(&mut inos.map(keys::attributes))?;
            }
            entries.reserve(page.len());
            let is_last = page.len() < room;
            for (record, value) in page {
                let damaged = || Error::corrupt("directory entry", "its key has no name");
                let (hash, name) = keys::child_name(&record).ok_or_else(damaged)?;
                let dentry = Dentry::decode(&value)?;
                let child = Node { snapshot: node.snapshot, ino: dentry.ino };
                let attr =
                    if attrs { Some(self.attr_of(child, &tree::inode(reader, dentry.ino)?)) } else { None };
                let name = OsString::from_vec(name.to_vec());
                entries.push((NodeEntry { name, node: child, kind: dentry.kind, cursor: hash }, attr));
            }
            Ok(Page { entries, is_last })
        })
    }

    /// The entries of `.snapshots`: the snapshots by age.
    fn read_snapshots(&self, node: Node, cursor: u64, limit: usize, attrs: bool) -> Result<Page> {
        let own = self.getattr(node)?;
        let mut entries = Vec::new();
        if cursor < AFTER_DOT {
            entries.push((dot(".", node, AFTER_DOT), Some(own)));
        }
        if cursor < AFTER_DOT_DOT {
            entries.push((dot("..", self.root(), AFTER_DOT_DOT), Some(own)));
        }
        let snapshots = self.shared.meta.view(|txn| snapshot::list(txn, self.volume))?;
        let rest = snapshots.into_iter().filter(|(number, _)| keys::HASH_MIN + number > cursor);
        let mut room = limit;
        for (number, row) in rest {
            if room == 0 {
                break;
            }
            let root = Node { snapshot: number, ino: ROOT_INO };
            let attr = if attrs {
                match self.getattr(root) {
                    Ok(attr) => Some(attr),
                    // Deleted since it was listed.
                    Err(Error::Stale { .. }) => continue,
                    Err(error) => return Err(error),
                }
            } else {
                None
            };
            let cursor = keys::HASH_MIN + number;
            let entry = NodeEntry { name: row.name.into(), node: root, kind: FileKind::Directory, cursor };
            entries.push((entry, attr));
            room -= 1;
        }
        Ok(Page { entries, is_last: false })
    }
}

fn dot(name: &str, node: Node, cursor: u64) -> NodeEntry {
    NodeEntry { name: name.into(), node, kind: FileKind::Directory, cursor }
}

/// About `limit` entries with a hash above `cursor`; names of equal hash are never separated, because
/// the cursor could not tell them apart.
fn children(reader: &mut Reader<'_>, parent: u64, cursor: u64, limit: usize) -> Result<Vec<Pair>> {
    let end = keys::after_prefix(&keys::children(parent));
    let start = keys::children_from(parent, cursor.saturating_add(1).max(keys::HASH_MIN));
    let mut page = reader.scan(&start, &end, Order::Ascending, limit)?;
    if page.len() < limit {
        return Ok(page);
    }
    let hash_of = |pair: &Pair| keys::child_name(&pair.0).map_or(0, |(hash, _)| hash);
    let last = page.last().map_or(0, hash_of);
    page.retain(|pair| hash_of(pair) != last);
    let group = keys::children_from(parent, last);
    let group_end = keys::children_from(parent, last + 1);
    page.extend(reader.scan(&group, &group_end, Order::Ascending, usize::MAX)?);
    Ok(page)
}
