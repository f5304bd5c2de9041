//! Counters of the process, in its default Prometheus registry and in the statistics of mounts.
//!
//! Most threads add to a separate cell, so that counting costs a few nanoseconds. `mount/observe/stats.rs` has the
//! counters per mount.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use millrace_leaf::error_chain;
use prometheus::core::{Collector, Desc};
use prometheus::proto;

/// Cells of each counter; threads are assigned to them round-robin.
pub(crate) const STRIPES: usize = 8;

/// The cell that the current thread counts in.
pub(crate) fn stripe() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static STRIPE: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    match STRIPE.get() {
        usize::MAX => {
            let stripe = NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES;
            STRIPE.set(stripe);
            stripe
        }
        stripe => stripe,
    }
}

/// A number on a separate cache line.
#[derive(Debug)]
#[repr(align(64))]
struct Striped(AtomicU64);

/// A counter of this process.
#[derive(Debug)]
pub(crate) struct Counter {
    name: &'static str,
    help: &'static str,
    cells: [Striped; STRIPES],
}

impl Counter {
    const fn new(name: &'static str, help: &'static str) -> Counter {
        Counter { name, help, cells: [const { Striped(AtomicU64::new(0)) }; STRIPES] }
    }

    /// Adds one.
    pub(crate) fn inc(&self) {
        self.inc_by(1);
    }

    /// Adds `n`.
    pub(crate) fn inc_by(&self, n: u64) {
        self.cells[stripe()].0.fetch_add(n, Ordering::Relaxed);
    }

    /// The count so far.
    pub(crate) fn get(&self) -> u64 {
        self.cells.iter().map(|cell| cell.0.load(Ordering::Relaxed)).sum()
    }
}

macro_rules! counters {
    ($($ident:ident $name:literal $help:literal;)*) => {
        $(
            #[doc = $help]
            pub(crate) static $ident: Counter = Counter::new($name, $help);
        )*

        /// All counters.
        static COUNTERS: &[&Counter] = &[$(&$ident,)*];
    };
}

counters! {
    OBJECT_WRITTEN_BYTES "millrace_datafs_object_written_bytes_total"
        "Data bytes in objects completed.";
    OBJECTS_WRITTEN "millrace_datafs_objects_written_total"
        "Objects completed.";
    OBJECT_READ_BYTES "millrace_datafs_object_read_bytes_total"
        "Bytes read from objects and verified, whole frames.";
    OBJECTS_OPENED "millrace_datafs_objects_opened_total"
        "Object files opened: those that were not among the open ones.";
    STORE_RETRIES "millrace_datafs_store_retries_total"
        "Requests to a store in the cloud that were tried again.";
    STORE_READ_BYTES "millrace_datafs_store_read_bytes_total"
        "Bytes that were fetched from a store in the cloud.";
    CACHE_WRITTEN_BYTES "millrace_datafs_cache_written_bytes_total"
        "Bytes of objects in the cloud that were written to the cache.";
    CACHE_READ_BYTES "millrace_datafs_cache_read_bytes_total"
        "Bytes read from the cache and verified.";
    CACHE_SKIPPED "millrace_datafs_cache_skipped_total"
        "Blocks that were not kept because too many were waiting for the disk of the cache.";
    CACHE_EVICTED_BYTES "millrace_datafs_cache_evicted_bytes_total"
        "Bytes removed from the cache to stay within its bounds.";
    CACHE_LOCKS_IGNORED "millrace_datafs_cache_locks_ignored_total"
        "Evictions without the lock of the cache, because another process held it for more than 30 s.";
    RECORD_CACHE_HITS "millrace_datafs_record_cache_hits_total"
        "Metadata records that were in memory.";
    RECORD_CACHE_MISSES "millrace_datafs_record_cache_misses_total"
        "Metadata records that the engine was asked for.";
    TRANSACTIONS "millrace_datafs_metadata_transactions_total"
        "Transactions that changed metadata and were answered.";
    COMMITS "millrace_datafs_metadata_commits_total"
        "Groups of transactions that were committed.";
    COMMITTED_RECORDS "millrace_datafs_metadata_committed_records_total"
        "Records that commits have changed.";
    COMMIT_NANOS "millrace_datafs_metadata_commit_nanoseconds_total"
        "Nanoseconds that commits have taken, the objects included that they wait for.";
    METADATA_SYNCS "millrace_datafs_metadata_syncs_total"
        "Times that committed metadata was made durable.";
    UPKEEP_SLICES "millrace_datafs_upkeep_slices_total"
        "Slices of background work that this process has done while it was elected.";
    UPKEEP_LISTED "millrace_datafs_upkeep_listed_files_total"
        "Files of the store that background work has listed and checked.";
    UPKEEP_LISTS "millrace_datafs_upkeep_list_requests_total"
        "Requests of background work that list a bucket, or directories that it has read.";
    UPKEEP_DELETED "millrace_datafs_upkeep_deleted_objects_total"
        "Objects that background work has deleted.";
    PASSTHROUGH_OPENS "millrace_datafs_mount_passthrough_opens_total"
        "Files that a mount has opened and handed to the kernel.";
    MOUNT_ERRORS "millrace_datafs_mount_errors_total"
        "Kernel requests answered with an error other than no such file.";
}

