//! Tests of parameter types, from both transports.
use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{Parameters, Schedule, check_request};
use crate::error::InferError;
use crate::wire::inference::InferParameter;
use crate::wire::inference::infer_parameter::ParameterChoice::{
    self, BoolParam, DoubleParam, Int64Param, StringParam, Uint64Param,
};

fn message(choices: Vec<(&str, Option<ParameterChoice>)>) -> HashMap<String, InferParameter> {
    let parameter =
        |(name, choice): (&str, _)| (name.to_owned(), InferParameter { parameter_choice: choice });
    choices.into_iter().map(parameter).collect()
}

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

#[test]
fn both_transports_give_the_same_values() {
    let message = message(vec![
        ("flag", Some(BoolParam(true))),
        ("low", Some(Int64Param(0))),
        ("high", Some(Uint64Param(u64::MAX))),
        ("negative", Some(Int64Param(-1))),
        ("text", Some(StringParam("a".into()))),
        ("fraction", Some(DoubleParam(1.5))),
        ("nothing", None),
    ]);
    let object = object(json!({
        "flag": true, "low": 0, "high": u64::MAX, "negative": -1, "text": "a", "fraction": 1.5, "nothing": null,
    }));
    fn check(parameters: &impl Parameters) {
        let of = &"input \"x\"";
        assert_eq!(parameters.flag(of, "flag").unwrap(), Some(true));
        assert_eq!(parameters.count(of, "low").unwrap(), Some(0));
        assert_eq!(parameters.count(of, "high").unwrap(), Some(u64::MAX));
        assert_eq!(parameters.text(of, "text").unwrap(), Some("a"));
        assert_eq!(parameters.text(of, "absent").unwrap(), None);
        for (error, part) in [
            (parameters.count(of, "negative").unwrap_err(), "it is -1"),
            (parameters.count(of, "text").unwrap_err(), "it is a string"),
            (parameters.count(of, "fraction").unwrap_err(), "takes an integer"),
            (parameters.count(of, "nothing").unwrap_err(), "takes an integer"),
            (parameters.text(of, "flag").unwrap_err(), "it is a boolean"),
            (parameters.flag(of, "low").unwrap_err(), "it is an integer"),
        ] {
            let text = error.to_string();
            assert!(text.contains(part) && text.contains("input \"x\""), "{text}");
        }
    }
    check(&message);
    check(&object);
}

#[test]
fn known_and_unknown_parameters_are_accepted() {
    let fine = [
        json!({}),
        json!({ "anything": [1, { "of": "any kind" }], "priority": 1, "timeout": 5 }),
        json!({ "sequence_id": 0, "sequence_start": false, "sequence_end": false }),
        json!({ "sequence_id": "", "triton_enable_empty_final_response": true }),
        json!({ "sequence_id": 1, "sequence_start": true }),
        json!({ "sequence_id": "a", "sequence_end": true }),
        json!({ "sequence_start": true, "sequence_end": true }),
    ];
    for parameters in fine {
        check_request(&object(parameters)).unwrap();
    }
    let schedule = |parameters| check_request(&object(parameters)).unwrap();
    assert_eq!(schedule(json!({ "priority": 0, "timeout": 0 })), Schedule::default());
    let expected = Schedule { priority: 2, timeout: Some(std::time::Duration::from_millis(3)) };
    assert_eq!(schedule(json!({ "priority": 2, "timeout": 3000 })), expected);
    for parameters in [
        json!({ "sequence_id": true }),
        json!({ "sequence_id": -1 }),
        json!({ "sequence_id": 1.5 }),
        json!({ "sequence_id": "a".repeat(129) }),
        json!({ "sequence_start": 1 }),
        json!({ "sequence_end": "true" }),
        json!({ "triton_enable_empty_final_response": 1 }),
        json!({ "triton_grpc_error": true }),
        json!({ "triton_": 1 }),
        json!({ "priority": -1 }),
        json!({ "timeout": 1.5 }),
        json!({ "timeout": null }),
    ] {
        let error = check_request(&object(parameters.clone())).unwrap_err();
        assert!(matches!(error, InferError::Invalid { .. }), "{parameters}: {error}");
    }
}
