//! Tests of sequences with server-side state: concurrent clients against a reference model, streams, and
//! version changes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use millrace_bundle::onnx::{GraphProto, tensor_proto::DataType};
use millrace_serving::ModelOptions;
use millrace_serving::wire::inference as pb;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use pb::model_infer_request::InferInputTensor;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tempfile::TempDir;
use tonic::{Code, Status};

use crate::rollout::{split, with_options};
use crate::support::*;
use crate::triton_layout::put;

const WAIT: Duration = Duration::from_secs(120);
/// Inputs of [`accumulator`].
const WIDTH: usize = 2;

/// Accumulates `x` FP32 [batch, 2] in `sum`, and returns its sequence controls.
pub(crate) fn accumulator() -> Vec<u8> {
    use DataType::{Bool, Float, Int32, Uint64};
    let wide = [-1, WIDTH as i64];
    model(GraphProto {
        name: Some("accumulator".into()),
        node: vec![
            node("Add", &["past", "x"], "sum"),
            node("Identity", &["sum"], "next"),
            node("Identity", &["start"], "started"),
            node("Identity", &["end"], "ended"),
            node("Identity", &["ready"], "was_ready"),
            node("Identity", &["id"], "of"),
        ],
        input: vec![
            value("start", Int32, &[-1, 1]),
            value("x", Float, &wide),
            value("past", Float, &wide),
            value("end", Bool, &[-1, 1]),
            value("ready", Float, &[-1, 1]),
            value("id", Uint64, &[-1, 1]),
        ],
        output: vec![
            value("sum", Float, &wide),
            value("next", Float, &wide),
            value("started", Int32, &[-1, 1]),
            value("ended", Bool, &[-1, 1]),
            value("was_ready", Float, &[-1, 1]),
            value("of", Uint64, &[-1, 1]),
        ],
        ..Default::default()
    })
}

/// The configuration of [`accumulator`], with further fields of `sequence_batching`.
pub(crate) fn accumulating(more: &str) -> String {
    format!(
        r#"max_batch_size: 8
        sequence_batching {{
          {more}
          control_input [
            {{ name: "start" control [ {{ kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] }} ] }},
            {{ name: "end" control [ {{ kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] }} ] }},
            {{ name: "ready" control [ {{ kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0.5, 1.5 ] }} ] }},
            {{ name: "id" control [ {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} ] }}
          ]
          state [ {{
            input_name: "past" output_name: "next" data_type: TYPE_FP32 dims: [ 2 ]
            initial_state: {{ data_type: TYPE_FP32 dims: [ 2 ] zero_data: true name: "zeros" }}
          }} ]
        }}"#
    )
}

/// No sequence becomes idle during a test.
pub(crate) const PATIENT: &str = "max_sequence_idle_microseconds: 3600000000";

pub(crate) fn publish_accumulator(dir: &Path, name: &str, version: u64, more: &str) {
    put(dir, &format!("{name}/config.pbtxt"), accumulating(more));
    put(dir, &format!("{name}/{version}/model.onnx"), accumulator());
}

/// A sequence request as Triton's clients send it.
pub(crate) fn request(model: &str, id: u64, start: bool, end: bool, x: &[f32]) -> pb::ModelInferRequest {
    let parameter = |choice| pb::InferParameter { parameter_choice: Some(choice) };
    let flags = [("sequence_start", start), ("sequence_end", end)];
    let flags = flags.map(|(name, is)| (name.to_owned(), parameter(ParameterChoice::BoolParam(is))));
    let id = ("sequence_id".to_owned(), parameter(ParameterChoice::Int64Param(id as i64)));
    pb::ModelInferRequest {
        model_name: model.into(),
        id: "r".into(),
        parameters: flags.into_iter().chain([id]).collect(),
        inputs: vec![InferInputTensor {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![1, x.len() as i64],
            ..Default::default()
        }],
        raw_input_contents: vec![x.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>().into()],
        ..Default::default()
    }
}

fn raw<'a>(response: &'a pb::ModelInferResponse, name: &str) -> &'a [u8] {
    let place = response.outputs.iter().position(|output| output.name == name).unwrap();
    &response.raw_output_contents[place]
}

