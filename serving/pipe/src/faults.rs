//! The test that tells a fault of the server from bad records, by the number of failures in a row.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use millrace_serving_core::config::PipeConfig;
use millrace_serving_core::error::InferError;

/// Records in a row that fail with [`InferError::Internal`] until the pipe ends. A device without memory or a lost
/// context fails every record. Records that a producer wrote wrongly fail as invalid, which is not counted. So one
/// producer rarely makes that many such failures, and the pipe finds a fault after few calls.
const FAULTS_MAX: u32 = 16;

/// The number of records in a row on which the server failed. Clones share it. A pipe that is started again with the
/// same one ends at the next such record, unless the server has answered a record meanwhile.
#[derive(Debug, Clone, Default)]
pub struct Faults(Arc<AtomicU32>);

impl Faults {
    /// The last answer was none of these failures, or the pipe has not begun.
    pub(super) fn is_zero(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }

    /// The server has answered a record.
    pub(super) fn clear(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Notes the error of a record that ran alone.
    ///
    /// # Errors
    /// The error, if it is that of the server and not of the record.
    pub(super) fn note(&self, config: &PipeConfig, error: &InferError) -> Result<(), InferError> {
        if !matches!(error, InferError::Internal { .. }) {
            return Ok(());
        }
        // One thread at a time runs the pipe.
        let count = (self.0.load(Ordering::Relaxed) + 1).min(FAULTS_MAX);
        self.0.store(count, Ordering::Relaxed);
        if count < FAULTS_MAX {
            return Ok(());
        }
        let what = format!(
            "pipe {:?} ends: model {:?} failed on {FAULTS_MAX} records in a row, so the server has a fault and not the \
             records; the last batch is not committed; mend the model or its device, then start the pipe again",
            config.name, config.model
        );
        Err(error.clone().within(&what))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn only_failures_of_the_server_without_an_answer_between_end_a_pipe() {
        let (faults, config) = (Faults::default(), PipeConfig { name: "p".into(), ..PipeConfig::default() });
        let (internal, invalid) = (InferError::internal("no memory"), InferError::invalid("3 elements"));
        for _ in 0..3 {
            for _ in 1..FAULTS_MAX {
                faults.note(&config, &internal).unwrap();
                faults.note(&config, &invalid).unwrap();
            }
            assert!(!faults.is_zero());
            faults.clear();
            assert!(faults.is_zero());
        }
        for _ in 1..FAULTS_MAX {
            faults.note(&config, &internal).unwrap();
        }
        // Also in later runs, which share the number.
        for _ in 0..2 {
            let ended = faults.clone().note(&config, &internal).unwrap_err();
            assert!(
                matches!(ended, InferError::Internal { .. }) && ended.to_string().contains("no memory"),
                "{ended}"
            );
        }
        faults.note(&config, &invalid).unwrap();
    }
}
