//! Tests of `millrace predict` and `serve top`: records in every format, outputs in every format, and invalid
//! records.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray, FixedSizeListArray, Float32Array, Int64Array, RecordBatch};
use arrow::datatypes::{DataType, Field, Float32Type, Int64Type, Schema};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use serde_json::{Value, json};

use crate::bad_input::serve;
use crate::support::{Home, project, until};

const RECORDS: usize = 100;

/// The values of record `i`: some need all digits of a 32-bit float.
fn values(i: usize) -> [f32; 2] {
    [i as f32 / 7.0, -(i as f32) * 0.1]
}

fn table() -> RecordBatch {
    let flat: Float32Array = (0..RECORDS).flat_map(values).collect::<Vec<f32>>().into();
    let item = Arc::new(Field::new_list_field(DataType::Float32, false));
    let x = FixedSizeListArray::try_new(item, 2, Arc::new(flat), None).unwrap();
    let y = Int64Array::from_iter_values((0..RECORDS).map(|i| (i % 2) as i64));
    let when = arrow::array::TimestampSecondArray::from_iter_values((0..RECORDS).map(|i| i as i64));
    let fields = [
        Field::new("x", x.data_type().clone(), false),
        Field::new("y", DataType::Int64, false),
        Field::new("when", when.data_type().clone(), false),
    ];
    let columns: Vec<ArrayRef> = vec![Arc::new(x), Arc::new(y), Arc::new(when)];
    RecordBatch::try_new(Arc::new(Schema::new(fields.to_vec())), columns).unwrap()
}

fn write(path: &Path, batch: &RecordBatch) {
    let mut writer = ArrowWriter::try_new(File::create(path).unwrap(), batch.schema(), None).unwrap();
    writer.write(batch).unwrap();
    writer.close().unwrap();
}

fn close(a: &Value, b: &Value) -> bool {
    let logits = |value: &Value| -> Vec<f64> {
        value["outputs"]["logits"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
    };
    let (a, b) = (logits(a), logits(b));
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-5 * a.abs().max(1.0))
}

