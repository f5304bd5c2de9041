//! Volumes whose metadata is on a PostgreSQL server: figures, several processes, a server that goes
//! away and comes back. Each test starts servers of its own, where PostgreSQL is installed.
#![allow(clippy::unwrap_used)]

mod coherence;
mod figures;
mod processes;
pub(crate) mod server;
mod tls;

use millrace_datafs::{Config, Datafs};
use server::Server;

/// Metadata in a schema of the server, file data below the home.
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
