//! Graphs that are refused, and ones beside them that are not.
#![allow(clippy::unwrap_used)]

use millrace_bundle::onnx::tensor_proto::DataType::{self, Float, Int32, Int64};
use millrace_bundle::onnx::{
    OperatorSetIdProto, TensorProto, TensorShapeProto, tensor_shape_proto, type_proto,
};

use super::*;

/// A graph that grows; methods give the name of the value that they added.
#[derive(Default)]
struct Build {
    model: ModelProto,
}

impl Build {
    fn graph(&mut self) -> &mut GraphProto {
        self.model.graph.get_or_insert_default()
    }

    fn input(&mut self, name: &str, datatype: DataType, shape: &[i64]) -> String {
        self.graph().input.push(info(name, datatype, shape));
        name.to_owned()
    }

    fn constant(&mut self, datatype: DataType, values: &[i64]) -> String {
        let name = format!("c{}", self.graph().initializer.len());
        let mut tensor = TensorProto {
            name: Some(name.clone()),
            dims: vec![values.len() as i64],
            data_type: Some(datatype as i32),
            ..Default::default()
        };
        match datatype {
            Int64 => tensor.int64_data = values.to_vec(),
            Float => tensor.float_data = values.iter().map(|value| *value as f32).collect(),
            _ => tensor.int32_data = values.iter().map(|value| *value as i32).collect(),
        }
        self.graph().initializer.push(tensor);
        name
    }

    fn node(&mut self, operator: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let output = format!("t{}", self.graph().node.len());
        self.graph().node.push(node(operator, inputs, &[&output], attributes));
        output
    }

    fn cast(&mut self, value: &str, to: DataType) -> String {
        self.node("Cast", &[value], vec![int("to", to as i64)])
    }

    /// One extent of a value.
    fn extent(&mut self, value: &str, axis: i64) -> String {
        let (shape, axis) = (self.node("Shape", &[value], vec![]), self.constant(Int64, &[axis]));
        self.node("Gather", &[&shape, &axis], vec![])
    }
}

fn info(name: &str, datatype: DataType, shape: &[i64]) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |extent: &i64| Dimension {
        value: (*extent >= 0).then_some(Value::DimValue(*extent)),
        ..Default::default()
    };
    let shape = TensorShapeProto { dim: shape.iter().map(dim).collect() };
    let tensor = type_proto::Tensor { elem_type: Some(datatype as i32), shape: Some(shape) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { value: Some(Type::TensorType(tensor)), ..Default::default() }),
        ..Default::default()
    }
}

fn node(operator: &str, inputs: &[&str], outputs: &[&str], attribute: Vec<AttributeProto>) -> NodeProto {
    let (domain, operator) = operator.split_once(':').unwrap_or(("", operator));
    NodeProto {
        name: Some("it".into()),
        op_type: Some(operator.into()),
        domain: Some(domain.into()),
        input: inputs.iter().map(ToString::to_string).collect(),
        output: outputs.iter().map(ToString::to_string).collect(),
        attribute,
        ..Default::default()
    }
}

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(kind as i32), ..Default::default() }
}

fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: Some(value), ..attribute(name, AttributeType::Int) }
}

fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto { ints: values.to_vec(), ..attribute(name, AttributeType::Ints) }
}

fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto { s: Some(value.as_bytes().to_vec()), ..attribute(name, AttributeType::String) }
}

/// A graph with the inputs `x` of floats and `n` of integers.
fn built(build: impl FnOnce(&mut Build)) -> ModelProto {
    let mut graph = Build::default();
    graph.input("x", Float, &[-1, -1, 4]);
    graph.input("n", Int64, &[-1]);
    build(&mut graph);
    graph.model.opset_import = vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }];
    graph.model
}

#[track_caller]
fn accepted(build: impl FnOnce(&mut Build)) {
    if let Err(hazard) = check(&built(build), Divisors::Shown) {
        panic!("{hazard}");
    }
}

#[track_caller]
fn refused(words: &str, build: impl FnOnce(&mut Build)) {
    let hazard = check(&built(build), Divisors::Shown).unwrap_err().to_string();
    assert!(hazard.contains(words), "{hazard}");
}

/// `n` divided by something.
fn divided(g: &mut Build, divisor: &str) {
    g.node("Div", &["n", divisor], vec![]);
}

