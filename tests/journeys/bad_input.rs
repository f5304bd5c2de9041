//! Tests of user errors: one clear line, the right exit code or status, no partial output.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use millrace_bundle::{Bundle, Lineage};
use millrace_serving::client::{Client, ClientError};
use millrace_serving::tensor::{Data, Tensor};
use millrace_serving::wire::Form;
use object_store::local::LocalFileSystem;
use tonic::Code;

use crate::support::{Home, Service, Tmpfs, copy_program, failure, files_below};

const RECORDS: &str = r#"{"id":1,"x":[0.5,1.5],"label":0}
{"id":2,"x":[2.5,3.5],"label":1}
"#;

fn ingest_records(home: &Home) {
    let file = home.file("records.jsonl", RECORDS);
    home.ok(["produce", "t", file.to_str().unwrap()]);
    home.ok(["ingest", "--topic", "t", "--volume", "v"]);
    home.ok(["snapshot", "create", "v@s"]);
}

fn job(home: &Home, dataset: &str, model: &str) -> PathBuf {
    home.file(
        "train.toml",
        format!("name = \"j\"\ndataset = \"{dataset}\"\nfeatures = \"x\"\nlabel = \"label\"\nmodel = {model}\nbatch_rows = 2\nvirtual_shards = 1\nepochs_max = 2\nworkers = 1\n"),
    )
}

const MLP: &str = r#"{ kind = "mlp", inputs = 2, hidden = [4], classes = 2 }"#;

#[test]
fn port_in_use_is_named_with_the_remedy() {
    let home = Home::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, line) = home.fails(["broker", "--listen", &address]);
    assert_eq!(code, 4, "{line}");
    assert!(line.contains(&address) && line.contains("taken"), "{line}");
    let models = home.dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    for flag in ["--grpc", "--http", "--metrics"] {
        let mut args = vec!["serve", "--models", models.to_str().unwrap()];
        for other in ["--grpc", "--http", "--metrics"] {
            args.extend([other, if other == flag { &address } else { "127.0.0.1:0" }]);
        }
        let (code, line) = home.fails(args);
        assert_eq!(code, 4, "{line}");
        assert!(line.contains(&address) && line.contains(flag), "{line}");
    }
}

#[test]
fn configuration_mistakes_are_named_with_their_line() {
    let home = Home::new();
    for (text, says) in [
        (
            "[serving]\nhtpp = \"127.0.0.1:1\"\n",
            "line 2, column 1: unknown field `htpp` (did you mean `http`?)",
        ),
        ("[[ingest.jobs]]\nname = \"a\"\ntopik = \"t\"\n", "unknown field `topik`"),
        ("[nonsense]\n", "unknown field `nonsense`"),
        ("[serving\n", "line 1"),
        ("[serving]\ngrpc = 7\n", "line 2"),
    ] {
        let config = home.file("m.toml", text);
        let (code, line) = home.fails(["--config", config.to_str().unwrap(), "config"]);
        assert_eq!(code, 2, "{line}");
        assert!(line.contains(says) && line.contains("m.toml"), "{line}");
    }
    let (code, line) = home.fails(["--config", "missing.toml", "config"]);
    assert_eq!(code, 3, "{line}");
    let output = home.command().env("MILLRACE_SERVING__GRCP", "127.0.0.1:1").arg("config").output().unwrap();
    let (code, line) = failure(&output, "an unknown variable");
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("MILLRACE_SERVING__GRCP"), "{line}");
    assert!(!home.path().exists(), "a configuration mistake must not make a home");
}

#[test]
fn missing_or_unknown_name_lists_the_valid_names() {
    let home = Home::new();
    let (code, line) = home.fails(["serve"]);
    assert!(code == 2 && line.contains("--models DIR or --volume VOLUME"), "{line}");
    let (code, line) = home.fails(["ingest", "--job", "a"]);
    assert!(code == 3 && line.contains("declare it under [[ingest.jobs]]"), "{line}");
    let config =
        home.file("m.toml", "[[ingest.jobs]]\nname = \"b\"\ntopic = \"t\"\nvolume = \"v\"\npath = \"p\"\n");
    let (code, line) = home.fails(["--config", config.to_str().unwrap(), "ingest", "--job", "a"]);
    assert!(code == 3 && line.contains("it has b"), "{line}");
    let graph = home.file("m.onnx", "");
    let (code, line) =
        home.fails(["model", "import", graph.to_str().unwrap(), "--name", "m", "--models", "none"]);
    assert!(code == 3 && line.contains("mkdir -p none"), "{line}");
}

