//! Tests of Parquet files from common writers, read from a volume through the feed.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::clients::python;
use crate::support::{Home, program};

#[test]
#[ignore = "needs pyarrow, pandas, DuckDB and Polars: run make conformance"]
fn parquet_of_its_usual_writers_is_fed() {
    let home = Home::new();
    let folder = home.dir.path().join("written");
    let written = program(python("parquet_writers.py").arg(&folder));
    let written: Value = serde_json::from_str(&written).unwrap();
    home.ok(["volume", "create", "written"]);
    home.ok(["cp", "--recursive", folder.to_str().unwrap(), "written:/by"]);
    let writers = written.as_object().unwrap();
    assert_eq!(writers.len(), 4, "{written}");
    for (writer, rows) in writers {
        let rows = rows.as_u64().unwrap();
        let dataset = format!("written:/by/{writer}");
        let batches = (rows / 100).to_string();
        let text = home.ok(["feed", &dataset, "--batch-rows", "100", "--batches", &batches, "--json"]);
        let mut ids = BTreeSet::new();
        for line in text.lines() {
            let row: Value = serde_json::from_str(line).unwrap();
            let id = row["id"].as_u64().unwrap();
            assert_eq!(row["name"], ["ada", "grace", "katherine"][id as usize % 3], "{writer}: {row}");
            assert_eq!(row["value"], id as f64 / 4.0, "{writer}: {row}");
            ids.insert(id);
        }
        assert_eq!(ids.len() as u64, rows, "{writer}");
    }
}
