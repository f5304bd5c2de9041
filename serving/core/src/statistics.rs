//! Statistics of a model version: counts and times of its requests and runs, as Triton's clients read them, and its
//! metrics.
//!
//! One lock protects all figures. A request takes it twice for plain additions, instead of some thirty atomic
//! operations. A reader sees a consistent set of figures.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::metrics::{self, ModelMetrics};
use crate::wire::inference as pb;

/// Maximum number of run sizes with separate figures; runs of further sizes count only in the totals.
const SIZES_MAX: usize = 64;

/// Timestamps of the stages of an answered request.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Start of the wait for a session.
    pub queued: Instant,
    /// A session was available; creation of its input values began.
    pub computing: Instant,
    /// ONNX Runtime started.
    pub input_end: Instant,
    /// ONNX Runtime finished; extraction of its output values began.
    pub output_start: Instant,
    /// The outputs were available.
    pub end: Instant,
    /// Whether the outputs come from the response cache and nothing was computed.
    pub cached: bool,
}

impl Times {
    /// Times of a response found in the cache now, by a lookup that began at `queued`.
    pub fn from_cache(queued: Instant) -> Times {
        let now = Instant::now();
        Times { queued, computing: now, input_end: now, output_start: now, end: now, cached: true }
    }

    fn input(&self) -> Duration {
        self.input_end.saturating_duration_since(self.computing)
    }

    fn infer(&self) -> Duration {
        self.output_start.saturating_duration_since(self.input_end)
    }

    fn output(&self) -> Duration {
        self.end.saturating_duration_since(self.output_start)
    }
}

/// A count of events and their total time.
#[derive(Debug, Default, Clone, Copy)]
struct DurationTotal {
    count: u64,
    nanos: u64,
}

impl DurationTotal {
    fn add(&mut self, time: Duration) {
        self.count += 1;
        self.nanos = self.nanos.saturating_add(nanos(time));
    }

    fn to_message(self) -> pb::StatisticDuration {
        pb::StatisticDuration { count: self.count, ns: self.nanos }
    }
}

/// Runs of one size, and their total times by stage.
#[derive(Debug, Default)]
struct BatchTotals {
    runs: u64,
    input_nanos: u64,
    infer_nanos: u64,
    output_nanos: u64,
}

#[derive(Debug)]
struct VersionTotals {
    last_answered: Option<Instant>,
    rows: u64,
    runs: u64,
    success: DurationTotal,
    fail: DurationTotal,
    queue: DurationTotal,
    input: DurationTotal,
    infer: DurationTotal,
    output: DurationTotal,
    cache_hit: DurationTotal,
    cache_miss: DurationTotal,
    /// By number of rows.
    sizes: BTreeMap<u64, BatchTotals>,
    metrics: ModelMetrics,
}

impl VersionTotals {
    fn answered(&mut self, at: Instant) {
        self.last_answered = self.last_answered.max(Some(at));
    }

    /// Time of the last response in milliseconds since 1970, by the current setting of the system clock; 0 before the
    /// first response.
    fn last_inference_ms(&self) -> u64 {
        // Computed here, so that a request need not read the system clock.
        let at = self.last_answered.and_then(|last| SystemTime::now().checked_sub(last.elapsed()));
        let since = at.and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
    }

    /// Counts a run of `rows` rows, with its size unless [`SIZES_MAX`] other sizes have figures.
    fn count_run(&mut self, rows: u64, times: &Times) {
        self.runs += 1;
        if rows == 0 {
            return;
        }
        let is_full = self.sizes.len() >= SIZES_MAX;
        let size = match self.sizes.entry(rows) {
            Entry::Vacant(_) if is_full => return,
            entry => entry.or_default(),
        };
        size.runs += 1;
        size.input_nanos = size.input_nanos.saturating_add(nanos(times.input()));
        size.infer_nanos = size.infer_nanos.saturating_add(nanos(times.infer()));
        size.output_nanos = size.output_nanos.saturating_add(nanos(times.output()));
    }

    fn sizes(&self) -> Vec<pb::InferBatchStatistics> {
        let told = |(rows, size): (&u64, &BatchTotals)| {
            let spent = |ns| Some(pb::StatisticDuration { count: size.runs, ns });
            pb::InferBatchStatistics {
                batch_size: *rows,
                compute_input: spent(size.input_nanos),
                compute_infer: spent(size.infer_nanos),
                compute_output: spent(size.output_nanos),
            }
        };
        self.sizes.iter().map(told).collect()
    }
}

impl metrics::LocalCounts for Mutex<VersionTotals> {
    fn publish(&self) {
        self.lock().metrics.publish();
    }
}

/// The statistics of one model version since it was loaded.
#[derive(Debug)]
pub struct Statistics {
    figures: Arc<Mutex<VersionTotals>>,
}

