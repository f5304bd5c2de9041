//! Unix sockets of the driver, replaced in one step: during an upgrade the successor takes the path over, and the
//! predecessor leaves it alone when it ends.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// A listening socket. Dropping it removes its path, unless another process has taken that over.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    identity: (u64, u64),
}

impl Socket {
    /// Listens at a path, in place of any other socket there. Only the owner and its group may connect.
    ///
    /// # Errors
    /// Those of the system; [`io::ErrorKind::AlreadyExists`] for a file that is no socket.
    pub(crate) fn listen(path: &Path) -> io::Result<(Socket, UnixListener)> {
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"));
        };
        fs::create_dir_all(folder)?;
        use std::os::unix::fs::FileTypeExt as _;
        match fs::symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => {
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, "the file there is no socket"));
            }
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // The kubelet leaves names that begin with a dot alone.
        let staged = folder.join(format!(".{}.{}", name.display(), std::process::id()));
        match fs::remove_file(&staged) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(&staged)?;
        let made = fs::set_permissions(&staged, Permissions::from_mode(0o660))
            .and_then(|()| fs::symlink_metadata(&staged))
            .and_then(|metadata| fs::rename(&staged, path).map(|()| metadata));
        match made {
            Ok(metadata) => {
                Ok((Socket { path: path.to_owned(), identity: (metadata.dev(), metadata.ino()) }, listener))
            }
            Err(error) => {
                fs::remove_file(&staged).ok();
                Err(error)
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let there = fs::symlink_metadata(&self.path);
        if there.is_ok_and(|there| (there.dev(), there.ino()) == self.identity)
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the socket");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_successor_takes_the_path_over_and_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/csi.sock");
        let (first, _) = Socket::listen(&path).unwrap();
        let (second, listener) = Socket::listen(&path).unwrap();
        drop(first);
        let connected = tokio::net::UnixStream::connect(&path);
        let (connected, accepted) = tokio::join!(connected, listener.accept());
        assert!(connected.is_ok() && accepted.is_ok());
        drop(second);
        assert!(!path.exists());
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 0);
        fs::write(&path, "bytes").unwrap();
        assert_eq!(Socket::listen(&path).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"bytes");
    }
}
