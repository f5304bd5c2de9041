//! Test support for the row proof: builders for small graphs, and assertions.

use millrace_bundle::onnx::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, attribute_proto::AttributeType, tensor_proto::DataType, tensor_shape_proto,
    type_proto,
};
use millrace_bundle::{Datatype, Signature, TensorSpec};

use crate::rows::{Dependence, prove};

/// A graph builder; methods return the name of the value that they added.
pub(super) struct Build {
    pub(super) model: ModelProto,
}

impl Build {
    /// A graph with the FP32 input `x` of rows of the shape `row`; -1 stands for an extent that callers choose.
    pub(super) fn new(opset: i64, row: &[i64]) -> Build {
        let set = |domain: &str, version| OperatorSetIdProto {
            domain: Some(domain.into()),
            version: Some(version),
        };
        let mut build = Build {
            model: ModelProto {
                ir_version: Some(8),
                opset_import: vec![
                    set("", opset),
                    set("ai.onnx.ml", 3),
                    set("com.microsoft", 1),
                    set("own", 1),
                ],
                graph: Some(GraphProto { name: Some("test".into()), ..Default::default() }),
                ..Default::default()
            },
        };
        build.input("x", DataType::Float, row);
        build
    }

    pub(super) fn graph(&mut self) -> &mut GraphProto {
        self.model.graph.as_mut().unwrap()
    }

    /// Adds an input of rows of the shape `row`.
    pub(super) fn input(&mut self, name: &str, datatype: DataType, row: &[i64]) -> String {
        let shape = [&[-1], row].concat();
        self.graph().input.push(info(name, datatype, Some(&shape)));
        name.to_owned()
    }

    /// A constant of floats.
    pub(super) fn floats(&mut self, dims: &[i64]) -> String {
        let count = dims.iter().product::<i64>();
        let values = (0..count).map(|place| ((place * 7 + 3) % 11) as f32 / 11.0 - 0.45).collect();
        self.constant(dims, values)
    }

    /// A constant of the given floats.
    pub(super) fn constant(&mut self, dims: &[i64], values: Vec<f32>) -> String {
        self.tensor(TensorProto {
            dims: dims.to_vec(),
            data_type: Some(DataType::Float as i32),
            float_data: values,
            ..Default::default()
        })
    }

    /// A list of integers.
    pub(super) fn list(&mut self, values: &[i64]) -> String {
        self.integers(&[values.len() as i64], values)
    }

    /// One integer.
    pub(super) fn number(&mut self, value: i64) -> String {
        self.integers(&[], &[value])
    }

    pub(super) fn integers(&mut self, dims: &[i64], values: &[i64]) -> String {
        self.tensor(TensorProto {
            dims: dims.to_vec(),
            data_type: Some(DataType::Int64 as i32),
            int64_data: values.to_vec(),
            ..Default::default()
        })
    }

    /// A constant that repeats one small integer.
    pub(super) fn bytes(&mut self, datatype: DataType, dims: &[i64], value: i32) -> String {
        self.tensor(TensorProto {
            dims: dims.to_vec(),
            data_type: Some(datatype as i32),
            int32_data: vec![value; dims.iter().product::<i64>() as usize],
            ..Default::default()
        })
    }

    fn tensor(&mut self, tensor: TensorProto) -> String {
        let name = format!("c{}", self.graph().initializer.len());
        self.graph().initializer.push(TensorProto { name: Some(name.clone()), ..tensor });
        name
    }

    /// A node with one output.
    pub(super) fn node(
        &mut self,
        operator: &str,
        inputs: &[&str],
        attributes: Vec<AttributeProto>,
    ) -> String {
        self.nodes(operator, inputs, attributes, 1).remove(0)
    }

    /// A node with several outputs. The operator may have its domain as prefix: `ai.onnx.ml:Scaler`.
    pub(super) fn nodes(
        &mut self,
        operator: &str,
        inputs: &[&str],
        attribute: Vec<AttributeProto>,
        outputs: usize,
    ) -> Vec<String> {
        let number = self.graph().node.len();
        let (domain, operator) = operator.split_once(':').unwrap_or(("", operator));
        let output: Vec<String> = (0..outputs).map(|place| format!("t{number}_{place}")).collect();
        self.graph().node.push(NodeProto {
            name: Some(format!("n{number}")),
            op_type: Some(operator.into()),
            domain: Some(domain.into()),
            input: inputs.iter().map(ToString::to_string).collect(),
            output: output.clone(),
            attribute,
            ..Default::default()
        });
        output
    }

    /// Result of the proof for one output.
    pub(super) fn prove(&mut self, output: &str) -> Result<(), Dependence> {
        let inputs: Vec<&str> =
            self.model.graph.iter().flat_map(|graph| &graph.input).map(|input| input.name()).collect();
        let spec = |name: &str| TensorSpec { name: name.into(), datatype: Datatype::Fp32, shape: vec![-1] };
        let signature =
            Signature { inputs: inputs.iter().map(|name| spec(name)).collect(), outputs: vec![spec(output)] };
        prove(&self.model, &signature)
    }
}

/// Type information of a value, with a shape or without.
pub(super) fn info(name: &str, datatype: DataType, shape: Option<&[i64]>) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |(place, extent): (usize, &i64)| {
        let value = if *extent < 0 { Value::DimParam(format!("d{place}")) } else { Value::DimValue(*extent) };
        Dimension { value: Some(value), ..Default::default() }
    };
    let shape = shape.map(|shape| TensorShapeProto { dim: shape.iter().enumerate().map(dim).collect() });
    let tensor = type_proto::Tensor { elem_type: Some(datatype as i32), shape };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() }),
        ..Default::default()
    }
}

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(kind as i32), ..Default::default() }
}

pub(super) fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: Some(value), ..attribute(name, AttributeType::Int) }
}

pub(super) fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto { ints: values.to_vec(), ..attribute(name, AttributeType::Ints) }
}

pub(super) fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto { s: Some(value.as_bytes().to_vec()), ..attribute(name, AttributeType::String) }
}

pub(super) fn inner(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto { g: Some(graph), ..attribute(name, AttributeType::Graph) }
}

/// Asserts that rows are proven to be independent.
#[track_caller]
pub(super) fn accepted(opset: i64, row: &[i64], build: impl FnOnce(&mut Build) -> String) {
    let mut graph = Build::new(opset, row);
    let output = build(&mut graph);
    if let Err(why) = graph.prove(&output) {
        panic!("{why}");
    }
}

/// Asserts that rows are not proven to be independent, and that the reason contains `words`.
#[track_caller]
pub(super) fn refused(opset: i64, row: &[i64], words: &str, build: impl FnOnce(&mut Build) -> String) {
    let mut graph = Build::new(opset, row);
    let output = build(&mut graph);
    match graph.prove(&output) {
        Ok(()) => panic!("it was taken for independent"),
        Err(why) => assert!(why.to_string().contains(words), "{why}"),
    }
}
