//! Tests of `millrace pipe`: topic to topic without a server, with several pipe names and with recreated
//! topics.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Home, until};

const PIPE: [&str; 11] =
    ["pipe", "--from", "asked", "--to", "answered", "--model", "m", "--volume", "v", "--input", "x"];

#[test]
fn new_pipe_starts_at_the_first_record_and_a_recreated_topic_needs_a_new_pipe() {
    let home = Home::new();
    home.ok(["model", "init", "mlp", "--inputs", "2", "--hidden", "4", "--classes", "2", "m.onnx"]);
    home.ok(["volume", "create", "v"]);
    home.ok(["model", "import", "m.onnx", "--name", "m", "--volume", "v"]);
    let records = |count: usize| {
        let lines: String = (0..count).map(|id| format!("{{\"id\":{id},\"x\":[{id},1]}}\n")).collect();
        home.file("records.jsonl", lines)
    };
    home.ok(["produce", "asked", records(5).to_str().unwrap()]);
    let predicted = |more: &[&str]| home.json([&PIPE[..], more].concat())["predicted"].clone();
    // A wrong field stops the command before it moves the position.
    let wrong = [&PIPE[..PIPE.len() - 1], &["y"]].concat();
    let (code, line) = home.fails(wrong);
    assert_eq!(code, 2, "{line}");
    for part in ["topic asked", "no field \"y\"", "\"id\", \"x\"", "--input", "--allow-unfit"] {
        assert!(line.contains(part), "{line}");
    }
    assert_eq!(predicted(&[]), 5);
    assert_eq!(predicted(&[]), 0);
    let again = home.run(PIPE);
    let note = String::from_utf8(again.stderr).unwrap();
    assert!(again.status.success() && note.contains("offset 5 of partition 0"), "{note}");
    assert!(note.contains("--name"), "{note}");
    assert_eq!(predicted(&["--name", "second"]), 5);

    home.ok(["topic", "delete", "asked", "--yes"]);
    home.ok(["produce", "asked", records(9).to_str().unwrap()]);
    let (code, line) = home.fails(PIPE);
    assert_eq!(code, 4, "{line}");
    assert!(
        line.contains("pipe asked-to-answered: topic asked partition 0") && line.contains("--name"),
        "{line}"
    );
    assert_eq!(predicted(&["--name", "third"]), 9);
}

#[test]
fn following_pipe_continues_after_its_temporary_broker_is_killed() {
    let home = Home::new();
    home.ok(["model", "init", "mlp", "--inputs", "2", "--hidden", "4", "--classes", "2", "m.onnx"]);
    home.ok(["volume", "create", "v"]);
    home.ok(["model", "import", "m.onnx", "--name", "m", "--volume", "v"]);
    let record = home.file("record.jsonl", "{\"id\":1,\"x\":[1,2]}\n");
    home.ok(["produce", "asked", record.to_str().unwrap()]);
    let answered = || -> i64 {
        let list = home.json(["topic", "list"]);
        let partitions = list["partitions"].as_array().unwrap().iter();
        partitions
            .filter(|found| found["topic"] == "answered")
            .map(|found| found["next"].as_i64().unwrap())
            .sum()
    };
    let follow = home.start([&PIPE[..], &["--follow", "--json"]].concat());
    until("the first record is answered", || answered() == 1);
    let (dir, lock) = (home.path().join("broker"), home.path().join("broker/lock"));
    let holder = std::fs::read_to_string(&lock).unwrap();
    kill(Pid::from_raw(holder.lines().next().unwrap().parse().unwrap()), Signal::SIGKILL).unwrap();
    until("the broker is gone", || {
        std::fs::read_to_string(&lock).unwrap() != holder || !millrace_streams::broker::is_held(&dir)
    });
    home.ok(["produce", "asked", record.to_str().unwrap()]);
    until("the second record is answered", || answered() >= 2);
    assert_eq!(follow.stop(), 0);
}
