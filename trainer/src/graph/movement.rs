//! Operators that cut, repeat, pad and rearrange elements.

use millrace_bundle::onnx::tensor_proto::DataType;

use super::arithmetic::choose;
use super::builder::{Builder, Call, NamedValue, NodeRef};
use super::ints::{Ints, Size};
use super::types::{self, Kind};
use super::{Dim, GraphError, Op, ValueId, shape};

/// Most positions that one operator picks from an axis.
const POSITIONS_MAX: usize = 1 << 20;

/// The part of one axis that a Slice takes.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) axis: usize,
    start: Size,
    end: Size,
    step: i64,
}

impl Cut {
    /// First position and number of positions on an axis of `size`.
    fn range(&self, size: usize, site: &NodeRef) -> Result<(i64, usize), GraphError> {
        let (Some(start), Some(end)) = (self.start.known(), self.end.known()) else {
            return Err(site.form(format!("its bounds on axis {} depend on the number of rows", self.axis)));
        };
        let size = size as i64;
        let place = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
        let (start, end) = if self.step > 0 {
            (place(start).clamp(0, size), place(end).clamp(0, size))
        } else {
            (place(start).clamp(-1, size - 1), place(end).clamp(-1, size - 1))
        };
        let span = if self.step > 0 { end - start } else { start - end };
        let count = if span > 0 { (span as u64).div_ceil(self.step.unsigned_abs()) as usize } else { 0 };
        Ok((start, count))
    }

    /// The positions that it takes of an axis of `size`.
    pub(super) fn places(&self, size: usize, site: &NodeRef) -> Result<Vec<usize>, GraphError> {
        let (start, count) = self.range(size, site)?;
        if count > POSITIONS_MAX {
            return Err(site.form(format!("{count} positions, at most {POSITIONS_MAX} are supported")));
        }
        // Every position is within the axis, hence no sum overflows.
        Ok((0..count as i64).map(|at| (start + at * self.step) as usize).collect())
    }

    /// Whether it takes all rows of a batch.
    fn is_whole(&self, factor: usize) -> bool {
        let all = Size { rows: factor as i64, plain: 0 };
        let reaches = match self.end.known() {
            Some(end) => end >= i64::from(i32::MAX),
            None => self.end.compare(all).is_some_and(std::cmp::Ordering::is_ge),
        };
        self.step == 1 && self.start == Size::plain(0) && reaches
    }
}

/// The cuts of a Slice, whose bounds are attributes before opset 10 and inputs from it on.
pub(super) fn slice_cuts(b: &Builder, call: &mut Call<'_>, rank: usize) -> Result<Vec<Cut>, GraphError> {
    let plain = |values: Vec<i64>| values.into_iter().map(Size::plain).collect::<Vec<_>>();
    let (starts, ends, axes, steps) = if b.opset < 10 {
        let (starts, ends, axes) = (call.ints("starts")?, call.ints("ends")?, call.ints("axes")?);
        call.finish(1)?;
        (plain(starts.unwrap_or_default()), plain(ends.unwrap_or_default()), axes, None)
    } else {
        call.finish(5)?;
        let list = |index: usize| Ok(call.needed_numbers(b, index)?.elements.clone());
        (list(1)?, list(2)?, call.ints_input(b, 3)?, call.ints_input(b, 4)?)
    };
    let count = starts.len();
    let axes = axes.unwrap_or_else(|| (0..count as i64).collect());
    let steps = steps.unwrap_or_else(|| vec![1; count]);
    if [ends.len(), axes.len(), steps.len()] != [count; 3] || steps.contains(&0) {
        return Err(call.site.form("starts, ends, axes and steps do not fit each other"));
    }
    shape::axes(&axes, rank, &call.site)?;
    let mut cuts = Vec::with_capacity(count);
    for at in 0..count {
        let axis = shape::axis(axes[at], rank, &call.site)?;
        cuts.push(Cut { axis, start: starts[at], end: ends[at], step: steps[at] });
    }
    Ok(cuts)
}

