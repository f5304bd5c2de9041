//! Tests of quantized models: created from a version, compared with it, served beside it; or rejected with
//! one clear line, without output.

use std::path::{Path, PathBuf};

use millrace_bundle::onnx::{ModelProto, tensor_proto::DataType};
use millrace_bundle::{Bundle, Lineage};
use object_store::local::LocalFileSystem;
use prost::Message;
use serde_json::{Value, json};

use crate::support::{Home, echo, failure, program};

const INPUTS: usize = 64;

/// A folder of models in which version 1 of `m` takes rows of 64 numbers.
fn folder(home: &Home) -> PathBuf {
    let (file, folder) = (home.dir.path().join("mlp.onnx"), home.dir.path().join("models"));
    std::fs::create_dir_all(&folder).unwrap();
    home.ok(["model", "init", "mlp", "--inputs", "64", "--hidden", "256", "--classes", "10", text(&file)]);
    home.ok(["model", "import", text(&file), "--name", "m", "--models", text(&folder)]);
    folder
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn records(count: usize) -> Vec<Value> {
    let value = |row: usize, at: usize| ((row * 31 + at * 17) % 100) as f64 / 50.0 - 1.0;
    (0..count).map(|row| json!({ "x": (0..INPUTS).map(|at| value(row, at)).collect::<Vec<_>>() })).collect()
}

fn lines(records: &[Value]) -> String {
    records.iter().map(|record| format!("{record}\n")).collect()
}

fn versions(folder: &Path) -> Vec<String> {
    let mut found: Vec<String> = std::fs::read_dir(folder.join("m"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned())
        .collect();
    found.sort();
    found
}

#[test]
fn a_version_is_quantized_compared_and_served() {
    let home = Home::new();
    let folder = folder(&home);
    let rows = records(100);
    let sample = home.file("rows.jsonl", lines(&rows));
    let quantize =
        ["model", "quantize", "m", "--models", text(&folder), "--sample", text(&sample), "--input", "x"];
    let report = home.json(quantize);
    assert_eq!(
        (&report["from"], &report["version"], &report["records"]),
        (&json!(1), &json!(2), &json!(100))
    );
    let bytes = |which: &str| report[which].as_u64().unwrap();
    assert!(bytes("bytes_after") * 3 < bytes("bytes_before"), "{report}");
    assert!(
        report["run_us_before"].as_f64().unwrap() > 0.0 && report["run_us_after"].as_f64().unwrap() > 0.0
    );
    assert_eq!(report["run_rows"], 64);
    assert_eq!((report["layers"].as_array().unwrap().len(), &report["kept"]), (2, &json!([])));
    assert_eq!(report["sample"], "rows.jsonl");
    let output = &report["outputs"][0];
    assert_eq!((&output["output"], &output["elements"]), (&json!("logits"), &json!(1000)));
    let (mean, max) = (output["mean"].as_f64().unwrap(), output["max"].as_f64().unwrap());
    assert!(mean > 0.0 && mean <= max && mean < 0.05, "{output}");
    assert!(output["agreement"].as_f64().unwrap() > 0.5, "{output}");

    let manifest: Value =
        serde_json::from_slice(&std::fs::read(folder.join("m/2/bundle.json")).unwrap()).unwrap();
    let source: Value =
        serde_json::from_slice(&std::fs::read(folder.join("m/1/bundle.json")).unwrap()).unwrap();
    let lineage = &manifest["lineage"]["quantized"];
    assert_eq!((&lineage["version"], &lineage["layers"]), (&json!(1), &json!(2)));
    assert_eq!(lineage["model_sha256"], source["files"][0]["sha256"]);
    assert_eq!(lineage["sample"], "rows.jsonl (100 records)");
    assert_eq!(manifest["lineage"]["imported"], source["lineage"]["imported"]);
    assert_eq!(manifest["signature"], source["signature"]);
    assert_eq!(manifest["metrics"]["quantization_mean_difference"].as_f64(), Some(mean));

    // The table names random inputs as such, and a version may be given.
    let printed = program(home.command().env("MILLRACE_HOME", "/proc/millrace").args([
        "model",
        "quantize",
        "m",
        "--from",
        "1",
        "--version",
        "9",
        "--models",
        text(&folder),
    ]));
    for word in [
        "m version 9, from version 1",
        "random inputs, seed 7",
        "size",
        "run of 64 rows",
        "logits differs by",
    ] {
        assert!(printed.contains(word), "{word}: {printed}");
    }
    assert_eq!(versions(&folder), ["1", "2", "9"]);

    // The server serves all versions, which answer alike.
    let (service, served) = home.serve(["--models", text(&folder)]);
    let grpc = served["grpc"].as_str().unwrap();
    let ask = |version: &str| {
        home.json(["predict", "m", text(&sample), "--grpc", grpc, "--input", "x", "--version", version])
    };
    let logits = |answer: &Value| -> Vec<f64> {
        let each = answer["predictions"].as_array().unwrap().iter();
        each.flat_map(|one| one["outputs"]["logits"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()))
            .collect()
    };
    let (before, after) = (logits(&ask("1")), logits(&ask("2")));
    assert_eq!((before.len(), after.len()), (1000, 1000));
    let range =
        before.iter().copied().fold(f64::MIN, f64::max) - before.iter().copied().fold(f64::MAX, f64::min);
    let apart = before.iter().zip(&after).map(|(a, b)| (a - b).abs()).sum::<f64>() / 1000.0;
    assert!(apart > 0.0 && apart / range < 0.05, "{apart} of {range}");
    assert_eq!(service.stop(), 0);
}

#[test]
fn samples_of_every_form_are_compared_in_a_volume() {
    let home = Home::new();
    folder(&home);
    home.ok(["volume", "create", "v"]);
    home.ok(["model", "import", "mlp.onnx", "--name", "m", "--volume", "v"]);
    let rows = records(40);
    let list = home.file("rows.json", json!(rows).to_string());
    let sample = home.file("rows.jsonl", lines(&rows));
    for (file, version) in [(&list, 2), (&sample, 3)] {
        let report = home.json([
            "model",
            "quantize",
            "m",
            "--from",
            "1",
            "--volume",
            "v",
            "--sample",
            text(file),
            "--input",
            "input=x",
        ]);
        assert_eq!((&report["version"], &report["records"]), (&json!(version), &json!(40)));
    }
    let shown = home.json(["model", "show", "m", "--volume", "v"]);
    assert_eq!((&shown["version"], &shown["lineage"]["quantized"]["version"]), (&json!(3), &json!(1)));
    let printed = home.ok(["model", "show", "m", "--volume", "v"]);
    assert!(printed.contains("quantized from") && printed.contains("rows.jsonl (40 records)"), "{printed}");
    // Only the requested number of records.
    let few = ["model", "quantize", "m", "--from", "1", "--version", "7", "--volume", "v"];
    let few = home.json(few.into_iter().chain([
        "--sample",
        text(&sample),
        "--input",
        "x",
        "--records",
        "8",
        "--batch-rows",
        "4",
    ]));
    assert_eq!((&few["version"], &few["records"], &few["run_rows"]), (&json!(7), &json!(8), &json!(4)));
    let again = home.fails(["model", "quantize", "m", "--from", "1", "--version", "7", "--volume", "v"]);
    assert!(again.0 == 4 && again.1.contains("version 7 already"), "{again:?}");
    // The next version is above all existing ones.
    let next = home.json(["model", "quantize", "m", "--from", "1", "--volume", "v"]);
    assert_eq!(next["version"], 8);
}

#[test]
fn quantization_beyond_the_error_limit_writes_nothing() {
    let home = Home::new();
    let folder = folder(&home);
    home.ok(["volume", "create", "v"]);
    home.ok(["model", "import", "mlp.onnx", "--name", "m", "--volume", "v"]);
    for place in [["--models", text(&folder)], ["--volume", "v"]] {
        let mut command = home.command();
        let output =
            command.args(["model", "quantize", "m", "--limit", "0", "--json"]).args(place).output().unwrap();
        let (code, line) = failure(&output, "quantize");
        assert_eq!(code, 9, "{line}");
        assert!(line.contains("nothing was written") && line.contains("--limit"), "{line}");
        // The report is printed even so.
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["version"], &report["limit"]), (&Value::Null, &json!(0.0)));
        assert!(report["outputs"][0]["mean"].as_f64().unwrap() > 0.0, "{report}");
    }
    assert_eq!(versions(&folder), ["1"]);
    assert_eq!(home.fails(["model", "show", "m", "--volume", "v", "--version", "2"]).0, 3);
}

