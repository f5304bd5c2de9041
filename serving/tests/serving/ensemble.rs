//! Tests of ensembles: the outputs equal those of the models in sequence, and clients see an ordinary model.

use std::path::Path;

use futures::StreamExt;
use millrace_serving::client::ClientError;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use serde_json::json;
use tempfile::TempDir;
use tonic::Code;

use crate::shared_memory::grpc;
use crate::support::*;
use crate::triton_layout::put;

/// A diamond whose two sides take the same tensor: cumulative sums of rows, rows in reverse order, their sum,
/// and the small network on it. The steps are in no order.
pub(crate) const DIAMOND: &str = r#"
name: "diamond"
platform: "ensemble"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [
  { name: "logits" data_type: TYPE_FP32 dims: [ 3 ] },
  { name: "total" data_type: TYPE_FP32 dims: [ 4 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "mlp" model_version: -1
      input_map { key: "input" value: "total" }
      output_map { key: "logits" value: "logits" }
    },
    {
      model_name: "sum" model_version: 2
      input_map [ { key: "a" value: "sums" }, { key: "b" value: "turned" } ]
      output_map { key: "output" value: "total" }
    },
    {
      model_name: "steps"
      input_map { key: "input" value: "x" }
      output_map { key: "output" value: "sums" }
    },
    {
      model_name: "reversed" model_version: -1
      input_map { key: "input" value: "x" }
      output_map { key: "output" value: "turned" }
    }
  ]
}
"#;

/// Writes an ensemble: a configuration, and an empty folder as its version.
pub(crate) fn put_ensemble(dir: &Path, name: &str, config: impl AsRef<[u8]>) {
    put(dir, &format!("{name}/config.pbtxt"), config);
    std::fs::create_dir_all(dir.join(name).join("1")).unwrap();
}

/// Writes the diamond and its models.
pub(crate) async fn put_diamond(dir: &Path) {
    publish(dir, "mlp", 1, mlp()).await;
    publish(dir, "sum", 2, sum()).await;
    publish(dir, "steps", 1, steps()).await;
    publish(dir, "reversed", 1, reversed()).await;
    put_ensemble(dir, "diamond", DIAMOND);
}

pub(crate) fn rows(name: &str, count: usize) -> Tensor {
    let values = (0..count * FEATURES).map(|value| ((value * 13 + count) % 29) as f32 / 8.0 - 1.0).collect();
    Tensor::fp32(name, vec![count as i64, FEATURES as i64], values).unwrap()
}

pub(crate) fn assert_close(found: &Tensor, expected: &Tensor) {
    let (Data::Fp32(a), Data::Fp32(b)) = (&found.data, &expected.data) else { panic!("{found:?}") };
    assert_eq!(found.shape, expected.shape);
    assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4), "{found:?} {expected:?}");
}

/// `total` and `logits` from direct requests to the models.
pub(crate) async fn one_by_one(server: &Server, count: usize) -> (Tensor, Tensor) {
    let mut client = server.client().await;
    let mut ask = async |model: &str, inputs: Vec<Tensor>| {
        client.infer(model, None, inputs, Form::Raw).await.unwrap().outputs.remove(0)
    };
    let sums = ask("steps", vec![rows("input", count)]).await;
    let turned = ask("reversed", vec![rows("input", count)]).await;
    let inputs = vec![Tensor { name: "a".into(), ..sums }, Tensor { name: "b".into(), ..turned }];
    let total = ask("sum", inputs).await;
    let logits = ask("mlp", vec![Tensor { name: "input".into(), ..total.clone() }]).await;
    (total, logits)
}

/// A request for some of the diamond's outputs.
fn asking(outputs: &[&str]) -> pb::ModelInferRequest {
    let input = pb::model_infer_request::InferInputTensor {
        name: "x".into(),
        datatype: "FP32".into(),
        shape: vec![2, FEATURES as i64],
        ..Default::default()
    };
    let output = |name: &&str| pb::model_infer_request::InferRequestedOutputTensor {
        name: (*name).to_owned(),
        ..Default::default()
    };
    pb::ModelInferRequest {
        model_name: "diamond".into(),
        inputs: vec![input],
        outputs: outputs.iter().map(output).collect(),
        raw_input_contents: vec![rows("x", 2).data.to_raw()],
        ..Default::default()
    }
}

async fn statistics(server: &Server, model: &str) -> pb::ModelStatistics {
    let request = pb::ModelStatisticsRequest { name: model.into(), version: String::new() };
    server.triton().await.model_statistics(request).await.unwrap().into_inner().model_stats.remove(0)
}

