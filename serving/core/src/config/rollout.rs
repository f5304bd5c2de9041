//! Version routing: labels, the split of requests that name no version, and the shadow that runs copies of
//! requests. `rollout.json` next to the versions holds it, so that it can change while the server runs. It
//! overrides `millrace.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::error::quote;

/// Largest `rollout.json` in bytes.
pub const BYTES_MAX: u64 = 64 << 10;
const LABELS_MAX: usize = 64;
const LABEL_BYTES_MAX: usize = 64;
/// Most versions in a split.
const SPLIT_MAX: usize = 16;
/// Largest weight, so that sums stay finite.
const WEIGHT_MAX: f64 = 1e9;

/// The content of `rollout.json`. For fields that it leaves out, `millrace.toml` applies.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rollout {
    /// Versions by label: `{"stable": 3}`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, u64>,
    /// Split of requests that name no version: weights by version or label, `{"stable": 95, "4": 5}`. If
    /// empty, the newest version answers all of them.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub split: BTreeMap<Target, f64>,
    /// The shadow: a version that runs copies of requests after they are answered, to compare the answers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowTarget>,
}

/// A version that runs copies of requests to others: `{"version": "4", "share": 0.1}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShadowTarget {
    /// The version, or a label.
    pub version: Target,
    /// The fraction of the model's requests that is copied, from 0 to 1.
    pub share: f64,
}

impl Rollout {
    /// Reads the content of a file.
    ///
    /// # Errors
    /// The error in it.
    pub fn read(content: &[u8]) -> Result<Rollout, String> {
        // Serde would accept a list, whose elements it takes for the fields in order.
        if content.trim_ascii_start().first() == Some(&b'[') {
            return Err("it is a list, but an object is expected".into());
        }
        let rollout: Rollout = serde_json::from_slice(content).map_err(|error| error.to_string())?;
        rollout.check()?;
        Ok(rollout)
    }

    /// The content of a file.
    pub fn written(&self) -> Vec<u8> {
        // Serialization cannot fail: string keys and finite numbers.
        let mut json = serde_json::to_vec_pretty(self).unwrap_or_default();
        json.push(b'\n');
        json
    }

    /// Refuses invalid labels, weights and shares.
    ///
    /// # Errors
    /// The invalid value, and the allowed ones.
    pub fn check(&self) -> Result<(), String> {
        if self.labels.len() > LABELS_MAX {
            return Err(format!("{} labels, the limit is {LABELS_MAX}", self.labels.len()));
        }
        for (label, version) in &self.labels {
            check_label(label)?;
            if *version == 0 {
                return Err(format!("label {label:?} names version 0, and versions are positive"));
            }
        }
        if self.split.len() > SPLIT_MAX {
            return Err(format!("split has {} versions, the limit is {SPLIT_MAX}", self.split.len()));
        }
        for (target, weight) in &self.split {
            if !(0.0..=WEIGHT_MAX).contains(weight) {
                return Err(format!(
                    "split gives {target} the weight {weight}, allowed are 0 to {WEIGHT_MAX}"
                ));
            }
        }
        if !self.split.is_empty() && self.split.values().all(|weight| *weight == 0.0) {
            return Err(
                "split gives every version the weight 0: give at least one version a positive weight".into(),
            );
        }
        if let Some(shadow) = self.shadow.as_ref().filter(|shadow| !(0.0..=1.0).contains(&shadow.share)) {
            return Err(format!("shadow has the share {}, allowed are 0 to 1", shadow.share));
        }
        Ok(())
    }

    /// The settings of `self`, overridden by those that `file` sets.
    pub fn with(&self, file: &Rollout) -> Rollout {
        let mut both = self.clone();
        both.labels.extend(file.labels.iter().map(|(label, version)| (label.clone(), *version)));
        if !file.split.is_empty() {
            both.split.clone_from(&file.split);
        }
        if file.shadow.is_some() {
            both.shadow.clone_from(&file.shadow);
        }
        both
    }

    /// The versions that are named by number; they are served whatever the policy is.
    pub fn versions(&self) -> BTreeSet<u64> {
        let shadow = self.shadow.iter().map(|shadow| &shadow.version);
        let split = self.split.keys().chain(shadow).filter_map(|target| match target {
            Target::Version(version) => Some(*version),
            Target::Label(_) => None,
        });
        self.labels.values().copied().chain(split).collect()
    }
}

