//! Tests of types, declared schemas, inference and evolution.

use super::*;
use crate::decode::Limits;

fn declared(entries: &[(&str, &str)]) -> Result<Schema, SchemaError> {
    let entry = |(name, kind): &(&str, &str)| ((*name).to_owned(), (*kind).to_owned());
    DeclaredSchema(entries.iter().map(entry).collect()).schema()
}

#[test]
fn type_names_round_trip() {
    for name in [
        "bool",
        "int32",
        "int64",
        "float32",
        "float64",
        "utf8",
        "binary",
        "timestamp",
        "json",
        "list<int64>",
        "fixed_list<float32,64>",
        "list<fixed_list<list<utf8>,3>>",
    ] {
        let kind: Type = name.parse().unwrap();
        assert_eq!(kind.to_string(), name);
        let json = serde_json::to_string(&kind).unwrap();
        assert_eq!(serde_json::from_str::<Type>(&json).unwrap(), kind);
    }
    assert_eq!(
        " fixed_list< float32 , 64 > ".parse::<Type>().unwrap(),
        Type::FixedList(Box::new(Type::Float32), 64)
    );
}

#[test]
fn bad_type_names_are_refused() {
    for name in [
        "",
        "int",
        "list",
        "list<>",
        "list<int64",
        "fixed_list<int64>",
        "fixed_list<int64,0>",
        "fixed_list<int64,-1>",
        "fixed_list<int64,99999999>",
        "list<list<list<list<list<bool>>>>>",
        "int64??",
    ] {
        let error = name.parse::<Type>().unwrap_err().to_string();
        assert!(error.contains("fixed_list<T,N>"), "{name}: {error}");
    }
    assert!("list<".repeat(10_000).parse::<Type>().is_err());
}

