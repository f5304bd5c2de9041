//! A single-node broker that speaks the Kafka protocol, inside this process.
mod config;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
pub use config::{Config, Flush};
/// Cluster ids of this broker begin with this.
pub(crate) const CLUSTER_ID_PREFIX: &str = "millrace-";
/// Where the broker of a home keeps its files.
pub fn dir(home: &Path) -> PathBuf {
    home.join("broker")
}
/// Address of the broker that holds `dir` now.
pub fn running_address(_dir: &Path) -> Option<SocketAddr> {
    None
}
