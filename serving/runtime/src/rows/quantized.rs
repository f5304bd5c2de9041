//! Row rules for quantized operators: scales and zero points must not depend on the rows.

use super::call::{Call, Outcome, axis_in};
use super::elementwise::broadcast;
use super::matrix;
use super::select::not_along_rows;
use super::value::Value;

/// `QuantizeLinear` and `DequantizeLinear`.
pub(super) fn linear(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    call.free_from(1)?;
    let scale = call.free(1)?;
    if call.int("block_size", 0) != 0 {
        if !data.is_free() {
            return Err("its blocks may hold several rows".into());
        }
    } else if !scale.is_single() {
        not_along_rows(data, axis_in(call.int("axis", 1), data.rank()?)?)?;
        if scale.rank()? != 1 {
            return Err("its scale has more than one axis".into());
        }
    }
    Ok(vec![data.same_shape()])
}

/// `DynamicQuantizeLinear`, which computes scale and zero point over its whole input.
pub(super) fn dynamic(call: &Call<'_>) -> Outcome {
    let data = call.data(0)?;
    if !data.is_free() {
        return Err("it computes one range over all rows".into());
    }
    let number = Value::free(Some(Vec::new()));
    Ok(vec![data.same_shape(), number.clone(), number])
}

/// `QLinearMatMul`: left side, right side, result, each with scale and zero point.
pub(super) fn qlinear_matmul(call: &Call<'_>) -> Outcome {
    for (side, first) in [(0, 1), (3, 4)] {
        for place in [first, first + 1] {
            if call.data(side)?.is_free() {
                call.free_if_given(place)?;
            } else {
                call.single_if_given(place)?;
            }
        }
    }
    call.single_if_given(6)?;
    call.single_if_given(7)?;
    Ok(vec![matrix::product(call, 0, 3)?])
}

/// `MatMulIntegerToFloat`: both sides, their scales and zero points, bias.
pub(super) fn matmul_to_float(call: &Call<'_>) -> Outcome {
    for (side, places) in [(0, [2, 4]), (1, [3, 5])] {
        for place in places {
            if call.data(side)?.is_free() {
                call.free_if_given(place)?;
            } else {
                call.single_if_given(place)?;
            }
        }
    }
    let product = matrix::product(call, 0, 1)?;
    Ok(vec![match call.free_if_given(6)? {
        Some(added) => broadcast(call, &[&product, added])?,
        None => product,
    }])
}

/// `QGemm`: left side, scale, zero point; right side, scale, zero point; bias; scale and zero point of the result.
pub(super) fn qgemm(call: &Call<'_>) -> Outcome {
    call.free_from(1)?;
    [1, 2, 7, 8].into_iter().try_for_each(|place| call.single_if_given(place))?;
    let turned = |place: usize, name: &str| -> Result<Value, String> {
        let value = call.data(place)?;
        if call.int(name, 0) != 0 { matrix::exchanged(value) } else { Ok(value.same_shape()) }
    };
    let product = matrix::of(call, &turned(0, "transA")?, &turned(3, "transB")?)?;
    Ok(vec![match call.free_if_given(6)? {
        Some(added) => broadcast(call, &[&product, added])?,
        None => product,
    }])
}

/// `QLinearAdd` and `QLinearMul`: two tensors and the result, each with scale and zero point.
pub(super) fn qlinear_pair(call: &Call<'_>) -> Outcome {
    [1, 2, 4, 5, 6, 7].into_iter().try_for_each(|place| call.single_if_given(place))?;
    Ok(vec![broadcast(call, &[call.data(0)?, call.data(3)?])?])
}

/// One tensor, followed by scalars that apply to all of it.
pub(super) fn qlinear_unary(call: &Call<'_>) -> Outcome {
    (1..call.inputs.len()).try_for_each(|place| call.single_if_given(place))?;
    Ok(vec![call.data(0)?.same_shape()])
}
