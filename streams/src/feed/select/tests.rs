use std::ops::Range;
use std::sync::Arc;

use arrow::datatypes::{DataType, Field, Schema};
use proptest::prelude::*;

use super::rows::RowSetBuilder;
use super::split::{hash_of_key, hash_of_row};
use super::value::Value;
use super::*;

fn set(rows: &[bool]) -> RowSet {
    let mut builder = RowSetBuilder::new(rows.len() as u64);
    for (at, chunk) in rows.chunks(97).enumerate() {
        builder.add(at as u64 * 97, &chunk.iter().copied().collect());
    }
    builder.finish()
}

proptest! {
    #[test]
    fn rank_select_and_masks_agree_with_a_list_of_rows(
        rows in prop::collection::vec(prop::bool::weighted(0.3), 1..5000),
        cut: prop::sample::Index,
    ) {
        let set = set(&rows);
        let found: Vec<u64> = (0..rows.len() as u64).filter(|row| rows[*row as usize]).collect();
        prop_assert_eq!(set.len(), found.len() as u64);
        for (n, row) in found.iter().enumerate() {
            let near = row.saturating_sub(100)..(row + 100).min(rows.len() as u64);
            let ranges: [Range<u64>; 3] = [0..rows.len() as u64, near, *row..row + 1];
            for within in ranges {
                prop_assert_eq!(set.select(n as u64, &within), *row);
            }
            prop_assert_eq!(set.rank(*row), n as u64);
            prop_assert!(set.contains(*row));
        }
        let cut = cut.index(rows.len());
        prop_assert_eq!(set.rank(cut as u64) as usize, rows[..cut].iter().filter(|row| **row).count());
        let mask = set.mask(cut as u64..rows.len() as u64);
        prop_assert!(mask.values().iter().eq(rows[cut..].iter().copied()));
        let text = set.encode().unwrap();
        prop_assert_eq!(RowSet::decode(&text, rows.len() as u64), Some(set));
    }

    #[test]
    fn texts_never_panic_the_parser(text in "[ a-c0-9'\"()<>=!,.+-]{0,40}|(not |\\(|a|=|1| and | or | in | is null|\\)){0,30}") {
        if let Ok(filter) = text.parse::<Filter>() {
            let canonical = filter.to_string();
            prop_assert_eq!(canonical.parse::<Filter>().unwrap(), filter);
        }
    }
}

#[test]
fn a_set_of_rows_takes_little_more_than_one_bit_a_row() {
    let set = set(&vec![true; 1 << 20]);
    assert!(set.bytes() * 8 <= (1 << 20) * 11 / 10, "{} bytes", set.bytes());
}

#[test]
fn damaged_sets_of_rows_are_refused() {
    let set = set(&[true; 100]);
    let text = set.encode().unwrap();
    assert_eq!(RowSet::decode(&text, 100), Some(set));
    for rows in [0, 64, 99, 129, u64::MAX] {
        assert_eq!(RowSet::decode(&text, rows), None, "{rows} rows");
    }
    assert_eq!(RowSet::decode(&text[..text.len() - 8], 100), None);
    assert_eq!(RowSet::decode("?", 100), None);
    // Much more than was announced is not decompressed.
    let bomb = set_of_zeros(1 << 24);
    assert_eq!(RowSet::decode(&bomb, 100), None);
}

fn set_of_zeros(rows: u64) -> String {
    RowSetBuilder::new(rows).finish().encode().unwrap()
}

#[test]
fn filters_have_one_canonical_text() {
    for (text, canonical) in [
        ("label!=3", "\"label\" != 3"),
        ("((label <> +3))", "\"label\" != 3"),
        ("a = 1 AND (b = 2 and c = 3)", "\"a\" = 1 and \"b\" = 2 and \"c\" = 3"),
        ("a = 1 and (b = 2 or c)", "\"a\" = 1 and (\"b\" = 2 or \"c\")"),
        ("a = 1 and b = 2 or c", "\"a\" = 1 and \"b\" = 2 or \"c\""),
        ("not (a or b) and not a", "not (\"a\" or \"b\") and not \"a\""),
        ("x not in (1, -2.5, 'it''s', true)", "not \"x\" in (1, -2.5, 'it''s', true)"),
        ("\"two \"\" words\" is not null", "not \"two \"\" words\" is null"),
        ("0.5 <= größe", "0.5 <= \"größe\""),
        ("meta.id == 1e3", "\"meta.id\" = 1000.0"),
    ] {
        let filter: Filter = text.parse().unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(filter.to_string(), canonical);
        assert_eq!(canonical.parse::<Filter>().unwrap(), filter);
    }
}

