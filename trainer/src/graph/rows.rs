//! Numbers of rows in the batch, as exporters write `x[torch.arange(rows), places]`.
//!
//! No row of a batch may depend on its number. But a value at the row's own number is one of the row itself. The graph
//! holds such a value without that number, and [`RowNumber`] says what is missing. A few operators keep it: they change
//! the shape, add, or multiply by a constant. A gather at the row's own number takes the parts of that row. Every other
//! operator refuses the value.

use millrace_bundle::onnx::NodeProto;
use millrace_bundle::onnx::tensor_proto::DataType;

use super::builder::{Builder, Call, NamedValue, NodeRef};
use super::ints::Size;
use super::positions::pick;
use super::read::INDEX_BELOW;
use super::{Binary, Dim, GraphError, Op, Unary, ValueId, arithmetic, linear, ranges, shape, sizes};

/// What an element of a value lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowNumber {
    /// The number of its row, times this one.
    Times(i64),
    /// Something that depends on the number of its row: only the shape may be read.
    Unknown,
    /// The elements of all planes before its own. The value is a place in a plane.
    Plane {
        /// Height and width.
        size: [usize; 2],
        /// Whether no place is twice in a plane.
        is_distinct: bool,
    },
    /// A first position of several along the last axis, which is the number of its row.
    First,
}

/// The refusal of a value that lacks the number of its row.
pub(super) fn refusal(site: &NodeRef) -> GraphError {
    site.mixes_rows(
        "it reads the number of a row; only parts of the row itself may be taken at it, as in x[torch.arange(rows), places]",
    )
}

/// The refusal of a value that lacks `number`.
pub(super) fn refusal_of(site: &NodeRef, number: RowNumber) -> GraphError {
    match number {
        RowNumber::Plane { .. } => site.mixes_rows(
            "it reads the places that a MaxPool found, which ONNX counts from the start of the batch; only MaxUnpool may \
             read them",
        ),
        _ => refusal(site),
    }
}

/// Lowers a node whose output or inputs hold numbers of rows. `None` if neither does, or if the node keeps none.
pub(super) fn lower(
    b: &mut Builder,
    node: &NodeProto,
    element: DataType,
) -> Result<Option<NamedValue>, GraphError> {
    let call = Call::new(node);
    if node.op_type() == "Range" {
        return Ok(range(b, &call)?.map(NamedValue::Float));
    }
    if b.row_numbers.is_empty() {
        return Ok(None);
    }
    let view: &Builder = b;
    let numbers: Vec<Option<RowNumber>> = (0..call.input_count())
        .map(|index| call.value_id(view, index).and_then(|value| view.row_numbers.get(&value).copied()))
        .collect();
    if numbers.iter().all(Option::is_none) {
        return Ok(None);
    }
    if node.op_type() == "Shape" {
        return apart(b, &call, |b| sizes::shape_of(b, Call::new(node))).map(Some);
    }
    match (node.op_type(), &numbers[..]) {
        ("GatherND", [None, Some(RowNumber::First)]) => {
            return parts(b, call).map(|found| Some(NamedValue::Float(found)));
        }
        ("Gather", [None, Some(RowNumber::Times(times))]) => {
            return lines(b, call, *times).map(|found| Some(NamedValue::Float(found)));
        }
        ("Concat", [Some(RowNumber::Times(1)), rest @ ..])
            if !rest.is_empty() && rest.iter().all(Option::is_none) =>
        {
            let found = behind(b, call)?;
            b.row_numbers.insert(found, RowNumber::First);
            return Ok(Some(NamedValue::Float(found)));
        }
        _ => {}
    }
    let Some(kept) = kept(b, &call, &numbers, element)? else { return Ok(None) };
    let found = apart(b, &call, |b| {
        let call = Call::new(node);
        match node.op_type() {
            "Add" => arithmetic::binary(b, call, Binary::Add),
            "Sub" => arithmetic::binary(b, call, Binary::Sub),
            "Mul" => arithmetic::binary(b, call, Binary::Mul),
            "Max" => arithmetic::several(b, call, Binary::Max, false),
            "Min" => arithmetic::several(b, call, Binary::Min, false),
            "Reshape" => linear::reshape(b, call),
            "Flatten" => linear::flatten(b, call),
            "Squeeze" => linear::squeeze(b, call),
            "Unsqueeze" => linear::unsqueeze(b, call),
            "Expand" => {
                let site = call.site.clone();
                float(&site, sizes::expand(b, call)?)
            }
            _ => {
                let site = call.site.clone();
                float(&site, sizes::cast(b, call, element)?)
            }
        }
    })?;
    b.row_numbers.insert(found, kept);
    Ok(Some(NamedValue::Float(found)))
}

