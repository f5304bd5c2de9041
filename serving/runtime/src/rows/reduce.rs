//! Rules of the row independence proof (`rows`) for operators along axes: reductions, cumulative sums and
//! normalizations.
//!
//! A rule returns the outputs of a node, with the axis of their rows. It fails if the node may mix rows: then
//! requests are not batched. A free value depends on no row.

use super::call::{Call, Outcome, axis_in};
use super::elementwise::broadcast;
use super::extent::Extent;
use super::select::not_along_rows;
use super::value::Value;

/// Reductions: sums, means, extremes and similar.
pub(super) fn reduce(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let since = if call.operator() == "ReduceSum" { 13 } else { 18 };
    let axes = match call.axes(1, since)? {
        Some(axes) if !axes.is_empty() => {
            axes.iter().map(|axis| axis_in(*axis, dims.len())).collect::<Result<Vec<_>, _>>()?
        }
        _ if call.opset >= since && call.int("noop_with_empty_axes", 0) != 0 => Vec::new(),
        _ => (0..dims.len()).collect(),
    };
    Ok(vec![reduced(call, data, &axes)?])
}

/// `ArgMax` and `ArgMin`: the index of the extreme along an axis.
pub(super) fn arg_extreme(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let axis = axis_in(call.int("axis", 0), data.rank()?)?;
    Ok(vec![reduced(call, data, &[axis])?])
}

/// A tensor whose reduced axes have extent 1, or are removed.
fn reduced(call: &Call<'_>, data: &Value, axes: &[usize]) -> Result<Value, String> {
    axes.iter().try_for_each(|axis| not_along_rows(data, *axis))?;
    let dims = data.extents()?;
    let keeps = call.int("keepdims", 1) != 0;
    let mut extents = Vec::with_capacity(dims.len());
    let mut rows_axis = 0;
    for (axis, extent) in dims.iter().enumerate() {
        if data.axis().is_some_and(|(rows, _)| rows == axis) {
            rows_axis = extents.len();
        }
        if !axes.contains(&axis) {
            extents.push(extent.clone());
        } else if keeps {
            extents.push(Extent::known(1));
        }
    }
    Ok(data.like(rows_axis, extents))
}

/// Cumulative sums or products.
pub(super) fn cumulative(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let [axis] = call.numbers(1)?[..] else { return Err("its axis is not one number".into()) };
    not_along_rows(data, axis_in(axis, data.rank()?)?)?;
    Ok(vec![data.same_shape()])
}

/// Softmax and similar: along one axis; before operator set 13, along all axes from one on.
pub(super) fn softmax(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let rank = data.rank()?;
    if call.opset >= 13 {
        not_along_rows(data, axis_in(call.int("axis", -1), rank)?)?;
    } else {
        let axis = axis_in(call.int("axis", 1), rank)?;
        rows_before(data, axis)?;
    }
    Ok(vec![data.same_shape()])
}

/// Scales to a norm of 1 along one axis.
pub(super) fn lp_normalization(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    not_along_rows(data, axis_in(call.int("axis", -1), data.rank()?)?)?;
    Ok(vec![data.same_shape()])
}

/// Normalizes by mean and variance over all axes from one on.
pub(super) fn layer_normalization(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let axis = axis_in(call.int("axis", -1), dims.len())?;
    rows_before(data, axis)?;
    let mut outputs = with_constants(call, data, 1)?;
    let mut statistic = dims.to_vec();
    statistic[axis..].fill(Extent::known(1));
    let rows = data.axis().map_or(0, |(rows, _)| rows);
    outputs.extend([data.like(rows, statistic.clone()), data.like(rows, statistic)]);
    Ok(outputs)
}

/// Normalizes by mean and variance over given axes.
pub(super) fn mean_variance(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let rank = data.rank()?;
    let axes = call.ints("axes").unwrap_or(&[0, 2, 3]);
    // The reductions inside this operator treat an empty list as all axes.
    if axes.is_empty() {
        rows_before(data, 0)?;
    }
    for axis in axes {
        not_along_rows(data, axis_in(*axis, rank)?)?;
    }
    Ok(vec![data.same_shape()])
}

/// The shape of a value; the inputs from index `from` on are constants that broadcast to it and must not enlarge it.
pub(super) fn with_constants(call: &Call<'_>, data: &Value, from: usize) -> Outcome {
    call.free_from(from)?;
    let mut values = vec![data];
    for place in from..call.inputs.len() {
        values.extend(call.free_if_given(place)?);
    }
    let stretched = broadcast(call, &values)?;
    if stretched.rank() != data.rank() {
        return Err("a constant has more axes than its input".into());
    }
    Ok(vec![data.same_shape()])
}

/// Requires that the axis of the rows is before `axis`.
fn rows_before(data: &Value, axis: usize) -> Result<(), String> {
    match data.axis() {
        Some((rows, _)) if rows >= axis => Err("it works along the rows".into()),
        _ => Ok(()),
    }
}
