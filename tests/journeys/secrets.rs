//! Tests that secrets of the configuration appear in no output, no error and no log.

use crate::support::{Home, failure};

/// Passwords, keys and headers, each planted in one place.
const SECRETS: [&str; 9] = [
    "planted-sasl-password",
    "planted-key-password",
    "planted-store-secret",
    "planted-store-token",
    "planted-meta-password",
    "planted-header-value",
    "planted-key-of-volumes-32-bytes!",
    "planted-in-a-file",
    "planted-in-a-variable",
];

const CONFIG: &str = r#"
[datafs]
meta_url = "postgres://me:planted-meta-password@127.0.0.1:1/db"
lock_wait_ms = 200

[datafs.store_options]
secret_access_key = "planted-store-secret"
token = "planted-store-token"

[datafs.encryption_keys]
k = "planted-key-of-volumes-32-bytes!"

[streams]
bootstrap_servers = "127.0.0.1:1"

[streams.properties]
"security.protocol" = "SASL_PLAINTEXT"
"sasl.mechanism" = "PLAIN"
"sasl.username" = { env = "TEST_USER_OF_MILLRACE" }
"sasl.password" = "planted-sasl-password"
"client.rack" = "planted-key-password"
"socket.timeout.ms" = 100

[serving.telemetry]
endpoint = "http://127.0.0.1:1"
headers = { authorization = "planted-header-value", other = { file = "secret" } }
"#;

/// All output of a command, with the most verbose log.
fn run(home: &Home, args: &[&str]) -> (i32, String) {
    let mut command = home.command();
    command.args(["--log", "trace"]).args(args).env("TEST_USER_OF_MILLRACE", "planted-in-a-variable");
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap(), String::from_utf8_lossy(&text).into_owned())
}

fn assert_no_secret(printed: &str, of: &str) {
    for secret in SECRETS {
        assert!(!printed.contains(secret), "{of} shows {secret}:\n{printed}");
    }
}

#[test]
fn output_and_logs_contain_no_secret() {
    let home = Home::new();
    home.file("secret", "planted-in-a-file");
    home.file("millrace.toml", CONFIG);
    for args in [&["config"][..], &["config", "--json"], &["config", "--all"], &["config", "--all", "--json"]]
    {
        let (code, text) = run(&home, args);
        assert_eq!(code, 0, "{text}");
        // The output shows keys and the sources of values.
        for shown in ["sasl.password", "secret_access_key", "authorization", "TEST_USER_OF_MILLRACE", "(set)"]
        {
            assert!(text.contains(shown), "{shown} is missing in\n{text}");
        }
        assert_no_secret(&text, "config");
    }
    let records = home.file("r.jsonl", "{}\n");
    let records = records.to_str().unwrap();
    for args in [&["volume", "list"][..], &["produce", "t", records], &["up"]] {
        let (code, text) = run(&home, args);
        assert_ne!(code, 0, "{text}");
        assert_no_secret(&text, &args.join(" "));
    }
}

#[test]
fn configuration_errors_contain_no_secret() {
    let records = "{}\n";
    for (from, to, args, named) in [
        // Refused by librdkafka, by its name and by its value.
        (
            "\"socket.timeout.ms\" = 100",
            "\"socket.timeout.ms\" = \"planted-sasl-password\"",
            "produce",
            "socket",
        ),
        (
            "\"sasl.mechanism\" = \"PLAIN\"",
            "\"sasl.mechanism\" = \"planted-sasl-password\"",
            "produce",
            "SASL",
        ),
        (
            "\"socket.timeout.ms\" = 100",
            "\"sasl.pasword\" = \"planted-sasl-password\"",
            "produce",
            "sasl.pasword",
        ),
        // By the store: its options, and a URL that holds a key.
        (
            "meta_url = \"postgres://me:planted-meta-password@127.0.0.1:1/db\"",
            "store_url = \"s3://bucket/x\"\nstore_options = { allow_http = \"planted-store-secret\" }",
            "volume",
            "store_url",
        ),
        (
            "meta_url = \"postgres://me:planted-meta-password@127.0.0.1:1/db\"",
            "store_url = \"ftp://me:planted-store-secret@bucket/x\"",
            "volume",
            "store_url",
        ),
        // Of the wrong type, or at the wrong place.
        ("meta_url = \"", "meta_url = [\"planted-store-secret\"]\nx = \"", "volume", "line 3"),
        (
            "[datafs.encryption_keys]",
            "[datafs.encryption_keys]\nl = [\"planted-store-secret\"]",
            "volume",
            "line ",
        ),
        ("lock_wait_ms = 200", "lock_wait_ms = \"planted-store-secret\"", "volume", "line 4"),
        ("lock_wait_ms = 200", "lock_wait_ms = planted-store-secret", "volume", "line 4"),
        (":planted-meta-password@127.0.0.1:1", ":planted-meta-password@127.0.0.1:port", "volume", "meta_url"),
    ] {
        let home = Home::new();
        home.file("secret", "planted-in-a-file");
        let mut config = CONFIG.replace(from, to);
        assert_ne!(config, CONFIG, "{from}");
        // A key in place is refused before anything else.
        config = config.replace("k = \"planted-key-of-volumes-32-bytes!\"\n", "");
        if to.contains("store_options = ") {
            let (head, rest) = config.split_once("[datafs.store_options]").unwrap();
            config = format!("{head}{}", &rest[rest.find("[datafs.encryption_keys]").unwrap()..]);
        }
        home.file("millrace.toml", config);
        let file = home.file("r.jsonl", records);
        let args = match args {
            "produce" => vec!["produce", "t", file.to_str().unwrap()],
            _ => vec!["volume", "list"],
        };
        let (code, text) = run(&home, &args);
        assert_eq!(code, 2, "{to}: {text}");
        let line = text.lines().find(|line| line.starts_with("millrace: ")).unwrap();
        assert!(line.contains(named), "{to}: {line}");
        assert_no_secret(&text, to);
    }
    // By a variable of the environment.
    let home = Home::new();
    let mut command = home.command();
    command.env("MILLRACE_STREAMS__PROPERTIES", "planted-sasl-password").args(["volume", "list"]);
    let (code, line) = failure(&command.output().unwrap(), "a variable of the wrong type");
    assert_eq!(code, 2, "{line}");
    assert!(line.contains("MILLRACE_STREAMS__PROPERTIES"), "{line}");
    assert_no_secret(&line, "a variable");
}

/// A server that uses a copied sample would accept its token, which is public.
#[test]
fn docs_contain_no_token_digest() {
    let docs = crate::support::project().join("docs");
    let mut files = crate::support::files_below(&docs, "md");
    files.push(crate::support::project().join("README.md"));
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let digest = text.split(|c: char| !c.is_ascii_hexdigit()).find(|word| word.len() == 64);
        assert_eq!(digest, None, "{}", file.display());
    }
}
