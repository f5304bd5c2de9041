//! Readiness notification to systemd (`Type=notify`), see sd_notify(3).

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// The variable that names the socket.
pub(crate) const SOCKET: &str = "NOTIFY_SOCKET";

/// Notifies systemd that this process serves, if systemd set the socket.
pub(crate) fn notify_systemd() {
    let Some(name) = std::env::var_os(SOCKET).filter(|name| !name.is_empty()) else { return };
    let address = match name.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address));
    if let Err(error) = sent {
        tracing::warn!(%error, socket = %name.display(), "cannot notify systemd that this process is ready");
    }
}
