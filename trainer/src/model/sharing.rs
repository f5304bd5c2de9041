//! Restoration of weights and modes that PyTorch's exporters merge, copy or leave out, although training needs them.
//!
//! PyTorch's exporters write equal tensors once: layers that begin with the same values share one tensor in the file.
//! They also transpose weights ahead: a weight that the model uses in both forms becomes two tensors. Predictions stay
//! the same, but training would tie what is separate, and separate what is tied. [`restore`] undoes both where the
//! model says which parameters were meant:
//!
//! - The earlier exporter gives the second of two equal tensors its own name, by an `Identity` node ([`separate_aliases`]).
//! - The default exporter quotes the call in PyTorch at each node, which names its parameters ([`calls`]). A tensor that
//!   calls read under several names stands for as many parameters.
//! - Where calls are missing, the module of each node is known. A tensor that modules of one class read stands for a
//!   parameter of each of them, if all its elements are equal (initial scales and biases), or if one module is a copy of the other:
//!   their paths differ in numbers only, all their tensors, two or more, are equal, and the original is computed first.
//!   Other equal weights are tied, as those of an embedding and an output layer.
//! - A transposed tensor is tied to the parameter that it was folded from. The earlier exporter does not name that one;
//!   there the elements must be equal.
//! - What the earlier exporter folds from one parameter for two nodes of a module becomes two tensors without names. They are
//!   one again if they are equal in shape and elements, and the elements are not all the same. One that holds the squares of
//!   another, as for a norm, is computed from it again.
//! - The default exporter removes a bias whose elements are all 0, and names the rule ([`biases`]).
//! - The default exporter writes a batch normalisation in training as one in evaluation, but names the operation.

use std::collections::{BTreeMap, HashMap, HashSet};

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::{AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};

use crate::graph::{float_elements, has_marks, initializer_origin, quoted_name};

mod biases;
mod calls;
#[cfg(test)]
mod tests;

/// The start of names that the earlier exporter makes up.
const NAMELESS: &str = "onnx::";
const SCOPES: &str = "pkg.torch.onnx.name_scopes";
const CLASSES: &str = "pkg.torch.onnx.class_hierarchy";

/// The operation of a batch normalisation in training; the default exporter writes it as one in evaluation.
const TRAINING: &str = "aten._native_batch_norm_legit_functional.default";

/// From this version of the format on, initializers need not be inputs.
const IR_VERSION_MIN: i64 = 4;
/// Most nodes and initializers of a graph that is restored; each pair of initializers may be compared.
const TENSORS_MAX: usize = 10_000;
/// Most inputs of all nodes, and descriptions of values, of such a graph; each initializer may search them.
const OPERANDS_MAX: usize = 10 * TENSORS_MAX;

/// Most bytes of the tensors that are added: a damaged model may quote any number of parameters.
const NEW_BYTES_MAX: usize = 4 << 30;

/// What [`restore`] changed; names of tensors and nodes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Restored {
    /// Parameters that have a tensor of their own again.
    pub(crate) separated: Vec<String>,
    /// Tensors that are computed from a parameter again.
    pub(crate) tied: Vec<String>,
    /// Biases of zeros that are there again.
    pub(crate) biases: Vec<String>,
    /// Batch normalisations that are in training mode again.
    pub(crate) training: Vec<String>,
}

/// Undoes what the exporter merged, copied or left out. Leaves predictions in evaluation as they are, to the bit, but for
/// the sign of a 0 to which a restored bias is added.
pub(crate) fn restore(model: &mut ModelProto) -> Restored {
    let mut restored = Restored::default();
    let is_of_pytorch = model.producer_name() == "pytorch";
    // Of former versions of the format, in which every initializer is an input as well, and of oversized graphs, nothing
    // is changed.
    let is_current = model.ir_version() >= IR_VERSION_MIN;
    let fits = |graph: &GraphProto| {
        let operands: usize = graph.node.iter().map(|node| node.input.len()).sum();
        graph.node.len().max(graph.initializer.len()) <= TENSORS_MAX
            && graph.value_info.len().max(operands) <= OPERANDS_MAX
    };
    let Some(graph) = model.graph.as_mut().filter(|graph| is_of_pytorch && is_current && fits(graph)) else {
        return restored;
    };
    // The default exporter gives computed values plain names, too.
    if !has_marks(graph) {
        separate_aliases(graph, &mut restored);
    }
    let mut names = Names::of(graph);
    separate_statistics(graph, &mut names, &mut restored);
    separate_modules(graph, &mut names, &mut restored);
    restored.biases = biases::restore(graph, &mut names);
    tie_transposed(graph, &mut restored);
    tie_equal(graph, &mut restored);
    restore_training(graph, &mut restored);
    restored
}

