//! Tests of a model server that requires TLS, a client certificate and a token, and of the commands that are
//! its clients.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

use crate::bad_input::serve;
use crate::support::Home;

/// Writes `ca.pem` and the certificates `server` and `client` that it signed, as `.pem` and `.key`. A prefix
/// `whose` makes a second, untrusted set.
fn certificates(home: &Home, whose: &str) {
    let mut authority = CertificateParams::new(Vec::<String>::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    authority.distinguished_name.push(DnType::CommonName, format!("{whose}authority"));
    let authority_key = KeyPair::generate().unwrap();
    home.file(&format!("{whose}ca.pem"), authority.self_signed(&authority_key).unwrap().pem());
    let issuer = Issuer::from_params(&authority, &authority_key);
    for name in ["server", "client"] {
        let mut params = CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        home.file(&format!("{whose}{name}.pem"), params.signed_by(&key, &issuer).unwrap().pem());
        home.file(&format!("{whose}{name}.key"), key.serialize_pem());
    }
}

#[test]
fn clients_present_the_required_certificate_and_token() {
    let home = Home::new();
    certificates(&home, "");
    certificates(&home, "other-");
    let made = home.json(["serve", "token", "ci", "--models", "m"]);
    home.file("tokens.txt", made["line"].as_str().unwrap());
    home.file("token", made["token"].as_str().unwrap());
    home.file("wrong", "0".repeat(64));
    home.file(
        "millrace.toml",
        "[serving]\ntokens = \"tokens.txt\"\n\n[serving.tls]\ncertificate = \"server.pem\"\n\
         key = \"server.key\"\nclient_ca = \"ca.pem\"\n",
    );
    home.file("r.jsonl", "{\"input\": [1, 2]}\n");
    let (service, grpc, _) = serve(&home, |_| {});

    // The server belongs to the home, so its metrics address is known, too; metrics have no TLS.
    let predict = ["predict", "m", "r.jsonl"];
    let top = ["serve", "top", "m", "--interval", "0.1", "--count", "1"];
    let bench = ["serve", "bench", "m", "--concurrency", "1", "--duration", "0.2", "--warm-up", "0.05"];
    let certificate = ["--ca", "ca.pem", "--cert", "client.pem", "--key", "client.key"];
    let token = ["--token-file", "token"];
    let all = [&certificate[..], &token].concat();
    assert_eq!(home.json([&predict[..], &all].concat())["predicted"], 1);
    let seen = home.json([&top[..], &all].concat());
    assert_eq!(seen["server"], grpc.as_str(), "{seen}");
    assert!(seen["models"][0]["state"] == "READY" && seen["metrics_error"].is_null(), "{seen}");
    let measured = home.json([&bench[..], &all].concat());
    assert_eq!(measured["loads"][0]["failed"], serde_json::json!({}), "{measured}");
    // By its name as well; then the scheme enables TLS.
    let port = grpc.rsplit_once(':').unwrap().1;
    let named = format!("https://localhost:{port}");
    let elsewhere = home.json([&top[..], &all, &["--grpc", &named]].concat());
    assert_eq!((&elsewhere["server"], &elsewhere["ready"]), (&named.as_str().into(), &true.into()));

    for command in [&predict[..], &top, &bench] {
        let fails = |flags: &[&[&str]]| {
            let args = [command, &flags.concat()].concat();
            let (code, line) = home.fails(&args);
            (code, format!("{args:?}: {line}"))
        };
        let (_, line) = fails(&[&certificate]);
        assert!(line.contains("Unauthenticated"), "{line}");
        let (_, line) = fails(&[&certificate, &["--token-file", "wrong"]]);
        assert!(line.contains("Unauthenticated"), "{line}");
        // Without a certificate, with an untrusted one, and without TLS.
        fails(&[&["--ca", "ca.pem"], &token]);
        fails(&[&["--ca", "ca.pem", "--cert", "other-client.pem", "--key", "other-client.key"], &token]);
        fails(&[&token]);
        // A server that this client does not trust.
        let (code, line) =
            fails(&[&["--ca", "other-ca.pem", "--cert", "client.pem", "--key", "client.key"], &token]);
        assert!(code == 5 && line.contains(&grpc), "{code} {line}");
        for (flags, says) in [
            (["--ca", "nosuch.pem", "--token-file", "token"], "nosuch.pem"),
            (["--ca", "client.key", "--token-file", "token"], "holds no certificate"),
            (["--ca", "ca.pem", "--token-file", "nosuch"], "nosuch"),
        ] {
            let (code, line) = fails(&[&flags]);
            assert!(code == 2 && line.contains(says), "{code} {line}");
        }
        let half = [command, &["--ca", "ca.pem", "--cert", "client.pem"]].concat();
        let refused = home.run(half);
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(refused.status.code() == Some(2) && text.contains("--key"), "{text}");
    }
    assert_eq!(service.stop(), 0);
}
