//! Tests with scripted connections.
use std::collections::VecDeque;
use std::future::{pending, poll_fn};
use std::sync::atomic::AtomicUsize;

use futures::task::{ArcWake, waker};
use tokio::sync::oneshot;

use super::*;

/// The work of a connection in one poll.
type Turn = Box<dyn FnMut(&Calls, &mut Context<'_>) + Send>;

/// A connection that runs the scripted polls and never ends.
fn connection(turns: Vec<Turn>) -> WithCalls<BoxFuture<'static, ()>> {
    let (calls, mut turns) = (Calls::default(), VecDeque::from(turns));
    let own = calls.clone();
    let connection = poll_fn(move |cx| {
        if let Some(mut turn) = turns.pop_front() {
            turn(&own, cx);
        }
        Poll::Pending
    });
    WithCalls::new(connection.boxed(), calls)
}

/// Counts calls that ran in the task of their connection and those that ran in tasks of their own.
#[derive(Debug, Default)]
struct Ran {
    in_connection: AtomicUsize,
    in_tasks: AtomicUsize,
}

impl Ran {
    fn counts(&self) -> (usize, usize) {
        (self.in_connection.load(Ordering::Relaxed), self.in_tasks.load(Ordering::Relaxed))
    }
}

/// A poll in which `calls` calls arrive.
fn arrive(calls: usize, ran: &Arc<Ran>) -> Turn {
    let ran = Arc::clone(ran);
    Box::new(move |own, _| {
        for _ in 0..calls {
            let ran = Arc::clone(&ran);
            own.execute(async move {
                // The main task of a test has no id.
                let count = if tokio::task::try_id().is_some() { &ran.in_tasks } else { &ran.in_connection };
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
    })
}

#[derive(Debug, Default)]
struct Woken(AtomicUsize);

impl ArcWake for Woken {
    fn wake_by_ref(woken: &Arc<Woken>) {
        woken.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Polls a connection as its runtime would. Returns how often its task was woken meanwhile.
fn poll(connection: &mut WithCalls<BoxFuture<'static, ()>>) -> usize {
    let woken = Arc::new(Woken::default());
    let polled = Pin::new(connection).poll(&mut Context::from_waker(&waker(Arc::clone(&woken))));
    assert!(polled.is_pending());
    woken.0.load(Ordering::Relaxed)
}

/// Polls a connection that has something to read.
fn read(connection: &mut WithCalls<BoxFuture<'static, ()>>) -> usize {
    connection.of_connection.0.is_woken.store(true, Ordering::SeqCst);
    poll(connection)
}

#[tokio::test]
async fn single_call_runs_in_the_turn_in_which_it_arrives() {
    let ran = Arc::new(Ran::default());
    let mut connection = connection((0..3).map(|_| arrive(1, &ran)).collect());
    for done in 1..=3 {
        assert_eq!(read(&mut connection), 0);
        assert_eq!(ran.counts(), (done, 0));
    }
}

#[tokio::test]
async fn concurrent_calls_run_in_tasks() {
    let ran = Arc::new(Ran::default());
    let mut connection = connection(vec![arrive(3, &ran), arrive(1, &ran)]);
    read(&mut connection);
    while ran.counts().1 < 2 {
        tokio::task::yield_now().await;
    }
    assert_eq!(ran.counts(), (1, 2));
    read(&mut connection);
    assert_eq!(ran.counts(), (2, 2));
}

#[tokio::test]
async fn waiting_call_is_polled_by_its_connection_when_woken() {
    let ran = Arc::new(Ran::default());
    let (answer, answered) = oneshot::channel::<()>();
    let (done, finished) = oneshot::channel();
    let mut call = Some(async move {
        answered.await.unwrap();
        done.send(tokio::task::try_id()).unwrap();
    });
    let waits: Turn = Box::new(move |own, _| own.execute(call.take().unwrap()));
    let mut connection = connection(vec![waits, arrive(1, &ran), arrive(1, &ran)]);
    read(&mut connection);
    // The second call does not wait for the first.
    read(&mut connection);
    while ran.counts().1 == 0 {
        tokio::task::yield_now().await;
    }
    let woken = Arc::new(Woken::default());
    let context_waker = waker(Arc::clone(&woken));
    assert!(Pin::new(&mut connection).poll(&mut Context::from_waker(&context_waker)).is_pending());
    answer.send(()).unwrap();
    assert_eq!(woken.0.load(Ordering::Relaxed), 1, "the answer wakes the task");
    poll(&mut connection);
    assert_eq!(finished.await.unwrap(), None, "it ran in the task of the connection");
    read(&mut connection);
    assert_eq!(ran.counts(), (1, 1), "the next call runs in the connection again");
}

#[tokio::test]
async fn wake_ups_within_a_turn_schedule_nothing() {
    let ran = Arc::new(Ran::default());
    let wakes: Turn = Box::new(|own, cx| {
        cx.waker().wake_by_ref();
        let connection = cx.waker().clone();
        own.execute(async move { connection.wake() });
    });
    let mut connection = connection(vec![wakes, arrive(1, &ran)]);
    assert_eq!(read(&mut connection), 0);
    assert_eq!(ran.counts(), (1, 0));
}

#[tokio::test]
async fn connection_that_always_wakes_itself_lets_other_tasks_run() {
    let wakes = || -> Turn { Box::new(|_, cx| cx.waker().wake_by_ref()) };
    let mut connection = connection((0..ROUNDS_MAX).map(|_| wakes()).collect());
    assert_eq!(read(&mut connection), 1);
    assert_eq!(poll(&mut connection), 0, "it has done the last turn");
}

#[tokio::test]
async fn wake_up_from_another_thread_within_a_turn_is_not_lost() {
    let ran = Arc::new(Ran::default());
    let during: Turn = Box::new(|_, cx| {
        let waker = cx.waker().clone();
        std::thread::spawn(move || waker.wake()).join().unwrap();
    });
    let mut connection = connection(vec![during, arrive(1, &ran)]);
    assert_eq!(read(&mut connection), 0);
    assert_eq!(ran.counts(), (1, 0), "the next turn followed at once");
}

#[tokio::test]
async fn call_that_panics_ends_alone() {
    let ran = Arc::new(Ran::default());
    let panics: Turn = Box::new(|own, _| own.execute(async { panic!("on purpose") }));
    let mut connection = connection(vec![panics, arrive(1, &ran)]);
    read(&mut connection);
    read(&mut connection);
    assert_eq!(ran.counts(), (1, 0));
}

#[tokio::test]
async fn closed_connection_drops_its_call() {
    let (held, dropped) = oneshot::channel::<()>();
    let mut held = Some(held);
    let waits: Turn = Box::new(move |own, _| {
        let held = held.take().unwrap();
        own.execute(async move {
            let _held = held;
            pending::<()>().await;
        });
    });
    let mut connection = connection(vec![waits]);
    read(&mut connection);
    drop(connection);
    assert!(dropped.await.is_err());
}
