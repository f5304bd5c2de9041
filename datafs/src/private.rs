//! Files and folders of the home, which are for their owner alone: they hold what files of any mode hold in a volume,
//! keys of tokens, and locks that another user could keep.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::Path;

/// Makes a folder, and its parents where they are missing.
///
/// # Errors
/// Those of `mkdir`; a folder that is there is none.
pub fn create_dir_all(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// How a file is opened that is made where it is missing. A symbolic link is refused (ELOOP): in the home of
/// another user it could lead to any file of this one.
pub fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600).custom_flags(libc::O_NOFOLLOW);
    options
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
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
