//! Tests of calls that web pages make a visitor's browser send.

use http_body_util::{BodyExt, Full};
use millrace_serving::wire::inference as pb;
use millrace_serving::{Control, Source, serve};
use prost::Message;
use tonic::body::Body;
use tonic::codegen::{Service, http};

use crate::malformed::{as_rest, typed};
use crate::support::*;

const PREFLIGHT: [(&str, &str); 2] = [
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "content-type,inference-header-content-length"),
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listed_origins_may_call() {
    let mut config = config();
    config.cors_origins = vec!["https://example.org".into(), "http://localhost:3000".into()];
    let server = Server::start(config, &[]).await;
    let request =
        as_rest(&typed(pb::InferTensorContents { fp32_contents: vec![0.5; FEATURES], ..Default::default() }));
    for (origin, allowed) in
        [("https://example.org", true), ("http://localhost:3000", true), ("https://example.com", false)]
    {
        let headers = [("origin", origin), PREFLIGHT[0], PREFLIGHT[1]];
        let preflight = server.http("OPTIONS", &request.path, &headers, b"").await;
        assert_eq!(preflight.status, if allowed { 204 } else { 403 });
        let expected = allowed.then_some(origin);
        assert_eq!(preflight.header("access-control-allow-origin"), expected);
        assert_eq!(preflight.header("access-control-allow-methods"), allowed.then_some("GET, POST"));
        assert_eq!(preflight.header("access-control-allow-headers"), allowed.then_some(PREFLIGHT[1].1));
        let headers = [("origin", origin), (request.headers[0].0, request.headers[0].1.as_str())];
        let reply = server.http("POST", &request.path, &headers, &request.body).await;
        let status = if allowed { 200 } else { 403 };
        assert_eq!((reply.status, reply.header("access-control-allow-origin")), (status, expected));
        let exposed = allowed.then_some("inference-header-content-length");
        assert_eq!(reply.header("access-control-expose-headers"), exposed);
        // A page can read errors, too.
        let missing = server.http("GET", "/v2/nosuch", &headers[..1], b"").await;
        let status = if allowed { 404 } else { 403 };
        assert_eq!((missing.status, missing.header("access-control-allow-origin")), (status, expected));
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_origins_no_page_may_call() {
    let server = Server::start(config(), &[]).await;
    let headers = [("origin", "https://example.org"), PREFLIGHT[0], PREFLIGHT[1]];
    let preflight = server.http("OPTIONS", "/v2/models/mlp/infer", &headers, b"").await;
    assert_eq!((preflight.status, preflight.header("access-control-allow-origin")), (403, None));
    server.stop().await;
    let mut config = config();
    config.cors_origins = vec!["example.org".into()];
    let dir = tempfile::tempdir().unwrap();
    let source = Source::directory(dir.path()).unwrap();
    let refused = serve(&config, source, Default::default()).await.unwrap_err().to_string();
    assert!(refused.contains("cors_origins has \"example.org\""), "{refused}");
}

/// A server whose model `mlp` a call may unload.
async fn unloadable(edit: impl FnOnce(&mut millrace_serving::Config)) -> Server {
    let mut config = config();
    config.control = Control::Explicit;
    config.load = vec!["mlp".into()];
    edit(&mut config);
    Server::start(config, &[]).await
}

const UNLOAD: &str = "/v2/repository/models/mlp/unload";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_pages_cannot_drive_a_loopback_server() {
    let server = unloadable(|_| ()).await;
    let port = server.serving.addresses().http.port();
    let rebound = format!("evil.example:{port}");
    let rebound_origin = format!("http://{rebound}");
    let neighbour = format!("http://127.0.0.1:{}", port.wrapping_add(1));
    let json = ("content-type", "application/json");
    let marks: [(&[(&str, &str)], u16); 9] = [
        (&[("origin", "https://evil.example"), json], 403),
        (&[("origin", "https://evil.example")], 403),
        (&[("origin", "null"), ("content-type", "text/plain")], 403),
        (&[("origin", &neighbour), ("sec-fetch-site", "same-site"), json], 403),
        (&[("sec-fetch-site", "cross-site"), json], 403),
        (&[("content-type", "text/plain")], 415),
        (&[("content-type", "multipart/form-data; boundary=x")], 415),
        (&[("sec-fetch-site", "none"), ("content-type", "application/x-www-form-urlencoded")], 415),
        (&[("origin", &rebound_origin), json], 421),
    ];
    for (headers, status) in marks {
        let host = if status == 421 { rebound.clone() } else { format!("127.0.0.1:{port}") };
        for path in [UNLOAD, "/v2/models/mlp/infer", "/v2/systemsharedmemory/region/r/register"] {
            let reply = server.http_of(&host, "POST", path, headers, b"{}").await;
            assert_eq!(reply.status, status, "{path} {headers:?}: {}", String::from_utf8_lossy(&reply.body));
            assert_eq!(reply.header("www-authenticate"), None);
            assert!(reply.json()["error"].is_string());
        }
    }
    // A name that was made to resolve to loopback gets nothing, not even the page.
    for path in ["/v2/models/stats", "/v2/repository/index", "/"] {
        assert_eq!(server.http_of("evil.example", "GET", path, &[], b"").await.status, 421, "{path}");
    }
    let metrics = server.serving.addresses().metrics;
    assert_eq!(http_of(metrics, "evil.example", "GET", "/metrics", &[], b"").await.status, 421);
    let foreign = [("sec-fetch-site", "cross-site")];
    assert_eq!(http(metrics, "GET", "/metrics", &foreign, b"").await.status, 403);
    assert_eq!(server.http("GET", "/v2/models/stats", &foreign, b"").await.status, 403);
    assert_eq!(server.serving.repository().versions("mlp").unwrap(), [1]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn own_page_and_programs_call_a_loopback_server() {
    let server = unloadable(|_| ()).await;
    let port = server.serving.addresses().http.port();
    let own = format!("http://127.0.0.1:{port}");
    let request =
        as_rest(&typed(pb::InferTensorContents { fp32_contents: vec![0.5; FEATURES], ..Default::default() }));
    let json = ("content-type", "application/json");
    let programs: [&[(&str, &str)]; 6] = [
        &[],
        &[json],
        &[("content-type", "Application/JSON; charset=utf-8")],
        // Triton's C++ client in control calls, and curl.
        &[("content-type", "application/x-www-form-urlencoded")],
        &[("origin", &own), json],
        &[("origin", "https://proxied.example"), ("sec-fetch-site", "same-origin"), json],
    ];
    for headers in programs {
        let reply = server.http("POST", &request.path, headers, &request.body).await;
        assert_eq!(reply.status, 200, "{headers:?}: {}", String::from_utf8_lossy(&reply.body));
    }
    for host in [
        "localhost",
        "LOCALHOST:1",
        "models.localhost",
        "127.0.0.1:9",
        "[::1]:8000",
        "10.0.0.1",
        "localhost.",
    ] {
        assert_eq!(server.http_of(host, "GET", "/v2", &[], b"").await.status, 200, "{host}");
    }
    // A link on another page may lead to the page at `/`.
    assert_eq!(server.http("GET", "/", &[("sec-fetch-site", "cross-site")], b"").await.status, 200);
    assert_eq!(server.http("POST", UNLOAD, &[json], b"").await.status, 200);
    server.stop().await;

    let server = unloadable(|config| config.cors_origins = vec!["https://models.example.org".into()]).await;
    assert_eq!(server.http_of("models.example.org", "GET", "/v2", &[], b"").await.status, 200);
    assert_eq!(server.http_of("example.org", "GET", "/v2", &[], b"").await.status, 421);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rest_over_http2_checks_the_authority() {
    let server = unloadable(|_| ()).await;
    let address = server.serving.addresses().http;
    let connect = async |origin: &str| {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
        endpoint.origin(origin.parse().unwrap()).connect().await.unwrap()
    };
    for (origin, status) in [(format!("http://{address}"), 200), ("http://evil.example".into(), 421)] {
        let mut channel = connect(&origin).await;
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
        let request = http::Request::get(format!("{origin}/v2")).body(Body::empty()).unwrap();
        assert_eq!(channel.call(request).await.unwrap().status(), status, "{origin}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_calls_have_the_content_type_of_grpc() {
    let server = unloadable(|_| ()).await;
    let address = server.serving.addresses().grpc;
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
    let mut channel = endpoint.connect().await.unwrap();
    let message =
        pb::RepositoryModelUnloadRequest { model_name: "mlp".into(), ..Default::default() }.encode_to_vec();
    let framed = [&[0][..], &(message.len() as u32).to_be_bytes(), &message].concat();
    for (content_type, status) in
        [(None, 415), (Some("text/plain"), 415), (Some("application/grpc+proto"), 200)]
    {
        let mut request = http::Request::post(format!(
            "http://{address}/inference.GRPCInferenceService/RepositoryModelUnload"
        ));
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        let body = Body::new(Full::new(bytes::Bytes::from(framed.clone())));
        std::future::poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
        let reply = channel.call(request.body(body).unwrap()).await.unwrap();
        assert_eq!(reply.status(), status, "{content_type:?}");
        reply.into_body().collect().await.unwrap();
        let loaded = server.serving.repository().versions("mlp").is_some_and(|versions| !versions.is_empty());
        assert_eq!(loaded, status == 415, "{content_type:?}");
    }
    server.stop().await;
}
