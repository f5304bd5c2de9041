//! A look at a dataset before a training: its plan, first rows, columns, parts and speed.

use std::collections::BTreeSet;
use std::fs::File;
use std::sync::Arc;

use arrow::array::{ArrayRef, ListArray, RecordBatch, TimestampMicrosecondArray};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::Field;
use parquet::arrow::ArrowWriter;
use serde_json::{Value, json};

use crate::support::Home;

const ROWS: u64 = 400;
const SPLITS: [&str; 4] = ["--splits", "train=0.8,val=0.1,test=0.1", "--split-by", "id"];

fn dataset() -> Home {
    let home = Home::new();
    let record = |id: u64| {
        let name = (!id.is_multiple_of(7)).then(|| format!("row {}", id % 5));
        format!("{}\n", json!({ "id": id, "label": id % 10, "name": name, "score": id as f64 / 2.0 }))
    };
    let file = home.file("records.jsonl", (0..ROWS).map(record).collect::<String>());
    home.ok(["produce", "rows", file.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "rows", "--volume", "v", "--path", "rows"]);
    home.ok(["snapshot", "create", "v@s"]);
    home
}

/// The ids of one epoch in the order of the feed.
fn ids(home: &Home, more: &[&str]) -> Vec<u64> {
    let batches =
        home.json([&["feed", "plan", "v@s:/rows", "--batch-rows", "16"], more].concat())["steps_per_epoch"]
            .as_u64()
            .unwrap();
    let rows = batches * 16;
    let head = ["--json", "feed", "head", "v@s:/rows", "--batch-rows", "16", "--columns", "id", "--rows"];
    let printed = home.ok([&head[..], &[&rows.to_string()], more].concat());
    printed.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["id"].as_u64().unwrap()).collect()
}

#[test]
fn parts_of_a_split_are_disjoint_complete_and_the_same_for_any_readers() {
    let home = dataset();
    let mut seen = BTreeSet::new();
    for part in ["train", "val", "test"] {
        let chosen = [&SPLITS[..], &["--split", part]].concat();
        let plan = home.json([&["feed", "plan", "v@s:/rows", "--world", "3"], &chosen[..]].concat());
        let found = ids(&home, &chosen);
        assert_eq!(plan["rows"], found.len());
        assert_eq!(plan["dataset_rows"], ROWS);
        let readers = plan["readers"].as_array().unwrap();
        assert_eq!(
            readers.iter().map(|reader| reader["rows"].as_u64().unwrap()).sum::<u64>(),
            found.len() as u64
        );
        assert!(found.iter().all(|id| seen.insert(*id)), "{part}: {found:?}");
        let digests: BTreeSet<String> = ["1", "2", "5", "8"]
            .map(|readers| {
                let verify = ["feed", "verify", "v@s:/rows", "--batch-rows", "16", "--readers", readers];
                let found = home.json([&verify[..], &chosen].concat());
                assert_eq!(found["rows"], plan["rows"]);
                found["digest"].to_string()
            })
            .into();
        assert_eq!(digests.len(), 1, "{digests:?}");
    }
    assert!(seen.into_iter().eq(0..ROWS));
}

#[test]
fn the_plan_and_the_columns_of_a_dataset_are_shown_before_it_is_read() {
    let home = dataset();
    let table = home.ok(["feed", "plan", "v@s:/rows", "--where", "label != 3", "--world", "2"]);
    for text in ["360", "\"label\" != 3", "steps of an epoch", "rows of an epoch"] {
        assert!(table.contains(text), "{text}: {table}");
    }
    let plan = home.json(["feed", "plan", "v@s:/rows"]);
    assert_eq!(
        (&plan["rows"], &plan["batch_rows"], &plan["steps_per_epoch"]),
        (&json!(400), &json!(128), &json!(4))
    );
    assert_eq!(plan["selection"], Value::Null);

    let head = home.ok([
        "feed",
        "head",
        "v@s:/rows",
        "--rows",
        "3",
        "--columns",
        "label,name",
        "--where",
        "label = 3",
    ]);
    assert_eq!(head.lines().count(), 4, "{head}");

    let stats = home.json(["feed", "stats", "v@s:/rows", "--columns", "label,name,score"]);
    let column = |name: &str| {
        let columns = stats["columns"].as_array().unwrap();
        columns.iter().find(|column| column["column"] == name).unwrap().clone()
    };
    let label = column("label");
    assert_eq!((&label["rows"], &label["distinct"], &label["max"]), (&json!(ROWS), &json!(10), &json!(9)));
    assert!((label["mean"].as_f64().unwrap() - 4.5).abs() < 1e-9, "{label}");
    let name = column("name");
    assert_eq!((&name["nulls"], &name["distinct"], &name["min"]), (&json!(58), &json!(5), &json!("row 0")));
    assert_eq!(column("score")["max"], 199.5);
    assert!(home.ok(["feed", "stats", "v@s:/rows"]).contains("row 0"));

    let bench = home.json(["feed", "bench", "v@s:/rows", "--batch-rows", "100", "--decoders", "1"]);
    assert_eq!((&bench["rows"], &bench["batches"]), (&json!(ROWS), &json!(4)));

    // The form without a subcommand stays.
    assert_eq!(home.json(["feed", "v@s:/rows", "--dry", "--batch-rows", "100"])["rows_read"], 400);
    // One epoch is all rows once, also where they do not fill the last batch.
    let bench = home.json(["feed", "bench", "v@s:/rows", "--batch-rows", "150"]);
    assert_eq!((&bench["rows"], &bench["batches"]), (&json!(ROWS), &json!(3)));
    let dry = home.json(["feed", "v@s:/rows", "--dry", "--batch-rows", "150"]);
    assert_eq!((&dry["rows_read"], &dry["batches"]), (&json!(ROWS), &json!(3)));
}

