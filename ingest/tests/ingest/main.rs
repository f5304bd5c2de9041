//! Ingest against the embedded broker and a real volume: what lands, what does not, and that
//! every record lands exactly once whatever is killed on the way.
// What was skipped, measured or seeded is told to whoever runs the tests.
#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::print_stderr)]

mod exactly_once;
mod gaps;
mod landing;
mod refusals;
mod site;
mod throughput;
