//! The metadata engine of a test and of its children.
#![allow(clippy::unwrap_used)]

use std::process::Command;
use std::sync::Arc;

use millrace_datafs::Config;

use crate::postgres::server::Server;

const URL: &str = "MILLRACE_TEST_META_URL";
const SCHEMA: &str = "MILLRACE_TEST_META_SCHEMA";
const CONNECTIONS_MAX: usize = 4;

/// SQLite, or a schema of a PostgreSQL server.
pub(crate) struct Engine(Option<(Arc<Server>, String)>);

impl Engine {
    pub(crate) fn sqlite() -> Engine {
        Engine(None)
    }

    /// `None`, and the reason on standard error, where PostgreSQL is not installed.
    pub(crate) fn postgres() -> Option<Engine> {
        let server = Server::shared()?;
        let schema = server.new_schema();
        Some(Engine(Some((server, schema))))
    }

    pub(crate) fn is_server(&self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn config(&self) -> Config {
        let at = self.0.as_ref().map(|(server, schema)| (server.url(), schema.clone()));
        config_of(at)
    }

    /// Passes the engine to a child, which reads it with [`inherited`].
    pub(crate) fn tell(&self, child: &mut Command) {
        if let Some((server, schema)) = &self.0 {
            child.env(URL, server.url()).env(SCHEMA, schema);
        }
    }
}

/// The configuration that the parent test has passed to this process.
pub(crate) fn inherited() -> Config {
    config_of(std::env::var(URL).ok().zip(std::env::var(SCHEMA).ok()))
}

fn config_of(at: Option<(String, String)>) -> Config {
    match at {
        Some((url, schema)) => Config {
            meta_url: Some(url.into()),
            meta_schema: schema,
            meta_connections_max: CONNECTIONS_MAX,
            ..Config::default()
        },
        None => Config::default(),
    }
}
