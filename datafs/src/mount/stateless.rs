//! A cache of files that the kernel reads without an open request: such a read names the inode and no handle.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::error::Result;
use crate::fs::{OpenFile, View};
use crate::node::Node;

/// Most cached files: with one extent each, less than 2 MiB.
const FILES_MAX: usize = 4_096;

/// The cached files, all of snapshots, so their layout never changes.
#[derive(Debug, Default)]
pub(super) struct Stateless {
    files: Mutex<Files>,
}

#[derive(Debug, Default)]
struct Files {
    by_node: HashMap<Node, Arc<OpenFile>>,
    /// Oldest first. A read does not move a file: the kernel caches pages, so repeated reads are mostly the
    /// rest of a large file.
    order: VecDeque<Node>,
}

impl Stateless {
    pub(super) fn get(&self, view: &View, node: Node) -> Result<Arc<OpenFile>> {
        if let Some(file) = self.files.lock().by_node.get(&node) {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(OpenFile::of_snapshot(view, node)?);
        self.put(Arc::clone(&file));
        Ok(file)
    }

    /// Adds a file, and removes the oldest one from a full cache.
    pub(super) fn put(&self, file: Arc<OpenFile>) {
        let node = file.node();
        let mut files = self.files.lock();
        if files.by_node.insert(node, file).is_none() {
            files.order.push_back(node);
            if files.order.len() > FILES_MAX
                && let Some(oldest) = files.order.pop_front()
            {
                files.by_node.remove(&oldest);
            }
        }
    }

    pub(super) fn clear(&self) {
        *self.files.lock() = Files::default();
    }
}
