//! Tests of configurations that are honored, and of refused ones with their reasons.
use millrace_bundle::Datatype;

use super::*;
use millrace_serving_core::config::Device;

fn spec(name: &str, datatype: Datatype, shape: &[i64]) -> TensorSpec {
    TensorSpec { name: name.into(), datatype, shape: shape.to_vec() }
}

fn graph() -> Signature {
    Signature {
        inputs: vec![spec("x", Datatype::Fp32, &[-1, 4]), spec("n", Datatype::Int64, &[-1, -1])],
        outputs: vec![spec("y", Datatype::Fp32, &[-1, 3]), spec("z", Datatype::Fp32, &[-1, 3])],
    }
}

fn read(text: &str) -> Result<Declared, String> {
    Declared::read("m", text.as_bytes())
}

const IO: &str = r#"
    input [ { name: "n" data_type: TYPE_INT64 dims: [ 7 ] }, { name: "x" data_type: TYPE_FP32 dims: 4 } ]
    output { name: "z" data_type: TYPE_FP32 dims: 3 }
"#;

#[test]
fn an_empty_configuration_leaves_everything_to_graph_and_server() {
    let declared = read("").unwrap();
    assert_eq!(declared.loading.signature(&graph()).unwrap(), graph());
    assert_eq!((declared.policy, declared.loading.max_batch_size), (None, None));
    let (mut config, before) = (Config::default(), Config::default());
    declared.loading.apply(&mut config);
    assert_eq!(config, before);
    assert_eq!(declared.loading.file, "model.onnx");
}

#[test]
fn declared_settings_are_applied() {
    let declared = read(&format!(
        r#"name: "m" backend: "onnxruntime" max_batch_size: 32 default_model_filename: "net.onnx"
        version_policy {{ specific {{ versions: [3, 1] }} }}
        dynamic_batching {{ preferred_batch_size: [ 8, 32 ] max_queue_delay_microseconds: 500 }}
        instance_group [ {{ count: 2 kind: KIND_CPU }}, {{ kind: KIND_CPU }} ]
        parameters {{ key: "k" value {{ string_value: "v" }} }} {IO}"#
    ))
    .unwrap();
    assert_eq!(declared.policy, Some(VersionPolicy::Specific(vec![1, 3])));
    assert_eq!(declared.ignored, ["parameters"]);
    let loading = &declared.loading;
    assert_eq!((loading.max_batch_size, loading.file.as_str()), (Some(32), "net.onnx"));
    let mut config = Config { device: Device::Cuda(0).into(), ..Config::default() };
    loading.apply(&mut config);
    assert_eq!((config.sessions_max, config.device), (3, Devices::CPU));
    assert_eq!((config.batching.rows_max, config.batching.delay_us_max), (32, 500));
    assert_eq!(config.batching.preferred_rows, [8, 32]);
    for (groups, devices, sessions) in [
        ("{ kind: KIND_GPU }", "cuda", 1),
        ("{ count: 2 kind: KIND_GPU gpus: [ 1, 0 ] }", "cuda:0,1", 2),
        ("{ gpus: 3 }, { kind: KIND_GPU gpus: [ 3, 5 ] }, { kind: KIND_GPU gpus: 5 }", "cuda:3,5", 2),
        ("{ count: 4 }", "cpu", 4),
    ] {
        let mut config = Config::default();
        let declared = read(&format!("backend: \"onnxruntime\" instance_group [ {groups} ] {IO}")).unwrap();
        declared.loading.apply(&mut config);
        assert_eq!((config.device.to_string().as_str(), config.sessions_max), (devices, sessions));
    }
    let tensorrt = "execution_accelerators { gpu_execution_accelerator { name: \"tensorrt\" } }";
    for (kind, optimization, devices, ignored) in [
        ("KIND_GPU gpus: [ 1 ]", tensorrt, "tensorrt:1", false),
        ("KIND_GPU", &format!("graph {{ level: 1 }} {tensorrt}"), "tensorrt", true),
        ("KIND_GPU", "execution_accelerators { gpu_execution_accelerator { name: \"auto\" } }", "cuda", true),
        (
            "KIND_GPU",
            &tensorrt.replace("rt\"", "rt\" parameters { key: \"a\" value: \"b\" }"),
            "tensorrt",
            true,
        ),
        ("KIND_CPU", tensorrt, "cpu", true),
        ("KIND_GPU", "", "cuda", false),
    ] {
        let optimization =
            if optimization.is_empty() { "" } else { &format!("optimization {{ {optimization} }}") };
        let declared =
            read(&format!("backend: \"onnxruntime\" instance_group {{ kind: {kind} }} {optimization} {IO}"))
                .unwrap();
        let mut config = Config::default();
        declared.loading.apply(&mut config);
        assert_eq!(config.device.to_string(), devices, "{kind} {optimization}");
        assert_eq!(
            declared.ignored.iter().any(|field| field == "optimization"),
            ignored,
            "{kind} {optimization}"
        );
    }
    // In the graph's order, with the row dimension, as narrow as declared, and without the output that the
    // configuration omits.
    let signature = loading.signature(&graph()).unwrap();
    let inputs = [spec("x", Datatype::Fp32, &[-1, 4]), spec("n", Datatype::Int64, &[-1, 7])];
    assert_eq!(signature.inputs, inputs);
    assert_eq!(signature.outputs.len(), 1);
    assert_eq!(signature.outputs[0].name, "z");
}

