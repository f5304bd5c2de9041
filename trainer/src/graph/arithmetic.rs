//! Element-wise operators and softmax.

use super::builder::{Builder, Call, NodeRef};
use super::types::{self, Kind};
use super::{Binary, Compare, Dim, GraphError, Op, Source, Unary, ValueId, shape};

pub(super) fn binary(b: &mut Builder, call: Call<'_>, kind: Binary) -> Result<ValueId, GraphError> {
    let ((left, is_left), (right, is_right)) = (call.merged(b, 0)?, call.merged(b, 1)?);
    call.finish(2)?;
    // A vector along the last axis means the same for a merged value.
    let fits = |b: &Builder, other: ValueId, is_merged: bool| is_merged || b.dims(other).len() <= 1;
    if is_left && !fits(b, right, is_right) || is_right && !fits(b, left, is_left) {
        return Err(call.site.mixes_rows("a reshape merged the batch with another axis"));
    }
    let out = join(b, &call, kind, left, right)?;
    Ok(b.mark(out, is_left || is_right))
}

/// A quotient; that of integers is truncated.
pub(super) fn divide(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let is_whole = call.element(b, 0).is_some_and(|element| types::kind(element) == Kind::Integer);
    let site = call.site.clone();
    let quotient = binary(b, call, Binary::Div)?;
    if !is_whole {
        return Ok(quotient);
    }
    let is_merged = b.merged.contains(&quotient);
    let whole = map(b, &site, Unary::Trunc, quotient)?;
    Ok(b.mark(whole, is_merged))
}

/// A remainder of whole numbers: with the sign of the divisor, or with `fmod` with that of the dividend. That of floats would
/// be off by a divisor where the quotient is rounded.
pub(super) fn modulo(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let is_whole = call.element(b, 0).is_some_and(|element| types::kind(element) == Kind::Integer);
    let like_c = call.int("fmod", 0)? != 0;
    let (dividend, divisor) = (call.value(b, 0)?, call.value(b, 1)?);
    call.finish(2)?;
    let site = call.site;
    if !is_whole {
        return Err(site.form("remainders of floats are not exact here, those of integers are supported"));
    }
    let quotient = join_at(b, &site, Binary::Div, dividend, divisor)?;
    let whole = map(b, &site, if like_c { Unary::Trunc } else { Unary::Floor }, quotient)?;
    let reached = join_at(b, &site, Binary::Mul, whole, divisor)?;
    join_at(b, &site, Binary::Sub, dividend, reached)
}

/// Appends a broadcasting element-wise operation.
pub(super) fn join(
    b: &mut Builder,
    call: &Call<'_>,
    kind: Binary,
    left: ValueId,
    right: ValueId,
) -> Result<ValueId, GraphError> {
    join_at(b, &call.site, kind, left, right)
}

/// [`join`] for a node that is known by name only.
pub(super) fn join_at(
    b: &mut Builder,
    site: &NodeRef,
    kind: Binary,
    left: ValueId,
    right: ValueId,
) -> Result<ValueId, GraphError> {
    if let Some(op) = unary_of_scalar(b, kind, left, right) {
        return map(b, site, op, left);
    }
    let dims = shape::broadcast(b.dims(left), b.dims(right), site)?;
    if let (Source::Constant(a), Source::Constant(c)) = (&b.values[left].source, &b.values[right].source)
        && let ([a], [c]) = (&a[..], &c[..])
        && let Some(value) = binary_of(kind, *a, *c)
    {
        return b.value(dims, Source::Constant(vec![value]), false, site);
    }
    b.push(Op::Binary(kind), &[left, right], dims, site)
}

/// The result for constants, so that integers which depend on it are known.
fn binary_of(kind: Binary, a: f32, c: f32) -> Option<f32> {
    match kind {
        Binary::Add => Some(a + c),
        Binary::Sub => Some(a - c),
        Binary::Mul => Some(a * c),
        Binary::Div => Some(a / c),
        Binary::Max | Binary::Min | Binary::Pow => None,
    }
}

/// The result for a constant, so that integers which depend on it are known.
fn unary_of(kind: Unary, x: f32) -> Option<f32> {
    match kind {
        Unary::Scale(factor) => Some(x * factor),
        Unary::Shift(offset) => Some(x + offset),
        Unary::Neg => Some(-x),
        Unary::Sqrt => Some(x.sqrt()),
        Unary::Reciprocal => Some(1.0 / x),
        Unary::Floor => Some(x.floor()),
        Unary::Ceil => Some(x.ceil()),
        Unary::Round => Some(x.round_ties_even()),
        _ => None,
    }
}

