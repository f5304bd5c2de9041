//! Bulk read of a snapshot's directory: the attributes and layouts of its files in few scans. A caller that
//! looks up one entry after another would need several searches for each.

use std::collections::HashMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;

use super::View;
use super::content::Layout;
use crate::error::{Error, Result};
use crate::meta::engine::{Order, Pair};
use crate::meta::inode::{Dentry, Inode};
use crate::meta::keys::{self, NodeTag};
use crate::meta::versioned::{Reader, Records as _};
use crate::node::{Attr, FileKind, Node};

/// Records read by one scan.
const PAGE: usize = 1_024;
/// Largest gap between two inode numbers of the directory in one scan; the inodes in the gap are read too.
const GAP_MAX: u64 = 8;
/// Fewest entries, on average, in a row of inode numbers: for fewer a scan does not pay.
const ROW_MIN: usize = 8;
/// Most extents of a file whose layout is returned.
const EXTENTS_MAX: usize = 64;
/// Bytes of records after which the read stops.
const BYTES_MAX: usize = 4 << 20;

/// An entry of the directory.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) attr: Attr,
    /// The whole layout of a regular file that is not scattered.
    pub(crate) layout: Option<Layout>,
}

/// An inode whose records are being read.
#[derive(Debug)]
struct Partial {
    ino: u64,
    inode: Inode,
    head: Vec<u8>,
    extents: Vec<Pair>,
}

impl View {
    /// The entries of a snapshot's directory by name. Some are missing when the records exceed `BYTES_MAX`.
    /// `None` when there are more than `entries_max` entries, or their inode numbers are scattered.
    pub(crate) fn whole_directory(
        &self,
        parent: Node,
        entries_max: usize,
    ) -> Result<Option<HashMap<OsString, Found>>> {
        self.read(parent, |reader| {
            let prefix = keys::children(parent.ino);
            let page =
                reader.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, entries_max + 1)?;
            if page.len() > entries_max {
                return Ok(None);
            }
            let mut names = Vec::with_capacity(page.len());
            for (record, value) in &page {
                let damaged = || Error::corrupt("directory entry", "its key has no name");
                let (_, name) = keys::child_name(record).ok_or_else(damaged)?;
                names.push((Dentry::decode(value)?.ino, OsString::from_vec(name.to_vec())));
            }
            names.sort_unstable();
            let rows: Vec<_> = names.chunk_by(|a, b| b.0 - a.0 <= GAP_MAX).collect();
            if rows.len() * ROW_MIN > names.len() {
                return Ok(None);
            }
            let mut found = HashMap::with_capacity(names.len());
            let mut room = BYTES_MAX;
            for row in rows {
                let Some(((first, _), (last, _))) = row.first().zip(row.last()) else { continue };
                let mut names = row.iter().peekable();
                read_row(reader, (*first, *last), &mut room, |partial| {
                    while names.next_if(|(ino, _)| *ino < partial.ino).is_some() {}
                    if names.peek().is_none_or(|(ino, _)| *ino != partial.ino) {
                        return Ok(());
                    }
                    let attr = partial.inode.attr(Node { snapshot: parent.snapshot, ino: partial.ino });
                    let layout = partial.layout()?;
                    // More than one name: a hard link within the directory.
                    while let Some((_, name)) = names.next_if(|(ino, _)| *ino == partial.ino) {
                        found.insert(name.clone(), Found { attr, layout: layout.clone() });
                    }
                    Ok(())
                })?;
            }
            Ok(Some(found))
        })
    }
}

impl Partial {
    fn layout(&self) -> Result<Option<Layout>> {
        if self.inode.kind != FileKind::File || self.extents.len() > EXTENTS_MAX {
            return Ok(None);
        }
        Layout::of_records(self.inode.size, &self.head, &self.extents).map(Some)
    }
}

