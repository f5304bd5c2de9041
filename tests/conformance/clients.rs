//! Tests with unmodified clients: kcat, confluent-kafka, tritonclient, perf_analyzer, KServe's client,
//! PyTorch, pyarrow and duckdb.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::support::{Home, Service, fuse_permitted, program, project};

pub(crate) fn python(script: &str) -> Command {
    let mut command = Command::new(project().join(".local/python/bin/python"));
    command.arg(project().join("tests/conformance/clients").join(script));
    command
}

fn records(name: &str) -> PathBuf {
    project().join("examples/digits").join(name)
}

fn broker(home: &Home) -> (Service, String) {
    let mut service = home.start(["broker", "--listen", "127.0.0.1:0", "--json"]);
    let kafka = service.object()["kafka"].as_str().unwrap().to_owned();
    (service, kafka)
}

fn quickstart(home: &Home) -> (Service, Value) {
    let mut service = home.start(["quickstart", "--keep", "--free-ports", "--json"]);
    let report = service.object();
    (service, report)
}

fn address<'a>(report: &'a Value, name: &str) -> &'a str {
    report["addresses"][name].as_str().unwrap_or_else(|| panic!("no address {name} in {report}"))
}

#[test]
#[ignore = "needs kcat: run make conformance"]
fn kcat_produces_and_consumes() {
    let home = Home::new();
    let (service, kafka) = broker(&home);
    let lines: Vec<String> = (0..2_000).map(|i| format!("key-{i}:value {i}")).collect();
    let mut producer = Command::new("kcat")
        .args(["-b", &kafka, "-P", "-t", "from-kcat", "-K", ":", "-p", "0", "-X", "enable.idempotence=true"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    producer.stdin.take().unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
    assert!(producer.wait().unwrap().success());

    let consumed = program(Command::new("kcat").args([
        "-b",
        &kafka,
        "-C",
        "-t",
        "from-kcat",
        "-p",
        "0",
        "-o",
        "beginning",
        "-e",
        "-q",
        "-K",
        ":",
    ]));
    assert_eq!(consumed.lines().collect::<Vec<_>>(), lines);
    let tail = program(Command::new("kcat").args([
        "-b",
        &kafka,
        "-C",
        "-t",
        "from-kcat",
        "-p",
        "0",
        "-o",
        "-5",
        "-e",
        "-q",
        "-f",
        "%o %s\n",
    ]));
    assert_eq!(tail.lines().next(), Some("1995 value 1995"));
    let listed = program(Command::new("kcat").args(["-b", &kafka, "-L"]));
    assert!(listed.contains("topic \"from-kcat\" with 1 partitions"), "{listed}");
    assert_eq!(service.stop(), 0);
}

#[test]
#[ignore = "needs confluent-kafka: run make conformance"]
fn confluent_kafka_produces_and_consumes() {
    let home = Home::new();
    let (service, kafka) = broker(&home);
    let said = program(python("confluent.py").arg(&kafka));
    assert!(said.contains("20000 records, each once"), "{said}");
    assert_eq!(service.stop(), 0);
}

#[test]
#[ignore = "needs tritonclient, pyarrow and duckdb: run make conformance"]
fn python_clients_use_a_running_pipeline() {
    let home = Home::new();
    let (service, report) = quickstart(&home);
    let test = records("digits-test.jsonl");
    for (script, name) in [("triton_grpc.py", "grpc"), ("triton_http.py", "http")] {
        let said = program(python(script).arg(address(&report, name)).arg("digits").arg(&test));
        assert!(said.contains("360 predictions"), "{said}");
    }
    let said = program(
        python("triton_data.py")
            .args([address(&report, "grpc"), address(&report, "http"), "digits"])
            .arg(&test),
    );
    assert!(said.contains("360 rows"), "{said}");
    for (script, says) in
        [("triton_async.py", "360 rows side by side"), ("kserve_client.py", "360 predictions")]
    {
        let said = program(
            python(script).args([address(&report, "grpc"), address(&report, "http"), "digits"]).arg(&test),
        );
        assert!(said.contains(says), "{said}");
    }
    // A second server over the same volume, which serves only models that a client loads.
    let mut explicit = Service::spawn(
        home.command().args(["serve", "--volume", "digits", "--control", "explicit", "--json"]).args([
            "--grpc",
            "127.0.0.1:0",
            "--http",
            "127.0.0.1:0",
            "--metrics",
            "127.0.0.1:0",
        ]),
    );
    let listens = explicit.object();
    let (grpc, http) = (listens["grpc"].as_str().unwrap(), listens["http"].as_str().unwrap());
    let said = program(python("triton_control.py").args([grpc, http, "digits"]));
    assert!(said.contains("loaded and unloaded twice"), "{said}");
    assert_eq!(explicit.stop(), 0);
    if fuse_permitted() {
        let said = program(python("parquet.py").arg(address(&report, "mount")).arg(records("digits.jsonl")));
        assert!(said.contains("1437 rows"), "{said}");
    }
    assert_eq!(service.stop(), 0);
}

/// Models that PyTorch exported are imported into a volume as a user would, served together, and give
/// PyTorch's answers.
#[test]
#[ignore = "needs PyTorch, tritonclient and perf_analyzer: run make conformance"]
fn models_of_pytorch_answer_as_in_pytorch() {
    let home = Home::new();
    let exported = home.dir.path().join("exported");
    std::fs::create_dir(&exported).unwrap();
    // Debian's PyTorch package needs Debian's Python.
    let mut export = Command::new("/usr/bin/python3");
    export.arg(project().join("tests/conformance/clients/torch_export.py")).arg(&exported);
    let said = program(&mut export);
    assert!(said.contains("exported by PyTorch"), "{said}");
    let mlp = exported.join("mlp.onnx");
    home.ok(["model", "init", "mlp", "--inputs", "64", "--classes", "10", mlp.to_str().unwrap()]);
    home.ok(["volume", "create", "models"]);
    for name in ["resnet18", "mobilenet_v2", "bert", "lstm", "mlp"] {
        let file = exported.join(format!("{name}.onnx"));
        let import = ["model", "import", file.to_str().unwrap(), "--name", name, "--volume", "models"];
        let manifest = home.json(import);
        assert_eq!(manifest["version"], 1, "{manifest}");
        let producer = manifest["lineage"]["imported"]["producer"].as_str().unwrap();
        assert!(producer.starts_with(if name == "mlp" { "millrace " } else { "pytorch " }), "{producer}");
    }
    let any = "127.0.0.1:0";
    let mut service = Service::spawn(
        home.command()
            .args(["serve", "--volume", "models", "--json", "--grpc", any, "--http", any, "--metrics", any])
            // One session, so that requests wait for each other on any number of processors.
            .env("MILLRACE_SERVING__SESSIONS_MAX", "1"),
    );
    let served = service.object();
    let (grpc, http) = (served["grpc"].as_str().unwrap(), served["http"].as_str().unwrap());
    let said = program(python("torch_models.py").args([grpc, http]).arg(&exported));
    assert!(said.contains("4 models answer as PyTorch does"), "{said}");
    if cfg!(target_arch = "x86_64") {
        let said =
            program(python("perf.py").arg(project().join(".local/perf_analyzer")).args([grpc, http, "mlp"]));
        assert!(said.contains("every request answered"), "{said}");
    }
    assert_eq!(service.stop(), 0);
}

/// Models of PyTorch, scikit-learn and quantization tools, most of them with rows that depend on each other.
/// 24 clients get the answers of single requests, and only models with independent rows are batched.
#[test]
#[ignore = "needs PyTorch, scikit-learn, onnxruntime and tritonclient: run make conformance"]
fn rows_that_depend_on_each_other_are_never_batched() {
    let home = Home::new();
    let made = home.dir.path().join("made");
    std::fs::create_dir(&made).unwrap();
    let mut export = Command::new("/usr/bin/python3");
    export.arg(project().join("tests/conformance/clients/dependent_torch.py")).arg(&made);
    let said = program(&mut export);
    assert!(said.contains("exported by PyTorch"), "{said}");
    let said = program(python("dependent_tools.py").arg(&made));
    assert!(said.contains("made by scikit-learn"), "{said}");
    home.ok(["volume", "create", "models"]);
    let mut names = Vec::new();
    for file in std::fs::read_dir(&made).unwrap() {
        let file = file.unwrap().path();
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let import = ["model", "import", file.to_str().unwrap(), "--name", &name, "--volume", "models"];
        let manifest = home.json(import);
        assert_eq!(
            manifest["rows"]["independent"],
            name.starts_with("independent_"),
            "{name}: {}",
            manifest["rows"]
        );
        names.push(name);
    }
    let any = "127.0.0.1:0";
    let mut service = Service::spawn(
        home.command()
            .args(["serve", "--volume", "models", "--json", "--grpc", any, "--http", any, "--metrics", any])
            .env("MILLRACE_SERVING__SESSIONS_MAX", "1"),
    );
    let served = service.object();
    let said = program(python("dependent_models.py").arg(served["grpc"].as_str().unwrap()).args(&names));
    assert!(said.contains("10 dependent models answered 24 clients as one"), "{said}");
    assert_eq!(service.stop(), 0);
}
