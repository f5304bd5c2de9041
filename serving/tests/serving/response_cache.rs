//! Tests of the response cache: which requests it answers, in which form, and until when.

use bytes::Bytes;
use millrace_bundle::Datatype;
use millrace_serving::tensor::Data;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, ModelOptions};
use pb::infer_parameter::ParameterChoice::Int64Param;
use serde_json::json;

use crate::shared_memory::{Object, grpc, input, output, parameters, place, register};
use crate::support::*;

/// A configuration with the response cache enabled for `models`.
pub(crate) fn caching(models: &[&str], response_cache_bytes_max: usize) -> Config {
    let options = ModelOptions { response_cache: Some(true), ..ModelOptions::default() };
    let models = models.iter().map(|name| ((*name).to_owned(), options.clone())).collect();
    Config { models, response_cache_bytes_max, ..config() }
}

/// Counters of a version.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) answered: u64,
    pub(crate) runs: u64,
    pub(crate) rows: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
}

pub(crate) async fn counts(server: &Server, model: &str, version: &str) -> Counts {
    let request = pb::ModelStatisticsRequest { name: model.into(), version: version.into() };
    let told = server.triton().await.model_statistics(request).await.unwrap().into_inner();
    let of = &told.model_stats[0];
    let steps = of.inference_stats.unwrap();
    Counts {
        answered: steps.success.unwrap().count,
        runs: of.execution_count,
        rows: of.inference_count,
        hits: steps.cache_hit.unwrap().count,
        misses: steps.cache_miss.unwrap().count,
    }
}

fn raw(values: &[f32]) -> Bytes {
    Data::Fp32(values.to_vec()).to_raw()
}

/// A request to a model with one input of rows.
pub(crate) fn request(model: &str, values: &[f32]) -> pb::ModelInferRequest {
    let rows = (values.len() / FEATURES) as i64;
    pb::ModelInferRequest {
        model_name: model.into(),
        inputs: vec![input("input", "FP32", &[rows, FEATURES as i64], vec![])],
        raw_input_contents: vec![raw(values)],
        ..Default::default()
    }
}

pub(crate) async fn ask(server: &Server, request: &pb::ModelInferRequest) -> pb::ModelInferResponse {
    grpc(server).await.model_infer(request.clone()).await.unwrap().into_inner()
}

