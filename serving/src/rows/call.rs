//! One node as its rule sees it: attributes, inputs, operator set.

use std::cell::Cell;

use millrace_bundle::onnx::attribute_proto::AttributeType;
use millrace_bundle::onnx::{AttributeProto, NodeProto, TensorProto};

use super::extent::{Entry, Extent, Symbol};
use super::value::{Kind, Value};

/// What a rule gives: the node's outputs, or why they are not known to keep rows apart.
pub(super) type Outcome = Result<Vec<Value>, String>;

/// A rule of an operator.
pub(super) type Rule = fn(&Call<'_>) -> Outcome;

/// A node with its inputs.
pub(super) struct Call<'a> {
    pub(super) node: &'a NodeProto,
    /// Those that are left out are `None`.
    pub(super) inputs: Vec<Option<Value>>,
    /// Version of the operator set that its operator belongs to.
    pub(super) opset: i64,
    /// Attributes of the function whose body the node is in, as its caller gives them and by default.
    pub(super) bound: [&'a [AttributeProto]; 2],
    /// The next symbol that is not used.
    pub(super) symbols: &'a Cell<Symbol>,
    /// Whether an attribute was read as another type than it says it has.
    pub(super) misread: Cell<bool>,
}

impl Call<'_> {
    pub(super) fn operator(&self) -> &str {
        self.node.op_type()
    }

    /// An extent that is not known.
    pub(super) fn fresh(&self) -> Extent {
        let symbol = self.symbols.get();
        self.symbols.set(symbol + 1);
        Extent::symbol(symbol)
    }

    pub(super) fn unknown(&self, count: usize) -> Vec<Extent> {
        (0..count).map(|_| self.fresh()).collect()
    }

    /// An attribute of the node; one that refers to an attribute of the function around it is that one.
    fn followed<'b>(&'b self, attribute: &'b AttributeProto) -> Option<&'b AttributeProto> {
        match attribute.ref_attr_name() {
            "" => Some(attribute),
            outer => self.bound.into_iter().flatten().find(|attribute| attribute.name() == outer),
        }
    }

    fn attribute(&self, name: &str) -> Option<&AttributeProto> {
        self.followed(self.node.attribute.iter().find(|attribute| attribute.name() == name)?)
    }

    /// An attribute of a type, where it is given. Writers leave out the field of a value that is 0 or empty, so that an
    /// attribute without it has that value and not the operator's default.
    fn typed(&self, name: &str, kind: AttributeType) -> Option<&AttributeProto> {
        let found = self.attribute(name)?;
        if found.r#type() != kind {
            self.misread.set(true);
        }
        Some(found)
    }

    /// Whether a graph comes with an attribute, be it one of the function around the node.
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

    /// An input of any kind, where it is given.
    pub(super) fn given(&self, place: usize) -> Option<&Value> {
        self.inputs.get(place)?.as_ref()
    }

    /// An input whose elements are used, where it is given.
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

    /// Whether an input that must not depend on the rows is given.
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

    /// Requires that all inputs from a place on do not depend on the rows.
    pub(super) fn free_from(&self, place: usize) -> Result<(), String> {
        (place..self.inputs.len()).try_for_each(|place| self.free_if_given(place).map(drop))
    }

    /// Requires that an input, where it is given, is one number that does not depend on the rows.
    pub(super) fn single_if_given(&self, place: usize) -> Result<(), String> {
        match self.free_if_given(place)? {
            Some(value) if !value.is_single() => {
                Err(format!("its input {:?} is not one number", self.name(place)))
            }
            _ => Ok(()),
        }
    }

    /// Integers of an input that says a shape, axes or places.
    pub(super) fn entries(&self, place: usize) -> Result<&[Entry], String> {
        let entries = self.given(place).and_then(Value::entries);
        entries.ok_or_else(|| format!("the integers of its input {:?} are not known", self.name(place)))
    }

    /// The same where all of them are known numbers.
    pub(super) fn numbers(&self, place: usize) -> Result<Vec<i64>, String> {
        let numbers = self.given(place).and_then(Value::numbers);
        numbers.ok_or_else(|| format!("the integers of its input {:?} are not known", self.name(place)))
    }

    /// Axes as an attribute, or as an input from an operator set on.
    pub(super) fn axes(&self, input: usize, since: i64) -> Result<Option<Vec<i64>>, String> {
        if self.opset < since {
            return Ok(self.ints("axes").map(<[i64]>::to_vec));
        }
        match self.given(input) {
            None => Ok(None),
            Some(_) => self.numbers(input).map(Some),
        }
    }

    /// How many outputs there are that have a name.
    pub(super) fn outputs(&self) -> usize {
        self.node.output.iter().rposition(|name| !name.is_empty()).map_or(0, |last| last + 1)
    }
}

/// An axis of a tensor of that rank, which may be counted from the end.
pub(super) fn axis_in(axis: i64, rank: usize) -> Result<usize, String> {
    let rank_signed = i64::try_from(rank).unwrap_or(i64::MAX);
    let from_start = if axis < 0 { axis.saturating_add(rank_signed) } else { axis };
    usize::try_from(from_start)
        .ok()
        .filter(|axis| *axis < rank)
        .ok_or_else(|| format!("axis {axis} is not one of {rank}"))
}
