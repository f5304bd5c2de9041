//! Tests of the ranking against a plain sort, and of edge cases.
use half::{bf16, f16};
use proptest::prelude::*;

use super::classify;
use millrace_serving_core::error::InferError;
use millrace_serving_core::tensor::{Data, Tensor};

fn classes(shape: &[i64], data: Data, count: usize, batched: bool) -> (Vec<i64>, Vec<String>) {
    let output = Tensor::new("scores", shape.to_vec(), data).unwrap();
    let best = classify(&output, count, batched).unwrap();
    assert_eq!(best.name, "scores");
    let Data::Bytes(texts) = best.data else { panic!("{best:?}") };
    assert_eq!(texts.len() as i64, best.shape.iter().product::<i64>());
    (best.shape, texts.iter().map(|text| String::from_utf8(text.to_vec()).unwrap()).collect())
}

#[test]
fn the_largest_come_first_row_by_row() {
    let data = Data::Fp32(vec![0.1, 0.7, 0.2, 3.0, -1.0, 2.5]);
    let (shape, texts) = classes(&[2, 3], data.clone(), 2, true);
    assert_eq!(shape, [2, 2]);
    assert_eq!(texts, ["0.7:1", "0.2:2", "3:0", "2.5:2"]);
    let (shape, texts) = classes(&[2, 3], data, 1, false);
    assert_eq!(shape, [1]);
    assert_eq!(texts, ["3:3"]);
}

#[test]
fn equal_elements_keep_their_order_and_nan_comes_last() {
    let nan = f32::NAN;
    let data = Data::Fp32(vec![nan, 1.0, 2.0, 2.0, nan, f32::INFINITY, -0.0, 0.0, f32::NEG_INFINITY]);
    let (_, texts) = classes(&[1, 9], data, 9, true);
    assert_eq!(texts, ["inf:5", "2:2", "2:3", "1:1", "-0:6", "0:7", "-inf:8", "NaN:0", "NaN:4"]);
}

#[test]
fn number_of_classes_is_limited_to_the_elements() {
    assert_eq!(classes(&[3], Data::Int32(vec![1, 3, 2]), usize::MAX, false).1, ["3:1", "2:2", "1:0"]);
    let (shape, texts) = classes(&[3], Data::Int32(vec![1, 3, 2]), 5, true);
    assert_eq!((shape, texts.join(" ")), (vec![3, 1], "1:0 3:0 2:0".into()));
    assert_eq!(classes(&[0, 4], Data::Int32(Vec::new()), 5, true).0, [0, 0]);
    assert_eq!(classes(&[2, 0], Data::Int32(Vec::new()), 5, true).0, [2, 0]);
    assert_eq!(classes(&[], Data::Fp64(vec![0.5]), 5, false), (vec![1], vec!["0.5:0".into()]));
}

#[test]
fn every_number_has_classes() {
    for (data, best) in [
        (Data::Uint8(vec![1, u8::MAX]), "255:1"),
        (Data::Uint16(vec![1, u16::MAX]), "65535:1"),
        (Data::Uint32(vec![1, u32::MAX]), "4294967295:1"),
        (Data::Uint64(vec![u64::MAX - 1, u64::MAX]), "18446744073709551615:1"),
        (Data::Int8(vec![i8::MIN, -1]), "-1:1"),
        (Data::Int16(vec![i16::MIN, -1]), "-1:1"),
        (Data::Int32(vec![i32::MIN, -1]), "-1:1"),
        (Data::Int64(vec![i64::MAX - 1, i64::MAX]), "9223372036854775807:1"),
        (Data::Fp16(vec![f16::from_f32(0.5), f16::from_f32(1.5)]), "1.5:1"),
        (Data::Bf16(vec![bf16::from_f32(0.5), bf16::from_f32(1.5)]), "1.5:1"),
        (Data::Fp64(vec![0.1, 0.2]), "0.2:1"),
    ] {
        assert_eq!(classes(&[1, 2], data, 1, true).1, [best]);
    }
    for data in [Data::Bool(vec![true, false]), Data::Bytes(vec!["a".into(), "b".into()])] {
        let output = Tensor::new("scores", vec![2], data).unwrap();
        let error = classify(&output, 1, true).unwrap_err();
        assert!(matches!(error, InferError::Invalid { .. }), "{error}");
        assert!(error.to_string().contains("only numbers"), "{error}");
    }
}

proptest! {
    #[test]
    fn any_number_of_classes_is_the_head_of_the_whole_order(
        values in prop::collection::vec(-4i16..4, 1..40),
        count in 1usize..50,
    ) {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by_key(|index| std::cmp::Reverse(values[*index]));
        let expected: Vec<String> =
            order.iter().take(count).map(|index| format!("{}:{index}", values[*index])).collect();
        let (_, texts) = classes(&[1, values.len() as i64], Data::Int16(values), count, true);
        prop_assert_eq!(texts, expected);
    }
}
