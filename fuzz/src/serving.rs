//! Targets for serving: bodies of requests, configurations, manifests and graphs.

use std::collections::BTreeMap;

use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Bundle, Lineage};
use millrace_serving::fuzzing;
use millrace_serving::hazards::{self, Divisors};
use millrace_trainer::graph::Graph;
use millrace_trainer::init;
use millrace_trainer::quantize::quantize;
use prost::Message as _;

/// The body of a REST request, behind two bytes with the length of its JSON part; 0 if all of it is JSON.
pub(crate) fn body(input: &[u8]) {
    let Some((length, body)) = input.split_first_chunk() else { return };
    let length = usize::from(u16::from_le_bytes(*length));
    fuzzing::body(body, (length > 0).then_some(length));
}

/// Requests with JSON and binary tensors.
pub(crate) fn bodies() -> Vec<Vec<u8>> {
    let json = [
        r#"{"id":"1","inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[[1,2.5],[3e-2,-0.0]]}]}"#,
        r#"{"inputs":[{"name":"x","shape":[2],"datatype":"BYTES","data":["a","é\n"]}],"parameters":{"priority":1}}"#,
        r#"{"inputs":[{"name":"x","shape":[3],"datatype":"INT64","data":[1,-9223372036854775808,0]},
            {"name":"y","shape":[1],"datatype":"UINT64","data":[18446744073709551615]},
            {"name":"z","shape":[0,4],"datatype":"BOOL","data":[]}],"outputs":[{"name":"o"}]}"#,
        r#"{"inputs":[{"name":"x","shape":[2],"datatype":"FP16","data":[0.5,-1]},
            {"name":"b","shape":[2],"datatype":"BF16","data":[0.5,-1]}],
            "outputs":[{"name":"o","parameters":{"binary_data":true}},{"name":"c","parameters":{"classification":2}}]}"#,
        r#"{"inputs":[{"name":"x","shape":[1],"datatype":"FP64","data":[NaN]}]}"#,
    ];
    let mut all: Vec<Vec<u8>> = json.iter().map(|json| [&[0, 0], json.as_bytes()].concat()).collect();
    let binary = r#"{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","parameters":{"binary_data_size":8}},
        {"name":"y","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":7}}],
        "parameters":{"binary_data_output":true}}"#;
    let length = (binary.len() as u16).to_le_bytes();
    all.push([&length[..], binary.as_bytes(), &[0, 0, 128, 63, 0, 0, 0, 64], &[3, 0, 0, 0], b"abc"].concat());
    all
}

/// A gRPC inference request.
pub(crate) fn request(input: &[u8]) {
    fuzzing::infer_request(input);
}

/// Requests with typed and with raw contents.
pub(crate) fn requests() -> Vec<Vec<u8>> {
    fuzzing::infer_requests()
}

/// A `config.pbtxt`.
pub(crate) fn config(input: &[u8]) {
    fuzzing::config_pbtxt(input);
}

/// Configurations of each kind of model.
pub(crate) fn configs() -> Vec<Vec<u8>> {
    let configs = [
        "name: \"resnet\" max_batch_size: 8\ninput [ { name: \"x\" data_type: TYPE_FP32 dims: [ 3, -1 ] } ]\n\
         output { name: 'y' \"z\" data_type: TYPE_STRING dims: 4 } # a comment\n\
         dynamic_batching < preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 >\n\
         instance_group # of one\n [ { count: 2 kind: KIND_CPU } ]\n\
         parameters { key: \"k\" value { string_value: \"v\\n\\x41\" } }\n\
         version_policy: { specific { versions: [ 1, 2 ] } }",
        "platform: \"ensemble\" ensemble_scheduling { step [ { model_name: \"a\" model_version: -1\n\
         input_map { key: \"x\" value: \"y\" } output_map { key: \"z\" value: \"w\" } } ] }",
        "sequence_batching { max_sequence_idle_microseconds: 5000000 control_input [ { name: \"START\"\n\
         control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1.5e3 ] } ] } ]\n\
         state { input_name: \"i\" output_name: \"o\" data_type: TYPE_INT32 dims: -1 } }\n\
         response_cache { enable: true }",
    ];
    configs.map(|config| config.as_bytes().to_vec()).to_vec()
}

/// The manifest of a bundle, or statistics of inputs.
pub(crate) fn manifest(input: &[u8]) {
    for recode in [millrace_bundle::fuzzing::manifest, millrace_bundle::fuzzing::statistics] {
        if let Some(written) = recode(input) {
            let again = recode(&written);
            assert_eq!(again.as_deref(), Some(&written[..]), "it is read as it was written");
        }
    }
}

/// A manifest and statistics.
pub(crate) fn manifests() -> Vec<Vec<u8>> {
    let manifest = bundle(&graphs()[0]).map(|bundle| serde_json::to_vec(bundle.manifest()));
    let statistics = r#"{"format_version":1,"column":"x","rows":3,"features":[{"input":"x","element":0,"mean":1.5,
        "variance":0.25,"min":0,"max":3.5,"edges":[1.0,2.0],"shares":[0.5,0.25,0.25]}]}"#;
    vec![manifest.expect("the graph is valid").expect("a manifest is JSON"), statistics.as_bytes().to_vec()]
}

fn bundle(model: &[u8]) -> Option<Bundle> {
    Bundle::new("m", 1, model.to_vec(), Lineage::default(), BTreeMap::new()).ok()
}

/// Outputs of a model that are read as that of a loss.
const OUTPUTS_READ: usize = 4;

/// An ONNX file: its bundle, its hazards, the independence of its rows, its quantization and its training.
pub(crate) fn graph(input: &[u8]) {
    if let Some(bundle) = bundle(input) {
        let model = ModelProto::decode(input).expect("the bundle decoded it");
        if hazards::check(&model, Divisors::Shown).is_err() {
            assert!(hazards::check_bundle(&bundle, Divisors::Shown).is_err(), "the outline shows no less");
        }
    }
    let Ok(model) = ModelProto::decode(input) else { return };
    fuzzing::graph(&model);
    let outputs = model.graph.iter().flat_map(|graph| &graph.output).take(OUTPUTS_READ);
    for graph in outputs.filter_map(|output| Graph::read_output(&model, Some(output.name())).ok()) {
        let weights = graph.initial_weights(&model).expect("a graph that was read has weights");
        assert_eq!(weights.len(), graph.params().iter().map(|param| param.elements()).sum::<usize>());
        let states = graph.initial_states(&model).expect("a graph that was read has its states");
        assert_eq!(states.len(), graph.states().iter().map(|state| state.elements()).sum::<usize>());
    }
    if let Ok(quantized) = quantize(model) {
        let bytes = quantized.model.encode_to_vec();
        assert!(ModelProto::decode(&bytes[..]).is_ok(), "a quantized model can be read");
    }
}

/// Graphs of the trainer, plain and quantized.
pub(crate) fn graphs() -> Vec<Vec<u8>> {
    let small = init::mlp(4, &[3], 2, 1).expect("a small model");
    let spec = r#"{"kind":"cnn","height":4,"width":4,"filters":[2],"classes":2}"#;
    let spec: init::ModelSpec = serde_json::from_str(spec).expect("a specification");
    let convolution = spec.build().expect("a small model");
    let quantized = quantize(small.clone()).map(|quantized| quantized.model);
    [Some(small), Some(convolution), quantized.ok()]
        .into_iter()
        .flatten()
        .map(|it| it.encode_to_vec())
        .collect()
}
