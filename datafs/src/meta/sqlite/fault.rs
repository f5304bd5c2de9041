//! Translation of SQLite's errors into those of the crate.

use std::path::Path;
use std::time::Duration;

use rusqlite::{ErrorCode, ffi};

use crate::error::Error;

/// Whether another connection or process has the lock.
pub(super) fn is_busy(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked))
}

/// Whether a failed call lacked space: `Some(true)` if a quota was used up, `Some(false)` if the disk was
/// full. SQLite reports lack of space only for a disk that is full during a write. For other failures it
/// leaves the system's reason in `errno`. Call this right after the failure, on the same thread: a write or
/// an open that fails sets `errno` again.
fn used_up(error: &rusqlite::Error) -> Option<bool> {
    let failed = error.sqlite_error()?.extended_code;
    if !matches!(failed, ffi::SQLITE_IOERR_WRITE | ffi::SQLITE_IOERR_SHMSIZE | ffi::SQLITE_CANTOPEN) {
        return None;
    }
    match std::io::Error::last_os_error().raw_os_error() {
        Some(libc::EDQUOT) => Some(true),
        Some(libc::ENOSPC) => Some(false),
        _ => None,
    }
}

/// Translates an error of SQLite after a wait.
pub(super) fn translate(path: &Path, error: rusqlite::Error, waited: Duration) -> Error {
    let place = path.display().to_string();
    if let Some(quota) = used_up(&error) {
        return Error::NoSpace { place, quota };
    }
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => {
            Error::Busy { place, waited_ms: u64::try_from(waited.as_millis()).unwrap_or(u64::MAX) }
        }
        Some(ErrorCode::DiskFull) => Error::NoSpace { place, quota: false },
        Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
            Error::Corrupt { what: format!("metadata {place}"), reason: error.to_string() }
        }
        Some(ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied) => {
            Error::NotWritable { place: path.to_owned(), source: std::io::Error::other(error) }
        }
        _ => Error::Metadata { place, source: Box::new(error) },
    }
}
