//! Row rules for operators that change shape or element order: the rows must remain one axis.

use super::call::{Call, Outcome, axis_in};
use super::elementwise::wider;
use super::extent::{Entry, Extent};
use super::value::Value;

/// Reshapes; an element of the shape may be -1 (inferred) or 0 (copied).
pub(super) fn reshape(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let target =
        if call.opset < 5 { return Err("its operator set is too old".into()) } else { call.entries(1) };
    if data.is_free() && target.as_ref().is_ok_and(|target| target.iter().all(|entry| !entry.is_of_rows())) {
        return Ok(vec![Value::free(target.ok().and_then(|target| free_dims(call, data, target)))]);
    }
    let target = target?;
    let dims = data.extents()?;
    let keeps_zero = call.int("allowzero", 0) != 0;
    let extent = |(place, entry): (usize, &Entry)| match entry {
        Entry::Known(extent) if extent.as_known() == Some(0) && !keeps_zero => dims
            .get(place)
            .cloned()
            .map(Some)
            .ok_or_else(|| format!("its shape copies axis {place}, which is not there")),
        Entry::Known(extent) if extent.as_known() == Some(-1) => Ok(None),
        Entry::Known(extent) if extent.is_natural() && extent.as_known() != Some(0) => {
            Ok(Some(extent.clone()))
        }
        _ => Err("its shape is not known".to_owned()),
    };
    let target = target.iter().enumerate().map(extent).collect::<Result<Vec<_>, _>>()?;
    let Some((axis, outer)) = data.axis() else {
        return Err("it gives a constant a shape with the number of rows".into());
    };
    Ok(vec![in_shape(call, dims, (axis, outer), target)?])
}

/// Extents of a constant after a reshape, as far as they are known.
fn free_dims(call: &Call<'_>, data: &Value, target: &[Entry]) -> Option<Vec<Extent>> {
    let before = data.dims.as_deref();
    let mut rest = before.and_then(Extent::product);
    let mut dims = Vec::with_capacity(target.len());
    for (place, entry) in target.iter().enumerate() {
        let extent = match entry {
            Entry::Known(extent) if extent.as_known() == Some(0) && call.int("allowzero", 0) == 0 => {
                before.and_then(|before| before.get(place).cloned())
            }
            Entry::Known(extent) if extent.is_natural() => Some(extent.clone()),
            _ => None,
        };
        if let Some(extent) = &extent {
            rest = rest.and_then(|rest| rest.divided_by(extent));
        }
        dims.push(extent);
    }
    let rest = if dims.iter().filter(|extent| extent.is_none()).count() == 1 { rest } else { None };
    Some(dims.into_iter().map(|extent| extent.or(rest.clone()).unwrap_or_else(|| call.fresh())).collect())
}

/// Reshapes a value with rows; one extent of the target may be inferred.
fn in_shape(
    call: &Call<'_>,
    dims: &[Extent],
    (axis, outer): (usize, &Extent),
    target: Vec<Option<Extent>>,
) -> Result<Value, String> {
    const TOO_LARGE: &str = "its shape is too large";
    if target.iter().filter(|extent| extent.is_none()).count() > 1 {
        return Err("its shape is not known".into());
    }
    let all = Extent::product(dims).ok_or(TOO_LARGE)?;
    let known = Extent::product(target.iter().flatten()).ok_or(TOO_LARGE)?;
    if known.batches() > 1 {
        return Err("its shape has the number of rows twice".into());
    }
    // ONNX Runtime may replace a computed extent by -1 and then does not detect the mismatch.
    if target.iter().all(Option::is_some) && all.differs_from(&known) {
        return Err("its shape does not fit its input".into());
    }
    let left = all.divided_by(&known);
    let target: Vec<Extent> = target
        .into_iter()
        .map(|extent| match (extent, &left) {
            (Some(extent), _) => Ok(extent),
            (None, Some(left)) => Ok(left.clone()),
            // The inferred extent contains no rows, so it is the same in every run.
            (None, None) if known.batches() == 1 => Ok(call.fresh()),
            (None, None) => Err("its shape may cut a row apart".to_owned()),
        })
        .collect::<Result<_, _>>()?;
    let Some(place) = target.iter().position(|extent| extent.batches() == 1) else {
        return Err("its shape fixes the number of rows".into());
    };
    // In memory order: elements before the rows, the rows, the elements of a row.
    let before = Extent::product(&dims[..axis]).and_then(|before| before.times(outer)).ok_or(TOO_LARGE)?;
    let before_now = Extent::product(&target[..place]).ok_or(TOO_LARGE)?;
    let outer =
        before.divided_by(&before_now).ok_or("its shape splits or merges the rows with other axes")?;
    let inner =
        target[place].divided_by(&outer).ok_or("its shape splits or merges the rows with other axes")?;
    if inner.batches() != 1 {
        return Err("its shape splits or merges the rows with other axes".into());
    }
    Ok(Value::rows(place, outer, target))
}

