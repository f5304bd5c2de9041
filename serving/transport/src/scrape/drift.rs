//! Drift metrics of model versions, computed at each scrape. Their number is bounded by the loaded versions
//! and the features of a bundle; they disappear with their version.

use prometheus::core::Collector;
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec, Opts, Registry};

use millrace_serving_repository::repository::Repository;

const OF_VERSION: [&str; 2] = ["model", "version"];
const OF_FEATURE: [&str; 3] = ["model", "version", "feature"];

/// The figures of every ready version with a drift detector.
pub(crate) fn gather(repository: &Repository) -> Vec<MetricFamily> {
    let watched: Vec<_> = repository
        .ready(None)
        .into_iter()
        .filter_map(|model| Some((model.drift.as_ref()?.figures(), model)))
        .collect();
    if watched.is_empty() {
        return Vec::new();
    }
    // Cannot fail: names and labels are constants of this file, and a test requests them all.
    let gauge =
        |name: &str, help: &str| GaugeVec::new(Opts::new(name, help), &OF_FEATURE).expect("a valid metric");
    let psi = gauge(
        "millrace_serving_drift_psi",
        "Population stability index of an input feature against the training",
    );
    let shift = gauge(
        "millrace_serving_drift_mean_shift",
        "Distance of a feature's mean from the training's, in standard deviations of the training",
    );
    let outside = gauge(
        "millrace_serving_drift_outside_ratio",
        "Share of a feature's values outside of the training's range",
    );
    let rows = Opts::new("millrace_serving_drift_rows_total", "Rows that were looked at for drift");
    let rows = IntCounterVec::new(rows, &OF_VERSION).expect("a valid metric");
    let window = Opts::new("millrace_serving_drift_window_rows", "Rows in the window of the drift figures");
    let window = IntGaugeVec::new(window, &OF_VERSION).expect("a valid metric");
    for (figures, model) in &watched {
        let version = model.version().to_string();
        let of = [model.name(), version.as_str()];
        rows.with_label_values(&of).inc_by(figures.rows);
        window.with_label_values(&of).set(i64::try_from(figures.window_rows).unwrap_or(i64::MAX));
        for (feature, drift) in &figures.features {
            let of = [model.name(), version.as_str(), feature.as_str()];
            psi.with_label_values(&of).set(drift.psi);
            outside.with_label_values(&of).set(drift.outside);
            if let Some(mean_shift) = drift.mean_shift {
                shift.with_label_values(&of).set(mean_shift);
            }
        }
    }
    let registry = Registry::new();
    let families: [Box<dyn Collector>; 5] =
        [Box::new(psi), Box::new(shift), Box::new(outside), Box::new(rows), Box::new(window)];
    for family in families {
        if let Err(error) = registry.register(family) {
            tracing::warn!(%error, "a metric is not exported");
        }
    }
    registry.gather()
}
