//! Tests of the hazard checks: refused graphs, each next to similar accepted ones.
use millrace_bundle::Lineage;
use millrace_bundle::onnx::tensor_proto::DataLocation;
use millrace_bundle::onnx::tensor_proto::DataType::{self, Float, Int32, Int64, Uint8, Uint64};
use millrace_bundle::onnx::{
    OperatorSetIdProto, StringStringEntryProto, TensorProto, TensorShapeProto, tensor_shape_proto, type_proto,
};

use super::*;

/// Rules for ONNX Runtime since version 1.25.
const RECENT: Rules = Rules { divisors: Divisors::Shown, zero_ends: false, may_be_empty: false };
/// Rules for earlier versions of ONNX Runtime.
const OLD: Rules = Rules { zero_ends: true, ..RECENT };
/// Rules for inputs that may be empty.
const EMPTY: Rules = Rules { may_be_empty: true, ..RECENT };

/// A graph builder; methods return the name of the value that they added.
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
            Uint64 => tensor.uint64_data = values.iter().map(|value| *value as u64).collect(),
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

/// A graph with the FP32 input `x` and the INT64 input `n`.
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
    if let Err(hazard) = RECENT.check(&built(build)) {
        panic!("{hazard}");
    }
}

#[track_caller]
fn refused(words: &str, build: impl FnOnce(&mut Build)) {
    refused_by(RECENT, words, build);
}

#[track_caller]
fn refused_by(rules: Rules, words: &str, build: impl FnOnce(&mut Build)) {
    let hazard = rules.check(&built(build)).unwrap_err().to_string();
    assert!(hazard.contains(words), "{hazard}");
}

/// Divides `n` by a value.
fn divided(g: &mut Build, divisor: &str) {
    g.node("Div", &["n", divisor], vec![]);
}

#[test]
fn divisor_that_may_be_minus_1_is_refused() {
    for operator in ["Div", "Mod"] {
        for values in [&[1][..], &[2, 3], &[-2, 3], &[0], &[2, 0]] {
            accepted(|g| {
                let c = g.constant(Int64, values);
                g.node(operator, &["n", &c], vec![]);
            });
        }
        for values in [&[-1][..], &[i64::MAX, -1]] {
            refused("trusted_divisors = true", |g| {
                let c = g.constant(Int64, values);
                g.node(operator, &["n", &c], vec![]);
            });
        }
        refused(&format!("{operator} \"it\" that gives \"t0\""), |g| {
            g.node(operator, &["n", "n"], vec![]);
        });
    }
    // -1 may divide a value that is never the smallest integer, for example one from a narrower type.
    accepted(|g| {
        let (extent, c) = (g.extent("x", 1), g.constant(Int64, &[-1]));
        g.node("Div", &[&extent, &c], vec![]);
        let narrow = g.input("m", Int32, &[-1]);
        let wide = g.cast(&narrow, Int64);
        g.node("Mod", &[&wide, "n"], vec![]);
    });
    // A `Constant` node counts like an initializer.
    accepted(|g| {
        let c = g.node("Constant", &[], vec![ints("value_ints", &[7])]);
        divided(g, &c);
    });
    refused("-1 divides the smallest one", |g| {
        let c = g.node("Constant", &[], vec![int("value_int", -1)]);
        divided(g, &c);
    });
    // Division of floats is safe.
    accepted(|g| {
        g.node("Div", &["x", "x"], vec![]);
        g.node("Mod", &["n", "n"], vec![int("fmod", 1)]);
    });
}

