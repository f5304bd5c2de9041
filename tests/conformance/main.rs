//! Conformance tests: real clients against real sockets and mounts. `make conformance` installs the clients
//! and runs them.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

#[path = "../support.rs"]
mod support;

mod browser;
mod clients;
mod csi;
mod kafka;
mod parquet;
mod posix;
