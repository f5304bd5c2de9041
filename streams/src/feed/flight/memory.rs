//! Memory that the feeds and streams of a service reserve before they use it.

use std::sync::Arc;

use parking_lot::Mutex;

use super::metrics;

/// A bound in bytes. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Memory {
    used: Arc<Mutex<u64>>,
    max: u64,
}

/// Bytes of a [`Memory`], given back when dropped.
#[derive(Debug)]
pub(super) struct Reserved {
    memory: Memory,
    bytes: u64,
}

impl Memory {
    pub(super) fn new(max: u64) -> Memory {
        Memory { used: Arc::default(), max }
    }

    pub(super) fn max(&self) -> u64 {
        self.max
    }

    pub(super) fn used(&self) -> u64 {
        *self.used.lock()
    }

    /// Reserves bytes; none if too few are left.
    pub(super) fn reserve(&self, bytes: u64) -> Option<Reserved> {
        let mut used = self.used.lock();
        *used = used.checked_add(bytes).filter(|sum| *sum <= self.max)?;
        metrics::MEMORY.add(bytes as i64);
        Some(Reserved { memory: self.clone(), bytes })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        *self.memory.used.lock() -= self.bytes;
        metrics::MEMORY.sub(self.bytes as i64);
    }
}
