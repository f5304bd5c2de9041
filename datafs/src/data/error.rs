//! Errors of the object pool, distinguished by what the caller does next.

use std::error::Error as StdError;
use std::io;
use std::path::PathBuf;

use millrace_leaf::error_chain;

use crate::error::{Error, no_space};
use crate::object::ObjectId;

/// An error of the object pool.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ObjectError {
    /// The object is not in the store: it is lost, or it was deleted after the caller looked up the pointer,
    /// which the caller should then look up again.
    #[error("object {id} is missing from the object store")]
    Missing {
        /// The object.
        id: ObjectId,
    },
    /// The store returned other bytes than were written.
    #[error("object {id} is damaged at byte {byte}: {reason}")]
    Corrupt {
        /// The object.
        id: ObjectId,
        /// First byte of the damaged frame, or the object's length when its checksums are damaged.
        byte: u64,
        /// The failed check.
        reason: String,
    },
    /// This process does not have the key that the object is encrypted with.
    #[error("object {id} is encrypted with the key {key:?}, {}", missing_words(*.missing))]
    Key {
        /// The object.
        id: ObjectId,
        /// The key's name.
        key: String,
        /// True: no key of that name is configured. False: another key has that name.
        missing: bool,
    },
    /// The object is not protected as the record of its volume says.
    #[error("object {id} is {found}, which the record of its volume rules out: it was replaced in the store")]
    Protection {
        /// The object.
        id: ObjectId,
        /// The protection that the object has.
        found: String,
    },
    /// The store is full, or its owner's quota is used up.
    #[error("no space left in the object store at {place}")]
    NoSpace {
        /// The store.
        place: String,
        /// The disk has space, but the owner's quota is used up (EDQUOT).
        quota: bool,
        /// What the store said.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The local store could not be read or written.
    #[error("{operation} {}", path.display())]
    Io {
        /// The operation in words: "sync object file".
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: io::Error,
    },
    /// A remote store did not respond within the configured time.
    #[error("the object store at {place} could not {operation} for {tried_ms} ms")]
    Away {
        /// The operation in words.
        operation: &'static str,
        /// The store.
        place: String,
        /// How long the operation was retried, in milliseconds.
        tried_ms: u64,
        /// The error of the last try.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
    /// The object store refused the request.
    #[error("{operation} in the object store at {place}")]
    Store {
        /// The operation in words.
        operation: &'static str,
        /// The store.
        place: String,
        /// What the store said.
        #[source]
        source: Box<dyn StdError + Send + Sync>,
    },
}

/// A result of the object pool.
pub(crate) type Result<T> = std::result::Result<T, ObjectError>;

impl ObjectError {
    /// An operating-system error at a path; a full disk becomes [`ObjectError::NoSpace`].
    pub(crate) fn io(operation: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        let path = path.into();
        if let Some(quota) = no_space(&source) {
            return Self::NoSpace { place: path.display().to_string(), quota, source: source.into() };
        }
        Self::Io { operation, path, source }
    }

    /// A copy of the error for another caller that waited for the same operation.
    pub(super) fn again(&self) -> ObjectError {
        match self {
            Self::Missing { id } => Self::Missing { id: *id },
            Self::Corrupt { id, byte, reason } => {
                Self::Corrupt { id: *id, byte: *byte, reason: reason.clone() }
            }
            Self::Key { id, key, missing } => Self::Key { id: *id, key: key.clone(), missing: *missing },
            Self::Protection { id, found } => Self::Protection { id: *id, found: found.clone() },
            Self::NoSpace { place, quota, source } => {
                Self::NoSpace { place: place.clone(), quota: *quota, source: source.to_string().into() }
            }
            Self::Io { operation, path, source } => Self::Io {
                operation,
                path: path.clone(),
                source: io::Error::new(source.kind(), source.to_string()),
            },
            Self::Away { operation, place, tried_ms, source } => Self::Away {
                operation,
                place: place.clone(),
                tried_ms: *tried_ms,
                source: source.to_string().into(),
            },
            Self::Store { operation, place, source } => {
                Self::Store { operation, place: place.clone(), source: source.to_string().into() }
            }
        }
    }

    /// Whether the store said that there is no such object.
    pub(super) fn is_not_found(&self) -> bool {
        let Self::Store { source, .. } = self else { return false };
        matches!(source.downcast_ref::<object_store::Error>(), Some(object_store::Error::NotFound { .. }))
    }

    /// An object-store error; a full disk below it becomes [`ObjectError::NoSpace`].
    pub(crate) fn store(operation: &'static str, place: &str, source: object_store::Error) -> Self {
        let source: Box<dyn StdError + Send + Sync> = source.into();
        let quota = error_chain::causes(source.as_ref())
            .find_map(|cause| cause.downcast_ref::<io::Error>().and_then(no_space));
        let place = place.to_owned();
        match quota {
            Some(quota) => Self::NoSpace { place, quota, source },
            None => Self::Store { operation, place, source },
        }
    }
}

/// The error when the runtime that asks the store has stopped.
pub(super) fn threads_gone(place: &str) -> ObjectError {
    let source = "the object store's threads have stopped".into();
    ObjectError::Store { operation: "ask", place: place.to_owned(), source }
}

fn missing_words(missing: bool) -> &'static str {
    match missing {
        true => "which [datafs.encryption_keys] does not name",
        false => "but [datafs.encryption_keys] has another key under that name",
    }
}

impl Error {
    /// Whether a remote store was unreachable or refused the request: a retry loses nothing.
    pub fn is_store_trouble(&self) -> bool {
        match self {
            Self::StoreAway { .. } => true,
            Self::Object(source) => matches!(source.downcast_ref(), Some(ObjectError::Store { .. })),
            _ => false,
        }
    }
}

impl From<ObjectError> for Error {
    fn from(error: ObjectError) -> Self {
        match error {
            ObjectError::NoSpace { place, quota, .. } => Self::NoSpace { place, quota },
            ObjectError::Corrupt { id, byte, reason } => {
                Self::Corrupt { what: format!("object {id} at byte {byte}"), reason }
            }
            ObjectError::Protection { id, found } => Self::Corrupt {
                what: format!("object {id}"),
                reason: format!("it is {found}, which the record of its volume rules out: it was replaced"),
            },
            ObjectError::Key { id, key, missing } => Self::wrong_key(format!("object {id}"), &key, missing),
            ObjectError::Away { operation, place, tried_ms, source } => {
                Self::StoreAway { place, operation, tried_ms, source }
            }
            other => Self::Object(Box::new(other)),
        }
    }
}
