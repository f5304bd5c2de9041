//! Graph builder: maps tensor names to values while a model is read, and locates errors.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::{AttributeProto, NodeProto, TensorProto, attribute_proto::AttributeType};

use super::budget::Budget;
use super::initializers::entry;
use super::ints::{Ints, step, strides};
use super::rows::{self, RowNumber};
use super::sequences::Sequence;
use super::{Dim, Dropout, GraphError, Node, Normalization, Op, ParamSpec, Source, Value, ValueId, shape};

/// Most values a graph may have.
pub(super) const VALUES_MAX: usize = 100_000;

/// Shape and elements of constant floats.
pub(super) type ShapedFloats = (Vec<usize>, Vec<f32>);

/// The node that an error refers to.
#[derive(Debug, Clone)]
pub(super) struct NodeRef {
    pub(super) op: String,
    pub(super) node: String,
}

impl NodeRef {
    pub(super) fn of(node: &NodeProto) -> NodeRef {
        let op = match node.domain() {
            "" | "ai.onnx" => node.op_type().to_owned(),
            domain => format!("{domain}.{}", node.op_type()),
        };
        let name = match node.name() {
            "" => node.output.first().cloned().unwrap_or_default(),
            name => name.to_owned(),
        };
        NodeRef { op, node: name }
    }

    pub(super) fn unsupported(&self) -> GraphError {
        GraphError::UnsupportedOperator { op: self.op.clone(), node: self.node.clone() }
    }

    pub(super) fn form(&self, reason: impl Into<String>) -> GraphError {
        GraphError::UnsupportedForm { op: self.op.clone(), node: self.node.clone(), reason: reason.into() }
    }

    pub(super) fn shape(&self, reason: impl Into<String>) -> GraphError {
        GraphError::Shape { op: self.op.clone(), node: self.node.clone(), reason: reason.into() }
    }

    pub(super) fn mixes_rows(&self, reason: impl Into<String>) -> GraphError {
        GraphError::MixesRows { op: self.op.clone(), node: self.node.clone(), reason: reason.into() }
    }
}

/// The meaning of a tensor name.
#[derive(Debug, Clone)]
pub(super) enum NamedValue {
    /// A float value of the graph.
    Float(ValueId),
    /// Integers known up to the number of rows, used for shapes, axes, positions and masks.
    Ints(Ints),
}

/// The graph so far.
#[derive(Debug, Default)]
pub(super) struct Builder {
    pub(super) values: Vec<Value>,
    pub(super) nodes: Vec<Node>,
    pub(super) params: Vec<ParamSpec>,
    pub(super) states: Vec<ParamSpec>,
    pub(super) normalizations: Vec<Normalization>,
    pub(super) dropouts: Vec<Dropout>,
    pub(super) names: HashMap<String, NamedValue>,
    /// Element types of the names.
    pub(super) elements: HashMap<String, DataType>,
    pub(super) budget: Budget,
    pub(super) opset: i64,
    /// Values `[steps, rows, …]` that the graph sees as `[steps · rows, …]`: products with weights and sums keep the
    /// rows apart, a reshape separates them again.
    pub(super) merged: HashSet<ValueId>,
    /// Lists of tensors, by name.
    pub(super) sequences: HashMap<String, Sequence>,
    /// What values lack that were computed from numbers of rows.
    pub(super) row_numbers: HashMap<ValueId, RowNumber>,
    /// Values that nodes compute in DOUBLE, FLOAT16 or BFLOAT16, which the graph holds in float32.
    pub(super) other_floats: HashSet<ValueId>,
    /// How often nodes read each tensor; an output of the graph counts as well.
    pub(super) reads: HashMap<String, usize>,
    /// Names of float32 initializers.
    pub(super) float_initializers: HashSet<String>,
    /// Whether PyTorch exported the model.
    pub(super) is_from_pytorch: bool,
    /// For each element of a row of the inputs of whole numbers and truth values, one input after another, the number
    /// that it stays below.
    pub(super) index_bounds: Vec<u32>,
    /// For each value that holds elements of these inputs, unchanged, their places in `index_bounds`.
    pub(super) origins: HashMap<ValueId, Rc<[u32]>>,
}

impl Builder {
    pub(super) fn dims(&self, value: ValueId) -> &[Dim] {
        &self.values[value].dims
    }

