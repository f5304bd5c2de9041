//! Tests of imported models: an ONNX file becomes a served version, or fails with one clear line.

use std::path::{Path, PathBuf};

use millrace_bundle::onnx::{
    AttributeProto, ModelProto, NodeProto, StringStringEntryProto, attribute_proto::AttributeType,
    tensor_proto::DataLocation,
};
use millrace_serving::client::Client;
use millrace_serving::tensor::Tensor;
use millrace_serving::wire::Form;
use prost::Message;
use serde_json::Value;

use crate::support::{Home, program, project};

fn onnx(home: &Home) -> PathBuf {
    let file = home.dir.path().join("mlp.onnx");
    home.ok(["model", "init", "mlp", "--inputs", "2", "--classes", "2", file.to_str().unwrap()]);
    file
}

fn folder(home: &Home) -> PathBuf {
    let folder = home.dir.path().join("models");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn versions(model: &Path) -> Vec<u64> {
    let entries = std::fs::read_dir(model).unwrap();
    let mut versions: Vec<u64> =
        entries.map(|entry| entry.unwrap().file_name().to_str().unwrap().parse().unwrap()).collect();
    versions.sort_unstable();
    versions
}

fn check(manifest: &Value, version: u64) {
    assert_eq!((&manifest["name"], manifest["version"].as_u64()), (&"m".into(), Some(version)));
    assert_eq!(manifest["lineage"]["imported"]["file"], "mlp.onnx", "{manifest}");
    let producer = manifest["lineage"]["imported"]["producer"].as_str().unwrap();
    assert!(producer.starts_with("millrace "), "{producer}");
    assert_eq!(manifest["signature"]["inputs"][0]["shape"], serde_json::json!([-1, 2]));
}

#[test]
fn imported_files_become_the_next_versions_in_a_folder_and_are_served() {
    let home = Home::new();
    let (file, folder) = (onnx(&home), folder(&home));
    let import = ["model", "import", text(&file), "--name", "m", "--models", text(&folder)];
    check(&home.json(import), 1);
    let printed = home.ok(import);
    assert!(
        printed.contains("m version 2") && printed.contains("imported from") && printed.contains("mlp.onnx"),
        "{printed}"
    );
    assert_eq!(std::fs::read(folder.join("m/2/model.onnx")).unwrap(), std::fs::read(&file).unwrap());
    // A folder needs no home.
    program(home.command().env("MILLRACE_HOME", "/proc/millrace").args(import));
    let show = ["model", "show", "m", "--models", text(&folder)];
    check(&home.json(show), 3);
    check(&home.json([&show[..], &["--version", "2"]].concat()), 2);
    program(home.command().env("MILLRACE_HOME", "/proc/millrace").args(show));
    let (code, line) = home.fails(["model", "show", "nope", "--models", text(&folder)]);
    assert!(code == 3 && line.contains("nope") && line.contains(text(&folder)), "{line}");
    let (service, served) = home.serve(["--models", text(&folder)]);
    for version in 1..=3 {
        let line = Value::from(format!("m version {version}"));
        assert!(served["models"].as_array().unwrap().contains(&line), "{served}");
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::connect(served["grpc"].as_str().unwrap()).await.unwrap();
        let input = Tensor::fp32("input", vec![1, 2], vec![1.0, 2.0]).unwrap();
        assert_eq!(client.infer("m", None, vec![input], Form::Raw).await.unwrap().version, "3");
    });
    assert_eq!(service.stop(), 0);
}

#[test]
fn imported_files_become_the_next_versions_in_a_volume() {
    let home = Home::new();
    let file = onnx(&home);
    home.ok(["volume", "create", "v"]);
    let import = ["model", "import", text(&file), "--name", "m", "--volume", "v"];
    check(&home.json(import), 1);
    check(&home.json(import), 2);
    check(&home.json(["model", "show", "m", "--volume", "v", "--version", "2"]), 2);
    let printed = home.ok(["model", "show", "m", "--volume", "v"]);
    assert!(printed.contains("written by") && !printed.contains("snapshot"), "{printed}");
}

