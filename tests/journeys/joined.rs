//! Training with workers that join with `millrace worker --join`.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

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
