//! Row rules for matrix products: rows as rows of the left side, as columns of the right side, or as batched
//! matrices.

use super::call::{Call, Outcome};
use super::elementwise::wider;
use super::extent::Extent;
use super::select::not_along_rows;
use super::value::Value;

/// The product of the inputs at two positions.
pub(super) fn product(call: &Call<'_>, left: usize, right: usize) -> Result<Value, String> {
    of(call, call.data(left)?, call.data(right)?)
}

/// The product of two values.
pub(super) fn of(call: &Call<'_>, a: &Value, b: &Value) -> Result<Value, String> {
    let (dims_a, dims_b) = (a.extents()?, b.extents()?);
    let (rank_a, rank_b) = (dims_a.len(), dims_b.len());
    if rank_a == 0 || rank_b == 0 || (rank_a == 1 && !a.is_free()) || (rank_b == 1 && !b.is_free()) {
        return Err("it sums up over the rows, or treats them as one vector".into());
    }
    not_along_rows(a, rank_a - 1)?;
    if rank_b > 1 {
        not_along_rows(b, rank_b - 2)?;
    }
    // Treats both as matrices: a vector is one row on the left, one column on the right.
    let one = Extent::known(1);
    let wide_a = if rank_a == 1 { vec![one.clone(), dims_a[0].clone()] } else { dims_a.to_vec() };
    let wide_b = if rank_b == 1 { vec![dims_b[0].clone(), one.clone()] } else { dims_b.to_vec() };
    let rank = wide_a.len().max(wide_b.len());
    let from_end =
        |value: &Value, wide: usize| value.axis().map(|(axis, outer)| (wide - axis, outer.clone()));
    let (rows_a, rows_b) = (from_end(a, wide_a.len()), from_end(b, wide_b.len()));
    let own_extent =
        |wide: &[Extent], from_end: usize| wide.len().checked_sub(from_end).map(|axis| wide[axis].clone());
    let free_along = |wide: &[Extent], from_end: usize| {
        from_end <= 2 || own_extent(wide, from_end).is_none_or(|extent| extent.is_one())
    };
    let rows = match (&rows_a, &rows_b) {
        (None, None) => None,
        (Some(rows), None) if free_along(&wide_b, rows.0) => {
            Some((rows.clone(), own_extent(&wide_a, rows.0)))
        }
        (None, Some(rows)) if free_along(&wide_a, rows.0) => {
            Some((rows.clone(), own_extent(&wide_b, rows.0)))
        }
        (Some(rows), Some(others)) if rows == others && rows.0 > 2 => {
            Some((rows.clone(), own_extent(&wide_a, rows.0)))
        }
        (Some(_), Some(_)) => return Err("it multiplies rows with other rows".into()),
        _ => return Err("a constant has an extent of its own along the rows".into()),
    };
    let leading = |wide: &[Extent], place: usize| {
        (place + wide.len()).checked_sub(rank).map_or_else(|| one.clone(), |own| wide[own].clone())
    };
    let mut dims: Vec<Extent> =
        (0..rank - 2).map(|place| wider(call, &leading(&wide_a, place), &leading(&wide_b, place))).collect();
    dims.push(wide_a[wide_a.len() - 2].clone());
    dims.push(wide_b[wide_b.len() - 1].clone());
    let mut axis = 0;
    if let Some(((from_end, _), extent)) = &rows {
        axis = rank - from_end;
        dims[axis] = extent.clone().ok_or("its rank is not known")?;
    }
    // Removes the axes added to vectors.
    if rank_b == 1 {
        dims.pop();
    }
    if rank_a == 1 {
        let place = dims.len() - usize::from(rank_b > 1) - 1;
        dims.remove(place);
        axis = if axis > place { axis - 1 } else { axis };
    }
    Ok(match rows {
        Some(((_, outer), _)) => Value::rows(axis, outer, dims),
        None => Value::free(Some(dims)),
    })
}

pub(super) fn matmul(call: &Call<'_>) -> Outcome {
    Ok(vec![product(call, 0, 1)?])
}

/// A product of integers, whose zero points are the same for all rows.
pub(super) fn matmul_integer(call: &Call<'_>) -> Outcome {
    let (a, b) = (call.data(0)?, call.data(1)?);
    for (place, value) in [(2, a), (3, b)] {
        if value.is_free() {
            call.free_if_given(place)?;
        } else {
            call.single_if_given(place)?;
        }
    }
    matmul(call)
}

