//! The URL of a metadata server. It may contain a password, which `Debug` and `Display` hide.

use std::fmt;
use std::ops::Range;

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

    /// The URL without its password. What is redacted stays so.
    pub fn redacted(&self) -> MetaUrl {
        let mut url = self.redacted_once();
        // What is hidden may have held the mark by which another password is found. Each round hides more of the text.
        loop {
            let again = url.redacted_once();
            if again == url {
                return url;
            }
            url = again;
        }
    }

    fn redacted_once(&self) -> MetaUrl {
        let is_scheme =
            |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
        let Some((scheme, rest)) = self.0.split_once("://").filter(|(scheme, _)| is_scheme(scheme)) else {
            // Not a URL: opening it fails later; hide all of it.
            return MetaUrl("***".into());
        };
        let mut shown = format!("{scheme}://");
        let mut at = 0;
        for hidden in secrets(rest) {
            // What two rules hide overlaps where a password has an `@` or a `?` of its own.
            if hidden.start >= at {
                shown += &rest[at..hidden.start];
                shown += "***";
            }
            at = at.max(hidden.end);
        }
        MetaUrl(shown + &rest[at..])
    }
}

/// The places of passwords in a URL without its scheme, ordered by their starts. They may overlap.
fn secrets(rest: &str) -> Vec<Range<usize>> {
    let mut secrets = Vec::new();
    // The engine ends the user and the password at the first `@` of the whole URL. Hidden is all up to the last one,
    // which hides too much where an option holds one.
    if let Some(last) = rest.rfind('@').filter(|last| rest[..*last].contains(':')) {
        let user = rest.find([':', '/', '?']).unwrap_or(last);
        secrets.push(user + usize::from(rest[user..].starts_with(':'))..last);
    }
    let mut start = 0;
    for part in rest.split('&') {
        let end = start + part.len();
        secrets.extend(password(part).map(|password| start + password..end));
        start = end + 1;
    }
    secrets.sort_by_key(|secret| secret.start);
    secrets
}

/// Where the text after `password=` begins in a part of a URL between two `&`. A name with an escape may be `password`,
/// too.
fn password(part: &str) -> Option<usize> {
    let is_password = |end: &usize| {
        let name = part[..*end].rsplit('?').next().unwrap_or_default();
        name == "password" || name.contains('%')
    };
    Some(part.match_indices('=').map(|(at, _)| at).find(is_password)? + 1)
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
            ("postgres://me/x:s3cret@h/d", "postgres://me***@h/d"),
            // What is shown of a user does not look like a password.
            ("postgres://me/x:postgres://me:@h/d", "postgres://me***@h/d"),
            ("postgres:///d?host=/run&p%61ssword=s3cret", "postgres:///d?host=/run&p%61ssword=***"),
            ("postgres://u@h:5432/d?password=cret@s3&x=1", "postgres://u@h:***&x=1"),
            ("postgres://me:?password=cret@s3", "postgres://me:***"),
            ("postgres://me:s3cret@h/d?password=s3", "postgres://me:***@h/d?password=***"),
            ("postgres://password=x/y&a:s3@h", "postgres://password=***"),
            ("postgres://a?b=c@h/d?password=s3?cret", "postgres://a?b=c@h/d?password=***"),
        ] {
            let url = MetaUrl::from(url.to_owned());
            assert_eq!(url.to_string(), shown);
            assert!(!format!("{url:?}").contains("s3"));
        }
    }
}