/// Gives each parameter that is an `Identity` of another one its own tensor.
///
/// Weights that the earlier exporter transposed ahead have no names. Such an `Identity` stands for a weight of its own if
/// the nodes that read both are those of different modules, and the second one's named parameters are all `Identity` of
/// others: a copy of a layer, not a layer that is called twice or tied to another one. It also does if all elements are
/// equal, as in the scales of two new `GroupNorm`.
fn separate_aliases(graph: &mut GraphProto, restored: &mut Restored) {
    let tensors: HashMap<&str, &TensorProto> = graph
        .initializer
        .iter()
        .filter(|tensor| float_elements(tensor).is_some())
        .map(|tensor| (tensor.name(), tensor))
        .collect();
    let outputs: HashSet<&str> = graph.output.iter().map(|output| output.name()).collect();
    let aliases: HashMap<&str, &str> = graph.node.iter().filter_map(alias).collect();
    let mut readers: HashMap<&str, HashSet<String>> = HashMap::new();
    for node in graph.node.iter().filter(|node| alias(node).is_none()) {
        for input in &node.input {
            readers.entry(input).or_default().extend(module_path(node));
        }
    }
    let is_alias_of_copy = |output: &str, input: &str| {
        let (Some(own), Some(other)) = (readers.get(output), readers.get(input)) else { return false };
        // Initial scales and biases of different modules, as those of two new GroupNorm.
        if let ([own], [other]) = (&Vec::from_iter(own)[..], &Vec::from_iter(other)[..])
            && !is_further_call(own, other)
            && tensors
                .get(input)
                .and_then(|tensor| float_elements(tensor))
                .is_some_and(|all| is_uniform(&all))
        {
            return true;
        }
        let named = |path: &str| -> Vec<&str> {
            let names = aliases.keys().chain(tensors.keys()).copied();
            names.filter(|name| name.strip_prefix(path).is_some_and(is_leaf)).collect()
        };
        own.is_disjoint(other)
            && own.iter().all(|path| {
                let named = named(path);
                !named.is_empty() && named.iter().all(|name| aliases.contains_key(name))
            })
    };
    let mut copies = BTreeMap::new();
    for (index, node) in graph.node.iter().enumerate() {
        let Some((output, input)) = alias(node).filter(|(output, _)| !outputs.contains(output)) else {
            continue;
        };
        let Some(tensor) = tensors.get(input) else { continue };
        // Names of values that are computed have a scope.
        let is_parameter = match output.starts_with(NAMELESS) {
            true => is_alias_of_copy(output, input),
            false => !output.contains([':', '/']),
        };
        if is_parameter {
            copies.insert(index, TensorProto { name: Some(output.to_owned()), ..(*tensor).clone() });
        }
    }
    let mut index = 0;
    graph.node.retain(|_| {
        index += 1;
        !copies.contains_key(&(index - 1))
    });
    restored.separated.extend(copies.values().map(|tensor| tensor.name().to_owned()));
    graph.initializer.extend(copies.into_values());
}

/// The output and the input of an `Identity`.
fn alias(node: &NodeProto) -> Option<(&str, &str)> {
    match (node.op_type(), &node.input[..], &node.output[..]) {
        ("Identity", [input], [output]) => Some((output, input)),
        _ => None,
    }
}

/// The path of the module in the name that the earlier exporter gives a node: `/layers/layers.1/linear/MatMul`.
fn module_path(node: &NodeProto) -> Option<String> {
    let (path, _) = node.name().strip_prefix('/')?.rsplit_once('/')?;
    Some(path.replace('/', "."))
}