/// A product of matrices, each optionally transposed, plus a third one.
pub(super) fn gemm(call: &Call<'_>) -> Outcome {
    let turned = ["transA", "transB"].map(|name| call.int(name, 0) != 0);
    let (a, b) = (transposed(call.data(0)?, turned[0])?, transposed(call.data(1)?, turned[1])?);
    let product = of(call, &a, &b)?;
    let Some(added) = call.data_if_given(2)? else { return Ok(vec![product]) };
    let sum = super::elementwise::broadcast(call, &[&product, added])?;
    if sum.rank() != Ok(2) {
        return Err("its addend has more than two axes".into());
    }
    Ok(vec![sum])
}

/// A matrix, transposed if `turned`.
fn transposed(value: &Value, turned: bool) -> Result<Value, String> {
    if value.rank()? != 2 {
        return Err("its inputs are not matrices".into());
    }
    Ok(if turned { exchanged(value)? } else { value.same_shape() })
}

/// A value with its last two axes exchanged.
pub(super) fn exchanged(value: &Value) -> Result<Value, String> {
    let mut dims = value.extents()?.to_vec();
    let rank = dims.len();
    if rank < 2 {
        return Err("its inputs are not matrices".into());
    }
    dims.swap(rank - 2, rank - 1);
    let axis = match value.axis() {
        Some((axis, _)) if axis + 2 == rank => rank - 1,
        Some((axis, _)) if axis + 1 == rank => rank - 2,
        Some((axis, _)) => axis,
        None => 0,
    };
    Ok(value.like(axis, dims))
}

/// `FusedMatMul`: each side may be transposed.
pub(super) fn fused_matmul(call: &Call<'_>) -> Outcome {
    if call.int("transBatchA", 0) != 0 || call.int("transBatchB", 0) != 0 {
        return Err("it exchanges other axes than the last two".into());
    }
    let side = |place: usize, name: &str| {
        let value = call.data(place)?;
        if call.int(name, 0) != 0 { exchanged(value) } else { Ok(value.same_shape()) }
    };
    Ok(vec![of(call, &side(0, "transA")?, &side(1, "transB")?)?])
}

/// A product with packed constants on the right side; the attribute `N` is their number of columns.
pub(super) fn with_packed(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    let a = call.data(0)?;
    let mut dims = a.extents()?.to_vec();
    let Some(last) = dims.last_mut() else { return Err("its input is one number".into()) };
    *last = match call.int("N", 0) {
        0 => call.fresh(),
        columns => Extent::known(columns),
    };
    not_along_rows(a, a.rank()? - 1)?;
    Ok(vec![a.like(a.axis().map_or(0, |(rows, _)| rows), dims)])
}

/// Sums of products over named axes.
pub(super) fn einsum(call: &Call<'_>) -> Outcome {
    let equation: String =
        call.text("equation", "").chars().filter(|letter| !letter.is_whitespace()).collect();
    let (terms, result) = equation.split_once("->").ok_or("its equation has no result")?;
    let terms: Vec<&str> = terms.split(',').collect();
    if equation.contains('.') || terms.len() != call.inputs.len() {
        return Err("its equation is not known".into());
    }
    let mut rows: Option<(char, Extent, Extent)> = None;
    let mut extents: Vec<(char, Extent)> = Vec::new();
    for (place, term) in terms.iter().enumerate() {
        let value = call.data(place)?;
        let dims = value.extents()?;
        if term.chars().count() != dims.len() {
            return Err("its equation does not fit its inputs".into());
        }
        for (axis, (letter, extent)) in term.chars().zip(dims).enumerate() {
            match extents.iter_mut().find(|(known, _)| *known == letter) {
                Some((_, known)) => *known = wider(call, known, extent),
                None => extents.push((letter, extent.clone())),
            }
            let Some((_, outer)) = value.axis().filter(|(rows, _)| *rows == axis) else { continue };
            let found = (letter, outer.clone(), extent.clone());
            if *rows.get_or_insert_with(|| found.clone()) != found {
                return Err("it multiplies rows with other rows".into());
            }
        }
    }
    let extent_of =
        |letter: char| extents.iter().find(|(known, _)| *known == letter).map(|(_, extent)| extent.clone());
    let dims =
        result.chars().map(extent_of).collect::<Option<Vec<_>>>().ok_or("its equation is not known")?;
    let Some((letter, outer, extent)) = rows else { return Ok(vec![Value::free(Some(dims))]) };
    let apart = terms.iter().enumerate().all(|(place, term)| {
        let has_rows = call.given(place).is_some_and(|value| !value.is_free());
        term.chars().filter(|found| *found == letter).count() == usize::from(has_rows)
    });
    let axis = result.chars().position(|found| found == letter);
    match axis {
        Some(axis) if apart => {
            let mut dims = dims;
            dims[axis] = extent;
            Ok(vec![Value::rows(axis, outer, dims)])
        }
        Some(_) => Err("it multiplies rows with other rows".into()),
        None => Err("it sums up over the rows".into()),
    }
}