#[test]
fn records_of_every_format_get_equal_answers() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |_| {});
    let rows: Vec<Value> = (0..RECORDS).map(|i| json!({ "x": values(i), "y": i % 2 })).collect();
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    let lines_file = home.file("rows.jsonl", &lines);
    let list_file = home.file("rows.json", json!(rows).to_string());
    let column = |name: &str| rows.iter().map(|row| row[name].clone()).collect::<Vec<_>>();
    let columns_file = home.file("columns.json", json!({ "x": column("x"), "y": column("y") }).to_string());
    let parquet_file = home.dir.path().join("rows.parquet");
    write(&parquet_file, &table());

    let ask = |file: &Path, more: &[&str]| {
        let fixed = ["predict", "m", file.to_str().unwrap(), "--grpc", &grpc, "--input", "x"];
        home.ok(fixed.iter().chain(more))
    };
    let object = |file: &Path, more: &[&str]| -> Value {
        serde_json::from_str(&ask(file, &[&["--label", "y", "--json"][..], more].concat())).unwrap()
    };
    let whole = object(&lines_file, &[]);
    assert_eq!((&whole["predicted"], &whole["version"]), (&json!(RECORDS), &json!("2")));
    let predictions = whole["predictions"].as_array().unwrap();
    assert_eq!(predictions.len(), RECORDS);
    let right = predictions.iter().filter(|one| one["argmax"]["logits"] == one["label"]).count();
    assert_eq!(whole["accuracy"], right as f64 / RECORDS as f64);
    // In order, for any number of requests and of concurrent requests.
    let marked_file = home.file("marked.jsonl", format!("\u{feff}{lines}"));
    let marked_list = home.file("marked.json", format!("\u{feff}{}", json!(rows)));
    let more: [(&Path, &[&str]); 7] = [
        (&marked_file, &[]),
        (&marked_list, &[]),
        (&list_file, &[]),
        (&columns_file, &[]),
        (&parquet_file, &[]),
        (&lines_file, &["--batch-rows", "1", "--in-flight", "16"]),
        (&parquet_file, &["--batch-rows", "7", "--in-flight", "1", "--version", "1"]),
    ];
    for (file, flags) in more {
        let other = object(file, flags);
        let others = other["predictions"].as_array().unwrap();
        assert_eq!(others.len(), RECORDS, "{}", file.display());
        assert!(others.iter().zip(predictions).all(|(a, b)| close(a, b) && a["label"] == b["label"]));
    }

    // All predictions into a file, in the model's types.
    let written = home.dir.path().join("predictions.parquet");
    let printed = ask(&parquet_file, &["--label", "y", "--output", written.to_str().unwrap()]);
    assert!(
        printed.contains("100 predicted by m version 2") && printed.contains("predictions.parquet"),
        "{printed}"
    );
    let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&written).unwrap()).unwrap();
    let mut row = 0;
    for batch in reader.build().unwrap() {
        let batch = batch.unwrap();
        let logits = batch.column_by_name("logits").unwrap().as_list::<i32>().clone();
        let labels = batch.column_by_name("label").unwrap().as_primitive::<Int64Type>().clone();
        for at in 0..batch.num_rows() {
            let found = logits.value(at).as_primitive::<Float32Type>().values().to_vec();
            assert!(close(&json!({ "outputs": { "logits": found } }), &predictions[row]));
            assert_eq!(labels.value(at), predictions[row]["label"]);
            row += 1;
        }
    }
    assert_eq!(row, RECORDS);
    let written = home.dir.path().join("predictions.jsonl");
    ask(&lines_file, &["-o", written.to_str().unwrap()]);
    let printed = ask(&lines_file, &["-o", "-"]);
    assert_eq!(std::fs::read_to_string(&written).unwrap(), printed);
    assert_eq!(printed.lines().count(), RECORDS);
    assert!(close(&serde_json::from_str(printed.lines().nth(57).unwrap()).unwrap(), &predictions[57]));

    // Tables show the first predictions; a pipe works like a file.
    let mut command = home.command();
    command.args(["predict", "m", "--grpc", &grpc, "--input", "input=x", "--label", "y"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let shown = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{shown}");
    for text in ["logits: ", "largest", "100 predicted by m version 2", "accuracy", "the first 10 are shown"]
    {
        assert!(shown.contains(text), "{text} is missing in\n{shown}");
    }
    assert_eq!(service.stop(), 0);
}

#[test]
fn predict_names_all_versions_of_a_split() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |version| {
        let split = json!({ "split": { "1": 1, "2": 1 } });
        std::fs::write(version.with_file_name("rollout.json"), split.to_string()).unwrap();
    });
    let file = home.file("rows.jsonl", "{\"input\":[1,2]}\n".repeat(10));
    let args = ["predict", "m", file.to_str().unwrap(), "--grpc", &grpc, "--batch-rows", "1"];
    let whole = home.json(args);
    assert_eq!((&whole["version"], &whole["versions"]), (&Value::Null, &json!(["1", "2"])));
    let shown = home.ok(args);
    assert!(shown.contains("10 predicted by m versions 1, 2 in"), "{shown}");
    let whole = home.json([&args[..], &["--version", "1"]].concat());
    assert_eq!((&whole["version"], &whole["versions"]), (&json!("1"), &json!(["1"])));
    assert_eq!(service.stop(), 0);
}

#[test]
fn non_finite_floats_round_trip_through_the_model() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |_| {});
    let flat = Float32Array::from(vec![f32::NAN, 1.0, f32::INFINITY, 0.0]);
    let item = Arc::new(Field::new_list_field(DataType::Float32, false));
    let x = FixedSizeListArray::try_new(item, 2, Arc::new(flat), None).unwrap();
    let columns: Vec<(&str, ArrayRef)> = vec![("x", Arc::new(x))];
    let file = home.dir.path().join("odd.parquet");
    write(&file, &RecordBatch::try_from_iter(columns).unwrap());
    let ask = |file: &Path| {
        let args = ["predict", "m", file.to_str().unwrap(), "--grpc", &grpc, "--input", "x", "-o", "-"];
        home.ok(args)
    };
    let printed = ask(&file);
    assert!(printed.lines().next().unwrap().contains("\"NaN\""), "{printed}");
    let lines = home.file("odd.jsonl", "{\"x\":[\"NaN\",1]}\n{\"x\":[\"Infinity\",0]}\n");
    assert_eq!(ask(&lines), printed);
    assert_eq!(service.stop(), 0);
}

