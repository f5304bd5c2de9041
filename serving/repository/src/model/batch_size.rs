//! Bound of the rows of a request, from the signature and the largest message.

use millrace_bundle::{Signature, TensorSpec};

/// Largest batch size in a configuration, however large a message may be.
const BATCH_ROWS_MAX: usize = 65_536;
/// Bytes of the length before each BYTES element.
const BYTES_PREFIX: usize = 4;

/// Most rows of a request; 0 when the model has no row dimension.
///
/// A model has rows when the first extent of all its inputs and outputs is dynamic. The message size bounds
/// their number. In this estimate a dynamic inner extent counts as 1, and a BYTES element as its length
/// prefix.
pub(crate) fn max_batch_size(signature: &Signature, message_bytes_max: usize) -> i32 {
    if !signature.has_rows() {
        return 0;
    }
    let row_bytes = signature.inputs.iter().fold(0usize, |sum, spec| sum.saturating_add(row_bytes(spec)));
    let rows = message_bytes_max.checked_div(row_bytes).unwrap_or(BATCH_ROWS_MAX);
    // The bound fits into an `i32`.
    rows.clamp(1, BATCH_ROWS_MAX) as i32
}

/// The smallest size of a row of an input, in bytes.
fn row_bytes(spec: &TensorSpec) -> usize {
    let width = spec.datatype.element_bytes().unwrap_or(BYTES_PREFIX);
    spec.shape
        .iter()
        .skip(1)
        .fold(width, |bytes, extent| bytes.saturating_mul(usize::try_from(*extent).unwrap_or(1)))
}

#[cfg(test)]
mod tests {
    use millrace_bundle::Datatype;

    use super::*;

    fn spec(datatype: Datatype, shape: &[i64]) -> TensorSpec {
        TensorSpec { name: "x".into(), datatype, shape: shape.to_vec() }
    }

    fn rows(inputs: Vec<TensorSpec>, output: &[i64], message_bytes_max: usize) -> i32 {
        let outputs = vec![spec(Datatype::Fp32, output)];
        max_batch_size(&Signature { inputs, outputs }, message_bytes_max)
    }

    #[test]
    fn rows_are_counted_only_where_all_tensors_have_them() {
        let fp32 = |shape: &[i64]| vec![spec(Datatype::Fp32, shape)];
        assert_eq!(rows(fp32(&[-1, 4]), &[-1, 3], 1600), 100);
        assert_eq!(rows(fp32(&[-1, 4]), &[1, 3], 1600), 0);
        assert_eq!(rows(fp32(&[4]), &[-1], 1600), 0);
        assert_eq!(rows(fp32(&[]), &[-1], 1600), 0);
        assert_eq!(rows(fp32(&[-1, 4]), &[], 1600), 0);
    }

    #[test]
    fn row_limit_follows_the_message_limit_and_is_positive() {
        let wide = vec![spec(Datatype::Fp64, &[-1, i64::MAX, i64::MAX])];
        assert_eq!(rows(wide, &[-1], usize::MAX), 1);
        assert_eq!(rows(vec![spec(Datatype::Fp32, &[-1, 400])], &[-1], 4), 1);
        assert_eq!(rows(vec![spec(Datatype::Bool, &[-1])], &[-1], usize::MAX), 65_536);
        assert_eq!(rows(vec![spec(Datatype::Bytes, &[-1, 2])], &[-1], 80), 10);
        assert_eq!(rows(vec![spec(Datatype::Fp16, &[-1, -1])], &[-1], 80), 40);
        assert_eq!(rows(vec![spec(Datatype::Fp32, &[-1, 0])], &[-1], 80), 65_536);
    }
}
