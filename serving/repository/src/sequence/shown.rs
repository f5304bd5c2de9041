//! JSON form of `sequence_batching` for the model configuration endpoint, with the field names of Triton.

use serde_json::{Value, json};

use millrace_serving_core::wire::inference::ModelSequenceBatching;
use millrace_serving_core::wire::inference::model_sequence_batching as pb;

/// The sequence configuration of a model in JSON.
pub fn to_json(batching: &ModelSequenceBatching) -> Value {
    let mut json = json!({
        "max_sequence_idle_microseconds": batching.max_sequence_idle_microseconds,
        "control_input": batching.control_input.iter().map(control_input).collect::<Vec<_>>(),
        "state": batching.state.iter().map(state).collect::<Vec<_>>(),
        "iterative_sequence": batching.iterative_sequence,
    });
    match &batching.strategy_choice {
        Some(pb::StrategyChoice::Direct(direct)) => {
            json["direct"] = json!({
                "max_queue_delay_microseconds": direct.max_queue_delay_microseconds,
                "minimum_slot_utilization": direct.minimum_slot_utilization,
            });
        }
        Some(pb::StrategyChoice::Oldest(oldest)) => {
            json["oldest"] = json!({
                "max_candidate_sequences": oldest.max_candidate_sequences,
                "preferred_batch_size": oldest.preferred_batch_size,
                "max_queue_delay_microseconds": oldest.max_queue_delay_microseconds,
                "preserve_ordering": oldest.preserve_ordering,
            });
        }
        None => {}
    }
    json
}

fn control_input(input: &pb::ControlInput) -> Value {
    let control = |control: &pb::Control| {
        json!({
            "kind": control.kind().as_str_name(),
            "int32_false_true": control.int32_false_true,
            "fp32_false_true": control.fp32_false_true,
            "bool_false_true": control.bool_false_true,
            "data_type": control.data_type().as_str_name(),
        })
    };
    json!({ "name": input.name, "control": input.control.iter().map(control).collect::<Vec<_>>() })
}

fn state(state: &pb::State) -> Value {
    let initial = |initial: &pb::InitialState| {
        json!({
            "data_type": initial.data_type().as_str_name(),
            "dims": initial.dims,
            // The server supports only zeros as initial states.
            "zero_data": true,
            "name": initial.name,
        })
    };
    json!({
        "input_name": state.input_name,
        "output_name": state.output_name,
        "data_type": state.data_type().as_str_name(),
        "dims": state.dims,
        "initial_state": state.initial_state.iter().map(initial).collect::<Vec<_>>(),
        "use_same_buffer_for_input_output": state.use_same_buffer_for_input_output,
        "use_growable_memory": state.use_growable_memory,
    })
}
