//! Integration tests of the crate, one binary.

mod mount_journeys;
