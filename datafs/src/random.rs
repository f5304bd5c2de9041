//! Random numbers from the kernel.

use std::fs::File;
use std::io::Read as _;

use crate::error::{Error, Result};

/// A random number, not 0. Two processes practically never draw the same.
pub(crate) fn random_id() -> Result<u64> {
    let source = "/dev/urandom";
    let mut bytes = [0; 8];
    File::open(source)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .map_err(|e| Error::io("read", source, e))?;
    Ok(u64::from_be_bytes(bytes).max(1))
}
