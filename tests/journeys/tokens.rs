//! Tests of a model server that authenticates its clients by tokens, and of its clients.

use millrace_bundle::{Bundle, Lineage};
use object_store::local::LocalFileSystem;

use crate::support::Home;

#[test]
fn token_is_shown_once_and_permits_predictions() {
    let home = Home::new();
    let onnx = home.dir.path().join("m.onnx");
    let onnx = onnx.to_str().unwrap();
    home.ok(["model", "init", "mlp", "--inputs", "2", "--hidden", "4", "--classes", "2", onnx]);
    let models = home.dir.path().join("models");
    std::fs::create_dir(&models).unwrap();
    let store = LocalFileSystem::new_with_prefix(&models).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let graph = std::fs::read(onnx).unwrap();
    let bundle = Bundle::new("m", 1, graph, Lineage::default(), Default::default()).unwrap();
    runtime.block_on(bundle.write(&store, "")).unwrap();

    let made = home.run(["serve", "token", "ci", "--models", "m"]);
    let (line, note) = (String::from_utf8(made.stdout).unwrap(), String::from_utf8(made.stderr).unwrap());
    let token = note.trim().rsplit(' ').next().unwrap();
    assert!(line.starts_with("ci ") && line.ends_with(" m\n") && !line.contains(token), "{line}");
    assert_eq!((token.len(), token.bytes().all(|byte| byte.is_ascii_hexdigit())), (64, true), "{note}");
    let other = home.json(["serve", "token", "other", "--models", "x-*,y", "--control"]);
    assert!(other["line"].as_str().unwrap().ends_with(" x-*,y control"), "{other}");
    home.file("tokens.txt", format!("{line}{}\n", other["line"].as_str().unwrap()));
    for wrong in ["a b", "", "a/b"] {
        assert_eq!(home.fails(["serve", "token", wrong]).0, 2);
    }

    let config = home.file("millrace.toml", "[serving]\ntokens = \"tokens.txt\"\n");
    let config = config.to_str().unwrap();
    let models = models.to_str().unwrap();
    let (service, printed) = home.serve(["--config", config, "--models", models]);
    let grpc = printed["grpc"].as_str().unwrap();
    let records = home.file("records.jsonl", "{\"input\": [1, 2]}\n");
    let secret = home.file("secret", format!("{token}\n"));
    let predict = ["predict", "m", records.to_str().unwrap(), "--grpc", grpc];
    let with =
        |file: &str| predict.iter().copied().map(str::to_owned).chain(["--token-file".into(), file.into()]);
    assert_eq!(home.json(with(secret.to_str().unwrap()))["predicted"], 1);
    let (_, error) = home.fails(predict);
    assert!(error.contains("Unauthenticated") && error.contains("authorization: Bearer"), "{error}");
    let stranger = home.file("stranger", other["token"].as_str().unwrap());
    let (_, error) = home.fails(with(stranger.to_str().unwrap()));
    assert!(error.contains("PermissionDenied") && error.contains("may not use model \"m\""), "{error}");
    let (code, error) = home.fails(with(home.dir.path().join("none").to_str().unwrap()));
    assert!(code == 2 && error.contains("cannot be read"), "{code} {error}");
    assert_eq!(service.stop(), 0);
}
