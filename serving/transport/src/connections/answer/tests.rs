//! Tests of answers in pieces, read as hyper reads them.
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};

use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;

use super::super::answer_progress::EndableCall;
use super::super::quota::Answers;
use super::*;

fn unbounded() -> Quota {
    Quota::new(usize::MAX, &Answers::new(usize::MAX)).0
}

fn content(bytes: usize) -> Bytes {
    (0..bytes).map(|index| index as u8).collect()
}

async fn answer(content: &Bytes, quota: &Quota) -> http::Response<Answer<Full<Bytes>>> {
    let response = std::future::ready(Ok(http::Response::new(Full::new(content.clone()))));
    Call::new(response, quota, false).await.unwrap()
}

#[tokio::test]
async fn answer_counts_until_its_pieces_are_dropped() {
    let (quota, _watch) = Quota::new(100, &Answers::new(usize::MAX));
    let content = content(3 * PIECE_BYTES + 7);
    let mut body = answer(&content, &quota).await.into_body();
    let both = |bytes| (bytes, bytes);
    assert_eq!(quota.unsent(), both(content.len()), "the only one may have any size");
    assert_eq!(answer(&content, &quota).await.status(), http::StatusCode::TOO_MANY_REQUESTS);
    let mut pieces = Vec::new();
    while let Some(frame) = body.frame().await {
        pieces.push(frame.unwrap().into_data().unwrap());
    }
    drop(body);
    assert_eq!((pieces.len(), pieces.concat()), (4, content.to_vec()));
    assert_eq!(quota.unsent(), both(content.len()));
    drop(pieces.pop());
    assert_eq!(quota.unsent(), both(3 * PIECE_BYTES));
    drop(pieces);
    assert_eq!(quota.unsent(), both(0));
}

/// A sender like hyper's: holds one piece, and asks for the next when the current one can be sent.
struct Sending {
    body: Answer<Full<Bytes>>,
    /// `None` after the last piece.
    piece: Option<Bytes>,
    can_go: Arc<AtomicBool>,
}

impl Sending {
    fn next(&mut self, cx: &mut Context<'_>) {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else { panic!("the body is there") };
        self.piece = frame.map(|frame| frame.unwrap().into_data().unwrap());
    }
}

impl Future for Sending {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        while self.piece.is_some() {
            if !self.can_go.swap(false, Ordering::SeqCst) {
                return Poll::Pending;
            }
            self.piece = None;
            self.next(cx);
        }
        Poll::Ready(())
    }
}

#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A call whose answer has begun and waits for its client, and the flag that lets one piece be sent.
fn call(bytes: usize, quota: &Quota) -> (Pin<Box<EndableCall<impl Future<Output = ()>>>>, Arc<AtomicBool>) {
    let can_go = Arc::new(AtomicBool::new(false));
    let (quota, content, goes) = (quota.clone(), content(bytes), can_go.clone());
    let call = async move {
        let body = answer(&content, &quota).await.into_body();
        let mut sending = Sending { body, piece: None, can_go: goes };
        sending.next(&mut Context::from_waker(Waker::noop()));
        sending.await;
    };
    (Box::pin(EndableCall::new(call)), can_go)
}

#[test]
fn call_with_a_stalled_answer_ends_while_others_are_read() {
    let quota = unbounded();
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut cx = Context::from_waker(&waker);
    let (mut stalled, stalled_goes) = call(10 * PIECE_BYTES, &quota);
    let (mut slow, slow_goes) = call(10 * PIECE_BYTES, &quota);
    let mut looked = quota.look();
    for _ in 0..3 {
        stalled_goes.store(true, Ordering::SeqCst);
        slow_goes.store(true, Ordering::SeqCst);
        assert!(stalled.as_mut().poll(&mut cx).is_pending() && slow.as_mut().poll(&mut cx).is_pending());
        looked = quota.end_period(looked).unwrap();
    }
    assert!(!woken.0.load(Ordering::SeqCst), "each has gone on in each period");
    // Half of a piece is its share of what the client takes in a period.
    for _ in 0..2 {
        assert!(!woken.0.load(Ordering::SeqCst), "the other one took all of its share");
        slow_goes.store(true, Ordering::SeqCst);
        assert!(slow.as_mut().poll(&mut cx).is_pending());
        looked = quota.end_period(looked).expect("the call ends, not the connection");
    }
    assert!(woken.0.load(Ordering::SeqCst), "the call is woken");
    assert!(stalled.as_mut().poll(&mut cx).is_ready() && slow.as_mut().poll(&mut cx).is_pending());
    let before = quota.unsent().0;
    drop(stalled);
    assert_eq!(before - quota.unsent().0, 7 * PIECE_BYTES, "what was not taken goes with the call");
    drop(slow);
    assert_eq!(quota.unsent(), (0, 0));
}

#[test]
fn connection_ends_for_an_answer_that_it_holds_after_the_call() {
    let quota = unbounded();
    let piece = Arc::new(Mutex::new(None));
    let mut call = {
        let (quota, piece) = (quota.clone(), piece.clone());
        Box::pin(EndableCall::new(async move {
            let mut body = answer(&content(20), &quota).await.into_body();
            let frame = body.frame().await.unwrap().unwrap();
            *piece.lock() = frame.into_data().ok();
        }))
    };
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready());
    drop(call);
    assert_eq!(quota.unsent(), (20, 20));
    let looked = quota.look();
    // Other answers are taken in each period.
    quota.took();
    let looked = quota.end_period(looked).expect("the period has not been whole");
    quota.took();
    assert_eq!(quota.end_period(looked).unwrap_err(), "did not read the rest of an answer");
    assert!(piece.lock().take().is_some());
    assert_eq!(quota.unsent(), (0, 0));
}
