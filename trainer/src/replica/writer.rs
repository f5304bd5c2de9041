//! The background thread that writes a replica's checkpoints, one at a time.
use std::thread::JoinHandle;

use crate::error::{Error, Result};

/// What the thread did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// A checkpoint of this step, or of a later one, is durable.
    Written(u64),
    /// The step of the newest checkpoint that the run has; none if it has none, or if that cannot be read.
    Found(Option<u64>),
}

/// Writes in the background. A step never waits for it.
#[derive(Debug, Default)]
pub(super) struct Writer {
    running: Option<JoinHandle<Result<Done>>>,
    /// The newest step that is known to be durable.
    durable: u64,
    /// The due step whose checkpoint is missing, as another worker died before it was written.
    missing: Option<u64>,
    /// Whether the thread only looks for the newest checkpoint.
    is_looking: bool,
    /// Whether a checkpoint that was left out has been reported.
    told: bool,
}

impl Writer {
    /// Whether a checkpoint has to be written after `step`. Not while another one is being written.
    pub(super) fn is_due(&mut self, step: u64, every: u64) -> bool {
        let is_due = step.is_multiple_of(every);
        if self.running.is_none() || self.is_looking {
            return is_due || (self.missing.is_some() && !self.is_looking);
        }
        if is_due && !self.told {
            self.told = true;
            tracing::warn!(
                step,
                "a checkpoint is due while the one before it is still being written: it is left out, as later ones \
                 will be; raise checkpoint_every_steps"
            );
        }
        false
    }

    /// The last due step up to `step`, unless its checkpoint is known to be durable or is being written.
    pub(super) fn unknown_due(&self, step: u64, every: u64) -> Option<u64> {
        let due = step - step % every;
        (due > self.durable && self.running.is_none()).then_some(due)
    }

    /// Looks in the background whether the run has a checkpoint of the step `due` or of a later one.
    pub(super) fn look(
        &mut self,
        due: u64,
        look: impl FnOnce() -> Result<Option<u64>> + Send + 'static,
    ) -> Result<()> {
        self.begin(move || {
            Ok(Done::Found(look().unwrap_or_else(|error| {
                tracing::warn!(error = error.one_line(), "cannot look for the newest checkpoint");
                None
            })))
        })?;
        (self.missing, self.is_looking) = (Some(due), true);
        Ok(())
    }

    /// Begins to write the state after `step` steps, once the write before it has ended.
    pub(super) fn write(
        &mut self,
        step: u64,
        write: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        (self.missing, self.is_looking) = (None, false);
        self.begin(move || write().map(|()| Done::Written(step)))
    }

    fn begin(&mut self, work: impl FnOnce() -> Result<Done> + Send + 'static) -> Result<()> {
        let former = self.running.take();
        let running = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || {
                if let Some(Ok(Err(error))) = former.map(JoinHandle::join) {
                    // The newer state makes up for it, or fails as well.
                    tracing::warn!(error = error.one_line(), "a checkpoint was not written");
                }
                work()
            })
            .map_err(|e| Error::io("start a thread for the checkpoint", e))?;
        self.running = Some(running);
        Ok(())
    }

    /// Takes note of a write that has ended. Never waits.
    pub(super) fn poll(&mut self) -> Result<()> {
        match &self.running {
            Some(running) if running.is_finished() => self.wait(),
            _ => Ok(()),
        }
    }

    /// Waits for the write in progress, if there is one.
    pub(super) fn wait(&mut self) -> Result<()> {
        let Some(running) = self.running.take() else { return Ok(()) };
        self.is_looking = false;
        match running.join() {
            Ok(Ok(Done::Written(step))) => self.durable = self.durable.max(step),
            Ok(Ok(Done::Found(newest))) => {
                self.durable = self.durable.max(newest.unwrap_or_default());
                self.missing = self.missing.filter(|due| *due > self.durable);
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                return Err(Error::Checkpoint {
                    place: "state of this worker".to_owned(),
                    reason: "writing it panicked".to_owned(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn failed() -> Error {
        Error::Busy { job: "j".to_owned(), reason: "another coordinator has taken it over".to_owned() }
    }

    /// A write that ends when the test lets it.
    fn held(writer: &mut Writer, step: u64) -> mpsc::Sender<Result<()>> {
        let (release, ended) = mpsc::channel();
        writer.write(step, move || ended.recv().unwrap()).unwrap();
        release
    }

    #[test]
    fn a_due_checkpoint_is_left_out_while_another_one_is_written() {
        let mut writer = Writer::default();
        assert!(writer.is_due(10, 10) && !writer.is_due(11, 10));
        let release = held(&mut writer, 10);
        assert!(!writer.is_due(20, 10) && !writer.is_due(21, 10));
        writer.poll().unwrap();
        assert!(writer.running.is_some(), "a step does not wait");
        release.send(Ok(())).unwrap();
        writer.wait().unwrap();
        assert!(!writer.is_due(21, 10) && writer.is_due(30, 10));
        assert_eq!(writer.durable, 10);
    }

    #[test]
    fn a_failed_write_is_reported_by_the_next_poll_after_its_end() {
        let mut writer = Writer::default();
        held(&mut writer, 10).send(Err(failed())).unwrap();
        let error = loop {
            match writer.poll() {
                Ok(()) => std::thread::yield_now(),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, Error::Busy { .. }), "{error}");
        assert_eq!((writer.durable, writer.poll().is_ok()), (0, true));
    }

    #[test]
    fn a_due_checkpoint_that_its_lead_did_not_write_is_written_by_the_next_lead() {
        for (newest, is_missing) in
            [(Ok(None), true), (Ok(Some(100)), true), (Ok(Some(200)), false), (Err(failed()), true)]
        {
            let mut writer = Writer::default();
            assert_eq!((writer.unknown_due(99, 100), writer.unknown_due(203, 100)), (None, Some(200)));
            let (release, looked) = mpsc::channel();
            writer.look(200, move || looked.recv().unwrap()).unwrap();
            assert_eq!(writer.unknown_due(203, 100), None);
            assert!(!writer.is_due(203, 100) && writer.is_due(300, 100), "a look delays no checkpoint");
            release.send(newest).unwrap();
            writer.wait().unwrap();
            assert_eq!(writer.is_due(203, 100), is_missing);
            held(&mut writer, 203).send(Ok(())).unwrap();
            writer.wait().unwrap();
            assert_eq!((writer.is_due(204, 100), writer.unknown_due(204, 100)), (false, None));
        }
    }

    #[test]
    fn a_newer_state_is_written_after_the_write_in_progress() {
        let mut writer = Writer::default();
        let first = held(&mut writer, 10);
        let second = held(&mut writer, 15);
        second.send(Ok(())).unwrap();
        first.send(Err(failed())).unwrap();
        writer.wait().unwrap();
        assert_eq!(writer.durable, 15);
    }
}
