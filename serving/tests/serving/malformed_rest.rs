//! Malformed requests over REST: each gets its exact status and a reason in one line.

use serde_json::{Value, json};

use crate::malformed::{MESSAGE_BYTES_MAX, server};
use crate::support::*;

fn rest_good() -> Value {
    json!({ "inputs": [{
        "name": "input", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4],
    }] })
}

fn with(key: &str, value: Value) -> Vec<u8> {
    let mut body = rest_good();
    body["inputs"][0][key] = value;
    body.to_string().into_bytes()
}

fn without(key: &str) -> Vec<u8> {
    let mut body = rest_good();
    body["inputs"][0].as_object_mut().unwrap().remove(key);
    body.to_string().into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rest_refuses_each_with_its_status() {
    if !have_runtime() {
        return;
    }
    let server = server().await;
    let mlp = "/v2/models/mlp/infer";
    let good = rest_good().to_string().into_bytes();
    let binary = |size: usize| {
        let mut body = rest_good();
        body["inputs"][0].as_object_mut().unwrap().remove("data");
        body["inputs"][0]["parameters"] = json!({ "binary_data_size": size });
        body.to_string()
    };
    let cases: Vec<(&str, &str, Vec<u8>, u16)> = vec![
        ("unknown model", "/v2/models/nosuch/infer", good.clone(), 404),
        ("unknown version", "/v2/models/mlp/versions/9/infer", good.clone(), 404),
        ("version in letters", "/v2/models/mlp/versions/x/infer", good.clone(), 400),
        ("version 0", "/v2/models/mlp/versions/0/infer", good.clone(), 400),
        ("corrupt model", "/v2/models/corrupt/infer", good.clone(), 503),
        ("unknown path", "/v2/models/mlp/predict", good.clone(), 404),
        ("path upwards", "/v2/models/..%2Fmlp/infer", good.clone(), 404),
        ("empty body", mlp, Vec::new(), 400),
        ("no JSON", mlp, b"hello".to_vec(), 400),
        ("cut JSON", mlp, good[..good.len() - 3].to_vec(), 400),
        ("more after the JSON", mlp, [good.as_slice(), b"x"].concat(), 400),
        ("a list", mlp, b"[]".to_vec(), 400),
        ("bytes that are not UTF-8", mlp, vec![b'"', 0xff, b'"'], 400),
        ("no inputs", mlp, b"{}".to_vec(), 400),
        ("inputs that are no list", mlp, br#"{"inputs":{}}"#.to_vec(), 400),
        ("empty inputs", mlp, br#"{"inputs":[]}"#.to_vec(), 400),
        ("no name", mlp, without("name"), 400),
        ("no shape", mlp, without("shape"), 400),
        ("no datatype", mlp, without("datatype"), 400),
        ("no data", mlp, without("data"), 400),
        ("wrong name", mlp, with("name", json!("inputs")), 400),
        ("wrong datatype", mlp, with("datatype", json!("FP31")), 400),
        ("another datatype", mlp, with("datatype", json!("FP64")), 400),
        ("wrong shape", mlp, with("shape", json!([4, 1])), 400),
        ("negative shape", mlp, with("shape", json!([-1, 4])), 400),
        ("shape with fractions", mlp, with("shape", json!([1.5, 4])), 400),
        ("shape beyond 64 bits", mlp, with("shape", json!([18446744073709551615u64, 4])), 400),
        ("overflowing shape", mlp, with("shape", json!([i64::MAX, i64::MAX])), 400),
        ("too few elements", mlp, with("data", json!([1, 2, 3])), 400),
        ("ragged data", mlp, with("data", json!([[1, 2], [3], [4]])), 400),
        ("nested in another shape", mlp, with("data", json!([[1, 2], [3, 4]])), 400),
        ("strings", mlp, with("data", json!(["a", "b", "c", "d"])), 400),
        ("null", mlp, with("data", json!([1, 2, 3, null])), 400),
        ("objects", mlp, with("data", json!([{}])), 400),
        ("beyond FP32", mlp, with("data", json!([1, 2, 3, 1e300])), 400),
        ("binary size without a body", mlp, binary(16).into_bytes(), 400),
        ("data and binary size", mlp, with("parameters", json!({ "binary_data_size": 0 })), 400),
        ("shared memory", mlp, with("parameters", json!({ "shared_memory_region": "r" })), 501),
        (
            "output twice",
            mlp,
            {
                let mut body = rest_good();
                body["outputs"] = json!([{ "name": "logits" }, { "name": "logits" }]);
                body.to_string().into_bytes()
            },
            400,
        ),
        (
            "unknown output",
            mlp,
            {
                let mut body = rest_good();
                body["outputs"] = json!([{ "name": "x" }]);
                body.to_string().into_bytes()
            },
            400,
        ),
        (
            "binary_data that is no boolean",
            mlp,
            {
                let mut body = rest_good();
                body["outputs"] = json!([{ "name": "logits", "parameters": { "binary_data": 1 } }]);
                body.to_string().into_bytes()
            },
            400,
        ),
        (
            "classification",
            mlp,
            {
                let mut body = rest_good();
                body["outputs"] = json!([{ "name": "logits", "parameters": { "classification": 2 } }]);
                body.to_string().into_bytes()
            },
            501,
        ),
        ("body too large", mlp, vec![b' '; MESSAGE_BYTES_MAX + 1], 413),
        ("deep nesting", mlp, "[".repeat(10_000).into_bytes(), 400),
    ];
    for (what, path, body, status) in cases {
        let reply = server.http("POST", path, &[], &body).await;
        assert_eq!(reply.status, status, "{what}: {}", String::from_utf8_lossy(&reply.body));
        let reason = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(!reason.is_empty() && !reason.contains('\n'), "{what}: {reason}");
    }
    let body = [binary(16).as_bytes(), &[0; 16]].concat();
    let length = binary(16).len();
    let exact = length.to_string();
    for (what, headers, body, status) in [
        ("as it should be", vec![("Inference-Header-Content-Length", exact.as_str())], body.clone(), 200),
        ("header beyond the body", vec![("Inference-Header-Content-Length", "99999")], body.clone(), 400),
        ("header that is no number", vec![("Inference-Header-Content-Length", "x")], body.clone(), 400),
        (
            "too little binary data",
            vec![("Inference-Header-Content-Length", exact.as_str())],
            body[..length + 15].to_vec(),
            400,
        ),
        (
            "too much binary data",
            vec![("Inference-Header-Content-Length", exact.as_str())],
            [body.as_slice(), b"x"].concat(),
            400,
        ),
        ("compressed", vec![("Content-Encoding", "gzip")], good.clone(), 415),
    ] {
        let reply = server.http("POST", mlp, &headers, &body).await;
        assert_eq!(reply.status, status, "{what}: {}", String::from_utf8_lossy(&reply.body));
    }
    assert_eq!(server.http("GET", mlp, &[], b"").await.status, 405);
    assert_eq!(server.http("DELETE", "/v2", &[], b"").await.status, 405);

    // NaN goes in as bytes and cannot come out as JSON, but as bytes again.
    let input = |binary: bool| {
        json!({
            "inputs": [{ "name": "in_FP32", "shape": [1], "datatype": "FP32", "parameters": { "binary_data_size": 4 } }],
            "outputs": [{ "name": "out_FP32", "parameters": { "binary_data": binary } }],
        })
        .to_string()
    };
    for (binary, status) in [(false, 406), (true, 200)] {
        let head = input(binary);
        let body = [head.as_bytes(), &f32::NAN.to_le_bytes()].concat();
        let length = head.len().to_string();
        let headers = [("Inference-Header-Content-Length", length.as_str())];
        let reply = server.http("POST", "/v2/models/echo_FP32/infer", &headers, &body).await;
        assert_eq!(reply.status, status, "{}", String::from_utf8_lossy(&reply.body));
    }
    assert_eq!(server.http("POST", mlp, &[], &good).await.status, 200);
    server.stop().await;
}
