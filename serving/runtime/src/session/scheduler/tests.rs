//! Scheduler tests with a simulated runner, clock and executor: one thread plays all roles, in a fixed order.
use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use millrace_bundle::Datatype;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::run_end::RunEnd;
use super::super::values::RequestedOutput;
use super::super::work::tests::{BEGIN, client, work};
use super::*;
use millrace_serving_core::statistics::Times;
use millrace_serving_core::tensor::{Data, Tensor, TensorHandle, View};

mod waiting;

const MICRO: Duration = Duration::from_micros(1);
const HOUR: Duration = Duration::from_secs(3600);
/// Elements of a short row. Its run takes one microsecond for each element.
const SHORT: usize = 4;
/// Elements of a long row.
const LONG: usize = 4000;

thread_local! {
    static NOW: Cell<Instant> = Cell::new(*BEGIN);
    /// Runs so far: rows, elements of a row, and whether the run was on an inference thread.
    static RUNS: RefCell<Vec<(usize, usize, bool)>> = const { RefCell::new(Vec::new()) };
    static ON_INFERENCE_THREAD: Cell<bool> = const { Cell::new(false) };
    /// Number of runs that were ended early.
    static ENDED: Cell<usize> = const { Cell::new(0) };
    /// Action to perform while the next long row runs.
    static MEANWHILE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
}

fn now() -> Instant {
    NOW.get()
}

fn pass(time: Duration) {
    NOW.set(now() + time);
}

fn runs() -> Vec<(usize, usize, bool)> {
    RUNS.take()
}

/// Performs an action while the next long row runs, as if on an I/O thread.
fn meanwhile(action: impl FnOnce() + 'static) {
    let action = move || {
        let before = ON_INFERENCE_THREAD.replace(false);
        action();
        ON_INFERENCE_THREAD.set(before);
    };
    MEANWHILE.set(Some(Box::new(action)));
}

/// Returns its input as output. One microsecond passes for each element. Refuses NaN values.
#[derive(Debug, Default)]
struct Echo {
    device: usize,
    /// Whether it returns a single row for any input.
    merges: bool,
    /// Fewest rows of its runs; the rest is filled.
    rows_min: usize,
}

impl Runner for Echo {
    fn device(&self) -> usize {
        self.device
    }

    fn steady_rows(&mut self, rows: usize, _is_joined: bool) -> usize {
        rows.max(self.rows_min)
    }

