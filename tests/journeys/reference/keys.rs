//! Generator of the configuration key pages: names, types and meanings from the source, defaults from the
//! program.

use millrace_trainer::job::JobFile;
use serde_json::Value;

use super::rust::{Member, Token, constant, fields, members, shown};
use super::{Page, cell, page, program, source};
use crate::support::Home;

/// A table of keys.
struct Table {
    /// Its heading in a file.
    heading: &'static str,
    file: &'static str,
    /// The struct, or `ENUM::VARIANT`.
    name: &'static str,
    /// JSON pointer to an example among the values of the configuration or of a job file.
    at: &'static str,
    /// The keys that it lists.
    keys: Keys,
}

/// Keys of a struct that a table lists.
enum Keys {
    All,
    /// [`ROW_KEYS`], or the others.
    Rows(bool),
}

const fn table(heading: &'static str, file: &'static str, name: &'static str, at: &'static str) -> Table {
    Table { heading, file, name, at, keys: Keys::All }
}

/// Some keys of the job file: those of the rows, or the others.
const fn job(heading: &'static str, are_rows: bool) -> Table {
    Table { heading, file: "trainer/src/job.rs", name: "JobFile", at: "/mlp", keys: Keys::Rows(are_rows) }
}

/// Keys of the job file that choose rows. They have a table of their own.
const ROW_KEYS: [&str; 6] = ["until", "where", "splits", "split", "split_by", "rows_per_epoch"];

/// Keys whose names are words of Rust, by the names of their fields.
const RENAMED: [(&str, &str); 1] = [("filter", "where")];

/// Keys that the samples give and that may be left out, with what stands in their place.
const OPTIONAL: [(&str, &str, &str); 1] = [("/mlp/validation", "dataset", "the job's, with `split`")];

const SERVING: &str = "serving/core/src/config.rs";
const OPTIMIZER: &str = "trainer/src/optim/config.rs";

const OBJECTIVE: &str = "trainer/src/engine/objective.rs";

