//! The engine against a real server.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use super::target::Target;
use super::{Options, Postgres};
use crate::meta::suite;

#[path = "../../../tests/postgres/server.rs"]
pub(crate) mod server;

use server::Server;

fn options() -> Options {
    Options {
        wait: Duration::from_secs(60),
        connections_max: 4,
        cache_bytes_max: 1 << 20,
        lease: Duration::from_secs(60),
    }
}

fn open(server: &Server, schema: &str) -> Postgres {
    let target = Target::parse(&server.url(), schema, None).unwrap();
    Postgres::open(target, client(), &options()).unwrap()
}

#[test]
fn postgres_passes_the_suite() {
    let Some(server) = Server::shared() else { return };
    let schema = server.new_schema();
    suite::all(&|| Box::new(open(&server, &schema)));
    // Nothing is left behind by those who have left.
    assert_eq!(server.sql(&format!("SELECT count(*) FROM {schema}.clients")), "0");
}

fn client() -> u64 {
    let mut bytes = [0; 8];
    let mut source = std::fs::File::open("/dev/urandom").unwrap();
    std::io::Read::read_exact(&mut source, &mut bytes).unwrap();
    (u64::from_be_bytes(bytes) >> 1).max(1)
}
