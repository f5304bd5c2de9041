//! Tests of `millrace config check`: all problems of a file in one run, with lines.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use serde_json::Value;

use crate::support::Home;

/// The result of `config check --json`, and the exit code.
fn check(home: &Home, file: &Path) -> (Value, i32) {
    let output = home.run(["config", "check", file.to_str().unwrap(), "--json"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let found = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    (found, output.status.code().unwrap())
}

/// Line, severity and key of each problem.
fn problems(found: &Value) -> Vec<(u64, String, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let one = |problem: &Value| {
        (problem["line"].as_u64().unwrap_or(0), text(&problem["severity"]), text(&problem["key"]))
    };
    found["problems"].as_array().unwrap().iter().map(one).collect()
}

#[test]
fn all_problems_of_a_configuration_are_reported_in_one_run() {
    let home = Home::new();
    let secret = home.file("tokens.txt", "nonsense\n");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let file = home.file(
        "m.toml",
        r#"[datafs]
lock_wait_ms = 0
store_url = "ftp://bucket"
store_options = { access_key_id = { file = "id" }, secret_access_key = { file = "secret" } }
[datafs.encryption_keys]
main = { file = "missing.key" }
[streams]
topics = [{ name = "records" }, { name = "bad name" }]
[streams.properties]
"no.such.property" = "hunter2"
[[ingest.jobs]]
name = "a"
topic = "recrods"
volume = "v"
path = "raw"
flush_ms = 0
[[ingest.jobs]]
name = "b"
topic = "records"
volume = "v"
path = "raw"
flsh_ms = 5
[serving]
htpp = "127.0.0.1:1"
grpc = "127.0.0.1:9092"
volume = "models"
tokens = "tokens.txt"
[serving.tls]
certificate = "none.pem"
key = "none.key"
[trainer]
workers = 0
checkpoints_keep = "x"
[up]
train = ["none.toml"]
snapshots = [{ volume = "v", every_s = 0, keep = 1 }]
"#,
    );
    let (found, exit) = check(&home, &file);
    assert_eq!(exit, 2, "{found}");
    let reported = problems(&found);
    for (line, severity, key) in [
        (2, "error", "datafs.lock_wait_ms"),
        (3, "error", "datafs.store_url"),
        (4, "error", "datafs.store_options.access_key_id"),
        (4, "error", "datafs.store_options.secret_access_key"),
        (6, "error", "datafs.encryption_keys.main"),
        (8, "error", "streams.topics[1].name"),
        (10, "error", "streams.properties.\"no.such.property\""),
        (13, "warning", "ingest.jobs[0].topic"),
        (16, "error", "ingest.jobs[0].flush_ms"),
        (22, "error", "ingest.jobs[1].flsh_ms"),
        (24, "error", "serving.htpp"),
        (25, "error", "serving.grpc"),
        (27, "error", "serving.tokens"),
        (29, "error", "serving.tls.certificate"),
        (30, "error", "serving.tls.key"),
        (32, "error", "trainer.workers"),
        (33, "error", "trainer.checkpoints_keep"),
        (35, "error", "up.train[0]"),
        (36, "error", "up.snapshots[0]"),
    ] {
        let is_it =
            |one: &(u64, String, String)| one.0 == line && one.1 == severity && one.2.starts_with(key);
        assert!(reported.iter().any(is_it), "{line} {key}: {found:#}");
    }
    assert!(!found.to_string().contains("hunter2"), "{found}");
    assert!(found.to_string().contains("did you mean `flush_ms`?"), "{found}");
    assert!(!home.path().exists(), "config check must not make a home");

    // The lines for people have the form that editors jump to.
    let output = home.run(["config", "check", file.to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("m.toml:24:1: error: serving.htpp: unknown field `htpp`"), "{text}");
}

#[test]
fn a_sound_configuration_has_no_errors_and_secrets_of_all_users_warn() {
    let home = Home::new();
    let tokens = home.ok(["serve", "token", "ci"]);
    let secret = home.file("tokens.txt", tokens);
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o644)).unwrap();
    let file = home.file("m.toml", "[serving]\nvolume = \"models\"\ntokens = \"tokens.txt\"\n");
    let (found, exit) = check(&home, &file);
    assert_eq!(
        (exit, problems(&found)),
        (0, vec![(3, "warning".into(), "serving.tokens".into())]),
        "{found}"
    );
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let (found, exit) = check(&home, &file);
    assert_eq!((exit, found["problems"].as_array().unwrap().len()), (0, 0), "{found}");
    let shipped = crate::support::project().join("deploy/compose/millrace.toml");
    let (found, exit) = check(&home, &shipped);
    assert_eq!((exit, found["errors"].as_u64()), (0, Some(0)), "{found}");
}

#[test]
fn problems_of_a_job_file_are_reported_and_a_missing_file_is_3() {
    let home = Home::new();
    let job =
        "name = \"a\"\ndataset = \"v@s:/train\"\nbatch_row = 5\nepochs_max = \"x\"\nmodel = \"m.onnx\"\n";
    let (found, exit) = check(&home, &home.file("train.toml", job));
    let reported = problems(&found);
    assert_eq!((exit, found["kind"].as_str()), (2, Some("job")), "{found}");
    assert!(reported.iter().any(|one| one.0 == 3) && reported.iter().any(|one| one.0 == 4), "{found}");
    // Bounds are reported beside unknown keys, and all of them.
    let job = "name = \"a\"\ndataset = \"v@s:/train\"\nfeatures = \"x\"\nlabel = \"y\"\nmodel = \"m.onnx\"\nbatch_row = 5\n\
               epochs_max = 0\ncheckpoint_every_steps = 0\nloss_target = -1.0\n[validation]\nevery_epochs = 0\n";
    let (found, _) = check(&home, &home.file("train.toml", job));
    let lines: Vec<u64> = problems(&found).iter().map(|(line, _, _)| *line).collect();
    assert!([5, 6, 7, 8, 9].iter().all(|line| lines.contains(line)), "{found:#}");
    // So are those of the optimizer and of a built-in model, which come last.
    let job = "name = \"a\"\ndataset = \"v@s:/train\"\nfeatures = \"x\"\nlabel = \"y\"\nbatch_rows = 0\n[model]\n\
               kind = \"mlp\"\ninputs = 0\nclasses = 2\n[optimizer]\nkind = \"sgd\"\nlearning_rate = nan\n\
               momentum = 1.0\n[optimizer.schedule]\nkind = \"cosine\"\ntotal_steps = 0\n";
    let file = home.file("train.toml", job);
    let (found, _) = check(&home, &file);
    let reported: Vec<(u64, String)> =
        problems(&found).into_iter().map(|(line, _, key)| (line, key)).collect();
    let expected = [
        (5, "batch_rows"),
        (8, "model.inputs"),
        (12, "optimizer.learning_rate"),
        (13, "optimizer.momentum"),
        (16, "optimizer.schedule.total_steps"),
    ];
    assert_eq!(reported, expected.map(|(line, key)| (line, key.to_owned())), "{found:#}");
    let sound = job.replace("batch_rows = 0", "").replace("= nan", "= 0.1").replace("= 1.0", "= 0.9");
    let (code, said) = home.fails(["train", home.file("bounds.toml", sound).to_str().unwrap()]);
    assert!(code == 2 && said.contains("bounds.toml") && said.contains("total_steps"), "{code} {said}");
    // A wrong value of the only model is one problem.
    let job = job.replace("inputs = 0", "inputs = -1");
    let (found, _) = check(&home, &home.file("train.toml", job));
    let of_model: Vec<_> = problems(&found).into_iter().filter(|(_, _, key)| key.contains("model")).collect();
    assert!(of_model.len() == 1 && !found.to_string().contains("missing field"), "{found:#}");
    let (code, said) = home.fails(["config", "check", "none.toml"]);
    assert!(code == 3 && said.contains("none.toml"), "{code} {said}");
}

#[test]
fn errors_of_syntax_and_hostile_files_are_reported() {
    let home = Home::new();
    let (found, exit) = check(&home, &home.file("m.toml", "a = \nb = = 1\n"));
    assert!(exit == 2 && found["errors"].as_u64() >= Some(2), "{found}");
    let deep = format!("a = {}1{}\n", "[".repeat(5_000), "]".repeat(5_000));
    assert_eq!(check(&home, &home.file("deep.toml", deep)).1, 2);
    let wide: String = (0..2_000).map(|n| format!("k{n} = 1\n")).collect();
    let (found, exit) = check(&home, &home.file("wide.toml", wide));
    assert!(exit == 2 && found["errors"].as_u64() == Some(51), "{exit} {}", found["errors"]);
    let (code, said) = home.fails(["config", "check", home.file("b.toml", [0xff, 0xfe]).to_str().unwrap()]);
    assert!(code == 2 && said.contains("UTF-8"), "{code} {said}");
}