#[test]
fn a_home_that_cannot_be_used_is_refused() {
    let home = Home::new();
    let file = home.file("a-file", "");
    for place in [file.join("home"), PathBuf::from("/proc/millrace")] {
        let (code, line) = home.fails(["--home", place.to_str().unwrap(), "volume", "list"]);
        assert_eq!(code, 5, "{line}");
        assert!(line.contains(place.to_str().unwrap()) && line.contains("--home"), "{line}");
    }
    home.ok(["volume", "create", "v"]);
    let format = home.path().join("format.json");
    std::fs::write(&format, r#"{"format":99}"#).unwrap();
    let (code, line) = home.fails(["volume", "list"]);
    assert_eq!(code, 4, "{line}");
    assert!(line.contains("format 99"), "{line}");
    std::fs::write(&format, "garbage").unwrap();
    assert_eq!(home.fails(["volume", "list"]).0, 6);
}

#[test]
fn missing_volumes_topics_and_models_are_named() {
    let home = Home::new();
    ingest_records(&home);
    for args in [
        &["volume", "show", "nope"][..],
        &["snapshot", "list", "nope"],
        &["snapshot", "delete", "v@nope"],
        &["mount", "v@nope", "m"],
        &["feed", "v@nope:/t"],
        &["feed", "v@s:/nope"],
        &["model", "show", "nope", "--volume", "v"],
        &["ingest", "--topic", "nope", "--volume", "v"],
        &["ingest", "--job", "nope"],
        &["pipe", "--pipe", "nope", "--volume", "v"],
        &["pipe", "--from", "t", "--to", "o", "--model", "nope", "--volume", "v"],
        &["produce", "t", "nope.jsonl"],
    ] {
        let (code, line) = home.fails(args);
        assert_eq!(code, 3, "{args:?}: {line}");
        assert!(line.contains("nope"), "{args:?}: {line}");
    }
    let job = job(&home, "v@nope:/t", MLP);
    let (code, line) = home.fails(["train", job.to_str().unwrap()]);
    assert_eq!(code, 3, "{line}");
    assert!(line.contains("nope"), "{line}");
    let (code, line) = home.fails(["volume", "create", "v"]);
    assert_eq!(code, 4, "{line}");
    for name in ["-x", ".hidden", "a/b", ""] {
        let output = home.run(["volume", "create", "--", name]);
        assert_eq!(output.status.code(), Some(2), "{name:?}");
    }
    assert_eq!(home.fails(["volume", "delete", "v"]).0, 2, "deleting takes a --yes");
    let file = home.file("a", "b");
    let (code, line) = home.fails(["cp", file.to_str().unwrap(), "v@s:/x"]);
    assert!(code == 2 && line.contains("v@s is a snapshot") && line.contains("v:/x"), "{line}");
    let (code, line) = home.fails(["umount", "v"]);
    assert!(code == 3 && line.contains("/v does not exist: "), "{line}");
    let output = home.run(["quickstart", "--workers", "13"]);
    assert_eq!(output.status.code(), Some(2), "more workers than the quickstart has virtual shards");
}

#[test]
fn no_permission_to_mount_is_explained() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(
            millrace_testing::Need::Root,
            "only root can become a user without the right to mount",
        );
    }
    let home = Home::new();
    home.ok(["volume", "create", "v"]);
    // Gives the home to a user without privileges.
    let program = home.dir.path().join("millrace");
    copy_program(env!("CARGO_BIN_EXE_millrace").as_ref(), &program);
    let open = |path: &Path| std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o777)).unwrap();
    open(home.dir.path());
    for path in walk(&home.path()) {
        open(&path);
        std::os::unix::fs::chown(&path, Some(65_534), Some(65_534)).unwrap();
    }
    let at = home.dir.path().join("m");
    let output = Command::new(&program)
        .current_dir(home.dir.path())
        .env_clear()
        .env("MILLRACE_HOME", home.path())
        .env("PATH", "/nowhere")
        .args(["mount", "v", at.to_str().unwrap()])
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let (code, line) = failure(&output, "a mount without the right to");
    assert_eq!(code, 5, "{line}");
    assert!(line.contains("fuse"), "{line}");
}