#[test]
fn lineage_and_record_of_a_training_come_with_the_version() {
    let home = Home::new();
    let (file, folder) = (onnx(&home), folder(&home));
    home.ok(["volume", "create", "v"]);
    let lineage = r#"{"lineage": {"volume": "digits", "snapshot": "v1", "path": "/train", "seed": 18446744073709551615,
        "steps": 20, "epochs": 2, "code_version": "4711abc", "config_sha256": "00"}, "metrics": {"loss": 0.25}}"#;
    let lineage = home.file("lineage.json", lineage);
    let training = home.file("record.json", "{\"anything\":  1}");
    for into in [["--models", text(&folder)], ["--volume", "v"]] {
        let import = [&["model", "import", text(&file), "--name", "m"][..], &into].concat();
        let both = ["--lineage", text(&lineage), "--training", text(&training)];
        let manifest = home.json([&import[..], &both].concat());
        let found = &manifest["lineage"];
        assert_eq!((&found["volume"], &found["seed"]), (&"digits".into(), &u64::MAX.into()), "{manifest}");
        assert_eq!((&found["imported"], &manifest["metrics"]["loss"]), (&Value::Null, &0.25_f64.into()));
        let record =
            manifest["files"].as_array().unwrap().iter().find(|file| file["path"] == "training.json");
        assert_eq!(record.unwrap()["bytes"], 16, "{manifest}");
        // Without a dataset, the version is an import.
        let unknown = home.file("unknown.json", r#"{"lineage": {"seed": 5}}"#);
        let manifest = home.json([&import[..], &["--lineage", text(&unknown)]].concat());
        assert_eq!(manifest["lineage"]["imported"]["file"], "mlp.onnx");
        assert_eq!(manifest["lineage"]["seed"], 5);
        for (flag, content, exit, says) in [
            ("--lineage", Some("{\"lineage\": {\"sede\": 5}}"), 2, "unknown field `sede`"),
            ("--lineage", Some("{\"seed\": 5}"), 2, "unknown field `seed`"),
            ("--lineage", Some("no JSON"), 2, "is not the lineage of a version"),
            ("--lineage", None, 3, "cannot read"),
            ("--training", None, 3, "cannot read"),
        ] {
            let named =
                content.map_or_else(|| folder.join("nope"), |content| home.file("wrong.json", content));
            let (code, line) = home.fails([&import[..], &[flag, text(&named)]].concat());
            assert_eq!(code, exit, "{line}");
            assert!(line.contains(says), "{line}");
        }
    }
    assert_eq!(std::fs::read(folder.join("m/1/training.json")).unwrap(), std::fs::read(&training).unwrap());
    assert_eq!(versions(&folder.join("m")), [1, 2]);
}

