use std::collections::HashMap;

use arrow::array::{Array, ArrayRef, DictionaryArray, Int32Array, Int64Array, ListArray, StringArray};
use arrow::datatypes::{DataType, Field, Int32Type};

use super::*;
use crate::feed::PlanOptions;

fn schema(fields: &[(&str, DataType, bool)]) -> Schema {
    Schema::new(fields.iter().map(|(n, t, null)| Field::new(*n, t.clone(), *null)).collect::<Vec<_>>())
}

#[test]
fn schemas_unite_by_name() {
    let a = schema(&[("id", DataType::Int64, false), ("label", DataType::Int64, false)]);
    let b = schema(&[
        ("label", DataType::Int64, true),
        ("note", DataType::Utf8, false),
        ("id", DataType::Int64, false),
    ]);
    let (both, conflicts) = schema::unify([("a", &a), ("b", &b)].into_iter());
    assert_eq!(conflicts, []);
    let expected = schema(&[
        ("id", DataType::Int64, false),
        ("label", DataType::Int64, true),
        ("note", DataType::Utf8, true),
    ]);
    assert_eq!(both, expected);
    assert_eq!(decode_schema(&encode_schema(&both).unwrap()).unwrap(), both);
    assert!(decode_schema("zz").is_err());
    assert!(decode_schema("00").is_err());
}

#[test]
fn a_type_conflict_names_both_files() {
    let a = schema(&[("id", DataType::Int64, false)]);
    let b = schema(&[("id", DataType::Utf8, false)]);
    let (both, conflicts) = schema::unify([("x/a.parquet", &a), ("x/b.parquet", &b)].into_iter());
    assert_eq!((both.fields().len(), conflicts.len()), (0, 1));
    let text = conflicts[0].error().to_string();
    for part in ["\"id\"", "Int64 in x/a.parquet", "Utf8 in x/b.parquet"] {
        assert!(text.contains(part), "{text}");
    }
}

/// Six orders of three files.
fn orders<T: Clone>(files: &[T; 3]) -> Vec<Vec<T>> {
    let rotated = (0..3).map(|by| {
        let mut order = files.to_vec();
        order.rotate_left(by);
        order
    });
    rotated.flat_map(|order| [order.clone(), order.into_iter().rev().collect()]).collect()
}

#[test]
fn nulls_and_wider_types_fit_in_each_order_of_the_files() {
    use DataType::{Binary, Int64, LargeBinary, LargeUtf8, Null, Utf8};
    let coded = || DataType::Dictionary(Box::new(DataType::Int32), Box::new(Utf8));
    let list = |kind: DataType| DataType::List(Arc::new(Field::new("item", kind, true)));
    let pair = |a: DataType, b: DataType| {
        DataType::Struct(
            [("a", a), ("b", b)].map(|(name, kind)| Field::new(name, kind, true)).to_vec().into(),
        )
    };
    let required = |kind: DataType| DataType::List(Arc::new(Field::new("item", kind, false)));
    for (kinds, expected) in [
        ([Null, Int64, Int64], Some((Int64, true))),
        ([Null, Null, list(Int64)], Some((list(Int64), true))),
        ([Null, Utf8, LargeUtf8], Some((LargeUtf8, true))),
        ([coded(), Utf8, LargeUtf8], Some((LargeUtf8, false))),
        ([coded(), Utf8, Null], Some((Utf8, true))),
        ([Binary, Binary, LargeBinary], Some((LargeBinary, false))),
        ([list(Null), list(Utf8), list(LargeUtf8)], Some((list(LargeUtf8), false))),
        (
            [pair(Null, Utf8), pair(Int64, Utf8), pair(Int64, LargeUtf8)],
            Some((pair(Int64, LargeUtf8), false)),
        ),
        ([Null, Null, Null], Some((Null, false))),
        ([Null, Int64, Utf8], None),
        ([Utf8, LargeUtf8, LargeBinary], None),
        ([list(Int64), list(Null), list(Utf8)], None),
        ([required(Int64), required(Null), required(Int64)], Some((list(Int64), false))),
    ] {
        for order in orders(&kinds) {
            let files = order.iter().map(|kind| schema(&[("x", kind.clone(), false)])).collect::<Vec<_>>();
            let (both, conflicts) = schema::unify(["a", "b", "c"].into_iter().zip(&files));
            let found = both.fields().first().map(|field| (field.data_type().clone(), field.is_nullable()));
            assert_eq!(found, expected, "{order:?}");
            assert_eq!(conflicts.is_empty(), expected.is_some(), "{order:?}");
        }
    }
}

#[test]
fn extension_types_are_kept_where_all_files_agree() {
    let tensors = DataType::FixedSizeList(Arc::new(Field::new("item", DataType::Float32, true)), 6);
    let field = |kind: &DataType, shape: &str| {
        let metadata = [
            ("ARROW:extension:name", "arrow.fixed_shape_tensor"),
            ("ARROW:extension:metadata", shape),
            ("PARQUET:field_id", "7"),
        ];
        let metadata = metadata.map(|(key, value)| (key.to_owned(), value.to_owned()));
        Schema::new(vec![Field::new("x", kind.clone(), true).with_metadata(HashMap::from(metadata))])
    };
    let plain = |kind: &DataType| Schema::new(vec![Field::new("x", kind.clone(), true)]);
    let (square, other) = (|| field(&tensors, "{\"shape\":[2,3]}"), || field(&tensors, "{\"shape\":[3,2]}"));
    let large = DataType::LargeUtf8;
    for (files, kept) in [
        ([square(), square(), square()], true),
        ([square(), plain(&DataType::Null), Schema::empty()], true),
        ([square(), other(), square()], false),
        ([square(), square(), plain(&tensors)], false),
        ([field(&DataType::Utf8, ""), field(&large, ""), field(&large, "")], false),
    ] {
        for order in orders(&files) {
            let (both, conflicts) = schema::unify(["a", "b", "c"].into_iter().zip(&order));
            assert_eq!(conflicts, []);
            let mut keys: Vec<&str> = both.field(0).metadata().keys().map(String::as_str).collect();
            keys.sort_unstable();
            let expected: &[&str] = match kept {
                true => &["ARROW:extension:metadata", "ARROW:extension:name"],
                false => &[],
            };
            assert_eq!(keys, expected, "{order:?}");
            assert_eq!(decode_schema(&encode_schema(&both).unwrap()).unwrap(), both);
        }
    }
}

