//! Edits of a model: fix sizes that its inputs leave open, cut a graph at a value, and add new layers behind it.
//!
//! What the cut leaves behind (nodes, weights, outputs) is removed. New layers get seeded weights as those of
//! new models ([`super`]).

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::str::FromStr;

use millrace_bundle::onnx::{GraphProto, ModelProto, NodeProto, ValueInfoProto};
use thiserror::Error;

use super::InitError;
use super::proto::{GraphBuilder, rows_info};
use crate::graph::{Dim, Graph, GraphError, has_marks, read_by};
pub use crate::model::ModelFileError;
pub use sizes::NamedSize;

/// First IR version in which a weight need not be an input as well.
const IR_VERSION_MIN: i64 = 4;
/// Names that an error lists.
const LISTED_MAX: usize = 8;

/// A layer to add behind a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer {
    /// One row of values from whatever shape: `flatten`.
    Flatten,
    /// The mean of each channel of `[rows, channels, …]`: `pool`.
    Pool,
    /// `relu`
    Relu,
    /// A fully connected layer with this number of outputs: `linear=N`.
    Linear(usize),
}

impl FromStr for Layer {
    type Err = String;

    fn from_str(text: &str) -> Result<Layer, String> {
        let outputs = |text: &str| text.parse().ok().filter(|outputs| *outputs > 0).map(Layer::Linear);
        match text {
            "flatten" => Ok(Layer::Flatten),
            "pool" => Ok(Layer::Pool),
            "relu" => Ok(Layer::Relu),
            _ => text
                .strip_prefix("linear=")
                .and_then(outputs)
                .ok_or_else(|| format!("{text:?} is no layer: write flatten, pool, relu or linear=N")),
        }
    }
}

/// An edit of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Edit {
    /// The value that becomes the output: its name, or the name of the node or of the module that makes it, if that
    /// makes one value alone. The model's output when absent.
    pub cut: Option<String>,
    /// Layers behind it, in order.
    pub layers: Vec<Layer>,
    /// Sizes for dynamic dimensions of the inputs, but the first ones, by their names.
    pub sizes: Vec<NamedSize>,
    /// Seed of the new weights.
    pub seed: u64,
}

