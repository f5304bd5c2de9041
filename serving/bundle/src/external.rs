//! External tensor data: tensors whose elements are in other files, as exporters write large models.
//!
//! ONNX Runtime would read any file that a graph names. So before a model is loaded, each external tensor
//! anywhere in it must name a file of the same version, and lie within that file.

use std::collections::BTreeSet;

use crate::manifest::{check_file_path, shorten};
use crate::onnx::tensor_proto::{DataLocation, DataType};
use crate::onnx::{ModelProto, TensorProto};
use crate::outline::{TensorPosition, each_tensor};

/// A tensor's reference to its elements.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Path of the file, relative to the folder of the version.
    pub(crate) file: String,
    /// Offset of the elements in the file.
    pub(crate) offset: u64,
    /// Size of the elements in bytes.
    pub(crate) bytes: u64,
}

/// The files that the tensors of a model name; none of them is outside the version's folder.
///
/// # Errors
/// The first tensor that names a file outside, or has an invalid reference.
pub(crate) fn files(model: &mut ModelProto) -> Result<BTreeSet<String>, String> {
    let mut files = BTreeSet::new();
    each_reference(model, &mut |_, reference, _| {
        files.insert(reference.file);
        Ok(())
    })?;
    Ok(files)
}

/// Checks that the elements of all tensors are in existing files; `size_of` returns the size of a file.
///
/// # Errors
/// The first tensor for which this fails.
pub(crate) fn check(model: &mut ModelProto, size_of: impl Fn(&str) -> Option<u64>) -> Result<(), String> {
    each_reference(model, &mut |tensor, Reference { file, offset, bytes }, _| {
        let Some(size) = size_of(&file) else {
            return Err(format!("{}: the folder of the graph has no file {file:?}", named(tensor)));
        };
        match offset.checked_add(bytes) {
            Some(end) if end <= size => Ok(()),
            _ => Err(format!(
                "{}: its {bytes} bytes from {offset} on are not in {file:?}, which has {size} bytes",
                named(tensor)
            )),
        }
    })
}

/// Copies the elements of external tensors other than the graph's initializers into the model, as ONNX
/// Runtime accepts only initializers from memory. Returns whether there were any.
///
/// # Errors
/// As [`check`].
pub(crate) fn inline(
    model: &mut ModelProto,
    content: impl Fn(&str) -> Option<bytes::Bytes>,
) -> Result<bool, String> {
    embed(model, content, |place| place != TensorPosition::Initializer)
}

/// Copies the elements of all external tensors into the model.
///
/// # Errors
/// As [`check`].
pub(crate) fn inline_all(
    model: &mut ModelProto,
    content: impl Fn(&str) -> Option<bytes::Bytes>,
) -> Result<(), String> {
    embed(model, content, |_| true).map(drop)
}

/// Copies the elements of external tensors at `wanted` places into the model. Returns whether there were any.
fn embed(
    model: &mut ModelProto,
    content: impl Fn(&str) -> Option<bytes::Bytes>,
    wanted: impl Fn(TensorPosition) -> bool,
) -> Result<bool, String> {
    let mut any = false;
    each_reference(model, &mut |tensor, Reference { file, offset, bytes }, place| {
        if !wanted(place) {
            return Ok(());
        }
        let part = |content: bytes::Bytes| {
            let begin = usize::try_from(offset).ok()?;
            Some(content.get(begin..begin.checked_add(usize::try_from(bytes).ok()?)?)?.to_vec())
        };
        let Some(elements) = content(&file).and_then(part) else {
            return Err(format!("{}: its elements are not in {file:?}", named(tensor)));
        };
        tensor.raw_data = Some(elements);
        tensor.external_data = Vec::new();
        tensor.data_location = None;
        any = true;
        Ok(())
    })?;
    Ok(any)
}

type Visit<'a> = dyn FnMut(&mut TensorProto, Reference, TensorPosition) -> Result<(), String> + 'a;

fn each_reference(model: &mut ModelProto, visit: &mut Visit<'_>) -> Result<(), String> {
    let mut result = Ok(());
    each_tensor(model, &mut |tensor, place| {
        let outside = tensor.data_location() == DataLocation::External || !tensor.external_data.is_empty();
        if result.is_ok() && outside {
            result = reference(tensor)
                .map_err(|reason| format!("{}: {reason}", named(tensor)))
                .and_then(|reference| visit(tensor, reference, place));
        }
    });
    result
}

fn named(tensor: &TensorProto) -> String {
    match tensor.name() {
        "" => "a tensor without a name keeps its elements in another file".to_owned(),
        name => format!("tensor {:?} keeps its elements in another file", shorten(name)),
    }
}

