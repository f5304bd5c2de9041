//! A worker's replica of the run: model, optimizer and ledger, and the steps that change them.
//!
//! `updater` decides where weights and optimizer live: on the host, or on the device with copies for the host on request.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use millrace_bundle::onnx::ModelProto;
use millrace_datafs::{Datafs, View};
use millrace_streams::feed::{AnyFeed, Epochs};
use prost::Message;
use sha2::{Digest as _, Sha256};
use tokio::runtime::Handle;

use crate::checkpoint::{Checkpoints, Finish};
use crate::collective::Ring;
use crate::data::Columns;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::ledger::{EpochRecord, Ledger, RowsDigest};
use crate::lineage::Lineage;
use crate::optim::Groups;
use crate::order::Order;
use crate::outage::Outage;
use crate::output::Output;
use crate::precision::LossScale;
use crate::reader::{Reader, Reading, Wishes};
use crate::source::{self, Sources, Use};
use crate::spent::Spent;
use crate::state::RunState;
use crate::validation::{self, Evaluation, Partial, Round, Validator};
use crate::worker::Assignment;

mod failure;
mod links;
mod reduce;
mod saving;
mod stepping;
mod updater;
mod writer;

pub(crate) use failure::check_weights;
use reduce::Reduction;
use updater::{Home, Updater};
use writer::Writer;

/// Largest file of a model, as of protobuf.
const MODEL_BYTES_MAX: u64 = 2 << 30;

/// A worker's copy of the run.
pub(crate) struct Replica {
    job: JobFile,
    runtime: Handle,
    order: Order,
    feed: AnyFeed,
    columns: Columns,
    validator: Option<Validator>,
    engine: Engine,
    groups: Groups,
    /// The optimizer, and the moving average of the weights, if the job keeps one.
    updater: Updater,
    reduction: Box<dyn Reduction>,
    /// Membership epochs in a row whose GPUs could not be connected.
    failed_links: u32,
    /// The scale of the loss in the next step, for a precision that needs one.
    loss_scale: Option<LossScale>,
    ledger: Ledger,
    evaluations: Vec<Evaluation>,
    /// The weights of the evaluation with the lowest loss, if the job publishes them.
    best: Option<Vec<f32>>,
    /// The running statistics of `best`.
    best_states: Vec<f32>,
    step: u64,
    lineage: Lineage,
    /// How long this step has waited for sums of the ring.
    waited: Duration,
    /// How long this step has waited for rows.
    reading: Duration,
    /// The time of all steps.
    spent: Spent,
    /// The prefetched next rows: their step, their slots and the read in progress.
    prefetched: Option<(u64, Range<usize>, Reading)>,
    /// The digest of the rows of every epoch, once known, if each is a pass over one dataset.
    pass_digest: Option<RowsDigest>,
    /// The places of epochs in the order of the plan.
    epoch_places: Epochs,
    checkpoints: Checkpoints,
    output: Output,
    writer: Writer,
    reader: Reader,
}

