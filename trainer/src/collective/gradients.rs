//! Sums of gradients over all ranks of a membership epoch: those of the ring, or of a library for GPUs.

use super::{Error, Ring};

/// The connections that sum gradients over all ranks of one membership epoch. They are unusable after their first error.
pub(crate) trait GradientLinks: Send {
    /// Replaces `values`, the bucket `bucket` of the step `step`, by the element-wise sum over all ranks: the same bits
    /// on every rank. On an error `values` is unspecified.
    fn sum_bucket(&mut self, step: u64, bucket: usize, values: &mut [f32]) -> Result<(), Error>;
}

impl GradientLinks for Ring<'_> {
    fn sum_bucket(&mut self, step: u64, _bucket: usize, values: &mut [f32]) -> Result<(), Error> {
        self.all_reduce(step, values)
    }
}
