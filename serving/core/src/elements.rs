//! Parser for the `data` of a JSON tensor: reads a flat or nested list of numbers, booleans or strings
//! straight into vectors, eight bytes per number.

pub mod output;

use std::fmt;

use bytes::Bytes;
use half::{bf16, f16};
use millrace_bundle::Datatype;
use serde::de::{DeserializeSeed, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::{InferError, quote};
use crate::tensor::{Data, element_count, shown, wrong_count};

const DEPTH_MAX: usize = 32;

/// Elements in written order, and the lengths of the lists in which they are nested.
#[derive(Debug, Default, PartialEq)]
pub struct Elements {
    values: Values,
    /// Length of the lists at each depth.
    extents: Vec<usize>,
}

#[derive(Debug, Default, PartialEq)]
enum Values {
    #[default]
    Empty,
    Bool(Vec<bool>),
    Signed(Vec<i64>),
    Unsigned(Vec<u64>),
    Float(Vec<f64>),
    Text(Vec<String>),
}

impl Elements {
    /// Length of the lists at each depth, outermost first.
    pub fn extents(&self) -> &[usize] {
        &self.extents
    }

    /// Converts the elements to a datatype. A nested list must have exactly the shape, a flat one its number
    /// of elements. Numbers must fit: fractions are never rounded to integers, and integers never wrap.
    ///
    /// # Errors
    /// [`InferError::Invalid`].
    pub fn into_data(self, name: &str, datatype: Datatype, shape: &[i64]) -> Result<Data, InferError> {
        let count = element_count(name, shape)?;
        let found = self.values.len();
        if found != count {
            return Err(wrong_count(name, shape, count, found));
        }
        let nested = self.extents.len() > 1;
        if nested && !self.extents.iter().map(|n| *n as i64).eq(shape.iter().copied()) {
            return Err(InferError::invalid(format!(
                "input {}: data is nested as {:?}, the shape is {}",
                quote(name),
                self.extents,
                shown(shape)
            )));
        }
        self.values.into_data(name, datatype)
    }
}

impl Values {
    fn len(&self) -> usize {
        match self {
            Values::Empty => 0,
            Values::Bool(values) => values.len(),
            Values::Signed(values) => values.len(),
            Values::Unsigned(values) => values.len(),
            Values::Float(values) => values.len(),
            Values::Text(values) => values.len(),
        }
    }

    fn kind(&self) -> &'static str {
        match self {
            Values::Empty => "nothing",
            Values::Bool(_) => "booleans",
            Values::Signed(_) | Values::Unsigned(_) => "integers",
            Values::Float(_) => "numbers with fractions",
            Values::Text(_) => "strings",
        }
    }

    fn push_bool(&mut self, value: bool) -> Result<(), String> {
        match self {
            Values::Empty => *self = Values::Bool(vec![value]),
            Values::Bool(values) => values.push(value),
            other => return Err(format!("a boolean among {}", other.kind())),
        }
        Ok(())
    }

    fn push_signed(&mut self, value: i64) -> Result<(), String> {
        match self {
            Values::Empty => *self = Values::Signed(vec![value]),
            Values::Signed(values) => values.push(value),
            Values::Float(values) => values.push(value as f64),
            Values::Unsigned(values) => match u64::try_from(value) {
                Ok(value) => values.push(value),
                Err(_) => {
                    return Err(format!("{value} beside an integer beyond 64 bits with a sign"));
                }
            },
            other => return Err(format!("a number among {}", other.kind())),
        }
        Ok(())
    }

    /// Only for values beyond `i64::MAX`.
    fn push_unsigned(&mut self, value: u64) -> Result<(), String> {
        if let Values::Signed(values) = self {
            let unsigned: Result<Vec<u64>, _> = values.iter().map(|v| u64::try_from(*v)).collect();
            *self = Values::Unsigned(unsigned.map_err(|_| format!("{value} beside a negative integer"))?);
        }
        match self {
            Values::Empty => *self = Values::Unsigned(vec![value]),
            Values::Unsigned(values) => values.push(value),
            Values::Float(values) => values.push(value as f64),
            other => return Err(format!("a number among {}", other.kind())),
        }
        Ok(())
    }

    fn push_float(&mut self, value: f64) -> Result<(), String> {
        match self {
            Values::Signed(values) => {
                *self = Values::Float(values.iter().map(|v| *v as f64).collect());
            }
            Values::Unsigned(values) => {
                *self = Values::Float(values.iter().map(|v| *v as f64).collect());
            }
            _ => {}
        }
        match self {
            Values::Empty => *self = Values::Float(vec![value]),
            Values::Float(values) => values.push(value),
            other => return Err(format!("a number among {}", other.kind())),
        }
        Ok(())
    }

    fn push_text(&mut self, value: String) -> Result<(), String> {
        match self {
            Values::Empty => *self = Values::Text(vec![value]),
            Values::Text(values) => values.push(value),
            other => return Err(format!("a string among {}", other.kind())),
        }
        Ok(())
    }

    fn into_data(self, name: &str, datatype: Datatype) -> Result<Data, InferError> {
        let kind = self.kind();
        let mismatch = || InferError::invalid(format!("input {}: {kind} for {datatype}", quote(name)));
        let outside = |value: &dyn fmt::Display| {
            InferError::invalid(format!("input {}: {value} does not fit {datatype}", quote(name)))
        };
        macro_rules! integers {
            ($variant:ident, $number:ty) => {
                Data::$variant(match self {
                    Values::Empty => Vec::new(),
                    Values::Signed(values) => values
                        .into_iter()
                        .map(|value| <$number>::try_from(value).map_err(|_| outside(&value)))
                        .collect::<Result<_, _>>()?,
                    Values::Unsigned(values) => values
                        .into_iter()
                        .map(|value| <$number>::try_from(value).map_err(|_| outside(&value)))
                        .collect::<Result<_, _>>()?,
                    _ => return Err(mismatch()),
                })
            };
        }
        macro_rules! floats {
            ($variant:ident, $number:ty, $from:expr, $finite:expr) => {{
                let convert: fn(f64) -> $number = $from;
                let checked = |value: f64| {
                    let converted = convert(value);
                    if $finite(converted) { Ok(converted) } else { Err(outside(&value)) }
                };
                Data::$variant(match self {
                    Values::Empty => Vec::new(),
                    Values::Float(values) => values.into_iter().map(checked).collect::<Result<_, _>>()?,
                    Values::Signed(values) => {
                        values.into_iter().map(|v| checked(v as f64)).collect::<Result<_, _>>()?
                    }
                    Values::Unsigned(values) => {
                        values.into_iter().map(|v| checked(v as f64)).collect::<Result<_, _>>()?
                    }
                    _ => return Err(mismatch()),
                })
            }};
        }
        Ok(match datatype {
            Datatype::Bool => match self {
                Values::Empty => Data::Bool(Vec::new()),
                Values::Bool(values) => Data::Bool(values),
                _ => return Err(mismatch()),
            },
            Datatype::Uint8 => integers!(Uint8, u8),
            Datatype::Uint16 => integers!(Uint16, u16),
            Datatype::Uint32 => integers!(Uint32, u32),
            Datatype::Uint64 => integers!(Uint64, u64),
            Datatype::Int8 => integers!(Int8, i8),
            Datatype::Int16 => integers!(Int16, i16),
            Datatype::Int32 => integers!(Int32, i32),
            Datatype::Int64 => integers!(Int64, i64),
            Datatype::Fp16 => floats!(Fp16, f16, f16::from_f64, f16::is_finite),
            Datatype::Bf16 => floats!(Bf16, bf16, bf16::from_f64, bf16::is_finite),
            Datatype::Fp32 => floats!(Fp32, f32, |value| value as f32, f32::is_finite),
            Datatype::Fp64 => floats!(Fp64, f64, |value| value, f64::is_finite),
            Datatype::Bytes => match self {
                Values::Empty => Data::Bytes(Vec::new()),
                Values::Text(values) => Data::Bytes(values.into_iter().map(Bytes::from).collect()),
                _ => return Err(mismatch()),
            },
        })
    }
}

