//! The `[trainer]` table of millrace.toml: how workers are launched, watched and joined.
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::lease::{LEASE_MS_MAX, LEASE_MS_MIN};

/// A worker alone may take this many times `exchange_timeout_ms` per step, since it computes all of it.
const STEP_EXCHANGES: u32 = 10;
/// The usual lease of a coordinator.
const LEASE_MS: u64 = 10_000;

/// Settings that decide how a job runs, never what it computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where the coordinator and the rings of local workers listen (ports are ephemeral).
    pub listen: IpAddr,
    /// Workers of a job whose file sets none, 1 to 1024.
    pub workers: usize,
    /// Checkpoints kept per run, at least 1.
    pub checkpoints_keep: usize,
    /// Respawns of workers before a job continues with fewer. Every 30 s of training with progress restores
    /// one.
    pub respawns_max: u32,
    /// Pause before a worker is restarted; doubles with each failure of the same slot, up to 64 times.
    pub respawn_backoff_ms: u64,
    /// Interval between a worker's heartbeats.
    pub heartbeat_ms: u64,
    /// A worker that is silent for this long is killed and replaced; several heartbeats.
    pub heartbeat_lost_ms: u64,
    /// How long a started worker may take to reach the barrier.
    pub start_timeout_ms: u64,
    /// How long the members of a broken ring may take to reach the barrier; longer than a step.
    pub rendezvous_timeout_ms: u64,
    /// How long a rank waits for its neighbor within a step; longer than a step. A worker that trains alone
    /// is replaced when a step takes ten times as long.
    pub exchange_timeout_ms: u64,
    /// How long a stopping job may take for its last checkpoint before its workers are killed.
    pub stop_timeout_ms: u64,
    /// Shortest time between two progress reports.
    pub progress_ms: u64,
    /// How long a coordinator may be silent before another one may take its place, 500 to 600000; 10000 when
    /// absent. The coordinator renews its lease in the metadata four times as often.
    #[serde(skip_serializing_if = "is_usual_lease")]
    pub lease_ms: u64,
    /// Decoded rows that a worker may keep in memory, in bytes.
    pub feed_cache_bytes: u64,
}

/// Left out of a worker's assignment, so that workers without this key can join.
fn is_usual_lease(lease_ms: &u64) -> bool {
    *lease_ms == LEASE_MS
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            workers: 2,
            checkpoints_keep: 2,
            respawns_max: 16,
            respawn_backoff_ms: 100,
            heartbeat_ms: 500,
            heartbeat_lost_ms: 5_000,
            start_timeout_ms: 60_000,
            rendezvous_timeout_ms: 60_000,
            exchange_timeout_ms: 60_000,
            stop_timeout_ms: 30_000,
            progress_ms: 100,
            lease_ms: LEASE_MS,
            feed_cache_bytes: 32 << 20,
        }
    }
}

impl Config {
    /// Checks the settings; the error names the unusable one.
    pub fn check(&self) -> Result<(), String> {
        match self.problems().into_iter().next() {
            Some((key, problem)) => Err(format!("[trainer] {key} = {problem}")),
            None => Ok(()),
        }
    }

    /// The unusable settings: the key, and its value with what is allowed.
    #[must_use]
    pub fn problems(&self) -> Vec<(&'static str, String)> {
        let mut problems = Vec::new();
        if self.workers == 0 || self.workers > crate::collective::WORLD_MAX {
            problems.push(("workers", format!("{}: allowed are 1 to 1024", self.workers)));
        }
        if self.checkpoints_keep == 0 {
            problems.push(("checkpoints_keep", "0: keep at least 1".to_owned()));
        }
        if self.heartbeat_ms == 0 || self.heartbeat_lost_ms < self.heartbeat_ms.saturating_mul(2) {
            problems.push((
                "heartbeat_lost_ms",
                format!(
                    "{}: must be at least twice heartbeat_ms = {}, which must not be 0",
                    self.heartbeat_lost_ms, self.heartbeat_ms
                ),
            ));
        }
        if !(LEASE_MS_MIN..=LEASE_MS_MAX).contains(&self.lease_ms) {
            let allowed = format!("{}: allowed are {LEASE_MS_MIN} to {LEASE_MS_MAX}", self.lease_ms);
            problems.push(("lease_ms", allowed));
        }
        problems
    }

    pub(crate) fn lease(&self) -> Duration {
        Duration::from_millis(self.lease_ms)
    }

    pub(crate) fn heartbeat(&self) -> Duration {
        Duration::from_millis(self.heartbeat_ms)
    }

    pub(crate) fn heartbeat_lost(&self) -> Duration {
        Duration::from_millis(self.heartbeat_lost_ms)
    }

    pub(crate) fn start_timeout(&self) -> Duration {
        Duration::from_millis(self.start_timeout_ms)
    }

    pub(crate) fn rendezvous_timeout(&self) -> Duration {
        Duration::from_millis(self.rendezvous_timeout_ms)
    }

    pub(crate) fn exchange_timeout(&self) -> Duration {
        Duration::from_millis(self.exchange_timeout_ms)
    }

    /// How long the volumes may take no checkpoint until the job ends: half of what a step may take, because the
    /// last checkpoint counts as one.
    pub(crate) fn outage_timeout(&self) -> Duration {
        self.step_timeout() / 2
    }

    /// How long a worker may compute a step alone.
    pub(crate) fn step_timeout(&self) -> Duration {
        self.exchange_timeout().saturating_mul(STEP_EXCHANGES)
    }

    pub(crate) fn stop_timeout(&self) -> Duration {
        Duration::from_millis(self.stop_timeout_ms)
    }

    pub(crate) fn progress(&self) -> Duration {
        Duration::from_millis(self.progress_ms)
    }
}