impl Statistics {
    /// Empty statistics of a version that is being loaded.
    pub fn new(model: &str, version: u64) -> Statistics {
        let figures = Arc::new(Mutex::new(VersionTotals {
            last_answered: None,
            rows: 0,
            runs: 0,
            success: DurationTotal::default(),
            fail: DurationTotal::default(),
            queue: DurationTotal::default(),
            input: DurationTotal::default(),
            infer: DurationTotal::default(),
            output: DurationTotal::default(),
            cache_hit: DurationTotal::default(),
            cache_miss: DurationTotal::default(),
            sizes: BTreeMap::new(),
            metrics: ModelMetrics::new(model, version),
        }));
        let kept: Arc<dyn metrics::LocalCounts> = figures.clone();
        metrics::register_counts(Arc::downgrade(&kept));
        Statistics { figures }
    }

    /// Counts an answered request of `rows` inferences that arrived at `arrived`. As in Triton, a response from the
    /// cache counts with a wait of zero and as no inference.
    pub fn succeeded(&self, rows: u64, arrived: Instant, times: &Times) {
        let mut figures = self.figures.lock();
        figures.metrics.ok.inc();
        figures.answered(times.end);
        figures.success.add(times.end.saturating_duration_since(arrived));
        if times.cached {
            figures.queue.add(Duration::ZERO);
            return;
        }
        figures.rows = figures.rows.saturating_add(rows);
        figures.queue.add(times.computing.saturating_duration_since(times.queued));
        figures.input.add(times.input());
        figures.infer.add(times.infer());
        figures.output.add(times.output());
    }

    /// Counts the outputs of a request of `rows` rows, and the run of `run_rows` rows if this request counts it.
    pub fn gave(&self, rows: u64, run_rows: Option<u64>, times: &Times) {
        let since = |start: Instant| times.end.saturating_duration_since(start).as_secs_f64();
        let mut figures = self.figures.lock();
        figures.metrics.request_seconds.observe(since(times.queued));
        figures.metrics.rows.inc_by(rows);
        if let Some(run_rows) = run_rows {
            figures.metrics.compute_seconds.observe(since(times.computing));
            figures.metrics.batch_rows.observe(run_rows as f64);
            figures.count_run(run_rows, times);
        }
    }

    /// Counts a response found in the cache, and the time of the lookup.
    pub fn hit(&self, time: Duration) {
        let mut figures = self.figures.lock();
        figures.cache_hit.add(time);
        figures.metrics.request_seconds.observe(time.as_secs_f64());
    }

    /// Counts a response not found in the cache, and the time for lookup and insertion.
    pub fn missed(&self, time: Duration) {
        self.figures.lock().cache_miss.add(time);
    }

    /// Counts a request that arrived at `arrived` and was refused or failed.
    pub fn failed(&self, arrived: Instant) {
        let now = Instant::now();
        let mut figures = self.figures.lock();
        figures.answered(now);
        figures.fail.add(now.saturating_duration_since(arrived));
    }

