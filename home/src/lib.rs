//! The home folder of one Millrace as programs open it: the folder with its locks, the configuration file, and
//! the exit codes of errors that every program on a home meets.
//!
//! The command and the Python package open a home through this crate, so that both find the same folder, read
//! the same configuration and report the same errors.
//!
//! Not here: the tables of the configuration, which the crates own, and what runs on a home.
//!
//! ```no_run
//! use millrace_home::{Home, settings};
//!
//! #[derive(Default, serde::Serialize, serde::Deserialize)]
//! #[serde(default)]
//! struct Settings {
//!     datafs: millrace_datafs::Config,
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let root = Home::locate(None)?;
//! let loaded = settings::load::<Settings>(None, &root, |name| name.starts_with("MILLRACE_DATAFS__"))?;
//! let home = Home::open(root, true, |note| eprintln!("{note}"))?;
//! let volumes = home.volumes(&loaded.settings.datafs)?;
//! # let _ = volumes;
//! # Ok(())
//! # }
//! ```

#![deny(unsafe_code)]

pub mod check;
mod error;
mod exit;
mod folder;
pub mod settings;

pub use error::{Error, Result};
pub use exit::{Exit, as_type};
pub use folder::{Addresses, ExclusiveHome, Home, HomeLock, write_atomically, write_private};
