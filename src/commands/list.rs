//! `millrace ls`: a listing of a folder, or of one file, in a volume or a snapshot.

use std::ffi::OsStr;

use anyhow::Result;
use chrono::{DateTime, SecondsFormat, Utc};
use millrace_datafs::{Attr, Error, FileKind, Node, View, VolumeSpec};
use serde_json::json;

use crate::cli::ListArgs;
use crate::context::Context;
use crate::failure::{Exit, failure};
use crate::output::{self, Output, time};

/// Entries that are read at a time.
const PAGE: usize = 1_000;
/// Entries of one folder that are sorted by name. A larger folder is sorted in parts of about this many.
const SORTED_MAX: usize = 100_000;

/// Runs the command.
pub(crate) fn run(context: &Context, args: &ListArgs) -> Result<()> {
    let what = &args.what;
    let (spec, path) = what.split_once(':').unwrap_or((what, "/"));
    let spec: VolumeSpec = spec.parse().map_err(|error| failure(Exit::Usage, format!("{what}: {error}")))?;
    let view = context.datafs()?.view(&spec)?;
    let found = match view.resolve(path) {
        // A link that leads nowhere in the volume is listed itself.
        Err(error) => link_at(&view, path).ok_or(error)?,
        Ok(found) => found,
    };
    if found.kind == FileKind::Directory {
        return list(context.out, &view, found.node, args.recursive);
    }
    let name = path.trim_end_matches('/').rsplit('/').next().unwrap_or(path);
    show(context.out, &view, name, &found).map(drop)
}

/// The symbolic link at a path; `None` where there is none.
fn link_at(view: &View, path: &str) -> Option<Attr> {
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let parent = view.resolve(parent).ok()?;
    let found = view.lookup(parent.node, OsStr::new(name)).ok()?;
    (found.kind == FileKind::Symlink).then_some(found)
}

/// A folder whose entries are being listed.
struct OpenFolder {
    folder: Node,
    /// The folder's path below the one that the user named, empty or with `/` at its end.
    prefix: String,
    /// Entries that were read and not shown yet.
    rows: std::vec::IntoIter<(String, Attr)>,
    cursor: u64,
    is_read: bool,
}

impl OpenFolder {
    fn new(folder: Node, prefix: String) -> OpenFolder {
        OpenFolder { folder, prefix, rows: Vec::new().into_iter(), cursor: 0, is_read: false }
    }

    /// Reads further entries, sorted by name.
    fn read(&mut self, view: &View) -> millrace_datafs::Result<()> {
        let mut rows = Vec::new();
        while rows.len() < SORTED_MAX {
            let page = view.readdir_attrs(self.folder, self.cursor, PAGE)?;
            let Some((last, _)) = page.last() else {
                self.is_read = true;
                break;
            };
            self.cursor = last.cursor;
            rows.extend(page.into_iter().filter_map(|(entry, attr)| {
                let name = entry.name.to_string_lossy();
                (name != "." && name != "..").then(|| (format!("{}{name}", self.prefix), attr))
            }));
        }
        rows.sort_by(|(one, _), (other, _)| one.cmp(other));
        self.rows = rows.into_iter();
        Ok(())
    }
}

/// Lists a folder. Folders below it are kept on a stack of its own: a tree may be deeper than that of a thread.
fn list(out: Output, view: &View, folder: Node, recursive: bool) -> Result<()> {
    let mut open_folders = vec![OpenFolder::new(folder, String::new())];
    while let Some(level) = open_folders.last_mut() {
        let Some((path, attr)) = level.rows.next() else {
            if level.is_read {
                open_folders.pop();
                continue;
            }
            match level.read(view) {
                Ok(()) => {}
                // Removed since it was listed, or a snapshot in `.snapshots` that was deleted.
                Err(Error::NotFound { .. }) if open_folders.len() > 1 => drop(open_folders.pop()),
                Err(Error::Stale { .. }) if open_folders.len() > 1 && !view.is_snapshot() => {
                    drop(open_folders.pop())
                }
                Err(error) => return Err(error.into()),
            }
            continue;
        };
        if !show(out, view, &path, &attr)? {
            return Ok(());
        }
        if recursive && attr.kind == FileKind::Directory {
            open_folders.push(OpenFolder::new(attr.node, path + "/"));
        }
    }
    Ok(())
}

