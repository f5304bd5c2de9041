//! Entry points of the fuzz targets (`fuzz/`) into the parsers of this crate. Not part of the interface.

use millrace_bundle::onnx::ModelProto;
use millrace_bundle::{Datatype, Signature, TensorSpec};

use crate::hazards::{self, Divisors};
use crate::rows;

/// Analyses a graph as the loader does.
pub fn graph(model: &ModelProto) {
    let shown = hazards::check(model, Divisors::Shown);
    let trusted = hazards::check(model, Divisors::Trusted);
    assert!(shown.is_err() || trusted.is_ok(), "trust allows no less: {trusted:?}");
    assert_eq!(hazards::check(model, Divisors::Shown), shown, "the same graph gets the same answer");
    if hazards::allows_empty_inputs(model) {
        assert_eq!(shown, Ok(()), "a graph that is safe with empty inputs is safe without");
    }
    let Some(graph) = &model.graph else { return };
    let spec =
        |name: &str| TensorSpec { name: name.to_owned(), datatype: Datatype::Fp32, shape: vec![-1, 4] };
    let inputs = graph.input.iter().map(|value| spec(value.name())).collect();
    let outputs = graph.output.iter().map(|value| spec(value.name())).collect();
    let signature = Signature { inputs, outputs };
    let proof = rows::prove(model, &signature);
    assert_eq!(rows::prove(model, &signature), proof, "the same graph gets the same answer");
    if proof.is_ok() {
        let made = |name: &str| {
            let of_node = graph.node.iter().any(|node| node.output.iter().any(|output| output == name));
            of_node || graph.input.iter().any(|input| input.name() == name)
        };
        assert!(signature.outputs.iter().all(|spec| made(&spec.name)), "each output is made of rows");
    }
}
