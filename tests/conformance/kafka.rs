//! The same commands on Apache Kafka instead of the embedded broker.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::clients::python;
use crate::support::{Home, program, project, until};

/// A single-node Apache Kafka in a folder of its own; killed when dropped.
struct Kafka {
    child: Child,
    bootstrap: String,
}

impl Kafka {
    fn start(dir: &Path) -> Kafka {
        // Both ports are held until both are known.
        let held: Vec<_> = (0..2).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let ports: Vec<u16> = held.iter().map(|listener| listener.local_addr().unwrap().port()).collect();
        drop(held);
        let bootstrap = format!("127.0.0.1:{}", ports[0]);
        let properties = dir.join("server.properties");
        std::fs::write(
            &properties,
            format!(
                "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:{c}\n\
                 listeners=PLAINTEXT://{bootstrap},CONTROLLER://127.0.0.1:{c}\n\
                 controller.listener.names=CONTROLLER\nlog.dirs={}\n\
                 offsets.topic.replication.factor=1\ntransaction.state.log.replication.factor=1\n\
                 transaction.state.log.min.isr=1\ngroup.initial.rebalance.delay.ms=0\n",
                dir.join("logs").display(),
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
        program(java("kafka.tools.StorageTool").args(["format", "-t", id.trim(), "-c"]).arg(&properties));
        let log = std::fs::File::create(dir.join("kafka.log")).unwrap();
        let child = java("kafka.Kafka")
            .arg(&properties)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let kafka = Kafka { child, bootstrap };
        until("Apache Kafka answers", || {
            let listed =
                Command::new("kcat").args(["-b", &kafka.bootstrap, "-L", "-m", "2"]).output().unwrap();
            listed.status.success()
        });
        kafka
    }
}

impl Drop for Kafka {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

#[test]
#[ignore = "needs Apache Kafka: run make conformance"]
fn the_commands_work_on_apache_kafka() {
    let home = Home::new();
    let kafka = Kafka::start(home.dir.path());
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

    // Records of a transaction that was aborted never happened; its marker leaves a gap.
    program(python("transactions.py").arg(&kafka.bootstrap).arg("transactional"));
    let report = on_kafka(&["ingest", "--topic", "transactional", "--volume", "digits"]);
    assert_eq!(report["report"]["landed"], 100, "{report}");
    assert_eq!(report["report"]["dead_letters"], 0, "{report}");
    assert_eq!(on_kafka(&["feed", "digits:/transactional", "--dry"])["rows"], 100);
}
