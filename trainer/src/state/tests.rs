//! Tests of the state's encoding.

use safetensors::SafeTensors;

use super::RunState;
use crate::engine::{Param, ParamLayout};
use crate::ledger::Ledger;
use crate::optim::OptimizerState;

fn layout() -> ParamLayout {
    let param =
        |name: &str, shape: &[usize], range| Param { name: name.into(), shape: shape.to_vec(), range };
    ParamLayout { params: vec![param("w", &[2, 3], 0..6), param("b", &[3], 6..9)], states: vec![] }
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
        evaluations: Vec::new(),
        best: None,
        states: Vec::new(),
        best_states: Vec::new(),
        ema: None,
        loss_scale: None,
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
    let endless = RunState { step: u64::MAX, ..state() }.encode(&layout()).unwrap();
    assert!(RunState::decode(&layout(), &endless).unwrap_err().contains("steps"));
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

#[test]
fn optimizer_vectors_that_cannot_be_told_apart_are_refused() {
    let slots = ["first", "other"].map(|slot| (slot.to_owned(), vec![0.0; 9])).to_vec();
    let two = RunState { optimizer: OptimizerState { step: 1, slots }, ..state() };
    let bytes = two.encode(&layout()).unwrap();
    for (slot, reason) in [("first", "twice"), ("fi.st", "dot")] {
        // The counters are a text within the header's text.
        let (counted, told) = (br#"\"other\""#, format!(r#"\"{slot}\""#));
        let at = bytes.windows(counted.len()).position(|part| part == counted).unwrap();
        let mut bytes = bytes.clone();
        bytes[at..at + counted.len()].copy_from_slice(told.as_bytes());
        let error = RunState::decode(&layout(), &bytes).unwrap_err();
        assert!(error.contains(slot) && error.contains(reason), "{error}");
    }
}

#[test]
fn evaluations_and_the_best_weights_are_part_of_the_state() {
    let evaluation = crate::validation::Evaluation {
        epoch: 2,
        step: 40,
        rows: 5,
        loss: 0.1 + 0.2,
        accuracy: None,
        top_k: None,
        mae: Some(1.5),
        perplexity: None,
        auc: None,
    };
    let plain = state().encode(&layout()).unwrap();
    let with = RunState { evaluations: vec![evaluation], best: Some(vec![-1.0; 9]), ..state() };
    let bytes = with.encode(&layout()).unwrap();
    assert_eq!(RunState::decode(&layout(), &bytes).unwrap(), with);
    assert_eq!((with.published(), state().published()), (&[-1.0; 9][..], &state().weights[..]));
    assert!(bytes.len() as u64 <= RunState::bytes_max(&layout()));
    // The average is published unless there is a best one, which is an average then.
    let averaged = RunState { ema: Some(vec![2.0; 9]), ..state() };
    let bytes = averaged.encode(&layout()).unwrap();
    assert_eq!(RunState::decode(&layout(), &bytes).unwrap(), averaged);
    assert_eq!(SafeTensors::deserialize(&bytes).unwrap().tensor("ema.w").unwrap().shape(), [2, 3]);
    let both = RunState { ema: averaged.ema.clone(), ..with.clone() };
    assert_eq!((averaged.published(), both.published()), (&[2.0; 9][..], &[-1.0; 9][..]));
    assert!(both.encode(&layout()).unwrap().len() as u64 <= RunState::bytes_max(&layout()));
    // A state without them has the metadata of earlier programs.
    let (_, metadata) = SafeTensors::read_metadata(&plain).unwrap();
    let counters = &metadata.metadata().as_ref().unwrap()[super::COUNTERS];
    assert!(!counters.contains("evaluations") && !counters.contains("best"), "{counters}");
    assert!(!counters.contains("ema"), "{counters}");
}

#[test]
fn running_statistics_are_part_of_the_state() {
    let mut with = layout();
    with.states = vec![Param { name: "norm.mean".into(), shape: vec![2], range: 0..2 }];
    let best = RunState {
        states: vec![0.5, -0.25],
        best: Some(vec![-1.0; 9]),
        best_states: vec![0.125, 3.0],
        ..state()
    };
    let bytes = best.encode(&with).unwrap();
    assert_eq!(RunState::decode(&with, &bytes).unwrap(), best);
    assert!(bytes.len() as u64 <= RunState::bytes_max(&with));
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(tensors.tensor("state.norm.mean").unwrap().shape(), [2]);
    assert_eq!(tensors.tensor("best_state.norm.mean").unwrap().shape(), [2]);
    assert_eq!(best.published_states(), [0.125, 3.0]);
    let last = RunState { best: None, best_states: Vec::new(), ..best };
    assert_eq!(last.published_states(), [0.5, -0.25]);
    assert_eq!(RunState::decode(&with, &last.encode(&with).unwrap()).unwrap(), last);
    // The state of a model without them has the tensors of earlier programs, and theirs does not suit a model with them.
    let plain = state().encode(&layout()).unwrap();
    let tensors = SafeTensors::deserialize(&plain).unwrap();
    let is_earlier = |name: &str| ["model.", "optimizer."].iter().any(|prefix| name.starts_with(prefix));
    assert!(tensors.names().into_iter().all(is_earlier), "{:?}", tensors.names());
    assert_eq!(RunState::decode(&layout(), &plain).unwrap(), state());
    assert!(RunState::decode(&with, &plain).unwrap_err().contains("state.norm.mean"));
    let short = RunState { states: vec![0.0], ..last };
    assert!(short.encode(&with).unwrap_err().contains("state has 1 elements"));
}
