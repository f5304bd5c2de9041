//! The copy itself: one thread walks the source, others copy the files it finds.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use parking_lot::Mutex;

use super::tree::{Attributes, Entry, Kind, Source, Target, is_partial};
use super::{CopyOptions, CopyProgress, CopyReport};
use crate::error::{Error, Result, in_full};

/// Files that were found and wait for a thread.
const QUEUE: usize = 1_024;
/// Failures that are listed.
const FAILED_MAX: usize = 100;

struct Job {
    path: PathBuf,
    entry: Entry,
}

struct Copy<'a> {
    source: &'a dyn Source,
    target: &'a dyn Target,
    progress: &'a (dyn Fn(CopyProgress) -> bool + Sync),
    report: Mutex<CopyReport>,
    found: AtomicU64,
    done: AtomicU64,
    bytes: AtomicU64,
    stopped: AtomicBool,
}

pub(super) fn run(
    source: &dyn Source,
    target: &dyn Target,
    options: &CopyOptions,
    progress: &(dyn Fn(CopyProgress) -> bool + Sync),
) -> Result<CopyReport> {
    let root = source.root()?;
    if root.kind == Kind::Folder && !options.recursive {
        let what = root.name.to_string_lossy().into_owned();
        return Err(Error::IsADirectory { what: format!("{what} (copy it with -r)") });
    }
    let copy = Copy {
        source,
        target,
        progress,
        report: Mutex::default(),
        found: AtomicU64::new(0),
        done: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
        stopped: AtomicBool::new(false),
    };
    let (sender, receiver) = sync_channel(QUEUE);
    let receiver = Mutex::new(receiver);
    let (mut folders, mut links) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..options.parallel {
            scope.spawn(|| copy.work(&receiver));
        }
        copy.walk(root, sender, &mut folders, &mut links);
    });
    // After the files that they are further names of.
    for (existing, path) in links {
        let made = target.make_link(&existing, &path);
        copy.outcome(&path, made.map(|()| copy.report.lock().links += 1));
    }
    // After their content, the innermost first: their times would change again, and they may be read-only.
    for (path, entry, attributes) in folders.into_iter().rev() {
        let finished = target.finish_folder(&path, &entry, &attributes);
        copy.outcome(&path, finished);
    }
    target.finish()?;
    if copy.stopped.load(Ordering::Relaxed) {
        return Err(Error::Invalid("the copy was stopped; run it again to go on".into()));
    }
    Ok(copy.report.into_inner())
}

impl Copy<'_> {
    fn walk(
        &self,
        root: Entry,
        sender: SyncSender<Job>,
        folders: &mut Vec<(PathBuf, Entry, Attributes)>,
        links: &mut Vec<(PathBuf, PathBuf)>,
    ) {
        // The first name of each file that has several.
        let mut first_names: HashMap<(u64, u64), PathBuf> = HashMap::new();
        let mut pending = vec![(PathBuf::new(), root)];
        while let Some((path, entry)) = pending.pop() {
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            match entry.kind {
                Kind::Folder => {
                    let entered = self.enter(&path, &entry);
                    let Some((entries, attributes)) = self.outcome(&path, entered) else { continue };
                    let entries = entries.into_iter().filter(|entry| !is_partial(&entry.name));
                    pending.extend(entries.map(|entry| (path.join(&entry.name), entry)));
                    folders.push((path, entry, attributes));
                }
                Kind::File => {
                    if let Some(identity) = entry.identity.filter(|_| self.target.has_links()) {
                        if let Some(first) = first_names.get(&identity) {
                            links.push((first.clone(), path));
                            continue;
                        }
                        first_names.insert(identity, path.clone());
                    }
                    self.found.fetch_add(1, Ordering::Relaxed);
                    if sender.send(Job { path, entry }).is_err() {
                        return;
                    }
                }
                Kind::Symlink if self.target.has_links() => {
                    let made = self
                        .source
                        .target(&path, &entry)
                        .and_then(|target| self.target.make_symlink(&path, target));
                    self.outcome(&path, made.map(|()| self.report.lock().links += 1));
                }
                Kind::Symlink | Kind::Special => self.report.lock().left_out += 1,
            }
        }
    }

    fn enter(&self, path: &Path, folder: &Entry) -> Result<(Vec<Entry>, Attributes)> {
        if self.target.make_folder(path)? {
            self.report.lock().folders += 1;
        }
        Ok((self.source.list(path, folder)?, self.source.attributes(path, folder)?))
    }

    fn work(&self, jobs: &Mutex<Receiver<Job>>) {
        loop {
            let next = jobs.lock().recv();
            let Ok(Job { path, entry }) = next else { return };
            if self.stopped.load(Ordering::Relaxed) {
                // Drained, so that the walk never waits for room.
                continue;
            }
            let copied = self.file(&path, &entry);
            self.outcome(&path, copied);
            self.done.fetch_add(1, Ordering::Relaxed);
            self.tell();
        }
    }

    fn tell(&self) {
        let now = CopyProgress {
            found: self.found.load(Ordering::Relaxed),
            done: self.done.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        };
        if !(self.progress)(now) {
            self.stopped.store(true, Ordering::Relaxed);
        }
    }

    fn file(&self, path: &Path, entry: &Entry) -> Result<()> {
        if let Some(there) = self.target.find(path)?
            && there.kind == Kind::File
            && there.size == entry.size
            && (there.mtime == entry.mtime || (!self.target.keeps_times() && there.mtime >= entry.mtime))
        {
            self.report.lock().unchanged += 1;
            return Ok(());
        }
        let attributes = self.source.attributes(path, entry)?;
        let mut from = self.source.open(path, entry)?;
        let mut to = self.target.create(path, entry)?;
        while let Some((offset, bytes)) = from.next()? {
            let len = bytes.len() as u64;
            to.write(offset, bytes)?;
            self.bytes.fetch_add(len, Ordering::Relaxed);
            self.report.lock().bytes += len;
            self.tell();
            if self.stopped.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        if from.size()? < entry.size {
            // Else zeros would take the place of what was cut off meanwhile.
            return Err(Error::Stale { what: format!("the version of {} that was read", path.display()) });
        }
        to.finish(&attributes)?;
        self.report.lock().files += 1;
        Ok(())
    }

    /// Notes a failure; the copy goes on with the next.
    fn outcome<T>(&self, path: &Path, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let mut report = self.report.lock();
                report.failures += 1;
                if report.failed.len() < FAILED_MAX {
                    report.failed.push((path.display().to_string(), in_full(&error)));
                }
                None
            }
        }
    }
}
