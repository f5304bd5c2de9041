//! Training with workers that join with `millrace worker --join`.

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::process::{Child, Stdio};

use millrace_datafs::{Config, Datafs, Publish};
use nix::sys::signal::Signal;

use crate::support::{Home, Service, until};

/// A home with the dataset `v@s:/t` and a token file.
fn prepared() -> (Home, PathBuf) {
    let home = Home::new();
    let lines: String = (0..200)
        .map(|id: u32| {
            let x = f64::from(id.wrapping_mul(2_654_435_761) % 1_000) / 500.0 - 1.0;
            format!("{{\"id\":{id},\"x\":[{x},{}],\"label\":{}}}\n", -x, u8::from(x > 0.0))
        })
        .collect();
    let file = home.file("records.jsonl", lines);
    home.ok(["produce", "t", file.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "t", "--volume", "v", "--path", "t"]);
    home.ok(["snapshot", "create", "v@s"]);
    let token = home.file("token", "0123456789abcdef0123456789abcdef\n");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    (home, token)
}

fn job(home: &Home, name: &str, more: &str) -> String {
    let text = format!(
        "name = \"{name}\"\ndataset = \"v@s:/t\"\nfeatures = \"x\"\nlabel = \"label\"\n\
         model = {{ kind = \"mlp\", inputs = 2, hidden = [16], classes = 2 }}\nbatch_rows = 8\nvirtual_shards = 4\n\
         epochs_max = 200\ncheckpoint_every_steps = 50\n{more}"
    );
    home.file(&format!("{name}.toml"), text).to_str().unwrap().to_owned()
}

/// A job of 50 steps, with a worker of this machine.
fn short_job(home: &Home, name: &str) -> String {
    let file = job(home, name, "workers = 1\n");
    let text = std::fs::read_to_string(&file).unwrap().replace("epochs_max = 200", "epochs_max = 2");
    std::fs::write(&file, text).unwrap();
    file
}

fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

#[test]
fn workers_join_die_and_leave_without_changing_the_model() {
    let (home, token) = prepared();
    let token = token.to_str().unwrap();
    let plain = home.json(["train", &job(&home, "plain", "workers = 1\n")]);
    let address = free_address();
    let joined = job(&home, "joined", "workers_min = 2\n");
    let mut coordinator = Service::spawn(home.command().args(["train", &joined, "--json"]).args([
        "--listen",
        &address,
        "--token-file",
        token,
        "--workers-local",
        "0",
    ]));
    let start = || home.start(["worker", "--join", &address, "--token-file", token]);
    let mut first = start();
    let mut second =
        home.start(["worker", "--join", &address, "--token-file", token, "--exit-on-leave", "75"]);
    let checkpoints = || home.run(["ls", "-r", "v:/checkpoints/joined"]);
    until("the first checkpoint is there", || {
        String::from_utf8_lossy(&checkpoints().stdout).contains("state.safetensors")
    });
    first.signal(Signal::SIGKILL);
    first.wait();
    let mut third = start();
    second.signal(Signal::SIGTERM);
    // As at the end of its terminal.
    second.signal(Signal::SIGHUP);
    assert_eq!(second.wait(), Some(75));
    assert!(coordinator.is_running());
    let mut fourth = start();
    let report = coordinator.object();
    assert_eq!(report["model_sha256"], plain["model_sha256"], "{report}");
    assert_eq!(report["rows_per_epoch"], plain["rows_per_epoch"], "{report}");
    assert_eq!((&report["workers_joined"], &report["workers_lost"]), (&4.into(), &1.into()), "{report}");
    for worker in [&mut third, &mut fourth] {
        assert_eq!(worker.wait(), Some(0));
    }
    assert_eq!(coordinator.wait(), Some(0));
}

