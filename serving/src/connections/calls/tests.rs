//! Calls of a connection that is made up: in each turn it has those that it is given.

#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::future::{pending, poll_fn};

use futures::future::BoxFuture;
use futures::task::{ArcWake, waker};
use tokio::sync::oneshot;

use super::*;

/// What a connection does in one turn.
type Turn = Box<dyn FnMut(&Calls, &mut Context<'_>) + Send>;

/// A connection that does one thing after the other, and never ends. No call is too long for it.
fn connection(turns: Vec<Turn>) -> Attended<BoxFuture<'static, ()>> {
    connection_with(Calls::of(Duration::MAX), turns)
}

fn connection_with(calls: Calls, turns: Vec<Turn>) -> Attended<BoxFuture<'static, ()>> {
    let mut turns = VecDeque::from(turns);
    let own = calls.clone();
    calls.attend(Box::pin(poll_fn(move |cx| {
        if let Some(mut turn) = turns.pop_front() {
            turn(&own, cx);
        }
        Poll::Pending
    })))
}

/// A turn in which so many calls come, each of which notes where it ran.
fn come(calls: usize, ran: &Arc<Ran>) -> Turn {
    let ran = ran.clone();
    Box::new(move |own, _| {
        for _ in 0..calls {
            let ran = ran.clone();
            own.execute(async move {
                // The test's own task is none that was spawned.
                let count = if tokio::task::try_id().is_some() { &ran.tasks } else { &ran.at_once };
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
    })
}

/// How many calls ran as tasks, and how many where they came.
#[derive(Debug, Default)]
struct Ran {
    tasks: AtomicUsize,
    at_once: AtomicUsize,
}

impl Ran {
    fn counts(&self) -> (usize, usize) {
        (self.at_once.load(Ordering::Relaxed), self.tasks.load(Ordering::Relaxed))
    }
}

/// Counts how often a task is woken.
#[derive(Debug, Default)]
struct Woken(AtomicUsize);

impl ArcWake for Woken {
    fn wake_by_ref(woken: &Arc<Woken>) {
        woken.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// One turn of a connection, after those that it lets go first; how often its task was woken by it.
fn turn(connection: &mut Attended<BoxFuture<'static, ()>>) -> usize {
    let woken = poll(connection);
    if connection.behind.is_some() { poll(connection) } else { woken }
}

/// Polls a connection; how often its task was woken meanwhile.
fn poll(connection: &mut Attended<BoxFuture<'static, ()>>) -> usize {
    let woken = Arc::new(Woken::default());
    assert!(Pin::new(connection).poll(&mut Context::from_waker(&waker(woken.clone()))).is_pending());
    woken.0.load(Ordering::Relaxed)
}

/// Has all tasks run that can.
async fn settle(calls: &Calls) {
    while calls.0.tasks.load(Ordering::Relaxed) > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_call_that_comes_alone_is_answered_at_once() {
    let ran = Arc::new(Ran::default());
    let mut connection = connection((0..3).map(|_| come(1, &ran)).collect());
    for done in 1..=3 {
        turn(&mut connection);
        assert_eq!(ran.counts(), (done, 0));
    }
}

#[tokio::test]
async fn calls_that_come_together_are_tasks_until_one_comes_alone() {
    let ran = Arc::new(Ran::default());
    let turns = [3, 2, 0, 1, 1].map(|calls| come(calls, &ran));
    let mut connection = connection(turns.into());
    let calls = connection.calls.clone();
    let mut counts = Vec::new();
    for _ in 0..5 {
        turn(&mut connection);
        settle(&calls).await;
        counts.push(ran.counts());
    }
    // The first is not known to have company yet; the one after two is alone, which tells for the next.
    assert_eq!(counts, [(1, 2), (1, 4), (1, 4), (1, 5), (2, 5)]);
}

#[tokio::test]
async fn a_call_that_has_to_wait_goes_on_as_a_task_and_those_after_it_are_tasks_meanwhile() {
    let ran = Arc::new(Ran::default());
    let (answer, answered) = oneshot::channel::<()>();
    let (said, heard) = oneshot::channel();
    let mut call = Some(async move {
        answered.await.unwrap();
        said.send(()).unwrap();
    });
    let waits: Turn = Box::new(move |own, _| own.execute(call.take().unwrap()));
    let mut connection = connection(vec![waits, come(1, &ran), come(1, &ran)]);
    turn(&mut connection);
    turn(&mut connection);
    answer.send(()).unwrap();
    heard.await.unwrap();
    settle(&connection.calls.clone()).await;
    turn(&mut connection);
    assert_eq!(ran.counts(), (1, 1));
}

// With one thread that has what a task wakes done before all else.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_connection_sends_answers_together_that_are_there_one_after_the_other() {
    const CALLS: usize = 9;
    let sent = Arc::new(AtomicUsize::new(0));
    let calls: Turn = Box::new(|own, cx| {
        for _ in 0..CALLS {
            let connection = cx.waker().clone();
            own.execute(async move { connection.wake() });
        }
    });
    let mut turns = vec![calls];
    turns.extend((0..CALLS).map(|_| -> Turn {
        let sent = sent.clone();
        Box::new(move |_, _| _ = sent.fetch_add(1, Ordering::Relaxed))
    }));
    let connection = connection(turns);
    let calls = connection.calls.clone();
    let attending = tokio::spawn(connection);
    while calls.0.ended.load(Ordering::Relaxed) < CALLS - 1 {
        tokio::task::yield_now().await;
    }
    attending.abort();
    assert!(attending.await.unwrap_err().is_cancelled());
    assert!(sent.load(Ordering::Relaxed) <= 1, "{sent:?}");
}

#[tokio::test]
async fn a_connection_waits_for_no_answer_where_none_follows() {
    let ran = Arc::new(Ran::default());
    let wait: Turn = Box::new(|own, _| own.execute(pending()));
    let mut connection = connection(std::iter::once(wait).chain((0..9).map(|_| come(0, &ran))).collect());
    // It wakes itself where it lets others go first.
    let woken: Vec<usize> = (0..12).map(|_| poll(&mut connection)).collect();
    assert_eq!(woken, [0, 1, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0]);
}

#[tokio::test]
async fn calls_that_take_long_are_tried_less_and_less() {
    let ran = Arc::new(Ran::default());
    let calls = Calls::of(Duration::ZERO);
    let mut connection = connection_with(calls.clone(), (0..1000).map(|_| come(1, &ran)).collect());
    let mut tried = Vec::new();
    for number in 0..300 {
        let before = ran.counts().0;
        turn(&mut connection);
        settle(&calls).await;
        if ran.counts().0 > before {
            tried.push(number);
        }
    }
    assert_eq!(tried, [0, 1, 3, 6, 11, 20, 37, 70, 135, 200, 265]);
}

#[tokio::test]
async fn a_call_that_panics_is_the_end_of_itself_alone() {
    let ran = Arc::new(Ran::default());
    let panics: Turn = Box::new(|own, _| own.execute(async { panic!("on purpose") }));
    let mut connection = connection(vec![panics, come(1, &ran)]);
    turn(&mut connection);
    turn(&mut connection);
    assert_eq!(ran.counts(), (1, 0));
}

#[tokio::test]
async fn a_connection_that_wakes_itself_goes_on_in_the_same_turn() {
    let ran = Arc::new(Ran::default());
    let wakes: Turn = Box::new(|_, cx| cx.waker().wake_by_ref());
    let mut connection = connection(vec![wakes, come(1, &ran)]);
    assert_eq!(turn(&mut connection), 0, "nobody else has to know");
    assert_eq!(ran.counts(), (1, 0));
}

/// It goes on after the call anyway.
#[tokio::test]
async fn a_call_that_is_answered_where_it_came_wakes_its_connection_in_vain() {
    for (before, ran_after) in [(false, 0), (true, 1)] {
        let ran = Arc::new(Ran::default());
        let wakes: Turn = Box::new(move |own, cx| {
            if before {
                cx.waker().wake_by_ref();
            }
            let connection = cx.waker().clone();
            own.execute(async move { connection.wake() });
        });
        let mut connection = connection(vec![wakes, come(1, &ran)]);
        assert_eq!(turn(&mut connection), 0);
        assert_eq!(ran.counts(), (ran_after, 0), "woken before: {before}");
    }
}

#[tokio::test]
async fn a_connection_that_wakes_itself_again_and_again_lets_others_have_their_turn() {
    let wakes = || -> Turn { Box::new(|_, cx| cx.waker().wake_by_ref()) };
    let mut connection = connection((0..=AGAIN_MAX + 1).map(|_| wakes()).collect());
    assert_eq!(turn(&mut connection), 1);
    assert_eq!(turn(&mut connection), 0, "it has done the last thing");
}

#[tokio::test]
async fn what_wakes_a_connection_from_elsewhere_wakes_its_task() {
    let during: Turn = Box::new(|_, cx| {
        let waker = cx.waker().clone();
        std::thread::spawn(move || waker.wake()).join().unwrap();
    });
    let mut connection = connection(vec![during]);
    assert_eq!(turn(&mut connection), 1);
    let woken = Arc::new(Woken::default());
    assert!(Pin::new(&mut connection).poll(&mut Context::from_waker(&waker(woken.clone()))).is_pending());
    connection.waker.wake_by_ref();
    assert_eq!(woken.0.load(Ordering::Relaxed), 1, "between its turns, from this thread");
}

#[tokio::test]
async fn a_connection_that_goes_leaves_its_calls() {
    let (said, heard) = oneshot::channel();
    let mut said = Some(said);
    let turns: Vec<Turn> = vec![
        Box::new(|own, _| {
            own.execute(pending());
            own.execute(async {});
        }),
        Box::new(move |own, _| {
            let said = said.take().unwrap();
            own.execute(async move { said.send(()).unwrap() });
        }),
    ];
    let mut connection = connection(turns);
    turn(&mut connection);
    turn(&mut connection);
    drop(connection);
    heard.await.unwrap();
}