#[test]
fn concurrent_imports_get_different_versions() {
    let home = Home::new();
    let (file, folder) = (onnx(&home), folder(&home));
    home.ok(["volume", "create", "v"]);
    for into in [["--models", text(&folder)], ["--volume", "v"]] {
        let children: Vec<_> = (0..6)
            .map(|_| {
                let mut command = home.command();
                command.args(["model", "import", text(&file), "--name", "m", "--json"]).args(into);
                std::thread::spawn(move || serde_json::from_str::<Value>(&program(&mut command)).unwrap())
            })
            .collect();
        let mut given: Vec<u64> =
            children.into_iter().map(|child| child.join().unwrap()["version"].as_u64().unwrap()).collect();
        given.sort_unstable();
        assert_eq!(given, [1, 2, 3, 4, 5, 6], "{into:?}");
    }
    assert_eq!(versions(&folder.join("m")), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn failed_import_prints_one_line_and_leaves_no_files() {
    let home = Home::new();
    let (file, folder) = (onnx(&home), folder(&home));
    home.ok(["volume", "create", "v"]);
    let readme = project().join("README.md");
    let empty = home.file("empty.onnx", "");
    let cut = home.file("cut.onnx", &std::fs::read(&file).unwrap()[..200]);
    let mut model = ModelProto::decode(&std::fs::read(&file).unwrap()[..]).unwrap();
    let weights = &mut model.graph.as_mut().unwrap().initializer[0];
    weights.data_location = Some(DataLocation::External.into());
    weights.external_data =
        vec![StringStringEntryProto { key: Some("location".into()), value: Some("../w".into()) }];
    let elsewhere = home.file("elsewhere.onnx", model.encode_to_vec());
    let cases: [(&Path, &str, i32, &str); 9] = [
        (&readme, "m", 6, "not an ONNX file"),
        (&cut, "m", 6, "not an ONNX file"),
        (&empty, "m", 6, "holds no graph"),
        (&elsewhere, "m", 2, "keeps its elements in another file"),
        (&folder, "m", 2, "not a file"),
        (Path::new("nope.onnx"), "m", 3, "does not exist"),
        (&file, "../m", 2, "not a model name"),
        (&file, "", 2, "not a model name"),
        (&file, ".m", 2, "not a model name"),
    ];
    for (file, name, exit, says) in cases {
        for into in [["--models", text(&folder)], ["--volume", "v"]] {
            let (code, line) =
                home.fails([&["model", "import", text(file), "--name", name][..], &into].concat());
            assert_eq!(code, exit, "{line}");
            assert!(line.contains(says), "{line}");
        }
    }
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    // Dimensions whose product overflows are shown as far as possible.
    let weights = &mut model.graph.as_mut().unwrap().initializer[0];
    weights.dims = vec![i64::MAX, i64::MAX];
    let huge = home.file("huge.onnx", model.encode_to_vec());
    assert_eq!(home.json(["model", "show", text(&huge)])["parameters"], i64::MAX);
    assert_eq!(home.fails(["model", "show", "m", "--volume", "v"]).0, 3);
    let import = ["model", "import", text(&file), "--name", "m"];
    for (into, exit, says) in [
        (&["--models", "nowhere"][..], 3, "nowhere"),
        (&["--models", text(&file)], 3, "mlp.onnx"),
        (&["--volume", "nope"], 3, "nope"),
    ] {
        let (code, line) = home.fails([&import[..], into].concat());
        assert_eq!(code, exit, "{line}");
        assert!(line.contains(says), "{line}");
    }
    // Neither destination, or both: clap shows the usage.
    for into in [&[][..], &["--models", text(&folder), "--volume", "v"]] {
        assert_eq!(home.run([&import[..], into].concat()).status.code(), Some(2));
    }
}

#[test]
fn weights_beside_a_graph_are_imported_with_it() {
    let home = Home::new();
    let (made, folder) = (onnx(&home), folder(&home));
    let mut model = ModelProto::decode(&std::fs::read(&made).unwrap()[..]).unwrap();
    let weights = &mut model.graph.as_mut().unwrap().initializer[0];
    let elements: Vec<u8> = match weights.raw_data.take() {
        Some(raw) => raw,
        None => std::mem::take(&mut weights.float_data).into_iter().flat_map(f32::to_le_bytes).collect(),
    };
    weights.data_location = Some(DataLocation::External.into());
    let mut outside = |location: &str| {
        let entry = |key: &str, value: &str| StringStringEntryProto {
            key: Some(key.into()),
            value: Some(value.into()),
        };
        let weights = &mut model.graph.as_mut().unwrap().initializer[0];
        weights.external_data = vec![entry("location", location), entry("offset", "4")];
        home.file("outside.onnx", model.encode_to_vec())
    };
    let file = outside("outside.onnx.data");
    let into = ["--name", "m", "--models", text(&folder)];
    let import = [&["model", "import", text(&file)][..], &into[..]].concat();
    let (code, line) = home.fails(&import);
    assert!(code == 3 && line.contains("outside.onnx.data, which does not exist"), "{code}: {line}");
    home.file("outside.onnx.data", [&[0u8; 4], &elements[..]].concat());
    assert_eq!(home.json(&import)["files"][1]["path"], "outside.onnx.data");
    home.json([&["model", "import", text(&made)][..], &into[..]].concat());
    let (service, served) = home.serve(["--models", text(&folder)]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::connect(served["grpc"].as_str().unwrap()).await.unwrap();
        let mut answers = Vec::new();
        for version in [1, 2] {
            let input = Tensor::fp32("input", vec![1, 2], vec![1.0, 2.0]).unwrap();
            answers.push(client.infer("m", Some(version), vec![input], Form::Raw).await.unwrap().outputs);
        }
        assert_eq!(answers[0], answers[1]);
    });
    assert_eq!(service.stop(), 0);
    // No file outside the folder may become part of a model.
    for location in ["../outside.onnx.data", "/etc/passwd", "link"] {
        let file = outside(location);
        let link = home.dir.path().join("link");
        std::fs::remove_file(&link).ok();
        std::os::unix::fs::symlink("/etc/passwd", &link).unwrap();
        let (code, line) = home.fails([&["model", "import", text(&file)][..], &into[..]].concat());
        assert!(code == 2 && line.contains("cannot import"), "{location}: {code}: {line}");
    }
    assert_eq!(versions(&folder.join("m")), [1, 2]);
}

#[test]
fn graphs_that_servers_refuse_are_refused_or_reported_at_import() {
    let home = Home::new();
    let (made, folder) = (onnx(&home), folder(&home));
    let model = ModelProto::decode(&std::fs::read(&made).unwrap()[..]).unwrap();
    let node =
        |domain: &str, operator: &str, inputs: &[&str], output: &str, attribute: AttributeProto| NodeProto {
            domain: Some(domain.into()),
            op_type: Some(operator.into()),
            input: inputs.iter().map(ToString::to_string).collect(),
            output: vec![output.into()],
            attribute: if attribute.name.is_some() { vec![attribute] } else { vec![] },
            ..Default::default()
        };
    let attribute = |name: &str, kind: AttributeType| AttributeProto {
        name: Some(name.into()),
        r#type: Some(kind as i32),
        ..Default::default()
    };
    let with = |nodes: Vec<NodeProto>, file: &str| {
        let mut model = model.clone();
        model.graph.as_mut().unwrap().node.extend(nodes);
        home.file(file, model.encode_to_vec())
    };
    let probit =
        AttributeProto { s: Some(b"PROBIT".to_vec()), ..attribute("post_transform", AttributeType::String) };
    let scores =
        with(vec![node("ai.onnx.ml", "LinearRegressor", &["input"], "scores", probit)], "scores.onnx");
    let import = |file: &Path| {
        ["model", "import", text(file), "--name", "m", "--models", text(&folder)].map(str::to_owned)
    };
    let (exit, line) = home.fails(import(&scores));
    assert!(exit == 2 && line.contains("ai.onnx.ml.LinearRegressor") && line.contains("PROBIT"), "{line}");
    assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0);
    assert!(home.json(["model", "show", text(&scores)])["refused"].as_str().unwrap().contains("PROBIT"));
    // A server's configuration may vouch for divisors.
    let whole = AttributeProto { i: Some(7), ..attribute("to", AttributeType::Int) };
    let quotient = with(
        vec![
            node("", "Cast", &["input"], "whole", whole),
            node("", "Div", &["whole", "whole"], "quotient", AttributeProto::default()),
        ],
        "quotient.onnx",
    );
    let printed = home.json(import(&quotient));
    assert!(printed["refused"].as_str().unwrap().contains("trusted_divisors"), "{printed}");
    assert_eq!(home.json(["model", "show", text(&made)]).get("refused"), None);
}
