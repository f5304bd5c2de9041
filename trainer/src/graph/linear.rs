//! Matrix products and operators that move elements without computing.

use super::arithmetic::{apply, join};
use super::builder::{Builder, Call, Size};
use super::{Binary, Dim, GraphError, Op, Unary, ValueId, shape};

pub(super) fn matmul(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let (left, right) = (call.float(b, 0)?, call.float(b, 1)?);
    call.finish(2)?;
    product(b, &call, left, right)
}

fn product(b: &mut Builder, call: &Call<'_>, left: ValueId, right: ValueId) -> Result<ValueId, GraphError> {
    let (l, r) = (b.dims(left).to_vec(), b.dims(right).to_vec());
    let shapes = || format!("{} and {}", shape::display(&l), shape::display(&r));
    if l.len() < 2 || r.len() < 2 {
        return Err(call
            .site
            .form(format!("{}: vectors are not supported, give them two dimensions", shapes())));
    }
    let (inner, outer) = (l[l.len() - 1], r[r.len() - 2]);
    if inner != outer {
        return Err(call.site.shape(format!("{} do not multiply", shapes())));
    }
    if matches!(inner, Dim::Rows(_)) {
        return Err(call.site.mixes_rows("it sums over the batch"));
    }
    let (m, n) = (l[l.len() - 2], r[r.len() - 1]);
    // If all leading dimensions share the right side, one large product replaces many small ones.
    if l.len() > 2 && r.len() == 2 {
        let open = [None, Some(inner)];
        if let Ok(flat) = shape::reshape(&l, &open, &call.site) {
            let rows = flat[0];
            let flat = b.reshape(left, flat, &call.site)?;
            let dims = vec![rows, n];
            let out = b.push(Op::MatMul, &[flat, right], dims, &call.site)?;
            let mut dims = l;
            let last = dims.len() - 1;
            dims[last] = n;
            return b.reshape(out, dims, &call.site);
        }
    }
    let rank = l.len().max(r.len());
    let left = b.reshape(left, pad_rank(&l, rank), &call.site)?;
    let right = b.reshape(right, pad_rank(&r, rank), &call.site)?;
    let mut dims = shape::broadcast(&b.dims(left)[..rank - 2], &b.dims(right)[..rank - 2], &call.site)?;
    dims.extend([m, n]);
    b.push(Op::MatMul, &[left, right], dims, &call.site)
}

/// The shape with leading ones up to `rank`.
fn pad_rank(dims: &[Dim], rank: usize) -> Vec<Dim> {
    let mut lifted = vec![Dim::Fixed(1); rank - dims.len()];
    lifted.extend(dims);
    lifted
}

pub(super) fn gemm(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (mut left, mut right) = (call.float(b, 0)?, call.float(b, 1)?);
    let bias = call.float_optional(b, 2)?;
    let alpha = call.float_attribute("alpha", 1.0)?;
    let beta = call.float_attribute("beta", 1.0)?;
    let turns = [call.int("transA", 0)? != 0, call.int("transB", 0)? != 0];
    call.finish(3)?;
    for (side, turn) in [&mut left, &mut right].into_iter().zip(turns) {
        let dims = b.dims(*side).to_vec();
        let [rows, columns] = dims[..] else {
            return Err(call.site.shape(format!("{} is not a matrix", shape::display(&dims))));
        };
        if turn {
            let op = Op::Permute(vec![1, 0]);
            *side = b.push(op, &[*side], vec![columns, rows], &call.site)?;
        }
    }
    let mut out = product(b, &call, left, right)?;
    if alpha != 1.0 {
        out = apply(b, &call, Unary::Scale(alpha), out)?;
    }
    let Some(mut bias) = bias else { return Ok(out) };
    if beta != 1.0 {
        bias = apply(b, &call, Unary::Scale(beta), bias)?;
    }
    let dims = b.dims(out).to_vec();
    if shape::broadcast(&dims, b.dims(bias), &call.site)? != dims {
        return Err(call.site.shape(format!(
            "C {} does not broadcast to {}",
            shape::display(b.dims(bias)),
            shape::display(&dims)
        )));
    }
    join(b, &call, Binary::Add, out, bias)
}

