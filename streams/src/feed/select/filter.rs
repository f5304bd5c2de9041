//! Filter of rows: a condition over columns, with the three-valued logic of SQL.

use std::fmt;
use std::str::FromStr;

use arrow::array::{Array, AsArray, StringArray};
use arrow::compute::cast;
use arrow::compute::kernels::cast_utils::string_to_timestamp_nanos;
use arrow::datatypes::{DataType, SchemaRef, TimeUnit, TimestampMicrosecondType};

use super::decimal::Decimal;
use super::parse::parse;
use super::value::{Kind, Value};
use crate::feed::error::{FeedError, Result};

/// A condition that selects rows, for example `label != 3 and (source = 'web' or score >= 0.5)`.
///
/// - *Columns* are written as they are or in double quotes (`"two words"`), texts in single quotes (`'it''s'`).
///   Numbers, `true` and `false` are the other literals.
/// - *Comparisons*: `=`, `!=`, `<`, `<=`, `>`, `>=`, also `==` and `<>`; `x in (1, 2)`, `x not in (…)`,
///   `x is null`, `x is not null`. A column of flags is a condition by itself.
/// - *Conditions* are joined by `and`, `or`, `not` and parentheses.
///
/// A comparison with null is unknown, and so is its negation; rows are selected where the condition is true.
/// Integers and floats compare exactly, but a literal next to a column of narrower floats is rounded to them.
/// NaN is unequal to everything. Texts compare by their bytes. A text next to a column of dates or times is a
/// time in UTC, for example `'2026-01-31'` or `'2026-01-31T12:00:00+02:00'`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Filter {
    pub(super) columns: Vec<String>,
    pub(super) condition: Condition,
}

