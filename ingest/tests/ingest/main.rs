//! Tests of ingest against the embedded broker and a real volume: landing, refusals, and that every record
//! lands exactly once, whatever is killed meanwhile.
// The tests print what they skip, measure and seed.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod exactly_once;
mod gaps;
mod landing;
mod refusals;
mod site;
mod throughput;
mod tombstones;