impl Replica {
    /// Opens the dataset and loads the run's model and its newest checkpoint.
    pub(crate) fn load(assignment: Assignment, sources: Sources, runtime: Handle) -> Result<Replica> {
        let Assignment { job, config, run, owner, plan, other_plans, validation_plan, facts, models, .. } =
            assignment;
        let datasets = runtime.block_on(source::open_datasets(&sources, &job))?;
        let order = Order::of_plans(&job, plan, other_plans)?;
        let feed = {
            let _context = runtime.enter();
            source::open_feed(&job, &order, &datasets, config.feed_cache_bytes, Use::Training)?
        };
        links::check(&job)?;
        let checkpoints = Checkpoints {
            view: open_output(&sources.datafs, &job)?,
            job: job.name.to_string(),
            run,
            plan: order.id().to_string(),
            owner,
            keep: config.checkpoints_keep,
        };
        let model = read_model(&checkpoints.view, &checkpoints.model_path(), &models.model)?;
        let mut engine =
            Engine::load_output(&model, job.loss_output.as_deref(), job.loss.clone(), job.device)?;
        if job.loss.teacher().is_some() {
            let sha256 = models.teacher.as_deref().unwrap_or_default();
            engine.set_teacher(&read_model(&checkpoints.view, &checkpoints.teacher_path(), sha256)?)?;
        }
        let groups = Groups::new(engine.layout(), &job.freeze, &job.no_decay)?;
        engine.freeze_states(groups.frozen_states())?;
        engine.set_precision(job.precision);
        let reduction = reduce::of(&job, &engine, &groups)?;
        let columns = source::columns(&job, &engine, &facts)?;
        let validator = match (&job.validation, job.validation_dataset(), validation_plan) {
            (Some(validation), Some(spec), Some(plan)) => {
                let dataset = runtime.block_on(source::open_dataset(&sources, &job, spec))?;
                let _context = runtime.enter();
                Some(Validator::open(&job, validation, Arc::new(plan), &dataset, &columns, 0)?)
            }
            _ => None,
        };
        let mut replica = Replica {
            columns,
            validator,
            updater: Updater::new((&job.optimizer, job.ema), &mut engine, &groups, Home::of(&job))?,
            groups,
            evaluations: Vec::new(),
            best: None,
            best_states: Vec::new(),
            reduction,
            failed_links: 0,
            loss_scale: LossScale::of(job.precision),
            ledger: Ledger::default(),
            step: 0,
            lineage: Lineage::new(job.strategy),
            waited: Duration::ZERO,
            reading: Duration::ZERO,
            spent: Spent::default(),
            prefetched: None,
            pass_digest: None,
            epoch_places: order.epochs(&job)?,
            writer: Writer::new(job.name.to_string(), config.outage_timeout()),
            reader: Reader::new(job.name.to_string(), config.outage_timeout(), runtime.clone()),
            job,
            runtime,
            order,
            feed,
            engine,
            output: Output::new(checkpoints.view.clone()),
            checkpoints,
        };
        let newest =
            newest_usable_state(&replica.checkpoints, &replica.job, &replica.order, &replica.engine)?;
        if let Some(state) = newest {
            replica.restore(state)?;
            if replica.lineage.is_tracked() {
                let state = replica.export()?;
                replica.lineage.begin(&state);
            }
        }
        Ok(replica)
    }

    /// Whether this state belongs to the run of an assignment, within its budget.
    pub(crate) fn continues(&self, assignment: &Assignment) -> bool {
        // These keys say how a job runs, and no state depends on them.
        let of = |job: &JobFile| JobFile {
            workers: None,
            workers_min: None,
            workers_max: None,
            checkpoint_every_steps: 1,
            ..job.clone()
        };
        self.checkpoints.run == assignment.run && of(&self.job) == of(&assignment.job)
    }

    /// Goes on under the next coordinator of the run, which gave `assignment`.
    pub(crate) fn follow(mut self, assignment: Assignment) -> Replica {
        self.abandon();
        self.writer.set_patience(assignment.config.outage_timeout());
        self.reader.reset(assignment.config.outage_timeout());
        self.checkpoints.owner = assignment.owner;
        self.checkpoints.keep = assignment.config.checkpoints_keep;
        self.job = assignment.job;
        tracing::info!(step = self.step, "going on from the state in memory");
        self
    }

    /// Lets this state be saved under the next coordinator of its run, also if that one has changed the job.
    pub(crate) fn write_for(&mut self, assignment: &Assignment) {
        if self.checkpoints.run == assignment.run {
            self.checkpoints.owner.clone_from(&assignment.owner);
        }
    }

