//! Graphs without branches: `If` and `Loop` nodes, replaced by the nodes that they run.
//!
//! PyTorch's earlier exporter writes an `If` where a dimension may be 1, tf2onnx a `Loop` for a recurrent layer of Keras.
//! Their conditions and counts follow from shapes and constants, which are known while the model is read. The nodes of
//! the branch that is taken, or of each step, get names of their own. Branches nest.

use std::collections::{HashMap, HashSet};

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto};
use prost::Message;

use super::GraphError;
use super::budget::Budget;
use super::builder::{Builder, NamedValue, NodeRef, VALUES_MAX};
use super::initializers::Roles;
use super::ints::Ints;
use super::{QUOTED_CALL, read, tensor, training, wiring};

/// Most steps of a loop, each of which becomes nodes of its own.
const STEPS_MAX: i64 = 1024;

/// Most bytes that branches and the steps of loops may become: a few kilobytes can describe nodes without bound.
const COPIED_MAX: usize = 1 << 28;

/// The names of a branch, by those that its file gives.
type Names = HashMap<String, String>;

fn is_branching(node: &NodeProto) -> bool {
    matches!(node.domain(), "" | "ai.onnx") && matches!(node.op_type(), "If" | "Loop")
}

/// The model with the nodes that its branches run in their place; `None` if its output depends on no branch.
pub(super) fn flattened(model: &ModelProto, wanted: Option<&str>) -> Result<Option<ModelProto>, GraphError> {
    let Some(proto) = model.graph.as_ref().filter(|graph| graph.node.iter().any(is_branching)) else {
        return Ok(None);
    };
    if proto.node.len() > VALUES_MAX {
        return Ok(None);
    }
    let opset = read::opset(model)?;
    let initializers = read::initializers(proto)?;
    let declared = wiring::inputs(proto, &initializers)?;
    let output = wiring::output(proto, wanted)?;
    let producers = wiring::producers(proto, &declared, &initializers)?;
    let order = wiring::order(proto, output, &producers, &declared, &initializers)?;
    if !order.iter().any(|node| is_branching(node)) {
        return Ok(None);
    }
    let mut b = Builder {
        opset,
        is_from_pytorch: model.producer_name() == "pytorch",
        reads: training::reads(proto),
        budget: Budget::of(proto),
        ..Builder::default()
    };
    read::begin(&mut b, proto, &Roles::of(model, proto), &declared, &order, false)?;
    let mut flattening = Flattening { b, nodes: Vec::new(), scopes: 0, depth: 0, copied: 0 };
    for node in &order {
        flattening.take(node)?;
    }
    let mut nodes = flattening.nodes;
    // Other outputs keep their nodes.
    let taken: HashSet<*const NodeProto> = order.iter().map(|node| std::ptr::from_ref(*node)).collect();
    nodes.extend(proto.node.iter().filter(|node| !taken.contains(&std::ptr::from_ref(*node))).cloned());
    let mut flat = model.clone();
    if let Some(graph) = flat.graph.as_mut() {
        graph.node = nodes;
    }
    Ok(Some(flat))
}

/// Nodes in order, lowered one after another, so that what decides on a branch is known once it is reached.
struct Flattening {
    b: Builder,
    nodes: Vec<NodeProto>,
    /// Branches so far, for their names.
    scopes: usize,
    /// Branches around the current node.
    depth: usize,
    /// Bytes of the nodes of branches and of their names so far, at most [`COPIED_MAX`].
    copied: usize,
}

impl Flattening {
    /// Counts bytes before they are copied.
    fn charge(&mut self, bytes: usize, site: &NodeRef) -> Result<(), GraphError> {
        self.copied = self.copied.saturating_add(bytes);
        if self.copied <= COPIED_MAX {
            return Ok(());
        }
        Err(site.form(format!(
            "its branches and steps would become more than {COPIED_MAX} bytes of nodes (export fewer steps, shorter names \
             and no comments, and pass constants to the loop from outside)"
        )))
    }

