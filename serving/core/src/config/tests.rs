//! Tests of the table as users write it.
use super::{Config, Device, Devices};

#[test]
fn the_table_round_trips_and_refuses_unknown_keys() {
    let json = serde_json::json!({
        "grpc": "0.0.0.0:9001", "volume": "digits@v1", "device": "cuda:1",
        "limits": { "message_bytes_max": 1024 },
        "pipes": [{ "name": "p", "input": "a", "output": "b", "model": "m",
                    "columns": { "input": "pixels" } }],
    });
    let config: Config = serde_json::from_value(json).unwrap();
    assert_eq!(config.grpc.port(), 9001);
    assert_eq!(config.http, Config::default().http);
    assert_eq!(config.device, Device::Cuda(1).into());
    assert_eq!(config.pipes[0].dead_letter_topic(), "b-dead");
    let again: Config = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
    for (table, key) in
        [(r#"{"prot":1}"#, "prot"), (r#"{"limits":{"x":1}}"#, "x"), (r#"{"pipes":[{"topic":"a"}]}"#, "topic")]
    {
        let error = serde_json::from_str::<Config>(table).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    assert!(serde_json::from_str::<Config>(r#"{"device":"tpu"}"#).is_err());
    assert!(Config::default().threads() >= 1);
}

#[test]
fn removed_key_is_accepted_and_not_shown() {
    let config: Config = serde_json::from_str(r#"{"realtime":true}"#).unwrap();
    assert_eq!(config.realtime, Some(true), "so that the server can warn");
    assert!(!serde_json::to_string(&config).unwrap().contains("realtime"));
}

#[test]
fn memory_is_shared_where_every_client_is_local_or_as_configured() {
    let config = |json: &str| serde_json::from_str::<Config>(json).unwrap();
    for (table, shared) in [
        ("{}", true),
        (r#"{"grpc":"[::1]:1","http":"127.8.0.1:1"}"#, true),
        (r#"{"grpc":"0.0.0.0:1"}"#, false),
        (r#"{"http":"[::]:1"}"#, false),
        (r#"{"http":"10.0.0.1:1","shared_memory":true}"#, true),
        (r#"{"shared_memory":false}"#, false),
    ] {
        assert_eq!(config(table).shares_memory(), shared, "{table}");
    }
    assert!(serde_json::from_str::<Config>(r#"{"shared_memory":"yes"}"#).is_err());
}

#[test]
fn table_of_a_model_overrides_the_server() {
    let config: Config = serde_json::from_value(serde_json::json!({
        "device": "cuda:1", "sessions_max": 4,
        "models": { "small": { "device": "cpu", "sessions_max": 1 }, "large": { "allow_fallback": true } },
    }))
    .unwrap();
    let of = |name| {
        let config = config.of_model(name);
        (config.device, config.sessions_max, config.allow_fallback)
    };
    assert_eq!(of("small"), (Devices::CPU, 1, false));
    assert_eq!(of("large"), (Device::Cuda(1).into(), 4, true));
    assert_eq!(of("other"), (Device::Cuda(1).into(), 4, false));
    let again: Config = serde_json::from_str(&serde_json::to_string(&config).unwrap()).unwrap();
    assert_eq!(again, config);
    for (table, key) in [
        (r#"{"models":{"m":{"devise":"cpu"}}}"#, "devise"),
        (r#"{"models":{"m":{"device":"tpu"}}}"#, "tpu"),
        (r#"{"models":{"m":{"sessions_max":-1}}}"#, "-1"),
        (r#"{"models":[]}"#, "sequence"),
    ] {
        let error = serde_json::from_str::<Config>(table).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
}
