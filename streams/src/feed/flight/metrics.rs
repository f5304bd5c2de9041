//! Prometheus metrics of the feed over Arrow Flight.

use std::sync::LazyLock;

use prometheus::{IntCounter, IntCounterVec, IntGauge, Opts, register};

macro_rules! metric {
    ($(#[$doc:meta])* $ident:ident: $kind:ty = $name:expr, $help:expr $(, $labels:expr)?) => {
        $(#[$doc])*
        #[allow(clippy::expect_used, reason = "names are constants of this file")]
        pub static $ident: LazyLock<$kind> = LazyLock::new(|| {
            let metric = metric!(@new $kind, $name, $help $(, $labels)?).expect("the name and labels are valid");
            // A second registration comes from a second copy of this crate, whose numbers are not exported.
            register(Box::new(metric.clone())).ok();
            metric
        });
    };
    (@new $kind:ty, $name:expr, $help:expr) => { <$kind>::new($name, $help) };
    (@new $kind:ty, $name:expr, $help:expr, $labels:expr) => { <$kind>::new(Opts::new($name, $help), $labels) };
}

metric!(
    /// Streams that run.
    STREAMS: IntGauge = "millrace_flight_open_streams", "Streams of Flight clients that run"
);
metric!(
    /// Streams that ended, by how.
    ENDED: IntCounterVec = "millrace_flight_streams_total",
        "Streams that ended: complete, left by the client, stopped with the server, or failed", &["end"]
);
metric!(
    /// Rows sent.
    ROWS: IntCounter = "millrace_flight_rows_total", "Rows in batches that were passed to connections"
);
metric!(
    /// Bytes of the batches sent.
    BYTES: IntCounter = "millrace_flight_bytes_total", "Bytes of encoded batches that were passed to connections"
);
metric!(
    /// Calls refused, by reason.
    REFUSED: IntCounterVec = "millrace_flight_refused_total",
        "Calls refused: streams, memory, plans (too many of them), exposure, permission", &["reason"]
);
metric!(
    /// Bytes reserved.
    MEMORY: IntGauge = "millrace_flight_reserved_bytes", "Memory reserved for decoded row groups and batches"
);

/// The values of `end`.
const ENDS: [&str; 4] = ["complete", "left", "stopped", "failed"];
/// The values of `reason`.
const REASONS: [&str; 5] = ["streams", "memory", "plans", "exposure", "permission"];

/// Registers all metrics, so that those without an event yet are exported as 0.
pub(super) fn register_all() {
    LazyLock::force(&STREAMS);
    LazyLock::force(&ROWS);
    LazyLock::force(&BYTES);
    LazyLock::force(&MEMORY);
    for end in ENDS {
        ENDED.with_label_values(&[end]);
    }
    for reason in REASONS {
        REFUSED.with_label_values(&[reason]);
    }
}
