//! Key hashing for in-memory tables: fast on short keys, and seeded, because users choose names.

use std::hash::{BuildHasher as _, BuildHasherDefault, Hasher, RandomState};
use std::sync::LazyLock;

/// Odd, without a pattern: digits of the golden ratio and of pi.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
const LENGTH: u64 = 0x2437_54a3_243f_6a89;

static SEED: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(MULTIPLIER));

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

/// The hash of a key, in this process.
pub(super) fn key_hash(key: &[u8]) -> u64 {
    let mut hash = *SEED ^ (key.len() as u64).wrapping_mul(LENGTH);
    let (words, rest) = key.as_chunks::<8>();
    for word in words {
        hash = fold(hash ^ u64::from_le_bytes(*word), MULTIPLIER);
    }
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    fold(fold(hash ^ u64::from_le_bytes(last), MULTIPLIER) ^ *SEED, LENGTH | 1)
}

/// Hasher for tables whose keys are such hashes already.
pub(super) type Hashed = BuildHasherDefault<Itself>;

/// Identity hasher: uses a 64-bit key as its hash.
#[derive(Debug, Default)]
pub(super) struct Itself(u64);

impl Hasher for Itself {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = key_hash(bytes);
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_differ_little_have_hashes_that_differ_much() {
        let mut seen = std::collections::HashSet::new();
        let mut low = std::collections::HashSet::new();
        for len in 0..40 {
            let mut key = vec![0; len];
            for at in 0..len {
                for bit in 0..8 {
                    key[at] ^= 1 << bit;
                    assert!(seen.insert(key_hash(&key)));
                    low.insert(key_hash(&key) & 0xffff);
                    key[at] ^= 1 << bit;
                }
            }
        }
        // 6,240 of 65,536: about 5,950 are different by chance.
        assert!(low.len() > 5_600, "{} of {}", low.len(), seen.len());
    }
}
