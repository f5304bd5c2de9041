//! Observation of mounts: statistics, traces, and the socket that serves both to other processes.

pub(super) mod control;
pub(super) mod exported;
pub(super) mod stats;
pub(super) mod trace;
pub(super) mod watch;
