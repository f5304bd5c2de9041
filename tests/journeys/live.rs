//! A training on a topic while records arrive: its range is fixed, proven, resumed and named by the model.

use serde_json::{Value, json};

use crate::support::Home;

fn produce(home: &Home, ids: std::ops::Range<u64>) {
    let record = |id: u64| {
        let pixels: Vec<u64> = (0..4).map(|place| u64::from(place == id % 4)).collect();
        format!("{}\n", json!({ "id": id, "pixels": pixels, "label": id % 4 }))
    };
    let file = home.file(&format!("{}.jsonl", ids.start), ids.map(record).collect::<String>());
    home.ok(["produce", "rows", file.to_str().unwrap()]);
}

#[test]
fn a_model_is_trained_on_a_topic_and_names_its_offsets() {
    let home = Home::new();
    produce(&home, 0..300);
    let plan = home.json(["feed", "plan", "topic:rows@latest", "--world", "3"]);
    assert_eq!(plan["rows"], 300);
    // The printed name has the offsets: what arrives later is not in it.
    let pinned = plan["dataset"].as_str().unwrap();
    assert!(pinned.starts_with("topic:rows@latest?offsets=0:0-"), "{pinned}");
    produce(&home, 300..340);
    let verified = ["1", "3"].map(|readers| home.json(["feed", "verify", pinned, "--readers", readers]));
    assert_eq!((&verified[0]["rows"], &verified[0]["digest"]), (&json!(300), &verified[1]["digest"]));
    assert_eq!(home.json(["feed", "stats", "topic:rows@250", "--columns", "id"])["rows"], 250);
    let head = home.ok(["--json", "feed", "head", pinned, "--rows", "300"]);
    let rows: Vec<Value> = head.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let mut ids: Vec<u64> = rows.iter().map(|row| row["id"].as_u64().unwrap()).collect();
    assert!(rows.iter().all(|row| row["_offset"].is_u64() && row["_partition"].is_u64()), "{head}");
    ids.sort_unstable();
    assert!(ids.into_iter().eq(0..300));

    home.ok(["volume", "create", "models"]);
    let job = home.file(
        "train.toml",
        "name = \"live\"\ndataset = \"topic:rows@latest\"\nfeatures = \"pixels\"\nlabel = \"label\"\n\
         model = { kind = \"mlp\", inputs = 4, hidden = [4], classes = 4 }\nworkers = 2\nepochs_max = 2\nbatch_rows = 32\n\
         output = { volume = \"models\" }\n",
    );
    let report = home.json(["train", job.to_str().unwrap()]);
    assert_eq!((&report["version"], &report["rows_per_epoch"]), (&json!(1), &json!([340, 340])));
    // Without another record, it is the same run.
    assert_eq!(home.json(["train", job.to_str().unwrap()])["already_published"], true);
    let shown = home.json(["model", "show", "live", "--volume", "models"]);
    let lineage = shown["lineage"]["topic"].as_str().unwrap();
    assert!(lineage.starts_with("topic:rows@latest?offsets=0:0-"), "{shown}");
    // What the model names can be read again.
    assert_eq!(home.json(["feed", "plan", lineage])["rows"], 340);
    assert!(home.ok(["model", "show", "live", "--volume", "models"]).contains(lineage));
}

#[test]
fn ranges_that_cannot_be_read_say_why() {
    let home = Home::new();
    produce(&home, 0..20);
    for (dataset, code, text) in [
        ("topic:rows@21", 3, "topic rows has 20 records that are rows, fewer than the 21"),
        ("topic:rows@2999-01-01", 2, "cannot be read until 2999-01-01T00:00:00Z"),
        ("topic:none", 3, "topic none does not exist"),
        ("topic:rows@2024-01-01", 3, "topic:rows@2024-01-01T00:00:00Z has no record that is a row"),
    ] {
        let (found, line) = home.fails(["feed", "plan", dataset]);
        assert!(found == code && line.contains(text), "{dataset}: {found} {line}");
    }
    let refused = home.run(["feed", "plan", "topic:rows@soon"]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && text.contains("2026-11-28T06:00:00Z"), "{text}");
    let file = home.file("bad.jsonl", "no json\n");
    home.ok(["produce", "rows", file.to_str().unwrap()]);
    let (code, line) = home.fails(["feed", "plan", "topic:rows"]);
    assert!(code == 6 && line.contains("topic rows partition") && line.contains("?bad=skip"), "{line}");
    assert_eq!(home.json(["feed", "plan", "topic:rows@latest?bad=skip"])["rows"], 20);
}
