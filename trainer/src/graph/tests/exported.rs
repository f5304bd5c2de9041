//! Models in which PyTorch's default exporter merged or rearranged parameters; see merged.py beside them.

use std::path::Path;

use millrace_bundle::onnx::ModelProto;
use prost::Message;

use crate::graph::folded::{self, Stand};
use crate::graph::{Graph, absent};
use crate::model;

/// The model as jobs read it.
fn exported(name: &str) -> ModelProto {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/merged");
    model::read(&folder.join(format!("{name}.onnx"))).unwrap()
}

#[test]
fn parameters_that_the_exporter_merged_or_repeats_are_refused_with_the_way_out() {
    let cases = [
        ("ParallelNorms", "operand layer_norm_1 of PyTorch with layer_norm"),
        ("ParallelNorms", "norm2.bias, norm2.weight among them"),
        ("Repeated", "from the parameter weight, of which it has elements twice"),
        ("TwoForms", "of which weight holds elements as well"),
        ("RepeatedRows", "from the parameter table.weight, of which it has elements twice"),
    ];
    for (name, reason) in cases {
        let error = Graph::read(&exported(name)).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains("optimize=False"), "{name}: {error}");
        assert!(Graph::infer(&exported(name)).is_ok(), "{name}: a teacher is not trained");
        let whole = exported(&format!("{name}.raw"));
        let graph = Graph::read(&whole).unwrap_or_else(|e| panic!("{name}.raw: {e}"));
        assert_eq!(absent(whole.graph.as_ref().unwrap()), [""; 0], "{name}.raw");
        assert!(graph.params().len() >= 3);
    }
}

#[test]
fn unused_layers_and_parts_of_a_weight_are_no_reason_to_refuse() {
    let model = exported("Unused");
    let graph = Graph::read(&model).unwrap();
    assert_eq!(graph.params().len(), 4);
    assert_eq!(absent(model.graph.as_ref().unwrap()), ["pool.bias", "pool.weight"]);
}

#[test]
fn elements_that_stand_for_one_of_a_parameter_are_found_by_their_places() {
    let numbers: Vec<f32> = (0..12u8).map(f32::from).collect();
    fn stand<'a>(name: &'a str, shape: &'a [usize], elements: &[f32]) -> Stand<'a> {
        let functions = vec![name];
        Stand { name, shape, elements: elements.to_vec(), parameters: vec!["w"], functions }
    }
    let halves = [stand("slice_1", &[3, 2], &numbers[..6]), stand("slice_2", &[3, 2], &numbers[6..])];
    folded::check(&halves).unwrap();
    let shifted = [stand("slice_1", &[4, 2], &numbers[..8]), stand("slice_2", &[4, 2], &numbers[4..])];
    assert!(folded::check(&shifted).is_err());
    // Two whole forms of one parameter.
    assert!(folded::check(&[stand("view", &[3, 4], &numbers), stand("flip", &[12], &numbers)]).is_err());
    // Equal elements alone are no sign: new biases are zeros.
    folded::check(&[stand("cat", &[12], &[0.0; 12])]).unwrap();
    folded::check(&[stand("slice_1", &[2, 2], &[0.0; 4]), stand("slice_2", &[4, 2], &[0.0; 8])]).unwrap();
    let columns: Vec<f32> = numbers.chunks(4).flat_map(|row| [row, row].concat()).collect();
    assert!(folded::check(&[stand("cat", &[3, 8], &columns)]).is_err());
    assert!(folded::check(&[stand("cat", &[24], &numbers.repeat(2))]).is_err());
    for empty in [&[0usize, 4][..], &[4, 0], &[0]] {
        folded::check(&[stand("cat", empty, &[])]).unwrap();
    }
}

#[test]
fn damaged_calls_and_signatures_do_no_harm() {
    let model = exported("ParallelNorms");
    let texts =
        ["", "%", "(args = (%", "%a : (args = (%%, %_1, %\u{e9}1 %layer_norm_1", "p: PARAMETER target='"];
    for text in texts {
        let mut model = model.clone();
        let graph = model.graph.as_mut().unwrap();
        for entry in
            graph.node.iter_mut().flat_map(|node| &mut node.metadata_props).chain(&mut graph.metadata_props)
        {
            entry.value = Some(text.to_owned());
        }
        let read = ModelProto::decode(&model.encode_to_vec()[..]).unwrap();
        assert!(Graph::read(&read).is_ok(), "{text}");
    }
}
