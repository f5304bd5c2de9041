//! Tests of device selection: by the server's or the model's configuration, with a reported fallback to the
//! processor only where it is allowed.

use millrace_serving::ModelOptions;
use millrace_serving::client::ClientError;
use millrace_serving::repository::VersionState;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::{Form, inference as pb};
use millrace_serving::{Config, Device, Error, Source, serve};
use tokio_util::sync::CancellationToken;
use tonic::Code;

use crate::support::*;

fn row() -> Vec<Tensor> {
    vec![Tensor::fp32("input", vec![1, FEATURES as i64], vec![0.5; FEATURES]).unwrap()]
}

fn settings(device: Option<&str>, allow_fallback: Option<bool>, sessions_max: Option<usize>) -> ModelOptions {
    ModelOptions {
        device: device.map(|device| device.parse().unwrap()),
        allow_fallback,
        sessions_max,
        ..ModelOptions::default()
    }
}

async fn described(server: &Server, model: &str) -> pb::ModelConfig {
    let request = pb::ModelConfigRequest { name: model.into(), ..Default::default() };
    server.triton().await.model_config(request).await.unwrap().into_inner().config.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_runs_on_the_processor_instead_only_where_that_is_allowed() {
    let mut config = config();
    // No machine has that many devices.
    config.models.insert("falls".into(), settings(Some("cuda:99"), Some(true), Some(2)));
    config.models.insert("stays".into(), settings(Some("cuda:99"), None, None));
    config.models.insert("compiled".into(), settings(Some("tensorrt:98,99"), None, None));
    config.models.insert("three".into(), settings(None, None, Some(3)));
    let models = ["falls", "stays", "compiled", "three"].map(|name| (name, 1, mlp()));
    let server = Server::start(config, &models).await;
    let mut client = server.client().await;
    for model in ["mlp", "falls", "three"] {
        client.infer(model, None, row(), Form::Raw).await.unwrap();
    }
    for (model, device) in [("stays", "cuda:99"), ("compiled", "tensorrt:98")] {
        match client.infer(model, None, row(), Form::Raw).await {
            Err(ClientError::Refused { code, message }) => {
                assert_eq!(code, Code::Unavailable);
                assert!(message.contains(device) && message.contains("allow_fallback"), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
    let status = server.serving.repository().status();
    let stays = status.iter().find(|status| status.model == "stays").unwrap();
    assert!(matches!(&stays.state, VersionState::Failed(reason) if reason.contains("cuda:99")), "{stays:?}");

    let falls = described(&server, "falls").await;
    assert_eq!(falls.instance_group[0].kind(), pb::model_instance_group::Kind::Cpu);
    assert_eq!(falls.instance_group[0].count, 2);
    assert_eq!(falls.parameters["runs_instead_of"].string_value, "cuda:99");
    let shown = server.http("GET", "/v2/models/falls/config", &[], b"").await.json();
    assert_eq!(shown["parameters"]["runs_instead_of"]["string_value"], "cuda:99");
    let three = described(&server, "three").await;
    assert_eq!(three.instance_group[0].count, 3);
    assert!(!three.parameters.contains_key("runs_instead_of"));
    let metrics = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await.body;
    let metrics = String::from_utf8(metrics).unwrap();
    for line in [
        "millrace_serving_sessions{asked=\"cuda:99\",device=\"cpu\",model=\"falls\",version=\"1\"} 2",
        "millrace_serving_sessions{asked=\"cpu\",device=\"cpu\",model=\"three\",version=\"1\"} 3",
    ] {
        assert!(metrics.lines().any(|found| found == line), "{line} is not in {metrics}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_server_falls_back_where_it_may() {
    let fallback = Config { device: Device::Cuda(99).into(), allow_fallback: true, ..config() };
    let server = Server::start(fallback, &[]).await;
    server.client().await.infer("mlp", None, row(), Form::Raw).await.unwrap();
    assert_eq!(described(&server, "mlp").await.parameters["runs_instead_of"].string_value, "cuda:99");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_that_no_model_can_have_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let with = |name: &str, sessions| {
        let mut config = config();
        config.models.insert(name.into(), settings(None, None, sessions));
        config
    };
    let cases = [
        (with("../up", None), "../up"),
        (with("", None), "models"),
        (with("mlp", Some(1_000_000)), "1000000"),
        (with("mlp", Some(usize::MAX)), "at most 1024"),
        (Config { sessions_max: 1025, ..config() }, "sessions_max is 1025"),
    ];
    for (config, part) in cases {
        let source = Source::directory(dir.path()).unwrap();
        let error = serve(&config, source, CancellationToken::new()).await.unwrap_err();
        assert!(matches!(error, Error::Config { .. }), "{error}");
        assert!(error.to_string().contains(part), "{part} is not in {error}");
    }
}
