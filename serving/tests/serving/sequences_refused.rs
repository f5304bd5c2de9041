//! Tests of refused sequence requests: missing and unknown ids, bounds, idle sequences, and the configuration
//! that clients see of a model with states.

use millrace_serving::Config;
use millrace_serving::wire::inference as pb;
use millrace_serving::wire::inference::infer_parameter::ParameterChoice;
use serde_json::json;
use tempfile::TempDir;
use tonic::Code;

use crate::sequences::{
    END, NEXT, PATIENT, START, accumulating, accumulator, publish_accumulator, request, step,
};
use crate::support::*;
use crate::triton_layout::put;

async fn serve(config: Config, more: &str) -> Server {
    let dir = TempDir::new().unwrap();
    publish_accumulator(dir.path(), "acc", 1, more);
    publish(dir.path(), "mlp", 1, mlp()).await;
    Server::over(config, dir).await
}

/// The metric of live sequences of a version.
async fn live(server: &Server) -> u64 {
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    let name = "millrace_serving_live_sequences{model=\"acc\",version=\"1\"} ";
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
}

fn with(mut request: pb::ModelInferRequest, name: &str, choice: ParameterChoice) -> pb::ModelInferRequest {
    request.parameters.insert(name.into(), pb::InferParameter { parameter_choice: Some(choice) });
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_without_a_live_sequence_is_refused_with_a_remedy() {
    let server = serve(config(), PATIENT).await;
    let mut client = server.triton().await;
    let good = || request("acc", 5, true, false, &[1.0; 2]);
    let mut without = good();
    without.parameters.clear();
    let mut given = good();
    given
        .inputs
        .push(pb::model_infer_request::InferInputTensor { name: "past".into(), ..given.inputs[0].clone() });
    given.raw_input_contents.push(vec![0; 8].into());
    let mut asked = good();
    asked.outputs.push(pb::model_infer_request::InferRequestedOutputTensor {
        name: "next".into(),
        ..Default::default()
    });
    let mut rows = good();
    rows.inputs[0].shape = vec![2, 2];
    rows.raw_input_contents[0] = vec![0; 16].into();
    let text = |text: &str| ParameterChoice::StringParam(text.into());
    let cases = [
        (without, "give the parameter sequence_id, sequence_start = true with the first"),
        (with(good(), "sequence_id", ParameterChoice::Int64Param(0)), "give the parameter sequence_id"),
        (with(good(), "sequence_id", text("")), "give the parameter sequence_id"),
        (
            with(good(), "sequence_id", ParameterChoice::Int64Param(-5)),
            "an integer from 0 to 2^64 - 1, it is -5",
        ),
        (
            with(good(), "sequence_id", ParameterChoice::BoolParam(true)),
            "an integer or a string, it is a boolean",
        ),
        (
            with(good(), "sequence_id", text(&"a".repeat(129))),
            "a string of up to 128 bytes, it is one of 129",
        ),
        (with(good(), "sequence_id", text("a")), "sequence_id is \"a\", and the model takes ids as UINT64"),
        (with(good(), "sequence_start", ParameterChoice::Int64Param(1)), "takes a boolean, it is an integer"),
        (with(good(), "sequence_end", text("true")), "takes a boolean, it is a string"),
        (
            request("acc", 6, false, false, &[1.0; 2]),
            "no live sequence 6: begin it with sequence_start = true",
        ),
        (request("acc", 6, false, true, &[1.0; 2]), "no live sequence 6"),
        (given, "the model has no input \"past\", its inputs are [\"x\"]"),
        (asked, "the model has no output \"next\""),
        (rows, "a request of a sequence has one row"),
    ];
    for (request, expected) in cases {
        let status = client.model_infer(request).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{expected}: {status}");
        assert!(status.message().contains(expected), "{expected}: {status}");
    }
    let body = json!({ "inputs": [{ "name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2] }] });
    let reply = server.http("POST", "/v2/models/acc/infer", &[], body.to_string().as_bytes()).await;
    assert_eq!(reply.status, 400);
    assert!(reply.json()["error"].as_str().unwrap().contains("give the parameter sequence_id"));
    // None of these began a sequence. A sequence that ends is gone, and a start begins a new one.
    assert_eq!(live(&server).await, 0);
    let mut ask = async |id, flags| step(&mut client, "acc", id, flags, 1.0).await;
    for (id, flags, sum) in [(1, START, 1.0), (1, NEXT, 2.0), (1, START, 1.0), (2, START, 1.0), (1, END, 2.0)]
    {
        assert_eq!(ask(id, flags).await.unwrap().1, sum);
    }
    assert_eq!(ask(1, NEXT).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(ask(3, (true, true)).await.unwrap().1, 1.0);
    assert_eq!(ask(3, NEXT).await.unwrap_err().code(), Code::InvalidArgument);
    assert_eq!(live(&server).await, 1);
    // A model without sequences ignores the sequence parameters.
    let mut mlp = request("mlp", 9, false, true, &[0.0; FEATURES]);
    mlp.inputs[0].name = "input".into();
    client.model_infer(mlp).await.unwrap();
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_see_neither_states_nor_controls() {
    let server = serve(config(), &format!("{PATIENT} oldest {{ max_candidate_sequences: 4 }}")).await;
    let shown = server.http("GET", "/v2/models/acc", &[], b"").await.json();
    assert_eq!(shown["inputs"], json!([{ "name": "x", "datatype": "FP32", "shape": [-1, 2] }]));
    let names = |list: &serde_json::Value| -> Vec<String> {
        list.as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&shown["outputs"]), ["sum", "started", "ended", "was_ready", "of"]);
    let config = server.http("GET", "/v2/models/acc/config", &[], b"").await.json();
    assert_eq!((names(&config["input"]), config["max_batch_size"].clone()), (vec!["x".to_owned()], json!(8)));
    let batching = &config["sequence_batching"];
    assert_eq!(batching["max_sequence_idle_microseconds"], 3_600_000_000u64);
    assert_eq!(batching["oldest"]["max_candidate_sequences"], 4);
    assert_eq!(names(&batching["control_input"]), ["start", "end", "ready", "id"]);
    let control = &batching["control_input"][0]["control"][0];
    assert_eq!(
        (&control["kind"], &control["int32_false_true"]),
        (&json!("CONTROL_SEQUENCE_START"), &json!([0, 1]))
    );
    let state = &batching["state"][0];
    assert_eq!((&state["input_name"], &state["output_name"]), (&json!("past"), &json!("next")));
    assert_eq!((&state["dims"], &state["initial_state"][0]["zero_data"]), (&json!([2]), &json!(true)));
    assert!(config.get("dynamic_batching").is_none(), "{config}");
    let grpc = server.client().await.model_config("acc", "").await.unwrap();
    let Some(pb::model_config::SchedulingChoice::SequenceBatching(batching)) = &grpc.scheduling_choice else {
        panic!("{grpc:?}")
    };
    assert_eq!((batching.state.len(), batching.control_input.len()), (1, 4));
    let metadata = server.client().await.server_metadata().await.unwrap();
    assert!(metadata.extensions.contains(&"sequence".to_owned()), "{metadata:?}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn live_sequences_are_limited() {
    let by_the_server = |sequences_max, sequence_bytes_max| {
        let mut config = config();
        config.limits.sequences_max = sequences_max;
        config.limits.sequence_bytes_max = sequence_bytes_max;
        config
    };
    let candidates = format!("{PATIENT} oldest {{ max_candidate_sequences: 2 }}");
    for (config, more, limit) in [
        (config(), candidates.as_str(), "max_candidate_sequences"),
        (by_the_server(2, 1 << 20), PATIENT, "limits.sequences_max"),
        // A state has two elements of 32 bits.
        (by_the_server(100, 16), PATIENT, "limits.sequence_bytes_max"),
    ] {
        let server = serve(config, more).await;
        let mut client = server.triton().await;
        let mut ask = async |id, flags| step(&mut client, "acc", id, flags, 1.0).await.map(|(_, sum)| sum);
        for id in [1, 2] {
            assert_eq!(ask(id, START).await.unwrap(), 1.0);
        }
        let status = ask(3, START).await.unwrap_err();
        assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
        assert!(status.message().contains(limit), "{status}");
        // The others continue, also with a new start, and free capacity at their end.
        assert_eq!(ask(1, NEXT).await.unwrap(), 2.0);
        assert_eq!(ask(2, START).await.unwrap(), 1.0);
        assert_eq!(ask(1, END).await.unwrap(), 3.0);
        assert_eq!(ask(3, START).await.unwrap(), 1.0);
        assert_eq!(live(&server).await, 2);
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_sequences_are_evicted_for_new_ones() {
    // On any machine the next request comes later than this.
    let idle = "max_sequence_idle_microseconds: 1 oldest { max_candidate_sequences: 1 }";
    let server = serve(config(), idle).await;
    let mut client = server.triton().await;
    for id in 1..=5 {
        assert_eq!(step(&mut client, "acc", id, START, 1.0).await.unwrap().1, 1.0);
    }
    let status = step(&mut client, "acc", 5, NEXT, 1.0).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().contains("had no request for 1 us"), "{status}");
    assert_eq!(live(&server).await, 0);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_whose_states_do_not_fit_are_named() {
    let dir = TempDir::new().unwrap();
    publish(dir.path(), "mlp", 1, mlp()).await;
    let good = accumulating(PATIENT);
    let cases = [
        ("dims", good.replace("dims: [ 2 ]", "dims: [ 3 ]"), "state \"past\" is FP32 [-1, 3]"),
        ("output", good.replace("\"next\"", "\"none\""), "names output \"none\", the graph has none"),
        (
            "type",
            good.replace("int32_false_true: [ 0, 1 ]", "bool_false_true: [ false, true ]"),
            "\"start\" is BOOL",
        ),
        // Without rows, `dims` covers the whole tensor.
        ("rows", good.replace("max_batch_size: 8", ""), "state \"past\" is FP32 [2]"),
        (
            "left",
            good.replace(
                "max_batch_size: 8",
                "max_batch_size: 8 input { name: \"y\" data_type: TYPE_FP32 dims: 2 }",
            ),
            "no input \"y\"",
        ),
    ];
    for (name, content, _) in &cases {
        put(dir.path(), &format!("{name}/config.pbtxt"), content);
        put(dir.path(), &format!("{name}/1/model.onnx"), accumulator());
    }
    let server = Server::over(config(), dir).await;
    let mut client = server.triton().await;
    for (name, _, expected) in &cases {
        let status = step(&mut client, name, 1, START, 1.0).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable, "{name}: {status}");
        assert!(status.message().contains(expected), "{name}: {status}");
    }
    server.stop().await;
}