pub(super) fn slice(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let mut value = call.float(b, 0)?;
    let cuts = slice_cuts(b, &mut call, b.dims(value).len())?;
    for cut in cuts {
        match b.dims(value)[cut.axis] {
            Dim::Rows(factor) if cut.is_whole(factor) => {}
            Dim::Rows(_) => return Err(call.site.mixes_rows("it takes a part of the batch")),
            Dim::Fixed(size) if cut.step == 1 => {
                let (start, count) = cut.range(size, &call.site)?;
                value = b.slice(value, cut.axis, start.max(0) as usize, count, &call.site)?;
            }
            Dim::Fixed(size) => {
                let positions = cut.places(size, &call.site)?;
                value = select(b, &call.site, value, cut.axis, positions)?;
            }
        }
    }
    Ok(value)
}

/// Appends the elements at positions of a fixed axis.
pub(super) fn select(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    axis: usize,
    positions: Vec<usize>,
) -> Result<ValueId, GraphError> {
    let mut dims = b.dims(value).to_vec();
    if let Some(first) = positions.first()
        && positions.iter().copied().eq(*first..first + positions.len())
    {
        return b.slice(value, axis, *first, positions.len(), site);
    }
    dims[axis] = Dim::Fixed(positions.len());
    // A position takes 8 bytes.
    b.budget.charge(2 * positions.len(), site)?;
    b.push(Op::Select { axis, positions }, &[value], dims, site)
}

/// Consecutive parts of an axis, one for each output.
pub(super) fn split(b: &mut Builder, mut call: Call<'_>) -> Result<Vec<ValueId>, GraphError> {
    let input = call.float(b, 0)?;
    let given = call.int("axis", 0)?;
    let outputs = call.output_count();
    let (parts, inputs) = if b.opset < 13 { (call.ints("split")?, 1) } else { (call.ints_input(b, 1)?, 2) };
    let stated = call.int("num_outputs", outputs as i64)?;
    call.finish_with(inputs, usize::MAX)?;
    let dims = b.dims(input).to_vec();
    let axis = shape::axis(given, dims.len(), &call.site)?;
    let Dim::Fixed(size) = dims[axis] else {
        return Err(call.site.mixes_rows("it splits the batch"));
    };
    let parts = match parts {
        Some(parts) => parts
            .iter()
            .map(|part| usize::try_from(*part).map_err(|_| call.site.shape(format!("a part of {part}"))))
            .collect::<Result<Vec<_>, _>>()?,
        None => {
            let even = size.div_ceil(outputs.max(1));
            (0..outputs).map(|at| even.min(size.saturating_sub(at * even))).collect()
        }
    };
    let total = parts.iter().fold(0usize, |sum, part| sum.saturating_add(*part));
    if stated != outputs as i64 || parts.len() != outputs || total != size {
        return Err(call.site.shape(format!(
            "parts {parts:?} for {outputs} outputs do not cover axis {axis} of {}",
            shape::display(&dims)
        )));
    }
    let mut start = 0;
    parts
        .into_iter()
        .map(|part| {
            let found = b.slice(input, axis, start, part, &call.site);
            start += part;
            found
        })
        .collect()
}

