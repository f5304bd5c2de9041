//! A Prometheus collector for the statistics of all mounts of this process.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use prometheus::core::{Collector, Desc};
use prometheus::proto::{self, MetricFamily, MetricType};

use super::stats::MountStats;
use super::watch::Watch;
use crate::metrics;

/// The mounts whose statistics are exported.
#[derive(Debug, Clone, Default)]
struct Exported(Arc<Mutex<Vec<Weak<Watch>>>>);

/// Exports the statistics of a mount for as long as it lives.
pub(in crate::mount) fn export(watch: &Arc<Watch>) {
    static EXPORTED: OnceLock<Exported> = OnceLock::new();
    let exported = EXPORTED.get_or_init(|| {
        let exported = Exported::default();
        metrics::register(Box::new(exported.clone()), "millrace_mount");
        exported
    });
    let mut mounts = exported.0.lock();
    mounts.retain(|mount| mount.strong_count() > 0);
    mounts.push(Arc::downgrade(watch));
}

type Samples = fn(&MountStats, &mut dyn FnMut(Option<&str>, proto::Metric));

/// One family: name, help, kind, and a function that adds its samples of a mount.
type Family = (&'static str, &'static str, MetricType, Samples);

const FAMILIES: &[Family] = &[
    (
        "millrace_mount_operations_total",
        "Requests of the kernel that were answered.",
        MetricType::COUNTER,
        |stats, add| {
            for op in &stats.operations {
                add(Some(&op.op), counter(op.latency.count() as f64));
            }
        },
    ),
    (
        "millrace_mount_operation_errors_total",
        "Requests that failed; no such file and the like are not failures.",
        MetricType::COUNTER,
        |stats, add| {
            for op in stats.operations.iter().filter(|op| op.errors > 0) {
                add(Some(&op.op), counter(op.errors as f64));
            }
        },
    ),
    (
        "millrace_mount_operation_bytes_total",
        "Bytes that were read or written through the mount.",
        MetricType::COUNTER,
        |stats, add| {
            for op in stats.operations.iter().filter(|op| op.bytes > 0) {
                add(Some(&op.op), counter(op.bytes as f64));
            }
        },
    ),
    (
        "millrace_mount_operation_duration_seconds",
        "How long requests took, from when they were read to when they were answered.",
        MetricType::HISTOGRAM,
        |stats, add| {
            for op in &stats.operations {
                add(Some(&op.op), histogram(&op.latency));
            }
        },
    ),
    (
        "millrace_mount_operations_in_flight",
        "Requests that are being answered.",
        MetricType::GAUGE,
        |stats, add| {
            for op in &stats.operations {
                add(Some(&op.op), gauge(op.in_flight as f64));
            }
        },
    ),
    (
        "millrace_mount_kernel_served_opens_total",
        "Files opened that the kernel may serve by itself, with pages that it has or from a file it was handed.",
        MetricType::COUNTER,
        |stats, add| add(None, counter(stats.kernel_served_opens as f64)),
    ),
    ("millrace_mount_open_files", "Files that are open.", MetricType::GAUGE, |stats, add| {
        add(None, gauge(stats.open_files as f64));
    }),
    (
        "millrace_mount_waiting_requests",
        "Requests that the kernel has waiting, those included that are being answered.",
        MetricType::GAUGE,
        |stats, add| {
            if let Some(waiting) = stats.waiting {
                add(None, gauge(waiting as f64));
            }
        },
    ),
    (
        "millrace_mount_trace_lost_total",
        "Requests that the trace in progress has no line of.",
        MetricType::COUNTER,
        |stats, add| {
            if let Some(trace) = &stats.trace {
                add(None, counter(trace.lost as f64));
            }
        },
    ),
];

fn counter(value: f64) -> proto::Metric {
    let (mut metric, mut counter) = (proto::Metric::default(), proto::Counter::default());
    counter.set_value(value);
    metric.set_counter(counter);
    metric
}

fn gauge(value: f64) -> proto::Metric {
    let (mut metric, mut gauge) = (proto::Metric::default(), proto::Gauge::default());
    gauge.set_value(value);
    metric.set_gauge(gauge);
    metric
}

fn histogram(latency: &super::stats::Latency) -> proto::Metric {
    let (mut metric, mut histogram) = (proto::Metric::default(), proto::Histogram::default());
    let bucket = |(bound, count)| {
        let mut bucket = proto::Bucket::default();
        bucket.set_upper_bound(bound);
        bucket.set_cumulative_count(count);
        bucket
    };
    histogram.set_bucket(latency.cumulative().map(bucket).collect());
    histogram.set_sample_count(latency.count());
    histogram.set_sample_sum(latency.nanos as f64 / 1e9);
    metric.set_histogram(histogram);
    metric
}

fn label(name: &str, value: &str) -> proto::LabelPair {
    let mut label = proto::LabelPair::default();
    label.set_name(name.into());
    label.set_value(value.into());
    label
}

impl Collector for Exported {
    fn desc(&self) -> Vec<&Desc> {
        // The registry uses it only for uniqueness; all names begin with this one.
        static DESC: OnceLock<Option<Desc>> = OnceLock::new();
        let name = "millrace_mount".to_owned();
        let labels = vec!["volume".to_owned(), "mount".to_owned()];
        let make = || Desc::new(name, "Statistics of mounts.".into(), labels, Default::default()).ok();
        DESC.get_or_init(make).iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let mounts: Vec<_> = self.0.lock().iter().filter_map(Weak::upgrade).collect();
        let stats: Vec<MountStats> = mounts.iter().map(|watch| watch.stats()).collect();
        let family = |&(name, help, kind, samples): &Family| {
            let mut metrics = Vec::new();
            for stats in &stats {
                let path = stats.path.display().to_string();
                samples(stats, &mut |op, mut metric| {
                    // Sorted by name, as the format requires.
                    let mut labels = vec![label("mount", &path), label("volume", &stats.volume)];
                    labels.extend(op.map(|op| label("op", op)));
                    labels.sort_by(|a, b| a.name().cmp(b.name()));
                    metric.set_label(labels);
                    metrics.push(metric);
                });
            }
            let mut family = MetricFamily::default();
            family.set_name(name.into());
            family.set_help(help.into());
            family.set_field_type(kind);
            family.set_metric(metrics);
            family
        };
        FAMILIES.iter().map(family).filter(|family| !family.get_metric().is_empty()).collect()
    }
}