#[test]
fn columns_are_converted_to_the_common_schema() {
    let list = ListArray::from_iter_primitive::<Int32Type, _, _>([Some(vec![Some(1)]), None]);
    let element = Arc::new(Field::new("element", DataType::Int32, true));
    let target = Arc::new(Schema::new(vec![
        Field::new("missing", DataType::Utf8, true),
        Field::new("list", DataType::List(element), true),
        Field::new("id", DataType::Int64, false),
    ]));
    let columns: HashMap<String, ArrayRef> = HashMap::from([
        ("id".to_string(), Arc::new(Int64Array::from(vec![1, 2])) as ArrayRef),
        ("list".to_string(), Arc::new(list) as ArrayRef),
        ("unused".to_string(), Arc::new(StringArray::from(vec!["a", "b"])) as ArrayRef),
    ]);
    let batch = conform(&columns, 2, &target).unwrap();
    assert_eq!(batch.schema(), target);
    assert_eq!(batch.column(0).null_count(), 2);
    assert_eq!(batch.column(2).len(), 2);
}

#[test]
fn a_dictionary_whose_values_exceed_their_type_names_its_column() {
    let keys = Int32Array::from(vec![0; 2048]);
    let values = Arc::new(StringArray::from(vec!["x".repeat(1 << 20)]));
    let coded = DictionaryArray::<Int32Type>::try_new(keys, values).unwrap();
    let target = Arc::new(schema(&[("x", DataType::Utf8, true)]));
    let columns: HashMap<String, ArrayRef> = HashMap::from([("x".to_string(), Arc::new(coded) as ArrayRef)]);
    let error = conform(&columns, 2048, &target).unwrap_err().to_string();
    for part in ["column \"x\"", "smaller row groups", "large_string"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn specifications_are_parsed_strictly() {
    for (text, shown) in [
        ("digits", "digits:/"),
        ("digits@v1", "digits@v1:/"),
        ("digits@v1:/train/", "digits@v1:/train"),
        ("digits:/a//b", "digits:/a/b"),
    ] {
        let spec: DatasetSpec = text.parse().unwrap();
        assert_eq!(spec.to_string(), shown);
        let json = serde_json::to_string(&spec).unwrap();
        assert_eq!(json, format!("\"{shown}\""));
        assert_eq!(serde_json::from_str::<DatasetSpec>(&json).unwrap(), spec);
    }
    for text in ["", ":/train", "digits:train", "digits:/../x", "digits:/a\nb", "@v1:/x", "a b:/x"] {
        let error = text.parse::<DatasetSpec>().unwrap_err().to_string();
        assert!(error.contains("VOLUME[@SNAPSHOT]:/PATH"), "{error}");
    }
}

#[test]
fn two_columns_of_one_name_are_refused() {
    let twice =
        schema(&[("x", DataType::Int64, false), ("y", DataType::Utf8, true), ("x", DataType::Int64, false)]);
    let (read, conflicts) = schema::unify([("a/twice.parquet", &twice)].into_iter());
    assert_eq!((read.fields().len(), conflicts.len()), (1, 1));
    let error = conflicts[0].error().to_string();
    assert!(error.contains("a/twice.parquet has two columns \"x\""), "{error}");
}

#[tokio::test]
async fn only_plans_of_shared_snapshots_share_row_groups() {
    let home = tempfile::tempdir().unwrap();
    let datafs = millrace_datafs::Datafs::open(home.path(), &millrace_datafs::Config::default()).unwrap();
    let volume = "digits".parse().unwrap();
    datafs.volume_create(&volume).unwrap();
    let live = datafs.view(&"digits".parse().unwrap()).unwrap();
    live.write_file("train/0.jsonl", b"{\"x\": 1}\n").unwrap();
    datafs.snapshot_create(&volume, &"v1".parse().unwrap()).unwrap();
    let content = async |spec: &str, is_shared: bool| {
        let opened = spec.parse::<DatasetSpec>().unwrap().open(&datafs).await.unwrap();
        let opened = if is_shared { opened.shared().await } else { opened };
        let options = PlanOptions { batch_rows: 1, ..PlanOptions::default() };
        opened.plan(&options).await.unwrap().content().copied()
    };
    let first = content("digits@v1:/train", true).await;
    assert!(first.is_some());
    assert_eq!(content("digits@latest:/train", true).await, first);
    assert_eq!(content("digits@v1:/train", false).await, None);
    assert_eq!(content("digits:/train", true).await, None, "a live volume changes");
    // Another file of the same size, under the same names.
    datafs.snapshot_delete(&volume, &"v1".parse().unwrap()).unwrap();
    live.write_file("train/0.jsonl", b"{\"x\": 2}\n").unwrap();
    datafs.snapshot_create(&volume, &"v1".parse().unwrap()).unwrap();
    let second = content("digits@v1:/train", true).await;
    assert!(second.is_some() && second != first);
}
