//! Errors of the package, and their Python exceptions: one class for each exit code of the command.

use std::io;

use millrace_home::Exit;
use millrace_leaf::error_chain;
use pyo3::prelude::*;

/// A result of this crate.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// An error of the package.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Failure {
    #[error(transparent)]
    Home(#[from] millrace_home::Error),
    #[error(transparent)]
    Volume(#[from] millrace_datafs::Error),
    #[error(transparent)]
    Feed(#[from] millrace_streams::feed::FeedError),
    #[error(transparent)]
    Topic(#[from] millrace_streams::Error),
    #[error(transparent)]
    Arrow(#[from] arrow::error::ArrowError),
    #[error("start the threads of the feed")]
    Threads(#[source] io::Error),
    /// An array or tensor of numbers cannot hold a null.
    #[error(
        "column {column:?} has a null in row {row} of step {step}, which an array of numbers cannot hold; fill it \
         when the data is written, leave the column out (columns=[...]), or read format=\"arrow\""
    )]
    Null { column: String, row: usize, step: u64 },
    /// [`Failure::Null`] in an input group.
    #[error(
        "column {column:?} has a null in row {row} of the group, which an array of numbers cannot hold; fill it \
         when the data is written, leave the column out (columns=[...]), or read format=\"arrow\""
    )]
    NullInGroup { column: String, row: usize },
    /// The column has no form as an array or tensor.
    #[error(
        "column {column:?} is {data_type}, which format={format:?} has no form for; leave it out (columns=[...]) or \
         read format=\"arrow\""
    )]
    NoForm { column: String, data_type: String, format: &'static str },
    #[error("{0}")]
    Usage(String),
    /// `millrace.close()` has closed a file that was being written.
    #[error("write {path}: the file was closed before it was complete; open it again")]
    Closed { path: String },
    /// The process was forked while its parent had something open.
    #[error(
        "this process was forked while Millrace was open in its parent: close files that are being written before \
         forking, and let Python fork, or start the process by the method \"spawn\" (the parent warns where a call has \
         kept a volume open)"
    )]
    Inherited,
    #[error("this process is forking: Millrace cannot be used in a fork hook")]
    Forking,
}

impl Failure {
    fn exit(&self) -> Exit {
        match self {
            Failure::Home(error) => Exit::of(error, Exit::of_cause),
            Failure::Volume(error) => Exit::of(error, Exit::of_cause),
            Failure::Feed(error) => Exit::of(error, Exit::of_cause),
            Failure::Topic(error) => Exit::of(error, Exit::of_cause),
            Failure::Arrow(_) | Failure::Threads(_) => Exit::Failed,
            Failure::NoForm { .. } | Failure::Usage(_) => Exit::Usage,
            Failure::Null { .. } | Failure::NullInGroup { .. } | Failure::Closed { .. } => Exit::Conflict,
            Failure::Inherited | Failure::Forking => Exit::Unavailable,
        }
    }

    /// The class of `millrace` that stands for an exit code.
    fn class(&self) -> &'static str {
        match self.exit() {
            Exit::Usage => "UsageError",
            Exit::NotFound => "NotFoundError",
            Exit::Conflict => "ConflictError",
            Exit::Unavailable => "UnavailableError",
            Exit::Corrupt => "CorruptError",
            Exit::NoSpace => "NoSpaceError",
            Exit::Failed | Exit::Repaired | Exit::BeyondLimit => "Error",
        }
    }

    /// The exception, with the text that the command prints.
    pub(crate) fn raise(&self, py: Python<'_>) -> PyErr {
        let text = error_chain::one_line(self);
        let class = py.import("millrace.errors").and_then(|module| module.getattr(self.class()));
        match class.and_then(|class| class.call1((text,))) {
            Ok(exception) => PyErr::from_value(exception),
            Err(error) => error,
        }
    }
}
