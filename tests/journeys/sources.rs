//! Files as they are, copied into a volume: JSON lines, CSV and folders of files, looked at and trained on.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::{Home, project};

const ROWS: usize = 240;
const GROUPS: [&str; 4] = ["ants", "bees", "cats", "dogs"];

fn record(id: usize) -> Value {
    let mix = (id * 31 + id / 7) % 97;
    let item = mix % 20;
    let history = [mix % 3, mix % 5, mix % 7, mix % 2].map(|part| part as f64 / 4.0 - 0.5);
    json!({
        "id": id, "age": mix as f64 / 50.0 - 1.0, "history": history, "item": item, "price": mix as f64 / 97.0,
        "is_new": mix.is_multiple_of(2), "stars": mix % 5, "group": GROUPS[item / 5]
    })
}

fn copied(home: &Home, name: &str, text: String) {
    let file = home.file(name, text);
    home.ok(["cp", file.to_str().unwrap(), &format!("v:/{name}")]);
}

#[test]
fn copied_json_lines_train_a_model() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    for part in 0..3 {
        let lines: String = (part * 80..(part + 1) * 80).map(|id| format!("{}\n", record(id))).collect();
        let file = home.file(&format!("{part}.jsonl"), lines);
        home.ok(["cp", file.to_str().unwrap(), &format!("v:/visits/{part}.jsonl")]);
    }
    home.ok(["snapshot", "create", "v@s"]);

    let plan = home.json(["feed", "plan", "v@s:/visits", "--batch-rows", "16", "--world", "3"]);
    assert_eq!((&plan["rows"], &plan["files"]), (&json!(ROWS), &json!(3)), "{plan}");
    let head = home.ok(["--json", "feed", "head", "v@s:/visits", "--rows", "240", "--batch-rows", "16"]);
    let mut seen = BTreeSet::new();
    for line in head.lines() {
        let row: Value = serde_json::from_str(line).unwrap();
        let id = row["id"].as_u64().unwrap() as usize;
        assert_eq!(row, record(id));
        assert!(seen.insert(id));
    }
    assert_eq!(seen.len(), ROWS);
    let digests: BTreeSet<String> = ["1", "3"]
        .map(|readers| {
            let verify = ["feed", "verify", "v@s:/visits", "--batch-rows", "16", "--readers", readers];
            home.json(verify)["digest"].to_string()
        })
        .into();
    assert_eq!(digests.len(), 1);
    let stats =
        home.json(["feed", "stats", "v@s:/visits", "--columns", "group,stars", "--where", "stars < 3"]);
    assert_eq!(stats["columns"][1]["max"], 2, "{stats}");

    let model = project().join("trainer/tests/zoo/default/two_towers.onnx");
    let job = format!(
        "name = \"towers\"\ndataset = \"v@s:/visits\"\nlabel = \"group\"\nmodel = {model:?}\nbatch_rows = 16\n\
         virtual_shards = 4\nworkers = 2\nepochs_max = 40\noptimizer = {{ kind = \"adam\", learning_rate = 0.01 }}\n\
         validation = {{ dataset = \"v@s:/visits\" }}\n[inputs]\nuser = [\"age\", \"history\"]\nitem = \"item\"\n\
         details = [\"price\", \"is_new\", \"stars\"]\n"
    );
    let report = home.json(["train", home.file("train.toml", job).to_str().unwrap()]);
    let accuracy = report["validation"].as_array().unwrap().last().unwrap()["accuracy"].as_f64().unwrap();
    assert!(accuracy > 0.9, "{report}");
}

#[test]
fn copied_tables_and_folders_are_shown_in_training_order() {
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let rows: String =
        (0..50).map(|id| format!("{id},\"label {}\",{}\r\n", id % 3, id as f64 / 4.0)).collect();
    copied(&home, "table.csv", format!("\u{feff}id,label,score\r\n{rows}"));
    for class in ["cat", "dog"] {
        for number in 0..5 {
            let folder = home.dir.path().join("photos").join(class);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join(format!("{number}.jpg")), format!("{class} {number}")).unwrap();
        }
    }
    let photos = home.dir.path().join("photos");
    home.ok(["cp", "-r", photos.to_str().unwrap(), "v:/photos"]);
    home.ok(["snapshot", "create", "v@s"]);

    let head = home.ok(["--json", "feed", "head", "v@s:/table.csv", "--rows", "50"]);
    let found: BTreeSet<u64> = head
        .lines()
        .map(|line| {
            let row: Value = serde_json::from_str(line).unwrap();
            let id = row["id"].as_u64().unwrap();
            assert_eq!(
                row,
                json!({ "id": id, "label": format!("label {}", id % 3), "score": id as f64 / 4.0 })
            );
            id
        })
        .collect();
    assert!(found.into_iter().eq(0..50));
    let stats = home.json(["feed", "stats", "folder:v@s:/photos", "--columns", "label,class"]);
    let [label, class] = [&stats["columns"][0], &stats["columns"][1]];
    assert_eq!(
        (&label["rows"], &label["max"], &class["distinct"]),
        (&json!(10), &json!(1), &json!(2)),
        "{stats}"
    );
    let verified = home.json(["feed", "verify", "folder:v@s:/photos", "--batch-rows", "4", "--readers", "3"]);
    assert_eq!(verified["rows"], 10);

    for (dataset, code, texts) in [
        ("v@s:/photos", 3, &["no data file", "folder:VOLUME@SNAPSHOT:/PATH"][..]),
        ("jsonl:v@s:/table.csv", 6, &["table.csv, line 1"]),
    ] {
        let (found, line) = home.fails(["feed", "plan", dataset]);
        assert!(texts.iter().all(|text| line.contains(text)), "{line}");
        assert_eq!(found, code, "{line}");
    }
    let refused = home.run(["feed", "plan", "zip:v@s:/photos"]);
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && told.contains("format \"zip\" is unknown"), "{told}");
}
