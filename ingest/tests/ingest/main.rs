//! Ingest against the embedded broker and a real volume: what lands, what does not, and that
//! every record lands exactly once whatever is killed on the way.
#![allow(clippy::unwrap_used)]

mod exactly_once;
mod landing;
mod refusals;
mod site;
mod throughput;