#[test]
fn selections_that_cannot_work_say_why() {
    let home = dataset();
    for (more, code, texts) in [
        (&["--where", "lable = 3"][..], 3, &["column \"lable\"", "label"][..]),
        (&["--where", "label = '3'"], 2, &["\"label\" is", "quotes make a text"]),
        (&["--where", "label = "], 2, &["character 9"]),
        (&["--where", "label > 10"], 3, &["none of its 400 rows"]),
        (&["--splits", "a=0.5,b=0.6", "--split", "a"], 2, &["1.1 together"]),
        (&["--split", "a"], 2, &["needs splits"]),
    ] {
        for command in [&["feed", "v@s:/rows"][..], &["feed", "plan", "v@s:/rows"]] {
            let (found, line) = home.fails([command, more].concat());
            assert_eq!(found, code, "{line}");
            assert!(texts.iter().all(|text| line.contains(text)), "{line}");
        }
    }
    // A typo names what there is, and where it was looked for.
    home.ok(["volume", "create", "fresh"]);
    let root = home.path().display().to_string();
    for (dataset, texts) in [
        ("w@s:/rows", &["volume w does not exist in the home ", &root, "which has fresh, v"][..]),
        ("v@t:/rows", &["snapshot v@t does not exist; volume v has s"]),
        ("fresh@s:/rows", &["snapshot fresh@s does not exist; volume fresh has no snapshots yet"]),
        (
            "fresh@latest:/rows",
            &["a snapshot of volume fresh does not exist; take one with: millrace snapshot create fresh@"],
        ),
        ("v@s:/row", &["no data file found: there is no file at or below this path"]),
    ] {
        let (code, line) = home.fails(["feed", dataset]);
        assert_eq!(code, 3, "{line}");
        assert!(texts.iter().all(|text| line.contains(text)), "{line}");
    }
    for (command, says) in [
        (&["feed"][..], "DATASET"),
        (&["feed", "plan"], "DATASET"),
        (&["feed", "v@s:/rows", "--splits", "a:0.5", "--split", "a"], "PART=FRACTION"),
    ] {
        let output = home.run(command);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(says), "{text}");
    }
}

#[test]
fn rows_with_times_of_named_zones_are_shown_as_a_table_in_utc() {
    let home = dataset();
    // A landed topic has a column of times in UTC.
    let landed = home.ok(["feed", "head", "v@s:/rows", "--rows", "3"]);
    assert_eq!(landed.lines().count(), 4, "{landed}");

    let at = |zone: &str| -> ArrayRef {
        Arc::new(TimestampMicrosecondArray::from(vec![1_710_050_400_000_000]).with_timezone(zone.to_owned()))
    };
    let berlin = at("Europe/Berlin");
    let item = Arc::new(Field::new_list_field(berlin.data_type().clone(), true));
    let list = ListArray::new(item, OffsetBuffer::from_lengths([1]), Arc::clone(&berlin), None);
    let columns: Vec<(&str, ArrayRef)> =
        vec![("utc", at("UTC")), ("berlin", berlin), ("list", Arc::new(list))];
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let path = home.dir.path().join("times.parquet");
    let mut writer = ArrowWriter::try_new(File::create(&path).unwrap(), batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    home.ok(["cp", path.to_str().unwrap(), "v:/times.parquet"]);
    home.ok(["snapshot", "create", "v@times"]);
    let table = home.ok(["feed", "head", "v@times:/times.parquet"]);
    assert_eq!(table.matches("2024-03-10T06:00:00Z").count(), 3, "{table}");
}