/// The first number of an output.
pub(crate) fn first(response: &pb::ModelInferResponse, name: &str) -> f32 {
    f32::from_le_bytes(*raw(response, name).first_chunk().unwrap())
}

/// One request; returns the version that answered and the sum, or the error.
pub(crate) async fn step(
    client: &mut Triton,
    model: &str,
    id: u64,
    (start, end): (bool, bool),
    x: f32,
) -> Result<(String, f32), Status> {
    let response = client.model_infer(request(model, id, start, end, &[x, 0.0])).await?.into_inner();
    let sum = first(&response, "sum");
    Ok((response.model_version, sum))
}

pub(crate) const START: (bool, bool) = (true, false);
pub(crate) const NEXT: (bool, bool) = (false, false);
pub(crate) const END: (bool, bool) = (false, true);

/// The same request over REST; returns the sum, or the status and the reason.
async fn rest(
    address: std::net::SocketAddr,
    id: u64,
    (start, end): (bool, bool),
    x: &[f32],
) -> Result<f32, (u16, String)> {
    let body = json!({
        "parameters": { "sequence_id": id, "sequence_start": start, "sequence_end": end },
        "inputs": [{ "name": "x", "datatype": "FP32", "shape": [1, x.len()], "data": x }],
        "outputs": [{ "name": "of" }, { "name": "sum" }],
    });
    let path = "/v2/models/acc/infer";
    let reply = http(address, "POST", path, &[], body.to_string().as_bytes()).await;
    let json = reply.json();
    match reply.status {
        200 => {
            assert_eq!(json["outputs"][0]["data"][0], id, "{json}");
            Ok(json["outputs"][1]["data"][0].as_f64().unwrap() as f32)
        }
        status => Err((status, json["error"].as_str().unwrap().to_owned())),
    }
}