    pub(super) fn value(
        &mut self,
        dims: Vec<Dim>,
        source: Source,
        trained: bool,
        site: &NodeRef,
    ) -> Result<ValueId, GraphError> {
        shape::check(&dims, site)?;
        if self.values.len() >= VALUES_MAX {
            return Err(GraphError::Limit {
                what: "values",
                found: self.values.len() + 1,
                limit: VALUES_MAX,
            });
        }
        self.values.push(Value { dims, source, trained });
        Ok(self.values.len() - 1)
    }

    /// Appends an operation and returns its output.
    pub(super) fn push(
        &mut self,
        op: Op,
        inputs: &[ValueId],
        dims: Vec<Dim>,
        site: &NodeRef,
    ) -> Result<ValueId, GraphError> {
        // The derivative of a step function is 0 wherever it exists.
        let steps =
            matches!(op, Op::Compare(_) | Op::Rank { .. }) || matches!(op, Op::Unary(kind) if kind.is_step());
        let trained = !steps && inputs.iter().any(|input| self.values[*input].trained);
        let output = self.value(dims, Source::Node, trained, site)?;
        if op.moves()
            && let Some(origin) = self.origins.get(&inputs[0]).map(Rc::clone)
        {
            let moved = self.moved(&op, inputs[0], output, origin, site)?;
            self.origins.insert(output, moved);
        }
        self.nodes.push(Node { op, inputs: inputs.to_vec(), output });
        Ok(output)
    }

    /// Appends a reshape unless the value has that shape already.
    pub(super) fn reshape(
        &mut self,
        value: ValueId,
        dims: Vec<Dim>,
        site: &NodeRef,
    ) -> Result<ValueId, GraphError> {
        if self.dims(value) == dims {
            return Ok(value);
        }
        self.push(Op::Reshape, &[value], dims, site)
    }

    /// Marks a value as merged if the one that it is computed from is.
    pub(super) fn mark(&mut self, value: ValueId, is_merged: bool) -> ValueId {
        if is_merged {
            self.merged.insert(value);
        }
        value
    }

    /// Appends a constant tensor.
    pub(super) fn constant(
        &mut self,
        dims: &[usize],
        elements: Vec<f32>,
        site: &NodeRef,
    ) -> Result<ValueId, GraphError> {
        self.budget.charge(elements.len(), site)?;
        let dims = dims.iter().copied().map(Dim::Fixed).collect();
        self.value(dims, Source::Constant(elements), false, site)
    }

    /// Appends a constant of rank 0.
    pub(super) fn scalar(&mut self, value: f32, site: &NodeRef) -> Result<ValueId, GraphError> {
        self.constant(&[], vec![value], site)
    }

    /// Appends the axes of a value in a new order.
    pub(super) fn permute(
        &mut self,
        value: ValueId,
        order: Vec<usize>,
        site: &NodeRef,
    ) -> Result<ValueId, GraphError> {
        if order.iter().copied().eq(0..order.len()) {
            return Ok(value);
        }
        let dims = order.iter().map(|axis| self.dims(value)[*axis]).collect();
        self.push(Op::Permute(order), &[value], dims, site)
    }

    /// Appends a repetition of axes of size 1 up to `dims`.
    pub(super) fn expand(
        &mut self,
        value: ValueId,
        dims: Vec<Dim>,
        site: &NodeRef,
    ) -> Result<ValueId, GraphError> {
        if self.dims(value) == dims {
            return Ok(value);
        }
        self.push(Op::Expand, &[value], dims, site)
    }

    /// Appends `size` elements of a fixed axis, from `start` on.
    pub(super) fn slice(
        &mut self,
        value: ValueId,
        axis: usize,
        start: usize,
        size: usize,
        site: &NodeRef,
    ) -> Result<ValueId, GraphError> {
        let mut dims = self.dims(value).to_vec();
        if dims[axis] == Dim::Fixed(size) {
            return Ok(value);
        }
        dims[axis] = Dim::Fixed(size);
        self.push(Op::Slice { axis, start }, &[value], dims, site)
    }

    /// The operation that computes a value.
    pub(super) fn node_of(&self, value: ValueId) -> Option<&Node> {
        self.nodes.binary_search_by_key(&value, |node| node.output).ok().map(|at| &self.nodes[at])
    }

