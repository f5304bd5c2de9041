//! Tests of sequences: random steps compared with a simple model, and the checks of declarations.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_bundle::{Datatype, Signature, TensorSpec};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::*;
use millrace_serving_core::config::Limits;
use millrace_serving_core::error::InferError;
use millrace_serving_core::parameters::{SequenceId, Step};
use millrace_serving_core::tensor::{Data, Tensor, TensorHandle};

/// Longer than a test runs.
const LONG: Duration = Duration::from_secs(3600);
/// Bytes of the state of one sequence.
const STATE_BYTES: usize = 8;

fn spec(name: &str, datatype: Datatype, shape: &[i64]) -> TensorSpec {
    TensorSpec { name: name.into(), datatype, shape: shape.to_vec() }
}

fn graph() -> Signature {
    Signature {
        inputs: vec![
            spec("start", Datatype::Int32, &[-1, 1]),
            spec("x", Datatype::Fp32, &[-1, 2]),
            spec("past", Datatype::Fp32, &[-1, 2]),
            spec("id", Datatype::Uint32, &[-1, -1]),
            spec("z", Datatype::Bool, &[-1]),
        ],
        outputs: vec![
            spec("next", Datatype::Fp32, &[-1, 2]),
            spec("y", Datatype::Fp32, &[-1, 2]),
            spec("w", Datatype::Fp32, &[-1]),
        ],
    }
}

fn declaration(idle: Duration) -> Declaration {
    let flag = Signal::Start(Data::Int32(vec![5]), Data::Int32(vec![7]));
    let state = StateTensor {
        input: "past".into(),
        output: "next".into(),
        datatype: Datatype::Fp32,
        dims: vec![-1, 2],
        initial: vec![1, 2],
    };
    Declaration {
        shown: Default::default(),
        idle,
        sequences_max: None,
        controls: vec![
            Control { input: "start".into(), signal: flag },
            Control { input: "id".into(), signal: Signal::Id(Datatype::Uint32) },
        ],
        states: vec![state],
    }
}

fn plan(declaration: &Declaration) -> Result<Plan, String> {
    Plan::new(declaration, &graph(), &[], true, 1 << 20)
}

fn sequences(idle: Duration, sequences_max: usize, sequence_bytes_max: usize) -> Arc<Sequences> {
    let limits = Limits { sequences_max, sequence_bytes_max, ..Limits::default() };
    let declaration = declaration(idle);
    Arc::new(Sequences::new(plan(&declaration).unwrap(), &declaration, limits, "m", 3))
}

fn step(id: u64, start: bool, end: bool) -> Step {
    Step { id: SequenceId::Number(id), start, end }
}

fn has_turn(place: &mut SequencePosition) -> bool {
    if place.turn.as_mut().is_some_and(|turn| turn.try_recv().is_ok()) {
        place.turn = None;
    }
    place.turn.is_none()
}

/// Simulates the run of a request without a session: adds to the state.
fn run(sequences: &Arc<Sequences>, place: &mut SequencePosition, more: f32) -> Result<f32, InferError> {
    let states = sequences.begin(&place.step, &mut place.claim)?;
    let Data::Fp32(values) = &states[0].read()?.data else { panic!("{states:?}") };
    let sum = values[0] + more;
    if !place.step.end {
        sequences.claim(&place.step, STATE_BYTES, &mut place.claim)?;
    }
    let next = Tensor::fp32("past", vec![1, 2], vec![sum; 2]).unwrap();
    place.left = Some((vec![TensorHandle::Alone(next)], STATE_BYTES));
    Ok(sum)
}

