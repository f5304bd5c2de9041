//! Elements at positions along an axis: GatherElements, ScatterElements, ScatterND, TopK, ArgMax, ArgMin, OneHot.
//!
//! Positions are whole numbers that are known, fed as an input, or found in a computed value. The engine takes them
//! without a check, hence a model is read only if all of them are within the axis: constants are compared, inputs get a
//! bound, what TopK finds is within the axis that it searched, and the range of computed ones is known (`ranges.rs`).

use std::collections::HashSet;
use std::rc::Rc;

use super::arithmetic::{choose, compare_values, map};
use super::builder::{Builder, Call, NamedValue, NodeRef};
use super::ints::strides;
use super::movement::select;
use super::ranges;
use super::read::INDEX_BELOW;
use super::types::{self, Kind};
use super::{Compare, Dim, GraphError, Op, Source, Unary, ValueId, shape};

/// Positions within an axis.
struct Positions {
    value: ValueId,
    /// Whether no position is twice in a line along the axis.
    distinct: bool,
}

/// The largest or smallest elements along an axis, and their positions.
pub(super) fn top(b: &mut Builder, mut call: Call<'_>) -> Result<Vec<ValueId>, GraphError> {
    let input = call.value(b, 0)?;
    let given = call.int("axis", -1)?;
    let largest = call.int("largest", 1)? != 0;
    // The order of unsorted ones is free.
    call.int("sorted", 1)?;
    let (count, inputs) = match b.opset {
        ..10 => (call.int("k", -1)?, 1),
        _ => (call.int_input(b, 1)?.ok_or_else(|| call.site.form("the number of elements is missing"))?, 2),
    };
    call.finish_with(inputs, 2)?;
    let (axis, size) = fixed_axis(b, &call.site, input, given)?;
    let count = usize::try_from(count).ok().filter(|count| (1..=size).contains(count)).ok_or_else(|| {
        call.site.shape(format!("{count} elements of axis {axis} of {}", shape::display(b.dims(input))))
    })?;
    let positions = rank(b, &call.site, input, Op::Rank { axis, largest, last: false }, count)?;
    let values = pick(b, &call.site, input, axis, positions)?;
    Ok(vec![values, positions])
}

/// The position of the largest or smallest element along an axis.
pub(super) fn extreme(b: &mut Builder, mut call: Call<'_>, largest: bool) -> Result<ValueId, GraphError> {
    let input = call.value(b, 0)?;
    let given = call.int("axis", 0)?;
    let keep = call.int("keepdims", 1)? != 0;
    let last = call.int("select_last_index", 0)? != 0;
    call.finish(1)?;
    let (axis, _) = fixed_axis(b, &call.site, input, given)?;
    let found = rank(b, &call.site, input, Op::Rank { axis, largest, last }, 1)?;
    if keep {
        return Ok(found);
    }
    let mut dims = b.dims(found).to_vec();
    dims.remove(axis);
    b.reshape(found, dims, &call.site)
}

fn rank(
    b: &mut Builder,
    site: &NodeRef,
    input: ValueId,
    op: Op,
    count: usize,
) -> Result<ValueId, GraphError> {
    let mut dims = b.dims(input).to_vec();
    if let Op::Rank { axis, .. } = op {
        dims[axis] = Dim::Fixed(count);
    }
    b.push(op, &[input], dims, site)
}

/// An axis that does not hold the batch, and its size, which float32 positions tell apart.
fn fixed_axis(b: &Builder, site: &NodeRef, value: ValueId, given: i64) -> Result<(usize, usize), GraphError> {
    let dims = b.dims(value);
    let axis = shape::axis(given, dims.len(), site)?;
    match dims[axis] {
        Dim::Rows(_) => Err(site.mixes_rows("its axis is the batch")),
        Dim::Fixed(size) if size > INDEX_BELOW as usize => Err(site.form(format!(
            "positions in an axis of {size}: they are float32 numbers, which tell at most {INDEX_BELOW} apart"
        ))),
        Dim::Fixed(size) => Ok((axis, size)),
    }
}

/// Appends the elements at positions along an axis; both values have equal sizes along the others.
pub(super) fn pick(
    b: &mut Builder,
    site: &NodeRef,
    data: ValueId,
    axis: usize,
    positions: ValueId,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(positions).to_vec();
    b.push(Op::Pick(axis), &[data, positions], dims, site)
}

