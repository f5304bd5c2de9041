//! Flags of `millrace scaler`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

/// `millrace scaler`
#[derive(Debug, Args)]
pub(crate) struct ScalerArgs {
    /// gRPC address
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:9300")]
    pub(crate) listen: SocketAddr,
    /// Certificate chain (PEM); connections then have TLS. Changed files are read again
    #[arg(long, value_name = "FILE", requires = "tls_key")]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Key (PEM) of --tls-cert
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Authorities (PEM) of client certificates, one of which every client must then have
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_client_ca: Option<PathBuf>,
    /// File with lines of `millrace serve token`, one of whose tokens every call must then carry. KEDA sends none:
    /// for other callers
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}