/// Whether both paths are of one module: the earlier exporter numbers the calls of a module after the first one, as in
/// `/norm/Mul` and `/norm_1/Mul`.
fn is_further_call(path: &str, first: &str) -> bool {
    let is_same = |(own, other): (&str, &str)| {
        let count = own.strip_prefix(other).and_then(|rest| rest.strip_prefix('_'));
        own == other || count.is_some_and(is_number)
    };
    path.split('.').count() == first.split('.').count() && path.split('.').zip(first.split('.')).all(is_same)
}

/// Whether the rest of a name behind a module's path is that of a tensor which the module itself holds.
fn is_leaf(rest: &str) -> bool {
    rest.strip_prefix('.').is_some_and(|leaf| !leaf.contains(['.', ':', '/']))
}

/// The module that a node belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Module {
    path: String,
    class: String,
}

impl Module {
    fn of(node: &NodeProto) -> Option<Module> {
        let (paths, classes) = (list(node, SCOPES)?, list(node, CLASSES)?);
        // The last entry of both is the operation.
        let at = paths.len().checked_sub(2).filter(|_| paths.len() == classes.len())?;
        Some(Module { path: paths[at].to_owned(), class: classes[at].to_owned() })
    }

    /// The rest of `parameter` behind this module's path, if the module holds it.
    fn holds<'a>(&self, parameter: &'a str) -> Option<&'a str> {
        match self.path.as_str() {
            "" => Some(parameter),
            path => parameter.strip_prefix(path)?.strip_prefix('.'),
        }
    }
}

/// The parts of two paths up to the last difference, if the paths differ in numbers only.
fn numbered<'a>(one: &'a str, other: &'a str) -> Option<(&'a str, &'a str)> {
    let (mut ends, mut found) = ((0, 0), None);
    if one.split('.').count() != other.split('.').count() {
        return None;
    }
    for (mine, theirs) in one.split('.').zip(other.split('.')) {
        ends = (ends.0 + mine.len(), ends.1 + theirs.len());
        if mine != theirs {
            if !is_number(mine) || !is_number(theirs) {
                return None;
            }
            found = Some((&one[..ends.0], &other[..ends.1]));
        }
        ends = (ends.0 + 1, ends.1 + 1);
    }
    found
}

/// The number at the end of a path.
fn number(path: &str) -> u64 {
    path.rsplit('.').next().and_then(|last| last.parse().ok()).unwrap_or(0)
}

/// Whether `path` is `outer` or inside it.
fn is_within(path: &str, outer: &str) -> bool {
    path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// A tensor of a parameter, and what reads it.
struct Weight {
    tensor: String,
    parameter: String,
    bytes: usize,
    is_uniform: bool,
    /// Node, place among its inputs, and module.
    readers: Vec<(usize, usize, Module)>,
}

/// The tensors of parameters of which every reader's module is known.
fn weights(graph: &GraphProto) -> Vec<Weight> {
    let mut readers: HashMap<&str, Vec<(usize, usize)>> = HashMap::new();
    for (index, node) in graph.node.iter().enumerate() {
        for (at, input) in node.input.iter().enumerate() {
            readers.entry(input).or_default().push((index, at));
        }
    }
    // A node that the exporter's optimizer made, as the `Split` of an attention's bias, says nothing itself.
    let module = |node: &NodeProto| {
        Module::of(node).or_else(|| {
            let (first, _) = readers.get(node.output.first()?.as_str())?.first()?;
            Module::of(&graph.node[*first])
        })
    };
    let weight = |tensor: &TensorProto| {
        let read = readers.get(tensor.name())?.iter();
        let readers: Option<Vec<_>> =
            read.map(|(node, at)| Some((*node, *at, module(&graph.node[*node])?))).collect();
        let elements = float_elements(tensor)?;
        Some(Weight {
            tensor: tensor.name().to_owned(),
            parameter: initializer_origin(graph, tensor.name())?,
            bytes: size_of_val(&elements[..]),
            is_uniform: is_uniform(&elements),
            readers: readers?,
        })
    };
    graph.initializer.iter().filter_map(weight).collect()
}

/// Whether the module at `copy` has no tensor of its own and two or more of the module at `original`. Uniform tensors
/// say nothing.
fn is_copy(weights: &[Weight], original: &str, copy: &str) -> bool {
    let mut read = weights
        .iter()
        .filter(|weight| !weight.is_uniform)
        .filter(|weight| weight.readers.iter().any(|(_, _, module)| is_within(&module.path, copy)));
    let mut count = 0;
    read.all(|weight| {
        count += 1;
        is_within(&weight.parameter, original)
    }) && count > 1
}

/// The elements of a list of texts that the exporter wrote as Python does: `['', 'layer']`.
fn list<'a>(node: &'a NodeProto, key: &str) -> Option<Vec<&'a str>> {
    let entry = node.metadata_props.iter().find(|entry| entry.key() == key)?;
    Some(entry.value().split('\'').skip(1).step_by(2).collect())
}

