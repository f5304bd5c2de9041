//! A worker's replica of the run: model, optimizer and ledger, and the steps that change them.
//!
//! `updater` decides where weights and optimizer live: on the host, or on the device with copies for the host on request.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_bundle::onnx::ModelProto;
use millrace_datafs::{Datafs, View};
use millrace_streams::feed::{AnyFeed, Epochs, FeedBatch};
use prost::Message;
use tokio::runtime::Handle;

use crate::checkpoint::{Checkpoints, Finish};
use crate::collective::Ring;
use crate::data::{Columns, Rows, rank_shards, shard_slots};
use crate::engine::{ChannelMoments, Engine, EngineError, NOT_FINITE, ParamLayout, ShardKey};
use crate::error::{Error, Result};
use crate::fixed::FixedError;
use crate::job::JobFile;
use crate::ledger::{EpochError, EpochRecord, Ledger, RowsDigest, Tally};
use crate::lineage::Lineage;
use crate::optim::Groups;
use crate::order::{Order, StepPlaces};
use crate::outage::Outage;
use crate::output::Output;
use crate::precision::{LossScale, Precision};
use crate::reader::{Interrupt, Reader, Reading, Wishes};
use crate::source::{self, Sources, Use};
use crate::spent::Spent;
use crate::state::RunState;
use crate::validation::{self, Evaluation, Partial, Round, Validator};
use crate::worker::Assignment;

mod links;
mod reduce;
mod saving;
mod updater;
mod writer;

use reduce::{ReduceError, Reduced, Reduction};
use updater::{Home, UpdateError, Updater, first_not_finite};
use writer::Writer;

/// The outcome of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StepOutcome {
    /// Mean loss of the global batch before the update.
    pub(crate) loss: f64,
    /// At least one member wants to leave so that another worker can join.
    pub(crate) leave: bool,
    /// At least one member was told to stop.
    pub(crate) stop: bool,
}

