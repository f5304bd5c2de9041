//! Tests of topics: the temporary broker that commands share, damage, full disks, limits.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use millrace_datafs::{Datafs, View};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Home, Service, Tmpfs, until};

/// A `produce` that reads the lines that the test writes.
struct InteractiveProduce(Child);

impl InteractiveProduce {
    fn start(home: &Home, topic: &str) -> InteractiveProduce {
        let mut command = home.command();
        command.args(["produce", topic]).stdin(Stdio::piped()).stdout(Stdio::null());
        InteractiveProduce(command.spawn().unwrap())
    }

    fn line(&mut self, text: &str) {
        let stdin = self.0.stdin.as_mut().unwrap();
        stdin.write_all(text.as_bytes()).unwrap();
        stdin.write_all(b"\n").unwrap();
    }

    /// Closes its input and waits for its exit code.
    fn end(&mut self) -> Option<i32> {
        drop(self.0.stdin.take());
        until("produce ends", || self.0.try_wait().unwrap().is_some());
        self.0.wait().unwrap().code()
    }
}

impl Drop for InteractiveProduce {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Number of records in a topic, by its offsets; 0 while it does not exist.
fn records(home: &Home, topic: &str) -> i64 {
    let list = home.json(["topic", "list"]);
    let of_topic = list["partitions"].as_array().unwrap().iter().filter(|found| found["topic"] == topic);
    of_topic.map(|found| found["next"].as_i64().unwrap() - found["first"].as_i64().unwrap()).sum()
}

#[test]
fn commands_share_a_temporary_broker_without_waiting() {
    let home = Home::new();
    let mut first = InteractiveProduce::start(&home, "t");
    first.line("1");
    until("the first record is there", || records(&home, "t") == 1);
    let mut second = InteractiveProduce::start(&home, "t");
    second.line("2");
    until("the second record is there", || records(&home, "t") == 2);
    // The command that started the broker ends while another one uses it.
    assert_eq!(first.end(), Some(0));
    second.line("3");
    until("the third record is there", || records(&home, "t") == 3);
    // A service waits for the temporary broker to end, then starts.
    let config = home.file("m.toml", "[streams.broker]\nlisten = \"127.0.0.1:0\"\n[up]\nvolumes = [\"v\"]\n");
    let mut up = home.start(["--config", config.to_str().unwrap(), "up", "--json"]);
    assert_eq!(second.end(), Some(0));
    up.object();
    assert_eq!(records(&home, "t"), 3);
    assert_eq!(up.stop(), 0);
}

#[test]
fn temporary_broker_survives_a_killed_command() {
    let home = Home::new();
    let mut first = InteractiveProduce::start(&home, "t");
    first.line("1");
    until("the first record is there", || records(&home, "t") == 1);
    let mut second = InteractiveProduce::start(&home, "t");
    second.line("2");
    until("the second record is there", || records(&home, "t") == 2);
    kill(Pid::from_raw(first.0.id() as i32), Signal::SIGKILL).unwrap();
    first.0.wait().unwrap();
    second.line("3");
    assert_eq!(second.end(), Some(0));
    assert_eq!(records(&home, "t"), 3);
    // The broker ends with the last command, so a copy of the home is complete.
    until("the broker ends", || !millrace_streams::broker::is_held(&home.path().join("broker")));
}

#[test]
fn following_ingest_continues_after_its_temporary_broker_is_killed() {
    let home = Home::new();
    let record = home.file("record.jsonl", "{\"id\":1}\n");
    home.ok(["produce", "t", record.to_str().unwrap()]);
    let follower = Follower::start(&home);
    until("the first record has landed", || follower.has_landed(1));
    let holder = std::fs::read_to_string(home.path().join("broker/lock")).unwrap();
    let broker = Pid::from_raw(holder.lines().next().unwrap().parse().unwrap());
    kill(broker, Signal::SIGKILL).unwrap();
    until("the broker is gone", || {
        std::fs::read_to_string(home.path().join("broker/lock")).unwrap() != holder
            || !millrace_streams::broker::is_held(&home.path().join("broker"))
    });
    home.ok(["produce", "t", record.to_str().unwrap()]);
    until("the second record has landed", || follower.has_landed(2));
    assert_eq!(follower.service.stop(), 0);
}

/// A following ingest of topic `t` into volume `v`, and the volume.
struct Follower {
    service: Service,
    view: View,
}

impl Follower {
    fn start(home: &Home) -> Follower {
        let job = "name = \"j\"\ntopic = \"t\"\nvolume = \"v\"\npath = \"d\"\nflush_ms = 100\n";
        let config = home.file("job.toml", format!("[[ingest.jobs]]\n{job}"));
        let datafs = Datafs::open(&home.path(), &millrace_datafs::Config::default()).unwrap();
        datafs.volume_create(&"v".parse().unwrap()).unwrap();
        let view = datafs.view(&"v".parse().unwrap()).unwrap();
        let args = ["--config", config.to_str().unwrap(), "ingest", "--job", "j", "--follow", "--json"];
        Follower { service: home.start(args), view }
    }