    /// Reads the rows of the next batch once, for `limit` at most.
    ///
    /// # Errors
    /// Why the volumes do not give them.
    pub(crate) fn try_to_read(&self, limit: Duration) -> Result<()> {
        let what = || format!("step {}: read dataset {}", self.step, self.job.dataset);
        let read =
            async { tokio::time::timeout(limit, self.feed.batch(self.step, 0..self.job.batch_rows)).await };
        match self.runtime.block_on(read) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(Error::feed(what(), error)),
            Err(_) => {
                Err(Error::Outage { reason: format!("{}: no rows within {} s", what(), limit.as_secs()) })
            }
        }
    }

    /// Steps applied.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// Steps and evaluations applied: of two states of a run, the one with more is ahead.
    pub(crate) fn position(&self) -> u64 {
        self.step + self.evaluations.len() as u64
    }

    /// What identifies the state among those of other workers: its position, and its lineage if that matters.
    pub(crate) fn arrival(&self) -> (u64, Vec<u8>) {
        (self.position(), self.lineage.digest().to_vec())
    }

    /// The ring of this membership epoch begins, with the same state on every rank.
    pub(crate) fn enter(&mut self, epoch: u64) {
        self.writer.resume();
        self.lineage.enter(&self.checkpoints.owner, epoch);
    }

    /// How long the volumes have not taken a checkpoint.
    pub(crate) fn unsaved(&self) -> Arc<Outage> {
        self.writer.unsaved()
    }

    /// How long the volumes have not given the rows of a step.
    pub(crate) fn unread(&self) -> Arc<Outage> {
        self.reader.outage()
    }

    /// Whether the state waits for an evaluation before the next step.
    pub(crate) fn evaluation_due(&self) -> bool {
        validation::due(&self.job, self.ledger.epochs.len(), &self.evaluations)
    }

    /// Mean training loss of the last complete epoch.
    pub(crate) fn last_loss(&self) -> f64 {
        self.ledger.epochs.last().map_or(0.0, |epoch| epoch.loss)
    }

    /// The last evaluation.
    pub(crate) fn last_evaluation(&self) -> Option<Evaluation> {
        self.evaluations.last().copied()
    }

    /// Computes one batch per rank of an evaluation of the current weights. The round that completes it adds it
    /// to the state.
    ///
    /// On an error `partial` must not be used any more.
    pub(crate) fn evaluate(
        &mut self,
        partial: &mut Partial,
        ring: &mut Ring<'_>,
        wishes: Wishes<'_>,
    ) -> Result<Round> {
        // Also after an error: a state transfer may follow.
        self.updater.exchange_average(&mut self.engine)?;
        let round = self.evaluate_engine(partial, ring, wishes);
        self.updater.exchange_average(&mut self.engine)?;
        let round = round?;
        if let (true, Some(validator)) = (round.complete, &self.validator) {
            let evaluation = validator.conclude(partial, self.epochs(), self.step)?;
            self.evaluations.push(evaluation);
            let keeps = self.job.validation.as_ref().is_some_and(|validation| validation.best);
            if keeps && validation::best(&self.evaluations) == Some(&evaluation) {
                self.best = Some(match self.updater.average(&self.engine)? {
                    Some(average) => average,
                    None => self.engine.weights()?.to_vec(),
                });
                self.best_states = self.engine.states().to_vec();
            }
            self.updater.follow(losses(&self.evaluations));
            self.lineage.advance();
        }
        Ok(round)
    }

    fn evaluate_engine(
        &self,
        partial: &mut Partial,
        ring: &mut Ring<'_>,
        wishes: Wishes<'_>,
    ) -> Result<Round> {
        let Some(validator) = &self.validator else {
            return Err(
                self.bad_state("it waits for an evaluation, but there is no validation data".to_owned())
            );
        };
        validator.round(&self.engine, partial, ring, (self.position(), wishes), &self.reader).map_err(
            |error| match error {
                Error::Engine(error) => self.diverged(error),
                other => other,
            },
        )
    }

    /// Where the time of this worker's steps went.
    pub(crate) fn spent(&self) -> Spent {
        self.spent
    }

    /// Epochs completed.
    pub(crate) fn epochs(&self) -> u64 {
        self.ledger.epochs.len() as u64
    }

    /// Rows of all applied steps.
    pub(crate) fn rows(&self) -> u64 {
        self.step.saturating_mul(self.order.batch_rows() as u64)
    }

    /// Whether the run is finished: the same answer on every worker after a step.
    pub(crate) fn finish(&self) -> Option<Finish> {
        finish(&self.job, &self.ledger, &self.evaluations)
    }

    /// The largest state that [`Replica::import`] accepts.
    pub(crate) fn state_bytes_max(&self) -> u64 {
        RunState::bytes_max(self.engine.layout())
    }

    /// Encodes the state for workers that are behind.
    pub(crate) fn export(&self) -> Result<Vec<u8>> {
        self.state()?.encode(self.engine.layout()).map_err(|reason| self.bad_state(reason))
    }

    /// Replaces the state by that of another worker, which has that lineage.
    pub(crate) fn import(&mut self, state: &[u8], lineage: &[u8]) -> Result<()> {
        let state = RunState::decode(self.engine.layout(), state).map_err(|reason| self.bad_state(reason))?;
        self.restore(state)?;
        self.lineage.take(lineage.to_vec());
        Ok(())
    }

    /// A copy of the state, also of what only the device has.
    fn state(&self) -> Result<RunState> {
        Ok(RunState {
            step: self.step,
            weights: self.engine.weights()?.to_vec(),
            optimizer: self.updater.state(&self.engine)?,
            ledger: self.ledger.clone(),
            fraction_bits: self.reduction.fraction_bits(),
            evaluations: self.evaluations.clone(),
            best: self.best.clone(),
            states: self.engine.states().to_vec(),
            best_states: self.best_states.clone(),
            ema: self.updater.average(&self.engine)?,
            loss_scale: self.loss_scale,
        })
    }

    fn restore(&mut self, state: RunState) -> Result<()> {
        let before = state.step.saturating_sub(1);
        check_weights(self.engine.layout(), &state.weights, before)?;
        self.engine.set_weights(&state.weights)?;
        self.engine.set_states(&state.states).map_err(|error| self.diverged(error))?;
        let kept = (state.optimizer, state.ema);
        let restored = self.updater.restore(&mut self.engine, &self.groups, kept);
        restored.map_err(|error| self.not_updated(error, before))?;
        self.updater.follow(losses(&state.evaluations));
        self.reduction.restore(state.fraction_bits)?;
        self.loss_scale = LossScale::restored(self.job.precision, state.loss_scale);
        self.ledger = state.ledger;
        self.evaluations = state.evaluations;
        self.best = state.best;
        self.best_states = state.best_states;
        self.step = state.step;
        Ok(())
    }
}

