//! The `[serving]` table of `millrace.toml`: the model source, the addresses, the limits and the
//! topic-to-topic pipes.

mod device;
mod drift;
mod model;
mod rollout;
mod telemetry;
mod version_policy;

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use millrace_datafs::VolumeSpec;
use serde::{Deserialize, Serialize};

pub use device::{Device, Devices};
pub use device::{Engine, Memory};
pub use drift::Drift;
pub use drift::ROWS_MIN;
pub use model::ModelOptions;
pub use rollout::{BYTES_MAX as ROLLOUT_BYTES_MAX, is_label};
pub use rollout::{Rollout, ShadowTarget, Target, check_label};
pub use telemetry::Telemetry;
pub use version_policy::{UnknownPolicy, VersionPolicy};

/// Root path of the models inside a volume.
pub const VOLUME_ROOT: &str = "models";

/// The `[serving]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Address of the gRPC service; port 0 selects a free port.
    pub grpc: SocketAddr,
    /// Address of the REST service; port 0 selects a free port.
    pub http: SocketAddr,
    /// Address of the Prometheus metrics; port 0 selects a free port.
    pub metrics: SocketAddr,
    /// Volume, or snapshot of one, from whose `models/` directory the server loads models. Excludes
    /// `directory`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeSpec>,
    /// Directory of the local file system from which the server loads models. Excludes `volume`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directory: Option<PathBuf>,
    /// ONNX Runtime's shared library; `ORT_DYLIB_PATH` takes precedence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub onnxruntime: Option<PathBuf>,
    /// Device of the models: `cpu`, `cuda`, `cuda:1`, or `cuda:0,1` for sessions on both GPUs.
    pub device: Devices,
    /// Whether a model, or a part of it, that its device cannot run may run on the processor. Otherwise the
    /// server refuses it.
    pub allow_fallback: bool,
    /// Threads of the inference pool, which adds one for each version that would otherwise wait for the
    /// others, and threads that a run of a large model may use. 0 means what the control group and the CPU
    /// affinity of the process allow.
    pub threads_max: usize,
    /// Ignored with a warning; the next release refuses it.
    #[serde(skip_serializing)]
    pub realtime: Option<bool>,
    /// Sessions per model version and device, each of which runs one request at a time; sessions on the
    /// processor share the weights. 0 means one per thread for models up to 64 MiB, and one that uses all
    /// threads for larger models.
    pub sessions_max: usize,
    /// Control of the served models: `poll` serves every version in the repository, `explicit` only models
    /// that `load` names or a client's call has loaded.
    pub control: Control,
    /// Models to load at the start under `control = "explicit"`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub load: Vec<String>,
    /// Settings of single models, by name.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub models: BTreeMap<String, ModelOptions>,
    /// Interval in milliseconds between scans of the repository for new versions. 0 disables scanning, and so
    /// does `control = "explicit"`.
    pub poll_ms: u64,
    /// Ignored with a warning; the next release refuses it. `telemetry` sends spans of requests.
    #[serde(skip_serializing)]
    pub trace_directory: Option<PathBuf>,
    /// Collector for the spans of requests; without it the server sends none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub telemetry: Option<Telemetry>,
    /// Longest time for running requests after a stop request, in milliseconds.
    pub drain_ms_max: u64,
    /// Batching of waiting requests.
    pub batching: Batching,
    /// Comparison of inputs with those of the training.
    pub drift: Drift,
    /// Size of the response cache in bytes, for models with `response_cache`; 0 disables it.
    pub response_cache_bytes_max: usize,
    /// Origins of the web pages whose scripts may call the REST service, such as `https://example.org`, or
    /// `*` for all. If empty, only the server's own page may. A server on loopback may also be called under
    /// the hosts of these origins.
    pub cors_origins: Vec<String>,
    /// Whether clients may register system shared memory and pass tensors there. Every client may then read
    /// and write all objects in `/dev/shm` that the server's user may. When absent: only if both `grpc` and
    /// `http` are loopback addresses, which other machines cannot reach, and there are no `tokens`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_memory: Option<bool>,
    /// Certificates of the gRPC and the REST service, which then accept only TLS connections. The metrics
    /// stay without TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<Tls>,
    /// File of the bearer tokens, one of which every call must present. Without it every client that reaches
    /// the server may call it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<PathBuf>,
    /// Interval in milliseconds after which the server checks the files of `tls` and `tokens`, and reads
    /// changed ones again; 0 disables the check.
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
    /// Threads for inference: `threads_max`, or the number that the process may use.
    pub fn threads(&self) -> usize {
        match self.threads_max {
            // The standard library reads the affinity mask and the quota of the control group.
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }

    /// The configuration without secrets, for display.
    pub fn without_secrets(&self) -> Config {
        let telemetry = self.telemetry.as_ref().map(Telemetry::without_secrets);
        Config { telemetry, ..self.clone() }
    }

    /// Whether clients may use shared memory: as configured, else only if all of them are local and the
    /// server has no tokens.
    pub fn shares_memory(&self) -> bool {
        self.shared_memory.unwrap_or_else(|| self.is_local() && self.tokens.is_none())
    }

    /// Whether only this machine can reach both services.
    pub fn is_local(&self) -> bool {
        let local = |address: SocketAddr| address.ip().to_canonical().is_loopback();
        local(self.grpc) && local(self.http)
    }

    /// Replaces the paths of files and directories that the server opens, except the models; for example
    /// makes them absolute.
    pub fn resolve_files(&mut self, resolve: impl Fn(&Path) -> PathBuf) {
        let tls = self.tls.iter_mut();
        let pem =
            tls.flat_map(|tls| [Some(&mut tls.certificate), Some(&mut tls.key), tls.client_ca.as_mut()]);
        let collector = self.telemetry.iter_mut().filter_map(|telemetry| telemetry.ca.as_mut());
        for path in pem.flatten().chain(&mut self.tokens).chain(&mut self.onnxruntime).chain(collector) {
            *path = resolve(path);
        }
    }
}

