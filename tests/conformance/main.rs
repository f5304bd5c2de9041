//! Real clients against real sockets and mounts; run by `make conformance`, which installs them.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

#[path = "../support.rs"]
mod support;

mod browser;
mod clients;
mod kafka;
mod parquet;
mod posix;