/// Names for new tensors, and the bytes that those may take.
struct Names {
    taken: HashSet<String>,
    bytes_left: usize,
}

impl Names {
    fn of(graph: &GraphProto) -> Names {
        let outputs = graph.node.iter().flat_map(|node| &node.output).cloned();
        let tensors = graph.initializer.iter().map(|tensor| tensor.name().to_owned());
        let inputs = graph.input.iter().map(|input| input.name().to_owned());
        Names { taken: outputs.chain(tensors).chain(inputs).collect(), bytes_left: NEW_BYTES_MAX }
    }

    /// A name like `wanted` that no value has; none if the tensor does not fit.
    fn take(&mut self, wanted: &str, bytes: usize) -> Option<String> {
        self.bytes_left = self.bytes_left.checked_sub(bytes)?;
        let mut name = wanted.to_owned();
        while !self.taken.insert(name.clone()) {
            name.push('_');
        }
        Some(name)
    }
}

/// Gives batch normalisations running statistics of their own: the exporter merges those of a new one, zeros and ones, with
/// biases and scales.
fn separate_statistics(graph: &mut GraphProto, names: &mut Names, restored: &mut Restored) {
    let is_statistic = |node: &NodeProto, at: usize| node.op_type() == "BatchNormalization" && at >= 3;
    let mut others: HashSet<&str> = HashSet::new();
    for node in &graph.node {
        others.extend(
            node.input
                .iter()
                .enumerate()
                .filter(|(at, _)| !is_statistic(node, *at))
                .map(|(_, name)| name.as_str()),
        );
    }
    let tensors: HashMap<&str, &TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name(), tensor)).collect();
    let (mut moved, mut copies) = (Vec::new(), Vec::new());
    for (index, node) in graph.node.iter().enumerate() {
        for (at, input) in node.input.iter().enumerate().filter(|(at, _)| is_statistic(node, *at)) {
            let Some(tensor) = tensors.get(input.as_str()).filter(|_| others.contains(input.as_str())) else {
                continue;
            };
            let leaf = if at == 3 { "running_mean" } else { "running_var" };
            let scale = node.input[1].rsplit_once('.').map_or("", |(module, _)| module);
            let wanted = if scale.is_empty() { leaf.to_owned() } else { format!("{scale}.{leaf}") };
            let bytes = float_elements(tensor).map_or(0, |elements| size_of_val(&elements[..]));
            let Some(name) = names.take(&wanted, bytes) else { continue };
            copies.push(TensorProto { name: Some(name.clone()), ..(*tensor).clone() });
            moved.push((index, at, name));
        }
    }
    for (node, at, name) in moved {
        restored.separated.push(name.clone());
        graph.node[node].input[at] = name;
    }
    graph.initializer.extend(copies);
}