#[test]
fn concurrent_sequences_agree_with_a_simple_model() {
    const IDS: u64 = 6;
    const LIVE_MAX: usize = 3;
    for seed in 0..100 {
        let mut random = StdRng::seed_from_u64(seed);
        // Alternates between the limit on bytes and the limit on sequences.
        let bounded_by_bytes = seed % 2 == 0;
        let sequences = match bounded_by_bytes {
            true => sequences(LONG, 100, LIVE_MAX * STATE_BYTES),
            false => sequences(LONG, LIVE_MAX, usize::MAX),
        };
        let mut lines: BTreeMap<u64, Vec<Box<SequencePosition>>> = BTreeMap::new();
        let mut sums: BTreeMap<u64, f32> = BTreeMap::new();
        for _ in 0..300 {
            let id = random.random_range(1..=IDS);
            let line = lines.entry(id).or_default();
            match random.random_range(0..5) {
                0 | 1 => {
                    let step = step(id, random.random_bool(0.3), random.random_bool(0.2));
                    line.push(sequences.queue(step));
                }
                // The caller of any request in the queue drops it.
                2 if !line.is_empty() => drop(line.remove(random.random_range(0..line.len()))),
                _ if !line.is_empty() => {
                    let mut place = line.remove(0);
                    let (start, end) = (place.step.start, place.step.end);
                    let room = sums.contains_key(&id)
                        || sums.len() < LIVE_MAX
                        // The state after the last request takes no capacity.
                        || (bounded_by_bytes && end);
                    let before = if start { room.then_some(0.0) } else { sums.get(&id).copied() };
                    let more = random.random_range(0..100) as f32;
                    let ran = run(&sequences, &mut place, more);
                    assert_eq!(ran.ok(), before.map(|before| before + more), "seed {seed}");
                    // Some requests fail after their run, when their response is written.
                    if let Some(before) = before
                        && random.random_bool(0.8)
                    {
                        place.commit();
                        match end {
                            true => sums.remove(&id),
                            false => sums.insert(id, before + more),
                        };
                    }
                }
                _ => {}
            }
            assert_eq!(sequences.live(), sums.len(), "seed {seed}");
            for line in lines.values_mut() {
                for (place, waiter) in line.iter_mut().enumerate() {
                    assert_eq!(has_turn(waiter), place == 0, "seed {seed}");
                }
            }
        }
        lines.clear();
        for id in 1..=IDS {
            let id = SequenceId::Number(id);
            assert_eq!(
                sequences.start_order(&id).is_some(),
                sums.keys().any(|it| id == SequenceId::Number(*it))
            );
            sequences.forget(&id);
        }
        assert_eq!(sequences.live(), 0);
        let mut place = sequences.queue(step(1, true, false));
        assert_eq!(run(&sequences, &mut place, 1.0).unwrap(), 1.0);
    }
}

#[test]
fn idle_sequences_are_removed_when_requested_or_when_capacity_is_needed() {
    let sequences = sequences(Duration::ZERO, 1, usize::MAX);
    for id in 1..=3 {
        let mut place = sequences.queue(step(id, true, false));
        run(&sequences, &mut place, 1.0).unwrap();
        place.commit();
        // A waiting request keeps its sequence from being idle.
        let mut next = sequences.queue(step(id, false, false));
        drop(place);
        assert!(has_turn(&mut next));
        assert_eq!(run(&sequences, &mut next, 1.0).unwrap(), 2.0);
        next.commit();
        drop(next);
        assert_eq!(sequences.start_order(&SequenceId::Number(id)), None);
    }
    let mut late = sequences.queue(step(3, false, false));
    let error = run(&sequences, &mut late, 1.0).unwrap_err();
    assert!(error.to_string().contains("no live sequence 3: begin it with sequence_start"), "{error}");
    drop(late);
    assert_eq!(sequences.live(), 0);
}

#[test]
fn sequence_that_ends_during_its_run_leaves_no_state() {
    let sequences = sequences(LONG, 1, usize::MAX);
    let id = SequenceId::Number(1);
    let mut place = sequences.queue(step(1, true, false));
    run(&sequences, &mut place, 1.0).unwrap();
    place.commit();
    drop(place);
    let mut place = sequences.queue(step(1, false, false));
    run(&sequences, &mut place, 1.0).unwrap();
    sequences.forget(&id);
    place.commit();
    drop(place);
    assert_eq!((sequences.live(), sequences.start_order(&id)), (0, None));
}

