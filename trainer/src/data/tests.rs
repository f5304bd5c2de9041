//! Tests of column checks, decoding and shards.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BooleanArray, Float64Array, Int8Array, Int16Array, Int32Array, Int64Array, ListArray,
    RecordBatch, StringArray, UInt8Array, UInt16Array, UInt32Array, UInt64Array,
};
use arrow::datatypes::{Float32Type, Int32Type};
use proptest::prelude::*;

use super::{Columns, rank_shards, shard_slots};
use crate::engine::{Labels, Loss};

fn columns(input_width: usize, output_width: usize, loss: Loss) -> Columns {
    Columns {
        dataset: "d@s:/p".into(),
        features: "x".into(),
        label: "y".into(),
        input_width,
        output_width,
        loss,
        ignore_index: None,
        dictionary: None,
        scale: None,
    }
}

fn batch(x: ArrayRef, y: ArrayRef) -> RecordBatch {
    RecordBatch::try_from_iter_with_nullable([("x", x, true), ("y", y, true)]).unwrap()
}

fn lists(rows: &[Option<Vec<Option<f32>>>]) -> ArrayRef {
    Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows.to_vec()))
}

fn name(row: usize) -> String {
    format!("row {row}")
}

proptest! {
    #[test]
    fn shards_cut_batches_and_ranks_share_them(
        batch_rows in 1usize..500, shards in 1usize..40, world in 1usize..9,
    ) {
        let shards = shards.min(batch_rows);
        let mut next = 0;
        for rank in 0..world {
            for shard in rank_shards(rank, world, shards) {
                let slots = shard_slots(shard, shards, batch_rows);
                prop_assert_eq!(slots.start, next);
                next = slots.end;
            }
        }
        prop_assert_eq!(next, batch_rows);
    }
}

#[test]
fn lists_numbers_and_slices_decode_alike() {
    let x = lists(&[
        Some(vec![Some(9.0), Some(9.0)]),
        Some(vec![Some(1.0), Some(2.0)]),
        Some(vec![Some(3.0), Some(4.0)]),
    ]);
    let y: ArrayRef = Arc::new(Int8Array::from(vec![0, 1, 2]));
    let sliced = batch(x, y).slice(1, 2);
    let rows = columns(2, 3, Loss::CrossEntropy).decode(&sliced, &name).unwrap();
    let shard = rows.shard(1..2);
    assert_eq!((shard.rows, shard.inputs), (1, vec![3.0, 4.0]));
    assert_eq!(shard.labels, Labels::Class(vec![2]));
    assert_eq!(rows.shard(0..2).inputs, [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(rows.shard(1..1).rows, 0);

    let x: ArrayRef = Arc::new(Int32Array::from(vec![5, 6]));
    let y: ArrayRef = Arc::new(Float64Array::from(vec![0.5, -1.5]));
    let mse = columns(1, 1, Loss::Mse);
    let numbers = batch(x, y);
    mse.check_schema(&numbers.schema()).unwrap();
    let shard = mse.decode(&numbers, &name).unwrap().shard(0..2);
    assert_eq!((shard.inputs, shard.labels), (vec![5.0, 6.0], Labels::Value(vec![0.5, -1.5])));
}

#[test]
fn columns_that_do_not_match_the_model_are_named() {
    let good_x = || lists(&[Some(vec![Some(1.0), Some(2.0)]), Some(vec![Some(3.0), Some(4.0)])]);
    let good_y = || -> ArrayRef { Arc::new(Int64Array::from(vec![0, 1])) };
    let int_list: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int32Type, _, _>([
        Some(vec![Some(1)]),
        Some(vec![Some(2)]),
    ]));
    let cases: Vec<(ArrayRef, ArrayRef, &str)> = vec![
        (lists(&[Some(vec![Some(1.0), Some(2.0)]), Some(vec![Some(3.0)])]), good_y(), "row 1 has 1 values"),
        (
            lists(&[Some(vec![Some(1.0), None]), Some(vec![Some(3.0), Some(4.0)])]),
            good_y(),
            "row 0 has a null",
        ),
        (lists(&[None, Some(vec![Some(3.0), Some(4.0)])]), good_y(), "row 0 has no value in column \"x\""),
        (
            lists(&[Some(vec![Some(1.0), Some(2.0)]), Some(vec![Some(3.0), Some(f32::NAN)])]),
            good_y(),
            "row 1 has NaN",
        ),
        (good_x(), Arc::new(Int64Array::from(vec![Some(0), None])), "row 1 has no value in column \"y\""),
        (
            good_x(),
            Arc::new(Int64Array::from(vec![0, 3])),
            "row 1 has label 3; the model's classes are 0 to 2",
        ),
        (good_x(), Arc::new(Int64Array::from(vec![-1, 0])), "row 0 has label -1"),
        (good_x(), Arc::new(UInt64Array::from(vec![1, 1 << 63])), "row 1 has label 9223372036854775808"),
        (good_x(), Arc::new(UInt64Array::from(vec![u64::MAX, 0])), "row 0 has label 18446744073709551615"),
        (good_x(), Arc::new(Float64Array::from(vec![0.0, 1.0])), "whole class numbers"),
        (good_x(), int_list, "whole class numbers"),
        (Arc::new(StringArray::from(vec!["a", "b"])), good_y(), "numbers"),
        (Arc::new(BooleanArray::from(vec![true, false])), good_y(), "numbers"),
    ];
    let wanted = columns(2, 3, Loss::CrossEntropy);
    for (x, y, reason) in cases {
        let batch = batch(x, y);
        let error = wanted
            .check_schema(&batch.schema())
            .and_then(|()| wanted.decode(&batch, &name).map(drop))
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("dataset d@s:/p: ") && error.contains(reason), "{error} lacks {reason}");
    }
    let error = columns(2, 3, Loss::CrossEntropy);
    let error = Columns { features: "z".into(), ..error }
        .check_schema(&batch(good_x(), good_y()).schema())
        .unwrap_err();
    assert!(error.to_string().contains("no column \"z\"; it has x, y"), "{error}");
}