/// Gives each module its own tensor where the exporter merged those of several.
fn separate_modules(graph: &mut GraphProto, names: &mut Names, restored: &mut Restored) {
    let weights = weights(graph);
    for weight in &weights {
        let parameters = weight.readers.iter().map(|(node, at, _)| calls::parameter(&graph.node[*node], *at));
        if let Some(parameters) = parameters.collect::<Option<Vec<_>>>() {
            let parameters = parameters.into_iter().map(str::to_owned).collect();
            separate_calls(graph, weight, parameters, names, restored);
            continue;
        }
        // The module that holds the parameter by its name.
        let holders = weight.readers.iter().map(|(_, _, module)| module);
        let holders = holders.filter(|module| module.holds(&weight.parameter).is_some());
        let Some(owner) = holders.max_by_key(|module| module.path.len()) else { continue };
        let rest = owner.holds(&weight.parameter).unwrap_or_default();
        // The exporter keeps the first of equal tensors, and the last name of a module that is called twice.
        let is_first = weight.readers.first().is_some_and(|(_, _, first)| first == owner);
        // Where numbers alone tell the modules apart, they tell their order as well.
        let is_distinct = |module: &Module| {
            numbered(&owner.path, &module.path)
                .map_or(is_first, |(owner, other)| number(owner) < number(other))
        };
        let mut separated: HashMap<&str, String> = HashMap::new();
        for (node, at, module) in &weight.readers {
            let is_other = module.path != owner.path && module.class == owner.class;
            let is_copied = || {
                let parts = numbered(&owner.path, &module.path).filter(|_| is_first);
                parts.is_some_and(|(original, copy)| is_copy(&weights, original, copy))
            };
            if !is_other || !(weight.is_uniform && is_distinct(module) || is_copied()) {
                continue;
            }
            if !separated.contains_key(module.path.as_str()) {
                let wanted = format!("{}.{rest}", module.path);
                let Some(name) = names.take(&wanted, weight.bytes) else { continue };
                add_copy(graph, &weight.tensor, &name);
                restored.separated.push(name.clone());
                separated.insert(&module.path, name);
            }
            graph.node[*node].input[*at].clone_from(&separated[module.path.as_str()]);
        }
    }
}

/// Gives each parameter that calls in PyTorch name its own tensor; `parameters` are those of the weight's readers.
fn separate_calls(
    graph: &mut GraphProto,
    weight: &Weight,
    parameters: Vec<String>,
    names: &mut Names,
    restored: &mut Restored,
) {
    // The exporter keeps one of the names; the first reader stands for a name that no call has.
    let own = quoted_name(&weight.parameter);
    let kept = parameters.iter().find(|parameter| **parameter == own).or(parameters.first()).cloned();
    let mut separated: HashMap<&str, String> = HashMap::new();
    for (parameter, (node, at, module)) in parameters.iter().zip(&weight.readers) {
        if Some(parameter) == kept.as_ref() {
            continue;
        }
        if !separated.contains_key(parameter.as_str()) {
            let path = quoted_name(&module.path);
            let leaf = parameter.strip_prefix(&path).and_then(|rest| rest.strip_prefix('_'));
            let in_module = || leaf.map(|leaf| format!("{}.{leaf}", module.path));
            let wanted = like(&weight.parameter, parameter).or_else(in_module).unwrap_or(parameter.clone());
            let Some(name) = names.take(&wanted, weight.bytes) else { continue };
            add_copy(graph, &weight.tensor, &name);
            restored.separated.push(name.clone());
            separated.insert(parameter, name);
        }
        graph.node[*node].input[*at].clone_from(&separated[parameter.as_str()]);
    }
}

