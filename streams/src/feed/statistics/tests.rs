use arrow::array::{
    BooleanArray, FixedSizeListArray, Float32Array, Int64Array, ListArray, RecordBatch, StringArray,
    TimestampMillisecondArray, UInt64Array,
};
use arrow::datatypes::{Float32Type, Int64Type};

use super::*;

fn summaries(batches: &[RecordBatch]) -> Vec<ColumnSummary> {
    let mut statistics = Statistics::new(&batches[0].schema());
    batches.iter().for_each(|batch| statistics.add(batch).unwrap());
    statistics.summaries()
}

fn of(array: ArrayRef) -> ColumnSummary {
    let batch = RecordBatch::try_from_iter_with_nullable([("x", array, true)]).unwrap();
    let (first, second) = (batch.slice(0, 1), batch.slice(1, batch.num_rows() - 1));
    summaries(&[first, second]).remove(0)
}

#[test]
fn numbers_have_range_mean_and_deviation() {
    let found = of(Arc::new(Int64Array::from(vec![Some(1), Some(3), None, Some(3), Some(5)])));
    assert_eq!((found.rows, found.nulls, found.distinct), (5, 1, Some(3)));
    assert_eq!((found.min, found.max, found.mean), (json!(1), json!(5), Some(3.0)));
    assert_eq!(found.std, Some(2.0f64.sqrt()));
    assert_eq!(found.top, [(json!(3), 2)]);
    let found = of(Arc::new(Float32Array::from(vec![0.5, f32::NAN, f32::INFINITY])));
    assert_eq!((found.nans, found.min, found.max), (1, json!(0.5), json!("inf")));
    let found = of(Arc::new(UInt64Array::from(vec![0, u64::MAX])));
    assert_eq!((found.min, found.max), (json!(0), json!(u64::MAX)));
    // The deviation of numbers far from 0 keeps its digits.
    let found = of(Arc::new(Int64Array::from_iter_values((0..1000).map(|n| 1_000_000_000_000 + n % 2))));
    assert_eq!(found.std, Some(0.5));
}

#[test]
fn lists_are_described_by_lengths_and_items() {
    let rows = vec![Some(vec![Some(1), None]), None, Some(vec![]), Some(vec![Some(7), Some(7), Some(9)])];
    let found = of(Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows)));
    assert_eq!((found.rows, found.nulls, found.lengths, found.null_items), (4, 1, Some((0, 3)), 1));
    assert_eq!((found.min, found.max, found.mean, found.top), (json!(1), json!(9), Some(6.0), vec![]));
    // What lies behind a null row is no value.
    let rows = vec![Some(vec![Some(1.0), Some(2.0)]), None];
    let found = of(Arc::new(FixedSizeListArray::from_iter_primitive::<Float32Type, _, _>(rows, 2)));
    assert_eq!((found.nulls, found.null_items, found.lengths), (1, 0, None));
    assert_eq!((found.min, found.mean), (json!(1.0), Some(1.5)));
}

#[test]
fn texts_flags_and_times_have_ranges_and_frequent_values() {
    let long = "x".repeat(5000);
    let found = of(Arc::new(StringArray::from(vec![Some("b"), Some("a"), None, Some("b"), Some(&long)])));
    assert_eq!((found.min, found.max, found.distinct), (json!("a"), json!("x".repeat(96)), Some(3)));
    assert_eq!(found.top, [(json!("b"), 2)]);
    let found = of(Arc::new(BooleanArray::from(vec![true, false, true])));
    assert_eq!((found.min, found.max, found.top), (json!(false), json!(true), vec![(json!(true), 2)]));
    let found = of(Arc::new(TimestampMillisecondArray::from(vec![1_500, 0])));
    assert_eq!((found.min, found.max), (json!("1970-01-01T00:00:00Z"), json!("1970-01-01T00:00:01.500Z")));
    let found = of(Arc::new(StringArray::from(vec![None::<&str>, None])));
    assert_eq!((found.nulls, found.min, found.distinct), (2, Json::Null, None));
}

#[test]
fn many_distinct_values_are_estimated_and_the_frequent_ones_found() {
    let rows = 200_000i64;
    let values = Int64Array::from_iter_values((0..rows).map(|n| if n % 4 == 0 { -1 } else { n }));
    let found = of(Arc::new(values));
    let (distinct, truth) = (found.distinct.unwrap() as f64, (rows * 3 / 4 + 1) as f64);
    assert!((distinct / truth - 1.0).abs() < 0.05, "{distinct} of {truth}");
    assert_eq!(found.top[0].0, json!(-1));
    assert!(found.top[0].1 <= 50_000 && found.top[0].1 >= 50_000 - 200, "{:?}", found.top);
}
