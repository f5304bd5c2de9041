//! Whether several models are in use, and what each of them has had.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long models count as used together after one run has followed one of another model.
const MIXED: Duration = Duration::from_millis(100);

/// One model version's runs beside those of others.
#[derive(Debug)]
pub(super) struct Account {
    /// From 1 on.
    pub(super) id: u64,
    /// When the last of its runs ends, on the clock of runs.
    pub(super) finish: AtomicU64,
}

impl Default for Account {
    fn default() -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Account { id: IDS.fetch_add(1, Ordering::Relaxed), finish: AtomicU64::new(0) }
    }
}

/// Whether several models are in use, told from which ran after which.
#[derive(Debug)]
pub(super) struct Mix;

/// The account that ran last.
static LAST: AtomicU64 = AtomicU64::new(0);
/// When a run last followed one of another model, in microseconds since `BEGIN`; 0 when none has.
static SWITCHED: AtomicU64 = AtomicU64::new(0);
static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);

impl Mix {
    /// Notes that a model ran until `end`. While one model alone is in use this is one load.
    pub(super) fn used(account: &Account, end: Instant) {
        let last = LAST.load(Ordering::Relaxed);
        if last != account.id {
            LAST.store(account.id, Ordering::Relaxed);
            if last != 0 {
                SWITCHED.store(micros(end).max(1), Ordering::Relaxed);
            }
        }
    }

    /// Whether more than one model is in use.
    pub(super) fn is_mixed() -> bool {
        let switched = SWITCHED.load(Ordering::Relaxed);
        if switched == 0 {
            return false;
        }
        let is_mixed = u128::from(micros(Instant::now()).saturating_sub(switched)) < MIXED.as_micros();
        if !is_mixed {
            // So that the next request reads no clock. A change that is noted just now and lost by this is noted again
            // with the next run of another model.
            SWITCHED.store(0, Ordering::Relaxed);
        }
        is_mixed
    }
}

fn micros(at: Instant) -> u64 {
    u64::try_from(at.saturating_duration_since(*BEGIN).as_micros()).unwrap_or(u64::MAX)
}
