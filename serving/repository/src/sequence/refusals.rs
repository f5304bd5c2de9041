//! Error messages for requests without a live sequence, and for exceeded limits of sequences.

use super::Sequences;
use millrace_serving_core::error::InferError;
use millrace_serving_core::parameters::SequenceId;

impl Sequences {
    /// The error for a request without a sequence.
    pub fn outside(&self) -> InferError {
        InferError::invalid(format!(
            "model {:?} keeps a state for each sequence of requests: give the parameter sequence_id, sequence_start = \
             true with the first request of a sequence and sequence_end = true with its last one",
            self.model
        ))
    }

    pub(super) fn unknown(&self, id: &SequenceId) -> InferError {
        InferError::invalid(format!(
            "model {:?} version {} has no live sequence {id}: begin it with sequence_start = true (it was not started, \
             has ended, had no request for {} us, or its version was loaded anew)",
            self.model,
            self.version,
            self.idle.as_micros()
        ))
    }

    pub(super) fn full(&self) -> InferError {
        InferError::Overloaded {
            reason: format!(
                "{} sequences of model {:?} version {} are live, the limit (the lower one of limits.sequences_max and \
                 max_candidate_sequences): end others with sequence_end, or wait until they had no request for {} us",
                self.sequences_max,
                self.model,
                self.version,
                self.idle.as_micros()
            ),
        }
    }
}
