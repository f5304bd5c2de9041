//! Test support: small ONNX graphs, one per operator form, and ONNX Runtime as the reference.
#![allow(clippy::print_stderr)]

pub(crate) mod digits;
mod operators;

use std::collections::BTreeMap;

use millrace_bundle::onnx::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, attribute_proto::AttributeType, tensor_proto, tensor_shape_proto, type_proto,
};
use prost::Message;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use crate::graph::Graph;

pub(crate) use operators::all as every_operator;

/// Numbers uniform in (−1, 1), the same for the same seed.
pub(crate) fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| f64::from(random.next_u32() >> 8) as f32 / 8_388_608.0 - 1.0).collect()
}

/// Inputs for a graph: numbers, or positions in its tables.
pub(crate) fn inputs(graph: &Graph, rows: usize, seed: u64) -> Vec<f32> {
    let mut values = numbers(rows * graph.input_width(), seed);
    for row in values.chunks_exact_mut(graph.input_width()) {
        for input in graph.inputs() {
            for (x, below) in row[input.range.clone()].iter_mut().zip(input.below.iter().flatten()) {
                *x = ((*x + 1.0) * 0.5 * (*below).min(1 << 10) as f32).floor();
            }
        }
    }
    values
}

pub(crate) fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..Default::default()
    }
}

pub(crate) fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Ints as i32),
        ints: values.to_vec(),
        ..Default::default()
    }
}

pub(crate) fn float(name: &str, value: f32) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Float as i32),
        f: Some(value),
        ..Default::default()
    }
}

pub(crate) fn floats(name: &str, values: &[f32]) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Floats as i32),
        floats: values.to_vec(),
        ..Default::default()
    }
}

pub(crate) fn tensor(name: &str, value: TensorProto) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Tensor as i32),
        t: Some(value),
        ..Default::default()
    }
}

pub(crate) fn text(name: &str, value: &str) -> AttributeProto {
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::String as i32),
        s: Some(value.as_bytes().to_vec()),
        ..Default::default()
    }
}

/// A graph under construction; every method returns the name of the tensor that it added.
pub(crate) struct Probe {
    pub(crate) graph: GraphProto,
    opset: i64,
}

impl Probe {
    pub(crate) fn new(opset: i64, row: &[i64]) -> Probe {
        let graph = GraphProto {
            name: Some("probe".into()),
            input: vec![info("x", Some(row))],
            ..Default::default()
        };
        Probe { graph, opset }
    }

    /// Makes the input one of int64.
    pub(crate) fn of_integers(&mut self) {
        for info in &mut self.graph.input {
            if let Some(type_proto::Value::TensorType(tensor)) =
                info.r#type.as_mut().and_then(|kind| kind.value.as_mut())
            {
                tensor.elem_type = Some(tensor_proto::DataType::Int64 as i32);
            }
        }
    }

    pub(crate) fn param(&mut self, dims: &[i64]) -> String {
        let count = dims.iter().product::<i64>() as usize;
        let index = self.graph.initializer.len();
        self.param_of(dims, numbers(count, 77 + index as u64))
    }

    pub(crate) fn param_of(&mut self, dims: &[i64], data: Vec<f32>) -> String {
        let name = format!("w{}", self.graph.initializer.len());
        self.graph.initializer.push(TensorProto {
            dims: dims.to_vec(),
            data_type: Some(tensor_proto::DataType::Float as i32),
            name: Some(name.clone()),
            float_data: data,
            ..Default::default()
        });
        name
    }

    pub(crate) fn shape(&mut self, values: &[i64]) -> String {
        let name = format!("s{}", self.graph.initializer.len());
        self.graph.initializer.push(TensorProto {
            dims: vec![values.len() as i64],
            data_type: Some(tensor_proto::DataType::Int64 as i32),
            name: Some(name.clone()),
            int64_data: values.to_vec(),
            ..Default::default()
        });
        name
    }

    /// A constant of truth values.
    pub(crate) fn flags(&mut self, dims: &[i64], values: &[bool]) -> String {
        let name = format!("b{}", self.graph.initializer.len());
        self.graph.initializer.push(TensorProto {
            dims: dims.to_vec(),
            data_type: Some(tensor_proto::DataType::Bool as i32),
            name: Some(name.clone()),
            int32_data: values.iter().map(|value| i32::from(*value)).collect(),
            ..Default::default()
        });
        name
    }

    /// An integer of rank 0.
    pub(crate) fn index(&mut self, value: i64) -> String {
        let name = self.shape(&[value]);
        if let Some(tensor) = self.graph.initializer.last_mut() {
            tensor.dims.clear();
        }
        name
    }

    pub(crate) fn constant(&mut self, dims: &[i64], data: Vec<f32>) -> String {
        let tensor = TensorProto {
            dims: dims.to_vec(),
            data_type: Some(tensor_proto::DataType::Float as i32),
            float_data: data,
            ..Default::default()
        };
        let value = AttributeProto {
            name: Some("value".into()),
            r#type: Some(AttributeType::Tensor as i32),
            t: Some(tensor),
            ..Default::default()
        };
        self.node("Constant", &[], vec![value])
    }

