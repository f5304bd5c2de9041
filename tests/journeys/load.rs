//! Tests of `millrace serve bench`: both kinds of load, their figures, and invalid loads.

use serde_json::{Value, json};

use crate::bad_input::serve;
use crate::support::Home;

const SHORT: [&str; 4] = ["--duration", "0.3", "--warm-up", "0.05"];

#[test]
fn open_and_closed_loads_report_figures() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |_| {});
    let bench = ["serve", "bench", "m", "--grpc", &grpc];
    let loads = ["--concurrency", "1,3", "--rate", "50,200", "--deadline-ms", "60000", "--rows", "2"];
    let args = [&bench[..], &loads, &SHORT].concat();
    let text = home.ok(&args);
    for word in ["answered/s", "p99.9", "1 client", "3 clients", "50/s", "200/s"] {
        assert!(text.contains(word), "{word} is missing in\n{text}");
    }

    let report: Value = home.json(args);
    assert_eq!((&report["model"], &report["rows"]), (&json!("m"), &json!(2)));
    let loads = report["loads"].as_array().unwrap();
    assert_eq!(
        loads.iter().map(|load| &load["clients"]).collect::<Vec<_>>(),
        [&json!(1), &json!(3), &Value::Null, &Value::Null]
    );
    assert_eq!((&loads[2]["rate"], &loads[3]["rate"]), (&json!(50.0), &json!(200.0)));
    for load in &loads[2..] {
        assert_eq!(load["failed"], json!({}), "{load}");
        assert_eq!(load["answered_per_second"], load["in_time_per_second"], "{load}");
        let times = &load["latency_us"];
        let ascending = ["p50", "p90", "p99", "p99.9", "max"].map(|name| times[name].as_f64().unwrap());
        assert!(ascending[0] > 0.0 && ascending.is_sorted(), "{times}");
    }
    assert_eq!(service.stop(), 0);
}

#[test]
fn load_sends_records_of_a_file_and_names_invalid_ones() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |_| {});
    let file = home.file("rows.jsonl", "{\"input\": [0.5, -1]}\n\n{\"label\": 1, \"input\": [2, 3e-1]}\n");
    let bench = ["serve", "bench", "m", "--version", "1", "--grpc", &grpc, "--rate", "100"];
    let report = home.json([&bench[..], &SHORT, &["--data", file.to_str().unwrap()]].concat());
    assert_eq!((&report["loads"][0]["failed"], &report["version"]), (&json!({}), &json!(1)));
    for (text, says) in [
        ("", "the input has no records"),
        ("{\"input\": [0.5, -1]}\n{\"input\": [0.5]}\n", "line 2"),
        ("[1, 2]\n", "line 1: the record is not a JSON object"),
        ("{\"x\": [1, 2]}\n", "no field \"input\""),
        ("{\"input\": [1, \"two\"]}\n", "line 1"),
    ] {
        let file = home.file("wrong.jsonl", text);
        let (code, line) = home.fails([&bench[..], &["--data", file.to_str().unwrap()]].concat());
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(says), "{line}");
    }
    let missing = home.dir.path().join("missing.jsonl");
    let (code, line) = home.fails([&bench[..], &["--data", missing.to_str().unwrap()]].concat());
    assert_eq!(code, 3, "{line}");
    assert!(line.contains("missing.jsonl"), "{line}");
    assert_eq!(service.stop(), 0);
}

#[test]
fn impossible_load_is_refused_with_the_reason() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |_| {});
    let folder = home.dir.path().to_str().unwrap().to_owned();
    // Errors in the command line alone.
    let flags: [(&[&str], &str); 12] = [
        (&["--rate", "0"], "above 0"),
        (&["--rate", "nan"], "above 0"),
        (&["--rate", "1e9"], "at most 1000000"),
        (&["--rate=-5"], "above 0"),
        (&["--concurrency", "0"], "0 is not in 1..=10000"),
        (&["--concurrency", "8,many"], "many"),
        (&["--duration", "0"], "seconds"),
        (&["--duration", "inf"], "seconds"),
        (&["--rows", "0"], "0 is not in"),
        (&["--deadline-ms", "5"], "--rate"),
        (&["--shape", "input"], "image:3,224,224"),
        (&["--shape", "input:2,-1"], "image:3,224,224"),
    ];
    for (args, says) in flags {
        let line = usage(&home, &[&["serve", "bench", "m", "--grpc", &grpc][..], args].concat());
        assert!(line.contains(says), "{args:?}: {line}");
    }
    // Flags of serving and of benchmarking are not mixed, and serving needs models.
    usage(&home, &["serve", "--models", &folder, "bench", "m"]);
    let line = usage(&home, &["serve"]);
    assert!(line.contains("--models"), "{line}");
    let cases: [(&[&str], i32, &str); 5] = [
        (&["m", "--shape", "input:3"], 2, "takes shape [2]"),
        (&["m", "--shape", "pixels:2"], 2, "the inputs of the model are [\"input\"]"),
        (&["m", "--picture", "m.svg"], 2, "bench draws no plots any more"),
        (&["m", "--version", "9"], 3, "9"),
        (&["nope"], 3, "nope"),
    ];
    for (args, code, says) in cases {
        let (found, line) = home.fails([&["serve", "bench", "--grpc", &grpc][..], args].concat());
        assert_eq!(found, code, "{args:?}: {line}");
        assert!(line.contains(says), "{args:?}: {line}");
    }
    assert_eq!(service.stop(), 0);
    let (code, line) = home.fails(["serve", "bench", "m", "--grpc", &grpc]);
    assert_eq!(code, 5, "{line}");
    assert!(line.contains(&grpc), "{line}");
}

/// Runs a command that clap must reject; returns the message.
fn usage(home: &Home, args: &[&str]) -> String {
    let output = home.run(args);
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{args:?}: {stderr}");
    stderr
}
