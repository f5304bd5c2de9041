//! Row rules for attention and other fused transformer operators, with rows along the first axis.

use super::call::{Call, Outcome};
use super::elementwise::broadcast;
use super::extent::Extent;
use super::reduce;
use super::spatial::by_row;
use super::value::Value;

/// Requires that an input, if given, has the rows of another along an axis.
fn follows(call: &Call<'_>, place: usize, axis: usize, rows: &Value) -> Result<(), String> {
    let Some(value) = call.data_if_given(place)? else { return Ok(()) };
    let same = match (value.axis(), rows.axis()) {
        (Some((found, outer)), Some((_, also))) => found == axis && outer == also,
        (None, None) => true,
        _ => false,
    };
    if same { Ok(()) } else { Err(format!("its input {:?} does not have the same rows", call.name(place))) }
}

/// Requires that an input, if given, broadcasts to four axes of which the first is the axis of the rows.
fn mask(call: &Call<'_>, place: usize, rows: &Value) -> Result<(), String> {
    let Some(value) = call.data_if_given(place)? else { return Ok(()) };
    let dims = value.extents()?;
    match value.axis() {
        None if dims.len() <= 2 || (dims.len() == 4 && dims[0].is_one()) => Ok(()),
        Some(_) if dims.len() == 4 => follows(call, place, 0, rows),
        _ => Err(format!("its mask {:?} does not have the same rows", call.name(place))),
    }
}

/// ONNX's `Attention`: queries, keys, values, mask, past keys, past values, lengths.
pub(super) fn attention(call: &Call<'_>) -> Outcome {
    let (queries, dims) = by_row(call, 0)?;
    [1, 2, 4, 5, 6].into_iter().try_for_each(|place| follows(call, place, 0, queries))?;
    mask(call, 3, queries)?;
    let rows = dims[0].clone();
    let inner = dims.get(1..dims.len() - 1).ok_or("its input is a list of numbers")?;
    let result = [vec![rows.clone()], inner.to_vec(), call.unknown(1)].concat();
    let past = || queries.like(0, [vec![rows.clone()], call.unknown(3)].concat());
    Ok(vec![queries.like(0, result), past(), past(), past()])
}

/// `com.microsoft` `Attention`: input, weights, bias, mask of two axes or more, past keys and values, attention bias.
pub(super) fn fused_attention(call: &Call<'_>) -> Outcome {
    let (input, dims) = by_row(call, 0)?;
    call.free_if_given(1)?;
    call.free_if_given(2)?;
    if let Some(value) = call.data_if_given(3)? {
        if value.rank()? < 2 {
            return Err("its mask is a list of lengths".into());
        }
        follows(call, 3, 0, input)?;
    }
    follows(call, 4, 1, input)?;
    mask(call, 5, input)?;
    if call.inputs.len() > 6 {
        return Err("one of its inputs is not known".into());
    }
    let result = [dims[..dims.len() - 1].to_vec(), call.unknown(1)].concat();
    let present = [call.unknown(1), vec![dims[0].clone()], call.unknown(3)].concat();
    Ok(vec![input.like(0, result), input.like(1, present)])
}

/// `com.microsoft` `MultiHeadAttention` without past keys and values.
pub(super) fn multi_head_attention(call: &Call<'_>) -> Outcome {
    let (queries, dims) = by_row(call, 0)?;
    [1, 2].into_iter().try_for_each(|place| follows(call, place, 0, queries))?;
    call.free_if_given(3)?;
    if let Some(value) = call.data_if_given(4)? {
        if value.rank()? < 2 {
            return Err("its mask is a list of lengths".into());
        }
        follows(call, 4, 0, queries)?;
    }
    mask(call, 5, queries)?;
    if dims.len() != 3 || call.inputs.len() > 6 {
        return Err("one of its inputs is not known".into());
    }
    let result = [dims[..2].to_vec(), call.unknown(1)].concat();
    Ok(vec![queries.like(0, result)])
}

/// A sum of two inputs, normalized along the last axis: input, skip input, scale, shift, bias.
pub(super) fn skip_normalization(call: &Call<'_>) -> Outcome {
    call.free_from(2)?;
    let sum = broadcast(call, &[call.data(0)?, call.data(1)?])?;
    let rank = sum.rank()?;
    if sum.axis().is_some_and(|(rows, _)| rows + 1 >= rank) {
        return Err("it works along the rows".into());
    }
    for place in 2..call.inputs.len() {
        if call.free_if_given(place)?.is_some_and(|value| value.rank().is_ok_and(|rank| rank > 1)) {
            return Err("a constant has more than one axis".into());
        }
    }
    let mut statistic = sum.extents()?.to_vec();
    if let Some(last) = statistic.last_mut() {
        *last = Extent::known(1);
    }
    let statistic = sum.like(sum.axis().map_or(0, |(rows, _)| rows), statistic);
    Ok(vec![sum.clone(), statistic.clone(), statistic, sum])
}

/// An activation after the addition of constants.
pub(super) fn with_bias(call: &Call<'_>) -> Outcome {
    reduce::with_constants(call, call.data(0)?, 1)
}

/// Embeddings of words and positions: words, segments, tables, scale, shift, mask, positions.
pub(super) fn embeddings(call: &Call<'_>) -> Outcome {
    let (words, dims) = by_row(call, 0)?;
    [1, 7].into_iter().try_for_each(|place| follows(call, place, 0, words))?;
    if dims.len() != 2 || call.given(8).is_some() {
        return Err("one of its inputs is not known".into());
    }
    (2..7).try_for_each(|place| call.free_if_given(place).map(drop))?;
    let made = [dims.to_vec(), call.unknown(1)].concat();
    Ok(vec![words.like(0, made.clone()), words.like(0, vec![dims[0].clone()]), words.like(0, made)])
}
