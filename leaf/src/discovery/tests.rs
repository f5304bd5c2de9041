//! Lookups at a name server of the test, which also answers wrongly.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread;

use super::message::SERVERS_MAX;
use super::*;

const NAME: &str = "dnssrv+_coordinator._tcp.train.example";

/// Flags of answers: one without errors, and a cut off one.
const GOOD: u16 = 0x8180;
const CUT_OFF: u16 = 0x8380;

/// A name server on a thread, which answers each question with the datagrams of `answer`. It ends with the test.
fn name_server(answer: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + 'static) -> NameServers {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let names = NameServers::of(&[socket.local_addr().unwrap()]);
    thread::spawn(move || {
        let mut buffer = [0; 512];
        while let Ok((length, peer)) = socket.recv_from(&mut buffer) {
            for message in answer(&buffer[..length]) {
                socket.send_to(&message, peer).unwrap();
            }
        }
    });
    names
}

/// A record: priority, weight, port, target.
type Record = (u16, u16, u16, &'static str);

/// A name in labels.
fn labels(name: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    for label in name.split('.').filter(|label| !label.is_empty()) {
        bytes.push(label.len() as u8);
        bytes.extend(label.as_bytes());
    }
    bytes.push(0);
    bytes
}

/// A record of a type with the question's name as its owner.
fn record(kind: u16, data: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0xc0, 12];
    bytes.extend(kind.to_be_bytes());
    bytes.extend([0, 1, 0, 0, 0, 1]);
    bytes.extend((data.len() as u16).to_be_bytes());
    bytes.extend(data);
    bytes
}

fn srv((priority, weight, port, target): &Record) -> Vec<u8> {
    let mut data = [priority, weight, port].map(|number| number.to_be_bytes()).concat();
    data.extend(labels(target));
    record(33, &data)
}

/// An answer to a question, of records as bytes.
fn message(question: &[u8], flags: u16, records: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = question.to_vec();
    bytes[2..4].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&(records.len() as u16).to_be_bytes());
    bytes.extend(records.concat());
    bytes
}

fn answer(question: &[u8], records: &[Record]) -> Vec<u8> {
    message(question, GOOD, &records.iter().map(srv).collect::<Vec<_>>())
}

fn plain(records: &'static [Record]) -> NameServers {
    name_server(move |question| vec![answer(question, records)])
}

#[test]
fn addresses_without_srv_records_are_their_own_servers() {
    assert_eq!(servers("a.example:7100").unwrap(), ["a.example:7100"]);
    assert_eq!(servers_of_list("a:1, b:2").unwrap(), "a:1, b:2");
    let long = format!("{SCHEME}{}", "a.".repeat(200));
    for malformed in ["dnssrv+", "dnssrv+a b", "a:1", "dnssrv+..", "dnssrv+a..b", "dnssrv+@._tcp", &long] {
        let found = servers_at(malformed, &NameServers::of(&[]));
        assert!(matches!(found, Err(Error::Malformed { .. })), "{malformed}: {found:?}");
    }
}

#[test]
fn the_form_of_an_address_is_checked_without_a_lookup() {
    for good in ["a.example:1", "[::1]:7100", NAME, "dnssrv+_a._tcp.x."] {
        assert!(check(good).is_ok(), "{good}");
    }
    for bad in ["", "a.example", ":1", "a:0", "a:99999", "dnssrv+", "dnssrv+a b", "dnssrv+."] {
        assert!(check(bad).is_err(), "{bad}");
    }
}

#[test]
fn servers_come_by_priority_and_a_changed_record_is_seen_at_the_next_lookup() {
    let names = plain(&[(2, 0, 7102, "c.example"), (0, 0, 7100, "a.example"), (1, 9, 7101, "b.example")]);
    assert_eq!(servers_at(NAME, &names).unwrap(), ["a.example:7100", "b.example:7101", "c.example:7102"]);
    let count = AtomicU16::new(1);
    let names = name_server(move |question| {
        let port = count.fetch_add(1, Ordering::Relaxed);
        vec![answer(question, &[(0, 0, port, "a.example")])]
    });
    assert_eq!(servers_at(NAME, &names).unwrap(), ["a.example:1"]);
    assert_eq!(servers_at(NAME, &names).unwrap(), ["a.example:2"]);
}

