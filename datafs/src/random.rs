//! Random numbers for sessions and store identities.

use millrace_leaf::random;

use crate::error::{Error, Result};

/// A random number, not 0. Two processes practically never draw the same.
pub(crate) fn random_id() -> Result<u64> {
    random::id().map_err(|e| Error::io("read", random::SOURCE, e))
}
