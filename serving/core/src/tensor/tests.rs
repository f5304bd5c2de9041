//! Tests of the raw form: round trips for every datatype, and refusal of all bytes that do not fit exactly.
use bytes::Bytes;
use half::{bf16, f16};
use millrace_bundle::Datatype;
use proptest::prelude::*;

use super::{Data, Tensor, element_count};

fn samples() -> Vec<Data> {
    vec![
        Data::Bool(vec![true, false, true]),
        Data::Uint8(vec![0, 255, 7]),
        Data::Uint16(vec![0, u16::MAX, 7]),
        Data::Uint32(vec![0, u32::MAX, 7]),
        Data::Uint64(vec![0, u64::MAX, 7]),
        Data::Int8(vec![i8::MIN, i8::MAX, -7]),
        Data::Int16(vec![i16::MIN, i16::MAX, -7]),
        Data::Int32(vec![i32::MIN, i32::MAX, -7]),
        Data::Int64(vec![i64::MIN, i64::MAX, -7]),
        Data::Fp16(vec![f16::MIN, f16::MAX, f16::from_f32(0.5)]),
        Data::Bf16(vec![bf16::MIN, bf16::MAX, bf16::from_f32(0.5)]),
        Data::Fp32(vec![f32::MIN, f32::INFINITY, 0.1]),
        Data::Fp64(vec![f64::MIN, f64::INFINITY, 0.1]),
        Data::Bytes(vec![Bytes::new(), Bytes::from_static(b"a"), Bytes::from_static(b"\xff\0")]),
    ]
}

#[test]
fn every_datatype_survives_its_raw_form() {
    let samples = samples();
    assert_eq!(samples.len(), Datatype::ALL.len());
    for data in samples {
        let raw = data.to_raw();
        assert_eq!(raw.len(), data.raw_len(), "{:?}", data.datatype());
        let back = Tensor::from_raw("x".into(), data.datatype(), vec![3, 1], &raw).unwrap();
        assert_eq!(back.data, data);
    }
}

#[test]
fn raw_data_must_fit_the_shape_exactly() {
    for data in samples() {
        let raw = data.to_raw();
        for (shape, raw) in [
            (vec![2], raw.clone()),
            (vec![4], raw.clone()),
            (vec![3], raw.slice(..raw.len() - 1)),
            (vec![3], [raw.as_ref(), &[0]].concat().into()),
            (vec![-3], raw.clone()),
            (vec![i64::MAX, 4], raw.clone()),
        ] {
            let error = Tensor::from_raw("x".into(), data.datatype(), shape.clone(), &raw);
            assert!(error.is_err(), "{:?} {shape:?} {}", data.datatype(), raw.len());
        }
    }
    let two = Bytes::from_static(&[0, 2]);
    assert!(Tensor::from_raw("x".into(), Datatype::Bool, vec![2], &two).is_err());
}

#[test]
fn element_counts_are_checked() {
    assert_eq!(element_count("x", &[]).unwrap(), 1);
    assert_eq!(element_count("x", &[0, 5]).unwrap(), 0);
    assert!(element_count("x", &[i64::MAX, 2]).is_err());
    assert!(element_count("x", &[i64::MAX]).is_err() || cfg!(target_pointer_width = "64"));
    assert!(element_count("x", &[-1]).is_err());
}

proptest! {
    #[test]
    fn hostile_raw_bytes_never_panic(raw in proptest::collection::vec(any::<u8>(), 0..64), n in 0i64..20) {
        let raw = Bytes::from(raw);
        for datatype in Datatype::ALL {
            if let Ok(tensor) = Tensor::from_raw("x".into(), datatype, vec![n], &raw) {
                prop_assert_eq!(tensor.data.len() as i64, n);
                prop_assert_eq!(tensor.data.to_raw(), raw.clone());
            }
        }
    }
}