const PAGES: [(&str, &str, &[Table]); 15] = [
    ("config/datafs.md", "Keys: datafs", &[table("[datafs]", "datafs/src/config.rs", "Config", "/datafs")]),
    (
        "config/streams.md",
        "Keys: streams",
        &[
            table("[streams]", "streams/src/config.rs", "Config", "/streams"),
            table("[[streams.topics]]", "streams/src/config.rs", "TopicConfig", "/streams/topics/0"),
            table("[streams.broker]", "streams/src/broker/config.rs", "Config", "/streams/broker"),
        ],
    ),
    (
        "config/ingest.md",
        "Keys: ingest",
        &[table("[[ingest.jobs]]", "ingest/src/config.rs", "JobConfig", "/ingest/jobs/0")],
    ),
    (
        "config/trainer.md",
        "Keys: trainer",
        &[table("[trainer]", "trainer/src/config.rs", "Config", "/trainer")],
    ),
    ("config/serving.md", "Keys: serving", &[table("[serving]", SERVING, "Config", "/serving")]),
    (
        "config/serving-limits.md",
        "Keys: limits and batching of the server, TLS, telemetry, drift",
        &[
            table("[serving.limits]", SERVING, "Limits", "/serving/limits"),
            table("[serving.batching]", SERVING, "Batching", "/serving/batching"),
            table("[serving.tls]", SERVING, "Tls", "/serving/tls"),
            table(
                "[serving.telemetry]",
                "serving/core/src/config/telemetry.rs",
                "Telemetry",
                "/serving/telemetry",
            ),
            table("[serving.drift]", "serving/core/src/config/drift.rs", "Drift", "/serving/drift"),
        ],
    ),
    (
        "config/serving-models.md",
        "Keys: models and pipes",
        &[
            table(
                "[serving.models.NAME]",
                "serving/core/src/config/model.rs",
                "ModelOptions",
                "/serving/models/example",
            ),
            table("[[serving.pipes]]", SERVING, "PipeConfig", "/serving/pipes/0"),
        ],
    ),
    (
        "config/feed.md",
        "Keys: feed",
        &[
            table("[feed]", "src/settings.rs", "FeedConfig", "/feed"),
            table("[feed.limits]", "streams/src/feed/flight/service.rs", "Limits", "/feed/limits"),
            table("[feed.tls]", SERVING, "Tls", "/feed/tls"),
        ],
    ),
    (
        "config/up.md",
        "Keys: up",
        &[
            table("[up]", "src/settings.rs", "UpConfig", "/up"),
            table("[[up.mounts]]", "src/settings.rs", "MountConfig", "/up/mounts/0"),
            table("[[up.snapshots]]", "src/settings.rs", "SnapshotSchedule", "/up/snapshots/0"),
        ],
    ),
    (
        "config/cluster.md",
        "Keys: cluster",
        &[table("[cluster]", "src/settings.rs", "ClusterConfig", "/cluster")],
    ),
    ("config/train-job.md", "Keys of a training job", &[job("The job file", false)]),
    (
        "config/train-tables.md",
        "Keys of rows, validation, shuffling and output",
        &[
            job("The job file: rows to train on", true),
            table("[validation]", "trainer/src/job.rs", "Validation", "/mlp/validation"),
            table("[shuffle]", "trainer/src/job.rs", "Shuffle", "/mlp/shuffle"),
            table("[output]", "trainer/src/job.rs", "Output", "/mlp/output"),
        ],
    ),
    (
        "config/train-objective.md",
        "Keys of losses, optimizers and averages",
        &[
            table("loss = { kind = \"cross_entropy\" }", OBJECTIVE, "CrossEntropy", "/mlp/loss"),
            table("loss = { kind = \"huber\" }", OBJECTIVE, "Huber", "/mlp/loss"),
            table("loss = { kind = \"kl\" }", OBJECTIVE, "Distillation", "/kl/loss"),
            table("[ema]", "trainer/src/optim/average.rs", "EmaConfig", "/kl/ema"),
            table("[optimizer] with kind = \"sgd\"", OPTIMIZER, "SgdConfig", "/cnn/optimizer"),
            table("[optimizer] with kind = \"adamw\"", OPTIMIZER, "AdamWConfig", "/mlp/optimizer"),
            table("[optimizer] with kind = \"adam\"", OPTIMIZER, "AdamConfig", "/adam/optimizer"),
            table("[optimizer] with kind = \"adagrad\"", OPTIMIZER, "AdaGradConfig", "/adagrad/optimizer"),
            table("[optimizer] with kind = \"rmsprop\"", OPTIMIZER, "RmsPropConfig", "/rmsprop/optimizer"),
        ],
    ),
    (
        "config/train-schedule.md",
        "Keys of learning rate schedules",
        &[
            table(
                "schedule = { kind = \"cosine\" }",
                OPTIMIZER,
                "Schedule::Cosine",
                "/mlp/optimizer/schedule",
            ),
            table(
                "schedule = { kind = \"one_cycle\" }",
                OPTIMIZER,
                "Schedule::OneCycle",
                "/adam/optimizer/schedule",
            ),
            table(
                "schedule = { kind = \"step\" }",
                OPTIMIZER,
                "Schedule::Step",
                "/adagrad/optimizer/schedule",
            ),
            table(
                "schedule = { kind = \"exponential\" }",
                OPTIMIZER,
                "Schedule::Exponential",
                "/rmsprop/optimizer/schedule",
            ),
            table(
                "schedule = { kind = \"linear\" }",
                OPTIMIZER,
                "Schedule::Linear",
                "/cnn/optimizer/schedule",
            ),
            table(
                "schedule = { kind = \"plateau\" }",
                "trainer/src/optim/plateau.rs",
                "Plateau",
                "/kl/optimizer/schedule",
            ),
        ],
    ),
    (
        "config/train-model.md",
        "Keys of models that a job builds",
        &[
            table("[model] with kind = \"mlp\"", "trainer/src/init.rs", "MlpSpec", "/mlp/model"),
            table("[model] with kind = \"cnn\"", "trainer/src/init.rs", "CnnSpec", "/cnn/model"),
        ],
    ),
];

