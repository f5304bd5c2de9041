//! What is an origin.
#![allow(clippy::unwrap_used)]

use super::Origins;

#[test]
fn origins_are_checked_when_the_server_starts() {
    assert!(Origins::new(&[]).unwrap().is_none());
    for good in ["*", "http://localhost:3000", "https://example.org", "http://127.0.0.1", "http://[::1]:80"] {
        assert!(Origins::new(&[good.to_string()]).unwrap().is_some(), "{good}");
    }
    for bad in [
        "",
        "example.org",
        "https://",
        "https://example.org/",
        "https://example.org/app",
        "https://Example.org",
        "https://user@example.org",
        "ftp://example.org",
        "https://example.org\n",
        "https://exämple.org",
        "null",
        "**",
    ] {
        let refused =
            Origins::new(&["https://example.org".to_string(), bad.to_string()]).unwrap_err().to_string();
        assert!(refused.contains("cors_origins"), "{bad}: {refused}");
    }
}
