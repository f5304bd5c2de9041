//! Tests of row independence: reported when a model is created, and respected by commands that send records.

use std::path::{Path, PathBuf};

use millrace_bundle::onnx::tensor_proto::DataType;
use millrace_bundle::onnx::*;
use prost::Message;
use serde_json::{Value, json};

use crate::support::Home;

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn value(name: &str) -> ValueInfoProto {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let dim = |value| Dimension { value: Some(value), ..Default::default() };
    let shape = TensorShapeProto { dim: vec![dim(Value::DimParam("batch".into())), dim(Value::DimValue(1))] };
    let tensor = type_proto::Tensor { elem_type: Some(DataType::Float as i32), shape: Some(shape) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() }),
        ..Default::default()
    }
}

/// A graph with one node that computes `y` from `x`, both FP32 [batch, 1], and a constant.
fn one_node(operator: &str, name: &str, constant: TensorProto) -> ModelProto {
    ModelProto {
        ir_version: Some(8),
        opset_import: vec![OperatorSetIdProto { domain: Some(String::new()), version: Some(17) }],
        graph: Some(GraphProto {
            name: Some("one".into()),
            node: vec![NodeProto {
                name: Some(name.into()),
                op_type: Some(operator.into()),
                input: vec!["x".into(), constant.name().to_owned()],
                output: vec!["y".into()],
                ..Default::default()
            }],
            initializer: vec![constant],
            input: vec![value("x")],
            output: vec![value("y")],
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// A model that sums over its rows, so that they depend on each other.
fn summed(home: &Home) -> PathBuf {
    let axis = TensorProto {
        name: Some("axis".into()),
        data_type: Some(DataType::Int64 as i32),
        int64_data: vec![0],
        ..Default::default()
    };
    home.file("summed.onnx", one_node("CumSum", "over_rows", axis).encode_to_vec())
}

#[test]
fn model_that_sums_rows_gets_records_one_by_one() {
    let home = Home::new();
    let (file, folder) = (summed(&home), home.dir.path().join("models"));
    std::fs::create_dir(&folder).unwrap();
    let shown = home.json(["model", "show", text(&file)]);
    let made = home.json(["model", "import", text(&file), "--name", "summed", "--models", text(&folder)]);
    for rows in [&shown["rows"], &made["rows"]] {
        let place = json!({ "node": "over_rows", "operator": "CumSum", "value": "y", "reason": "it works along the rows" });
        assert_eq!((&rows["independent"], &rows["place"]), (&json!(false), &place), "{rows}");
    }
    let printed = home.ok(["model", "import", text(&file), "--name", "summed", "--models", text(&folder)]);
    assert!(
        printed.contains(r#"dependent: CumSum "over_rows" that gives "y": it works along the rows"#),
        "{printed}"
    );
    let (service, served) = home.serve(["--models", text(&folder)]);
    let records = home.file("records.jsonl", "{\"x\":[1]}\n{\"x\":[10]}\n{\"x\":[100]}\n");
    let grpc = served["grpc"].as_str().unwrap();
    let predicted = home.json(["predict", "summed", text(&records), "--grpc", grpc]);
    let found: Vec<&Value> =
        predicted["predictions"].as_array().unwrap().iter().map(|row| &row["outputs"]["y"]).collect();
    assert_eq!(json!(found), json!([[1.0], [10.0], [100.0]]), "{predicted}");
    assert_eq!(service.stop(), 0);
}

#[test]
fn trained_networks_have_independent_rows() {
    let home = Home::new();
    let file = home.dir.path().join("net.onnx");
    for kind in [
        &["mlp", "--inputs", "8", "--hidden", "16", "--classes", "3"][..],
        &["cnn", "--height", "8", "--width", "8", "--classes", "3"],
    ] {
        home.ok([&["model", "init"][..], kind, &[text(&file)]].concat());
        assert_eq!(
            home.json(["model", "show", text(&file)])["rows"],
            json!({ "independent": true }),
            "{kind:?}"
        );
    }
}
