//! Flags of `millrace csi`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// `millrace csi`
#[derive(Debug, Args)]
pub(crate) struct CsiArgs {
    /// The socket of the driver
    #[arg(long, value_name = "unix:///PATH", env = "CSI_ENDPOINT", value_parser = unix_socket)]
    pub(crate) endpoint: PathBuf,
    /// The services to serve, beside the identity of the driver
    #[arg(long, value_enum, default_value_t = CsiServices::All)]
    pub(crate) services: CsiServices,
    /// The socket at which the kubelet finds the driver, in its folder plugins_registry
    #[arg(long, value_name = "PATH")]
    pub(crate) registration_socket: Option<PathBuf>,
    /// The name of the node, as Kubernetes has it; for the node service
    #[arg(long, value_name = "NAME")]
    pub(crate) node_id: Option<String>,
    /// The kubelet's folder; nothing is mounted outside of it
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub(crate) kubelet_dir: PathBuf,
    /// The folder with the state of published volumes, which outlives the driver [default: HOME/csi]
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: Option<PathBuf>,
    /// The socket of `millrace holder`, which mounts: a new driver then takes mounts over, and pods see nothing of it
    /// [default: each mount is supervised]
    #[arg(long, value_name = "unix:///PATH")]
    pub(crate) holder: Option<String>,
    /// Most volumes on the node; 0 for no limit
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    pub(crate) volumes_max: u32,
    /// A file that exists while the driver serves and has taken over the mounts of the driver before; for a probe
    #[arg(long, value_name = "FILE")]
    pub(crate) ready_file: Option<PathBuf>,
    /// Serve Prometheus metrics of the driver and of all its mounts at this address, under /metrics
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<SocketAddr>,
    /// The name of the driver
    #[arg(long, value_name = "NAME", default_value = millrace_csi::NAME)]
    pub(crate) driver_name: String,
}

/// The services of a driver's process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CsiServices {
    /// Controller and node
    All,
    /// Volumes and snapshots are made and deleted
    Controller,
    /// Volumes are mounted
    Node,
}

/// Parses the URL of a unix socket.
fn unix_socket(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix:").unwrap_or(text);
    // Two more slashes may come before the path.
    let path = path.strip_prefix("//").unwrap_or(path);
    match path.starts_with('/') {
        true => Ok(PathBuf::from(path)),
        false => Err("takes the absolute path of a socket: unix:///run/csi.sock".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_are_absolute_paths() {
        for text in ["unix:///run/a.sock", "unix:/run/a.sock", "/run/a.sock"] {
            assert_eq!(unix_socket(text), Ok("/run/a.sock".into()), "{text}");
        }
        for text in ["", "a.sock", "unix://a.sock", "tcp://127.0.0.1:1"] {
            assert!(unix_socket(text).is_err(), "{text}");
        }
    }
}
