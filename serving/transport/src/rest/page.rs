//! The web page at `/`: one document that contains its style and its script. It gets all its data from the
//! server's public calls.

use std::sync::LazyLock;

use axum::Router;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::get;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest, Sha256};

use super::App;

const FRAME: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = concat!(include_str!("page/try.js"), include_str!("page/page.js"));

/// The route of the page.
pub(super) fn routes() -> Router<App> {
    Router::new().route("/", get(page))
}

/// The document and its content security policy.
struct Page {
    html: String,
    policy: HeaderValue,
}

static PAGE: LazyLock<Page> = LazyLock::new(|| {
    let html = FRAME
        .replace("<style></style>", &format!("<style>{STYLE}</style>"))
        .replace("<script></script>", &format!("<script>{SCRIPT}</script>"));
    let digest = |text: &str| STANDARD.encode(Sha256::digest(text));
    // Only the page's own script and style may run, so text injected as HTML has no effect.
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        digest(SCRIPT),
        digest(STYLE)
    );
    let policy = HeaderValue::try_from(policy).expect("digests and constants are visible ASCII");
    Page { html, policy }
});

async fn page() -> Response {
    let fixed = [
        (header::CACHE_CONTROL, "no-cache"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    ];
    let policy = [(header::CONTENT_SECURITY_POLICY, PAGE.policy.clone())];
    (fixed, policy, Html(PAGE.html.as_str())).into_response()
}
