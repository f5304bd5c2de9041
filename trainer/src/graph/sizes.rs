//! Shape integers: values that a graph computes to shape its tensors, evaluated while the model is read.
//!
//! Exporters write `x.view(x.size(0), -1)` as Shape → Gather → Unsqueeze → Concat → Reshape. All of it is
//! known here except the number of rows, which stays symbolic.

use super::builder::{Builder, Call, NamedValue, Size};
use super::{Dim, GraphError, shape};

/// Most integers in one list.
const SIZES_MAX: usize = 1024;

/// The dimensions of a float tensor.
pub(super) fn shape_of(b: &Builder, mut call: Call<'_>) -> Result<NamedValue, GraphError> {
    let input = call.float(b, 0)?;
    call.only("start", 0)?;
    call.finish(1)?;
    let sizes = b.dims(input).iter().map(|dim| match dim {
        // The limits on a value bound it.
        Dim::Fixed(size) => Size::Plain(*size as i64),
        Dim::Rows(factor) => Size::Rows(*factor),
    });
    Ok(NamedValue::Ints(sizes.collect()))
}

/// Picks integers by constant positions.
pub(super) fn gather(b: &Builder, mut call: Call<'_>) -> Result<NamedValue, GraphError> {
    let Some(sizes) = call.sizes_input(b, 0)? else {
        return Err(call.site.form("input 0 is missing"));
    };
    let Some(positions) = call.ints_input(b, 1)? else {
        return Err(call.site.form("its positions are not constant"));
    };
    call.only("axis", 0)?;
    call.finish(2)?;
    let picked = positions
        .iter()
        .map(|position| Ok(sizes[shape::axis(*position, sizes.len(), &call.site)?]))
        .collect::<Result<_, GraphError>>()?;
    Ok(NamedValue::Ints(picked))
}

/// Joins lists of integers.
pub(super) fn concat(b: &Builder, mut call: Call<'_>) -> Result<NamedValue, GraphError> {
    let mut joined = Vec::new();
    for index in 0..call.input_count() {
        let Some(sizes) = call.sizes_input(b, index)? else {
            return Err(call.site.form(format!("input {index} is missing")));
        };
        joined.extend(sizes);
        if joined.len() > SIZES_MAX {
            return Err(call.site.form(format!("more than {SIZES_MAX} integers")));
        }
    }
    call.only("axis", 0)?;
    call.finish(call.input_count())?;
    Ok(NamedValue::Ints(joined))
}

/// Adding or removing a dimension of 1 does not change a list.
pub(super) fn sizes_unchanged(b: &Builder, mut call: Call<'_>) -> Result<NamedValue, GraphError> {
    let Some(sizes) = call.sizes_input(b, 0)? else {
        return Err(call.site.form("input 0 is missing"));
    };
    call.ints("axes")?;
    call.finish(2)?;
    Ok(NamedValue::Ints(sizes))
}
