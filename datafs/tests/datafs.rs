//! Integration tests of the crate, one binary.
#![allow(clippy::unwrap_used)]

mod child;
mod crash;
mod group_commit;
mod mount_journeys;
mod postgres;
mod processes;
mod trouble;
mod writes;
