//! Integration tests of the crate, one binary.
#![allow(clippy::unwrap_used)]

mod backup;
mod buckets;
mod child;
mod close_to_open;
mod crash;
mod engine;
mod group_commit;
mod handover;
mod hostile;
mod kills;
mod known_names;
mod lock_holders;
mod mount_journeys;
mod postgres;
mod processes;
mod scale;
mod small_disk;
mod trouble;
mod unnamed;
mod upkeep;
mod writes;