/// PEM files of the server's TLS identity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tls {
    /// The server's certificate, followed by the intermediate certificates.
    pub certificate: PathBuf,
    /// Its private key (PKCS #8, PKCS #1 or SEC 1), not encrypted.
    pub key: PathBuf,
    /// Authorities for client certificates. If set, the server refuses clients without a valid certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
}

/// Control of the served models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Control {
    /// The server serves every version in the repository.
    #[default]
    Poll,
    /// The server serves models that `load` names or a call has loaded, until a call unloads them.
    Explicit,
}

/// Batching of waiting requests. A request that finds a free session runs at once and alone, so these
/// settings matter under load only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Batching {
    /// Most rows of a run of several requests; 0 and 1 run each request alone. Models whose graph does not
    /// prove that rows are independent also run each alone, unless their configuration asks for batching.
    pub rows_max: usize,
    /// Preferred numbers of rows, for example those at which a device is fast. A run stops at the largest of
    /// them that it reaches.
    pub preferred_rows: Vec<usize>,
    /// Longest delay since arrival for which a request that had to wait for a session waits for further
    /// requests to batch with, in microseconds. 0 batches only requests that are already waiting.
    pub delay_us_max: u64,
    /// Longest wait of a request for a session, in microseconds; the server then answers DEADLINE_EXCEEDED.
    /// Requests may set a shorter time, not a longer one. 0 sets no bound.
    pub timeout_us_max: u64,
    /// Number of priority levels, 64 at most. Level 1 is served first; a level is served when no request of a
    /// lower number waits.
    pub priority_levels: usize,
    /// Level of requests without a priority.
    pub priority_default: usize,
}

/// Most priority levels.
pub const PRIORITY_LEVELS_MAX: usize = 64;

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
    /// Refuses invalid priority levels.
    pub fn check(&self) -> crate::error::Result<()> {
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

/// Bounds on requests, models and connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Largest request message in bytes, compressed or not. Also bounds the bytes of one request's inputs in
    /// shared memory.
    pub message_bytes_max: usize,
    /// Largest model version, in bytes.
    pub model_bytes_max: u64,
    /// Most requests that wait for one model version; the server refuses more with RESOURCE_EXHAUSTED.
    pub requests_waiting_max: usize,
    /// Most bytes of inputs that wait for one model version; the server refuses more in the same way.
    pub waiting_bytes_max: usize,
    /// Most live sequences on one model version; the server refuses more with RESOURCE_EXHAUSTED.
    pub sequences_max: usize,
    /// Most bytes of their states together; the server refuses more in the same way.
    pub sequence_bytes_max: usize,
    /// Newest versions of a model to load.
    pub versions_max: usize,
    /// Most open connections on each port; the server closes further ones with a message.
    pub connections_max: usize,
    /// Most bytes of request bodies in receipt at a time over all connections, before and after
    /// decompression; the server refuses more with RESOURCE_EXHAUSTED. Bodies up to 64 KiB have a separate
    /// bound of this size.
    pub body_bytes_max: usize,
    /// Most bytes of answers that a client may leave unread on one connection. A further answer becomes
    /// RESOURCE_EXHAUSTED, unless it is the only one.
    pub unsent_bytes_max: usize,
    /// Most bytes of answers that clients may leave unread over all connections. A further answer becomes
    /// RESOURCE_EXHAUSTED, unless it is the only one or its connection has at most 64 KiB of them.
    pub answer_bytes_max: usize,
    /// Longest time in milliseconds for which a client may keep a connection without a request, pause within
    /// a request, or not read an answer. A body must progress by 64 KiB, or its rest, in that time. Over
    /// HTTP/2 and gRPC a client that answers pings may be idle for longer.
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
    /// Refuses bounds under which the server could not answer any request.
    pub fn check(&self) -> crate::error::Result<()> {
        let zero =
            [("connections_max", self.connections_max == 0), ("stalled_ms_max", self.stalled_ms_max == 0)];
        match zero.into_iter().find(|(_, zero)| *zero) {
            Some((name, _)) => Err(crate::error::Error::Config {
                reason: format!("limits.{name} is 0: set it to 1 or more"),
            }),
            None => Ok(()),
        }
    }
}

/// One pipe: reads records of a topic and writes predictions to another topic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PipeConfig {
    /// Name of the pipe, part of the keys that hold its progress.
    pub name: String,
    /// Topic to read JSON records from.
    pub input: String,
    /// Topic for predictions; created if missing.
    pub output: String,
    /// Topic for records that cannot be predicted, with the reason in a header; `<output>-dead` if empty.
    /// Created with the first such record.
    pub dead_letter: String,
    /// Model name.
    pub model: String,
    /// Model version; if absent, the latest one at each batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<u64>,
    /// Volume whose keys hold the progress; if absent, the served volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<VolumeSpec>,
    /// Record field of each model input. An input without an entry takes the fields that fed it in the training, if the
    /// model's bundle names them (`fields`), or else the field of its own name.
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