pub(super) fn pad(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let rank = b.dims(input).len();
    let mode = call.string("mode")?.unwrap_or_else(|| "constant".to_owned());
    let (pads, value, axes) = if b.opset < 11 {
        let (pads, value) = (call.ints("pads")?, call.float_attribute("value", 0.0)?);
        call.finish(1)?;
        (pads, value, None)
    } else {
        call.finish(4)?;
        (call.ints_input(b, 1)?, call.constant_scalar(b, 2)?.unwrap_or(0.0), call.ints_input(b, 3)?)
    };
    let pads = pads.ok_or_else(|| call.site.form("pads are missing"))?;
    let axes = match axes {
        Some(axes) => {
            shape::axes(&axes, rank, &call.site)?;
            axes.iter().map(|axis| shape::axis(*axis, rank, &call.site)).collect::<Result<Vec<_>, _>>()?
        }
        None => (0..rank).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err(call.site.form(format!("pads = {pads:?} for {} axes", axes.len())));
    }
    let mut value_id = input;
    let (mut before, mut after) = (vec![0; rank], vec![0; rank]);
    for (at, axis) in axes.iter().enumerate() {
        let sides = [pads[at], pads[at + axes.len()]];
        let Dim::Fixed(size) = b.dims(value_id)[*axis] else {
            if sides == [0, 0] {
                continue;
            }
            return Err(call.site.mixes_rows("it pads the batch"));
        };
        // A negative pad removes elements.
        let cut = sides.map(|side| usize::try_from(side.min(0).unsigned_abs()).unwrap_or(usize::MAX));
        let left = size.saturating_sub(cut[0]).saturating_sub(cut[1]);
        value_id = b.slice(value_id, *axis, cut[0].min(size), left, &call.site)?;
        let added = sides.map(|side| usize::try_from(side.max(0)).unwrap_or(usize::MAX));
        if added.iter().any(|side| *side > POSITIONS_MAX) {
            return Err(call.site.form(format!("pads = {pads:?}")));
        }
        (before[*axis], after[*axis]) = (added[0], added[1]);
    }
    if mode == "constant" {
        return surround(b, &call.site, value_id, before, &after, value);
    }
    for axis in axes {
        if before[axis] == 0 && after[axis] == 0 {
            continue;
        }
        let size = b.dims(value_id)[axis].at(1) as i64;
        let positions = -(before[axis] as i64)..size + after[axis] as i64;
        if positions.end - positions.start > POSITIONS_MAX as i64 {
            return Err(call.site.form(format!("pads = {pads:?}")));
        }
        let place = |at: i64| match mode.as_str() {
            "edge" => Some(at.clamp(0, size - 1)),
            "wrap" => Some(at.rem_euclid(size)),
            // The edge itself is not repeated.
            "reflect" if size > 1 => {
                let at = at.rem_euclid(2 * (size - 1));
                Some(if at < size { at } else { 2 * (size - 1) - at })
            }
            _ => None,
        };
        let positions: Option<Vec<usize>> = positions.map(|at| place(at).map(|at| at as usize)).collect();
        let positions = positions.ok_or_else(|| {
            call.site.form(format!("mode = {mode:?} with pads {pads:?} is not supported here"))
        })?;
        value_id = select(b, &call.site, value_id, axis, positions)?;
    }
    Ok(value_id)
}

/// Appends a constant around a value.
pub(super) fn surround(
    b: &mut Builder,
    site: &NodeRef,
    input: ValueId,
    before: Vec<usize>,
    after: &[usize],
    value: f32,
) -> Result<ValueId, GraphError> {
    if before.iter().chain(after).all(|side| *side == 0) {
        return Ok(input);
    }
    let mut dims = b.dims(input).to_vec();
    for (axis, dim) in dims.iter_mut().enumerate() {
        if let Dim::Fixed(size) = dim {
            *size = size.saturating_add(before[axis]).saturating_add(after[axis]);
        }
    }
    b.push(Op::Pad { before, value }, &[input], dims, site)
}

/// The value repeated along its axes.
pub(super) fn tile(b: &mut Builder, call: Call<'_>) -> Result<ValueId, GraphError> {
    let mut value = call.float(b, 0)?;
    let repeats = call.needed_numbers(b, 1)?.clone();
    call.finish(2)?;
    let rank = b.dims(value).len();
    if repeats.elements.len() != rank || rank >= shape::RANK_MAX {
        return Err(call.site.form(format!(
            "{} repeats for {}",
            repeats.elements.len(),
            shape::display(b.dims(value))
        )));
    }
    for (axis, times) in repeats.elements.iter().enumerate() {
        let mut dims = b.dims(value).to_vec();
        if *times == Size::plain(1) {
            continue;
        }
        // An axis of 1 may also become the rows of the batch.
        let times = times.dim().ok_or_else(|| call.site.form("a repeat is not above 0"))?;
        match (dims[axis], times) {
            (Dim::Fixed(1), times) => {
                dims[axis] = times;
                value = b.expand(value, dims, &call.site)?;
            }
            // By the rows: blocks of a constant size, one for each row, as DeBERTa repeats its positions.
            (Dim::Fixed(size), by @ (Dim::Fixed(times) | Dim::Rows(times)))
                if matches!(by, Dim::Fixed(_)) || shape::rows_axis(&dims).is_none() =>
            {
                let merged = size
                    .checked_mul(times)
                    .ok_or_else(|| call.site.shape(format!("{times} repeats of {size}")))?;
                let mut wide = dims.clone();
                wide.insert(axis, Dim::Fixed(1));
                value = b.reshape(value, wide.clone(), &call.site)?;
                wide[axis] = by;
                value = b.expand(value, wide, &call.site)?;
                dims[axis] = match by {
                    Dim::Fixed(_) => Dim::Fixed(merged),
                    Dim::Rows(_) => Dim::Rows(merged),
                };
                value = b.reshape(value, dims, &call.site)?;
            }
            _ => return Err(call.site.mixes_rows("it repeats the batch")),
        }
    }
    Ok(value)
}

