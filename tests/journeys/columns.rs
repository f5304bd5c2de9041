//! A model with several inputs, trained on a table and served.

use serde_json::{Value, json};

use crate::support::{Home, project};

const GROUPS: [&str; 4] = ["ants", "bees", "cats", "dogs"];

/// What a user looked at, and the group of people that they belong to.
fn records() -> Vec<Value> {
    let record = |id: usize| {
        let mix = (id * 31 + id / 7) % 97;
        let item = mix % 20;
        let history = [mix % 3, mix % 5, mix % 7, mix % 2].map(|part| part as f64 / 4.0 - 0.5);
        json!({
            "id": id, "age": mix as f64 / 50.0 - 1.0, "history": history, "item": item, "price": mix as f64 / 97.0,
            "is_new": mix.is_multiple_of(2), "stars": mix % 5, "group": GROUPS[item / 5],
            "class": item / 5
        })
    };
    (0..240).map(record).collect()
}

#[test]
fn records_with_many_fields_train_a_model_of_several_inputs_and_are_predicted() {
    let home = Home::new();
    let lines: String = records().iter().map(|record| format!("{record}\n")).collect();
    let file = home.file("records.jsonl", lines);
    home.ok(["produce", "visits", file.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "visits", "--volume", "v", "--path", "visits"]);
    home.ok(["snapshot", "create", "v@s"]);
    // Inputs: user [rows, 5], item [rows] of int64, details [rows, 3].
    let model = project().join("trainer/tests/zoo/default/two_towers.onnx");
    let job = |inputs: &str| {
        let text = format!(
            "name = \"towers\"\ndataset = \"v@s:/visits\"\nlabel = \"group\"\nmodel = {model:?}\nbatch_rows = 16\n\
             virtual_shards = 4\nworkers = 2\nepochs_max = 40\noptimizer = {{ kind = \"adam\", learning_rate = 0.01 }}\n\
             validation = {{ dataset = \"v@s:/visits\" }}\n[inputs]\n{inputs}"
        );
        home.file("train.toml", text).to_str().unwrap().to_owned()
    };
    let (code, line) = home.fails(["train", &job("user = [\"age\", \"history\"]\nitem = \"item\"\n")]);
    assert!(code == 2 && line.contains("\"details\" (FLOAT [rows, 3])"), "{code} {line}");
    let columns =
        "user = [\"age\", \"history\"]\nitem = \"item\"\ndetails = [\"price\", \"is_new\", \"stars\"]\n";
    let report = home.json(["train", &job(columns)]);
    let accuracy = report["validation"].as_array().unwrap().last().unwrap()["accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.9, "{report}");

    let shown = home.json(["model", "show", "towers", "--volume", "v"]);
    assert_eq!(
        shown["fields"],
        json!({ "details": ["price", "is_new", "stars"], "item": ["item"], "user": ["age", "history"] })
    );
    let (service, served) = home.serve(["--volume", "v"]);
    let grpc = served["grpc"].as_str().unwrap();
    let predict = ["predict", "towers", file.to_str().unwrap(), "--grpc", grpc, "--label", "class"];
    // The server tells which fields feed the inputs, and joins them as the training did.
    let printed = home.json(predict);
    assert_eq!(
        (&printed["predicted"], printed["accuracy"].as_f64()),
        (&json!(240), Some(accuracy)),
        "{printed}"
    );
    let (code, line) = home.fails([&predict[..], &["--input", "user=age"]].concat());
    assert!(code == 2 && line.contains("\"age\"") && line.contains("elements"), "{code} {line}");
    assert_eq!(service.stop(), 0);
}
