//! The background thread that writes a replica's checkpoints, one at a time.
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use millrace_leaf::backoff::Backoff;

use crate::error::{Error, Result};
use crate::outage::{Attempts, Outage};

/// What the thread did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Done {
    /// A checkpoint of this step, or of a later one, is durable.
    Written(u64),
    /// The step of the newest checkpoint that the run has; none if it has none, or if that cannot be read.
    Found(Option<u64>),
}

/// First and longest pause before another attempt at a write that the volumes did not answer.
const PAUSE: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// What a thread is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Work {
    /// A checkpoint, which the volumes have to take within the patience.
    Checkpoint,
    /// The state of this step while too few workers are here. Nothing is computed meanwhile, so attempts go on for as
    /// long as that lasts, and a failure ends no worker: the state stays in memory.
    Save(u64),
    /// A look for the newest checkpoint.
    Look,
}

/// The thread in progress. Without `retries`, it makes no further attempt.
#[derive(Debug)]
struct Running {
    work: Work,
    thread: JoinHandle<Result<Done>>,
    retries: Option<mpsc::Sender<()>>,
}

/// Writes in the background. A step never waits for it.
///
/// A write that the volumes do not answer is tried again, for as long as `patience` allows. Every other failure is
/// definite.
#[derive(Debug)]
pub(super) struct Writer {
    job: String,
    patience: Duration,
    unsaved: Arc<Outage>,
    running: Option<Running>,
    /// The newest step that is known to be durable.
    durable: u64,
    /// The due step whose checkpoint is missing: another worker died before it was written, or a save failed.
    missing: Option<u64>,
    /// Whether a checkpoint that was left out has been reported.
    told: bool,
}

/// What a thread needs to try again.
struct Retries {
    job: String,
    /// None for a write that is tried again until it is given up.
    patience: Option<Duration>,
    unsaved: Arc<Outage>,
    /// Disconnected when the writer gives this write up.
    given_up: mpsc::Receiver<()>,
}

impl Retries {
    /// Writes until the volumes take the checkpoint of `step`, or refuse it.
    fn write(&self, step: u64, write: impl Fn() -> Result<()>) -> Result<()> {
        let mut backoff = Backoff::new(PAUSE, PAUSE_MAX);
        let mut attempts = Attempts::new(&self.unsaved);
        loop {
            let error = match write() {
                Ok(()) => {
                    drop(attempts);
                    if self.unsaved.clear() {
                        tracing::info!(job = self.job, step, "the volumes take checkpoints again");
                    }
                    return Ok(());
                }
                Err(error) if !error.is_outage() => {
                    drop(attempts);
                    self.unsaved.clear();
                    return Err(error);
                }
                Err(error) => error,
            };
            let failing = attempts.failed()?;
            let (seconds, cause) = (self.unsaved.elapsed().as_secs(), error.one_line());
            if self.patience.is_some_and(|patience| failing >= patience) {
                return Err(Error::Outage {
                    reason: format!(
                        "job {}: the volumes took no checkpoint for {seconds} s, up to that of step {step} ({cause}): \
                         start the job again when they answer, and it goes on from the last one",
                        self.job
                    ),
                });
            }
            let limit = match self.patience {
                Some(patience) => format!("for up to {} s", patience.as_secs()),
                None => "while too few workers are here".to_owned(),
            };
            tracing::warn!(
                job = self.job,
                step,
                error = cause,
                "cannot write a checkpoint for {seconds} s; trying again, {limit}"
            );
            if let Err(mpsc::RecvTimeoutError::Disconnected) = self.given_up.recv_timeout(backoff.jittered())
            {
                return Err(error);
            }
        }
    }
}

impl Writer {
    pub(super) fn new(job: String, patience: Duration) -> Writer {
        Writer {
            job,
            patience,
            unsaved: Arc::default(),
            running: None,
            durable: 0,
            missing: None,
            told: false,
        }
    }

    pub(super) fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    pub(super) fn unsaved(&self) -> Arc<Outage> {
        Arc::clone(&self.unsaved)
    }

