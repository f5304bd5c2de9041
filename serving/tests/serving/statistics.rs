//! Tests of model configurations and statistics, over gRPC and REST.

use millrace_bundle::Datatype;
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use serde_json::json;
use tonic::Code;

use crate::support::*;

fn rows(count: usize) -> Vec<Tensor> {
    let values = vec![0.5; count * FEATURES];
    vec![Tensor::fp32("input", vec![count as i64, FEATURES as i64], values).unwrap()]
}

async fn statistics(client: &mut Triton, name: &str, version: &str) -> Vec<pb::ModelStatistics> {
    let request = pb::ModelStatisticsRequest { name: name.into(), version: version.into() };
    client.model_statistics(request).await.unwrap().into_inner().model_stats
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn model_configuration_describes_the_served_model() {
    let mut config = config();
    config.sessions_max = 3;
    config.limits.versions_max = 5;
    config.batching.preferred_rows = vec![8, 4, 1000];
    config.batching.delay_us_max = 70;
    config.limits.message_bytes_max = 1 << 20;
    let echo = echo(&[Datatype::Bytes, Datatype::Bf16]);
    let server = Server::start(config, &[("fixed", 2, fixed()), ("echo", 1, echo)]).await;
    let mut client = server.triton().await;
    let mut of = async |name: &str, version: &str| {
        let request = pb::ModelConfigRequest { name: name.into(), version: version.into() };
        client.model_config(request).await.map(|reply| reply.into_inner().config.unwrap())
    };

    let mlp = of("mlp", "").await.unwrap();
    assert_eq!((mlp.name.as_str(), mlp.platform.as_str()), ("mlp", "onnxruntime_onnx"));
    assert_eq!((mlp.backend.as_str(), mlp.default_model_filename.as_str()), ("onnxruntime", "model.onnx"));
    assert_eq!(mlp.max_batch_size, (1 << 20) / (4 * FEATURES as i32));
    assert_eq!((mlp.input[0].data_type(), &mlp.input[0].dims), (pb::DataType::TypeFp32, &vec![4]));
    assert_eq!((mlp.output[0].name.as_str(), &mlp.output[0].dims), ("logits", &vec![3]));
    assert_eq!((mlp.instance_group[0].count, mlp.instance_group.len()), (3, 1));
    assert_eq!(mlp.instance_group[0].kind(), pb::model_instance_group::Kind::Cpu);
    let Some(pb::model_config::SchedulingChoice::DynamicBatching(batching)) = &mlp.scheduling_choice else {
        panic!("{mlp:?}");
    };
    assert_eq!(
        (batching.max_queue_delay_microseconds, batching.preferred_batch_size.as_slice()),
        (70, &[4, 8][..])
    );

    let fixed = of("fixed", "2").await.unwrap();
    assert_eq!((fixed.max_batch_size, &fixed.input[0].dims), (0, &vec![2, 3]));
    assert_eq!(fixed.scheduling_choice, None);
    let echo = of("echo", "").await.unwrap();
    assert_eq!(echo.max_batch_size, 65_536);
    let types: Vec<_> = echo.input.iter().map(|input| (input.data_type(), input.dims.clone())).collect();
    assert_eq!(types, [(pb::DataType::TypeString, vec![]), (pb::DataType::TypeBf16, vec![])]);

    let reply = server.http("GET", "/v2/models/mlp/config", &[], b"").await;
    let versioned = server.http("GET", "/v2/models/mlp/versions/1/config", &[], b"").await;
    assert_eq!((reply.status, reply.json()), (200, versioned.json()));
    let shown = reply.json();
    assert_eq!(shown["max_batch_size"], mlp.max_batch_size);
    assert_eq!(shown["version_policy"], json!({ "latest": { "num_versions": 5 } }));
    assert_eq!(shown["input"][0]["data_type"], "TYPE_FP32");
    assert_eq!(shown["input"][0]["format"], "FORMAT_NONE");
    assert_eq!((&shown["input"][0]["dims"], &shown["output"][0]["dims"]), (&json!([4]), &json!([3])));
    assert_eq!(shown["input"][0]["optional"], false);
    assert_eq!(shown["instance_group"][0]["kind"], "KIND_CPU");
    assert_eq!(shown["instance_group"][0]["count"], 3);
    assert_eq!(shown["dynamic_batching"]["preferred_batch_size"], json!([4, 8]));
    for scheduling in ["sequence_batching", "ensemble_scheduling"] {
        assert!(shown.get(scheduling).is_none(), "{shown}");
    }

    for (name, version, code, status) in [
        ("nosuch", "", Code::NotFound, 404),
        ("mlp", "9", Code::NotFound, 404),
        ("mlp", "0", Code::InvalidArgument, 400),
        ("mlp", "latest", Code::InvalidArgument, 400),
        ("mlp", "99999999999999999999", Code::InvalidArgument, 400),
    ] {
        assert_eq!(of(name, version).await.unwrap_err().code(), code, "{name} {version}");
        let path = match version {
            "" => format!("/v2/models/{name}/config"),
            version => format!("/v2/models/{name}/versions/{version}/config"),
        };
        let reply = server.http("GET", &path, &[], b"").await;
        assert_eq!(reply.status, status, "{path}");
        assert!(reply.json()["error"].is_string());
    }
    let long = "m".repeat(10_000);
    assert_eq!(of(&long, "").await.unwrap_err().code(), Code::NotFound);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statistics_count_requests() {
    let server = Server::start(config(), &[("mlp", 2, mlp()), ("fixed", 1, fixed())]).await;
    let mut client = server.client().await;
    let mut triton = server.triton().await;
    let untouched = &statistics(&mut triton, "mlp", "2").await[0];
    assert_eq!((untouched.last_inference, untouched.inference_count, untouched.execution_count), (0, 0, 0));
    assert!(untouched.batch_stats.is_empty());

    for count in [1, 5, 1] {
        client.infer("mlp", None, rows(count), Form::Raw).await.unwrap();
    }
    client.infer("mlp", None, Vec::new(), Form::Raw).await.unwrap_err();
    let ids = Tensor::new("input", vec![2, 3], Data::Int32(vec![1; 6])).unwrap();
    client.infer("fixed", None, vec![ids], Form::Raw).await.unwrap();

    let mlp = &statistics(&mut triton, "mlp", "2").await[0];
    assert_eq!((mlp.name.as_str(), mlp.version.as_str()), ("mlp", "2"));
    assert_eq!((mlp.inference_count, mlp.execution_count), (7, 3));
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis() as u64;
    assert!(mlp.last_inference > now - 600_000 && mlp.last_inference <= now, "{mlp:?}");
    let inference = mlp.inference_stats.unwrap();
    let (success, fail) = (inference.success.unwrap(), inference.fail.unwrap());
    assert_eq!((success.count, fail.count), (3, 1));
    let steps = [inference.queue, inference.compute_input, inference.compute_infer, inference.compute_output];
    assert!(steps.iter().all(|step| step.unwrap().count == 3), "{inference:?}");
    let sum: u64 = steps.iter().map(|step| step.unwrap().ns).sum();
    assert!(inference.compute_infer.unwrap().ns > 0 && sum <= success.ns, "{inference:?}");
    let sizes: Vec<_> =
        mlp.batch_stats.iter().map(|size| (size.batch_size, size.compute_infer.unwrap().count)).collect();
    assert_eq!(sizes, [(1, 2), (5, 1)]);
    let by_size: u64 = mlp.batch_stats.iter().map(|size| size.compute_infer.unwrap().ns).sum();
    assert_eq!(by_size, inference.compute_infer.unwrap().ns);

    // A first extent that is not a batch makes the request one inference.
    assert_eq!(statistics(&mut triton, "fixed", "").await[0].inference_count, 1);
    let named = |found: Vec<pb::ModelStatistics>| -> Vec<String> {
        found.into_iter().map(|of| format!("{}/{}", of.name, of.version)).collect()
    };
    assert_eq!(named(statistics(&mut triton, "mlp", "").await), ["mlp/1", "mlp/2"]);
    assert_eq!(named(statistics(&mut triton, "", "").await), ["fixed/1", "mlp/1", "mlp/2"]);

    let get = async |path: &str| server.http("GET", path, &[], b"").await;
    let all = get("/v2/models/stats").await.json();
    assert_eq!(all["model_stats"].as_array().unwrap().len(), 3);
    let shown = get("/v2/models/mlp/versions/2/stats").await.json()["model_stats"][0].clone();
    assert_eq!(shown["inference_count"], 7);
    assert_eq!(shown["inference_stats"]["success"], json!({ "count": 3, "ns": success.ns }));
    assert_eq!(shown["inference_stats"]["cache_hit"], json!({ "count": 0, "ns": 0 }));
    assert_eq!(shown["batch_stats"][1]["batch_size"], 5);
    assert_eq!((&shown["response_stats"], &shown["memory_usage"]), (&json!({}), &json!([])));
    assert_eq!(get("/v2/models/mlp/stats").await.json()["model_stats"].as_array().unwrap().len(), 2);

    for (name, version, code) in [
        ("nosuch", "", Code::NotFound),
        ("mlp", "3", Code::NotFound),
        ("mlp", "x", Code::InvalidArgument),
        ("", "1", Code::InvalidArgument),
    ] {
        let request = pb::ModelStatisticsRequest { name: name.into(), version: version.into() };
        let error = triton.model_statistics(request).await.unwrap_err();
        assert_eq!(error.code(), code, "{name} {version}: {error}");
    }
    assert_eq!(get("/v2/models/nosuch/stats").await.status, 404);
    assert_eq!(get("/v2/models/mlp/versions/x/stats").await.status, 400);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn statistics_of_a_model_that_is_loaded_again_begin_anew() {
    let server = Server::start(config(), &[]).await;
    let mut client = server.client().await;
    let mut triton = server.triton().await;
    client.infer("mlp", None, rows(2), Form::Raw).await.unwrap();
    server.serving.repository().refresh().await.unwrap();
    assert_eq!(statistics(&mut triton, "mlp", "").await[0].inference_count, 2);
    std::fs::remove_dir_all(server.dir.path().join("mlp/1")).unwrap();
    publish(server.dir.path(), "mlp", 1, slow(2)).await;
    server.serving.repository().refresh().await.unwrap();
    let anew = &statistics(&mut triton, "mlp", "").await[0];
    assert_eq!((anew.inference_count, anew.last_inference), (0, 0));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_have_the_names_of_triton() {
    let server = Server::start(config(), &[("idle", 3, mlp())]).await;
    let mut client = server.client().await;
    for count in [1, 5] {
        client.infer("mlp", None, rows(count), Form::Raw).await.unwrap();
    }
    let wrong = vec![Tensor::fp32("other", vec![1], vec![0.5]).unwrap()];
    client.infer("mlp", None, wrong, Form::Raw).await.unwrap_err();
    let told = statistics(&mut server.triton().await, "mlp", "").await.remove(0);
    let steps = told.inference_stats.unwrap();

    let metrics = async || {
        let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
        String::from_utf8(reply.body).unwrap()
    };
    let text = metrics().await;
    let value = |name: &str, model: &str| -> Option<u64> {
        let labels =
            if model == "idle" { r#"{model="idle",version="3"} "# } else { r#"{model="mlp",version="1"} "# };
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(labels));
        line.map(|value| value.parse().unwrap())
    };
    let micros = |spent: Option<pb::StatisticDuration>| spent.unwrap().ns / 1_000;
    for (name, expected) in [
        ("nv_inference_request_success", 2),
        ("nv_inference_request_failure", 1),
        ("nv_inference_count", 6),
        ("nv_inference_exec_count", 2),
        ("nv_inference_request_duration_us", micros(steps.success)),
        ("nv_inference_queue_duration_us", micros(steps.queue)),
        ("nv_inference_compute_input_duration_us", micros(steps.compute_input)),
        ("nv_inference_compute_infer_duration_us", micros(steps.compute_infer)),
        ("nv_inference_compute_output_duration_us", micros(steps.compute_output)),
        ("nv_inference_pending_request_count", 0),
    ] {
        assert_eq!(value(name, "mlp"), Some(expected), "{name}: {text}");
        assert_eq!(value(name, "idle"), Some(0), "{name}: {text}");
        let kind = if name.ends_with("pending_request_count") { "gauge" } else { "counter" };
        assert!(text.contains(&format!("# TYPE {name} {kind}")), "{name}: {text}");
    }
    // Deleted versions have no metrics.
    std::fs::remove_dir_all(server.dir.path().join("idle")).unwrap();
    server.serving.repository().refresh().await.unwrap();
    let after = metrics().await;
    assert!(!after.contains(r#"nv_inference_count{model="idle""#), "{after}");
    assert!(after.contains(r#"nv_inference_count{model="mlp",version="1"} 6"#), "{after}");
    server.stop().await;
}
