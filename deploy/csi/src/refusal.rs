//! Refusals of calls: gRPC codes as the CSI specification gives them, with messages that name the field or the volume.

use std::fmt::Display;

use millrace_datafs::Error;
use millrace_leaf::error_chain;
use tonic::{Code, Status};

/// Longest message of a refusal, in bytes. It travels in a header.
const MESSAGE_BYTES_MAX: usize = 2048;

/// A field of a request with a value that is never right.
pub(crate) fn invalid(field: &str, reason: impl Display) -> Status {
    refused(Code::InvalidArgument, format!("{field}: {reason}"))
}

/// A required field that is empty.
pub(crate) fn missing(field: &str) -> Status {
    invalid(field, "is required")
}

/// Another call for the same volume or target is running.
pub(crate) fn busy(what: &str) -> Status {
    refused(Code::Aborted, format!("another call for {what} is still running: retry"))
}

/// A refusal with a bounded message.
pub(crate) fn refused(code: Code, mut message: String) -> Status {
    if message.len() > MESSAGE_BYTES_MAX {
        let mut end = MESSAGE_BYTES_MAX;
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        message.truncate(end);
    }
    Status::new(code, message)
}

/// The refusal for an error of the volumes.
pub(crate) fn of_volumes(attempt: &str, error: &Error) -> Status {
    let code = match error {
        Error::NotFound { .. } => Code::NotFound,
        Error::Exists { .. } => Code::AlreadyExists,
        Error::InvalidName { .. }
        | Error::NameTooLong { .. }
        | Error::Invalid(_)
        | Error::TooLarge { .. } => Code::InvalidArgument,
        Error::Conflict { .. } | Error::Changed { .. } | Error::Busy { .. } => Code::Aborted,
        Error::NoSpace { .. } | Error::NoSpaceToCommit { .. } => Code::ResourceExhausted,
        Error::WrongKey { .. } | Error::InUse { .. } | Error::ReadOnly { .. } => Code::FailedPrecondition,
        Error::StoreAway { .. } | Error::Metadata { .. } | Error::Stale { .. } | Error::Failed { .. } => {
            Code::Unavailable
        }
        Error::Corrupt { .. } => Code::DataLoss,
        _ => Code::Internal,
    };
    refused(code, format!("cannot {attempt}: {}", error_chain::one_line(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_messages_are_cut_between_characters() {
        let status = refused(Code::Internal, "ä".repeat(MESSAGE_BYTES_MAX));
        assert_eq!(status.message().len(), MESSAGE_BYTES_MAX);
        let status = invalid("name", "x".repeat(3 * MESSAGE_BYTES_MAX));
        assert!(status.message().starts_with("name: x") && status.message().len() == MESSAGE_BYTES_MAX);
    }
}
