//! The connections of a membership epoch that sum gradients beside the ring.

use tokio_util::sync::CancellationToken;

use super::Replica;
use crate::collective::{self, Collective, Ring, nccl};
use crate::engine::Device;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::strategy::{Backend, Strategy};

/// Membership epochs in a row that NCCL may fail to connect before the job ends.
const FAILED_MAX: u32 = 5;

/// Checks that this process can sum gradients as the job says.
pub(super) fn check(job: &JobFile) -> Result<()> {
    match job.strategy {
        Strategy::Allreduce(Backend::Nccl) => nccl::check().map_err(|error| unsuitable(job, error)),
        Strategy::Strict | Strategy::Allreduce(Backend::Tcp) => Ok(()),
    }
}

impl Replica {
    /// Connects what sums gradients in the membership epoch of `ring`, if that is not the ring. All ranks call it.
    pub(crate) fn connect(
        &mut self,
        collective: &Collective,
        ring: &mut Ring<'_>,
        abort: &CancellationToken,
    ) -> Result<()> {
        // Ends that of the former epoch.
        self.reduction.connect(None);
        let (Strategy::Allreduce(Backend::Nccl), Device::Cuda(ordinal)) =
            (self.job.strategy, self.job.device)
        else {
            return Ok(());
        };
        if ring.world() == 1 {
            return Ok(());
        }
        let options = collective.options();
        if options.encrypt {
            tracing::warn!("NCCL sends gradients between machines without encryption");
        }
        match nccl::connect(ring, ordinal, options, abort) {
            Ok(links) => {
                self.failed_links = 0;
                self.reduction.connect(Some(links));
                Ok(())
            }
            Err(error @ collective::Error::Nccl { .. }) => {
                self.failed_links += 1;
                if self.failed_links < FAILED_MAX {
                    return Err(error.into());
                }
                let reason = format!(
                    "{error}, {FAILED_MAX} times in a row: NCCL_DEBUG=INFO shows its connections, NCCL_SOCKET_IFNAME chooses \
                     the network; or set collective = \"tcp\" in [strategy]"
                );
                Err(Error::Job { job: self.job.name.to_string(), reason })
            }
            Err(error) => Err(unsuitable(&self.job, error)),
        }
    }
}

/// The error of the job if `error` does not go away with another ring.
fn unsuitable(job: &JobFile, error: collective::Error) -> Error {
    match error {
        collective::Error::Invalid { reason } => Error::Job { job: job.name.to_string(), reason },
        error => error.into(),
    }
}
