//! Inferred types of the values of a column, united over all rows and files.
//!
//! Integers widen to floats if these hold them exactly. Other differences are a [`Clash`] in JSON, and make the column
//! texts in CSV, where every value is written as text.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Fields as ArrowFields};

/// Most columns of a dataset, those inside of objects included.
pub(crate) const FIELDS_MAX: usize = 4096;
/// Description of integers beside floats, for errors.
const WIDE: &str = "integers that Float64 does not hold exactly";

/// A row of a file: its line, its member, or its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Place {
    /// Index of the file in the dataset.
    pub(crate) file: u32,
    /// Line or byte, from 1; which one depends on the format.
    pub(crate) at: u64,
}

/// What the values of a column are.
#[derive(Debug, Clone, Default)]
pub(crate) enum Kind {
    /// No value but null.
    #[default]
    Null,
    Flag,
    /// Integers of 64 bits; `large` for those above `i64::MAX`, `wide` for those that a float would round.
    Integer {
        negative: bool,
        large: bool,
        wide: bool,
    },
    Float,
    Text,
    Bytes,
    List(Box<Shape>),
    Object(Fields),
}

/// The kind of some values, with the first place where it was seen.
#[derive(Debug, Clone, Default)]
pub(crate) struct Shape {
    pub(crate) kind: Kind,
    pub(crate) first: Place,
}

/// Named shapes in order of appearance.
#[derive(Debug, Clone, Default)]
pub(crate) struct Fields {
    fields: Vec<NamedShape>,
    by_name: HashMap<String, usize>,
}

/// A field of an object.
#[derive(Debug, Clone)]
pub(crate) struct NamedShape {
    pub(crate) name: String,
    pub(crate) shape: Shape,
    /// Number of the last object that had it.
    pub(crate) seen: u64,
}

/// Two values of one column that have no common type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Clash {
    /// Names of the fields between the column and the value, outermost first.
    pub(crate) path: Vec<String>,
    pub(crate) first: (Place, String),
    pub(crate) other: (Place, String),
}

impl Kind {
    /// The kind of an integer of 64 bits, with or without a sign.
    pub(crate) fn integer(value: impl Into<i128>) -> Self {
        let value: i128 = value.into();
        let wide = value as f64 as i128 != value;
        Kind::Integer { negative: value < 0, large: value > i128::from(i64::MAX), wide }
    }

    /// The Arrow type of the column.
    pub(crate) fn data_type(&self) -> DataType {
        match self {
            Kind::Null => DataType::Null,
            Kind::Flag => DataType::Boolean,
            Kind::Integer { large: true, .. } => DataType::UInt64,
            Kind::Integer { .. } => DataType::Int64,
            Kind::Float => DataType::Float64,
            Kind::Text => DataType::Utf8,
            Kind::Bytes => DataType::Binary,
            Kind::List(item) => DataType::List(Arc::new(Field::new_list_field(item.kind.data_type(), true))),
            Kind::Object(fields) => DataType::Struct(fields.arrow()),
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Integer { negative: true, large: true, .. } => {
                f.write_str("integers beyond 64 bits of one sign")
            }
            // Its fields would be longer than the rest of an error.
            Kind::Object(_) => f.write_str("Struct"),
            Kind::List(_) => f.write_str("List"),
            other => write!(f, "{}", other.data_type()),
        }
    }
}

impl Shape {
    pub(crate) fn new(kind: Kind, first: Place) -> Self {
        Self { kind, first }
    }

    /// Takes in values of a kind at a place.
    ///
    /// # Errors
    /// A [`Clash`] if there is no common type; the shape stays.
    pub(crate) fn add(&mut self, kind: Kind, place: Place) -> Result<(), Clash> {
        self.unite(Shape::new(kind, place))
    }

