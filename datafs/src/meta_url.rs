//! The URL of a metadata server. It may contain a password, which `Debug` and `Display` hide.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// `postgres://user:password@host:port/database`; for a unix socket `postgres:///database?host=/folder`.
///
/// `Debug` and `Display` hide the password. Serializing does not: to print a configuration, use
/// [`crate::Config::without_secrets`].
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MetaUrl(String);

impl MetaUrl {
    /// The URL as it is, password included.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    /// The URL without its password.
    pub fn redacted(&self) -> MetaUrl {
        let is_scheme =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
        let Some((scheme, rest)) = self.0.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) else {
            // Not a URL: opening it fails later; hide all of it.
            return MetaUrl("***".into());
        };
        // The engine ends the user and the password at the first `@` of the whole URL. Hidden is all up to the last
        // one, which hides too much where an option holds one.
        let (user, tail) = match rest.rfind('@') {
            Some(at) if rest[..at].contains(':') => {
                let end = rest.find([':', '/', '?']).unwrap_or(at);
                (format!("{}:***", &rest[..end]), &rest[at..])
            }
            _ => (String::new(), rest),
        };
        let options = tail.split('&').map(without_password).collect::<Vec<_>>().join("&");
        MetaUrl(format!("{scheme}://{user}{options}"))
    }
}

/// A part of a URL between two `&`, with its text after `password=` hidden. A name with an escape may be `password`,
/// too.
fn without_password(part: &str) -> Cow<'_, str> {
    let is_password = |end: &usize| {
        let name = part[..*end].rsplit('?').next().unwrap_or_default();
        name == "password" || name.contains('%')
    };
    match part.match_indices('=').map(|(at, _)| at).find(is_password) {
        Some(end) => format!("{}=***", &part[..end]).into(),
        None => part.into(),
    }
}

impl From<String> for MetaUrl {
    fn from(url: String) -> MetaUrl {
        MetaUrl(url)
    }
}

impl fmt::Display for MetaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted().0)
    }
}

impl fmt::Debug for MetaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.redacted().0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_are_not_shown() {
        for (url, shown) in [
            ("postgres://me:s3cret@h:1/d?x=1", "postgres://me:***@h:1/d?x=1"),
            ("postgres://me:s3:cr@et@h/d", "postgres://me:***@h/d"),
            ("postgres://me:s3/cr?et@h:1/d?x=1", "postgres://me:***@h:1/d?x=1"),
            ("postgres://me:s3@cr/et@h", "postgres://me:***@h"),
            ("postgres://h:5432/d?x=1", "postgres://h:5432/d?x=1"),
            ("postgres://me@h/d", "postgres://me@h/d"),
            ("postgres:///d?host=/run&password=s3cret&user=u", "postgres:///d?host=/run&password=***&user=u"),
            ("me:s3cret@h", "***"),
            ("password=s3cret postgres://h/d", "***"),
            ("postgres://me/x:s3cret@h/d", "postgres://me:***@h/d"),
            ("postgres:///d?host=/run&p%61ssword=s3cret", "postgres:///d?host=/run&p%61ssword=***"),
            ("postgres://a?b=c@h/d?password=s3?cret", "postgres://a?b=c@h/d?password=***"),
        ] {
            let url = MetaUrl::from(url.to_owned());
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?}").contains("s3"));
        }
    }
}