#[test]
fn inputs_come_from_the_client_the_controls_and_the_states() {
    let plan = plan(&declaration(LONG)).unwrap();
    let names = |specs: &[TensorSpec]| specs.iter().map(|spec| spec.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&plan.client().inputs), ["x", "z"]);
    assert_eq!(names(&plan.client().outputs), ["y", "w"]);
    // The outputs that clients request, followed by the kept ones.
    assert_eq!(plan.outputs(&[1, 0]), [2, 1, 0]);
    let x = Tensor::fp32("x", vec![1, 2], vec![1.0, 2.0]).unwrap();
    let z = Tensor::new("z", vec![1], Data::Bool(vec![true])).unwrap();
    let states = plan.initial();
    let inputs = [x, z].map(TensorHandle::Alone).into();
    let inputs = plan.inputs(inputs, &step((9 << 32) + 4, true, false), &states).unwrap();
    let found: Vec<_> = inputs.into_iter().map(|input| input.into_tensor().unwrap()).collect();
    let found: Vec<_> =
        found.iter().map(|it| (it.name.as_str(), it.shape.clone(), it.data.clone())).collect();
    let expected = [
        ("start", vec![1, 1], Data::Int32(vec![7])),
        ("x", vec![1, 2], Data::Fp32(vec![1.0, 2.0])),
        ("past", vec![1, 2], Data::Fp32(vec![0.0, 0.0])),
        ("id", vec![1, 1], Data::Uint32(vec![4])),
        ("z", vec![1], Data::Bool(vec![true])),
    ];
    assert_eq!(found, expected);
    let text = Step { id: SequenceId::Text("a".into()), start: false, end: false };
    let error = plan.inputs(found_inputs(), &text, &states).unwrap_err();
    assert!(error.to_string().contains("\"a\", and the model takes ids as UINT32"), "{error}");
    assert!(plan.check_rows(1).is_ok());
    assert!(plan.check_rows(2).unwrap_err().to_string().contains("has one row"));
    // A state listed as an output is visible to clients, too.
    let listed = [spec("next", Datatype::Fp32, &[-1, 2])];
    let seen = Plan::new(&declaration(LONG), &graph(), &listed, true, 1 << 20).unwrap();
    assert_eq!(names(&seen.client().outputs), ["next", "y", "w"]);
    assert_eq!(seen.outputs(&[0]), [0, 0]);
}

fn found_inputs() -> Vec<TensorHandle> {
    vec![
        TensorHandle::Alone(Tensor::fp32("x", vec![1, 2], vec![0.0; 2]).unwrap()),
        TensorHandle::Alone(Tensor::new("z", vec![1], Data::Bool(vec![false])).unwrap()),
    ]
}

#[test]
fn a_declaration_that_is_not_of_the_graph_is_refused() {
    type Change = fn(&mut Declaration);
    let cases: [(Change, &str); 9] = [
        (|it| it.states[0].input = "pasta".into(), "names input \"pasta\", the graph has none of that name"),
        (|it| it.states[0].output = "text".into(), "names output \"text\", the graph has none of that name"),
        (|it| it.controls[0].input = "begin".into(), "names input \"begin\", the graph has none"),
        (|it| it.states[0].datatype = Datatype::Fp64, "state \"past\" is FP64 [-1, 2]"),
        (|it| it.states[0].dims = vec![-1, 3], "state \"past\" is FP32 [-1, 3]"),
        (|it| it.states[0].dims = vec![2], "input \"past\" of the graph is FP32 [-1, 2]"),
        (|it| it.states[0].output = "w".into(), "output \"w\" of the graph is FP32 [-1]"),
        (|it| it.controls[1].signal = Signal::Id(Datatype::Int64), "\"id\" is INT64 in sequence_batching"),
        (|it| it.states[0].initial = vec![1, 1 << 40], "(limits.sequence_bytes_max)"),
    ];
    for (change, expected) in cases {
        let mut declaration = declaration(LONG);
        change(&mut declaration);
        let reason = plan(&declaration).unwrap_err();
        assert!(reason.contains(expected), "{expected}: {reason}");
    }
    let mut wide = declaration(LONG);
    wide.controls[0].input = "x".into();
    wide.controls[0].signal = Signal::Start(Data::Fp32(vec![0.0]), Data::Fp32(vec![1.0]));
    let reason = plan(&wide).unwrap_err();
    assert!(reason.contains("it gets one element for each request"), "{reason}");
}