#[test]
fn integers_are_divided_by_constants_without_0_and_minus_1() {
    for operator in ["Div", "Mod"] {
        for values in [&[1][..], &[2, 3], &[-2, 3]] {
            accepted(|g| {
                let c = g.constant(Int64, values);
                g.node(operator, &["n", &c], vec![]);
            });
        }
        for values in [&[0][..], &[2, 0], &[-1], &[i64::MAX, -1]] {
            refused("nonzero_divisors = true", |g| {
                let c = g.constant(Int64, values);
                g.node(operator, &["n", &c], vec![]);
            });
        }
        refused(&format!("{operator} \"it\" that gives \"t0\""), |g| {
            g.node(operator, &["n", "n"], vec![]);
        });
    }
    // -1 divides what is not the smallest integer; a node that is a constant is one as an initializer is.
    accepted(|g| {
        let (extent, c) = (g.extent("x", 1), g.constant(Int64, &[-1]));
        g.node("Div", &[&extent, &c], vec![]);
    });
    accepted(|g| {
        let c = g.node("Constant", &[], vec![ints("value_ints", &[7])]);
        divided(g, &c);
    });
    refused("it divides integers", |g| {
        let c = g.node("Constant", &[], vec![attribute("value_int", AttributeType::Int)]);
        divided(g, &c);
    });
    // That of floats is no matter.
    accepted(|g| {
        g.node("Div", &["x", "x"], vec![]);
        g.node("Mod", &["n", "n"], vec![int("fmod", 1)]);
    });
}

#[test]
fn integers_are_divided_by_extents_and_what_follows_from_them() {
    accepted(|g| {
        let extent = g.extent("x", 1);
        divided(g, &extent);
        let (two, narrow) = (g.constant(Int64, &[2]), g.cast(&extent, Int32));
        let more = g.node("Mul", &[&extent, &two], vec![]);
        let more = g.node("Add", &[&more, &two], vec![]);
        divided(g, &more);
        let wide = g.cast(&narrow, Int64);
        divided(g, &wide);
    });
    // Through what keeps elements: layers, windows with padding, the first ones of a slice.
    accepted(|g| {
        let c = g.constant(Float, &[1]);
        let y = g.node("Mul", &["x", &c], vec![]);
        let y = g.node("Softmax", &[&y], vec![]);
        let kernel = vec![ints("kernel_shape", &[3]), ints("pads", &[1, 1]), ints("strides", &[2])];
        let y = g.node("MaxPool", &[&y], kernel);
        let (start, end) = (g.constant(Int64, &[0]), g.extent("x", 1));
        let y = g.node("Slice", &[&y, &start, &end], vec![]);
        let extent = g.extent(&y, 1);
        divided(g, &extent);
    });
    for windows in [vec![], vec![ints("kernel_shape", &[3])]] {
        refused("it divides integers", |g| {
            let y = g.node("MaxPool", &["x"], windows);
            let extent = g.extent(&y, 2);
            divided(g, &extent);
        });
    }
    // How many there are of something may be 0, and so may a half of 1, and what 32 bits leave of a number.
    refused("it divides integers", |g| {
        let found = g.node("NonZero", &["x"], vec![]);
        let extent = g.extent(&found, 1);
        divided(g, &extent);
    });
    refused("it divides integers", |g| {
        let (extent, two) = (g.extent("x", 1), g.constant(Int64, &[2]));
        let half = g.node("Div", &[&extent, &two], vec![]);
        divided(g, &half);
    });
    refused("it divides integers", |g| {
        let one = g.constant(Int64, &[1]);
        let most = g.node("Max", &["n", &one], vec![]);
        let narrow = g.cast(&most, Int32);
        g.node("Div", &[&narrow, &narrow], vec![]);
    });
}

#[test]
fn a_divisor_that_the_graph_bounds_is_taken() {
    accepted(|g| {
        let one = g.constant(Int64, &[1]);
        let most = g.node("Max", &["n", &one], vec![]);
        divided(g, &most);
        let most = g.node("Clip", &["n", &one], vec![]);
        divided(g, &most);
    });
    refused("it divides integers", |g| {
        let one = g.constant(Int64, &[1]);
        let least = g.node("Clip", &["n", "", &one], vec![]);
        divided(g, &least);
    });
    // Where the user vouches for it, all other rules hold.
    let model = built(|g| divided(g, "n"));
    assert_eq!(check(&model, Divisors::Trusted), Ok(()));
    let model = built(|g| drop(g.node("Conv", &["x", "x"], vec![int("group", 0)])));
    assert!(check(&model, Divisors::Trusted).is_err());
}

#[test]
fn extents_of_inputs_without_elements_are_0() {
    let model = built(|g| {
        let extent = g.extent("x", 1);
        divided(g, &extent);
    });
    assert!(!allows_empty_inputs(&model));
    let model = built(|g| {
        let c = g.constant(Int64, &[2]);
        divided(g, &c);
    });
    assert!(allows_empty_inputs(&model));
    refused("it divides integers", |g| {
        let empty = g.input("empty", Float, &[-1, 0]);
        let extent = g.extent(&empty, 1);
        divided(g, &extent);
    });
}

