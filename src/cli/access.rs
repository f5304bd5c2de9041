//! Flags of `millrace serve token`, and the server flags of all clients of a model server.

use std::path::PathBuf;

use clap::Args;

/// `millrace serve token`
#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// The client's name, shown in the access log
    pub(crate) name: String,
    /// Models that the client may use, in which * stands for any characters
    #[arg(long, value_name = "MODEL", value_delimiter = ',', default_value = "*")]
    pub(crate) models: Vec<String>,
    /// Allow loading and unloading these models; with *, also changing the log
    #[arg(long)]
    pub(crate) control: bool,
}

/// The model server that a command contacts, and the client's credentials
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// The model server, HOST:PORT, https://HOST:PORT or dnssrv+NAME [default: this home's server, else
    /// cluster.server, else serving.grpc]
    #[arg(long, value_name = "ADDR")]
    pub(crate) grpc: Option<String>,
    /// PEM file of the authorities that may sign the server's certificate; connects with TLS [default for
    /// https://…: the system's authorities]
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// PEM file of the client certificate, for servers that require one; connects with TLS
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,
    /// PEM file of the client certificate's private key
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
    /// File whose first line is the bearer token, for servers that require one
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}
