//! Exit codes, and those of errors of the home, volumes, topics and the feed.

use std::error::Error as StdError;
use std::io;
use std::sync::Arc;

use millrace_leaf::error_chain;

use crate::error::Error;

/// The exit code of a command; `millrace --help` documents the numbers. Other programs take it as the kind of an
/// error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
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
    pub fn from_code(code: i32) -> Exit {
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

    /// The exit code of an error: that of the first cause that `code_of_cause` gives a more specific code than
    /// [`Exit::Failed`].
    pub fn of(
        error: &(dyn StdError + 'static),
        code_of_cause: impl Fn(&(dyn StdError + 'static)) -> Option<Exit>,
    ) -> Exit {
        let mut codes = error_chain::causes(error).filter_map(code_of_cause);
        codes.find(|exit| *exit != Exit::Failed).unwrap_or(Exit::Failed)
    }

    /// The code of one cause, without those behind it; none for an error of another crate than the home, volumes,
    /// topics and the feed, and of another origin than the operating system.
    pub fn of_cause(cause: &(dyn StdError + 'static)) -> Option<Exit> {
        None.or_else(|| as_type(cause).map(home))
            .or_else(|| as_type(cause).map(datafs))
            .or_else(|| as_type(cause).map(streams))
            .or_else(|| as_type(cause).map(feed))
            .or_else(|| as_type(cause).map(os))
    }
}

/// The error as type `E`, also if it is in a `Box` or `Arc`.
pub fn as_type<'a, E: StdError + 'static>(cause: &'a (dyn StdError + 'static)) -> Option<&'a E> {
    cause
        .downcast_ref::<E>()
        .or_else(|| cause.downcast_ref::<Box<E>>().map(Box::as_ref))
        .or_else(|| cause.downcast_ref::<Arc<E>>().map(Arc::as_ref))
}

fn home(error: &Error) -> Exit {
    match error {
        Error::Usage(_) => Exit::Usage,
        Error::NotFound(_) => Exit::NotFound,
        Error::Conflict(_) => Exit::Conflict,
        Error::Unavailable(_) => Exit::Unavailable,
        Error::Corrupt(_) => Exit::Corrupt,
        Error::Volumes(error) => datafs(error),
        Error::Io { .. } => Exit::Failed,
    }
}

fn datafs(error: &millrace_datafs::Error) -> Exit {
    use millrace_datafs::Error as E;
    match error {
        E::NotFound { .. } | E::Stale { .. } => Exit::NotFound,
        E::Exists { .. }
        | E::NotEmpty { .. }
        | E::Conflict { .. }
        | E::Changed { .. }
        | E::Busy { .. }
        | E::InUse { .. }
        | E::Replaced { .. }
        | E::NewerFormat { .. } => Exit::Conflict,
        E::InvalidName { .. } | E::NameTooLong { .. } | E::Invalid(_) | E::WrongKey { .. } => Exit::Usage,
        E::NoSpace { .. } | E::NoSpaceToCommit { .. } => Exit::NoSpace,
        E::NotWritable { .. } | E::StoreAway { .. } | E::Unsupported(_) => Exit::Unavailable,
        E::Corrupt { .. } => Exit::Corrupt,
        _ => Exit::Failed,
    }
}

fn streams(error: &millrace_streams::Error) -> Exit {
    use millrace_streams::Error as E;
    match error {
        E::Unreachable { .. } | E::NotRunning { .. } | E::Discovery { .. } => Exit::Unavailable,
        E::UnknownTopic { .. }
        | E::UnknownPartition { .. }
        | E::OffsetOutOfRange { .. }
        | E::RecordsRemoved { .. }
        | E::TooFewRecords { .. }
        | E::OpenTransaction { .. }
        | E::NoRecords { .. } => Exit::NotFound,
        E::Config { .. } | E::InvalidTopic { .. } | E::OpenRange { .. } => Exit::Usage,
        E::AddressTaken { .. }
        | E::HeldByAnother { .. }
        | E::NewerFormat { .. }
        | E::RecordsChanged { .. } => Exit::Conflict,
        E::BrokerDisk { .. } => Exit::NoSpace,
        E::Corrupt { .. }
        | E::Damaged { .. }
        | E::DamagedMeta { .. }
        | E::Undecodable { .. }
        | E::BadRecord { .. } => Exit::Corrupt,
        _ => Exit::Failed,
    }
}

fn feed(error: &millrace_streams::feed::FeedError) -> Exit {
    use millrace_streams::feed::FeedError as E;
    match error {
        E::NoFiles { .. } | E::NoRows { .. } | E::NothingSelected { .. } | E::NoColumn { .. } => {
            Exit::NotFound
        }
        E::Corrupt { .. } | E::Row { .. } | E::UnusablePlan { .. } | E::Image { .. } => Exit::Corrupt,
        E::Invalid { .. }
        | E::Filter { .. }
        | E::InvalidSpec { .. }
        | E::InvalidTopicSpec { .. }
        | E::OtherPlan { .. }
        | E::OtherOrder { .. } => Exit::Usage,
        E::SchemaConflict { .. }
        | E::MixedColumns { .. }
        | E::DuplicateColumn { .. }
        | E::MixedFormats { .. }
        | E::SlotsHeld { .. }
        | E::OtherContent { .. }
        | E::Changed { .. } => Exit::Conflict,
        E::Device { .. } => Exit::Unavailable,
        _ => Exit::Failed,
    }
}

fn os(error: &io::Error) -> Exit {
    match error.kind() {
        io::ErrorKind::NotFound => Exit::NotFound,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Exit::Unavailable,
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::NoSpace,
        io::ErrorKind::AddrInUse => Exit::Conflict,
        _ => Exit::Failed,
    }
}
