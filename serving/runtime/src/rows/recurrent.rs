//! Row rule for LSTM, GRU and RNN: steps along one axis, rows along another.

use super::call::{Call, Outcome};
use super::value::Value;

/// Weights must be constant; lengths and initial states must have the rows of the input.
pub(super) fn recurrent(call: &Call<'_>) -> Outcome {
    let input = call.data(0)?;
    let dims = input.extents()?;
    if dims.len() != 3 {
        return Err("its input does not have three axes".into());
    }
    let rows_first = call.int("layout", 0) != 0;
    let axis = usize::from(!rows_first);
    let (weights, repeats) = (call.free(1)?, call.free(2)?);
    call.free_if_given(3)?;
    // Peephole weights.
    call.free_if_given(7)?;
    let states = if call.operator() == "LSTM" { [Some(5), Some(6)] } else { [Some(5), None] };
    let hidden = repeats.extents()?.get(2).cloned().ok_or("its weights do not have three axes")?;
    let directions = weights.extents()?.first().cloned().ok_or("its weights do not have three axes")?;
    match input.axis() {
        None => call.free_from(4)?,
        Some((rows, _)) if rows != axis => return Err("it uses the rows as steps or features".into()),
        Some((_, outer)) => {
            let follows = |place: usize, axis: usize| match call.data_if_given(place)? {
                None => Ok(()),
                Some(value) if value.axis() == Some((axis, outer)) => Ok(()),
                Some(_) => Err(format!(
                    "its input {:?} does not have the rows of {:?}",
                    call.name(place),
                    call.name(0)
                )),
            };
            follows(4, 0)?;
            states.into_iter().flatten().try_for_each(|place| follows(place, axis))?;
        }
    }
    let rows = dims[axis].clone();
    let (all, all_axis, last) = if rows_first {
        (
            vec![rows.clone(), dims[1].clone(), directions.clone(), hidden.clone()],
            0,
            vec![rows, directions, hidden],
        )
    } else {
        (
            vec![dims[0].clone(), directions.clone(), rows.clone(), hidden.clone()],
            2,
            vec![directions, rows, hidden],
        )
    };
    let last: Value = input.like(axis, last);
    Ok(vec![input.like(all_axis, all), last.clone(), last])
}
