//! Test of kcat as a client, where it is installed.

use std::io::Write;
use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::broker_in;

fn kcat(input: &[u8], arguments: &[&str]) -> Option<String> {
    let child = Command::new("kcat")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        Err(error) => panic!("{error}"),
    };
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "kcat {arguments:?}: {errors}");
    Some(String::from_utf8(output.stdout).unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn kcat_produces_consumes_and_lists() {
    let dir = TempDir::new().unwrap();
    let broker = broker_in(dir.path()).await;
    let address = broker.addr().to_string();
    let at = ["-b", &address];
    let run = |input: &str, arguments: &[&str]| kcat(input.as_bytes(), &[&at[..], arguments].concat());
    let lines: String = (0..1_000).map(|id| format!("k{id}:v{id}\n")).collect();
    for codec in ["none", "gzip", "snappy", "lz4"] {
        let topic = format!("t-{codec}");
        let Some(_) = run(&lines, &["-P", "-t", &topic, "-K:", "-z", codec, "-X", "enable.idempotence=true"])
        else {
            return millrace_testing::skip(millrace_testing::Need::Kcat, "kcat is not installed");
        };
        let back = run("", &["-C", "-t", &topic, "-K:", "-o", "beginning", "-e", "-q"]).unwrap();
        assert_eq!(back, lines, "{codec}");
    }
    let middle = run("", &["-C", "-t", "t-none", "-p", "0", "-o", "998", "-e", "-q"]).unwrap();
    assert_eq!(middle, "v998\nv999\n");
    let last = run("", &["-C", "-t", "t-none", "-p", "0", "-o", "-1", "-e", "-q"]).unwrap();
    assert_eq!(last, "v999\n");
    let queried = run("", &["-Q", "-t", "t-none:0:-1"]).unwrap();
    assert!(queried.contains("1000"), "{queried}");
    let listed = run("", &["-L"]).unwrap();
    assert!(
        listed.contains("1 brokers") && listed.contains(&address) && listed.contains("t-gzip"),
        "{listed}"
    );
}
