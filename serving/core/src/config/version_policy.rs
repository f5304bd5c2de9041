//! The version policy: selects which versions of a model are served, the newest, all, or specific ones.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::quote;

/// Most versions that a policy may name.
const VERSIONS_MAX: usize = 1024;

/// Selects the versions of a model to serve.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VersionPolicy {
    /// The newest `N` that can be loaded: `"latest:2"`.
    Latest(NonZeroU32),
    /// All: `"all"`.
    All,
    /// These versions, ascending: `[1, 4]`.
    Specific(Vec<u64>),
}

/// Error: a value that is not a version policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("versions is {0}: use \"latest:N\" with N from 1 on, \"all\", or a list such as [1, 4]")]
pub struct UnknownPolicy(String);

impl VersionPolicy {
    /// A policy of specific versions.
    ///
    /// # Errors
    /// [`UnknownPolicy`] for none, for 0, and for more than 1,024.
    pub fn specific(versions: &[u64]) -> Result<VersionPolicy, UnknownPolicy> {
        if versions.is_empty() || versions.len() > VERSIONS_MAX {
            return Err(UnknownPolicy(format!("a list of {}", versions.len())));
        }
        if versions.contains(&0) {
            return Err(UnknownPolicy("a list with 0, and versions are positive".into()));
        }
        let mut versions = versions.to_vec();
        versions.sort_unstable();
        versions.dedup();
        Ok(VersionPolicy::Specific(versions))
    }
}

impl fmt::Display for VersionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VersionPolicy::Latest(count) => write!(f, "latest:{count}"),
            VersionPolicy::All => f.write_str("all"),
            VersionPolicy::Specific(versions) => write!(f, "{versions:?}"),
        }
    }
}

impl FromStr for VersionPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        match text.split_once(':') {
            None if text == "all" => Ok(VersionPolicy::All),
            Some(("latest", count)) => {
                count.parse().map(VersionPolicy::Latest).map_err(|_| UnknownPolicy(quote(text)))
            }
            _ => Err(UnknownPolicy(quote(text))),
        }
    }
}

impl Serialize for VersionPolicy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            VersionPolicy::Specific(versions) => versions.serialize(serializer),
            text => serializer.collect_str(text),
        }
    }
}

impl<'de> Deserialize<'de> for VersionPolicy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "versions is \"latest:N\", \"all\", or a list such as [1, 4]")]
        enum Form {
            Text(String),
            List(Vec<u64>),
        }
        match Form::deserialize(deserializer)? {
            Form::Text(text) => text.parse(),
            Form::List(versions) => VersionPolicy::specific(&versions),
        }
        .map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_round_trip() {
        for (json, shown) in
            [("\"all\"", "all"), ("\"latest:3\"", "latest:3"), ("[4,1,4]", "[1, 4]"), ("[9]", "[9]")]
        {
            let policy: VersionPolicy = serde_json::from_str(json).unwrap();
            assert_eq!(policy.to_string(), shown);
            let again = serde_json::to_string(&policy).unwrap();
            assert_eq!(serde_json::from_str::<VersionPolicy>(&again).unwrap(), policy);
        }
    }

    #[test]
    fn invalid_policy_is_refused_with_the_valid_forms() {
        for json in [
            "\"\"",
            "\"latest\"",
            "\"latest:0\"",
            "\"latest:-1\"",
            "\"latest:4294967296\"",
            "\"newest:1\"",
            "\"ALL\"",
            "[]",
            "[0]",
            "[-1]",
            "[1.5]",
            "[\"1\"]",
            "3",
            "null",
            "{}",
        ] {
            let error = serde_json::from_str::<VersionPolicy>(json).unwrap_err().to_string();
            assert!(error.contains("\"all\"") && error.contains("[1, 4]"), "{json}: {error}");
        }
    }
}