    fn run(
        &mut self,
        inputs: &[View<'_>],
        outputs: &[RequestedOutput<'_>],
        queued: Instant,
        end: Option<&RunEnd>,
    ) -> Result<(Vec<TensorHandle>, Times), InferError> {
        let View::Here(input) = inputs[0] else { panic!("{inputs:?}") };
        let Data::Fp32(values) = &input.data else { panic!("{inputs:?}") };
        let rows = input.shape[0] as usize;
        let width = values.len() / rows;
        if width == LONG
            && let Some(action) = MEANWHILE.take()
        {
            action();
        }
        if end.is_some_and(RunEnd::is_ended) {
            ENDED.set(ENDED.get() + 1);
            return Err(InferError::internal("the run was ended"));
        }
        let computing = now();
        pass(MICRO * values.len() as u32);
        RUNS.with_borrow_mut(|runs| runs.push((rows, width, ON_INFERENCE_THREAD.get())));
        if values.iter().any(|value| value.is_nan()) {
            return Err(InferError::invalid("not a number"));
        }
        let output = match self.merges {
            true => Tensor::fp32("y", vec![1, width as i64], values[..width].to_vec()).unwrap(),
            false => Tensor { name: outputs[0].spec.name.clone(), ..input.clone() },
        };
        let end = now();
        let times = Times { queued, computing, input_end: computing, output_start: end, end, cached: false };
        Ok((vec![TensorHandle::Alone(output)], times))
    }
}

fn policy() -> Policy {
    Policy {
        rows_max: 64,
        preferred: Vec::new(),
        delay: Duration::ZERO,
        limits: QueueLimits { requests_max: 1000, bytes_max: usize::MAX },
        is_predictable: true,
        // The tests run submitted tasks explicitly.
        share: TaskLimits { threads_max: 0, own: 0, is_on_cpu: true },
    }
}

fn scheduler_of(sessions: Vec<Echo>, policy: Policy) -> Arc<Scheduler<Echo>> {
    // Tests may share a thread, and so the thread-local state.
    NOW.set(*BEGIN);
    RUNS.take();
    MEANWHILE.take();
    ENDED.set(0);
    let output = TensorSpec { name: "y".into(), datatype: Datatype::Fp32, shape: vec![-1, -1] };
    let executor = Box::leak(Box::new(Executor::new()));
    let scheduler = Scheduler::new(sessions, vec![output], policy, executor, now);
    // Run times for short rows are known up to 32 rows.
    for rows in [1, 2, 4, 8, 16, 32] {
        scheduler.run_times.record(rows, rows * SHORT, MICRO * (rows * SHORT) as u32);
    }
    Arc::new(scheduler)
}

fn scheduler(sessions: usize, policy: Policy) -> Arc<Scheduler<Echo>> {
    scheduler_of((0..sessions).map(|_| Echo::default()).collect(), policy)
}

/// A request of `rows` rows of `width` elements that all have the same value.
fn rows(rows: usize, width: usize, value: f32) -> Work {
    let input = Tensor::fp32("x", vec![rows.max(1) as i64, width as i64], vec![value; rows.max(1) * width]);
    Work { inputs: vec![TensorHandle::Alone(input.unwrap())], ..work(rows, 1, &[0], 0) }
}

type Call = Pin<Box<dyn Future<Output = Result<Output, InferError>>>>;

fn call(scheduler: &Arc<Scheduler<Echo>>, work: Work) -> Call {
    let scheduler = Arc::clone(scheduler);
    Box::pin(async move { scheduler.run(work).await })
}

/// Polls a call on this thread.
fn poll(call: &mut Call) -> Poll<Result<Output, InferError>> {
    call.as_mut().poll(&mut Context::from_waker(Waker::noop()))
}

/// A call that has been polled once and is still pending.
fn pending(scheduler: &Arc<Scheduler<Echo>>, work: Work) -> Call {
    let mut call = call(scheduler, work);
    let polled = poll(&mut call);
    assert!(polled.is_pending(), "{polled:?}");
    call
}

fn answer(call: &mut Call) -> Result<Output, InferError> {
    match poll(call) {
        Poll::Ready(answer) => answer,
        Poll::Pending => panic!("it has no answer"),
    }
}

/// The value of all elements of a response.
fn value(call: &mut Call) -> f32 {
    let output = answer(call).unwrap();
    let Data::Fp32(values) = &output.outputs[0].read().unwrap().data else { panic!("{output:?}") };
    assert!(values.iter().all(|value| *value == values[0]));
    values[0]
}

/// Runs the next task of the executor, as an inference thread would; false when the queue is empty.
fn run_next(scheduler: &Scheduler<Echo>) -> bool {
    ON_INFERENCE_THREAD.set(true);
    let ran = scheduler.executor.run_next();
    ON_INFERENCE_THREAD.set(false);
    ran
}

fn run_all(scheduler: &Scheduler<Echo>) {
    while run_next(scheduler) {}
}

/// Number of idle sessions and of queued requests.
fn rest(scheduler: &Scheduler<Echo>) -> (usize, usize) {
    let state = scheduler.state.lock();
    (state.idle.len(), state.queue.len())
}

#[test]
fn short_request_of_an_idle_model_runs_on_the_io_thread() {
    let scheduler = scheduler(2, policy());
    let mut call = pending(&scheduler, rows(1, SHORT, 7.0));
    assert_eq!(runs(), [], "it yields once, for others to join");
    assert_eq!(value(&mut call), 7.0);
    assert_eq!(runs(), [(1, SHORT, false)]);
    assert!(!run_next(&scheduler), "no inference thread was asked");
    assert_eq!(rest(&scheduler), (2, 0));
}

#[test]
fn requests_of_64_connections_share_one_inline_batch() {
    let mut policy = policy();
    policy.limits.requests_max = 0;
    let scheduler = scheduler(2, policy);
    // A run of 64 rows is short, too.
    scheduler.run_times.record(64, 64 * SHORT, 100 * MICRO);
    let mut calls: Vec<Call> =
        (0..64).map(|number| pending(&scheduler, rows(1, SHORT, number as f32))).collect();
    for (number, call) in calls.iter_mut().enumerate() {
        assert_eq!(value(call), number as f32);
    }
    assert_eq!(runs(), [(64, SHORT, false)]);
    assert!(!run_next(&scheduler));
}

#[test]
fn batch_that_is_not_short_goes_to_an_inference_thread() {
    let scheduler = scheduler(1, policy());
    let mut calls: Vec<Call> =
        (0..64).map(|number| pending(&scheduler, rows(1, SHORT, number as f32))).collect();
    // The leader finds that the run time of 64 rows is unknown.
    assert!(poll(&mut calls[0]).is_pending());
    assert_eq!(runs(), []);
    assert!(run_next(&scheduler));
    assert_eq!(runs(), [(64, SHORT, true)]);
    for (number, call) in calls.iter_mut().enumerate() {
        assert_eq!(value(call), number as f32);
    }
}

#[test]
fn long_request_never_runs_on_the_io_thread_and_short_ones_do_not_wait_for_it() {
    let scheduler = scheduler(2, policy());
    let mut long = pending(&scheduler, rows(1, LONG, 1.0));
    assert!(poll(&mut long).is_pending());
    assert_eq!(runs(), [], "nothing is known of such rows");
    let beside = Arc::clone(&scheduler);
    meanwhile(move || {
        for number in 0..10 {
            let mut short = pending(&beside, rows(1, SHORT, number as f32));
            assert_eq!(value(&mut short), number as f32);
        }
    });
    assert!(run_next(&scheduler));
    assert_eq!(value(&mut long), 1.0);
    assert_eq!(runs(), [vec![(1, SHORT, false); 10], vec![(1, LONG, true)]].concat());
    // The run is now known to be long.
    let mut again = pending(&scheduler, rows(1, LONG, 2.0));
    assert!(poll(&mut again).is_pending());
    assert_eq!(runs(), []);
}

#[test]
fn short_requests_pass_a_long_one_that_waits_for_a_thread() {
    for request in [0, 1] {
        let scheduler = scheduler(2, policy());
        let mut long = pending(&scheduler, rows(request, LONG, 1.0));
        for number in 0..10 {
            let mut short = call(&scheduler, rows(request, SHORT, number as f32));
            // A request with rows yields once, so that others can join.
            if request > 0 {
                assert!(poll(&mut short).is_pending());
            }
            assert_eq!(value(&mut short), number as f32);
        }
        assert_eq!(runs(), [(1, SHORT, false); 10]);
        // With a second long request, every session is reserved.
        let mut another = pending(&scheduler, rows(request, LONG + 1, 2.0));
        let mut short = pending(&scheduler, rows(request, SHORT, 3.0));
        assert!(poll(&mut short).is_pending());
        run_all(&scheduler);
        assert_eq!((value(&mut long), value(&mut another), value(&mut short)), (1.0, 2.0, 3.0));
        assert_eq!(rest(&scheduler), (2, 0));
    }
}

#[test]
fn runs_of_unpredictable_graphs_stay_on_inference_threads() {
    let scheduler = scheduler(1, Policy { is_predictable: false, ..policy() });
    let mut call = pending(&scheduler, rows(1, SHORT, 7.0));
    run_all(&scheduler);
    assert_eq!(value(&mut call), 7.0);
    assert_eq!(runs(), [(1, SHORT, true)]);
}

#[test]
fn requests_that_wait_for_a_busy_session_share_the_next_batch() {
    let scheduler = scheduler(1, policy());
    let mut long = pending(&scheduler, rows(1, LONG, 1.0));
    let (beside, calls) = (Arc::clone(&scheduler), Rc::new(RefCell::new(Vec::new())));
    let waiting = Rc::clone(&calls);
    meanwhile(move || {
        waiting.replace((0..64).map(|number| pending(&beside, rows(1, SHORT, number as f32))).collect());
        assert_eq!(beside.waiting(), 64);
    });
    assert!(run_next(&scheduler));
    assert_eq!(value(&mut long), 1.0);
    assert!(run_next(&scheduler));
    assert_eq!(runs(), [(1, LONG, true), (64, SHORT, true)]);
    let mut counted = 0;
    for (number, mut call) in calls.take().into_iter().enumerate() {
        let output = answer(&mut call).unwrap();
        counted += output.run_rows.unwrap_or(0);
        let Data::Fp32(values) = &output.outputs[0].read().unwrap().data else { panic!() };
        assert_eq!(values, &[number as f32; SHORT]);
    }
    assert_eq!(counted, 64, "one of them counts the batch");
    assert_eq!(rest(&scheduler), (1, 0));
}

#[test]
fn models_without_batches_run_each_request_alone() {
    for (policy, request) in [(Policy { rows_max: 0, ..policy() }, 1), (policy(), 0)] {
        let scheduler = scheduler(1, policy);
        let mut first = call(&scheduler, rows(request, SHORT, 1.0));
        assert_eq!(value(&mut first), 1.0, "it has nothing to yield for");
        assert_eq!(runs(), [(1, SHORT, false)]);
        let mut long = pending(&scheduler, rows(request, LONG, 1.0));
        let mut others: Vec<Call> =
            (0..3).map(|number| pending(&scheduler, rows(request, SHORT, number as f32))).collect();
        run_all(&scheduler);
        assert_eq!(value(&mut long), 1.0);
        for (number, call) in others.iter_mut().enumerate() {
            assert_eq!(value(call), number as f32);
        }
        assert_eq!(runs(), [vec![(1, LONG, true)], vec![(1, SHORT, true); 3]].concat());
    }
}

#[test]
fn idle_sessions_share_the_queue() {
    let scheduler = scheduler(2, policy());
    // The cost of a row is the same in runs of any size.
    let mut calls: Vec<Call> = (0..6).map(|_| pending(&scheduler, rows(1, LONG, 1.0))).collect();
    for rows in [1, 2, 4, 8] {
        scheduler.run_times.record(rows, rows * LONG, MICRO * (rows * LONG) as u32);
    }
    run_all(&scheduler);
    assert_eq!(runs()[0], (3, LONG, true), "half of them, as another session is idle");
    calls.iter_mut().for_each(|call| assert_eq!(value(call), 1.0));
}

#[test]
fn dropped_leader_leaves_its_batch_to_an_inference_thread() {
    let scheduler = scheduler(1, policy());
    let leader = pending(&scheduler, rows(1, SHORT, 1.0));
    let mut follower = pending(&scheduler, rows(1, SHORT, 2.0));
    drop(leader);
    assert!(poll(&mut follower).is_pending());
    assert!(run_next(&scheduler));
    assert_eq!(value(&mut follower), 2.0);
    assert_eq!(runs(), [(1, SHORT, true)]);
}

#[test]
fn requests_that_found_an_idle_session_do_not_count_towards_the_limits() {
    let limits = QueueLimits { requests_max: 0, bytes_max: 0 };
    let scheduler = scheduler(2, Policy { limits, ..policy() });
    let mut calls = [1.0, 2.0].map(|value| pending(&scheduler, rows(1, LONG, value)));
    assert_eq!(scheduler.waiting(), 0);
    let error = answer(&mut call(&scheduler, rows(1, SHORT, 3.0))).unwrap_err();
    assert!(matches!(&error, InferError::Overloaded { .. }), "{error}");
    run_all(&scheduler);
    assert_eq!(calls.each_mut().map(value), [1.0, 2.0]);
    let mut call = pending(&scheduler, rows(1, SHORT, 3.0));
    assert_eq!(value(&mut call), 3.0);
}

#[test]
fn requests_beyond_the_limits_are_refused() {
    let mut policy = policy();
    policy.limits = QueueLimits { requests_max: 1, bytes_max: 8 * LONG };
    let scheduler = scheduler(1, policy);
    let mut first = pending(&scheduler, rows(3, LONG, 1.0));
    let mut waits = pending(&scheduler, rows(1, LONG, 2.0));
    let error = answer(&mut call(&scheduler, rows(1, SHORT, 3.0))).unwrap_err();
    assert!(error.to_string().contains("the limits are 1 and 32000"), "{error}");
    // A request of a higher level displaces the waiting one.
    let mut other = pending(&scheduler, Work { client: client(2), level: 0, ..rows(1, LONG, 4.0) });
    let error = answer(&mut waits).unwrap_err();
    assert!(matches!(&error, InferError::Overloaded { .. }), "{error}");
    run_all(&scheduler);
    assert_eq!((value(&mut first), value(&mut other)), (1.0, 4.0));
}

#[tokio::test]
async fn request_that_cannot_start_in_time_is_refused_at_once() {
    let scheduler = scheduler(1, policy());
    let _first = pending(&scheduler, rows(1, LONG, 1.0));
    let _second = pending(&scheduler, rows(1, LONG, 2.0));
    scheduler.admission.record(1, HOUR);
    let within = |time| Work { deadline: Some(now() + time), ..rows(1, LONG, 3.0) };
    let error = answer(&mut call(&scheduler, within(HOUR))).unwrap_err();
    assert!(matches!(&error, InferError::Overloaded { .. }), "{error}");
    assert_eq!(scheduler.waiting(), 1, "it takes no place");
    let _patient = pending(&scheduler, within(24 * HOUR));
}

#[test]
fn request_that_breaks_a_batch_breaks_its_own_answer_only() {
    let scheduler = scheduler(1, policy());
    let values = [1.0, f32::NAN, 3.0];
    let mut calls: Vec<Call> =
        values.iter().map(|value| pending(&scheduler, rows(1, LONG, *value))).collect();
    run_all(&scheduler);
    assert_eq!(runs(), [(3, LONG, true), (1, LONG, true), (1, LONG, true), (1, LONG, true)]);
    assert_eq!(value(&mut calls[0]), 1.0);
    assert!(matches!(answer(&mut calls[1]), Err(InferError::Invalid { .. })));
    assert_eq!(value(&mut calls[2]), 3.0);
}

#[test]
fn requests_of_an_inline_batch_that_fails_run_again_on_an_inference_thread() {
    let scheduler = scheduler(1, policy());
    let values = [1.0, f32::NAN, 3.0];
    let mut calls: Vec<Call> =
        values.iter().map(|value| pending(&scheduler, rows(1, SHORT, *value))).collect();
    assert!(poll(&mut calls[0]).is_pending());
    assert_eq!(runs(), [(3, SHORT, false)]);
    run_all(&scheduler);
    assert_eq!(runs(), [(1, SHORT, true); 3]);
    assert_eq!(value(&mut calls[0]), 1.0);
    assert!(matches!(answer(&mut calls[1]), Err(InferError::Invalid { .. })));
    assert_eq!((value(&mut calls[2]), rest(&scheduler)), (3.0, (1, 0)));
}

#[test]
fn filled_runs_answer_with_the_rows_of_their_requests() {
    let scheduler = scheduler_of(vec![Echo { rows_min: 8, ..Echo::default() }], policy());
    let mut calls: Vec<Call> =
        (1..=3).map(|number| pending(&scheduler, rows(number, SHORT, number as f32))).collect();
    for (number, call) in (1..).zip(&mut calls) {
        let output = answer(call).unwrap();
        assert_eq!(output.outputs[0].read().unwrap().shape, [number, SHORT as i64]);
    }
    let mut alone = pending(&scheduler, rows(2, SHORT, 5.0));
    let output = answer(&mut alone).unwrap();
    assert_eq!((output.outputs[0].read().unwrap().shape[0], output.run_rows), (2, Some(2)));
    let filled: Vec<usize> = runs().iter().map(|(rows, ..)| *rows).collect();
    assert_eq!(filled, [8, 8]);
    assert!(scheduler.has_batches());
}

#[test]
fn model_that_merges_rows_has_no_batches_any_more() {
    let scheduler = scheduler_of(vec![Echo { merges: true, ..Echo::default() }], policy());
    let mut calls: Vec<Call> = (0..2).map(|_| pending(&scheduler, rows(1, LONG, 5.0))).collect();
    run_all(&scheduler);
    calls.iter_mut().for_each(|call| assert_eq!(value(call), 5.0));
    assert_eq!(runs(), [(2, LONG, true), (1, LONG, true), (1, LONG, true)]);
    assert!(!scheduler.has_batches());
}

#[test]
fn runs_go_to_the_device_with_the_fewest() {
    let on = |device| Echo { device, ..Echo::default() };
    let mut idle = IdleSessions::new(vec![on(0), on(0), on(1), on(1)]);
    let taken = [idle.take().unwrap(), idle.take().unwrap()];
    assert_ne!(taken[0].device, taken[1].device);
    let third = idle.take().unwrap();
    let other = taken.iter().position(|session| session.device != third.device).unwrap();
    assert_eq!(idle.take().unwrap().device, taken[other].device);
    assert_eq!((idle.len(), idle.take().is_none()), (0, true));
}

#[test]
fn session_of_a_run_that_panics_is_returned() {
    let scheduler = scheduler(1, policy());
    let mut long = pending(&scheduler, rows(1, LONG, 1.0));
    meanwhile(|| panic!("on purpose"));
    assert!(run_next(&scheduler));
    let error = answer(&mut long).unwrap_err();
    assert!(error.to_string().contains("ended without an answer"), "{error}");
    assert_eq!(rest(&scheduler), (1, 0));
}

#[test]
fn shutdown_answers_queued_requests() {
    let scheduler = scheduler(2, policy());
    let mut calls: Vec<Call> =
        (0..20).map(|number| pending(&scheduler, rows(1, LONG + number % 3, number as f32))).collect();
    let executor = scheduler.executor;
    let gone = Arc::downgrade(&scheduler);
    // The repository has dropped the version; the server still waits for the calls.
    drop(scheduler);
    while executor.run_next() {}
    for (number, call) in calls.iter_mut().enumerate() {
        assert_eq!(value(call), number as f32);
    }
    drop(calls);
    assert_eq!(gone.strong_count(), 0);
    assert!(executor.close(Duration::ZERO), "nothing runs");
}

/// Calls arrive, are polled and dropped in random order: every remaining call gets its own value, and no session is
/// lost.
#[test]
fn no_request_is_lost_under_random_calls() {
    const SESSIONS: usize = 4;
    for seed in 0..200 {
        let mut rng = StdRng::seed_from_u64(seed);
        let on = |device| Echo { device, ..Echo::default() };
        let scheduler = scheduler_of([0, 0, 1, 1].map(on).into(), Policy { rows_max: 8, ..policy() });
        let mut calls: Vec<(Call, f32)> = Vec::new();
        for step in 0..300 {
            match rng.random_range(0..8u8) {
                0..3 if step < 200 => {
                    let (count, width) =
                        (rng.random_range(0..3), [SHORT, SHORT + 1, LONG][rng.random_range(0..3)]);
                    let number = step as f32;
                    let work = Work { client: client(step % 3), ..rows(count, width, number) };
                    calls.push((call(&scheduler, work), number));
                }
                3 if !calls.is_empty() => {
                    drop(calls.swap_remove(rng.random_range(0..calls.len())));
                }
                4 => _ = run_next(&scheduler),
                _ if !calls.is_empty() => {
                    let index = rng.random_range(0..calls.len());
                    let (call, number) = &mut calls[index];
                    if let Poll::Ready(output) = poll(call) {
                        let output = output.unwrap();
                        let Data::Fp32(values) = &output.outputs[0].read().unwrap().data else { panic!() };
                        assert!(values.iter().all(|value| value == number), "seed {seed}");
                        drop(calls.swap_remove(index));
                    }
                }
                _ => {}
            }
        }
        // Each call is polled until it is queued, and once more for its answer.
        for _ in 0..3 {
            calls.retain_mut(|(call, _)| poll(call).is_pending());
            run_all(&scheduler);
        }
        calls.retain_mut(|(call, _)| poll(call).is_pending());
        assert!(calls.is_empty(), "seed {seed}: {} calls have no answer", calls.len());
        assert_eq!(rest(&scheduler), (SESSIONS, 0), "seed {seed}");
        let state = scheduler.state.lock();
        assert!(!state.leading && state.dispatches == 0, "seed {seed}: {state:?}");
        runs();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_callers_get_their_own_answers() {
    let share = TaskLimits { threads_max: 2, own: 1, is_on_cpu: true };
    let scheduler = scheduler(2, Policy { share, ..policy() });
    let callers = (0..32).map(|caller| {
        let scheduler = Arc::clone(&scheduler);
        async move {
            for request in 0..100 {
                let number = (caller * 100 + request) as f32;
                let width = if request % 10 == 0 { LONG } else { SHORT };
                let output = scheduler.run(rows(1, width, number)).await.unwrap();
                let Data::Fp32(values) = &output.outputs[0].read().unwrap().data else { panic!() };
                assert!(values.len() == width && values.iter().all(|value| *value == number));
            }
        }
    });
    let callers: tokio::task::JoinSet<()> = callers.collect();
    callers.join_all().await;
    assert_eq!(rest(&scheduler), (2, 0));
}
