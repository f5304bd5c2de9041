//! Tests of the conversion from records to batches and back.
use std::collections::BTreeMap;

use millrace_bundle::{Datatype, Signature, TensorSpec};
use serde_json::json;

use super::{Document, Mapping, parse, parse_document, row_outputs};
use crate::tensor::{Data, Tensor};

fn signature(shape: Vec<i64>) -> Signature {
    let spec = |name: &str, shape| TensorSpec { name: name.into(), datatype: Datatype::Fp32, shape };
    Signature { inputs: vec![spec("input", shape)], outputs: vec![spec("logits", vec![-1, 2])] }
}

fn columns() -> BTreeMap<String, String> {
    [("input".to_string(), "pixels".to_string())].into()
}

#[test]
fn rows_become_one_batch_and_outputs_one_record_each() {
    let mapping = Mapping::new(&signature(vec![-1, 2, 2]), &columns()).unwrap();
    let flat = parse(br#"{"pixels":[1,2.5,3,4],"id":7}"#).unwrap();
    let nested = parse(br#"{"pixels":[[1,2],[3,4]]}"#).unwrap();
    let rows = vec![mapping.row(&flat).unwrap(), mapping.row(&nested).unwrap()];
    assert_eq!(mapping.fitting(&rows, 10), 2);
    assert_eq!(mapping.fitting(&rows, 1), 1);
    let batch = mapping.batch(&rows).unwrap();
    assert_eq!(batch[0].shape, [2, 2, 2]);
    assert_eq!(batch[0].data, Data::Fp32(vec![1.0, 2.5, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0]));

    let logits = Tensor::fp32("logits", vec![2, 2], vec![0.1, -1.0, f32::NAN, 2.0]).unwrap();
    let first = row_outputs(std::slice::from_ref(&logits), 0, 2).unwrap();
    assert_eq!(json!(first.outputs), json!({"logits": [0.1, -1.0]}));
    assert_eq!(first.argmax["logits"], 0);
    let second = row_outputs(std::slice::from_ref(&logits), 1, 2).unwrap();
    assert_eq!(json!(second.outputs), json!({"logits": ["NaN", 2.0]}));
    assert!(second.argmax.is_empty());
    assert!(row_outputs(&[logits], 0, 3).is_err());
}

#[test]
fn bad_records_are_refused_with_a_reason() {
    let mapping = Mapping::new(&signature(vec![-1, 2, 2]), &columns()).unwrap();
    for (record, reason) in [
        (r#"{"id":1}"#, "no field \"pixels\""),
        (r#"{"pixels":[1,2,3]}"#, "3 elements"),
        (r#"{"pixels":[[1,2,3,4]]}"#, "nested as [1, 4]"),
        (r#"{"pixels":[[1,2],[3]]}"#, "ragged"),
        (r#"{"pixels":["a","b","c","d"]}"#, "strings for FP32"),
        (r#"{"pixels":[1,2,3,1e300]}"#, "does not fit FP32"),
        (r#"{"pixels":null}"#, "null"),
    ] {
        let error = mapping.row(&parse(record.as_bytes()).unwrap()).unwrap_err().to_string();
        assert!(error.contains(reason), "{record}: {error}");
    }
    for bytes in [&b"not json"[..], b"[1]", b"", b"\xff", b"{}{}"] {
        assert!(parse(bytes).unwrap_err().to_string().contains("not a JSON object"));
    }
}

#[test]
fn mappings_are_checked_against_the_signature() {
    assert!(Mapping::new(&signature(vec![2, 2]), &columns()).is_err());
    assert!(Mapping::new(&signature(vec![]), &columns()).is_err());
    let other = [("nosuch".to_string(), "pixels".to_string())].into();
    assert!(Mapping::new(&signature(vec![-1, 2]), &other).is_err());
    let single = Mapping::new(&signature(vec![1, 1]), &columns()).unwrap();
    let row = single.row(&parse(br#"{"pixels":5}"#).unwrap()).unwrap();
    assert_eq!(single.fitting(&[row.clone(), row.clone()], 10), 1);
    assert_eq!(single.batch(&[row]).unwrap()[0].shape, [1, 1]);
}

#[test]
fn rows_of_free_extents_batch_with_their_likes() {
    let mapping = Mapping::new(&signature(vec![-1, -1]), &columns()).unwrap();
    let row = |text: &str| mapping.row(&parse(text.as_bytes()).unwrap()).unwrap();
    let rows = [row(r#"{"pixels":[1,2]}"#), row(r#"{"pixels":[3,4]}"#), row(r#"{"pixels":[5]}"#)];
    assert_eq!(mapping.fitting(&rows, 10), 2);
    assert!(mapping.batch(&rows).is_err());
    assert_eq!(mapping.batch(&rows[2..]).unwrap()[0].shape, [1, 1]);
}

#[test]
fn fields_of_the_training_are_joined_as_there() {
    let trained = |fields: &[&str]| -> BTreeMap<String, Vec<String>> {
        [("input".to_owned(), fields.iter().map(|field| (*field).to_owned()).collect())].into()
    };
    let of = |shape: Vec<i64>, fields: &[&str], record: &str| {
        let mapping = Mapping::of_trained(&signature(shape), &BTreeMap::new(), &trained(fields))
            .map_err(|error| error.to_string())?;
        let row = mapping.row(&parse(record.as_bytes()).unwrap()).map_err(|error| error.to_string())?;
        match &mapping.batch(&[row]).unwrap()[0].data {
            Data::Fp32(values) => Ok::<_, String>(values.clone()),
            other => panic!("{other:?}"),
        }
    };
    let record = r#"{"age":7,"seen":true,"history":[1,2],"four":[[1,2],[3,4]],"input":[5,6]}"#;
    assert_eq!(of(vec![-1, 4], &["age", "history", "seen"], record).unwrap(), [7.0, 1.0, 2.0, 1.0]);
    assert_eq!(of(vec![-1, 2, 3], &["four", "history"], record).unwrap(), [1.0, 2.0, 1.0, 3.0, 4.0, 2.0]);
    assert_eq!(of(vec![-1, 2], &["history"], record).unwrap(), [1.0, 2.0]);
    for (shape, fields, reason) in [
        (vec![-1, 4], &["age", "history"][..], "3 elements, shape [4] takes 4"),
        (vec![-1, 4], &["age", "none"], "no field \"none\""),
        (
            vec![-1, 2, 3],
            &["four", "age"],
            "field \"age\": 1 elements, input \"input\" of shape [2, 3] needs a multiple",
        ),
        (vec![-1, -1], &["age", "seen"], "fields age, seen cannot be joined"),
    ] {
        let error = of(shape, fields, record).unwrap_err();
        assert!(error.contains(reason), "{error} lacks {reason}");
    }
    // What is configured comes first, and inputs that the training did not name take the field of their name.
    let named = Mapping::of_trained(&signature(vec![-1, 2]), &columns(), &trained(&["a", "b"])).unwrap();
    assert_eq!(named.inputs().next().unwrap().1, ["pixels"]);
    let plain = Mapping::of_trained(&signature(vec![-1, 2]), &BTreeMap::new(), &BTreeMap::new()).unwrap();
    assert_eq!(plain.inputs().next().unwrap().1, ["input"]);
}

#[test]
fn inputs_from_other_sources_are_checked() {
    let mapping = Mapping::new(&signature(vec![-1, 2, -1]), &columns()).unwrap();
    let row = mapping.row_of(vec![(vec![2, 3], Data::Fp32(vec![0.5; 6]))]).unwrap();
    assert_eq!(mapping.batch(&[row.clone(), row]).unwrap()[0].shape, [2, 2, 3]);
    for (inputs, reason) in [
        (vec![], "0 inputs, the model takes 1"),
        (vec![(vec![3, 2], Data::Fp32(vec![0.5; 6]))], "it has shape [3, 2], the model takes [2, -1]"),
        (vec![(vec![2], Data::Fp32(vec![0.5; 2]))], "it has shape [2]"),
        (vec![(vec![2, 1], Data::Uint8(vec![1; 2]))], "it holds UINT8, the model takes FP32"),
        (vec![(vec![2, 2], Data::Fp32(vec![0.5; 3]))], "3 elements for shape [2, 2]"),
        (vec![(vec![2, -1], Data::Fp32(vec![]))], "is negative or too large"),
    ] {
        let error = mapping.row_of(inputs).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn floats_that_are_not_finite_are_read_as_they_are_written() {
    let mapping = Mapping::new(&signature(vec![-1, 2, 2]), &columns()).unwrap();
    for text in [
        r#"{"pixels":[1,"NaN","Infinity","-Infinity"]}"#,
        r#"{"pixels":[[1,"NaN"],["Infinity","-Infinity"]]}"#,
    ] {
        let row = mapping.row(&parse(text.as_bytes()).unwrap()).unwrap();
        let batch = mapping.batch(&[row]).unwrap();
        let Data::Fp32(values) = &batch[0].data else { panic!("{batch:?}") };
        assert!(values[0] == 1.0 && values[1].is_nan(), "{values:?}");
        assert_eq!(values[2..], [f32::INFINITY, f32::NEG_INFINITY]);
        let written = row_outputs(&batch, 0, 1).unwrap();
        assert_eq!(written.outputs[&batch[0].name], json!([1.0, "NaN", "Infinity", "-Infinity"]));
    }
    let refused = mapping.row(&parse(br#"{"pixels":["NaN",1,2,"nan"]}"#).unwrap()).unwrap_err();
    assert!(refused.to_string().contains("pixels"), "{refused}");
}

#[test]
fn duplicate_field_is_refused() {
    let error = parse(br#"{"a":1,"b":2,"a":3}"#).unwrap_err().to_string();
    assert!(error.contains("field \"a\" appears twice"), "{error}");
    let error = parse_document(br#"[{"a":1},{"a":1,"a":2}]"#).unwrap_err().to_string();
    assert!(error.contains("field \"a\" appears twice"), "{error}");
    assert!(parse_document(br#"{"a":[1],"a":[2]}"#).is_err());
    assert!(matches!(parse_document(br#" [{"a":1}]"#), Ok(Document::Records(records)) if records.len() == 1));
    assert!(matches!(parse_document(br#"{"a":[1]}"#), Ok(Document::Columns(_))));
    assert!(parse_document(b"7").is_err());
}
