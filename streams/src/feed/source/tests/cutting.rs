//! Property tests: cut anywhere, a file reads as a naive parser reads it whole.

use proptest::prelude::*;
use serde_json::{Map, Value, json};

use super::*;

/// A value of a column of one type, or null.
fn value(kind: u8) -> BoxedStrategy<Value> {
    let some = match kind % 6 {
        0 => any::<i64>().prop_map(Value::from).boxed(),
        1 => (-1e9..1e9f64).prop_map(|number| json!(number + 0.5)).boxed(),
        2 => any::<bool>().prop_map(Value::from).boxed(),
        3 => prop::collection::vec(any::<i32>(), 0..4).prop_map(|list| json!(list)).boxed(),
        4 => ("[a-z]{0,3}", any::<bool>()).prop_map(|(a, b)| json!({"a": a, "b": [b]})).boxed(),
        _ => "\\PC{0,12}|.{0,8}".prop_map(Value::from).boxed(),
    };
    prop_oneof![1 => Just(Value::Null), 5 => some].boxed()
}

/// Rows of columns `c0`, `c1`, …; a row may lack some.
fn table() -> impl Strategy<Value = Vec<Map<String, Value>>> {
    prop::collection::vec(any::<u8>(), 1..5).prop_flat_map(|kinds| {
        let cells: Vec<_> = kinds.iter().map(|kind| prop::option::weighted(0.8, value(*kind))).collect();
        let row = cells.prop_map(|cells| {
            let named = cells.into_iter().enumerate();
            named.filter_map(|(at, cell)| Some((format!("c{at}"), cell?))).collect()
        });
        prop::collection::vec(row, 0..40)
    })
}

fn bounds() -> impl Strategy<Value = Bounds> {
    (1..20u64, 1..200u64).prop_map(|(rows, bytes)| Bounds { rows, bytes })
}

fn with_nulls(row: &Map<String, Value>, columns: &[String]) -> Value {
    let all = columns.iter().map(|name| (name.clone(), row.get(name).cloned().unwrap_or_default()));
    Value::Object(all.collect())
}

fn names(rows: &[Map<String, Value>]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for name in rows.iter().flat_map(Map::keys) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    names
}

