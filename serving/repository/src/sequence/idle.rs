//! Removal of idle sequences, which have had no request for too long. They are dropped when a request has their id,
//! when their capacity is needed, and periodically by one task for each version while any sequence is live.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Sequences;
use super::live::{Entry, Live, SavedState};

/// Minimum and maximum pause before the next search for idle sequences.
const PAUSE: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(60));

impl Sequences {
    /// Drops idle sequences; returns when to search again, or `None` if no sequence is live.
    pub(super) fn sweep(&self) -> Option<Duration> {
        let mut guard = self.live.lock();
        let live = &mut *guard;
        let lapsed = live.sweep(self.idle);
        let until = live.quiet_until;
        let none = live.held == 0;
        drop(guard);
        drop(lapsed);
        let pause = until.map_or(PAUSE.1, |until| until.saturating_duration_since(Instant::now()));
        (!none).then(|| pause.clamp(PAUSE.0, PAUSE.1))
    }

    /// Starts a task that drops idle sequences until no sequence is live.
    pub(super) fn sweep_from_time_to_time(self: &Arc<Self>) {
        let Ok(runtime) = tokio::runtime::Handle::try_current() else {
            // Without a runtime, sequences are dropped when their capacity or their id is needed.
            self.live.lock().swept = false;
            return;
        };
        let (weak, mut pause) = (Arc::downgrade(self), self.idle.clamp(PAUSE.0, PAUSE.1));
        runtime.spawn(async move {
            loop {
                tokio::time::sleep(pause).await;
                let Some(sequences) = weak.upgrade() else { return };
                if let Some(next) = sequences.sweep() {
                    pause = next;
                    continue;
                }
                let mut live = sequences.live.lock();
                if live.held == 0 {
                    live.swept = false;
                    return;
                }
            }
        });
    }
}

impl Live {
    /// Removes idle sequences. Searches nothing before the earliest time at which a sequence can be idle.
    pub(super) fn sweep(&mut self, idle: Duration) -> Vec<SavedState> {
        let now = Instant::now();
        if self.quiet_until.is_some_and(|until| now < until) {
            return Vec::new();
        }
        let (mut lapsed, mut oldest) = (Vec::new(), now);
        self.entries.retain(|_, entry| {
            if !entry.line.is_empty() {
                return true;
            }
            if entry.is_idle(now, idle) {
                lapsed.extend(entry.kept.take());
                return false;
            }
            oldest = entry.kept.as_ref().map_or(oldest, |kept| kept.last.min(oldest));
            true
        });
        self.held -= lapsed.len();
        self.bytes -= lapsed.iter().map(|kept| kept.bytes).sum::<usize>();
        self.quiet_until = oldest.checked_add(idle);
        lapsed
    }
}

impl Entry {
    pub(super) fn is_idle(&self, now: Instant, idle: Duration) -> bool {
        self.kept.as_ref().is_some_and(|kept| now.saturating_duration_since(kept.last) >= idle)
    }
}