/// A number of this process that goes up and down.
#[derive(Debug)]
pub(crate) struct Gauge {
    name: &'static str,
    help: &'static str,
    bits: AtomicU64,
}

impl Gauge {
    const fn new(name: &'static str, help: &'static str) -> Gauge {
        Gauge { name, help, bits: AtomicU64::new(0) }
    }

    pub(crate) fn set(&self, value: f64) {
        self.bits.store(value.to_bits(), Ordering::Relaxed);
    }

    fn get(&self) -> f64 {
        f64::from_bits(self.bits.load(Ordering::Relaxed))
    }
}

/// Whether this process is elected.
pub(crate) static UPKEEP_ELECTED: Gauge = Gauge::new(
    "millrace_datafs_upkeep_elected",
    "1 while this process does the background work of its home or schema, else 0.",
);
/// The position of the sweep.
pub(crate) static UPKEEP_POSITION: Gauge = Gauge::new(
    "millrace_datafs_upkeep_position_ratio",
    "How far the elected process has come in its pass over the store: 0 to 1, by the names of objects.",
);

/// All gauges.
static GAUGES: &[&Gauge] = &[&UPKEEP_ELECTED, &UPKEEP_POSITION];

/// All counters by name.
pub(crate) fn snapshot() -> BTreeMap<String, u64> {
    COUNTERS.iter().map(|counter| (counter.name.to_owned(), counter.get())).collect()
}

/// Registers the counters in the default registry of the process, once.
pub(crate) fn export() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for counter in COUNTERS {
            let desc = Desc::new(counter.name.into(), counter.help.into(), Vec::new(), Default::default());
            match desc {
                Ok(desc) => register(Box::new(Exported { counter, desc }), counter.name),
                Err(error) => tracing::warn!(
                    error = error_chain::one_line(&error),
                    counter.name,
                    "a metric is not exported"
                ),
            }
        }
        for gauge in GAUGES {
            let desc = Desc::new(gauge.name.into(), gauge.help.into(), Vec::new(), Default::default());
            match desc {
                Ok(desc) => register(Box::new(ExportedGauge { gauge, desc }), gauge.name),
                Err(error) => tracing::warn!(
                    error = error_chain::one_line(&error),
                    gauge.name,
                    "a metric is not exported"
                ),
            }
        }
    });
}

/// Registers a collector; a failure is logged and does not stop the caller.
pub(crate) fn register(collector: Box<dyn Collector>, name: &str) {
    if let Err(error) = prometheus::register(collector) {
        tracing::warn!(error = error_chain::one_line(&error), name, "a metric is not exported");
    }
}

struct Exported {
    counter: &'static Counter,
    desc: Desc,
}

impl Collector for Exported {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let (mut metric, mut counter) = (proto::Metric::default(), proto::Counter::default());
        counter.set_value(self.counter.get() as f64);
        metric.set_counter(counter);
        let mut family = proto::MetricFamily::default();
        family.set_name(self.counter.name.into());
        family.set_help(self.counter.help.into());
        family.set_field_type(proto::MetricType::COUNTER);
        family.set_metric(vec![metric]);
        vec![family]
    }
}

struct ExportedGauge {
    gauge: &'static Gauge,
    desc: Desc,
}

impl Collector for ExportedGauge {
    fn desc(&self) -> Vec<&Desc> {
        vec![&self.desc]
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let (mut metric, mut gauge) = (proto::Metric::default(), proto::Gauge::default());
        gauge.set_value(self.gauge.get());
        metric.set_gauge(gauge);
        let mut family = proto::MetricFamily::default();
        family.set_name(self.gauge.name.into());
        family.set_help(self.gauge.help.into());
        family.set_field_type(proto::MetricType::GAUGE);
        family.set_metric(vec![metric]);
        vec![family]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_exported_once_each() {
        export();
        export();
        let before = STORE_RETRIES.get();
        STORE_RETRIES.inc_by(3);
        assert!(STORE_RETRIES.get() >= before + 3);
        let names: Vec<_> = prometheus::gather().iter().map(|family| family.name().to_owned()).collect();
        for counter in COUNTERS {
            assert_eq!(names.iter().filter(|name| *name == counter.name).count(), 1, "{}", counter.name);
        }
    }
}
