//! Errors of this crate, distinguished by what the caller does next.

use std::io;
use std::path::PathBuf;

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. The mount translates each variant to one errno.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such volume, snapshot, file, directory or node (ENOENT).
    #[error("{what} does not exist{hint}")]
    NotFound {
        /// What was looked for, with its kind: "volume digits", "train/part-0.parquet".
        what: String,
        /// Empty, or where it was looked for and what exists there, with what separates it from the message.
        hint: String,
    },
    /// The inode has no such extended attribute (ENODATA).
    #[error("extended attribute {name} does not exist")]
    NoAttribute {
        /// Its name.
        name: String,
    },
    /// An entry of that name exists already (EEXIST).
    #[error("{what} exists already")]
    Exists {
        /// The existing entry, with its kind.
        what: String,
    },
    /// A directory was needed (ENOTDIR).
    #[error("{what} is not a directory")]
    NotADirectory {
        /// What is not a directory.
        what: String,
    },
    /// The operation does not apply to a directory (EISDIR).
    #[error("{what} is a directory")]
    IsADirectory {
        /// The directory.
        what: String,
    },
    /// The directory still has entries (ENOTEMPTY).
    #[error("directory {what} is not empty")]
    NotEmpty {
        /// The directory.
        what: String,
    },
    /// Snapshots, and the `.snapshots` directory, cannot be changed (EROFS).
    #[error("{what} is read-only")]
    ReadOnly {
        /// The target of the change.
        what: String,
    },
    /// The operation is not permitted on this kind of target (EPERM), for example a hard link to a directory.
    #[error("{operation} is not permitted on {what}")]
    NotPermitted {
        /// The operation.
        operation: &'static str,
        /// Its object.
        what: String,
    },
    /// A handle is used against the mode it was opened in (EBADF).
    #[error("the file handle is not open for {0}")]
    BadHandle(&'static str),
    /// A name that no volume, snapshot, file or key can have (EINVAL).
    #[error("invalid name {name:?}: {reason}")]
    InvalidName {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A file name over 255 bytes, a path or link target over 4095 bytes (ENAMETOOLONG).
    #[error("the name has {bytes} bytes, at most {bytes_max} are allowed")]
    NameTooLong {
        /// Its length.
        bytes: usize,
        /// The limit.
        bytes_max: usize,
    },
    /// An argument is out of its range (EINVAL), for example moving a directory into itself.
    #[error("invalid argument: {0}")]
    Invalid(String),
    /// Resolving the path followed too many symbolic links (ELOOP).
    #[error("too many symbolic links in {what}")]
    Loop {
        /// The path.
        what: String,
    },
    /// Too many hard links to one inode (EMLINK).
    #[error("{what} has too many links")]
    TooManyLinks {
        /// The inode.
        what: String,
    },
    /// A size or count is over its limit (EFBIG).
    #[error("{what} is too large: at most {max}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// The limit, in the unit of `what`.
        max: u64,
    },
    /// The disk under the metadata or the objects is full (ENOSPC), or the writing user's quota is used up
    /// (EDQUOT). The operation left nothing half-written.
    #[error("{} at {place}: free some space and retry", no_space_words(*.quota))]
    NoSpace {
        /// The full place.
        place: String,
        /// True when the quota is used up, not the disk.
        quota: bool,
    },
    /// The operation is in memory but cannot be committed: the disk under the metadata is full (ENOSPC), or
    /// the quota is used up (EDQUOT). It is committed once there is space, unless the process ends first.
    #[error(
        "{} at {place}, so that what was done is not on disk yet: free some space and retry",
        no_space_words(*.quota)
    )]
    NoSpaceToCommit {
        /// The full place.
        place: String,
        /// True when the quota is used up, not the disk.
        quota: bool,
    },
    /// An application key no longer has the value that the publish expected (EAGAIN): another writer
    /// published first. Read it again and decide.
    #[error("key {key:?} was changed by another writer")]
    Conflict {
        /// The key.
        key: String,
    },
    /// A file is no longer as the publish expected (EAGAIN): another writer changed or removed it first. Look
    /// at it again and decide.
    #[error("{what} was changed by another writer")]
    Changed {
        /// The path.
        what: String,
    },
    /// The metadata stayed locked by other processes for longer than the limit (EBUSY). Retry.
    #[error("the metadata at {place} stayed locked by another process for {waited_ms} ms")]
    Busy {
        /// The metadata file.
        place: String,
        /// How long this call waited.
        waited_ms: u64,
    },
    /// Other processes have the volumes open (EBUSY), and the operation needs exclusive access.
    #[error(
        "the volumes at {place} are open in another process: end its mounts, services and commands, then retry \
         (with PostgreSQL, a process counts until session_lease_ms after its end)"
    )]
    InUse {
        /// The metadata file or server.
        place: String,
    },
    /// The target of the handle, view or staged file is gone (ESTALE): the snapshot or volume was deleted, or
    /// another process declared this one dead. Open it again.
    #[error("{what} is gone")]
    Stale {
        /// What is gone.
        what: String,
    },
    /// A file that this process has open was replaced by another one (EIO), such as an older copy. This
    /// process no longer reads or writes through the old one.
    #[error("{what} was replaced by another file: end this process and start it again")]
    Replaced {
        /// What was replaced.
        what: String,
    },
    /// The data on disk was written by a newer Millrace (EIO).
    #[error(
        "{place} has format version {found}, this build reads up to {supported}: use a newer millrace or another --home"
    )]
    NewerFormat {
        /// The metadata file.
        place: String,
        /// The version found.
        found: u32,
        /// The newest version that this build knows.
        supported: u32,
    },
    /// The home folder cannot be written (EACCES).
    #[error("cannot write to {}: check its owner and permissions or choose another --home", place.display())]
    NotWritable {
        /// The folder or file.
        place: PathBuf,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// The operation is not supported (EOPNOTSUPP).
    #[error("{0} is not supported")]
    Unsupported(&'static str),
    /// Stored bytes differ from what was written (EIO).
    #[error("{what} is damaged: {reason}")]
    Corrupt {
        /// What is damaged.
        what: String,
        /// The failed check.
        reason: String,
    },
    /// The data is encrypted with a key that this process lacks, or for which it has another key of the same
    /// name (EACCES).
    #[error("{what} is encrypted with the key {key:?}, {reason}")]
    WrongKey {
        /// The volume or object.
        what: String,
        /// The key's name.
        key: String,
        /// Whether the key is missing or another one.
        reason: &'static str,
    },
    /// The object store did not respond for `store_timeout_ms` (EIO). Repeat the call once it is reachable;
    /// written but uncommitted data is kept.
    #[error(
        "the object store at {place} could not {operation} for {tried_ms} ms: see that it can be reached, then retry"
    )]
    StoreAway {
        /// The store.
        place: String,
        /// The operation in words.
        operation: &'static str,
        /// How long the operation was retried, in milliseconds.
        tried_ms: u64,
        /// The error of the last try.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The object store failed (EIO).
    #[error("file data")]
    Object(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The metadata engine failed (EIO). If a commit failed, its outcome is unknown.
    #[error("metadata at {place}")]
    Metadata {
        /// The metadata file.
        place: String,
        /// What the engine said.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// An earlier commit of this process failed permanently (EIO). Operations that were answered but not
    /// synced are lost, so this datafs refuses to continue. Open it again.
    #[error("metadata at {place}: a commit failed ({cause}), what was not synced is lost: open it again")]
    Failed {
        /// The metadata file.
        place: String,
        /// The error of that commit.
        cause: String,
    },
    /// The process that served a mount died before it had committed what was written to this file (EIO).
    /// Everything that was synced is there.
    #[error("writes to {what} were lost when the process that served the mount died: write the file again")]
    LostWrites {
        /// The file.
        what: String,
    },
    /// The operating system failed (EIO).
    #[error("{operation} {}", path.display())]
    Io {
        /// The operation in words.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
}

impl Error {
    /// Whether repeating the same call may succeed.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::StoreAway { .. })
    }

    /// Whether the error is [`Error::NotFound`].
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::NotFound { .. })
    }

    /// Whether the operation certainly changed nothing. A commit with an unknown outcome is not definite.
    pub(crate) fn is_definite(&self) -> bool {
        // A commit that waits for the store or for disk space continues in the background.
        !matches!(
            self,
            Self::Metadata { .. }
                | Self::Failed { .. }
                | Self::Io { .. }
                | Self::StoreAway { .. }
                | Self::NoSpaceToCommit { .. }
        )
    }

    pub(crate) fn not_found(what: impl Into<String>) -> Self {
        Self::NotFound { what: what.into(), hint: String::new() }
    }

    /// [`Error::NotFound`] with a hint, which is appended to the message.
    pub(crate) fn not_found_hinted(what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::NotFound { what: what.into(), hint: hint.into() }
    }

    pub(crate) fn corrupt(what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Corrupt { what: what.into(), reason: reason.into() }
    }

    /// The error for a missing key, or for another key of the same name.
    pub(crate) fn wrong_key(what: String, key: &str, missing: bool) -> Self {
        let reason = match missing {
            true => "which is not in [datafs.encryption_keys]",
            false => "but [datafs.encryption_keys] has another key under that name",
        };
        Self::WrongKey { what, key: key.to_owned(), reason }
    }

    /// Converts an operating-system error at a path by its errno.
    pub(crate) fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if let Some(quota) = no_space(&source) {
            return Self::NoSpace { place: path.display().to_string(), quota };
        }
        match source.raw_os_error() {
            Some(libc::EACCES | libc::EPERM | libc::EROFS) => Self::NotWritable { place: path, source },
            _ => Self::Io { operation, path, source },
        }
    }
}

fn no_space_words(quota: bool) -> &'static str {
    if quota { "disk quota exceeded" } else { "no space left on device" }
}

/// `None` unless the error means "no space"; then whether a quota caused it.
pub(crate) fn no_space(error: &io::Error) -> Option<bool> {
    match error.raw_os_error() {
        Some(libc::ENOSPC) => Some(false),
        Some(libc::EDQUOT) => Some(true),
        _ => None,
    }
}
