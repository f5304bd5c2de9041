//! Tests of `sequence_batching`: fields that are read and fields that are refused.
use super::super::Declared;
use super::*;
use millrace_serving_core::config::Config;

fn read(text: &str) -> Result<Declared, String> {
    Declared::read("m", text.as_bytes())
}

const STATE: &str = "input_name: \"past\" output_name: \"next\" data_type: TYPE_FP32 dims: [ -1, 3 ]";

#[test]
fn declared_sequences_are_read() {
    let text = format!(
        r#"max_batch_size: 4
        sequence_batching {{
          oldest {{ max_candidate_sequences: 7 preferred_batch_size: [ 2, 4 ] max_queue_delay_microseconds: 30 }}
          control_input [
            {{ name: "start" control [ {{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }} ] }},
            {{ name: "ready" control {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [ 0, 1 ] }} }},
            {{ name: "end" control {{ kind: CONTROL_SEQUENCE_END bool_false_true: [ false, true ] }} }},
            {{ name: "id" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING }} }}
          ]
          state [
            {{ {STATE} initial_state {{ data_type: TYPE_FP32 dims: [ 0, 3 ] zero_data: true name: "none" }} }},
            {{ input_name: "n" output_name: "m" data_type: TYPE_INT64 dims: [ -1 ] use_growable_memory: true }}
          ]
        }}"#
    );
    let declared = read(&text).unwrap();
    assert_eq!(declared.ignored, ["sequence_batching.state.use_growable_memory"]);
    let mut config = Config::default();
    declared.loading.apply(&mut config);
    assert_eq!((config.batching.preferred_rows.as_slice(), config.batching.delay_us_max), (&[2, 4][..], 30));
    let of = declared.loading.sequences.unwrap();
    assert_eq!((of.idle, of.sequences_max), (Duration::from_secs(1), Some(7)));
    assert_eq!(of.shown.max_sequence_idle_microseconds, 1_000_000);
    let signals: Vec<_> = of.controls.iter().map(|control| control.signal.clone()).collect();
    let expected = [
        Signal::Start(Data::Fp32(vec![0.0]), Data::Fp32(vec![1.0])),
        Signal::Ready(Data::Int32(vec![0]), Data::Int32(vec![1])),
        Signal::End(Data::Bool(vec![false]), Data::Bool(vec![true])),
        Signal::Id(Datatype::Bytes),
    ];
    assert_eq!(signals, expected);
    assert_eq!(
        (of.states[0].dims.as_slice(), of.states[0].initial.as_slice()),
        (&[-1, -1, 3][..], &[1, 0, 3][..])
    );
    assert_eq!((of.states[1].dims.as_slice(), of.states[1].initial.as_slice()), (&[-1, -1][..], &[1, 1][..]));

    // Without rows; the strategy affects only the bounds.
    let declared = read("sequence_batching { direct { } max_sequence_idle_microseconds: 5 }").unwrap();
    assert_eq!(declared.loading.max_batch_size, Some(0));
    let of = declared.loading.sequences.unwrap();
    assert_eq!((of.idle, of.sequences_max), (Duration::from_micros(5), None));
}

#[test]
fn unsupported_sequence_settings_are_refused() {
    let control = |fields: &str| format!("control_input {{ name: \"c\" control {{ {fields} }} }}");
    let initial = |fields: &str| format!("state {{ {STATE} initial_state {{ {fields} }} }}");
    let cases = [
        ("iterative_sequence: true".to_owned(), "iterative_sequence is not supported"),
        ("oldest { max_candidate_sequences: -1 }".into(), "max_candidate_sequences is -1, below 0"),
        ("oldest { preferred_batch_size: 9 }".into(), "preferred_batch_size has 9, allowed are 1 to"),
        ("direct { minimum_slot_utilization: nan }".into(), "minimum_slot_utilization is NaN"),
        ("direct { minimum_slot_utilization: 2 }".into(), "minimum_slot_utilization is 2"),
        ("control_input { name: \"c\" }".into(), "\"c\" has 0 controls, one is expected"),
        ("control_input { control { int32_false_true: [ 0, 1 ] } }".into(), "a control_input has no name"),
        (control("kind: 9 int32_false_true: [ 0, 1 ]"), "kind 9 is unknown"),
        (control("int32_false_true: [ 0 ]"), "takes one of int32_false_true"),
        (control("int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]"), "takes one of"),
        (control("fp32_false_true: [ 0, nan ]"), "takes one of int32_false_true"),
        (control("kind: CONTROL_SEQUENCE_END"), "takes one of int32_false_true"),
        (control("kind: CONTROL_SEQUENCE_CORRID"), "data_type is TYPE_INVALID, ids are TYPE_UINT64"),
        (control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"), "data_type is TYPE_FP32"),
        (
            control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_INT64 int32_false_true: [ 0, 1 ]"),
            "has no false and true",
        ),
        ("state { input_name: \"a\" data_type: TYPE_FP32 }".into(), "output_name \"\", both are needed"),
        ("state { input_name: \"a\" output_name: \"b\" }".into(), "\"a\": data_type is missing"),
        (
            "state { input_name: \"a\" output_name: \"b\" data_type: TYPE_FP32 dims: 0 }".into(),
            "\"a\": dims has 0",
        ),
        (format!("state [ {{ {STATE} }}, {{ {STATE} }} ]"), "input \"past\" appears twice"),
        (
            format!("state [ {{ {STATE} }}, {{ {} }} ]", STATE.replace("past", "before")),
            "output \"next\" appears twice",
        ),
        (initial("data_type: TYPE_FP32 dims: [ 1, 3 ] data_file: \"x\""), "data_file is not supported"),
        (initial("data_type: TYPE_FP32 dims: [ 1, 3 ]"), "has no zero_data: true"),
        (
            initial("data_type: TYPE_FP64 dims: [ 1, 3 ] zero_data: true"),
            "is TYPE_FP32 and its initial_state",
        ),
        (initial("data_type: TYPE_FP32 dims: [ -1, 3 ] zero_data: true"), "its initial_state [-1, 3]"),
        (initial("data_type: TYPE_FP32 dims: [ 1, 4 ] zero_data: true"), "its initial_state [1, 4]"),
        (initial("data_type: TYPE_FP32 dims: 1 zero_data: true"), "its initial_state [1]"),
        (
            format!("state {{ {STATE} initial_state [ {{ }}, {{ }} ] }}"),
            "initial_state appears 2 times, the limit is one",
        ),
    ];
    for (text, expected) in cases {
        let reason = read(&format!("max_batch_size: 4 sequence_batching {{ {text} }}")).expect_err(&text);
        assert!(reason.contains(expected), "{text}: {reason}");
        assert!(reason.starts_with("line 1: sequence_batching: "), "{text}: {reason}");
    }
    let both = format!(
        "input {{ name: \"past\" data_type: TYPE_FP32 dims: 3 }} sequence_batching {{ state {{ {STATE} }} }}"
    );
    let reason = read(&both).unwrap_err();
    assert!(reason.contains("input \"past\" is set by the server, not by clients"), "{reason}");
}
