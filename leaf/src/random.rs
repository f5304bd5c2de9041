//! Random bytes of the operating system, for ids and secrets that no other process draws.

use std::fs::File;
use std::io::{self, Read as _};

/// Where the bytes come from, for errors.
pub const SOURCE: &str = "/dev/urandom";

/// `N` random bytes.
///
/// # Errors
/// Those of opening or reading [`SOURCE`].
pub fn bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    File::open(SOURCE)?.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A random number, not 0. Two processes practically never draw the same.
///
/// # Errors
/// As [`bytes`].
pub fn id() -> io::Result<u64> {
    Ok(u64::from_be_bytes(bytes()?).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_differ() {
        assert_ne!(bytes::<32>().unwrap(), bytes::<32>().unwrap());
        assert_ne!(id().unwrap(), id().unwrap());
    }
}
