//! Creation of private files and folders, accessible to their owner only. They hold the content
//! of volume files of any mode, keys of tokens, and locks that another user could keep.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Creates a folder and its missing parents, with mode 0700.
///
/// # Errors
/// Those of `mkdir`; an existing folder is not an error.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The options to open or create a file with mode 0600. A symbolic link is refused (ELOOP): in another user's
/// home it could lead to any file of this user.
pub fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_in_the_place_of_a_file_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, link) = (dir.path().join("victim"), dir.path().join("holder.lock"));
        std::fs::write(&victim, "bytes").unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        let opened = options().write(true).create(true).truncate(true).open(&link);
        assert_eq!(opened.unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert_eq!(std::fs::read(victim).unwrap(), b"bytes");
    }
}