fn walk(folder: &Path) -> Vec<PathBuf> {
    let mut found = vec![folder.to_owned()];
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() {
            found.extend(walk(&entry.path()));
        } else {
            found.push(entry.path());
        }
    }
    found
}

#[test]
fn a_missing_or_foreign_onnx_library_is_one_line() {
    let home = Home::new();
    let models = home.dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    let foreign = home.file("libonnxruntime.so", "not a library");
    for library in [PathBuf::from("/nowhere/libonnxruntime.so"), foreign] {
        let output = home
            .command()
            .env("ORT_DYLIB_PATH", &library)
            .args([
                "serve",
                "--grpc",
                "127.0.0.1:0",
                "--http",
                "127.0.0.1:0",
                "--metrics",
                "127.0.0.1:0",
                "--models",
            ])
            .arg(&models)
            .output()
            .unwrap();
        let (code, line) = failure(&output, "a server without its library");
        assert_eq!(code, 5, "{line}");
        assert!(line.contains(library.to_str().unwrap()) && line.contains("ORT_DYLIB_PATH"), "{line}");
    }
}

/// This program is built without the CUDA feature, so it must reject the device.
#[test]
fn cuda_is_refused_in_one_line_rather_than_replaced() {
    let home = Home::new();
    let (code, line) = home.fails(["quickstart", "--free-ports", "--device", "cuda"]);
    assert_eq!(code, 5, "{line}");
    assert!(line.contains("cuda"), "{line}");
    ingest_records(&home);
    let job = job(&home, "v@s:/t", MLP);
    let (_, line) = home.fails(["train", job.to_str().unwrap(), "--device", "cuda"]);
    assert!(line.contains("cuda"), "{line}");
}

#[test]
fn damaged_parquet_and_foreign_operators_stop_before_training() {
    let home = Home::new();
    ingest_records(&home);
    let bad = home.dir.path().join("bad.onnx");
    home.ok([
        "model",
        "init",
        "mlp",
        "--inputs",
        "2",
        "--hidden",
        "4",
        "--classes",
        "2",
        bad.to_str().unwrap(),
    ]);
    // Same length, so that the graph stays readable, with an unknown operator.
    let bytes = std::fs::read(&bad).unwrap();
    let at = bytes.windows(4).position(|window| window == b"Relu").unwrap();
    let mut changed = bytes.clone();
    changed[at..at + 4].copy_from_slice(b"Zelu");
    std::fs::write(&bad, changed).unwrap();
    let path = job(&home, "v@s:/t", "\"bad.onnx\"");
    let (_, line) = home.fails(["train", path.to_str().unwrap()]);
    assert!(line.contains("Zelu"), "{line}");
    let path = job(&home, "v@s:/t", r#"{ kind = "mlp", inputs = 3, classes = 2 }"#);
    let (_, line) = home.fails(["train", path.to_str().unwrap()]);
    assert!(line.contains('3') && line.contains('2'), "{line}");
    let path = job(&home, "v@s:/t", MLP);
    let text = std::fs::read_to_string(&path).unwrap().replace("features = \"x\"", "features = \"nope\"");
    std::fs::write(&path, text).unwrap();
    let (code, line) = home.fails(["train", path.to_str().unwrap()]);
    assert!(code == 3 && line.contains("no column \"nope\"; it has id, x, label"), "{code} {line}");
    assert_eq!(
        home.json(["volume", "show", "v"])["volume"]["usage"]["files"],
        1,
        "nothing but the data is there"
    );

    if !crate::support::fuse_permitted() {
        return;
    }
    // Truncates an ingested file through the mount, as an interrupted copy would.
    let at = home.dir.path().join("m");
    std::fs::create_dir(&at).unwrap();
    let mut mount = home.start(["mount", "v", at.to_str().unwrap(), "--json"]);
    mount.object();
    let file = files_below(&at.join("t"), "parquet").remove(0);
    let length = std::fs::metadata(&file).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&file).unwrap().set_len(length / 2).unwrap();
    assert_eq!(mount.stop(), 0);
    let (code, line) = home.fails(["feed", "v:/t"]);
    assert_eq!(code, 6, "{line}");
    assert!(line.contains(file.file_name().unwrap().to_str().unwrap()), "{line}");
    // The snapshot still has the complete file.
    assert_eq!(home.json(["feed", "v@s:/t", "--dry", "--batch-rows", "2"])["rows"], 2);
}

