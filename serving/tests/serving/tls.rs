//! Tests of TLS on both services: trust, client certificates, files that change while the server runs, and
//! unusable files.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millrace_serving::client::{Client, ClientError, Credentials};
use millrace_serving::{Config, Source, Tls, serve};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto};

use crate::malformed::good;
use crate::support::*;

/// Timeout: a hang is a failure; no test measures time.
const HANGING: Duration = Duration::from_secs(60);

/// A certificate authority.
struct Authority {
    params: CertificateParams,
    key: KeyPair,
    pem: String,
}

impl Authority {
    fn new(name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { params, key, pem }
    }

    /// A certificate for this machine, and its key.
    fn issue(&self, name: &str) -> (String, String) {
        let mut params = CertificateParams::new(vec!["localhost".into(), "127.0.0.1".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &Issuer::from_params(&self.params, &self.key)).unwrap();
        (certificate.pem(), key.serialize_pem())
    }
}

/// A folder with the files of a server and a client.
pub(crate) struct Files {
    dir: TempDir,
    authority: Authority,
}

impl Files {
    pub(crate) fn new() -> Files {
        let files = Files { dir: tempfile::tempdir().unwrap(), authority: Authority::new("ours") };
        files.write("ca.pem", &files.authority.pem);
        files.issue("server");
        files.issue("client");
        files
    }

    pub(crate) fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join(name)
    }

    /// Replaces a file atomically.
    pub(crate) fn write(&self, name: &str, content: &str) {
        let next = self.path(".next");
        std::fs::write(&next, content).unwrap();
        std::fs::rename(next, self.path(name)).unwrap();
    }

    fn issue(&self, name: &str) -> String {
        let (certificate, key) = self.authority.issue(name);
        self.write(&format!("{name}.key"), &key);
        self.write(&format!("{name}.pem"), &certificate);
        certificate
    }

    pub(crate) fn config(&self) -> Config {
        let tls = Tls { certificate: self.path("server.pem"), key: self.path("server.key"), client_ca: None };
        Config { tls: Some(tls), ..config() }
    }

    pub(crate) fn credentials(&self, identity: Option<&str>) -> Credentials {
        let pair = |name: &str| (self.path(&format!("{name}.pem")), self.path(&format!("{name}.key")));
        Credentials { ca: Some(self.path("ca.pem")), identity: identity.map(pair), ..Credentials::default() }
    }
}

/// A TLS connection by a rustls client.
async fn connect(
    address: SocketAddr,
    files: &Files,
    identity: Option<&str>,
    protocols: &[&str],
) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(files.path("ca.pem")).unwrap()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots);
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(name) => {
            let chain = vec![CertificateDer::from_pem_file(files.path(&format!("{name}.pem"))).unwrap()];
            let key = PrivateKeyDer::from_pem_file(files.path(&format!("{name}.key"))).unwrap();
            builder.with_client_auth_cert(chain, key).unwrap()
        }
    };
    config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from("localhost").unwrap();
    let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
    tokio::time::timeout(HANGING, connecting).await.expect("the handshake hangs")
}

/// Asks whether the server is live; returns the whole answer, or the error.
async fn ask(stream: &mut TlsStream<TcpStream>, keep: bool) -> io::Result<String> {
    let connection = if keep { "keep-alive" } else { "close" };
    let request =
        format!("GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\nconnection: {connection}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"}") {
        let read = tokio::time::timeout(HANGING, stream.read_buf(&mut answer));
        if read.await.expect("no reply")? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok(String::from_utf8(answer).unwrap())
}

/// Waits until the server has a free connection slot and answers.
async fn until_served(address: SocketAddr, files: &Files) {
    let served = async {
        loop {
            let Ok(mut stream) = connect(address, files, None, &[]).await else { continue };
            if ask(&mut stream, false).await.is_ok() {
                return;
            }
        }
    };
    tokio::time::timeout(HANGING, served).await.unwrap();
}

/// The server's certificate.
fn shown(stream: &TlsStream<TcpStream>) -> CertificateDer<'static> {
    stream.get_ref().1.peer_certificates().unwrap()[0].clone()
}

