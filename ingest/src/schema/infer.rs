//! From JSON values to column types: what the first records say a column is.

use std::collections::HashMap;

use super::{COLUMNS_MAX, Field, Origin, Schema, Type, check_name};
use crate::decode::{Kind, Limits, Reject, Scanner};

/// Lists nested deeper than this become `json` columns.
const INFERRED_LIST_DEPTH_MAX: usize = 4;

/// What is known of a column so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Only `null` was seen.
    Null,
    /// Only `[]` was seen.
    EmptyList,
    /// A typed value was seen.
    Known(Type),
}

impl Shape {
    /// The type to give a column, or `None` while nothing but `null` was seen.
    pub(crate) fn into_type(self) -> Option<Type> {
        match self {
            Self::Null => None,
            // Nothing of `[]` may get lost, and its items could still be anything.
            Self::EmptyList => Some(Type::Json),
            Self::Known(kind) => Some(kind),
        }
    }

    /// Joins two observations of one top-level column. On a contradiction the first one stays:
    /// later records of the other type become dead letters that name the column.
    fn join(self, other: Self) -> Self {
        match (self, other) {
            (Self::Null, other) => other,
            (first, Self::Null) => first,
            (Self::EmptyList, Self::Known(kind @ Type::List(_))) => Self::Known(kind),
            (Self::EmptyList, Self::EmptyList) => Self::EmptyList,
            (Self::EmptyList, Self::Known(_)) => Self::Known(Type::Json),
            (Self::Known(a), Self::EmptyList) => Self::Known(a),
            (Self::Known(a), Self::Known(b)) => match widen(&a, &b) {
                Some(both) => Self::Known(both),
                None => Self::Known(a),
            },
        }
    }
}

/// The type that takes both, if there is one without loss.
fn widen(a: &Type, b: &Type) -> Option<Type> {
    match (a, b) {
        (a, b) if a == b => Some(a.clone()),
        (Type::Int64, Type::Float64) | (Type::Float64, Type::Int64) => Some(Type::Float64),
        (Type::Json, _) | (_, Type::Json) => Some(Type::Json),
        (Type::List(a), Type::List(b)) => Some(Type::List(Box::new(widen(a, b)?))),
        _ => None,
    }
}

/// Reads one value and says what column could hold it.
pub(crate) fn infer_value(scanner: &mut Scanner<'_>) -> Result<Shape, crate::decode::Fault> {
    infer_nested(scanner, 0)
}

fn infer_nested(scanner: &mut Scanner<'_>, depth: usize) -> Result<Shape, crate::decode::Fault> {
    Ok(match scanner.kind()? {
        Kind::Null => {
            scanner.skip_value()?;
            Shape::Null
        }
        Kind::Bool => {
            scanner.skip_value()?;
            Shape::Known(Type::Bool)
        }
        Kind::String => {
            scanner.skip_value()?;
            Shape::Known(Type::Utf8)
        }
        Kind::Object => {
            scanner.skip_value()?;
            Shape::Known(Type::Json)
        }
        Kind::Number => {
            let number = scanner.number()?;
            Shape::Known(if number.to_i64().is_ok() { Type::Int64 } else { Type::Float64 })
        }
        Kind::Array if depth >= INFERRED_LIST_DEPTH_MAX => {
            scanner.skip_value()?;
            Shape::Known(Type::Json)
        }
        Kind::Array => {
            let mut items: Option<Type> = None;
            let mut json = false;
            scanner.begin_array()?;
            let mut first = true;
            while scanner.next_item(&mut first)? {
                match infer_nested(scanner, depth + 1)? {
                    Shape::Null | Shape::EmptyList => json = true,
                    Shape::Known(kind) => {
                        items = match items {
                            None => Some(kind),
                            Some(before) => {
                                let both = widen(&before, &kind);
                                json |= both.is_none();
                                Some(both.unwrap_or(before))
                            }
                        }
                    }
                }
            }
            match items {
                _ if json => Shape::Known(Type::Json),
                None => Shape::EmptyList,
                Some(Type::Json) => Shape::Known(Type::Json),
                Some(kind) => Shape::Known(Type::List(Box::new(kind))),
            }
        }
    })
}

/// Collects the shapes of the first records of a job.
#[derive(Debug, Default)]
pub(crate) struct Inference {
    order: Vec<String>,
    shapes: HashMap<String, Shape>,
}

impl Inference {
    /// Takes one record into account; a record that is not a JSON object says nothing (the
    /// decoder turns it into a dead letter later).
    pub(crate) fn observe(&mut self, value: &[u8], limits: &Limits) {
        if let Ok(fields) = record_shapes(value, limits) {
            for (name, shape) in fields {
                match self.shapes.get_mut(&name) {
                    Some(known) => {
                        let before = std::mem::replace(known, Shape::Null);
                        *known = before.join(shape);
                    }
                    None if self.order.len() < COLUMNS_MAX && check_name(&name).is_ok() => {
                        self.order.push(name.clone());
                        self.shapes.insert(name, shape);
                    }
                    None => {}
                }
            }
        }
    }

    /// The schema: every column nullable, columns that were only ever `null` left out (the first
    /// value brings them).
    pub(crate) fn finish(mut self) -> Schema {
        let mut fields = Vec::with_capacity(self.order.len());
        for name in self.order {
            let kind = self.shapes.remove(&name).and_then(Shape::into_type);
            if let Some(kind) = kind {
                fields.push(Field { name, kind, nullable: true });
            }
        }
        Schema { origin: Origin::Inferred, fields }
    }
}

fn record_shapes(value: &[u8], limits: &Limits) -> Result<Vec<(String, Shape)>, Reject> {
    let mut scanner = Scanner::of_record(value, limits)?;
    let mut fields = Vec::new();
    scanner.begin_object()?;
    let mut first = true;
    while let Some(name) = scanner.next_field(&mut first)? {
        if fields.len() >= limits.fields_max {
            return Err(Reject::too_many_fields(limits.fields_max));
        }
        let name = name.into_owned();
        let shape = infer_value(&mut scanner)?;
        fields.push((name, shape));
    }
    scanner.end()?;
    Ok(fields)
}