pub(super) fn gather_elements(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let mut data = call.value(b, 0)?;
    let given = call.int("axis", 0)?;
    call.finish(2)?;
    let (axis, size) = fixed_axis(b, &call.site, data, given)?;
    let positions = positions(b, &call, axis, size)?.value;
    // Positions may cover the first elements of another axis only.
    let wanted = b.dims(positions).to_vec();
    for (at, (from, to)) in b.dims(data).to_vec().into_iter().zip(&wanted).enumerate() {
        if let (Dim::Fixed(from), Dim::Fixed(to)) = (from, to)
            && at != axis
            && *to < from
        {
            data = b.slice(data, at, 0, *to, &call.site)?;
        }
    }
    check_shape(b, &call.site, data, axis, positions)?;
    pick(b, &call.site, data, axis, positions)
}

pub(super) fn scatter_elements(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let data = call.value(b, 0)?;
    let given = call.int("axis", 0)?;
    let adds = adds(&mut call)?;
    call.finish(3)?;
    let (axis, size) = fixed_axis(b, &call.site, data, given)?;
    let Positions { value: positions, distinct } = positions(b, &call, axis, size)?;
    let updates = call.value(b, 2)?;
    if matches!(b.dims(positions)[axis], Dim::Rows(_)) {
        return Err(call.site.mixes_rows("it writes elements of all rows into one tensor"));
    }
    check_shape(b, &call.site, data, axis, positions)?;
    if b.dims(updates) != b.dims(positions) {
        return Err(call.site.shape(format!(
            "{} elements for positions {}",
            shape::display(b.dims(updates)),
            shape::display(b.dims(positions))
        )));
    }
    let dims = b.dims(data).to_vec();
    let put = |b: &mut Builder, into: ValueId, elements: ValueId| {
        b.push(Op::Put(axis), &[into, positions, elements], dims.clone(), &call.site)
    };
    if adds {
        return put(b, data, updates);
    }
    if !distinct {
        return Err(call.site.form(
            "its positions may repeat, and ONNX does not say which element stays (use reduction = \"add\", or positions \
             of TopK or constant ones along the same axis)",
        ));
    }
    let (zero, one) = (b.scalar(0.0, &call.site)?, b.scalar(1.0, &call.site)?);
    let zeros = b.expand(zero, dims.clone(), &call.site)?;
    let ones = b.expand(one, b.dims(positions).to_vec(), &call.site)?;
    let is_new = put(b, zeros, ones)?;
    let found = put(b, zeros, updates)?;
    choose(b, &call.site, is_new, found, data)
}

/// Whether elements are added to those that they meet; otherwise they replace them.
fn adds(call: &mut Call<'_>) -> Result<bool, GraphError> {
    match call.string("reduction")?.as_deref() {
        None | Some("none") => Ok(false),
        Some("add") => Ok(true),
        Some(other) => {
            Err(call.site.form(format!("reduction = {other:?} is not supported, none and add are")))
        }
    }
}

/// Parts at constant positions along the first axes, replaced or added to.
pub(super) fn scatter_nd(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let (data, updates) = (call.value(b, 0)?, call.value(b, 2)?);
    let adds = adds(&mut call)?;
    call.finish(3)?;
    let site = call.site.clone();
    if !call.is_ints(b, 1) {
        return Err(site.form("its positions are computed, constant ones are supported"));
    }
    let positions = call.needed_numbers(b, 1)?.clone();
    let known = positions.known().ok_or_else(|| site.form("its positions depend on the number of rows"))?;
    let dims = b.dims(data).to_vec();
    let [outer @ .., depth] = &positions.dims[..] else {
        return Err(site.shape("its positions are a scalar"));
    };
    if *depth == 0 || *depth > dims.len() {
        return Err(site.shape(format!("positions of {depth} axes of {}", shape::display(&dims))));
    }
    let (placed, rest) = dims.split_at(*depth);
    if shape::rows_axis(placed).is_some() {
        return Err(site.mixes_rows("it changes rows of the batch"));
    }
    let mut wanted: Vec<Dim> = outer.iter().copied().map(Dim::Fixed).collect();
    wanted.extend(rest);
    if b.dims(updates) != wanted {
        return Err(site.shape(format!(
            "{} elements where positions take {}",
            shape::display(b.dims(updates)),
            shape::display(&wanted)
        )));
    }
    let (count, changes) = (shape::check(placed, &site)?, known.len() / depth);
    if adds && count > INDEX_BELOW as usize {
        return Err(site.form(format!(
            "positions among {count} parts: they are float32 numbers, which tell at most {INDEX_BELOW} apart"
        )));
    }
    b.budget.charge(2 * count.saturating_add(changes), &site)?;
    if adds {
        let mut places = Vec::with_capacity(changes);
        for place in known.chunks(*depth) {
            places.push(flat_place(place, placed, &site)? as f32);
        }
        return add_parts(b, &site, [data, updates], [count, changes], rest, places);
    }
    // Without a change, the place behind all changes.
    let mut sources = vec![changes; count];
    for (at, place) in known.chunks(*depth).enumerate() {
        let place = flat_place(place, placed, &site)?;
        if std::mem::replace(&mut sources[place], at) != changes {
            return Err(site.form("it changes an element twice, which is not supported"));
        }
    }
    let flat = |size: usize| [&[Dim::Fixed(size)][..], rest].concat();
    let data = b.reshape(data, flat(count), &site)?;
    let updates = b.reshape(updates, flat(changes), &site)?;
    let all = b.push(Op::Concat(0), &[updates, data], flat(changes + count), &site)?;
    let sources = sources.into_iter().enumerate();
    let kept = sources.map(|(place, source)| if source == changes { changes + place } else { source });
    let found = select(b, &site, all, 0, kept.collect())?;
    b.reshape(found, dims, &site)
}

