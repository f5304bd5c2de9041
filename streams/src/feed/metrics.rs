//! Prometheus metrics of the feed.

use std::sync::LazyLock;

use prometheus::{IntCounter, IntGauge, register_int_counter, register_int_gauge};

/// Rows returned in batches; no labels.
pub const FEED_ROWS_TOTAL: &str = "millrace_streams_feed_rows_total";
/// Row groups decoded, prefetched ones included; no labels.
pub const FEED_ROW_GROUPS_DECODED_TOTAL: &str = "millrace_streams_feed_row_groups_decoded_total";
/// Rows in decoded row groups. Divided by [`FEED_ROWS_TOTAL`] it is the read amplification.
pub const FEED_ROWS_DECODED_TOTAL: &str = "millrace_streams_feed_rows_decoded_total";
/// Bytes of decoded row groups kept by all feeds of the process; no labels.
pub const FEED_CACHE_BYTES: &str = "millrace_streams_feed_cache_bytes";
/// Batches that had to wait for a row group to be decoded; no labels.
pub const FEED_BATCHES_WAITED_TOTAL: &str = "millrace_streams_feed_batches_waited_total";

macro_rules! metric {
    ($(#[$doc:meta])* $ident:ident: $kind:ty = $register:ident!($name:expr, $help:expr)) => {
        $(#[$doc])*
        pub(crate) static $ident: LazyLock<Option<$kind>> =
            LazyLock::new(|| $register!($name, $help).ok());
    };
}

metric!(ROWS: IntCounter = register_int_counter!(FEED_ROWS_TOTAL, "Rows returned in batches"));
metric!(GROUPS_DECODED: IntCounter =
    register_int_counter!(FEED_ROW_GROUPS_DECODED_TOTAL, "Row groups decoded"));
metric!(ROWS_DECODED: IntCounter =
    register_int_counter!(FEED_ROWS_DECODED_TOTAL, "Rows in decoded row groups"));
metric!(CACHE_BYTES: IntGauge =
    register_int_gauge!(FEED_CACHE_BYTES, "Bytes of decoded row groups kept"));
metric!(BATCHES_WAITED: IntCounter =
    register_int_counter!(FEED_BATCHES_WAITED_TOTAL, "Batches that waited for decoding"));

pub(crate) fn count(counter: &LazyLock<Option<IntCounter>>, n: u64) {
    if let Some(counter) = &**counter {
        counter.inc_by(n);
    }
}

pub(crate) fn cache_bytes_changed(delta: i64) {
    if let Some(gauge) = &*CACHE_BYTES {
        gauge.add(delta);
    }
}
