use std::collections::HashMap;

use arrow::array::{Array, ArrayRef, Int64Array, ListArray, StringArray};
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
