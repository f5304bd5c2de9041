//! Tests of the PostgreSQL engine against a real server.
use std::collections::BTreeSet;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::target::Target;
use super::{Options, Postgres};
use crate::error::Error;
use crate::meta::engine::{Durability, Engine, Order};
use crate::meta::faulty::{self, Fault, Faults, Place};
use crate::meta::metadata::Metadata;
use crate::meta::suite;
use crate::meta::tests::group::{agree_with_their_models, number};

#[path = "../../../tests/postgres/server.rs"]
pub(crate) mod server;

use server::Server;

fn options() -> Options {
    Options {
        wait: Duration::from_secs(60),
        connections_max: 4,
        cache_bytes_max: 1 << 20,
        lease: Duration::from_secs(60),
    }
}

fn open(server: &Server, schema: &str) -> Postgres {
    let target = Target::parse(&server.url(), schema, None).unwrap();
    Postgres::open(target, client(), &options()).unwrap()
}

#[test]
fn postgres_passes_the_suite() {
    let Some(server) = Server::shared() else { return };
    let schema = server.new_schema();
    suite::all(&|| Box::new(open(&server, &schema)));
    suite::listeners_hear_of_others(&|| Box::new(open(&server, &schema)));
    // Clients that have closed leave no rows.
    assert_eq!(server.sql(&format!("SELECT count(*) FROM {schema}.clients")), "0");
}

#[test]
fn a_flush_that_fails_does_not_say_that_nothing_was_committed() {
    let place = || "a server".to_owned();
    for error in [
        Error::Busy { place: place(), waited_ms: 7 },
        Error::NoSpace { place: place(), quota: false },
        Error::Failed { place: place(), cause: "lost".into() },
    ] {
        let told = super::of_the_flush(error);
        assert!(!told.is_definite() && !told.is_retryable(), "{told:?}");
    }
}

fn client() -> u64 {
    let mut bytes = [0; 8];
    let mut source = std::fs::File::open("/dev/urandom").unwrap();
    std::io::Read::read_exact(&mut source, &mut bytes).unwrap();
    (u64::from_be_bytes(bytes) >> 1).max(1)
}

/// Faults on every connection, below the engine's handling of errors.
fn faults(seed: u64, one_in: u32, kinds: &[Fault]) -> Arc<Faults> {
    Faults::new(seed, one_in, kinds, Place::Inside)
}

#[test]
fn postgres_passes_the_suite_on_bad_connections() {
    let Some(server) = Server::shared() else { return };
    let faults = faults(5, 40, &Fault::ALL);
    let schema = server.new_schema();
    suite::all(&|| faulty::with(&faults, || Box::new(open(&server, &schema))));
    suite::listeners_hear_of_others(&|| faulty::with(&faults, || Box::new(open(&server, &schema))));
    assert!(faults.drawn() > 3);
}

#[test]
fn postgres_agrees_with_the_models_of_groups_on_bad_connections() {
    let Some(server) = Server::shared() else { return };
    for one_in in [u32::MAX, 30] {
        let faults = faults(6, one_in, &Fault::ALL);
        let schema = server.new_schema();
        let metadata = || faulty::with(&faults, || Metadata::direct(Arc::new(open(&server, &schema))));
        agree_with_their_models([metadata(), metadata()], 20, &|| Box::new(open(&server, &schema)));
        assert_eq!(faults.drawn() > 0, one_in == 30);
    }
}

/// Commits are sent and then the server is unreachable. What the caller is told must agree with the data, and
/// the engine must recover without help.
#[test]
fn commits_of_unknown_outcome_are_applied_once_at_most() {
    let Some(server) = Server::shared() else { return };
    let schema = server.new_schema();
    let faults = faults(8, 4, &[Fault::Unknown]);
    let target = Target::parse(&server.url(), &schema, None).unwrap();
    let impatient = Options { wait: Duration::from_millis(150), ..options() };
    faults.set_away(false);
    let quiet = open(&server, &schema);
    let engine: Box<dyn Engine> = loop {
        // Opening meets the faults as well.
        faults.set_away(false);
        match faulty::with(&faults, || Postgres::open(target.clone(), client(), &impatient)) {
            Ok(engine) => break Box::new(engine),
            Err(error) => assert!(matches!(error, Error::Metadata { .. } | Error::Busy { .. }), "{error:?}"),
        }
    };
    let quiet: Box<dyn Engine> = Box::new(quiet);
    let (mut answered, mut unknown) = (BTreeSet::new(), 0);
    for round in 0..150u64 {
        faults.set_away(false);
        let key = [b"x".as_slice(), &round.to_be_bytes()].concat();
        let done = engine.transact(Durability::Relaxed, |txn| {
            let next = number(txn.get(b"x")?) + 1;
            txn.put(b"x", &next.to_be_bytes())?;
            txn.put(&key, b"")
        });
        match done {
            Ok(()) => drop(answered.insert(round)),
            Err(error) => {
                assert!(matches!(error, Error::Metadata { .. } | Error::Busy { .. }), "{error:?}");
                unknown += u32::from(format!("{error:?}").contains("it is not known whether"));
            }
        }
    }
    assert!(unknown > 0 && !answered.is_empty(), "{unknown} unknown, {} answered", answered.len());
    quiet.barrier().unwrap();
    let pairs = quiet.view(|txn| txn.scan(b"x", b"y", Order::Ascending, usize::MAX)).unwrap();
    let there: BTreeSet<u64> = pairs[1..].iter().map(|(key, _)| number(Some(key[1..].to_vec()))).collect();
    assert!(answered.is_subset(&there), "what was answered is lost");
    assert_eq!(number(Some(pairs[0].1.clone())), there.len() as u64, "applied twice");
    // The engine's cache agrees with the data.
    let seen = loop {
        faults.set_away(false);
        if let Ok(seen) = engine.view(|txn| txn.scan(b"x", b"y", Order::Ascending, usize::MAX)) {
            break seen;
        }
    };
    assert_eq!(seen, pairs);
}