    fn take(&mut self, node: &NodeProto) -> Result<(), GraphError> {
        if self.depth > 0 {
            self.charge(node.encoded_len(), &NodeRef::of(node))?;
        }
        if is_branching(node) {
            self.depth += 1;
            let done = if node.op_type() == "If" { self.choose(node) } else { self.repeat(node) };
            self.depth -= 1;
            return done;
        }
        if self.depth > 0 && self.trains(node) {
            return Err(NodeRef::of(node).form(
                "it is in training mode within a branch, where its state could not be exported (export the model in \
                 evaluation mode)",
            ));
        }
        if self.nodes.len() >= VALUES_MAX {
            return Err(GraphError::Limit { what: "nodes", found: self.nodes.len() + 1, limit: VALUES_MAX });
        }
        let (element, found) = read::lower(&mut self.b, node)?;
        read::name_outputs(&mut self.b, node, element, found)?;
        self.nodes.push(node.clone());
        Ok(())
    }

    /// The nodes of the branch that a known condition takes.
    fn choose(&mut self, node: &NodeProto) -> Result<(), GraphError> {
        let site = NodeRef::of(node);
        let condition = node.input.first().and_then(|name| self.known(name)).ok_or_else(|| {
            site.form(
                "its condition is computed from the rows; one that follows from shapes and constants is supported (write a \
                 choice for each row with torch.where)",
            )
        })?;
        let name = if condition != 0 { "then_branch" } else { "else_branch" };
        let branch = graph_of(node, name)?;
        if branch.output.len() != node.output.len() {
            return Err(site.form(format!(
                "{name} has {} outputs for {} of the node",
                branch.output.len(),
                node.output.len()
            )));
        }
        let names = self.inline(branch, &site, Names::new())?;
        for (output, own) in branch.output.iter().zip(&node.output).filter(|(_, own)| !own.is_empty()) {
            self.take(&made("Identity", vec![resolved(&names, output.name())], own, vec![]))?;
        }
        Ok(())
    }

    /// The nodes of every step of a loop.
    fn repeat(&mut self, node: &NodeProto) -> Result<(), GraphError> {
        let site = NodeRef::of(node);
        let body = graph_of(node, "body")?;
        let unknown = |what: &str| {
            site.form(format!(
                "{what} is not known when the model is read; a loop whose steps follow from shapes and constants is \
                 supported (export with a fixed length)"
            ))
        };
        let given = |index: usize| node.input.get(index).filter(|name| !name.is_empty());
        let limit = match given(0) {
            Some(name) => Some(self.known(name).ok_or_else(|| unknown("the number of its steps"))?),
            None => None,
        };
        let mut goes_on = match given(1) {
            Some(name) => self.known(name).ok_or_else(|| unknown("its condition"))? != 0,
            None => true,
        };
        let mut state: Vec<String> = node.input.iter().skip(2).cloned().collect();
        let carried = state.len();
        let fits = body.input.len() == carried + 2
            && body.output.len() > carried
            && node.output.len() < body.output.len();
        if !fits {
            return Err(site.form(format!(
                "its body has {} inputs and {} outputs for {carried} values of the loop and {} outputs",
                body.input.len(),
                body.output.len(),
                node.output.len()
            )));
        }
        let mut scans: Vec<Vec<String>> = vec![Vec::new(); body.output.len() - 1 - carried];
        let mut step = 0;
        while goes_on && limit.is_none_or(|limit| step < limit) {
            if step >= STEPS_MAX {
                return Err(site.form(format!(
                    "it takes more than {STEPS_MAX} steps, each of which becomes nodes of its own (export a shorter \
                     sequence, or the layer as LSTM, GRU or RNN)"
                )));
            }
            let [at, flag] =
                [0, 1].map(|index| format!("{}@{}/{}", site.node, self.scopes, body.input[index].name()));
            self.take(&made("Constant", vec![], &at, vec![whole("value_int", step)]))?;
            self.take(&made("Constant", vec![], &flag, vec![truth()]))?;
            let mut names = Names::new();
            names.insert(body.input[0].name().to_owned(), at);
            names.insert(body.input[1].name().to_owned(), flag);
            for (info, value) in body.input.iter().skip(2).zip(&state) {
                names.insert(info.name().to_owned(), value.clone());
            }
            let names = self.inline(body, &site, names)?;
            let given = body.output.iter().filter_map(|info| names.get(info.name()));
            self.charge(given.map(String::len).sum(), &site)?;
            let mut results = body.output.iter().map(|info| resolved(&names, info.name()));
            let condition = results.next().unwrap_or_default();
            goes_on = self.known(&condition).ok_or_else(|| unknown("the condition of its next step"))? != 0;
            state = results.by_ref().take(carried).collect();
            for (scan, result) in scans.iter_mut().zip(results) {
                scan.push(result);
            }
            step += 1;
        }
        for (value, own) in state.iter().zip(&node.output).filter(|(_, own)| !own.is_empty()) {
            self.take(&made("Identity", vec![value.clone()], own, vec![]))?;
        }
        for (parts, own) in scans.iter().zip(node.output.iter().skip(carried)) {
            if !own.is_empty() {
                self.join(&site, parts, own)?;
            }
        }
        Ok(())
    }

