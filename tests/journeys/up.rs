//! Tests of `millrace up`: all configured parts, started together and stopped in order.

use crate::support::{Home, Service, fuse_permitted, operations, project, scrape, try_scrape, until};

const CONFIG: &str = r#"
[streams]
topics = [{ name = "digits", partitions = 2 }, { name = "asked" }]
[streams.broker]
listen = "127.0.0.1:0"

[up]
volumes = ["digits"]
train = ["train.toml"]
snapshots = [{ volume = "digits", every_s = 1, keep = 2 }]
MOUNTS

[[ingest.jobs]]
name = "digits"
topic = "digits"
volume = "digits"
path = "train"
flush_ms = 200

[serving]
grpc = "127.0.0.1:0"
http = "127.0.0.1:0"
metrics = "127.0.0.1:0"
volume = "digits"
poll_ms = 100

[[serving.pipes]]
name = "answers"
input = "asked"
output = "answered"
model = "digits"
columns = { input = "pixels" }
"#;

const JOB: &str = r#"
name = "digits"
dataset = "digits@frozen:/train"
features = "pixels"
label = "label"
model = { kind = "mlp", inputs = 64, hidden = [32], classes = 10, scale = 0.0625 }
optimizer = { kind = "adamw", learning_rate = 0.003 }
batch_rows = 96
epochs_max = 3
workers = 1
"#;

#[test]
fn declared_service_runs_all_parts_and_stops_in_order() {
    let home = Home::new();
    let mounts = if fuse_permitted() { "mounts = [{ volume = \"digits\", path = \"mnt\" }]" } else { "" };
    let config = home.file("up.toml", CONFIG.replace("MOUNTS", mounts));
    home.file("train.toml", JOB);
    let config = config.to_str().unwrap();
    let mut up = home.start(["--config", config, "up", "--json"]);
    let addresses = up.object();

    let examples = project().join("examples/digits");
    let (train, test) = (examples.join("digits.jsonl"), examples.join("digits-test.jsonl"));
    home.json(["--config", config, "produce", "digits", train.to_str().unwrap()]);
    until("all records have landed", || {
        // Until the first file exists, a feed reports that it has nothing to read.
        let output = home.run(["--config", config, "feed", "digits:/train", "--dry", "--json"]);
        output.status.success()
            && serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["rows"] == 1437
    });
    home.ok(["--config", config, "snapshot", "create", "digits@frozen"]);
    // Training starts automatically and publishes, and the server loads the model.
    until("the model answers", || {
        let args =
            ["--config", config, "predict", "digits", test.to_str().unwrap(), "--input", "pixels", "--json"];
        let output = home.run(args);
        output.status.success() && {
            let printed: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            printed["predicted"] == 360
        }
    });
    home.json(["--config", config, "produce", "asked", test.to_str().unwrap()]);
    let metrics = addresses["metrics"].as_str().unwrap().to_owned();
    until("the pipe has answered", || {
        let text = http_get(&metrics, "/metrics");
        text.lines()
            .any(|line| line.starts_with("millrace_serving_pipe_records_total") && line.ends_with(" 360"))
    });
    until("old scheduled snapshots go", || {
        let listed = home.json(["--config", config, "snapshot", "list", "digits"]);
        let names: Vec<_> =
            listed.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect();
        names.iter().filter(|name| name.starts_with("scheduled-")).count() == 2
            && names.iter().any(|n| n == "frozen")
    });
    if fuse_permitted() {
        assert!(home.dir.path().join("mnt/.snapshots/frozen/train").is_dir());
    }
    assert_eq!(up.stop(), 0);
    // After an orderly stop nothing is mounted, and all data is readable without the service.
    assert!(!home.dir.path().join("mnt/.snapshots").exists());
    assert_eq!(home.json(["--config", config, "feed", "digits@frozen:/train", "--dry"])["rows"], 1437);
}

