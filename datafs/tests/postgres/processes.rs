//! Tests of several processes that write one volume on a real server. The server restarts and crashes
//! meanwhile, and the tests kill one of the writers.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use millrace_datafs::{Config, Datafs, OpenFlags, Owner, View};

use super::server::Server;
use crate::child;
use crate::processes::{counter, take_ticket, tickets};

/// The environment variable with the server of a child.
pub(super) const URL: &str = "MILLRACE_TEST_META_URL";
const OWNER: Owner = Owner { uid: 0, gid: 0 };
const WRITERS: u64 = 4;
const ROUNDS: u64 = 60;

pub(super) fn config(url: &str) -> Config {
    Config { meta_url: Some(url.to_owned().into()), meta_connections_max: 4, ..Config::default() }
}

pub(super) fn view(home: &Path, url: &str) -> (Datafs, View) {
    let datafs = Datafs::open(home, &config(url)).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    (datafs, view)
}

pub(super) fn command(function: &str, home: &Path, argument: u64, url: &str) -> Command {
    let mut command = child::command(function, home, argument);
    command.env(URL, url);
    command
}

pub(super) fn say(word: &str, number: u64) {
    println!("{word} {number}");
    std::io::stdout().flush().unwrap();
}

fn content(id: u64, round: u64) -> Vec<u8> {
    (id << 32 | round).to_be_bytes().repeat(1 + (round as usize % 5) * 400)
}

/// The child: writes files with a sync, files without one, and takes tickets in competition with the others. No
/// call fails, except for conflicts over a ticket.
#[test]
fn writer() {
    let Some((home, id)) = child::task() else { return };
    let (_datafs, view) = view(&home, &std::env::var(URL).unwrap());
    let folder = view.mkdir(view.root(), format!("of-{id}").as_ref(), 0o755, OWNER).unwrap().node;
    let flags = OpenFlags { exclusive: true, ..OpenFlags::READ_WRITE };
    for round in 0..ROUNDS {
        for (prefix, sync) in [("synced", true), ("closed", false)] {
            let name = format!("{prefix}-{round}");
            let (_, file) = view.create(folder, name.as_ref(), 0o644, OWNER, flags).unwrap();
            file.write_at(0, &content(id, round)).unwrap();
            file.flush().unwrap();
            if sync {
                file.fsync().unwrap();
                say("synced", round);
            }
        }
        say("ticket", take_ticket(&view, id));
    }
    say("done", id);
}

/// A writing child, and its reports, which a thread receives.
struct Writer {
    id: u64,
    child: Child,
    said: std::sync::mpsc::Receiver<(String, u64)>,
    heard: Vec<(String, u64)>,
}

impl Writer {
    fn start(home: &Path, id: u64, url: &str) -> Writer {
        let mut child = command("postgres::processes::writer", home, id, url).spawn().unwrap();
        let (sender, said) = std::sync::mpsc::channel();
        let reports = child::reports(&mut child);
        std::thread::spawn(move || reports.for_each(|report| drop(sender.send(report))));
        Writer { id, child, said, heard: Vec::new() }
    }

    /// Waits until the child has taken this number of tickets.
    fn reach(&mut self, tickets: usize) {
        while self.heard.iter().filter(|(word, _)| word == "ticket").count() < tickets {
            let next = self.said.recv_timeout(Duration::from_secs(240));
            self.heard.push(next.unwrap_or_else(|_| panic!("writer {} does not go on", self.id)));
        }
    }

    fn finish(mut self) -> (u64, Vec<(String, u64)>) {
        self.heard.extend(self.said.iter());
        self.child.wait().unwrap();
        (self.id, self.heard)
    }
}

