//! The crate's error type: a variant tells the caller what to do next.
use std::path::PathBuf;

use millrace_leaf::error_chain;
use millrace_streams::feed::FeedError;

/// The source of an error that came from another crate.
pub(crate) type Source = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error between a job file and a published bundle.
///
/// `Display` is one line that names the item, its location and the remedy; causes are in
/// [`std::error::Error::source`] and are not repeated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The job file is invalid: fix the named key.
    #[error("job file {path}: {reason}", path = path.display())]
    JobFile {
        /// The file.
        path: PathBuf,
        /// The problem, with the key and the remedy.
        reason: String,
    },
    /// The job is well-formed but does not match its data, its model or its volumes.
    #[error("job {job}: {reason}")]
    Job {
        /// The job's name.
        job: String,
        /// The mismatch and the remedy.
        reason: String,
    },
    /// The model cannot be loaded or does not match its loss or its batch; see the engine's error.
    #[error(transparent)]
    Engine(#[from] crate::engine::EngineError),
    /// The optimizer's settings or its state cannot be used.
    #[error(transparent)]
    Optim(#[from] crate::optim::OptimError),
    /// A gradient or a loss does not fit the exact sum.
    #[error(transparent)]
    Fixed(#[from] crate::fixed::FixedError),
    /// The data does not have the columns, types or widths the model needs.
    #[error("dataset {dataset}: {reason}")]
    Data {
        /// The dataset, `volume@snapshot:/path`.
        dataset: String,
        /// The problem, with the column and, if known, the row.
        reason: String,
    },
    /// The data has no column of this name: name one of those that it has.
    #[error("dataset {dataset}: no column {column:?}; it has {available}")]
    NoColumn {
        /// The dataset, `volume@snapshot:/path`.
        dataset: String,
        /// The name.
        column: String,
        /// The names that exist, comma separated.
        available: String,
    },
    /// Training diverged: lower the learning rate or check the data.
    #[error("step {step}: {reason}")]
    Diverged {
        /// The step, counted from 0.
        step: u64,
        /// The value that is not finite or out of range, and the remedy.
        reason: String,
    },
    /// A collective operation did not complete; the ring must be formed again.
    #[error(transparent)]
    Collective(#[from] crate::collective::Error),
    /// The worker lost its coordinator and must exit.
    #[error("coordinator {address}: {reason}")]
    CoordinatorLost {
        /// The coordinator's address.
        address: String,
        /// The cause.
        reason: String,
    },
    /// All workers are gone and the respawn limit is reached.
    #[error("job {job}: no worker left after {respawns} respawns; the last one {reason}")]
    WorkersLost {
        /// The job's name.
        job: String,
        /// How many respawns were spent.
        respawns: u32,
        /// How the last worker ended.
        reason: String,
        /// The exit code that it reported; 1 if it reported none.
        exit_code: u8,
    },
    /// A worker met an error that every other worker would meet, too.
    #[error("{message}")]
    Worker {
        /// The worker's own one-line message.
        message: String,
        /// The exit code that the function passed to [`crate::worker::run`] gives for its error.
        exit_code: u8,
    },
    /// The volumes took no checkpoint, or gave no rows, for too long or until the job had to stop: start the job again
    /// once they answer.
    #[error("{reason}")]
    Outage {
        /// The job, the step, the time, the cause and the remedy.
        reason: String,
    },
    /// A worker process could not be started.
    #[error("start worker {program}: {reason}")]
    Launch {
        /// The program.
        program: String,
        /// The cause.
        reason: String,
    },
    /// The script of a job cannot be run on this machine: fix the file.
    #[error("script {script}: {reason}")]
    Script {
        /// The script as it was named.
        script: String,
        /// The problem and the remedy.
        reason: String,
    },
    /// A process of a script job failed, and no restart was left.
    #[error("{reason}")]
    ScriptFailed {
        /// The job, the process that failed first, its machine and its end.
        reason: String,
    },
    /// Too few machines joined a script job in time.
    #[error("{reason}")]
    NodesMissing {
        /// The job, the time, the machines that are there, those that are gone, and the remedy.
        reason: String,
    },
    /// A file or an address that a coordinator or a worker needs cannot be used: fix it.
    #[error("{what}: {reason}")]
    Access {
        /// The operation and the file or the address.
        what: String,
        /// The problem and the remedy.
        reason: String,
    },
    /// The coordinator and this worker do not fit together, or the coordinator refused it.
    #[error("join {coordinator}: {reason}")]
    Join {
        /// The coordinator's address.
        coordinator: String,
        /// The cause and the remedy.
        reason: String,
    },
    /// Another process runs the same job, or publishes versions of the same model.
    #[error("job {job}: {reason}")]
    Busy {
        /// The job's name.
        job: String,
        /// The holder, if known, and the remedy.
        reason: String,
    },
    /// The job was cancelled while its data and its model were checked.
    #[error("job {job}: stopped before it began; nothing has changed, run it again")]
    Stopped {
        /// The job's name.
        job: String,
    },
    /// This process lost the job's lease to another coordinator, or the lease cannot be read.
    #[error("lease of job {job}: {reason}")]
    Lease {
        /// The job's name.
        job: String,
        /// The cause, the new coordinator if known, and the remedy.
        reason: String,
    },
    /// A checkpoint cannot be read: delete it to start over.
    #[error("checkpoint {place}: {reason}")]
    Checkpoint {
        /// `volume:/path` of the checkpoint.
        place: String,
        /// The problem.
        reason: String,
    },
    /// Rows were lost or delivered twice: a defect, reported instead of a wrong count.
    #[error("epoch {epoch} of job {job}: {reason}")]
    Count {
        /// The job's name.
        job: String,
        /// The data epoch, counted from 0.
        epoch: u64,
        /// The counts that differ.
        reason: String,
    },
    /// A volume operation failed.
    #[error("{what}")]
    Volume {
        /// The operation and the location.
        what: String,
        /// The cause.
        #[source]
        source: Source,
    },
    /// The feed failed.
    #[error("{what}")]
    Feed {
        /// The operation and the location.
        what: String,
        /// The cause.
        #[source]
        source: Source,
    },
    /// The bundle could not be made.
    #[error("{what}")]
    Bundle {
        /// The operation.
        what: String,
        /// The cause.
        #[source]
        source: Source,
    },
    /// An operating system call failed.
    #[error("{what}")]
    Io {
        /// The operation and the location.
        what: String,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
}

impl Error {
    /// Whether a retry (a new ring, or the job started again) can succeed without a change of the job, its
    /// data or its model.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Collective(error) => error.is_retryable(),
            Error::CoordinatorLost { .. }
            | Error::WorkersLost { .. }
            | Error::Outage { .. }
            | Error::Busy { .. }
            | Error::Lease { .. }
            | Error::Io { .. } => true,
            _ => false,
        }
    }

    /// Whether another process may succeed in place of this one: the operating system, the device or this
    /// process's access to a volume failed. Errors caused by the data, the job or a full disk would hit every
    /// other worker, too.
    pub(crate) fn is_local(&self) -> bool {
        use millrace_datafs::Error as E;
        let source = match self {
            Error::Io { .. }
            | Error::Launch { .. }
            | Error::Collective(_)
            | Error::Engine(crate::engine::EngineError::Execution { .. }) => return true,
            Error::Volume { source, .. } | Error::Feed { source, .. } => source,
            _ => return false,
        };
        if self.is_of_brokers() {
            return true;
        }
        for inner in error_chain::causes(source.as_ref()) {
            if let Some(error) = inner.downcast_ref::<E>() {
                return match error {
                    E::Io { .. }
                    | E::Metadata { .. }
                    | E::Failed { .. }
                    | E::Busy { .. }
                    | E::StoreAway { .. }
                    | E::NotWritable { .. }
                    | E::Stale { .. } => true,
                    // A missing or damaged object affects every worker.
                    E::Object(source) => error.is_store_trouble() || has_io(source.as_ref()),
                    _ => false,
                };
            }
            if inner.is::<std::io::Error>() {
                return true;
            }
        }
        false
    }

    /// Whether the metadata or the store of the volumes, or the brokers of a topic, did not answer: the same call may succeed
    /// later.
    ///
    /// A read that the operating system refuses is none: a worker that starts anew may succeed at once.
    pub(crate) fn is_outage(&self) -> bool {
        use millrace_datafs::Error as E;
        match self {
            Error::Volume { .. } => self.is_local() && !self.is_of_process(),
            Error::Feed { .. } if self.is_of_brokers() => true,
            Error::Feed { .. } => self.of_datafs().next().is_some_and(|cause| {
                matches!(cause, E::Metadata { .. } | E::Busy { .. }) || cause.is_store_trouble()
            }),
            _ => false,
        }
    }

    /// Whether brokers did not give the records of a topic: they do not answer, or the leader of a partition changes.
    pub(crate) fn is_of_brokers(&self) -> bool {
        let mut errors = error_chain::causes(self).filter_map(|cause| cause.downcast_ref::<FeedError>());
        errors.any(|error| matches!(error, FeedError::Topic { source, .. } if source.is_retryable()))
    }

    /// Whether this process may not open files: waiting does not help it, and another process may do better.
    fn is_of_process(&self) -> bool {
        error_chain::causes(self).any(|cause| {
            let refused = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
            let not_writable =
                matches!(cause.downcast_ref(), Some(millrace_datafs::Error::NotWritable { .. }));
            not_writable || refused == Some(libc::EMFILE)
        })
    }

    /// Whether this process has to open its volumes again: others have declared it dead, or one of its commits failed
    /// for good.
    pub(crate) fn is_declared_dead(&self) -> bool {
        use millrace_datafs::Error as E;
        self.of_datafs().any(|cause| matches!(cause, E::Stale { .. } | E::Failed { .. }))
    }

    /// The errors of the volumes among the causes.
    pub(crate) fn of_datafs(&self) -> impl Iterator<Item = &millrace_datafs::Error> {
        error_chain::causes(self).filter_map(|cause| cause.downcast_ref())
    }

    /// The message with all its causes, on one line.
    pub fn one_line(&self) -> String {
        error_chain::one_line(self)
    }

    pub(crate) fn volume(what: impl Into<String>, source: impl Into<Source>) -> Error {
        Error::Volume { what: what.into(), source: source.into() }
    }

    pub(crate) fn feed(what: impl Into<String>, source: impl Into<Source>) -> Error {
        Error::Feed { what: what.into(), source: source.into() }
    }

    pub(crate) fn io(what: impl Into<String>, source: std::io::Error) -> Error {
        Error::Io { what: what.into(), source }
    }
}

/// Whether an operating system error is among the causes.
fn has_io(error: &(dyn std::error::Error + 'static)) -> bool {
    error_chain::causes(error).any(|cause| cause.is::<std::io::Error>())
}
