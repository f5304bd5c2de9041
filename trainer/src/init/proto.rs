//! ONNX graph writer: appends the nodes, weights and constants of a new model.

use millrace_bundle::onnx::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, ValueInfoProto,
    attribute_proto::AttributeType, tensor_proto, tensor_shape_proto::dimension::Value,
};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::{InitError, WeightCount};
use crate::graph::{float_info, parameter_info};

/// IR version of ONNX 1.12, the release of operator set 17.
const IR_VERSION: i64 = 8;
const OPSET: i64 = 17;

/// A graph under construction.
pub(super) struct GraphBuilder {
    graph: GraphProto,
    random: ChaCha8Rng,
    weights: WeightCount,
    /// Whether new weights are marked as parameters.
    marks: bool,
    /// Names of the weights and biases that this builder added.
    added: Vec<String>,
}

impl GraphBuilder {
    pub(super) fn new(name: &str, inputs: usize, classes: usize, seed: u64) -> GraphBuilder {
        GraphBuilder {
            graph: GraphProto {
                name: Some(name.to_owned()),
                input: vec![tensor_info("input", inputs)],
                output: vec![tensor_info("logits", classes)],
                ..GraphProto::default()
            },
            random: ChaCha8Rng::seed_from_u64(seed),
            weights: WeightCount::default(),
            marks: false,
            added: Vec::new(),
        }
    }

    /// Continues a graph. With `marks`, new weights are marked as parameters, as PyTorch's exporter does.
    pub(super) fn on(graph: GraphProto, seed: u64, marks: bool) -> GraphBuilder {
        let random = ChaCha8Rng::seed_from_u64(seed);
        GraphBuilder { graph, random, weights: WeightCount::default(), marks, added: Vec::new() }
    }

    /// The graph, and the names of the weights and biases that were added to it.
    pub(super) fn into_graph(self) -> (GraphProto, Vec<String>) {
        (self.graph, self.added)
    }