/// The value of an output that is not known ahead.
fn float(site: &NodeRef, named: NamedValue) -> Result<ValueId, GraphError> {
    match named {
        NamedValue::Float(value) => Ok(value),
        NamedValue::Ints(_) => Err(refusal(site)),
    }
}

/// What `change` makes of the inputs as if they lacked nothing.
fn apart<T>(
    b: &mut Builder,
    call: &Call<'_>,
    change: impl FnOnce(&mut Builder) -> Result<T, GraphError>,
) -> Result<T, GraphError> {
    let view: &Builder = b;
    let values: Vec<ValueId> =
        (0..call.input_count()).filter_map(|index| call.value_id(view, index)).collect();
    let held: Vec<(ValueId, RowNumber)> =
        values.into_iter().filter_map(|value| b.row_numbers.remove_entry(&value)).collect();
    let found = change(b);
    b.row_numbers.extend(held);
    found
}

/// What the output of a node lacks whose inputs lack `numbers`; `None` if the node keeps no numbers of rows.
fn kept(
    b: &Builder,
    call: &Call<'_>,
    numbers: &[Option<RowNumber>],
    element: DataType,
) -> Result<Option<RowNumber>, GraphError> {
    let is_place =
        |number: &Option<RowNumber>| matches!(number, Some(RowNumber::First | RowNumber::Plane { .. }));
    if numbers.iter().any(is_place) {
        return Ok(None);
    }
    let times = |index: usize| match numbers.get(index).copied().flatten() {
        None => Some(0),
        Some(RowNumber::Times(times)) => Some(times),
        Some(RowNumber::Unknown | RowNumber::First | RowNumber::Plane { .. }) => None,
    };
    let counted = |times: Option<i64>| times.map_or(RowNumber::Unknown, RowNumber::Times);
    Ok(match (call.site.op.as_str(), numbers) {
        ("Reshape" | "Flatten" | "Squeeze" | "Unsqueeze" | "Expand", [number, ..]) => *number,
        ("Cast", [number]) if matches!(element, DataType::Int64 | DataType::Int32) => *number,
        ("Max" | "Min", _) => Some(RowNumber::Unknown),
        ("Add", [_, _]) => {
            Some(counted(times(0).zip(times(1)).and_then(|(first, second)| first.checked_add(second))))
        }
        ("Sub", [_, _]) => {
            Some(counted(times(0).zip(times(1)).and_then(|(first, second)| first.checked_sub(second))))
        }
        ("Mul", [first, second]) if first.is_none() || second.is_none() => {
            let (number, other) = if first.is_some() { (times(0), 1) } else { (times(1), 0) };
            let factor =
                if call.is_ints(b, other) { equal(&call.needed_numbers(b, other)?.elements) } else { None };
            Some(counted(number.zip(factor).and_then(|(number, factor)| number.checked_mul(factor))))
        }
        _ => None,
    })
}

/// The number that all sizes are.
fn equal(sizes: &[Size]) -> Option<i64> {
    let first = sizes.first()?.known()?;
    sizes.iter().all(|size| *size == Size::plain(first)).then_some(first)
}

