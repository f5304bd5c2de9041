//! Proofs of a shared secret: random nonces and HMAC-SHA-256 over them.
//!
//! Both sides of a connection draw a nonce and prove that they know the secret. The secret itself is never
//! sent, and a proof that an attacker has seen is valid for no other connection.
use millrace_leaf::random;
use ring::hmac;

use crate::error::{Error, Result};

/// Length of a nonce, in bytes.
pub(crate) const NONCE_BYTES: usize = 32;
/// Length of a proof, in bytes.
pub(crate) const PROOF_BYTES: usize = 32;

/// A number that is used once.
pub(crate) type Nonce = [u8; NONCE_BYTES];

/// Draws a nonce.
pub(crate) fn nonce() -> Result<Nonce> {
    random::bytes().map_err(|e| Error::io(format!("read {}", random::SOURCE), e))
}

/// The proof that its maker knows `secret`, for one `purpose` and the values in `parts`.
pub(crate) fn prove(secret: &[u8], purpose: &str, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
    let mut proof = [0; PROOF_BYTES];
    proof.copy_from_slice(hmac::sign(&key(secret), &message(purpose, parts)).as_ref());
    proof
}

/// Whether `proof` is the one of [`prove`] with the same arguments. Takes the same time for any wrong proof.
pub(crate) fn is_valid(secret: &[u8], purpose: &str, parts: &[&[u8]], proof: &[u8]) -> bool {
    hmac::verify(&key(secret), &message(purpose, parts), proof).is_ok()
}

fn key(secret: &[u8]) -> hmac::Key {
    hmac::Key::new(hmac::HMAC_SHA256, secret)
}

/// Each part follows its length, so that no two lists of parts give the same message.
fn message(purpose: &str, parts: &[&[u8]]) -> Vec<u8> {
    let mut message = Vec::new();
    for part in std::iter::once(purpose.as_bytes()).chain(parts.iter().copied()) {
        message.extend_from_slice(&(part.len() as u64).to_le_bytes());
        message.extend_from_slice(part);
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_valid_for_its_own_secret_purpose_and_parts_only() {
        let proof = prove(b"secret", "join", &[b"ab", b"c"]);
        assert!(is_valid(b"secret", "join", &[b"ab", b"c"], &proof));
        assert!(!is_valid(b"another", "join", &[b"ab", b"c"], &proof));
        assert!(!is_valid(b"secret", "ring", &[b"ab", b"c"], &proof));
        assert!(!is_valid(b"secret", "join", &[b"a", b"bc"], &proof));
        assert!(!is_valid(b"secret", "join", &[b"ab", b"c"], &proof[..31]));
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
