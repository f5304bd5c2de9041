//! Conversion between JSON records and tensors: maps fields to inputs, stacks rows into a batch, and turns a
//! row of the outputs into JSON. Used by the pipe and by `millrace predict`.

use std::collections::BTreeMap;

use millrace_bundle::{Datatype, Signature, TensorSpec};
use serde::Deserialize;
use serde_json::{Map, Number, Value};

use crate::elements::Elements;
use crate::error::{Error, InferError, Result, quote};
use crate::tensor::{Data, Tensor, element_count};

/// Mapping of record fields to the inputs of a model, checked against its signature.
#[derive(Debug, Clone)]
pub struct Mapping {
    /// In the signature's order.
    inputs: Vec<Fed>,
    /// Whether several records fit into one call.
    batched: bool,
}

/// The parameter of a model's configuration with the fields that fed its inputs in the training, as a JSON object.
pub const PARAMETER: &str = "fields";

/// An input and its fields.
#[derive(Debug, Clone)]
struct Fed {
    spec: TensorSpec,
    fields: Vec<String>,
    /// Whether the training named the fields. It takes truth values for numbers, and numbers for truth values.
    is_trained: bool,
}

/// The inputs of one record.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Shape without the batch dimension, and elements, in the signature's order.
    inputs: Vec<(Vec<i64>, Data)>,
}

impl Row {
    /// Bytes of its elements in a request.
    pub fn bytes(&self) -> usize {
        self.inputs.iter().map(|(_, data)| data.raw_len()).fold(0, usize::saturating_add)
    }
}

impl Mapping {
    /// A mapping for a model. `columns` holds the field of each input; an input without an entry takes the
    /// field of its own name.
    ///
    /// # Errors
    /// [`Error::Config`] when `columns` names an input that the model lacks, or an input has no batch
    /// dimension (first extent -1 or 1).
    pub fn new(signature: &Signature, columns: &BTreeMap<String, String>) -> Result<Mapping> {
        Mapping::of_trained(signature, columns, &BTreeMap::new())
    }

    /// [`Mapping::new`] for a model whose training named the fields of its inputs: an input without an entry in `columns`
    /// takes those. The values of several fields follow one another in the last dimension, as in the training.
    ///
    /// # Errors
    /// As [`Mapping::new`], and [`Error::Config`] when several fields feed an input whose shape is open.
    pub fn of_trained(
        signature: &Signature,
        columns: &BTreeMap<String, String>,
        trained: &BTreeMap<String, Vec<String>>,
    ) -> Result<Mapping> {
        let config = |reason: String| Error::Config { reason };
        let names: Vec<&str> = signature.inputs.iter().map(|spec| spec.name.as_str()).collect();
        if let Some(unknown) = columns.keys().find(|input| !names.contains(&input.as_str())) {
            return Err(config(format!("columns names input {unknown:?}, the model's inputs are {names:?}")));
        }
        for spec in &signature.inputs {
            if !matches!(spec.shape.first(), Some(-1 | 1)) {
                return Err(config(format!(
                    "input {:?} has shape {:?}: records need a first extent of -1 or 1",
                    spec.name, spec.shape
                )));
            }
        }
        let batched = signature.inputs.iter().all(|spec| spec.shape.first() == Some(&-1));
        let fed = |spec: &TensorSpec| {
            let (fields, is_trained) = match (columns.get(&spec.name), trained.get(&spec.name)) {
                (Some(column), _) => (vec![column.clone()], false),
                (None, Some(fields)) => (fields.clone(), true),
                (None, None) => (vec![spec.name.clone()], false),
            };
            Fed { spec: spec.clone(), fields, is_trained }
        };
        let inputs: Vec<Fed> = signature.inputs.iter().map(fed).collect();
        let is_open = |spec: &TensorSpec| spec.shape.iter().skip(1).any(|extent| *extent < 0);
        if let Some(Fed { spec, fields, .. }) =
            inputs.iter().find(|fed| fed.fields.len() > 1 && is_open(&fed.spec))
        {
            return Err(config(format!(
                "input {:?} has the open shape {:?}, so that fields {} cannot be joined: name one field",
                spec.name,
                spec.shape,
                fields.join(", ")
            )));
        }
        Ok(Mapping { inputs, batched })
    }

    /// The inputs, each with its fields.
    pub fn inputs(&self) -> impl Iterator<Item = (&TensorSpec, &[String])> {
        self.inputs.iter().map(|fed| (&fed.spec, fed.fields.as_slice()))
    }