#[test]
fn a_filter_that_does_not_parse_names_the_character() {
    for (text, at, reason) in [
        ("", 1, "a comparison is expected"),
        ("label =", 8, "a comparison is expected"),
        ("ä = 'open", 5, "the closing ' is missing"),
        ("label = null", 9, "write `is null`"),
        ("label is 3", 10, "`null` is expected"),
        ("label in 3", 10, "`(` is expected"),
        ("label in (a)", 12, "literals only"),
        ("label = 3 label", 11, "`and`, `or` or the end"),
        ("(label = 3", 11, "`)` is expected"),
        ("label = 99999999999999999999", 9, "beyond 64 bits"),
        ("label = 1.2.3", 9, "not a number"),
        ("label ; 3", 7, "';' has no meaning"),
        ("3", 2, "a comparison with a column"),
        ("label = 3 and", 14, "a comparison is expected"),
        ("a not b", 7, "`in` is expected"),
        ("1 = 2 or small = 1", 7, "names no column"),
        ("'small' = 'cat'", 16, "double quotes"),
    ] {
        match text.parse::<Filter>() {
            Err(FeedError::Filter { at: found, reason: why, .. }) => {
                assert_eq!(found, at, "{text}: {why}");
                assert!(why.contains(reason), "{text}: {why}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
}

#[test]
fn deep_and_long_filters_are_refused() {
    let nested = |depth: usize| format!("{}a = 1{}", "(".repeat(depth), ")".repeat(depth));
    assert!(nested(64).parse::<Filter>().is_ok());
    assert!(nested(65).parse::<Filter>().is_err());
    assert!(format!("{}a", "not ".repeat(100_000)).parse::<Filter>().is_err());
    assert!("a = 1 or ".repeat(8000).parse::<Filter>().is_err());
    // Width is no depth.
    let wide = vec!["a = 1"; 5000].join(" or ");
    assert_eq!(wide.parse::<Filter>().unwrap().columns(), ["a"]);
}

fn parts(text: &str) -> Vec<(String, String)> {
    let part =
        |part: &str| part.split_once('=').map(|(name, size)| (name.to_owned(), size.to_owned())).unwrap();
    text.split(',').map(part).collect()
}

#[test]
fn parts_of_a_split_meet_exactly() {
    let text = "a=0.7,b=0.2,c=0.1";
    let ranges: Vec<_> = ["a", "b", "c"]
        .map(|name| Split::new(&parts(text), name, &[]).unwrap().range())
        .into_iter()
        .collect();
    for hash in
        [0, u64::MAX, (u64::MAX / 10) * 7, (u64::MAX / 10) * 9].into_iter().chain((0..4000).map(|n| {
            // Around both borders.
            let border = if n % 2 == 0 { 7 } else { 9 };
            ((u128::from(u64::MAX) + 1) * border / 10) as u64 - 1000 + n / 2
        }))
    {
        assert_eq!(ranges.iter().filter(|range| range.contains(hash)).count(), 1, "{hash}");
    }
    assert!(ranges[0].contains(0) && ranges[2].contains(u64::MAX));
}

#[test]
fn definitions_of_splits_that_are_wrong_are_refused() {
    for (text, take, by, why) in [
        ("a=0.7,b=0.4", "a", &[][..], "1.1 together, more than 1"),
        ("a=0", "a", &[], "\"0\" is not a decimal fraction"),
        ("a=1.5", "a", &[], "not a decimal fraction"),
        ("a=-0.5", "a", &[], "not a decimal fraction"),
        ("a=1e-3", "a", &[], "not a decimal fraction"),
        ("a=.", "a", &[], "not a decimal fraction"),
        ("a=", "a", &[], "not a decimal fraction"),
        ("a=99999999999999999999", "a", &[], "not a decimal fraction"),
        ("a=0.1234567890123456789", "a", &[], "more than 18 digits"),
        ("a=0.5,a=0.5", "a", &[], "two parts of one name"),
        ("=0.5", "", &[], "without a name"),
        ("train=0.8", "test", &[], "\"test\" is not a part of splits: train"),
        ("a=1", "a", &["x", "x"], "names column \"x\" twice"),
    ] {
        let by: Vec<String> = by.iter().map(|name| (*name).to_owned()).collect();
        let error = Split::new(&parts(text), take, &by).unwrap_err().to_string();
        assert!(error.contains(why), "{text}: {error}");
    }
    assert!(Split::new(&parts("a=.5,b=0.50000"), "b", &[]).is_ok());
    assert!(Split::new(&parts("a=1.0"), "a", &[]).is_ok());
    assert!(Selection::new(None, &[], Some("a"), &[]).unwrap_err().to_string().contains("needs splits"));
    assert!(Selection::new(None, &parts("a=1"), None, &[]).unwrap_err().to_string().contains("one of a"));
    assert!(Selection::new(None, &[], None, &["x".into()]).unwrap_err().to_string().contains("needs splits"));
    assert_eq!(Selection::new(None, &[], None, &[]).unwrap(), None);
}

/// Made with hashlib of Python, by the rules in the documentation of [`Split`].
#[test]
fn hashes_of_keys_are_those_of_the_documentation() {
    let of = |value: Value<'_>| hash_of_key([value].into_iter());
    assert_eq!(of(Value::Integer(42)), GOLDEN[0]);
    assert_eq!(of(Value::Integer(-1)), GOLDEN[1]);
    assert_eq!(of(Value::Text("row 1")), GOLDEN[2]);
    assert_eq!(of(Value::Null), GOLDEN[3]);
    assert_eq!((of(Value::Float(0.0)), of(Value::Float(-0.0))), (GOLDEN[4], GOLDEN[4]));
    assert_eq!(of(Value::Float(f64::NAN)), GOLDEN[5]);
    assert_eq!(of(Value::Float(-f64::NAN)), GOLDEN[5]);
    assert_eq!(hash_of_row("train/a.parquet", 7), GOLDEN[6]);
    let two = hash_of_key([Value::Flag(true), Value::Bytes(b"x")].into_iter());
    assert_eq!((two, of(Value::Time(1_000_000_000))), (GOLDEN[7], GOLDEN[8]));
}

const GOLDEN: [u64; 9] = [
    0x677068aafacd697a,
    0xe5f5ed2e684fbdff,
    0x6276a795fab2fc6a,
    0x9500e3562e49f34e,
    0x16e3291c088df2d3,
    0xc9b18db1de47d360,
    0x43f64dedc11ef994,
    0x1af1b13e7bf16c41,
    0xf8d47b6a9e41097a,
];

#[test]
fn a_filter_whose_stored_text_would_not_parse_is_refused() {
    let list = |count: usize| format!("id in ({})", vec!["10000"; count].join(","));
    let stored = list(9_000).parse::<Filter>().unwrap().to_string();
    assert_eq!(stored.parse::<Filter>().unwrap().to_string(), stored);
    assert!(list(10_900).len() < 64 << 10);
    assert!(list(10_900).parse::<Filter>().is_err());
    let negations = |count: usize| format!("{}x is not null", "not ".repeat(count)).parse::<Filter>();
    assert!(negations(63).is_ok() && negations(64).is_err());
}

#[test]
fn errors_of_long_filters_show_their_place_alone() {
    let error = |text: String| text.parse::<Filter>().unwrap_err().to_string();
    for (text, at) in [
        ("(".repeat(60_000), "character 65:"),
        (format!("x = {}", "9".repeat(60_000)), "character 5:"),
        (format!("x = 1 {}", "ü".repeat(30_000)), "character 7:"),
        (format!("{}? x = 1", "x = 1 or ".repeat(5_000)), "character 45001:"),
    ] {
        let error = error(text);
        assert!(error.len() < 1_000 && error.contains(at) && error.contains('…'), "{error}");
    }
    assert!(error("x ? 1".to_owned()).contains("where \"x ? 1\", character 3:"));
}

/// Whether a value of a column of a type is selected.
fn selects(kind: DataType, filter: &str, value: Value<'_>) -> bool {
    let schema = Arc::new(Schema::new(vec![Field::new("x", kind, true)]));
    filter.parse::<Filter>().unwrap().bind(&schema).unwrap().selects(|_| value)
}

#[test]
fn numbers_beside_narrow_floats_are_rounded_unless_they_are_beyond_them() {
    let narrow = |filter: &str, value: f32| selects(DataType::Float32, filter, Value::Float(value.into()));
    assert!(narrow("x = 0.1", 0.1) && narrow("x = 16777217", 16_777_216.0));
    assert!(!selects(DataType::Float64, "x = 16777217", Value::Float(16_777_216.0)));
    assert!(selects(DataType::Float16, "x = 2049", Value::Float(2048.0)));
    // Rounding would make them infinite.
    assert!(narrow("x > 1e39", f32::INFINITY) && !narrow("x <= 1e39", f32::INFINITY));
    assert!(narrow("x < 1e39", f32::MAX) && !narrow("x >= 1e39", f32::MAX));
    assert!(selects(DataType::Float16, "x > 70000", Value::Float(f64::INFINITY)));
}

#[test]
fn literals_that_floats_round_compare_exactly_with_integers() {
    let whole = |filter: &str, value: i128| selects(DataType::Int64, filter, Value::Integer(value));
    let (below, odd, above) = (9_007_199_254_740_992, 9_007_199_254_740_993, 9_007_199_254_740_994);
    assert!(whole("x = 9007199254740993.0", odd) && !whole("x = 9007199254740993.0", below));
    assert!(whole("x <= 9007199254740993e0", odd) && !whole("x <= 9007199254740993e0", above));
    assert!(whole("x < 9007199254740992.5", below) && !whole("x < 9007199254740992.5", odd));
    assert!(whole("9007199254740992.5 > x", below) && !whole("9007199254740992.5 > x", odd));
    assert!(whole("x > 9007199254740993.5", above) && !whole("x > 9007199254740993.5", odd));
    assert!(whole("x != 9007199254740992.5", below) && !whole("x in (9007199254740992.5)", below));
    assert!(whole("x in (1, 9007199254740993.0)", odd));
    assert!(whole("x > -9007199254740992.5", -below) && !whole("x > -9007199254740992.5", -odd));
    assert!(whole("x < 1e-400", 0) && !whole("x > -1e-400", -1));
    assert!(whole("x > 0.99999999999999999999", 1));
    assert!(whole("x > -9223372036854775808.5", i64::MIN.into()));
    let unsigned = |filter: &str| selects(DataType::UInt64, filter, Value::Integer(u64::MAX.into()));
    assert!(unsigned("x = 18446744073709551615.0") && unsigned("x < 18446744073709551615.5"));
    // Columns of floats keep the nearest float.
    let float = |filter: &str| selects(DataType::Float64, filter, Value::Float(9_007_199_254_740_992.0));
    assert!(float("x = 9007199254740993.0") && float("x = 9007199254740992.5"));
    assert!(selects(DataType::Float32, "x = 9007199254740993.0", Value::Float(9_007_199_254_740_992.0)));
}

#[test]
fn canonical_texts_keep_what_a_float_would_round_and_nothing_else() {
    let canonical = |literal: &str| format!("x = {literal}").parse::<Filter>().unwrap().to_string();
    for (literal, kept) in [
        ("+9007199254740993.0", "9007199254740993.0"),
        ("9007199254740992.50", "9007199254740992.50"),
        ("1e-400", "1e-400"),
        // Exact, rounded between the same integers, or beyond all integers.
        ("9007199254740992.0", "9007199254740992.0"),
        ("0.1", "0.1"),
        ("1.00", "1.0"),
        ("18446744073709551616.5", "1.8446744073709552e19"),
        ("123456789012345678901234.5", "1.2345678901234569e23"),
        // The shortest digits of these floats are those of other integers.
        ("1152921504606846976.0", "1152921504606846976.0"),
        ("1.152921504606847e18", "1.152921504606847e18"),
        ("9223372036854775808.0", "9223372036854775808.0"),
        ("-9223372036854775808.0", "-9223372036854775808.0"),
    ] {
        let text = canonical(literal);
        assert_eq!(text, format!("\"x\" = {kept}"), "{literal}");
        assert_eq!(text.parse::<Filter>().unwrap(), format!("x = {literal}").parse().unwrap(), "{literal}");
        assert_eq!(text.parse::<Filter>().unwrap().to_string(), text);
    }
}

#[test]
fn times_of_all_years_compare() {
    let day =
        |filter: &str, days: i128| selects(DataType::Date32, filter, Value::Time(days * 86_400_000_000_000));
    assert!(day("x >= '0001-01-01'", -719_162) && !day("x < '0001-01-01'", -719_162));
    assert!(day("x = '9999-12-31'", 2_932_896));
    assert!(
        day("x > '2299-12-31T23:00:00+02:00'", 120_530) && !day("x > '2299-12-31T23:00:00-02:00'", 120_530)
    );
    let schema = Arc::new(Schema::new(vec![Field::new("x", DataType::Date32, true)]));
    for text in ["x = 'today'", "x = '2026-02-30'", "x = ''"] {
        assert!(text.parse::<Filter>().unwrap().bind(&schema).is_err(), "{text}");
    }
}
