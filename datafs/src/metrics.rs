//! Prometheus metrics of the crate, in the process's default registry.

use std::sync::LazyLock;

use prometheus::IntCounter;

/// A counter that registers itself at first use.
pub(crate) struct Counter(LazyLock<Option<IntCounter>>);

impl Counter {
    /// Adds one.
    pub(crate) fn inc(&self) {
        self.inc_by(1);
    }

    /// Adds `n`.
    pub(crate) fn inc_by(&self, n: u64) {
        if let Some(counter) = &*self.0 {
            counter.inc_by(n);
        }
    }

    /// The count so far.
    #[cfg(test)]
    pub(crate) fn get(&self) -> u64 {
        self.0.as_ref().map_or(0, IntCounter::get)
    }
}

/// Registers a counter; one that cannot be registered is logged and counts nothing, which is better
/// than failing the operation that wanted to count.
fn counter(name: &str, help: &str) -> Option<IntCounter> {
    prometheus::register_int_counter!(name, help)
        .inspect_err(|error| tracing::warn!(%error, name, "a metric could not be registered"))
        .ok()
}

/// Data bytes in objects completed by this process.
pub(crate) static OBJECT_WRITTEN_BYTES: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_object_written_bytes_total", "Data bytes in objects completed.")
}));

/// Objects completed by this process.
pub(crate) static OBJECTS_WRITTEN: Counter =
    Counter(LazyLock::new(|| counter("millrace_datafs_objects_written_total", "Objects completed.")));

/// Bytes read from objects and verified, whole frames.
pub(crate) static OBJECT_READ_BYTES: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_object_read_bytes_total", "Bytes read from objects and verified.")
}));

/// Object files opened (misses of the set of open files).
pub(crate) static OBJECTS_OPENED: Counter =
    Counter(LazyLock::new(|| counter("millrace_datafs_objects_opened_total", "Object files opened.")));

/// Requests to a store in the cloud that were tried again.
pub(crate) static STORE_RETRIES: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_store_retries_total", "Requests to the object store that were tried again.")
}));

/// Bytes of objects in the cloud that were written to the cache.
pub(crate) static CACHE_WRITTEN_BYTES: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_cache_written_bytes_total", "Bytes written to the cache.")
}));

/// Bytes that were read from the cache and verified.
pub(crate) static CACHE_READ_BYTES: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_cache_read_bytes_total", "Bytes read from the cache and verified.")
}));

/// Blocks that were not kept because too many were waiting for the disk.
pub(crate) static CACHE_SKIPPED: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_cache_skipped_total", "Blocks that the cache had no time to keep.")
}));

/// Bytes that were removed from the cache to stay within its bounds.
pub(crate) static CACHE_EVICTED_BYTES: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_cache_evicted_bytes_total", "Bytes evicted from the cache.")
}));

/// Files that a mount opened and handed to the kernel.
pub(crate) static PASSTHROUGH_OPENS: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_mount_passthrough_opens_total", "Files handed to the kernel at open.")
}));

/// Requests of the kernel that a mount answered with an error other than "no such file".
pub(crate) static MOUNT_ERRORS: Counter = Counter(LazyLock::new(|| {
    counter("millrace_datafs_mount_errors_total", "Kernel requests answered with an error.")
}));