/// Rows of a step that a worker holds at a time, beside those that are read ahead.
struct Pass {
    parts: Range<usize>,
    batch: FeedBatch,
    rows: Rows,
}

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
        let Assignment { job, config, run, owner, plan, other_plans, validation_plan, facts, .. } =
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
        let model = read_model(&checkpoints.view, &checkpoints.model_path())?;
        let mut engine =
            Engine::load_output(&model, job.loss_output.as_deref(), job.loss.clone(), job.device)?;
        if job.loss.teacher().is_some() {
            engine.set_teacher(&read_model(&checkpoints.view, &checkpoints.teacher_path())?)?;
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

    fn bad_state(&self, reason: String) -> Error {
        Error::Checkpoint { place: format!("state of job {}", self.job.name), reason }
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

    /// The error of a step that was not applied.
    fn not_updated(&self, error: UpdateError, step: u64) -> Error {
        match error {
            UpdateError::Engine(error) => self.diverged(error),
            UpdateError::Optim(error) => error.into(),
            UpdateError::Gradient(error) => self.not_finite(&error),
            UpdateError::Weight { index, value } => bad_weight(self.engine.layout(), (index, value), step),
            UpdateError::Slot { index } => {
                let parameter = self.engine.layout().name_of(index).unwrap_or_default();
                let reason = format!(
                    "the optimizer's memory of parameter {parameter} overflowed, as its gradient is too large: clean or \
                     scale the labels, or set clip_norm{}",
                    self.advice()
                );
                Error::Diverged { step, reason }
            }
        }
    }

    /// Computes this rank's rows, reduces the gradients over the ring and applies the step.
    ///
    /// On an error nothing was applied, and the step can be computed again in another ring.
    pub(crate) fn step_once(&mut self, ring: &mut Ring<'_>, wishes: Wishes<'_>) -> Result<StepOutcome> {
        let began = Instant::now();
        let batch_rows = self.order.batch_rows();
        let parts = self.reduction.parts(ring.world());
        let passes = passes(rank_shards(ring.rank(), ring.world(), parts), self.job.accumulate_steps);
        let places = self.order.place_of_step(self.step)..self.order.place_of_step(self.step + 1);
        let (first, last) = (
            self.epoch_places.of_place(places.start),
            self.epoch_places.of_place(places.end.saturating_sub(1)),
        );
        let mut tally = Tally::new(first, last, parts).with_channels(self.engine.moving_channels());
        tally.leave = u64::from(wishes.leave);
        tally.stop = u64::from(wishes.stop);
        self.reduction.begin();
        (self.waited, self.reading) = (Duration::ZERO, Duration::ZERO);
        let mut loss_scale = self.loss_scale;
        let step_places = self.order.places_of_step(self.step);
        let mut held = None;
        let total = loop {
            let scaled = (loss_scale, tally.clone());
            let shared = (&mut *ring, wishes);
            let own = self.compute((passes.as_slice(), &step_places), parts, &mut held, scaled, shared)?;
            let Some(own) = own else { return Err(ring.over().into()) };
            let computed = Instant::now();
            let reduced = self.reduction.reduce(self.step, own, ring);
            self.waited += computed.elapsed();
            match reduced.map_err(|error| self.unreduced(error))? {
                Reduced::Sum(total) => break total,
                Reduced::Again => {}
                Reduced::Overflow => {
                    loss_scale = loss_scale.and_then(LossScale::lower);
                    let scale = loss_scale.map(LossScale::factor);
                    tracing::debug!(self.step, scale, "gradients overflowed; computing the step again");
                }
            }
        };
        drop(held);
        if total.rows != batch_rows as u64 {
            let reason = format!("step {} summed {} rows of {batch_rows}", self.step, total.rows);
            return Err(self.miscounted(self.epochs(), reason));
        }
        let summed = began.elapsed();

        // Rows without any weight have no mean: the step changes neither the weights nor the optimizer.
        if total.weight() > 0.0 {
            let (reduction, sized) = (self.reduction.as_mut(), (total.weight(), ring.world()));
            let applied = self.updater.apply(&mut self.engine, &self.groups, reduction, sized);
            applied.map_err(|error| self.not_updated(error, self.step))?;
        }
        let rows_of = |shard: usize| shard_slots(shard, parts, batch_rows).len();
        let moments: Vec<(usize, &[ChannelMoments])> =
            total.moments().enumerate().map(|(shard, moments)| (rows_of(shard), moments)).collect();
        self.engine.move_states(&moments).map_err(|error| self.diverged(error))?;
        self.reduction.commit();
        self.loss_scale = loss_scale.map(LossScale::after_step);
        self.step += 1;
        self.lineage.advance();
        self.ledger.add(&total);
        while self.epoch_places.of_place(self.order.place_of_step(self.step)) > self.epochs() {
            let epoch = self.epochs();
            let (rows, digest) = self.expected_rows(epoch);
            match self.ledger.close_epoch(rows, digest) {
                Ok(_) => {}
                Err(reason @ EpochError::Weightless) => {
                    return Err(Error::Data {
                        dataset: self.columns.dataset.clone(),
                        reason: reason.to_string(),
                    });
                }
                Err(reason) => return Err(self.miscounted(epoch, reason.to_string())),
            }
        }
        let waits = self.waited + self.reading;
        self.spent = self.spent.plus(Spent {
            feed_us: self.reading.as_micros() as u64,
            compute_us: began.elapsed().saturating_sub(waits).as_micros() as u64,
            communication_us: self.waited.as_micros() as u64,
            checkpoint_us: 0,
        });
        tracing::trace!(
            step = self.step,
            gradients_us = summed.as_micros() as u64,
            communication_us = self.waited.as_micros() as u64,
            apply_us = (began.elapsed() - summed).as_micros() as u64,
            "step applied"
        );
        Ok(StepOutcome { loss: total.mean_loss(), leave: total.leave > 0, stop: total.stop > 0 })
    }

    /// The number of rows of an epoch, and the digest of these rows.
    fn expected_rows(&mut self, epoch: u64) -> (u64, u64) {
        let places = self.epoch_places.places(epoch..epoch + 1);
        let rows = places.end - places.start;
        if self.pass_digest.is_none() {
            self.pass_digest = self.order.digest_of_pass(&self.job);
        }
        let digest = self.pass_digest.unwrap_or_else(|| self.order.digest_of(places));
        (rows, digest.0)
    }

    /// Computes the gradients of the parts of `passes`, and adds them to the reduction, which may sum that of the last
    /// part over `ring` meanwhile. `places` are those of the step. Returns this rank's tally; none if a read was
    /// interrupted. `held` are the rows of the last pass, which need not be read again. The loss is multiplied by
    /// `loss_scale`; a gradient that overflows while the scale can be lowered is told in the tally.
    fn compute(
        &mut self,
        (passes, places): (&[Range<usize>], &StepPlaces),
        parts: usize,
        held: &mut Option<Pass>,
        (loss_scale, mut tally): (Option<LossScale>, Tally),
        (ring, wishes): (&mut Ring<'_>, Wishes<'_>),
    ) -> Result<Option<Tally>> {
        let batch_rows = self.order.batch_rows();
        self.reduction.clear(self.engine.layout().elements());
        let keeps = self.updater.keeps_gradients(ring.world());
        if keeps {
            self.engine.clear_gradients()?;
        }
        let form = self.reduction.form();
        let scale = loss_scale.map_or(1.0, LossScale::factor);
        let may_overflow = loss_scale.and_then(LossScale::lower).is_some();
        for (at, own) in passes.iter().enumerate() {
            if held.as_ref().is_none_or(|held| held.parts != *own) {
                *held = None;
                let next = passes.get(at + 1).map_or((self.step + 1, &passes[0]), |next| (self.step, next));
                let interrupted = |is_failing| wishes.end_read(ring, is_failing);
                *held = self.pass(own, next, parts, &interrupted)?;
            }
            let Some(Pass { batch, rows, .. }) = held else { return Ok(None) };
            for (at, place) in places.of(batch.slots.clone()).into_iter().enumerate() {
                let epoch = self.epoch_places.of_place(place);
                if !tally.count(epoch, Order::row_id(batch, at)) {
                    let row = self.order.row_name(batch, at);
                    let reason = format!("step {} delivered its {row}", self.step);
                    return Err(self.miscounted(epoch, reason));
                }
            }
            let first_slot = shard_slots(own.start, parts, batch_rows).start;
            for part in own.clone() {
                let range = shard_slots(part, parts, batch_rows);
                let key = ShardKey { seed: self.job.seed, step: self.step, shard: part as u64 };
                let shard = rows.shard(range.start - first_slot..range.end - first_slot);
                let is_last = at + 1 == passes.len() && part + 1 == own.end;
                let in_buckets = self.reduction.in_buckets(ring.world()).filter(|_| is_last);
                let overlaps = in_buckets.is_some();
                let mut is_finite = true;
                let mut note_overflow = |grad: &[f32]| {
                    is_finite &= !may_overflow || grad.iter().all(|value| value.is_finite());
                };
                let engine = &mut self.engine;
                let found = match in_buckets {
                    Some(allreduce) => allreduce.overlap(self.step, ring, |buckets, hand_over| {
                        engine.gradients_in_buckets(&shard, key, scale, buckets, &mut |values| {
                            note_overflow(&values);
                            hand_over(values)
                        })
                    }),
                    None if keeps => {
                        let found = engine.add_gradients(&shard, key, (scale, may_overflow));
                        found.map_err(ReduceError::Engine).map(|(found, fits)| {
                            is_finite = fits;
                            (found, Duration::ZERO)
                        })
                    }
                    None => {
                        let found = match &form {
                            Some(form) => engine.gradients_formed(&shard, key, scale, form),
                            None => engine.gradients_scaled(&shard, key, scale).map(|mut found| {
                                self.groups.clear_frozen(&mut found.grad);
                                found
                            }),
                        };
                        found.map_err(ReduceError::Engine).map(|found| {
                            note_overflow(&found.grad);
                            (found, Duration::ZERO)
                        })
                    }
                };
                let (found, waited) = found.map_err(|error| match error {
                    ReduceError::Engine(error) => self.diverged_at(error, batch, range.start - first_slot),
                    other => self.unreduced(other),
                })?;
                self.waited += waited;
                if !is_finite {
                    tally.overflow(part);
                    continue;
                }
                tally.shard(part, found.loss_sum, found.weight, 0.0);
                tally.record_moments(part, &found.moments);
                tally.correct += found.correct;
                tally.ignored += found.ignored;
                if !overlaps && !keeps {
                    self.reduction.add(part, found).map_err(|error| self.not_finite(&error))?;
                }
            }
            for (part, largest) in self.reduction.finish().map_err(|error| self.not_finite(&error))? {
                tally.record_largest(part, largest);
            }
        }
        Ok(Some(tally))
    }

    /// Reads the rows of the parts `own` of this step; starts prefetching those of the pass `next`. None if the read was
    /// interrupted.
    fn pass(
        &mut self,
        own: &Range<usize>,
        (next_step, next): (u64, &Range<usize>),
        parts: usize,
        interrupted: Interrupt<'_>,
    ) -> Result<Option<Pass>> {
        let batch_rows = self.order.batch_rows();
        let cut = |at| shard_slots(at, parts, batch_rows).start;
        let next = (next_step, cut(next.start)..cut(next.end));
        let Some(batch) = self.read(cut(own.start)..cut(own.end), next, interrupted)? else {
            return Ok(None);
        };
        let rows = source::decode(&self.order, &self.columns, &batch)?;
        Ok(Some(Pass { parts: own.clone(), batch, rows }))
    }

    /// Rows of this step, prefetched if their slots were predicted; starts prefetching those of `next`. None if the read
    /// was interrupted.
    fn read(
        &mut self,
        slots: Range<usize>,
        next: (u64, Range<usize>),
        interrupted: Interrupt<'_>,
    ) -> Result<Option<FeedBatch>> {
        let foreseen = self.prefetched.take().and_then(|(step, prefetched, reading)| {
            if step == self.step && prefetched == slots {
                return Some(reading);
            }
            reading.abort();
            None
        });
        let what = format!("step {}: read dataset {}", self.step, self.job.dataset);
        let began = Instant::now();
        let read = self.reader.read(&self.feed, (self.step, slots), foreseen, &what, interrupted);
        self.reading += began.elapsed();
        let read = read?;
        let Some(batch) = read else { return Ok(None) };
        let (feed, (step, wanted)) = (self.feed.clone(), next.clone());
        let reading = self.runtime.spawn(async move { feed.batch(step, wanted).await });
        self.prefetched = Some((next.0, next.1, reading));
        Ok(Some(batch))
    }

    fn miscounted(&self, epoch: u64, reason: String) -> Error {
        Error::Count { job: self.job.name.to_string(), epoch, reason }
    }

    /// What else to do about numbers that are too large.
    fn advice(&self) -> &'static str {
        if self.job.precision == Precision::Fp16 {
            return "; fp16 holds magnitudes up to 65504: set precision = \"bf16\" or \"fp32\"";
        }
        let numbers = !self.job.loss.kind().counts_classes();
        match numbers && !self.job.standardize_labels {
            true => "; for labels of large numbers set standardize_labels = true",
            false => "",
        }
    }

    fn unreduced(&self, error: ReduceError) -> Error {
        match error {
            ReduceError::Collective(error) => Error::Collective(error),
            ReduceError::Engine(error) => self.diverged(error),
            ReduceError::Thread(error) => Error::io("start the thread that sums gradients", error),
            ReduceError::Tally => self.miscounted(self.epochs(), format!("step {}: {error}", self.step)),
        }
    }

    /// The error of a shard that begins with row `first` of a batch.
    fn diverged_at(&self, error: EngineError, batch: &FeedBatch, first: usize) -> Error {
        let EngineError::NonFinite { row, value } = error else { return self.diverged(error) };
        let place = self.order.row_name(batch, first + row);
        let reason = format!("the loss of {place} is {value}: {NOT_FINITE}{}", self.advice());
        Error::Diverged { step: self.step, reason }
    }

    fn diverged(&self, error: EngineError) -> Error {
        match error {
            EngineError::NonFinite { .. } | EngineError::State { .. } => {
                let reason = format!("{error}{}", self.advice());
                Error::Diverged { step: self.step, reason }
            }
            other => Error::Engine(other),
        }
    }

    fn not_finite(&self, error: &FixedError) -> Error {
        let param = error.index().and_then(|index| self.engine.layout().name_of(index));
        let advice = self.advice();
        let reason = match param {
            Some(param) => format!("parameter {param}: {error}{advice}"),
            None => format!("{error}{advice}"),
        };
        Error::Diverged { step: self.step, reason }
    }
}