/// A condition; columns by their index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    Compare(Operand, Comparison, Operand),
    In(usize, Vec<Literal>),
    Null(usize),
    Flag(usize),
    Not(Box<Condition>),
    /// At least two conditions.
    All(Vec<Condition>),
    /// At least two conditions.
    Any(Vec<Condition>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Operand {
    Column(usize),
    Literal(Literal),
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Literal {
    Flag(bool),
    Integer(i128),
    Float(f64),
    /// A number that no float holds exactly enough.
    Decimal(Decimal),
    /// A number between this integer and the next one, next to a column of integers.
    Above(i128),
    Text(String),
    /// A text that stands next to a column of times.
    Time(i128),
}

/// Floats are finite when they are parsed, and never NaN.
impl Eq for Literal {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Comparison {
    Equal,
    Unequal,
    Less,
    AtMost,
    More,
    AtLeast,
}

impl FromStr for Filter {
    type Err = FeedError;

    fn from_str(text: &str) -> Result<Self> {
        let filter = parse(text)?;
        // Plans store the canonical text, which may be longer and deeper.
        parse(&filter.to_string())?;
        Ok(filter)
    }
}

impl Filter {
    /// The columns that the condition names.
    pub(super) fn columns(&self) -> &[String] {
        &self.columns
    }

    /// The filter for columns of these types: literals get the type of the column beside them.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a comparison of types that do not compare.
    pub(super) fn bind(&self, schema: &SchemaRef) -> Result<Self> {
        let types = self.columns.iter().map(|name| {
            let data_type = schema.field_with_name(name).map(|field| field.data_type().clone());
            let data_type = data_type.map_err(|_| no_column(name, schema))?;
            let kind = Kind::of(&data_type);
            Ok(Typed { name: name.clone(), data_type, kind })
        });
        let types = types.collect::<Result<Vec<_>>>()?;
        let mut bound = self.clone();
        bound.condition.bind(&types)?;
        Ok(bound)
    }

    /// Whether a row is selected, by its values of the columns, which count in the order of [`Filter::columns`].
    pub(super) fn selects<'a>(&'a self, value: impl Fn(usize) -> Value<'a>) -> bool {
        self.condition.holds(&value) == Some(true)
    }
}

/// The error for a column that a dataset lacks.
pub(super) fn no_column(column: &str, schema: &SchemaRef) -> FeedError {
    FeedError::NoColumn {
        column: column.to_owned(),
        available: schema.fields().iter().map(|field| field.name().as_str()).collect::<Vec<_>>().join(", "),
    }
}

/// A column with its type.
struct Typed {
    name: String,
    data_type: DataType,
    kind: Option<Kind>,
}

impl Typed {
    fn refuse(&self, other: impl fmt::Display, hint: &str) -> FeedError {
        let Typed { name, data_type, .. } = self;
        FeedError::invalid(format!(
            "where: column {name:?} is {data_type}, which does not compare with {other}; {hint}"
        ))
    }

    /// A number as this column of narrow floats would hold it; none for other columns, and beyond the largest float.
    fn rounded(&self, number: f64) -> Option<f64> {
        let rounded = match self.data_type {
            DataType::Float16 => half(number),
            DataType::Float32 => number as f32,
            _ => return None,
        };
        Some(f64::from(rounded)).filter(|rounded| rounded.is_finite())
    }

    /// Gives a literal the type of this column.
    fn bind(&self, literal: &mut Literal) -> Result<()> {
        let hint = match self.kind {
            None => "only `is null` works for this type",
            Some(Kind::Bytes) => "only `is null` and other columns of bytes work for this type",
            Some(Kind::Text) => "put texts in single quotes",
            Some(Kind::Time) => "write a time as a text, for example '2026-01-31' or '2026-01-31T12:00:00Z'",
            Some(Kind::Flag) => "compare it with true or false",
            Some(Kind::Integer | Kind::Float) => "compare it with a number; quotes make a text",
        };
        let bound = match (self.kind, &*literal) {
            (Some(Kind::Flag), Literal::Flag(_))
            | (Some(Kind::Text), Literal::Text(_))
            | (Some(Kind::Integer), Literal::Integer(_) | Literal::Float(_)) => return Ok(()),
            (Some(Kind::Float), Literal::Integer(number)) => match self.rounded(*number as f64) {
                Some(rounded) => Literal::Float(rounded),
                None => return Ok(()),
            },
            (Some(Kind::Float), Literal::Float(number)) => match self.rounded(*number) {
                Some(rounded) => Literal::Float(rounded),
                None => return Ok(()),
            },
            (Some(Kind::Integer), Literal::Decimal(number)) => match number.is_whole() {
                true => Literal::Integer(number.floor()),
                false => Literal::Above(number.floor()),
            },
            (Some(Kind::Float), Literal::Decimal(number)) => {
                Literal::Float(self.rounded(number.float()).unwrap_or(number.float()))
            }
            (Some(Kind::Time), Literal::Text(text)) => {
                Literal::Time(time(text).ok_or_else(|| self.refuse(&*literal, hint))?)
            }
            _ => return Err(self.refuse(&*literal, hint)),
        };
        *literal = bound;
        Ok(())
    }
}

/// The time of a text in nanoseconds since 1970 in UTC. Times beyond 64 bits of nanoseconds have microseconds.
fn time(text: &str) -> Option<i128> {
    if let Ok(nanoseconds) = string_to_timestamp_nanos(text) {
        return Some(nanoseconds.into());
    }
    let texts = StringArray::from(vec![text]);
    let times = cast(&texts, &DataType::Timestamp(TimeUnit::Microsecond, None)).ok()?;
    let times = times.as_primitive::<TimestampMicrosecondType>();
    times.is_valid(0).then(|| i128::from(times.value(0)) * 1000)
}

/// A number rounded to 16 bits, by the conversion that Arrow uses for columns.
fn half(number: f64) -> f32 {
    use arrow::datatypes::{ArrowPrimitiveType, Float16Type};
    <Float16Type as ArrowPrimitiveType>::Native::from_f64(number).to_f32()
}

impl Condition {
    fn bind(&mut self, types: &[Typed]) -> Result<()> {
        let typed = |column: usize| {
            types
                .get(column)
                .ok_or_else(|| FeedError::invalid(format!("where: column {column} of the filter")))
        };
        match self {
            Condition::Null(_) => Ok(()),
            Condition::Flag(column) => {
                let typed = typed(*column)?;
                match typed.kind {
                    Some(Kind::Flag) => Ok(()),
                    _ => Err(FeedError::invalid(format!(
                        "where: column {:?} is {}, not a condition; compare it, for example {} != 0",
                        typed.name, typed.data_type, typed.name
                    ))),
                }
            }
            Condition::In(column, literals) => {
                let typed = typed(*column)?;
                literals.iter_mut().try_for_each(|literal| typed.bind(literal))
            }
            Condition::Not(inner) => inner.bind(types),
            Condition::All(inner) | Condition::Any(inner) => {
                inner.iter_mut().try_for_each(|one| one.bind(types))
            }
            Condition::Compare(left, comparison, right) => match (left, right) {
                (Operand::Column(column), Operand::Literal(literal))
                | (Operand::Literal(literal), Operand::Column(column)) => {
                    let typed = typed(*column)?;
                    typed.bind(literal)?;
                    let equality = matches!(comparison, Comparison::Equal | Comparison::Unequal);
                    if typed.kind == Some(Kind::Flag) && !equality {
                        return Err(typed.refuse(format!("{comparison} {literal}"), "use = or !="));
                    }
                    Ok(())
                }
                (Operand::Column(left), Operand::Column(right)) => {
                    let (left, right) = (typed(*left)?, typed(*right)?);
                    let compares = match (left.kind, right.kind) {
                        (Some(a), Some(b)) => a == b || a.is_number() && b.is_number(),
                        _ => false,
                    };
                    let other = format!("column {:?} of {}", right.name, right.data_type);
                    if compares { Ok(()) } else { Err(left.refuse(other, "compare columns of one kind")) }
                }
                // Not a form that the parser gives.
                (Operand::Literal(left), Operand::Literal(right)) => {
                    Err(FeedError::invalid(format!("where: {left} {comparison} {right} names no column")))
                }
            },
        }
    }

    /// Whether the condition is true for a row; `None` where it is unknown.
    fn holds<'a>(&'a self, value: &impl Fn(usize) -> Value<'a>) -> Option<bool> {
        match self {
            Condition::Compare(left, comparison, right) => {
                let value = |operand: &'a Operand| match operand {
                    Operand::Column(column) => value(*column),
                    Operand::Literal(literal) => literal.value(),
                };
                comparison.holds(value(left), value(right))
            }
            Condition::In(column, literals) => {
                let value = value(*column);
                let is_in = |literal: &Literal| Comparison::Equal.holds(value, literal.value()) == Some(true);
                (!value.is_null()).then(|| literals.iter().any(is_in))
            }
            Condition::Null(column) => Some(value(*column).is_null()),
            Condition::Flag(column) => match value(*column) {
                Value::Flag(flag) => Some(flag),
                _ => None,
            },
            Condition::Not(inner) => inner.holds(value).map(|holds| !holds),
            Condition::All(inner) => decide(inner, value, false),
            Condition::Any(inner) => decide(inner, value, true),
        }
    }
}

