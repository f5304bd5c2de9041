//! Trial of rows that the configuration declares independent, where the graph does not prove it.
//!
//! The trial runs each row alone and all rows as one batch, and compares the results. A difference shows dependence;
//! agreement proves nothing. The trial therefore only warns. The rows have very different magnitudes, because most
//! operators that mix rows let the largest value dominate.

use half::{bf16, f16};
use millrace_bundle::{Datatype, Signature, TensorSpec};

use super::Session;
use super::limited::{self, Failure};
use super::row_join::{join, split};
use millrace_serving_core::tensor::{Data, Tensor, element_count};

/// Extent for open inner dimensions and exclusive upper bound for integers, tried in turn: some inputs accept only
/// small integers, for example indexes.
const ATTEMPTS: [(i64, u64); 4] = [(3, 100), (3, 2), (1, 100), (1, 2)];
/// Magnitude of the values of each row.
const MAGNITUDES: [f64; 3] = [1e-3, 1.0, 1e4];
/// Maximum number of elements of a trial input.
const ELEMENTS_MAX: usize = 1 << 22;
/// Allowed difference of results, relative to the largest value: kernels may sum another number of rows in another
/// order.
const TOLERANCE: f64 = 1e-3;

/// Compares the results of rows run together with the results of rows run alone.
///
/// # Errors
/// The output that differs, or the reason why there was no trial.
pub(super) fn check(session: &mut Session, signature: &Signature) -> Result<(), String> {
    let mut reason = String::new();
    for attempt in ATTEMPTS {
        match compare(session, signature, attempt) {
            Ok(()) => return Ok(()),
            Err(Trial::Differs(output)) => {
                return Err(format!("rows of output {output:?} depend on other rows of the batch"));
            }
            Err(Trial::Endless(error)) => {
                reason = error;
                break;
            }
            Err(Trial::Failed(error)) => reason = error,
        }
    }
    Err(format!("the trial run failed: {reason}"))
}

enum Trial {
    Differs(String),
    Failed(String),
    /// A run did not end in time; other attempts would not end either.
    Endless(String),
}

fn compare(session: &mut Session, signature: &Signature, attempt: (i64, u64)) -> Result<(), Trial> {
    let failed = |reason: &str| Trial::Failed(reason.to_owned());
    let rows: Vec<Vec<Tensor>> = (1..)
        .zip(MAGNITUDES)
        .map(|(seed, magnitude)| {
            let inputs = signature.inputs.iter().zip(0u64..);
            inputs
                .map(|(spec, place)| row(spec, attempt, magnitude, seed + 10 * place))
                .collect::<Option<_>>()
        })
        .collect::<Option<_>>()
        .ok_or_else(|| failed("a row has no elements, or too many"))?;
    let mut runs =
        |inputs: &[Tensor]| match limited::run(session, inputs, &signature.outputs, limited::RUN_MAX) {
            Ok((tensors, _)) => Ok(tensors),
            Err(endless @ Failure::Endless(_)) => Err(Trial::Endless(endless.to_string())),
            Err(refused) => Err(Trial::Failed(refused.to_string())),
        };
    let alone = rows.iter().map(|row| runs(row)).collect::<Result<Vec<_>, _>>()?;
    let joined: Option<Vec<Tensor>> =
        (0..signature.inputs.len()).map(|place| join(rows.iter().map(|row| &row[place]))).collect();
    let together = runs(&joined.ok_or_else(|| failed("rows cannot be joined"))?)?;
    for (place, tensor) in together.into_iter().enumerate() {
        let differs = || Trial::Differs(signature.outputs[place].name.clone());
        let parts = split(tensor, &[1; MAGNITUDES.len()]).ok_or_else(differs)?;
        let agree = parts.iter().zip(&alone).all(|(part, alone)| {
            part.shape == alone[place].shape && are_close(&part.data, &alone[place].data)
        });
        if !agree {
            return Err(differs());
        }
    }
    Ok(())
}