pub(super) fn reshape(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let target = call.sizes_input(b, 1)?.ok_or_else(|| call.site.form("the target shape is not constant"))?;
    call.only("allowzero", 0)?;
    call.finish(2)?;
    let from = b.dims(input).to_vec();
    let to = target
        .iter()
        .enumerate()
        .map(|(axis, size)| match *size {
            Size::Rows(factor) => Ok(Some(Dim::Rows(factor))),
            Size::Plain(-1) => Ok(None),
            Size::Plain(0) => from.get(axis).copied().map(Some).ok_or_else(|| {
                call.site.shape(format!("0 at axis {axis} copies nothing of {}", shape::display(&from)))
            }),
            Size::Plain(size) => usize::try_from(size)
                .map(|size| Some(Dim::Fixed(size)))
                .map_err(|_| call.site.shape(format!("target dimension {size}"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    let dims = shape::reshape(&from, &to, &call.site)?;
    b.reshape(input, dims, &call.site)
}

pub(super) fn flatten(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let given = call.int("axis", 1)?;
    call.finish(1)?;
    let from = b.dims(input).to_vec();
    // Flatten may split behind the last axis.
    let axis =
        if given == from.len() as i64 { from.len() } else { shape::axis(given, from.len(), &call.site)? };
    let (outer, inner) = from.split_at(axis);
    let to = if shape::rows_axis(outer).is_some() {
        [None, Some(Dim::Fixed(shape::check(inner, &call.site)?))]
    } else {
        [Some(Dim::Fixed(shape::check(outer, &call.site)?)), None]
    };
    let dims = shape::reshape(&from, &to, &call.site)?;
    b.reshape(input, dims, &call.site)
}

pub(super) fn squeeze(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let (given, inputs) = axes_of(b, &mut call)?;
    call.finish(inputs)?;
    let from = b.dims(input).to_vec();
    let axes = match given {
        Some(given) => shape::axes(&given, from.len(), &call.site)?,
        None => (0..from.len()).filter(|axis| from[*axis] == Dim::Fixed(1)).collect(),
    };
    if let Some(axis) = axes.iter().find(|axis| from[**axis] != Dim::Fixed(1)) {
        return Err(call.site.shape(format!("axis {axis} of {} is not 1", shape::display(&from))));
    }
    let dims = (0..from.len()).filter(|axis| !axes.contains(axis)).map(|axis| from[axis]).collect();
    b.reshape(input, dims, &call.site)
}

pub(super) fn unsqueeze(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let (given, inputs) = axes_of(b, &mut call)?;
    call.finish(inputs)?;
    let given = given.ok_or_else(|| call.site.form("its axes are missing"))?;
    let from = b.dims(input).to_vec();
    let rank = from.len().saturating_add(given.len());
    if rank > shape::RANK_MAX {
        return Err(call.site.shape(format!("{rank} dimensions")));
    }
    let axes = shape::axes(&given, rank, &call.site)?;
    let mut rest = from.into_iter();
    let dims = (0..rank)
        .map(|axis| if axes.contains(&axis) { Dim::Fixed(1) } else { rest.next().unwrap_or(Dim::Fixed(1)) })
        .collect();
    b.reshape(input, dims, &call.site)
}

/// Axes from the attribute (before opset 13) or the second input, and the number of inputs.
fn axes_of(b: &Builder, call: &mut Call<'_>) -> Result<(Option<Vec<i64>>, usize), GraphError> {
    if b.opset >= 13 { Ok((call.ints_input(b, 1)?, 2)) } else { Ok((call.ints("axes")?, 1)) }
}

pub(super) fn transpose(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let given = call.ints("perm")?;
    call.finish(1)?;
    let from = b.dims(input).to_vec();
    let order: Vec<usize> = match given {
        None => (0..from.len()).rev().collect(),
        Some(given) => {
            let sorted = shape::axes(&given, from.len(), &call.site)?;
            if sorted.len() != from.len() {
                return Err(call
                    .site
                    .shape(format!("perm {given:?} does not name every axis of {}", shape::display(&from))));
            }
            given.iter().map(|axis| shape::axis(*axis, from.len(), &call.site)).collect::<Result<_, _>>()?
        }
    };
    if order.iter().copied().eq(0..from.len()) {
        return Ok(input);
    }
    let dims = order.iter().map(|axis| from[*axis]).collect();
    b.push(Op::Permute(order), &[input], dims, &call.site)
}

pub(super) fn concat(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let count = call.input_count();
    let inputs = (0..count).map(|index| call.float(b, index)).collect::<Result<Vec<_>, _>>()?;
    let given = call.int("axis", 0)?;
    call.finish(count)?;
    let Some(first) = inputs.first() else {
        return Err(call.site.form("it has no inputs"));
    };
    let mut dims = b.dims(*first).to_vec();
    let axis = shape::axis(given, dims.len(), &call.site)?;
    if matches!(dims[axis], Dim::Rows(_)) {
        return Err(call.site.mixes_rows("its axis is the batch"));
    }
    let mut total = 0usize;
    for input in &inputs {
        let other = b.dims(*input);
        let fits = other.len() == dims.len() && (0..dims.len()).all(|a| a == axis || other[a] == dims[a]);
        let Some(Dim::Fixed(size)) = other.get(axis).copied().filter(|_| fits) else {
            return Err(call.site.shape(format!(
                "{} and {} do not join at axis {axis}",
                shape::display(&dims),
                shape::display(other)
            )));
        };
        total = total.saturating_add(size);
    }
    dims[axis] = Dim::Fixed(total);
    match inputs[..] {
        [single] => Ok(single),
        _ => b.push(Op::Concat(axis), &inputs, dims, &call.site),
    }
}
