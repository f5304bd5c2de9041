//! Models in which PyTorch's default exporter merged or rearranged parameters; see merged.py beside them.

use std::collections::HashSet;
use std::path::Path;

use millrace_bundle::onnx::ModelProto;
use prost::Message;

use crate::graph::folded::{self, Stand};
use crate::graph::{Graph, QUOTED_CALL, absent, absorbed};
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
        ("ScaledBias", "computed it ahead from the parameters bias,"),
        ("ScaledShift", "computed it ahead from the parameters shift,"),
        ("ScaledQuery", "computed it ahead from the parameters query,"),
        ("ViewOfProduct", "computed it ahead from the parameters a, b, c,"),
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
fn weights_within_a_call_without_quotes_are_read_only_as_transposed_ones() {
    let unquoted = |mut model: ModelProto| {
        let nodes = &mut model.graph.as_mut().unwrap().node;
        for node in nodes {
            node.metadata_props.retain(|entry| entry.key() != QUOTED_CALL);
        }
        model
    };
    let error = Graph::read(&unquoted(exported("ScaledBias"))).unwrap_err().to_string();
    assert!(error.contains("from the parameters bias,"), "{error}");
    let zoo = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo/default/scaled_dot_product.onnx");
    let attention = model::read(&zoo).unwrap();
    let params = |model: &ModelProto| Graph::read(model).unwrap().params().len();
    assert_eq!(params(&unquoted(attention.clone())), params(&attention));
    // Former exporters do not say what they folded.
    let unfolded = |mut model: ModelProto| {
        for info in &mut model.graph.as_mut().unwrap().value_info {
            info.metadata_props.retain(|entry| !entry.key().ends_with(".folded_from"));
        }
        model
    };
    assert_eq!(params(&unfolded(attention.clone())), params(&attention));
    let norm = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo/default/weight_norm.onnx");
    for model in [unfolded(model::read(&norm).unwrap()), unfolded(exported("ScaledQuery"))] {
        let error = Graph::read(&model).unwrap_err().to_string();
        assert!(error.contains("ahead from the parameters of the module"), "{error}");
    }
}

#[test]
fn folded_normalisations_are_named_by_their_modules() {
    let layers = |model: &ModelProto, trained: &[&str]| {
        absorbed(model, &trained.iter().copied().collect::<HashSet<_>>())
    };
    let folded = exported("Folded");
    let graph = Graph::read(&folded).unwrap();
    let params: Vec<&str> = graph.params().iter().map(|param| param.name.as_str()).collect();
    assert_eq!(layers(&folded, &params), ["body.1"]);
    assert_eq!(layers(&folded, &["out.weight"]), [""; 0], "the layer is frozen");
    assert_eq!(layers(&exported("Folded.raw"), &["body.0.weight", "body.1.weight"]), [""; 0]);
    // Without the call, the scopes tell it.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/folded.onnx");
    assert_eq!(layers(&model::read(&path).unwrap(), &["conv.weight"]), ["bn"]);
    // The earlier exporter gives such a weight a number.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/zoo/earlier/conv2d.onnx");
    let mut earlier = model::read(&path).unwrap();
    assert_eq!(layers(&earlier, &["0.weight", "0.bias"]), [""; 0]);
    let graph = earlier.graph.as_mut().unwrap();
    let renamed = |name: &mut String| {
        if name == "0.weight" {
            *name = "onnx::Conv_9".to_owned();
        }
    };
    graph.initializer.iter_mut().filter_map(|tensor| tensor.name.as_mut()).for_each(renamed);
    graph.node.iter_mut().flat_map(|node| &mut node.input).for_each(renamed);
    assert_eq!(layers(&earlier, &["onnx::Conv_9"]), ["/0/Conv"]);
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
