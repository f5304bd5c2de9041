//! Schema inference: column types from the JSON values of the first records.

use std::collections::HashMap;

use super::{COLUMNS_MAX, Field, Origin, Schema, Type, check_name};
use crate::decode::{Kind, Limits, Reject, Scanner};

/// Lists nested deeper than this become `json` columns.
const INFERRED_LIST_DEPTH_MAX: usize = 4;

/// Shape of one value, from which the type of its column is inferred.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `null`.
    Null,
    /// `[]`.
    EmptyList,
    /// A value of that type.
    Known(Type),
    /// An integer that int64 holds and float64 does not.
    Wide,
    /// A number that int64 cannot hold and that is no fraction in the range of float64. `exact`: float64
    /// holds it all the same. It does not vote for a type of the column.
    Beyond { exact: bool },
}

impl Shape {
    /// The type for a column of this value alone, or `None` for `null`.
    pub(crate) fn into_type(self) -> Option<Type> {
        match self {
            Self::Null => None,
            // `[]` must not get lost, and its items could still have any type.
            Self::EmptyList => Some(Type::Json),
            Self::Known(kind) => Some(kind),
            Self::Wide => Some(Type::Int64),
            Self::Beyond { .. } => Some(Type::Float64),
        }
    }

    /// The type of a list's item; `None` where a list of them is JSON text.
    fn into_item(self) -> Option<Type> {
        match self {
            Self::Null | Self::EmptyList => None,
            shape => shape.into_type(),
        }
    }

    /// The type that the value votes for; no value votes for `json`, which takes everything.
    fn vote(&self) -> Option<Type> {
        match self {
            Self::Known(Type::Json) | Self::Null | Self::EmptyList | Self::Beyond { .. } => None,
            Self::Known(kind) => Some(kind.clone()),
            Self::Wide => Some(Type::Int64),
        }
    }

    /// Whether a column of that type takes the value.
    fn fits(&self, kind: &Type) -> bool {
        match self {
            Self::Null | Self::Beyond { .. } => false,
            Self::EmptyList => matches!(kind, Type::List(_)),
            Self::Known(found) => takes(kind, found),
            Self::Wide => *kind == Type::Int64,
        }
    }

    /// Whether only a column of JSON text is sure to take it.
    fn is_open(&self) -> bool {
        matches!(self, Self::EmptyList | Self::Known(Type::Json))
    }
}

/// The different shapes of one column, each with the number of its records.
#[derive(Debug, Default)]
struct Candidates(Vec<(Shape, u64)>);

impl Candidates {
    fn add(&mut self, shape: Shape) {
        match self.0.iter_mut().find(|(known, _)| *known == shape) {
            Some((_, records)) => *records += 1,
            None => self.0.push((shape, 1)),
        }
    }

    fn records(&self, of: impl Fn(&Shape) -> bool) -> u64 {
        self.0.iter().filter(|(shape, _)| of(shape)).map(|(_, records)| records).sum()
    }

    /// The type that takes most records, the first one among equals. Records that it does not take become
    /// dead letters that name the column. With objects or mixed lists, and no type that takes more than half
    /// of the records, it is `json`, which takes all.
    fn into_type(self) -> Option<Type> {
        let mut best: Option<(Type, u64)> = None;
        for kind in self.0.iter().filter_map(|(shape, _)| shape.vote()) {
            let records = self.records(|shape| shape.fits(&kind));
            if best.as_ref().is_none_or(|(_, most)| records > *most) {
                best = Some((kind, records));
            }
        }
        let open = self.records(Shape::is_open);
        let all = self.records(|shape| !matches!(shape, Shape::Null | Shape::Beyond { .. }));
        match best {
            Some((kind, records)) if open == 0 || 2 * records > all => Some(kind),
            _ if open > 0 => Some(Type::Json),
            // Only numbers that at most float64 takes.
            _ => self.0.into_iter().find_map(|(shape, _)| shape.into_type()),
        }
    }
}

/// Whether a column of `kind` takes values of `found` without loss.
fn takes(kind: &Type, found: &Type) -> bool {
    match (kind, found) {
        (Type::Float64, Type::Int64) => true,
        (Type::List(kind), Type::List(found)) => takes(kind, found),
        (kind, found) => kind == found,
    }
}

/// The type that takes both, if there is one without loss.
fn widen(a: &Type, b: &Type) -> Option<Type> {
    match (a, b) {
        (Type::Json, _) | (_, Type::Json) => Some(Type::Json),
        (a, b) if takes(a, b) => Some(a.clone()),
        (a, b) if takes(b, a) => Some(b.clone()),
        _ => None,
    }
}

/// Reads one value and returns its shape.
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
            match (number.to_i64().is_ok(), number.to_f64().is_ok()) {
                (true, true) => Shape::Known(Type::Int64),
                (true, false) => Shape::Wide,
                (false, true) if !number.is_integer() => Shape::Known(Type::Float64),
                (false, exact) => Shape::Beyond { exact },
            }
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
                let Some(kind) = infer_nested(scanner, depth + 1)?.into_item() else {
                    json = true;
                    continue;
                };
                items = match items {
                    None => Some(kind),
                    Some(before) => {
                        let both = widen(&before, &kind);
                        json |= both.is_none();
                        Some(both.unwrap_or(before))
                    }
                };
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
    /// Takes one record into account. A record that is not a JSON object counts nothing; the decoder turns it
    /// into a dead letter later.
    pub(crate) fn observe(&mut self, value: &[u8], limits: &Limits) {
        if let Ok(fields) = record_shapes(value, limits) {
            for (name, shape) in fields {
                match self.columns.get_mut(&name) {
                    Some(known) => known.add(shape),
                    None if self.order.len() < COLUMNS_MAX && check_name(&name).is_ok() => {
                        self.order.push(name.clone());
                        self.columns.entry(name).or_default().add(shape);
                    }
                    None => {}
                }
            }
        }
    }

    /// The schema. Every column is nullable; columns with nothing but `null` are left out until their first
    /// value.
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