#[test]
fn full_disk_leaves_no_partial_files() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root can mount the small disk");
    }
    let home = Home::new();
    let disk = home.dir.path().join("disk");
    let _disk = Tmpfs::mount(&disk, "3m");
    let small = disk.join("home");
    // The topic is elsewhere; only the volume's disk is small.
    let mut broker = home.start(["broker", "--listen", "127.0.0.1:0", "--json"]);
    let kafka = broker.object()["kafka"].as_str().unwrap().to_owned();
    let file = home.dir.path().join("big.jsonl");
    let mut text = std::io::BufWriter::new(std::fs::File::create(&file).unwrap());
    let mut noise = 1_u64;
    for i in 0..30_000 {
        let words: Vec<String> = (0..16)
            .map(|_| {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                format!("{:016x}", noise)
            })
            .collect();
        writeln!(text, r#"{{"id":{i},"noise":"{}"}}"#, words.concat()).unwrap();
    }
    drop(text);
    home.ok(["produce", "big", file.to_str().unwrap()]);
    let on_disk = |args: &[&str]| {
        home.command()
            .env("MILLRACE_HOME", &small)
            .env("MILLRACE_STREAMS__BOOTSTRAP_SERVERS", &kafka)
            .args(args)
            .output()
            .unwrap()
    };
    let output = on_disk(&["ingest", "--topic", "big", "--volume", "v"]);
    let (code, line) = failure(&output, "landing on a full disk");
    assert_eq!(code, 7, "{line}");
    assert!(line.contains("space"), "{line}");
    // The volume holds no file or complete files.
    let rows = on_disk(&["feed", "v:/big", "--dry", "--json"]);
    if rows.status.success() {
        let rows: serde_json::Value = serde_json::from_slice(&rows.stdout).unwrap();
        assert!(rows["rows"].as_u64().unwrap() < 30_000);
    } else {
        assert_eq!(rows.status.code(), Some(3), "{}", String::from_utf8_lossy(&rows.stderr));
    }
    // With space again, the same command ingests every record once.
    crate::support::program(Command::new("mount").args(["-o", "remount,size=64m"]).arg(&disk));
    assert!(on_disk(&["ingest", "--topic", "big", "--volume", "v"]).status.success());
    let rows = on_disk(&["feed", "v:/big", "--dry", "--json"]);
    let rows: serde_json::Value = serde_json::from_slice(&rows.stdout).unwrap();
    assert_eq!(rows["rows"], 30_000);
    assert_eq!(broker.stop(), 0);
}

#[test]
fn garbage_on_the_broker_port_does_not_disturb_clients() {
    let home = Home::new();
    let mut broker = home.start(["broker", "--listen", "127.0.0.1:0", "--json"]);
    let kafka = broker.object()["kafka"].as_str().unwrap().to_owned();
    for garbage in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 64], &[0, 0, 0, 4, 1, 2, 3, 4], b"\x7f\xff\xff\xff", &[0; 4]]
    {
        let mut socket = TcpStream::connect(&kafka).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.write_all(garbage).unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        // An orderly close or a reset: the connection must end.
        match socket.read_to_end(&mut answer) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
        }
    }
    let file = home.file("records.jsonl", RECORDS);
    assert_eq!(home.json(["produce", "t", file.to_str().unwrap()])["produced"], 2);
    // Empty lines, also those at the end, are counted and no records.
    let gaps = home.file("gaps.jsonl", "\n{\"id\":1}\n\r\n{\"id\":2}\n\n");
    let produced = home.json(["produce", "t", gaps.to_str().unwrap()]);
    assert_eq!((&produced["produced"], &produced["empty_lines"]), (&2.into(), &3.into()), "{produced}");
    let empty = home.file("empty.jsonl", "\n\n");
    let produced = home.json(["produce", "t", empty.to_str().unwrap()]);
    assert_eq!((&produced["produced"], &produced["empty_lines"]), (&0.into(), &2.into()), "{produced}");
    assert!(broker.is_running());
    assert_eq!(broker.stop(), 0);
}

