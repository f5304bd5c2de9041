//! The files that quickstart writes into its home: the data, millrace.toml and train.toml, such as
//! a user would write them by hand.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};

use crate::cli::QuickstartArgs;
use crate::failure::{Exit, fail};
use crate::home::{Home, write_atomically};

/// The records to train on, one JSON object per line.
pub(crate) const TRAIN: &str = include_str!("../../examples/digits/digits.jsonl");
/// The held-out records.
pub(crate) const TEST: &str = include_str!("../../examples/digits/digits-test.jsonl");

/// First line of a configuration that quickstart may overwrite.
const MARK: &str = "# Written by `millrace quickstart`; a later run writes it again.";

/// What was written.
pub(crate) struct Scaffold {
    /// The configuration that `millrace up` would read.
    pub(crate) config: PathBuf,
    /// The training job.
    pub(crate) job: PathBuf,
}

/// Writes the files. Refuses to touch a configuration that somebody else wrote.
pub(crate) fn write(home: &Home, args: &QuickstartArgs) -> Result<Scaffold> {
    let config = home.root().join("millrace.toml");
    let job = home.root().join("train.toml");
    for path in [&config, &job] {
        if let Ok(text) = fs::read_to_string(path)
            && !text.starts_with(MARK)
        {
            return fail(
                Exit::Conflict,
                format!(
                    "{} was not written by quickstart: choose another home with --home DIR",
                    path.display()
                ),
            );
        }
    }
    let data = home.root().join("data");
    fs::create_dir_all(&data).with_context(|| format!("cannot create {}", data.display()))?;
    let put = |path: &PathBuf, text: &str| {
        write_atomically(path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
    };
    put(&data.join("digits.jsonl"), TRAIN)?;
    put(&data.join("digits-test.jsonl"), TEST)?;
    put(&config, &config_text(args))?;
    put(&job, &job_text(args))?;
    Ok(Scaffold { config, job })
}

fn config_text(args: &QuickstartArgs) -> String {
    let (kafka, grpc, http, metrics) = if args.free_ports { (0, 0, 0, 0) } else { (9092, 8001, 8000, 8002) };
    let device = args.device.as_str();
    format!(
        r#"{MARK}
# `millrace --home THIS_FOLDER up` runs the same service again.

[streams]
bootstrap_servers = "embedded"
topics = [
    {{ name = "digits", partitions = 2 }},
    {{ name = "digits-test", partitions = 2 }},
    {{ name = "digits-predictions", partitions = 2 }},
]

[streams.broker]
listen = "127.0.0.1:{kafka}"

[up]
volumes = ["digits"]

[[ingest.jobs]]
name = "digits"
topic = "digits"
volume = "digits"
path = "train"
flush_ms = 500
[ingest.jobs.schema]
id = "int64"
pixels = "fixed_list<float32, 64>"
label = "int64"

[[ingest.jobs]]
name = "digits-test"
topic = "digits-test"
volume = "digits"
path = "test"
flush_ms = 500
[ingest.jobs.schema]
id = "int64"
pixels = "fixed_list<float32, 64>"
label = "int64"

[serving]
grpc = "127.0.0.1:{grpc}"
http = "127.0.0.1:{http}"
metrics = "127.0.0.1:{metrics}"
volume = "digits"
device = "{device}"
poll_ms = 250

[[serving.pipes]]
name = "digits"
input = "digits-test"
output = "digits-predictions"
model = "digits"
columns = {{ input = "pixels" }}
carry = ["id", "label"]
"#
    )
}

fn job_text(args: &QuickstartArgs) -> String {
    let (workers, seed, device) = (args.workers, args.seed, args.device.as_str());
    format!(
        r#"{MARK}
# `millrace --home THIS_FOLDER train THIS_FILE` trains it again.

name = "digits"
dataset = "digits@quickstart:/train"
features = "pixels"
label = "label"
batch_rows = 96
virtual_shards = 12
epochs_max = 60
loss_target = 0.02
seed = {seed}
workers = {workers}
device = "{device}"
checkpoint_every_steps = 100
loss = "cross_entropy"

[model]
kind = "mlp"
inputs = 64
hidden = [128]
classes = 10
scale = 0.0625

[optimizer]
kind = "adamw"
learning_rate = 0.003
weight_decay = 0.01
"#
    )
}
