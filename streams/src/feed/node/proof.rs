//! Mutual proof at the beginning of a connection: both ends can read the home.
//!
//! Containers may share a network namespace and a user id, and every process of the namespace sees the address. So each end
//! draws a nonce, and proves with an HMAC-SHA-256 over both nonces that it knows the key of the scope. The server proves
//! first. The client then proves itself, and asks. No end sends or takes a row group before it has verified the other's
//! proof. The proofs name the role of their maker, so that none can be sent back.

use std::io;
use std::time::Duration;

use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::line::{Half, Kind, Line, nonsense, within};

/// Bytes that take the place of an unused half.
const UNUSED: Half = [0; 32];

/// The key of a scope.
#[derive(Clone)]
pub(super) struct Key(hmac::Key);

/// The maker of a proof.
#[derive(Debug, Clone, Copy)]
enum Role {
    Server,
    Client,
}

/// The nonces of a connection.
#[derive(Debug, Clone, Copy)]
struct Nonces {
    client: Half,
    server: Half,
}

impl Key {
    pub(super) fn new(secret: &[u8; 32]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    fn prove(&self, role: Role, nonces: &Nonces) -> Half {
        let mut proof = UNUSED;
        proof.copy_from_slice(hmac::sign(&self.0, &message(role, nonces)).as_ref());
        proof
    }

    /// Takes the same time for any wrong proof.
    fn verify(&self, role: Role, nonces: &Nonces, proof: &Half) -> io::Result<()> {
        hmac::verify(&self.0, &message(role, nonces), proof)
            .map_err(|_| nonsense("the process at the other end cannot read the home"))
    }
}

/// Each part has a fixed length.
fn message(role: Role, nonces: &Nonces) -> Vec<u8> {
    let role: &[u8; 20] = match role {
        Role::Server => b"millrace-feed server",
        Role::Client => b"millrace-feed client",
    };
    [role.as_slice(), &nonces.client, &nonces.server].concat()
}

/// A number that is used once. It takes no descriptor, of which the process may have none left.
fn nonce() -> io::Result<Half> {
    let mut nonce = UNUSED;
    SystemRandom::new()
        .fill(&mut nonce)
        .map_err(|_| io::Error::other("the kernel gave no random bytes for a connection"))?;
    Ok(nonce)
}

/// Proves both ends to each other, as the client. False for a server that has no connection to spare.
pub(super) async fn introduce(line: &Line, key: &Key, limit: Duration) -> io::Result<bool> {
    let client = nonce()?;
    let sent = line.send_halves(limit, Kind::Hello, [client, UNUSED]).await;
    // A server without a spare connection answers and closes before it reads.
    let reply = match (within(limit, line.receive()).await, sent) {
        (Ok(reply), _) => reply,
        (Err(_), Err(error)) | (Err(error), Ok(())) => return Err(error),
    };
    match (reply.kind, reply.file) {
        (Kind::Alone, None) => return Ok(false),
        (Kind::ServerProof, None) => {}
        _ => return Err(nonsense("a first answer of another form")),
    }
    let [server, proof] = reply.halves;
    let nonces = Nonces { client, server };
    key.verify(Role::Server, &nonces, &proof)?;
    line.send_halves(limit, Kind::ClientProof, [key.prove(Role::Client, &nonces), UNUSED]).await?;
    Ok(true)
}

/// Proves both ends to each other, as the server.
pub(super) async fn admit(line: &Line, key: &Key, limit: Duration) -> io::Result<()> {
    let hello = within(limit, line.receive()).await?;
    if hello.kind != Kind::Hello || hello.file.is_some() {
        return Err(nonsense("a first message of another form"));
    }
    let nonces = Nonces { client: hello.halves[0], server: nonce()? };
    let proof = key.prove(Role::Server, &nonces);
    line.send_halves(limit, Kind::ServerProof, [nonces.server, proof]).await?;
    let answer = within(limit, line.receive()).await?;
    if answer.kind != Kind::ClientProof || answer.file.is_some() {
        return Err(nonsense("a proof of another form"));
    }
    key.verify(Role::Client, &nonces, &answer.halves[0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_is_valid_for_its_own_key_role_and_nonces_only() {
        let key = Key::new(&[1; 32]);
        let nonces = Nonces { client: [2; 32], server: [3; 32] };
        let proof = key.prove(Role::Server, &nonces);
        assert!(key.verify(Role::Server, &nonces, &proof).is_ok());
        assert!(key.verify(Role::Client, &nonces, &proof).is_err(), "sent back");
        assert!(Key::new(&[9; 32]).verify(Role::Server, &nonces, &proof).is_err());
        assert!(key.verify(Role::Server, &Nonces { client: [9; 32], ..nonces }, &proof).is_err());
        assert!(key.verify(Role::Server, &Nonces { server: [9; 32], ..nonces }, &proof).is_err());
        let swapped = Nonces { client: nonces.server, server: nonces.client };
        assert!(key.verify(Role::Server, &swapped, &proof).is_err());
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
