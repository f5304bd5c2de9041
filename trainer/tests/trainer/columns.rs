//! Tests of jobs whose model has several inputs and outputs, and of inputs of several columns.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{
    ArrayRef, AsArray, BooleanArray, FixedSizeListArray, Float32Array, Float64Array, Int32Array, Int64Array,
    ListArray, RecordBatch, StringArray,
};
use arrow::datatypes::{DataType, Field, Float32Type};
use millrace_bundle::onnx::tensor_shape_proto::{Dimension, dimension};
use millrace_bundle::onnx::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto,
    TypeProto, ValueInfoProto, attribute_proto::AttributeType, type_proto,
};
use millrace_datafs::Datafs;
use millrace_trainer::job::JobFile;
use millrace_trainer::{End, TrainReport};
use prost::Message;

use super::{ROWS, WIDTH, bundle, home, job_text, parquet_bytes, rows, run, setup, signal, versions, volume};

/// A tensor of a type, whose first dimension is the batch.
fn info(name: &str, element: i32, row: &[i64]) -> ValueInfoProto {
    let batch = dimension::Value::DimParam("batch".into());
    let sizes = row.iter().map(|size| dimension::Value::DimValue(*size));
    let dim = std::iter::once(batch)
        .chain(sizes)
        .map(|value| Dimension { value: Some(value), ..Dimension::default() })
        .collect();
    let tensor = type_proto::Tensor { elem_type: Some(element), shape: Some(TensorShapeProto { dim }) };
    ValueInfoProto {
        name: Some(name.into()),
        r#type: Some(TypeProto {
            value: Some(type_proto::Value::TensorType(tensor)),
            ..TypeProto::default()
        }),
        ..ValueInfoProto::default()
    }
}

fn weights(name: &str, dims: &[i64]) -> TensorProto {
    let elements = dims.iter().product::<i64>();
    TensorProto {
        name: Some(name.into()),
        dims: dims.to_vec(),
        data_type: Some(1),
        float_data: (0..elements).map(|at| ((37 * at) % 101 - 50) as f32 / 100.0).collect(),
        ..TensorProto::default()
    }
}