/// Publishes a graph as version 1 of a model.
fn publish(folder: &Path, name: &str, onnx: Vec<u8>) {
    let store = LocalFileSystem::new_with_prefix(folder).unwrap();
    let bundle = Bundle::new(name, 1, onnx, Lineage::default(), Default::default()).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(bundle.write(&store, "")).unwrap();
}

#[test]
fn quantization_copies_the_other_files_of_a_version() {
    let home = Home::new();
    let folder = folder(&home);
    let onnx = std::fs::read(folder.join("m/1/model.onnx")).unwrap();
    let lineage = Lineage { volume: "digits".into(), snapshot: "v1".into(), seed: 3, ..Lineage::default() };
    let bundle = Bundle::new("t", 4, onnx, lineage, [("train_loss".to_owned(), 0.5)].into()).unwrap();
    let bundle = bundle.with_file("notes/read.me", "said".into()).unwrap();
    let store = LocalFileSystem::new_with_prefix(&folder).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(bundle.write(&store, "")).unwrap();
    home.ok(["model", "quantize", "t", "--models", text(&folder)]);
    let made = runtime.block_on(millrace_bundle::load(&store, "", "t", 5)).unwrap();
    let manifest = made.manifest();
    assert_eq!((manifest.lineage.snapshot.as_str(), manifest.lineage.seed), ("v1", 3));
    assert_eq!(manifest.lineage.quantized.as_ref().unwrap().version, 4);
    assert_eq!(manifest.metrics["train_loss"], 0.5);
    assert_eq!(std::fs::read(folder.join("t/5/notes/read.me")).unwrap(), b"said");
}

