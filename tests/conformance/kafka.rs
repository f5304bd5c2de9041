//! Tests of the topic commands on Apache Kafka instead of the embedded broker.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use crate::clients::python;
use crate::support::{Home, failure, program, project, until};

/// A single-node Apache Kafka in a temporary folder. The tests share one, each with topics of its own.
struct Kafka {
    child: Child,
    folder: TempDir,
    /// Kills the shared one and removes its folder when its standard input ends, which it does with this process.
    _guard: Option<Child>,
    bootstrap: String,
    /// The listener with TLS.
    tls: String,
    /// The listener with TLS and SCRAM.
    scram: String,
    /// The certificate of the authority that signed the broker's certificate.
    authority: PathBuf,
}

/// The login module of a SCRAM listener; its users are in Kafka's metadata.
const LOGIN: &str = "org.apache.kafka.common.security.scram.ScramLoginModule required;";
const PASSWORD: &str = "grist-and-flour";
/// Attempts to start; another process may take a port that was free.
const STARTS: usize = 5;

static SHARED: OnceLock<Kafka> = OnceLock::new();

/// Writes an authority's certificate, and a server key and certificate for Kafka.
fn write_certificates(authority: &Path, server: &Path) {
    let mut params = CertificateParams::new(Vec::<String>::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.distinguished_name.push(DnType::CommonName, "authority");
    let key = KeyPair::generate().unwrap();
    let signed = params.self_signed(&key).unwrap();
    let issuer = Issuer::from_params(&params, &key);
    let mut broker = CertificateParams::new(vec!["127.0.0.1".into(), "localhost".into()]).unwrap();
    broker.distinguished_name.push(DnType::CommonName, "broker");
    let broker_key = KeyPair::generate().unwrap();
    let certificate = broker.signed_by(&broker_key, &issuer).unwrap();
    std::fs::write(authority, signed.pem()).unwrap();
    std::fs::write(server, broker_key.serialize_pem() + &certificate.pem() + &signed.pem()).unwrap();
}

impl Kafka {
    fn shared() -> &'static Kafka {
        SHARED.get_or_init(|| {
            let mut kafka = (0..STARTS).find_map(|_| Kafka::start()).expect("Apache Kafka starts");
            let guard = Command::new("sh")
                .args(["-c", "read -r _; kill -s KILL \"$1\"; rm -rf \"$2\"", "sh"])
                .arg(kafka.child.id().to_string())
                .arg(kafka.folder.path())
                .stdin(Stdio::piped())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                // Ctrl-C of the tests is not for it.
                .process_group(0)
                .spawn();
            kafka._guard = Some(guard.unwrap());
            kafka
        })
    }

    /// `None` if Kafka ended before it answered.
    fn start() -> Option<Kafka> {
        let folder = tempfile::Builder::new().prefix("millrace-kafka-").tempdir().unwrap();
        let dir = folder.path();
        // Holds all ports until all are known.
        let held: Vec<_> = (0..4).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<u16> = held.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        drop(held);
        let [bootstrap, tls, scram] = [0, 2, 3].map(|at| format!("127.0.0.1:{}", ports[at]));
        let authority = dir.join("authority.pem");
        let server = dir.join("server.pem");
        write_certificates(&authority, &server);
        let properties = dir.join("server.properties");
        std::fs::write(
            &properties,
            format!(
                "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:{c}\n\
                 listeners=PLAINTEXT://{bootstrap},SSL://{tls},SASL_SSL://{scram},CONTROLLER://127.0.0.1:{c}\n\
                 listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_SSL:SASL_SSL,CONTROLLER:PLAINTEXT\n\
                 inter.broker.listener.name=PLAINTEXT\n\
                 ssl.keystore.type=PEM\nssl.keystore.location={server}\n\
                 sasl.enabled.mechanisms=SCRAM-SHA-256,SCRAM-SHA-512\n\
                 listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config={LOGIN}\n\
                 listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config={LOGIN}\n\
                 controller.listener.names=CONTROLLER\nlog.dirs={logs}\n\
                 offsets.topic.replication.factor=1\ntransaction.state.log.replication.factor=1\n\
                 transaction.state.log.min.isr=1\ngroup.initial.rebalance.delay.ms=0\n",
                logs = dir.join("logs").display(),
                server = server.display(),
                c = ports[1],
            ),
        )
        .unwrap();
        let java = |main: &str| {
            let mut command = Command::new("java");
            command.args(["-Xmx512m", "-cp"]).arg(project().join(".local/kafka/libs/*")).arg(main);
            command
        };
        let id = program(java("kafka.tools.StorageTool").arg("random-uuid"));
        let users = ["SCRAM-SHA-256", "SCRAM-SHA-512"]
            .map(|kind| format!("{kind}=[name=miller,password={PASSWORD}]"));
        let users = users.iter().flat_map(|user| ["--add-scram", user]);
        program(
            java("kafka.tools.StorageTool")
                .args(["format", "-t", id.trim(), "-c"])
                .arg(&properties)
                .args(users),
        );
        let log = std::fs::File::create(dir.join("kafka.log")).unwrap();
        let child = java("kafka.Kafka")
            .arg(&properties)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut kafka = Kafka { child, folder, _guard: None, bootstrap, tls, scram, authority };
        let mut answers = false;
        until("Apache Kafka answers or ends", || {
            let listed =
                Command::new("kcat").args(["-b", &kafka.bootstrap, "-L", "-m", "2"]).output().unwrap();
            // A process that has the port instead must not be taken for Kafka.
            let ended = kafka.child.try_wait().unwrap().is_some();
            answers = listed.status.success() && !ended;
            answers || ended
        });
        answers.then_some(kafka)
    }
}