    fn has_landed(&self, wanted: i64) -> bool {
        let offsets = millrace_ingest::offsets(&self.view).unwrap();
        offsets.get("t").is_some_and(|partitions| partitions.values().sum::<i64>() == wanted)
    }
}

/// Starts a service whose broker listens at the given address.
fn service_at(home: &Home, address: SocketAddr) -> Service {
    let text = format!("[streams.broker]\nlisten = \"{address}\"\n");
    let config = home.file("up.toml", text);
    let mut up = home.start(["--config", config.to_str().unwrap(), "up", "--json"]);
    assert_eq!(up.object()["kafka"], address.to_string());
    up
}

/// An address that was free a moment ago.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[test]
fn a_service_restarts_while_an_ingest_follows_its_topics() {
    let (home, address) = (Home::new(), free_address());
    let record = home.file("record.jsonl", "{\"id\":1}\n");
    let first = service_at(&home, address);
    home.ok(["produce", "t", record.to_str().unwrap()]);
    let follower = Follower::start(&home);
    until("the first record has landed", || follower.has_landed(1));
    assert_eq!(first.stop(), 0);
    until("the ingest has given its share in the broker up", || {
        std::fs::File::open(home.path().join("topics.lock")).unwrap().try_lock().is_ok()
    });
    assert!(!millrace_streams::broker::is_held(&home.path().join("broker")));
    let second = service_at(&home, address);
    home.ok(["produce", "t", record.to_str().unwrap()]);
    until("the second record has landed", || follower.has_landed(2));
    assert_eq!(follower.service.stop(), 0);
    assert_eq!(second.stop(), 0);
}

#[test]
fn a_service_starts_while_an_ingest_follows_on_a_temporary_broker() {
    let home = Home::new();
    let record = home.file("record.jsonl", "{\"id\":1}\n");
    home.ok(["produce", "t", record.to_str().unwrap()]);
    let follower = Follower::start(&home);
    until("the first record has landed", || follower.has_landed(1));
    let up = service_at(&home, free_address());
    home.ok(["produce", "t", record.to_str().unwrap()]);
    until("the second record has landed", || follower.has_landed(2));
    assert_eq!(up.stop(), 0);
    // The ingest waits for the service, and a signal ends the wait.
    assert_eq!(follower.service.stop(), 0);
}

#[test]
fn a_damaged_partition_is_read_up_to_the_damage_with_exit_code_6() {
    let home = Home::new();
    let config = home.file("m.toml", "[streams.broker]\nsegment_bytes_max = 1024\n");
    let config = ["--config", config.to_str().unwrap()];
    for id in 0..4 {
        let line = format!("{{\"id\":{id},\"text\":\"{}\"}}\n", "x".repeat(900));
        let file = home.file("line.jsonl", line);
        home.ok(config.into_iter().chain(["produce", "t", file.to_str().unwrap()]));
    }
    home.ok(["produce", "other", home.file("one", "{\"id\":1}\n").to_str().unwrap()]);
    let segment = home.path().join("broker/topics/t/0/00000000000000000002.log");
    let file = std::fs::OpenOptions::new().write(true).open(&segment).unwrap();
    file.write_all_at(&[9], 16).unwrap();
    let (code, line) = home.fails(["ingest", "--topic", "t", "--volume", "v"]);
    assert_eq!(code, 6, "{line}");
    assert!(line.contains("topic t partition 0 is damaged at offset 2"), "{line}");
    let log = std::fs::read_to_string(home.path().join("broker.log")).unwrap();
    assert!(log.contains(segment.to_str().unwrap()) && log.contains("truncate -s 0"), "{log}");
    // The records before the damage have landed, and other topics work.
    assert_eq!(home.json(["volume", "show", "v"])["volume"]["name"], "v");
    let report = home.json(["ingest", "--topic", "other", "--volume", "v"]);
    assert_eq!(report["report"]["landed"], 1);
    // The list of topics: damaged, then of a newer format.
    let meta = home.path().join("broker/meta.json");
    let kept = std::fs::read_to_string(&meta).unwrap();
    std::fs::write(&meta, "{").unwrap();
    let (code, line) = home.fails(["topic", "list"]);
    assert_eq!(code, 6, "{line}");
    assert!(line.contains("meta.json"), "{line}");
    assert_eq!(home.fails(["broker", "--listen", "127.0.0.1:0"]).0, 6);
    std::fs::write(&meta, kept.replace("\"format_version\": 1", "\"format_version\": 9")).unwrap();
    let (code, line) = home.fails(["topic", "list"]);
    assert_eq!(code, 4, "{line}");
    assert!(line.contains("format 9"), "{line}");
}

#[test]
fn byte_order_mark_is_not_part_of_the_first_record() {
    let home = Home::new();
    let file = home.file("marked.jsonl", "\u{feff}{\"id\":1}\n{\"id\":2}\n");
    home.ok(["produce", "t", file.to_str().unwrap(), "--key", "id"]);
    let report = home.json(["ingest", "--topic", "t", "--volume", "v"]);
    assert_eq!((&report["report"]["landed"], &report["report"]["dead_letters"]), (&2.into(), &0.into()));
}

#[test]
fn produce_on_a_full_disk_names_the_cause_and_the_line_to_resume_at() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root can mount a tmpfs");
    }
    let home = Home::new();
    let root = home.path();
    let _disk = Tmpfs::mount(&root, "3m");
    let config = home.file("m.toml", "[streams.properties]\n\"message.timeout.ms\" = \"3000\"\n");
    let lines: String = (0..60_000).map(|id| format!("{{\"id\":{id:0>60}}}\n")).collect();
    let file = home.file("lines.jsonl", lines);
    let args = ["--config", config.to_str().unwrap(), "produce", "t", file.to_str().unwrap()];
    let (code, line) = home.fails(args);
    assert_eq!(code, 7, "{line}");
    assert!(line.contains("cannot write to its disk"), "{line}");
    let held = records(&home, "t");
    assert!(held > 0 && held < 60_000, "{held}");
    assert!(line.contains(&format!("continue with line {}", held + 1)), "{held} records: {line}");
    // A topic can be deleted on a full disk, and then records fit again.
    home.ok(["topic", "delete", "t", "--yes"]);
    home.ok(["produce", "t", home.file("one", "1\n").to_str().unwrap()]);
    assert_eq!(records(&home, "t"), 1);
}

