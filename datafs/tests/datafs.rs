//! Integration tests of the crate, one binary.
#![allow(clippy::unwrap_used)]

mod child;
mod close_to_open;
mod crash;
mod group_commit;
mod hostile;
mod kills;
mod mount_journeys;
mod postgres;
mod processes;
mod trouble;
mod writes;
