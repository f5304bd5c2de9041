//! Sizes for dynamic dimensions: text models are often exported for any length, and a job needs one length.

use std::collections::BTreeSet;
use std::str::FromStr;

use millrace_bundle::onnx::tensor_shape_proto::{Dimension, dimension::Value};
use millrace_bundle::onnx::{GraphProto, ValueInfoProto, type_proto};

use super::EditError;

/// Largest size of a dimension.
const SIZE_MAX: i64 = 1 << 30;

/// A dimension by its name, and the size that it gets: `sequence_length=128`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedSize {
    name: String,
    size: i64,
}

impl FromStr for NamedSize {
    type Err = String;

    fn from_str(text: &str) -> Result<NamedSize, String> {
        let parts = text.rsplit_once('=').and_then(|(name, size)| {
            let size = size.parse().ok().filter(|size| (1..=SIZE_MAX).contains(size))?;
            (!name.is_empty()).then(|| NamedSize { name: name.to_owned(), size })
        });
        parts.ok_or_else(|| format!("{text:?} is no size: write NAME=SIZE, as sequence_length=128"))
    }
}

/// Gives a dimension of the inputs its size, wherever the graph names it. The first dimension of an input holds the
/// rows and stays.
pub(super) fn fix(graph: &mut GraphProto, wanted: &NamedSize) -> Result<(), EditError> {
    let name = |dim: &Dimension| match &dim.value {
        Some(Value::DimParam(name)) if !name.is_empty() => Some(name.clone()),
        _ => None,
    };
    let rows: BTreeSet<String> =
        graph.input.iter_mut().filter_map(|input| name(dims(input).first()?)).collect();
    let inner: BTreeSet<String> =
        graph.input.iter_mut().flat_map(|input| dims(input).iter().skip(1).filter_map(name)).collect();
    let free: Vec<&str> = inner.difference(&rows).map(String::as_str).collect();
    if !free.contains(&wanted.name.as_str()) {
        let known = match &free[..] {
            [] => "no dimension behind the rows has a name".to_owned(),
            names => format!("those are {}", names.join(", ")),
        };
        return Err(EditError::NoDimension { name: wanted.name.clone(), known });
    }
    for info in graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info) {
        for dim in dims(info) {
            if matches!(&dim.value, Some(Value::DimParam(name)) if *name == wanted.name) {
                dim.value = Some(Value::DimValue(wanted.size));
            }
        }
    }
    Ok(())
}

/// The dimensions of a tensor.
fn dims(info: &mut ValueInfoProto) -> &mut [Dimension] {
    let kind = info.r#type.as_mut().and_then(|kind| kind.value.as_mut());
    let Some(type_proto::Value::TensorType(tensor)) = kind else { return &mut [] };
    match &mut tensor.shape {
        Some(shape) => &mut shape.dim,
        None => &mut [],
    }
}