#[test]
fn divisor_that_may_be_zero_is_refused_where_the_runtime_does_not_check_it() {
    for values in [&[0][..], &[2, 0], &[-1]] {
        refused_by(OLD, "before 1.25", |g| {
            let c = g.constant(Int64, values);
            divided(g, &c);
        });
    }
    refused_by(OLD, "before 1.25", |g| {
        let c = g.node("Constant", &[], vec![attribute("value_int", AttributeType::Int)]);
        divided(g, &c);
    });
    refused_by(OLD, "before 1.25", |g| {
        let extent = g.extent("x", 1);
        divided(g, &extent);
    });
    // Windows entirely in the padding give 0, regardless of the elements.
    refused_by(OLD, "before 1.25", |g| {
        let (bytes, one) = (g.input("bytes", Uint8, &[-1, 1, 2]), g.constant(Uint8, &[1]));
        let some = g.node("Max", &[&bytes, &one], vec![]);
        let window = vec![ints("kernel_shape", &[2]), ints("dilations", &[3]), ints("pads", &[1, 1])];
        let most = g.node("MaxPool", &[&some], window);
        let wide = g.cast(&most, Int64);
        divided(g, &wide);
    });
    let bounded = built(|g| {
        let (one, two) = (g.constant(Int64, &[1]), g.constant(Int64, &[-2, 3]));
        divided(g, &two);
        let most = g.node("Max", &["n", &one], vec![]);
        divided(g, &most);
    });
    assert_eq!(OLD.check(&bounded), Ok(()));
}

#[test]
fn extents_and_values_computed_from_them_are_safe_divisors() {
    accepted(|g| {
        let extent = g.extent("x", 1);
        divided(g, &extent);
        let (two, narrow) = (g.constant(Int64, &[2]), g.cast(&extent, Int32));
        let more = g.node("Mul", &[&extent, &two], vec![]);
        let more = g.node("Add", &[&more, &two], vec![]);
        divided(g, &more);
        let wide = g.cast(&narrow, Int64);
        divided(g, &wide);
        let half = g.node("Div", &[&extent, &two], vec![]);
        divided(g, &half);
        let found = g.node("NonZero", &["x"], vec![]);
        let extent = g.extent(&found, 1);
        divided(g, &extent);
    });
    // A conversion to 32 bits may yield -1.
    refused("it divides integers", |g| {
        let one = g.constant(Int64, &[1]);
        let most = g.node("Max", &["n", &one], vec![]);
        let narrow = g.cast(&most, Int32);
        g.node("Div", &[&narrow, &narrow], vec![]);
    });
    refused("it divides integers", |g| {
        let count = g.constant(Int64, &[(1 << 32) - 1]);
        let filled = g.node("ConstantOfShape", &[&count], vec![]);
        let shape = g.node("Shape", &[&filled], vec![]);
        let (narrow, m) = (g.cast(&shape, Int32), g.input("m", Int32, &[-1]));
        g.node("Mod", &[&m, &narrow], vec![]);
    });
    // Unsigned 64-bit integers may exceed the signed range.
    refused("it divides integers", |g| {
        let (u, one) = (g.input("u", Uint64, &[-1]), g.constant(Uint64, &[1]));
        let most = g.node("Max", &[&u, &one], vec![]);
        let signed = g.cast(&most, Int64);
        divided(g, &signed);
    });
}

#[test]
fn spatial_extents_of_any_size_are_divided() {
    let kernel = || vec![ints("kernel_shape", &[3]), ints("strides", &[2])];
    for operator in ["Identity", "MaxPool", "Conv", "Resize", "Pad", "Slice"] {
        for windows in [vec![], kernel()] {
            accepted(|g| {
                let (c, list) = (g.constant(Float, &[1, 1, 2]), g.constant(Int64, &[0, 0, 1]));
                let (c, list) = (c.as_str(), list.as_str());
                let inputs = match operator {
                    "Conv" => vec!["x", c],
                    "Resize" => vec!["x", "", c],
                    "Pad" => vec!["x", list],
                    "Slice" => vec!["x", list, list],
                    _ => vec!["x"],
                };
                let map = g.node(operator, &inputs, windows);
                let (width, flat) = (g.extent(&map, 2), g.constant(Int64, &[0, -1]));
                let line = g.node("Reshape", &[&map, &flat], vec![]);
                let place = g.node("ArgMax", &[&line], vec![]);
                g.node("Mod", &[&place, &width], vec![]);
                g.node("Div", &[&place, &width], vec![]);
                g.node("Div", &["n", &width], vec![]);
                // An index may also be divided by a value of a request.
                g.node("Mod", &[&place, "n"], vec![]);
            });
        }
    }
}