/// Shows an entry; false once the reader of standard output has gone away.
fn show(out: Output, view: &View, path: &str, attr: &Attr) -> Result<bool> {
    // Removed since it was listed, it has no target.
    let target = match attr.kind {
        FileKind::Symlink => {
            view.readlink(attr.node).ok().map(|target| target.to_string_lossy().into_owned())
        }
        _ => None,
    };
    if out.is_json() {
        return out.partial(&object(path, attr, target).to_string());
    }
    let target = target.map_or(String::new(), |target| format!(" -> {}", output::printable(&target)));
    let name = output::printable(path);
    out.partial(&format!("{} {:>14}  {}  {name}{target}", mode(attr), attr.size, time(attr.mtime)))
}

/// An entry for programs. Bytes of the name that are not UTF-8 become U+FFFD.
fn object(path: &str, attr: &Attr, target: Option<String>) -> serde_json::Value {
    let mut object = json!({
        "path": path,
        "kind": kind(attr.kind).1,
        "mode": format!("{:04o}", attr.mode),
        "uid": attr.uid,
        "gid": attr.gid,
        "size": attr.size,
        "modified": DateTime::<Utc>::from(attr.mtime).to_rfc3339_opts(SecondsFormat::Nanos, true),
    });
    if let Some(target) = target {
        object["target"] = target.into();
    }
    object
}

/// A kind as `ls -l` and as programs name it.
fn kind(kind: FileKind) -> (char, &'static str) {
    match kind {
        FileKind::File => ('-', "file"),
        FileKind::Directory => ('d', "directory"),
        FileKind::Symlink => ('l', "symlink"),
        FileKind::BlockDevice => ('b', "block-device"),
        FileKind::CharDevice => ('c', "char-device"),
        FileKind::Fifo => ('p', "fifo"),
        FileKind::Socket => ('s', "socket"),
    }
}

/// Kind and permissions as `ls -l` shows them.
fn mode(attr: &Attr) -> String {
    let bits = |shift: u32, special: bool, (lower, upper): (char, char)| {
        let bits = attr.mode >> shift & 7;
        let executes = match (special, bits & 1 == 1) {
            (true, true) => lower,
            (true, false) => upper,
            (false, true) => 'x',
            (false, false) => '-',
        };
        [if bits & 4 == 4 { 'r' } else { '-' }, if bits & 2 == 2 { 'w' } else { '-' }, executes]
    };
    let user = bits(6, attr.mode & 0o4000 != 0, ('s', 'S'));
    let group = bits(3, attr.mode & 0o2000 != 0, ('s', 'S'));
    let other = bits(0, attr.mode & 0o1000 != 0, ('t', 'T'));
    std::iter::once(kind(attr.kind).0).chain(user).chain(group).chain(other).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_modes_match_ls() {
        let home = tempfile::tempdir().unwrap();
        let datafs = millrace_datafs::Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
        datafs.volume_create(&"v".parse().unwrap()).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        let mut attr = view.resolve("/").unwrap();
        for (kind, bits, shown) in [
            (FileKind::Directory, 0o1777, "drwxrwxrwt"),
            (FileKind::File, 0o640, "-rw-r-----"),
            (FileKind::File, 0o4755, "-rwsr-xr-x"),
            (FileKind::File, 0o7000, "---S--S--T"),
            (FileKind::Symlink, 0o777, "lrwxrwxrwx"),
        ] {
            (attr.kind, attr.mode) = (kind, bits);
            assert_eq!(mode(&attr), shown);
        }
    }
}