    /// Reads the inputs of one record.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when a field is missing or does not fit the input.
    pub fn row(&self, record: &Map<String, Value>) -> Result<Row, InferError> {
        let value = |field: &String| {
            record.get(field).ok_or_else(|| InferError::invalid(format!("the record has no field {field:?}")))
        };
        let read = |Fed { spec, fields, is_trained }: &Fed| match &fields[..] {
            [field] if !is_trained => input(spec, field, value(field)?),
            [field] => input(spec, field, &as_trained(value(field)?, spec.datatype)),
            several => {
                let values = several.iter().map(value).collect::<Result<Vec<_>, _>>()?;
                input(spec, &several.join(", "), &joined(spec, several, &values)?)
            }
        };
        Ok(Row { inputs: self.inputs.iter().map(read).collect::<Result<_, _>>()? })
    }

    /// Checks the inputs of one record that the caller has read: for each input, in the signature's order,
    /// the shape without the batch dimension and the elements.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when they do not fit the inputs.
    pub fn row_of(&self, inputs: Vec<(Vec<i64>, Data)>) -> Result<Row, InferError> {
        if inputs.len() != self.inputs.len() {
            let reason = format!("{} inputs, the model takes {}", inputs.len(), self.inputs.len());
            return Err(InferError::invalid(reason));
        }
        for (Fed { spec, fields, .. }, (shape, data)) in self.inputs.iter().zip(&inputs) {
            let declared = spec.shape.get(1..).unwrap_or_default();
            let reason = if !fits(declared, shape) {
                format!("it has shape {shape:?}, the model takes {declared:?}")
            } else if data.datatype() != spec.datatype {
                format!("it holds {}, the model takes {}", data.datatype(), spec.datatype)
            } else if element_count(&spec.name, shape)? != data.len() {
                format!("{} elements for shape {shape:?}", data.len())
            } else {
                continue;
            };
            return Err(InferError::invalid(format!("field {:?}: {reason}", fields.join(", "))));
        }
        Ok(Row { inputs })
    }

    /// Number of rows at the front that fit into one call: those of one shape, at most `rows_max`.
    pub fn fitting(&self, rows: &[Row], rows_max: usize) -> usize {
        let Some(first) = rows.first() else { return 0 };
        if !self.batched {
            return 1;
        }
        let alike = |row: &&Row| row.inputs.iter().zip(&first.inputs).all(|((a, _), (b, _))| a == b);
        rows.iter().take(rows_max.max(1)).take_while(alike).count()
    }

    /// Stacks rows of one shape into the inputs of one call.
    ///
    /// # Errors
    /// [`InferError::Invalid`] when there are none or their shapes differ.
    pub fn batch(&self, rows: &[Row]) -> Result<Vec<Tensor>, InferError> {
        let uneven = || InferError::invalid("the rows of a batch differ in shape");
        let first = rows.first().ok_or_else(|| InferError::invalid("the batch has no rows"))?;
        let mut tensors = Vec::with_capacity(self.inputs.len());
        for (index, Fed { spec, .. }) in self.inputs.iter().enumerate() {
            let (row_shape, data) = first.inputs.get(index).ok_or_else(uneven)?;
            let mut stacked = data.clone();
            for row in &rows[1..] {
                let (shape, data) = row.inputs.get(index).ok_or_else(uneven)?;
                if shape != row_shape || !stacked.append(data) {
                    return Err(uneven());
                }
            }
            let mut shape = vec![rows.len() as i64];
            shape.extend(row_shape);
            tensors.push(Tensor { name: spec.name.clone(), shape, data: stacked });
        }
        Ok(tensors)
    }
}

/// The values of several fields as one list: in each group of values of the last dimension, equal parts of each field.
fn joined(spec: &TensorSpec, fields: &[String], values: &[&Value]) -> Result<Value, InferError> {
    let outer = spec.shape.get(1..).unwrap_or_default().split_last().map_or(&[][..], |(_, outer)| outer);
    let groups: usize = outer
        .iter()
        .map(|extent| usize::try_from(*extent).unwrap_or(1))
        .fold(1, usize::saturating_mul)
        .max(1);
    let mut flat = Vec::with_capacity(values.len());
    for (field, value) in fields.iter().zip(values) {
        let mut leaves = Vec::new();
        take_leaves(as_trained(value, spec.datatype), &mut leaves);
        if leaves.is_empty() || leaves.len() % groups != 0 {
            let (shape, found) = (spec.shape.get(1..).unwrap_or_default(), leaves.len());
            return Err(InferError::invalid(format!(
                "field {field:?}: {found} elements, input {} of shape {shape:?} needs a multiple of {groups}",
                quote(&spec.name)
            )));
        }
        flat.push(leaves);
    }
    let group = |group: usize| {
        flat.iter().flat_map(move |leaves| {
            let together = leaves.len() / groups;
            leaves[group * together..(group + 1) * together].iter().cloned()
        })
    };
    Ok(Value::Array((0..groups).flat_map(group).collect()))
}

