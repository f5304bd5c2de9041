//! Tests of TLS connections to the server, with generated certificates, and of the errors when TLS fails.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use millrace_datafs::{Config, Datafs};

use super::server::Server;

/// Runs openssl in a folder; `false` where it is not installed.
fn openssl(folder: &Path, arguments: &str) -> bool {
    let Ok(output) = Command::new("openssl").args(arguments.split(' ')).current_dir(folder).output() else {
        return false;
    };
    assert!(output.status.success(), "openssl {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    true
}

/// Creates an authority, its server certificate for `localhost` alone, and an untrusted certificate.
fn make_certificates(folder: &Path) -> bool {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    std::fs::write(folder.join("names"), "subjectAltName=DNS:localhost\n").unwrap();
    openssl(folder, &format!("req -x509 {key} -days 30 -subj /CN=authority -keyout ca.key -out ca.crt"))
        && openssl(folder, &format!("req {key} -subj /CN=localhost -keyout server.key -out server.csr"))
        && openssl(
            folder,
            "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile names -out server.crt",
        )
        && openssl(
            folder,
            &format!("req -x509 {key} -days 30 -subj /CN=other -keyout other.key -out other.crt"),
        )
}

/// An error with its causes, as the command line prints it.
fn line(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[test]
fn connections_are_as_safe_as_the_url_says() {
    let Some(server) = Server::start_on_tcp(&["fsync=off"]) else { return };
    let port = server.port();
    let folder = server.folder();
    if !make_certificates(folder) {
        return millrace_testing::skip(millrace_testing::Need::Openssl, "openssl is not installed");
    }
    server.give(&folder.join("server.key"), 0o600);
    server.give(&folder.join("server.crt"), 0o644);
    let rules = folder.join("data/pg_hba.conf");
    std::fs::write(&rules, "local all all trust\nhost all all 127.0.0.1/32 scram-sha-256\n").unwrap();
    server.give(&rules, 0o600);
    server.sql("ALTER USER millrace PASSWORD 'right'");
    let set_tls = |state: &str| {
        server.sql(&format!("ALTER SYSTEM SET ssl = {state}"));
        server.sql("SELECT pg_reload_conf()");
        let deadline = Instant::now() + Duration::from_secs(60);
        while server.sql("SHOW ssl") != state {
            assert!(Instant::now() < deadline, "the server does not turn TLS {state}");
        }
    };
    for (name, file) in [("ssl_cert_file", "server.crt"), ("ssl_key_file", "server.key")] {
        server.sql(&format!("ALTER SYSTEM SET {name} = '{}'", folder.join(file).display()));
    }

    let home = tempfile::tempdir().unwrap();
    let open = |host: &str, password: &str, options: &str| {
        let url = format!("postgres://millrace:{password}@{host}:{port}/postgres?{options}");
        let config = Config { meta_url: Some(url.into()), ..Config::default() };
        Datafs::open(home.path(), &config).map_err(|error| line(&error))
    };
    let encrypted = || {
        server.sql("SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl AND application_name = 'millrace'")
    };
    let refused = |host: &str, password: &str, options: &str, words: &[&str]| {
        let error = open(host, password, options).unwrap_err();
        let said = words.iter().all(|word| error.contains(word)) && !error.contains('\n');
        // A refusal is reported at once, not after the timeout for an unreachable server.
        assert!(said && !error.contains(password) && !error.contains("did not answer"), "{error}");
    };

    // The server offers no TLS.
    set_tls("off");
    refused("localhost", "right", "sslmode=require", &["does not support TLS", "localhost"]);
    drop(open("localhost", "right", "sslmode=prefer").unwrap());
    assert_eq!(encrypted(), "0");

    set_tls("on");
    let roots = |file: &str| format!("sslrootcert={}", folder.join(file).display());
    let (authority, own, other) = (roots("ca.crt"), roots("server.crt"), roots("other.crt"));
    for (host, options) in [
        ("127.0.0.1", String::new()),
        ("127.0.0.1", "sslmode=require".into()),
        ("127.0.0.1", format!("sslmode=require&{authority}")),
        ("127.0.0.1", format!("sslmode=verify-ca&{authority}")),
        ("localhost", format!("sslmode=verify-full&{authority}")),
        ("localhost", format!("{own}&sslmode=verify-full&connect_timeout=20")),
        // The password's proof is bound to the certificate (SCRAM-SHA-256-PLUS).
        ("localhost", format!("sslmode=verify-full&{authority}&channel_binding=require")),
    ] {
        let datafs = open(host, "right", &options).unwrap_or_else(|error| panic!("{options}: {error}"));
        assert_ne!(encrypted(), "0", "{options}");
        drop(datafs);
    }
    drop(open("127.0.0.1", "right", "sslmode=disable").unwrap());
    // A unix socket in a list with another host: it has no TLS and inherits no TLS settings.
    let socket = folder.display().to_string().replace('/', "%2F");
    for (hosts, options, expected) in [
        (format!("%2Fnowhere:{port},localhost"), format!("sslmode=verify-full&{authority}"), true),
        (format!("localhost:{port},{socket}"), String::new(), true),
        (format!("{socket}:{port},localhost"), format!("sslmode=verify-full&{authority}"), false),
    ] {
        let datafs = open(&hosts, "right", &options).unwrap_or_else(|error| panic!("{hosts}: {error}"));
        // The server may not have noticed yet that the connections before are closed.
        let deadline = Instant::now() + Duration::from_secs(60);
        while (encrypted() != "0") != expected {
            assert!(Instant::now() < deadline, "{hosts}");
        }
        drop(datafs);
    }
    let hosts = format!("%2Fnowhere:{port},localhost");
    refused(&hosts, "right", &format!("sslmode=verify-full&{other}"), &["certificate", "UnknownIssuer"]);
    // Certificates that must be refused.
    let unknown = ["localhost", "certificate", "UnknownIssuer"];
    refused("localhost", "right", &format!("sslmode=verify-full&{other}"), &unknown);
    refused("localhost", "right", &format!("sslmode=require&{other}"), &unknown);
    refused("localhost", "right", "sslmode=verify-full&sslrootcert=system", &["certificate"]);
    for trusted in [&authority, &own] {
        let options = format!("sslmode=verify-full&{trusted}");
        refused("127.0.0.1", "right", &options, &["127.0.0.1", "certificate", "not valid for name"]);
    }
    refused("localhost", "wrong", "sslmode=require", &["password authentication failed", "PGPASSWORD"]);
}
