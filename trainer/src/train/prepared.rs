//! A job that owns its checkpoints: its workers, and the publication of its model.
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_leaf::random;
use millrace_streams::dataset::OpenDataset;
use millrace_streams::feed::Plan;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::Setup;
use super::checked::Crew;
use super::report::{End, Progress, TrainReport, fill};
use crate::checkpoint::{Checkpoints, Finish};
use crate::elastic::coordinator::{self, CoordinatorParams, Joining, Outcome};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::join::{Listen, host_port};
use crate::lease::Lease;
use crate::metrics;
use crate::order::Order;
use crate::output::Output;
use crate::publish::{self, Origin};
use crate::replica;
use crate::source::{self, Use};
use crate::statistics;
use crate::worker::{Assignment, ModelDigests, VolumesSetup};

/// A checked job that owns its checkpoints.
pub(super) struct Prepared {
    pub(super) job: JobFile,
    pub(super) setup: Setup,
    pub(super) engine: Engine,
    pub(super) datasets: Vec<OpenDataset>,
    pub(super) order: Order,
    pub(super) validation_plan: Option<Arc<Plan>>,
    pub(super) checkpoints: Checkpoints,
    pub(super) origin: Origin,
    pub(super) models: ModelDigests,
    pub(super) lease: Arc<Lease>,
    /// The step of the checkpoint from which the job continues, and whether that checkpoint ends the job.
    pub(super) resumed_from_step: Option<u64>,
    pub(super) finished: bool,
    pub(super) runtime: Handle,
}

impl Prepared {
    pub(super) async fn run_workers(
        &self,
        crew: Crew,
        first_step: u64,
        cancel: CancellationToken,
        on_progress: &mut (impl FnMut(Progress) + Send),
    ) -> Result<Outcome> {
        let job = &self.job;
        let mut plans = self.order.plans().map(|plan| (**plan).clone());
        let plan = plans.next().ok_or_else(|| Error::Job {
            job: job.name.to_string(),
            reason: format!("{} has no dataset", job.dataset),
        })?;
        let assignment = Assignment {
            job: job.clone(),
            volumes: Some(VolumesSetup {
                home: self.setup.home.clone(),
                datafs: self.setup.datafs_config.clone(),
                kafka: self.setup.kafka.clone(),
            }),
            config: self.setup.config.clone(),
            run: self.checkpoints.run.clone(),
            owner: self.checkpoints.owner.clone(),
            fence: self.lease.fence(),
            models: self.models.clone(),
            plan,
            other_plans: plans.collect(),
            validation_plan: self.validation_plan.as_deref().cloned(),
            facts: self.origin.facts.clone(),
            encrypt_ring: self.setup.listen.is_some(),
        };
        let encode = |assignment: &Assignment| {
            serde_json::to_string(assignment).map_err(|e| Error::Job {
                job: job.name.to_string(),
                reason: format!("cannot be sent to the workers ({e})"),
            })
        };
        let joining = match &self.setup.listen {
            None => None,
            Some(listen) => {
                // Settings of volumes have secrets, and those of another machine are its own.
                let theirs = Assignment { volumes: None, ..assignment.clone() };
                Some(Joining { listen, places: crew.places, assignment: encode(&theirs)? })
            }
        };
        let assignment = encode(&assignment)?;
        let params = CoordinatorParams {
            job: job.name.as_str(),
            workers: crew.local,
            workers_min: crew.min,
            config: &self.setup.config,
            command: &self.setup.worker,
            token: random_token()?,
            assignment,
            joining,
            hand_over: self.setup.standby,
            lease: Some(Arc::clone(&self.lease)),
        };
        let steps_max = self.order.epochs(job)?.steps(job.epochs_max, self.order.batch_rows() as u64);
        let mut first_report: Option<(Instant, u64)> = None;
        let host = self.setup.listen.as_ref().and_then(Listen::host);
        let mut announced = None;
        coordinator::run(params, cancel, |seen| {
            if seen.listening != announced {
                announced = seen.listening;
                if let Some((host, address)) = host.as_ref().zip(seen.listening) {
                    self.lease.announce(host_port(host, address.port()));
                }
            }
            if seen.step > 0 {
                first_report.get_or_insert((Instant::now(), seen.step));
            }
            let (since, step) = first_report.unwrap_or_else(|| (Instant::now(), seen.step));
            let rows = seen.step.saturating_sub(step.max(first_step)) as f64 * job.step_rows() as f64;
            let elapsed = since.elapsed().max(Duration::from_micros(1)).as_secs_f64();
            on_progress(Progress {
                step: seen.step,
                steps_max,
                first_step,
                epoch: seen.epoch,
                epochs_max: job.epochs_max,
                loss: seen.loss,
                evaluation: seen.evaluation,
                samples_per_second: rows / elapsed,
                spent: seen.spent,
                worker_pids: seen.pids,
                membership_epoch: seen.membership_epoch,
                workers_missing: seen.missing,
                unsaved_seconds: seen.unsaved.as_secs(),
                unread_seconds: seen.unread.as_secs(),
                listening: seen.listening,
                waiting_for: None,
            });
        })
        .await
    }