/// Rejects weights that are not finite after `step`.
pub(crate) fn check_weights(layout: &ParamLayout, weights: &[f32], step: u64) -> Result<()> {
    first_not_finite(weights).map_or(Ok(()), |bad| Err(bad_weight(layout, bad, step)))
}

/// The error of a weight that is not finite after `step`, given its place and value.
fn bad_weight(layout: &ParamLayout, (index, value): (usize, f32), step: u64) -> Error {
    let reason = format!(
        "a weight of parameter {} became {value}: training diverged (lower the learning rate, or scale the inputs)",
        layout.name_of(index).unwrap_or_default()
    );
    Error::Diverged { step, reason }
}

/// The losses of evaluations, in order.
fn losses(evaluations: &[Evaluation]) -> impl Iterator<Item = f64> {
    evaluations.iter().map(|evaluation| evaluation.loss)
}

/// A rank's parts in the passes in which it computes them: one for each accumulated batch, or fewer.
fn passes(own: Range<usize>, accumulate_steps: usize) -> Vec<Range<usize>> {
    let size = own.len().div_ceil(accumulate_steps).max(1);
    own.clone().step_by(size).map(|first| first..(first + size).min(own.end)).collect()
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

/// A model of the run as the coordinator stored it when the run began.
fn read_model(view: &View, path: &str) -> Result<ModelProto> {
    let place = format!("{}:/{path}", view.spec());
    let bytes =
        view.read_file(path).map_err(|e| Error::volume(format!("read the run's model {place}"), e))?;
    ModelProto::decode(bytes)
        .map_err(|e| Error::Checkpoint { place, reason: format!("not an ONNX model ({e})") })
}