/// Merges all axes before `axis` into one, and all others into another.
pub(super) fn flatten(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let axis = match call.int("axis", 1) {
        axis if usize::try_from(axis) == Ok(dims.len()) => dims.len(),
        axis => axis_in(axis, dims.len())?,
    };
    let (before, after) = dims.split_at(axis);
    let sides = [before, after].map(Extent::product);
    let [Some(before), Some(after)] = sides else { return Err("its shape is too large".into()) };
    let target = vec![before, after];
    Ok(vec![match data.axis() {
        None => Value::free(Some(target)),
        Some(rows) => in_shape(call, dims, rows, target.into_iter().map(Some).collect())?,
    }])
}

pub(super) fn transpose(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let order = match call.ints("perm") {
        None => (0..dims.len()).rev().collect(),
        Some(order) => order.iter().map(|axis| axis_in(*axis, dims.len())).collect::<Result<Vec<_>, _>>()?,
    };
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..dims.len()) {
        return Err("its list of axes is not a permutation".into());
    }
    let axis = data.axis().and_then(|(axis, _)| order.iter().position(|from| *from == axis)).unwrap_or(0);
    Ok(vec![data.like(axis, order.iter().map(|from| dims[*from].clone()).collect())])
}

pub(super) fn squeeze(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    // An empty list means the same as no list.
    let Some(axes) = call.axes(1, 13)?.filter(|axes| !axes.is_empty()) else {
        if data.is_free() && dims.iter().all(|extent| extent.as_known().is_some()) {
            return Ok(vec![Value::free(Some(
                dims.iter().filter(|extent| !extent.is_one()).cloned().collect(),
            ))]);
        }
        return Err(
            "it drops every axis of extent 1, which removes the rows of a request with one row".into()
        );
    };
    let axes = axes.iter().map(|axis| axis_in(*axis, dims.len())).collect::<Result<Vec<_>, _>>()?;
    let kept: Vec<usize> = (0..dims.len()).filter(|axis| !axes.contains(axis)).collect();
    let axis = match data.axis() {
        None => 0,
        Some((axis, _)) => {
            kept.iter().position(|kept| *kept == axis).ok_or("it drops the axis of the rows")?
        }
    };
    Ok(vec![data.like(axis, kept.iter().map(|axis| dims[*axis].clone()).collect())])
}

pub(super) fn unsqueeze(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let axes = call.axes(1, 13)?.ok_or("its axes are missing")?;
    let rank = dims.len() + axes.len();
    let axes = axes.iter().map(|axis| axis_in(*axis, rank)).collect::<Result<Vec<_>, _>>()?;
    let mut from = dims.iter().enumerate();
    let (mut moved, mut made) = (0, Vec::with_capacity(rank));
    for axis in 0..rank {
        if axes.contains(&axis) {
            made.push(Extent::known(1));
        } else if let Some((old, extent)) = from.next() {
            if data.axis().is_some_and(|(rows, _)| rows == old) {
                moved = axis;
            }
            made.push(extent.clone());
        }
    }
    if made.len() != rank || from.next().is_some() {
        return Err("its axes are not those of a tensor".into());
    }
    Ok(vec![data.like(moved, made)])
}