#[test]
fn failed_quantization_prints_one_line_and_leaves_no_files() {
    let home = Home::new();
    let folder = folder(&home);
    let onnx = std::fs::read(folder.join("m/1/model.onnx")).unwrap();
    let changed = |change: &dyn Fn(&mut ModelProto)| {
        let mut model = ModelProto::decode(&onnx[..]).unwrap();
        change(&mut model);
        model.encode_to_vec()
    };
    publish(&folder, "old", changed(&|model| model.opset_import[0].version = Some(10)));
    publish(&folder, "unknown", changed(&|model| model.opset_import[0].version = Some(999)));
    publish(&folder, "echo", echo(&[("a", DataType::Float, &[-1, 2])]));
    publish(&folder, "cut", onnx.clone());
    std::fs::write(folder.join("cut/1/model.onnx"), &onnx[..onnx.len() / 2]).unwrap();
    home.ok(["model", "quantize", "m", "--models", text(&folder)]);
    let short = home.file("short.jsonl", "{\"x\": [1, 2]}\n");
    let none = home.file("none.jsonl", "");
    let missing = home.file("fields.jsonl", "{\"y\": 1}\n");
    let cases: [(&str, &[&str], i32, &str); 13] = [
        ("m", &[], 2, "quantized from version 1: quantize that (--from 1)"),
        ("m", &["--from", "1", "--version", "1"], 4, "version 1 already"),
        ("m", &["--from", "77"], 3, "no model version"),
        ("nope", &[], 3, "no complete bundle of a model \"nope\""),
        ("../m", &[], 2, "not a model name"),
        ("old", &[], 2, "operator set 10"),
        ("unknown", &[], 2, "operator set 999"),
        ("echo", &[], 2, "no node to quantize: the graph has no MatMul and no Gemm"),
        ("cut", &["--from", "1"], 6, "corrupt"),
        ("m", &["--from", "1", "--sample", text(&short), "--input", "x"], 2, "line 1"),
        ("m", &["--from", "1", "--sample", text(&none), "--input", "x"], 2, "no records"),
        ("m", &["--from", "1", "--sample", text(&missing), "--input", "x"], 2, "no field \"x\""),
        ("m", &["--from", "1", "--sample", "nope.jsonl"], 3, "nope.jsonl"),
    ];
    for (model, flags, exit, says) in cases {
        let fixed = ["model", "quantize", model, "--models", text(&folder)];
        let (code, line) = home.fails(fixed.iter().chain(flags));
        assert_eq!(code, exit, "{line}");
        assert!(line.contains(says), "{line}");
    }
    assert_eq!(versions(&folder), ["1", "2"]);
    for model in ["old", "unknown", "echo", "cut"] {
        assert_eq!(std::fs::read_dir(folder.join(model)).unwrap().count(), 1, "{model}");
    }
    // Flags that clap rejects.
    for flags in [
        &["--limit", "-1"][..],
        &["--limit", "nan"],
        &["--limit", "inf"],
        &["--records", "0"],
        &["--batch-rows", "99999999"],
        &["--version", "0"],
        &["--input", "x"],
        &["--volume", "v"],
    ] {
        let fixed = ["model", "quantize", "m", "--models", text(&folder)];
        assert_eq!(home.run(fixed.iter().chain(flags)).status.code(), Some(2), "{flags:?}");
    }
    assert_eq!(home.run(["model", "quantize", "m"]).status.code(), Some(2));
}