#[test]
fn divisions_are_found_in_graphs_inside_and_in_functions() {
    let inside = || GraphProto {
        node: vec![node("Div", &["n", "n"], &["inner"], vec![])],
        output: vec![info("inner", Int64, &[-1])],
        ..Default::default()
    };
    refused("gives \"inner\"", |g| {
        let graph = AttributeProto { g: Some(inside()), ..attribute("then_branch", AttributeType::Graph) };
        g.node("If", &["n"], vec![graph]);
    });
    let function = |node: NodeProto| FunctionProto {
        name: Some("f".into()),
        domain: Some("own".into()),
        input: vec!["a".into()],
        output: vec!["b".into()],
        node: vec![node],
        ..Default::default()
    };
    let halved = || function(node("Div", &["a", "a"], &["b"], vec![]));
    refused("gives \"b\"", |g| {
        g.model.functions.push(halved());
        g.node("own:f", &["n"], vec![]);
    });
    accepted(|g| {
        g.model.functions.push(halved());
        g.node("own:f", &["x"], vec![]);
    });
    // One that calls itself, and a graph that refers to itself, end.
    refused("call each other too often", |g| {
        g.model.functions.push(function(node("own:f", &["a"], &["b"], vec![])));
        g.node("own:f", &["x"], vec![]);
    });
    accepted(|g| {
        let refers = AttributeProto {
            ref_attr_name: Some("inside".into()),
            ..attribute("then_branch", AttributeType::Graph)
        };
        let branch = |name: &str| node("If", &["a"], &[name], vec![refers.clone()]);
        let graph = GraphProto {
            node: vec![branch("again")],
            output: vec![info("again", Float, &[-1])],
            ..Default::default()
        };
        let given = AttributeProto { g: Some(graph), ..attribute("inside", AttributeType::Graph) };
        g.model.functions.push(function(branch("b")));
        g.node("own:f", &["x"], vec![given]);
    });
}

#[test]
fn a_type_that_is_not_known_has_to_be_declared() {
    let quotient = |g: &mut Build| {
        let made = g.node("com.microsoft:QuantizedSomething", &["x"], vec![]);
        g.node("Div", &[&made, &made], vec![]);
        made
    };
    refused("shape_inference", |g| drop(quotient(g)));
    for (datatype, is_taken) in [(Float, true), (Int64, false)] {
        let model = built(|g| {
            let made = quotient(g);
            g.graph().value_info.push(info(&made, datatype, &[]));
        });
        assert_eq!(check(&model, Divisors::Shown).is_ok(), is_taken);
    }
}

#[test]
fn attributes_that_are_divided_by_are_1_or_more() {
    for zero in [ints("strides", &[1, 0]), int("group", 0), attribute("blocksize", AttributeType::Int)] {
        refused("is below 1", |g| drop(g.node("Conv", &["x", "x"], vec![zero])));
    }
    accepted(|g| drop(g.node("Conv", &["x", "x"], vec![ints("strides", &[1, 2]), int("group", 1)])));
}

#[test]
fn outputs_without_a_name_are_refused_where_they_are_written() {
    let unnamed = |operator: &'static str, outputs: &'static [&'static str]| {
        move |g: &mut Build| g.graph().node.push(node(operator, &["x"], outputs, vec![]))
    };
    refused("has no name", unnamed("Split", &["a", ""]));
    refused("has no name", unnamed("Relu", &[""]));
    accepted(unnamed("Dropout", &["a", ""]));
    accepted(unnamed("LSTM", &["", "b"]));
    refused("graph inside of it has no name", |g| {
        let inside = GraphProto { output: vec![ValueInfoProto::default()], ..Default::default() };
        let graph = AttributeProto { g: Some(inside), ..attribute("then_branch", AttributeType::Graph) };
        g.node("If", &["n"], vec![graph]);
    });
}

#[test]
fn scores_are_transformed_in_known_ways() {
    for operator in ["TreeEnsembleClassifier", "TreeEnsembleRegressor", "LinearClassifier", "SVMRegressor"] {
        let operator = format!("ai.onnx.ml:{operator}");
        for transform in ["PROBIT", "probit", ""] {
            refused("post_transform is PROBIT or unknown", |g| {
                g.node(&operator, &["x"], vec![text("post_transform", transform)]);
            });
        }
        for transform in TRANSFORMS {
            accepted(|g| drop(g.node(&operator, &["x"], vec![text("post_transform", transform)])));
        }
    }
    refused("PROBIT", |g| drop(g.node("ai.onnx.ml:TreeEnsemble", &["x"], vec![int("post_transform", 4)])));
    accepted(|g| drop(g.node("ai.onnx.ml:TreeEnsemble", &["x"], vec![int("post_transform", 3)])));
}
