//! The `[serving]` table of `millrace.toml`: where models come from, where the server listens, how
//! much it takes, and the topic-to-topic pipes.

mod device;
mod drift;
mod model;
mod telemetry;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use millrace_datafs::VolumeSpec;
use serde::{Deserialize, Serialize};

pub use device::{Device, Devices};
pub(crate) use device::{Engine, Memory};
pub use drift::Drift;
pub(crate) use drift::ROWS_MIN;
pub use model::ModelOptions;
pub use telemetry::Telemetry;

/// Root path of the models inside a volume.
pub const VOLUME_ROOT: &str = "models";

/// The `[serving]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address of the gRPC service; port 0 takes a free one.
    pub grpc: SocketAddr,
    /// Address of the REST service; port 0 takes a free one.
    pub http: SocketAddr,
    /// Address of the Prometheus metrics; port 0 takes a free one.
    pub metrics: SocketAddr,
    /// Volume, or snapshot of one, whose `models/` directory is served. Excludes `directory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeSpec>,
    /// Directory of the local file system that is served. Excludes `volume`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// ONNX Runtime's shared library, unless `ORT_DYLIB_PATH` names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub onnxruntime: Option<PathBuf>,
    /// Where models run: `cpu`, `cuda`, `cuda:1`, or `cuda:0,1` for sessions on both.
    pub device: Devices,
    /// Whether a model may run on the processor, or parts of it, that its device cannot run. It is refused
    /// otherwise.
    pub allow_fallback: bool,
    /// Threads of the pool that inference runs on, beside one for each version that would wait for the others, and threads
    /// that a run of a large model may use; 0 takes what the control group and the CPU affinity of the process allow.
    pub threads_max: usize,
    /// Ignored with a warning; the next release refuses it.
    #[serde(skip_serializing)]
    pub realtime: Option<bool>,
    /// Sessions per model version and device, each of which runs one request at a time; those on the processor
    /// share the weights. 0 takes one per thread for models up to 64 MiB, else one that uses all threads.
    pub sessions_max: usize,
    /// Who decides what is served: `poll`, by which every version that is found is, or `explicit`, by
    /// which only models are that `load` names or a client's call loaded.
    pub control: Control,
    /// Models that are loaded at the start under `control = "explicit"`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub load: Vec<String>,
    /// What is said of single models, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub models: BTreeMap<String, ModelOptions>,
    /// How often the repository is looked through for new versions, in milliseconds; 0 never does, and
    /// neither does `control = "explicit"`.
    pub poll_ms: u64,
    /// Folder for the traces that clients ask for, which exists; without it none are written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trace_directory: Option<PathBuf>,
    /// Where spans of requests are sent; nowhere when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub telemetry: Option<Telemetry>,
    /// How long running requests may take after the server was told to stop, in milliseconds.
    pub drain_ms_max: u64,
    /// How requests that wait run together.
    pub batching: Batching,
    /// How inputs are compared with those of the training.
    pub drift: Drift,
    /// Bytes that answers may take which are kept to be given again, of models with `response_cache`; 0
    /// keeps none.
    pub response_cache_bytes_max: usize,
    /// Origins of the web pages whose scripts may call the REST service, such as `https://example.org`,
    /// or `*` for all; beside the server's own page none when empty. Their hosts are also hosts under which a
    /// server on loopback may be called.
    pub cors_origins: Vec<String>,
    /// Whether clients may register system shared memory and pass tensors there. Whoever reaches the
    /// server may then read and write every object in `/dev/shm` that its user may. When absent: only
    /// if both `grpc` and `http` are loopback addresses, which nobody reaches from elsewhere, and there are
    /// no `tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_memory: Option<bool>,
    /// Certificates of the gRPC and the REST service, which then take connections with TLS alone. The
    /// metrics stay without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// File of the bearer tokens, one of which every call has to show; without it whoever reaches the
    /// server may call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<PathBuf>,
    /// How often the files of `tls` and `tokens` are looked at, in milliseconds, to read them again when
    /// they have changed; 0 never does.
    pub reload_ms: u64,
    /// Bounds on requests and models.
    pub limits: Limits,
    /// Topic-to-topic inference.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pipes: Vec<PipeConfig>,
}