/// A Range over the rows from 0 on, by steps of 1; `None` if it is none.
fn range(b: &mut Builder, call: &Call<'_>) -> Result<Option<ValueId>, GraphError> {
    if !call.all_ints(b) || call.input_count() != 3 {
        return Ok(None);
    }
    let limit = match call.needed_numbers(b, 1)?.elements[..] {
        [Size { rows, plain: 0 }] if rows > 0 => rows,
        _ => return Ok(None),
    };
    let (start, step) = (call.needed_numbers(b, 0)?, call.needed_numbers(b, 2)?);
    if equal(&start.elements) != Some(0) || equal(&step.elements) != Some(1) {
        return Ok(None);
    }
    call.finish(3)?;
    // Each row has `count` numbers, and those of the rows before it come first.
    let count = usize::try_from(limit).ok().filter(|count| *count <= INDEX_BELOW as usize);
    let count = count.ok_or_else(|| call.site.form(format!("{limit} positions in each row")))?;
    b.budget.check(count, &call.site)?;
    let dims = vec![Dim::Rows(1), Dim::Fixed(count)];
    shape::check(&dims, &call.site)?;
    let own = b.constant(&[1, count], (0..count).map(|at| at as f32).collect(), &call.site)?;
    let all = b.expand(own, dims, &call.site)?;
    let found = b.reshape(all, vec![Dim::Rows(count)], &call.site)?;
    b.row_numbers.insert(found, RowNumber::Times(limit));
    Ok(Some(found))
}

/// The positions behind the number of a row, which is the first one.
fn behind(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let given = call.int("axis", 0)?;
    let count = call.input_count();
    call.finish(count)?;
    let site = call.site.clone();
    let number = call.value_id(b, 0).ok_or_else(|| refusal(&site))?;
    let dims = b.dims(number).to_vec();
    let axis = shape::axis(given, dims.len(), &site)?;
    if axis + 1 != dims.len() || dims[axis] != Dim::Fixed(1) || ranges::range(b, number) != Some((0.0, 0.0)) {
        return Err(refusal(&site));
    }
    let mut rest = Vec::with_capacity(count);
    let mut total = 0usize;
    for index in 1..count {
        let value = call.value(b, index)?;
        let own = b.dims(value);
        let Some((Dim::Fixed(size), _)) = own.split_last().filter(|(_, outer)| **outer == dims[..axis])
        else {
            return Err(site.shape(format!(
                "{} and {} do not join at axis {axis}",
                shape::display(&dims),
                shape::display(own)
            )));
        };
        total = total.saturating_add(*size);
        rest.push(value);
    }
    let mut joined = dims;
    joined[axis] = Dim::Fixed(total);
    match rest[..] {
        // A value of its own: the positions themselves lack nothing.
        [single] => b.push(Op::Reshape, &[single], joined, &site),
        _ => b.push(Op::Concat(axis), &rest, joined, &site),
    }
}

/// Whether the rows come first, apart from axes of 1.
fn begins_with_rows(dims: &[Dim]) -> bool {
    shape::rows_axis(dims)
        .is_some_and(|axis| dims[axis] == Dim::Rows(1) && shape::elements_at(&dims[..axis], 1) == 1)
}

/// Parts of the row itself at positions of its first axes.
fn parts(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let data = call.value(b, 0)?;
    let places = call.value_id(b, 1).ok_or_else(|| refusal(&call.site))?;
    call.only("batch_dims", 0)?;
    call.finish(2)?;
    let site = call.site.clone();
    own_parts(b, &site, data, places)
}

