//! Training scripts with `millrace train --script`: shell scripts that write down what they get.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::support::{Home, Service, failure, until};

/// Writes an executable shell script, whose `$1` is the folder of the test.
fn script(home: &Home, name: &str, text: &str) -> String {
    let path = home.file(name, format!("#!/bin/sh\n{text}"));
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

fn folder(home: &Home) -> String {
    let folder = home.dir.path().join("told");
    std::fs::create_dir_all(&folder).unwrap();
    folder.to_str().unwrap().to_owned()
}

/// The variables that a process has written.
fn environment(path: &Path) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().filter_map(|line| line.split_once('=')).map(|(a, b)| (a.to_owned(), b.to_owned())).collect()
}

/// Process ids in files with an extension, once there are `count`.
fn pids(folder: &str, extension: &str, count: usize) -> Vec<i32> {
    let read = || -> Vec<i32> {
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        files
            .filter(|path| path.extension().is_some_and(|found| found == extension))
            .filter_map(|path| std::fs::read_to_string(path).ok()?.trim().parse().ok())
            .collect()
    };
    until("all processes have started", || read().len() == count);
    read()
}

fn is_running(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
}

fn token(home: &Home) -> PathBuf {
    let token = home.file("token", "0123456789abcdef0123456789abcdef\n");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    token
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn a_killed_process_starts_a_new_round_with_the_environment_of_torchrun() {
    let home = Home::new();
    let told = folder(&home);
    let text = "env > \"$1/$RANK.$TORCHELASTIC_RESTART_COUNT.env\"\n\
                [ \"$TORCHELASTIC_RESTART_COUNT\" = 1 ] && exit 0\n\
                [ \"$RANK\" = 1 ] && while [ ! -e \"$1/0.0.env\" ]; do sleep 0.01; done && kill -9 $$\n\
                while :; do sleep 600; done\n";
    let train = script(&home, "train.sh", text);
    let args = ["train", "--script", &train, "--nproc-per-node", "2", "--json", "--", &told, "--lr", "0.1"];
    let mut command = home.command();
    // The rank of another launcher, as in a batch script of Slurm.
    command.args(args).env("SLURM_PROCID", "0").env("RANK", "9");
    let mut running = Service::spawn(&mut command);
    let report = running.object();
    assert_eq!(running.wait(), Some(0));
    assert_eq!(
        (&report["restarts"], &report["rounds"], &report["world"], &report["end"]),
        (&1.into(), &2.into(), &2.into(), &"succeeded".into()),
        "{report}"
    );
    let mut ports = Vec::new();
    for round in 0..2 {
        for rank in 0..2 {
            let env = environment(&Path::new(&told).join(format!("{rank}.{round}.env")));
            for (name, value) in [
                ("RANK", rank.to_string()),
                ("LOCAL_RANK", rank.to_string()),
                ("WORLD_SIZE", "2".into()),
                ("LOCAL_WORLD_SIZE", "2".into()),
                ("GROUP_RANK", "0".into()),
                ("MASTER_ADDR", "127.0.0.1".into()),
                ("TORCHELASTIC_MAX_RESTARTS", "3".into()),
                ("TORCHELASTIC_RUN_ID", report["run"].as_str().unwrap().into()),
                ("MILLRACE_ROUND", (round + 1).to_string()),
                ("MILLRACE_RUN_VOLUME", "models".into()),
                ("MILLRACE_HOME", home.path().display().to_string()),
            ] {
                assert_eq!(env.get(name), Some(&value), "{name} of rank {rank} in round {round}");
            }
            assert!(!env.contains_key("SLURM_PROCID"), "the rank of another launcher");
            if rank == 0 {
                ports.push(env["MASTER_PORT"].clone());
            } else {
                assert_eq!(env["MASTER_PORT"], ports[round]);
            }
        }
    }
    assert_ne!(ports[0], ports[1], "both rounds meet at one port");

    let runs = home.json(["runs", "list", "--volume", "models"]);
    let run = &runs[0];
    assert_eq!((&run["job"], &run["run"]), (&"train".into(), &report["run"]), "{runs}");
    let record = &run["script"];
    assert_eq!((&record["outcome"], &record["restarts"]), (&"succeeded".into(), &1.into()), "{record}");
    assert_eq!(record["args"], serde_json::json!([told, "--lr", "0.1"]));
    let names = record["environment"].as_array().unwrap();
    assert!(names.contains(&Value::from("MILLRACE_HOME")), "{names:?}");
    // Steps and epochs of a script are unknown, so that its row has no number but the digits of the run and its time.
    let listed = home.ok(["runs", "list", "--volume", "models"]);
    let row = listed.lines().find(|line| line.contains("succeeded")).unwrap();
    assert!(!row.split("succeeded").nth(1).unwrap().contains(char::is_numeric), "{listed}");
    let shown = home.ok(["runs", "show", "train", "--volume", "models"]);
    assert!(shown.contains("succeeded") && shown.contains("sha256") && shown.contains("--lr"), "{shown}");
}

#[test]
fn launches_of_a_job_are_numbered_so_that_files_of_earlier_ones_are_fenced() {
    let home = Home::new();
    let told = folder(&home);
    // A script may call the program, which must not take these variables for keys.
    let text = "echo \"launch=$MILLRACE_LAUNCH\" > \"$1/env\"\n\"$MILLRACE_PROGRAM\" volume list >&2\n";
    let train = script(&home, "train.sh", text);
    let mut ids = BTreeSet::new();
    for number in 1..=3 {
        let mut command = home.command();
        command.args(["train", "--script", &train, "--", &told]);
        // That of a job around this one.
        command.env("MILLRACE_LAUNCH", format!("{}:9", "f0".repeat(16)));
        assert_eq!(Service::spawn(&mut command).wait(), Some(0));
        let launch = environment(&Path::new(&told).join("env"))["launch"].clone();
        let (id, counted) = launch.split_once(':').unwrap();
        assert_eq!(counted, number.to_string());
        ids.insert(id.to_owned());
    }
    assert!(ids.len() == 1 && !ids.contains(&"f0".repeat(16)), "{ids:?}");
}

#[test]
fn the_first_failure_is_named_with_its_last_lines() {
    let home = Home::new();
    let told = folder(&home);
    let text = "[ \"$RANK\" = 2 ] || while :; do sleep 600; done\n\
                echo begins; echo \"ValueError: loss is nan\" >&2; exit 7\n";
    let train = script(&home, "train.sh", text);
    let args = ["train", "--script", &train, "--nproc-per-node", "3", "--max-restarts", "0"];
    let output = home.run(args.iter().chain(&["--", &told]));
    let (code, line) = failure(&output, "a script that fails");
    assert_eq!(code, 1, "{line}");
    assert!(line.contains("job train") && line.contains("rank 2 on "), "{line}");
    assert!(line.contains("exited with code 7"), "{line}");
    let (out, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(out.contains("[2] begins"), "{out}");
    assert!(error.contains("[2] ValueError: loss is nan"), "{error}");
    assert!(error.contains("\n    ValueError: loss is nan"), "{error}");
    let runs = home.json(["runs", "list", "--volume", "models", "--job", "train"]);
    assert_eq!(runs[0]["script"]["outcome"], "failed");
    assert!(runs[0]["script"]["failure"].as_str().unwrap().contains("rank 2"), "{runs}");
}

#[test]
fn no_process_is_left_behind_whichever_is_killed() {
    let home = Home::new();
    // Each process starts another one that leaves its group and its session.
    let text = "(setsid sh -c 'echo $$ > \"$0/$RANK.far.pid\"; exec sleep 600' \"$1\" &)\n\
                trap '' TERM\necho $$ > \"$1/$RANK.own.pid\"\nwhile :; do sleep 600; done\n";
    let train = script(&home, "train.sh", text);
    // SIGKILL for the launcher, and SIGTERM, which the script ignores.
    for (signal, code) in [(Signal::SIGKILL, None), (Signal::SIGTERM, Some(1))] {
        let told = folder(&home);
        let args = ["train", "--script", &train, "--nproc-per-node", "2", "--grace", "1", "--", &told];
        let mut running = home.start(args);
        let all = pids(&told, "pid", 4);
        running.signal(signal);
        assert_eq!(running.wait(), code);
        until("all processes have ended", || !all.iter().any(|pid| is_running(*pid)));
        std::fs::remove_dir_all(&told).unwrap();
    }
    // The first run's launcher could not record its end.
    // Runs of one second are in the order of their ids.
    let runs = home.json(["runs", "list", "--volume", "models"]);
    let outcomes = [&runs[0]["script"]["outcome"], &runs[1]["script"]["outcome"]];
    assert!(outcomes.contains(&&Value::Null) && outcomes.contains(&&Value::from("stopped")), "{runs}");
    // Launcher and keeper at once: the next run kills what they have left.
    let told = folder(&home);
    let args = ["train", "--script", &train, "--nproc-per-node", "2", "--grace", "1", "--", &told];
    let mut running = home.start(args);
    let all = pids(&told, "pid", 4);
    let keeper = keeper_of(running.pid());
    // Not the keeper: the kernel wakes stopped processes whose group has lost its parent.
    running.signal(Signal::SIGSTOP);
    kill(keeper, Signal::SIGKILL).unwrap();
    running.signal(Signal::SIGKILL);
    running.wait();
    assert!(all.iter().any(|pid| is_running(*pid)), "the keeper was not the last one");
    std::fs::remove_dir_all(&told).unwrap();
    folder(&home);
    let mut running = home.start(args);
    pids(&told, "pid", 4);
    until("all processes have ended", || !all.iter().any(|pid| is_running(*pid)));
    running.signal(Signal::SIGTERM);
    assert_eq!(running.wait(), Some(1));
}

/// The keeper of a launcher: its child with the keeper's variable.
fn keeper_of(launcher: u32) -> Pid {
    let is_child = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        parent == Some(launcher) && environ.windows(21).any(|part| part == b"MILLRACE_KEEPER_MARK=")
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    let mut pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    Pid::from_raw(pids.find(is_child).expect("the launcher has a keeper"))
}

#[test]
fn a_stop_is_passed_on_and_waited_for() {
    let home = Home::new();
    let told = folder(&home);
    let text = "trap 'echo saved > \"$1/$RANK.saved\"; exit 0' TERM\necho $$ > \"$1/$RANK.pid\"\n\
                while :; do sleep 0.01; done\n";
    let train = script(&home, "train.sh", text);
    let mut running =
        home.start(["train", "--script", &train, "--nproc-per-node", "2", "--json", "--", &told]);
    pids(&told, "pid", 2);
    running.signal(Signal::SIGTERM);
    assert_eq!(running.object()["end"], "stopped");
    assert_eq!(running.wait(), Some(1));
    for rank in 0..2 {
        assert!(Path::new(&told).join(format!("{rank}.saved")).exists(), "rank {rank} was not asked");
    }
}

#[test]
fn a_killed_node_is_replaced_by_one_that_joins() {
    let home = Home::new();
    let (token, told) = (token(&home), folder(&home));
    let token = token.to_str().unwrap();
    let text = "echo $$ > \"$1/$GROUP_RANK.$RANK.$MILLRACE_ROUND.pid\"\nenv > \"$1/$RANK.env\"\n\
                while [ ! -e \"$1/go\" ]; do sleep 0.01; done\n";
    let train = script(&home, "train.sh", text);
    let address = free_address();
    let args = [
        "train",
        "--script",
        &train,
        "--nproc-per-node",
        "2",
        "--nodes",
        "2",
        "--workers-local",
        "0",
        "--listen",
        &address,
        "--token-file",
        token,
        "--json",
        "--",
        &told,
    ];
    let mut coordinator = home.start(args);
    let join = || home.start(["worker", "--join", &address, "--token-file", token]);
    let mut nodes = [join(), join()];
    let first = pids(&told, "pid", 4);
    let env = environment(&Path::new(&told).join("3.env"));
    assert_eq!((&env["WORLD_SIZE"][..], &env["LOCAL_RANK"][..], &env["GROUP_RANK"][..]), ("4", "1", "1"));
    nodes[0].signal(Signal::SIGKILL);
    nodes[0].wait();
    until("all processes of the round have ended", || !first.iter().any(|pid| is_running(*pid)));
    let mut third = join();
    let second = pids(&told, "pid", 8);
    assert_eq!(second.len(), 8);
    std::fs::write(Path::new(&told).join("go"), "").unwrap();
    let report = coordinator.object();
    assert_eq!((&report["restarts"], &report["world"]), (&1.into(), &4.into()), "{report}");
    assert_eq!(coordinator.wait(), Some(0));
    assert_eq!((third.wait(), nodes[1].wait()), (Some(0), Some(0)));
}

#[test]
fn tensorflow_and_mxnet_get_their_clusters() {
    let home = Home::new();
    let told = folder(&home);
    // Servers run until they are asked to end.
    let text = "env > \"$1/$MILLRACE_ROLE.${RANK:-x}.env\"\n\
                [ \"$MILLRACE_ROLE\" = worker ] || while :; do sleep 600; done\n\
                while [ ! -s \"$1/server.x.env\" ]; do sleep 0.01; done\n";
    let train = script(&home, "train.sh", text);
    let run = |framework: &str| {
        let args = ["train", "--script", &train, "--nproc-per-node", "2", "--servers", "1"];
        home.ok(args.iter().chain(&["--framework", framework, "--", &told]));
        let of = |name: &str| environment(&Path::new(&told).join(name));
        (of("worker.1.env"), of("server.x.env"))
    };
    let (worker, server) = run("tensorflow");
    let config = |env: &BTreeMap<String, String>| serde_json::from_str::<Value>(&env["TF_CONFIG"]).unwrap();
    assert_eq!(config(&worker)["cluster"], config(&server)["cluster"]);
    assert_eq!(config(&worker)["cluster"]["worker"].as_array().unwrap().len(), 2);
    assert_eq!(config(&worker)["task"], serde_json::json!({ "type": "worker", "index": 1 }));
    assert_eq!(config(&server)["task"], serde_json::json!({ "type": "ps", "index": 0 }));
    assert!(!server.contains_key("RANK"));
    let (worker, server) = run("mxnet");
    let scheduler = environment(&Path::new(&told).join("scheduler.x.env"));
    for (env, role) in [(&worker, "worker"), (&server, "server"), (&scheduler, "scheduler")] {
        assert_eq!(env["DMLC_ROLE"], role);
        assert_eq!((&env["DMLC_NUM_WORKER"][..], &env["DMLC_NUM_SERVER"][..]), ("2", "1"));
        assert_eq!(env["DMLC_PS_ROOT_PORT"], worker["DMLC_PS_ROOT_PORT"]);
    }
}

#[test]
fn mistakes_with_scripts_are_named_with_the_remedy() {
    let home = Home::new();
    let (token, told) = (token(&home), folder(&home));
    let token = token.to_str().unwrap();
    let as_job = home.file("train.py", "print()\n");
    let (code, line) = home.fails(["train", as_job.to_str().unwrap()]);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("run it with: millrace train --script"), "{line}");
    let (code, line) = home.fails(["train", "--script", "missing.py"]);
    assert_eq!(code, 3, "{line}");
    assert!(line.contains("missing.py"), "{line}");
    let plain = home.file("train.txt", "echo\n");
    let (code, line) = home.fails(["train", "--script", plain.to_str().unwrap()]);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("chmod +x"), "{line}");
    let python = home.file("train.py", "print(1)\n");
    let (code, line) =
        home.fails(["train", "--script", python.to_str().unwrap(), "--python", "no-such-python"]);
    assert_eq!(code, 5, "{line}");
    assert!(line.contains("no-such-python") && line.contains("--python"), "{line}");
    let train = script(&home, "train.sh", "exit 0\n");
    let (code, line) = home.fails(["train", "--script", &train, "--nodes", "2"]);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("--listen"), "{line}");
    let (code, line) = home.fails(["train", "--script", &train, "--dataset", "none@v1:/x"]);
    assert_eq!(code, 3, "{line}");
    assert!(line.contains("none"), "{line}");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let listen = ["train", "--script", &train, "--token-file", token, "--listen"];
    let (code, line) = home.fails(listen.iter().chain(&[&address[..]]));
    assert_ne!(code, 0);
    assert!(line.contains(&address) && line.contains("in use"), "{line}");
    drop(taken);
    // This machine's node comes, the second one never does.
    let few = ["--nodes", "2", "--join-timeout", "1"];
    let address = free_address();
    let (code, line) = home.fails(listen.iter().chain(&[&address[..]]).chain(&few));
    assert_eq!(code, 5, "{line}");
    assert!(
        line.contains("too few nodes") && line.contains("--join-timeout") && line.contains("there is "),
        "{line}"
    );
    // A node whose script is another one.
    let mut coordinator =
        home.start(listen.iter().chain(&[&address[..], "--nodes", "2", "--workers-local", "0", "--", &told]));
    until("the coordinator listens", || std::net::TcpStream::connect(&address).is_ok());
    std::fs::write(&train, "#!/bin/sh\nexit 1\n").unwrap();
    let output = home.run(["worker", "--join", &address, "--token-file", token]);
    let (code, line) = failure(&output, "a node with another script");
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("SHA-256") && line.contains("copy"), "{line}");
    coordinator.signal(Signal::SIGTERM);
    assert_eq!(coordinator.wait(), Some(1));
    // One job of a name at a time.
    let wait = script(&home, "wait.sh", "echo $$ > \"$1/one.pid\"\nexec sleep 600\n");
    let mut first = home.start(["train", "--script", &wait, "--", &told]);
    pids(&told, "pid", 1);
    let (code, line) = home.fails(["train", "--script", &wait]);
    assert_eq!(code, 4, "{line}");
    assert!(line.contains("already running"), "{line}");
    first.signal(Signal::SIGTERM);
    assert_eq!(first.wait(), Some(1));
}
