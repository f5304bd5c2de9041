//! Tests of the configured origins.
use super::Pages;

#[test]
fn origins_are_checked_when_the_server_starts() {
    Pages::new(&[], true).unwrap();
    for good in ["*", "http://localhost:3000", "https://example.org", "http://127.0.0.1", "http://[::1]:80"] {
        assert!(Pages::new(&[good.to_string()], true).is_ok(), "{good}");
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
            Pages::new(&["https://example.org".to_string(), bad.to_string()], true).unwrap_err().to_string();
        assert!(refused.contains("cors_origins"), "{bad}: {refused}");
    }
}
