//! The errno of each error.

use fuser::Errno;

use crate::error::Error;

/// The errno that the kernel receives for an error. Exhaustive on purpose: a new variant must choose one.
pub(super) fn errno(error: &Error) -> Errno {
    match error {
        Error::NotFound { .. } => Errno::ENOENT,
        Error::NoAttribute { .. } => Errno::ENODATA,
        Error::Exists { .. } => Errno::EEXIST,
        Error::NotADirectory { .. } => Errno::ENOTDIR,
        Error::IsADirectory { .. } => Errno::EISDIR,
        Error::NotEmpty { .. } => Errno::ENOTEMPTY,
        Error::ReadOnly { .. } => Errno::EROFS,
        Error::NotPermitted { .. } => Errno::EPERM,
        Error::BadHandle(_) => Errno::EBADF,
        Error::InvalidName { .. } | Error::Invalid(_) => Errno::EINVAL,
        Error::NameTooLong { .. } => Errno::ENAMETOOLONG,
        Error::Loop { .. } => Errno::ELOOP,
        Error::TooManyLinks { .. } => Errno::EMLINK,
        Error::TooLarge { .. } => Errno::EFBIG,
        Error::NoSpace { quota: false, .. } | Error::NoSpaceToCommit { quota: false, .. } => Errno::ENOSPC,
        Error::NoSpace { quota: true, .. } | Error::NoSpaceToCommit { quota: true, .. } => Errno::EDQUOT,
        Error::Conflict { .. } | Error::Changed { .. } => Errno::EAGAIN,
        Error::Busy { .. } | Error::InUse { .. } => Errno::EBUSY,
        Error::Stale { .. } => Errno::ESTALE,
        Error::NotWritable { .. } | Error::WrongKey { .. } => Errno::EACCES,
        Error::Unsupported(_) => Errno::EOPNOTSUPP,
        Error::NewerFormat { .. }
        | Error::Replaced { .. }
        | Error::Corrupt { .. }
        | Error::Object(_)
        | Error::StoreAway { .. }
        | Error::Metadata { .. }
        | Error::Failed { .. }
        | Error::LostWrites { .. }
        | Error::Io { .. } => Errno::EIO,
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::data::ObjectError;

    #[test]
    fn a_full_disk_and_a_used_up_quota_are_told_apart() {
        for (code, expected) in [(libc::ENOSPC, Errno::ENOSPC), (libc::EDQUOT, Errno::EDQUOT)] {
            let full = || io::Error::from_raw_os_error(code);
            assert_eq!(errno(&Error::io("write", "a pack", full())), expected);
            assert_eq!(errno(&ObjectError::io("write", "a pack", full()).into()), expected);
        }
    }
}