fn reference(tensor: &TensorProto) -> Result<Reference, String> {
    let (mut file, mut offset, mut length) = (None, None, None);
    for entry in &tensor.external_data {
        let number = || entry.value().parse::<u64>().map_err(|_| format!("{} is not a number", entry.key()));
        let again = match entry.key() {
            "location" => file.replace(entry.value().to_owned()).is_some(),
            "offset" => offset.replace(number()?).is_some(),
            "length" => length.replace(number()?).is_some(),
            "checksum" => false,
            other => return Err(format!("its entry {:?} is not known", shorten(other))),
        };
        if again {
            return Err(format!("its entry {} appears twice", entry.key()));
        }
    }
    let file = file.ok_or("it does not say which one")?;
    check_file_path(&file)?;
    let bytes = bytes_of(tensor)?;
    if length.is_some_and(|length| length != bytes) {
        return Err(format!(
            "its length is {}, and its elements have {bytes} bytes",
            length.unwrap_or_default()
        ));
    }
    Ok(Reference { file, offset: offset.unwrap_or(0), bytes })
}

/// Size of a tensor's elements, by its type and extents.
fn bytes_of(tensor: &TensorProto) -> Result<u64, String> {
    let bits: u64 = match DataType::try_from(tensor.data_type()) {
        Ok(DataType::Uint2 | DataType::Int2) => 2,
        Ok(DataType::Uint4 | DataType::Int4 | DataType::Float4e2m1) => 4,
        Ok(
            DataType::Uint8
            | DataType::Int8
            | DataType::Bool
            | DataType::Float8e4m3fn
            | DataType::Float8e4m3fnuz
            | DataType::Float8e5m2
            | DataType::Float8e5m2fnuz
            | DataType::Float8e8m0,
        ) => 8,
        Ok(DataType::Uint16 | DataType::Int16 | DataType::Float16 | DataType::Bfloat16) => 16,
        Ok(DataType::Uint32 | DataType::Int32 | DataType::Float) => 32,
        Ok(DataType::Uint64 | DataType::Int64 | DataType::Double | DataType::Complex64) => 64,
        Ok(DataType::Complex128) => 128,
        _ => return Err("elements of its type cannot be stored in another file".into()),
    };
    let count =
        tensor.dims.iter().try_fold(bits, |bits, extent| bits.checked_mul(u64::try_from(*extent).ok()?));
    count.map(|bits| bits.div_ceil(8)).ok_or_else(|| "its extents are negative or too large".to_owned())
}

/// Checks that each initializer of the graph that keeps its elements in itself has as many as its extents say.
///
/// # Errors
/// The tensor, its extents and what it has. ONNX Runtime refuses such a model when it loads it.
pub(crate) fn check_initializers(model: &ModelProto) -> Result<(), String> {
    let tensors = model.graph.iter().flat_map(|graph| &graph.initializer);
    for tensor in tensors.filter(|tensor| tensor.data_location() != DataLocation::External) {
        let wrong = |reason: String| {
            Err(format!("initializer {:?} of extents {:?}: {reason}", shorten(tensor.name()), tensor.dims))
        };
        if tensor.dims.contains(&0) {
            continue;
        }
        let product = |product: u64, extent: &i64| product.checked_mul(u64::try_from(*extent).ok()?);
        let Some(count) = tensor.dims.iter().try_fold(1, product) else {
            return wrong("the extents are negative or too large".to_owned());
        };
        let raw = tensor.raw_data.as_ref().map_or(0, Vec::len) as u64;
        let typed = match DataType::try_from(tensor.data_type()) {
            Ok(DataType::Float) => tensor.float_data.len(),
            Ok(DataType::Double) => tensor.double_data.len(),
            Ok(DataType::Int64) => tensor.int64_data.len(),
            Ok(
                DataType::Int32
                | DataType::Int16
                | DataType::Int8
                | DataType::Uint16
                | DataType::Uint8
                | DataType::Bool
                | DataType::Float16
                | DataType::Bfloat16,
            ) => tensor.int32_data.len(),
            Ok(DataType::Uint32 | DataType::Uint64) => tensor.uint64_data.len(),
            Ok(DataType::String) => tensor.string_data.len(),
            // Several elements may share a number, or one element have two.
            _ if raw == 0
                && !(tensor.int32_data.is_empty()
                    && tensor.float_data.is_empty()
                    && tensor.double_data.is_empty()) =>
            {
                continue;
            }
            _ => 0,
        } as u64;
        match bytes_of(tensor) {
            Ok(bytes) if typed == 0 && raw > 0 && raw != bytes => {
                return wrong(format!("it has {raw} bytes of elements instead of {bytes}"));
            }
            Ok(_) if typed == 0 && raw > 0 => {}
            _ if typed != count => return wrong(format!("it has {typed} elements instead of {count}")),
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
