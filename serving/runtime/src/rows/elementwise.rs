//! Row rules for elementwise operators, which combine only elements at the same position.

use super::call::{Call, Outcome};
use super::extent::Extent;
use super::value::Value;

/// One input, whose elements keep their positions. Further inputs do not depend on the rows.
pub(super) fn unary(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    Ok(vec![call.data(0)?.same_shape()])
}

/// The second input only determines the datatype.
pub(super) fn cast_like(call: &Call<'_>) -> Outcome {
    Ok(vec![call.data(0)?.same_shape()])
}

/// Drops no elements unless in training mode.
pub(super) fn dropout(call: &Call<'_>) -> Outcome {
    if call.given(2).is_some() && call.numbers(2) != Ok(vec![0]) {
        return Err("it may drop elements at random".into());
    }
    call.free_if_given(1)?;
    let value = call.data(0)?.same_shape();
    Ok(vec![value.clone(), value])
}

/// Any number of inputs that are broadcast to one shape.
pub(super) fn broadcasting(call: &Call<'_>) -> Outcome {
    let values = (0..call.inputs.len()).map(|place| call.data(place)).collect::<Result<Vec<_>, _>>()?;
    Ok(vec![broadcast(call, &values)?])
}

/// The result of broadcasting several values.
pub(super) fn broadcast(call: &Call<'_>, values: &[&Value]) -> Result<Value, String> {
    let rank =
        values.iter().map(|value| value.rank()).try_fold(0, |most, rank| Ok::<_, String>(most.max(rank?)))?;
    let Some((from_end, outer)) = place_of_rows(values)? else {
        return Ok(Value::free(Some(stretched(call, values, rank)?)));
    };
    let axis = rank - from_end;
    for value in values.iter().filter(|value| value.is_free()) {
        let along = value.extents()?.iter().rev().nth(from_end - 1);
        if along.is_some_and(|extent| !extent.is_one()) {
            return Err("a constant has an extent of its own along the rows".into());
        }
    }
    let mut dims = stretched(call, values, rank)?;
    let with_rows = values.iter().find_map(|value| Some((*value, value.axis()?.0)));
    if let Some((value, own)) = with_rows {
        dims[axis] = value.extents()?[own].clone();
    }
    Ok(Value::rows(axis, outer, dims))
}

/// Position of the row axis, counted from the last axis as 1; it must be the same in all inputs that have rows.
pub(super) fn place_of_rows(values: &[&Value]) -> Result<Option<(usize, Extent)>, String> {
    let mut found: Option<(usize, &Extent)> = None;
    for value in values {
        let Some((axis, outer)) = value.axis() else { continue };
        let from_end = value.rank()? - axis;
        match found {
            None => found = Some((from_end, outer)),
            Some(before) if before == (from_end, outer) => {}
            Some(_) => return Err("it combines rows of one input with rows of another".into()),
        }
    }
    Ok(found.map(|(from_end, outer)| (from_end, outer.clone())))
}

/// The extents after broadcasting.
fn stretched(call: &Call<'_>, values: &[&Value], rank: usize) -> Result<Vec<Extent>, String> {
    let mut dims = vec![Extent::known(1); rank];
    for value in values {
        let own = value.extents()?;
        for (into, extent) in dims[rank - own.len()..].iter_mut().zip(own) {
            *into = wider(call, into, extent);
        }
    }
    Ok(dims)
}

/// The larger of two extents that are equal or of which one is 1.
pub(super) fn wider(call: &Call<'_>, a: &Extent, b: &Extent) -> Extent {
    match (a.as_known(), b.as_known()) {
        _ if a == b || b.is_one() => a.clone(),
        (Some(1), _) => b.clone(),
        (Some(_), _) => a.clone(),
        (_, Some(_)) => b.clone(),
        _ => call.fresh(),
    }
}