/// The name with underscores `plain` with the dots of `model`, if they differ in numbers only.
fn like(model: &str, plain: &str) -> Option<String> {
    let mut parts = plain.split('_');
    let mut name = String::new();
    for part in model.split_inclusive(['.', '_']) {
        let (word, end) = match part.char_indices().last() {
            Some((at, end @ ('.' | '_'))) => (&part[..at], Some(end)),
            _ => (part, None),
        };
        let own = parts.next()?;
        let is_other_number = is_number(own) && is_number(word);
        if !is_other_number && !own.eq_ignore_ascii_case(word) {
            return None;
        }
        name.push_str(if is_other_number { own } else { word });
        name.extend(end);
    }
    parts.next().is_none().then_some(name)
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// Adds a copy of a tensor and of what the exporter says about it.
fn add_copy(graph: &mut GraphProto, from: &str, to: &str) {
    let tensor = graph.initializer.iter().find(|tensor| tensor.name() == from).cloned();
    graph.initializer.extend(tensor.map(|tensor| TensorProto { name: Some(to.to_owned()), ..tensor }));
    let info = graph.value_info.iter().find(|info| info.name() == from).cloned();
    graph.value_info.extend(info.map(|info| ValueInfoProto { name: Some(to.to_owned()), ..info }));
}

fn is_uniform(elements: &[f32]) -> bool {
    elements.windows(2).all(|pair| pair[0].to_bits() == pair[1].to_bits())
}

/// Replaces a tensor that is the transpose of a parameter by a `Transpose` node.
fn tie_transposed(graph: &mut GraphProto, restored: &mut Restored) {
    let square = |tensor: &TensorProto| match tensor.dims[..] {
        [rows, columns] => Some((rows, columns)),
        _ => None,
    };
    let mut nodes = Vec::new();
    for tensor in &graph.initializer {
        let Some((rows, columns)) = square(tensor) else { continue };
        let origin = initializer_origin(graph, tensor.name());
        let is_nameless = tensor.name().starts_with(NAMELESS);
        let is_candidate = |other: &&TensorProto| match &origin {
            Some(origin) if !is_nameless => origin == other.name() && origin != tensor.name(),
            _ => is_nameless && !other.name().starts_with(NAMELESS),
        };
        let others = graph.initializer.iter().filter(|other| square(other) == Some((columns, rows)));
        let mut others = others.filter(is_candidate).peekable();
        let Some(elements) = others.peek().and_then(|_| float_elements(tensor)) else { continue };
        // A matrix that is its own transpose may be another parameter with the same start.
        if is_uniform(&elements) || rows == columns && is_transposed(&elements, &elements, columns as usize) {
            continue;
        }
        let tied = others.find(|other| {
            float_elements(other).is_some_and(|other| is_transposed(&elements, &other, columns as usize))
        });
        if let Some(tied) = tied {
            nodes.push(transpose(tied.name(), tensor.name()));
            restored.tied.push(tensor.name().to_owned());
        }
    }
    graph.initializer.retain(|tensor| !restored.tied.iter().any(|tied| tied == tensor.name()));
    graph.node.splice(0..0, nodes);
}

/// Lets nodes of one module read one tensor where the earlier exporter folded a parameter for each of them, and computes
/// squares from what they are of.
///
/// Layers of one recurrent module share its path, and nodes of the outermost module have none. So equal tensors of these stay
/// apart, as those of a copied layer do.
fn tie_equal(graph: &mut GraphProto, restored: &mut Restored) {
    let mut modules: HashMap<&str, HashSet<Option<String>>> = HashMap::new();
    let mut recurrent: HashSet<&str> = HashSet::new();
    for node in &graph.node {
        for input in node.input.iter().filter(|input| input.starts_with(NAMELESS)) {
            modules.entry(input).or_default().insert(module_path(node));
            if matches!(node.op_type(), "LSTM" | "GRU" | "RNN") {
                recurrent.insert(input);
            }
        }
    }
    // A copy of a layer has weights of its own.
    let is_folded = |tensor: &&TensorProto| {
        let name = tensor.name();
        modules.contains_key(name)
            && !recurrent.contains(name)
            && !restored.separated.iter().any(|separated| separated == name)
    };
    let elements = |tensor: &TensorProto| float_elements(tensor).filter(|elements| !is_uniform(elements));
    let key = |tensor: &TensorProto, elements: &[f32]| {
        (tensor.dims.clone(), elements.iter().map(|element| element.to_bits()).collect::<Vec<u32>>())
    };
    // Tensors with the same elements, in the order of the model.
    let mut equal: HashMap<(Vec<i64>, Vec<u32>), Vec<&str>> = HashMap::new();
    for tensor in graph.initializer.iter().filter(is_folded) {
        if let Some(elements) = elements(tensor) {
            equal.entry(key(tensor, &elements)).or_default().push(tensor.name());
        }
    }
    let is_within_one = |name: &str| modules[name].iter().all(Option::is_some);
    let mut tied: BTreeMap<String, String> = BTreeMap::new();
    for names in equal.values() {
        for other in &names[1..] {
            if is_within_one(other) && modules[names[0]] == modules[other] {
                tied.insert((*other).to_owned(), names[0].to_owned());
            }
        }
    }
    // What each square is of. One of several equal tensors might be another parameter.
    let mut squares: BTreeMap<String, String> = BTreeMap::new();
    for tensor in graph.initializer.iter().filter(is_folded) {
        let Some(mut elements) = elements(tensor) else { continue };
        let same = &equal[&key(tensor, &elements)];
        let is_alone = same.iter().all(|name| *name == tensor.name() || tied.contains_key(*name));
        elements.iter_mut().for_each(|element| *element *= *element);
        let Some([square]) = equal.get(&key(tensor, &elements)).map(Vec::as_slice) else { continue };
        if is_alone && *square != tensor.name() && modules[square] == modules[tensor.name()] {
            squares.insert((*square).to_owned(), tensor.name().to_owned());
        }
    }
    // A square of a square stays, so that no node reads a later one.
    let chained: Vec<String> = squares
        .iter()
        .filter(|(_, of)| squares.contains_key(*of))
        .map(|(square, _)| square.clone())
        .collect();
    squares.retain(|square, _| !chained.contains(square));
    for input in graph.node.iter_mut().flat_map(|node| &mut node.input) {
        if let Some(first) = tied.get(input) {
            input.clone_from(first);
        }
    }
    graph
        .initializer
        .retain(|tensor| !tied.contains_key(tensor.name()) && !squares.contains_key(tensor.name()));
    let nodes = squares.iter().map(|(square, of)| NodeProto {
        name: Some(square.clone()),
        op_type: Some("Mul".to_owned()),
        input: vec![of.clone(); 2],
        output: vec![square.clone()],
        ..NodeProto::default()
    });
    graph.node.splice(0..0, nodes.collect::<Vec<_>>());
    restored.tied.extend(tied.into_keys().chain(squares.into_keys()));
}

/// Puts batch normalisations that were exported in training into training mode.
fn restore_training(graph: &mut GraphProto, restored: &mut Restored) {
    for node in &mut graph.node {
        let has_mode = node.attribute.iter().any(|attribute| attribute.name() == "training_mode");
        let is_training = list(node, CLASSES).is_some_and(|classes| classes.last() == Some(&TRAINING));
        let ([_, _, _, mean, variance], [output]) = (&node.input[..], &node.output[..]) else { continue };
        if node.op_type() != "BatchNormalization" || has_mode || !is_training {
            continue;
        }
        let moved = [format!("{output}_{mean}"), format!("{output}_{variance}")];
        node.output.extend(moved);
        node.attribute.push(AttributeProto {
            name: Some("training_mode".to_owned()),
            r#type: Some(AttributeType::Int as i32),
            i: Some(1),
            ..AttributeProto::default()
        });
        restored.training.push(node.name().to_owned());
    }
}

/// Whether `tensor`, with rows of `columns` elements, is the transpose of `other`.
fn is_transposed(tensor: &[f32], other: &[f32], columns: usize) -> bool {
    let rows = tensor.len().checked_div(columns).unwrap_or(0);
    tensor.len() == other.len()
        && (0..rows).all(|row| {
            (0..columns).all(|column| {
                tensor[row * columns + column].to_bits() == other[column * rows + row].to_bits()
            })
        })
}

fn transpose(from: &str, to: &str) -> NodeProto {
    let order = AttributeProto {
        name: Some("perm".to_owned()),
        r#type: Some(AttributeType::Ints as i32),
        ints: vec![1, 0],
        ..AttributeProto::default()
    };
    NodeProto {
        op_type: Some("Transpose".to_owned()),
        name: Some(format!("{to}/Transpose")),
        input: vec![from.to_owned()],
        output: vec![to.to_owned()],
        attribute: vec![order],
        ..NodeProto::default()
    }
}