/// A client that runs random sequences of its own and checks each answer.
async fn wander(address: millrace_serving::Addresses, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let mut client = Triton::connect(format!("http://{}", address.grpc)).await.unwrap();
    let mut sums: BTreeMap<u64, f32> = BTreeMap::new();
    for n in 0..120 {
        let id = seed * 100 + random.random_range(1..=5);
        let live = sums.contains_key(&id);
        let start = random.random_bool(if live { 0.1 } else { 0.7 });
        let end = random.random_bool(0.15);
        let x = random.random_range(1..1000) as f32;
        // Some are malformed and refused.
        let wrong = random.random_bool(0.1);
        let inputs = vec![x; if wrong { WIDTH + 1 } else { WIDTH }];
        let before = if start { Some(0.0) } else { sums.get(&id).copied() };
        let expected = before.filter(|_| !wrong).map(|before| before + x);
        let found = if n % 3 == 0 {
            rest(address.http, id, (start, end), &inputs).await.map_err(|(status, reason)| {
                assert_eq!(status, 400, "{reason}");
                reason
            })
        } else {
            let answer = client.model_infer(request("acc", id, start, end, &inputs)).await;
            answer.map(|response| first(response.get_ref(), "sum")).map_err(|status| {
                assert_eq!(status.code(), Code::InvalidArgument, "{status}");
                status.message().to_owned()
            })
        };
        match (&found, wrong) {
            (Ok(sum), _) => assert_eq!(Some(*sum), expected, "seed {seed}, {id}"),
            (Err(reason), true) => assert!(reason.contains("[-1, 2]"), "{reason}"),
            (Err(reason), false) => {
                assert_eq!(expected, None, "seed {seed}, {id}: {reason}");
                assert!(reason.contains(&format!("no live sequence {id}: begin it with")), "{reason}");
            }
        }
        match found {
            Ok(_) if end => sums.remove(&id),
            Ok(sum) => sums.insert(id, sum),
            Err(_) => None,
        };
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_sequences_have_separate_states() {
    let dir = TempDir::new().unwrap();
    publish_accumulator(dir.path(), "acc", 1, PATIENT);
    let mut config = config();
    config.sessions_max = 2;
    let server = Server::over(config, dir).await;
    let addresses = server.serving.addresses();
    let clients: Vec<_> = (1..=4).map(|seed| tokio::spawn(wander(addresses, seed))).collect();
    for client in clients {
        client.await.unwrap();
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_stream_run_in_their_order() {
    let dir = TempDir::new().unwrap();
    publish_accumulator(dir.path(), "acc", 1, PATIENT);
    let server = Server::over(config(), dir).await;
    // All are sent before the first answer; requests after a start wait for it.
    let (mut requests, mut expected) = (Vec::new(), Vec::new());
    let mut random = StdRng::seed_from_u64(5);
    let mut sums: BTreeMap<u64, f32> = BTreeMap::new();
    for _ in 0..400 {
        let id = random.random_range(1..=4);
        let (start, end) = (!sums.contains_key(&id), random.random_bool(0.1));
        let x = random.random_range(1..1000) as f32;
        let sum = sums.get(&id).copied().unwrap_or(0.0) + x;
        match end {
            true => sums.remove(&id),
            false => sums.insert(id, sum),
        };
        requests.push(request("acc", id, start, end, &[x, 0.0]));
        expected.push((sum, i32::from(start), u8::from(end), id));
    }
    let mut client = server.triton().await;
    let stream = futures::stream::iter(requests);
    let mut answers = client.model_stream_infer(stream).await.unwrap().into_inner();
    for (sum, start, end, id) in expected {
        let answer = tokio::time::timeout(WAIT, answers.message()).await.unwrap().unwrap().unwrap();
        assert_eq!(answer.error_message, "");
        let response = answer.infer_response.unwrap();
        assert_eq!(first(&response, "sum"), sum, "{id}");
        assert_eq!(raw(&response, "started"), start.to_le_bytes());
        assert_eq!(raw(&response, "ended"), [end]);
        assert_eq!(first(&response, "was_ready"), 1.5);
        assert_eq!(raw(&response, "of"), id.to_le_bytes());
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sequence_stays_with_the_version_that_began_it() {
    let dir = TempDir::new().unwrap();
    publish_accumulator(dir.path(), "acc", 1, PATIENT);
    let server = Server::over(config(), dir).await;
    let refresh = async || server.serving.repository().refresh().await.unwrap();
    let mut client = server.triton().await;
    let mut ask = async |id, flags| step(&mut client, "acc", id, flags, 1.0).await;
    let by = |version: &str, sum: f32| (version.to_owned(), sum);
    assert_eq!(ask(1, START).await.unwrap(), by("1", 1.0));
    assert_eq!(ask(2, START).await.unwrap(), by("1", 1.0));
    publish_accumulator(server.dir.path(), "acc", 2, PATIENT);
    refresh().await;
    assert_eq!(ask(1, NEXT).await.unwrap(), by("1", 2.0));
    assert_eq!(ask(3, START).await.unwrap(), by("2", 1.0));
    // A sequence that restarts moves to the newest version and ends in all others.
    assert_eq!(ask(1, START).await.unwrap(), by("2", 1.0));
    assert_eq!(ask(1, NEXT).await.unwrap(), by("2", 2.0));
    assert_eq!(ask(2, NEXT).await.unwrap(), by("1", 2.0));
    std::fs::remove_dir_all(server.dir.path().join("acc/2")).unwrap();
    refresh().await;
    for id in [1, 3] {
        let status = ask(id, NEXT).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains("begin it with sequence_start"), "{status}");
    }
    assert_eq!(ask(2, END).await.unwrap(), by("1", 3.0));
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sequences_are_split_by_their_ids() {
    let dir = TempDir::new().unwrap();
    publish_accumulator(dir.path(), "mlp", 1, PATIENT);
    publish_accumulator(dir.path(), "mlp", 2, PATIENT);
    let options = ModelOptions { split: split(&[("1", 1.0), ("2", 1.0)]), ..ModelOptions::default() };
    let server = Server::over(with_options(options), dir).await;
    let mut client = server.triton().await;
    let mut versions = BTreeSet::new();
    for id in 1..=32 {
        let (version, _) = step(&mut client, "mlp", id, START, 1.0).await.unwrap();
        for sum in [2.0, 3.0] {
            let again = step(&mut client, "mlp", id, NEXT, 1.0).await.unwrap();
            assert_eq!(again, (version.clone(), sum));
        }
        versions.insert(version);
    }
    assert_eq!(versions.len(), 2, "{versions:?}");
    server.stop().await;
}