    /// The places in an input row of the elements of a value that `op` moves from another one.
    fn moved(
        &mut self,
        op: &Op,
        from: ValueId,
        to: ValueId,
        origin: Rc<[u32]>,
        site: &NodeRef,
    ) -> Result<Rc<[u32]>, GraphError> {
        if matches!(op, Op::Reshape) {
            return Ok(origin);
        }
        let sizes = |value: ValueId| self.dims(value).iter().map(|dim| dim.at(1)).collect::<Vec<_>>();
        let (from, to) = (sizes(from), sizes(to));
        let count = to.iter().product();
        self.budget.charge(count, site)?;
        let strides = strides(&from);
        let lead = to.len() - from.len();
        let mut index = vec![0; to.len()];
        let mut places = Vec::with_capacity(count);
        for _ in 0..count {
            let place: usize = match op {
                Op::Permute(order) => order.iter().zip(&index).map(|(axis, at)| strides[*axis] * at).sum(),
                _ => (0..from.len())
                    .map(|axis| {
                        let at = index[lead + axis];
                        let at = match op {
                            Op::Slice { axis: cut, start } if *cut == axis => start + at,
                            Op::Select { axis: cut, positions } if *cut == axis => positions[at],
                            _ if from[axis] == 1 => 0,
                            _ => at,
                        };
                        strides[axis] * at
                    })
                    .sum(),
            };
            places.push(origin[place]);
            step(&mut index, &to);
        }
        Ok(places.into())
    }
}

/// A node while it is read: its inputs by position, and its attributes, each of which an operator must
/// request.
pub(super) struct Call<'a> {
    pub(super) site: NodeRef,
    node: &'a NodeProto,
    read_attributes: Vec<&'static str>,
}

impl<'a> Call<'a> {
    pub(super) fn new(node: &'a NodeProto) -> Call<'a> {
        Call { site: NodeRef::of(node), node, read_attributes: Vec::new() }
    }

    /// What the exporter says about the node under `key`.
    pub(super) fn metadata(&self, key: &str) -> Option<&'a str> {
        entry(&self.node.metadata_props, key)
    }

    pub(super) fn output_count(&self) -> usize {
        self.node.output.len()
    }

    /// Names of the outputs after the first one.
    pub(super) fn more_outputs(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        self.node.output.iter().skip(1).map(String::as_str).filter(|name| !name.is_empty())
    }