/// Appends an element-wise operation for a node that is known by name only.
pub(super) fn map(
    b: &mut Builder,
    site: &NodeRef,
    kind: Unary,
    input: ValueId,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(input).to_vec();
    if let Source::Constant(elements) = &b.values[input].source
        && let [value] = elements[..]
        && let Some(value) = unary_of(kind, value)
    {
        return b.value(dims, Source::Constant(vec![value]), false, site);
    }
    b.push(Op::Unary(kind), &[input], dims, site)
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
        Binary::Div | Binary::Max | Binary::Min | Binary::Pow => return None,
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
    map(b, &call.site, kind, input)
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
    if dims[axis..].iter().any(|dim| matches!(dim, Dim::Rows(_)))
        && (flattens || matches!(dims[axis], Dim::Rows(_)))
    {
        return Err(call.site.mixes_rows("its axis is the batch"));
    }
    if !flattens || axis + 1 == dims.len() {
        return b.push(op(axis), &[input], dims, &call.site);
    }
    // Before opset 13 the axes from this one on are one.
    let mut flat = dims[..axis].to_vec();
    flat.push(Dim::Fixed(shape::check(&dims[axis..], &call.site)?));
    let input = b.reshape(input, flat.clone(), &call.site)?;
    let shares = b.push(op(axis), &[input], flat, &call.site)?;
    b.reshape(shares, dims, &call.site)
}

/// The activations that ONNX defines by others, and those with attributes.
pub(super) fn activation(b: &mut Builder, mut call: Call<'_>, op: &str) -> Result<ValueId, GraphError> {
    let site = call.site.clone();
    match op {
        "Elu" => {
            let alpha = call.float_attribute("alpha", 1.0)?;
            unary(b, call, Unary::Elu(alpha))
        }
        "Selu" => {
            let alpha = call.float_attribute("alpha", 1.673_263_2)?;
            let gamma = call.float_attribute("gamma", 1.050_701)?;
            let bent = unary(b, call, Unary::Elu(alpha))?;
            map(b, &site, Unary::Scale(gamma), bent)
        }
        "Celu" => {
            let alpha = call.float_attribute("alpha", 1.0)?;
            if alpha == 0.0 {
                return Err(site.form("alpha = 0"));
            }
            let input = call.float(b, 0)?;
            let narrow = unary(b, call, Unary::Scale(1.0 / alpha))?;
            if alpha > 0.0 {
                let bent = map(b, &site, Unary::Elu(1.0), narrow)?;
                return map(b, &site, Unary::Scale(alpha), bent);
            }
            // max(x, 0) + min(α · (e^(x/α) − 1), 0)
            let power = map(b, &site, Unary::Exp, narrow)?;
            let lower = map(b, &site, Unary::Shift(-1.0), power)?;
            let bent = map(b, &site, Unary::Scale(alpha), lower)?;
            let below = map(b, &site, Unary::Clip(f32::NEG_INFINITY, 0.0), bent)?;
            let above = map(b, &site, Unary::Relu, input)?;
            join_at(b, &site, Binary::Add, above, below)
        }
        "HardSigmoid" => {
            let alpha = call.float_attribute("alpha", 0.2)?;
            let beta = call.float_attribute("beta", 0.5)?;
            let input = call.float(b, 0)?;
            call.finish(1)?;
            hard_sigmoid(b, &site, input, alpha, beta)
        }
        "HardSwish" => {
            let input = call.float(b, 0)?;
            call.finish(1)?;
            let gate = hard_sigmoid(b, &site, input, 1.0 / 6.0, 0.5)?;
            join_at(b, &site, Binary::Mul, input, gate)
        }
        "Mish" => {
            let input = call.float(b, 0)?;
            let soft = unary(b, call, Unary::Softplus)?;
            let gate = map(b, &site, Unary::Tanh, soft)?;
            join_at(b, &site, Binary::Mul, input, gate)
        }
        "Swish" => {
            let input = call.float(b, 0)?;
            let alpha = call.float_attribute("alpha", 1.0)?;
            let scaled = unary(b, call, Unary::Scale(alpha))?;
            let gate = map(b, &site, Unary::Sigmoid, scaled)?;
            join_at(b, &site, Binary::Mul, input, gate)
        }
        "Softsign" => {
            let input = call.float(b, 0)?;
            let size = unary(b, call, Unary::Abs)?;
            let divisor = map(b, &site, Unary::Shift(1.0), size)?;
            join_at(b, &site, Binary::Div, input, divisor)
        }
        "ThresholdedRelu" => {
            let input = call.float(b, 0)?;
            let alpha = call.float_attribute("alpha", 1.0)?;
            call.finish(1)?;
            let bound = b.scalar(alpha, &site)?;
            let above = compare_values(b, &site, Compare::Less, bound, input)?;
            let zero = b.scalar(0.0, &site)?;
            choose(b, &site, above, input, zero)
        }
        "Shrink" => {
            let input = call.float(b, 0)?;
            let lambd = call.float_attribute("lambd", 0.5)?;
            let bias = call.float_attribute("bias", 0.0)?;
            call.finish(1)?;
            let (low, high) = (b.scalar(-lambd, &site)?, b.scalar(lambd, &site)?);
            let below = compare_values(b, &site, Compare::Less, input, low)?;
            let above = compare_values(b, &site, Compare::Less, high, input)?;
            let (up, down) =
                (map(b, &site, Unary::Shift(bias), input)?, map(b, &site, Unary::Shift(-bias), input)?);
            let zero = b.scalar(0.0, &site)?;
            let rest = choose(b, &site, above, down, zero)?;
            choose(b, &site, below, up, rest)
        }
        "PRelu" => {
            let (input, slope) = (call.float(b, 0)?, call.float(b, 1)?);
            call.finish(2)?;
            let dims = b.dims(input).to_vec();
            if shape::broadcast(&dims, b.dims(slope), &site)? != dims {
                return Err(site.shape(format!(
                    "slope {} does not broadcast to {}",
                    shape::display(b.dims(slope)),
                    shape::display(&dims)
                )));
            }
            let above = map(b, &site, Unary::Relu, input)?;
            let below = map(b, &site, Unary::Clip(f32::NEG_INFINITY, 0.0), input)?;
            let bent = join_at(b, &site, Binary::Mul, below, slope)?;
            join_at(b, &site, Binary::Add, above, bent)
        }
        _ => Err(site.unsupported()),
    }
}