impl Drop for Kafka {
    /// Not reached for the shared one.
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
#[ignore = "needs Apache Kafka: run make conformance"]
fn the_commands_work_on_apache_kafka() {
    let home = Home::new();
    let kafka = Kafka::shared();
    let on_kafka = |args: &[&str]| -> serde_json::Value {
        let text = program(
            home.command()
                .env("MILLRACE_STREAMS__BOOTSTRAP_SERVERS", &kafka.bootstrap)
                .arg("--json")
                .args(args),
        );
        serde_json::from_str(&text).unwrap()
    };
    let records = project().join("examples/digits/digits.jsonl");
    assert_eq!(
        on_kafka(&["produce", "digits", records.to_str().unwrap(), "--partitions", "3"])["produced"],
        1437
    );
    let ingest = ["ingest", "--topic", "digits", "--volume", "digits", "--path", "train"];
    assert_eq!(on_kafka(&ingest)["report"]["landed"], 1437);
    assert_eq!(on_kafka(&ingest)["report"]["landed"], 0, "a second run lands nothing twice");
    assert_eq!(on_kafka(&["produce", "digits", records.to_str().unwrap()])["produced"], 1437);
    assert_eq!(on_kafka(&ingest)["report"]["landed"], 1437);
    assert_eq!(on_kafka(&["feed", "digits:/train", "--dry"])["rows"], 2 * 1437);

    // Records of an aborted transaction do not count; its marker leaves a gap.
    program(python("transactions.py").arg(&kafka.bootstrap).arg("transactional"));
    let report = on_kafka(&["ingest", "--topic", "transactional", "--volume", "digits"]);
    assert_eq!(report["report"]["landed"], 100, "{report}");
    assert_eq!(report["report"]["dead_letters"], 0, "{report}");
    assert_eq!(on_kafka(&["feed", "digits:/transactional", "--dry"])["rows"], 100);
}

/// Retention may remove all records of a transaction together with its marker. The ingest then still counts
/// them as landed.
#[test]
#[ignore = "needs Apache Kafka: run make conformance"]
fn transactions_land_through_retention() {
    let home = Home::new();
    let kafka = Kafka::shared();
    let run = |args: &[&str]| {
        let text = program(
            home.command()
                .env("MILLRACE_STREAMS__BOOTSTRAP_SERVERS", &kafka.bootstrap)
                .arg("--json")
                .args(args),
        );
        serde_json::from_str::<serde_json::Value>(&text).unwrap()
    };
    let ingest = ["ingest", "--topic", "retained", "--volume", "digits"];
    let mut landed = 0;
    for round in 0..3 {
        program(python("transactions.py").arg(&kafka.bootstrap).arg("retained"));
        let report = run(&ingest);
        assert_eq!(report["report"]["landed"], 100, "round {round}: {report}");
        landed += 100;
        // 200 records and two markers: the offset is after the last marker.
        assert_eq!(report["report"]["offsets"]["0"], 202 * (round + 1), "round {round}: {report}");
        let said = program(python("delete_records.py").arg(&kafka.bootstrap).arg("retained"));
        assert!(said.contains("deleted all"), "{said}");
        let again = run(&ingest);
        assert_eq!(again["report"]["records"], 0, "round {round}: {again}");
    }
    assert_eq!(run(&["feed", "digits:/retained", "--dry"])["rows"], landed);
}

#[test]
#[ignore = "needs Apache Kafka: run make conformance"]
fn tls_scram_and_zstd_work_on_apache_kafka() {
    let home = Home::new();
    let kafka = Kafka::shared();
    let records = project().join("examples/digits/digits.jsonl");
    let records = records.to_str().unwrap();
    let authority = kafka.authority.to_str().unwrap();
    let settings = |servers: &str, properties: &[(&str, &str)]| {
        let lines: String =
            properties.iter().map(|(key, value)| format!("\"{key}\" = \"{value}\"\n")).collect();
        let text = format!("[streams]\nbootstrap_servers = \"{servers}\"\n[streams.properties]\n{lines}");
        home.file("millrace.toml", text);
    };
    let tls = [("security.protocol", "ssl"), ("ssl.ca.location", authority), ("compression.type", "zstd")];
    let scram = |mechanism, password| {
        [
            ("security.protocol", "sasl_ssl"),
            ("ssl.ca.location", authority),
            ("sasl.mechanism", mechanism),
            ("sasl.username", "miller"),
            ("sasl.password", password),
            ("compression.type", "zstd"),
        ]
    };
    for (topic, servers, properties) in [
        ("by-tls", &kafka.tls, &tls[..]),
        ("by-scram-256", &kafka.scram, &scram("SCRAM-SHA-256", PASSWORD)),
        ("by-scram-512", &kafka.scram, &scram("SCRAM-SHA-512", PASSWORD)),
    ] {
        settings(servers, properties);
        assert_eq!(home.json(["produce", topic, records])["produced"], 1437, "{topic}");
        let report = home.json(["ingest", "--topic", topic, "--volume", "digits"]);
        assert_eq!(report["report"]["landed"], 1437, "{topic}: {report}");
        // The attributes of the first batch name its codec: 4 is zstd.
        let log = kafka.folder.path().join(format!("logs/{topic}-0/00000000000000000000.log"));
        let mut attributes = [0; 2];
        std::fs::File::open(log).unwrap().read_exact_at(&mut attributes, 21).unwrap();
        assert_eq!(i16::from_be_bytes(attributes) & 7, 4, "{topic} is not zstd");
    }

    settings(&kafka.scram, &scram("SCRAM-SHA-256", "not-the-password"));
    let (_, line) = home.fails(["ingest", "--topic", "by-scram-256", "--volume", "digits"]);
    assert!(line.contains("uthentication"), "{line}");
    assert!(!line.contains("not-the-password"), "{line}");
    // Without the authority, the client does not trust the broker's certificate.
    settings(&kafka.tls, &[("security.protocol", "ssl")]);
    let (_, line) = home.fails(["ingest", "--topic", "by-tls", "--volume", "digits"]);
    assert!(line.contains("certificate"), "{line}");
}

/// Commands on topics of Kafka as datasets.
struct Feeds {
    home: Home,
    kafka: &'static Kafka,
}

impl Feeds {
    fn command(&self, args: &[&str]) -> Command {
        let mut command = self.home.command();
        command.env("MILLRACE_STREAMS__BOOTSTRAP_SERVERS", &self.kafka.bootstrap).arg("--json").args(args);
        command
    }

