//! Tests of column checks, decoding and shards.

use std::sync::Arc;

use arrow::array::{
    ArrayRef, BinaryArray, BooleanArray, FixedSizeListArray, Float32Array, Float64Array, Int8Array,
    Int16Array, Int32Array, Int64Array, ListArray, RecordBatch, StringArray, UInt8Array, UInt16Array,
    UInt32Array, UInt64Array,
};
use arrow::datatypes::{DataType, Field, Float32Type, Int32Type, Int64Type};
use proptest::prelude::*;

use super::{Columns, InputColumns, list_length, rank_shards, shard_slots};
use crate::engine::{Labels, Loss};

fn input(columns: &[&str], width: usize, last: usize) -> InputColumns {
    InputColumns {
        input: None,
        columns: columns.iter().map(|name| (*name).to_owned()).collect(),
        width,
        last,
        below: None,
        is_strict: columns.len() > 1,
    }
}

fn columns(input_width: usize, output_width: usize, loss: Loss) -> Columns {
    Columns {
        dataset: "d@s:/p".into(),
        inputs: vec![input(&["x"], input_width, input_width)],
        lengths: Arc::default(),
        label: "y".into(),
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
        (
            Arc::new(BooleanArray::from(vec![true, false])),
            good_y(),
            "has 1 values per row, the model takes 2",
        ),
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
    let error = Columns { inputs: vec![input(&["z"], 2, 2)], ..error }
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

fn fixed_lists(size: i32, values: Vec<f32>) -> ArrayRef {
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    Arc::new(FixedSizeListArray::new(item, size, Arc::new(Float32Array::from(values)), None))
}

/// Two rows of columns of all kinds.
fn table() -> RecordBatch {
    let list = lists(&[Some(vec![Some(1.0), Some(2.0)]), Some(vec![Some(3.0), Some(4.0)])]);
    let ragged = lists(&[Some(vec![Some(1.0)]), Some(vec![Some(3.0), Some(4.0)])]);
    let ids = ListArray::from_iter_primitive::<Int64Type, _, _>([
        Some(vec![Some(1), Some(2)]),
        Some(vec![Some(3), Some((1 << 24) + 1)]),
    ]);
    RecordBatch::try_from_iter_with_nullable([
        ("list", list, true),
        ("ragged", ragged, true),
        ("ids", Arc::new(ids) as ArrayRef, true),
        ("number", Arc::new(Int32Array::from(vec![7, 8])), true),
        ("flag", Arc::new(BooleanArray::from(vec![true, false])), true),
        ("text", Arc::new(StringArray::from(vec!["a", "b"])), true),
        ("picture", Arc::new(BinaryArray::from(vec![b"a".as_slice(), b"b"])), true),
        ("fixed", fixed_lists(2, vec![-1.0, -2.0, -3.0, -4.0]), true),
        ("four", fixed_lists(4, (10..18).map(|value| value as f32).collect()), true),
        ("y", Arc::new(Int64Array::from(vec![0, 1])), true),
    ])
    .unwrap()
}

/// The rows that the inputs take from [`table`], or the refusal.
fn rows_of(inputs: Vec<InputColumns>) -> Result<Vec<Vec<f32>>, String> {
    let batch = table();
    let schema = batch.schema();
    let length = |name: &str| Some((name.to_owned(), list_length(batch.column_by_name(name)?, 0)?));
    let lengths = inputs.iter().flat_map(|input| input.open(&schema)).filter_map(length).collect();
    let columns = Columns { inputs, lengths: Arc::new(lengths), ..columns(0, 2, Loss::CrossEntropy) };
    columns.check_schema(&schema).map_err(|e| e.to_string())?;
    let rows = columns.decode(&batch, &name).map_err(|e| e.to_string())?;
    Ok(rows.inputs().map(<[f32]>::to_vec).collect())
}

#[test]
fn several_columns_make_one_row_in_their_order() {
    let of = |names: &[&str], width: usize| rows_of(vec![input(names, width, width)]);
    assert_eq!(of(&["number", "list", "flag"], 4).unwrap(), [[7.0, 1.0, 2.0, 1.0], [8.0, 3.0, 4.0, 0.0]]);
    assert_eq!(
        of(&["fixed", "list", "number"], 5).unwrap(),
        [[-1.0, -2.0, 1.0, 2.0, 7.0], [-3.0, -4.0, 3.0, 4.0, 8.0]]
    );
    for (names, width, reason) in [
        (
            &["number", "fixed"][..],
            4,
            "columns number (1), fixed (2) have 3 values per row together, the model takes 4",
        ),
        (&["list", "ragged"][..], 3, "row 1 has 2 values in column \"ragged\", not 1"),
        (&["list", "ids"][..], 4, ""),
        (&["number", "nothing"][..], 2, "no column \"nothing\"; it has list, "),
        (&["number", "text"][..], 2, "column \"text\" is Utf8; features are numbers, true and false"),
        (&["number", "picture"][..], 2, "an image needs its size, as in images.picture = { size ="),
    ] {
        match (of(names, width), reason) {
            (Ok(_), "") => {}
            (Err(error), reason) if !reason.is_empty() => {
                assert!(error.contains(reason), "{error} lacks {reason}")
            }
            (found, _) => panic!("{names:?}: {found:?}"),
        }
    }
}

#[test]
fn numbers_beyond_float32_are_told_from_infinite_ones() {
    let wanted = columns(1, 1, Loss::Mse);
    let x: ArrayRef = Arc::new(Float32Array::from(vec![1.0, 2.0]));
    for (value, reason) in [
        (1e300, "row 1 has 1e300 in column \"y\", which float32 cannot hold: scale the column"),
        (-1e39, "row 1 has -1e39 in column \"y\", which float32 cannot hold: scale the column"),
        (f64::INFINITY, "row 1 has inf in column \"y\""),
        (f64::NAN, "row 1 has NaN in column \"y\""),
    ] {
        let y: ArrayRef = Arc::new(Float64Array::from(vec![0.5, value]));
        let error = wanted.decode(&batch(Arc::clone(&x), y), &name).unwrap_err().to_string();
        assert!(error.ends_with(reason), "{error} lacks {reason}");
    }
}

#[test]
fn a_column_of_empty_lists_is_told() {
    let (empty, one) = (Some(vec![]), Some(vec![Some(1.0)]));
    let table = [("a", lists(&[one.clone(), one])), ("b", lists(&[empty.clone(), empty]))];
    let y: ArrayRef = Arc::new(Int64Array::from(vec![0, 1]));
    let columns_of = table.into_iter().chain([("y", y)]).map(|(name, column)| (name, column, true));
    let read = RecordBatch::try_from_iter_with_nullable(columns_of).unwrap();
    let wanted = Columns {
        inputs: vec![input(&["a", "b"], 1, 1)],
        lengths: Arc::new([("a".to_owned(), 1), ("b".to_owned(), 0)].into()),
        ..columns(1, 2, Loss::CrossEntropy)
    };
    let error = wanted.decode(&read, &name).unwrap_err().to_string();
    assert!(error.contains("column \"b\" is empty: its lists have 0 values"), "{error}");
}

#[test]
fn columns_stand_side_by_side_in_the_last_dimension() {
    // An input [rows, 2, 3]: two values of a column of four stand together.
    let found = rows_of(vec![input(&["four", "list"], 6, 3)]).unwrap();
    assert_eq!(found, [[10.0, 11.0, 1.0, 12.0, 13.0, 2.0], [14.0, 15.0, 3.0, 16.0, 17.0, 4.0]]);
    let error = rows_of(vec![input(&["four", "number"], 6, 3)]).unwrap_err();
    assert!(
        error.contains("column \"number\" has 1 values per row; the model takes 2 times 3 values"),
        "{error}"
    );
}

#[test]
fn inputs_follow_one_another_and_keep_whole_numbers_exact() {
    let named = |name: &str, columns: &[&str], width: usize, below: Option<Vec<u32>>| InputColumns {
        input: Some(name.to_owned()),
        is_strict: true,
        below,
        ..input(columns, width, width)
    };
    let found = rows_of(vec![
        named("mask", &["flag"], 1, Some(vec![2])),
        named("a", &["fixed"], 2, None),
        named("b", &["number", "flag"], 2, Some(vec![9, 2])),
    ]);
    assert_eq!(found.unwrap(), [[1.0, -1.0, -2.0, 7.0, 1.0], [0.0, -3.0, -4.0, 8.0, 0.0]]);
    for (columns, below, reason) in [
        (
            &["ids"][..],
            vec![1 << 24; 2],
            "row 1 has 16777217 in column \"ids\"; the model takes whole numbers from 0 to 16777215",
        ),
        (
            &["number", "flag"][..],
            vec![8, 2],
            "row 1 has 8 in column \"number\"; the model takes whole numbers from 0 to 7",
        ),
        (&["flag", "number"][..], vec![2, 8], "row 1 has 8 in column \"number\""),
        (
            &["list"][..],
            vec![9, 9],
            "; input \"ids\" of the model takes whole numbers: write the column as integers",
        ),
    ] {
        let error = rows_of(vec![named("ids", columns, 2, Some(below))]).unwrap_err();
        assert!(error.contains(reason), "{error} lacks {reason}");
    }
    let error = rows_of(vec![named("a", &["four"], 2, None)]).unwrap_err();
    assert!(
        error.contains("column \"four\" has 4 values per row, input \"a\" of the model takes 2"),
        "{error}"
    );
}