/// A crash of the server loses commits that were acknowledged and not flushed. Their processes replay them,
/// also when they depend on each other.
#[test]
fn what_a_crashed_server_has_lost_is_committed_again() {
    // Commits that are not flushed stay in the server's memory.
    let Some(server) = Server::start(&["fsync=off", "wal_writer_delay=10000"]) else { return };
    let schema = server.new_schema();
    let engines =
        [open(&server, &schema), open(&server, &schema)].map(|engine| Box::new(engine) as Box<dyn Engine>);
    let mut expected = 0u64;
    for round in 0..3u64 {
        for step in 0..30u64 {
            let engine = &engines[(step % 2) as usize];
            engine
                .transact(Durability::Relaxed, |txn| {
                    let next = number(txn.get(b"x")?) + 1;
                    txn.put(b"x", &next.to_be_bytes())?;
                    txn.put(&[b"x".as_slice(), &next.to_be_bytes()].concat(), &round.to_be_bytes())
                })
                .unwrap();
            expected += 1;
        }
        server.kill();
        server.resume();
        for engine in &engines {
            engine.barrier().unwrap();
        }
        let seen = engines
            .each_ref()
            .map(|engine| engine.view(|txn| txn.scan(b"x", b"y", Order::Ascending, usize::MAX)).unwrap());
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[0].len() as u64, expected + 1);
        assert_eq!(number(Some(seen[0][0].1.clone())), expected);
        for engine in &engines {
            assert_eq!(number(engine.view(|txn| txn.get(b"x")).unwrap()), expected);
        }
    }
    engines[0].sync().unwrap();
}

/// A port that forwards connections to a server. While the flag is set, it accepts connections and stays silent.
fn proxy(server: u16) -> (u16, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let silent = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&silent);
    std::thread::spawn(move || {
        let mut held = Vec::new();
        for client in listener.incoming().map_while(Result::ok) {
            if flag.load(Ordering::Acquire) {
                held.push(client);
                continue;
            }
            let Ok(server) = TcpStream::connect(("127.0.0.1", server)) else { return };
            for (mut from, mut to) in
                [(client.try_clone().unwrap(), server.try_clone().unwrap()), (server, client)]
            {
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(std::net::Shutdown::Write);
                });
            }
        }
    });
    (port, silent)
}

#[test]
fn a_server_that_accepts_and_stays_silent_does_not_cost_the_lease() {
    let Some(server) = Server::start_on_tcp(&["fsync=off"]) else { return };
    let schema = server.new_schema();
    let (port, silent) = proxy(server.port());
    let url = format!("postgres://millrace@127.0.0.1:{port}/postgres?sslmode=disable");
    let options = Options { lease: Duration::from_secs(5), ..options() };
    let target = Target::parse(&url, &schema, None).unwrap();
    let engine = Postgres::open(target, client(), &options).unwrap();
    let listening = "FROM pg_stat_activity WHERE query LIKE 'LISTEN %'";
    assert_eq!(server.sql(&format!("SELECT count(*) {listening}")), "1");

    // The connection for notifications ends, and a new one gets no answer.
    silent.store(true, Ordering::Release);
    server.sql(&format!("SELECT pg_terminate_backend(pid) {listening}"));
    let alive = format!("SELECT count(*) FROM {schema}.clients WHERE seen > now() - interval '5 s'");
    let end = Instant::now() + options.lease * 3 / 2;
    while Instant::now() < end {
        assert_eq!(server.sql(&alive), "1");
        std::thread::sleep(Duration::from_millis(200));
    }

    silent.store(false, Ordering::Release);
    let deadline = Instant::now() + Duration::from_secs(60);
    while server.sql(&format!("SELECT count(*) {listening}")) != "1" {
        assert!(Instant::now() < deadline, "nothing listens for notifications");
        std::thread::sleep(Duration::from_millis(50));
    }
    drop(engine);
}