    /// Takes in the values of another shape.
    ///
    /// # Errors
    /// A [`Clash`] if there is no common type.
    pub(crate) fn unite(&mut self, other: Shape) -> Result<(), Clash> {
        let clash = |kind: &Kind, first, other: &Shape| {
            let path = Vec::new();
            Err(Clash {
                path,
                first: (first, kind.to_string()),
                other: (other.first, other.kind.to_string()),
            })
        };
        match (&mut self.kind, other.kind) {
            (_, Kind::Null) => {}
            (Kind::Null, kind) => *self = Shape::new(kind, other.first),
            (Kind::Flag, Kind::Flag) | (Kind::Text, Kind::Text) | (Kind::Bytes, Kind::Bytes) => {}
            (Kind::Float, Kind::Float | Kind::Integer { wide: false, .. }) => {}
            (Kind::Integer { wide: false, .. }, Kind::Float) => self.kind = Kind::Float,
            (Kind::Float, Kind::Integer { wide: true, .. }) => {
                let first = (self.first, self.kind.to_string());
                return Err(Clash { path: Vec::new(), first, other: (other.first, WIDE.to_owned()) });
            }
            (Kind::Integer { wide: true, .. }, Kind::Float) => {
                let first = (self.first, WIDE.to_owned());
                let other = (other.first, Kind::Float.to_string());
                return Err(Clash { path: Vec::new(), first, other });
            }
            (
                Kind::Integer { negative, large, wide },
                Kind::Integer { negative: below, large: above, wide: beyond },
            ) => {
                let (negative, large) = (*negative || below, *large || above);
                if negative && large {
                    let found = Kind::Integer { negative: below, large: above, wide: beyond };
                    return clash(&self.kind, self.first, &Shape::new(found, other.first));
                }
                // A clash with floats names the first value that a float does not hold.
                let first = if beyond && !*wide { other.first } else { self.first };
                *self = Shape::new(Kind::Integer { negative, large, wide: *wide || beyond }, first);
            }
            (Kind::List(items), Kind::List(others)) => return items.unite(*others),
            (Kind::Object(fields), Kind::Object(others)) => {
                for field in others.fields {
                    let mine = fields.entry(&field.name);
                    mine.shape.unite(field.shape).map_err(|clash| clash.within(&field.name))?;
                }
            }
            (kind, other_kind) => {
                let found = Shape::new(other_kind, other.first);
                return clash(kind, self.first, &found);
            }
        }
        Ok(())
    }

    /// Fields of objects in it.
    pub(crate) fn fields(&self) -> usize {
        match &self.kind {
            Kind::List(items) => items.fields(),
            Kind::Object(fields) => fields.count(),
            _ => 0,
        }
    }
}

impl Clash {
    /// The clash as one of a field of an object.
    pub(crate) fn within(mut self, name: &str) -> Self {
        self.path.insert(0, name.to_owned());
        self
    }
}

impl Fields {
    /// The field of a name, made if there is none.
    pub(crate) fn entry(&mut self, name: &str) -> &mut NamedShape {
        let index = self.index(name).0;
        &mut self.fields[index]
    }

    /// The index of a name, and whether it is new.
    pub(crate) fn index(&mut self, name: &str) -> (usize, bool) {
        if let Some(&index) = self.by_name.get(name) {
            return (index, false);
        }
        let index = self.fields.len();
        self.by_name.insert(name.to_owned(), index);
        self.fields.push(NamedShape { name: name.to_owned(), shape: Shape::default(), seen: 0 });
        (index, true)
    }

    pub(crate) fn at(&mut self, index: usize) -> &mut NamedShape {
        &mut self.fields[index]
    }

    /// Fields in it, those of inner objects included.
    pub(crate) fn count(&self) -> usize {
        self.fields.iter().map(|field| 1 + field.shape.fields()).sum()
    }

    fn arrow(&self) -> ArrowFields {
        self.fields.iter().map(|field| Field::new(&field.name, field.shape.kind.data_type(), true)).collect()
    }
}

/// Bytes that a row of a type takes at least once it is decoded.
pub(crate) fn fixed_bytes(kind: &DataType) -> u64 {
    match kind {
        DataType::Null => 0,
        DataType::Boolean => 1,
        DataType::Struct(fields) => fields.iter().map(|field| fixed_bytes(field.data_type())).sum(),
        DataType::Utf8 | DataType::Binary | DataType::List(_) => 4,
        _ => 8,
    }
}
