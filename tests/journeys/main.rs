//! Journey tests: tasks of users, run through the built program alone.
#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

#[path = "../support.rs"]
mod support;

mod bad_input;
mod before;
mod checked;
mod columns;
mod csi;
mod deploy;
mod examples;
mod feeding;
mod flight;
mod full_disk;
mod habits;
mod held;
mod images;
mod imported;
mod independent;
mod instances;
mod joined;
mod kills;
mod labels;
mod live;
mod load;
mod piped;
mod predicting;
mod private;
mod quantized;
mod quickstart;
mod readme;
mod reference;
mod render;
mod rolling;
mod rooms;
mod runs;
mod scaler;
mod scripts;
mod secrets;
mod secured;
mod settings;
mod shares;
mod signals;
mod sources;
mod supervised;
mod tabular;
mod tokens;
mod topics;
mod unprivileged;
mod up;
mod upkeep;
mod watching;
