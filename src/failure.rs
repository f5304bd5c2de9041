//! Exit codes for scripts, and errors that carry one.

use std::fmt;

/// The exit code of the process; `millrace --help` documents the numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    /// An error without a more specific code.
    Failed = 1,
    /// Wrong flags or configuration.
    Usage = 2,
    /// A volume, snapshot, topic, model or file does not exist.
    NotFound = 3,
    /// Held by another process, in use, of a newer format, or already existing.
    Conflict = 4,
    /// A prerequisite is missing: a library, a permission, a server.
    Unavailable = 5,
    /// Data does not match its checksum or its format.
    Corrupt = 6,
    /// No space left.
    NoSpace = 7,
    /// Damage was found, and all of it was repaired.
    Repaired = 8,
    /// A result exceeds a limit of the command, so nothing was written.
    BeyondLimit = 9,
}

impl Exit {
    /// The exit code of another `millrace` process.
    pub(crate) fn from_code(code: i32) -> Exit {
        match code {
            2 => Exit::Usage,
            3 => Exit::NotFound,
            4 => Exit::Conflict,
            5 => Exit::Unavailable,
            6 => Exit::Corrupt,
            7 => Exit::NoSpace,
            8 => Exit::Repaired,
            9 => Exit::BeyondLimit,
            _ => Exit::Failed,
        }
    }
}

/// An error with its exit code.
#[derive(Debug)]
pub(crate) struct Failure {
    exit: Exit,
    message: String,
}

impl Failure {
    /// The exit code.
    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// A signal ended the work early; the work itself did not fail.
#[derive(Debug)]
pub(crate) struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

/// Makes an error with an exit code.
pub(crate) fn failure(exit: Exit, message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Failure { exit, message: message.into() })
}

/// Returns an error with an exit code.
pub(crate) fn fail<T>(exit: Exit, message: impl Into<String>) -> anyhow::Result<T> {
    Err(failure(exit, message))
}
