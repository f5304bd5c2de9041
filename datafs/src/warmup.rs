//! Brings files of a store in the cloud onto this machine before somebody waits for them.

use std::collections::HashSet;
use std::sync::mpsc::{Receiver, sync_channel};

use parking_lot::Mutex;

use crate::data::ObjectId;
use crate::error::{Error, Result};
use crate::fs::FileKind;
use crate::view::View;

/// Objects that are fetched at a time.
const FETCHERS: usize = 8;
/// Objects that are remembered, so that one which many files share is asked for once. Beyond, it may be
/// looked at again, which costs a look into the cache.
const SEEN_MAX: usize = 1 << 20;

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
        self.shared.pool.settle_cache();
        progress(state);
        Ok(state)
    }

    /// Visits every regular file at or below a path with the objects that it consists of.
    fn each_file(&self, path: &str, visit: &mut dyn FnMut(Vec<ObjectId>) -> Result<()>) -> Result<()> {
        let mut left = vec![path.to_owned()];
        while let Some(path) = left.pop() {
            let stat = match self.stat(&path) {
                // Removed since its directory was listed, or a link to nowhere.
                Err(error) if error.is_not_found() && !left.is_empty() => continue,
                other => other?,
            };
            match stat.kind {
                FileKind::Directory => {
                    for entry in self.list(&path)? {
                        if matches!(entry.stat.kind, FileKind::Directory | FileKind::File) {
                            left.push(format!("{}/{}", path.trim_end_matches('/'), entry.name));
                        }
                    }
                }
                FileKind::File => visit(self.with_file(&path, |file| file.objects())?)?,
                _ => {}
            }
        }
        Ok(())
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
