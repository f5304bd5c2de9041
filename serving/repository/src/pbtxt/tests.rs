//! Tests with valid configurations and with many invalid texts.
use proptest::prelude::*;

use super::*;

fn refused(text: &str) -> String {
    parse(text.as_bytes()).expect_err(text)
}

#[test]
fn a_configuration_is_read_with_the_lines_of_its_fields() {
    let text = r#"
        # platform: "a comment is none"
        name: "resnet"   max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] },
                { name: 'y' data_type: TYPE_INT64 dims: 4 } ]
        output { name: "}" "z" data_type: TYPE_STRING }
        dynamic_batching < preferred_batch_size: [ 4, 8 ] >
        parameters { key: "k" value { string_value: "v" } }
        instance_group # of one
        [ { count: 2 kind: KIND_CPU } ]
        version_policy: { specific { versions: [ 1, 2 ] } }
    "#;
    let parsed = parse(text.as_bytes()).unwrap();
    let config = &parsed.config;
    assert_eq!((config.name.as_str(), config.max_batch_size), ("resnet", 8));
    assert_eq!(config.input[0].dims, [3, -1]);
    assert_eq!(config.input[1].name, "y");
    assert_eq!(config.output[0].name, "}z");
    assert_eq!(config.instance_group[0].count, 2);
    assert_eq!(config.parameters["k"].string_value, "v");
    assert_eq!(parsed.place("max_batch_size"), "line 3: ");
    assert_eq!(parsed.place("dynamic_batching"), "line 7: ");
    assert_eq!((parsed.place("platform"), parsed.place("preferred_batch_size")), Default::default());
    assert_eq!(parse(b"").unwrap().config, ModelConfig::default());
}

#[test]
fn syntax_errors_are_reported_with_their_line() {
    let cases = [
        ("name: \"a\"\nnosuch: 1", "line 2: field 'nosuch' not found"),
        ("name \"a\"", "line 1: expected ':'"),
        ("name: \"a\nb\"", "line 1: invalid string character"),
        ("\n\nname: \"a", "line 3: expected string terminator"),
        ("name: 7", "line 1: expected a string"),
        ("max_batch_size: 99999999999", "line 1: expected value to be a signed 32-bit integer"),
        ("max_batch_size: 1.5", "line 1: expected an integer"),
        ("max_batch_size: 4\nmax_batch_size: 8", "line 2: 'max_batch_size' is already set"),
        ("input { name: \"x\"\n", "line 2: expected"),
        ("input {\n data_type: FP32 }", "line 2: value 'FP32' was not found"),
        ("dynamic_batching { }\nsequence_batching { }", "line 2: a value is already set for oneof"),
        ("}", "line 1: expected a field name"),
        ("name: \"\\xff\"", "not valid utf-8"),
        ("name: \"\\q\"", "invalid string escape"),
        ("[a/inference.ModelConfig] { }", "Any"),
        ("input [\n{ name: \"x\" }\n", "line 3: expected"),
        ("\u{0}", "line 1: "),
        ("{\"name\": \"json\"}", "line 1: expected a field name"),
    ];
    for (text, expected) in cases {
        let reason = refused(text);
        assert!(reason.contains(expected), "{text:?}: {reason}");
    }
    assert!(parse(b"name: \"\xff\"").unwrap_err().contains("not UTF-8 text from byte 7 on"));
}

#[test]
fn nesting_depth_is_limited_in_every_syntax() {
    for open in ["input {", "[a/inference.ModelConfig] {", "input <"] {
        let reason = refused(&open.repeat(5_000));
        assert!(reason.contains("nested more than 16 deep"), "{reason}");
    }
    // Braces in strings and comments do not count.
    let text = format!("name: \"{0}\" # {0}\nplatform: '{0}'", "{".repeat(100));
    assert_eq!(parse(text.as_bytes()).unwrap().config.name.len(), 100);
}

proptest! {
    #[test]
    fn arbitrary_text_never_panics(words in prop::collection::vec(
        prop::sample::select(vec![
            "name", "input", "dims", ":", "{", "}", "[", "]", "<", ">", ",", ";", "-1", "07", "0x", "1e", "\"", "'", "\\",
            "\n", "#", "TYPE_FP32", "data_type", "/", ".", "inf", "ä", "version_policy", "all", "latest", "9999999999999999999",
        ]),
        0..60,
    ), gap in prop::sample::select(vec!["", " "])) {
        let text = words.join(gap);
        if let Err(reason) = parse(text.as_bytes()) {
            prop_assert!(!reason.is_empty());
        }
    }
}