/// Blocks of channels to spatial positions.
pub(super) fn depth_to_space(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let size = call.int("blocksize", 0)?;
    let mode = call.string("mode")?.unwrap_or_else(|| "DCR".to_owned());
    call.finish(1)?;
    let (rows, [channels, height, width], block) = blocks(b, &call.site, input, size)?;
    let square = block.checked_mul(block).filter(|square| channels % square == 0);
    let Some(square) = square else {
        return Err(call.site.shape(format!("blocks of {block} do not divide {channels} channels")));
    };
    let inner = channels / square;
    let (wide, order) = match mode.as_str() {
        "DCR" => ([block, block, inner, height, width], vec![0, 3, 4, 1, 5, 2]),
        "CRD" => ([inner, block, block, height, width], vec![0, 1, 4, 2, 5, 3]),
        _ => return Err(call.site.form(format!("mode = {mode:?} is not known"))),
    };
    rearrange(b, &call.site, input, rows, wide, order, [inner, height * block, width * block])
}

/// Blocks of spatial positions to channels.
pub(super) fn space_to_depth(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let size = call.int("blocksize", 0)?;
    call.finish(1)?;
    let (rows, [channels, height, width], block) = blocks(b, &call.site, input, size)?;
    if height % block != 0 || width % block != 0 {
        return Err(call.site.shape(format!("blocks of {block} do not divide {height} × {width}")));
    }
    let (down, across) = (height / block, width / block);
    let wide = [channels, down, block, across, block];
    let deep = channels.saturating_mul(block).saturating_mul(block);
    rearrange(b, &call.site, input, rows, wide, vec![0, 3, 5, 1, 2, 4], [deep, down, across])
}

fn blocks(
    b: &Builder,
    site: &NodeRef,
    input: ValueId,
    size: i64,
) -> Result<(Dim, [usize; 3], usize), GraphError> {
    let dims = b.dims(input);
    let block = usize::try_from(size).ok().filter(|size| (1..=1 << 15).contains(size));
    match (dims, block) {
        ([rows, Dim::Fixed(channels), Dim::Fixed(height), Dim::Fixed(width)], Some(block)) => {
            Ok((*rows, [*channels, *height, *width], block))
        }
        _ => Err(site.form(format!("blocks of {size} in {}", shape::display(dims)))),
    }
}

fn rearrange(
    b: &mut Builder,
    site: &NodeRef,
    input: ValueId,
    rows: Dim,
    wide: [usize; 5],
    order: Vec<usize>,
    out: [usize; 3],
) -> Result<ValueId, GraphError> {
    let dims = |sizes: &[usize]| {
        std::iter::once(rows).chain(sizes.iter().copied().map(Dim::Fixed)).collect::<Vec<_>>()
    };
    let apart = b.reshape(input, dims(&wide), site)?;
    let moved = b.permute(apart, order, site)?;
    b.reshape(moved, dims(&out), site)
}

/// Which elements of a matrix a Trilu keeps.
pub(super) fn trilu_mask(
    b: &Builder,
    call: &mut Call<'_>,
) -> Result<impl Fn(usize, usize) -> bool + use<>, GraphError> {
    let upper = call.int("upper", 1)? != 0;
    let offset = call.int_input(b, 1)?.unwrap_or(0);
    call.finish(2)?;
    Ok(move |row: usize, column: usize| {
        let distance = column as i64 - row as i64;
        if upper { distance >= offset } else { distance <= offset }
    })
}

