//! The keys of encrypted volumes, by name, from the configuration.

use std::collections::BTreeMap;
use std::fmt;

use ring::aead::{AES_256_GCM, LessSafeKey, UnboundKey};
use ring::hkdf;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::object::{CHECK_BYTES, KeyIdentity, ObjectId};

/// Bytes of a key.
const KEY_BYTES: usize = 32;
/// Longest name of a key in bytes: the footer of an encoded object has a field of this size.
pub(crate) const KEY_NAME_BYTES_MAX: usize = 64;

/// Derivation contexts; another format needs other ones.
const FOR_OBJECT: &[u8] = b"millrace datafs object v1";
const FOR_CHECK: &[u8] = b"millrace datafs key check v1";

/// The keys of this process.
#[derive(Debug, Default)]
pub(crate) struct Keyring {
    keys: BTreeMap<String, VolumeKey>,
}

/// One key. `Debug` shows its name alone.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct VolumeKey {
    name: String,
    secret: [u8; KEY_BYTES],
}

impl fmt::Debug for VolumeKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VolumeKey").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The output length of a key derivation.
struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl Keyring {
    /// Reads the configured keys; one that cannot be read or is malformed is an error.
    pub(crate) fn open(config: &Config) -> Result<Keyring> {
        let mut keys = BTreeMap::new();
        for (name, secret) in &config.encryption_keys {
            let what = format!("[datafs.encryption_keys] {name}");
            if name.is_empty() || name.len() > KEY_NAME_BYTES_MAX {
                return Err(Error::Invalid(format!("{what}: a name has 1 to {KEY_NAME_BYTES_MAX} bytes")));
            }
            if secret.is_in_place() {
                return Err(Error::Invalid(format!(
                    "{what}: a key is not written into the configuration: give {{ file = … }} or {{ env = … }}"
                )));
            }
            let bytes = secret.bytes(&what)?;
            let secret = parse(&bytes).ok_or_else(|| {
                Error::Invalid(format!("{what}: a key is 32 bytes, or 64 hex digits, or their base64"))
            })?;
            keys.insert(name.clone(), VolumeKey { name: name.clone(), secret });
        }
        Ok(Keyring { keys })
    }

    /// The key of a name.
    pub(crate) fn get(&self, name: &str) -> Option<&VolumeKey> {
        self.keys.get(name)
    }
}

impl VolumeKey {
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The key's identity in records and objects.
    pub(crate) fn identity(&self) -> KeyIdentity {
        (self.name.clone(), self.check())
    }

    /// The check value: it distinguishes this key from others and reveals nothing about it.
    pub(crate) fn check(&self) -> [u8; CHECK_BYTES] {
        let mut check = [0; CHECK_BYTES];
        let key = hkdf::Salt::new(hkdf::HKDF_SHA256, &[]).extract(&self.secret);
        let derived = key.expand(&[FOR_CHECK], Length(CHECK_BYTES));
        // HKDF fails only for more than 255 hashes, or a buffer of the wrong length. An all-zero check would
        // match that of any other key.
        let filled = derived.and_then(|derived| derived.fill(&mut check));
        assert!(filled.is_ok(), "{CHECK_BYTES} bytes can be derived from any key");
        check
    }

    /// The key of one object. No two objects share a key, so the frame numbers of each can be nonces.
    pub(super) fn for_object(&self, id: ObjectId) -> Option<LessSafeKey> {
        let key = hkdf::Salt::new(hkdf::HKDF_SHA256, &id.to_bytes()).extract(&self.secret);
        let derived = key.expand(&[FOR_OBJECT], &AES_256_GCM).ok()?;
        Some(LessSafeKey::new(UnboundKey::from(derived)))
    }
}

/// Parses the key in a file or variable: 32 bytes raw, in hex or in base64.
fn parse(bytes: &[u8]) -> Option<[u8; KEY_BYTES]> {
    if let Ok(key) = bytes.try_into() {
        return Some(key);
    }
    let text = std::str::from_utf8(bytes).ok()?.trim();
    let decoded = if text.len() == 2 * KEY_BYTES { hex(text)? } else { base64(text)? };
    decoded.try_into().ok()
}

fn hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| Some(c.to_digit(16)? as u8)).collect();
    Some(digits?.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// The standard alphabet and the one for URLs, with or without padding.
fn base64(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let (mut bits, mut filled) = (0u32, 0);
    for c in text.trim_end_matches('=').bytes() {
        let value = match c {
            b'A'..=b'Z' => c - b'A',
            b'a'..=b'z' => c - b'a' + 26,
            b'0'..=b'9' => c - b'0' + 52,
            b'+' | b'-' => 62,
            b'/' | b'_' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        filled += 6;
        if filled >= 8 {
            filled -= 8;
            bytes.push((bits >> filled) as u8);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{FromFile, Secret};

    fn open(bytes: &[u8]) -> Result<VolumeKey> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("key");
        std::fs::write(&file, bytes).unwrap();
        let secret = Secret::File(FromFile { file });
        let config = Config { encryption_keys: [("main".into(), secret)].into(), ..Config::default() };
        Keyring::open(&config).map(|ring| ring.get("main").unwrap().clone())
    }

    #[test]
    fn a_key_is_read_in_three_forms() {
        let raw: Vec<u8> = (0..32u8).map(|i| i.wrapping_mul(37) ^ 0xa5).collect();
        let hex: String = raw.iter().map(|byte| format!("{byte:02X}")).collect();
        let key = open(&raw).unwrap();
        assert_eq!(open(hex.as_bytes()).unwrap(), key);
        assert_eq!(open(format!("{hex}\n").as_bytes()).unwrap(), key);
        let known = open(b"AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\n").unwrap();
        assert_eq!(known.secret.to_vec(), (0..32).collect::<Vec<u8>>());
        for wrong in [&b"short"[..], &raw[..31], b"", &[b'x'; 64]] {
            let error = open(wrong).unwrap_err().to_string();
            assert!(error.contains("main") && error.contains("32 bytes"), "{error}");
        }
        assert!(!format!("{key:?}").contains("165"), "{key:?}");
        let other = open(&[7; 32]).unwrap();
        assert_ne!(key.check(), other.check());
    }

    #[test]
    fn a_key_in_the_configuration_itself_is_refused() {
        let secret = Secret::Text("00".repeat(32));
        let config = Config { encryption_keys: [("main".into(), secret)].into(), ..Config::default() };
        assert!(Keyring::open(&config).unwrap_err().to_string().contains("file"));
    }
}