    pub(super) fn finish(self) -> ModelProto {
        ModelProto {
            ir_version: Some(IR_VERSION),
            opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(OPSET) }],
            producer_name: Some("millrace".to_owned()),
            producer_version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            graph: Some(self.graph),
            ..ModelProto::default()
        }
    }

    fn node(&mut self, op: &str, output: &str, inputs: &[&str], attribute: Vec<AttributeProto>) -> String {
        self.graph.node.push(NodeProto {
            input: inputs.iter().map(|name| (*name).to_owned()).collect(),
            output: vec![output.to_owned()],
            name: Some(output.to_owned()),
            op_type: Some(op.to_owned()),
            attribute,
            ..NodeProto::default()
        });
        output.to_owned()
    }

    fn initializer(&mut self, name: &str, dims: &[usize], data: Vec<f32>) {
        self.graph.initializer.push(TensorProto {
            dims: dims.iter().map(|size| *size as i64).collect(),
            data_type: Some(tensor_proto::DataType::Float as i32),
            name: Some(name.to_owned()),
            raw_data: Some(data.iter().flat_map(|value| value.to_le_bytes()).collect()),
            ..TensorProto::default()
        });
        if self.marks {
            self.graph.value_info.push(parameter_info(name, dims));
        }
        self.added.push(name.to_owned());
    }

    /// Weights from the uniform distribution with variance `gain / (3 · fan_in)`, and zero biases.
    fn layer(
        &mut self,
        layer: &str,
        dims: &[usize],
        fan_in: usize,
        outputs: usize,
        gain: f64,
    ) -> Result<[String; 2], InitError> {
        let count = self.weights.add(dims, outputs)?;
        let bound = (gain / fan_in as f64).sqrt();
        let data = (0..count)
            .map(|_| {
                let unit = f64::from(self.random.next_u32() >> 8) / f64::from(1u32 << 24);
                ((2.0 * unit - 1.0) * bound) as f32
            })
            .collect();
        let names = [format!("{layer}.weight"), format!("{layer}.bias")];
        self.initializer(&names[0], dims, data);
        self.initializer(&names[1], &[outputs], vec![0.0; outputs]);
        Ok(names)
    }

    /// Multiplies by a constant, unless it is 1.
    pub(super) fn scale(&mut self, input: &str, factor: f32) -> String {
        if factor == 1.0 {
            return input.to_owned();
        }
        let value = AttributeProto {
            name: Some("value_float".to_owned()),
            r#type: Some(AttributeType::Float as i32),
            f: Some(factor),
            ..AttributeProto::default()
        };
        let constant = self.node("Constant", "scale", &[], vec![value]);
        self.node("Mul", "scaled", &[input, &constant], vec![])
    }

    pub(super) fn gemm(
        &mut self,
        layer: &str,
        input: &str,
        inputs: usize,
        outputs: usize,
        gain: f64,
    ) -> Result<String, InitError> {
        let [weight, bias] = self.layer(layer, &[inputs, outputs], inputs, outputs, gain)?;
        Ok(self.node("Gemm", layer, &[input, &weight, &bias], vec![]))
    }

    /// The last layer, whose output is the model's.
    pub(super) fn logits(&mut self, input: &str, inputs: usize, classes: usize) -> Result<(), InitError> {
        let [weight, bias] = self.layer("head", &[inputs, classes], inputs, classes, 3.0)?;
        self.node("Gemm", "logits", &[input, &weight, &bias], vec![]);
        Ok(())
    }

    pub(super) fn relu(&mut self, layer: &str, input: &str) -> String {
        self.node("Relu", &format!("{layer}.relu"), &[input], vec![])
    }

    /// Reshapes flat rows to images.
    pub(super) fn image(&mut self, input: &str, sides: [usize; 3]) -> String {
        let mut shape = vec![-1i64];
        shape.extend(sides.map(|side| side as i64));
        self.graph.initializer.push(TensorProto {
            dims: vec![4],
            data_type: Some(tensor_proto::DataType::Int64 as i32),
            name: Some("image.shape".to_owned()),
            raw_data: Some(shape.iter().flat_map(|size| size.to_le_bytes()).collect()),
            ..TensorProto::default()
        });
        self.node("Reshape", "image", &[input, "image.shape"], vec![])
    }

    pub(super) fn conv3x3(
        &mut self,
        layer: &str,
        input: &str,
        channels: usize,
        filters: usize,
    ) -> Result<String, InitError> {
        let dims = [filters, channels, 3, 3];
        let fan_in = channels.saturating_mul(9);
        let [weight, bias] = self.layer(layer, &dims, fan_in, filters, 6.0)?;
        let attributes = vec![ints("kernel_shape", &[3, 3]), ints("pads", &[1, 1, 1, 1])];
        Ok(self.node("Conv", layer, &[input, &weight, &bias], attributes))
    }

    pub(super) fn pool2x2(&mut self, layer: &str, input: &str) -> String {
        let attributes = vec![ints("kernel_shape", &[2, 2]), ints("strides", &[2, 2])];
        self.node("MaxPool", &format!("{layer}.pool"), &[input], attributes)
    }

    pub(super) fn flatten(&mut self, input: &str) -> String {
        self.flatten_as("flat", input)
    }

    pub(super) fn flatten_as(&mut self, name: &str, input: &str) -> String {
        self.node("Flatten", name, &[input], vec![])
    }

    /// The mean over all positions of each channel, as `[rows, channels]`.
    pub(super) fn pool_channels(&mut self, name: &str, input: &str) -> String {
        let pooled = self.node("GlobalAveragePool", &format!("{name}.mean"), &[input], vec![]);
        self.flatten_as(name, &pooled)
    }
}

fn ints(name: &str, values: &[i64]) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Ints as i32),
        ints: values.to_vec(),
        ..AttributeProto::default()
    }
}

/// A float tensor `[batch, width]`.
fn tensor_info(name: &str, width: usize) -> ValueInfoProto {
    rows_info(name, &[width])
}

/// A float tensor `[batch, …]` whose rows have a shape.
pub(super) fn rows_info(name: &str, row: &[usize]) -> ValueInfoProto {
    let rows = std::iter::once(Value::DimParam("batch".to_owned()));
    float_info(name, rows.chain(row.iter().map(|size| Value::DimValue(*size as i64))).collect())
}
