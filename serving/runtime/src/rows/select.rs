//! Row rules for operators that select or combine elements along axes other than the axis of the rows.

use super::call::{Call, Outcome, axis_in};
use super::elementwise::place_of_rows;
use super::extent::Extent;
use super::value::Value;

/// Ends of slices that mean the end of the axis.
const ENDS: [i64; 2] = [i64::MAX, i32::MAX as i64];

pub(super) fn concat(call: &Call<'_>) -> Outcome {
    let values = (0..call.inputs.len()).map(|place| call.data(place)).collect::<Result<Vec<_>, _>>()?;
    let Some(first) = values.first() else { return Err("it has no inputs".into()) };
    let rank = first.rank()?;
    let axis = axis_in(call.int("axis", 1), rank)?;
    if values.iter().any(|value| value.rank() != Ok(rank)) {
        return Err("its inputs differ in rank".into());
    }
    let rows = place_of_rows(&values)?.map(|(from_end, outer)| (rank - from_end, outer));
    let mut dims = first.extents()?.to_vec();
    if let Some((rows, _)) = &rows {
        if *rows == axis {
            return Err("it concatenates tensors along the rows".into());
        }
        if values.iter().any(|value| value.is_free()) {
            return Err("it concatenates a constant with rows".into());
        }
    }
    let mut along = values.iter().map(|value| value.extents().ok()?[axis].as_known());
    let sum = along.try_fold(0i64, |sum, extent| sum.checked_add(extent?));
    dims[axis] = sum.map_or_else(|| call.fresh(), Extent::known);
    Ok(vec![match rows {
        Some((axis, outer)) => Value::rows(axis, outer, dims),
        None => Value::free(Some(dims)),
    }])
}

pub(super) fn split(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let axis = axis_in(call.int("axis", 0), dims.len())?;
    not_along_rows(data, axis)?;
    let (given, sizes) = if call.opset < 13 {
        (call.has("split"), call.ints("split").map(<[i64]>::to_vec))
    } else {
        (call.free_if_given(1)?.is_some(), call.numbers(1).ok())
    };
    // Outputs without a name also take a part.
    let count = call.node.output.len();
    let part = |number: usize| {
        let extent = match &sizes {
            Some(sizes) => sizes.get(number).map(|size| Extent::known(*size)),
            None if given || (call.opset >= 18 && call.has("num_outputs")) => None,
            None => i64::try_from(count).ok().and_then(|count| dims[axis].divided_by(&Extent::known(count))),
        };
        let mut dims = dims.to_vec();
        dims[axis] = extent.unwrap_or_else(|| call.fresh());
        data.like(data.axis().map_or(0, |(rows, _)| rows), dims)
    };
    Ok((0..count).map(part).collect())
}

pub(super) fn slice(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let given = |place: usize, name: &str| -> Result<Option<Vec<Option<i64>>>, String> {
        if call.opset < 10 {
            return Ok(call.ints(name).map(|numbers| numbers.iter().copied().map(Some).collect()));
        }
        match call.given(place) {
            None => Ok(None),
            Some(_) => Ok(match call.entries(place) {
                Ok(entries) => Some(entries.iter().map(|entry| entry.as_number()).collect()),
                Err(_) => {
                    call.free(place)?;
                    None
                }
            }),
        }
    };
    let of_rows = |place: usize| {
        call.entries(place).is_ok_and(|entries| entries.iter().any(|entry| entry.is_of_rows()))
    };
    let (starts, ends) = (given(1, "starts")?, given(2, "ends")?);
    let steps = given(4, "steps")?;
    let axes = match given(3, "axes")? {
        Some(axes) => axes
            .into_iter()
            .map(|axis| axis_in(axis.ok_or("its axes are not known")?, dims.len()))
            .collect::<Result<Vec<_>, _>>()?,
        None if call.opset >= 10 && call.given(3).is_some() => return Err("its axes are not known".into()),
        None => (0..starts.as_ref().ok_or("its places are not known")?.len()).collect(),
    };
    let differs = |numbers: &Option<Vec<Option<i64>>>| {
        numbers.as_ref().is_some_and(|numbers| numbers.len() != axes.len())
    };
    if differs(&starts) || differs(&ends) || differs(&steps) {
        return Err("its starts, ends, axes and steps differ in number".into());
    }
    let mut made = dims.to_vec();
    for (place, axis) in axes.into_iter().enumerate() {
        let at =
            |numbers: &Option<Vec<Option<i64>>>| numbers.as_ref().and_then(|numbers| *numbers.get(place)?);
        let step = if steps.is_none() && call.given(4).is_none() { Some(1) } else { at(&steps) };
        let all =
            at(&starts) == Some(0) && at(&ends).is_some_and(|end| ENDS.contains(&end)) && step == Some(1);
        if all {
            continue;
        }
        not_along_rows(data, axis)?;
        let extent = dims.get(axis).and_then(Extent::as_known).filter(|extent| *extent >= 0);
        let sliced = match (extent, at(&starts), at(&ends), step) {
            (Some(extent), Some(start), Some(end), Some(1)) => {
                let bound = |bound: i64| {
                    (if bound < 0 { bound.saturating_add(extent) } else { bound }).clamp(0, extent)
                };
                Some(Extent::known((bound(end) - bound(start)).max(0)))
            }
            _ => None,
        };
        *made.get_mut(axis).ok_or("its axes are not those of its input")? =
            sliced.unwrap_or_else(|| call.fresh());
    }
    if call.opset >= 10 && [1, 2, 4].into_iter().any(of_rows) {
        return Err("its indices depend on the number of rows".into());
    }
    Ok(vec![data.like(data.axis().map_or(0, |(rows, _)| rows), made)])
}

