//! Graph rewriting: replaces matrix products by nodes that compute with integers.

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::{
    AttributeProto, GraphProto, NodeProto, TensorProto, attribute_proto::AttributeType,
    tensor_proto::DataType,
};

use super::names::Names;
use super::weights::Weights;

/// The names of a quantized value: its integers, scale and zero point.
type Integers = [String; 3];

/// A graph whose nodes are added again one by one.
pub(super) struct Rewrite<'a> {
    graph: &'a mut GraphProto,
    names: Names,
    /// Values that are quantized already, since several products may read one.
    integers: HashMap<String, Integers>,
    /// Weights that are not read any more.
    replaced: HashSet<String>,
    nodes: Vec<NodeProto>,
    scales: Vec<TensorProto>,
}

impl<'a> Rewrite<'a> {
    /// Starts the rewriting of a graph whose nodes were taken out.
    pub(super) fn new(graph: &'a mut GraphProto, nodes: &[NodeProto]) -> Rewrite<'a> {
        let names = Names::of(graph, nodes);
        Rewrite {
            graph,
            names,
            integers: HashMap::new(),
            replaced: HashSet::new(),
            nodes: Vec::with_capacity(nodes.len()),
            scales: Vec::new(),
        }
    }

    /// The graph without its nodes.
    pub(super) fn graph(&self) -> &GraphProto {
        self.graph
    }

    /// Adds a node unchanged.
    pub(super) fn keep(&mut self, node: NodeProto) {
        self.nodes.push(node);
    }

    /// Adds integer nodes in place of a product with two or three inputs and one output, whose weights are
    /// the initializer at `place`.
    pub(super) fn replace(&mut self, node: NodeProto, place: usize, weights: Weights) {
        let Some(tensor) = self.graph.initializer.get_mut(place) else { return self.nodes.push(node) };
        let (input, output) = (node.input[0].clone(), node.output[0].clone());
        let bias = node.input.get(2).filter(|name| !name.is_empty()).cloned();
        let old = tensor.name().to_owned();
        let levels = self.names.unused(format!("{old}_int8"));
        let scales = self.names.unused(format!("{old}_scales"));
        let doc_string = tensor.doc_string.take();
        *tensor = TensorProto {
            doc_string,
            ..initializer(
                &levels,
                &[weights.rows, weights.columns],
                DataType::Int8,
                // Two's complement, as `raw_data` stores it.
                weights.values.iter().map(|value| value.cast_unsigned()).collect(),
            )
        };
        let bytes = weights.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
        self.scales.push(initializer(&scales, &[weights.columns], DataType::Float, bytes));
        self.replaced.insert(old);

        let [integers, scale, zero] = self.integers(&input);
        let value = |names: &mut Names, what: &str| names.unused(format!("{output}_{what}"));
        let sums = value(&mut self.names, "sums");
        let floats = value(&mut self.names, "float_sums");
        let factors = value(&mut self.names, "factors");
        let product = if bias.is_some() { value(&mut self.names, "product") } else { output.clone() };
        self.node("MatMulInteger", &[&integers, &levels, &zero], &[&sums]);
        self.node("Cast", &[&sums], &[&floats]).attribute.push(AttributeProto {
            name: Some("to".to_owned()),
            r#type: Some(AttributeType::Int as i32),
            i: Some(i64::from(DataType::Float as i32)),
            ..AttributeProto::default()
        });
        self.node("Mul", &[&scale, &scales], &[&factors]);
        self.node("Mul", &[&floats, &factors], &[&product]);
        if let Some(bias) = bias {
            self.node("Add", &[&product, &bias], &[&output]);
        }
        // The last new node takes over the name and the description of the replaced one.
        if let Some(last) = self.nodes.last_mut() {
            let NodeProto { name, doc_string, metadata_props, .. } = node;
            last.name = name.filter(|name| !name.is_empty()).or(last.name.take());
            (last.doc_string, last.metadata_props) = (doc_string, metadata_props);
        }
    }

    /// Puts the nodes into the graph, and removes metadata of replaced weights.
    pub(super) fn finish(self) {
        let Rewrite { graph, replaced, nodes, scales, .. } = self;
        graph.node = nodes;
        graph.initializer.extend(scales);
        graph.input.retain(|value| !replaced.contains(value.name()));
        graph.value_info.retain(|value| !replaced.contains(value.name()));
        graph.quantization_annotation.retain(|about| !replaced.contains(about.tensor_name()));
    }

    fn integers(&mut self, input: &str) -> Integers {
        if let Some(there) = self.integers.get(input) {
            return there.clone();
        }
        let made = ["uint8", "scale", "zero"].map(|what| self.names.unused(format!("{input}_{what}")));
        self.node("DynamicQuantizeLinear", &[input], &[&made[0], &made[1], &made[2]]);
        self.integers.insert(input.to_owned(), made.clone());
        made
    }

    fn node(&mut self, operator: &str, inputs: &[&str], outputs: &[&str]) -> &mut NodeProto {
        let name = self.names.unused(format!("{}_{operator}", outputs[0]));
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        self.nodes.push(NodeProto {
            input: owned(inputs),
            output: owned(outputs),
            name: Some(name),
            op_type: Some(operator.to_owned()),
            ..NodeProto::default()
        });
        let last = self.nodes.len() - 1;
        &mut self.nodes[last]
    }
}

fn initializer(name: &str, dims: &[usize], data_type: DataType, bytes: Vec<u8>) -> TensorProto {
    TensorProto {
        dims: dims.iter().map(|size| *size as i64).collect(),
        data_type: Some(data_type as i32),
        name: Some(name.to_owned()),
        raw_data: Some(bytes),
        ..TensorProto::default()
    }
}