/// Appends the elements of a value.
fn take_leaves(value: Value, leaves: &mut Vec<Value>) {
    match value {
        Value::Array(items) => items.into_iter().for_each(|item| take_leaves(item, leaves)),
        leaf => leaves.push(leaf),
    }
}

/// A value as the training reads it: truth values that feed numbers are 0 and 1, and these are truth values.
fn as_trained(value: &Value, datatype: Datatype) -> Value {
    match value {
        Value::Array(items) => Value::Array(items.iter().map(|item| as_trained(item, datatype)).collect()),
        Value::Bool(flag) if !matches!(datatype, Datatype::Bool | Datatype::Bytes) => u8::from(*flag).into(),
        Value::Number(number) if datatype == Datatype::Bool => match number.as_u64() {
            Some(bit @ (0 | 1)) => Value::Bool(bit == 1),
            _ => value.clone(),
        },
        leaf => leaf.clone(),
    }
}

/// Reads the value of a record's field for an input: its shape without the batch dimension, and its elements.
///
/// # Errors
/// [`InferError::Invalid`] when it does not fit the input; the error names `column`.
pub fn input(spec: &TensorSpec, column: &str, value: &Value) -> Result<(Vec<i64>, Data), InferError> {
    let invalid = |reason: String| InferError::invalid(format!("field {column:?}: {reason}"));
    let mut names = Vec::new();
    let named = is_float(spec.datatype) && has_text(value);
    let named = if named { take_names(value, &mut 0, &mut names) } else { None };
    let value = named.as_ref().unwrap_or(value);
    let elements = match value {
        Value::Array(_) => Elements::deserialize(value),
        // A scalar is a list of one element.
        scalar => Elements::deserialize(Value::Array(vec![scalar.clone()])),
    }
    .map_err(|error| invalid(error.to_string()))?;
    let declared = spec.shape.get(1..).unwrap_or_default();
    let shape: Vec<i64> = if declared.contains(&-1) {
        let extents: Vec<i64> = elements.extents().iter().map(|extent| *extent as i64).collect();
        if !fits(declared, &extents) {
            return Err(invalid(format!("it has shape {extents:?}, the model takes {declared:?}")));
        }
        extents
    } else {
        declared.to_vec()
    };
    let mut data =
        elements.into_data(&spec.name, spec.datatype, &shape).map_err(|error| invalid(error.to_string()))?;
    names.into_iter().for_each(|(at, value)| data.set_float(at, value));
    Ok((shape, data))
}

fn is_float(datatype: Datatype) -> bool {
    matches!(datatype, Datatype::Fp16 | Datatype::Bf16 | Datatype::Fp32 | Datatype::Fp64)
}

fn has_text(value: &Value) -> bool {
    match value {
        Value::Array(items) => items.iter().any(has_text),
        leaf => leaf.is_string(),
    }
}

/// The string that records use for a non-finite float, which JSON cannot represent; `None` for finite ones.
pub fn float_name(value: f64) -> Option<&'static str> {
    match value {
        value if value.is_nan() => Some("NaN"),
        f64::INFINITY => Some("Infinity"),
        f64::NEG_INFINITY => Some("-Infinity"),
        _ => None,
    }
}

/// A copy of the value with 0 in place of each [`float_name`]; `None` without such names. Appends the element
/// index and the float of each name to `names`.
fn take_names(value: &Value, element: &mut usize, names: &mut Vec<(usize, f64)>) -> Option<Value> {
    match value {
        Value::Array(items) => {
            let taken: Vec<_> = items.iter().map(|item| take_names(item, element, names)).collect();
            if taken.iter().all(Option::is_none) {
                return None;
            }
            let items = items.iter().zip(taken).map(|(item, taken)| taken.unwrap_or_else(|| item.clone()));
            Some(Value::Array(items.collect()))
        }
        leaf => {
            let at = *element;
            *element += 1;
            let text = leaf.as_str()?;
            let found = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY]
                .into_iter()
                .find(|f| float_name(*f) == Some(text))?;
            names.push((at, found));
            Some(0.0.into())
        }
    }
}

