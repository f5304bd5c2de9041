//! Encryption of the frames of a connection between ranks: AES-256-GCM with a key of that connection and direction.
//!
//! The two sides of a connection exchange ephemeral X25519 keys as the nonces of their handshake. The key of the frames
//! depends on these and on the job's secret, so that a secret that leaks later opens no recorded connection. Each frame
//! has a number, so that none can be repeated, left out or moved.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, Nonce, UnboundKey};
use ring::agreement::{EphemeralPrivateKey, UnparsedPublicKey, X25519, agree_ephemeral};
use ring::rand::SystemRandom;

use crate::proof::{NONCE_BYTES, PROOF_BYTES, prove};

/// Bytes that encryption adds to a frame.
pub(super) const TAG_BYTES: usize = MAX_TAG_LEN;
/// The purposes of the derived keys: frames of the connecting side, and those of the accepting side.
const OF_FRAMES: [&str; 2] = ["millrace ring frames", "millrace ring answers"];

/// One side's part of an agreement on a key. Its public part is the nonce of the handshake.
pub(super) struct Agreement {
    private: EphemeralPrivateKey,
    public: [u8; NONCE_BYTES],
}

/// The cipher of a connection's frames in one direction.
pub(super) struct Seal {
    key: LessSafeKey,
    /// Frames so far.
    frames: u64,
}

impl std::fmt::Debug for Seal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Seal").field("frames", &self.frames).finish_non_exhaustive()
    }
}

impl Agreement {
    pub(super) fn new() -> Result<Agreement, String> {
        let failed = |_| "no random numbers for a key".to_owned();
        let private = EphemeralPrivateKey::generate(&X25519, &SystemRandom::new()).map_err(failed)?;
        let computed = private.compute_public_key().map_err(failed)?;
        let mut public = [0; NONCE_BYTES];
        public.copy_from_slice(computed.as_ref());
        Ok(Agreement { private, public })
    }

    pub(super) fn public(&self) -> &[u8; NONCE_BYTES] {
        &self.public
    }

    /// The ciphers that both sides get from each other's public part `theirs`, the secret and the connection's `parts`:
    /// of what the connecting side sends, and of what the accepting side sends.
    pub(super) fn seals(self, theirs: &[u8], secret: &str, parts: &[&[u8]]) -> Result<[Seal; 2], String> {
        let theirs = UnparsedPublicKey::new(&X25519, theirs);
        let [sent, answered]: [[u8; PROOF_BYTES]; 2] = agree_ephemeral(self.private, &theirs, |shared| {
            let parts: Vec<&[u8]> = parts.iter().copied().chain([shared]).collect();
            OF_FRAMES.map(|purpose| prove(secret.as_bytes(), purpose, &parts))
        })
        .map_err(|_| "its public key is none".to_owned())?;
        Ok([Seal::new(&sent)?, Seal::new(&answered)?])
    }
}

impl Seal {
    fn new(key: &[u8]) -> Result<Seal, String> {
        let key = UnboundKey::new(&AES_256_GCM, key).map_err(|_| "no key of 256 bits".to_owned())?;
        Ok(Seal { key: LessSafeKey::new(key), frames: 0 })
    }

    fn next_nonce(&mut self) -> Nonce {
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&self.frames.to_le_bytes());
        self.frames += 1;
        Nonce::assume_unique_for_key(nonce)
    }

    /// Encrypts the payload of the next frame, [`TAG_BYTES`] longer afterwards, and binds it to `header`.
    pub(super) fn seal(&mut self, header: &[u8], payload: &mut Vec<u8>) -> Result<(), String> {
        let nonce = self.next_nonce();
        let sealed = self.key.seal_in_place_append_tag(nonce, Aad::from(header), payload);
        sealed.map_err(|_| "the frame is too long to be encrypted".to_owned())
    }

    /// Decrypts the payload of the next frame in place.
    pub(super) fn open(&mut self, header: &[u8], payload: &mut Vec<u8>) -> Result<(), String> {
        let nonce = self.next_nonce();
        let opened = self.key.open_in_place(nonce, Aad::from(header), payload);
        let bytes = opened.map_err(|_| "a frame was changed on its way".to_owned())?.len();
        payload.truncate(bytes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The ciphers of both sides of a connection, of each direction.
    fn both(secrets: [&str; 2], parts: [&[u8]; 2]) -> [[Seal; 2]; 2] {
        let (a, b) = (Agreement::new().unwrap(), Agreement::new().unwrap());
        let (public_a, public_b) = (*a.public(), *b.public());
        [
            a.seals(&public_b, secrets[0], &[parts[0]]).unwrap(),
            b.seals(&public_a, secrets[1], &[parts[1]]).unwrap(),
        ]
    }

    /// The ciphers of both sides of a connection for what the connecting side sends.
    fn pair(secrets: [&str; 2], parts: [&[u8]; 2]) -> [Seal; 2] {
        both(secrets, parts).map(|[sent, _]| sent)
    }

    #[test]
    fn directions_have_different_keys() {
        for directions in [[0, 0], [1, 1], [0, 1], [1, 0]] {
            let mut sides = both(["secret"; 2], [b"place"; 2]);
            let mut frame = b"first".to_vec();
            sides[0][directions[0]].seal(b"header", &mut frame).unwrap();
            let opened = sides[1][directions[1]].open(b"header", &mut frame);
            assert_eq!(opened.is_ok(), directions[0] == directions[1], "{directions:?}");
        }
    }

    #[test]
    fn frames_open_once_in_order_with_their_header() {
        let [mut one, mut other] = pair(["secret"; 2], [b"place"; 2]);
        let mut sealed = |payload: &[u8]| {
            let mut payload = payload.to_vec();
            one.seal(b"header", &mut payload).unwrap();
            payload
        };
        let (first, second, third) = (sealed(b"first"), sealed(b""), sealed(b"third"));
        assert_eq!((first.len(), second.len()), (5 + TAG_BYTES, TAG_BYTES));
        assert!(!first.windows(5).any(|part| part == b"first"));
        let mut open = |frame: &[u8], header: &[u8]| {
            let mut payload = frame.to_vec();
            other.open(header, &mut payload).map(|()| payload)
        };
        assert_eq!(open(&first, b"header").unwrap(), b"first");
        assert_eq!(open(&second, b"header").unwrap(), b"");
        open(&first, b"header").unwrap_err();
        // Each attempt takes a number: after a frame that does not open, the connection is of no use.
        open(&third, b"header").unwrap_err();
    }

    #[test]
    fn changed_frames_and_other_keys_open_nothing() {
        for at in [0, 4, 5, 20] {
            let [mut one, mut other] = pair(["secret"; 2], [b"place"; 2]);
            let mut frame = b"first".to_vec();
            one.seal(b"header", &mut frame).unwrap();
            frame[at] ^= 1;
            other.open(b"header", &mut frame).unwrap_err();
        }
        let places: [&[u8]; 2] = [b"place", b"plate"];
        for (secrets, parts, header) in [
            (["secret", "guess"], [places[0]; 2], b"header"),
            (["secret"; 2], places, b"header"),
            (["secret"; 2], [places[0]; 2], b"healer"),
        ] {
            let [mut one, mut other] = pair(secrets, parts);
            let mut frame = b"first".to_vec();
            one.seal(b"header", &mut frame).unwrap();
            other.open(header, &mut frame).unwrap_err();
        }
        // A point of small order gives the same secret to everyone.
        Agreement::new().unwrap().seals(&[0; NONCE_BYTES], "secret", &[]).unwrap_err();
    }
}