fn node(operator: &str, inputs: &[&str], output: &str, axis: Option<i64>) -> NodeProto {
    let attribute = |value| AttributeProto {
        name: Some("axis".into()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    };
    NodeProto {
        op_type: Some(operator.into()),
        input: inputs.iter().map(|input| (*input).to_owned()).collect(),
        output: vec![output.into()],
        attribute: axis.map(attribute).into_iter().collect(),
        ..NodeProto::default()
    }
}

/// Two towers: the values of a user, and the embedding of an item, which is an output as well.
fn towers() -> Vec<u8> {
    let graph = GraphProto {
        input: vec![info("user", 1, &[3]), info("item", 7, &[])],
        output: vec![info("embedding", 1, &[4]), info("logits", 1, &[3])],
        initializer: vec![weights("table", &[6, 4]), weights("first", &[3, 4]), weights("last", &[8, 3])],
        node: vec![
            node("Gather", &["table", "item"], "embedding", None),
            node("MatMul", &["user", "first"], "wide", None),
            node("Tanh", &["wide"], "bent", None),
            node("Concat", &["bent", "embedding"], "joined", Some(1)),
            node("MatMul", &["joined", "last"], "logits", None),
        ],
        ..GraphProto::default()
    };
    let opset = OperatorSetIdProto { domain: Some(String::new()), version: Some(17) };
    let model = ModelProto {
        ir_version: Some(8),
        opset_import: vec![opset],
        graph: Some(graph),
        ..Default::default()
    };
    model.encode_to_vec()
}

/// Users, items and what they chose; `items` replaces the column of items.
fn visits(items: Option<ArrayRef>) -> RecordBatch {
    let row = |row: usize| (row * 31 + row / 7) % 97;
    let item = |at: usize| (row(at) % 6) as i64;
    let age = |at: usize| row(at) as f32 / 50.0 - 1.0;
    let columns: Vec<(&str, ArrayRef, bool)> = vec![
        ("label", Arc::new(Int64Array::from_iter_values((0..ROWS).map(|at| item(at) / 2))), true),
        ("item", items.unwrap_or_else(|| Arc::new(Int64Array::from_iter_values((0..ROWS).map(item)))), true),
        ("seen", Arc::new(BooleanArray::from_iter((0..ROWS).map(|at| Some(row(at) % 2 == 0)))), true),
        ("visits", Arc::new(Int32Array::from_iter_values((0..ROWS).map(|at| row(at) as i32 % 5))), true),
        ("age", Arc::new(Float64Array::from_iter_values((0..ROWS).map(|at| age(at).into()))), true),
        ("name", Arc::new(StringArray::from_iter_values((0..ROWS).map(|at| format!("n{at}")))), true),
    ];
    RecordBatch::try_from_iter_with_nullable(columns).unwrap()
}

/// Writes the model and each batch as a dataset of its name in the snapshot `data@tables`.
fn tables(home: &Path, batches: &[(&str, RecordBatch)]) {
    let datafs = Datafs::open(home, &millrace_datafs::Config::default()).unwrap();
    let live = volume(&datafs, "data");
    for (name, batch) in batches {
        live.write_file(&format!("{name}/a.parquet"), &parquet_bytes(&batch.slice(0, 200))).unwrap();
        let rest = batch.num_rows() - 200;
        live.write_file(&format!("{name}/b.parquet"), &parquet_bytes(&batch.slice(200, rest))).unwrap();
    }
    datafs.snapshot_create(&"data".parse().unwrap(), &"tables".parse().unwrap()).unwrap();
    std::fs::write(home.join("towers.onnx"), towers()).unwrap();
}

fn text(home: &Path, name: &str, keys: &str) -> String {
    format!(
        "name = \"{name}\"\ndataset = \"data@tables:/visits\"\nlabel = \"label\"\nmodel = \"{}\"\nbatch_rows = 32\n\
         optimizer = {{ kind = \"adamw\", learning_rate = 0.01 }}\noutput = {{ volume = \"models\" }}\n{keys}\n",
        home.join("towers.onnx").display()
    )
}

const KEYS: &str =
    "loss_output = \"logits\"\ninputs = { item = \"item\", user = [\"age\", \"visits\", \"seen\"] }\n";

fn trained(home: &Path, text: &str) -> TrainReport {
    run(setup(home), JobFile::parse(text).unwrap(), |_| {}).unwrap()
}

#[test]
fn a_model_of_two_inputs_trains_alike_on_any_number_of_workers() {
    let home = home();
    tables(home.path(), &[("visits", visits(None))]);
    let more = "epochs_max = 30\nvalidation = { dataset = \"data@tables:/visits\" }\n";
    let plain = trained(home.path(), &text(home.path(), "plain", &format!("workers = 1\n{KEYS}{more}")));
    assert_eq!((plain.end, plain.rows_per_epoch.len()), (End::EpochsDone, 30));
    let last = plain.validation.last().unwrap();
    assert!(last.accuracy.unwrap() > 0.9 && last.rows == ROWS as u64, "{last:?}");

    let mut killed = false;
    let battered =
        JobFile::parse(&text(home.path(), "battered", &format!("workers = 3\n{KEYS}{more}"))).unwrap();
    let battered = run(setup(home.path()), battered, |seen| {
        if seen.step > 60 && seen.worker_pids.len() == 3 && !killed {
            killed = true;
            signal("KILL", seen.worker_pids[1]);
        }
    })
    .unwrap();
    assert!(killed);
    assert_eq!((&battered.model_sha256, &battered.run), (&plain.model_sha256, &plain.run));
    assert_eq!(battered.validation, plain.validation);

    let bundle = bundle(home.path(), "plain", 1);
    let names = |specs: &[millrace_bundle::TensorSpec]| {
        specs.iter().map(|spec| spec.name.clone()).collect::<Vec<_>>()
    };
    let signature = &bundle.manifest().signature;
    assert_eq!(names(&signature.inputs), ["user", "item"]);
    assert_eq!(names(&signature.outputs), ["embedding", "logits"]);
    let fields = serde_json::to_value(&bundle.manifest().fields).unwrap();
    assert_eq!(fields, serde_json::json!({ "item": ["item"], "user": ["age", "visits", "seen"] }));
    let statistics = bundle.statistics().unwrap().unwrap();
    assert_eq!(statistics.column, "age, visits, seen, item");
    let features: Vec<_> = statistics.features.iter().map(|feature| (feature.name(), feature.max)).collect();
    assert_eq!(features[1..], [("user[1]".into(), 4.0), ("user[2]".into(), 1.0), ("item[0]".into(), 5.0)]);
    // The order of the table is not part of the computation, the columns of an input are.
    let same = KEYS.replace("[\"age\", \"visits\", \"seen\"]", "[\"visits\", \"age\", \"seen\"]");
    let other = trained(home.path(), &text(home.path(), "other", &format!("workers = 1\n{same}{more}")));
    assert_ne!((&other.model_sha256, &other.run), (&plain.model_sha256, &plain.run));
}

#[test]
fn columns_and_names_that_do_not_fit_are_refused_before_workers_start() {
    let home = home();
    let beyond: ArrayRef = Arc::new(Int64Array::from(vec![6; ROWS]));
    let floats: ArrayRef = Arc::new(Float32Array::from_iter_values((0..ROWS).map(|at| (at % 6) as f32)));
    let large: ArrayRef = Arc::new(Int64Array::from(vec![(1 << 24) + 1; ROWS]));
    tables(
        home.path(),
        &[
            ("visits", visits(None)),
            ("beyond", visits(Some(beyond))),
            ("floats", visits(Some(floats))),
            ("large", visits(Some(large))),
        ],
    );
    let keys = |inputs: &str| format!("loss_output = \"logits\"\ninputs = {{ {inputs} }}");
    let on = |dataset: &str| {
        text(home.path(), "wrong", KEYS).replace("tables:/visits", &format!("tables:/{dataset}"))
    };
    let job = |keys: &str| text(home.path(), "wrong", keys);
    let user = "user = [\"age\", \"visits\", \"seen\"]";
    let cases = [
        (
            job("features = \"age\"\nloss_output = \"logits\""),
            vec![
                "several inputs",
                "\"user\" (FLOAT [rows, 3])",
                "inputs = { user = \"COLUMN\", item = \"COLUMN\" }",
            ],
        ),
        (job(&keys(user)), vec!["no columns of the model's input \"item\"", "add item = \"COLUMN\""]),
        (
            job(&keys(&format!("{user}, item = \"item\", shop = \"item\""))),
            vec!["inputs.shop", "\"item\" (INT64 [rows])"],
        ),
        (
            job(&keys(&format!("{user}, item = \"product\""))),
            vec!["no column \"product\"", "it has label, item, seen, visits, age, name"],
        ),
        (
            job(&keys("user = [\"age\", \"visits\"], item = \"item\"")),
            vec!["columns age (1), visits (1) have 2 values", "input \"user\" of the model takes 3"],
        ),
        (
            job(&keys("user = \"age\", item = \"item\"")),
            vec!["\"age\" has 1 values", "\"user\" of the model takes 3"],
        ),
        (
            job(&keys("user = [\"age\", \"visits\", \"name\"], item = \"item\"")),
            vec!["column \"name\" is Utf8", "true and false"],
        ),
        (on("floats"), vec!["column \"item\" is Float32", "whole numbers", "as integers"]),
        (on("beyond"), vec!["has 6 in column \"item\"", "from 0 to 5", ".parquet"]),
        (on("large"), vec!["has 16777217 in column \"item\"", "from 0 to 5"]),
        (
            job(&format!("inputs = {{ {user}, item = \"item\" }}")),
            vec!["\"embedding\" [rows, 4] and \"logits\" [rows, 3]", "loss_output = "],
        ),
        (
            job(&format!("loss_output = \"scores\"\ninputs = {{ {user}, item = \"item\" }}")),
            vec!["no output \"scores\"", "\"embedding\", \"logits\""],
        ),
        (
            job_text("wrong", "").replace("features = \"pixels\"", "inputs = { pixels = \"pixels\" }"),
            vec!["inputs.pixels", "\"input\" (FLOAT [rows, 16])"],
        ),
    ];
    for (text, words) in cases {
        let mut setup = setup(home.path());
        setup.worker.program = PathBuf::from("/does/not/exist");
        let line = run(setup, JobFile::parse(&text).unwrap(), |_| {}).unwrap_err().one_line();
        for word in words {
            assert!(line.contains(word), "{line:?} lacks {word:?}\n{text}");
        }
    }
    assert_eq!(versions(home.path()), 0);
}

#[test]
fn several_columns_train_the_model_of_one() {
    let home = home();
    let batch = rows(0..ROWS);
    let values =
        batch.column(0).as_fixed_size_list().values().as_primitive::<Float32Type>().values().to_vec();
    let part = |from: usize, to: usize| values.chunks(WIDTH).map(move |row| row[from..to].to_vec());
    let list = |from: usize, to: usize| -> ArrayRef {
        let rows = part(from, to).map(|row| Some(row.into_iter().map(Some).collect::<Vec<_>>()));
        Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows))
    };
    let item = Arc::new(Field::new("item", DataType::Float32, true));
    let fixed = Arc::new(Float32Array::from(part(0, 10).flatten().collect::<Vec<f32>>()));
    let fixed: ArrayRef = Arc::new(FixedSizeListArray::new(item, 10, fixed, None));
    let number: ArrayRef = Arc::new(Float64Array::from_iter_values(part(10, 11).flatten().map(f64::from)));
    // The order of the job counts, not that of the dataset.
    let columns = [
        ("label", Arc::clone(batch.column(1)), true),
        ("d", list(13, WIDTH), true),
        ("c", list(11, 13), true),
        ("a", fixed, true),
        ("b", number, true),
    ];
    tables(home.path(), &[("parts", RecordBatch::try_from_iter_with_nullable(columns).unwrap())]);
    let one = trained(home.path(), &job_text("one", "epochs_max = 3"));
    let several = |name: &str, columns: &str| {
        let more = "epochs_max = 3\nworkers = 2\n[validation]\ndataset = \"data@tables:/parts\"";
        let text = job_text(name, more)
            .replace("data@v1:/train", "data@tables:/parts")
            .replace("features = \"pixels\"", &format!("features = {columns}"));
        trained(home.path(), &text)
    };
    let report = several("several", "[\"a\", \"b\", \"c\", \"d\"]");
    assert_eq!((&report.loss_per_epoch, &report.model_sha256), (&one.loss_per_epoch, &one.model_sha256));
    let published = bundle(home.path(), "several", 1);
    assert_eq!(published.statistics().unwrap().unwrap().column, "a, b, c, d");
    assert_eq!(published.manifest().fields["input"], ["a", "b", "c", "d"]);
    assert!(bundle(home.path(), "one", 1).manifest().fields.is_empty());
    assert_ne!(several("other", "[\"d\", \"a\", \"b\", \"c\"]").model_sha256, one.model_sha256);
}