/// Whether a shape fits a declared one, in which -1 is dynamic.
fn fits(declared: &[i64], shape: &[i64]) -> bool {
    shape.len() == declared.len()
        && declared.iter().zip(shape).all(|(want, found)| *want == -1 || want == found)
}

/// Parses a record.
///
/// # Errors
/// [`InferError::Invalid`] when the bytes are not one JSON object.
pub fn parse(bytes: &[u8]) -> Result<Map<String, Value>, InferError> {
    let Record(record) = serde_json::from_slice(bytes)
        .map_err(|error| InferError::invalid(format!("the record is not a JSON object: {error}")))?;
    Ok(record)
}

/// A JSON document with many records.
#[derive(Debug, Clone, PartialEq)]
pub enum Document {
    /// A list of records.
    Records(Vec<Map<String, Value>>),
    /// An object of columns: lists with one entry for each record.
    Columns(Map<String, Value>),
}

/// Parses a document with many records.
///
/// # Errors
/// [`InferError::Invalid`] when it has neither form.
pub fn parse_document(bytes: &[u8]) -> Result<Document, InferError> {
    let list = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[');
    let parsed = if list {
        serde_json::from_slice::<Vec<Record>>(bytes)
            .map(|records| Document::Records(records.into_iter().map(|Record(record)| record).collect()))
    } else {
        serde_json::from_slice(bytes).map(|Record(columns)| Document::Columns(columns))
    };
    parsed.map_err(|error| {
        InferError::invalid(format!("not a list of JSON objects, nor an object of columns: {error}"))
    })
}

/// A JSON object without duplicate fields, which ingest refuses, too.
struct Record(Map<String, Value>);

impl<'de> Deserialize<'de> for Record {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> serde::de::Visitor<'de> for Fields {
            type Value = Record;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut fields: A) -> Result<Record, A::Error> {
                let mut record = Map::new();
                while let Some(name) = fields.next_key::<String>()? {
                    if record.contains_key(&name) {
                        return Err(serde::de::Error::custom(format!("field {name:?} appears twice")));
                    }
                    record.insert(name, fields.next_value()?);
                }
                Ok(Record(record))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// One row of a call's outputs.
#[derive(Debug, Clone, PartialEq)]
pub struct RowOutputs {
    /// Elements of the row by output, flat. Non-finite numbers become the strings of [`float_name`]; invalid
    /// UTF-8 in byte strings becomes U+FFFD.
    pub outputs: Map<String, Value>,
    /// Index of the row's largest element, for each float output with at least two elements and no NaN.
    pub argmax: BTreeMap<String, usize>,
}

/// Extracts one row from the outputs of a call of `rows` rows.
///
/// # Errors
/// [`InferError::Internal`] when an output does not have one row per input row.
pub fn row_outputs(outputs: &[Tensor], row: usize, rows: usize) -> Result<RowOutputs, InferError> {
    let mut taken = RowOutputs { outputs: Map::new(), argmax: BTreeMap::new() };
    for tensor in outputs {
        let per_row = tensor.shape.first() == Some(&(rows as i64));
        let width = if per_row { tensor.data.len() / rows.max(1) } else { tensor.data.len() };
        if !per_row && rows != 1 {
            return Err(InferError::internal(format!(
                "output {} has shape {:?}, not one row for each of {rows}",
                quote(&tensor.name),
                tensor.shape
            )));
        }
        let (start, end) = if per_row { (row * width, (row + 1) * width) } else { (0, width) };
        let values = tensor.data.json(start, end);
        if let Some(index) = tensor.data.argmax(start, end) {
            taken.argmax.insert(tensor.name.clone(), index);
        }
        taken.outputs.insert(tensor.name.clone(), Value::Array(values));
    }
    Ok(taken)
}

impl Data {
    /// Appends elements; returns `false` and changes nothing if the datatypes differ.
    fn append(&mut self, other: &Data) -> bool {
        match (self, other) {
            (Data::Bool(a), Data::Bool(b)) => a.extend_from_slice(b),
            (Data::Uint8(a), Data::Uint8(b)) => a.extend_from_slice(b),
            (Data::Uint16(a), Data::Uint16(b)) => a.extend_from_slice(b),
            (Data::Uint32(a), Data::Uint32(b)) => a.extend_from_slice(b),
            (Data::Uint64(a), Data::Uint64(b)) => a.extend_from_slice(b),
            (Data::Int8(a), Data::Int8(b)) => a.extend_from_slice(b),
            (Data::Int16(a), Data::Int16(b)) => a.extend_from_slice(b),
            (Data::Int32(a), Data::Int32(b)) => a.extend_from_slice(b),
            (Data::Int64(a), Data::Int64(b)) => a.extend_from_slice(b),
            (Data::Fp16(a), Data::Fp16(b)) => a.extend_from_slice(b),
            (Data::Bf16(a), Data::Bf16(b)) => a.extend_from_slice(b),
            (Data::Fp32(a), Data::Fp32(b)) => a.extend_from_slice(b),
            (Data::Fp64(a), Data::Fp64(b)) => a.extend_from_slice(b),
            (Data::Bytes(a), Data::Bytes(b)) => a.extend_from_slice(b),
            _ => return false,
        }
        true
    }

    /// Sets one element if the datatype is a float.
    fn set_float(&mut self, at: usize, value: f64) {
        fn put<T>(values: &mut [T], at: usize, value: T) {
            if let Some(place) = values.get_mut(at) {
                *place = value;
            }
        }
        match self {
            Data::Fp16(values) => put(values, at, half::f16::from_f64(value)),
            Data::Bf16(values) => put(values, at, half::bf16::from_f64(value)),
            Data::Fp32(values) => put(values, at, value as f32),
            Data::Fp64(values) => put(values, at, value),
            _ => {}
        }
    }

    /// Elements `start..end` as JSON.
    fn json(&self, start: usize, end: usize) -> Vec<Value> {
        fn float(value: f64) -> Value {
            match float_name(value) {
                Some(name) => name.into(),
                None => Number::from_f64(value).into(),
            }
        }
        fn shortest(value: f32) -> Value {
            // Parses the decimal text of the 32-bit number, so that 0.1 stays 0.1.
            float(value.to_string().parse().unwrap_or(f64::NAN))
        }
        let range = start..end;
        macro_rules! all {
            ($values:expr, $convert:expr) => {
                $values.get(range).unwrap_or_default().iter().map($convert).collect()
            };
        }
        match self {
            Data::Fp16(values) => all!(values, |value| shortest(value.to_f32())),
            Data::Bf16(values) => all!(values, |value| shortest(value.to_f32())),
            Data::Fp32(values) => all!(values, |value| shortest(*value)),
            Data::Fp64(values) => all!(values, |value| float(*value)),
            Data::Bytes(values) => {
                all!(values, |value| String::from_utf8_lossy(value).into_owned().into())
            }
            Data::Bool(values) => all!(values, |value| (*value).into()),
            Data::Uint8(values) => all!(values, |value| (*value).into()),
            Data::Uint16(values) => all!(values, |value| (*value).into()),
            Data::Uint32(values) => all!(values, |value| (*value).into()),
            Data::Uint64(values) => all!(values, |value| (*value).into()),
            Data::Int8(values) => all!(values, |value| (*value).into()),
            Data::Int16(values) => all!(values, |value| (*value).into()),
            Data::Int32(values) => all!(values, |value| (*value).into()),
            Data::Int64(values) => all!(values, |value| (*value).into()),
        }
    }

    /// Index of the largest of the floats `start..end`; the first one among equals. `None` for other
    /// datatypes, fewer than two elements, or any NaN.
    fn argmax(&self, start: usize, end: usize) -> Option<usize> {
        let values: Vec<f64> = match self {
            Data::Fp16(values) => values.get(start..end)?.iter().map(|v| v.to_f64()).collect(),
            Data::Bf16(values) => values.get(start..end)?.iter().map(|v| v.to_f64()).collect(),
            Data::Fp32(values) => values.get(start..end)?.iter().map(|v| f64::from(*v)).collect(),
            Data::Fp64(values) => values.get(start..end)?.to_vec(),
            _ => return None,
        };
        if values.len() < 2 || values.iter().any(|value| value.is_nan()) {
            return None;
        }
        let mut best = 0;
        for (index, value) in values.iter().enumerate() {
            if *value > values[best] {
                best = index;
            }
        }
        Some(best)
    }
}

#[cfg(test)]
mod tests;