/// An example of each table that is absent by default, with its required keys.
const SAMPLE: &str = r#"
[streams]
topics = [{ name = "example" }]
[[ingest.jobs]]
name = "example"
topic = "example"
volume = "example"
path = "example"
[serving.tls]
certificate = "server.pem"
key = "server.key"
[feed.tls]
certificate = "server.pem"
key = "server.key"
[serving.telemetry]
endpoint = "http://127.0.0.1:4317"
[serving.models.example]
[[serving.pipes]]
name = "example"
input = "example"
output = "predictions"
model = "example"
[up]
mounts = [{ volume = "example", path = "mnt" }]
snapshots = [{ volume = "example", every_s = 3600, keep = 48 }]
"#;

/// Job files with their required keys.
const JOBS: [(&str, &str); 6] = [
    (
        "mlp",
        r#"
name = "example"
dataset = "example@monday:/train"
features = "pixels"
label = "label"
model = { kind = "mlp", inputs = 64, classes = 10 }
optimizer = { kind = "adamw", schedule = { kind = "cosine", total_steps = 1000 } }
validation = { dataset = "example@monday:/test" }
"#,
    ),
    (
        "cnn",
        r#"
name = "example"
dataset = "example@monday:/train"
features = "pixels"
label = "label"
model = { kind = "cnn", height = 8, width = 8, classes = 10 }
optimizer = { kind = "sgd", schedule = { kind = "linear", warmup_steps = 100 } }
"#,
    ),
    (
        "adam",
        r#"
name = "example"
dataset = "example@monday:/train"
features = "pixels"
label = "label"
model = "example.onnx"
optimizer = { kind = "adam", schedule = { kind = "one_cycle", total_steps = 1000 } }
"#,
    ),
    (
        "adagrad",
        r#"
name = "example"
dataset = "example@monday:/train"
features = "pixels"
label = "label"
model = "example.onnx"
optimizer = { kind = "adagrad", schedule = { kind = "step", every_steps = 1000 } }
"#,
    ),
    (
        "rmsprop",
        r#"
name = "example"
dataset = "example@monday:/train"
features = "pixels"
label = "label"
model = "example.onnx"
optimizer = { kind = "rmsprop", schedule = { kind = "exponential", gamma = 0.999 } }
"#,
    ),
    (
        "kl",
        r#"
name = "example"
dataset = "example@monday:/train"
features = "pixels"
label = "label"
model = "example.onnx"
loss = { kind = "kl", teacher = "example:/models/large/1" }
optimizer = { kind = "sgd", schedule = { kind = "plateau" } }
ema = {}
validation = { dataset = "example@monday:/test" }
"#,
    ),
];

/// Readable names of types.
const TYPES: [(&str, &str); 54] = [
    ("bool", "true or false"),
    ("usize", "integer"),
    ("u32", "integer"),
    ("u64", "integer"),
    ("i64", "integer"),
    ("i32", "integer"),
    ("f32", "number"),
    ("f64", "number"),
    ("[f64;2]", "list of 2 numbers"),
    ("String", "text"),
    ("Features", "text or list"),
    ("Splits", "table of numbers"),
    ("EpochRows", "integer, or number with a point"),
    ("PathBuf", "path"),
    ("SocketAddr", "IP:PORT"),
    ("IpAddr", "IP address"),
    ("Name", "name"),
    ("VolumeSpec", "VOLUME[@SNAPSHOT]"),
    ("DatasetSpec", "VOLUME[@SNAPSHOT]:/PATH"),
    ("SourceSpec", "VOLUME@SNAPSHOT:/PATH or topic:NAME@UNTIL"),
    ("JobDataset", "VOLUME@SNAPSHOT:/PATH or topic:NAME@UNTIL, or a list of DATASET=WEIGHT"),
    ("Until", "word"),
    ("MetaUrl", "URL"),
    ("Secret", "secret"),
    ("Devices", "device"),
    ("Device", "device"),
    ("VersionPolicy", "text or list"),
    ("Target", "version or label"),
    ("ShadowTarget", "table"),
    ("DeclaredSchema", "table of types"),
    ("ModelSource", "path or table"),
    ("OptimizerConfig", "table"),
    ("Schedule", "table"),
    ("EmaConfig", "table"),
    ("ImageOptions", "table"),
    ("broker::Config", "table"),
    ("TopicConfig", "table"),
    ("JobConfig", "table"),
    ("MountConfig", "table"),
    ("SnapshotSchedule", "table"),
    ("ModelOptions", "table"),
    ("PipeConfig", "table"),
    ("Batching", "table"),
    ("Drift", "table"),
    ("Limits", "table"),
    ("Telemetry", "table"),
    ("Tls", "table"),
    ("Shuffle", "table"),
    ("Output", "table"),
    ("UnknownFields", "word"),
    ("Objective", "word or table"),
    ("Strategy", "word or table"),
    ("Precision", "word"),
    ("Validation", "table"),
];

