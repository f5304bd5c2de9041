//! Secret configuration values: a value given in place, or a reference to a file or an environment variable.
//! Every table that takes passwords, keys or headers uses this type.

use std::fmt;
use std::path::PathBuf;

use millrace_leaf::bounded_file;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::{Error, Result};

/// Longest file that a value is read from, in bytes.
const FILE_BYTES_MAX: u64 = 64 * 1024;

/// A value, or a reference: `{ env = "NAME" }` or `{ file = "PATH" }`. `Debug` never shows the value.
/// `Serialize` does, because a process passes its configuration to its children.
#[derive(Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Secret {
    /// A text, as it is.
    Text(String),
    /// A flag, as TOML writes it.
    Flag(bool),
    /// A number, as TOML writes it.
    Number(i64),
    /// A reference to an environment variable.
    Environment(FromEnvironment),
    /// A reference to a file; as text, line breaks at its end are not part of the value.
    File(FromFile),
}

/// The name of an environment variable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FromEnvironment {
    /// The variable.
    pub env: String,
}

/// The path of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FromFile {
    /// The file; a relative path begins at the working directory.
    pub file: PathBuf,
}

impl Secret {
    /// The value as bytes, for a file all of its bytes; `what` names the value in errors.
    pub(crate) fn bytes(&self, what: &str) -> Result<Vec<u8>> {
        match self {
            Self::Text(text) => Ok(text.clone().into_bytes()),
            Self::Flag(flag) => Ok(flag.to_string().into_bytes()),
            Self::Number(number) => Ok(number.to_string().into_bytes()),
            Self::Environment(FromEnvironment { env }) => match std::env::var(env) {
                Ok(value) => Ok(value.into_bytes()),
                Err(_) => Err(Error::Invalid(format!(
                    "{what}: the environment variable {env} is not set (or is no text)"
                ))),
            },
            Self::File(FromFile { file }) => {
                let failed = |e| Error::Invalid(format!("{what}: cannot read {}: {e}", file.display()));
                bounded_file::read(file, FILE_BYTES_MAX).map_err(failed)
            }
        }
    }

    /// The value as text, without line breaks at the end of a file.
    ///
    /// # Errors
    /// [`Error::Invalid`], which names `what` and the file or variable.
    pub fn text(&self, what: &str) -> Result<String> {
        let mut bytes = self.bytes(what)?;
        if matches!(self, Self::File(_)) {
            while bytes.last().is_some_and(|byte| matches!(byte, b'\n' | b'\r')) {
                bytes.pop();
            }
        }
        String::from_utf8(bytes).map_err(|_| Error::Invalid(format!("{what}: the value is no text")))
    }

    /// Whether the configuration contains the value itself.
    pub(crate) fn is_in_place(&self) -> bool {
        matches!(self, Self::Text(_) | Self::Flag(_) | Self::Number(_))
    }

    /// A copy that may be shown: without the value.
    #[must_use]
    pub fn hidden(&self) -> Secret {
        if self.is_in_place() { Self::Text(HIDDEN.into()) } else { self.clone() }
    }

    /// Removes these values from the error text of another library, which may repeat them.
    pub fn hide_in<'s>(secrets: impl IntoIterator<Item = &'s Secret>, text: String) -> String {
        let values = secrets.into_iter().filter_map(|secret| secret.text("").ok());
        values
            .filter(|value| value.len() >= HIDDEN_BYTES_MIN)
            .fold(text, |text, value| text.replace(&value, HIDDEN))
    }
}

/// Shown in place of a value.
const HIDDEN: &str = "(set)";
/// Shorter values are not replaced: they keep no secret, and parts of other words would match.
const HIDDEN_BYTES_MIN: usize = 4;

impl From<String> for Secret {
    fn from(value: String) -> Secret {
        Self::Text(value)
    }
}

impl From<&str> for Secret {
    fn from(value: &str) -> Secret {
        Self::Text(value.to_owned())
    }
}

impl<'de> Deserialize<'de> for Secret {
    /// Not derived: errors of derived code repeat the refused value.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Secret, D::Error> {
        deserializer.deserialize_any(SecretVisitor)
    }
}

struct SecretVisitor;

impl<'de> Visitor<'de> for SecretVisitor {
    type Value = Secret;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value, { env = \"NAME\" } or { file = \"PATH\" }")
    }

    fn visit_str<E: de::Error>(self, value: &str) -> std::result::Result<Secret, E> {
        Ok(Secret::Text(value.to_owned()))
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> std::result::Result<Secret, E> {
        Ok(Secret::Flag(value))
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> std::result::Result<Secret, E> {
        Ok(Secret::Number(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> std::result::Result<Secret, E> {
        i64::try_from(value).map(Secret::Number).map_err(|_| E::custom("a number is too large"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Secret, A::Error> {
        let refused = || de::Error::custom(format_args!("expected {}", &self as &dyn de::Expected));
        let secret = match map.next_key::<String>()?.as_deref() {
            Some("env") => Secret::Environment(FromEnvironment { env: map.next_value()? }),
            Some("file") => Secret::File(FromFile { file: map.next_value()? }),
            _ => return Err(refused()),
        };
        if map.next_key::<String>()?.is_some() { Err(refused()) } else { Ok(secret) }
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Environment(from) => from.fmt(f),
            Self::File(from) => from.fmt(f),
            _ => f.write_str(HIDDEN),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn values_come_from_where_the_configuration_says_and_are_never_shown() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("secret");
        std::fs::write(&file, "from a file\n").unwrap();
        let config: Config = serde_json::from_value(serde_json::json!({
            "store_url": "s3://bucket/prefix",
            "store_options": {
                "allow_http": true,
                "secret_access_key": "hunter2",
                "access_key_id": { "file": file },
                "token": { "env": "MILLRACE_TEST_NO_SUCH_VARIABLE" },
            },
        }))
        .unwrap();
        let text = |name: &str| config.store_options[name].text(name);
        assert_eq!(text("allow_http").unwrap(), "true");
        assert_eq!(text("secret_access_key").unwrap(), "hunter2");
        assert_eq!(text("access_key_id").unwrap(), "from a file");
        let error = text("token").unwrap_err().to_string();
        assert!(error.contains("token") && error.contains("MILLRACE_TEST_NO_SUCH_VARIABLE"), "{error}");
        assert!(!format!("{config:?}").contains("hunter2"));
        let shown = serde_json::to_string(&config.without_secrets()).unwrap();
        assert!(!shown.contains("hunter2") && shown.contains("MILLRACE_TEST_NO_SUCH_VARIABLE"), "{shown}");
        // Serialization keeps the values, since a process passes its configuration on.
        let again: Config = serde_json::from_value(serde_json::to_value(&config).unwrap()).unwrap();
        assert_eq!(again, config);
        for wrong in [
            serde_json::json!({ "envv": "hunter2" }),
            serde_json::json!({ "hunter2": 1 }),
            serde_json::json!({ "env": "X", "file": "hunter2" }),
            serde_json::json!({}),
            serde_json::json!(["hunter2"]),
            serde_json::json!(1.5),
            serde_json::json!(null),
        ] {
            let config = serde_json::json!({ "store_options": { "key": wrong } });
            let error = serde_json::from_value::<Config>(config).unwrap_err().to_string();
            assert!(error.contains("{ file = ") && !error.contains("hunter2"), "{error}");
        }
    }
}