/// Starts a server over a bundle directory, after `break_it` has changed the directory.
pub(crate) fn serve(home: &Home, break_it: impl FnOnce(&Path)) -> (Service, String, Vec<String>) {
    let onnx = home.dir.path().join("m.onnx");
    home.ok([
        "model",
        "init",
        "mlp",
        "--inputs",
        "2",
        "--hidden",
        "4",
        "--classes",
        "2",
        onnx.to_str().unwrap(),
    ]);
    let models = home.dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    let store = LocalFileSystem::new_with_prefix(&models).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for version in [1, 2] {
        let lineage = Lineage::default();
        let bundle =
            Bundle::new("m", version, std::fs::read(&onnx).unwrap(), lineage, Default::default()).unwrap();
        runtime.block_on(bundle.write(&store, "")).unwrap();
    }
    break_it(&models.join("m/2"));
    let mut service = home.start([
        "serve",
        "--json",
        "--models",
        models.to_str().unwrap(),
        "--grpc",
        "127.0.0.1:0",
        "--http",
        "127.0.0.1:0",
        "--metrics",
        "127.0.0.1:0",
    ]);
    let printed = service.object();
    let models =
        printed["models"].as_array().unwrap().iter().map(|line| line.as_str().unwrap().to_owned()).collect();
    (service, printed["grpc"].as_str().unwrap().to_owned(), models)
}

#[test]
fn a_corrupt_bundle_is_named_and_never_served() {
    let home = Home::new();
    let (service, grpc, models) = serve(&home, |version| {
        let model = version.join("model.onnx");
        let mut bytes = std::fs::read(&model).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 0x40;
        std::fs::write(&model, bytes).unwrap();
    });
    assert!(models.iter().any(|line| line == "m version 1"), "{models:?}");
    assert!(
        models.iter().any(|line| line.contains("version 2 is not served") && line.contains("corrupt")),
        "{models:?}"
    );
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::connect(&grpc).await.unwrap();
        let input = || vec![Tensor::fp32("input", vec![1, 2], vec![1.0, 2.0]).unwrap()];
        assert_eq!(client.infer("m", None, input(), Form::Raw).await.unwrap().version, "1");
        let refused = client.infer("m", Some(2), input(), Form::Raw).await.unwrap_err();
        assert!(matches!(refused, ClientError::Refused { .. }), "{refused}");
    });
    assert_eq!(service.stop(), 0);
}

#[test]
fn wrong_names_types_and_shapes_get_the_matching_status() {
    let home = Home::new();
    let (service, grpc, _) = serve(&home, |_| {});
    let cases = [
        ("m", Tensor::fp32("wrong", vec![1, 2], vec![0.0; 2]), Code::InvalidArgument, "wrong"),
        ("m", Tensor::fp32("input", vec![1, 3], vec![0.0; 3]), Code::InvalidArgument, "shape"),
        ("m", Tensor::fp32("input", vec![2], vec![0.0; 2]), Code::InvalidArgument, "shape"),
        ("m", Tensor::new("input", vec![1, 2], Data::Int64(vec![0, 0])), Code::InvalidArgument, "INT64"),
        ("nope", Tensor::fp32("input", vec![1, 2], vec![0.0; 2]), Code::NotFound, "nope"),
    ];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut client = Client::connect(&grpc).await.unwrap();
        for (model, tensor, status, says) in cases {
            match client.infer(model, None, vec![tensor.unwrap()], Form::Raw).await {
                Err(ClientError::Refused { code, message }) => {
                    assert_eq!(code, status, "{message}");
                    assert!(message.contains(says), "{message}");
                }
                other => panic!("{other:?}"),
            }
        }
    });
    assert_eq!(service.stop(), 0);
}