    /// Joins what the steps of a loop gave along a new first axis.
    fn join(&mut self, site: &NodeRef, parts: &[String], own: &str) -> Result<(), GraphError> {
        if parts.is_empty() {
            return Err(site.form("it takes no step, and its outputs are empty (remove the loop)"));
        }
        let axes_are_input = self.b.opset >= 13;
        let scope = format!("{own}@{}", self.scopes);
        self.scopes += 1;
        let axes = format!("{scope}/axes");
        if axes_are_input {
            let list = AttributeProto { ints: vec![0], ..attribute("value_ints", AttributeType::Ints) };
            self.take(&made("Constant", vec![], &axes, vec![list]))?;
        }
        let mut lines = Vec::with_capacity(parts.len());
        for (at, part) in parts.iter().enumerate() {
            let line = format!("{scope}/{at}");
            let (inputs, attributes) = if axes_are_input {
                (vec![part.clone(), axes.clone()], vec![])
            } else {
                (
                    vec![part.clone()],
                    vec![AttributeProto { ints: vec![0], ..attribute("axes", AttributeType::Ints) }],
                )
            };
            self.take(&made("Unsqueeze", inputs, &line, attributes))?;
            lines.push(line);
        }
        self.take(&made("Concat", lines, own, vec![whole("axis", 0)]))
    }

    /// Takes the nodes of a branch, and returns its names. `names` are those of its inputs.
    fn inline(&mut self, branch: &GraphProto, site: &NodeRef, mut names: Names) -> Result<Names, GraphError> {
        let scope = format!("{}@{}", site.node, self.scopes);
        self.scopes += 1;
        let defined = wiring::defined(branch);
        self.charge(defined.iter().map(|name| scope.len() + name.len()).sum(), site)?;
        for name in defined {
            names.entry(name.to_owned()).or_insert_with(|| format!("{scope}/{name}"));
        }
        let copied = branch.node.iter().map(|node| node.encoded_len() + renamed_bytes(node, &names));
        self.charge(copied.sum(), site)?;
        let read = branch.node.iter().flat_map(wiring::reads);
        for name in read.chain(branch.output.iter().map(|info| info.name())) {
            *self.b.reads.entry(resolved(&names, name)).or_default() += 1;
        }
        for tensor in &branch.initializer {
            if tensor::is_float(tensor) && !tensor.dims.is_empty() {
                return Err(site.form(format!(
                    "its branch holds the weight {:?}, which training could not move (pass it to the branch from outside)",
                    tensor.name()
                )));
            }
            let value =
                AttributeProto { t: Some(tensor.clone()), ..attribute("value", AttributeType::Tensor) };
            self.take(&made("Constant", vec![], &resolved(&names, tensor.name()), vec![value]))?;
        }
        for node in &branch.node {
            let mut own = node.clone();
            own.doc_string = None;
            own.metadata_props.retain(|entry| entry.key() == QUOTED_CALL);
            rename(&mut own, &names);
            self.take(&own)?;
        }
        Ok(names)
    }

