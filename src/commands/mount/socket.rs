//! The metrics of a mount at a Unix socket: a connection gets the text and an end mark, and is closed.
//!
//! A successor of this process takes the path over in one step. This process does not remove it: after its end the socket
//! refuses connections, and `millrace csi` removes it when it unpublishes the volume.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millrace_csi::METRICS_END;
use millrace_serving::metrics_text;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

/// Most connections at the same time; more are closed.
const CONNECTIONS_MAX: usize = 4;
/// Longest wait for a reader, and pause after a connection that could not be accepted.
const WRITE_MAX: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(100);

/// Exports the metrics of this process until `stop` fires. Only this user may connect.
pub(super) fn export(path: &Path, stop: CancellationToken) -> io::Result<()> {
    let mut staged = path.as_os_str().to_owned();
    staged.push("-new");
    match fs::remove_file(&staged) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&staged)?;
    fs::set_permissions(&staged, Permissions::from_mode(0o600))?;
    fs::rename(&staged, path)?;
    tokio::spawn(async move {
        tokio::select! {
            () = accept(&listener) => {}
            () = stop.cancelled() => {}
        }
    });
    Ok(())
}

async fn accept(listener: &UnixListener) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            // Too many open files, for example.
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        tokio::spawn(async move {
            // The reader may be gone.
            let _ = tokio::time::timeout(WRITE_MAX, write(stream)).await;
            drop(place);
        });
    }
}

async fn write(mut stream: UnixStream) -> io::Result<()> {
    stream.write_all(metrics_text().as_bytes()).await?;
    stream.write_all(METRICS_END.as_bytes()).await?;
    stream.shutdown().await
}
