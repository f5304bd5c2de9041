//! Who gets a session, who waits, and what becomes of those who wait when others go.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use millrace_bundle::Datatype;
use millrace_bundle::onnx::*;
use prost::Message as _;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::oneshot::error::TryRecvError;

use super::super::{options, peak};
use super::*;
use crate::config::{Device, Memory};
use crate::runtime::Runtime;
use crate::tensor::{Held, Tensor};

/// `y = relu(x)`, of rows of any width.
fn graph() -> Vec<u8> {
    use tensor_shape_proto::{Dimension, dimension::Value};
    let value = |name: &str| {
        let dim = |name: &str| Dimension { value: Some(Value::DimParam(name.into())), ..Default::default() };
        let tensor = type_proto::Tensor {
            elem_type: Some(tensor_proto::DataType::Float as i32),
            shape: Some(TensorShapeProto { dim: vec![dim("rows"), dim("width")] }),
        };
        let r#type = TypeProto { value: Some(type_proto::Value::TensorType(tensor)), ..Default::default() };
        ValueInfoProto { name: Some(name.into()), r#type: Some(r#type), ..Default::default() }
    };
    let node = NodeProto {
        op_type: Some("Relu".into()),
        input: vec!["x".into()],
        output: vec!["y".into()],
        ..Default::default()
    };
    let graph = GraphProto {
        name: Some("relu".into()),
        node: vec![node],
        input: vec![value("x")],
        output: vec![value("y")],
        ..Default::default()
    };
    let opset = OperatorSetIdProto { version: Some(17), ..Default::default() };
    ModelProto { ir_version: Some(8), opset_import: vec![opset], graph: Some(graph), ..Default::default() }
        .encode_to_vec()
}

/// With so many sessions on one device.
fn shared(sessions: usize) -> Arc<Shared> {
    shared_on(&vec![0; sessions])
}

/// With sessions on the devices of these places, as it were: all are on the processor.
fn shared_on(places: &[usize]) -> Arc<Shared> {
    let runtime = Runtime::load().unwrap();
    let mut builder = options::builder(runtime, Device::Cpu, 1, false).unwrap();
    let graph = graph();
    let session =
        |place: &usize| Session::new(builder.commit_from_memory(&graph).unwrap(), *place, Memory::Host);
    let free = places.iter().map(session).collect();
    let output = TensorSpec { name: "y".into(), datatype: Datatype::Fp32, shape: vec![-1, -1] };
    let sizes = Sizes { rows_max: 8, preferred: Vec::new() };
    let room = Room { requests_max: 64, bytes_max: 1 << 20 };
    Arc::new(Shared::new(free, vec![output], sizes, Duration::ZERO, room, true))
}

/// A request of so many rows, of that width, each filled with a value.
fn work(rows: usize, width: usize, value: f32) -> Work {
    let extents = vec![rows.max(1) as i64, width as i64];
    let input = Tensor::fp32("x", extents, vec![value; rows.max(1) * width]).unwrap();
    Work {
        inputs: vec![Held::Alone(input)],
        outputs: vec![0],
        stays: Vec::new(),
        rows,
        queued: Instant::now(),
        deadline: None,
        answer_by: None,
        level: 1,
        client: None,
        beside: false,
    }
}

fn waits(begun: Result<Begun<'_>, InferError>) -> Waiting<'_> {
    match begun.unwrap() {
        Begun::Waits(waiting) => waiting,
        other => panic!("{other:?}"),
    }
}

fn gathers(begun: Result<Begun<'_>, InferError>) -> (Lease, Work) {
    match begun.unwrap() {
        Begun::Gathers(lease, work) => (lease, work),
        other => panic!("{other:?}"),
    }
}

/// Sessions that are free, and requests that wait.
fn rest(shared: &Shared) -> (usize, usize) {
    let state = shared.state.lock();
    (state.free.len(), state.line.len())
}

fn value(ran: &super::super::Ran) -> f32 {
    match &ran.outputs[0].read().unwrap().data {
        crate::tensor::Data::Fp32(values) => values[0],
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn who_was_taken_along_gets_the_answer_after_the_deadline_too() {
    let sizes = Sizes { rows_max: 8, preferred: Vec::new() };
    let room = Room { requests_max: 8, bytes_max: 1 << 20 };
    let shared = Arc::new(Shared::new(Vec::new(), Vec::new(), sizes, Duration::ZERO, room, true));
    let deadline = Instant::now() + Duration::from_millis(1);
    let [taken, left] =
        [0, 1].map(|_| waits(shared.begin(Work { deadline: Some(deadline), ..work(1, 1, 0.0) }, |_| false)));
    let job = shared.state.lock().line.remove(taken.place.unwrap()).unwrap();
    let telling = async {
        tokio::time::sleep_until((deadline + Duration::from_millis(1)).into()).await;
        job.reply.send(Turn::Done(Err(InferError::invalid("told")))).unwrap();
    };
    let (told, ()) = tokio::join!(taken.turn(), telling);
    assert!(matches!(told, Turn::Done(Err(InferError::Invalid { .. }))), "{told:?}");
    let told = left.turn().await;
    assert!(matches!(told, Turn::Done(Err(InferError::DeadlineExceeded { .. }))), "{told:?}");
    assert_eq!(shared.waiting(), 0);
}

#[tokio::test]
async fn who_gathers_takes_along_who_came_although_a_session_was_free() {
    let shared = shared(2);
    let (lease, first) = gathers(shared.begin(work(1, 3, 1.0), |free| free == 1));
    let joined = waits(shared.begin(work(2, 3, 2.0), |_| true));
    // What runs alone has nothing to wait for, and looks for nobody.
    assert!(matches!(shared.begin(work(0, 3, 3.0), |_| true).unwrap(), Begun::Alone(..)));
    let ran = lease.run(first).unwrap();
    assert_eq!((value(&ran), ran.run_rows), (1.0, Some(3)));
    let Turn::Done(Ok(ran)) = joined.turn().await else { panic!("it was not taken along") };
    assert_eq!((value(&ran), ran.run_rows), (2.0, None));
    assert_eq!(rest(&shared), (2, 0));
    assert!(matches!(shared.begin(work(1, 3, 1.0), |_| false).unwrap(), Begun::Alone(..)));
}

#[tokio::test]
async fn who_cannot_run_with_the_one_who_gathers_gets_a_session_that_is_free() {
    let shared = shared(2);
    let (mut lease, first) = gathers(shared.begin(work(1, 3, 1.0), |_| true));
    let other = waits(shared.begin(work(1, 4, 2.0), |_| true));
    assert!(shared.take_like(&first).is_empty());
    lease.end_gathering();
    // The first has his session still.
    let Turn::Lead(others, second) = other.turn().await else { panic!("it did not get the session") };
    assert_eq!(value(&others.run(second).unwrap()), 2.0);
    assert_eq!(value(&lease.run(first).unwrap()), 1.0);
    assert_eq!(shared.state.lock().free.len(), 2);
}

#[tokio::test]
async fn where_the_one_who_gathers_goes_another_runs() {
    let shared = shared(1);
    let (lease, _) = gathers(shared.begin(work(1, 3, 1.0), |_| true));
    let joined = waits(shared.begin(work(1, 3, 2.0), |_| true));
    drop(lease);
    let Turn::Lead(lease, second) = joined.turn().await else { panic!("nobody runs") };
    assert_eq!(value(&lease.run(second).unwrap()), 2.0);
    assert_eq!(shared.state.lock().free.len(), 1);
}

#[test]
fn who_cannot_begin_in_time_does_not_wait() {
    let shared = shared(1);
    let begun = shared.begin(work(1, 3, 1.0), |_| false).unwrap();
    let _waiting = waits(shared.begin(work(1, 4, 2.0), |_| false));
    shared.outlook.ran(1, Duration::from_secs(2));
    let within = |seconds| {
        let deadline = Some(Instant::now() + Duration::from_secs(seconds));
        shared.begin(Work { deadline, ..work(1, 4, 3.0) }, |_| false)
    };
    let refused = within(1).unwrap_err();
    assert!(matches!(refused, InferError::Overloaded { .. }), "{refused:?}");
    assert_eq!(rest(&shared), (0, 1), "it takes no place");
    let _waiting = waits(within(60));
    drop(begun);
}

#[tokio::test]
async fn the_time_that_those_of_the_line_have_a_session_is_noted() {
    let shared = shared(1);
    let begun = shared.begin(work(0, 3, 1.0), |_| false).unwrap();
    let Begun::Alone(lease, first) = begun else { panic!("{begun:?}") };
    let waiting = waits(shared.begin(work(0, 3, 2.0), |_| false));
    lease.run(first).unwrap();
    let Turn::Lead(lease, second) = waiting.turn().await else { panic!("nobody runs") };
    assert_eq!(shared.outlook.row_nanos(), 0, "nobody of the line has run");
    lease.run(second).unwrap();
    assert!(shared.outlook.row_nanos() > 0);
}

#[test]
fn runs_go_to_the_device_with_the_fewest() {
    let shared = shared_on(&[0, 0, 0, 1, 1, 1]);
    let mut leases = Vec::new();
    let begin = || shared.begin(work(1, 3, 1.0), |_| false).unwrap();
    for _ in 0..2 {
        let Begun::Alone(lease, _) = begin() else { panic!("it did not get a session") };
        leases.push(lease);
    }
    let place = |lease: &Lease| lease.session.as_ref().unwrap().place;
    assert_ne!(place(&leases[0]), place(&leases[1]));
    let Begun::Alone(third, _) = begin() else { panic!("it did not get a session") };
    leases.insert(0, third);
    let freed = place(&leases.pop().unwrap());
    let Begun::Alone(lease, _) = begin() else { panic!("it did not get the session that came back") };
    assert_eq!(place(&lease), freed);
}

/// Callers come, run, and go in any order: nobody waits while a session is free and nobody gathers, each gets
/// his own answer, and no session is lost.
#[test]
fn whatever_callers_do_nobody_is_forgotten() {
    const SESSIONS: usize = 4;
    let shared = shared_on(&[0, 0, 1, 1]);
    for seed in 0..200 {
        let mut rng = StdRng::seed_from_u64(seed);
        let (mut leases, mut waiting) = (Vec::new(), Vec::new());
        for step in 0..200u32 {
            let number = step as f32;
            match rng.random_range(0..6u8) {
                0..3 if step < 150 => {
                    let (rows, width) = (rng.random_range(0..3), rng.random_range(1..3));
                    let looks = rng.random_bool(0.5);
                    match shared.begin(work(rows, width, number), |_| looks).unwrap() {
                        Begun::Alone(lease, work) | Begun::Gathers(lease, work) => {
                            leases.push((lease, work, number));
                        }
                        Begun::Waits(place) => waiting.push((place, number)),
                    }
                }
                0..5 if !leases.is_empty() => {
                    let (lease, work, number) = leases.swap_remove(rng.random_range(0..leases.len()));
                    if rng.random_bool(0.8) {
                        assert_eq!(value(&lease.run(work).unwrap()), number);
                    }
                }
                _ if !waiting.is_empty() && rng.random_bool(0.2) => {
                    waiting.swap_remove(rng.random_range(0..waiting.len()));
                }
                _ => {}
            }
            let told = std::mem::take(&mut waiting).into_iter().filter_map(|(mut place, number)| {
                match place.turn.try_recv() {
                    Err(TryRecvError::Empty) => waiting.push((place, number)),
                    Err(TryRecvError::Closed) => panic!("seed {seed}: {number} was forgotten"),
                    Ok(Turn::Done(ran)) => assert_eq!(value(&ran.unwrap()), number),
                    Ok(Turn::Lead(mut lease, work)) => {
                        if rng.random_bool(0.5) {
                            shared.gather_for(&mut lease, &work);
                        }
                        return Some((lease, work, number));
                    }
                }
                None
            });
            leases.extend(told.collect::<Vec<_>>());
            let state = shared.state.lock();
            assert_eq!(state.free.len() + leases.len(), SESSIONS, "seed {seed}");
            assert_eq!(state.line.len(), waiting.len(), "seed {seed}");
            assert_eq!(state.gathering, leases.iter().any(|(lease, ..)| lease.gathers), "seed {seed}");
            assert!(
                state.gathering || state.free.len() == 0 || waiting.is_empty(),
                "seed {seed}: {} wait while {} sessions are free",
                waiting.len(),
                state.free.len()
            );
        }
        drop(leases);
        drop(waiting);
        assert_eq!(rest(&shared), (SESSIONS, 0), "seed {seed}");
    }
}

#[tokio::test]
async fn long_runs_follow_each_other_without_those_who_wait_for_them() {
    let shared = shared(1);
    for _ in 0..100 {
        shared.run_micros.note(10 * background::MICROS_MIN as u128);
    }
    let Begun::Alone(lease, first) = shared.begin(work(1, 3, 1.0), |_| false).unwrap() else { panic!() };
    let [second, along, gone, other] = [(3, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]
        .map(|(width, value)| waits(shared.begin(work(1, width, value), |_| false)));
    drop(gone);
    let micros = shared.run_micros();
    let first = background::run(&shared.account, micros, 1, move || lease.run(first)).await.unwrap();
    assert_eq!((value(&first), first.run_rows), (1.0, Some(3)));
    // The others had been in the line when the first one ran, but for one that is not like it.
    let Turn::Done(Ok(ran)) = other.turn().await else { panic!("it was to run without being asked") };
    assert_eq!((value(&ran), ran.run_rows), (5.0, Some(1)));
    for (waiting, expected) in [(second, 2.0), (along, 3.0)] {
        let Turn::Done(Ok(ran)) = waiting.turn().await else { panic!("it was taken along") };
        assert_eq!((value(&ran), ran.run_rows), (expected, None));
    }
    assert_eq!(shared.waiting(), 0);
}

#[tokio::test]
async fn a_run_for_one_who_has_gone_or_waited_too_long_goes_to_the_next_one() {
    let shared = shared(1);
    let Begun::Alone(lease, request) = shared.begin(work(1, 3, 1.0), |_| false).unwrap() else { panic!() };
    let next = waits(shared.begin(work(1, 4, 2.0), |_| false));
    let (reply, turn) = oneshot::channel();
    drop(turn);
    lease.run_for(request, reply);
    let Turn::Lead(lease, _) = next.turn().await else { panic!("nobody has the session") };
    let (reply, turn) = oneshot::channel();
    lease.run_for(Work { deadline: Some(Instant::now()), ..work(1, 3, 1.0) }, reply);
    let told = turn.await.unwrap();
    assert!(matches!(told, Turn::Done(Err(InferError::DeadlineExceeded { .. }))), "{told:?}");
    assert_eq!(rest(&shared), (1, 0));
}

#[test]
fn a_line_is_split_among_the_sessions_where_rows_take_as_long_in_runs_of_any_size() {
    let shared = shared(2);
    for rows in [1, 2, 4, 8] {
        shared.efficiency.ran(rows, rows, Duration::from_micros(rows as u64));
    }
    let (mut lease, first) = gathers(shared.begin(work(1, 3, 1.0), |_| true));
    let _waiting: Vec<_> = (0..5).map(|_| waits(shared.begin(work(1, 3, 1.0), |_| true))).collect();
    assert_eq!(shared.take_like(&first).len(), 2, "of six for two sessions, his own included");
    lease.end_gathering();
    assert_eq!(rest(&shared), (0, 2), "the other session went to one of those that were left");
}

#[tokio::test]
async fn what_a_peak_took_of_an_arena_is_given_back_by_a_session_that_is_free() {
    let shared = shared(0);
    // The processor's sessions have no arena otherwise; it is the same code of ONNX Runtime as for GPUs.
    let arena = ort::ep::CPU::default().with_arena_allocator(true).build();
    let builder = ort::session::builder::SessionBuilder::new(Runtime::load().unwrap().environment()).unwrap();
    let mut builder = builder.with_execution_providers([arena]).unwrap();
    let session = Session::new(builder.commit_from_memory(&graph()).unwrap(), 0, Memory::Host);
    shared.state.lock().free = Free::new(vec![session]);
    let run = |width: usize| {
        let Begun::Alone(mut lease, work) = shared.begin(work(1024, width, 1.0), |_| false).unwrap() else {
            panic!("it does not wait")
        };
        lease.run_alone(&work).unwrap();
    };
    let megabytes = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        resident.trim().split(' ').next().unwrap().parse::<usize>().unwrap() >> 10
    };
    let row = Arc::from([Tensor::fp32("x", vec![1, 1], vec![0.0]).unwrap()]);
    let arenas = Arc::from(["cpu:0".to_owned()]);
    let weak = Arc::downgrade(&shared);
    let end = || peak::end(&weak, &arenas, &row);

    run(1);
    let before = megabytes();
    run(32 << 10);
    let peak = megabytes();
    assert!(peak >= before + 100, "{before} MiB, then {peak}");
    assert_eq!(end().await.unwrap().unwrap(), 0, "it was just now");
    run(1);
    // Whoever runs meanwhile keeps his session.
    let Begun::Alone(lease, _) = shared.begin(work(1, 1, 0.0), |_| false).unwrap() else {
        panic!("it waits")
    };
    assert_eq!(end().await.unwrap().unwrap(), 0, "it is not free");
    drop(lease);
    assert_eq!(end().await.unwrap().unwrap(), 1);
    let after = megabytes();
    assert!(after <= before + 50, "{before} MiB, then {peak}, and {after} in the end");
    assert_eq!(end().await.unwrap().unwrap(), 0, "once");
    assert_eq!(rest(&shared), (1, 0));
    run(3);

    // A device whose memory the library does not know is an error, and the session stays.
    run(32 << 10);
    assert_eq!(end().await.unwrap().unwrap(), 0);
    let error = peak::end(&weak, &Arc::from(["gpu:7".to_owned()]), &row).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("gpu:7") || error.to_string().contains("arena"), "{error}");
    assert_eq!(rest(&shared), (1, 0));
    run(3);
    drop(shared);
    assert!(end().await.is_none(), "the version is gone");
}
