//! Warmup: fetches the objects of files from a remote store into the cache before programs read them.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::sync::mpsc::{Receiver, sync_channel};

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::fs::{OpenFlags, View};
use crate::node::{FileKind, Node};
use crate::object::ObjectId;

/// Objects that are fetched concurrently.
const FETCHERS: usize = 8;
/// Most object ids remembered, so that a shared object is fetched once. Beyond this, an object may be checked
/// again, which costs a lookup in the cache.
const SEEN_MAX: usize = 1 << 20;
/// Entries of a folder per page.
const PAGE: usize = 1_024;

/// Progress of a [`View::warmup`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Warmup {
    /// Files processed.
    pub files: u64,
    /// Bytes now in the cache, fetched or already there. Objects of a local store are not counted.
    pub bytes: u64,
}

/// A report of a fetching thread.
enum Report {
    Bytes(u64),
    Failed(Error),
}

impl View {
    /// Fetches the objects of the file at `path`, or of all files below the directory, into the cache, as far
    /// as it has room. Calls `progress` from time to time. Fetches nothing from a local store. Needs no
    /// mount; mounts that use the same cache benefit.
    pub fn warmup(&self, path: &str, progress: &mut dyn FnMut(Warmup)) -> Result<Warmup> {
        let mut state = Warmup::default();
        let (wanted, objects) = sync_channel::<ObjectId>(2 * FETCHERS);
        let (reports, reported) = std::sync::mpsc::channel();
        let objects = Mutex::new(objects);
        std::thread::scope(|scope| -> Result<()> {
            for _ in 0..FETCHERS {
                let (objects, reports) = (&objects, reports.clone());
                scope.spawn(move || {
                    loop {
                        let next = objects.lock().recv();
                        let Ok(object) = next else { return };
                        // Fails once the warmup has failed.
                        let told = |bytes| {
                            let _ = reports.send(Report::Bytes(bytes));
                        };
                        if let Err(error) = self.shared.pool.warm(object, &mut { told }) {
                            let _ = reports.send(Report::Failed(error.into()));
                        }
                    }
                });
            }
            drop(reports);
            let mut seen = HashSet::new();
            let walked = self.each_file(path, &mut |objects| {
                state.files += 1;
                for object in objects {
                    if seen.len() >= SEEN_MAX {
                        seen.clear();
                    }
                    if seen.insert(object) {
                        // Cannot fail: the threads receive until this sender is dropped.
                        let _ = wanted.send(object);
                    }
                }
                take(&reported, &mut state, false)?;
                progress(state);
                Ok(())
            });
            drop(wanted);
            walked?;
            while take(&reported, &mut state, true)? {
                progress(state);
            }
            Ok(())
        })?;
        self.shared.pool.settle_cache()?;
        progress(state);
        Ok(state)
    }

    /// Passes the objects of every regular file at or below a path to `visit`. Memory holds one page per
    /// level of nesting.
    fn each_file(&self, path: &str, visit: &mut dyn FnMut(Vec<ObjectId>) -> Result<()>) -> Result<()> {
        let top = self.stat(path)?;
        if top.kind == FileKind::File {
            return visit(self.with_file(path, |file| file.objects())?);
        }
        // Folders still to read, each with its cursor.
        let mut left = vec![(top.node, 0)];
        while let Some((folder, cursor)) = left.pop() {
            let page = match self.readdir_attrs(folder, cursor, PAGE) {
                // Removed since it was found.
                Err(error) if error.is_not_found() && folder != top.node => continue,
                other => other?,
            };
            let Some((last, _)) = page.last() else { continue };
            left.push((folder, last.cursor));
            for (entry, attr) in page {
                match attr.kind {
                    FileKind::Directory if entry.name != "." && entry.name != ".." => {
                        left.push((attr.node, 0));
                    }
                    FileKind::File => {
                        if let Some(objects) = self.objects_of(folder, &entry.name, attr.node)? {
                            visit(objects)?;
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The objects of a file, which was `node` when it was found; `None` when the name has no file any more.
    fn objects_of(&self, folder: Node, name: &OsStr, mut node: Node) -> Result<Option<Vec<ObjectId>>> {
        loop {
            match self.open(node, OpenFlags::READ).and_then(|file| file.objects()) {
                Err(error) if error.is_not_found() => {}
                other => return other.map(Some),
            }
            match self.lookup(folder, name) {
                Ok(attr) if attr.kind == FileKind::File && attr.node != node => node = attr.node,
                Err(error) if !error.is_not_found() => return Err(error),
                _ => return Ok(None),
            }
        }
    }
}

/// Applies all available reports; with `wait`, blocks for the first. Returns false if there was none.
fn take(reported: &Receiver<Report>, state: &mut Warmup, wait: bool) -> Result<bool> {
    let mut next = if wait { reported.recv().ok() } else { reported.try_recv().ok() };
    let any = next.is_some();
    while let Some(report) = next {
        match report {
            Report::Bytes(bytes) => state.bytes += bytes,
            Report::Failed(error) => return Err(error),
        }
        next = reported.try_recv().ok();
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;
    use crate::fs::tests::{open, owner, volume};

    #[test]
    fn every_file_is_found_whatever_its_name() {
        let home = tempfile::tempdir().unwrap();
        let datafs = open(home.path());
        let view = volume(&datafs);
        for folder in ["", "a/", "a/b/"] {
            view.write_file(&format!("{folder}file"), b"x").unwrap();
        }
        let many = view.mkdir(view.root(), OsStr::new("many"), 0o755, owner()).unwrap().node;
        for i in 0..PAGE + 10 {
            let name = [format!("{i}").as_bytes(), b"\xff"].concat();
            view.create(many, OsStr::from_bytes(&name), 0o644, owner(), OpenFlags::READ_WRITE).unwrap();
        }
        view.symlink(view.root(), OsStr::new("link"), OsStr::new("many"), owner()).unwrap();
        let files = |path| view.warmup(path, &mut |_| {}).unwrap().files;
        assert_eq!((files(""), files("a"), files("many")), (PAGE as u64 + 13, 2, PAGE as u64 + 10));
        assert_eq!((files("file"), files("link")), (1, PAGE as u64 + 10));
        assert!(view.warmup("missing", &mut |_| {}).unwrap_err().is_not_found());
    }
}
