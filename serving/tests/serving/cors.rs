//! Calls from web pages of other origins.

use millrace_serving::{Source, serve};

use crate::malformed::{as_rest, good};
use crate::support::*;

const PREFLIGHT: [(&str, &str); 2] = [
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "content-type,inference-header-content-length"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_listed_origins_may_call() {
    let mut config = config();
    config.cors_origins = vec!["https://example.org".into(), "http://localhost:3000".into()];
    let server = Server::start(config, &[]).await;
    let request = as_rest(&good());
    for (origin, allowed) in
        [("https://example.org", true), ("http://localhost:3000", true), ("https://example.com", false)]
    {
        let headers = [("origin", origin), PREFLIGHT[0], PREFLIGHT[1]];
        let preflight = server.http("OPTIONS", &request.path, &headers, b"").await;
        assert_eq!(preflight.status, 204);
        let expected = allowed.then_some(origin);
        assert_eq!(preflight.header("access-control-allow-origin"), expected);
        assert_eq!(preflight.header("access-control-allow-methods"), allowed.then_some("GET, POST"));
        assert_eq!(preflight.header("access-control-allow-headers"), allowed.then_some(PREFLIGHT[1].1));
        let headers = [("origin", origin), (request.headers[0].0, request.headers[0].1.as_str())];
        let reply = server.http("POST", &request.path, &headers, &request.body).await;
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, expected));
        let exposed = allowed.then_some("inference-header-content-length");
        assert_eq!(reply.header("access-control-expose-headers"), exposed);
        // Also errors are readable for a page.
        let missing = server.http("GET", "/v2/nosuch", &headers[..1], b"").await;
        assert_eq!((missing.status, missing.header("access-control-allow-origin")), (404, expected));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_origins_no_page_may_call() {
    let server = Server::start(config(), &[]).await;
    let headers = [("origin", "https://example.org"), PREFLIGHT[0], PREFLIGHT[1]];
    let preflight = server.http("OPTIONS", "/v2/models/mlp/infer", &headers, b"").await;
    assert_eq!((preflight.status, preflight.header("access-control-allow-origin")), (405, None));
    server.stop().await;
    let mut config = config();
    config.cors_origins = vec!["example.org".into()];
    let dir = tempfile::tempdir().unwrap();
    let source = Source::directory(dir.path()).unwrap();
    let refused = serve(&config, source, Default::default()).await.unwrap_err().to_string();
    assert!(refused.contains("cors_origins has \"example.org\""), "{refused}");
}
