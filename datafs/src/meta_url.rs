//! The URL of a metadata server. It may contain a password, which `Debug` and `Display` hide.

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
        let Some((scheme, rest)) = self.0.split_once("://") else {
            // Not a URL: opening it fails later; hide all of it.
            return MetaUrl("***".into());
        };
        // A password that is not percent-encoded may hold characters that end the authority. Then all up to the last `@`
        // is hidden, which hides too much where an option holds one.
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let end = match rest.rfind('@') {
            Some(at) if at > end && rest[..end].contains(':') => {
                at + 1 + rest[at + 1..].find(['/', '?']).unwrap_or(rest.len() - at - 1)
            }
            _ => end,
        };
        let (authority, tail) = rest.split_at(end);
        let (tail, options) =
            tail.split_once('?').map_or((tail, None), |(tail, options)| (tail, Some(options)));
        let authority = match authority.rsplit_once('@') {
            Some((user, host)) if user.contains(':') => {
                format!("{}:***@{host}", user.split(':').next().unwrap_or_default())
            }
            _ => authority.to_owned(),
        };
        let options = options.map(|options| {
            let shown = options.split('&').map(|option| match option.split_once('=') {
                Some(("password", _)) => "password=***",
                _ => option,
            });
            format!("?{}", shown.collect::<Vec<_>>().join("&"))
        });
        MetaUrl(format!("{scheme}://{authority}{tail}{}", options.unwrap_or_default()))
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
        ] {
            let url = MetaUrl::from(url.to_owned());
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?}").contains("s3"));
        }
    }
}
