//! Tests of the response cache's settings: off by default, enabled by the server or by the model's own
//! configuration.

use millrace_serving::{Config, ModelOptions, Source, serve};
use serde_json::json;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

use crate::response_cache::{Counts, ask, caching, counts, request};
use crate::support::*;
use crate::triton_layout::put;

const ENABLED: &str = "response_cache { enable: true }";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_are_cached_only_if_server_and_model_enable_it() {
    let option = |response_cache| ModelOptions { response_cache, ..ModelOptions::default() };
    // Cache bytes of the server, the model's setting in millrace.toml, its config.pbtxt, and the outcome.
    for (bytes, said, pbtxt, kept) in [
        (0, None, "", false),
        (0, None, ENABLED, false),
        (0, Some(false), ENABLED, false),
        (1 << 20, None, "", false),
        (1 << 20, None, "response_cache { }", false),
        (1 << 20, Some(false), ENABLED, false),
        (1 << 20, None, ENABLED, true),
        (1 << 20, Some(true), "response_cache { enable: false }", true),
    ] {
        let dir = TempDir::new().unwrap();
        put(dir.path(), "mlp/config.pbtxt", pbtxt);
        put(dir.path(), "mlp/1/model.onnx", mlp());
        let models = [("mlp".to_owned(), option(said))].into();
        let config = Config { models, response_cache_bytes_max: bytes, ..config() };
        let server = Server::over(config, dir).await;
        let asked = request("mlp", &[0.5; FEATURES]);
        assert_eq!(ask(&server, &asked).await, ask(&server, &asked).await);
        let expected = match kept {
            true => Counts { answered: 2, runs: 1, rows: 1, hits: 1, misses: 1 },
            false => Counts { answered: 2, runs: 2, rows: 2, hits: 0, misses: 0 },
        };
        assert_eq!(counts(&server, "mlp", "").await, expected, "{bytes} {said:?} {pbtxt}");
        let told = server.http("GET", "/v2/models/mlp/config", &[], b"").await.json();
        assert_eq!(told.get("response_cache").is_some(), kept, "{told}");
        server.stop().await;
    }
}

#[tokio::test]
async fn response_cache_without_memory_is_refused_at_start() {
    let dir = TempDir::new().unwrap();
    let source = Source::directory(dir.path()).unwrap();
    let error = serve(&caching(&["digits"], 0), source, CancellationToken::new()).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("digits") && text.contains("response_cache_bytes_max is 0"), "{text}");
    for (table, part) in [
        (r#"{"response_cache_bytes_max":-1}"#, "-1"),
        (r#"{"response_cache_bytes_max":"many"}"#, "many"),
        (r#"{"models":{"m":{"response_cache":1}}}"#, "boolean"),
    ] {
        let error = serde_json::from_str::<Config>(table).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_outputs_in_the_configuration_miss_the_response_cache() {
    use millrace_bundle::Datatype::{Fp32, Int32};
    let dir = TempDir::new().unwrap();
    put(dir.path(), "both/config.pbtxt", "");
    put(dir.path(), "both/1/model.onnx", echo(&[Int32, Fp32]));
    let server = Server::over(caching(&["both"], 1 << 20), dir).await;
    let body = json!({ "inputs": [
        { "name": "in_INT32", "shape": [1], "datatype": "INT32", "data": [5] },
        { "name": "in_FP32", "shape": [1], "datatype": "FP32", "data": [0.5] },
    ] });
    let outputs = async || {
        let reply = server.http("POST", "/v2/models/both/infer", &[], body.to_string().as_bytes()).await;
        let outputs = reply.json()["outputs"].as_array().unwrap().clone();
        outputs.iter().map(|output| (output["name"].clone(), output["data"].clone())).collect::<Vec<_>>()
    };
    let whole = (json!("out_INT32"), json!([5]));
    let real = (json!("out_FP32"), json!([0.5]));
    for _ in 0..2 {
        assert_eq!(outputs().await, [whole.clone(), real.clone()]);
    }
    let narrow = r#"output { name: "out_FP32" data_type: TYPE_FP32 dims: [ -1 ] }"#;
    put(server.dir.path(), "both/config.pbtxt", narrow);
    server.serving.repository().refresh().await.unwrap();
    for _ in 0..2 {
        assert_eq!(outputs().await, std::slice::from_ref(&real));
    }
    assert_eq!(counts(&server, "both", "").await.hits, 1);
    server.stop().await;
}