#[test]
fn predict_names_the_defect_of_a_record() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |_| {});
    let kept = home.file("predictions.parquet", "from before");
    let ask = |name: &str, text: &[u8], more: &[&str]| {
        let file = home.file(name, text);
        let fixed = ["predict", "m", file.to_str().unwrap(), "--grpc", &grpc];
        home.fails(fixed.iter().chain(more))
    };
    for (name, text, says) in [
        ("r.jsonl", "", "no records"),
        ("r.jsonl", "{\"x\":1}\nnot json\n", "r.jsonl line 1: the record has no field \"input\" (--input"),
        ("r.jsonl", "{\"input\":[1,2]}\n\nnot json\n", "r.jsonl line 3: the record is not a JSON object"),
        ("r.jsonl", "[1,2]\n", "line 1: the record is not a JSON object"),
        (
            "r.jsonl",
            "{\"input\":\"text\"}\n",
            "field \"input\": input \"input\": 1 elements, shape [2] takes 2",
        ),
        ("r.jsonl", "{\"input\":[\"a\",\"b\"]}\n", "strings for FP32"),
        ("r.jsonl", "{\"input\":[1,null]}\n", "null"),
        ("r.jsonl", "{\"input\":[1,1e300]}\n", "does not fit FP32"),
        ("r.jsonl", "{\"input\":[1,2,3]}\n", "3 elements, shape [2] takes 2"),
        ("r.json", "[{\"input\":[1,2]},7]", "r.json: not a list of JSON objects"),
        ("r.jsonl", "{\"input\":[1,2],\"input\":[3,4]}\n", "field \"input\" appears twice"),
        ("r.json", "{\"x\":[[1,2]]}", "r.json has no column \"input\" (--input names it); it has x"),
        ("r.json", "{\"input\":[[1,2],[1]]}", "entry 2 of each column: field \"input\""),
        ("r.json", "\"text\"", "not a list of JSON objects, nor an object of columns"),
        ("r.json", "[", "r.json: not a list of JSON objects"),
    ] {
        let output = ["--output", kept.to_str().unwrap()];
        let (code, line) = ask(name, text.as_bytes(), &output);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(says), "{says} is missing in {line}");
        // The old file stays, and no temporary file is left beside it.
        assert_eq!(std::fs::read(&kept).unwrap(), b"from before");
        let left = std::fs::read_dir(home.dir.path()).unwrap();
        assert!(!left.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(".predict")));
    }
    let mut parquet = Vec::new();
    let mut writer = ArrowWriter::try_new(&mut parquet, table().schema(), None).unwrap();
    writer.write(&table()).unwrap();
    writer.close().unwrap();
    let cases: [(&[u8], &[&str], i32, &str); 10] = [
        (&parquet, &["--input", "nosuch"], 2, "no column \"nosuch\" (--input names it); it has x, y, when"),
        (
            &parquet,
            &["--input", "x", "--label", "nosuch"],
            2,
            "no column \"nosuch\" (--label names it); it has x, y, when",
        ),
        (&parquet, &["--input", "when"], 2, "column \"when\" holds Timestamp"),
        (&parquet, &["--input", "y"], 2, "r.parquet row 1: field \"y\": "),
        (&parquet, &["--input", "x", "--label", "x"], 2, "row 1: field \"x\" holds no class number"),
        (&parquet[..parquet.len() - 9], &["--input", "x"], 6, "cannot be read as Parquet"),
        (b"no table at all", &["--input", "x"], 6, "cannot be read as Parquet"),
        (&parquet, &["--input", "a=x", "--input", "b=x"], 2, "--input names input input twice"),
        (&parquet, &["--input", "x", "--output", "predictions.txt"], 2, "ends in .parquet or .jsonl"),
        (&parquet, &["--input", "x", "--version", "7"], 3, "version 7"),
    ];
    for (text, flags, code, says) in cases {
        let (found, line) = ask("r.parquet", text, flags);
        assert_eq!(found, code, "{line}");
        assert!(line.contains(says), "{says} is missing in {line}");
    }
    // Two columns with the same name are ambiguous.
    let column: ArrayRef = table().column_by_name("x").unwrap().clone();
    let field = Field::new("x", column.data_type().clone(), false);
    let twice = Arc::new(Schema::new(vec![field.clone(), field]));
    let twice = RecordBatch::try_new(twice, vec![column.clone(), column]).unwrap();
    let file = home.dir.path().join("twice.parquet");
    write(&file, &twice);
    let (code, line) = home.fails(["predict", "m", file.to_str().unwrap(), "--grpc", &grpc, "--input", "x"]);
    assert!(code == 2 && line.contains("has two columns \"x\""), "{line}");
    let record = b"{\"class\":1,\"input\":[1,2]}\n";
    let (code, line) = ask("r.jsonl", record, &["--label", "label"]);
    let says = "line 1: the record has no field \"label\" (--label names it); it has class, input";
    assert!(code == 2 && line.contains(says), "{line}");
    let file = home.file("r.jsonl", "{\"input\":[1,2]}\n");
    let file = file.to_str().unwrap();
    let (code, line) = home.fails(["predict", "nosuch", file, "--grpc", &grpc]);
    assert!(code == 3 && line.contains("no model \"nosuch\""), "{line}");
    let (code, line) = home.fails(["predict", "m", "missing.jsonl", "--grpc", &grpc]);
    assert!(code == 3 && line.contains("missing.jsonl"), "{line}");
    let (code, line) = home.fails(["predict", "m", file, "--grpc", "not an address"]);
    assert!(code == 2 && line.contains("not an address"), "{line}");
    assert_eq!(service.stop(), 0);
    let records = project().join("examples/digits/digits-test.jsonl");
    let (code, line) = home.fails(["predict", "m", records.to_str().unwrap(), "--grpc", "127.0.0.1:1"]);
    assert!(code == 5 && line.contains("127.0.0.1:1"), "{line}");
}

