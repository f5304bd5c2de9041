//! Processes that wait, fail, die or say nonsense, on either side.

use std::future::Future;
use std::os::fd::OwnedFd;
use std::pin::pin;

use futures::poll;

use super::*;
use crate::feed::node::line::Message;

/// A connection after the proofs.
async fn introduced(node: &NodeCache) -> Line {
    let line = node.connect().await.unwrap().unwrap();
    assert!(proof::introduce(&line, &node.key, DEADLINE).await.unwrap());
    line
}

/// A connection of a process that asks for a row group.
async fn asking(node: &NodeCache, group: u32) -> (Line, Message) {
    let line = introduced(node).await;
    line.send(DEADLINE, Kind::Get, group, None).await.unwrap();
    let reply = within(DEADLINE, line.receive()).await.unwrap();
    (line, reply)
}

/// The next connection of a server that the test plays, with its question.
async fn asked(listener: &Listener, node: &NodeCache) -> (Line, Message) {
    let line = within(DEADLINE, listener.accept()).await.unwrap();
    proof::admit(&line, &node.key, DEADLINE).await.unwrap();
    let question = within(DEADLINE, line.receive()).await.unwrap();
    (line, question)
}

pub(super) async fn say(line: &Line, kind: Kind, group: u32, file: Option<&OwnedFd>) {
    line.send(DEADLINE, kind, group, file).await.unwrap();
}

#[tokio::test]
async fn a_waiting_process_holds_no_permit() {
    let node = Ends::new().end();
    let listener = Listener::bind(&node.address).unwrap();
    let (permits, decoded) = (Semaphore::new(1), AtomicU32::new(0));
    let serving = async {
        let (line, question) = asked(&listener, &node).await;
        assert_eq!(question.kind, Kind::Get);
        assert_eq!(permits.available_permits(), 0, "it asks with its permit");
        say(&line, Kind::Wait, 3, None).await;
        // It gives its permit back, or this waits for ever.
        let taken = timeout(DEADLINE, permits.acquire()).await.expect("it waits with its permit").unwrap();
        say(&line, Kind::Done, 3, None).await;
        drop(taken);
        let (line, question) = asked(&listener, &node).await;
        assert_eq!(question.kind, Kind::GetAgain);
        assert_eq!(permits.available_permits(), 0, "it asks again with its permit");
        say(&line, Kind::Alone, 3, None).await;
    };
    let (read, ()) = tokio::join!(read_with(&node, 3, &permits, &decoded), serving);
    assert_eq!(read, batch(3));
    assert_eq!(permits.available_permits(), 1);
}

#[tokio::test]
async fn a_process_without_a_permit_does_not_ask() {
    let node = Ends::new().end();
    let listener = Listener::bind(&node.address).unwrap();
    let (permits, decoded) = (Semaphore::new(0), AtomicU32::new(0));
    let mut reading = pin!(read_with(&node, 3, &permits, &decoded));
    assert!(poll!(reading.as_mut()).is_pending());
    // Connections come in their order: the first one is not that of the reader.
    let line = Line::connect(&node.address).await.unwrap();
    let asking = async {
        assert!(proof::introduce(&line, &node.key, DEADLINE).await.unwrap());
        say(&line, Kind::Get, 77, None).await;
    };
    let ((), (_served, question)) = tokio::join!(asking, asked(&listener, &node));
    assert_eq!(question.group, 77);
    drop(listener);
    permits.add_permits(1);
    assert_eq!(reading.await, batch(3));
}

#[tokio::test]
async fn processes_with_one_permit_each_do_not_block_each_other() {
    let ends = Ends::new();
    let (one, other) = (ends.end(), ends.end());
    let permits = [Semaphore::new(1), Semaphore::new(1)];
    let decoded = AtomicU32::new(0);
    let up = (0..16).map(|group| read_with(&one, group, &permits[0], &decoded));
    let down = (0..16).rev().map(|group| read_with(&other, group, &permits[1], &decoded));
    let (up, down) = tokio::join!(futures::future::join_all(up), futures::future::join_all(down));
    for (group, (a, b)) in up.iter().zip(down.iter().rev()).enumerate() {
        assert_eq!(a, &batch(group as u32));
        assert_eq!(b, &batch(group as u32));
    }
    assert_eq!(decoded.load(Ordering::SeqCst), 16);
}

