//! The files that quickstart writes to its home: the data, millrace.toml and train.toml, as a user would
//! write them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use millrace_home::{Home, write_private};
use millrace_leaf::private;

use crate::cli::{QUICKSTART_SHARDS, QuickstartArgs};
use crate::failure::{Exit, fail};
use crate::quickstart::report::Start;

/// The records to train on, one JSON object per line.
pub(crate) const TRAIN: &str = include_str!("../../examples/digits/digits.jsonl");
/// The held-out records.
pub(crate) const TEST: &str = include_str!("../../examples/digits/digits-test.jsonl");

/// The data files, by their paths in the home.
const DATA: [(&str, &str); 2] = [("data/digits.jsonl", TRAIN), ("data/digits-test.jsonl", TEST)];

/// First line of a configuration that quickstart may overwrite.
const MARK: &str = "# Written by `millrace quickstart`; a later run writes it again.";

/// The paths of the written files.
pub(crate) struct Scaffold {
    /// The configuration that `millrace up` would read.
    pub(crate) config: PathBuf,
    /// The training job.
    pub(crate) job: PathBuf,
}

/// How a run on this home starts. Rejects, without changes, a home that quickstart did not create.
pub(crate) fn start(home: &Home) -> Result<Start> {
    let (config, job) = paths(home);
    let (config_is_ours, _) = (is_marked(&config)?, is_marked(&job)?);
    if config_is_ours {
        return Ok(Start::Continued);
    }
    // A run writes its configuration before it creates any of these.
    for name in ["datafs", "broker"] {
        let path = home.root().join(name);
        if path.symlink_metadata().is_ok() {
            return not_written_by_quickstart(&path);
        }
    }
    for (name, text) in DATA {
        let path = home.root().join(name);
        if path.symlink_metadata().is_ok() && fs::read(&path).ok().as_deref() != Some(text.as_bytes()) {
            return not_written_by_quickstart(&path);
        }
    }
    Ok(Start::Clean)
}

fn paths(home: &Home) -> (PathBuf, PathBuf) {
    (home.root().join("millrace.toml"), home.root().join("train.toml"))
}

/// False if the file is missing; an error if quickstart did not write it.
fn is_marked(path: &Path) -> Result<bool> {
    match fs::read(path) {
        Ok(text) if text.starts_with(MARK.as_bytes()) => Ok(true),
        Ok(_) => not_written_by_quickstart(path),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn not_written_by_quickstart<T>(path: &Path) -> Result<T> {
    fail(
        Exit::Conflict,
        format!("{} was not written by quickstart: choose another home with --home DIR", path.display()),
    )
}

/// Writes the files.
pub(crate) fn write(home: &Home, args: &QuickstartArgs) -> Result<Scaffold> {
    let (config, job) = paths(home);
    let data = home.root().join("data");
    private::create_dir_all(&data).with_context(|| format!("cannot create {}", data.display()))?;
    let put = |path: &PathBuf, text: &str| {
        write_private(path, text.as_bytes()).with_context(|| format!("cannot write {}", path.display()))
    };
    // First, since it marks the home as quickstart's.
    put(&config, &config_text(args))?;
    put(&job, &job_text(args))?;
    for (name, text) in DATA {
        put(&home.root().join(name), text)?;
    }
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
virtual_shards = {QUICKSTART_SHARDS}
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
