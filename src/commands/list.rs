//! `millrace ls`: a listing of a folder, or of one file, in a volume or a snapshot.

use anyhow::Result;
use chrono::{DateTime, SecondsFormat, Utc};
use millrace_datafs::{Attr, FileKind, Node, NodeEntry, View, VolumeSpec};
use serde_json::json;

use crate::cli::ListArgs;
use crate::context::Context;
use crate::failure::{Exit, failure};
use crate::output::{self, time};

/// Entries that are read at a time.
const PAGE: usize = 1_000;
/// Entries of one folder that are sorted by name. A larger folder is listed page by page in the volume's order.
const SORTED_MAX: usize = 100_000;
/// Deepest folder that `--recursive` enters: the longest path that the kernel takes has fewer.
const DEPTH_MAX: usize = 4_096;

/// Runs the command.
pub(crate) fn run(context: &Context, args: &ListArgs) -> Result<()> {
    let what = &args.what;
    let (spec, path) = what.split_once(':').unwrap_or((what, "/"));
    let spec: VolumeSpec = spec.parse().map_err(|error| failure(Exit::Usage, format!("{what}: {error}")))?;
    let view = context.datafs()?.view(&spec)?;
    let found = view.resolve(path)?;
    let mut listing = Listing { context, view: &view, recursive: args.recursive, is_wanted: true };
    if found.kind != FileKind::Directory {
        let name = path.trim_end_matches('/');
        return listing.show(vec![(name.rsplit('/').next().unwrap_or(name).to_owned(), found)]).map(drop);
    }
    listing.folder(found.node, "", 0)
}

/// A listing under way.
struct Listing<'a> {
    context: &'a Context,
    view: &'a View,
    recursive: bool,
    /// False once the reader of standard output has gone away.
    is_wanted: bool,
}

impl Listing<'_> {
    /// Lists a folder. `prefix` is its path below the folder that the user named, empty or with `/` at its end.
    fn folder(&mut self, folder: Node, prefix: &str, depth: usize) -> Result<()> {
        let mut rows = Vec::new();
        let mut cursor = 0;
        loop {
            let page = self.view.readdir_attrs(folder, cursor, PAGE)?;
            let Some((last, _)) = page.last() else { break };
            cursor = last.cursor;
            rows.extend(page.into_iter().filter_map(|(entry, attr)| row(prefix, &entry, attr)));
            if rows.len() > SORTED_MAX {
                self.page(std::mem::take(&mut rows), depth)?;
            }
            if !self.is_wanted {
                return Ok(());
            }
        }
        self.page(rows, depth)
    }

    /// Shows entries of one folder, and lists the folders among them.
    fn page(&mut self, mut rows: Vec<(String, Attr)>, depth: usize) -> Result<()> {
        rows.sort_by(|(one, _), (other, _)| one.cmp(other));
        if !self.recursive {
            return self.show(rows);
        }
        for row in rows {
            let (path, attr) = row.clone();
            self.show(vec![row])?;
            if !self.is_wanted {
                return Ok(());
            }
            if attr.kind != FileKind::Directory || depth >= DEPTH_MAX {
                continue;
            }
            match self.folder(attr.node, &format!("{path}/"), depth + 1) {
                // Removed since it was listed.
                Err(error) if is_gone(&error) => {}
                listed => listed?,
            }
        }
        Ok(())
    }

    fn show(&mut self, rows: Vec<(String, Attr)>) -> Result<()> {
        if self.context.out.is_json() {
            for (path, attr) in rows {
                self.is_wanted = self.context.out.piece(&object(&path, &attr).to_string())?;
                if !self.is_wanted {
                    break;
                }
            }
        } else if !rows.is_empty() {
            let lines = rows.iter().map(|(path, attr)| {
                let size = attr.size.to_string();
                let name = output::printable(path);
                format!("{} {size:>14}  {}  {name}", mode(attr), time(attr.mtime))
            });
            let text = lines.collect::<Vec<_>>().join("\n");
            self.is_wanted = self.context.out.piece(&text)?;
        }
        Ok(())
    }
}

/// The path and attributes of an entry that is listed: not those of `.` and `..`.
fn row(prefix: &str, entry: &NodeEntry, attr: Attr) -> Option<(String, Attr)> {
    let name = entry.name.to_string_lossy();
    (name != "." && name != "..").then(|| (format!("{prefix}{name}"), attr))
}

fn is_gone(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(millrace_datafs::Error::NotFound { .. }))
}

/// An entry for programs. Bytes of the name that are not UTF-8 become U+FFFD.
fn object(path: &str, attr: &Attr) -> serde_json::Value {
    json!({
        "path": path,
        "kind": kind(attr.kind).1,
        "mode": format!("{:04o}", attr.mode),
        "uid": attr.uid,
        "gid": attr.gid,
        "size": attr.size,
        "modified": DateTime::<Utc>::from(attr.mtime).to_rfc3339_opts(SecondsFormat::Nanos, true),
    })
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
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn modes_look_as_those_of_ls() {
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
