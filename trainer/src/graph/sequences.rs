//! Lists of tensors, as PyTorch's default exporter writes a split whose parts it takes one by one.

use millrace_bundle::onnx::NodeProto;
use millrace_bundle::onnx::tensor_proto::DataType;

use super::builder::{Builder, Call, NamedValue};
use super::{Dim, GraphError, ValueId, shape};

/// Most parts of a list.
const PARTS_MAX: usize = 4096;

/// A list of tensors of one type.
#[derive(Debug)]
pub(super) struct Sequence {
    parts: Vec<ValueId>,
    element: DataType,
}

/// SplitToSequence: the parts of an axis, each of which SequenceAt reads.
pub(super) fn split(b: &mut Builder, node: &NodeProto) -> Result<(DataType, Vec<NamedValue>), GraphError> {
    let mut call = Call::new(node);
    let input = call.value(b, 0)?;
    let element = call.element(b, 0).unwrap_or(DataType::Float);
    let given = call.int("axis", 0)?;
    let keeps = call.int("keepdims", 1)? != 0;
    let sizes = call.numbers(b, 1)?.cloned();
    call.finish(2)?;
    let site = call.site;
    let dims = b.dims(input).to_vec();
    let axis = shape::axis(given, dims.len(), &site)?;
    let Dim::Fixed(size) = dims[axis] else { return Err(site.mixes_rows("it splits the batch")) };
    let known = |size: &i64| usize::try_from(*size).ok().filter(|size| *size > 0);
    let sizes: Option<Vec<usize>> = match &sizes {
        None => (size <= PARTS_MAX).then(|| vec![1; size]),
        Some(ints) => match (ints.known().as_deref(), ints.dims.is_empty()) {
            // One number is the size of every part but the last one.
            (Some([part]), true) => {
                known(part).filter(|part| size.div_ceil(*part) <= PARTS_MAX).map(|part| {
                    (0..size.div_ceil(part)).map(|at| part.min(size - at * part)).collect::<Vec<usize>>()
                })
            }
            (Some(parts), _) => parts.iter().map(known).collect(),
            (None, _) => None,
        },
    };
    let sizes = sizes.filter(|sizes| sizes.len() <= PARTS_MAX && total(sizes) == Some(size));
    let sizes = sizes.ok_or_else(|| {
        site.shape(format!(
            "its parts do not cover axis {axis} of {}, or are more than {PARTS_MAX}",
            shape::display(&dims)
        ))
    })?;
    let squeezes = !keeps && !has_sizes(node);
    let mut parts = Vec::with_capacity(sizes.len());
    let mut start = 0;
    for part in sizes {
        let mut value = b.slice(input, axis, start, part, &site)?;
        start += part;
        if squeezes {
            let mut dims = b.dims(value).to_vec();
            dims.remove(axis);
            value = b.reshape(value, dims, &site)?;
        }
        parts.push(value);
    }
    if let Some(name) = node.output.first() {
        b.sequences.insert(name.clone(), Sequence { parts, element });
    }
    Ok((element, vec![]))
}

fn total(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(0usize, |sum, size| sum.checked_add(*size))
}

/// Whether the sizes of the parts are given: only single elements lose their axis.
fn has_sizes(node: &NodeProto) -> bool {
    node.input.get(1).is_some_and(|name| !name.is_empty())
}

/// SequenceAt: one part of a list, at a constant position.
pub(super) fn at(b: &mut Builder, node: &NodeProto) -> Result<(DataType, Vec<NamedValue>), GraphError> {
    let call = Call::new(node);
    let position = call.int_input(b, 1)?.ok_or_else(|| call.site.form("its position is missing"))?;
    call.finish(2)?;
    let Some(list) = b.sequences.get(call.input_name(0)) else {
        return Err(call.site.form("its list does not come from SplitToSequence, which alone is supported"));
    };
    let at = shape::axis(position, list.parts.len(), &call.site)?;
    Ok((list.element, vec![NamedValue::Float(list.parts[at])]))
}