async fn diamond() -> Server {
    let dir = TempDir::new().unwrap();
    put_diamond(dir.path()).await;
    Server::over(config(), dir).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ensemble_gives_the_results_of_its_models_called_one_by_one() {
    let server = diamond().await;
    let mut client = server.client().await;
    for form in [Form::Raw, Form::Typed] {
        for count in [1, 2, 8] {
            let (total, logits) = one_by_one(&server, count).await;
            let found = client.infer("diamond", None, vec![rows("x", count)], form).await.unwrap();
            assert_eq!((found.model.as_str(), found.version.as_str()), ("diamond", "1"));
            let names: Vec<&str> = found.outputs.iter().map(|output| output.name.as_str()).collect();
            assert_eq!(names, ["logits", "total"]);
            assert_close(&found.outputs[0], &logits);
            assert_close(&found.outputs[1], &total);
        }
    }
    // Over REST, in streams, and for a part of the outputs.
    let (total, logits) = one_by_one(&server, 2).await;
    let Data::Fp32(values) = rows("x", 2).data else { panic!() };
    let body = json!({
        "inputs": [{ "name": "x", "datatype": "FP32", "shape": [2, FEATURES], "data": values }],
        "outputs": [{ "name": "total" }, { "name": "logits" }],
    });
    let reply =
        server.http("POST", "/v2/models/diamond/infer", &[], body.to_string().as_bytes()).await.json();
    for (place, expected) in [(0usize, &total), (1, &logits)] {
        let data = reply["outputs"][place]["data"].as_array().unwrap();
        let data = data.iter().map(|value| value.as_f64().unwrap() as f32).collect();
        assert_close(&Tensor { data: Data::Fp32(data), ..expected.clone() }, expected);
    }
    let stream = futures::stream::iter(vec![asking(&[]), asking(&["total"])]);
    let mut answers = grpc(&server).await.model_stream_infer(stream).await.unwrap().into_inner();
    for outputs in [2, 1] {
        let answer = answers.next().await.unwrap().unwrap();
        assert_eq!(answer.error_message, "");
        let response = answer.infer_response.unwrap();
        assert_eq!(response.outputs.len(), outputs);
        assert_eq!(response.raw_output_contents[outputs - 1], total.data.to_raw());
    }
    // Errors in a request are reported before a step runs.
    let error = client.infer("diamond", None, vec![rows("x", 9)], Form::Raw).await.unwrap_err();
    let ClientError::Refused { code, message } = error else { panic!("{error}") };
    assert_eq!(code, Code::InvalidArgument);
    assert!(message.contains("9 rows") && message.contains("at most 8"), "{message}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ensemble_is_a_model_to_its_clients() {
    let server = diamond().await;
    let mut client = server.client().await;
    let metadata = server.http("GET", "/v2/models/diamond", &[], b"").await.json();
    let expected = json!({
        "name": "diamond",
        "versions": ["1"],
        "platform": "ensemble",
        "inputs": [{ "name": "x", "datatype": "FP32", "shape": [-1, 4] }],
        "outputs": [
            { "name": "logits", "datatype": "FP32", "shape": [-1, 3] },
            { "name": "total", "datatype": "FP32", "shape": [-1, 4] },
        ],
    });
    assert_eq!(metadata, expected);
    assert_eq!(client.model_metadata("diamond", "1").await.unwrap().platform, "ensemble");

    let shown = server.http("GET", "/v2/models/diamond/config", &[], b"").await.json();
    assert_eq!((&shown["platform"], &shown["backend"]), (&json!("ensemble"), &json!("")));
    assert_eq!((&shown["max_batch_size"], &shown["instance_group"]), (&json!(8), &json!([])));
    assert_eq!(shown["default_model_filename"], "");
    let joining = json!({
        "model_name": "sum",
        "model_version": 2,
        "input_map": { "a": "sums", "b": "turned" },
        "output_map": { "output": "total" },
        "model_namespace": "",
    });
    assert_eq!(shown["ensemble_scheduling"]["step"][1], joining);
    assert_eq!(shown["ensemble_scheduling"]["step"][2]["model_version"], -1);
    assert!(shown.get("dynamic_batching").is_none(), "{shown}");
    let config = client.model_config("diamond", "").await.unwrap();
    let Some(pb::model_config::SchedulingChoice::EnsembleScheduling(steps)) = &config.scheduling_choice
    else {
        panic!("{config:?}");
    };
    let models: Vec<&str> = steps.step.iter().map(|step| step.model_name.as_str()).collect();
    assert_eq!(models, ["mlp", "sum", "steps", "reversed"]);

    assert!(client.model_ready("diamond", "1").await.unwrap());
    assert_eq!(server.http("GET", "/v2/models/diamond/ready", &[], b"").await.status, 200);
    let index = server.http("POST", "/v2/repository/index", &[], b"{\"ready\": true}").await.json();
    assert_eq!(index[0], json!({ "name": "diamond", "version": "1", "state": "READY", "reason": "" }));
    let lineage = server.http("GET", "/v2/models/diamond/lineage", &[], b"").await.json();
    assert_eq!((&lineage["name"], &lineage["files"]), (&json!("diamond"), &json!([])));

    // One request to the ensemble is one to each of its models, unless none of its outputs is wanted. The
    // rows of "steps" depend on each other, so each of its requests counts as one inference.
    client.infer("diamond", None, vec![rows("x", 3)], Form::Raw).await.unwrap();
    client.infer_message(asking(&["total"])).await.unwrap();
    client.infer("diamond", None, Vec::new(), Form::Raw).await.unwrap_err();
    for (model, requests, inferences) in [("diamond", 2, 5), ("steps", 2, 2), ("sum", 2, 5), ("mlp", 1, 3)] {
        let told = statistics(&server, model).await;
        let spent = told.inference_stats.unwrap();
        assert_eq!((told.inference_count, told.execution_count), (inferences, requests), "{model}");
        assert_eq!(spent.success.unwrap().count, requests, "{model}");
        assert_eq!(spent.fail.unwrap().count, u64::from(model == "diamond"), "{model}");
    }
    let whole = statistics(&server, "diamond").await.inference_stats.unwrap();
    let parts = [whole.queue, whole.compute_input, whole.compute_infer, whole.compute_output];
    let parts: u64 = parts.iter().map(|part| part.unwrap().ns).sum();
    assert!(parts <= whole.success.unwrap().ns, "{whole:?}");
    let metrics = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await.body;
    let metrics = String::from_utf8(metrics).unwrap();
    for line in [
        "nv_inference_request_success{model=\"diamond\",version=\"1\"} 2",
        "nv_inference_request_failure{model=\"diamond\",version=\"1\"} 1",
        "nv_inference_count{model=\"diamond\",version=\"1\"} 5",
        "nv_inference_pending_request_count{model=\"diamond\",version=\"1\"} 0",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    server.stop().await;
}