/// Types with a few values, and the files that declare them.
const CHOICES: [(&str, &str); 7] = [
    ("Flush", "streams/src/broker/config.rs"),
    ("Control", SERVING),
    ("Format", "ingest/src/config.rs"),
    ("DeadLetter", "ingest/src/config.rs"),
    ("Tombstones", "ingest/src/config.rs"),
    ("Compression", "ingest/src/config.rs"),
    ("UnknownFields", "ingest/src/decode.rs"),
];

const NOTE: &str = "\
The last column says what an unset key means. A secret is text, `{ env = \"NAME\" }` or \
`{ file = \"PATH\" }`. [Configuration](../configuration.md) says where values come from.
";

pub(super) fn pages(home: &Home) -> Vec<Page> {
    let sample = home.file("sample.toml", SAMPLE);
    let plain = configuration(home, &[]);
    let filled = configuration(home, &["--config", sample.to_str().unwrap()]);
    let mut given: Value = toml::from_str(SAMPLE).unwrap();
    let mut filled = filled;
    for (name, text) in JOBS {
        filled[name] = serde_json::to_value(JobFile::parse(text).unwrap()).unwrap();
        given[name] = toml::from_str(text).unwrap();
    }
    let values = Values { plain, filled, given };
    let one = |(path, title, tables): &(&str, &str, &[Table])| {
        let tables: String = tables.iter().map(|table| values.table(table)).collect();
        page(path, title, &format!("{NOTE}{tables}"))
    };
    PAGES.iter().map(one).collect()
}