impl Default for Config {
    fn default() -> Self {
        let local = |port| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        Config {
            grpc: local(8001),
            http: local(8000),
            metrics: local(8002),
            volume: None,
            directory: None,
            onnxruntime: None,
            device: Devices::CPU,
            allow_fallback: false,
            threads_max: 0,
            realtime: None,
            sessions_max: 0,
            control: Control::Poll,
            load: Vec::new(),
            models: BTreeMap::new(),
            poll_ms: 1_000,
            trace_directory: None,
            telemetry: None,
            drain_ms_max: 10_000,
            batching: Batching::default(),
            drift: Drift::default(),
            response_cache_bytes_max: 0,
            cors_origins: Vec::new(),
            shared_memory: None,
            tls: None,
            tokens: None,
            reload_ms: 1_000,
            limits: Limits::default(),
            pipes: Vec::new(),
        }
    }
}

impl Config {
    /// Threads for inference: the configured bound, or what the process is allowed.
    pub fn threads(&self) -> usize {
        match self.threads_max {
            // The standard library reads the affinity mask and the quota of the control group.
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }

    /// As it may be shown.
    pub fn without_secrets(&self) -> Config {
        let telemetry = self.telemetry.as_ref().map(Telemetry::without_secrets);
        Config { telemetry, ..self.clone() }
    }

    /// Whether clients may use shared memory: as configured, else where all of them are local and none is
    /// told apart by its token.
    pub fn shares_memory(&self) -> bool {
        self.shared_memory.unwrap_or_else(|| self.is_local() && self.tokens.is_none())
    }

    /// Whether both services are reached from this machine alone.
    pub(crate) fn is_local(&self) -> bool {
        let local = |address: SocketAddr| address.ip().to_canonical().is_loopback();
        local(self.grpc) && local(self.http)
    }

    /// Replaces the paths of what the server itself opens beside the models, such as relative ones.
    pub fn resolve_files(&mut self, resolve: impl Fn(&Path) -> PathBuf) {
        let tls = self.tls.iter_mut();
        let pem =
            tls.flat_map(|tls| [Some(&mut tls.certificate), Some(&mut tls.key), tls.client_ca.as_mut()]);
        let collector = self.telemetry.iter_mut().filter_map(|telemetry| telemetry.ca.as_mut());
        let folders = self.trace_directory.iter_mut().chain(&mut self.onnxruntime);
        for path in pem.flatten().chain(&mut self.tokens).chain(folders).chain(collector) {
            *path = resolve(path);
        }
    }
}

/// Files of certificates, in PEM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The server's certificate, then those between it and one that clients know.
    pub certificate: PathBuf,
    /// Its private key (PKCS #8, PKCS #1 or SEC 1), not encrypted.
    pub key: PathBuf,
    /// Those who may have issued the certificates of clients. With it, a client without one is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
}

/// Who decides which models are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Control {
    /// The repository: every version that is found in it.
    #[default]
    Poll,
    /// Callers: models that `load` names or a call loaded, until a call unloads them.
    Explicit,
}

/// How requests that wait run together. A request that finds a session free runs at once and alone, so
/// these matter under load only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Batching {
    /// Most rows of a run of several requests; 0 and 1 run each alone. So do models whose graph does not prove that
    /// rows are independent, unless their configuration asks for more.
    pub rows_max: usize,
    /// Numbers of rows that are better than others, such as those a device is quick with: a run stops
    /// at the largest of them that it reaches.
    pub preferred_rows: Vec<usize>,
    /// How long a request that has waited for a session goes on waiting for others to run with, since it
    /// came, in microseconds. 0 takes along whoever waits then.
    pub delay_us_max: u64,
    /// How long a request may wait for a session, in microseconds; one that does not run by then is
    /// answered DEADLINE_EXCEEDED. Requests may ask for less, not for more. 0 sets no bound.
    pub timeout_us_max: u64,
    /// Levels of priority that requests may choose from, 64 at most; 1 is served first, and the next one
    /// when none of it waits.
    pub priority_levels: usize,
    /// The level of requests that choose none.
    pub priority_default: usize,
}

/// Most levels of priority.
pub(crate) const PRIORITY_LEVELS_MAX: usize = 64;

impl Default for Batching {
    fn default() -> Self {
        Batching {
            rows_max: 64,
            preferred_rows: Vec::new(),
            delay_us_max: 0,
            timeout_us_max: 0,
            priority_levels: 1,
            priority_default: 1,
        }
    }
}

impl Batching {
    /// Refuses levels that there cannot be.
    pub(crate) fn check(&self) -> crate::error::Result<()> {
        let (levels, default) = (self.priority_levels, self.priority_default);
        if !(1..=PRIORITY_LEVELS_MAX).contains(&levels) {
            let reason = format!("batching.priority_levels is {levels}: take 1 to {PRIORITY_LEVELS_MAX}");
            return Err(crate::error::Error::Config { reason });
        }
        if !(1..=levels).contains(&default) {
            let reason = format!(
                "batching.priority_default is {default}: take 1 to priority_levels, which is {levels}"
            );
            return Err(crate::error::Error::Config { reason });
        }
        Ok(())
    }
}