fn of_pem(pem: &str) -> CertificateDer<'static> {
    CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_services_take_connections_with_tls_alone() {
    let files = Files::new();
    let server = Server::start(files.config(), &[]).await;
    let addresses = server.serving.addresses();
    for address in [addresses.grpc.to_string(), format!("https://localhost:{}", addresses.grpc.port())] {
        let mut client = Client::connect_with(&address, &files.credentials(None)).await.unwrap();
        client.infer_message(good()).await.unwrap();
    }
    for (protocols, agreed) in
        [(&["h2", "http/1.1"][..], Some(&b"h2"[..])), (&["http/1.1"], Some(b"http/1.1")), (&[], None)]
    {
        let mut stream = connect(addresses.http, &files, None, protocols).await.unwrap();
        assert_eq!(stream.get_ref().1.alpn_protocol(), agreed);
        if agreed != Some(b"h2") {
            assert!(ask(&mut stream, true).await.unwrap().starts_with("HTTP/1.1 200"));
            assert!(ask(&mut stream, false).await.unwrap().starts_with("HTTP/1.1 200"));
        }
    }
    // A service with HTTP/2 only accepts no other protocol.
    connect(addresses.grpc, &files, None, &["http/1.1"]).await.unwrap_err();

    let stranger = Files::new();
    for credentials in [stranger.credentials(None), Credentials::default()] {
        let refused = Client::connect_with(&addresses.grpc.to_string(), &credentials).await;
        let asked = match refused {
            Err(ClientError::Tls { .. } | ClientError::Unreachable { .. }) => continue,
            Err(other) => panic!("{other}"),
            Ok(mut client) => client.infer_message(good()).await,
        };
        asked.unwrap_err();
    }
    // A client without TLS gets no answer; the metrics port stays without TLS.
    for address in [addresses.grpc, addresses.http] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(b"GET /v2 HTTP/1.1\r\nhost: localhost\r\n\r\n").await.unwrap();
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(HANGING, stream.read_to_end(&mut answer)).await.unwrap();
        assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    }
    let metrics = http(addresses.metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(metrics.body).unwrap();
    assert!(text.contains("millrace_serving_failed_handshakes_total"), "{text}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_without_a_trusted_certificate_are_refused_where_one_is_asked_for() {
    let files = Files::new();
    let (certificate, key) = Authority::new("theirs").issue("stranger");
    files.write("stranger.pem", &certificate);
    files.write("stranger.key", &key);
    let mut config = files.config();
    config.tls.as_mut().unwrap().client_ca = Some(files.path("ca.pem"));
    let server = Server::start(config, &[]).await;
    let addresses = server.serving.addresses();
    for (identity, trusted) in [(None, false), (Some("stranger"), false), (Some("client"), true)] {
        let credentials = files.credentials(identity);
        let answered = match Client::connect_with(&addresses.grpc.to_string(), &credentials).await {
            Ok(mut client) => client.infer_message(good()).await.is_ok(),
            Err(_) => false,
        };
        assert_eq!(answered, trusted, "gRPC, {identity:?}");
        // With TLS 1.3 a client learns of the refusal from its first read.
        let answered = match connect(addresses.http, &files, identity, &[]).await {
            Ok(mut stream) => ask(&mut stream, false).await.is_ok(),
            Err(_) => false,
        };
        assert_eq!(answered, trusted, "REST, {identity:?}");
    }
    server.stop().await;
}

/// Failed reloads of certificates in this process.
async fn failed_reloads(server: &Server) -> u64 {
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    let name = r#"millrace_serving_reloads_total{outcome="failed",what="certificates"} "#;
    text.lines().find_map(|line| line.strip_prefix(name)).map_or(0, |value| value.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_certificates_are_shown_to_new_connections() {
    let files = Files::new();
    let first = of_pem(&std::fs::read_to_string(files.path("server.pem")).unwrap());
    let server = Server::start(Config { reload_ms: 5, ..files.config() }, &[]).await;
    let addresses = server.serving.addresses();
    let mut old = connect(addresses.http, &files, None, &[]).await.unwrap();
    assert_eq!(shown(&old), first);
    let mut client =
        Client::connect_with(&addresses.grpc.to_string(), &files.credentials(None)).await.unwrap();

    // A key and a certificate that do not match, as between two steps of a renewal, or that are invalid,
    // leave the old ones in force.
    for (name, content) in [("server.key", files.authority.issue("other").1), ("server.pem", "none".into())] {
        let failed = failed_reloads(&server).await;
        files.write(name, &content);
        let wait = async { while failed_reloads(&server).await == failed {} };
        tokio::time::timeout(HANGING, wait).await.unwrap();
        for address in [addresses.http, addresses.grpc] {
            assert_eq!(shown(&connect(address, &files, None, &["h2"]).await.unwrap()), first);
        }
    }
    let second = of_pem(&files.issue("server"));
    for address in [addresses.http, addresses.grpc] {
        let wait =
            async { while shown(&connect(address, &files, None, &["h2"]).await.unwrap()) != second {} };
        tokio::time::timeout(HANGING, wait).await.unwrap();
    }
    // Existing connections continue.
    assert!(ask(&mut old, false).await.unwrap().starts_with("HTTP/1.1 200"));
    client.infer_message(good()).await.unwrap();
    server.stop().await;
}

/// Whether a client with that certificate gets an answer.
async fn is_served(address: SocketAddr, files: &Files, identity: &str) -> bool {
    match connect(address, files, Some(identity), &[]).await {
        Ok(mut stream) => ask(&mut stream, false).await.is_ok(),
        Err(_) => false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn withdrawn_authority_is_not_trusted_even_if_its_file_is_invalid() {
    let files = Files::new();
    let theirs = Authority::new("theirs");
    let (certificate, key) = theirs.issue("former");
    files.write("former.pem", &certificate);
    files.write("former.key", &key);
    let both = format!("{}{}", files.authority.pem, theirs.pem);
    let bad = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    files.write("clients.pem", &both);
    let mut config = Config { reload_ms: 5, ..files.config() };
    config.tls.as_mut().unwrap().client_ca = Some(files.path("clients.pem"));
    let server = Server::start(config, &[]).await;
    let address = server.serving.addresses().http;
    for (content, ours) in [
        (Some(format!("{bad}{}", files.authority.pem)), true),
        (Some("no PEM at all".to_owned()), false),
        (Some(String::new()), false),
        (None, false),
    ] {
        files.write("clients.pem", &both);
        let trusted = async { while !is_served(address, &files, "former").await {} };
        tokio::time::timeout(HANGING, trusted).await.unwrap();
        let failed = failed_reloads(&server).await;
        match &content {
            Some(content) => files.write("clients.pem", content),
            None => std::fs::remove_file(files.path("clients.pem")).unwrap(),
        }
        let wait = async { while failed_reloads(&server).await == failed {} };
        tokio::time::timeout(HANGING, wait).await.unwrap();
        assert!(!is_served(address, &files, "former").await, "{content:?}");
        assert_eq!(is_served(address, &files, "client").await, ours, "{content:?}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_certificate_that_has_expired_is_reported() {
    let files = Files::new();
    let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    let key = KeyPair::generate().unwrap();
    let issuer = Issuer::from_params(&files.authority.params, &files.authority.key);
    files.write("server.pem", &params.signed_by(&key, &issuer).unwrap().pem());
    files.write("server.key", &key.serialize_pem());
    let server = Server::start(files.config(), &[]).await;
    let reply = http(server.serving.addresses().metrics, "GET", "/metrics", &[], b"").await;
    let text = String::from_utf8(reply.body).unwrap();
    let reported = r#"millrace_serving_reloads_total{outcome="expired",what="certificates"} 1"#;
    assert!(text.contains(reported), "{text}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_handshake_delays_no_connection_and_ends() {
    let files = Files::new();
    let mut config = files.config();
    config.limits.stalled_ms_max = 200;
    let server = Server::start(config, &[]).await;
    let addresses = server.serving.addresses();
    let mut silent = Vec::new();
    // An incomplete TLS record.
    for beginning in [&b""[..], &[0x16], &[0x16, 3, 1, 2, 0, 1, 0]] {
        for address in [addresses.http, addresses.grpc] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(beginning).await.unwrap();
            silent.push(stream);
        }
    }
    until_served(addresses.http, &files).await;
    for mut stream in silent {
        let mut rest = Vec::new();
        let read = stream.read_to_end(&mut rest);
        let _ = tokio::time::timeout(HANGING, read).await.expect("the server keeps the connection");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn handshakes_count_as_connections() {
    let files = Files::new();
    let mut config = files.config();
    config.limits.connections_max = 1;
    let server = Server::start(config, &[]).await;
    let address = server.serving.addresses().http;
    let silent = TcpStream::connect(address).await.unwrap();
    connect(address, &files, None, &[]).await.unwrap_err();
    drop(silent);
    until_served(address, &files).await;
    server.stop().await;
}

#[tokio::test]
async fn files_that_cannot_be_used_are_named() {
    let files = Files::new();
    let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nAAAA\n-----END ENCRYPTED PRIVATE KEY-----\n";
    let older =
        "-----BEGIN RSA PRIVATE KEY-----\nProc-Type: 4,ENCRYPTED\n\nAAAA\n-----END RSA PRIVATE KEY-----\n";
    for (name, content) in [
        ("empty", ""),
        ("words", "no PEM at all"),
        ("cut", "-----BEGIN CERTIFICATE-----\nMIIB"),
        ("bad", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"),
        ("badkey", "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"),
        ("base", "-----BEGIN PRIVATE KEY-----\n!secret!\n-----END PRIVATE KEY-----\n"),
        ("encrypted", encrypted),
        ("older", older),
    ] {
        files.write(name, content);
    }
    let refused = async |certificate: &str, key: &str, client_ca: Option<&str>| {
        let tls = Tls {
            certificate: files.path(certificate),
            key: files.path(key),
            client_ca: client_ca.map(|name| files.path(name)),
        };
        let source = Source::directory(files.dir.path()).unwrap();
        let config = Config { tls: Some(tls), ..config() };
        serve(&config, source, Default::default()).await.unwrap_err().to_string()
    };
    let path = |name: &str| files.path(name).display().to_string();
    for (certificate, key, ca, named, says) in [
        ("none", "server.key", None, "none", "tls.certificate"),
        ("server.pem", "none", None, "none", "cannot be read"),
        ("empty", "server.key", None, "empty", "holds no certificate"),
        ("words", "server.key", None, "words", "holds no certificate"),
        ("server.key", "server.key", None, "server.key", "holds no certificate"),
        ("cut", "server.key", None, "cut", "breaks off"),
        ("bad", "server.key", None, "bad", "bad certificate"),
        ("server.pem", "server.pem", None, "server.pem", "holds no private key"),
        ("server.pem", "client.key", None, "client.key", "is not the key of the certificate in"),
        ("server.pem", "encrypted", None, "encrypted", "is encrypted"),
        ("server.pem", "older", None, "older", "is encrypted"),
        ("server.pem", "badkey", None, "badkey", "cannot be used"),
        ("server.pem", "base", None, "base", "not base64"),
        ("server.pem", "server.key", Some("words"), "words", "tls.client_ca"),
        ("server.pem", "server.key", Some("bad"), "bad", "bad certificate"),
        ("server.pem", "server.key", Some("."), ".", "is no file"),
    ] {
        let error = refused(certificate, key, ca).await;
        assert!(error.contains(says) && error.contains(&path(named)), "{certificate} {key} {ca:?}: {error}");
        assert!(error.starts_with("[serving] tls.") && !error.contains("secret"), "{error}");
    }
    let credentials = |ca: &str| Credentials { ca: Some(files.path(ca)), ..Credentials::default() };
    for ca in ["none", "words", "bad"] {
        let error = Client::connect_with("localhost:1", &credentials(ca)).await.unwrap_err();
        assert!(
            matches!(&error, ClientError::Credentials { reason } if reason.contains(&path(ca))),
            "{error}"
        );
    }
    let with_token = |name: &str| Credentials::default().with_token_file(Path::new(&path(name)));
    assert!(with_token("words").unwrap().token.is_some());
    with_token("empty").unwrap_err();
    with_token("none").unwrap_err();
}

/// Each side with and without TLS, and certificates that do not match.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_tls_errors_name_the_mismatch_and_the_flag() {
    let (files, other) = (Files::new(), Files::new());
    let mut params = CertificateParams::new(vec!["elsewhere.example".into()]).unwrap();
    params.distinguished_name.push(DnType::CommonName, "elsewhere");
    let key = KeyPair::generate().unwrap();
    let issuer = Issuer::from_params(&other.authority.params, &other.authority.key);
    other.write("server.pem", &params.signed_by(&key, &issuer).unwrap().pem());
    other.write("server.key", &key.serialize_pem());
    let secured = Server::start(files.config(), &[]).await;
    let elsewhere = Server::start(other.config(), &[]).await;
    let plain = Server::start(config(), &[]).await;
    let stranger = Files::new();
    let refused = async |server: &Server, host: &str, credentials: Credentials| {
        let address = format!("{host}:{}", server.serving.addresses().grpc.port());
        let asked = match Client::connect_with(&address, &credentials).await {
            Ok(mut client) => client.server_metadata().await.map(drop),
            Err(error) => Err(error),
        };
        match asked {
            Err(error @ ClientError::Tls { .. }) => error.to_string(),
            other => panic!("{address}: {other:?}"),
        }
    };
    for (server, host, credentials, words) in [
        (&secured, "http://127.0.0.1", Credentials::default(), "with TLS alone: say https://"),
        (&secured, "127.0.0.1", Credentials::default(), "--ca"),
        (&plain, "https://127.0.0.1", files.credentials(None), "TLS"),
        (&secured, "https://localhost", stranger.credentials(None), "--ca"),
        (&elsewhere, "https://localhost", other.credentials(None), "not for localhost"),
    ] {
        let line = refused(server, host, credentials).await;
        assert!(line.contains(words) && line.contains(host), "{line}");
    }
    for server in [secured, elsewhere, plain] {
        server.stop().await;
    }
}
