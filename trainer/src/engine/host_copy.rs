//! The host's copy of a flat vector that a device may have changed.

use std::sync::OnceLock;

use super::EngineError;

/// A copy of the device's values, or nothing: an old copy does not exist.
#[derive(Debug)]
pub(super) struct HostCopy(OnceLock<Vec<f32>>);

impl HostCopy {
    pub(super) fn of(values: Vec<f32>) -> HostCopy {
        HostCopy(OnceLock::from(values))
    }

    /// The values; `download` gives them if only the device has them.
    pub(super) fn get(
        &self,
        download: impl FnOnce() -> Result<Vec<f32>, EngineError>,
    ) -> Result<&[f32], EngineError> {
        if let Some(values) = self.0.get() {
            return Ok(values);
        }
        let values = download()?;
        Ok(self.0.get_or_init(|| values))
    }

    /// Takes the copy out. The device has the values.
    pub(super) fn take(&mut self) -> Option<Vec<f32>> {
        self.0.take()
    }

    /// Puts a copy in.
    pub(super) fn put(&mut self, values: Vec<f32>) -> &[f32] {
        self.0.take();
        self.0.get_or_init(|| values)
    }
}