/// The place of a position of several axes among all positions of them.
fn flat_place(position: &[i64], axes: &[Dim], site: &NodeRef) -> Result<usize, GraphError> {
    position.iter().zip(axes).try_fold(0, |flat, (position, dim)| {
        let size = dim.at(1);
        Ok(flat * size + shape::axis(*position, size, site)?)
    })
}

/// Adds updates to parts of the data at `places` among the first `count` ones; places may repeat, as in `index_add`.
fn add_parts(
    b: &mut Builder,
    site: &NodeRef,
    [data, updates]: [ValueId; 2],
    [count, changes]: [usize; 2],
    rest: &[Dim],
    places: Vec<f32>,
) -> Result<ValueId, GraphError> {
    let dims = b.dims(data).to_vec();
    let flat = |size: usize| [&[Dim::Fixed(size)][..], rest].concat();
    let data = b.reshape(data, flat(count), site)?;
    let updates = b.reshape(updates, flat(changes), site)?;
    let mut own = vec![1; rest.len() + 1];
    own[0] = changes;
    let places = b.constant(&own, places, site)?;
    let places = b.expand(places, flat(changes), site)?;
    let found = b.push(Op::Put(0), &[data, places, updates], flat(count), site)?;
    b.reshape(found, dims, site)
}

/// One value at a position along a new axis, another one elsewhere.
pub(super) fn one_hot(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let positions = call.value(b, 0)?;
    let given = call.int("axis", -1)?;
    call.finish(3)?;
    let site = call.site.clone();
    let depth = call.constant_scalar(b, 1)?.ok_or_else(|| site.form("its depth is missing"))?;
    if !(1.0..=INDEX_BELOW as f32).contains(&depth) {
        return Err(site.form(format!("depth = {depth}: allowed are 1 to {INDEX_BELOW}")));
    }
    let depth = depth as usize;
    let Some((_, values)) = call.constant(b, 2)? else { return Err(site.form("its values are missing")) };
    let [off, on] = values[..] else {
        return Err(site.form(format!("{} values, two are needed", values.len())));
    };
    let mut dims = b.dims(positions).to_vec();
    let axis = shape::axis(given, dims.len() + 1, &site)?;
    dims.insert(axis, Dim::Fixed(1));
    let positions = b.reshape(positions, dims, &site)?;
    let mut own = vec![1; b.dims(positions).len()];
    own[axis] = depth;
    let places = b.constant(&own, (0..depth).map(|at| at as f32).collect(), &site)?;
    // Positions below 0 count from the end; those beyond both ends are no position.
    let zero = b.scalar(0.0, &site)?;
    let below = compare_values(b, &site, Compare::Less, positions, zero)?;
    let turned = map(b, &site, Unary::Shift(depth as f32), positions)?;
    let positions = choose(b, &site, below, turned, positions)?;
    let equal = compare_values(b, &site, Compare::Equal, positions, places)?;
    let (off, on) = (b.scalar(off, &site)?, b.scalar(on, &site)?);
    choose(b, &site, equal, on, off)
}

