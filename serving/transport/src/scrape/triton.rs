//! Model metrics under Triton's names, for its dashboards, and the number of live sequences. They are
//! computed from the statistics at each scrape, so that requests count only once. They start at zero with
//! each load of a version and disappear with it.
//! a version and end with it.

use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{IntCounterVec, IntGaugeVec, Opts, Registry};

use millrace_serving_core::wire::inference as pb;
use millrace_serving_repository::repository::Repository;

const LABELS: [&str; 2] = ["model", "version"];

type Figure = fn(&pb::ModelStatistics, &pb::InferStatistics) -> u64;

/// Name, help text and value of each counter. Times are in microseconds.
const COUNTERS: [(&str, &str, Figure); 13] = [
    ("nv_inference_request_success", "Number of successful inference requests", |_, of| count(of.success)),
    ("nv_inference_request_failure", "Number of failed inference requests", |_, of| count(of.fail)),
    ("nv_inference_count", "Number of inferences, each row of a batch counted", |of, _| of.inference_count),
    ("nv_inference_exec_count", "Number of model executions", |of, _| of.execution_count),
    ("nv_inference_request_duration_us", "Time of successful requests, in microseconds", |_, of| {
        micros(of.success)
    }),
    ("nv_inference_queue_duration_us", "Time waiting for a session, in microseconds", |_, of| {
        micros(of.queue)
    }),
    ("nv_inference_compute_input_duration_us", "Time preparing inputs, in microseconds", |_, of| {
        micros(of.compute_input)
    }),
    ("nv_inference_compute_infer_duration_us", "Time executing the model, in microseconds", |_, of| {
        micros(of.compute_infer)
    }),
    ("nv_inference_compute_output_duration_us", "Time taking outputs, in microseconds", |_, of| {
        micros(of.compute_output)
    }),
    ("nv_cache_num_hits_per_model", "Number of answers found in the response cache", |_, of| {
        count(of.cache_hit)
    }),
    ("nv_cache_num_misses_per_model", "Number of answers not found in the response cache", |_, of| {
        count(of.cache_miss)
    }),
    (
        "nv_cache_hit_duration_per_model",
        "Time finding answers in the response cache, in microseconds",
        |_, of| micros(of.cache_hit),
    ),
    (
        "nv_cache_miss_duration_per_model",
        "Time looking for answers and keeping them, in microseconds",
        |_, of| micros(of.cache_miss),
    ),
];

fn count(spent: Option<pb::StatisticDuration>) -> u64 {
    spent.unwrap_or_default().count
}

fn micros(spent: Option<pb::StatisticDuration>) -> u64 {
    spent.unwrap_or_default().ns / 1_000
}

/// The current figures of every ready version.
pub(crate) fn gather(repository: &Repository) -> Vec<MetricFamily> {
    let models = repository.ready(None);
    let told: Vec<_> = models.iter().map(|model| model.describe()).collect();
    let registry = Registry::new();
    for (name, help, figure) in COUNTERS {
        // Cannot fail: names and labels are constants of this file, and a test requests them all.
        let counter = IntCounterVec::new(Opts::new(name, help), &LABELS).expect("a valid metric");
        for of in &told {
            let steps = of.inference_stats.unwrap_or_default();
            counter.with_label_values(&[&of.name, &of.version]).inc_by(figure(of, &steps));
        }
        register(&registry, counter);
    }
    let pending = Opts::new("nv_inference_pending_request_count", "Number of requests waiting for a session");
    let pending = IntGaugeVec::new(pending, &LABELS).expect("a valid metric");
    for (model, of) in models.iter().zip(&told) {
        let before = model.sequences.as_ref().map_or(0, |sequences| sequences.waiting());
        let waiting = i64::try_from(model.pool.waiting() + before).unwrap_or(i64::MAX);
        pending.with_label_values(&[&of.name, &of.version]).set(waiting);
    }
    register(&registry, pending);
    let live = Opts::new(
        "millrace_serving_live_sequences",
        "Sequences of which a state is kept between their requests",
    );
    let live = IntGaugeVec::new(live, &LABELS).expect("a valid metric");
    for (model, of) in models.iter().zip(&told) {
        if let Some(sequences) = &model.sequences {
            let count = i64::try_from(sequences.live()).unwrap_or(i64::MAX);
            live.with_label_values(&[&of.name, &of.version]).set(count);
        }
    }
    register(&registry, live);
    registry.gather()
}

fn register(registry: &Registry, family: impl Collector + 'static) {
    if let Err(error) = registry.register(Box::new(family)) {
        tracing::warn!(%error, "a metric is not exported");
    }
}
