//! Checkpoints of a replica: in the background while it trains, and before it ends or leaves.

use std::time::Instant;

use super::{Replica, is_usable};
use crate::checkpoint::{Checkpoints, Finish};
use crate::engine::ParamLayout;
use crate::error::Result;
use crate::spent::Spent;
use crate::state::RunState;

impl Replica {
    /// Writes a checkpoint in the background if one is due at this step, or if the last due one is missing. While
    /// another one is being written, it is left out.
    pub(crate) fn checkpoint_when_due(&mut self) -> Result<()> {
        if self.finish().is_some() || !self.writer.is_due(self.step, self.job.checkpoint_every_steps) {
            return Ok(());
        }
        let began = Instant::now();
        let write = self.writing(|checkpoints, state, layout| checkpoints.write(state, layout, None))?;
        let written = self.writer.write(self.step, write);
        let checkpoint_us = began.elapsed().as_micros() as u64;
        self.spent = self.spent.plus(Spent { checkpoint_us, ..Spent::default() });
        written
    }

    /// Looks in the background whether the last due checkpoint was written. The worker that had to may have died.
    pub(crate) fn check_last_due(&mut self) -> Result<()> {
        let Some(due) = self.writer.unknown_due(self.step, self.job.checkpoint_every_steps) else {
            return Ok(());
        };
        let (checkpoints, step) = (self.checkpoints.through(&self.output.view()), self.step);
        self.writer.look(due, move || checkpoints.newest_step(step))
    }

    /// Fails if a checkpoint in the background has failed. Never waits.
    pub(crate) fn poll_writer(&mut self) -> Result<()> {
        self.writer.poll()
    }

    /// Writes a checkpoint; durable when it returns.
    pub(crate) fn checkpoint(&mut self, finish: Option<Finish>) -> Result<()> {
        let write =
            self.writing(move |checkpoints, state, layout| checkpoints.write(state, layout, finish))?;
        self.writer.write(self.step, write)?;
        self.close()
    }

    /// Writes a checkpoint, unless the job would continue from one of this position or of a later one. Durable when
    /// it returns.
    pub(crate) fn checkpoint_if_newest(&mut self) -> Result<()> {
        let write = self.writing_if_newest()?;
        self.writer.write(self.step, write)?;
        self.close()
    }

    /// Like [`Replica::checkpoint_if_newest`], in the background, while too few workers are here.
    pub(crate) fn save_if_newest(&mut self) -> Result<()> {
        let write = self.writing_if_newest()?;
        self.writer.save(self.step, write)
    }

    /// Makes one attempt at [`Replica::checkpoint_if_newest`], in place of those in progress.
    pub(crate) fn save_once(&mut self) -> Result<()> {
        self.abandon();
        let write = self.writing_if_newest()?;
        write()
    }

    /// Makes one attempt to save the state whose next rows did not come in time. The error of the read ends this worker
    /// in any case.
    pub(crate) fn save_unread(&mut self) {
        if self.position() == 0 || self.unread().elapsed().is_zero() {
            return;
        }
        let step = self.step;
        match self.save_once() {
            Ok(()) => tracing::info!(step, "the state is saved, as its next rows are away"),
            Err(error) => {
                let error = error.one_line();
                tracing::warn!(step, error, "the state whose next rows are away was not saved");
            }
        }
    }

    fn writing_if_newest(&self) -> Result<impl Fn() -> Result<()> + Send + 'static> {
        let (job, places, batch_rows) = (self.job.clone(), self.epoch_places, self.order.batch_rows());
        self.writing(move |checkpoints, state, layout| {
            checkpoints.write_if_newest(state, layout, |found| is_usable(&job, places, batch_rows, found))
        })
    }

    /// An attempt to write the present state.
    fn writing(
        &self,
        write: impl Fn(&Checkpoints, &RunState, &ParamLayout) -> Result<()> + Send + 'static,
    ) -> Result<impl Fn() -> Result<()> + Send + 'static> {
        let (output, checkpoints) = (self.output.clone(), self.checkpoints.clone());
        let (state, layout) = (self.state()?, self.engine.layout().clone());
        Ok(move || output.write(|view| write(&checkpoints.through(view), &state, &layout)))
    }

    /// Gives up a checkpoint that the volumes do not take, and waits for one that they take.
    pub(crate) fn abandon(&mut self) {
        if let Err(error) = self.writer.abandon() {
            // A coordinator that was replaced, or an outage.
            tracing::info!(step = self.step, error = error.one_line(), "the last checkpoint was not written");
        }
    }

    /// Waits for the checkpoint that is being written, if any.
    pub(crate) fn close(&mut self) -> Result<()> {
        self.writer.wait()
    }
}
