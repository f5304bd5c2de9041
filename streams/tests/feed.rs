//! Tests of the feed over real Parquet and Arrow IPC files: order, resume, bad input, caching.

mod bounded;
mod compressed;
mod data;
mod images;
mod mixture;
mod order;
mod ranks;
mod reading;
mod selection;
mod shared;
mod sources;
mod speed;
mod volume;
