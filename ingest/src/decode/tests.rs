//! Tests of the decoder: every type and every fault, and that no input breaks it.

use std::sync::Arc;

use arrow::array::{
    Array, ArrayRef, AsArray, BinaryArray, BooleanArray, Float32Array, Float64Array, Int32Array, Int64Array,
    StringArray, TimestampMicrosecondArray,
};
use arrow::datatypes::{Float32Type, Int64Type};
use proptest::prelude::*;

use super::*;
use crate::schema::DeclaredSchema;

fn schema(entries: &[(&str, &str)]) -> Arc<Schema> {
    let entry = |(name, kind): &(&str, &str)| ((*name).to_owned(), (*kind).to_owned());
    let declared = DeclaredSchema(entries.iter().map(entry).collect());
    Arc::new(declared.schema().unwrap())
}

struct Harness {
    decoder: Decoder,
    columns: Columns,
}

impl Harness {
    fn new(entries: &[(&str, &str)]) -> Self {
        Self::with(entries, UnknownFields::Reject)
    }

    fn with(entries: &[(&str, &str)], unknown: UnknownFields) -> Self {
        let schema = schema(entries);
        Self { columns: Columns::new(&schema), decoder: Decoder::new(schema, unknown, Limits::default()) }
    }

    fn decode(&mut self, record: &str) -> Outcome {
        self.decoder.decode(Some(record.as_bytes()), &mut self.columns)
    }

    fn land(&mut self, record: &str) {
        assert_eq!(self.decode(record), Outcome::Landed, "{record}");
    }

    fn reject(&mut self, record: &str) -> (RejectClass, String) {
        let rows = self.columns.rows();
        match self.decode(record) {
            Outcome::Rejected(reject) => {
                assert_eq!(self.columns.rows(), rows);
                (reject.class, reject.reason)
            }
            other => panic!("{record}: {other:?}"),
        }
    }

    fn take(&mut self) -> Vec<ArrayRef> {
        let rows = self.columns.rows();
        let columns = self.columns.take().unwrap();
        assert!(columns.iter().all(|column| column.len() == rows));
        columns
    }
}