/// One row of an input, with pseudorandom values.
fn row(spec: &TensorSpec, (extent, integers): (i64, u64), magnitude: f64, seed: u64) -> Option<Tensor> {
    let inner = spec.shape.iter().skip(1).map(|found| if *found < 0 { extent } else { *found });
    let shape: Vec<i64> = std::iter::once(1).chain(inner).collect();
    let count = element_count(&spec.name, &shape).ok().filter(|count| (1..=ELEMENTS_MAX).contains(count))?;
    // A linear congruential generator modulo 2^64 with Knuth's constants.
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut bits = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 40
    };
    // From -1 to 1 times the magnitude, with 24 bits.
    let float = |bits: u64| ((bits as f64 / f64::from(1 << 23) - 1.0) * magnitude) as f32;
    macro_rules! filled {
        ($value:expr) => {
            (0..count).map(|_| $value).collect()
        };
    }
    let data = match spec.datatype {
        Datatype::Fp16 => Data::Fp16(filled!(f16::from_f32(float(bits())))),
        Datatype::Bf16 => Data::Bf16(filled!(bf16::from_f32(float(bits())))),
        Datatype::Fp32 => Data::Fp32(filled!(float(bits()))),
        Datatype::Fp64 => Data::Fp64(filled!(f64::from(float(bits())))),
        Datatype::Bool => Data::Bool(filled!(bits() & 1 == 1)),
        Datatype::Uint8 => Data::Uint8(filled!((bits() % integers) as u8)),
        Datatype::Uint16 => Data::Uint16(filled!((bits() % integers) as u16)),
        Datatype::Uint32 => Data::Uint32(filled!((bits() % integers) as u32)),
        Datatype::Uint64 => Data::Uint64(filled!(bits() % integers)),
        Datatype::Int8 => Data::Int8(filled!((bits() % integers) as i8)),
        Datatype::Int16 => Data::Int16(filled!((bits() % integers) as i16)),
        Datatype::Int32 => Data::Int32(filled!((bits() % integers) as i32)),
        Datatype::Int64 => Data::Int64(filled!((bits() % integers) as i64)),
        Datatype::Bytes => Data::Bytes(filled!(bytes::Bytes::from(format!("{}", bits() % integers)))),
    };
    Some(Tensor { name: spec.name.clone(), shape, data })
}

fn are_close(a: &Data, b: &Data) -> bool {
    let close = |a: Vec<f64>, b: Vec<f64>| {
        let largest =
            a.iter().chain(&b).filter(|value| value.is_finite()).fold(0.0, |most: f64, v| most.max(v.abs()));
        a.len() == b.len()
            && a.iter()
                .zip(&b)
                .all(|(a, b)| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= TOLERANCE * largest)
    };
    let floats = |data: &Data| -> Option<Vec<f64>> {
        match data {
            Data::Fp16(values) => Some(values.iter().map(|value| value.to_f64()).collect()),
            Data::Bf16(values) => Some(values.iter().map(|value| value.to_f64()).collect()),
            Data::Fp32(values) => Some(values.iter().map(|value| f64::from(*value)).collect()),
            Data::Fp64(values) => Some(values.clone()),
            _ => None,
        }
    };
    match (floats(a), floats(b)) {
        (Some(a), Some(b)) => close(a, b),
        _ => a == b,
    }
}

#[cfg(test)]
mod tests {
    use super::are_close;
    use millrace_serving_core::tensor::Data;

    #[test]
    fn numbers_may_differ_by_rounding_only() {
        let fp32 = |values: &[f32]| Data::Fp32(values.to_vec());
        assert!(are_close(&fp32(&[1000.0, 0.1]), &fp32(&[1000.01, 0.2])));
        assert!(!are_close(&fp32(&[1000.0]), &fp32(&[1002.0])));
        assert!(!are_close(&fp32(&[0.0]), &fp32(&[0.0, 0.0])));
        assert!(are_close(&fp32(&[f32::NAN, f32::INFINITY]), &fp32(&[f32::NAN, f32::INFINITY])));
        assert!(!are_close(&fp32(&[1.0]), &fp32(&[f32::INFINITY])));
        assert!(!are_close(&Data::Int64(vec![5]), &Data::Int64(vec![6])));
        assert!(are_close(&Data::Bool(vec![true]), &Data::Bool(vec![true])));
    }
}