/// The output of `millrace config`.
fn configuration(home: &Home, flags: &[&str]) -> Value {
    let output = program(home).args(flags).args(["config", "--json"]).output().unwrap();
    assert!(output.status.success(), "millrace config: {output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

struct Values {
    /// The values without any configuration.
    plain: Value,
    /// The values with the samples.
    filled: Value,
    /// The samples themselves.
    given: Value,
}

impl Values {
    fn table(&self, table: &Table) -> String {
        let tokens = source(table.file);
        let keys = match table.name.split_once("::") {
            None => members(&tokens, "struct", table.name),
            Some((name, variant)) => {
                let variants = members(&tokens, "enum", name);
                fields(variants.iter().find(|found| found.name == variant).unwrap())
            }
        };
        let heading = if table.heading.starts_with("The ") {
            table.heading.into()
        } else {
            format!("`{}`", table.heading)
        };
        let mut text = format!("\n## {heading}\n\n| key | type | default | meaning |\n|---|---|---|---|\n");
        let mut choices = Vec::new();
        for key in &keys {
            let name =
                RENAMED.iter().find(|(field, _)| *field == key.name).map_or(&*key.name, |(_, name)| *name);
            if matches!(table.keys, Keys::Rows(are_rows) if are_rows != ROW_KEYS.contains(&name)) {
                continue;
            }
            let (kind, values) = kind(&shown(&key.rest));
            let default = self.default(table, name, &kind);
            text += &format!("| `{name}` | {kind} | {default} | {} |\n", cell(&plain(&key.doc, &tokens)));
            choices.extend(values.into_iter().map(|value| (key.name.clone(), value)));
        }
        for (key, value) in choices.iter().filter(|(_, value)| !value.doc.is_empty()) {
            text += &format!("\n- `{key}` = {}: {}", choice(value), plain(&value.doc, &tokens));
        }
        if choices.is_empty() { text } else { text + "\n" }
    }

    /// The default of a key.
    fn default(&self, table: &Table, key: &str, kind: &str) -> String {
        if let Some((_, _, other)) = OPTIONAL.iter().find(|(at, name, _)| *at == table.at && *name == key) {
            return (*other).to_owned();
        }
        let value = match self.plain.pointer(table.at) {
            Some(present) => &present[key],
            None => {
                let given = self.given.pointer(table.at).map(|given| &given[key]);
                if given.is_some_and(|given| !given.is_null() && !is_table(given)) {
                    return "required".to_owned();
                }
                let filled = self.filled.pointer(table.at);
                &filled.unwrap_or_else(|| panic!("the samples have no {}", table.at))[key]
            }
        };
        match value {
            Value::Null => "unset".to_owned(),
            Value::Object(fields) if fields.is_empty() => "none".to_owned(),
            // A choice between tables has no section of its own.
            Value::Object(_) if kind.contains('{') => {
                format!("`{}`", toml::Value::try_from(value).unwrap())
            }
            Value::Object(_) => "see below".to_owned(),
            Value::Array(list) if list.is_empty() => "none".to_owned(),
            Value::Number(number) => format!("{number}{}", size(key, number.as_u64().unwrap_or(0))),
            other => format!("`{}`", cell(&other.to_string())),
        }
    }
}

fn is_table(value: &Value) -> bool {
    value.is_object() || value.as_array().is_some_and(|list| list.iter().any(Value::is_object))
}

/// Formats bytes in the largest unit that divides them.
fn size(key: &str, value: u64) -> String {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let unit = units.into_iter().find(|(_, shift)| value > 0 && value.is_multiple_of(1 << shift));
    match unit {
        Some((unit, shift)) if key.contains("bytes") => format!(" ({} {unit})", value >> shift),
        _ => String::new(),
    }
}

/// A readable type, and its values if it has a few.
fn kind(written: &str) -> (String, Vec<Member>) {
    let inside = |outer: &str| written.strip_prefix(outer)?.strip_prefix('<')?.strip_suffix('>');
    if let Some(inner) = inside("Option") {
        return kind(inner);
    }
    if let Some(inner) = inside("Vec") {
        return (format!("list of {}", plural(&kind(inner).0)), Vec::new());
    }
    if let Some((_, value)) = inside("BTreeMap").and_then(|inner| inner.split_once(", ")) {
        return (format!("table of {}", plural(&kind(value).0)), Vec::new());
    }
    if let Some((_, file)) = CHOICES.into_iter().find(|(name, _)| *name == written) {
        let values = members(&source(file), "enum", written);
        let names: Vec<_> = values.iter().map(choice).collect();
        return (names.join(" or "), values);
    }
    let known = TYPES.into_iter().find(|(name, _)| *name == written);
    let (_, words) = known.unwrap_or_else(|| panic!("the type {written} has no words: add it to TYPES"));
    (words.replace('|', "\\|"), Vec::new())
}

fn plural(words: &str) -> String {
    match words {
        "text" => "texts".to_owned(),
        "IP:PORT" => words.to_owned(),
        _ if words.ends_with('s') || words.contains(' ') => words.to_owned(),
        _ => format!("{words}s"),
    }
}

/// A value of an enum in TOML.
fn choice(value: &Member) -> String {
    let mut name = String::new();
    for c in value.name.chars() {
        if c.is_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.extend(c.to_lowercase());
    }
    let has_content = value.rest.first().is_some_and(|token| token.is('('));
    if has_content { format!("`{{ {name} = \"…\" }}`") } else { format!("`\"{name}\"`") }
}

/// A doc comment without rustdoc links, in which constants of the file are replaced by their values.
fn plain(doc: &str, tokens: &[Token]) -> String {
    let mut text = String::new();
    let mut rest = doc;
    while let Some((before, after)) = rest.split_once("[`") {
        let Some((name, after)) = after.split_once("`]") else { break };
        text += before;
        match constant(tokens, name) {
            Some(value) => text += &value.to_string(),
            None => text += &format!("`{name}`"),
        }
        rest = after;
    }
    text + rest
}
