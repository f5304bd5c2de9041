//! Directory listings for the object store: the entries of a directory, or all files below it, in bounded memory.

use object_store::path::Path;
use object_store::{ObjectMeta, Result as StoreResult};

use super::{meta, refused, store_error};
use crate::error::Error;
use crate::fs::View;
use crate::node::{Attr, FileKind, Node};

/// Directory entries per page.
const ENTRIES_MAX: usize = 512;
/// Most nested directories that a listing descends into.
const DEPTH_MAX: usize = 256;

/// The directory at a prefix; `None` when there is none, so that the listing is empty.
pub(super) fn directory_at(view: &View, prefix: &Path) -> StoreResult<Option<Node>> {
    match view.stat(prefix.as_ref()) {
        Ok(attr) => Ok((attr.kind == FileKind::Directory).then_some(attr.node)),
        Err(Error::NotFound { .. } | Error::NotADirectory { .. }) => Ok(None),
        Err(error) => Err(store_error(prefix.as_ref(), error)),
    }
}

/// The next entries of a directory with their locations; `None` at its end, or when the directory was removed.
pub(super) fn read_page(
    view: &View,
    directory: &Path,
    node: Node,
    cursor: &mut u64,
) -> StoreResult<Option<Vec<(Path, Attr)>>> {
    let entries = match view.readdir_attrs(node, *cursor, ENTRIES_MAX) {
        Ok(entries) => entries,
        Err(Error::NotFound { .. } | Error::NotADirectory { .. }) => return Ok(None),
        Err(error) => return Err(store_error(directory.as_ref(), error)),
    };
    let Some((last, _)) = entries.last() else { return Ok(None) };
    *cursor = last.cursor;
    let mut page = Vec::with_capacity(entries.len());
    for (entry, attr) in entries {
        if entry.name == "." || entry.name == ".." || view.is_snapshots_dir(attr.node) {
            continue;
        }
        let location = entry.name.to_str().map(|name| Path::parse(format!("{directory}/{name}")));
        match location {
            Some(Ok(location)) => page.push((location, attr)),
            // Skipping it would make the listing wrong.
            Some(Err(error)) => return Err(error.into()),
            None => {
                let reason = format!("{directory}: the name {:?} is not UTF-8", entry.name);
                return Err(refused(reason));
            }
        }
    }
    Ok(Some(page))
}

/// A walk through the files below a directory, one page of entries at a time.
pub(super) struct Walk {
    view: View,
    /// The directories being read, each inside the one before, with its cursor and the subdirectories
    /// still to visit; `None` before the start.
    open: Option<Vec<Level>>,
    prefix: Path,
}

struct Level {
    path: Path,
    node: Node,
    cursor: u64,
    at_end: bool,
    below: Vec<(Path, Node)>,
}

impl Level {
    fn new(path: Path, node: Node) -> Level {
        Level { path, node, cursor: 0, at_end: false, below: Vec::new() }
    }
}

impl Walk {
    /// A walk that begins at a prefix.
    pub(super) fn new(view: View, prefix: Path) -> Walk {
        Walk { view, open: None, prefix }
    }

    /// The files of the next page of entries, possibly none of them; `None` at the end.
    pub(super) fn next_page(&mut self) -> StoreResult<Option<Vec<ObjectMeta>>> {
        let open = match &mut self.open {
            Some(open) => open,
            none => {
                let root = directory_at(&self.view, &self.prefix)?;
                let root = root.map(|node| Level::new(self.prefix.clone(), node));
                none.insert(root.into_iter().collect())
            }
        };
        loop {
            let depth = open.len();
            let Some(level) = open.last_mut() else { return Ok(None) };
            if let Some((path, node)) = level.below.pop() {
                if depth >= DEPTH_MAX {
                    let reason = format!("{path}: more than {DEPTH_MAX} directories deep");
                    return Err(refused(reason));
                }
                open.push(Level::new(path, node));
                continue;
            }
            if level.at_end {
                open.pop();
                continue;
            }
            let page = read_page(&self.view, &level.path, level.node, &mut level.cursor)?;
            let Some(page) = page else {
                level.at_end = true;
                continue;
            };
            let mut files = Vec::new();
            for (location, attr) in page {
                match attr.kind {
                    FileKind::File => files.push(meta(location, &attr)),
                    FileKind::Directory => level.below.push((location, attr.node)),
                    _ => {}
                }
            }
            return Ok(Some(files));
        }
    }
}
