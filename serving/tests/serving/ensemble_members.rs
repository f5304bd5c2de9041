//! Tests of ensembles while their models come, go, are replaced, wait and refuse.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_serving::client::{Client, ClientError};
use millrace_serving::config::VersionPolicy;
use millrace_serving::repository::VersionState;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use millrace_serving::wire::inference as pb;
use millrace_serving::{Config, Control, ModelOptions};
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::Code;

use crate::ensemble::{DIAMOND, assert_close, one_by_one, put_diamond, put_ensemble, rows};
use crate::scheduling::{Line, ROWS_MAX, holding, message, until};
use crate::support::*;
use crate::triton_layout::put;

/// Concurrent clients.
const CLIENTS: usize = 3;

async fn ask(client: &mut Client, model: &str, input: Tensor) -> Result<Vec<Tensor>, (Code, String)> {
    match client.infer(model, None, vec![input], Form::Raw).await {
        Ok(prediction) => Ok(prediction.outputs),
        Err(ClientError::Refused { code, message }) => Err((code, message)),
        Err(other) => panic!("{other}"),
    }
}

/// Clients that send requests to the diamond until they are stopped. Each returns its numbers of answers and
/// refusals.
struct Load {
    stop: Arc<AtomicBool>,
    clients: Vec<JoinHandle<(u64, u64)>>,
}

impl Load {
    /// Every answer must be right, and every refusal the expected one.
    async fn start(server: &Server, refusal: &'static str) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let mut clients = Vec::new();
        for count in 1..=CLIENTS {
            let (total, logits) = one_by_one(server, count).await;
            let (mut client, stop) = (server.client().await, stop.clone());
            clients.push(tokio::spawn(async move {
                let (mut answered, mut refused) = (0, 0);
                while !stop.load(Ordering::Relaxed) {
                    match ask(&mut client, "diamond", rows("x", count)).await {
                        Ok(outputs) => {
                            assert_close(&outputs[0], &logits);
                            assert_close(&outputs[1], &total);
                            answered += 1;
                        }
                        Err((code, message)) => {
                            assert_eq!((code, message.as_str()), (Code::Unavailable, refusal));
                            refused += 1;
                        }
                    }
                }
                (answered, refused)
            }));
        }
        Load { stop, clients }
    }

    /// The numbers of answers and refusals.
    async fn end(self) -> (u64, u64) {
        self.stop.store(true, Ordering::Relaxed);
        let mut sums = (0, 0);
        for client in self.clients {
            let (answered, refused) = client.await.unwrap();
            sums = (sums.0 + answered, sums.1 + refused);
        }
        sums
    }
}