const ROW: [f32; FEATURES] = [0.5, -1.0, 2.0, 0.25];
const ROWS: [f32; 2 * FEATURES] = [0.5, -1.0, 2.0, 0.25, 1.0, 0.0, -0.5, 3.0];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn equal_requests_run_once_and_get_equal_responses() {
    let server = Server::start(caching(&["mlp"], 1 << 20), &[]).await;
    let first = ask(&server, &request("mlp", &ROW)).await;
    let logits: Vec<f32> = first.raw_output_contents[0]
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();
    assert!(logits.iter().zip(mlp_logits(&ROW)).all(|(a, b)| (a - b).abs() < 1e-5), "{logits:?}");
    assert_eq!(ask(&server, &request("mlp", &ROW)).await, first);

    // Fields that do not change the answer do not change the key: the id, a priority, named outputs, the
    // encoding.
    let other = pb::ModelInferRequest {
        id: "7".into(),
        parameters: parameters(vec![("priority", Int64Param(1))]),
        outputs: vec![output("logits", vec![])],
        ..request("mlp", &ROW)
    };
    let reply = ask(&server, &other).await;
    assert_eq!((reply.id.as_str(), &reply.raw_output_contents), ("7", &first.raw_output_contents));
    let body = json!({ "inputs": [{ "name": "input", "shape": [1, 4], "datatype": "FP32", "data": ROW }] });
    let reply = server.http("POST", "/v2/models/mlp/infer", &[], body.to_string().as_bytes()).await.json();
    let found: Vec<f32> =
        reply["outputs"][0]["data"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect();
    assert_eq!(found, logits);
    assert_eq!(
        counts(&server, "mlp", "").await,
        Counts { answered: 4, runs: 1, rows: 1, hits: 3, misses: 1 }
    );

    let config = server.http("GET", "/v2/models/mlp/config", &[], b"").await.json();
    assert_eq!(config["response_cache"], json!({ "enable": true }));
    let shown = server.http("GET", "/v2/models/mlp/stats", &[], b"").await.json();
    assert_eq!(shown["model_stats"][0]["inference_stats"]["cache_hit"]["count"], 3);
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    for line in [
        r#"nv_cache_num_hits_per_model{model="mlp",version="1"} 3"#,
        r#"nv_cache_num_misses_per_model{model="mlp",version="1"} 1"#,
        r#"nv_cache_hit_duration_per_model{model="mlp",version="1"} "#,
        r#"nv_cache_miss_duration_per_model{model="mlp",version="1"} "#,
        "millrace_serving_response_cache_bytes ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn different_requests_are_run() {
    let config = caching(&["mlp", "both", "whole", "real"], 1 << 20);
    let of = |datatype: Datatype| echo(&[datatype]);
    let models = [
        ("mlp", 2, mlp()),
        ("both", 1, echo(&[Datatype::Int32, Datatype::Fp32])),
        ("whole", 1, of(Datatype::Int32)),
        ("real", 1, of(Datatype::Fp32)),
    ];
    let server = Server::start(config, &models).await;
    let mut requests = Vec::new();
    for (values, version) in [(&ROW[..], "1"), (&ROW, "2"), (&ROWS, "1"), (&ROWS[FEATURES..], "1")] {
        requests.push(pb::ModelInferRequest { model_version: version.into(), ..request("mlp", values) });
    }
    for wanted in [&["out_INT32", "out_FP32"][..], &["out_FP32", "out_INT32"], &["out_FP32"], &["out_INT32"]]
    {
        requests.push(pb::ModelInferRequest {
            model_name: "both".into(),
            inputs: vec![input("in_INT32", "INT32", &[1], vec![]), input("in_FP32", "FP32", &[1], vec![])],
            raw_input_contents: vec![raw(&[1.0]), raw(&[2.0])],
            outputs: wanted.iter().map(|name| output(name, vec![])).collect(),
            ..Default::default()
        });
    }
    for (model, datatype) in [("whole", "INT32"), ("real", "FP32")] {
        requests.push(pb::ModelInferRequest {
            model_name: model.into(),
            inputs: vec![input(&format!("in_{datatype}"), datatype, &[1], vec![])],
            raw_input_contents: vec![raw(&[1.0])],
            ..Default::default()
        });
    }
    let mut replies = Vec::new();
    for request in &requests {
        replies.push(ask(&server, request).await);
    }
    let ran = async |hits: u64| {
        for (model, version, runs, rows) in [
            ("mlp", "1", 3, 4),
            ("mlp", "2", 1, 1),
            ("both", "1", 4, 4),
            ("whole", "1", 1, 1),
            ("real", "1", 1, 1),
        ] {
            let expected =
                Counts { answered: runs * (1 + hits), runs, rows, hits: runs * hits, misses: runs };
            assert_eq!(counts(&server, model, version).await, expected, "{model} {version}");
        }
    };
    ran(0).await;
    for (request, reply) in requests.iter().zip(&replies) {
        assert_eq!(&ask(&server, request).await, reply);
    }
    ran(1).await;
    let names: Vec<_> = replies[5].outputs.iter().map(|output| output.name.as_str()).collect();
    assert_eq!(names, ["out_FP32", "out_INT32"]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_version_never_answers_from_the_cache_of_the_old_content() {
    let server = Server::start(caching(&["m"], 1 << 20), &[("m", 1, steps())]).await;
    let replace = async |onnx: Vec<u8>| {
        std::fs::remove_dir_all(server.dir.path().join("m/1")).unwrap();
        publish(server.dir.path(), "m", 1, onnx).await;
        server.serving.repository().refresh().await.unwrap();
    };
    let (first, second) = ROWS.split_at(FEATURES);
    let summed: Vec<f32> = first.iter().zip(second).map(|(a, b)| a + b).collect();
    let asked = request("m", &ROWS);
    assert_eq!(ask(&server, &asked).await.raw_output_contents, [raw(&[first, &summed].concat())]);
    replace(reversed()).await;
    for _ in 0..2 {
        assert_eq!(ask(&server, &asked).await.raw_output_contents, [raw(&[second, first].concat())]);
    }
    assert_eq!(counts(&server, "m", "").await, Counts { answered: 2, runs: 1, rows: 1, hits: 1, misses: 1 });
    // Equal content after a reload hits the old entries.
    replace(steps()).await;
    assert_eq!(ask(&server, &asked).await.raw_output_contents, [raw(&[first, &summed].concat())]);
    assert_eq!(counts(&server, "m", "").await, Counts { answered: 1, runs: 0, rows: 0, hits: 1, misses: 0 });
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn least_recently_requested_response_is_evicted() {
    // Capacity for two answers of one row, but not for three, nor for one answer of a hundred rows.
    let server = Server::start(caching(&["mlp"], 800), &[]).await;
    let row = |value: f32| request("mlp", &[value; FEATURES]);
    let (a, b, c) = (row(1.0), row(2.0), row(3.0));
    let mut replies = Vec::new();
    for (asked, hits) in [(&a, 0), (&b, 0), (&a, 1), (&c, 1), (&a, 2), (&b, 2), (&c, 2), (&b, 3), (&c, 4)] {
        replies.push(ask(&server, asked).await);
        assert_eq!(counts(&server, "mlp", "").await.hits, hits, "{} asked", replies.len());
    }
    assert!(replies[0] == replies[2] && replies[0] == replies[4] && replies[0] != replies[1]);
    assert!(replies[1] == replies[5] && replies[1] == replies[7]);
    let many = request("mlp", &[1.0; 100 * FEATURES]);
    assert_eq!(ask(&server, &many).await, ask(&server, &many).await);
    let after = counts(&server, "mlp", "").await;
    assert_eq!((after.hits, after.misses), (4, 7));
    // It evicted nothing.
    ask(&server, &c).await;
    assert_eq!(counts(&server, "mlp", "").await.hits, 5);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_requests_are_not_cached() {
    let server = Server::start(caching(&["sum"], 1 << 20), &[("sum", 1, sum())]).await;
    let mut client = grpc(&server).await;
    let width = FEATURES as i64;
    let apart = pb::ModelInferRequest {
        model_name: "sum".into(),
        inputs: vec![input("a", "FP32", &[2, width], vec![]), input("b", "FP32", &[3, width], vec![])],
        raw_input_contents: vec![raw(&[1.0; 2 * FEATURES]), raw(&[1.0; 3 * FEATURES])],
        ..Default::default()
    };
    for _ in 0..2 {
        let error = client.model_infer(apart.clone()).await.unwrap_err();
        assert_eq!(error.code(), tonic::Code::InvalidArgument, "{error}");
    }
    let expected = Counts { answered: 0, runs: 0, rows: 0, hits: 0, misses: 0 };
    assert_eq!(counts(&server, "sum", "").await, expected);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cached_responses_take_the_form_and_target_of_each_request() {
    let server = Server::start(caching(&["mlp"], 1 << 20), &[]).await;
    let mut client = grpc(&server).await;
    let given = Object::new("cache-in", &raw(&ROWS));
    let taken = Object::new("cache-out", &[7; 64]);
    register(&mut client, "cache-in", &given.0, 0, 32).await.unwrap();
    register(&mut client, "cache-out", &taken.0, 0, 64).await.unwrap();
    let plain = request("mlp", &ROWS);
    let logits = ask(&server, &plain).await.raw_output_contents.remove(0);

    let with = |choices| pb::ModelInferRequest { outputs: vec![output("logits", choices)], ..plain.clone() };
    for offset in [0, 40] {
        let reply = ask(&server, &with(place("cache-out", offset, 24))).await;
        assert_eq!(reply.raw_output_contents, [Bytes::new()]);
        assert_eq!(taken.read()[offset as usize..][..24], logits);
    }
    assert_eq!(taken.read()[24..40], [7; 16]);
    let classes = ask(&server, &with(vec![("classification", Int64Param(1))])).await;
    assert_eq!((classes.outputs[0].datatype.as_str(), &classes.outputs[0].shape), ("BYTES", &vec![2, 1]));
    let from_region = pb::ModelInferRequest {
        inputs: vec![input("input", "FP32", &[2, FEATURES as i64], place("cache-in", 0, 32))],
        raw_input_contents: Vec::new(),
        ..plain.clone()
    };
    assert_eq!(ask(&server, &from_region).await.raw_output_contents, std::slice::from_ref(&logits));
    // The cached answer is unchanged by its other uses.
    assert_eq!(ask(&server, &plain).await.raw_output_contents, [logits]);
    let expected = Counts { answered: 6, runs: 1, rows: 2, hits: 5, misses: 1 };
    assert_eq!(counts(&server, "mlp", "").await, expected);
    server.stop().await;
}