/// A field as RFC 4180 writes it.
fn quoted(text: &str) -> String {
    match text.contains(['"', ',', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn json_lines_cut_anywhere_read_as_whole(
        table in table(), bounds in bounds(), crlf: bool, blank: bool, last: bool, bom: bool,
    ) {
        let line_end = if crlf { "\r\n" } else { "\n" };
        let mut text = if bom { "\u{feff}".to_owned() } else { String::new() };
        for row in &table {
            text += &serde_json::to_string(row).unwrap();
            text += line_end;
            if blank {
                text += line_end;
            }
        }
        if !last {
            text.truncate(text.trim_end_matches(['\r', '\n']).len());
        }
        let names = names(&table);
        if names.is_empty() {
            return Ok(());
        }
        let expected: Vec<Value> = table.iter().map(|row| with_nulls(row, &names)).collect();
        prop_assert_eq!(rows("a.jsonl", text.as_bytes(), bounds), expected.clone());
        prop_assert_eq!(rows("a.ndjson.gz", &gzip(text.as_bytes()), bounds), expected.clone());
        prop_assert_eq!(rows("a.jsonl.zst", &zstd::encode_all(text.as_bytes(), 1).unwrap(), bounds), expected);
    }

    #[test]
    fn csv_cut_anywhere_reads_as_whole(
        cells in prop::collection::vec(("[0-9]{0,4}", "[a\",\n\r\u{feff}é ]{0,6}", "true|false|"), 0..40),
        bounds in bounds(), crlf: bool, last: bool,
    ) {
        let line_end = if crlf { "\r\n" } else { "\n" };
        let mut text = format!("id,\"a \"\"name\"\",\",flag{line_end}");
        for (id, name, flag) in &cells {
            // A row of empty fields alone is still a row.
            text += &format!("{id},{},{flag}{line_end}", quoted(name));
        }
        if !last {
            text.truncate(text.trim_end_matches(['\r', '\n']).len());
        }
        let read = rows("a.csv", text.as_bytes(), bounds);
        prop_assert_eq!(read.len(), cells.len());
        let is_code = |id: &String| id.len() > 1 && id.starts_with('0');
        let are_codes = cells.iter().any(|(id, ..)| is_code(id));
        for (row, (id, name, flag)) in read.iter().zip(&cells) {
            let expected_id = match id.as_str() {
                "" => Value::Null,
                text if are_codes => json!(text),
                text => json!(text.parse::<i64>().unwrap()),
            };
            prop_assert_eq!(&row["id"], &expected_id);
            prop_assert_eq!(&row["a \"name\","], &if name.is_empty() { Value::Null } else { json!(name) });
            let expected_flag = flag.parse::<bool>().map_or(Value::Null, Value::from);
            prop_assert_eq!(&row["flag"], &expected_flag);
        }
        prop_assert_eq!(rows("a.csv.gz", &gzip(text.as_bytes()), bounds), read);
    }
}

#[test]
fn types_widen_over_rows_and_clash_with_their_lines() {
    let schema = schema_of(
        "a.jsonl",
        br#"{"i": 1, "f": 1, "u": 18446744073709551615, "t": "x", "n": null, "l": [], "o": {"a": 1}}
            {"i": -2, "f": 0.5, "u": 1, "t": null, "l": [[1]], "o": {"b": [true]}}"#,
    );
    let kinds: Vec<String> =
        schema.fields().iter().map(|field| format!("{}: {}", field.name(), field.data_type())).collect();
    assert_eq!(kinds[..5], ["i: Int64", "f: Float64", "u: UInt64", "t: Utf8", "n: Null"]);
    assert!(kinds[5].starts_with("l: List(") && kinds[5].contains("Int64"), "{kinds:?}");
    assert!(kinds[6].contains("\"a\": Int64") && kinds[6].contains("\"b\""), "{kinds:?}");
    assert!(schema.field(3).is_nullable() && !schema.field(0).is_nullable());

    let text = b"{\"ok\": 1, \"x\": {\"y\": 1}}\n\n{\"ok\": 2, \"x\": {\"y\": \"a\"}}\n{\"x\": [2]}\n";
    let scanned = scan_bytes("a.jsonl", text, Bounds::TEXT).unwrap();
    let (schema, conflicts) = scanned.columns.schema(|place| format!("a.jsonl, line {}", place.at));
    assert_eq!(schema.fields().iter().map(|field| field.name().as_str()).collect::<Vec<_>>(), ["ok"]);
    let error = conflicts[0].error().to_string();
    for part in ["column \"x\"", "Int64 (at \"y\") in a.jsonl, line 1", "Utf8 (at \"y\") in a.jsonl, line 3"]
    {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(rows("a.jsonl", text, SMALL), [json!({"ok": 1}), json!({"ok": 2}), json!({"ok": null})]);
}

#[test]
fn csv_numbers_too_large_for_a_float_are_texts() {
    for (written, kind) in [("1e400", "Utf8"), ("-1e999", "Utf8"), ("1e308", "Float64"), ("inf", "Float64")] {
        let schema = schema_of("a.csv", format!("a\n{written}\n").as_bytes());
        assert_eq!(schema.field(0).data_type().to_string(), kind, "{written}");
    }
}

#[test]
fn csv_columns_of_several_types_are_texts() {
    let text = b"n,f,zip,id,mixed,blank\n1,1,01234,99999999999999999999,1,\n-2,2.5,1,1,x,\n";
    let schema = schema_of("a.csv", text);
    let kinds: Vec<String> = schema.fields().iter().map(|field| field.data_type().to_string()).collect();
    assert_eq!(kinds, ["Int64", "Float64", "Utf8", "Utf8", "Utf8", "Null"]);
    let tabs = rows("a.tsv", b"a\tb\n1,2\tx\n", SMALL);
    assert_eq!(tabs, [json!({"a": "1,2", "b": "x"})]);
}

#[test]
fn integers_are_never_rounded() {
    let kind = |path: &str, text: &str| schema_of(path, text.as_bytes()).field(0).data_type().to_string();
    let lines = |values: &[&str]| -> String {
        values
            .iter()
            .map(|value| format!("{{\"a\": {value}, \"t\": \"1{} \\\"\"}}\n", "0".repeat(30)))
            .collect()
    };
    // 2^53 + 1 is the first integer between two floats.
    for (first, other) in
        [("9007199254740993", "0.5"), ("-9007199254740993", "1e3"), ("18446744073709551615", "1.0")]
    {
        for values in [[first, other], [other, first]] {
            let scanned = scan_bytes("a.jsonl", lines(&values).as_bytes(), SMALL).unwrap();
            let (_, conflicts) = scanned.columns.schema(|place| place.at.to_string());
            let error = conflicts[0].error().to_string();
            assert!(error.contains("column \"a\"") && error.contains("does not hold exactly"), "{error}");
            let table = format!("a\n{}\n{}\n", values[0], values[1]);
            assert_eq!(kind("a.csv", &table), "Utf8");
            assert_eq!(rows("a.csv", table.as_bytes(), SMALL), values.map(|value| json!({ "a": value })));
        }
    }
    // The first value that a float does not hold is named, not the first integer.
    let scanned = scan_bytes("a.jsonl", lines(&["1", "9007199254740993", "0.5"]).as_bytes(), SMALL).unwrap();
    let (_, conflicts) = scanned.columns.schema(|place| format!("line {}", place.at));
    let error = conflicts[0].error().to_string();
    assert!(error.contains("line 2") && error.contains("line 3"), "{error}");
    // Floats that other programs write without a point.
    for exact in
        ["9007199254740992", "100000000000000000000", "-9223372036854775808", "-36893488147419103232"]
    {
        assert_eq!(kind("a.jsonl", &lines(&["0.5", exact])), "Float64");
    }
    assert_eq!(kind("a.jsonl", &lines(&["18446744073709551616", "1"])), "Float64");
    for rounded in ["18446744073709551617", "-9223372036854775809", "9".repeat(60).as_str()] {
        let error = refusal("a.jsonl", lines(&["1", rounded]).as_bytes());
        assert!(error.contains("line 2") && error.contains(&rounded[..19]), "{error}");
    }
}

#[test]
fn row_groups_are_bounded_and_hold_every_row_once() {
    let text: String = (0..1000).map(|i| format!("{{\"id\": {i}}}\n")).collect();
    let (_, batches) = read_in_groups("a.jsonl", text.as_bytes(), Bounds { rows: 64, bytes: 1 << 20 });
    assert_eq!(batches.len(), 16);
    let ids: Vec<Value> = batches.iter().flat_map(super::json).map(|row| row["id"].clone()).collect();
    assert_eq!(ids, (0..1000).map(Value::from).collect::<Vec<_>>());
    let (_, batches) = read_in_groups("a.jsonl", text.as_bytes(), Bounds { rows: 1 << 20, bytes: 1000 });
    assert!(batches.len() > 10 && batches.iter().all(|batch| batch.num_rows() < 110));
}
