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

    /// Joins two observations of one top-level column; `None` where no type takes both.
    fn join(&self, other: &Self) -> Option<Self> {
        match (self, other) {
            (Self::Null, other) | (other, Self::Null) => Some(other.clone()),
            (Self::EmptyList, Self::EmptyList) => Some(Self::EmptyList),
            (Self::EmptyList, Self::Known(kind)) | (Self::Known(kind), Self::EmptyList) => match kind {
                Type::List(_) => Some(Self::Known(kind.clone())),
                _ => Some(Self::Known(Type::Json)),
            },
            (Self::Known(a), Self::Known(b)) => widen(a, b).map(Self::Known),
        }
    }
}

/// The shapes of one column that contradict each other, each with the number of its records.
#[derive(Debug, Default)]
struct Candidates(Vec<(Shape, u64)>);

impl Candidates {
    fn add(&mut self, shape: &Shape) {
        let weight = u64::from(*shape != Shape::Null);
        let joined = self.0.iter_mut().find_map(|known| Some((known.0.join(shape)?, known)));
        match joined {
            None => self.0.push((shape.clone(), weight)),
            // It takes the values of all.
            Some((json @ Shape::Known(Type::Json), _)) => {
                let all = self.0.iter().map(|(_, records)| records).sum::<u64>() + weight;
                self.0 = vec![(json, all)];
            }
            Some((both, known)) => *known = (both, known.1 + weight),
        }
    }

    /// The shape of most records, the first one among equals. Records of the other shapes become dead
    /// letters that name the column.
    fn into_type(self) -> Option<Type> {
        let most = self.0.iter().map(|(_, records)| *records).max()?;
        self.0.into_iter().find(|(_, records)| *records == most)?.0.into_type()
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
    columns: HashMap<String, Candidates>,
}

impl Inference {
    /// Takes one record into account; a record that is not a JSON object says nothing (the
    /// decoder turns it into a dead letter later).
    pub(crate) fn observe(&mut self, value: &[u8], limits: &Limits) {
        if let Ok(fields) = record_shapes(value, limits) {
            for (name, shape) in fields {
                match self.columns.get_mut(&name) {
                    Some(known) => known.add(&shape),
                    None if self.order.len() < COLUMNS_MAX && check_name(&name).is_ok() => {
                        self.order.push(name.clone());
                        self.columns.entry(name).or_default().add(&shape);
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
            let kind = self.columns.remove(&name).and_then(Candidates::into_type);
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