#[test]
fn counts_are_valid_dividends_and_divisors() {
    accepted(|g| {
        let shape = g.node("Shape", &["x"], vec![]);
        let all = g.node("ReduceProd", &[&shape], vec![]);
        let (a, b, c) = (g.extent("x", 0), g.extent("x", 1), g.extent("x", 2));
        let pair = g.node("Mul", &[&a, &b], vec![]);
        divided(g, &pair);
        let three = g.node("Mul", &[&pair, &c], vec![]);
        g.node("Div", &[&all, &three], vec![]);
        divided(g, &all);
    });
    // The mean of the elements that a mask selects.
    accepted(|g| {
        let mask = g.node("Greater", &["x", "x"], vec![]);
        let mask = g.cast(&mask, Int64);
        let (sum, count) = (g.node("ReduceSum", &["n"], vec![]), g.node("ReduceSum", &[&mask], vec![]));
        g.node("Div", &[&sum, &count], vec![]);
    });
    refused("it divides integers", |g| {
        let (sum, count) = (g.node("ReduceSum", &["n"], vec![]), g.node("ReduceSum", &["n"], vec![]));
        g.node("Div", &[&sum, &count], vec![]);
    });
}

#[test]
fn divisor_that_the_graph_bounds_is_accepted() {
    accepted(|g| {
        let zero = g.constant(Int64, &[0]);
        let most = g.node("Max", &["n", &zero], vec![]);
        divided(g, &most);
        let most = g.node("Clip", &["n", &zero], vec![]);
        divided(g, &most);
    });
    refused("it divides integers", |g| {
        let one = g.constant(Int64, &[1]);
        let least = g.node("Clip", &["n", "", &one], vec![]);
        divided(g, &least);
    });
    // If the user vouches for divisors, all other rules still hold.
    let model = built(|g| divided(g, "n"));
    assert_eq!(check(&model, Divisors::Trusted), Ok(()));
    let model = built(|g| drop(g.node("Conv", &["x", "x"], vec![int("group", 0)])));
    assert!(check(&model, Divisors::Trusted).is_err());
}

#[test]
fn a_constant_divisor_in_another_file_is_read() {
    let bundle = |divisor: i64| {
        let entry = |key: &str, value: &str| StringStringEntryProto {
            key: Some(key.into()),
            value: Some(value.into()),
        };
        let model = built(|g| {
            let tensor = TensorProto {
                name: Some("d".into()),
                data_type: Some(Int64 as i32),
                data_location: Some(DataLocation::External as i32),
                external_data: vec![entry("location", "w.bin"), entry("offset", "8")],
                ..Default::default()
            };
            g.graph().initializer.push(tensor);
            divided(g, "d");
            g.graph().output.push(info("t0", Int64, &[-1]));
        });
        let content = [7i64.to_le_bytes(), divisor.to_le_bytes()].concat();
        let weights = vec![("w.bin".to_owned(), content.into())];
        let model = model.encode_to_vec();
        Bundle::with_weights("m", 1, model, weights, Lineage::default(), Default::default()).unwrap()
    };
    assert_eq!(check_bundle(&bundle(4), Divisors::Shown), Ok(()));
    assert!(check_bundle(&bundle(-1), Divisors::Shown).is_err());
}