#[test]
fn writers_survive_restarts_and_crashes_of_the_server() {
    let Some(server) = Server::start(&["wal_writer_delay=10000"]) else { return };
    let home = tempfile::tempdir().unwrap();
    let datafs = Datafs::open(home.path(), &config(&server.url())).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let mut writers: Vec<_> = (0..WRITERS).map(|id| Writer::start(home.path(), id, &server.url())).collect();
    writers.iter_mut().for_each(|writer| writer.reach(5));
    // A crash, a writer that is killed, an orderly restart.
    server.kill();
    server.resume();
    writers.iter_mut().for_each(|writer| writer.reach(20));
    writers[0].child.kill().unwrap();
    server.stop();
    server.resume();
    writers[1..].iter_mut().for_each(|writer| writer.reach(40));
    let heard: BTreeMap<u64, _> = writers.into_iter().map(Writer::finish).collect();

    let (_own, view) = view(home.path(), &server.url());
    let count = counter(&view).1;
    let mut tickets = tickets(&view);
    assert_eq!(tickets.values().map(Vec::len).sum::<usize>() as u64, count, "no number twice, none left out");
    for (id, heard) in &heard {
        let told = |word: &str| heard.iter().filter(|(w, _)| w == word).map(|(_, n)| *n).collect::<Vec<_>>();
        let killed = *id == 0;
        let taken = tickets.remove(id).unwrap();
        let answered = told("ticket");
        if killed {
            // The process may have died before it reported the ticket.
            assert!(taken.len() - answered.len() <= 1 && taken.starts_with(&answered));
        } else {
            assert_eq!(told("done"), [*id], "writer {id} had an error");
            assert_eq!(taken, answered, "what was answered is what there is, once");
        }
        for round in told("synced") {
            let file = view.read_file(&format!("of-{id}/synced-{round}")).unwrap();
            assert!(file == content(*id, round), "what was synced is there");
        }
        if !killed {
            for round in 0..ROUNDS {
                let file = view.read_file(&format!("of-{id}/closed-{round}")).unwrap();
                assert!(file == content(*id, round), "what a crash has lost is committed again");
            }
        }
    }
}

#[test]
fn a_server_that_stays_away_is_named_and_everything_goes_on_when_it_is_back() {
    let Some(server) = Server::start(&["fsync=off"]) else { return };
    let home = tempfile::tempdir().unwrap();
    let impatient = Config { lock_wait_ms: 1_500, ..config(&server.url()) };
    let datafs = Datafs::open(home.path(), &impatient).unwrap();
    datafs.volume_create(&"v".parse().unwrap()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let (_, file) = view.create(view.root(), "f".as_ref(), 0o644, OWNER, OpenFlags::READ_WRITE).unwrap();
    file.write_at(0, b"before").unwrap();
    file.fsync().unwrap();
    server.stop();
    file.write_at(0, b"during").unwrap();
    for _ in 0..2 {
        let error = file.fsync().unwrap_err();
        let text = format!("{error}: {}", std::error::Error::source(&error).unwrap());
        assert!(
            text.contains(server.folder().to_str().unwrap()) && text.contains("did not answer"),
            "{text}"
        );
        assert!(view.stat("f").is_err());
    }
    server.resume();
    // The same handles work, and uncommitted data is committed.
    file.fsync().unwrap();
    assert_eq!(view.read_file("f").unwrap(), b"during"[..]);
    view.write_file("after", b"after").unwrap();
}

#[test]
fn a_home_with_another_store_is_refused_and_the_others_go_on() {
    let Some(server) = Server::shared() else { return };
    let (dir, schema) = (tempfile::tempdir().unwrap(), server.new_schema());
    let common = Config {
        meta_schema: schema,
        store_url: Some(format!("file://{}", dir.path().join("store").display())),
        ..config(&server.url())
    };
    let home = |name: &str| dir.path().join(name);
    let first = Datafs::open(&home("first"), &common).unwrap();
    first.volume_create(&"v".parse().unwrap()).unwrap();
    let second = Datafs::open(&home("second"), &common).unwrap();
    let write = |datafs: &Datafs, name: &str| {
        datafs.view(&"v".parse().unwrap()).unwrap().write_file(name, &[7; 2 << 20]).unwrap();
    };
    write(&first, "a");
    // This home's objects would be on its local disk, where the other homes do not find them.
    let alone = Config { store_url: None, ..common.clone() };
    let error = Datafs::open(&home("third"), &alone).unwrap_err().to_string();
    assert!(error.contains("third/datafs/objects") && error.contains("store_url"), "{error}");
    write(&second, "b");
    for (datafs, name) in [(&first, "b"), (&second, "a")] {
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        assert_eq!(view.read_file(name).unwrap().len(), 2 << 20);
    }
}