    pub(crate) fn node(&mut self, op: &str, inputs: &[&str], attribute: Vec<AttributeProto>) -> String {
        let output = format!("t{}", self.graph.node.len());
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|i| (*i).to_owned()).collect(),
            output: vec![output.clone()],
            op_type: Some(op.into()),
            attribute,
            ..Default::default()
        });
        output
    }

    /// A node with several outputs.
    pub(crate) fn nodes(
        &mut self,
        op: &str,
        inputs: &[&str],
        attribute: Vec<AttributeProto>,
        outputs: usize,
    ) -> Vec<String> {
        let first = self.node(op, inputs, attribute);
        let names: Vec<String> =
            (0..outputs).map(|at| if at == 0 { first.clone() } else { format!("{first}_{at}") }).collect();
        if let Some(node) = self.graph.node.last_mut() {
            node.output.clone_from(&names);
        }
        names
    }

    pub(crate) fn finish(mut self, output: &str) -> ModelProto {
        self.graph.output = vec![info(output, None)];
        ModelProto {
            ir_version: Some(8),
            opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(self.opset) }],
            graph: Some(self.graph),
            ..Default::default()
        }
    }
}

/// A branch of a node `op`, which gives `output`.
pub(crate) fn branch(name: &str, op: &str, inputs: &[&str], output: &str) -> AttributeProto {
    let node = NodeProto {
        input: inputs.iter().map(|input| (*input).to_owned()).collect(),
        output: vec![output.to_owned()],
        op_type: Some(op.into()),
        ..Default::default()
    };
    let graph = GraphProto { node: vec![node], output: vec![info(output, None)], ..Default::default() };
    AttributeProto {
        name: Some(name.into()),
        r#type: Some(AttributeType::Graph as i32),
        g: Some(graph),
        ..Default::default()
    }
}

/// A float tensor; with a shape, its first dimension is the batch.
pub(crate) fn info(name: &str, row: Option<&[i64]>) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let shape = row.map(|row| {
        let batch = Value::DimParam("batch".into());
        let sizes = row.iter().map(|size| Value::DimValue(*size));
        TensorShapeProto {
            dim: std::iter::once(batch)
                .chain(sizes)
                .map(|value| Dimension { value: Some(value), ..Default::default() })
                .collect(),
        }
    });
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto {
            value: Some(type_proto::Value::TensorType(type_proto::Tensor {
                elem_type: Some(tensor_proto::DataType::Float as i32),
                shape,
            })),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// ONNX Runtime, from the library that `ORT_DYLIB_PATH` names.
pub(crate) fn runtime() -> &'static ort::environment::Environment {
    use std::sync::OnceLock;
    static RUNTIME: OnceLock<ort::environment::Environment> = OnceLock::new();
    RUNTIME.get_or_init(|| {
        let path = std::env::var_os("ORT_DYLIB_PATH").expect("ORT_DYLIB_PATH names ONNX Runtime's library");
        ort::init_from(path).unwrap().build().unwrap()
    })
}

/// All outputs, by name, of a model with several inputs, in ONNX Runtime. `graph` was read from it.
pub(crate) fn run_all(
    environment: &ort::environment::Environment,
    model: &ModelProto,
    graph: &Graph,
    rows: usize,
    values: &[f32],
) -> BTreeMap<String, Vec<f32>> {
    use ort::session::SessionInputValue;
    use ort::value::Tensor;
    let builder = ort::session::Session::builder(environment).unwrap();
    let mut session =
        builder.with_intra_threads(1).unwrap().commit_from_memory(&model.encode_to_vec()).unwrap();
    let mut given: Vec<(String, SessionInputValue<'_>)> = Vec::new();
    for input in graph.inputs() {
        let rows_of = values.chunks_exact(graph.input_width());
        let part: Vec<f32> = rows_of.flat_map(|row| row[input.range.clone()].to_vec()).collect();
        let shape = [vec![rows], graph.row_of(input)].concat();
        let whole = part.iter().map(|value| *value as i64);
        let tensor = match input.form.split(' ').next().unwrap() {
            "INT64" => Tensor::from_array((shape, whole.collect::<Vec<_>>())).unwrap().into(),
            "INT32" => Tensor::from_array((shape, whole.map(|value| value as i32).collect::<Vec<_>>()))
                .unwrap()
                .into(),
            "BOOL" => {
                Tensor::from_array((shape, whole.map(|value| value != 0).collect::<Vec<_>>())).unwrap().into()
            }
            _ => Tensor::from_array((shape, part)).unwrap().into(),
        };
        given.push((input.name.clone(), tensor));
    }
    let outputs = session.run(given).unwrap();
    let of = |(name, value): (&str, ort::value::ValueRef<'_>)| {
        (name.to_owned(), value.try_extract_tensor::<f32>().unwrap().1.to_vec())
    };
    outputs.iter().map(of).collect()
}

/// The model's output for `inputs` in ONNX Runtime.
pub(crate) fn run_reference(
    environment: &ort::environment::Environment,
    model: &ModelProto,
    row: &[usize],
    rows: usize,
    inputs: &[f32],
) -> Result<Vec<f32>, String> {
    let mut session = ort::session::Session::builder(environment)
        .map_err(|e| e.to_string())?
        .with_intra_threads(1)
        .map_err(|e| e.to_string())?
        .commit_from_memory(&model.encode_to_vec())
        .map_err(|e| e.to_string())?;
    let mut shape = vec![rows];
    shape.extend(row);
    let is_index = Graph::infer(model).is_ok_and(|graph| graph.inputs()[0].below.is_some());
    let outputs = if is_index {
        let whole: Vec<i64> = inputs.iter().map(|value| *value as i64).collect();
        let tensor = ort::value::Tensor::from_array((shape, whole)).map_err(|e| e.to_string())?;
        session.run(ort::inputs![tensor]).map_err(|e| e.to_string())?
    } else {
        let tensor = ort::value::Tensor::from_array((shape, inputs.to_vec())).map_err(|e| e.to_string())?;
        session.run(ort::inputs![tensor]).map_err(|e| e.to_string())?
    };
    let (_, data) = outputs[0].try_extract_tensor::<f32>().map_err(|e| e.to_string())?;
    Ok(data.to_vec())
}