#[test]
fn top_shows_a_running_server() {
    let home = Home::new();
    let (service, grpc, _) =
        serve(&home, |version| std::fs::write(version.join("model.onnx"), "no model").unwrap());
    let record = home.file("r.jsonl", "{\"input\":[1,2]}\n".repeat(20));
    let record = record.to_str().unwrap().to_owned();
    // The home also names the address of the metrics.
    let mut top = home.start(["serve", "top", "--interval", "0.1", "--json"]);
    let mut interval = || {
        home.ok(["predict", "m", &record, "--grpc", &grpc, "--batch-rows", "5"]);
        top.object()
    };
    let mut seen = interval();
    // Five rows per request; each request is a run, since there is no other client. A request that ends while
    // the figures are read may be counted in some of them only.
    until("an interval shows what was done in it", || {
        let first = &seen["models"][0];
        let number = |name: &str| first[name].as_f64().unwrap_or(0.0);
        let five = |rows: f64| (rows - 5.0).abs() < 1e-6;
        let whole = number("p99_us") > 0.0
            && five(number("rows_per_run"))
            && five(number("rows_per_s") / number("requests_per_s"));
        if !whole {
            seen = interval();
        }
        whole
    });
    assert!(seen["server"] == grpc.as_str() && seen["ready"] == true && seen["time"].is_string(), "{seen}");
    assert_eq!(seen["models"].as_array().unwrap().len(), 2, "{seen}");
    let (first, second) = (&seen["models"][0], &seen["models"][1]);
    assert_eq!(
        (&first["model"], &first["version"], &first["state"]),
        (&json!("m"), &json!("1"), &json!("READY"))
    );
    assert_eq!((&second["version"], &second["state"]), (&json!("2"), &json!("UNAVAILABLE")));
    assert!(second["reason"].as_str().unwrap().contains("model.onnx"), "{second}");
    let number = |name: &str| first[name].as_f64().unwrap_or_else(|| panic!("no {name} in {first}"));
    assert!(number("requests_per_s") > 0.0 && number("mean_us") > 0.0, "{first}");
    assert!(number("p50_us") <= number("p90_us") && number("p90_us") <= number("p99_us"), "{first}");
    assert_eq!(top.stop(), 0);

    let shown = home.ok(["serve", "top", "m", "--interval", "0.1", "--count", "2"]);
    let heading = format!("{grpc}, ready, ");
    assert_eq!(shown.lines().filter(|line| line.starts_with(&heading)).count(), 2, "{shown}");
    for text in ["requests/s", "p99", "unavailable: "] {
        assert!(shown.contains(text), "{text} is missing in\n{shown}");
    }
    // Without metrics there are no percentiles, and the command reports why.
    let one = ["serve", "top", "--interval", "0.1", "--count", "1", "--metrics", "127.0.0.1:1"];
    let report = home.json(one);
    assert!(report["metrics_error"].as_str().unwrap().contains("127.0.0.1:1"), "{report}");
    assert_eq!(report["models"][0]["p99_us"], Value::Null);
    let (code, line) = home.fails(["serve", "top", "nosuch", "--interval", "0.1", "--count", "1"]);
    assert!(code == 3 && line.contains("has no model nosuch"), "{line}");
    assert_eq!(service.stop(), 0);
    let (code, line) = home.fails(["serve", "top", "--grpc", &grpc, "--count", "1"]);
    assert!(code == 5 && line.contains(&grpc), "{line}");
    // Flags of the server are not flags of its subcommands.
    assert_eq!(home.run(["serve", "--load", "m", "top"]).status.code(), Some(2));
    assert_eq!(home.run(["serve"]).status.code(), Some(2));
}
