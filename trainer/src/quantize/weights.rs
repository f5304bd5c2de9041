//! Quantized weights: symmetric integers with one scale per column.

use millrace_bundle::onnx::{TensorProto, tensor_proto::DataType};

/// The largest integer. 255 · 64 + 255 · 64 fits into 16 bits, for processors that add byte products in
/// pairs.
const LEVEL_MAX: f32 = 64.0;
/// Most rows: 255 · 64 · this fits into the 32 bits of a sum.
const ROWS_MAX: usize = 131_072;

/// A matrix `[rows, columns]` of integers; each times the scale of its column approximates the weight.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Weights {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Row after row.
    pub(super) values: Vec<i8>,
    pub(super) scales: Vec<f32>,
}

impl Weights {
    /// Quantizes a tensor `[rows, columns]`, or `[columns, rows]` when `transposed`; the error says why it
    /// cannot.
    pub(super) fn of(tensor: &TensorProto, transposed: bool) -> Result<Weights, String> {
        let [first, second] = tensor.dims[..] else {
            return Err(format!("its weights have {} dimensions", tensor.dims.len()));
        };
        if tensor.data_type() != DataType::Float as i32 {
            let kind = DataType::try_from(tensor.data_type())
                .map_or("of an unknown type", |kind| kind.as_str_name());
            return Err(format!("its weights are {kind}, not FLOAT"));
        }
        let size = |extent: i64| {
            usize::try_from(extent).map_err(|_| "its weights have a negative extent".to_owned())
        };
        let (first, second) = (size(first)?, size(second)?);
        let (rows, columns) = if transposed { (second, first) } else { (first, second) };
        if rows == 0 || columns == 0 {
            return Err("its weights are empty".into());
        }
        if rows > ROWS_MAX {
            return Err(format!("it sums up {rows} products, at most {ROWS_MAX} fit into 32 bits"));
        }
        let floats = floats(tensor, rows.checked_mul(columns))?;
        let column = |index: usize| if transposed { index / rows } else { index % columns };
        let mut largest = vec![0.0f32; columns];
        for (index, value) in floats.iter().enumerate() {
            let largest = &mut largest[column(index)];
            *largest = largest.max(value.abs());
        }
        // The smallest normal number for a column that is zero, or so small that its scale would be
        // subnormal.
        let scales: Vec<f32> =
            largest.into_iter().map(|largest| (largest / LEVEL_MAX).max(f32::MIN_POSITIVE)).collect();
        let mut values = vec![0i8; floats.len()];
        for (index, value) in floats.iter().enumerate() {
            let column = column(index);
            let row = if transposed { index % rows } else { index / columns };
            let level = (value / scales[column]).round_ties_even();
            values[row * columns + column] = level.clamp(-LEVEL_MAX, LEVEL_MAX) as i8;
        }
        Ok(Weights { rows, columns, values, scales })
    }
}

/// The elements, all finite, exactly `count` of them.
fn floats(tensor: &TensorProto, count: Option<usize>) -> Result<Vec<f32>, String> {
    if tensor.segment.is_some() {
        return Err("its weights are split into segments".into());
    }
    let floats: Vec<f32> = match &tensor.raw_data {
        Some(bytes) if !bytes.is_empty() => {
            let (chunks, rest) = bytes.as_chunks::<4>();
            if !rest.is_empty() {
                return Err(format!(
                    "its weights of {} bytes are not a whole number of elements",
                    bytes.len()
                ));
            }
            chunks.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
        }
        _ => tensor.float_data.clone(),
    };
    if Some(floats.len()) != count {
        return Err(format!(
            "its weights hold {} elements, their dimensions say {:?}",
            floats.len(),
            tensor.dims
        ));
    }
    match floats.iter().find(|value| !value.is_finite()) {
        Some(value) => Err(format!("its weights hold {value}")),
        None => Ok(floats),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tensor(dims: &[i64], values: &[f32]) -> TensorProto {
        TensorProto {
            dims: dims.to_vec(),
            data_type: Some(DataType::Float as i32),
            raw_data: Some(values.iter().flat_map(|value| value.to_le_bytes()).collect()),
            ..TensorProto::default()
        }
    }

    #[test]
    fn each_column_has_its_own_scale() {
        let weights = Weights::of(&tensor(&[2, 3], &[64.0, 0.5, 0.0, -32.0, 0.25, 0.0]), false).unwrap();
        assert_eq!((weights.rows, weights.columns), (2, 3));
        assert_eq!(weights.scales, [1.0, 0.5 / 64.0, f32::MIN_POSITIVE]);
        assert_eq!(weights.values, [64, 64, 0, -32, 32, 0]);
        let transposed = Weights::of(&tensor(&[3, 2], &[64.0, -32.0, 0.5, 0.25, 0.0, 0.0]), true).unwrap();
        assert_eq!(transposed, weights);
        let tiny = Weights::of(&tensor(&[1, 1], &[f32::from_bits(1)]), false).unwrap();
        assert_eq!((tiny.values[0], tiny.scales[0]), (0, f32::MIN_POSITIVE));
        let huge = Weights::of(&tensor(&[1, 2], &[f32::MAX, f32::MIN]), false).unwrap();
        assert_eq!(huge.values, [64, -64]);
    }

    #[test]
    fn weights_that_are_not_a_finite_matrix_are_refused() {
        let refused = |tensor: &TensorProto, says: &str| {
            let reason = Weights::of(tensor, false).unwrap_err();
            assert!(reason.contains(says), "{reason}");
        };
        let good = tensor(&[2, 1], &[1.0, 2.0]);
        assert!(Weights::of(&good, false).is_ok());
        refused(&tensor(&[2], &[1.0, 2.0]), "1 dimensions");
        refused(&tensor(&[0, 2], &[]), "empty");
        refused(&tensor(&[-1, 2], &[1.0, 2.0]), "negative");
        refused(&tensor(&[2, 2], &[1.0, 2.0]), "hold 2 elements");
        refused(&tensor(&[131_072, i64::MAX], &[1.0]), "hold 1 elements");
        refused(&tensor(&[131_073, 1], &[1.0]), "fit into 32 bits");
        refused(&tensor(&[2, 1], &[1.0, f32::NAN]), "NaN");
        refused(&tensor(&[2, 1], &[1.0, f32::NEG_INFINITY]), "inf");
        refused(&TensorProto { raw_data: Some(vec![0; 7]), ..good.clone() }, "whole number");
        refused(&TensorProto { data_type: Some(DataType::Float16 as i32), ..good.clone() }, "FLOAT16");
        refused(&TensorProto { data_type: Some(999), ..good.clone() }, "unknown type");
        refused(&TensorProto { segment: Some(Default::default()), ..good }, "segments");
    }

    proptest! {
        #[test]
        fn each_weight_is_half_a_step_off_at_most(
            values in prop::collection::vec(-1e6f32..1e6, 1..60),
            rows in 1usize..6,
        ) {
            let columns = values.len().div_ceil(rows);
            let mut values = values;
            values.resize(rows * columns, 0.0);
            let weights = Weights::of(&tensor(&[rows as i64, columns as i64], &values), false).unwrap();
            for (index, value) in values.iter().enumerate() {
                let scale = f64::from(weights.scales[index % columns]);
                let apart = (f64::from(*value) - f64::from(weights.values[index]) * scale).abs();
                prop_assert!(apart <= scale * 0.500_01, "{value} {} {scale}", weights.values[index]);
            }
        }
    }
}