#[test]
fn extents_of_inputs_without_elements_are_of_any_size() {
    let product = |g: &mut Build| {
        let (a, b) = (g.extent("x", 0), g.extent("x", 1));
        let both = g.node("Mul", &[&a, &b], vec![]);
        divided(g, &both);
    };
    accepted(product);
    refused_by(EMPTY, "it divides integers", product);
    let model = built(|g| {
        let extent = g.extent("x", 1);
        divided(g, &extent);
    });
    assert_eq!(EMPTY.check(&model), Ok(()));
    let old = Rules { may_be_empty: true, ..OLD };
    assert!(old.check(&model).is_err());
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
    // Overloads are separate functions.
    let constant = || node("Constant", &[], &["b"], vec![int("value_int", 5)]);
    let overloaded = |overload: &'static str| {
        move |g: &mut Build| {
            let same = node("Identity", &["a"], &["b"], vec![]);
            for (name, node) in [("one", constant()), ("other", same)] {
                g.model.functions.push(FunctionProto { overload: Some(name.into()), ..function(node) });
            }
            let divisor = g.node("own:f", &["n"], vec![]);
            g.graph().node[0].overload = Some(overload.into());
            divided(g, &divisor);
        }
    };
    accepted(overloaded("one"));
    refused("it divides integers", overloaded("other"));
    // ONNX Runtime prefers its own operator to a function of that name.
    refused("it divides integers", |g| {
        let (name, domain) = (Some("Max".into()), Some(String::new()));
        g.model.functions.push(FunctionProto { name, domain, ..function(constant()) });
        let divisor = g.node("Max", &["n", "n"], vec![]);
        divided(g, &divisor);
    });
    // The walk ends for a function that calls itself, and for a graph that refers to itself.
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
fn unknown_type_has_to_be_declared() {
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
        assert_eq!(RECENT.check(&model).is_ok(), is_taken);
    }
}

#[test]
fn type_that_cannot_be_inferred_is_unknown() {
    // The category of a value that may be a string is an integer.
    refused("it divides integers", |g| {
        let made = g.node("com.microsoft:QuantizedSomething", &["x"], vec![]);
        let category = g.node("ai.onnx.ml:CategoryMapper", &[&made], vec![]);
        divided(g, &category);
    });
    for operator in ["LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"] {
        refused("it divides integers", |g| {
            let label = g.node(&format!("ai.onnx.ml:{operator}"), &["x"], vec![]);
            divided(g, &label);
        });
    }
    refused("it divides integers", |g| {
        let lists = vec![ints("values_int64s", &[7]), attribute("values_floats", AttributeType::Floats)];
        let code = g.node("ai.onnx.ml:LabelEncoder", &["n"], lists);
        divided(g, &code);
    });
    // Outputs after the first may be positions and lengths.
    refused("shape_inference", |g| {
        let embedded = node("com.microsoft:EmbedLayerNormalization", &["x"], &["e", "places"], vec![]);
        g.graph().node.push(embedded);
        g.node("Div", &["places", "places"], vec![]);
    });
}

#[test]
fn attributes_used_as_divisors_must_be_positive() {
    for zero in [ints("strides", &[1, 0]), int("group", 0), attribute("blocksize", AttributeType::Int)] {
        refused("is below 1", |g| drop(g.node("Conv", &["x", "x"], vec![zero])));
    }
    accepted(|g| drop(g.node("Conv", &["x", "x"], vec![ints("strides", &[1, 2]), int("group", 1)])));
}

#[test]
fn a_divisor_hides_in_no_long_list_and_behind_no_other_type() {
    let bundle = |first: i64| {
        let numbers: Vec<i64> = std::iter::once(first).chain([1; 600]).collect();
        let model = built(|g| {
            let y = g.node("Conv", &["x", "x"], vec![ints("strides", &numbers)]);
            g.graph().output.push(info(&y, Float, &[-1]));
        });
        Bundle::new("m", 1, model.encode_to_vec(), Lineage::default(), Default::default()).unwrap()
    };
    assert_eq!(check_bundle(&bundle(1), Divisors::Trusted), Ok(()));
    let hazard = check_bundle(&bundle(0), Divisors::Trusted).unwrap_err().to_string();
    assert!(hazard.contains("its strides is below 1"), "{hazard}");
    for (kind, words) in [(AttributeType::Floats, "is below 1"), (AttributeType::Undefined, "has no type")] {
        let mut strides = ints("strides", &[0]);
        strides.set_type(kind);
        refused(words, |g| drop(g.node("Conv", &["x", "x"], vec![strides])));
    }
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
    refused("output of its subgraph has no name", |g| {
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
