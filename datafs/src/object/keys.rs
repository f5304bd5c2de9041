//! Identities of encryption keys, as records of volumes and footers of objects name them.

/// Bytes of the check value that detects a wrong key without any data.
pub(crate) const CHECK_BYTES: usize = 8;

/// A key's identity in records and objects: its name, and the check value that distinguishes keys of that name.
pub(crate) type KeyIdentity = (String, [u8; CHECK_BYTES]);

/// The keys that the objects of a volume may be encrypted with, from the record of the volume. Each object's
/// footer is compared with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ExpectedKeys {
    /// None: the volume is not encrypted.
    None,
    /// One of these: the keys that the volume has, and has had.
    OneOf(Vec<KeyIdentity>),
    /// Any key: the record predates the list of the volume's former keys.
    Any,
    /// Any key or none: the caller does not know the volume.
    Unknown,
}

impl ExpectedKeys {
    /// Whether an object of the volume may be encrypted with this key, or with none.
    pub(crate) fn allow(&self, key: Option<&KeyIdentity>) -> bool {
        match (self, key) {
            (Self::None, key) => key.is_none(),
            (Self::OneOf(keys), Some(key)) => keys.contains(key),
            (Self::Any, Some(_)) | (Self::Unknown, _) => true,
            (Self::OneOf(_) | Self::Any, None) => false,
        }
    }
}