    /// The name of the tensor at an input position.
    pub(super) fn input_name(&self, index: usize) -> &'a str {
        self.node.input.get(index).map(String::as_str).unwrap_or_default()
    }

    pub(super) fn input_count(&self) -> usize {
        self.node.input.len()
    }

    fn named<'b>(&self, builder: &'b Builder, index: usize) -> Option<&'b NamedValue> {
        let name = self.node.input.get(index).filter(|name| !name.is_empty())?;
        builder.names.get(name)
    }

    /// The value at an input position that is not known ahead.
    pub(super) fn value_id(&self, builder: &Builder, index: usize) -> Option<ValueId> {
        match self.named(builder, index) {
            Some(NamedValue::Float(value)) => Some(*value),
            _ => None,
        }
    }

    /// The float value at an input position.
    pub(super) fn float(&self, builder: &Builder, index: usize) -> Result<ValueId, GraphError> {
        match self.named(builder, index) {
            Some(NamedValue::Float(value)) if builder.merged.contains(value) => {
                Err(self.site.mixes_rows("a reshape merged the batch with another axis"))
            }
            Some(NamedValue::Float(value)) => match builder.row_numbers.get(value) {
                Some(number) => Err(rows::refusal_of(&self.site, *number)),
                None => Ok(*value),
            },
            Some(NamedValue::Ints(_)) => {
                Err(self.site.form(format!("input {index} holds integers, a float tensor is needed")))
            }
            None => Err(self.site.form(format!("input {index} is missing"))),
        }
    }

    /// The float value at an input position, which may be merged, and whether it is.
    pub(super) fn merged(&self, builder: &mut Builder, index: usize) -> Result<(ValueId, bool), GraphError> {
        match self.merged_value(builder, index) {
            Some(value) => Ok((value, true)),
            None => Ok((self.value(builder, index)?, false)),
        }
    }

    /// The value at an input position if it is merged.
    pub(super) fn merged_value(&self, builder: &Builder, index: usize) -> Option<ValueId> {
        match self.named(builder, index) {
            Some(NamedValue::Float(value)) if builder.merged.contains(value) => Some(*value),
            _ => None,
        }
    }

    /// The float value at an optional input position.
    pub(super) fn float_optional(
        &self,
        builder: &Builder,
        index: usize,
    ) -> Result<Option<ValueId>, GraphError> {
        match self.node.input.get(index) {
            Some(name) if !name.is_empty() => self.float(builder, index).map(Some),
            _ => Ok(None),
        }
    }

    /// The constant integers at an optional input position, row-major.
    pub(super) fn ints_input(&self, builder: &Builder, index: usize) -> Result<Option<Vec<i64>>, GraphError> {
        let Some(ints) = self.numbers(builder, index)? else { return Ok(None) };
        match ints.known() {
            Some(values) => Ok(Some(values)),
            None => Err(self.site.form(format!("input {index} depends on the number of rows"))),
        }
    }

    /// The one constant integer at an optional input position.
    pub(super) fn int_input(&self, builder: &Builder, index: usize) -> Result<Option<i64>, GraphError> {
        match self.ints_input(builder, index)?.as_deref() {
            None => Ok(None),
            Some([value]) => Ok(Some(*value)),
            Some(values) => {
                Err(self.site.form(format!("input {index} holds {} integers, one is needed", values.len())))
            }
        }
    }

    /// The integers at an optional input position.
    pub(super) fn numbers<'b>(
        &self,
        builder: &'b Builder,
        index: usize,
    ) -> Result<Option<&'b Ints>, GraphError> {
        match self.named(builder, index) {
            Some(NamedValue::Ints(ints)) => Ok(Some(ints)),
            Some(NamedValue::Float(_)) => Err(self.site.form(format!(
                "input {index} must be constant int64 (export with fixed shapes apart from the batch)"
            ))),
            None => Ok(None),
        }
    }

    /// The integers at an input position that must be given.
    pub(super) fn needed_numbers<'b>(
        &self,
        builder: &'b Builder,
        index: usize,
    ) -> Result<&'b Ints, GraphError> {
        self.numbers(builder, index)?.ok_or_else(|| self.site.form(format!("input {index} is missing")))
    }

    /// The shape and elements of the constant floats at an optional input position.
    pub(super) fn constant(
        &self,
        builder: &Builder,
        index: usize,
    ) -> Result<Option<ShapedFloats>, GraphError> {
        let value = match self.named(builder, index) {
            None => return Ok(None),
            Some(NamedValue::Ints(ints)) => {
                let values = ints.known().ok_or_else(|| {
                    self.site
                        .form(format!("input {index} depends on the number of rows, a constant is needed"))
                })?;
                return Ok(Some((ints.dims.clone(), values.into_iter().map(|value| value as f32).collect())));
            }
            Some(NamedValue::Float(value)) => *value,
        };
        let Source::Constant(elements) = &builder.values[value].source else {
            return Err(self.site.form(format!("input {index} must be constant")));
        };
        Ok(Some((builder.dims(value).iter().map(|dim| dim.at(1)).collect(), elements.clone())))
    }

    /// The one constant float at an optional input position.
    pub(super) fn constant_scalar(&self, builder: &Builder, index: usize) -> Result<Option<f32>, GraphError> {
        match self.constant(builder, index)? {
            None => Ok(None),
            Some((_, elements)) => match elements[..] {
                [value] => Ok(Some(value)),
                _ => Err(self
                    .site
                    .form(format!("input {index} holds {} values, one is needed", elements.len()))),
            },
        }
    }

    /// The value at an input position; known integers become constant floats.
    pub(super) fn value(&self, builder: &mut Builder, index: usize) -> Result<ValueId, GraphError> {
        let Some(NamedValue::Ints(ints)) = self.named(builder, index) else {
            return self.float(builder, index);
        };
        let Some(values) = ints.known() else {
            return Err(self.site.form(format!("input {index} depends on the number of rows")));
        };
        let dims = ints.dims.clone();
        builder.constant(&dims, values.into_iter().map(|value| value as f32).collect(), &self.site)
    }

    /// Whether the input at a position is given.
    pub(super) fn has(&self, index: usize) -> bool {
        self.node.input.get(index).is_some_and(|name| !name.is_empty())
    }

    /// The element type of an input.
    pub(super) fn element(&self, builder: &Builder, index: usize) -> Option<DataType> {
        let name = self.node.input.get(index).filter(|name| !name.is_empty())?;
        builder.elements.get(name).copied()
    }

    /// Whether an input holds integers that are known.
    pub(super) fn is_ints(&self, builder: &Builder, index: usize) -> bool {
        matches!(self.named(builder, index), Some(NamedValue::Ints(_)))
    }

    /// Whether every given input holds integers.
    pub(super) fn all_ints(&self, builder: &Builder) -> bool {
        (0..self.input_count()).filter(|index| self.has(*index)).all(|index| self.is_ints(builder, index))
    }

    /// Whether the node has an attribute of this name.
    pub(super) fn has_attribute(&self, name: &str) -> bool {
        self.node.attribute.iter().any(|attribute| attribute.name() == name)
    }

    /// Whether the node has an attribute of this name and kind.
    pub(super) fn has_attribute_of(&self, name: &str, kind: AttributeType) -> bool {
        self.node.attribute.iter().any(|attribute| attribute.name() == name && attribute.r#type() == kind)
    }

    fn attribute(
        &mut self,
        name: &'static str,
        kind: AttributeType,
    ) -> Result<Option<&'a AttributeProto>, GraphError> {
        self.read_attributes.push(name);
        let Some(found) = self.node.attribute.iter().find(|a| a.name() == name) else {
            return Ok(None);
        };
        if found.r#type() != kind {
            return Err(self.site.form(format!(
                "attribute {name} is {}, {} is needed",
                found.r#type().as_str_name(),
                kind.as_str_name()
            )));
        }
        Ok(Some(found))
    }

    pub(super) fn int(&mut self, name: &'static str, default: i64) -> Result<i64, GraphError> {
        let found = self.attribute(name, AttributeType::Int)?;
        Ok(found.map_or(default, |a| a.i()))
    }

    pub(super) fn float_attribute(&mut self, name: &'static str, default: f32) -> Result<f32, GraphError> {
        let value = self.attribute(name, AttributeType::Float)?.map_or(default, |a| a.f());
        if !value.is_finite() {
            return Err(self.site.form(format!("attribute {name} is {value}")));
        }
        Ok(value)
    }

    pub(super) fn ints(&mut self, name: &'static str) -> Result<Option<Vec<i64>>, GraphError> {
        let found = self.attribute(name, AttributeType::Ints)?;
        Ok(found.map(|a| a.ints.clone()))
    }

    pub(super) fn floats(&mut self, name: &'static str) -> Result<Option<Vec<f32>>, GraphError> {
        let found = self.attribute(name, AttributeType::Floats)?;
        Ok(found.map(|a| a.floats.clone()))
    }

    pub(super) fn strings(&mut self, name: &'static str) -> Result<Option<Vec<String>>, GraphError> {
        let found = self.attribute(name, AttributeType::Strings)?;
        Ok(found.map(|a| a.strings.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect()))
    }

    pub(super) fn tensor(&mut self, name: &'static str) -> Result<Option<&'a TensorProto>, GraphError> {
        let found = self.attribute(name, AttributeType::Tensor)?;
        Ok(found.and_then(|a| a.t.as_ref()))
    }

    pub(super) fn string(&mut self, name: &'static str) -> Result<Option<String>, GraphError> {
        let found = self.attribute(name, AttributeType::String)?;
        Ok(found.map(|a| String::from_utf8_lossy(a.s()).into_owned()))
    }

    /// An attribute that has only one supported value.
    pub(super) fn only(&mut self, name: &'static str, value: i64) -> Result<(), GraphError> {
        match self.int(name, value)? {
            found if found == value => Ok(()),
            found => Err(self.site.form(format!("{name} = {found} is not supported, only {value}"))),
        }
    }

    /// Rejects attributes that the operator did not request, and inputs or outputs that it does not use.
    pub(super) fn finish(&self, inputs_max: usize) -> Result<(), GraphError> {
        self.finish_with(inputs_max, 1)
    }

    /// [`Call::finish`] of an operator with several outputs.
    pub(super) fn finish_with(&self, inputs_max: usize, outputs_max: usize) -> Result<(), GraphError> {
        for attribute in &self.node.attribute {
            if !self.read_attributes.iter().any(|name| *name == attribute.name()) {
                return Err(self.site.form(format!("attribute {:?} is not supported", attribute.name())));
            }
        }
        if self.input_count() > inputs_max {
            return Err(self
                .site
                .form(format!("{} inputs, at most {inputs_max} are supported", self.input_count())));
        }
        if self.node.output.iter().skip(outputs_max).any(|name| !name.is_empty()) {
            return Err(self.site.form(match outputs_max {
                1 => "only the first output is supported".to_owned(),
                _ => format!("only the first {outputs_max} outputs are supported"),
            }));
        }
        Ok(())
    }
}