pub(super) fn gather(call: &Call<'_>) -> Outcome {
    let (data, places) = (call.data(0)?, call.data(1)?);
    let (dims, found) = (data.extents()?, places.extents()?);
    let axis = axis_in(call.int("axis", 0), dims.len())?;
    let made = [&dims[..axis], found, &dims[axis + 1..]].concat();
    Ok(vec![match (data.axis(), places.axis()) {
        (None, None) => Value::free(Some(made)),
        (None, Some((rows, outer))) => Value::rows(axis + rows, outer.clone(), made),
        (Some((rows, outer)), None) => {
            not_along_rows(data, axis)?;
            let moved = if rows < axis { rows } else { rows + found.len() - 1 };
            Value::rows(moved, outer.clone(), made)
        }
        (Some(_), Some(_)) => return Err("rows choose from other rows".into()),
    }])
}

/// `GatherElements` and `ScatterElements`: an index refers to an axis, at its own position along the other axes.
pub(super) fn elements(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let rank = data.rank()?;
    let axis = axis_in(call.int("axis", 0), rank)?;
    let values = (0..call.inputs.len()).map(|place| call.data(place)).collect::<Result<Vec<_>, _>>()?;
    let made = if call.operator() == "GatherElements" { call.data(1)? } else { data };
    let Some((rows, outer)) = data.axis() else {
        call.free_from(1)?;
        return Ok(vec![Value::free(made.dims.clone())]);
    };
    not_along_rows(data, axis)?;
    let together = |value: &&Value| {
        value.axis() == Some((rows, outer))
            && value.rank() == Ok(rank)
            && value.extents().is_ok_and(|dims| data.extents().is_ok_and(|own| own[rows] == dims[rows]))
    };
    if !values.iter().all(together) {
        return Err("its inputs do not have the same rows along the same axis".into());
    }
    Ok(vec![made.same_shape()])
}

/// Indexes are tuples along the first axes, or along the axes after `batch_dims`.
pub(super) fn gather_nd(call: &Call<'_>) -> Outcome {
    let (data, places) = (call.data(0)?, call.data(1)?);
    let (dims, found) = (data.extents()?, places.extents()?);
    let batch_dims = usize::try_from(call.int("batch_dims", 0)).map_err(|_| "its batch_dims is below 0")?;
    let last = found.last().and_then(Extent::as_known).and_then(|last| usize::try_from(last).ok());
    let rest = dims.get(batch_dims + last.ok_or("the length of its indexes is not known")?..);
    let made =
        [&found[..found.len() - 1], rest.ok_or("its indexes are longer than its input's rank")?].concat();
    Ok(vec![match (data.axis(), places.axis()) {
        (None, None) => Value::free(Some(made)),
        (None, Some((rows, outer))) if batch_dims == 0 && rows + 1 < found.len() => {
            Value::rows(rows, outer.clone(), made)
        }
        (Some((rows, outer)), Some((other, also)))
            if rows == other && outer == also && rows < batch_dims && dims[rows] == found[rows] =>
        {
            Value::rows(rows, outer.clone(), made)
        }
        _ => return Err("rows choose from other rows".into()),
    }])
}