/// The triangle of a matrix; the rest becomes 0.
pub(super) fn trilu(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let keep = trilu_mask(b, &mut call)?;
    let dims = b.dims(input);
    let [.., Dim::Fixed(rows), Dim::Fixed(columns)] = *dims else {
        return Err(call.site.shape(format!("{} is not a matrix in its last axes", shape::display(dims))));
    };
    Ints::count(&[rows, columns], &call.site)?;
    let mask = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
    let mask = mask.map(|(row, column)| if keep(row, column) { 1.0 } else { 0.0 }).collect();
    let mask = b.constant(&[rows, columns], mask, &call.site)?;
    let zero = b.scalar(0.0, &call.site)?;
    choose(b, &call.site, mask, input, zero)
}

/// Sums along an axis, as a product with a triangle of ones.
pub(super) fn cumulative_sum(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let given = call.int_input(b, 1)?.ok_or_else(|| call.site.form("its axis is missing"))?;
    let exclusive = call.int("exclusive", 0)? != 0;
    let reverse = call.int("reverse", 0)? != 0;
    call.finish(2)?;
    let axis = shape::axis(given, b.dims(input).len(), &call.site)?;
    let Dim::Fixed(size) = b.dims(input)[axis] else {
        return Err(call.site.mixes_rows("it sums over the batch"));
    };
    let pairs = Ints::count(&[size, size], &call.site)?;
    let counts = |at: usize| {
        let (from, to) = if reverse { (at % size, at / size) } else { (at / size, at % size) };
        from < to || from == to && !exclusive
    };
    let triangle = (0..pairs).map(|at| if counts(at) { 1.0 } else { 0.0 }).collect();
    along_axis(b, &call.site, input, axis, [size, size], triangle)
}

/// A matrix of the input's shape with ones on a diagonal.
pub(super) fn eye_like(
    b: &mut Builder,
    mut call: Call<'_>,
    element: DataType,
) -> Result<NamedValue, GraphError> {
    let shift = call.int("k", 0)?;
    call.int("dtype", 0)?;
    call.finish(1)?;
    let dims: Vec<Dim> = match call.value_id(b, 0) {
        Some(value) => b.dims(value).to_vec(),
        None => call.needed_numbers(b, 0)?.dims.iter().copied().map(Dim::Fixed).collect(),
    };
    let [Dim::Fixed(rows), Dim::Fixed(columns)] = dims[..] else {
        return Err(call.site.shape(format!("{} is no matrix of a constant size", shape::display(&dims))));
    };
    let count = Ints::count(&[rows, columns], &call.site)?;
    let is_one = |at: usize| (at % columns) as i64 == ((at / columns) as i64).saturating_add(shift);
    let ones = (0..count).map(|at| i64::from(is_one(at)));
    if types::kind(element) == Kind::Float {
        let ones = ones.map(|one| one as f32).collect();
        return b.constant(&[rows, columns], ones, &call.site).map(NamedValue::Float);
    }
    let ones: Vec<i64> = ones.collect();
    Ok(NamedValue::Ints(Ints::of(vec![rows, columns], &ones)))
}

/// Appends the product of an axis of `from` elements with a constant matrix `[from, to]`.
pub(super) fn along_axis(
    b: &mut Builder,
    site: &NodeRef,
    value: ValueId,
    axis: usize,
    [from, to]: [usize; 2],
    matrix: Vec<f32>,
) -> Result<ValueId, GraphError> {
    let rank = b.dims(value).len();
    let mut shape = vec![1; rank.saturating_sub(2)];
    shape.extend([from, to]);
    let matrix = b.constant(&shape, matrix, site)?;
    let mut order: Vec<usize> = (0..rank).collect();
    order.swap(axis, rank - 1);
    let mut turned = b.permute(value, order.clone(), site)?;
    let mut dims = b.dims(turned).to_vec();
    dims[rank - 1] = Dim::Fixed(to);
    if rank == 1 {
        turned = b.reshape(turned, vec![Dim::Fixed(1), Dim::Fixed(from)], site)?;
        let product = b.push(Op::MatMul, &[turned, matrix], vec![Dim::Fixed(1), Dim::Fixed(to)], site)?;
        return b.reshape(product, dims, site);
    }
    let product = b.push(Op::MatMul, &[turned, matrix], dims, site)?;
    b.permute(product, order, site)
}
