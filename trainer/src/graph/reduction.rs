//! Reductions over axes that do not hold the batch.

use super::arithmetic::{choose, compare_values, join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::{Binary, Compare, Dim, GraphError, Op, Unary, ValueId, shape};

/// Most elements that ReduceProd multiplies: it becomes one product per element.
const FACTORS_MAX: usize = 256;

/// What a reduction computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    Sum,
    Mean,
    Max,
    Min,
    Prod,
    L1,
    L2,
    LogSum,
    LogSumExp,
    SumSquare,
}

impl Reduction {
    /// The first operator set whose axes are an input.
    fn axes_are_input_from(self) -> i64 {
        if self == Reduction::Sum { 13 } else { 18 }
    }
}

pub(super) fn reduce(b: &mut Builder, mut call: Call<'_>, kind: Reduction) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let rank = b.dims(input).len();
    let keep = call.int("keepdims", 1)? != 0;
    let (given, inputs) = if b.opset >= kind.axes_are_input_from() {
        (call.ints_input(b, 1)?, 2)
    } else {
        (call.ints("axes")?, 1)
    };
    let none_is_identity = call.int("noop_with_empty_axes", 0)? != 0;
    call.finish(inputs)?;
    let axes = match given.filter(|axes| !axes.is_empty()) {
        Some(axes) => shape::axes(&axes, rank, &call.site)?,
        // No element joins another one: the largest, the sum, the mean and the product of one element are itself.
        None if none_is_identity => match kind {
            Reduction::L1 | Reduction::L2 | Reduction::LogSum | Reduction::SumSquare => vec![],
            _ => return Ok(input),
        },
        None => (0..rank).collect(),
    };
    fold(b, &call.site, kind, input, &axes, keep)
}

/// Appends a reduction.
pub(super) fn fold(
    b: &mut Builder,
    site: &NodeRef,
    kind: Reduction,
    input: ValueId,
    axes: &[usize],
    keep: bool,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(input).to_vec();
    if axes.iter().any(|axis| matches!(dims[*axis], Dim::Rows(_))) {
        return Err(site.mixes_rows("it reduces over the batch"));
    }
    let reduced = |axis: &usize| axes.contains(axis);
    let target: Vec<Dim> = dims
        .iter()
        .enumerate()
        .filter(|(axis, _)| keep || !reduced(axis))
        .map(|(axis, dim)| if reduced(&axis) { Dim::Fixed(1) } else { *dim })
        .collect();
    let sum = |b: &mut Builder, value| {
        if axes.is_empty() {
            Ok(value)
        } else {
            b.push(Op::Sum(axes.to_vec()), &[value], target.clone(), site)
        }
    };
    let largest = |b: &mut Builder, value, dims: Vec<Dim>| {
        if axes.is_empty() { Ok(value) } else { b.push(Op::Max(axes.to_vec()), &[value], dims, site) }
    };
    match kind {
        Reduction::Sum => sum(b, input),
        Reduction::Mean if axes.is_empty() => Ok(input),
        Reduction::Mean => b.push(Op::Mean(axes.to_vec()), &[input], target, site),
        Reduction::Max => largest(b, input, target.clone()),
        Reduction::Min => {
            let turned = map(b, site, Unary::Neg, input)?;
            let found = largest(b, turned, target.clone())?;
            map(b, site, Unary::Neg, found)
        }
        Reduction::L1 => {
            let sizes = map(b, site, Unary::Abs, input)?;
            sum(b, sizes)
        }
        Reduction::SumSquare | Reduction::L2 => {
            let squares = join_at(b, site, Binary::Mul, input, input)?;
            let total = sum(b, squares)?;
            if kind == Reduction::L2 { map(b, site, Unary::Root, total) } else { Ok(total) }
        }
        Reduction::LogSum => {
            let total = sum(b, input)?;
            map(b, site, Unary::Log, total)
        }
        Reduction::LogSumExp => {
            // The largest element is subtracted first, so that no power overflows.
            let kept =
                (0..dims.len()).map(|axis| if reduced(&axis) { Dim::Fixed(1) } else { dims[axis] }).collect();
            let most = largest(b, input, kept)?;
            // An infinite one would leave no number; it is the result.
            let size = map(b, site, Unary::Abs, most)?;
            let (zero, infinity) = (b.scalar(0.0, site)?, b.scalar(f32::INFINITY, site)?);
            let is_infinite = compare_values(b, site, Compare::Equal, size, infinity)?;
            let base = choose(b, site, is_infinite, zero, most)?;
            let kept = choose(b, site, is_infinite, zero, input)?;
            let lower = join_at(b, site, Binary::Sub, kept, base)?;
            let powers = map(b, site, Unary::Exp, lower)?;
            let total = sum(b, powers)?;
            let log = map(b, site, Unary::Log, total)?;
            let [most, base, is_infinite] =
                [most, base, is_infinite].map(|value| b.reshape(value, target.clone(), site));
            let finite = join_at(b, site, Binary::Add, log, base?)?;
            choose(b, site, is_infinite?, most?, finite)
        }
        Reduction::Prod => product(b, site, input, axes, target),
    }
}

/// One multiplication after another, in order.
fn product(
    b: &mut Builder,
    site: &NodeRef,
    input: ValueId,
    axes: &[usize],
    target: Vec<Dim>,
) -> Result<ValueId, GraphError> {
    let mut found = input;
    for axis in axes {
        let Dim::Fixed(size) = b.dims(found)[*axis] else {
            return Err(site.mixes_rows("it reduces over the batch"));
        };
        if size > FACTORS_MAX {
            return Err(site.form(format!(
                "a product of {size} elements, at most {FACTORS_MAX} are supported (sum their logarithms instead)"
            )));
        }
        let mut all = b.slice(found, *axis, 0, 1, site)?;
        for start in 1..size {
            let next = b.slice(found, *axis, start, 1, site)?;
            all = join_at(b, site, Binary::Mul, all, next)?;
        }
        found = all;
    }
    b.reshape(found, target, site)
}

/// The largest or mean element of all dimensions after rows and channels, kept as 1.
pub(super) fn global_pool(b: &mut Builder, call: Call<'_>, kind: Reduction) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    call.finish(1)?;
    let rank = b.dims(input).len();
    if rank < 3 {
        return Err(call.site.shape(format!("{} has no dimension to pool", shape::display(b.dims(input)))));
    }
    let axes: Vec<usize> = (2..rank).collect();
    fold(b, &call.site, kind, input, &axes, true)
}
