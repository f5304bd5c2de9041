//! Tests of the state's encoding.

use safetensors::SafeTensors;

use super::RunState;
use crate::engine::{Param, ParamLayout};
use crate::ledger::Ledger;
use crate::optim::OptimizerState;

fn layout() -> ParamLayout {
    let param =
        |name: &str, shape: &[usize], range| Param { name: name.into(), shape: shape.to_vec(), range };
    ParamLayout { params: vec![param("w", &[2, 3], 0..6), param("b", &[3], 6..9)] }
}

fn state() -> RunState {
    RunState {
        step: 42,
        weights: vec![0.1, -0.2, f32::MIN_POSITIVE, 3.0, 1e30, -0.0, 7.0, 8.0, 9.0],
        optimizer: OptimizerState {
            step: 41,
            slots: vec![("first_moment".into(), vec![1.5; 9]), ("second_moment".into(), vec![2.5; 9])],
        },
        ledger: Ledger::default(),
        fraction_bits: Some(-3),
    }
}

#[test]
fn states_round_trip_and_are_readable_as_safetensors() {
    let bytes = state().encode(&layout()).unwrap();
    assert_eq!(bytes, state().encode(&layout()).unwrap());
    assert!(bytes.len() as u64 <= RunState::bytes_max(&layout()));
    assert_eq!(RunState::decode(&layout(), &bytes).unwrap(), state());
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("model.w").unwrap().shape(), [2, 3]);
    assert_eq!(tensors.tensor("optimizer.second_moment.b").unwrap().shape(), [3]);
}

#[test]
fn states_of_other_models_and_torn_ones_are_refused() {
    let bytes = state().encode(&layout()).unwrap();
    let mut other = layout();
    other.params[0].shape = vec![3, 2];
    assert!(RunState::decode(&other, &bytes).unwrap_err().contains("model.w"));
    other = layout();
    other.params[1].name = "bias".into();
    assert!(RunState::decode(&other, &bytes).unwrap_err().contains("model.bias"));
    for cut in [0, 7, 8, 60, bytes.len() - 1] {
        RunState::decode(&layout(), &bytes[..cut]).unwrap_err();
    }
    let short = RunState { weights: vec![0.0; 3], ..state() };
    assert!(short.encode(&layout()).unwrap_err().contains("3 elements"));
}

#[test]
fn more_optimizer_vectors_than_any_optimizer_has_are_refused() {
    let slots = (0..9).map(|slot| (format!("slot {slot}"), vec![0.0; 9])).collect();
    let many = RunState { optimizer: OptimizerState { step: 1, slots }, ..state() };
    let bytes = many.encode(&layout()).unwrap();
    assert!(RunState::decode(&layout(), &bytes).unwrap_err().contains("9 optimizer vectors"));
}
