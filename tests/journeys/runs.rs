//! Journey: train a job twice with other settings, list and compare the runs, draw them, watch them in TensorBoard.

use crate::support::{Home, project};

const JOB: &str = r#"
name = "digits"
dataset = "digits@one:/train"
features = "pixels"
label = "label"
model = { kind = "mlp", inputs = 64, hidden = [8], classes = 10, scale = 0.0625 }
optimizer = { kind = "adamw", learning_rate = 0.003 }
batch_rows = 32
epochs_max = 2
workers = 1
"#;

#[test]
fn runs_are_listed_compared_and_drawn() {
    let home = Home::new();
    let records = project().join("examples/digits/digits-test.jsonl");
    let config = home.file("millrace.toml", "[streams.broker]\nlisten = \"127.0.0.1:0\"\n");
    let config = config.to_str().unwrap();
    home.ok(["--config", config, "produce", "digits", records.to_str().unwrap()]);
    home.ok(["--config", config, "ingest", "--topic", "digits", "--volume", "digits", "--path", "/train"]);
    home.ok(["snapshot", "create", "digits@one"]);
    assert_eq!(home.json(["runs", "list", "--volume", "digits"]), serde_json::json!([]));
    let (code, line) = home.fails(["runs", "show", "digits", "--volume", "digits"]);
    assert!(code == 3 && line.contains("millrace runs list"), "{code} {line}");
    let (code, line) = home.fails(["runs", "list", "--volume", "digits", "--job", "digits"]);
    assert!(code == 3 && line.contains("none of other jobs"), "{code} {line}");

    let board = home.dir.path().join("board");
    let job = home.file("train.toml", JOB);
    let first = home.json(["train", job.to_str().unwrap(), "--tensorboard", board.to_str().unwrap()]);
    let events = std::fs::read_dir(board.join("digits")).unwrap().next().unwrap().unwrap().path();
    let events = std::fs::read(events).unwrap();
    let has = |tag: &str| events.windows(tag.len()).any(|part| part == tag.as_bytes());
    assert!(has("brain.Event:2") && has("train/loss") && has("epoch/loss"));

    let job =
        home.file("train.toml", JOB.replace("0.003", "0.03").replace("epochs_max = 2", "epochs_max = 3"));
    let second = home.json(["train", job.to_str().unwrap()]);
    let runs = home.json(["runs", "list", "--volume", "digits"]);
    let of = |report: &serde_json::Value| {
        let run = runs.as_array().unwrap().iter().find(|run| run["run"] == report["run"]).unwrap();
        assert_eq!((&run["step"], &run["finished"]), (&report["steps"], &true.into()), "{run}");
        assert_eq!(run["versions"], serde_json::json!([report["version"]]), "{run}");
        let losses: Vec<_> =
            run["epochs"].as_array().unwrap().iter().map(|epoch| epoch["loss"].clone()).collect();
        assert_eq!(serde_json::Value::from(losses), report["loss_per_epoch"], "{run}");
        run["run"].as_str().unwrap()[..12].to_owned()
    };
    let ids = [of(&first), of(&second)];
    assert_eq!(runs.as_array().unwrap().len(), 2);
    assert_eq!(home.json(["runs", "list", "--volume", "digits", "--job", "digits"]), runs);
    let (code, line) = home.fails(["runs", "list", "--volume", "digits", "--job", "digit"]);
    assert!(code == 3 && line.contains("no run of job \"digit\": it has runs of digits"), "{code} {line}");

    // The newest run of the job.
    let svg = home.dir.path().join("loss.svg");
    let shown = home.ok(["runs", "show", "digits", "--volume", "digits", "--svg", svg.to_str().unwrap()]);
    assert!(shown.contains(second["run"].as_str().unwrap()) && shown.contains("learning_rate"), "{shown}");
    let picture = std::fs::read_to_string(&svg).unwrap();
    assert!(picture.contains(&ids[1]) && !picture.contains(&ids[0]), "{picture}");
    // A bare name is a file of the working folder.
    let bare = ["runs", "show", "digits", "--volume", "digits", "--svg", "bare.svg"];
    let output = home.command().current_dir(home.dir.path()).args(bare).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_to_string(home.dir.path().join("bare.svg")).unwrap(), picture);
    // A picture that cannot be written does not take the table away.
    let name = format!("digits/{}", ids[0]);
    let nowhere = ["runs", "show", name.as_str(), "--volume", "digits", "--svg", "/nowhere/a.svg"];
    let output = home.run(nowhere);
    assert!(!output.status.success() && String::from_utf8_lossy(&output.stdout).contains("learning_rate"));
    let compared = home.json(["runs", "compare", &ids[0], &ids[1], "--volume", "digits"]);
    let differences = compared["differences"].as_object().unwrap();
    assert_eq!(differences.keys().collect::<Vec<_>>(), ["epochs_max", "optimizer.learning_rate"]);
    assert_eq!(differences["epochs_max"], serde_json::json!(["2", "3"]));
    let table = home.ok(["runs", "compare", &ids[0], &ids[1], "--volume", "digits"]);
    assert!(table.contains("optimizer.learning_rate"), "{table}");
    // At a snapshot from before the trainings there is none.
    assert_eq!(home.json(["runs", "list", "--volume", "digits@one"]), serde_json::json!([]));
    let (code, line) = home.fails(["runs", "compare", "nothing", &ids[1], "--volume", "digits"]);
    assert!(code == 3 && line.contains("\"nothing\""), "{code} {line}");
}
