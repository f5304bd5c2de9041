//! Tests of `millrace config --all`: every key, set or not.

use serde_json::Value;

use crate::support::Home;

#[test]
fn config_all_lists_set_and_unset_keys_with_their_defaults() {
    let home = Home::new();
    let config = home.file("m.toml", "[serving]\ngrpc = \"127.0.0.1:9001\"\n[serving.models.digits]\n");
    let config = config.to_str().unwrap();
    let keys = home.json(["--config", config, "config", "--all"]);
    let row = |name: &str| -> &Value {
        let all = keys.as_array().unwrap();
        all.iter().find(|row| row["key"] == name).unwrap_or_else(|| panic!("no row {name}"))
    };
    assert_eq!(row("serving.grpc")["value"], "127.0.0.1:9001");
    assert_eq!(row("serving.grpc")["default"], "127.0.0.1:8001");
    assert_eq!(row("datafs.lock_wait_ms")["value"], row("datafs.lock_wait_ms")["default"]);
    for unset in ["datafs.meta_url", "serving.tls.certificate", "serving.models.digits.device"] {
        assert!(row(unset)["value"].is_null() && row(unset)["default"].is_null(), "{unset}");
        assert!(!row(unset)["meaning"].as_str().unwrap().is_empty(), "{unset}");
    }
    // A list without entries shows the keys of one.
    assert!(row("ingest.jobs[].flush_ms")["value"].is_null());
    assert_eq!(row("ingest.jobs[].flush_ms")["default"], 10_000);

    let table = home.ok(["--config", config, "config", "--all"]);
    let line = |name: &str| -> Vec<&str> {
        let found = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        found
            .into_iter()
            .find(|words| words.first() == Some(&name))
            .unwrap_or_else(|| panic!("no line {name}"))
    };
    assert_eq!(line("serving.grpc")[1..], ["\"127.0.0.1:9001\"", "\"127.0.0.1:8001\"", "IP:PORT"]);
    assert_eq!(line("datafs.meta_url")[1..], ["unset", "unset", "URL"]);
    assert_eq!(line("serving.tls.key")[1..], ["unset", "required", "path"]);
    assert!(!home.path().exists(), "config must not make a home");
}