#[test]
fn mistakes_of_a_worker_are_named_with_the_remedy() {
    let (home, token) = prepared();
    let path = token.to_str().unwrap();
    let address = free_address();
    let join = ["worker", "--join", &address, "--token-file", path, "--wait", "0"];
    let (code, line) = home.fails(join);
    assert_eq!(code, 5, "{line}");
    assert!(line.contains(&address) && line.contains("refused"), "{line}");

    for unusable in ["127.0.0.1", "host:", ":7100", "host:70000", "a:1,b"] {
        let (code, line) = home.fails(["worker", "--join", unusable, "--token-file", path]);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(unusable) && line.contains("write HOST:PORT"), "{line}");
    }

    let (code, line) = home.fails(["worker"]);
    assert_eq!(code, 5, "{line}");
    assert!(
        line.contains("--join HOST:PORT") && line.contains("--join alone") && line.contains("[cluster]"),
        "{line}"
    );

    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o640)).unwrap();
    let (code, line) = home.fails(join);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("chmod 600") && line.contains(path), "{line}");
    let train = job(&home, "j", "");
    let (code, line) = home.fails(["train", &train, "--listen", &address, "--token-file", path]);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("chmod 600"), "{line}");
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();

    let everywhere = ["train", &train, "--listen", "0.0.0.0:0", "--token-file", path];
    let (code, line) = home.fails(everywhere);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("--advertise") && line.contains("--workers-local 0"), "{line}");
    let nowhere = [&everywhere[..], &["--advertise", "no.such.invalid"]].concat();
    let (code, line) = home.fails(nowhere);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("no.such.invalid"), "{line}");
    let (code, line) = home.fails(["train", &train, "--workers-min", "3", "--workers", "2"]);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("workers_min = 3") && line.contains("--listen"), "{line}");
}

#[test]
fn a_worker_finds_its_coordinator_by_an_srv_record_and_sees_a_changed_one() {
    let (home, token) = prepared();
    let path = token.to_str().unwrap();
    let address = free_address();
    let right: u16 = address.rsplit_once(':').unwrap().1.parse().unwrap();
    // The first answers name a port at which nothing listens.
    let wrong: u16 = free_address().rsplit_once(':').unwrap().1.parse().unwrap();
    let names = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let config = home.file(
        "worker.toml",
        format!(
            "[cluster]\nnameservers = [\"{}\"]\ncoordinator = \"dnssrv+_coordinator._tcp.train.example\"\n",
            names.local_addr().unwrap()
        ),
    );
    std::thread::spawn(move || {
        let mut question = [0; 512];
        let mut answered = 0;
        while let Ok((length, peer)) = names.recv_from(&mut question) {
            let port = if answered < 2 { wrong } else { right };
            answered += 1;
            let mut answer = question[..length].to_vec();
            // An answer with one record, whose owner is the name in question.
            answer[2..8].copy_from_slice(&[0x81, 0x80, 0, 1, 0, 1]);
            let target = b"\x09localhost\0";
            answer.extend([0xc0, 12, 0, 33, 0, 1, 0, 0, 0, 0, 0, 6 + target.len() as u8, 0, 0, 0, 0]);
            answer.extend(port.to_be_bytes());
            answer.extend(target);
            names.send_to(&answer, peer).unwrap();
        }
    });
    let train = job(&home, "found", "");
    let listen = ["train", &train, "--listen", &address, "--token-file", path, "--workers-local", "0"];
    let mut coordinator = home.start(listen);
    let worker = ["--config", config.to_str().unwrap(), "worker", "--token-file", path, "--join"];
    home.ok(worker);
    assert_eq!(coordinator.wait(), Some(0));
}

/// A worker that has found no coordinator and has asked for the end of its job, behind its first warning.
fn waiting_worker(home: &Home, token: &str, job: &str) -> (Child, BufReader<std::process::ChildStderr>) {
    let nowhere = free_address();
    let mut command = home.command();
    command.args(["worker", "--join", &nowhere, "--token-file", token, "--job", job]);
    let mut worker = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(worker.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("waiting for the coordinator") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "the worker has ended");
    }
    (worker, said)
}

#[test]
fn a_worker_that_comes_after_the_end_of_its_job_ends_with_success() {
    let (home, token) = prepared();
    let token = token.to_str().unwrap();
    let file = short_job(&home, "over");
    let short = std::fs::read_to_string(&file).unwrap();
    let nowhere = free_address();
    let late = ["worker", "--join", &nowhere, "--token-file", token, "--wait", "0", "--job", &file];

    // No coordinator has been there.
    assert_eq!(home.fails(late).0, 5);
    home.ok(["train", &file]);
    let output = home.run(late);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("the job over is complete"), "{said}");

    // Another computation, and one with more to do.
    assert_eq!(home.fails(late.iter().chain(&["--seed", "9"])).0, 5);
    let longer = home.file("longer.toml", short.replace("epochs_max = 2", "epochs_max = 3"));
    let longer = longer.to_str().unwrap();
    let of_longer = late.map(|word| if word == file { longer } else { word });
    assert_eq!(home.fails(of_longer).0, 5);
    home.ok(["train", longer]);
    home.ok(of_longer);
    // The run has gone beyond what the first file asks for, but that stays complete.
    home.ok(["train", &file]);
    home.ok(late);

    std::fs::write(&file, "name = \"over\"\n").unwrap();
    let (code, line) = home.fails(late);
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("over.toml"), "{line}");
    std::fs::remove_file(&file).unwrap();
    let (code, line) = home.fails(late);
    assert_eq!(code, 3, "{line}");
}