/// Bounds on what comes from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Largest request message, in bytes, compressed or not; also the most that the inputs of one request
    /// may hold in shared memory.
    pub message_bytes_max: usize,
    /// Largest model version, in bytes.
    pub model_bytes_max: u64,
    /// Requests that may wait for one model version; more are refused as RESOURCE_EXHAUSTED.
    pub requests_waiting_max: usize,
    /// Bytes of the inputs that may wait for one model version; more are refused likewise.
    pub waiting_bytes_max: usize,
    /// Sequences that may be live on one model version; more are refused as RESOURCE_EXHAUSTED.
    pub sequences_max: usize,
    /// Bytes of their states together; more are refused likewise.
    pub sequence_bytes_max: usize,
    /// Newest versions of a model that are loaded.
    pub versions_max: usize,
    /// Connections that may be open on each port; more are told so and closed.
    pub connections_max: usize,
    /// Bytes of request bodies that may be on their way in at a time, over all connections, compressed
    /// and not; more are refused as RESOURCE_EXHAUSTED. Bodies up to 64 KiB have the bound for themselves.
    pub body_bytes_max: usize,
    /// Bytes of answers that the client of a connection may leave unread; an answer beyond them becomes
    /// RESOURCE_EXHAUSTED, unless it is the only one.
    pub unsent_bytes_max: usize,
    /// Bytes of answers that clients may leave unread, over all connections; an answer beyond them becomes
    /// RESOURCE_EXHAUSTED, unless it is the only one or the connection has 64 KiB of them at most.
    pub answer_bytes_max: usize,
    /// How long a client may keep a connection without a request, stop within one, or not take an
    /// answer, in milliseconds; within that time 64 KiB or the rest have to go through. Over HTTP/2 and
    /// gRPC a client that answers pings may be idle for longer.
    pub stalled_ms_max: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            message_bytes_max: 64 << 20,
            model_bytes_max: 32 << 30,
            requests_waiting_max: 1024,
            waiting_bytes_max: 256 << 20,
            sequences_max: 1024,
            sequence_bytes_max: 256 << 20,
            versions_max: 16,
            connections_max: 1024,
            body_bytes_max: 1 << 30,
            unsent_bytes_max: 256 << 20,
            answer_bytes_max: 1 << 30,
            stalled_ms_max: 60_000,
        }
    }
}

impl Limits {
    /// Refuses bounds under which nothing could be answered.
    pub(crate) fn check(&self) -> crate::error::Result<()> {
        let zero =
            [("connections_max", self.connections_max == 0), ("stalled_ms_max", self.stalled_ms_max == 0)];
        match zero.into_iter().find(|(_, zero)| *zero) {
            Some((name, _)) => Err(crate::error::Error::Config {
                reason: format!("limits.{name} is 0: at least 1 is needed to answer anything"),
            }),
            None => Ok(()),
        }
    }
}

/// One pipe: records of a topic in, predictions to another topic out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PipeConfig {
    /// Name of the pipe, part of the keys that hold its progress.
    pub name: String,
    /// Topic to read JSON records from.
    pub input: String,
    /// Topic to write predictions to; created when missing.
    pub output: String,
    /// Topic for records that cannot be predicted, with the reason in a header; `<output>-dead`
    /// when empty. Created when the first such record comes.
    pub dead_letter: String,
    /// Model name.
    pub model: String,
    /// Model version; the latest at each batch when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Volume whose keys hold the progress; the served volume when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeSpec>,
    /// Which field of a record feeds which model input. A model with one input may be left out when
    /// the field has the input's name.
    pub columns: BTreeMap<String, String>,
    /// Fields of a record that are copied into its prediction.
    pub carry: Vec<String>,
    /// Most records in one inference call.
    pub batch_rows_max: usize,
}

impl Default for PipeConfig {
    fn default() -> Self {
        PipeConfig {
            name: String::new(),
            input: String::new(),
            output: String::new(),
            dead_letter: String::new(),
            model: String::new(),
            version: None,
            volume: None,
            columns: BTreeMap::new(),
            carry: Vec::new(),
            batch_rows_max: 256,
        }
    }
}

impl PipeConfig {
    /// The topic for records that cannot be predicted.
    pub fn dead_letter_topic(&self) -> String {
        if self.dead_letter.is_empty() { format!("{}-dead", self.output) } else { self.dead_letter.clone() }
    }
}

#[cfg(test)]
mod tests;