#[test]
fn declared_schemas_are_checked() {
    let schema = declared(&[("id", "int64"), ("note", "utf8?")]).unwrap();
    assert!(!schema.fields[0].nullable);
    assert!(schema.fields[1].nullable);
    for (entries, what) in [
        (&[][..], "at least one column"),
        (&[("a", "int64"), ("a", "utf8")], "twice"),
        (&[("_offset", "int64")], "reserved"),
        (&[("", "int64")], "empty"),
        (&[("a", "integer")], "not a type"),
    ] {
        let error = declared(entries).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}

#[test]
fn evolution_only_adds_nullable_columns() {
    let old = declared(&[("id", "int64"), ("note", "utf8?")]).unwrap();
    let new = declared(&[("extra", "bool?"), ("note", "utf8?"), ("id", "int64")]).unwrap();
    let names =
        |schema: Schema| -> Vec<String> { schema.fields.into_iter().map(|field| field.name).collect() };
    assert_eq!(names(old.evolve(&new).unwrap()), ["id", "note", "extra"]);
    for (entries, what) in [
        (&[("id", "int64")][..], "no longer declared"),
        (&[("id", "utf8"), ("note", "utf8?")], "cannot change"),
        (&[("id", "int64"), ("note", "utf8")], "nullable in the volume"),
        (&[("id", "int64"), ("note", "utf8?"), ("x", "bool")], "must be nullable"),
    ] {
        let error = old.evolve(&declared(entries).unwrap()).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    // A required column may become nullable.
    let relaxed = declared(&[("id", "int64?"), ("note", "utf8?")]).unwrap();
    assert!(old.evolve(&relaxed).unwrap().fields[0].nullable);
}

fn infer(records: &[&str]) -> Vec<(String, String)> {
    let mut inference = Inference::default();
    for record in records {
        inference.observe(record.as_bytes(), &Limits::default());
    }
    let schema = inference.finish();
    assert_eq!(schema.origin, Origin::Inferred);
    assert!(schema.fields.iter().all(|field| field.nullable));
    let entry = |field: Field| (field.name, field.kind.to_string());
    schema.fields.into_iter().map(entry).collect()
}

#[test]
fn columns_are_inferred() {
    for (records, expected) in [
        (&[r#"{"a":1}"#][..], "int64"),
        (&[r#"{"a":1}"#, r#"{"a":1.5}"#], "float64"),
        (&[r#"{"a":1e3}"#], "float64"),
        (&[r#"{"a":null}"#, r#"{"a":true}"#], "bool"),
        (&[r#"{"a":"x"}"#, r#"{"a":1}"#], "utf8"),
        (&[r#"{"a":[1,2.5]}"#], "list<float64>"),
        (&[r#"{"a":[]}"#, r#"{"a":["x"]}"#], "list<utf8>"),
        (&[r#"{"a":[["x"],["y"]]}"#], "list<list<utf8>>"),
        (&[r#"{"a":[]}"#], "json"),
        (&[r#"{"a":[1,null]}"#], "json"),
        (&[r#"{"a":[1,"x"]}"#], "json"),
        (&[r#"{"a":{"b":1}}"#], "json"),
        (&[r#"{"a":[[[[[1]]]]]}"#], "json"),
    ] {
        let found = infer(records);
        assert_eq!(found, [("a".to_owned(), expected.to_owned())], "{records:?}");
    }
}

#[test]
fn a_column_gets_the_type_of_most_records() {
    for (records, expected) in [
        (&[r#"{"a":"n/a"}"#, r#"{"a":1}"#, r#"{"a":2.5}"#][..], "float64"),
        (&[r#"{"a":true}"#, r#"{"a":"x"}"#, r#"{"a":1}"#, r#"{"a":"y"}"#], "utf8"),
        (&[r#"{"a":null}"#, r#"{"a":null}"#, r#"{"a":"x"}"#, r#"{"a":1}"#, r#"{"a":2}"#], "int64"),
        (&[r#"{"a":"x"}"#, r#"{"a":1}"#, r#"{"a":{}}"#], "json"),
        (&[r#"{"a":[1]}"#, r#"{"a":["x"]}"#, r#"{"a":["y"]}"#], "list<utf8>"),
    ] {
        let found = infer(records);
        assert_eq!(found, [("a".to_owned(), expected.to_owned())], "{records:?}");
    }
}

#[test]
fn one_odd_record_among_many_changes_no_column() {
    for odd in [
        "\"n/a\"",
        "{}",
        "{\"b\":[1]}",
        "[]",
        "[1,null]",
        "[1,\"x\"]",
        "true",
        "1e400",
        "99999999999999999999",
    ] {
        for at in [0, 1, 500, 999] {
            let mut inference = Inference::default();
            for record in 0..1000 {
                let value = if record == at { odd.to_owned() } else { record.to_string() };
                inference.observe(format!("{{\"a\":{value}}}").as_bytes(), &Limits::default());
            }
            assert_eq!(inference.finish().fields[0].kind, Type::Int64, "{odd} at {at}");
        }
    }
    // A tie between numbers and objects: JSON text takes all of them.
    assert_eq!(infer(&[r#"{"a":1}"#, r#"{"a":{}}"#]), [("a".to_owned(), "json".to_owned())]);
    // Integers that a float cannot hold do not become floats because of one fraction.
    let (wide, fraction) = (r#"{"a":9007199254740993}"#, r#"{"a":1.5}"#);
    assert_eq!(infer(&[fraction, wide, wide]), [("a".to_owned(), "int64".to_owned())]);
    assert_eq!(infer(&[wide, fraction, fraction]), [("a".to_owned(), "float64".to_owned())]);
    // Numbers that no integer column takes.
    assert_eq!(infer(&[r#"{"a":1e400}"#]), [("a".to_owned(), "float64".to_owned())]);
    assert_eq!(infer(&[r#"{"a":[1,1e400]}"#]), [("a".to_owned(), "list<float64>".to_owned())]);
}

#[test]
fn inference_skips_undecodable_records_and_keeps_column_order() {
    let found = infer(&["not json", "[1]", r#"{"b":1,"_offset":2,"a":"x"}"#, r#"{"c":null}"#]);
    let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["b", "a"]);
}

#[test]
fn null_fixed_list_uses_its_full_width() {
    let bytes = |name: &str| name.parse::<Type>().unwrap().bytes_min();
    assert_eq!(bytes("fixed_list<float32,64>"), 256);
    assert_eq!(bytes("fixed_list<fixed_list<int64,3>,2>"), 48);
    assert_eq!(bytes("list<float64>"), 4);
}
