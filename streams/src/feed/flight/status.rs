//! gRPC status of each error of the feed.

use millrace_leaf::error_chain;
use tonic::{Code, Status};

use super::metrics::REFUSED;
use crate::feed::error::FeedError;

/// Longest text of a status. It travels in a header, of which clients take 8 KiB, and is escaped there.
const TEXT_BYTES_MAX: usize = 2_000;

/// The status of an error. Its text has the causes, too.
pub(super) fn status(error: &FeedError) -> Status {
    let mut text = error_chain::one_line(error);
    if text.len() > TEXT_BYTES_MAX {
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        text.push('…');
    }
    Status::new(code(error), text)
}

/// Refuses a call because a limit is reached.
pub(super) fn exhausted(reason: &str, text: String) -> Status {
    REFUSED.with_label_values(&[reason]).inc();
    Status::resource_exhausted(text)
}

fn code(error: &FeedError) -> Code {
    match error {
        FeedError::NoFiles { .. }
        | FeedError::NoRows { .. }
        | FeedError::NothingSelected { .. }
        | FeedError::NoColumn { .. } => Code::NotFound,
        FeedError::MixedFormats { .. }
        | FeedError::Filter { .. }
        | FeedError::TooLarge { .. }
        | FeedError::SchemaConflict { .. }
        | FeedError::Invalid { .. }
        | FeedError::DuplicateColumn { .. }
        | FeedError::InvalidSpec { .. }
        | FeedError::InvalidTopicSpec { .. }
        | FeedError::MixedColumns { .. } => Code::InvalidArgument,
        FeedError::OtherPlan { .. }
        | FeedError::OtherOrder { .. }
        | FeedError::OtherContent { .. }
        | FeedError::Changed { .. } => Code::FailedPrecondition,
        FeedError::Topic { .. } if error.is_retryable() => Code::Unavailable,
        FeedError::Topic { .. } => Code::FailedPrecondition,
        FeedError::Corrupt { .. }
        | FeedError::Row { .. }
        | FeedError::Image { .. }
        | FeedError::Oversized { .. }
        | FeedError::Unsupported { .. } => Code::DataLoss,
        FeedError::Store { source, .. } => match &**source {
            object_store::Error::PermissionDenied { .. } => Code::PermissionDenied,
            object_store::Error::NotFound { .. } => Code::NotFound,
            _ if error.is_retryable() => Code::Unavailable,
            _ => Code::Internal,
        },
        FeedError::Volume { source, .. } => match &**source {
            millrace_datafs::Error::NotFound { .. } => Code::NotFound,
            millrace_datafs::Error::StoreAway { .. } | millrace_datafs::Error::Busy { .. } => {
                Code::Unavailable
            }
            millrace_datafs::Error::Corrupt { .. } => Code::DataLoss,
            _ => Code::Internal,
        },
        FeedError::Stopped { .. } => Code::Unavailable,
        // A service stages nothing.
        FeedError::Assemble { .. }
        | FeedError::UnusablePlan { .. }
        | FeedError::Device { .. }
        | FeedError::SlotsHeld { .. } => Code::Internal,
    }
}
