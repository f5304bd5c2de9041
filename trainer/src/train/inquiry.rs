//! The question of a worker that finds no coordinator: whether its job still needs workers.
//!
//! The job's lease (`lease.rs`) answers it, with the run that the job file means now:
//!  - the last holder finished that run, and its newest checkpoint also ends the job as its file has it: complete;
//!  - a holder of that run has let its lease expire after it published the model of that checkpoint, since its release
//!    failed or it was killed: complete as well;
//!  - a holder that this worker has waited for failed with that run: its error, as for a standby;
//!  - everything else: a coordinator may come. That is also so when the run is another one, because the job file, its
//!    data or its first model has changed, or when the budget of the job has grown.
//!
//! A look reads one key. Data and model are read only once the lease has expired or says that some run of the job has
//! ended, and once for each such record.
use std::time::{Duration, Instant};

use millrace_datafs::View;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::Setup;
use super::checked::Checked;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::lease::{self, Record, Standing};
use crate::replica::open_output;

/// Longest wait for an answer beside attempts to join; the look goes on meanwhile.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest wait for the last answer, before a worker gives up.
const LAST_PATIENCE: Duration = Duration::from_secs(60);
/// Pause after a look that failed.
const RETRY: Duration = Duration::from_secs(5);

/// The job that a worker is to join: it ends with success if that job is complete.
#[derive(Debug)]
pub struct Awaited {
    /// The job file that the coordinator trains, with the coordinator's overrides.
    pub job: JobFile,
    /// The volumes, brokers and settings with which a coordinator of this machine would train the job.
    pub setup: Setup,
}

/// What the metadata say about an awaited job.
#[derive(Debug)]
pub(crate) enum Answer {
    /// A coordinator leads the job, or may come.
    Open,
    Complete,
    /// The run failed while this worker waited for its coordinator.
    Failed(Error),
}

/// Looks for the end of an awaited job, one at a time and on a blocking thread.
pub(crate) struct Inquiry {
    /// None while a look has it.
    look: Option<Box<Look>>,
    running: Option<JoinHandle<(Box<Look>, Result<Answer>)>>,
    /// When the next look may begin.
    next: Instant,
    has_warned: bool,
}

/// What a look needs, and what it knows from earlier ones.
struct Look {
    awaited: Awaited,
    output: Option<View>,
    /// Whether a coordinator had the lease while this worker waited.
    has_waited: bool,
    /// The record that was judged to leave the job open.
    open: Option<Record>,
    /// The record of a holder, and when this worker has first seen it. Each renewal makes another one.
    held: Option<(Record, Instant)>,
}

impl Inquiry {
    pub(crate) fn new(awaited: Awaited) -> Inquiry {
        let look = Look { awaited, output: None, has_waited: false, open: None, held: None };
        Inquiry { look: Some(Box::new(look)), running: None, next: Instant::now(), has_warned: false }
    }

    /// Asks, and waits for the answer for a few seconds. Without one, because the metadata do not answer or a file
    /// cannot be read, the job counts as open.
    pub(crate) fn ask(&mut self, runtime: &Runtime, leave: &CancellationToken) -> Answer {
        if self.running.is_none() && Instant::now() < self.next {
            return Answer::Open;
        }
        self.wait(runtime, leave, PATIENCE)
    }

    /// [`Inquiry::ask`] before the worker gives up: at once, and with more patience.
    pub(crate) fn ask_finally(&mut self, runtime: &Runtime, leave: &CancellationToken) -> Answer {
        self.wait(runtime, leave, LAST_PATIENCE)
    }

    fn wait(&mut self, runtime: &Runtime, leave: &CancellationToken, patience: Duration) -> Answer {
        let mut running = match (self.running.take(), self.look.take()) {
            (Some(running), _) => running,
            (None, Some(mut look)) => runtime.spawn_blocking(move || {
                let answer = look.answer();
                (look, answer)
            }),
            // A look has panicked.
            (None, None) => return Answer::Open,
        };
        let done = runtime.block_on(async {
            tokio::select! {
                done = &mut running => Some(done),
                () = leave.cancelled() => None,
                () = tokio::time::sleep(patience) => None,
            }
        });
        match done {
            None => {
                self.running = Some(running);
                Answer::Open
            }
            Some(Ok((look, answer))) => {
                let job = look.awaited.job.name.to_string();
                self.look = Some(look);
                answer.unwrap_or_else(|error| self.open_after(&job, &error.one_line()))
            }
            Some(Err(error)) => self.open_after("", &error.to_string()),
        }
    }

    fn open_after(&mut self, job: &str, error: &str) -> Answer {
        self.next = Instant::now() + RETRY;
        if !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(
                job,
                error,
                "cannot find out whether the job is complete; waiting for its coordinator"
            );
        }
        Answer::Open
    }
}

impl Look {
    /// What the metadata say now. Must run on a thread of a runtime that may block.
    fn answer(&mut self) -> Result<Answer> {
        let Awaited { job, setup } = &self.awaited;
        let output = match &self.output {
            Some(output) => output.clone(),
            None => self.output.insert(open_output(&setup.datafs, job)?).clone(),
        };
        let Some(record) = lease::read(&output, job.name.as_str())? else { return Ok(Answer::Open) };
        let ended = match record.standing {
            Standing::Held => {
                self.has_waited = true;
                self.has_expired(&record)
            }
            Standing::Released => false,
            // A coordinator that starts afterwards tries again, as a standby does that has not waited.
            Standing::Failed => self.has_waited,
            Standing::Finished => true,
        };
        if !ended || self.open.as_ref() == Some(&record) {
            return Ok(Answer::Open);
        }
        let answer = self.judge(&record)?;
        if matches!(answer, Answer::Open) {
            self.open = Some(record);
        }
        Ok(answer)
    }

    /// Whether a holder has not renewed its lease for the time of it, as this worker has seen. The holder may still live:
    /// this alone ends nothing.
    fn has_expired(&mut self, record: &Record) -> bool {
        match &self.held {
            Some((held, since)) if held == record => since.elapsed() >= record.lease(),
            _ => {
                self.held = Some((record.clone(), Instant::now()));
                false
            }
        }
    }

    /// Whether the record's run is that of the job, and ends it.
    fn judge(&self, record: &Record) -> Result<Answer> {
        let Awaited { job, setup } = &self.awaited;
        let mut checked = Checked::new(job.clone(), setup.clone())?;
        if self.has_waited {
            // Like a standby: the coordinator's run stays on its rows.
            checked = checked.or_run_of(&record.run, job.clone(), setup.clone())?;
        }
        Ok(match record.standing {
            _ if checked.run != record.run => Answer::Open,
            Standing::Failed => Answer::Failed(record.failure(job.name.as_str())),
            Standing::Finished if checked.is_finished()? => Answer::Complete,
            // No word of the holder says that it has published.
            Standing::Held if checked.is_published()? => Answer::Complete,
            _ => Answer::Open,
        })
    }
}
