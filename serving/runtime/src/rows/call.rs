//! Node view for the row rules: attributes, inputs and operator set of one node.

use std::cell::Cell;

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::{AttributeProto, NodeProto, TensorProto};

use super::extent::{Entry, Extent, Symbol};
use super::value::{Kind, Value};

/// Result of a rule: the node's outputs, or the reason why they are not known to keep rows apart.
pub(super) type Outcome = Result<Vec<Value>, String>;

/// A rule for an operator.
pub(super) type Rule = fn(&Call<'_>) -> Outcome;

/// A node with its inputs.
pub(super) struct Call<'a> {
    pub(super) node: &'a NodeProto,
    /// Inputs by position; omitted ones are `None`.
    pub(super) inputs: Vec<Option<Value>>,
    /// Version of the operator set that its operator belongs to.
    pub(super) opset: i64,
    /// Attributes of the function whose body contains the node: those given by its caller, then the defaults.
    pub(super) bound: [&'a [AttributeProto]; 2],
    /// The next unused symbol.
    pub(super) symbols: &'a Cell<Symbol>,
    /// Whether an attribute was read as a type other than the type it declares.
    pub(super) misread: Cell<bool>,
}

impl Call<'_> {
    pub(super) fn operator(&self) -> &str {
        self.node.op_type()
    }

    /// A new unknown extent.
    pub(super) fn fresh(&self) -> Extent {
        let symbol = self.symbols.get();
        self.symbols.set(symbol + 1);
        Extent::symbol(symbol)
    }

    pub(super) fn unknown(&self, count: usize) -> Vec<Extent> {
        (0..count).map(|_| self.fresh()).collect()
    }

    /// Resolves an attribute that refers to an attribute of the enclosing function.
    fn followed<'b>(&'b self, attribute: &'b AttributeProto) -> Option<&'b AttributeProto> {
        match attribute.ref_attr_name() {
            "" => Some(attribute),
            outer => self.bound.into_iter().flatten().find(|attribute| attribute.name() == outer),
        }
    }

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.followed(self.node.attribute.iter().find(|attribute| attribute.name() == name)?)
    }

    /// An attribute of a type, if given. Writers omit the field of a value that is 0 or empty; an attribute without
    /// it therefore has that value and not the operator's default.
    fn typed(&self, name: &str, kind: AttributeType) -> Option<&AttributeProto> {
        let found = self.attribute(name)?;
        if found.r#type() != kind {
            self.misread.set(true);
        }
        Some(found)
    }

    /// Whether an attribute contains a graph, including attributes of the enclosing function.
    pub(super) fn refers_to_graph(&self) -> bool {
        let mut followed = self.node.attribute.iter().filter_map(|attribute| self.followed(attribute));
        followed.any(|attribute| attribute.g.is_some() || !attribute.graphs.is_empty())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.attribute(name).is_some()
    }

    pub(super) fn int(&self, name: &str, default: i64) -> i64 {
        self.typed(name, AttributeType::Int).map_or(default, AttributeProto::i)
    }

    pub(super) fn ints(&self, name: &str) -> Option<&[i64]> {
        self.typed(name, AttributeType::Ints).map(|attribute| attribute.ints.as_slice())
    }

    pub(super) fn floats(&self, name: &str) -> Option<&[f32]> {
        self.typed(name, AttributeType::Floats).map(|attribute| attribute.floats.as_slice())
    }

    pub(super) fn text(&self, name: &str, default: &str) -> String {
        let found = self.typed(name, AttributeType::String);
        found.map_or_else(|| default.to_owned(), |found| String::from_utf8_lossy(found.s()).into_owned())
    }

    pub(super) fn tensor(&self, name: &str) -> Option<&TensorProto> {
        self.typed(name, AttributeType::Tensor)?.t.as_ref()
    }

    /// Name of an input, for messages.
    pub(super) fn name(&self, place: usize) -> &str {
        self.node.input.get(place).map_or("", String::as_str)
    }

    /// An input of any kind, if given.
    pub(super) fn given(&self, place: usize) -> Option<&Value> {
        self.inputs.get(place)?.as_ref()
    }

    /// An input whose elements are used, if given.
    pub(super) fn data_if_given(&self, place: usize) -> Result<Option<&Value>, String> {
        match self.given(place) {
            Some(value) if matches!(value.kind, Kind::Sized) => {
                Err(format!("it uses the number of rows, {:?}, as a value", self.name(place)))
            }
            value => Ok(value),
        }
    }

    /// An input whose elements are used.
    pub(super) fn data(&self, place: usize) -> Result<&Value, String> {
        self.data_if_given(place)?.ok_or_else(|| format!("its input {place} is missing"))
    }

    /// An input that must not depend on the rows, if given.
    pub(super) fn free_if_given(&self, place: usize) -> Result<Option<&Value>, String> {
        match self.data_if_given(place)? {
            Some(value) if !value.is_free() => {
                Err(format!("its input {:?} depends on rows", self.name(place)))
            }
            value => Ok(value),
        }
    }

    /// An input that must not depend on the rows.
    pub(super) fn free(&self, place: usize) -> Result<&Value, String> {
        self.free_if_given(place)?.ok_or_else(|| format!("its input {place} is missing"))
    }

    /// Requires that all inputs from index `place` on do not depend on the rows.
    pub(super) fn free_from(&self, place: usize) -> Result<(), String> {
        (place..self.inputs.len()).try_for_each(|place| self.free_if_given(place).map(drop))
    }

    /// Requires that an input, if given, is one number that does not depend on the rows.
    pub(super) fn single_if_given(&self, place: usize) -> Result<(), String> {
        match self.free_if_given(place)? {
            Some(value) if !value.is_single() => {
                Err(format!("its input {:?} is not one number", self.name(place)))
            }
            _ => Ok(()),
        }
    }

    /// Integers of an input that contains a shape, axes or positions.
    pub(super) fn entries(&self, place: usize) -> Result<&[Entry], String> {
        let entries = self.given(place).and_then(Value::entries);
        entries.ok_or_else(|| format!("the integers of its input {:?} are not known", self.name(place)))
    }

    /// Integers of an input, all of which must be known numbers.
    pub(super) fn numbers(&self, place: usize) -> Result<Vec<i64>, String> {
        let numbers = self.given(place).and_then(Value::numbers);
        numbers.ok_or_else(|| format!("the integers of its input {:?} are not known", self.name(place)))
    }

    /// Axes from the attribute `axes`, or from an input since the operator set version `since`.
    pub(super) fn axes(&self, input: usize, since: i64) -> Result<Option<Vec<i64>>, String> {
        if self.opset < since {
            return Ok(self.ints("axes").map(<[i64]>::to_vec));
        }
        match self.given(input) {
            None => Ok(None),
            Some(_) => self.numbers(input).map(Some),
        }
    }

    /// Number of outputs up to the last one that has a name.
    pub(super) fn outputs(&self) -> usize {
        self.node.output.iter().rposition(|name| !name.is_empty()).map_or(0, |last| last + 1)
    }
}

/// Index of an axis in a tensor of rank `rank`; negative axes count from the end.
pub(super) fn axis_in(axis: i64, rank: usize) -> Result<usize, String> {
    let rank_signed = i64::try_from(rank).unwrap_or(i64::MAX);
    let from_start = if axis < 0 { axis.saturating_add(rank_signed) } else { axis };
    usize::try_from(from_start)
        .ok()
        .filter(|axis| *axis < rank)
        .ok_or_else(|| format!("axis {axis} is not one of {rank}"))
}
