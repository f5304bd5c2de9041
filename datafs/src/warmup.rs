//! Brings files of a store in the cloud onto this machine before somebody waits for them.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::sync::mpsc::{Receiver, sync_channel};

use parking_lot::Mutex;

use crate::data::ObjectId;
use crate::error::{Error, Result};
use crate::fs::{FileKind, Node, OpenFlags};
use crate::view::View;

/// Objects that are fetched at a time.
const FETCHERS: usize = 8;
/// Objects that are remembered, so that one which many files share is asked for once. Beyond, it may be
/// looked at again, which costs a look into the cache.
const SEEN_MAX: usize = 1 << 20;
/// Entries of a folder that are looked at together.
const PAGE: usize = 1_024;

/// How far a [`View::warmup`] has come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct Warmup {
    /// Files that were looked at.
    pub files: u64,
    /// Bytes that are on this machine now, fetched or there already. Those of a store that is a local
    /// directory are not counted.
    pub bytes: u64,
}

/// What the threads report.
enum Report {
    Bytes(u64),
    Failed(Error),
}

impl View {
    /// Fetches everything that the file at `path`, or the files below the directory, consist of into the
    /// cache, so far as it has room. Tells `progress` every now and then how far it is. Nothing has to be
    /// fetched from a local store. Needs no mount, and helps those that use the same cache.
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
                        // Nobody listens any more once the warmup has failed.
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
                        // The threads listen for as long as this does.
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

    /// Visits every regular file at or below a path with the objects that it consists of. Keeps no more
    /// than a page of a folder and of each of those it is in.
    fn each_file(&self, path: &str, visit: &mut dyn FnMut(Vec<ObjectId>) -> Result<()>) -> Result<()> {
        let top = self.stat(path)?;
        if top.kind == FileKind::File {
            return visit(self.with_file(path, |file| file.objects())?);
        }
        // Each with the cursor from which on it is left.
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

    /// What the file of a name consists of, `node` when it was found; `None` when there is none any more.
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

/// Takes what was reported; waits for the first when asked to. Returns false once nothing more comes.
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
    #![allow(clippy::unwrap_used)]

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
