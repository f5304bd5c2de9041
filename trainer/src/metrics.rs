//! Prometheus metrics of the coordinator, registered in the default registry on first use.
use std::sync::LazyLock;

use prometheus::{
    CounterVec, Gauge, IntCounter, IntGauge, register_counter_vec, register_gauge, register_int_counter,
    register_int_gauge,
};

use crate::spent::Spent;

/// Workers that are members of the current membership epoch.
pub const WORKERS_ALIVE: &str = "millrace_trainer_workers_alive";
/// Workers that died or stopped responding, over all jobs of this process.
pub const WORKERS_LOST_TOTAL: &str = "millrace_trainer_workers_lost_total";
/// Membership epochs formed, over all jobs of this process.
pub const MEMBERSHIP_EPOCHS_TOTAL: &str = "millrace_trainer_membership_epochs_total";
/// Steps applied, over all jobs of this process.
pub const STEPS_TOTAL: &str = "millrace_trainer_steps_total";
/// Rows of applied steps, over all jobs of this process.
pub const ROWS_TOTAL: &str = "millrace_trainer_rows_total";
/// Model versions published, over all jobs of this process.
pub const MODELS_PUBLISHED_TOTAL: &str = "millrace_trainer_models_published_total";
/// Seconds of rank 0's steps by cause: feed, compute, communication, checkpoint. Over all jobs of this process.
pub const STEP_SECONDS_TOTAL: &str = "millrace_trainer_step_seconds_total";
/// Mean loss of the last evaluation on a validation dataset.
pub const VALIDATION_LOSS: &str = "millrace_trainer_validation_loss";
/// Accuracy of the last evaluation on a validation dataset; not of regression.
pub const VALIDATION_ACCURACY: &str = "millrace_trainer_validation_accuracy";

// A metric that cannot be registered (a second one of the same name) counts unregistered. It does not end the
// job.
fn counter(name: &'static str, help: &'static str) -> Option<IntCounter> {
    register_int_counter!(name, help).or_else(|_| IntCounter::new(name, help)).ok()
}

fn gauge(name: &'static str, help: &'static str) -> Option<IntGauge> {
    register_int_gauge!(name, help).or_else(|_| IntGauge::new(name, help)).ok()
}

fn float_gauge(name: &'static str, help: &'static str) -> Option<Gauge> {
    register_gauge!(name, help).or_else(|_| Gauge::new(name, help)).ok()
}

static ALIVE: LazyLock<Option<IntGauge>> =
    LazyLock::new(|| gauge(WORKERS_ALIVE, "Workers in the current membership epoch."));
static LOST: LazyLock<Option<IntCounter>> =
    LazyLock::new(|| counter(WORKERS_LOST_TOTAL, "Workers that died or stopped responding."));
static EPOCHS: LazyLock<Option<IntCounter>> =
    LazyLock::new(|| counter(MEMBERSHIP_EPOCHS_TOTAL, "Membership epochs formed."));
static STEPS: LazyLock<Option<IntCounter>> =
    LazyLock::new(|| counter(STEPS_TOTAL, "Training steps applied."));
static ROWS: LazyLock<Option<IntCounter>> =
    LazyLock::new(|| counter(ROWS_TOTAL, "Rows of applied training steps."));
static STEP_SECONDS: LazyLock<Option<CounterVec>> = LazyLock::new(|| {
    register_counter_vec!(STEP_SECONDS_TOTAL, "Seconds of rank 0's steps, by cause.", &["cause"]).ok()
});
static PUBLISHED: LazyLock<Option<IntCounter>> =
    LazyLock::new(|| counter(MODELS_PUBLISHED_TOTAL, "Model versions published."));
static EVALUATED_LOSS: LazyLock<Option<Gauge>> = LazyLock::new(|| {
    float_gauge(VALIDATION_LOSS, "Mean loss of the last evaluation on a validation dataset.")
});
static EVALUATED_ACCURACY: LazyLock<Option<Gauge>> = LazyLock::new(|| {
    float_gauge(
        VALIDATION_ACCURACY,
        "Accuracy of the last evaluation on a validation dataset; not of regression.",
    )
});

pub(crate) fn workers_alive(workers: usize) {
    if let Some(gauge) = ALIVE.as_ref() {
        gauge.set(i64::try_from(workers).unwrap_or(i64::MAX));
    }
}

pub(crate) fn worker_lost() {
    add(&LOST, 1);
}

pub(crate) fn epoch_formed() {
    add(&EPOCHS, 1);
}

pub(crate) fn record_progress(steps: u64, rows: u64) {
    add(&STEPS, steps);
    add(&ROWS, rows);
}

pub(crate) fn record_time(spent: Spent) {
    for (cause, microseconds) in spent.parts() {
        if let Some(counters) = STEP_SECONDS.as_ref() {
            counters.with_label_values(&[cause]).inc_by(microseconds as f64 / 1e6);
        }
    }
}

pub(crate) fn record_evaluation(loss: f64, accuracy: Option<f64>) {
    if let Some(gauge) = EVALUATED_LOSS.as_ref() {
        gauge.set(loss);
    }
    if let (Some(gauge), Some(accuracy)) = (EVALUATED_ACCURACY.as_ref(), accuracy) {
        gauge.set(accuracy);
    }
}

pub(crate) fn model_published() {
    add(&PUBLISHED, 1);
}

fn add(counter: &LazyLock<Option<IntCounter>>, amount: u64) {
    if let Some(counter) = counter.as_ref() {
        counter.inc_by(amount);
    }
}
