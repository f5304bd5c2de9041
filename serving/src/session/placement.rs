//! Where the sessions of a version run, and where they were asked to.

use millrace_bundle::Manifest;
use prometheus::IntGauge;

use crate::config::Device;
use crate::metrics::SESSIONS;

/// Where the sessions of a version run. Counted in the metrics until it is dropped.
#[derive(Debug)]
pub(crate) struct Placement {
    device: Device,
    asked: Device,
    sessions: i64,
    gauge: IntGauge,
}

impl Placement {
    /// Counts the sessions of a version that was asked for on one device and runs on another or the same.
    pub(super) fn new(manifest: &Manifest, asked: Device, device: Device, sessions: usize) -> Placement {
        let labels =
            [manifest.name.as_str(), &manifest.version.to_string(), &device.to_string(), &asked.to_string()];
        let gauge = SESSIONS.with_label_values(&labels);
        let sessions = i64::try_from(sessions).unwrap_or(i64::MAX);
        gauge.add(sessions);
        Placement { device, asked, sessions, gauge }
    }

    /// Where the sessions run.
    pub(crate) fn device(&self) -> Device {
        self.device
    }

    /// The device that was asked for, where that is another one.
    pub(crate) fn instead_of(&self) -> Option<Device> {
        (self.asked != self.device).then_some(self.asked)
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        self.gauge.sub(self.sessions);
    }
}