fn hard_sigmoid(
    b: &mut Builder,
    site: &NodeRef,
    input: ValueId,
    alpha: f32,
    beta: f32,
) -> Result<ValueId, GraphError> {
    let scaled = map(b, site, Unary::Scale(alpha), input)?;
    let moved = map(b, site, Unary::Shift(beta), scaled)?;
    map(b, site, Unary::Clip(0.0, 1.0), moved)
}

/// Bounds from attributes (before opset 11) or inputs.
pub(super) fn clip(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let (low, high) = if b.opset < 11 {
        let low = call.float_attribute("min", f32::MIN)?;
        let high = call.float_attribute("max", f32::MAX)?;
        call.finish(1)?;
        (low, high)
    } else {
        call.finish(3)?;
        (
            call.constant_scalar(b, 1)?.unwrap_or(f32::NEG_INFINITY),
            call.constant_scalar(b, 2)?.unwrap_or(f32::INFINITY),
        )
    };
    if low.is_nan() || high.is_nan() {
        return Err(call.site.form("a bound is NaN"));
    }
    apply(b, &call, Unary::Clip(low, high), input)
}

/// Bound of constant exponents: backends take whole ones as integers.
pub(super) const EXPONENT_BELOW: f32 = (1u64 << 31) as f32;

/// A constant exponent needs no logarithm.
pub(super) fn pow(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let (base, exponent) = (call.value(b, 0)?, call.value(b, 1)?);
    call.finish(2)?;
    let constant = match &b.values[exponent].source {
        Source::Constant(elements) if b.dims(exponent).len() <= b.dims(base).len() => match elements[..] {
            [value] => Some(value),
            _ => None,
        },
        _ => None,
    };
    let is_whole = call.element(b, 0).is_some_and(|element| types::kind(element) == Kind::Integer);
    if is_whole && !matches!(constant, Some(1.0 | 2.0 | 3.0)) {
        return Err(call.site.form(
            "powers of integers are supported with the constant exponents 1, 2 and 3 only (cast the base to FLOAT before)",
        ));
    }
    match constant {
        Some(1.0) => Ok(base),
        Some(2.0) => join(b, &call, Binary::Mul, base, base),
        Some(3.0) => {
            let square = join(b, &call, Binary::Mul, base, base)?;
            join(b, &call, Binary::Mul, square, base)
        }
        Some(0.5) => apply(b, &call, Unary::Sqrt, base),
        Some(-1.0) => apply(b, &call, Unary::Reciprocal, base),
        Some(value) if value.abs() < EXPONENT_BELOW => apply(b, &call, Unary::Pow(value), base),
        Some(value) => Err(call.site.form(format!("its exponent is {value}, less than 2^31 is supported"))),
        None => join(b, &call, Binary::Pow, base, exponent),
    }
}

