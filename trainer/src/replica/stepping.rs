//! A step: rows of the feed, their gradients, the sum over the ring, and the update.

use std::ops::Range;
use std::time::{Duration, Instant};

use millrace_streams::feed::FeedBatch;

use super::Replica;
use super::reduce::{ReduceError, Reduced};
use crate::collective::Ring;
use crate::data::{Rows, rank_shards, shard_slots};
use crate::engine::{ChannelMoments, ShardKey};
use crate::error::{Error, Result};
use crate::ledger::{EpochError, Tally};
use crate::order::{Order, StepPlaces};
use crate::precision::LossScale;
use crate::reader::{Interrupt, Wishes};
use crate::source;
use crate::spent::Spent;

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

impl Replica {
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
}

/// A rank's parts in the passes in which it computes them: one for each accumulated batch, or fewer.
fn passes(own: Range<usize>, accumulate_steps: usize) -> Vec<Range<usize>> {
    let size = own.len().div_ceil(accumulate_steps).max(1);
    own.clone().step_by(size).map(|first| first..(first + size).min(own.end)).collect()
}