/// Whether a string may be a label: an ASCII letter, then letters, digits, `.`, `_`, `-`. No number is a
/// label.
pub fn is_label(text: &str) -> bool {
    text.len() <= LABEL_BYTES_MAX
        && text.starts_with(|first: char| first.is_ascii_alphabetic())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// Refuses a string that is not a label.
///
/// # Errors
/// The allowed characters and length.
pub fn check_label(text: &str) -> Result<(), String> {
    if is_label(text) {
        return Ok(());
    }
    Err(format!(
        "{} is not a label: use a letter, then letters, digits, '.', '_', '-', {LABEL_BYTES_MAX} at most",
        quote(text)
    ))
}

/// A version, named by its number or by a label.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Target {
    /// A version.
    Version(u64),
    /// A label.
    Label(String),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Target::Version(version) => write!(f, "{version}"),
            Target::Label(label) => f.write_str(label),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<u64>() {
            Ok(version) if version > 0 && version.to_string() == text => Ok(Target::Version(version)),
            _ if is_label(text) => Ok(Target::Label(text.to_owned())),
            _ => Err(format!("{} is neither a version nor a label", quote(text))),
        }
    }
}

impl Serialize for Target {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Target {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_rollout_is_read_back() {
        let text = br#"{"labels": {"stable": 3, "canary": 4}, "split": {"stable": 0.95, "4": 0.05}}"#;
        let rollout = Rollout::read(text).unwrap();
        assert_eq!(rollout.split[&Target::Version(4)], 0.05);
        assert_eq!(rollout.versions(), [3, 4].into());
        assert_eq!(Rollout::read(&rollout.written()).unwrap(), rollout);
        assert_eq!(Rollout::read(b"{}").unwrap(), Rollout::default());
    }

    #[test]
    fn rollout_file_overrides_only_its_keys() {
        let toml = Rollout::read(br#"{"labels": {"stable": 1, "old": 1}, "split": {"stable": 1}}"#).unwrap();
        let file = Rollout::read(br#"{"labels": {"stable": 2}}"#).unwrap();
        let both = toml.with(&file);
        assert_eq!(both.labels, [("old".to_owned(), 1), ("stable".to_owned(), 2)].into());
        assert_eq!(both.split, toml.split);
    }

    #[test]
    fn invalid_rollouts_are_refused_with_a_reason() {
        let many = format!(
            "{{\"labels\": {{{}}}}}",
            (0..65).map(|n| format!("\"l{n}\": 1")).collect::<Vec<_>>().join(",")
        );
        let cases = [
            ("", "EOF"),
            ("[]", "expected"),
            ("{\"label\": {}}", "unknown field"),
            ("{\"labels\": {\"3\": 3}}", "is not a label"),
            ("{\"labels\": {\"\": 3}}", "is not a label"),
            ("{\"labels\": {\"a b\": 3}}", "is not a label"),
            ("{\"labels\": {\"\\u00e4\": 3}}", "is not a label"),
            ("{\"labels\": {\"a\": 0}}", "version 0"),
            ("{\"labels\": {\"a\": -1}}", "expected u64"),
            ("{\"labels\": {\"a\": 1.0}}", "expected u64"),
            ("{\"labels\": {\"a\": \"1\"}}", "expected u64"),
            ("{\"split\": {\"0\": 1}}", "neither a version nor a label"),
            ("{\"split\": {\"01\": 1}}", "neither a version nor a label"),
            ("{\"split\": {\"1\": -0.1}}", "weight -0.1"),
            ("{\"split\": {\"1\": 1e300}}", "the weight 1"),
            ("{\"split\": {\"1\": 0, \"2\": 0}}", "a positive weight"),
            ("{\"split\": {\"1\": null}}", "expected f64"),
            ("{\"shadow\": {\"version\": \"4\"}}", "missing field `share`"),
            ("{\"shadow\": {\"version\": 4, \"share\": 1}}", "expected a string"),
            ("{\"shadow\": {\"version\": \"4\", \"share\": 1.1}}", "shadow has the share 1.1"),
            ("{\"shadow\": {\"version\": \"4\", \"share\": -0.1}}", "shadow has the share -0.1"),
            (many.as_str(), "65 labels, the limit is 64"),
        ];
        for (text, expected) in cases {
            let error = Rollout::read(text.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
        let long = "x".repeat(65);
        assert!(check_label(&long).is_err() && check_label(&long[1..]).is_ok());
    }
}
