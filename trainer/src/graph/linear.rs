//! Matrix products and operators that move elements without computing.

use super::arithmetic::{apply, join};
use super::builder::{Builder, Call};
use super::ints::Size;
use super::{Binary, Dim, GraphError, Op, Unary, ValueId, shape};

pub(super) fn matmul(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let ((left, is_merged), right) = (call.merged(b, 0)?, call.float(b, 1)?);
    call.finish(2)?;
    if is_merged && b.dims(right).len() != 2 {
        return Err(call.site.mixes_rows("a reshape merged the batch with another axis"));
    }
    let out = product(b, &call, left, right)?;
    Ok(b.mark(out, is_merged))
}

/// Appends a matrix product.
pub(super) fn product(
    b: &mut Builder,
    call: &Call<'_>,
    left: ValueId,
    right: ValueId,
) -> Result<ValueId, GraphError> {
    let (l, r) = (b.dims(left).to_vec(), b.dims(right).to_vec());
    let shapes = || format!("{} and {}", shape::display(&l), shape::display(&r));
    if l.is_empty() || r.is_empty() {
        return Err(call.site.shape(format!("{}: a scalar is no matrix", shapes())));
    }
    if r.len() == 1 || l.len() == 1 && shape::rows_axis(&l).is_none() {
        return vector_product(b, call, left, right);
    }
    if l.len() < 2 {
        return Err(call.site.mixes_rows("it sums over the batch"));
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

/// A vector is a row on the left and a column on the right; the result lacks that axis.
fn vector_product(
    b: &mut Builder,
    call: &Call<'_>,
    left: ValueId,
    right: ValueId,
) -> Result<ValueId, GraphError> {
    let (mut l, mut r) = (b.dims(left).to_vec(), b.dims(right).to_vec());
    let (is_row, is_column) = (l.len() == 1, r.len() == 1);
    if is_row {
        l.insert(0, Dim::Fixed(1));
    }
    if is_column {
        r.push(Dim::Fixed(1));
    }
    if matches!(r[r.len() - 2], Dim::Rows(_)) {
        return Err(call.site.mixes_rows("it sums over the batch"));
    }
    let left = b.reshape(left, l, &call.site)?;
    let right = b.reshape(right, r, &call.site)?;
    let out = product(b, call, left, right)?;
    let mut dims = b.dims(out).to_vec();
    if is_column {
        dims.pop();
    }
    if is_row {
        let last = dims.len() - usize::from(!is_column);
        dims.remove(last - 1);
    }
    b.reshape(out, dims, &call.site)
}

/// The shape with leading ones up to `rank`.
fn pad_rank(dims: &[Dim], rank: usize) -> Vec<Dim> {
    let mut lifted = vec![Dim::Fixed(1); rank - dims.len()];
    lifted.extend(dims);
    lifted
}

pub(super) fn gemm(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let ((mut left, is_merged), mut right) = (call.merged(b, 0)?, call.float(b, 1)?);
    let bias = call.float_optional(b, 2)?;
    let alpha = call.float_attribute("alpha", 1.0)?;
    let beta = call.float_attribute("beta", 1.0)?;
    let turns = [call.int("transA", 0)? != 0, call.int("transB", 0)? != 0];
    call.finish(3)?;
    if is_merged && turns[0] {
        return Err(call.site.mixes_rows("a reshape merged the batch with another axis"));
    }
    for (side, turn) in [&mut left, &mut right].into_iter().zip(turns).skip(usize::from(is_merged)) {
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
    let Some(mut bias) = bias else { return Ok(b.mark(out, is_merged)) };
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
    let out = join(b, &call, Binary::Add, out, bias)?;
    Ok(b.mark(out, is_merged))
}

pub(super) fn reshape(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (input, is_merged) = call.merged(b, 0)?;
    let target = call.needed_numbers(b, 1)?.elements.clone();
    // With allowzero a 0 is an empty dimension, otherwise it copies the input's.
    if call.int("allowzero", 0)? != 0 && target.contains(&Size::plain(0)) {
        return Err(call.site.shape("a target dimension of 0 with allowzero = 1 is empty"));
    }
    call.finish(2)?;
    let from = b.dims(input).to_vec();
    let to = target
        .iter()
        .enumerate()
        .map(|(axis, size)| match size.known() {
            Some(-1) => Ok(None),
            Some(0) => from.get(axis).copied().map(Some).ok_or_else(|| {
                call.site.shape(format!("0 at axis {axis} copies nothing of {}", shape::display(&from)))
            }),
            _ => match size.dim() {
                Some(dim) => Ok(Some(dim)),
                None => Err(call.site.shape(format!("target dimension {}", size.plain))),
            },
        })
        .collect::<Result<Vec<_>, _>>()?;
    if is_merged && target.contains(&Size::plain(0)) {
        return Err(call.site.mixes_rows("a reshape merged the batch with another axis"));
    }
    let dims = match shape::reshape(&from, &to, &call.site) {
        Ok(dims) => dims,
        Err(error @ GraphError::MixesRows { .. }) => return merge(b, &call, input, &to).ok_or(error)?,
        Err(error) => return Err(error),
    };
    if is_merged {
        // A value of its own, whose rows are apart again.
        return b.push(Op::Reshape, &[input], dims, &call.site);
    }
    b.reshape(input, dims, &call.site)
}

/// A reshape of `[steps, rows · heads, …]` to `[steps · rows, width]`, as attention layers write it before a product.
fn merge(
    b: &mut Builder,
    call: &Call<'_>,
    input: ValueId,
    to: &[Option<Dim>],
) -> Option<Result<ValueId, GraphError>> {
    let [Dim::Fixed(steps), Dim::Rows(factor), ..] = *b.dims(input) else { return None };
    let [first, width] = to else { return None };
    // Elements of a row in each step.
    let inner = shape::elements_at(&b.dims(input)[1..], 1);
    let quotient =
        |whole: usize, part: usize| whole.checked_rem(part).filter(|rest| *rest == 0).map(|_| whole / part);
    let kept = match (first, width) {
        (Some(Dim::Rows(all)), _) => quotient(*all, steps)?,
        (None, Some(Dim::Fixed(width))) => quotient(inner, *width)?,
        _ => return None,
    };
    // Whole heads move into the width.
    quotient(factor, kept)?;
    let rest = quotient(inner, kept)?;
    if width.is_some_and(|width| width != Dim::Fixed(rest)) {
        return None;
    }
    let dims = vec![Dim::Fixed(steps), Dim::Rows(kept), Dim::Fixed(rest)];
    let value = match b.dims(input) == dims {
        // A value of its own, since the unmerged one keeps its meaning.
        true => b.push(Op::Reshape, &[input], dims, &call.site),
        false => b.reshape(input, dims, &call.site),
    };
    Some(value.map(|value| b.mark(value, true)))
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
pub(super) fn axes_of(b: &Builder, call: &mut Call<'_>) -> Result<(Option<Vec<i64>>, usize), GraphError> {
    if b.opset >= 13 { Ok((call.ints_input(b, 1)?, 2)) } else { Ok((call.ints("axes")?, 1)) }
}

pub(super) fn transpose(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let order = order_of(&mut call, b.dims(input).len())?;
    b.permute(input, order, &call.site)
}

/// The axes in the order that `perm` gives, the reverse one by default.
pub(super) fn order_of(call: &mut Call<'_>, rank: usize) -> Result<Vec<usize>, GraphError> {
    let given = call.ints("perm")?;
    call.finish(1)?;
    let Some(given) = given else { return Ok((0..rank).rev().collect()) };
    if shape::axes(&given, rank, &call.site)?.len() != rank {
        return Err(call.site.shape(format!("perm {given:?} does not name every one of {rank} axes")));
    }
    given.iter().map(|axis| shape::axis(*axis, rank, &call.site)).collect()
}

pub(super) fn concat(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let count = call.input_count();
    let inputs = (0..count).map(|index| call.value(b, index)).collect::<Result<Vec<_>, _>>()?;
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