/// Sum, mean, maximum or minimum of any number of inputs.
pub(super) fn several(
    b: &mut Builder,
    call: Call<'_>,
    kind: Binary,
    is_mean: bool,
) -> Result<ValueId, GraphError> {
    let count = call.input_count();
    call.finish(count)?;
    let mut found = call.value(b, 0)?;
    for index in 1..count {
        let next = call.value(b, index)?;
        found = join(b, &call, kind, found, next)?;
    }
    if is_mean {
        found = apply(b, &call, Unary::Scale(1.0 / count as f32), found)?;
    }
    Ok(found)
}

/// A comparison; `swapped` exchanges its sides.
pub(super) fn compare(
    b: &mut Builder,
    call: Call<'_>,
    kind: Compare,
    swapped: bool,
) -> Result<ValueId, GraphError> {
    let (left, right) = (call.value(b, 0)?, call.value(b, 1)?);
    call.finish(2)?;
    let (left, right) = if swapped { (right, left) } else { (left, right) };
    compare_values(b, &call.site, kind, left, right)
}

pub(super) fn compare_values(
    b: &mut Builder,
    site: &NodeRef,
    kind: Compare,
    left: ValueId,
    right: ValueId,
) -> Result<ValueId, GraphError> {
    let dims = shape::broadcast(b.dims(left), b.dims(right), site)?;
    b.push(Op::Compare(kind), &[left, right], dims, site)
}

/// Operators on truth values, which are 0 and 1.
pub(super) fn logic(b: &mut Builder, call: Call<'_>, op: &str) -> Result<ValueId, GraphError> {
    let left = call.value(b, 0)?;
    if op == "Not" {
        call.finish(1)?;
        return not(b, &call.site, left);
    }
    let right = call.value(b, 1)?;
    call.finish(2)?;
    let both = |b: &mut Builder, kind| join(b, &call, kind, left, right);
    match op {
        "And" => both(b, Binary::Mul),
        "Or" => both(b, Binary::Max),
        _ => {
            let equal = compare_values(b, &call.site, Compare::Equal, left, right)?;
            not(b, &call.site, equal)
        }
    }
}

pub(super) fn not(b: &mut Builder, site: &NodeRef, value: ValueId) -> Result<ValueId, GraphError> {
    let zero = b.scalar(0.0, site)?;
    compare_values(b, site, Compare::Equal, value, zero)
}

/// Where an element is no number: it is not equal to itself.
pub(super) fn is_nan(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let value = call.float(b, 0)?;
    call.finish(1)?;
    let number = compare_values(b, &call.site, Compare::Equal, value, value)?;
    not(b, &call.site, number)
}

/// Where an element is infinite, of the signs that the attributes name.
pub(super) fn is_infinite(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let value = call.float(b, 0)?;
    let negative = call.int("detect_negative", 1)? != 0;
    let positive = call.int("detect_positive", 1)? != 0;
    call.finish(1)?;
    let site = call.site.clone();
    let (value, bound) = match (negative, positive) {
        (true, true) => (map(b, &site, Unary::Abs, value)?, f32::INFINITY),
        (false, true) => (value, f32::INFINITY),
        (true, false) => (value, f32::NEG_INFINITY),
        (false, false) => return Err(site.form("it detects neither sign")),
    };
    let bound = b.scalar(bound, &site)?;
    compare_values(b, &site, Compare::Equal, value, bound)
}

/// One of two values for each element of a condition.
pub(super) fn where_(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let (condition, left, right) = (call.value(b, 0)?, call.value(b, 1)?, call.value(b, 2)?);
    call.finish(3)?;
    choose(b, &call.site, condition, left, right)
}

pub(super) fn choose(
    b: &mut Builder,
    site: &NodeRef,
    condition: ValueId,
    left: ValueId,
    right: ValueId,
) -> Result<ValueId, GraphError> {
    let dims = shape::broadcast(b.dims(left), b.dims(right), site)?;
    let dims = shape::broadcast(&dims, b.dims(condition), site)?;
    b.push(Op::Where, &[condition, left, right], dims, site)
}
