//! Flags of `millrace serve token`, and of all that are clients of a model server.

use std::path::PathBuf;

use clap::Args;

/// `millrace serve token`
#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// Who gets it, as the access log will name it
    pub(crate) name: String,
    /// Models that it may use, in which * stands for any characters
    #[arg(long, value_name = "MODEL", value_delimiter = ',', default_value = "*")]
    pub(crate) models: Vec<String>,
    /// It may load and unload these models and change what is traced of them; of all models, with *
    #[arg(long)]
    pub(crate) control: bool,
}

/// Which model server a command asks, and what it shows it
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// The model server, HOST:PORT or https://HOST:PORT [default: the one of this home, else serving.grpc]
    #[arg(long, value_name = "ADDR")]
    pub(crate) grpc: Option<String>,
    /// PEM file of who may have issued the server's certificate; connects with TLS [default for https://…:
    /// those that the system trusts]
    #[arg(long, value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
    /// PEM file of a certificate to show, for servers that ask for one; connects with TLS
    #[arg(long, value_name = "FILE", requires = "key")]
    pub(crate) cert: Option<PathBuf>,
    /// PEM file of its private key
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub(crate) key: Option<PathBuf>,
    /// File whose first line is the bearer token, for servers that have tokens
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}