/// Broadcasts extents of 1 to a shape.
pub(super) fn expand(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let target = call.entries(1)?;
    let rank = dims.len().max(target.len());
    let own = |axis: usize| (axis + dims.len()).checked_sub(rank).map(|own| &dims[own]);
    let wanted = |axis: usize| (axis + target.len()).checked_sub(rank).map(|place| &target[place]);
    let rows = data.axis().map(|(axis, outer)| (axis + rank - dims.len(), outer.clone()));
    let mut found = rows;
    let one = Extent::known(1);
    let mut made = Vec::with_capacity(rank);
    for axis in 0..rank {
        let own = own(axis).unwrap_or(&one);
        let is_rows = found.as_ref().is_some_and(|(rows, _)| *rows == axis) && own.batches() > 0;
        made.push(match wanted(axis) {
            None => own.clone(),
            Some(Entry::Known(extent)) if extent.is_one() || extent == own => own.clone(),
            Some(_) if is_rows => return Err("it stretches the rows".into()),
            Some(Entry::Known(extent)) if extent.batches() == 1 => {
                if !own.is_one() || found.is_some() {
                    return Err("it stretches another axis to the number of rows".into());
                }
                found = Some((axis, one.clone()));
                extent.clone()
            }
            Some(entry) if entry.is_of_rows() => return Err("its shape depends on the number of rows".into()),
            Some(Entry::Known(extent)) if extent.is_natural() => wider(call, own, extent),
            Some(_) => call.fresh(),
        });
    }
    Ok(vec![match found {
        Some((axis, outer)) => Value::rows(axis, outer, made),
        None => Value::free(Some(made)),
    }])
}

/// One number repeated in a shape.
pub(super) fn filled(call: &Call<'_>) -> Outcome {
    let Ok(shape) = call.entries(0) else {
        call.free(0)?;
        return Ok(vec![Value::free(None)]);
    };
    let mut rows = None;
    let mut dims = Vec::with_capacity(shape.len());
    for (axis, entry) in shape.iter().enumerate() {
        match entry {
            Entry::Known(extent) if extent.is_natural() => {
                if extent.batches() > 1 || (extent.batches() == 1 && rows.replace(axis).is_some()) {
                    return Err("its shape has the number of rows twice".into());
                }
                dims.push(extent.clone());
            }
            entry if entry.is_of_rows() => return Err("its shape depends on the number of rows".into()),
            _ => dims.push(call.fresh()),
        }
    }
    Ok(vec![match rows {
        Some(axis) => Value::rows(axis, Extent::known(1), dims),
        None => Value::free(Some(dims)),
    }])
}

/// Repeats a tensor along its axes.
pub(super) fn tile(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = data.extents()?;
    let repeats = call.entries(1)?;
    if repeats.len() != dims.len() {
        return Err("its repeats are not one for each axis".into());
    }
    let mut rows = data.axis().map(|(axis, outer)| (axis, outer.clone()));
    let mut made = Vec::with_capacity(dims.len());
    for (axis, (extent, repeat)) in dims.iter().zip(repeats).enumerate() {
        let is_rows = data.axis().is_some_and(|(rows, _)| rows == axis);
        made.push(match repeat {
            Entry::Known(repeat) if repeat.is_one() => extent.clone(),
            _ if is_rows => return Err("it repeats the rows".into()),
            Entry::Known(repeat) if repeat.batches() == 1 => {
                if rows.replace((axis, Extent::known(1))).is_some() {
                    return Err("it repeats the rows by the number of rows".into());
                }
                repeat.times(extent).ok_or("its shape is too large")?
            }
            repeat if repeat.is_of_rows() => return Err("its shape depends on the number of rows".into()),
            Entry::Known(repeat) if repeat.is_natural() => {
                repeat.times(extent).unwrap_or_else(|| call.fresh())
            }
            _ => call.fresh(),
        });
    }
    Ok(vec![match rows {
        Some((axis, outer)) => Value::rows(axis, outer, made),
        None => Value::free(Some(made)),
    }])
}
