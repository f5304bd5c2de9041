//! Graph builder: maps tensor names to values while a model is read, and locates errors.

use std::collections::HashMap;

use millrace_bundle::onnx::{AttributeProto, NodeProto, attribute_proto::AttributeType};

use super::{Dim, GraphError, Node, Op, ParamSpec, Source, Value, ValueId, shape};

/// Most values a graph may have.
pub(super) const VALUES_MAX: usize = 100_000;

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
    /// Integers known up to the number of rows, used for shapes and axes.
    Ints(Vec<Size>),
}

/// An integer of a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Size {
    /// A known integer.
    Plain(i64),
    /// This many times the rows of the batch.
    Rows(usize),
}

impl NamedValue {
    /// Known integers.
    pub(super) fn ints(values: &[i64]) -> NamedValue {
        NamedValue::Ints(values.iter().copied().map(Size::Plain).collect())
    }
}

/// The graph so far.
#[derive(Debug, Default)]
pub(super) struct Builder {
    pub(super) values: Vec<Value>,
    pub(super) nodes: Vec<Node>,
    pub(super) params: Vec<ParamSpec>,
    pub(super) names: HashMap<String, NamedValue>,
    pub(super) opset: i64,
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
        let trained = inputs.iter().any(|input| self.values[*input].trained);
        let output = self.value(dims, Source::Node, trained, site)?;
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

    pub(super) fn input_count(&self) -> usize {
        self.node.input.len()
    }

    fn named<'b>(&self, builder: &'b Builder, index: usize) -> Option<&'b NamedValue> {
        let name = self.node.input.get(index).filter(|name| !name.is_empty())?;
        builder.names.get(name)
    }

    /// The float value at an input position.
    pub(super) fn float(&self, builder: &Builder, index: usize) -> Result<ValueId, GraphError> {
        match self.named(builder, index) {
            Some(NamedValue::Float(value)) => Ok(*value),
            Some(NamedValue::Ints(_)) => {
                Err(self.site.form(format!("input {index} holds integers, a float tensor is needed")))
            }
            None => Err(self.site.form(format!("input {index} is missing"))),
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

    /// The constant integers at an optional input position.
    pub(super) fn ints_input(&self, builder: &Builder, index: usize) -> Result<Option<Vec<i64>>, GraphError> {
        match self.named(builder, index) {
            Some(NamedValue::Ints(sizes)) => {
                let values = sizes.iter().map(|size| match size {
                    Size::Plain(value) => Ok(*value),
                    Size::Rows(_) => {
                        Err(self.site.form(format!("input {index} depends on the number of rows")))
                    }
                });
                values.collect::<Result<_, _>>().map(Some)
            }
            Some(NamedValue::Float(_)) => Err(self.not_constant(index)),
            None => Ok(None),
        }
    }

    fn not_constant(&self, index: usize) -> GraphError {
        self.site.form(format!(
            "input {index} must be constant int64 (export with fixed shapes apart from the batch)"
        ))
    }

    /// The integers of a shape at an optional input position.
    pub(super) fn sizes_input(
        &self,
        builder: &Builder,
        index: usize,
    ) -> Result<Option<Vec<Size>>, GraphError> {
        match self.named(builder, index) {
            Some(NamedValue::Ints(sizes)) => Ok(Some(sizes.clone())),
            Some(NamedValue::Float(_)) => Err(self.not_constant(index)),
            None => Ok(None),
        }
    }

    /// Whether the first input holds integers.
    pub(super) fn on_ints(&self, builder: &Builder) -> bool {
        matches!(self.named(builder, 0), Some(NamedValue::Ints(_)))
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
        if self.node.output.iter().skip(1).any(|name| !name.is_empty()) {
            return Err(self.site.form("only the first output is supported"));
        }
        Ok(())
    }
}
