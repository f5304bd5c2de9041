//! Samples per second of one training worker against two.

use std::process::Command;

use crate::figure::{Figure, Kind, median};

const ROUNDS: usize = 3;
const RECORDS: usize = 20_000;
const WIDTH: usize = 256;

pub(crate) fn figures() -> Vec<Figure> {
    let dir = tempfile::tempdir().unwrap();
    let home = dir.path().join("home");
    let millrace = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_millrace"))
            .current_dir(dir.path())
            .env("MILLRACE_HOME", &home)
            .arg("--json")
            .args(args)
            .output()
            .unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        output.stdout
    };
    let mut text = String::new();
    for i in 0..RECORDS {
        let values: Vec<String> = (0..WIDTH).map(|j| ((i * 31 + j * 17) % 16).to_string()).collect();
        text += &format!("{{\"x\":[{}],\"label\":{}}}\n", values.join(","), i % 10);
    }
    std::fs::write(dir.path().join("records.jsonl"), text).unwrap();
    millrace(&["produce", "t", "records.jsonl"]);
    millrace(&["ingest", "--topic", "t", "--volume", "v"]);
    millrace(&["snapshot", "create", "v@s"]);
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for workers in [1, 2] {
            // A seed of its own makes each a run that nobody has published yet.
            let job = format!(
                "name = \"bench\"\ndataset = \"v@s:/t\"\nfeatures = \"x\"\nlabel = \"label\"\n\
                 model = {{ kind = \"mlp\", inputs = 256, hidden = [512, 512], classes = 10 }}\n\
                 optimizer = {{ kind = \"adamw\", learning_rate = 0.001 }}\n\
                 batch_rows = 1536\nepochs_max = 2\nseed = {}\nworkers = {workers}\n",
                round * 2 + workers
            );
            std::fs::write(dir.path().join("train.toml"), job).unwrap();
            let report: serde_json::Value =
                serde_json::from_slice(&millrace(&["train", "train.toml"])).unwrap();
            rates[workers - 1].push(report["samples_per_second"].as_f64().unwrap());
        }
    }
    vec![Figure {
        name: "trainer/samples",
        kind: Kind::Rate,
        unit: "samples/s",
        value: median(&mut rates[1]),
        control: median(&mut rates[0]),
        against: "one worker; ours is two (MLP 256-512-512-10, batch 1536, strict fixed-point sums, all on two cores)",
    }]
}