/// Why a model cannot be edited.
#[derive(Debug, Error)]
pub enum EditError {
    /// The file cannot be read as a model.
    #[error(transparent)]
    File(#[from] ModelFileError),
    /// No value or node has the name.
    #[error("the graph has no node, value or module {name:?}; the last nodes are {last}")]
    NoValue {
        /// The name given.
        name: String,
        /// Names of the last nodes.
        last: String,
    },
    /// The name does not say which value is meant.
    #[error("{name:?} stands for several values: cut at one of {values}")]
    Ambiguous {
        /// The name given.
        name: String,
        /// The values.
        values: String,
    },
    /// No input has a dimension of the name that may be fixed.
    #[error("no input has a dynamic dimension {name:?} that can be fixed; {known}")]
    NoDimension {
        /// The name given.
        name: String,
        /// The dimensions that can be fixed.
        known: String,
    },
    /// A layer does not fit behind the values before it.
    #[error("layer {position} ({layer}) does not fit behind values of shape {shape}: {remedy}")]
    Layer {
        /// Number of the layer, from 1.
        position: usize,
        /// The layer.
        layer: &'static str,
        /// The shape of a row.
        shape: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// What is left cannot be read or trained.
    #[error("the edited model could not be trained: {0}")]
    Graph(#[from] GraphError),
    /// Training would not change a new layer.
    #[error("the edited model could not be trained: its new weights {name:?} would stay fixed")]
    Fixed {
        /// The weights.
        name: String,
    },
    /// A new layer exceeds a limit.
    #[error(transparent)]
    Init(#[from] InitError),
}

/// Reads an ONNX file with the weights that it keeps beside it.
pub fn read(path: &Path) -> Result<ModelProto, EditError> {
    Ok(crate::model::read(path)?)
}

/// The edited model, which depends on the model and the edit alone. With new layers, it can be trained.
pub fn edit(model: &ModelProto, edit: &Edit) -> Result<ModelProto, EditError> {
    let mut model = model.clone();
    let graph = model.graph.get_or_insert_default();
    for size in &edit.sizes {
        sizes::fix(graph, size)?;
    }
    if edit.cut.is_none() && edit.layers.is_empty() && !edit.sizes.is_empty() {
        return Ok(model);
    }
    let marks = has_marks(graph);
    if let Some(cut) = &edit.cut {
        let value = value_named(graph, cut)?;
        cut_at(graph, &value);
    }
    model.ir_version = Some(model.ir_version.unwrap_or_default().max(IR_VERSION_MIN));
    let body = Graph::infer(&model)?;
    let mut row = row_of(&body);
    let mut value = body.output_name().to_owned();
    let graph = model.graph.take().unwrap_or_default();
    let prefix = free_prefix(&graph);
    let mut builder = GraphBuilder::on(graph, edit.seed, marks);
    for (at, layer) in edit.layers.iter().enumerate() {
        let unfit =
            |layer, remedy| EditError::Layer { position: at + 1, layer, shape: format!("{row:?}"), remedy };
        let name = format!("{prefix}.{}", at + 1);
        match *layer {
            Layer::Flatten => {
                value = builder.flatten_as(&name, &value);
                row = vec![row.iter().product()];
            }
            Layer::Pool if row.len() >= 2 => {
                value = builder.pool_channels(&name, &value);
                row.truncate(1);
            }
            Layer::Pool => return Err(unfit("pool", "a pool needs channels and positions; leave it out")),
            Layer::Relu => value = builder.relu(&name, &value),
            Layer::Linear(outputs) if row.len() == 1 => {
                // As in new models: unit gain for the last layer, Kaiming's for those before a ReLU.
                let gain = if edit.layers.get(at + 1) == Some(&Layer::Relu) { 6.0 } else { 3.0 };
                value = builder.gemm(&name, &value, row[0], outputs, gain)?;
                row = vec![outputs];
            }
            Layer::Linear(_) if row.is_empty() => return Err(unfit("linear", "add flatten before it")),
            Layer::Linear(_) => return Err(unfit("linear", "add flatten or pool before it")),
        }
    }
    let (mut graph, added) = builder.into_graph();
    graph.output = vec![rows_info(&value, &row)];
    model.graph = Some(graph);
    if edit.layers.is_empty() {
        return Ok(model);
    }
    let edited = Graph::read(&model)?;
    let trained: HashSet<&str> = edited.params().iter().map(|param| param.name.as_str()).collect();
    match added.into_iter().find(|name| !trained.contains(name.as_str())) {
        Some(name) => Err(EditError::Fixed { name }),
        None => Ok(model),
    }
}

/// The shape of a row of the graph's output.
fn row_of(graph: &Graph) -> Vec<usize> {
    let dims = &graph.values()[graph.output()].dims;
    dims.iter().filter_map(|dim| if let Dim::Fixed(size) = dim { Some(*size) } else { None }).collect()
}

/// The value that a name means: a value, or the only one that a node or a module of this name gives.
fn value_named(graph: &GraphProto, name: &str) -> Result<String, EditError> {
    let outputs = |node: &NodeProto| node.output.clone().into_iter().filter(|output| !output.is_empty());
    let no_value = || {
        let last: Vec<_> = graph.node.iter().rev().take(LISTED_MAX).map(called).collect();
        EditError::NoValue { name: name.to_owned(), last: last.join(", ") }
    };
    if name.is_empty() {
        return Err(no_value());
    }
    if graph.node.iter().flat_map(outputs).any(|output| output == name) {
        return Ok(name.to_owned());
    }
    let mut found: Vec<String> =
        graph.node.iter().filter(|node| node.name() == name).flat_map(outputs).collect();
    if found.is_empty() {
        found = module::results(graph, name);
    }
    match &found[..] {
        [] => Err(no_value()),
        [value] => Ok(value.clone()),
        values => Err(EditError::Ambiguous { name: name.to_owned(), values: listed(values) }),
    }
}

/// The first names of a list.
fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(LISTED_MAX);
    let first = names[..names.len() - more].join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

/// The name of a node, or of its first output when it has none.
fn called(node: &NodeProto) -> &str {
    let name = node.name();
    if name.is_empty() { node.output.first().map_or("", String::as_str) } else { name }
}

/// Makes a value the only output, and removes what it does not need.
fn cut_at(graph: &mut GraphProto, value: &str) {
    // Its shape is known once the graph is read.
    graph.output = vec![ValueInfoProto { name: Some(value.to_owned()), ..ValueInfoProto::default() }];
    let made_by: HashMap<&str, usize> = graph
        .node
        .iter()
        .enumerate()
        .flat_map(|(at, node)| node.output.iter().map(move |output| (output.as_str(), at)))
        // An output without a name is one that the node does not give, and such an input one that it does not read.
        .filter(|(output, _)| !output.is_empty())
        .collect();
    let mut kept = BTreeSet::new();
    let mut needed = HashSet::from([value]);
    let mut open = vec![value];
    while let Some(value) = open.pop() {
        let Some(at) = made_by.get(value).copied() else { continue };
        if kept.insert(at) {
            for input in read_by(&graph.node[at]) {
                if needed.insert(input) {
                    open.push(input);
                }
            }
        }
    }
    let needed: HashSet<String> = needed.into_iter().map(str::to_owned).collect();
    graph.node = kept.iter().map(|at| graph.node[*at].clone()).collect();
    graph.initializer.retain(|tensor| needed.contains(tensor.name()));
    graph
        .sparse_initializer
        .retain(|tensor| tensor.values.as_ref().is_some_and(|t| needed.contains(t.name())));
    graph.input.retain(|input| needed.contains(input.name()));
    graph.value_info.retain(|info| needed.contains(info.name()) && info.name() != value);
    graph.quantization_annotation.retain(|annotation| needed.contains(annotation.tensor_name()));
}

/// A beginning that no name of the graph has.
fn free_prefix(graph: &GraphProto) -> String {
    let values =
        graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str).chain([node.name()]));
    let inputs = graph.input.iter().map(ValueInfoProto::name);
    let infos = graph.value_info.iter().map(ValueInfoProto::name);
    let weights = graph.initializer.iter().map(|tensor| tensor.name());
    let names: Vec<&str> = values.chain(inputs).chain(infos).chain(weights).collect();
    let free = |prefix: &String| !names.iter().any(|name| name.starts_with(prefix.as_str()));
    std::iter::once("head".to_owned())
        .chain((2..).map(|number: u64| format!("head{number}")))
        .find(free)
        .unwrap_or_default()
}

mod module;
mod sizes;
#[cfg(test)]
mod tests;
