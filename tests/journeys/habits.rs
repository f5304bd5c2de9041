//! Tests of everyday use: pipes to `head`, Ctrl-C, two commands at once, unusual paths.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::{Home, failure, fuse_permitted, project, until};

fn spawn(home: &Home, args: &[&str]) -> Child {
    home.command()
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn wait(child: &mut Child) {
    until("the command ends", || child.try_wait().unwrap().is_some());
}

#[test]
fn closed_reader_ends_a_feed() {
    let home = Home::new();
    let file = home.file("r.jsonl", "{\"id\":1}\n{\"id\":2}\n");
    home.ok(["produce", "t", file.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "t", "--volume", "v"]);
    // More batches than a reader could read in years.
    let mut feed = spawn(&home, &["feed", "v:/t", "--batch-rows", "2", "--batches", "1000000000000"]);
    let mut line = String::new();
    BufReader::new(feed.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("step 0"), "{line}");
    wait(&mut feed);
    assert!(feed.wait().unwrap().success());
}

#[test]
fn lines_are_produced_as_they_arrive_and_an_interrupt_reports_the_count() {
    let home = Home::new();
    let mut broker = home.start(["broker", "--listen", "127.0.0.1:0", "--json"]);
    broker.object();
    let mut produce = spawn(&home, &["produce", "t"]);
    let mut stdin = produce.stdin.take().unwrap();
    stdin.write_all(b"{\"id\":1}\n").unwrap();
    // Standard input stays open: the record must arrive before its end.
    until("the record is in the topic", || {
        let output = home.run(["ingest", "--topic", "t", "--volume", "v"]);
        output.status.success() && {
            let rows = home.run(["feed", "v:/t", "--dry", "--json", "--batch-rows", "1"]);
            rows.status.success()
        }
    });
    kill(Pid::from_raw(produce.id() as i32), Signal::SIGINT).unwrap();
    let (code, line) = failure(&produce.wait_with_output().unwrap(), "an interrupted produce");
    assert_eq!(code, 1, "{line}");
    assert!(line.contains("took 1 records; continue with line 2") && line.contains("interrupted"), "{line}");
    drop(stdin);
    assert_eq!(broker.stop(), 0);
}

#[test]
fn concurrent_commands_share_one_temporary_broker() {
    let home = Home::new();
    let mut first = spawn(&home, &["produce", "a"]);
    let mut second = spawn(&home, &["produce", "b"]);
    for (child, text) in [(&mut first, "1\n"), (&mut second, "2\n")] {
        child.stdin.as_mut().unwrap().write_all(text.as_bytes()).unwrap();
    }
    // The command that started the broker may end first or last; the records of both must arrive.
    drop(first.stdin.take());
    std::thread::park_timeout(Duration::from_millis(300));
    second.stdin.as_mut().unwrap().write_all(b"3\n").unwrap();
    drop(second.stdin.take());
    for child in [first, second] {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(home.json(["ingest", "--topic", "a", "--volume", "v"])["report"]["records"], 1);
    assert_eq!(home.json(["ingest", "--topic", "b", "--volume", "v"])["report"]["records"], 2);
}

#[test]
fn model_file_commands_need_no_home_and_use_the_default_mode() {
    let home = Home::new();
    let model = home.dir.path().join("m.onnx");
    let model = model.to_str().unwrap();
    for args in
        [&["model", "init", "mlp", "--inputs", "2", "--classes", "2", model][..], &["model", "show", model]]
    {
        let output = home.command().env("MILLRACE_HOME", "/proc/millrace").args(args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let other = home.file("as-any-other", "");
    let mode = |path: &str| std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(model), mode(other.to_str().unwrap()));
    for (args, expected) in [
        (&["model", "init", "mlp", "--inputs", "0", "--classes", "2", model][..], 2),
        (&["model", "init", "mlp", "--inputs", "2", "--classes", "2", "/nowhere/m.onnx"], 3),
        (&["train", "nope.toml"], 3),
        (&["serve", "--models", "nope"], 3),
    ] {
        let (code, line) = home.fails(args);
        assert_eq!(code, expected, "{line}");
    }
    let readme = project().join("README.md");
    let readme = readme.to_str().unwrap();
    assert_eq!(home.fails(["model", "show", readme]).0, 6);
    let edited = home.dir.path().join("edited.onnx");
    let (code, line) = home.fails(["model", "edit", readme, edited.to_str().unwrap(), "--add", "relu"]);
    assert!(code == 6 && line.matches("README.md").count() == 1, "{code} {line}");
    // A pipe has no end to wait for.
    let pipe = home.dir.path().join("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let (code, line) = home.fails(["model", "edit", pipe.to_str().unwrap(), "x.onnx", "--add", "relu"]);
    assert!(code == 2 && line.contains("not a regular file"), "{code} {line}");
}

/// A head is added to a model from PyTorch's exporter, whose nodes are listed, and weights beside a file count.
#[test]
fn exported_models_are_listed_and_cut_by_their_modules() {
    let home = Home::new();
    let exported = project().join("trainer/tests/fixtures/folded.onnx");
    let exported = exported.to_str().unwrap();
    let nodes = home.json(["model", "show", exported, "--nodes"]);
    let names: Vec<_> =
        nodes.as_array().unwrap().iter().map(|node| node["values"][0].as_str().unwrap()).collect();
    assert_eq!(names, ["getitem", "relu", "mean", "view", "mul_6", "linear"]);
    let flowers = home.dir.path().join("flowers.onnx");
    let flowers = flowers.to_str().unwrap();
    home.ok([
        "model", "edit", exported, flowers, "--cut", "avgpool", "--add", "flatten", "--add", "linear=5",
    ]);
    let weights = home.json(["model", "show", flowers, "--parameters"]);
    let kinds: Vec<_> = weights.as_array().unwrap().iter().map(|w| (&w["name"], &w["kind"])).collect();
    for name in ["conv.weight", "head.2.weight", "head.2.bias"] {
        assert!(kinds.contains(&(&name.into(), &"trained".into())), "{kinds:?}");
    }
    assert!(!kinds.iter().any(|(name, _)| *name == "level"), "{kinds:?}");
}

/// The process of a detached mount outlives the command that started it, however much it logs.
#[test]
fn detached_mount_keeps_running_and_logs_to_its_file() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let at = home.dir.path().join("mnt");
    let mount = ["--log", "debug", "mount", "--detach", "v", at.to_str().unwrap()];
    home.ok(mount);
    for i in 0..20 {
        std::fs::write(at.join(format!("{i}")), vec![i; 10_000]).unwrap();
    }
    assert!(std::fs::metadata(home.path().join("mount.log")).unwrap().len() > 0, "nothing was logged");
    assert_eq!(std::fs::read(at.join("7")).unwrap(), vec![7; 10_000]);
    let (code, line) = home.fails(mount);
    assert_eq!(code, 4, "{line}");
    home.ok(["umount", at.to_str().unwrap()]);
    until("what was written is there", || {
        home.json(["volume", "show", "v"])["volume"]["usage"]["files"] == 20
    });
}

/// `mount -t millrace` and /etc/fstab: their options reach the daemon through the supervisor.
#[test]
fn options_of_fstab_reach_the_mount() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    let file = home.file("f", "x");
    home.ok(["cp", file.to_str().unwrap(), "v:/f"]);
    let program = home.dir.path().join("mount.millrace");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_millrace"), &program).unwrap();
    let at = home.dir.path().join("mnt");
    let mount = |options: &str| {
        let mut command = std::process::Command::new(&program);
        command.arg("v").arg(&at).arg("-o").arg(format!("home={},{options}", home.path().display()));
        command.output().unwrap()
    };
    let shown = || {
        let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let line = table.lines().find(|line| line.split(' ').nth(4) == at.to_str()).unwrap();
        line.split(' ').nth(5).unwrap().to_owned()
    };
    for (options, expected) in [
        ("rw,users,noatime,relatime,_netdev,nofail,x-systemd.automount", "rw,nosuid,nodev,noexec,"),
        ("supervise,ro,nosuid,nodev", "ro,nosuid,nodev,"),
    ] {
        let output = mount(options);
        assert!(output.status.success(), "{output:?}");
        assert!(format!("{},", shown()).starts_with(expected), "{options}: {}", shown());
        assert_eq!(std::fs::read(at.join("f")).unwrap(), b"x");
        let written = std::fs::write(at.join("new"), b"x");
        assert_eq!(written.is_ok(), expected.starts_with("rw"), "{options}: {written:?}");
        home.ok(["umount", at.to_str().unwrap()]);
    }
    let (code, line) = crate::support::failure(&mount("nonsense"), "an unknown option");
    assert!(code == 2 && line.contains("nonsense"), "{line}");
}