    fn is_looking(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.work == Work::Look)
    }

    /// Whether a checkpoint has to be written after `step`. Not while another one is being written.
    pub(super) fn is_due(&mut self, step: u64, every: u64) -> bool {
        let is_due = step.is_multiple_of(every);
        let is_looking = self.is_looking();
        if self.running.is_none() || is_looking {
            return is_due || (self.missing.is_some() && !is_looking);
        }
        if is_due && !self.told && self.unsaved.elapsed().is_zero() {
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
        self.begin(Work::Look, move |_| {
            Ok(Done::Found(look().unwrap_or_else(|error| {
                tracing::warn!(error = error.one_line(), "cannot look for the newest checkpoint");
                None
            })))
        })?;
        self.missing = Some(due);
        Ok(())
    }

    /// Begins to write the state after `step` steps, once the write before it has ended. That one makes no further
    /// attempt.
    pub(super) fn write(&mut self, step: u64, write: impl Fn() -> Result<()> + Send + 'static) -> Result<()> {
        self.missing = None;
        self.begin(Work::Checkpoint, move |retries| retries.write(step, write).map(|()| Done::Written(step)))
    }

    /// Like [`Writer::write`], with attempts until [`Writer::resume`].
    pub(super) fn save(&mut self, step: u64, write: impl Fn() -> Result<()> + Send + 'static) -> Result<()> {
        self.missing = None;
        self.begin(Work::Save(step), move |retries| retries.write(step, write).map(|()| Done::Written(step)))
    }

    /// Training goes on: a save in progress makes no further attempt.
    pub(super) fn resume(&mut self) {
        if let Some(running) = &mut self.running
            && matches!(running.work, Work::Save(_))
        {
            running.retries = None;
        }
    }

    fn begin(
        &mut self,
        work: Work,
        run: impl FnOnce(&Retries) -> Result<Done> + Send + 'static,
    ) -> Result<()> {
        let former = self.running.take().map(|running| running.thread);
        let (sender, given_up) = mpsc::channel();
        let retries = Retries {
            job: self.job.clone(),
            patience: match work {
                Work::Save(_) => None,
                Work::Checkpoint | Work::Look => Some(self.patience),
            },
            unsaved: Arc::clone(&self.unsaved),
            given_up,
        };
        let thread = std::thread::Builder::new()
            .name("checkpoint".to_owned())
            .spawn(move || {
                if let Some(Ok(Err(error))) = former.map(JoinHandle::join) {
                    // The newer state makes up for it, or fails as well.
                    tracing::warn!(error = error.one_line(), "a checkpoint was not written");
                }
                run(&retries)
            })
            .map_err(|e| Error::io("start a thread for the checkpoint", e))?;
        self.running = Some(Running { work, thread, retries: Some(sender) });
        Ok(())
    }

    /// Takes note of a write that has ended. Never waits.
    pub(super) fn poll(&mut self) -> Result<()> {
        match &self.running {
            Some(running) if running.thread.is_finished() => self.wait(),
            _ => Ok(()),
        }
    }

    /// Waits for the write in progress, if there is one, with all its attempts.
    pub(super) fn wait(&mut self) -> Result<()> {
        let Some(Running { work, thread, retries }) = self.running.take() else { return Ok(()) };
        let ended = thread.join();
        drop(retries);
        self.conclude(work, ended)
    }

    /// Waits for the attempt in progress, if there is one.
    pub(super) fn abandon(&mut self) -> Result<()> {
        let ended = self.running.take().map(|Running { work, thread, retries }| {
            drop(retries);
            (work, thread.join())
        });
        self.unsaved.clear();
        ended.map_or(Ok(()), |(work, ended)| self.conclude(work, ended))
    }

    fn conclude(&mut self, work: Work, ended: std::thread::Result<Result<Done>>) -> Result<()> {
        match (ended, work) {
            (Ok(Ok(Done::Written(step))), _) => self.durable = self.durable.max(step),
            (Ok(Ok(Done::Found(newest))), _) => {
                self.durable = self.durable.max(newest.unwrap_or_default());
                self.missing = self.missing.filter(|due| *due > self.durable);
            }
            // Another coordinator has taken the job over.
            (Ok(Err(error @ Error::Busy { .. })), _) => return Err(error),
            (Ok(Err(error)), Work::Save(step)) => {
                tracing::warn!(
                    step,
                    error = error.one_line(),
                    "the state was not saved while workers were missing; the next checkpoint makes up for it"
                );
                self.unsaved.clear();
                self.missing = Some(step);
            }
            (Ok(Err(error)), _) => return Err(error),
            (Err(_), _) => {
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Longer than any test.
    const LONG: Duration = Duration::from_secs(3_600);

    fn writer(patience: Duration) -> Writer {
        Writer::new("j".to_owned(), patience)
    }

    fn away() -> Error {
        let source = std::io::Error::from(std::io::ErrorKind::ConnectionRefused);
        let place = "postgres://db".to_owned();
        Error::volume("write a checkpoint", millrace_datafs::Error::Metadata { place, source: source.into() })
    }

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
        let mut writer = writer(LONG);
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
        let mut writer = writer(LONG);
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
            let mut writer = writer(LONG);
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
        let mut writer = writer(LONG);
        let first = held(&mut writer, 10);
        let second = held(&mut writer, 15);
        second.send(Ok(())).unwrap();
        first.send(Err(failed())).unwrap();
        writer.wait().unwrap();
        assert_eq!(writer.durable, 15);
    }

    #[test]
    fn a_write_that_the_volumes_do_not_answer_is_tried_again() {
        let mut writer = writer(LONG);
        let (unsaved, tries) = (writer.unsaved(), Arc::new(AtomicUsize::new(0)));
        let (seen, count) = (Arc::clone(&unsaved), Arc::clone(&tries));
        writer
            .write(10, move || match count.fetch_add(1, Ordering::Relaxed) {
                0 => Err(away()),
                1 => {
                    assert!(!seen.elapsed().is_zero());
                    Err(away())
                }
                _ => Ok(()),
            })
            .unwrap();
        writer.wait().unwrap();
        assert_eq!((tries.load(Ordering::Relaxed), writer.durable), (3, 10));
        assert!(unsaved.elapsed().is_zero());
    }

    #[test]
    fn only_a_refusal_or_a_long_outage_is_an_error() {
        let mut own = writer(LONG);
        held(&mut own, 10).send(Err(failed())).unwrap();
        assert!(matches!(own.wait(), Err(Error::Busy { .. })));
        // As if the time were over.
        let mut own = writer(Duration::ZERO);
        held(&mut own, 10).send(Err(away())).unwrap();
        let error = own.wait().unwrap_err();
        let text = error.one_line();
        assert!(
            text.contains("job j") && text.contains("step 10") && text.contains("start the job again"),
            "{text}"
        );
        assert!(matches!(error, Error::Outage { .. }) && error.is_retryable() && !error.is_local());
    }

    /// As for a worker that waits for others, while the volumes are away for longer than its patience.
    #[test]
    fn a_save_outlasts_an_outage_and_its_failure_ends_no_worker() {
        let mut own = writer(Duration::ZERO);
        let (tried, tries) = mpsc::channel();
        own.save(150, move || {
            tried.send(()).unwrap();
            Err(away())
        })
        .unwrap();
        (0..3).for_each(|_| tries.recv().unwrap());
        assert!(!own.unsaved().elapsed().is_zero());
        // Training goes on.
        own.resume();
        while own.running.is_some() {
            own.poll().unwrap();
            std::thread::yield_now();
        }
        assert!(own.unsaved().elapsed().is_zero());
        assert!(own.is_due(151, 1_000), "the next checkpoint makes up for it");
        held(&mut own, 151).send(Ok(())).unwrap();
        own.wait().unwrap();
        assert_eq!((own.durable, own.is_due(152, 1_000)), (151, false));
        // A full disk then, which has space now.
        own.save(160, || {
            let full = millrace_datafs::Error::NoSpace { place: "/home".into(), quota: false };
            Err(Error::volume("write a checkpoint", full))
        })
        .unwrap();
        own.wait().unwrap();
        assert!(own.is_due(161, 1_000));
        // Only a coordinator that was replaced is an error.
        own.save(170, || Err(failed())).unwrap();
        assert!(matches!(own.wait(), Err(Error::Busy { .. })));
    }

    #[test]
    fn a_newer_write_and_the_end_take_the_place_of_further_attempts() {
        let mut writer = writer(LONG);
        writer.write(10, || Err(away())).unwrap();
        held(&mut writer, 15).send(Ok(())).unwrap();
        writer.wait().unwrap();
        assert_eq!((writer.durable, writer.unsaved().elapsed()), (15, Duration::ZERO));
        writer.write(20, || Err(away())).unwrap();
        assert!(writer.abandon().unwrap_err().is_outage());
        assert_eq!((writer.durable, writer.unsaved().elapsed()), (15, Duration::ZERO));
    }
}