pub(super) fn one_hot(call: &Call<'_>) -> Outcome {
    let labels = call.data(0)?;
    let dims = labels.extents()?;
    call.free(1)?;
    call.free(2)?;
    let axis = axis_in(call.int("axis", -1), dims.len() + 1)?;
    let depth = call.given(1).and_then(Value::numbers).and_then(|depth| depth.first().copied());
    let mut made = dims.to_vec();
    made.insert(axis, depth.map_or_else(|| call.fresh(), Extent::known));
    Ok(vec![labels.like(labels.axis().map_or(0, |(rows, _)| rows + usize::from(axis <= rows)), made)])
}

pub(super) fn top_k(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let axis = axis_in(call.int("axis", -1), dims.len())?;
    not_along_rows(data, axis)?;
    let count = if call.opset < 10 {
        Some(call.int("k", 0))
    } else {
        call.free(1)?.numbers().and_then(|count| count.first().copied())
    };
    let mut made = dims.to_vec();
    made[axis] = count.map_or_else(|| call.fresh(), Extent::known);
    let value = data.like(data.axis().map_or(0, |(rows, _)| rows), made);
    Ok(vec![value.clone(), value])
}

pub(super) fn pad(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let pads = if call.opset < 11 {
        call.ints("pads").ok_or("its pads are missing")?.to_vec()
    } else {
        call.free_if_given(2)?;
        call.numbers(1)?
    };
    let axes = match call.given(3) {
        Some(_) if call.opset >= 18 => {
            let axes = call.numbers(3)?;
            axes.iter().map(|axis| axis_in(*axis, dims.len())).collect::<Result<Vec<_>, _>>()?
        }
        _ => (0..dims.len()).collect(),
    };
    if pads.len() != 2 * axes.len() {
        return Err("its pads are not two for each axis".into());
    }
    let mut made = dims.to_vec();
    for (place, axis) in axes.iter().enumerate() {
        let (before, after) = (pads[place], pads[place + axes.len()]);
        if (before, after) == (0, 0) {
            continue;
        }
        not_along_rows(data, *axis)?;
        let extent = dims[*axis].as_known().and_then(|extent| extent.checked_add(before)?.checked_add(after));
        made[*axis] = extent.map_or_else(|| call.fresh(), Extent::known);
    }
    Ok(vec![data.like(data.axis().map_or(0, |(rows, _)| rows), made)])
}

/// Reverses the first steps of each row, up to its length.
pub(super) fn reverse_sequence(call: &Call<'_>) -> Outcome {
    let (data, lengths) = (call.data(0)?, call.data(1)?);
    let rank = data.rank()?;
    let (batch, time) = (axis_in(call.int("batch_axis", 1), rank)?, axis_in(call.int("time_axis", 0), rank)?);
    match (data.axis(), lengths.axis()) {
        (None, None) => {}
        (Some((rows, outer)), Some((0, also))) if rows == batch && rows != time && outer == also => {}
        _ => return Err("its lengths are not one for each row".into()),
    }
    Ok(vec![data.same_shape()])
}

/// Numbers from a start to a limit.
pub(super) fn range(call: &Call<'_>) -> Outcome {
    if call.inputs.iter().flatten().any(|value| !value.is_free()) {
        return Err("it counts the rows".into());
    }
    let limit = call.given(1).and_then(Value::entries).and_then(<[_]>::first);
    let one = |place: usize| {
        call.given(place).and_then(Value::numbers).and_then(|numbers| numbers.first().copied())
    };
    let extent = match limit {
        Some(super::extent::Entry::Known(extent))
            if one(0) == Some(0) && one(2) == Some(1) && extent.is_natural() =>
        {
            extent.clone()
        }
        _ => call.fresh(),
    };
    Ok(vec![Value::free(Some(vec![extent]))])
}

/// One triangle of the matrices in the last two axes.
pub(super) fn triangle(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    let data = call.data(0)?;
    let rank = data.rank()?;
    if data.axis().is_some_and(|(rows, _)| rows + 2 >= rank) {
        return Err("it treats rows as a side of a matrix".into());
    }
    Ok(vec![data.same_shape()])
}

/// Requires that `axis` is not the axis of the rows.
pub(super) fn not_along_rows(data: &Value, axis: usize) -> Result<(), String> {
    match data.axis() {
        Some((rows, _)) if rows == axis => Err("it works along the rows".into()),
        _ => Ok(()),
    }
}