#[test]
fn snapshot_schedules_are_independent_and_survive_errors() {
    let home = Home::new();
    let config = home.file(
        "up.toml",
        "[streams.broker]\nlisten = \"127.0.0.1:0\"\n[up]\nvolumes = [\"v\"]\nsnapshots = [\n\
         { volume = \"v\", every_s = 1, keep = 2 },\n{ volume = \"v\", name = \"slow\", every_s = 2, keep = 3 },\n\
         { volume = \"late\", every_s = 1, keep = 1 },\n{ volume = \"v\", name = \"rare\", every_s = 86400, keep = 1 }]\n",
    );
    let config = config.to_str().unwrap();
    let mut up = home.start(["--config", config, "up", "--json"]);
    up.object();
    let names = |volume: &str| -> Vec<String> {
        let listed = home.json(["snapshot", "list", volume]);
        listed.as_array().unwrap().iter().map(|s| s["name"].as_str().unwrap().to_owned()).collect()
    };
    let count = |names: &[String], prefix: &str| names.iter().filter(|name| name.starts_with(prefix)).count();
    until("each schedule has its own snapshots", || {
        let names = names("v");
        count(&names, "scheduled-every-1s-") == 2
            && count(&names, "scheduled-slow-") == 3
            && count(&names, "scheduled-rare-") == 1
    });
    // The missing volume appears while the service runs.
    home.ok(["volume", "create", "late"]);
    until("the missing volume is tried again", || count(&names("late"), "scheduled-every-1s-") == 1);
    assert_eq!(up.stop(), 0);
}

#[test]
fn a_service_without_models_serves_the_metrics_of_its_mounts() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let config = home.file(
        "up.toml",
        "[streams.broker]\nlisten = \"127.0.0.1:0\"\n[up]\nvolumes = [\"v\"]\nmetrics = \"127.0.0.1:0\"\n\
         mounts = [{ volume = \"v\", path = \"mnt\" }, { volume = \"v\", path = \"m\" }]\n",
    );
    let mut up = home.start(["--config", config.to_str().unwrap(), "up", "--json"]);
    let address = up.object()["metrics"].as_str().unwrap().to_owned();
    let mounts = ["mnt", "m"].map(|name| home.dir.path().join(name));
    for (i, at) in mounts.iter().enumerate() {
        for file in 0..5 + i {
            std::fs::write(at.join(format!("{i}.{file}")), b"x").unwrap();
        }
    }
    for (i, at) in mounts.iter().enumerate() {
        until("all is counted", || operations(&scrape(&address), at, "create") == 5 + i as u64);
    }
    assert_eq!(up.stop(), 0);
    assert!(try_scrape(&address).is_none());
}