    /// Whether a node computes something else in training.
    fn trains(&self, node: &NodeProto) -> bool {
        match node.op_type() {
            "BatchNormalization" => {
                node.output.iter().skip(1).any(|name| !name.is_empty())
                    || node.attribute.iter().any(|a| a.name() == "training_mode" && a.i() != 0)
            }
            "Dropout" => {
                node.input.get(2).is_some_and(|name| !name.is_empty() && self.known(name) != Some(0))
            }
            _ => false,
        }
    }

    /// The one integer, or truth value, that a name is known to stand for.
    fn known(&self, name: &str) -> Option<i64> {
        match self.b.names.get(name) {
            Some(NamedValue::Ints(Ints { elements, .. })) => match elements[..] {
                [size] => size.known(),
                _ => None,
            },
            _ => None,
        }
    }
}

fn graph_of<'a>(node: &'a NodeProto, name: &str) -> Result<&'a GraphProto, GraphError> {
    let found = node.attribute.iter().find(|attribute| attribute.name() == name);
    found
        .and_then(|attribute| attribute.g.as_ref())
        .ok_or_else(|| NodeRef::of(node).form(format!("its graph {name} is missing")))
}

/// The name of a tensor of a branch, or of one outside.
fn resolved(names: &Names, name: &str) -> String {
    names.get(name).map_or_else(|| name.to_owned(), Clone::clone)
}

/// Bytes of the new names that [`rename`] writes, at most.
fn renamed_bytes(node: &NodeProto, names: &Names) -> usize {
    let nodes = wiring::within(node);
    let tensors = nodes.iter().flat_map(|node| node.input.iter().chain(&node.output)).map(String::as_str);
    let results = nodes.iter().flat_map(|node| wiring::branches(node)).flat_map(|branch| &branch.output);
    let all = tensors.chain(results.map(|info| info.name()));
    all.filter_map(|name| names.get(name)).map(String::len).sum()
}

/// Gives the tensors of a node their new names, in its branches as well where these read them from outside.
fn rename(node: &mut NodeProto, names: &Names) {
    for name in node.input.iter_mut().chain(&mut node.output) {
        if let Some(new) = names.get(name.as_str()) {
            name.clone_from(new);
        }
    }
    for branch in node.attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut()) {
        let own: Vec<String> = wiring::defined(branch).into_iter().map(str::to_owned).collect();
        let mut outside = names.clone();
        for name in &own {
            outside.remove(name);
        }
        for node in &mut branch.node {
            rename(node, &outside);
        }
        for info in &mut branch.output {
            if let Some(new) = outside.get(info.name()) {
                info.name = Some(new.clone());
            }
        }
    }
}

fn made(op: &str, input: Vec<String>, output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        op_type: Some(op.to_owned()),
        input,
        output: vec![output.to_owned()],
        attribute,
        ..NodeProto::default()
    }
}

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.to_owned()), r#type: Some(kind as i32), ..AttributeProto::default() }
}

fn whole(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: Some(value), ..attribute(name, AttributeType::Int) }
}

/// The value of a constant that is true.
fn truth() -> AttributeProto {
    let tensor =
        TensorProto { data_type: Some(DataType::Bool as i32), int32_data: vec![1], ..TensorProto::default() };
    AttributeProto { t: Some(tensor), ..attribute("value", AttributeType::Tensor) }
}
