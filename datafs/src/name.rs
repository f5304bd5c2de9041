//! Names of volumes and snapshots, and the volume specification that combines both: `digits`, `digits@v1`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Longest name, in bytes.
pub(crate) const NAME_BYTES_MAX: usize = 128;

/// The name of a volume or a snapshot: 1 to 128 of `A-Z a-z 0-9 . _ -`, the first neither `.` nor `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Name(String);

impl Name {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Name {
    type Err = Error;

    fn from_str(s: &str) -> Result<Name, Error> {
        let invalid =
            |reason| Err(Error::InvalidName { name: s.chars().take(NAME_BYTES_MAX).collect(), reason });
        if s.is_empty() {
            return invalid("a name has at least one character");
        }
        if s.len() > NAME_BYTES_MAX {
            return invalid("a name has at most 128 characters");
        }
        if !s.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-')) {
            return invalid("a name consists of A-Z a-z 0-9 . _ -");
        }
        if s.starts_with(['.', '-']) {
            return invalid("a name does not start with '.' or '-'");
        }
        Ok(Name(s.to_owned()))
    }
}

impl TryFrom<String> for Name {
    type Error = Error;

    fn try_from(s: String) -> Result<Name, Error> {
        s.parse()
    }
}

impl From<Name> for String {
    fn from(name: Name) -> String {
        name.0
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A volume, live or as of one of its snapshots: `digits` or `digits@v1`. `digits@latest` is the newest snapshot.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeSpec {
    /// The volume.
    pub volume: Name,
    /// The snapshot, or the live volume without one.
    pub snapshot: Option<Name>,
}

impl VolumeSpec {
    /// The snapshot name that stands for the newest snapshot, unless a snapshot has this name itself.
    pub const LATEST: &str = "latest";

    /// The live volume.
    pub fn live(volume: Name) -> VolumeSpec {
        VolumeSpec { volume, snapshot: None }
    }

    /// Whether this asks for the newest snapshot, unless one is called [`VolumeSpec::LATEST`].
    pub fn is_latest(&self) -> bool {
        self.snapshot.as_ref().is_some_and(|name| name.as_str() == VolumeSpec::LATEST)
    }

    /// The volume as of a snapshot.
    pub fn at(volume: Name, snapshot: Name) -> VolumeSpec {
        VolumeSpec { volume, snapshot: Some(snapshot) }
    }
}

impl FromStr for VolumeSpec {
    type Err = Error;

    fn from_str(s: &str) -> Result<VolumeSpec, Error> {
        match s.split_once('@') {
            None => Ok(VolumeSpec::live(s.parse()?)),
            Some((volume, snapshot)) => Ok(VolumeSpec::at(volume.parse()?, snapshot.parse()?)),
        }
    }
}

impl TryFrom<String> for VolumeSpec {
    type Error = Error;

    fn try_from(s: String) -> Result<VolumeSpec, Error> {
        s.parse()
    }
}

impl From<VolumeSpec> for String {
    fn from(spec: VolumeSpec) -> String {
        spec.to_string()
    }
}

impl fmt::Display for VolumeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.snapshot {
            None => write!(f, "{}", self.volume),
            Some(snapshot) => write!(f, "{}@{}", self.volume, snapshot),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_rules() {
        for good in ["a", "digits", "v1.2_x-y", "0", &"x".repeat(128)] {
            assert_eq!(good.parse::<Name>().unwrap().as_str(), good);
        }
        for bad in ["", ".a", "-a", "a b", "a/b", "a@b", "ä", "a\0", &"x".repeat(129)] {
            assert!(bad.parse::<Name>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn specs_round_trip() {
        for text in ["digits", "digits@v1"] {
            let spec: VolumeSpec = text.parse().unwrap();
            assert_eq!(spec.to_string(), text);
            let json = serde_json::to_string(&spec).unwrap();
            assert_eq!(json, format!("\"{text}\""));
            assert_eq!(serde_json::from_str::<VolumeSpec>(&json).unwrap(), spec);
        }
        for bad in ["", "@", "a@", "@b", "a@b@c", "a@.b"] {
            assert!(bad.parse::<VolumeSpec>().is_err(), "{bad:?}");
        }
    }
}