/// A broker with soft and hard limits of open files.
fn broker_under(home: &Home, soft: u32, hard: u32) -> (Service, SocketAddr) {
    let program = home.command();
    let mut command = Command::new("sh");
    let script = format!(
        "ulimit -Sn {soft} && ulimit -Hn {hard} && exec {} broker --listen 127.0.0.1:0 --json",
        program.get_program().to_str().unwrap()
    );
    command.args(["-c", &script]).env("MILLRACE_HOME", home.path()).stdin(Stdio::null());
    let mut service = Service::spawn(&mut command);
    let address = service.object()["kafka"].as_str().unwrap().parse().unwrap();
    (service, address)
}

/// Whether the broker answers on a connection to a request for its versions.
fn broker_answers(mut stream: &TcpStream) -> bool {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    // ApiVersions, version 0, correlation id 7, no client id.
    let request = [0, 0, 0, 10, 0, 18, 0, 0, 0, 0, 0, 7, 0xff, 0xff];
    let mut len = [0; 4];
    if stream.write_all(&request).is_err() || stream.read_exact(&mut len).is_err() {
        return false;
    }
    let mut answer = vec![0; u32::from_be_bytes(len) as usize];
    stream.read_exact(&mut answer).is_ok() && answer.starts_with(&[0, 0, 0, 7])
}

#[test]
fn the_soft_limit_of_open_files_is_raised() {
    let home = Home::new();
    let (broker, address) = broker_under(&home, 64, 1_024);
    let streams: Vec<_> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert!(streams.iter().all(broker_answers));
    drop(streams);
    assert_eq!(broker.stop(), 0);
}

#[test]
fn connection_over_the_open_file_limit_is_refused_and_the_port_stays_open() {
    let home = Home::new();
    let (broker, address) = broker_under(&home, 64, 64);
    let first = TcpStream::connect(address).unwrap();
    assert!(broker_answers(&first));
    let mut streams: Vec<_> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
    // A rejected connection is closed at once; the test does not wait for the read timeout.
    let refused = streams.iter().filter(|stream| {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        !broker_answers(stream) && {
            let read = (&**stream).read(&mut [0]);
            !matches!(&read, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
        }
    });
    let refused = refused.count();
    assert!(refused > 30, "{refused} were refused");
    assert!(broker_answers(&first));
    streams.clear();
    until("new connections are served", || {
        TcpStream::connect(address).is_ok_and(|stream| broker_answers(&stream))
    });
    assert_eq!(broker.stop(), 0);
}