/// Makes the lease of a job what its coordinator would have left, had its release failed. Lets the run be unpublished.
fn unrelease(home: &Home, job: &str, is_published: bool) {
    let datafs = Datafs::open(&home.path(), &Config::default()).unwrap();
    let view = datafs.view(&"v".parse().unwrap()).unwrap();
    let key = format!("trainer/{job}/lease");
    let mut record: serde_json::Value =
        serde_json::from_slice(&view.key_get(&key).unwrap().unwrap()).unwrap();
    assert!(["finished", "held"].contains(&record["standing"].as_str().unwrap()), "{record}");
    (record["standing"], record["lease_ms"]) = ("held".into(), 500.into());
    let mut publish = Publish::new().put_key(key, record.to_string());
    if !is_published {
        let published = view.key_scan(&format!("trainer/{job}/published/")).unwrap();
        assert!(!published.is_empty());
        publish = published.into_iter().fold(publish, |publish, (key, _)| publish.delete_key(key));
    }
    view.publish(publish).unwrap();
}

#[test]
fn a_late_worker_ends_with_success_if_the_coordinator_published_and_could_not_release_its_lease() {
    let (home, token) = prepared();
    let token = token.to_str().unwrap();
    let file = short_job(&home, "unreleased");
    home.ok(["train", &file]);
    unrelease(&home, "unreleased", true);
    let (mut worker, mut said) = waiting_worker(&home, token, &file);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(worker.wait().unwrap().success(), "{rest}");
    assert!(rest.contains("the job unreleased is complete"), "{rest}");
    // Without a publication, a coordinator has to come.
    unrelease(&home, "unreleased", false);
    let nowhere = free_address();
    let late = ["worker", "--join", &nowhere, "--token-file", token, "--wait", "2", "--job", &file];
    assert_eq!(home.fails(late).0, 5);
}

#[test]
fn a_worker_of_the_newest_snapshot_waits_until_that_is_trained() {
    let (home, token) = prepared();
    let token = token.to_str().unwrap();
    let file = short_job(&home, "moving");
    let text = std::fs::read_to_string(&file).unwrap().replace("v@s:", "v@latest:");
    std::fs::write(&file, text).unwrap();
    let nowhere = free_address();
    let late = ["worker", "--join", &nowhere, "--token-file", token, "--wait", "0", "--job", &file];
    home.ok(["train", &file]);
    home.ok(late);
    home.ok(["snapshot", "create", "v@t"]);
    assert_eq!(home.fails(late).0, 5);
    home.ok(["train", &file]);
    home.ok(late);
}

#[test]
fn a_waiting_worker_ends_when_its_job_ends_without_it() {
    let (home, token) = prepared();
    let token = token.to_str().unwrap();
    let file = short_job(&home, "without");
    let (mut worker, mut said) = waiting_worker(&home, token, &file);
    home.ok(["train", &file]);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(worker.wait().unwrap().success(), "{rest}");
    assert!(rest.contains("the job without is complete"), "{rest}");
}

#[test]
fn a_waiting_worker_ends_with_the_error_of_a_run_that_failed() {
    let (home, token) = prepared();
    let token = token.to_str().unwrap();
    let file =
        job(&home, "failing", "workers_min = 1\noptimizer = { kind = \"sgd\", learning_rate = 1e30 }\n");
    let address = free_address();
    let coordinator =
        ["train", &file, "--json", "--listen", &address, "--token-file", token, "--workers-local", "0"];
    let mut first = home.start(coordinator);
    until("the coordinator listens", || std::net::TcpStream::connect(&address).is_ok());
    let (mut waiting, mut said) = waiting_worker(&home, token, &file);
    let mut joined = home.start(["worker", "--join", &address, "--token-file", token]);
    let code = first.wait();
    joined.wait();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert_eq!(waiting.wait().unwrap().code(), code, "{rest}");
    assert!(rest.contains("job failing failed under its coordinator"), "{rest}");
    // A worker that starts afterwards waits for a coordinator that tries again.
    let late = ["worker", "--join", &address, "--token-file", token, "--wait", "0", "--job", &file];
    assert_eq!(home.fails(late).0, 5);
}
