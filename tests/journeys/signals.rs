//! Tests of signals and the environment: a signal ends every command, and services in order, also the hangup
//! of a terminal.

use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt as _;
use std::process::{Command, Stdio};

use nix::sys::signal::Signal;

use crate::support::{Home, Service, failure, until};

/// A server that accepts connections and never answers. Sends its first connection to the caller.
fn silent() -> (u16, std::sync::mpsc::Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (sender, taken) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            if sender.send(stream.unwrap()).is_err() {
                return;
            }
        }
    });
    (port, taken)
}

/// Sends a signal to a command that waits for the silent server, and checks its last line.
fn interrupted(home: &Home, args: &[&str], taken: &std::sync::mpsc::Receiver<TcpStream>, signal: Signal) {
    let mut command = home.command();
    let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The connection stays open: the server is silent, not gone.
    let _connection = taken.recv_timeout(crate::support::PATIENCE).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), signal).unwrap();
    until(&format!("{signal} ends {args:?}"), || child.try_wait().unwrap().is_some());
    let (code, line) = failure(&child.wait_with_output().unwrap(), &format!("{args:?}"));
    assert_eq!(code, 1, "{line}");
    assert!(line.contains("interrupted"), "{line}");
}

#[test]
fn first_signal_ends_commands_waiting_for_a_server() {
    let home = Home::new();
    let model = home.dir.path().join("m.onnx");
    let model = model.to_str().unwrap();
    home.ok(["model", "init", "mlp", "--inputs", "2", "--classes", "2", model]);
    let (port, taken) = silent();
    home.file(
        "millrace.toml",
        format!("[datafs]\nmeta_url = \"postgres://me@127.0.0.1:{port}/db\"\nlock_wait_ms = 86400000\n"),
    );
    for args in [
        &["fsck"][..],
        &["gc"],
        &["compact"],
        &["warmup", "v@s"],
        &["volume", "list"],
        &["snapshot", "list", "v"],
        &["cp", model, "v:/m.onnx"],
        &["model", "import", model, "--name", "m", "--volume", "v"],
        &["model", "show", "m", "--volume", "v"],
        &["feed", "v@s:/t"],
        &["ingest", "--topic", "t", "--volume", "v"],
    ] {
        interrupted(&home, args, &taken, Signal::SIGINT);
    }
    interrupted(&home, &["gc"], &taken, Signal::SIGTERM);
    interrupted(&home, &["gc"], &taken, Signal::SIGHUP);
}

#[test]
fn predict_times_out_on_a_silent_server() {
    let home = Home::new();
    let records = home.file("r.jsonl", "{\"input\":[1,2]}\n");
    let (port, taken) = silent();
    let server = format!("127.0.0.1:{port}");
    let args = ["predict", "m", records.to_str().unwrap(), "--grpc", &server];
    interrupted(&home, &args, &taken, Signal::SIGTERM);
    interrupted(&home, &args, &taken, Signal::SIGINT);
    let (code, line) = home.fails(args);
    assert_eq!(code, 5, "{line}");
    assert!(line.contains(&server) && line.contains("has not answered"), "{line}");
}

#[test]
fn sighup_stops_a_service_cleanly_unless_ignored() {
    let home = Home::new();
    let broker = ["broker", "--listen", "127.0.0.1:0", "--json"];
    let mut service = home.start(broker);
    service.object();
    // The kernel and the shell may both send SIGHUP.
    service.signal(Signal::SIGHUP);
    service.signal(Signal::SIGHUP);
    assert_eq!(service.wait(), Some(0));

    // Started as by nohup.
    let program = home.command().get_program().to_owned();
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' HUP; exec \"$@\"", "sh"]).arg(program).args(broker);
    command.env("MILLRACE_HOME", home.path()).env_remove("MILLRACE_CONFIG").current_dir(home.dir.path());
    let mut service = Service::spawn(&mut command);
    service.object();
    service.signal(Signal::SIGHUP);
    let records = home.file("r.jsonl", "{}\n");
    home.ok(["produce", "t", records.to_str().unwrap()]);
    assert!(service.is_running());
    assert_eq!(service.stop(), 0);
}

#[test]
fn variables_that_are_not_utf8_are_ignored_or_named() {
    let home = Home::new();
    let bytes = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    let output = home.command().env("SOME_VARIABLE", bytes).env(bytes, "x").args(["volume", "list"]).output();
    let output = output.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let source = home.file("source", "text");
    let target = home.dir.path().join("target");
    let mut copy = home.command();
    copy.env("AWS_ACCESS_KEY_ID", bytes).arg("cp").arg(source).arg(&target);
    let output = copy.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut copy = home.command();
    copy.env("SOME_VARIABLE", bytes).env("AWS_REGION", "nowhere").args(["cp", "s3://", "x"]);
    let (code, line) = failure(&copy.output().unwrap(), "a URL that names no bucket");
    assert_ne!(code, 101, "{line}");
    let output = home.command().env("MILLRACE_SERVING__GRPC", bytes).args(["volume", "list"]).output();
    let (code, line) = failure(&output.unwrap(), "a setting that is no text");
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("MILLRACE_SERVING__GRPC"), "{line}");
    // A home path that is not UTF-8 works.
    let odd = home.dir.path().join(bytes);
    let output = home.command().env("MILLRACE_HOME", &odd).args(["volume", "create", "v"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(odd.join("datafs").is_dir());
}
