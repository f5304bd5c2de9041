//! The native half of the Python package `millrace`: the feed, and files of volumes.
//!
//! What is here: `engine` holds all that the process has open; `reader` reads batches of a
//! feed; `columns` turns them into the values of arrays without a copy; `volume` reads and writes files.
//!
//! What is not here: the classes that users see. They are Python, under `python/millrace`, and alone use this
//! module, whose names may change.
//!
//! Invariants:
//! - Every call that may wait has left the interpreter, and takes no Python object with it.
//! - A fork by Python finds nothing open, unless a file is being written. A child that inherits something open is
//!   refused, and never touches it.
//! - A batch that Python gets is its own: nothing else reads or writes its memory.

#![deny(unsafe_code)]

mod columns;
mod engine;
mod error;
mod reader;
mod tensor;
mod volume;

use pyo3::prelude::*;

/// The native half of the package `millrace`; private to it.
#[pymodule]
mod _native {
    #[pymodule_export]
    use crate::columns::{RecordBatch, Values};
    #[pymodule_export]
    use crate::engine::{after_fork_in_child, after_fork_in_parent, before_fork, close};
    #[pymodule_export]
    use crate::reader::Reader;
    #[pymodule_export]
    use crate::volume::{File, Volume, Writer};

    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        crate::engine::start_log();
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
