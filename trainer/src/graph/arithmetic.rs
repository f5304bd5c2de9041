//! Element-wise operators, softmax, reductions and layer normalization.

use super::builder::{Builder, Call};
use super::{Binary, Dim, GraphError, Op, Source, Unary, ValueId, shape};

pub(super) fn binary(b: &mut Builder, call: Call<'_>, kind: Binary) -> Result<ValueId, GraphError> {
    let (left, right) = (call.float(b, 0)?, call.float(b, 1)?);
    call.finish(2)?;
    join(b, &call, kind, left, right)
}

/// Appends a broadcasting element-wise operation.
pub(super) fn join(
    b: &mut Builder,
    call: &Call<'_>,
    kind: Binary,
    left: ValueId,
    right: ValueId,
) -> Result<ValueId, GraphError> {
    if let Some(op) = unary_of_scalar(b, kind, left, right) {
        let dims = b.dims(left).to_vec();
        return b.push(Op::Unary(op), &[left], dims, &call.site);
    }
    let dims = shape::broadcast(b.dims(left), b.dims(right), &call.site)?;
    b.push(Op::Binary(kind), &[left, right], dims, &call.site)
}

/// A constant scalar on the right needs neither broadcasting nor a gradient.
fn unary_of_scalar(b: &Builder, kind: Binary, left: ValueId, right: ValueId) -> Option<Unary> {
    let Source::Constant(elements) = &b.values[right].source else {
        return None;
    };
    let [value] = elements[..] else { return None };
    if b.dims(right).len() > b.dims(left).len() {
        return None;
    }
    Some(match kind {
        Binary::Add => Unary::Shift(value),
        Binary::Sub => Unary::Shift(-value),
        Binary::Mul => Unary::Scale(value),
        Binary::Div => return None,
    })
}

pub(super) fn unary(b: &mut Builder, call: Call<'_>, kind: Unary) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    call.finish(1)?;
    apply(b, &call, kind, input)
}

/// Appends an element-wise operation.
pub(super) fn apply(
    b: &mut Builder,
    call: &Call<'_>,
    kind: Unary,
    input: ValueId,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(input).to_vec();
    b.push(Op::Unary(kind), &[input], dims, &call.site)
}

pub(super) fn gelu(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let kind = match call.string("approximate")?.as_deref() {
        None | Some("none") => Unary::Gelu,
        Some("tanh") => Unary::GeluTanh,
        Some(other) => {
            return Err(call.site.form(format!("approximate = {other:?} is not known")));
        }
    };
    unary(b, call, kind)
}

pub(super) fn leaky_relu(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let slope = call.float_attribute("alpha", 0.01)?;
    unary(b, call, Unary::LeakyRelu(slope))
}

pub(super) fn softmax(
    b: &mut Builder,
    mut call: Call<'_>,
    op: fn(usize) -> Op,
) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let dims = b.dims(input).to_vec();
    let flattens = b.opset < 13;
    let given = call.int("axis", if flattens { 1 } else { -1 })?;
    call.finish(1)?;
    let axis = shape::axis(given, dims.len(), &call.site)?;
    if flattens && axis + 1 != dims.len() {
        return Err(call.site.form(format!(
            "before opset 13 only the last axis is supported, not {axis} of {}",
            shape::display(&dims)
        )));
    }
    if matches!(dims[axis], Dim::Rows(_)) {
        return Err(call.site.mixes_rows("its axis is the batch"));
    }
    b.push(op(axis), &[input], dims, &call.site)
}

pub(super) fn reduce(
    b: &mut Builder,
    mut call: Call<'_>,
    op: fn(Vec<usize>) -> Op,
    axes_are_input_from: i64,
) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let dims = b.dims(input).to_vec();
    let keep = call.int("keepdims", 1)? != 0;
    let (given, inputs) =
        if b.opset >= axes_are_input_from { (call.ints_input(b, 1)?, 2) } else { (call.ints("axes")?, 1) };
    let none_is_identity = call.int("noop_with_empty_axes", 0)? != 0;
    call.finish(inputs)?;
    let axes = match given.filter(|axes| !axes.is_empty()) {
        Some(axes) => shape::axes(&axes, dims.len(), &call.site)?,
        None if none_is_identity => return Ok(input),
        None => (0..dims.len()).collect(),
    };
    fold(b, &call, op, input, axes, keep)
}

fn fold(
    b: &mut Builder,
    call: &Call<'_>,
    op: fn(Vec<usize>) -> Op,
    input: ValueId,
    axes: Vec<usize>,
    keep: bool,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(input).to_vec();
    if axes.iter().any(|axis| matches!(dims[*axis], Dim::Rows(_))) {
        return Err(call.site.mixes_rows("it reduces over the batch"));
    }
    let reduced = |axis: &usize| axes.contains(axis);
    let target = dims
        .iter()
        .enumerate()
        .filter(|(axis, _)| keep || !reduced(axis))
        .map(|(axis, dim)| if reduced(&axis) { Dim::Fixed(1) } else { *dim })
        .collect();
    if axes.is_empty() {
        return Ok(input);
    }
    b.push(op(axes.clone()), &[input], target, &call.site)
}

/// Mean over all dimensions after rows and channels, kept as 1.
pub(super) fn global_average_pool(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    call.finish(1)?;
    let rank = b.dims(input).len();
    if rank < 3 {
        return Err(call.site.shape(format!("{} has no dimension to pool", shape::display(b.dims(input)))));
    }
    fold(b, &call, Op::Mean, input, (2..rank).collect(), true)
}

/// (x − mean) / √(variance + ε) · scale + bias over the trailing dimensions, as primitive operations.
pub(super) fn layer_normalization(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (input, scale) = (call.float(b, 0)?, call.float(b, 1)?);
    let bias = call.float_optional(b, 2)?;
    let given = call.int("axis", -1)?;
    let epsilon = call.float_attribute("epsilon", 1e-5)?;
    call.only("stash_type", 1)?;
    call.finish(3)?;
    let dims = b.dims(input).to_vec();
    let axis = shape::axis(given, dims.len(), &call.site)?;
    let axes: Vec<usize> = (axis..dims.len()).collect();
    for factor in [Some(scale), bias].into_iter().flatten() {
        let fits = shape::broadcast(b.dims(factor), &dims[axis..], &call.site)?;
        if fits != dims[axis..] {
            return Err(call.site.shape(format!(
                "{} does not fit the normalised dimensions {}",
                shape::display(b.dims(factor)),
                shape::display(&dims[axis..])
            )));
        }
    }
    let mean = fold(b, &call, Op::Mean, input, axes.clone(), true)?;
    let centred = join(b, &call, Binary::Sub, input, mean)?;
    let square = join(b, &call, Binary::Mul, centred, centred)?;
    let variance = fold(b, &call, Op::Mean, square, axes, true)?;
    let shifted = apply(b, &call, Unary::Shift(epsilon), variance)?;
    let deviation = apply(b, &call, Unary::Sqrt, shifted)?;
    let normal = join(b, &call, Binary::Div, centred, deviation)?;
    let scaled = join(b, &call, Binary::Mul, normal, scale)?;
    match bias {
        Some(bias) => join(b, &call, Binary::Add, scaled, bias),
        None => Ok(scaled),
    }
}