#[tokio::test]
async fn a_claim_whose_holder_dies_passes_to_the_next_process() {
    let ends = Ends::new();
    let (one, other) = (ends.end(), ends.end());
    let decoded = AtomicU32::new(0);
    read(&one, 0, &decoded).await;
    let (dying, reply) = asking(&one, 1).await;
    assert_eq!(reply.kind, Kind::Decode);
    let (waiting, reply) = asking(&one, 1).await;
    assert_eq!(reply.kind, Kind::Wait);
    drop(dying);
    let reply = within(DEADLINE, waiting.receive()).await.unwrap();
    assert_eq!(reply.kind, Kind::Done, "before the time of the claim is over");
    assert_eq!(read(&other, 1, &decoded).await, batch(1));
    assert_eq!(read(&one, 1, &decoded).await, batch(1));
    assert_eq!(decoded.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_holder_that_decodes_too_long_loses_its_claim() {
    let ends = Ends { limits: Limits { claim: Duration::from_millis(50), ..PATIENT }, ..Ends::new() };
    let (one, other) = (ends.end(), ends.end());
    let decoded = AtomicU32::new(0);
    read(&one, 0, &decoded).await;
    let (_hung, reply) = asking(&one, 1).await;
    assert_eq!(reply.kind, Kind::Decode);
    assert_eq!(read(&other, 1, &decoded).await, batch(1));
    assert_eq!(decoded.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn after_a_failed_put_a_process_does_not_ask_for_a_while() {
    let node = Ends::new().end();
    let listener = Listener::bind(&node.address).unwrap();
    let decoded = AtomicU32::new(0);
    let refusing = async {
        let (line, _) = asked(&listener, &node).await;
        say(&line, Kind::Decode, 3, None).await;
        let put = within(DEADLINE, line.receive()).await.unwrap();
        assert_eq!(put.kind, Kind::Put);
        assert!(put.file.is_some());
        // The server refuses the file, or dies.
    };
    let (read_first, ()) = tokio::join!(read(&node, 3, &decoded), refusing);
    assert_eq!(read_first, batch(3));
    assert!(!node.may_ask(&wanted(4)));
    // Nothing answers: a question would take longer than the test waits.
    assert_eq!(read(&node, 4, &decoded).await, batch(4));
    assert_eq!(decoded.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn a_server_refuses_a_file_that_it_could_not_hand_on() {
    let node = Ends::new().end();
    let decoded = AtomicU32::new(0);
    read(&node, 0, &decoded).await;
    let small = memory::encode(&rows(1, 10)).unwrap();
    let open: OwnedFd = tempfile::tempfile().unwrap().into();
    for file in [small, open] {
        let (line, reply) = asking(&node, 1).await;
        assert_eq!(reply.kind, Kind::Decode);
        say(&line, Kind::Put, 1, Some(&file)).await;
        assert!(within(DEADLINE, line.receive()).await.is_err());
    }
    assert_eq!(read(&node, 1, &decoded).await, batch(1));
}

#[tokio::test]
async fn a_file_with_other_rows_or_columns_is_not_used() {
    let other_columns = batch(3).project(&[0]).unwrap();
    let other_rows = rows(3, ROWS + 1);
    for sent in [other_columns, other_rows] {
        let ends = Ends::new();
        // The file is large enough in any case.
        let sent = if sent.num_columns() == 1 { wide(&sent) } else { sent };
        let node = ends.end();
        let listener = Listener::bind(&node.address).unwrap();
        let decoded = AtomicU32::new(0);
        let lying = async {
            let (line, _) = asked(&listener, &node).await;
            say(&line, Kind::Hit, 3, Some(&memory::encode(&sent).unwrap())).await;
        };
        let (found, ()) = tokio::join!(read(&node, 3, &decoded), lying);
        assert_eq!(found, batch(3));
        assert_eq!(decoded.load(Ordering::SeqCst), 1);
        assert!(!node.may_ask(&wanted(4)));
    }
}

/// The same column three times, under other names.
fn wide(batch: &RecordBatch) -> RecordBatch {
    let column = batch.column(0);
    RecordBatch::try_from_iter(["a", "b", "c"].map(|name| (name, Arc::clone(column)))).unwrap()
}

#[tokio::test]
async fn a_silent_server_delays_once_and_then_more_rarely() {
    let ends = Ends {
        limits: Limits { answer: Duration::from_millis(20), quiet: Duration::from_secs(600), ..PATIENT },
        ..Ends::new()
    };
    let node = ends.end();
    // As a suspended process, or a child that inherited the socket of a killed one.
    let _silent = Listener::bind(&node.address).unwrap();
    let decoded = AtomicU32::new(0);
    let mut times = Vec::new();
    for group in 0..3 {
        assert_eq!(read(&node, group, &decoded).await, batch(group));
        let mut quiet = node.quiet.lock();
        times.push(quiet.until.take().unwrap().saturating_duration_since(Instant::now()).as_secs());
    }
    for (found, expected) in times.iter().zip([600, 1_200, 2_400]) {
        assert!((expected - 60..=expected).contains(found), "{times:?}");
    }
    assert_eq!(decoded.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn a_socket_that_a_child_inherited_refuses_after_the_end_of_its_server() {
    let node = Ends::new().end();
    let listener = Listener::bind(&node.address).unwrap();
    let inherited = listener.inherited().unwrap();
    drop(listener);
    let error = Line::connect(&node.address).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    // The address stays taken for as long as the child lives, and nothing waits for it.
    let decoded = AtomicU32::new(0);
    assert_eq!(read(&node, 3, &decoded).await, batch(3));
    drop(inherited);
    assert!(Listener::bind(&node.address).is_ok());
}

#[tokio::test]
async fn a_peer_that_sends_nonsense_is_dropped() {
    let node = Ends::new().end();
    let decoded = AtomicU32::new(0);
    read(&node, 0, &decoded).await;
    for (kind, group) in [(Kind::Get, 64), (Kind::Put, 0), (Kind::Done, 0)] {
        let line = introduced(&node).await;
        say(&line, kind, group, None).await;
        assert!(within(DEADLINE, line.receive()).await.is_err(), "{kind:?} {group}");
    }
    assert_eq!(read(&node, 0, &decoded).await, batch(0));
    assert_eq!(decoded.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_read_that_is_dropped_ends_its_claim() {
    let ends = Ends::new();
    let (one, other) = (ends.end(), ends.end());
    let decoded = AtomicU32::new(0);
    read(&one, 0, &decoded).await;
    let permits = Semaphore::new(1);
    let begun = tokio::sync::Notify::new();
    let decode = async {
        begun.notify_one();
        std::future::pending::<crate::feed::Result<RecordBatch>>().await
    };
    let wanted = wanted(1);
    {
        let mut hanging = pin!(one.read(&wanted, &permits, decode));
        until(hanging.as_mut(), begun.notified()).await;
    }
    assert_eq!(permits.available_permits(), 1);
    assert_eq!(read(&other, 1, &decoded).await, batch(1));
}

/// Runs work that does not end until `event`.
async fn until(work: impl Future, event: impl Future<Output = ()>) {
    tokio::select! {
        _ = work => panic!("it has ended"),
        () = event => {}
    }
}

#[tokio::test]
async fn a_process_that_waits_takes_over_from_a_server_that_dies() {
    let node = Ends::new().end();
    let listener = Listener::bind(&node.address).unwrap();
    let decoded = AtomicU32::new(0);
    let dying = async {
        let (line, question) = asked(&listener, &node).await;
        assert_eq!(question.kind, Kind::Get);
        say(&line, Kind::Wait, 3, None).await;
        drop((line, listener));
    };
    let (found, ()) = tokio::join!(read(&node, 3, &decoded), dying);
    assert_eq!(found, batch(3));
    assert!(node.may_ask(&wanted(4)), "the end of a server is no error");
    assert!(node.shelf.bytes() > 0, "it serves the row group now");
    assert_eq!(decoded.load(Ordering::SeqCst), 1);
}

#[test]
fn questions_that_fail_together_count_as_one_error() {
    let mut quiet = Quiet::default();
    let shortest = Duration::from_secs(10);
    let began = Instant::now();
    assert_eq!(quiet.begin(began, shortest), Some(shortest));
    for _ in 0..16 {
        assert_eq!(quiet.begin(began, shortest), None);
    }
    // Its question began later.
    let later = quiet.noted.unwrap() + Duration::from_nanos(1);
    assert_eq!(quiet.begin(later, shortest), Some(shortest * 2));
    quiet.end();
    assert_eq!(quiet.begin(began, shortest), None, "from before the last error");
    let later = quiet.noted.unwrap() + Duration::from_nanos(1);
    assert_eq!(quiet.begin(later, shortest), Some(shortest));
}
