//! The copy engine: one thread walks the source, other threads copy the files that it finds.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use millrace_leaf::error_chain;
use parking_lot::Mutex;

use super::tree::{Attributes, Entry, Kind, Source, Target, is_partial, is_plain};
use super::{CopyOptions, CopyProgress, CopyReport};
use crate::error::{Error, Result};

/// Found files that wait for a thread.
const QUEUE: usize = 1_024;
/// Attempts to copy a file that changes while it is read.
const ATTEMPTS: u32 = 3;
/// Failures listed in the report.
const FAILED_MAX: usize = 100;

struct Job {
    path: PathBuf,
    entry: Entry,
}

/// The state of the walk over the source.
struct Met<'l> {
    sender: SyncSender<Job>,
    /// The first name found of each file with several names.
    first_names: HashMap<(u64, u64), PathBuf>,
    /// Pairs of a first and a further name.
    links: &'l mut Vec<(PathBuf, PathBuf)>,
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
    // After the files, because links need their first names.
    for (existing, path) in links {
        let made = target.make_link(&existing, &path);
        copy.outcome(&path, made.map(|()| copy.report.lock().links += 1));
    }
    // After their content, innermost first: copying content changes times, and folders may become read-only.
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
    /// Walks the source. Memory holds one page of a folder, and all folders and links found.
    fn walk(
        &self,
        root: Entry,
        sender: SyncSender<Job>,
        folders: &mut Vec<(PathBuf, Entry, Attributes)>,
        links: &mut Vec<(PathBuf, PathBuf)>,
    ) {
        let mut met = Met { sender, first_names: HashMap::new(), links };
        if root.kind != Kind::Folder {
            self.meet(PathBuf::new(), root, &mut met);
            return;
        }
        let mut pending = vec![(PathBuf::new(), root)];
        while let Some((path, entry)) = pending.pop() {
            if self.stopped.load(Ordering::Relaxed) {
                return;
            }
            let entered = self.enter(&path, &entry, &mut |page| {
                for mut entry in page.into_iter().filter(|entry| !is_partial(&entry.name)) {
                    let name = std::mem::take(&mut entry.name);
                    if !is_plain(&name) {
                        let name = name.to_string_lossy().into_owned();
                        let reason = "it is not the name of one file in this folder";
                        self.outcome::<()>(&path, Err(Error::InvalidName { name, reason }));
                        continue;
                    }
                    let path = path.join(name);
                    match entry.kind {
                        Kind::Folder => pending.push((path, entry)),
                        _ => self.meet(path, entry, &mut met),
                    }
                }
                !self.stopped.load(Ordering::Relaxed)
            });
            if let Some(attributes) = self.outcome(&path, entered) {
                folders.push((path, entry, attributes));
            }
        }
    }

    /// Handles an entry that is not a folder.
    fn meet(&self, path: PathBuf, entry: Entry, met: &mut Met<'_>) {
        match entry.kind {
            Kind::File => {
                if let Some(identity) = entry.identity.filter(|_| self.target.has_links()) {
                    if let Some(first) = met.first_names.get(&identity) {
                        met.links.push((first.clone(), path));
                        return;
                    }
                    met.first_names.insert(identity, path.clone());
                }
                self.found.fetch_add(1, Ordering::Relaxed);
                // Cannot fail: the copying threads receive until the walk ends.
                let _ = met.sender.send(Job { path, entry });
            }
            Kind::Symlink if self.target.has_links() => {
                let made = self
                    .source
                    .target(&path, &entry)
                    .and_then(|target| self.target.make_symlink(&path, target, &entry));
                self.outcome(&path, made.map(|()| self.report.lock().links += 1));
            }
            Kind::Folder | Kind::Symlink | Kind::Special => self.report.lock().left_out += 1,
        }
    }

    fn enter(
        &self,
        path: &Path,
        folder: &Entry,
        visit: &mut dyn FnMut(Vec<Entry>) -> bool,
    ) -> Result<Attributes> {
        if self.target.make_folder(path, folder)? {
            self.report.lock().folders += 1;
        }
        self.source.list(path, folder, visit)?;
        self.source.attributes(path, folder)
    }

    fn work(&self, jobs: &Mutex<Receiver<Job>>) {
        loop {
            let next = jobs.lock().recv();
            let Ok(Job { path, entry }) = next else { return };
            if self.stopped.load(Ordering::Relaxed) {
                // Drain the queue, so that the walk never blocks on it.
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
        let mut now = Cow::Borrowed(entry);
        for attempt in 1.. {
            let Err(changed) = self.attempt(path, &now)? else { break };
            if attempt == ATTEMPTS {
                return Err(changed);
            }
            now = Cow::Owned(self.source.look(path)?);
            if now.kind != Kind::File {
                return Err(changed);
            }
        }
        Ok(())
    }

    /// Copies a file as `entry` describes it; the inner error means that it has changed since.
    fn attempt(&self, path: &Path, entry: &Entry) -> Result<std::result::Result<(), Error>> {
        let attributes = self.source.attributes(path, entry)?;
        let mut from = match self.source.open(path, entry) {
            Err(error @ Error::Stale { .. }) => return Ok(Err(error)),
            other => other?,
        };
        let mut to = self.target.create(path, entry)?;
        let mut copied = 0;
        loop {
            let (offset, bytes) = match from.next() {
                Ok(Some(next)) => next,
                Ok(None) => break,
                Err(error @ Error::Stale { .. }) => return Ok(Err(error)),
                Err(error) => return Err(error),
            };
            let len = bytes.len() as u64;
            to.write(offset, bytes)?;
            copied += len;
            self.bytes.fetch_add(len, Ordering::Relaxed);
            self.tell();
            if self.stopped.load(Ordering::Relaxed) {
                return Ok(Ok(()));
            }
        }
        if from.size()? < entry.size {
            // Otherwise the copy would have zeros for the bytes that were truncated.
            let what = format!("the version of {} that was read", path.display());
            return Ok(Err(Error::Stale { what }));
        }
        to.finish(&attributes)?;
        let mut report = self.report.lock();
        report.files += 1;
        report.bytes += copied;
        Ok(Ok(()))
    }

    /// Records a failure in the report; the copy continues.
    fn outcome<T>(&self, path: &Path, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                let mut report = self.report.lock();
                report.failures += 1;
                if report.failed.len() < FAILED_MAX {
                    report.failed.push((path.display().to_string(), error_chain::one_line(&error)));
                }
                None
            }
        }
    }
}
