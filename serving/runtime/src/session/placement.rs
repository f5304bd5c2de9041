//! Placement of a version's sessions: the devices they run on, and the devices the configuration requests.

use millrace_bundle::Manifest;
use prometheus::IntGauge;

use millrace_serving_core::config::Devices;
use millrace_serving_core::metrics::SESSIONS;

/// Devices that the sessions of a version run on. The metrics count the sessions until this is dropped.
#[derive(Debug)]
pub struct Placement {
    on: Devices,
    asked: Devices,
    /// Sessions on each of the devices.
    of_each: usize,
    gauges: Vec<IntGauge>,
}

impl Placement {
    /// Counts the sessions of a version in the metrics: `of_each` on each device of `on`, where the configuration
    /// requests the devices `asked`.
    pub(super) fn new(manifest: &Manifest, asked: &Devices, on: Devices, of_each: usize) -> Placement {
        let (version, asked_text) = (manifest.version.to_string(), asked.to_string());
        let gauge = |device: String| {
            SESSIONS.with_label_values(&[manifest.name.as_str(), &version, &device, &asked_text])
        };
        let gauges: Vec<_> = on.each().iter().map(|device| gauge(device.to_string())).collect();
        gauges.iter().for_each(|gauge| gauge.add(of_each as i64));
        Placement { on, asked: asked.clone(), of_each, gauges }
    }

    /// Devices that the sessions run on.
    pub fn on(&self) -> &Devices {
        &self.on
    }

    /// Number of sessions on each device.
    pub fn of_each(&self) -> usize {
        self.of_each
    }

    /// The requested devices, if the sessions run on others.
    pub fn instead_of(&self) -> Option<&Devices> {
        (self.asked != self.on).then_some(&self.asked)
    }
}

impl Drop for Placement {
    fn drop(&mut self) {
        self.gauges.iter().for_each(|gauge| gauge.sub(self.of_each as i64));
    }
}