    /// Publishes a finished run and fills in the report. `trained` says how the workers ended, if any ran. After
    /// `stop`, the publication is left to the next call.
    pub(super) fn conclude(
        mut self,
        mut report: TrainReport,
        trained: Option<Outcome>,
        stop: &CancellationToken,
    ) -> Result<TrainReport> {
        let state = replica::newest_usable_state(&self.checkpoints, &self.job, &self.order, &self.engine)?;
        let finish =
            state.as_ref().and_then(|state| replica::finish(&self.job, &state.ledger, &state.evaluations));
        report.end = match finish {
            Some(Finish::Converged) => End::Converged,
            Some(Finish::EpochsDone) => End::EpochsDone,
            Some(Finish::NoImprovement) => End::NoImprovement,
            None => End::Stopped,
        };
        if finish.is_none() && trained.as_ref().is_none_or(|outcome| !outcome.stopped) {
            return Err(Error::Checkpoint {
                place: self.checkpoints.run_location(),
                reason: "the run is finished, but its last checkpoint cannot be read; start the job again"
                    .to_owned(),
            });
        }
        let Some(state) = state else { return Ok(report) };
        if let Some(outcome) = trained.filter(|outcome| !outcome.trained.is_zero()) {
            let steps = state.step.saturating_sub(report.resumed_from_step.unwrap_or_default());
            report.samples_per_second =
                steps as f64 * self.job.step_rows() as f64 / outcome.trained.as_secs_f64();
        }
        fill(&mut report, &state, self.job.loss.kind());
        if let Some(last) = report.validation.last() {
            // The workers may have ended before they reported it.
            metrics::record_evaluation(last.loss, last.accuracy);
        }
        if report.end != End::Stopped {
            let columns = source::columns(&self.job, &self.engine, &self.origin.facts)?;
            let inputs = self.engine.graph().inputs().to_vec();
            let statistics = || {
                let feed = {
                    let _context = self.runtime.enter();
                    let cache = self.setup.config.feed_cache_bytes;
                    source::open_feed(&self.job, &self.order, &self.datasets, cache, Use::Evaluation)?
                };
                statistics::collect(&feed, &columns, &inputs, &self.runtime, stop)
            };
            // The model is published even if its inputs cannot be read a second time.
            let statistics = || {
                statistics().unwrap_or_else(|error| {
                    tracing::warn!(%error, "cannot compute the input statistics; publishing the model without them");
                    ControlFlow::Continue(None)
                })
            };
            let published = Output::new(self.checkpoints.view.clone()).write(|view| {
                publish::publish(
                    &self.checkpoints.through(view),
                    &self.job,
                    &self.origin,
                    &mut self.engine,
                    &state,
                    statistics,
                    &self.runtime,
                )
            })?;
            match published {
                Some((published, already)) => {
                    report.already_published = already;
                    report.version = Some(published.version);
                    report.model_sha256 = Some(published.model_sha256);
                }
                None => report.end = End::Stopped,
            }
        }
        Ok(report)
    }
}

/// 256 random bits from the kernel, in hex.
pub(super) fn random_token() -> Result<String> {
    let bytes: [u8; 32] = random::bytes().map_err(|e| Error::io(format!("read {}", random::SOURCE), e))?;
    Ok(hex::encode(bytes))
}
