//! Tests of the web page over HTTP, and of the lineage that it shows. `tests/conformance/browser.rs` tests it
//! in a browser.

use std::collections::BTreeMap;

use millrace_bundle::{Bundle, Lineage};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_is_one_document_without_other_resources() {
    let server = Server::start(config(), &[]).await;
    let page = server.http("GET", "/", &[], b"").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
    assert_eq!(page.header("referrer-policy"), Some("no-referrer"));
    let policy = page.header("content-security-policy").unwrap();
    for rule in ["default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"] {
        assert!(policy.contains(rule), "{policy}");
    }
    // Its own script and style by their digests only.
    for kind in ["script-src", "style-src"] {
        let rule = policy.split("; ").find(|rule| rule.starts_with(kind)).unwrap();
        let sources: Vec<&str> = rule.split(' ').skip(1).collect();
        assert!(sources.len() == 1 && sources[0].starts_with("'sha256-"), "{rule}");
    }
    let html = String::from_utf8(page.body.clone()).unwrap();
    assert!(html.starts_with("<!doctype html>") && html.contains("lang=\"en\""));
    assert_eq!(html.matches("</script>").count(), 1);
    assert_eq!(html.matches("</style>").count(), 1);
    for outside in
        ["src=", "@import", "url(", "innerHTML", "document.write", "eval(", " style=\"", "onclick="]
    {
        assert!(!html.contains(outside), "{outside} in the page");
    }
    // The only URL in it is the SVG namespace, from which nothing is loaded.
    let addresses = html.match_indices("http").map(|(at, _)| html[at..].chars().take(26).collect::<String>());
    for address in addresses {
        assert!(address == "http://www.w3.org/2000/svg", "{address}");
    }

    let head = server.http("HEAD", "/", &[], b"").await;
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(head.header("content-length"), Some(page.body.len().to_string().as_str()));
    assert_eq!(head.header("content-security-policy"), Some(policy));
    let packed = server.http("GET", "/", &[("accept-encoding", "gzip")], b"").await;
    assert_eq!((packed.status, packed.header("content-encoding")), (200, Some("gzip")));
    assert!(packed.body.len() < page.body.len() / 2);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lineage_is_read_from_the_manifest() {
    let dir = tempfile::tempdir().unwrap();
    let lineage = Lineage {
        volume: "digits".into(),
        snapshot: "monday".into(),
        path: "/train".into(),
        topic: String::new(),
        mixture: Vec::new(),
        selection: String::new(),
        offsets: BTreeMap::from([("digits".to_owned(), BTreeMap::from([(0, 700), (1, 737)]))]),
        config_sha256: "ab".repeat(32),
        seed: u64::MAX,
        code_version: "0.1.0".into(),
        steps: 120,
        epochs: 3,
        imported: None,
        quantized: None,
    };
    let bundle = Bundle::new("mlp", 2, mlp(), lineage.clone(), [("loss".to_owned(), 0.25)].into()).unwrap();
    let store = object_store::local::LocalFileSystem::new_with_prefix(dir.path()).unwrap();
    bundle.write(&store, "").await.unwrap();
    publish(dir.path(), "mlp", 1, mlp()).await;
    let server = Server::over(config(), dir).await;
    for path in ["/v2/models/mlp/lineage", "/v2/models/mlp/versions/2/lineage"] {
        let reply = server.http("GET", path, &[], b"").await;
        assert_eq!((reply.status, reply.header("content-type")), (200, Some("application/json")));
        let said = reply.json();
        assert_eq!(said["lineage"], serde_json::to_value(&lineage).unwrap());
        assert_eq!(said["metrics"]["loss"], 0.25);
        assert_eq!(said["files"][0]["sha256"], bundle.model_sha256());
        assert_eq!((&said["name"], &said["version"]), (&"mlp".into(), &"2".into()));
        assert_eq!(said["created_at"], bundle.manifest().created_at);
    }
    let first = server.http("GET", "/v2/models/mlp/versions/1/lineage", &[], b"").await.json();
    assert_eq!(first["lineage"], serde_json::to_value(Lineage::default()).unwrap());
    server.stop().await;
}
