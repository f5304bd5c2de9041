//! Integration tests of the crate: topics against the embedded broker, the feed over real files.
#![allow(clippy::unwrap_used)]

mod feed;
mod topics;
