//! Processes that run out of descriptors.

use nix::errno::Errno;

use super::*;

#[tokio::test]
async fn a_server_keeps_no_more_files_than_its_process_may_have() {
    let ends = Ends::new();
    let descriptors = Descriptors { files: Budget::new(2), ..Descriptors::new(DESCRIPTORS) };
    let (one, other) = (ends.spending(&descriptors), ends.end());
    let decoded = AtomicU32::new(0);
    for group in 0..8 {
        assert_eq!(read(&one, group, &decoded).await, batch(group));
        assert!((1..=2).contains(&descriptors.files.held()));
    }
    // The last two are kept.
    for group in 6..8 {
        assert_eq!(read(&other, group, &decoded).await, batch(group));
    }
    assert_eq!(decoded.load(Ordering::SeqCst), 8);
    one.pause_serving().await;
    assert_eq!(descriptors.files.held(), 0);
}

#[test]
fn servers_of_a_process_share_its_files() {
    let descriptors = Descriptors { files: Budget::new(1), ..Descriptors::new(DESCRIPTORS) };
    let shelf = || Shelf::new(1 << 20, 8, LIMITS, Key::new(&[1; 32]), descriptors.clone());
    let file = || memory::encode(&rows(0, 10)).unwrap();
    let (one, other) = (shelf(), shelf());
    let Answer::Decode(early) = other.ask(3, false) else { panic!("there is a file to spare") };
    let Answer::Decode(claim) = one.ask(1, false) else { panic!("there is a file to spare") };
    assert!(claim.fulfil(file(), 1));
    assert!(!early.fulfil(file(), 1), "the other server has the only file");
    assert!(matches!(other.ask(3, false), Answer::Alone));
    assert_eq!((one.bytes(), other.bytes(), descriptors.files.held()), (1, 0, 1));
    // A server evicts its own.
    let Answer::Decode(claim) = one.ask(2, false) else { panic!("its own file may go") };
    assert!(claim.fulfil(file(), 1));
    assert!(matches!(one.ask(2, false), Answer::Hit(_)));
    assert_eq!((one.bytes(), descriptors.files.held()), (1, 1));
}

#[test]
fn the_lack_of_descriptors_drops_the_files_of_a_server() {
    let descriptors = Descriptors::new(DESCRIPTORS);
    let shelf = Shelf::new(1 << 20, 8, LIMITS, Key::new(&[1; 32]), descriptors.clone());
    for errno in [Errno::EMFILE, Errno::ENFILE] {
        let Answer::Decode(claim) = shelf.ask(1, false) else { panic!("it is free") };
        assert!(claim.fulfil(memory::encode(&rows(0, 10)).unwrap(), 1));
        let Answer::Decode(_open) = shelf.ask(2, false) else { panic!("it is free") };
        shelf.relieve(&Errno::EPIPE.into());
        assert_eq!((shelf.bytes(), descriptors.files.held()), (1, 1));
        shelf.relieve(&errno.into());
        assert_eq!((shelf.bytes(), descriptors.files.held()), (0, 0));
        assert!(matches!(shelf.ask(2, false), Answer::Wait(_)), "claims stay");
    }
}

#[tokio::test]
async fn a_server_without_a_spare_connection_says_so_at_once() {
    let ends = Ends::new();
    // A connection of its own takes two.
    let descriptors = Descriptors { connections: Budget::new(2), ..Descriptors::new(DESCRIPTORS) };
    let (one, other) = (ends.spending(&descriptors), ends.end());
    let decoded = AtomicU32::new(0);
    read(&one, 0, &decoded).await;
    // The server gives the connection of the first question back when it has seen its end.
    let is_free = async {
        while descriptors.connections.held() > 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, is_free).await.expect("the connection has ended");
    let spare = descriptors.connections.hold().unwrap();
    let last = descriptors.connections.hold().unwrap();
    assert_eq!(read(&other, 0, &decoded).await, batch(0));
    assert_eq!(read(&one, 0, &decoded).await, batch(0));
    assert_eq!(decoded.load(Ordering::SeqCst), 3);
    // That was no error.
    assert!(other.may_ask(&wanted(1)) && one.may_ask(&wanted(1)));
    drop((spare, last));
    assert_eq!(read(&other, 0, &decoded).await, batch(0));
    assert_eq!(decoded.load(Ordering::SeqCst), 3);
}