/// `decisive` if one of the conditions is, unknown if one of the others is.
fn decide<'a>(
    conditions: &'a [Condition],
    value: &impl Fn(usize) -> Value<'a>,
    decisive: bool,
) -> Option<bool> {
    let mut known = Some(!decisive);
    for condition in conditions {
        match condition.holds(value) {
            Some(holds) if holds == decisive => return Some(decisive),
            Some(_) => {}
            None => known = None,
        }
    }
    known
}

impl Comparison {
    fn holds(self, left: Value<'_>, right: Value<'_>) -> Option<bool> {
        if left.is_null() || right.is_null() {
            return None;
        }
        let order = left.order(right);
        Some(match self {
            Comparison::Equal => order.is_some_and(|order| order.is_eq()),
            Comparison::Unequal => order.is_none_or(|order| order.is_ne()),
            Comparison::Less => order.is_some_and(|order| order.is_lt()),
            Comparison::AtMost => order.is_some_and(|order| order.is_le()),
            Comparison::More => order.is_some_and(|order| order.is_gt()),
            Comparison::AtLeast => order.is_some_and(|order| order.is_ge()),
        })
    }
}

impl Literal {
    fn value(&self) -> Value<'_> {
        match self {
            Literal::Flag(flag) => Value::Flag(*flag),
            Literal::Integer(number) => Value::Integer(*number),
            Literal::Float(number) => Value::Float(*number),
            Literal::Decimal(number) => Value::Float(number.float()),
            Literal::Above(number) => Value::Above(*number),
            Literal::Text(text) => Value::Text(text),
            Literal::Time(nanoseconds) => Value::Time(*nanoseconds),
        }
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Comparison::Equal => "=",
            Comparison::Unequal => "!=",
            Comparison::Less => "<",
            Comparison::AtMost => "<=",
            Comparison::More => ">",
            Comparison::AtLeast => ">=",
        })
    }
}

