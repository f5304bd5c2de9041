//! Atomic replacement of small private files: a reader, also after a crash, finds the old bytes or the new ones.

use std::fs;
use std::io::{self, Write as _};
use std::path::Path;

use crate::private;

/// Replaces the file `path`. The bytes are written to `staged`, in the same folder, and synced before they get
/// their name. The name is durable once the folder is synced.
///
/// # Errors
/// Those of creating, writing, syncing and renaming; the staged file stays.
pub fn replace(path: &Path, staged: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = private::options().write(true).create(true).truncate(true).open(staged)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(staged, path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn a_replaced_file_is_private_and_whole() {
        let dir = tempfile::tempdir().unwrap();
        let (path, staged) = (dir.path().join("meta.json"), dir.path().join("meta.json.new"));
        // Left by a crash.
        fs::write(&staged, "a longer text").unwrap();
        replace(&path, &staged, b"one").unwrap();
        replace(&path, &staged, b"two").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"two");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o077, 0);
        assert!(!staged.exists());
    }
}
