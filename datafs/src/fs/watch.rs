//! Change watchers: mounts, whose kernel keeps cached data until a watcher reports a change of it.
//!
//! Changes come from other processes, through the metadata engine, and from other users of the volume in this
//! process. Each user is a *writer* with a number and is not told of its own changes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::RwLock;

use super::View;
use crate::error::Result;
use crate::meta::changes::{Changed, Subscription};

/// Callback that gets the changes. It is called often and from any thread, so it must not block.
pub(crate) type Watcher = Arc<dyn Fn(&Changed) + Send + Sync>;

/// The watchers in this process.
#[derive(Default)]
pub(crate) struct Watchers {
    list: RwLock<Vec<Entry>>,
    count: AtomicUsize,
}

#[derive(Clone)]
struct Entry {
    volume: u64,
    writer: u64,
    watcher: Watcher,
}

impl std::fmt::Debug for Watchers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watchers").field("count", &self.count).finish_non_exhaustive()
    }
}

impl Watchers {
    /// Whether any watcher needs a writer's changes to a volume.
    pub(crate) fn want(&self, volume: u64, writer: u64) -> bool {
        self.count.load(Ordering::Acquire) > 0
            && self.list.read().iter().any(|entry| entry.volume == volume && entry.writer != writer)
    }

    /// Reports the records that a writer has changed to the other watchers of the volume.
    pub(crate) fn tell(&self, volume: u64, writer: u64, records: Vec<Vec<u8>>) {
        if records.is_empty() {
            return;
        }
        let list: Vec<Entry> = self.list.read().clone();
        let changed = Changed::records(records.into_iter().map(|record| (volume, record)).collect());
        for entry in list.iter().filter(|entry| entry.volume == volume && entry.writer != writer) {
            (entry.watcher)(&changed);
        }
    }

    fn set(&self, change: impl FnOnce(&mut Vec<Entry>)) {
        let mut list = self.list.write();
        change(&mut list);
        self.count.store(list.len(), Ordering::Release);
    }
}

/// The watcher of one [`Watch`].
struct OwnWatcher(Watcher);

impl std::fmt::Debug for OwnWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OwnWatcher")
    }
}

/// Registration of a watcher, which ends when this is dropped.
#[derive(Debug)]
#[must_use = "the watcher is not called any more once this is dropped"]
pub(crate) struct Watch {
    view: View,
    watcher: OwnWatcher,
    _others: Subscription,
}

impl View {
    /// Calls `watcher` with the commits of all writers but this view (and its clones), until the watch is
    /// dropped. Commits of other processes may be to any volume, those of this process are to this volume.
    pub(crate) fn watch(&self, watcher: Watcher) -> Result<Watch> {
        let (volume, writer) = (self.volume, self.writer());
        let theirs = Arc::clone(&watcher);
        let others = self.shared.meta.on_change(Box::new(move |changed| theirs(changed)))?;
        let own = OwnWatcher(Arc::clone(&watcher));
        self.shared.watchers.set(|list| list.push(Entry { volume, writer, watcher }));
        Ok(Watch { view: self.clone(), watcher: own, _others: others })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.view
            .shared
            .watchers
            .set(|list| list.retain(|entry| !Arc::ptr_eq(&entry.watcher, &self.watcher.0)));
    }
}