impl fmt::Display for Literal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Literal::Flag(flag) => write!(f, "{flag}"),
            Literal::Integer(number) | Literal::Time(number) => write!(f, "{number}"),
            Literal::Float(number) => write_float(f, *number),
            Literal::Decimal(number) => f.write_str(number.text()),
            Literal::Above(number) => write!(f, "a number above {number}"),
            Literal::Text(text) => write!(f, "'{}'", text.replace('\'', "''")),
        }
    }
}

/// Writes a float so that it is read as the same number: the shortest digits of a large whole one are those of another.
fn write_float(f: &mut fmt::Formatter<'_>, number: f64) -> fmt::Result {
    let text = format!("{number:?}");
    match Decimal::new(&text, number) {
        None => f.write_str(&text),
        // A whole number of about 64 bits.
        Some(_) => write!(f, "{}.0", number as i128),
    }
}

/// The canonical text: it parses to the same filter, and texts that differ in spaces and parentheses have one.
impl fmt::Display for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, &self.condition)
    }
}

impl Filter {
    fn write(&self, f: &mut fmt::Formatter<'_>, condition: &Condition) -> fmt::Result {
        let name = |column: &usize| {
            let name = self.columns.get(*column).map_or("", String::as_str);
            format!("\"{}\"", name.replace('"', "\"\""))
        };
        let operand = |operand: &Operand| match operand {
            Operand::Column(column) => name(column),
            Operand::Literal(literal) => literal.to_string(),
        };
        match condition {
            Condition::Compare(left, comparison, right) => {
                write!(f, "{} {comparison} {}", operand(left), operand(right))
            }
            Condition::In(column, literals) => {
                let literals: Vec<String> = literals.iter().map(Literal::to_string).collect();
                write!(f, "{} in ({})", name(column), literals.join(", "))
            }
            Condition::Null(column) => write!(f, "{} is null", name(column)),
            Condition::Flag(column) => f.write_str(&name(column)),
            Condition::Not(inner) => {
                f.write_str("not ")?;
                self.write_part(f, inner, matches!(**inner, Condition::All(_) | Condition::Any(_)))
            }
            Condition::All(inner) => {
                self.write_joined(f, inner, " and ", |part| matches!(part, Condition::Any(_)))
            }
            Condition::Any(inner) => self.write_joined(f, inner, " or ", |_| false),
        }
    }

    fn write_joined(
        &self,
        f: &mut fmt::Formatter<'_>,
        parts: &[Condition],
        word: &str,
        enclosed: fn(&Condition) -> bool,
    ) -> fmt::Result {
        for (at, part) in parts.iter().enumerate() {
            f.write_str(if at > 0 { word } else { "" })?;
            self.write_part(f, part, enclosed(part))?;
        }
        Ok(())
    }

    fn write_part(&self, f: &mut fmt::Formatter<'_>, part: &Condition, enclosed: bool) -> fmt::Result {
        f.write_str(if enclosed { "(" } else { "" })?;
        self.write(f, part)?;
        f.write_str(if enclosed { ")" } else { "" })
    }
}