    fn json(&self, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&program(&mut self.command(args))).unwrap()
    }

    /// The rows of a dataset and its name with offsets. Its order is the same for one reader and for three.
    fn rows(&self, dataset: &str) -> (u64, String) {
        let plan = self.json(&["feed", "plan", dataset]);
        let pinned = plan["dataset"].as_str().unwrap().to_owned();
        let [one, three] =
            ["1", "3"].map(|readers| self.json(&["feed", "verify", &pinned, "--readers", readers]));
        assert_eq!((&one["rows"], &one["digest"]), (&plan["rows"], &three["digest"]));
        (plan["rows"].as_u64().unwrap(), pinned)
    }

    /// The exit code and the error of a dataset whose records are not there any more.
    fn fails(&self, dataset: &str) -> (i32, String) {
        failure(&self.command(&["feed", "verify", dataset]).output().unwrap(), dataset)
    }

    /// A change of a topic; `command` and the topic come first.
    fn topics(&self, args: &[&str]) {
        let mut command = python("topics.py");
        program(command.arg(&self.kafka.bootstrap).args(args));
    }
}

#[test]
#[ignore = "needs Apache Kafka: run make conformance"]
fn ranges_of_topics_are_datasets_on_apache_kafka() {
    let kafka = Kafka::shared();
    let feeds = Feeds { home: Home::new(), kafka };
    let removed = |dataset: &str, text: &str| {
        let (code, line) = feeds.fails(dataset);
        assert!(
            code == 3 && line.contains(text) && line.contains("--abandon-run"),
            "{dataset}: {code} {line}"
        );
        assert!(!line.contains(".jsonl"), "no name of a block: {line}");
    };
    let changed = |dataset: &str, text: &str| {
        let (code, line) = feeds.fails(dataset);
        assert!(
            code == 4 && line.contains(text) && line.contains("--abandon-run"),
            "{dataset}: {code} {line}"
        );
    };

    // Aborted records are no rows, and the first open transaction ends the range of its partition.
    program(python("transactions.py").arg(&kafka.bootstrap).arg("sold"));
    let now = || chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Millis, true);
    let before = now();
    let (rows, first) = feeds.rows("topic:sold@latest");
    assert_eq!(rows, 100);
    let mut held = python("topics.py");
    held.arg(&kafka.bootstrap).args(["hold", "sold", "0", "200", "50"]);
    let mut held = held.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(held.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "open\n");
    feeds.topics(&["produce", "sold", "0", "300", "10"]);
    assert_eq!(feeds.rows("topic:sold@latest"), (100, first.clone()), "behind the open transaction");
    // A time before its first record leaves nothing out; a later one would.
    let (before, behind) = (format!("topic:sold@{before}"), format!("topic:sold@{}", now()));
    assert_eq!(feeds.rows(&before).0, 100);
    let (code, line) = feeds.fails(&behind);
    assert!(code == 3 && line.contains("topic sold cannot be read until"), "{code} {line}");
    assert!(line.contains("partition 0 has a transaction") && line.contains("offset 202"), "{line}");
    held.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(held.wait().unwrap().success());
    assert_eq!(feeds.rows("topic:sold@latest").0, 160);
    assert_eq!((feeds.rows(&behind).0, feeds.rows(&before).0), (160, 100));
    assert_eq!(feeds.rows(&first), (100, first.clone()));

    // Two of four partitions are idle, one more is added, and retention removes the front of a range.
    feeds.topics(&["create", "clicks", "4"]);
    feeds.topics(&["produce", "clicks", "1", "0", "100"]);
    feeds.topics(&["produce", "clicks", "3", "100", "50"]);
    let (rows, four) = feeds.rows("topic:clicks@latest");
    assert_eq!(rows, 150);
    feeds.topics(&["add", "clicks", "5"]);
    feeds.topics(&["produce", "clicks", "4", "150", "20"]);
    assert_eq!(feeds.rows(&four), (150, four.clone()));
    assert_eq!(feeds.rows("topic:clicks@latest").0, 170);
    assert_eq!(feeds.rows("topic:clicks@90").0, 90);
    feeds.topics(&["remove", "clicks", "1", "40"]);
    removed(&four, "topic clicks partition 1: the records from offset 0 up to before 100 are needed");
    removed(&four, "the log has those from 40 up to before 100");
    let (rows, later) = feeds.rows("topic:clicks@latest");
    assert_eq!(rows, 130);
    feeds.topics(&["remove", "clicks", "1", "100"]);
    removed(&later, "the log has those from 100 up to before 100");
    assert_eq!(feeds.rows("topic:clicks@latest").0, 70);

    // A topic of the same name with the same values is another one; one with fewer partitions, too.
    feeds.topics(&["create", "again", "2"]);
    feeds.topics(&["produce", "again", "1", "0", "60"]);
    let (_, before) = feeds.rows("topic:again@latest");
    feeds.topics(&["delete", "again"]);
    let (code, line) = feeds.fails(&before);
    assert!(code == 3 && line.contains("topic again does not exist"), "{code} {line}");
    feeds.topics(&["create", "again", "2"]);
    feeds.topics(&["produce", "again", "1", "0", "60"]);
    changed(&before, "topic again partition 1: the records from offset 0 up to before 60 are not those");
    feeds.topics(&["delete", "again"]);
    feeds.topics(&["create", "again", "1"]);
    changed(&before, "topic again partition 1");

    // Compaction leaves holes: a new range has the records that are left, and one from before is refused.
    feeds.topics(&[
        "create",
        "states",
        "1",
        "cleanup.policy=compact",
        "segment.ms=100",
        "min.cleanable.dirty.ratio=0.01",
        "max.compaction.lag.ms=100",
        "delete.retention.ms=0",
    ]);
    feeds.topics(&["produce", "states", "0", "0", "100"]);
    feeds.topics(&["produce", "states", "0", "100", "100"]);
    let (_, before) = feeds.rows("topic:states@latest");
    feeds.topics(&["produce", "states", "0", "200", "100"]);
    // Records of the newest segment stay: these begin two more.
    feeds.topics(&["produce", "states", "0", "300", "1"]);
    feeds.topics(&["produce", "states", "0", "301", "1"]);
    feeds.topics(&["compacted", "states", "150"]);
    changed(&before, "topic states partition 0");
    let (rows, compacted) = feeds.rows("topic:states@latest");
    assert!((100..=150).contains(&rows), "{rows}");
    assert_eq!(feeds.rows(&compacted), (rows, compacted.clone()));
}
