//! What a model version did: counts and times of its requests and runs, as Triton's clients read them.
//!
//! Every figure is an atomic of its own, so that a request takes no lock and adds some ten relaxed
//! additions to what it costs. A reader sees each figure exactly, but a request that ends meanwhile may
//! show in some figures and not yet in others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use crate::repository::Model;
use crate::wire::inference as pb;

/// Sizes of runs that are told apart; runs of further sizes count in all figures but the ones by size.
const SIZES_MAX: usize = 64;

/// When the steps of a request were reached that ran.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    /// It began to wait for a session.
    pub(crate) queued: Instant,
    /// It had one, and its values were made.
    pub(crate) computing: Instant,
    /// ONNX Runtime took over.
    pub(crate) input_end: Instant,
    /// ONNX Runtime was done, and its values were taken out.
    pub(crate) output_start: Instant,
    /// The outputs were there.
    pub(crate) end: Instant,
    /// The outputs were found in the response cache, and nothing was computed.
    pub(crate) cached: bool,
}

impl Times {
    /// Of a request whose answer is found now, after a look for it that began at `queued`.
    pub(crate) fn found(queued: Instant) -> Times {
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

/// A count and the time that it took together.
#[derive(Debug, Default)]
struct Spent {
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Spent {
    fn add(&self, time: Duration) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.nanos.fetch_add(nanos(time), Ordering::Relaxed);
    }

    fn read(&self) -> pb::StatisticDuration {
        let read = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
        pb::StatisticDuration { count: read(&self.count), ns: read(&self.nanos) }
    }
}

/// Runs of one size; the size is 0 as long as the place is free.
#[derive(Debug, Default)]
struct Size {
    rows: AtomicU64,
    runs: AtomicU64,
    input_nanos: AtomicU64,
    infer_nanos: AtomicU64,
    output_nanos: AtomicU64,
}

/// The figures of one model version since it was loaded.
#[derive(Debug)]
pub(crate) struct Statistics {
    begin: Instant,
    /// When a request was answered last, in nanoseconds since `begin`; 0 as long as none was. The clock that can be
    /// set is not read for a request.
    last_answered: AtomicU64,
    rows: AtomicU64,
    runs: AtomicU64,
    success: Spent,
    fail: Spent,
    queue: Spent,
    input: Spent,
    infer: Spent,
    output: Spent,
    cache_hit: Spent,
    cache_miss: Spent,
    sizes: [Size; SIZES_MAX],
}

impl Default for Statistics {
    fn default() -> Self {
        Statistics {
            begin: Instant::now(),
            last_answered: AtomicU64::default(),
            rows: AtomicU64::default(),
            runs: AtomicU64::default(),
            success: Spent::default(),
            fail: Spent::default(),
            queue: Spent::default(),
            input: Spent::default(),
            infer: Spent::default(),
            output: Spent::default(),
            cache_hit: Spent::default(),
            cache_miss: Spent::default(),
            sizes: std::array::from_fn(|_| Size::default()),
        }
    }
}

impl Statistics {
    /// Counts a request of `rows` that arrived at `arrived` and was answered. As Triton has it, one that was
    /// answered from the cache waited for nothing, and is no inference.
    pub(crate) fn succeeded(&self, rows: u64, arrived: Instant, times: &Times) {
        self.answered(times.end);
        self.success.add(times.end.saturating_duration_since(arrived));
        if times.cached {
            self.queue.add(Duration::ZERO);
            return;
        }
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.queue.add(times.computing.saturating_duration_since(times.queued));
        self.input.add(times.input());
        self.infer.add(times.infer());
        self.output.add(times.output());
    }

    /// Counts a run of `rows`, of one request or of several together.
    pub(crate) fn ran(&self, rows: u64, times: &Times) {
        self.runs.fetch_add(1, Ordering::Relaxed);
        if let Some(size) = self.size(rows) {
            size.runs.fetch_add(1, Ordering::Relaxed);
            size.input_nanos.fetch_add(nanos(times.input()), Ordering::Relaxed);
            size.infer_nanos.fetch_add(nanos(times.infer()), Ordering::Relaxed);
            size.output_nanos.fetch_add(nanos(times.output()), Ordering::Relaxed);
        }
    }

    /// Counts an answer that was found in the cache, and the time for that.
    pub(crate) fn hit(&self, time: Duration) {
        self.cache_hit.add(time);
    }

    /// Counts an answer that was not in the cache, and the time for the look and for keeping it.
    pub(crate) fn missed(&self, time: Duration) {
        self.cache_miss.add(time);
    }

    /// Counts a request that arrived at `arrived` and was refused or failed.
    pub(crate) fn failed(&self, arrived: Instant) {
        let now = Instant::now();
        self.answered(now);
        self.fail.add(now.saturating_duration_since(arrived));
    }

    fn answered(&self, at: Instant) {
        let since = at.saturating_duration_since(self.begin);
        self.last_answered.fetch_max(nanos(since).max(1), Ordering::Relaxed);
    }

    /// When a request was answered last, in milliseconds since 1970 by the clock as it is set now; 0 as long
    /// as none was.
    fn last_inference_ms(&self) -> u64 {
        let last = Duration::from_nanos(self.last_answered.load(Ordering::Relaxed));
        if last.is_zero() {
            return 0;
        }
        let ago = self.begin.elapsed().saturating_sub(last);
        let at =
            SystemTime::now().checked_sub(ago).and_then(|at| at.duration_since(SystemTime::UNIX_EPOCH).ok());
        u64::try_from(at.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
    }

    /// The place of a size: the one that has it, else a free one that gets it, else none.
    fn size(&self, rows: u64) -> Option<&Size> {
        if rows == 0 {
            return None;
        }
        // Small sizes, which are the frequent ones, find their place at once.
        let first = (rows - 1) as usize % SIZES_MAX;
        (0..SIZES_MAX).map(|step| &self.sizes[(first + step) % SIZES_MAX]).find(|size| {
            match size.rows.load(Ordering::Relaxed) {
                0 => match size.rows.compare_exchange(0, rows, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => true,
                    Err(taken) => taken == rows,
                },
                taken => taken == rows,
            }
        })
    }

    fn sizes(&self) -> Vec<pb::InferBatchStatistics> {
        let mut sizes: Vec<_> = self
            .sizes
            .iter()
            .filter_map(|size| {
                let count = size.runs.load(Ordering::Relaxed);
                let spent = |nanos: &AtomicU64| {
                    Some(pb::StatisticDuration { count, ns: nanos.load(Ordering::Relaxed) })
                };
                (count > 0).then(|| pb::InferBatchStatistics {
                    batch_size: size.rows.load(Ordering::Relaxed),
                    compute_input: spent(&size.input_nanos),
                    compute_infer: spent(&size.infer_nanos),
                    compute_output: spent(&size.output_nanos),
                })
            })
            .collect();
        sizes.sort_by_key(|size| size.batch_size);
        sizes
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The figures of a version as they are now. Memory is not measured, so there is no entry for it; one
/// request has one response, so there are no statistics by response.
pub(crate) fn describe(model: &Model) -> pb::ModelStatistics {
    let statistics = &model.statistics;
    let read = |figure: &AtomicU64| figure.load(Ordering::Relaxed);
    pb::ModelStatistics {
        name: model.name().to_owned(),
        version: model.version().to_string(),
        last_inference: statistics.last_inference_ms(),
        inference_count: read(&statistics.rows),
        execution_count: read(&statistics.runs),
        inference_stats: Some(pb::InferStatistics {
            success: Some(statistics.success.read()),
            fail: Some(statistics.fail.read()),
            queue: Some(statistics.queue.read()),
            compute_input: Some(statistics.input.read()),
            compute_infer: Some(statistics.infer.read()),
            compute_output: Some(statistics.output.read()),
            cache_hit: Some(statistics.cache_hit.read()),
            cache_miss: Some(statistics.cache_miss.read()),
        }),
        batch_stats: statistics.sizes(),
        memory_usage: Vec::new(),
        response_stats: Default::default(),
    }
}

/// The same in the JSON that Triton's clients read.
pub(crate) fn to_json(statistics: &pb::ModelStatistics) -> Value {
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

    #[test]
    fn a_request_that_the_cache_answers_is_a_success_and_no_inference() {
        let (statistics, start) = (Statistics::default(), Instant::now());
        let found = Times::found(start);
        statistics.hit(found.end.saturating_duration_since(start));
        statistics.succeeded(8, start, &found);
        statistics.missed(Duration::from_nanos(5));
        statistics.succeeded(2, start, &times(start));
        let counts = [&statistics.success, &statistics.queue, &statistics.infer, &statistics.cache_hit];
        assert_eq!(counts.map(|spent| spent.read().count), [2, 2, 1, 1]);
        assert_eq!(statistics.rows.load(Ordering::Relaxed), 2);
        let missed = statistics.cache_miss.read();
        assert_eq!((missed.count, missed.ns), (1, 5));
    }

    #[test]
    fn every_step_counts_where_it_belongs() {
        let (statistics, start) = (Statistics::default(), Instant::now());
        for rows in [1, 8, 8] {
            statistics.succeeded(rows, start, &times(start));
            statistics.ran(rows, &times(start));
        }
        statistics.failed(start);
        let figures = [
            (statistics.success.read(), 31),
            (statistics.queue.read(), 2),
            (statistics.input.read(), 4),
            (statistics.infer.read(), 8),
            (statistics.output.read(), 16),
        ];
        for (spent, micros) in figures {
            assert_eq!((spent.count, spent.ns), (3, 3 * micros * 1_000));
        }
        assert_eq!(statistics.rows.load(Ordering::Relaxed), 17);
        assert_eq!(statistics.fail.read().count, 1);
        let sizes = statistics.sizes();
        let counts =
            |size: &pb::InferBatchStatistics| (size.batch_size, size.compute_infer.unwrap_or_default());
        assert_eq!(sizes.iter().map(|size| counts(size).0).collect::<Vec<_>>(), [1, 8]);
        assert_eq!((counts(&sizes[1]).1.count, counts(&sizes[1]).1.ns), (2, 16_000));
    }

    #[test]
    fn the_last_answer_is_told_by_the_clock_of_the_machine() {
        let now = || SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_millis() as u64;
        let statistics = Statistics::default();
        assert_eq!(statistics.last_inference_ms(), 0);
        let before = now();
        let start = Instant::now();
        statistics.failed(start);
        let told = statistics.last_inference_ms();
        assert!((before.saturating_sub(1)..=now() + 1).contains(&told), "{before} {told}");
        // An answer of before the last one changes nothing.
        let end = start - Duration::from_secs(9);
        statistics.succeeded(1, end, &Times { end, ..times(end) });
        assert!(statistics.last_inference_ms().abs_diff(told) <= 1);
    }

    #[test]
    fn sizes_beyond_the_bound_count_in_the_sums_alone() {
        let (statistics, start) = (Statistics::default(), Instant::now());
        // All of these begin their search at the same place.
        for size in 0..2 * SIZES_MAX as u64 {
            statistics.ran(size * SIZES_MAX as u64 + 1, &times(start));
        }
        statistics.ran(u64::MAX, &times(start));
        assert_eq!(statistics.sizes().len(), SIZES_MAX);
        assert_eq!(statistics.runs.load(Ordering::Relaxed), 2 * SIZES_MAX as u64 + 1);
        statistics.ran(0, &times(start));
        assert_eq!(statistics.sizes().len(), SIZES_MAX);
    }

    #[test]
    fn threads_that_find_a_size_at_once_share_its_place() {
        let (statistics, start) = (Statistics::default(), Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (1..=32).for_each(|rows| statistics.ran(rows, &times(start))));
            }
        });
        let sizes = statistics.sizes();
        assert_eq!(sizes.len(), 32);
        assert!(sizes.iter().all(|size| size.compute_input.unwrap_or_default().count == 4), "{sizes:?}");
    }
}