#[test]
fn weights_decide_how_often_a_server_is_first() {
    let records = || {
        [("light", 1), ("heavy", 9), ("zero", 0)]
            .map(|(host, weight)| Server { priority: 5, weight, port: 1, host: host.to_owned() })
            .to_vec()
    };
    let mut first = std::collections::BTreeMap::<String, u32>::new();
    for drawn in 0..11 {
        let found = ordered(records(), |end| drawn % end);
        assert_eq!(found.len(), 3);
        *first.entry(found[0].host.clone()).or_default() += 1;
    }
    assert_eq!((first["zero"], first["light"], first["heavy"]), (1, 1, 9));
}

#[test]
fn wrong_answers_are_ignored_until_the_right_one_comes() {
    let names = name_server(|question| {
        let wrong = answer(question, &[(0, 0, 7100, "wrong.example")]);
        let with = |at: usize, bytes: &[u8]| {
            let mut changed = wrong.clone();
            changed[at..at + bytes.len()].copy_from_slice(bytes);
            changed
        };
        vec![
            // Another id, another question, a question instead of an answer, another operation.
            with(0, &[question[0] ^ 1]),
            with(13, b"_other"),
            with(2, &[0x01]),
            with(2, &[0x91]),
            question.to_vec(),
            Vec::new(),
            vec![0xff; 3_000],
            // A name that points at itself, one that points forward, and a label of a reserved kind.
            with(12, &[0xc0, 12]),
            with(12, &[0xc0, 40]),
            with(12, &[0x80]),
            // More records than there are, and a record that is longer than the message.
            with(6, &[0xff, 0xff]),
            wrong[..wrong.len() - 1].to_vec(),
            answer(question, &[(0, 0, 7100, "right.example")]),
        ]
    });
    assert_eq!(servers_at(NAME, &names).unwrap(), ["right.example:7100"]);
}

#[test]
fn every_beginning_and_every_changed_byte_of_an_answer_is_read_without_a_panic() {
    let question = Question::new("_a._tcp.example").unwrap();
    let records: &[Record] = &[(0, 1, 2, "b.example"), (3, 4, 5, "c.example")];
    let right = answer(&question.message(7), records);
    assert!(matches!(question.reply(7, &right), Some(Reply::Records(found)) if found.len() == 2));
    for length in 0..right.len() {
        assert_eq!(question.reply(7, &right[..length]), None, "{length}");
    }
    for at in 0..right.len() {
        for byte in 0..=u8::MAX {
            let mut changed = right.clone();
            changed[at] = byte;
            question.reply(7, &changed);
        }
    }
}

#[test]
fn targets_that_are_no_hosts_are_left_out() {
    let names = plain(&[(0, 0, 1, ""), (0, 0, 0, "a.example"), (0, 0, 1, "a/b"), (1, 0, 1, "good.example")]);
    assert_eq!(servers_at(NAME, &names).unwrap(), ["good.example:1"]);
    let none = plain(&[(0, 0, 1, "")]);
    assert!(matches!(servers_at(NAME, &none), Err(Error::Absent { .. })));
    let unknown = name_server(|question| vec![message(question, GOOD | 3, &[])]);
    assert!(matches!(servers_at(NAME, &unknown), Err(Error::Absent { .. })));
}

#[test]
fn records_behind_an_alias_and_with_compressed_targets_are_found() {
    let names = name_server(|question| {
        let alias = record(5, &labels("other.example"));
        // The target is `a` before the name in question.
        let target = [&[0, 0, 0, 0, 0x1b, 0xbc, 1, b'a'][..], &[0xc0, 12]].concat();
        vec![message(question, GOOD, &[alias, record(33, &target)])]
    });
    assert_eq!(servers_at(NAME, &names).unwrap(), ["a._coordinator._tcp.train.example:7100"]);
}

