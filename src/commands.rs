//! The commands, one file each: arguments in, library calls, a table or JSON out.

pub(crate) mod backup;
pub(crate) mod broker;
pub(crate) mod config;
pub(crate) mod copy;
pub(crate) mod csi;
pub(crate) mod feed;
pub(crate) mod fsck;
pub(crate) mod holder;
pub(crate) mod ingest;
pub(crate) mod list;
pub(crate) mod model;
pub(crate) mod mount;
pub(crate) mod pipe;
pub(crate) mod predict;
pub(crate) mod produce;
pub(crate) mod runs;
pub(crate) mod scaler;
pub(crate) mod serve;
pub(crate) mod snapshot;
pub(crate) mod stats;
mod supervise;
pub(crate) mod topic;
pub(crate) mod train;
pub(crate) mod volume;
pub(crate) mod warmup;
pub(crate) mod worker;