#[test]
fn a_model_without_rows_runs_its_requests_one_by_one() {
    let declared = read(r#"input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }"#).unwrap();
    assert_eq!(declared.loading.max_batch_size, Some(0));
    let mut config = Config::default();
    declared.loading.apply(&mut config);
    assert_eq!(config.batching.rows_max, 0);
}

#[test]
fn unsupported_settings_are_refused_with_their_line() {
    let cases = [
        ("name: \"other\"", "line 1: name is \"other\", but the folder is \"m\""),
        ("\nplatform: \"tensorrt_plan\"", "line 2: platform: \"tensorrt_plan\": only ONNX models"),
        ("backend: \"python\"", "line 1: backend: \"python\": only ONNX models are served here: export it"),
        (
            "platform: \"ensemble\"\nensemble_scheduling { step { } }",
            "line 2: ensemble_scheduling: an ensemble has to declare its inputs and outputs",
        ),
        (
            "ensemble_scheduling { step { } }\nplatform: \"onnxruntime_onnx\"",
            "line 2: platform is not \"ensemble\": leave it out, as the model has ensemble_scheduling",
        ),
        (
            "ensemble_scheduling { step { } }\nbackend: \"onnxruntime\"",
            "line 2: backend belongs to its steps' models: leave it out",
        ),
        ("platform: \"ensemble\"", "line 1: platform: \"ensemble\" needs ensemble_scheduling"),
        (
            "sequence_batching { iterative_sequence: true }",
            "line 1: sequence_batching: iterative_sequence is",
        ),
        (
            "sequence_batching { }\nresponse_cache { enable: true }",
            "line 2: response_cache: responses of a model with sequences depend on earlier requests and cannot be cached: remove the setting",
        ),
        (
            "ensemble_scheduling { step { } }\nresponse_cache { enable: true }",
            "line 2: response_cache applies to the models of its steps",
        ),
        ("max_batch_size: -1", "line 1: max_batch_size: -1 is below 0"),
        ("version_policy { latest { } }", "num_versions 0, which serves none"),
        ("version_policy { latest { num_versions: -1 } }", "line 1: expected value to be an unsigned"),
        ("version_policy { specific { } }", "a list of 0"),
        ("version_policy { specific { versions: [ 1, -2 ] } }", "a version below 0"),
        ("version_policy { specific { versions: 0 } }", "versions are positive"),
        ("input { data_type: TYPE_FP32 dims: 1 }", "line 1: input: an entry has no name"),
        ("input { name: \"x\" dims: 1 }", "\"x\": data_type is missing"),
        ("input { name: \"x\" data_type: 99 dims: 1 }", "data_type is missing or unknown"),
        ("input { name: \"x\" data_type: TYPE_FP32 dims: 0 }", "dims has 0"),
        ("input { name: \"x\" data_type: TYPE_FP32 dims: -2 }", "dims has -2"),
        (
            "input { name: \"x\" data_type: TYPE_FP32 dims: 4 reshape { shape: [ 2, 2 ] } }",
            "\"x\": reshape is not supported",
        ),
        (
            "output { name: \"y\" data_type: TYPE_FP32 dims: 4 reshape { } }",
            "line 1: output: \"y\": reshape is not",
        ),
        ("input { name: \"x\" data_type: TYPE_FP32 dims: 4 optional: true }", "optional is not supported"),
        (
            "input { name: \"x\" data_type: TYPE_FP32 dims: 4 allow_ragged_batch: true }",
            "allow_ragged_batch is not",
        ),
        (
            "input { name: \"x\" data_type: TYPE_FP32 dims: 4 } input { name: \"x\" data_type: TYPE_FP32 dims: 4 }",
            "\"x\" appears twice",
        ),
        (
            "default_model_filename: \"../model.onnx\"",
            "line 1: default_model_filename: \"../model.onnx\" is not",
        ),
        ("default_model_filename: \"a/b\"", "is not the plain name of a file"),
        ("default_model_filename: \".hidden\"", "is not the plain name of a file"),
        (
            "max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }",
            "preferred_batch_size has 8, allowed are 1 to",
        ),
        ("dynamic_batching { preferred_batch_size: 0 }", "preferred_batch_size has 0"),
        ("instance_group { count: 257 }", "count is 257, allowed are 0 to 256"),
        ("instance_group { count: -1 }", "count is -1"),
        ("instance_group [ { count: 200 }, { count: 200 } ]", "at most 256 instances"),
        ("instance_group { kind: KIND_CPU gpus: [ 0, 1 ] }", "gpus [0, 1]: a model runs"),
        ("instance_group { kind: KIND_GPU gpus: -1 }", "gpus [-1]"),
        ("instance_group { kind: KIND_GPU gpus: 256 }", "gpus [256]"),
        ("instance_group { kind: KIND_GPU count: 200 gpus: [ 0, 1 ] }", "at most 256 instances"),
        ("instance_group [ { kind: KIND_CPU }, { kind: KIND_GPU } ]", "not on both"),
        ("instance_group [ { kind: KIND_AUTO }, { kind: KIND_GPU } ]", "not on both"),
        ("instance_group [ { kind: KIND_GPU gpus: 1 }, { kind: KIND_GPU gpus: [ 1, 2 ] } ]", "{1: 2, 2: 1}"),
        ("batch_input { }", "line 1: batch_input: "),
        ("batch_output { }", "batch_output: "),
        ("model_operations { op_library_filename: \"lib.so\" }", "libraries of operators are not loaded"),
        (
            "model_transaction_policy { decoupled: true }",
            "line 1: model_transaction_policy: a request has one answer",
        ),
        ("model_repository_agents { agents { name: \"checksum\" } }", "model_repository_agents: "),
    ];
    for (text, expected) in cases {
        let reason = read(text).expect_err(text);
        assert!(reason.contains(expected), "{text}: {reason}");
    }
}

#[test]
fn configuration_of_another_graph_is_refused() {
    let cases = [
        (IO.replace("\"z\"", "\"q\""), "the graph has no output \"q\", its outputs are [\"y\", \"z\"]"),
        (IO.replace("\"n\"", "\"q\""), "the graph has no input \"q\""),
        (
            IO.replace("TYPE_INT64", "TYPE_INT32"),
            "input \"n\" is INT32 in the configuration and INT64 in the graph",
        ),
        (IO.replace("dims: 4", "dims: 5"), "input \"x\" is [-1, 5] in the configuration"),
        (IO.replace("dims: 4", "dims: -1"), "input \"x\" is [-1, -1] in the configuration"),
        (IO.replace("dims: 4", "dims: [ 4, 1 ]"), "input \"x\" is [-1, 4, 1]"),
        ("input { name: \"x\" data_type: TYPE_FP32 dims: 4 }".into(), "the graph has an input \"n\", which"),
    ];
    for (io, expected) in cases {
        let declared = read(&format!("max_batch_size: 8 {io}")).unwrap();
        let reason = declared.loading.signature(&graph()).unwrap_err();
        assert!(reason.contains(expected), "{io}: {reason}");
    }
    let mut fixed = graph();
    fixed.outputs[0].shape = vec![1, 3];
    let reason = read("max_batch_size: 8").unwrap().loading.signature(&fixed).unwrap_err();
    assert!(reason.contains("the first extent of an input or output of the graph is fixed"), "{reason}");
}