impl<'de> Deserialize<'de> for Elements {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut elements = Elements::default();
        deserializer.deserialize_seq(List { elements: &mut elements, depth: 0 })?;
        Ok(elements)
    }
}

/// Visitor for one list at a depth; its items are lists or elements.
struct List<'a> {
    elements: &'a mut Elements,
    depth: usize,
}

impl<'de> Visitor<'de> for List<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of numbers, booleans or strings")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let depth = self.depth;
        if depth >= DEPTH_MAX {
            return Err(A::Error::custom(format!("data is nested deeper than {DEPTH_MAX} lists")));
        }
        if self.elements.extents.len() == depth {
            // Set to the length of the first list at this depth when that list ends.
            self.elements.extents.push(usize::MAX);
        }
        let mut length = 0usize;
        while list.next_element_seed(Item { elements: self.elements, depth: depth + 1 })?.is_some() {
            length += 1;
        }
        match self.elements.extents.get_mut(depth) {
            Some(extent) if *extent == usize::MAX => *extent = length,
            Some(extent) if *extent != length => {
                return Err(A::Error::custom(format!(
                    "data is ragged: lists of {extent} and of {length} items at depth {depth}"
                )));
            }
            _ => {}
        }
        Ok(())
    }
}

/// One item of a list at `depth`.
struct Item<'a> {
    elements: &'a mut Elements,
    depth: usize,
}

impl Item<'_> {
    /// All elements must be at the same depth, at which there is no list.
    fn leaf<E: serde::de::Error>(
        self,
        push: impl FnOnce(&mut Values) -> Result<(), String>,
    ) -> Result<(), E> {
        if self.elements.extents.len() > self.depth {
            return Err(E::custom("data mixes lists and elements"));
        }
        push(&mut self.elements.values).map_err(|reason| E::custom(format!("data has {reason}")))
    }
}

impl<'de> DeserializeSeed<'de> for Item<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Item<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number, a boolean, a string or a list of them")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<(), A::Error> {
        if self.elements.extents.len() == self.depth && self.elements.values.len() > 0 {
            return Err(A::Error::custom("data mixes lists and elements"));
        }
        List { elements: self.elements, depth: self.depth }.visit_seq(list)
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.leaf(|values| values.push_bool(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.leaf(|values| values.push_signed(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.leaf(|values| match i64::try_from(value) {
            Ok(value) => values.push_signed(value),
            Err(_) => values.push_unsigned(value),
        })
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.leaf(|values| values.push_float(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<(), E> {
        self.leaf(|values| values.push_text(value.to_owned()))
    }
}

#[cfg(test)]
mod tests;