fn http_get(address: &str, path: &str) -> String {
    use std::io::{Read, Write};
    let mut socket = std::net::TcpStream::connect(address).unwrap();
    write!(socket, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    text
}

#[test]
fn service_ends_with_an_error_when_its_mount_is_removed() {
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let text = "[streams.broker]\nlisten = \"127.0.0.1:0\"\n[up]\nvolumes = [\"v\"]\n\
                mounts = [{ volume = \"v\", path = \"mnt\" }]\n";
    let config = home.file("m.toml", text);
    let mut up = home.start(["--config", config.to_str().unwrap(), "up", "--json"]);
    let mounted = up.object()["mount"].as_str().unwrap().to_owned();
    home.ok(["umount", &mounted]);
    assert_eq!(up.wait(), Some(1));
}

#[test]
fn one_bad_label_leaves_the_model_server_up() {
    let home = Home::new();
    let config = home.file("up.toml", CONFIG.replace("MOUNTS", ""));
    home.file("train.toml", JOB);
    let config = config.to_str().unwrap();
    let mut up = home.start(["--config", config, "up", "--json"]);
    let addresses = up.object();
    let lines = std::fs::read_to_string(project().join("examples/digits/digits.jsonl")).unwrap();
    let mut records: Vec<serde_json::Value> =
        lines.lines().take(200).map(|line| serde_json::from_str(line).unwrap()).collect();
    records[150]["label"] = serde_json::json!(99);
    let text: String = records.iter().map(|record| format!("{record}\n")).collect();
    let file = home.file("labels.jsonl", text);
    home.json(["--config", config, "produce", "digits", file.to_str().unwrap()]);
    until("all records have landed", || {
        let output = home.run(["--config", config, "feed", "digits:/train", "--dry", "--json"]);
        output.status.success()
            && serde_json::from_slice::<serde_json::Value>(&output.stdout).unwrap()["rows"] == 200
    });
    home.ok(["--config", config, "snapshot", "create", "digits@frozen"]);
    let metrics = addresses["metrics"].as_str().unwrap().to_owned();
    until("the training has failed and was started again", || {
        let reported = |name: &str| {
            let text = http_get(&metrics, "/metrics");
            let line = text.lines().find(|line| line.starts_with(name) && line.contains("train.toml"));
            line.is_some_and(|line| !line.ends_with(" 0"))
        };
        reported("millrace_up_part_restarts_total") && reported("millrace_up_part_failures")
    });
    let http = addresses["http"].as_str().unwrap().to_owned();
    assert!(http_get(&http, "/v2/health/ready").contains("true"));
    assert_eq!(up.stop(), 0);
}

#[test]
fn waiting_parts_appear_in_the_metrics() {
    let home = Home::new();
    let text = CONFIG
        .replace("MOUNTS", "")
        .replace("keep = 2 }]", "keep = 2 }, { volume = \"late\", every_s = 86400, keep = 1 }]");
    let config = home.file("up.toml", text);
    home.file("train.toml", JOB);
    let config = config.to_str().unwrap();
    let mut up = home.start(["--config", config, "up", "--json"]);
    let metrics = up.object()["metrics"].as_str().unwrap().to_owned();
    let waits = |part: &str| {
        let text = http_get(&metrics, "/metrics");
        let name = format!("millrace_up_part_waiting{{part=\"{part}\"}} ");
        text.lines().find_map(|line| line.strip_prefix(&name)).map(str::to_owned)
    };
    until("the training waits for its snapshot", || waits("train train.toml").as_deref() == Some("1"));
    let schedule = "snapshots every-86400s of late";
    until("the schedule waits for its volume", || waits(schedule).as_deref() == Some("1"));
    home.ok(["--config", config, "volume", "create", "late"]);
    until("the schedule goes on", || waits(schedule).as_deref() == Some("0"));
    let record = home.file("asked.jsonl", "{\"pixels\": [0]}\n");
    home.json(["--config", config, "produce", "asked", record.to_str().unwrap()]);
    until("the pipe waits for its model", || waits("pipe answers").as_deref() == Some("1"));
    assert_eq!(up.stop(), 0);
}

#[test]
fn a_service_trains_on_each_newer_snapshot() {
    let home = Home::new();
    let config = home.file(
        "up.toml",
        "[streams.broker]\nlisten = \"127.0.0.1:0\"\n[up]\nmetrics = \"127.0.0.1:0\"\ntrain = [\"train.toml\"]\n",
    );
    home.file("train.toml", JOB.replace("@frozen", "@latest").replace("epochs_max = 3", "epochs_max = 1"));
    let config = config.to_str().unwrap();
    // The first snapshot is older than the first record.
    home.ok(["volume", "create", "digits"]);
    home.ok(["snapshot", "create", "digits@empty"]);
    let socket_path = home.dir.path().join("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&socket_path).unwrap();
    let mut up = Service::spawn(
        home.command().args(["--config", config, "up", "--json"]).env("NOTIFY_SOCKET", &socket_path),
    );
    let metrics = up.object()["metrics"].as_str().unwrap().to_owned();
    let mut message = [0; 20];
    let len = socket.recv(&mut message).unwrap();
    assert_eq!(&message[..len], b"READY=1");
    let records = project().join("examples/digits/digits-test.jsonl");
    home.ok(["--config", config, "produce", "digits", records.to_str().unwrap()]);
    home.ok(["--config", config, "ingest", "--topic", "digits", "--volume", "digits", "--path", "/train"]);
    home.ok(["snapshot", "create", "digits@one"]);
    let trained_on = |version: &str| {
        let output =
            home.run(["model", "show", "digits", "--volume", "digits", "--version", version, "--json"]);
        let shown: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        output.status.success().then(|| shown.unwrap().to_string())
    };
    until("the first version is there", || trained_on("1").is_some());
    assert!(trained_on("1").unwrap().contains("\"one\""), "{:?}", trained_on("1"));
    let text = http_get(&metrics, "/metrics");
    let restarts = text.lines().find(|line| line.starts_with("millrace_up_part_restarts_total"));
    assert!(
        restarts.is_some_and(|line| line.ends_with(" 0")),
        "a snapshot without records is no failure: {restarts:?}"
    );
    home.ok(["snapshot", "create", "digits@two"]);
    until("the next snapshot is trained on", || {
        trained_on("2").is_some_and(|lineage| lineage.contains("\"two\""))
    });
    // An older snapshot becomes the newest when that is deleted. It is not trained on again.
    home.ok(["snapshot", "delete", "digits@two"]);
    home.ok(["snapshot", "create", "digits@two"]);
    until("a snapshot of the same name is another one", || trained_on("3").is_some());
    assert_eq!(up.stop(), 0);
    assert!(trained_on("4").is_none(), "once on each");
}

#[test]
fn a_service_trains_once_on_a_mixture_with_a_topic() {
    let home = Home::new();
    let config = home.file(
        "up.toml",
        "[streams.broker]\nlisten = \"127.0.0.1:0\"\n[up]\nmetrics = \"127.0.0.1:0\"\ntrain = [\"train.toml\"]\n",
    );
    let mixture = "[\"topic:digits@latest=0.5\", \"files@latest:/train=0.5\"]";
    let job = JOB.replace("\"digits@frozen:/train\"", mixture).replace("epochs_max = 3", "epochs_max = 1");
    home.file("train.toml", job);
    let config = config.to_str().unwrap();
    let records = project().join("examples/digits/digits-test.jsonl");
    home.ok(["volume", "create", "files"]);
    home.ok(["cp", records.to_str().unwrap(), "files:/train/a.jsonl"]);
    let mut up = home.start(["--config", config, "up", "--json"]);
    let metrics = up.object()["metrics"].as_str().unwrap().to_owned();
    home.ok(["--config", config, "produce", "digits", records.to_str().unwrap()]);
    until("the training waits for the snapshot beside the topic", || {
        let text = http_get(&metrics, "/metrics");
        text.lines().any(|line| line == "millrace_up_part_waiting{part=\"train train.toml\"} 1")
    });
    home.ok(["snapshot", "create", "files@one"]);
    let trained_on = |version: &str| {
        let output =
            home.run(["model", "show", "digits", "--volume", "files", "--version", version, "--json"]);
        output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
    };
    until("the first version is there", || trained_on("1").is_some());
    let shown: serde_json::Value = serde_json::from_str(&trained_on("1").unwrap()).unwrap();
    let sources = &shown["lineage"]["mixture"];
    let topic = sources[0]["dataset"].as_str().unwrap();
    assert!(topic.starts_with("topic:digits@latest?offsets=0:0-360:"), "{shown}");
    assert_eq!((&sources[1]["dataset"], &sources[1]["weight"]), (&"files@one:/train".into(), &"0.5".into()));
    home.ok(["snapshot", "create", "files@two"]);
    assert_eq!(up.stop(), 0);
    assert!(trained_on("2").is_none(), "once, whatever arrives or is created later");
}

#[test]
fn kubernetes_service_variables_are_ignored() {
    let home = Home::new();
    let output = home
        .command()
        .args(["volume", "list"])
        .env("MILLRACE_SERVING_PORT", "tcp://10.0.0.7:8000")
        .env("MILLRACE_SERVING_PORT_8000_TCP", "tcp://10.0.0.7:8000")
        .env("MILLRACE_SERVING_SERVICE_HOST", "10.0.0.7")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