/// Requests answered by a version.
async fn answered(server: &Server, model: &str, version: u64) -> u64 {
    let request = pb::ModelStatisticsRequest { name: model.into(), version: version.to_string() };
    let told = server.triton().await.model_statistics(request).await.unwrap().into_inner().model_stats;
    told[0].inference_stats.unwrap().success.unwrap().count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_are_replaced_while_an_ensemble_runs_on_them() {
    let dir = TempDir::new().unwrap();
    put_diamond(dir.path()).await;
    let server = Server::over(config(), dir).await;
    let load = Load::start(&server, "none is").await;
    for version in 2..5 {
        publish(server.dir.path(), "mlp", version, mlp()).await;
        server.serving.repository().refresh().await.unwrap();
        std::fs::remove_dir_all(server.dir.path().join(format!("mlp/{}", version - 1))).unwrap();
        server.serving.repository().refresh().await.unwrap();
        until("the new version answers", async || answered(&server, "mlp", version).await > 0).await;
        assert_eq!(server.serving.repository().versions("mlp"), Some(vec![version]));
    }
    let (answered, refused) = load.end().await;
    assert!(answered > 0 && refused == 0, "{answered} {refused}");

    // The ensemble itself is replaced by its configuration: now it has one output.
    let (_, logits) = one_by_one(&server, 2).await;
    let narrow = DIAMOND.replace(",\n  { name: \"total\" data_type: TYPE_FP32 dims: [ 4 ] }", "");
    put_ensemble(server.dir.path(), "diamond", narrow);
    server.serving.repository().refresh().await.unwrap();
    let outputs = ask(&mut server.client().await, "diamond", rows("x", 2)).await.unwrap();
    assert_eq!(outputs.len(), 1);
    assert_close(&outputs[0], &logits);
    // An invalid configuration leaves it unchanged and is reported.
    put_ensemble(server.dir.path(), "diamond", "platform: \"ensemble\"");
    server.serving.repository().refresh().await.unwrap();
    assert_eq!(ask(&mut server.client().await, "diamond", rows("x", 2)).await.unwrap().len(), 1);
    let status = server.serving.repository().status();
    let of_model = status.iter().find(|it| it.model == "diamond" && it.version.is_none()).unwrap();
    let VersionState::Failed(reason) = &of_model.state else { panic!("{of_model:?}") };
    assert!(reason.contains("needs ensemble_scheduling"), "{reason}");
    server.stop().await;
}

async fn load(client: &mut Triton, model: &str) -> Result<(), tonic::Status> {
    let request = pb::RepositoryModelLoadRequest { model_name: model.into(), ..Default::default() };
    client.repository_model_load(request).await.map(drop)
}

async fn unload(client: &mut Triton, model: &str, dependents: bool) {
    let choice = pb::model_repository_parameter::ParameterChoice::BoolParam(dependents);
    let parameter = pb::ModelRepositoryParameter { parameter_choice: Some(choice) };
    let request = pb::RepositoryModelUnloadRequest {
        model_name: model.into(),
        parameters: [("unload_dependents".to_owned(), parameter)].into(),
        ..Default::default()
    };
    client.repository_model_unload(request).await.unwrap();
}

/// The models that the index reports as ready.
async fn ready(client: &mut Triton) -> Vec<String> {
    let request = pb::RepositoryIndexRequest { ready: true, ..Default::default() };
    let models = client.repository_index(request).await.unwrap().into_inner().models;
    models.into_iter().map(|model| model.name).collect()
}

fn explicit(names: &[&str]) -> Config {
    let load = names.iter().map(ToString::to_string).collect();
    Config { control: Control::Explicit, load, ..config() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ensemble_is_loaded_and_unloaded_with_its_models() {
    let dir = TempDir::new().unwrap();
    put_diamond(dir.path()).await;
    let two = r#"
        input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ -1, 4 ] }
        ensemble_scheduling { step {
            model_name: "reversed"
            input_map { key: "input" value: "x" }
            output_map { key: "output" value: "y" }
        } }
    "#;
    put_ensemble(dir.path(), "two", two);
    put_ensemble(dir.path(), "bad", two.replace("\"reversed\"", "\"nosuch\""));
    let server = Server::over(explicit(&["mlp"]), dir).await;
    let mut client = server.triton().await;
    assert_eq!(ready(&mut client).await, ["mlp"]);
    load(&mut client, "diamond").await.unwrap();
    assert_eq!(ready(&mut client).await, ["diamond", "mlp", "reversed", "steps", "sum"]);
    load(&mut client, "two").await.unwrap();
    let input = rows("x", 3);
    ask(&mut server.client().await, "diamond", input.clone()).await.unwrap();
    let turned = ask(&mut server.client().await, "two", input.clone()).await.unwrap();
    assert_eq!(turned[0].shape, [3, 4]);

    // Models that a call names stay, and so do models of another ensemble.
    load(&mut client, "sum").await.unwrap();
    unload(&mut client, "diamond", true).await;
    assert_eq!(ready(&mut client).await, ["mlp", "reversed", "sum", "two"]);
    unload(&mut client, "two", false).await;
    assert_eq!(ready(&mut client).await, ["mlp", "reversed", "sum"]);
    load(&mut client, "two").await.unwrap();
    unload(&mut client, "two", true).await;
    assert_eq!(ready(&mut client).await, ["mlp", "sum"]);

    // Models of former steps are unloaded when the ensemble is loaded again.
    load(&mut client, "two").await.unwrap();
    assert_eq!(ready(&mut client).await, ["mlp", "reversed", "sum", "two"]);
    put_ensemble(server.dir.path(), "two", two.replace("\"reversed\"", "\"nosuch\""));
    load(&mut client, "two").await.unwrap_err();
    put_ensemble(server.dir.path(), "two", two.replace("\"reversed\"", "\"steps\""));
    load(&mut client, "two").await.unwrap();
    assert_eq!(ready(&mut client).await, ["mlp", "steps", "sum", "two"]);
    let summed = ask(&mut server.client().await, "two", input.clone()).await.unwrap();
    assert_ne!(summed[0].data, turned[0].data);
    unload(&mut client, "two", true).await;
    assert_eq!(ready(&mut client).await, ["mlp", "sum"]);

    // The call returns the reason why it cannot run, as the index does.
    let refused = load(&mut client, "bad").await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    let reason = "step 1 (model \"nosuch\"): the server has no model \"nosuch\"";
    assert_eq!(refused.message(), format!("ensemble \"bad\" version 1: {reason}"));
    let request = pb::RepositoryIndexRequest::default();
    let models = client.repository_index(request).await.unwrap().into_inner().models;
    let bad = models.iter().find(|model| model.name == "bad").unwrap();
    assert_eq!((bad.state.as_str(), bad.reason.as_str()), ("UNAVAILABLE", reason));
    assert_eq!(ready(&mut client).await, ["mlp", "sum"]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_is_unloaded_while_an_ensemble_runs_on_it() {
    let dir = TempDir::new().unwrap();
    put_diamond(dir.path()).await;
    let server = Server::over(explicit(&["diamond"]), dir).await;
    let refusal = "ensemble \"diamond\" version 1: step 1 (model \"mlp\"): the server has no model \"mlp\"";
    let asking = Load::start(&server, refusal).await;
    let mut client = server.triton().await;
    let mut own = server.client().await;
    for _ in 0..3 {
        unload(&mut client, "mlp", false).await;
        assert!(!own.model_ready("diamond", "").await.unwrap());
        assert!(!ready(&mut client).await.contains(&"diamond".to_owned()));
        let refused = ask(&mut own, "diamond", rows("x", 1)).await.unwrap_err();
        assert_eq!(refused, (Code::Unavailable, refusal.to_owned()));
        let reply = server.http("GET", "/v2/models/diamond/ready", &[], b"").await;
        assert_eq!((reply.status, reply.json()["error"].as_str()), (503, Some(refusal)));
        load(&mut client, "mlp").await.unwrap();
        assert!(own.model_ready("diamond", "").await.unwrap());
        ask(&mut own, "diamond", rows("x", 1)).await.unwrap();
    }
    let before = answered(&server, "mlp", 1).await;
    until("clients are answered again", async || answered(&server, "mlp", 1).await > before).await;
    let (answered, _) = asking.end().await;
    assert!(answered > 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ensemble_is_ready_when_all_versions_fit_that_its_steps_are_split_between() {
    let dir = TempDir::new().unwrap();
    put_diamond(dir.path()).await;
    // This one no longer fits; the versions before and after it do.
    publish(dir.path(), "mlp", 2, fixed()).await;
    publish(dir.path(), "mlp", 3, mlp()).await;
    let options = ModelOptions { versions: Some(VersionPolicy::All), ..Default::default() };
    let config = Config { models: [("mlp".to_owned(), options)].into(), ..config() };
    let server = Server::over(config, dir).await;
    let mut client = server.client().await;
    let repository = server.serving.repository();
    assert!(client.model_ready("diamond", "").await.unwrap());
    for (weights, ready) in [(r#"{"2": 1, "3": 9}"#, false), (r#"{"1": 1, "3": 1}"#, true)] {
        put(server.dir.path(), "mlp/rollout.json", format!("{{\"split\": {weights}}}"));
        repository.refresh().await.unwrap();
        assert_eq!(client.model_ready("diamond", "").await.unwrap(), ready, "{weights}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn error_of_an_ensemble_step_names_the_step() {
    let dir = TempDir::new().unwrap();
    put_diamond(dir.path()).await;
    // Larger than the models accept, which only a request shows.
    let loose = DIAMOND.replace("\"diamond\"", "\"loose\"").replace("dims: [ 4 ]", "dims: [ -1 ]");
    put_ensemble(dir.path(), "loose", loose);
    // Smaller than the model's output.
    let tight = r#"
        input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
        output { name: "y" data_type: TYPE_FP32 dims: [ 2, 4 ] }
        ensemble_scheduling { step {
            model_name: "steps"
            input_map { key: "input" value: "x" }
            output_map { key: "output" value: "y" }
        } }
    "#;
    put_ensemble(dir.path(), "tight", tight);
    let server = Server::over(config(), dir).await;
    let mut client = server.client().await;
    let wide = Tensor::fp32("x", vec![1, 5], vec![0.5; 5]).unwrap();
    let (code, message) = ask(&mut client, "loose", wide).await.unwrap_err();
    assert_eq!(code, Code::InvalidArgument);
    let step = |number, model: &str| {
        format!(
            "ensemble \"loose\" version 1: step {number} (model \"{model}\"), version 1: input \"input\" has shape [1, 5], \
             the model takes [-1, 4] (-1: any extent)"
        )
    };
    // Both steps get it; the first one to fail reports it.
    assert!([step(3, "steps"), step(4, "reversed")].contains(&message), "{message}");
    ask(&mut client, "loose", rows("x", 2)).await.unwrap();
    ask(&mut client, "tight", rows("x", 2)).await.unwrap();
    let (code, message) = ask(&mut client, "tight", rows("x", 3)).await.unwrap_err();
    let expected = "output \"y\" has shape [3, 4], and [2, 4] in config.pbtxt of the ensemble";
    assert_eq!((code, message.as_str()), (Code::InvalidArgument, expected));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ensemble_step_waits_in_the_queue_of_its_model_until_the_deadline() {
    let line = Line::start(holding(), "line-of-steps").await;
    let dir = line.server.dir.path();
    publish(dir, "first", 1, slow(1)).await;
    let pair = r#"
        max_batch_size: 8
        input { name: "input" data_type: TYPE_FP32 dims: 512 }
        output { name: "output" data_type: TYPE_FP32 dims: 512 }
        ensemble_scheduling {
            step {
                model_name: "first"
                input_map { key: "input" value: "input" }
                output_map { key: "output" value: "between" }
            }
            step {
                model_name: "line-of-steps"
                input_map { key: "input" value: "between" }
                output_map { key: "output" value: "output" }
            }
        }
    "#;
    put_ensemble(dir, "pair", pair);
    let twin = r#"
        max_batch_size: 8
        input { name: "input" data_type: TYPE_FP32 dims: 512 }
        output [ { name: "y" data_type: TYPE_FP32 dims: 512 }, { name: "z" data_type: TYPE_FP32 dims: 512 } ]
        ensemble_scheduling {
            step {
                model_name: "line-of-steps"
                input_map { key: "input" value: "input" }
                output_map { key: "output" value: "y" }
            }
            step {
                model_name: "line-of-steps"
                input_map { key: "input" value: "input" }
                output_map { key: "output" value: "z" }
            }
        }
    "#;
    put_ensemble(dir, "twin", twin);
    line.server.serving.repository().refresh().await.unwrap();
    let client = line.server.client().await;
    let send = |model: &str, parameters: &[(&str, u64)]| {
        let (mut client, message) = (client.clone(), message(model, 1, parameters));
        tokio::spawn(async move { client.infer_message(message).await })
    };
    let (runs, holder) = line.hold().await;

    // The request's time ends while it waits for its second step, unless the machine is so slow that it ends
    // before the first.
    let mut micros = 50_000;
    let message = loop {
        let refused = send("pair", &[("timeout", micros)]).await.unwrap().unwrap_err();
        let ClientError::Refused { code, message } = refused else { panic!("{refused}") };
        assert_eq!(code, Code::DeadlineExceeded, "{message}");
        if message.contains("step 2") {
            break message;
        }
        assert!(message.contains("step 1 (model \"first\"), version 1: the request waited"), "{message}");
        micros *= 2;
    };
    let place = "ensemble \"pair\" version 1: step 2 (model \"line-of-steps\"), version 1: the request waited for a session";
    assert!(message.starts_with(place), "{message}");
    line.waiting(0).await;

    // A disconnecting client cancels its waiting step.
    let gone = send("pair", &[]);
    line.waiting(1).await;
    gone.abort();
    line.waiting(0).await;
    until("it is counted", async || line.outcome("cancelled").await == 1).await;

    // Independent steps wait at the same time, and are batched with those of other requests.
    let twins = send("twin", &[]);
    line.waiting(2).await;
    let filler = line.send(&client, ROWS_MAX - 3, &[]);
    filler.await.unwrap().unwrap();
    holder.await.unwrap().unwrap();
    let twins = twins.await.unwrap().unwrap();
    assert_eq!(twins.outputs.iter().map(|output| output.name.as_str()).collect::<Vec<_>>(), ["y", "z"]);
    let floats = |raw: &[u8]| -> Vec<f32> {
        raw.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let (y, z) = (floats(&twins.raw_output_contents[0]), floats(&twins.raw_output_contents[1]));
    assert!(y.len() == 512 && y.iter().zip(&z).all(|(y, z)| (y - z).abs() < 1e-4), "{y:?} {z:?}");
    assert_eq!(line.statistics().await.execution_count, runs + 1);
    line.server.stop().await;
}
