//! One file per command: arguments in, library calls, a table or JSON out.

pub mod broker;
pub mod feed;
pub mod ingest;
pub mod model;
pub mod mount;
pub mod pipe;
pub mod predict;
pub mod produce;
pub mod serve;
pub mod snapshot;
pub mod train;
pub mod volume;
