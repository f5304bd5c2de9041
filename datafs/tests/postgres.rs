//! Tests of volumes with metadata on a PostgreSQL server: figures, several processes, and a server that stops
//! and starts again. They start their servers themselves, where PostgreSQL is installed.
#![allow(clippy::unwrap_used)]

mod coherence;
mod figures;
mod processes;
pub(crate) mod server;
mod tls;

use millrace_datafs::{Config, Datafs};
use server::Server;

/// A configuration with metadata in a schema of the server and file data below the home.
fn config(server: &Server, schema: &str) -> Config {
    Config {
        meta_url: Some(server.url().into()),
        meta_schema: schema.to_owned(),
        meta_connections_max: 8,
        ..Config::default()
    }
}

fn open(home: &std::path::Path, config: &Config) -> Datafs {
    Datafs::open(home, config).unwrap()
}