/// Refuses positions whose sizes along the other axes are not those of the data.
fn check_shape(
    b: &Builder,
    site: &NodeRef,
    data: ValueId,
    axis: usize,
    positions: ValueId,
) -> Result<(), GraphError> {
    let (from, to) = (b.dims(data), b.dims(positions));
    let fits = |at: usize| match (from[at], to[at]) {
        (from, to) if at != axis => from == to,
        // Rows of positions in a table.
        (_, Dim::Rows(_)) => shape::rows_axis(from).is_none(),
        _ => true,
    };
    if from.len() == to.len() && (0..to.len()).all(fits) {
        return Ok(());
    }
    Err(site.shape(format!(
        "positions {} along axis {axis} of {}; the other axes must be equal",
        shape::display(to),
        shape::display(from)
    )))
}

/// The positions at input 1, within an axis of `size`.
fn positions(b: &mut Builder, call: &Call<'_>, axis: usize, size: usize) -> Result<Positions, GraphError> {
    let site = &call.site;
    let rank = b.names.get(call.input_name(1)).map(|named| match named {
        NamedValue::Float(value) => b.dims(*value).len(),
        NamedValue::Ints(ints) => ints.dims.len(),
    });
    if rank.is_some_and(|rank| axis >= rank) {
        return Err(site.shape(format!("its positions have no axis {axis}")));
    }
    if call.element(b, 1).is_none_or(|element| types::kind(element) != Kind::Integer) {
        return Err(site.form("its positions are no integers (cast them to INT64 before)"));
    }
    if call.is_ints(b, 1) {
        let ints = call.needed_numbers(b, 1)?.clone();
        let known = ints.known().ok_or_else(|| site.form("its positions depend on the number of rows"))?;
        let places = known.iter().map(|position| shape::axis(*position, size, site));
        let places = places.collect::<Result<Vec<usize>, _>>()?;
        let distinct = are_distinct(&ints.dims, axis, &places);
        let places = places.into_iter().map(|place| place as f32).collect();
        return Ok(Positions { value: b.constant(&ints.dims, places, site)?, distinct });
    }
    let value = call.float(b, 1)?;
    if let Some(origin) = b.origins.get(&value).map(Rc::clone) {
        for place in origin.iter() {
            let below = &mut b.index_bounds[*place as usize];
            *below = (*below).min(size as u32);
        }
        let distinct = b.dims(value)[axis] == Dim::Fixed(1);
        return Ok(Positions { value, distinct });
    }
    let Some((found, is_turned)) = ranges::within(b, site, value, size as u32)? else {
        return Err(match ranges::range(b, value) {
            Some((low, high)) => site.shape(format!("positions from {low} to {high} on an axis of {size}")),
            None => site.form(
                "its positions are computed; constant ones, those of an integer input, of TopK, ArgMax and ArgMin, and \
                 those whose range follows from such ones are supported",
            ),
        });
    };
    // A position may be given from both ends.
    let distinct = if is_turned { b.dims(value)[axis] == Dim::Fixed(1) } else { is_distinct(b, value, axis) };
    Ok(Positions { value: found, distinct })
}

/// Whether no element is twice in a line of a value along an axis.
fn is_distinct(b: &Builder, value: ValueId, axis: usize) -> bool {
    if b.dims(value)[axis] == Dim::Fixed(1) {
        return true;
    }
    match b.node_of(value) {
        Some(node) => match node.op {
            Op::Rank { axis: searched, .. } => searched == axis,
            // A constant that is repeated along other axes.
            Op::Expand => {
                let from = b.dims(node.inputs[0]);
                let Some(own) = (axis + from.len()).checked_sub(b.dims(value).len()) else { return false };
                match &b.values[node.inputs[0]].source {
                    Source::Constant(elements) if from[own] == b.dims(value)[axis] => {
                        let dims: Vec<usize> = from.iter().map(|dim| dim.at(1)).collect();
                        let places: Vec<usize> = elements.iter().map(|element| *element as usize).collect();
                        are_distinct(&dims, own, &places)
                    }
                    _ => false,
                }
            }
            _ => false,
        },
        None => false,
    }
}

/// Whether no position is twice in a line along an axis.
fn are_distinct(dims: &[usize], axis: usize, places: &[usize]) -> bool {
    let strides = strides(dims);
    let line = |at: usize| at - at / strides[axis] % dims[axis] * strides[axis];
    let mut seen = HashSet::new();
    places.iter().enumerate().all(|(at, place)| seen.insert((line(at), *place)))
}
