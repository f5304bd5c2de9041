//! The right to coordinate a job: its lock and its lease.
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::blocking;
use super::checked::Checked;
use super::report::Progress;
use crate::error::{Error, Result};
use crate::lease::{Candidate, Lease, Look, Standing, Terms, boot_time};
use crate::lock::JobLock;

/// Looks at the lease within its time: of a standby, and of a process that must know whether the holder lives.
const STANDBY_LOOKS: u32 = 10;
const STARTING_LOOKS: u32 = 20;
/// Shortest and longest time between two looks.
const LOOK_MIN: Duration = Duration::from_millis(50);
const LOOK_MAX: Duration = Duration::from_secs(1);

/// The right to coordinate a job.
pub(super) struct Claim {
    /// None while a process that was stopped or cut off has the lock of this home.
    pub(super) lock: Option<JobLock>,
    pub(super) lease: Lease,
    /// The run of a coordinator that this process replaces.
    pub(super) predecessor: Option<String>,
}

/// Takes the job's lock and its lease. A standby waits for both; without [`super::Setup::standby`], a coordinator
/// that still renews its lease is an error. None if `cancel` came first.
pub(super) async fn claim(
    checked: &Checked,
    cancel: &CancellationToken,
    on_progress: &mut (impl FnMut(Progress) + Send),
) -> Result<Option<Claim>> {
    let (job, setup) = (checked.job.name.to_string(), &checked.setup);
    let standby = setup.standby;
    let lease = setup.config.lease();
    let terms = Terms { job: job.clone(), run: checked.run.clone(), lease, strict: standby };
    let mut candidate = Candidate::new(checked.output.clone(), terms)?;
    let mut lock: Option<JobLock> = None;
    let mut first: Option<Vec<u8>> = None;
    let mut told = None;
    let looks = if standby { STANDBY_LOOKS } else { STARTING_LOOKS };
    let mut pause = (lease / looks).clamp(LOOK_MIN, LOOK_MAX);
    loop {
        let (home, name) = (setup.home.clone(), job.clone());
        let look;
        (candidate, lock, look) = blocking(move || {
            if lock.is_none() {
                match JobLock::take(&home, &name) {
                    Ok(taken) => lock = Some(taken),
                    // Its holder may have been stopped, and then its lease tells.
                    Err(Error::Busy { .. }) if standby => {}
                    Err(error) => return Err(error),
                }
            }
            let dead = lock.as_ref().and_then(JobLock::former).map(str::to_owned);
            let look = candidate.look(dead.as_deref(), &boot_time);
            Ok((candidate, lock, look))
        })
        .await?;
        let by = match look {
            Ok(Look::Taken(holding)) => {
                if let Some(lock) = &mut lock {
                    lock.name(candidate.holder())?;
                }
                let before = candidate
                    .predecessor
                    .filter(|before| standby && (first.is_some() || before.standing != Standing::Finished));
                if let Some(before) = &before {
                    tracing::info!(
                        job,
                        before = before.describe(),
                        "this process takes the coordination over"
                    );
                }
                let predecessor = before.map(|before| before.run).filter(|run| *run != checked.run);
                return Ok(Some(Claim { lock, lease: Lease::start(*holding)?, predecessor }));
            }
            Ok(Look::Held { by, value, lease: held }) => {
                // A record that is looked at too seldom is not known to have stayed the same.
                pause = (lease.min(held) / looks).clamp(LOOK_MIN, LOOK_MAX);
                let known = first.get_or_insert_with(|| value.clone());
                if !standby && *known != value {
                    return Err(Error::Busy {
                        job,
                        reason: format!(
                            "its coordinator is {by}, which is alive (wait for it, stop it, or add --standby to take \
                             its place when it ends)"
                        ),
                    });
                }
                by
            }
            Ok(Look::Failed(error)) => return Err(error),
            // A standby outlasts a failure of the metadata, as its coordinator may.
            Err(error) if standby && error.is_local() => error.one_line(),
            Err(error) => return Err(error),
        };
        let holder = candidate.predecessor.as_ref().map(|before| before.holder.clone());
        let awaited = (holder, by.clone());
        if told.as_ref() != Some(&awaited) {
            tracing::info!(job, coordinator = by, "waiting for the coordinator's lease");
            on_progress(Progress { waiting_for: Some(by), ..Progress::default() });
            told = Some(awaited);
        }
        tokio::select! {
            () = cancel.cancelled() => return Ok(None),
            () = tokio::time::sleep(pause) => {}
        }
    }
}
