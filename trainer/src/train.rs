//! Training of one job, from its job file to its published bundle: [`train`] and its report.
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_datafs::Datafs;
use millrace_leaf::blocking::{self, Stopping};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::join::Listen;
use crate::launch::WorkerCommand;
use crate::lease::{Failure, Lease, Release};
use crate::source::Sources;

mod checked;
mod claim;
mod inquiry;
mod prepared;
mod report;

use checked::{Checked, Crew};
use claim::{Claim, claim};
pub use inquiry::Awaited;
pub(crate) use inquiry::{Answer, Inquiry};
pub use report::{End, Progress, TrainReport};

/// How long the check of a job may go on after it was cancelled: a short one then ends as usual.
const CHECK_GRACE: Duration = Duration::from_secs(2);

/// The environment of a job: its volumes, its settings and its worker program.
#[derive(Debug, Clone)]
pub struct Setup {
    /// The open volumes.
    pub datafs: Datafs,
    /// The brokers of topics that jobs read; none where jobs read volumes only.
    pub kafka: Option<millrace_streams::KafkaConfig>,
    /// The home folder of the volumes; workers open it, too.
    pub home: PathBuf,
    /// The settings of the volumes.
    pub datafs_config: millrace_datafs::Config,
    /// How workers are launched and watched.
    pub config: Config,
    /// The command that starts a worker process.
    pub worker: WorkerCommand,
    /// How workers of other machines join; none when only workers of this one train.
    pub listen: Option<Listen>,
    /// Waits while another process coordinates the job, and takes its place when it has ended, also when it was
    /// killed, stopped or cut off. A stop of this process then hands the job over: workers of other machines stay.
    pub standby: bool,
    /// Leaves the unfinished run of a job on a topic behind and begins a new one, on the offsets that the bounds of the
    /// topic mean now. The job's next calls go on with the new run. A job without such bounds is refused.
    pub abandon_run: bool,
}

impl Setup {
    /// Where the coordinator reads datasets from.
    fn sources(&self) -> Sources {
        Sources { datafs: self.datafs.clone(), kafka: self.kafka.clone() }
    }
}

/// Trains `job` and publishes its bundle.
///
/// The coordinator runs in the calling task, the workers are processes. All checks of the job, its data and
/// its model happen before the first worker starts.
///
/// A run is identified by the job's computation ([`JobFile::digest`]), the rows and the first weights. It
/// continues from its newest checkpoint within the budget, also when `epochs_max` or `loss_target` changed.
/// Its state after a step is published once per model name. Another call after a crash at any moment, or
/// after the end, gives the same version and the same `model_sha256`, independent of the workers. A version
/// that was deleted is published again, under a new number.
///
/// One process at a time coordinates a job: it holds a lease in the metadata of the output volume, and without it
/// nothing is written. Another call fails with [`Error::Busy`] or, with [`Setup::standby`], waits and takes over. A
/// coordinator whose lease was lost fails with [`Error::Lease`].
///
/// `cancel` ends the job after the current step with a checkpoint ([`End::Stopped`]), or fails with
/// [`Error::Stopped`] before the job is coordinated. While the rows of the current step are away, the checkpoint is that
/// of the last complete step. Dropping the
/// future kills the workers; what the last checkpoint holds is kept. `on_progress` is called at most
/// every `progress_ms` and must not block.
///
/// Needs a multi-threaded tokio runtime.
pub async fn train(
    job: JobFile,
    setup: Setup,
    cancel: CancellationToken,
    mut on_progress: impl FnMut(Progress) + Send,
) -> Result<TrainReport> {
    let began = Instant::now();
    let (declared, again) = (job.clone(), setup.clone());
    // Data of any size may be counted. Nothing is held yet, so a thread that goes on changes nothing.
    let stopped = async {
        cancel.cancelled().await;
        tokio::time::sleep(CHECK_GRACE).await;
    };
    let checked = tokio::select! {
        checked = blocking(move || Checked::new(job, setup)) => checked?,
        () = stopped => return Err(Error::Stopped { job: declared.name.to_string() }),
    };
    let crew = Crew::of(&checked.job, &checked.setup)?;
    if let Some(listen) = &checked.setup.listen {
        listen.check(crew.local).await?;
    }
    let Some(claim) = claim(&checked, &cancel, &mut on_progress).await? else {
        return Ok(TrainReport { seconds: began.elapsed().as_secs_f64(), ..TrainReport::of(&checked, crew) });
    };
    let Claim { lock, lease, predecessor } = claim;
    let lease = Arc::new(lease);
    let stop = cancel.clone();
    let coordinated = async {
        let checked = blocking(move || match predecessor {
            Some(run) => checked.or_run_of(&run, declared, again),
            None => Ok(checked),
        })
        .await?;
        lease.train(checked.run.clone());
        coordinate(checked, crew, Arc::clone(&lease), cancel, on_progress).await
    };
    let outcome = coordinated.await;
    let outcome = blocking(move || {
        let outcome = outcome.map_err(|error| lease.explain(error));
        let how = match &outcome {
            Ok(report) if report.end != End::Stopped => Release::Finished,
            // The workers would meet it again, and were told to end. A stop hands even a failing run over.
            Err(Error::Worker { message, exit_code }) if !stop.is_cancelled() => {
                Release::Failed(Failure { message: message.clone(), exit_code: *exit_code })
            }
            _ => Release::Unfinished,
        };
        lease.release(how);
        drop(lock);
        outcome
    })
    .await;
    let mut report = outcome?;
    report.seconds = began.elapsed().as_secs_f64();
    Ok(report)
}

/// Trains and publishes a checked job whose lease this process holds.
async fn coordinate(
    checked: Checked,
    crew: Crew,
    lease: Arc<Lease>,
    cancel: CancellationToken,
    mut on_progress: impl FnMut(Progress) + Send,
) -> Result<TrainReport> {
    let mut report = TrainReport::of(&checked, crew);
    let held = Arc::clone(&lease);
    let prepared = blocking(move || checked.begin(held)).await?;
    report.resumed_from_step = prepared.resumed_from_step;
    let mut trained = None;
    if !prepared.finished {
        let first_step = report.resumed_from_step.unwrap_or_default();
        let spent = &mut report.spent;
        let mut on_progress = |seen: Progress| {
            *spent = seen.spent;
            on_progress(seen);
        };
        let outcome = tokio::select! {
            outcome = prepared.run_workers(crew, first_step, cancel.clone(), &mut on_progress) => outcome?,
            error = lease.lost() => return Err(error),
        };
        report.workers_joined = outcome.workers_joined;
        report.workers_lost = outcome.workers_lost;
        report.membership_epochs = outcome.membership_epochs;
        trained = Some(outcome);
    }
    lease.check()?;
    blocking(move || prepared.conclude(report, trained, &cancel)).await
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let stopped = |error: Stopping| Error::io("run on a blocking thread", std::io::Error::other(error));
    blocking::run(work).await.map_err(stopped)?
}