    /// The current figures of a version. There is no entry for memory, which is not measured. There are no statistics
    /// by response, since each request has one response.
    pub fn describe(&self, name: &str, version: u64) -> pb::ModelStatistics {
        let figures = self.figures.lock();
        pb::ModelStatistics {
            name: name.to_owned(),
            version: version.to_string(),
            last_inference: figures.last_inference_ms(),
            inference_count: figures.rows,
            execution_count: figures.runs,
            inference_stats: Some(pb::InferStatistics {
                success: Some(figures.success.to_message()),
                fail: Some(figures.fail.to_message()),
                queue: Some(figures.queue.to_message()),
                compute_input: Some(figures.input.to_message()),
                compute_infer: Some(figures.infer.to_message()),
                compute_output: Some(figures.output.to_message()),
                cache_hit: Some(figures.cache_hit.to_message()),
                cache_miss: Some(figures.cache_miss.to_message()),
            }),
            batch_stats: figures.sizes(),
            memory_usage: Vec::new(),
            response_stats: Default::default(),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The figures in JSON, as Triton's clients read them.
pub fn to_json(statistics: &pb::ModelStatistics) -> Value {
    let spent = |spent: &Option<pb::StatisticDuration>| {
        let spent = spent.unwrap_or_default();
        json!({ "count": spent.count, "ns": spent.ns })
    };
    let size = |size: &pb::InferBatchStatistics| {
        json!({
            "batch_size": size.batch_size,
            "compute_input": spent(&size.compute_input),
            "compute_infer": spent(&size.compute_infer),
            "compute_output": spent(&size.compute_output),
        })
    };
    let inference = statistics.inference_stats.unwrap_or_default();
    json!({
        "name": statistics.name,
        "version": statistics.version,
        "last_inference": statistics.last_inference,
        "inference_count": statistics.inference_count,
        "execution_count": statistics.execution_count,
        "inference_stats": {
            "success": spent(&inference.success),
            "fail": spent(&inference.fail),
            "queue": spent(&inference.queue),
            "compute_input": spent(&inference.compute_input),
            "compute_infer": spent(&inference.compute_infer),
            "compute_output": spent(&inference.compute_output),
            "cache_hit": spent(&inference.cache_hit),
            "cache_miss": spent(&inference.cache_miss),
        },
        "response_stats": {},
        "batch_stats": statistics.batch_stats.iter().map(size).collect::<Vec<_>>(),
        "memory_usage": [],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(start: Instant) -> Times {
        let at = |micros| start + Duration::from_micros(micros);
        let cached = false;
        Times { queued: at(1), computing: at(3), input_end: at(7), output_start: at(15), end: at(31), cached }
    }

    fn statistics() -> Statistics {
        Statistics::new("of-a-test", 1)
    }

    fn described(statistics: &Statistics) -> (pb::ModelStatistics, pb::InferStatistics) {
        let described = statistics.describe("of-a-test", 1);
        let of_requests = described.inference_stats.unwrap_or_default();
        (described, of_requests)
    }

    fn spent(count: u64, micros: u64) -> Option<pb::StatisticDuration> {
        Some(pb::StatisticDuration { count, ns: micros * 1_000 })
    }

    #[test]
    fn a_request_that_the_cache_answers_is_a_success_and_no_inference() {
        let (statistics, start) = (statistics(), Instant::now());
        let found = Times::from_cache(start);
        statistics.hit(found.end.saturating_duration_since(start));
        statistics.succeeded(8, start, &found);
        statistics.missed(Duration::from_micros(5));
        statistics.succeeded(2, start, &times(start));
        let (described, of) = described(&statistics);
        let counts = [of.success, of.queue, of.compute_infer, of.cache_hit];
        assert_eq!(counts.map(|spent| spent.unwrap_or_default().count), [2, 2, 1, 1]);
        assert_eq!(described.inference_count, 2);
        assert_eq!(of.cache_miss, spent(1, 5));
    }

    #[test]
    fn each_step_is_counted_in_its_duration() {
        let (statistics, start) = (statistics(), Instant::now());
        for rows in [1, 8, 8] {
            statistics.succeeded(rows, start, &times(start));
            statistics.gave(rows, Some(rows), &times(start));
        }
        statistics.gave(8, None, &times(start));
        statistics.failed(start);
        let (described, of) = described(&statistics);
        let figures = [
            (of.success, 31),
            (of.queue, 2),
            (of.compute_input, 4),
            (of.compute_infer, 8),
            (of.compute_output, 16),
        ];
        for (figure, micros) in figures {
            assert_eq!(figure, spent(3, 3 * micros));
        }
        assert_eq!((described.inference_count, described.execution_count), (17, 3));
        assert_eq!(of.fail.unwrap_or_default().count, 1);
        let sizes: Vec<_> =
            described.batch_stats.iter().map(|size| (size.batch_size, size.compute_infer)).collect();
        assert_eq!(sizes, [(1, spent(1, 8)), (8, spent(2, 16))]);
    }

    #[test]
    fn time_of_the_last_inference_is_wall_clock_time() {
        let now = || SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis() as u64;
        let statistics = statistics();
        let last = || described(&statistics).0.last_inference;
        assert_eq!(last(), 0);
        let before = now();
        let start = Instant::now();
        statistics.failed(start);
        let told = last();
        assert!((before.saturating_sub(1)..=now() + 1).contains(&told), "{before} {told}");
        // A response before the last one changes nothing.
        let end = start - Duration::from_secs(9);
        statistics.succeeded(1, end, &Times { end, ..times(end) });
        assert!(last().abs_diff(told) <= 1);
    }

    #[test]
    fn sizes_beyond_the_bound_count_in_the_sums_alone() {
        let (statistics, start) = (statistics(), Instant::now());
        for size in 1..=2 * SIZES_MAX as u64 {
            statistics.gave(1, Some(size), &times(start));
        }
        statistics.gave(1, Some(u64::MAX), &times(start));
        statistics.gave(1, Some(1), &times(start));
        let (described, _) = described(&statistics);
        assert_eq!(described.batch_stats.len(), SIZES_MAX);
        assert_eq!(described.batch_stats[0].compute_infer, spent(2, 16), "one that is told apart goes on");
        assert_eq!(described.execution_count, 2 * SIZES_MAX as u64 + 2);
    }

    #[test]
    fn metrics_are_current_when_scraped_and_keep_counts_of_removed_versions() {
        let (name, start) = ("counted-by-itself", Instant::now());
        let statistics = Statistics::new(name, 7);
        let told = |expected: &[&str]| {
            metrics::flush();
            let text = prometheus::TextEncoder::new().encode_to_string(&prometheus::gather()).unwrap();
            for line in expected {
                let (metric, value) = line.split_once(' ').unwrap_or_default();
                let line = format!("{metric}{{model=\"{name}\",version=\"7\"}} {value}");
                assert!(text.lines().any(|of| of == line), "no {line} in\n{text}");
            }
        };
        statistics.gave(4, Some(4), &times(start));
        told(&["millrace_serving_rows_total 4", "millrace_serving_batch_rows_sum 4"]);
        statistics.gave(2, None, &times(start));
        told(&[
            "millrace_serving_rows_total 6",
            "millrace_serving_request_seconds_count 2",
            "millrace_serving_compute_seconds_count 1",
        ]);
        statistics.gave(1, None, &times(start));
        drop(statistics);
        told(&["millrace_serving_rows_total 7", "millrace_serving_request_seconds_count 3"]);
        Statistics::new(name, 7).gave(1, None, &times(start));
        told(&["millrace_serving_rows_total 8"]);
    }
}
