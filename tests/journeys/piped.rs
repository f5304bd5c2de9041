//! `millrace pipe`: topic to topic without a server, under several names, from topics that were created again.

use crate::support::Home;

const PIPE: [&str; 11] =
    ["pipe", "--from", "asked", "--to", "answered", "--model", "m", "--volume", "v", "--input", "x"];

#[test]
fn a_pipe_of_another_name_begins_at_the_first_record_and_a_topic_that_was_created_again_needs_one() {
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
    assert_eq!(predicted(&[]), 5);
    assert_eq!(predicted(&[]), 0);
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