#[test]
fn every_column_type_is_decoded() {
    let mut harness = Harness::new(&[
        ("flag", "bool"),
        ("small", "int32"),
        ("big", "int64"),
        ("single", "float32"),
        ("double", "float64"),
        ("text", "utf8"),
        ("raw", "binary"),
        ("time", "timestamp"),
        ("tree", "json"),
        ("many", "list<int64>"),
        ("pair", "fixed_list<float32,2>"),
    ]);
    harness.land(
        r#" { "flag":true, "small":-2147483648, "big":9223372036854775807, "single":0.1,
          "double":-1.5e300, "text":"a\"\u00e9\ud83d\ude00\n", "raw":"AQID",
          "time":"2026-11-21T01:02:03.000004Z", "tree":{"a":[1, null]}, "many":[1,2,3],
          "pair":[0.5, 16] } "#,
    );
    harness.land(
        r#"{"pair":[1,2],"many":[],"tree":null,"time":-1,"raw":"","text":"","double":0,
        "single":16777216,"big":-9223372036854775808,"small":0,"flag":false}"#
            .replace(r#""tree":null"#, r#""tree":7"#)
            .as_str(),
    );
    let columns = harness.take();
    let at = |i: usize| &columns[i];
    assert_eq!(at(0).as_boolean(), &BooleanArray::from(vec![true, false]));
    assert_eq!(at(1).as_primitive(), &Int32Array::from(vec![i32::MIN, 0]));
    assert_eq!(at(2).as_primitive(), &Int64Array::from(vec![i64::MAX, i64::MIN]));
    assert_eq!(at(3).as_primitive(), &Float32Array::from(vec![0.1, 16_777_216.0]));
    assert_eq!(at(4).as_primitive(), &Float64Array::from(vec![-1.5e300, 0.0]));
    assert_eq!(at(5).as_string(), &StringArray::from(vec!["a\"é😀\n", ""]));
    assert_eq!(at(6).as_binary(), &BinaryArray::from(vec![&[1u8, 2, 3][..], &[]]));
    assert_eq!(
        at(7).as_primitive(),
        &TimestampMicrosecondArray::from(vec![1_795_222_923_000_004, -1000]).with_timezone("UTC")
    );
    assert_eq!(at(8).as_string(), &StringArray::from(vec![r#"{"a":[1, null]}"#, "7"]));
    let many = at(9).as_list::<i32>();
    assert_eq!(many.value(0).as_primitive::<Int64Type>().values(), &[1, 2, 3]);
    assert!(many.value(1).is_empty());
    let pair = at(10).as_fixed_size_list();
    assert_eq!(pair.values().as_primitive::<Float32Type>().values(), &[0.5, 16.0, 1.0, 2.0]);
}

#[test]
fn nulls_and_missing_fields() {
    let mut harness = Harness::new(&[
        ("id", "int64"),
        ("note", "utf8?"),
        ("pair", "fixed_list<int32,2>?"),
        ("many", "list<bool>?"),
    ]);
    harness.land(r#"{"id":1}"#);
    harness.land(r#"{"id":2,"note":null,"pair":null,"many":null}"#);
    harness.land(r#"{"id":3,"note":"x","pair":[1,2],"many":[true]}"#);
    for (record, class, what) in [
        (r#"{"note":"x"}"#, RejectClass::MissingField, r#""id" is missing"#),
        (r#"{"id":null}"#, RejectClass::MissingField, "null where int64"),
        (r#"{"id":1,"many":[true,null]}"#, RejectClass::WrongType, "found null"),
        (r#"{"id":1,"pair":[1]}"#, RejectClass::WrongType, "an array of 1"),
        (r#"{"id":1,"pair":[1,2,3]}"#, RejectClass::WrongType, "an array of 3"),
    ] {
        let (found, reason) = harness.reject(record);
        assert_eq!(found, class, "{reason}");
        assert!(reason.contains(what), "{reason}");
    }
    let columns = harness.take();
    assert_eq!(columns[1].as_string(), &StringArray::from(vec![None, None, Some("x")]));
    assert_eq!(columns[2].null_count(), 2);
    assert_eq!(columns[3].null_count(), 2);
}

#[test]
fn rejected_records_name_the_reason() {
    let mut harness = Harness::new(&[
        ("a", "int32?"),
        ("f", "float32?"),
        ("d", "float64?"),
        ("b", "binary?"),
        ("t", "timestamp?"),
        ("s", "utf8?"),
    ]);
    use RejectClass::*;
    for (record, class, what) in [
        ("", NotJson, "byte 0"),
        ("{", NotJson, "field name"),
        ("nul", NotAnObject, "found null"),
        ("[]", NotAnObject, "found an array"),
        ("7", NotAnObject, "found a number"),
        (r#"{"a":1,}"#, NotJson, "field name"),
        (r#"{"a":1}x"#, NotJson, "after the end of the record"),
        (r#"{"a" 1}"#, NotJson, "expected :"),
        (r#"{a:1}"#, NotJson, "field name"),
        (r#"{"a":01}"#, NotJson, "leading zero"),
        (r#"{"a":-}"#, NotJson, "digit"),
        (r#"{"a":1.}"#, NotJson, "decimal point"),
        (r#"{"a":1e}"#, NotJson, "exponent"),
        (r#"{"a":+1}"#, NotJson, "expected a value"),
        (r#"{"a":NaN}"#, NotJson, "expected a value"),
        (r#"{"s":"\x"}"#, NotJson, "escape"),
        (r#"{"s":"\ud800"}"#, NotJson, "surrogate"),
        (r#"{"s":"\udc00\ud800"}"#, NotJson, "surrogate"),
        (r#"{"s":"\u12g4"}"#, NotJson, "hexadecimal"),
        ("{\"s\":\"a\nb\"}", NotJson, "control character"),
        (r#"{"s":"abc"#, NotJson, "inside a string"),
        (r#"{"a":1,"a":2}"#, DuplicateField, r#""a" appears twice"#),
        (r#"{"x":1}"#, UnknownField, r#""x" is not in the schema"#),
        (r#"{"a":"1"}"#, WrongType, r#"field "a": expected int32, found a string: "1""#),
        (r#"{"a":1.0}"#, WrongType, "fraction"),
        (r#"{"a":1e2}"#, WrongType, "fraction or exponent"),
        (r#"{"a":2147483648}"#, OutOfRange, "range of int32"),
        (r#"{"a":99999999999999999999}"#, OutOfRange, "range of int32"),
        (r#"{"f":1e39}"#, OutOfRange, "range of float32"),
        (r#"{"f":16777217}"#, OutOfRange, "exactly"),
        (r#"{"d":1e400}"#, OutOfRange, r#"field "d": a number out of the range of float64: 1e400"#),
        (r#"{"d":-1e400}"#, OutOfRange, "range of float64: -1e400"),
        (r#"{"d":1e-400}"#, OutOfRange, "range of float64"),
        (r#"{"d":9007199254740993}"#, OutOfRange, "exactly"),
        (r#"{"d":18446744073709551617}"#, OutOfRange, "exactly"),
        (r#"{"b":"AQI"}"#, WrongType, "base64"),
        (r#"{"b":"AR=="}"#, WrongType, "base64"),
        (r#"{"b":"A==="}"#, WrongType, "base64"),
        (r#"{"t":"yesterday"}"#, WrongType, "RFC 3339"),
        (r#"{"t":"2026-11-21T00:00:00.0000001Z"}"#, OutOfRange, "exactly"),
        (r#"{"t":9223372036854775807}"#, OutOfRange, "range of timestamp: 9223372036854775807"),
        (r#"{"t":9000000000000000}"#, OutOfRange, "range of timestamp: 9000000000000000"),
        (r#"{"t":-9000000000000000}"#, OutOfRange, "range of timestamp: -9000000000000000"),
        (r#"{"t":1.5}"#, WrongType, "fraction or exponent: 1.5"),
        (r#"{"t":true}"#, WrongType, "found a boolean: true"),
        (r#"{"t":"2016-12-31T23:59:60Z"}"#, OutOfRange, r#"exactly: "2016-12-31T23:59:60Z""#),
        (r#"{"t":"2026-11-21T24:00:00Z"}"#, WrongType, r#"time: "2026-11-21T24:00:00Z""#),
        (r#"{"t":"2026-11-21T00:00:00.0000000001Z"}"#, OutOfRange, "exactly"),
        (r#"{"t":"2026-02-30T00:00:00Z"}"#, WrongType, "RFC 3339"),
    ] {
        let (found, reason) = harness.reject(record);
        assert_eq!(found, class, "{record}: {reason}");
        assert!(reason.contains(what), "{record}: {reason}");
        // A reject does not disturb the rows that land afterwards.
        harness.land(r#"{"s":"ok","a":5}"#);
    }
    let rows = harness.columns.rows();
    let columns = harness.take();
    assert!(columns[0].as_primitive::<arrow::datatypes::Int32Type>().iter().all(|v| v == Some(5)));
    assert_eq!(columns[5].len(), rows);
}

#[test]
fn values_in_reasons_are_short_and_on_one_line() {
    let mut harness = Harness::new(&[("a", "int32?")]);
    let (_, reason) = harness.reject(&format!(r#"{{"a":"{}"}}"#, "ä".repeat(10_000)));
    assert!(reason.ends_with("ää…") && reason.chars().count() < 150, "{reason}");
    let (_, reason) = harness.reject("{\"a\":[1,\n2],\"b\":3}");
    assert!(reason.ends_with("found an array: [1, 2]"), "{reason}");
    // A value that is cut, too.
    let (_, reason) = harness.reject("{\"a\":[1");
    assert!(reason.ends_with("found an array: [1"), "{reason}");
}

#[test]
fn numbers_at_the_edges_are_exact() {
    let mut harness = Harness::new(&[("i", "int64"), ("d", "float64"), ("t", "timestamp")]);
    harness.land(r#"{"i":-0,"d":-0,"t":-0}"#);
    harness
        .land(r#"{"i":9223372036854775807,"d":1.7976931348623157e308,"t":"2026-11-21T23:59:59.999999000Z"}"#);
    harness.land(r#"{"i":-9223372036854775808,"d":5e-324,"t":"1969-12-31T23:59:59.999999-00:00"}"#);
    harness.land(r#"{"i":0,"d":0e999999,"t":-8000000000000000}"#);
    for big in ["9223372036854775808", "18446744073709551615", "-9223372036854775809", "1e18", "1e400"] {
        let (_, reason) = harness.reject(&format!(r#"{{"i":{big}}}"#));
        assert!(reason.contains(r#"field "i""#) && reason.contains("int64"), "{reason}");
        assert!(reason.ends_with(&format!(": {big}")), "{reason}");
    }
    let columns = harness.take();
    assert_eq!(columns[0].as_primitive(), &Int64Array::from(vec![0, i64::MAX, i64::MIN, 0]));
    let doubles = columns[1].as_primitive::<arrow::datatypes::Float64Type>();
    let bits: Vec<u64> = doubles.values().iter().map(|value| value.to_bits()).collect();
    assert_eq!(bits, [-0.0f64, f64::MAX, f64::from_bits(1), 0.0].map(f64::to_bits));
    let times = columns[2].as_primitive::<arrow::datatypes::TimestampMicrosecondType>().values();
    assert_eq!(times[..], [0, 1_795_305_599_999_999, -1, -8_000_000_000_000_000_000]);

    let mut add = Harness::with(&[("i", "int64?")], UnknownFields::AddColumn);
    let (class, reason) = add.reject(r#"{"new":1e400}"#);
    assert_eq!(class, RejectClass::OutOfRange);
    assert!(reason.contains(r#"field "new""#) && reason.ends_with(": 1e400"), "{reason}");
}

#[test]
fn records_over_the_limits_are_rejected() {
    let schema = schema(&[("a", "json?")]);
    let limits = Limits { record_bytes_max: 100, depth_max: 4, fields_max: 3 };
    let mut columns = Columns::new(&schema);
    let mut decoder = Decoder::new(schema, UnknownFields::Ignore, limits);
    let mut decode = |record: &[u8]| decoder.decode(Some(record), &mut columns);
    assert_eq!(decode(br#"{"a":[[[1]]]}"#), Outcome::Landed);
    for (record, what) in [
        (br#"{"a":[[[[1]]]]}"#.to_vec(), "deeper than 4"),
        (vec![b' '; 101], "record_bytes_max is 100"),
        (br#"{"a":1,"b":2,"c":3,"d":4}"#.to_vec(), "more than 3 fields"),
    ] {
        match decode(&record) {
            Outcome::Rejected(reject) => {
                assert_eq!(reject.class, RejectClass::TooLarge);
                assert!(reject.reason.contains(what), "{reject}");
            }
            other => panic!("{other:?}"),
        }
    }
    match decode(b"{\"a\":\"\xff\"}") {
        Outcome::Rejected(reject) => assert_eq!(reject.class, RejectClass::NotUtf8),
        other => panic!("{other:?}"),
    }
    // As deep as a record can be: the recursion stays within its limit.
    let deep = [b"{\"a\":".to_vec(), vec![b'['; 90]].concat();
    assert!(matches!(decode(&deep), Outcome::Rejected(_)));
}

#[test]
fn a_new_list_that_its_type_cannot_hold_is_a_dead_letter_without_a_column() {
    let mut add = Harness::with(&[("a", "int64?")], UnknownFields::AddColumn);
    for list in ["[11.0,60000000000000000000000000000000000000006]", "[1.5,9007199254740993]"] {
        let (class, reason) = add.reject(&format!("{{\"a\":1,\"new\":{list}}}"));
        assert_eq!(class, RejectClass::OutOfRange, "{reason}");
        assert!(reason.contains("\"new\"") && reason.contains("list<float64>"), "{reason}");
    }
    assert!(matches!(add.decode("{\"new\":[1.5,2]}"), Outcome::NewColumns(new) if new.len() == 1));
}

#[test]
fn unknown_fields_follow_the_policy() {
    let mut ignore = Harness::with(&[("a", "int64?")], UnknownFields::Ignore);
    ignore.land(r#"{"x":{"y":[1,"z"]},"a":1}"#);
    let (class, _) = ignore.reject(r#"{"x":1,"x":2}"#);
    assert_eq!(class, RejectClass::DuplicateField);
    let (class, _) = ignore.reject(r#"{"x":[1,]}"#);
    assert_eq!(class, RejectClass::NotJson);

    let mut add = Harness::with(&[("a", "int64?")], UnknownFields::AddColumn);
    add.land(r#"{"a":1,"later":null}"#);
    let field =
        |name: &str, kind: &str| Field { name: name.to_owned(), kind: kind.parse().unwrap(), nullable: true };
    assert_eq!(
        add.decode(r#"{"a":1,"x":[1.5],"y":"text"}"#),
        Outcome::NewColumns(vec![field("x", "list<float64>"), field("y", "utf8")])
    );
    assert_eq!(add.columns.rows(), 1);
    let (class, reason) = add.reject(r#"{"_offset":1}"#);
    assert_eq!(class, RejectClass::UnknownField);
    assert!(reason.contains("reserved"));
}

#[test]
fn tombstones_are_rejected() {
    let mut harness = Harness::new(&[("a", "int64?")]);
    match harness.decoder.decode(None, &mut harness.columns) {
        Outcome::Rejected(reject) => assert_eq!(reject.class, RejectClass::NoValue),
        other => panic!("{other:?}"),
    }
}

#[test]
fn plain_text_ends_at_the_closing_quote() {
    for len in 0..20 {
        for at in 0..=len {
            for stop in [b'"', b'\\', 0, 0x1f] {
                let mut bytes = vec![0xffu8; len];
                if at < len {
                    bytes[at] = stop;
                }
                assert_eq!(text::plain_len(&bytes), at, "{len} {at} {stop}");
            }
        }
    }
    assert_eq!(text::plain_len(b"\x20!#[]~\x7f\x80\"\"\"\"\"\"\"\""), 8);
}

/// JSON text of any shape, valid or not.
fn jsonish() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        Just("null".to_owned()),
        any::<bool>().prop_map(|b| b.to_string()),
        any::<i64>().prop_map(|n| n.to_string()),
        any::<f64>().prop_map(|n| format!("{n:e}")),
        any::<f64>().prop_map(|n| n.to_string()),
        any::<String>().prop_map(|s| serde_json::to_string(&s).unwrap()),
        "[-0-9.eE+]{1,12}",
        "\"[ -~]{0,10}\"?",
    ];
    let value = leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|v| format!("[{}]", v.join(","))),
            prop::collection::vec(("[ab]{1}", inner), 0..4).prop_map(|v| {
                let fields: Vec<_> = v.into_iter().map(|(k, v)| format!("\"{k}\": {v}")).collect();
                format!("{{{}}}", fields.join(" , "))
            }),
        ]
    });
    prop::collection::vec(("[abcdefg]", value), 0..5).prop_map(|v| {
        let fields: Vec<_> = v.into_iter().map(|(k, v)| format!("\"{k}\":{v}")).collect();
        format!("{{{}}}", fields.join(","))
    })
}

const MIXED: [(&str, &str); 6] = [
    ("a", "int64?"),
    ("b", "utf8?"),
    ("c", "float64?"),
    ("d", "list<float32>?"),
    ("e", "fixed_list<utf8,2>?"),
    ("f", "json?"),
];

fn decode_all(records: &[Vec<u8>], unknown: UnknownFields) {
    let mut harness = Harness::with(&MIXED, unknown);
    let (mut landed, mut dead, mut new) = (0, 0, 0);
    for record in records {
        match harness.decoder.decode(Some(record), &mut harness.columns) {
            Outcome::Landed => landed += 1,
            Outcome::Rejected(_) => dead += 1,
            Outcome::NewColumns(_) => new += 1,
        }
    }
    assert_eq!(landed + dead + new, records.len());
    assert_eq!(harness.columns.rows(), landed);
    harness.take();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn random_bytes_are_accepted_or_rejected_without_panic(
        records in prop::collection::vec(any::<Vec<u8>>(), 0..20),
    ) {
        for unknown in [UnknownFields::Reject, UnknownFields::Ignore, UnknownFields::AddColumn] {
            decode_all(&records, unknown);
        }
    }

    #[test]
    fn random_json_is_accepted_or_rejected_without_panic(records in prop::collection::vec(jsonish(), 0..20)) {
        let records: Vec<_> = records.into_iter().map(String::into_bytes).collect();
        for unknown in [UnknownFields::Reject, UnknownFields::Ignore, UnknownFields::AddColumn] {
            decode_all(&records, unknown);
        }
    }

    /// serde_json and the scanner agree on the texts that are JSON.
    #[test]
    fn parser_accepts_exactly_json(text in jsonish()) {
        let mut harness = Harness::with(&[("none", "bool?")], UnknownFields::Ignore);
        let ours = harness.decode(&text);
        let theirs = serde_json::from_str::<serde_json::Value>(&text);
        match ours {
            // serde_json refuses numbers beyond f64, although they are JSON.
            Outcome::Landed => prop_assert!(
                theirs.as_ref().map_or_else(|e| e.to_string().contains("out of range"), |_| true),
                "{text}: {theirs:?}"
            ),
            Outcome::Rejected(reject) if reject.class == RejectClass::NotJson =>
                prop_assert!(theirs.is_err(), "{text}: {reject}"),
            _ => {}
        }
    }

    #[test]
    fn random_strings_round_trip(text in any::<String>(), pretty in any::<bool>()) {
        let mut harness = Harness::new(&[("s", "utf8")]);
        let record = serde_json::json!({ "s": text });
        let record = if pretty { serde_json::to_string_pretty(&record) } else { serde_json::to_string(&record) };
        harness.land(&record.unwrap());
        let columns = harness.take();
        prop_assert_eq!(columns[0].as_string::<i32>().value(0), text);
    }

    #[test]
    fn random_floats_round_trip(values in prop::collection::vec(any::<f64>(), 0..8), digits in 0usize..20) {
        let values: Vec<f64> = values.into_iter().filter(|v| v.is_finite()).collect();
        for value in values {
            for text in [format!("{value:e}"), format!("{value:.digits$e}"), format!("{value}")] {
                let mut harness = Harness::new(&[("d", "float64"), ("f", "float32?")]);
                let expected: f64 = text.parse().unwrap();
                if let Outcome::Landed = harness.decode(&format!("{{\"d\":{text}}}")) {
                    let columns = harness.take();
                    let found = columns[0].as_primitive::<arrow::datatypes::Float64Type>().value(0);
                    prop_assert_eq!(found.to_bits(), expected.to_bits(), "{}", text);
                }
                let expected: f32 = text.parse().unwrap();
                if let Outcome::Landed = harness.decode(&format!("{{\"d\":0,\"f\":{text}}}")) {
                    let columns = harness.take();
                    let found = columns[1].as_primitive::<Float32Type>().value(0);
                    prop_assert_eq!(found.to_bits(), expected.to_bits(), "{}", text);
                }
            }
        }
    }

    #[test]
    fn short_decimals_are_exact(mantissa in -99_999_999i64..99_999_999, scale in 0u32..12) {
        let text = format!("{}e-{scale}", mantissa);
        let mut harness = Harness::new(&[("d", "float64"), ("f", "float32")]);
        harness.land(&format!("{{\"d\":{text},\"f\":{text}}}"));
        let columns = harness.take();
        let d = columns[0].as_primitive::<arrow::datatypes::Float64Type>().value(0);
        let f = columns[1].as_primitive::<Float32Type>().value(0);
        prop_assert_eq!(d.to_bits(), text.parse::<f64>().unwrap().to_bits());
        prop_assert_eq!(f.to_bits(), text.parse::<f32>().unwrap().to_bits());
    }

    #[test]
    fn random_binary_values_round_trip(bytes in any::<Vec<u8>>()) {
        const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let mut encoded = String::new();
        for chunk in bytes.chunks(3) {
            let word = chunk.iter().fold(0u32, |w, b| w << 8 | u32::from(*b)) << (8 * (3 - chunk.len()));
            for i in 0..4 {
                encoded.push(if i <= chunk.len() {
                    char::from(ALPHABET[(word >> (18 - 6 * i)) as usize & 63])
                } else {
                    '='
                });
            }
        }
        let mut harness = Harness::new(&[("b", "binary")]);
        harness.land(&format!("{{\"b\":\"{encoded}\"}}"));
        let columns = harness.take();
        prop_assert_eq!(columns[0].as_binary::<i32>().value(0), bytes);
    }
}