/// Parts of the row itself at positions `[rows, …, axes]` of the axes behind the rows.
pub(super) fn own_parts(
    b: &mut Builder,
    site: &NodeRef,
    data: ValueId,
    places: ValueId,
) -> Result<ValueId, GraphError> {
    let (dims, places_dims) = (b.dims(data).to_vec(), b.dims(places).to_vec());
    let Some((Dim::Fixed(depth), outer)) = places_dims.split_last() else { return Err(refusal(site)) };
    if dims.first() != Some(&Dim::Rows(1)) || !begins_with_rows(outer) || *depth >= dims.len() {
        return Err(refusal(site));
    }
    let (picked, rest) = dims[1..].split_at(*depth);
    let mut flat: Option<ValueId> = None;
    for (at, size) in picked.iter().enumerate() {
        let size = size.at(1);
        let place = b.slice(places, places_dims.len() - 1, at, 1, site)?;
        let place = within(b, site, place, size, true)?;
        flat = Some(match flat {
            Some(flat) => {
                let start = arithmetic::map(b, site, Unary::Scale(size as f32), flat)?;
                arithmetic::join_at(b, site, Binary::Add, start, place)?
            }
            None => place,
        });
    }
    let flat = flat.ok_or_else(|| refusal(site))?;
    let target = [outer, rest].concat();
    take(b, site, data, [shape::check(picked, site)?, shape::check(rest, site)?], flat, target)
}

/// Elements of the first axis, of which each row has its own, at `times` the number of the row and more.
fn lines(b: &mut Builder, mut call: Call<'_>, times: i64) -> Result<ValueId, GraphError> {
    let data = call.value(b, 0)?;
    let places = call.value_id(b, 1).ok_or_else(|| refusal(&call.site))?;
    let given = call.int("axis", 0)?;
    call.finish(2)?;
    let site = call.site.clone();
    let (dims, outer) = (b.dims(data).to_vec(), b.dims(places).to_vec());
    let size = match dims.first() {
        Some(Dim::Rows(size)) if *size as i64 == times => *size,
        _ => return Err(refusal(&site)),
    };
    if shape::axis(given, dims.len(), &site)? != 0 || !begins_with_rows(&outer) {
        return Err(refusal(&site));
    }
    // A position below 0 would be one of the row before.
    let places = within(b, &site, places, size, false)?;
    let target = [&outer[..], &dims[1..]].concat();
    take(b, &site, data, [size, shape::check(&dims[1..], &site)?], places, target)
}

/// Positions on an axis of `size`, which may count from its end if that is `allowed`.
fn within(
    b: &mut Builder,
    site: &NodeRef,
    places: ValueId,
    size: usize,
    allowed: bool,
) -> Result<ValueId, GraphError> {
    let bound = u32::try_from(size).map_err(|_| site.shape(format!("an axis of {size}")))?;
    match ranges::within(b, site, places, bound)? {
        Some((found, is_turned)) if allowed || !is_turned => Ok(found),
        _ => Err(site.form(format!(
            "its positions in each row are computed, and their range is not known to be within an axis of {size}; constant \
             ones, whole numbers of an int64 input, and those whose range follows from such ones are supported"
        ))),
    }
}

/// The parts of `inner` elements of each row's `size` ones at positions `[rows, …]`, in the shape `target`.
fn take(
    b: &mut Builder,
    site: &NodeRef,
    data: ValueId,
    [size, inner]: [usize; 2],
    places: ValueId,
    target: Vec<Dim>,
) -> Result<ValueId, GraphError> {
    if size > INDEX_BELOW as usize {
        return Err(site.form(format!(
            "{size} positions in each row: they are float32 numbers, which tell at most {INDEX_BELOW} apart"
        )));
    }
    let row = Dim::Rows(1);
    let count = shape::elements_at(b.dims(places), 1);
    let data = b.reshape(data, vec![row, Dim::Fixed(size), Dim::Fixed(inner)], site)?;
    let places = b.reshape(places, vec![row, Dim::Fixed(count), Dim::Fixed(1)], site)?;
    let places = b.expand(places, vec![row, Dim::Fixed(count), Dim::Fixed(inner)], site)?;
    let found = pick(b, site, data, 1, places)?;
    b.reshape(found, target, site)
}