/// The losses of evaluations, in order.
fn losses(evaluations: &[Evaluation]) -> impl Iterator<Item = f64> {
    evaluations.iter().map(|evaluation| evaluation.loss)
}

/// Whether a run with this ledger and these evaluations has nothing left to do.
pub(crate) fn finish(job: &JobFile, ledger: &Ledger, evaluations: &[Evaluation]) -> Option<Finish> {
    if validation::due(job, ledger.epochs.len(), evaluations) {
        return None;
    }
    let reached = |target| ledger.epochs.iter().any(|epoch| epoch.loss <= target);
    if job.loss_target.is_some_and(reached) {
        Some(Finish::Converged)
    } else if validation::early_end(job, evaluations).is_some() {
        Some(Finish::NoImprovement)
    } else if ledger.epochs.len() as u64 >= job.epochs_max {
        Some(Finish::EpochsDone)
    } else {
        None
    }
}

/// The newest checkpoint of a run that the job can continue from, or that finishes it. Later ones belong to a
/// job with a larger budget.
pub(crate) fn newest_usable_state(
    checkpoints: &Checkpoints,
    job: &JobFile,
    order: &Order,
    engine: &Engine,
) -> Result<Option<RunState>> {
    let (epochs, batch_rows) = (order.epochs(job)?, order.batch_rows());
    checkpoints.newest(engine.layout(), |state| is_usable(job, epochs, batch_rows, state))
}

/// Whether the job can continue from a state of its run, or is finished with it.
fn is_usable(job: &JobFile, places: Epochs, batch_rows: usize, state: &RunState) -> bool {
    let ends = |epoch: &EpochRecord| job.loss_target.is_some_and(|target| epoch.loss <= target);
    let converged = state.ledger.epochs.iter().position(ends).map(|index| index as u64 + 1);
    let epochs = converged.unwrap_or(u64::MAX).min(job.epochs_max);
    let early = validation::early_end(job, &state.evaluations).map(|end| end.step);
    state.step <= places.steps(epochs, batch_rows as u64).min(early.unwrap_or(u64::MAX))
}

/// Opens the volume of checkpoints and bundles.
pub(crate) fn open_output(datafs: &Datafs, job: &JobFile) -> Result<View> {
    let volume = job.output_volume();
    datafs
        .view(&volume)
        .map_err(|e| Error::volume(format!("job {}: open output volume {volume}", job.name), e))
}

/// A model of the run as the coordinator stored it when the run began: the one with this digest.
fn read_model(view: &View, path: &str, sha256: &str) -> Result<ModelProto> {
    let place = format!("{}:/{path}", view.spec());
    let bytes = view
        .read_file_up_to(path, MODEL_BYTES_MAX)
        .map_err(|e| Error::volume(format!("read the run's model {place}"), e))?;
    if hex::encode(Sha256::digest(&bytes)) != sha256 {
        let reason = "another program has changed it; start the job again, which writes it anew".to_owned();
        return Err(Error::Checkpoint { place, reason });
    }
    ModelProto::decode(bytes)
        .map_err(|e| Error::Checkpoint { place, reason: format!("not an ONNX model ({e})") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_another_program_has_changed_is_refused() {
        let home = tempfile::tempdir().unwrap();
        let datafs = Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
        datafs.volume_create(&"models".parse().unwrap()).unwrap();
        let view = datafs.view(&"models".parse().unwrap()).unwrap();
        let bytes = [1, 2].map(|seed| crate::init::mlp(4, &[], 3, seed).unwrap().encode_to_vec());
        let sha256 = hex::encode(Sha256::digest(&bytes[0]));
        view.write_file("model.onnx", &bytes[0]).unwrap();
        assert!(read_model(&view, "model.onnx", &sha256).is_ok());
        view.write_file("model.onnx", &bytes[1]).unwrap();
        let error = read_model(&view, "model.onnx", &sha256).unwrap_err().one_line();
        assert!(error.contains("models:/model.onnx") && error.contains("start the job again"), "{error}");
    }
}