#[test]
fn classes_come_from_integers_of_any_width_booleans_and_texts() {
    let x = || lists(&[Some(vec![Some(1.0)]), Some(vec![Some(2.0)]), Some(vec![Some(3.0)])]);
    let integers: Vec<ArrayRef> = vec![
        Arc::new(Int8Array::from(vec![1, 0, 1])),
        Arc::new(UInt8Array::from(vec![1, 0, 1])),
        Arc::new(Int16Array::from(vec![1, 0, 1])),
        Arc::new(UInt16Array::from(vec![1, 0, 1])),
        Arc::new(Int32Array::from(vec![1, 0, 1])),
        Arc::new(UInt32Array::from(vec![1, 0, 1])),
        Arc::new(Int64Array::from(vec![1, 0, 1])),
        Arc::new(UInt64Array::from(vec![1, 0, 1])),
        Arc::new(BooleanArray::from(vec![true, false, true])),
    ];
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["yes", "no", "yes"]));
    let dictionary = serde_json::from_str(r#"{"texts":["no","yes"]}"#).unwrap();
    let classes = Columns { dictionary: Some(Arc::new(dictionary)), ..columns(1, 2, Loss::CrossEntropy) };
    let numbers = Columns { dictionary: None, ..classes.clone() };
    let mixed = classes.check_schema(&batch(x(), integers[0].clone()).schema()).unwrap_err().to_string();
    assert!(mixed.contains("are texts"), "{mixed}");
    let all = integers.into_iter().map(|y| (&numbers, y)).chain([(&classes, texts)]);
    for (classes, y) in all {
        let batch = batch(x(), y);
        classes.check_schema(&batch.schema()).unwrap();
        assert_eq!(classes.decode(&batch, &name).unwrap().shard(0..3).labels, Labels::Class(vec![1, 0, 1]));
    }
    let unseen = batch(x(), Arc::new(StringArray::from(vec!["no", "maybe", "yes"])));
    let error = classes.decode(&unseen, &name).unwrap_err().to_string();
    assert!(error.contains("row 1 has label \"maybe\"") && error.contains("\"no\", \"yes\""), "{error}");
    let narrow = Columns { output_width: 1, ..classes.clone() };
    let error = narrow.check_schema(&unseen.schema()).unwrap_err().to_string();
    assert!(error.contains("2 different labels") && error.contains("1 classes"), "{error}");
    let ignoring = Columns { ignore_index: Some(-1), ..classes.clone() };
    let error = ignoring.check_schema(&unseen.schema()).unwrap_err().to_string();
    assert!(error.contains("loss.ignore_index = -1"), "{error}");
    let ignored = batch(x(), Arc::new(Int8Array::from(vec![1, -1, 0])));
    let rows = Columns { ignore_index: Some(-1), ..numbers.clone() }.decode(&ignored, &name).unwrap();
    assert_eq!(rows.shard(0..3).labels, Labels::Class(vec![1, -1, 0]));
}

#[test]
fn binary_labels_are_booleans_or_numbers_from_0_to_1() {
    let bce = columns(1, 1, Loss::Bce);
    let x = || -> ArrayRef { Arc::new(Int32Array::from(vec![5, 6])) };
    for y in [
        Arc::new(BooleanArray::from(vec![true, false])) as ArrayRef,
        Arc::new(Int8Array::from(vec![1, 0])),
        Arc::new(Float64Array::from(vec![1.0, 0.0])),
    ] {
        let batch = batch(x(), y);
        bce.check_schema(&batch.schema()).unwrap();
        assert_eq!(bce.decode(&batch, &name).unwrap().shard(0..2).labels, Labels::Value(vec![1.0, 0.0]));
    }
    let batch = batch(x(), Arc::new(Int8Array::from(vec![1, 2])));
    let error = bce.decode(&batch, &name).unwrap_err().to_string();
    assert!(error.contains("row 1 has 2 in column \"y\"") && error.contains("from 0 to 1"), "{error}");
}