/// Visits the inodes of a range of numbers, in order, until `room` bytes of records were read.
fn read_row(
    reader: &mut Reader<'_>,
    (first, last): (u64, u64),
    room: &mut usize,
    mut visit: impl FnMut(Partial) -> Result<()>,
) -> Result<()> {
    let end = keys::after_prefix(&keys::node(last));
    let mut start = keys::node(first);
    let mut partial: Option<Partial> = None;
    while *room > 0 {
        let page = reader.scan(&start, &end, Order::Ascending, PAGE)?;
        let more = page.len() == PAGE;
        let mut skipped = false;
        for (record, value) in page {
            let Some((ino, tag)) = keys::node_of(&record) else { continue };
            *room = room.saturating_sub(record.len() + value.len());
            if partial.as_ref().is_some_and(|partial| partial.ino != ino)
                && let Some(complete) = partial.take()
            {
                visit(complete)?;
            }
            match (tag, &mut partial) {
                (NodeTag::Attributes, _) => {
                    let inode = Inode::decode(&value)?;
                    partial = Some(Partial { ino, inode, head: Vec::new(), extents: Vec::new() });
                }
                // A directory in the range may have any number of entries: skip them.
                (NodeTag::Child, _) => {
                    start = keys::after_prefix(&keys::children(ino));
                    skipped = true;
                    break;
                }
                (NodeTag::Head, Some(partial)) => partial.head = value,
                (NodeTag::Extent, Some(partial)) if partial.extents.len() <= EXTENTS_MAX => {
                    partial.extents.push((record.clone(), value));
                }
                _ => {}
            }
            start = record;
        }
        if !skipped {
            if !more {
                return partial.map_or(Ok(()), visit);
            }
            start.push(0);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Datafs};

    #[test]
    fn it_is_what_was_in_the_snapshot() {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &Config::default()).unwrap();
        let name = "v".parse().unwrap();
        datafs.volume_create(&name).unwrap();
        let live = datafs.view(&"v".parse().unwrap()).unwrap();
        live.create_dir_all("d/sub").unwrap();
        for i in 0..40 {
            live.write_file(&format!("d/{i}"), &vec![i as u8; 1_000 * i]).unwrap();
            live.write_file(&format!("d/sub/{i}"), b"not of the directory").unwrap();
        }
        let parent = live.stat("d").unwrap().node;
        live.link(live.stat("d/7").unwrap().node, parent, "again".as_ref()).unwrap();
        live.symlink(parent, "link".as_ref(), "7".as_ref(), crate::fs::Owner { uid: 0, gid: 0 }).unwrap();
        datafs.snapshot_create(&name, &"s".parse().unwrap()).unwrap();
        live.write_file("d/7", b"later").unwrap();
        live.remove_file("d/8").unwrap();
        live.write_file("d/new", b"later").unwrap();
        let view = datafs.view(&"v@s".parse().unwrap()).unwrap();
        let parent = view.stat("d").unwrap().node;
        let found = view.whole_directory(parent, 100).unwrap().unwrap();
        assert_eq!(found.len(), 43);
        for (entry, attr) in view.readdir_attrs(parent, 0, 1_000).unwrap() {
            if entry.name == "." || entry.name == ".." {
                continue;
            }
            let found = &found[&entry.name];
            assert_eq!(found.attr, attr);
            assert_eq!(found.layout.is_some(), attr.kind == FileKind::File);
            if let Some(layout) = &found.layout {
                let known = crate::fs::OpenFile::known(&view, attr.node, layout.clone());
                let expected = view.open(attr.node, crate::fs::OpenFlags::READ).unwrap();
                assert_eq!(known.read_at(0, 1 << 20).unwrap(), expected.read_at(0, 1 << 20).unwrap());
            }
        }
        assert!(view.whole_directory(parent, 42).unwrap().is_none(), "too many");
        let root = view.whole_directory(view.root(), 100).unwrap();
        assert!(root.is_none(), "a single entry is not worth a scan");
    }
}
