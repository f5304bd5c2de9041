//! Row rules for operators of classical machine learning (`ai.onnx.ml`), whose tables have a row for each sample.

use super::call::{Call, Outcome};
use super::extent::Extent;
use super::spatial::by_row;
use super::value::Value;

/// A table: rows, then features.
fn table<'a>(call: &'a Call<'_>, place: usize) -> Result<(&'a Value, &'a [Extent]), String> {
    let (data, dims) = by_row(call, place)?;
    // Some of these operators treat a list as one sample, others as one sample for each element.
    if dims.len() != 2 && !data.is_free() {
        return Err("its input is not a table of rows and features".into());
    }
    Ok((data, dims))
}

/// A label and scores for each row.
pub(super) fn classifier(call: &Call<'_>) -> Outcome {
    let (data, dims) = table(call, 0)?;
    let scores = data.like(0, vec![dims[0].clone(), call.fresh()]);
    Ok(vec![data.like(0, vec![dims[0].clone()]), scores])
}

/// Numbers for each row.
pub(super) fn regressor(call: &Call<'_>) -> Outcome {
    let (data, dims) = table(call, 0)?;
    let name = if call.operator() == "LinearRegressor" { "targets" } else { "n_targets" };
    let targets = match call.int(name, 0) {
        0 => call.fresh(),
        targets => Extent::known(targets),
    };
    Ok(vec![data.like(0, vec![dims[0].clone(), targets])])
}

/// Each row keeps its shape.
pub(super) fn keeps_shape(call: &Call<'_>) -> Outcome {
    Ok(vec![table(call, 0)?.0.same_shape()])
}

/// Columns of several tables side by side.
pub(super) fn feature_vectorizer(call: &Call<'_>) -> Outcome {
    let (first, dims) = table(call, 0)?;
    for place in 0..call.inputs.len() {
        let (value, dims) = table(call, place)?;
        if value.axis() != first.axis() || dims.len() != 2 {
            return Err("its inputs do not have the same rows".into());
        }
    }
    Ok(vec![first.like(0, vec![dims[0].clone(), call.fresh()])])
}

/// Adds an axis with one element for each category.
pub(super) fn one_hot(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    let dims = [data.extents()?.to_vec(), call.unknown(1)].concat();
    Ok(vec![data.like(data.axis().map_or(0, |(rows, _)| rows), dims)])
}

/// Selects columns of a table, or an element of a list for each row.
pub(super) fn feature_extractor(call: &Call<'_>) -> Outcome {
    let (data, places) = (call.data(0)?, call.data(1)?);
    let (dims, found) = (data.extents()?, places.extents()?);
    let count = Extent::product(found).ok_or("its places are too many")?;
    let made = match dims {
        [] => return Err("its input is one number".into()),
        [_] => vec![Extent::known(1), count],
        [before @ .., _] => [before.to_vec(), vec![count]].concat(),
    };
    Ok(vec![match (data.axis(), places.axis()) {
        (None, None) => Value::free(Some(made)),
        (Some((rows, outer)), None) if rows + 1 < dims.len() => Value::rows(rows, outer.clone(), made),
        // The indexes are read in memory order.
        (None, Some((rows, outer))) if outer.is_one() && found[..rows].iter().all(Extent::is_one) => {
            Value::rows(made.len() - 1, Extent::known(1), made)
        }
        _ => return Err("rows choose from other rows".into()),
    }])
}

/// Term counts of the texts of each row.
pub(super) fn tf_idf(call: &Call<'_>) -> Outcome {
    let (data, dims) = table(call, 0)?;
    Ok(vec![data.like(0, vec![dims[0].clone(), call.fresh()])])
}