#[test]
fn a_cut_off_answer_is_asked_for_over_tcp() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let socket = UdpSocket::bind(address).unwrap();
    let datagrams = thread::spawn(move || {
        let mut buffer = [0; 512];
        let (length, peer) = socket.recv_from(&mut buffer).unwrap();
        socket.send_to(&message(&buffer[..length], CUT_OFF, &[]), peer).unwrap();
    });
    let streams = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut length = [0; 2];
        stream.read_exact(&mut length).unwrap();
        let mut question = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut question).unwrap();
        // Too many for a datagram, and more than are tried.
        let message = answer(&question, &[(0, 0, 7100, "a-server-with-a-long-name.example"); 600]);
        stream.write_all(&u16::try_from(message.len()).unwrap().to_be_bytes()).unwrap();
        stream.write_all(&message).unwrap();
    });
    let found = servers_at(NAME, &NameServers::of(&[address])).unwrap();
    assert_eq!(found.len(), SERVERS_MAX);
    datagrams.join().unwrap();
    streams.join().unwrap();
}

#[test]
fn the_next_name_server_is_asked_when_one_fails() {
    let failing = name_server(|question| vec![message(question, GOOD | 2, &[])]);
    let error = servers_at(NAME, &failing).unwrap_err().to_string();
    assert!(error.contains("that it failed") && error.contains("_coordinator._tcp"), "{error}");
    let good = plain(&[(0, 0, 7100, "a.example")]);
    let both = NameServers::of(&[failing.servers[0], good.servers[0]]);
    assert_eq!(servers_at(NAME, &both).unwrap(), ["a.example:7100"]);
}

#[test]
fn a_name_that_is_refused_or_fails_is_looked_up_in_the_search_domains() {
    for (flags, code) in [(0x8182, "that it failed"), (0x8185, "that it refuses")] {
        let names = name_server(move |question| {
            let is_in_domain = question.windows(4).any(|label| label == b"\x03lan");
            vec![if is_in_domain {
                answer(question, &[(1, 1, 7100, "a.example")])
            } else {
                message(question, flags, &[])
            }]
        });
        let with = |domains: &[&str]| NameServers {
            search: domains.iter().map(|domain| (*domain).to_owned()).collect(),
            ..names.clone()
        };
        assert_eq!(servers_at(NAME, &with(&["other", "lan"])).unwrap(), ["a.example:7100"]);
        // The failure is told when no domain has the name.
        let error = servers_at(NAME, &with(&["other"])).unwrap_err().to_string();
        assert!(error.contains(code), "{error}");
    }
}

#[test]
fn a_silent_name_server_is_given_up_in_time() {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let names = NameServers::of(&[socket.local_addr().unwrap()]);
    let question = Question::new("_a._tcp.example").unwrap();
    let began = Instant::now();
    let error = ask(names.servers[0], &question, Duration::from_millis(50)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(began.elapsed() < LOOKUP_MAX);
    let error = lookup(&question, &names.servers, Instant::now()).unwrap_err();
    assert!(matches!(error, Error::NoAnswer { .. }), "{error}");
}

#[test]
fn the_systems_file_names_servers_and_search_domains() {
    let text = "# text\nnameserver 10.0.0.10\nnameserver ::1\nnameserver nonsense\nsearch a.svc.cluster.local b.\n\
                options ndots:5\n";
    let names = NameServers::parse(text);
    assert_eq!(names.servers, ["10.0.0.10:53".parse().unwrap(), "[::1]:53".parse().unwrap()]);
    assert_eq!(names.candidates("_a._tcp.x"), ["_a._tcp.x", "_a._tcp.x.a.svc.cluster.local", "_a._tcp.x.b"]);
    assert_eq!(names.candidates("_a._tcp.x."), ["_a._tcp.x"]);
    assert_eq!(NameServers::parse("").servers, ["127.0.0.1:53".parse().unwrap()]);
}
