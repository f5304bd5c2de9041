//! Flags of the model commands: model, train, serve, predict, pipe.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use millrace_datafs::{Name, VolumeSpec};

use super::access::{ServerArgs, TokenArgs};
use super::images::ImageArgs;
use super::load::BenchArgs;
use super::mounts::seconds;
use super::render::RenderArgs;
use super::rollout::RolloutCommand;
use super::scripts::ScriptArgs;

/// The device that a model runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    /// The CPU
    Cpu,
    /// The first NVIDIA GPU; fails without one
    Cuda,
}

impl DeviceArg {
    /// The name in configuration files.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            DeviceArg::Cpu => "cpu",
            DeviceArg::Cuda => "cuda",
        }
    }
}

/// `millrace model …`
#[derive(Debug, Subcommand)]
pub(crate) enum ModelCommand {
    /// Write an ONNX graph with seeded weights
    #[command(
        after_help = "Examples:\n  millrace model init mlp --inputs 64 --hidden 128,64 --classes 10 mlp.onnx\n  millrace model init cnn --height 8 --width 8 --filters 8,16 --classes 10 cnn.onnx"
    )]
    Init {
        /// The architecture
        #[command(subcommand)]
        kind: ModelInit,
    },
    /// Import an ONNX file into a volume or a folder, as the next version of a model
    #[command(
        after_help = "Inputs and outputs are read from the graph. The version is one above the highest existing version, and\nbecomes visible once it is complete.\n\nExamples:\n  millrace model import resnet18.onnx --name resnet18 --volume models\n  millrace model import resnet18.onnx --name resnet18 --models ./models"
    )]
    Import(ImportArgs),
    /// Create a version of a model that computes its matrix products with 8-bit integers
    #[command(
        after_help = "Dynamic quantization of MatMul and Gemm with constant weights, as ONNX Runtime's own tool does it: a\nquarter of the bytes, and faster where the products are large. Convolutions and other operators do not\nchange. Both versions run on a sample; if the mean difference of an output exceeds --limit, as a part\nof its range, nothing is written and the exit code is 9. The lineage of the new version names its\nsource. The rows of a run share the range of its inputs, so servers run each request alone. For\nthe processor: GPUs have no such operators.\n\nExamples:\n  millrace model quantize digits --volume digits --sample examples/digits/digits-test.jsonl --input pixels\n  millrace model quantize resnet18 --models ./models --limit 0.02 --json"
    )]
    Quantize(QuantizeArgs),
    /// Cut an ONNX graph at a value, add new layers behind it, or fix the sizes of its inputs
    #[command(
        after_help = "What the cut leaves behind is removed. New layers get seeded weights: flatten, pool (the mean of each\nchannel), relu, linear=N. A job trains the result.\n\nExamples:\n  millrace model show resnet18.onnx --nodes\n  millrace model edit resnet18.onnx flowers.onnx --cut avgpool --add flatten --add linear=5\n  millrace model edit mlp.onnx deeper.onnx --cut dense1.relu --add linear=64 --add relu --add linear=10\n  millrace model edit bert.onnx bert128.onnx --dim sequence_length=128"
    )]
    Edit(EditArgs),
    /// Version routing: labels, splits and shadows
    #[command(flatten)]
    Rollout(RolloutCommand),
    /// Show a model's inputs, outputs, operators and parameters, or a bundle's lineage
    #[command(
        after_help = "Examples:\n  millrace model show mlp.onnx\n  millrace model show digits --volume digits\n  millrace model show resnet18 --models ./models"
    )]
    Show {
        /// An ONNX file, or with --volume or --models the name of a model
        model: String,
        /// Volume that holds the bundle
        #[arg(long, group = "place")]
        volume: Option<VolumeSpec>,
        /// Folder that holds the bundle
        #[arg(long, value_name = "DIR", group = "place")]
        models: Option<PathBuf>,
        /// The version [default: the newest]
        #[arg(long, requires = "place")]
        version: Option<u64>,
        /// List the trained parameters and the other weights of a file, by name
        #[arg(long, conflicts_with = "place")]
        parameters: bool,
        /// List the nodes of a file, with the values that they give: the names to cut it at
        #[arg(long, conflicts_with_all = ["place", "parameters"])]
        nodes: bool,
    },
}

/// `millrace model edit`
#[derive(Debug, Args)]
pub(crate) struct EditArgs {
    /// The ONNX file
    pub(crate) file: PathBuf,
    /// The file to write
    pub(crate) output: PathBuf,
    /// What the new layers read: a value, or a node or PyTorch module that gives one value [default: the
    /// model's output]
    #[arg(long, value_name = "NODE")]
    pub(crate) cut: Option<String>,
    /// A layer to add: flatten, pool, relu or linear=N; may be repeated
    #[arg(long, value_name = "LAYER", required_unless_present_any = ["cut", "dim"])]
    pub(crate) add: Vec<millrace_trainer::init::edit::Layer>,
    /// A size for a dynamic dimension of the inputs, as sequence_length=128; may be repeated
    #[arg(long, value_name = "NAME=SIZE")]
    pub(crate) dim: Vec<millrace_trainer::init::edit::NamedSize>,
    /// Seed of the new weights
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
}

/// `millrace model import`
#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The ONNX file
    pub(crate) file: PathBuf,
    /// Name of the model
    #[arg(long)]
    pub(crate) name: String,
    /// Volume to import into, below models/
    #[arg(long, conflicts_with = "models", required_unless_present = "models")]
    pub(crate) volume: Option<Name>,
    /// Folder to import into
    #[arg(long, value_name = "DIR")]
    pub(crate) models: Option<PathBuf>,
    /// JSON with `lineage` and `metrics` of the version, as in bundle.json
    #[arg(long, value_name = "FILE")]
    pub(crate) lineage: Option<PathBuf>,
    /// A file that is kept beside the graph as training.json
    #[arg(long, value_name = "FILE")]
    pub(crate) training: Option<PathBuf>,
    /// Import only while a key of the volume has this value. For the Python package
    #[arg(long, value_name = "KEY=VALUE", requires = "volume", hide = true, value_parser = expected_key)]
    pub(crate) expect_key: Option<(String, String)>,
}

fn expected_key(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("give KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// `millrace model quantize`
#[derive(Debug, Args)]
pub(crate) struct QuantizeArgs {
    /// Name of the model
    pub(crate) model: String,
    /// The version to quantize [default: the newest]
    #[arg(long, value_name = "VERSION", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) from: Option<u64>,
    /// The version to write [default: one above the highest]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) version: Option<u64>,
    /// Volume that holds the model, below models/
    #[arg(long, conflicts_with = "models", required_unless_present = "models")]
    pub(crate) volume: Option<Name>,
    /// Folder that holds the model
    #[arg(long, value_name = "DIR")]
    pub(crate) models: Option<PathBuf>,
    /// Records on which both versions are compared, in the formats of `predict` except images; may be
    /// repeated [default: random inputs, which say little]
    #[arg(long, value_name = "FILE")]
    pub(crate) sample: Vec<PathBuf>,
    /// Format of the sample [default: by the file name: .json, .csv, .parquet, else JSON lines]
    #[arg(long, value_enum, requires = "sample", conflicts_with = "seed")]
    pub(crate) format: Option<RecordFormat>,
    /// The field or column that feeds an input; just FIELD for a model with one input [default: the input's
    /// name]
    #[arg(long, value_name = "INPUT=FIELD", requires = "sample", conflicts_with = "seed")]
    pub(crate) input: Vec<String>,
    /// Number of records to compare, rounded up to whole runs
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) records: u32,
    /// Records per run
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) batch_rows: u32,
    /// Largest mean difference of an output, relative to its range, at which the version is written. For
    /// outputs that are not floats, the share of changed elements
    #[arg(long, default_value_t = 0.05, value_parser = limit)]
    pub(crate) limit: f64,
    /// Seed of random inputs
    #[arg(long, default_value_t = 7, conflicts_with = "sample")]
    pub(crate) seed: u64,
}

fn limit(text: &str) -> Result<f64, String> {
    let limit = text.parse::<f64>().ok().filter(|limit| (0.0..=1.0).contains(limit));
    limit.ok_or_else(|| "a limit is a number from 0 to 1".to_owned())
}

/// `millrace model init …`
#[derive(Debug, Subcommand)]
pub(crate) enum ModelInit {
    /// Fully connected layers
    #[command(
        after_help = "Example:\n  millrace model init mlp --inputs 64 --hidden 128,64 --classes 10 mlp.onnx"
    )]
    Mlp {
        /// The file to write
        file: PathBuf,
        /// Width of the input
        #[arg(long)]
        inputs: usize,
        /// Widths of the hidden layers
        #[arg(long, value_delimiter = ',', default_value = "128")]
        hidden: Vec<usize>,
        /// Flags of all architectures
        #[command(flatten)]
        weights: WeightArgs,
    },
    /// Convolutions with pooling, then a classifier
    #[command(
        after_help = "Example:\n  millrace model init cnn --height 8 --width 8 --filters 8,16 --classes 10 cnn.onnx"
    )]
    Cnn {
        /// The file to write
        file: PathBuf,
        /// Image height
        #[arg(long)]
        height: usize,
        /// Image width
        #[arg(long)]
        width: usize,
        /// Filters of the convolutions
        #[arg(long, value_delimiter = ',', default_value = "8,16")]
        filters: Vec<usize>,
        /// Flags of all architectures
        #[command(flatten)]
        weights: WeightArgs,
    },
}

/// Flags of all architectures of `millrace model init`.
#[derive(Debug, Args)]
pub(crate) struct WeightArgs {
    /// Number of classes
    #[arg(long)]
    pub(crate) classes: usize,
    /// Seed of the weights
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
    /// Factor on the inputs, part of the graph: 1 / (usual input size) helps training
    #[arg(long, default_value_t = 1.0)]
    pub(crate) scale: f32,
}

/// `millrace train`
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// The job file
    #[arg(required_unless_present = "script", conflicts_with = "script")]
    pub(crate) job: Option<PathBuf>,
    /// Worker processes of this machine [default: from the job file]
    #[arg(long, conflicts_with = "script", value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) workers: Option<u32>,
    /// Seed of the weights and the order [default: from the job file]
    #[arg(long, conflicts_with = "script")]
    pub(crate) seed: Option<u64>,
    /// The device to train on [default: from the job file]
    #[arg(long, value_enum, conflicts_with = "script")]
    pub(crate) device: Option<DeviceArg>,
    /// Write event files for TensorBoard to DIR/JOB
    #[arg(long, value_name = "DIR", conflicts_with = "script")]
    pub(crate) tensorboard: Option<PathBuf>,
    /// Admit workers of other machines (`millrace worker --join`) at this address and port
    #[arg(long, value_name = "ADDR:PORT", requires = "token_file")]
    pub(crate) listen: Option<SocketAddr>,
    /// Name or address of this machine for other machines [default: the address of --listen]
    #[arg(long, value_name = "NAME", requires = "listen")]
    pub(crate) advertise: Option<String>,
    /// File with the secret of the job's workers, which only its owner may read
    #[arg(long, value_name = "FILE", requires = "listen")]
    pub(crate) token_file: Option<PathBuf>,
    /// Certificate chain (PEM) for the port of --listen [default: one made at the start]
    #[arg(long, value_name = "FILE", requires_all = ["listen", "tls_key"])]
    pub(crate) tls_cert: Option<PathBuf>,
    /// Key (PEM) of --tls-cert
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    pub(crate) tls_key: Option<PathBuf>,
    /// Worker processes of this machine beside those that join; may be 0 [default: as without --listen]
    #[arg(long, value_name = "N", requires = "listen", conflicts_with = "workers")]
    pub(crate) workers_local: Option<u32>,
    /// Wait while another process coordinates this job, and take its place when it ends or is lost. SIGTERM then
    /// hands the job over: workers of other machines stay
    #[arg(long, conflicts_with = "script")]
    pub(crate) standby: bool,
    /// Leave the unfinished run of a job on a topic behind, and begin a new one on the records of now. For runs whose
    /// records were removed from the topic
    #[arg(long, conflicts_with_all = ["script", "standby"])]
    pub(crate) abandon_run: bool,
    /// Workers to wait for before training begins or goes on [default: from the job file, else 1]
    #[arg(long, value_name = "N", conflicts_with = "script", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) workers_min: Option<u32>,
    /// Most workers of all machines [default: from the job file, else its virtual_shards]
    #[arg(long, value_name = "N", conflicts_with = "script", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) workers_max: Option<u32>,
    /// Manifests instead of a training
    #[command(flatten)]
    pub(crate) render: RenderArgs,
    /// A training script instead of a job file
    #[command(flatten)]
    pub(crate) script: ScriptArgs,
}

/// `millrace runs …`
#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// List the runs of a volume's jobs
    #[command(after_help = "Example:\n  millrace runs list --volume digits --json")]
    List {
        /// Volume with the checkpoints, or a snapshot of it
        #[arg(long)]
        volume: VolumeSpec,
        /// Only the runs of this job, of which there must be some
        #[arg(long)]
        job: Option<Name>,
    },
    /// Show a run: its settings, checkpoints, model versions and epochs
    #[command(after_help = "Example:\n  millrace runs show digits --volume digits --svg loss.svg")]
    Show {
        /// First digits of the run's id, a job's name for its newest run, or JOB/DIGITS
        run: String,
        /// Volume with the checkpoints, or a snapshot of it
        #[arg(long)]
        volume: VolumeSpec,
        /// Draw the loss of each epoch and the throughput to an SVG file
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
    /// Compare runs: the settings that differ, and how far each came
    #[command(after_help = "Example:\n  millrace runs compare 3f2a 90bc --volume digits --svg losses.svg")]
    Compare {
        /// First digits of the runs' ids, jobs' names for their newest runs, or JOB/DIGITS
        #[arg(required = true, num_args = 2..=16)]
        runs: Vec<String>,
        /// Volume with the checkpoints, or a snapshot of it
        #[arg(long)]
        volume: VolumeSpec,
        /// Draw the loss of each epoch and the throughput to an SVG file
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
    },
}

/// `millrace worker`
#[derive(Debug, Args)]
pub(crate) struct WorkerArgs {
    /// The coordinator: a `millrace train --listen` on any machine. Several addresses, as of standbys, are separated
    /// by commas; `dnssrv+NAME` stands for those of its SRV records. Without a value: cluster.coordinator
    #[arg(long, value_name = "HOST:PORT[,…]", num_args = 0..=1, default_missing_value = "", requires = "token_file")]
    pub(crate) join: Option<String>,
    /// File with the coordinator's secret, which only its owner may read
    #[arg(long, value_name = "FILE", requires = "join")]
    pub(crate) token_file: Option<PathBuf>,
    /// Authority (PEM) that the coordinator's certificate must be of [default: the proof of the token is enough]
    #[arg(long, value_name = "FILE", requires = "join")]
    pub(crate) ca: Option<PathBuf>,
    /// Address, or address and port, for the other workers [default: a free port of the address that leads to
    /// the coordinator]
    #[arg(long, value_name = "ADDR[:PORT]", requires = "join", value_parser = ring_address)]
    pub(crate) listen_ring: Option<SocketAddr>,
    /// Name or address of this machine for the other workers [default: the address of --listen-ring]
    #[arg(long, value_name = "NAME", requires = "join")]
    pub(crate) advertise: Option<String>,
    /// Seconds to wait for a coordinator that does not answer, or that was lost. The state stays in memory meanwhile
    #[arg(long, value_name = "SECONDS", default_value_t = 600, requires = "join")]
    pub(crate) wait: u64,
    /// The job file that the coordinator trains, for a worker that may come after its end: while it finds no coordinator,
    /// it looks into the output volume, and ends with success if the job is complete
    #[arg(long, value_name = "FILE", requires = "join")]
    pub(crate) job: Option<PathBuf>,
    /// The coordinator's --seed
    #[arg(long, requires = "job")]
    pub(crate) seed: Option<u64>,
    /// The coordinator's --device
    #[arg(long, value_enum, requires = "job")]
    pub(crate) device: Option<DeviceArg>,
    /// Write the output of a script's processes to files in DIR instead of the terminal
    #[arg(long, value_name = "DIR", requires = "join")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Exit code of a worker that left after SIGTERM or Ctrl-C while the job goes on. A scheduler that takes 0 for the end
    /// of the work, as a Job of Kubernetes does, then starts another one
    #[arg(long, value_name = "CODE", default_value_t = 0, requires = "join")]
    pub(crate) exit_on_leave: u8,
}

/// An address whose port may be left out.
fn ring_address(text: &str) -> Result<SocketAddr, String> {
    let alone = || text.parse::<IpAddr>().map(|ip| SocketAddr::new(ip, 0));
    text.parse().or_else(|_| alone()).map_err(|_| "expected an IP address, with or without a port".to_owned())
}

/// `millrace serve`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ServeArgs {
    /// A command for a running server
    #[command(subcommand)]
    pub(crate) command: Option<ServeCommand>,
    /// Volume that holds bundles under models/
    #[arg(long, conflicts_with = "models")]
    pub(crate) volume: Option<VolumeSpec>,
    /// Folder that holds bundles
    #[arg(long, value_name = "DIR")]
    pub(crate) models: Option<PathBuf>,
    /// gRPC address [default: serving.grpc]
    #[arg(long)]
    pub(crate) grpc: Option<SocketAddr>,
    /// HTTP address [default: serving.http]
    #[arg(long)]
    pub(crate) http: Option<SocketAddr>,
    /// Metrics address [default: serving.metrics]
    #[arg(long)]
    pub(crate) metrics: Option<SocketAddr>,
    /// Devices for the models: cpu, cuda, cuda:1, or cuda:0,1 for sessions on both [default: serving.device]
    #[arg(long)]
    pub(crate) device: Option<millrace_serving::Devices>,
    /// What decides which models are served [default: serving.control]
    #[arg(long, value_enum)]
    pub(crate) control: Option<ControlArg>,
    /// A model to load at the start under `--control explicit`; may be repeated [default: serving.load]
    #[arg(long, value_name = "MODEL")]
    pub(crate) load: Vec<String>,
}

/// `millrace serve …`
#[derive(Debug, Subcommand)]
pub(crate) enum ServeCommand {
    /// Put load on a model server and report its latencies
    #[command(
        after_help = "Closed loops measure throughput: each client has its own connection and sends its next request after\nthe previous answer. Open loops measure the latency of users: requests follow a Poisson process, and the\ntime of a request counts from its scheduled send time, so that stalls of the server are included. Any\nserver of the Open Inference Protocol works. The report notes where this client was the bottleneck;\nit shares the machine with the server unless it runs on another one.\n\nExamples:\n  millrace serve bench digits\n  millrace serve bench digits --rate 500,1000,2000,4000 --deadline-ms 50\n  millrace serve bench resnet --grpc gpu1:8001 --shape image:3,224,224 --concurrency 16 --rows 8\n  millrace serve bench digits --grpc models.example.org:8001 --ca ca.pem --token-file token"
    )]
    Bench(Box<BenchArgs>),
    /// Show the activity of a running model server: rates, queues, batch sizes, latencies
    #[command(
        after_help = "A line for each version since the previous line: requests, rows and refused or failed requests a\nsecond, queued requests, rows per batch, the mean time of a request and its queueing part, and\npercentiles (within the buckets of the server's histogram). States are read every 10 seconds. With\n--json, one object per interval. On a server with tokens, the models that the token in --token-file\nmay use are shown; the metrics have neither tokens nor TLS.\n\nExamples:\n  millrace serve top\n  millrace serve top digits --interval 5\n  millrace serve top --grpc models.example.org:8001 --count 1 --json\n  millrace serve top --grpc models.example.org:8001 --ca ca.pem --cert me.pem --key me.key --token-file token"
    )]
    Top(TopArgs),
    /// Create a bearer token: prints its line for the serving.tokens file, and the token itself on standard
    /// error
    #[command(
        after_help = "Examples:\n  millrace serve token ci --models digits,fraud-* >> tokens.txt\n  millrace serve token release --control >> tokens.txt"
    )]
    Token(TokenArgs),
}

/// `millrace serve top`
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Only this model
    pub(crate) model: Option<String>,
    /// The server's metrics, HOST:PORT [default: of this home, else serving.metrics; with --grpc, that host
    /// and the port of serving.metrics]
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<String>,
    /// Seconds between updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub(crate) interval: f64,
    /// Stop after this many intervals
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
    /// The model server
    #[command(flatten)]
    pub(crate) server: ServerArgs,
}

/// What decides which models are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ControlArg {
    /// The repository: every version found in it
    Poll,
    /// Clients: models that --load names or a client loads
    Explicit,
}

impl From<ControlArg> for millrace_serving::Control {
    fn from(control: ControlArg) -> Self {
        match control {
            ControlArg::Poll => millrace_serving::Control::Poll,
            ControlArg::Explicit => millrace_serving::Control::Explicit,
        }
    }
}

/// Format of the records in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RecordFormat {
    /// One JSON object per line
    Jsonl,
    /// A list of objects, or an object whose fields are lists with an entry for each record
    Json,
    /// A header that names the columns, then a record per row
    Csv,
    /// One record per row
    Parquet,
    /// One JPEG, PNG or WebP file per record
    Image,
}

/// `millrace predict`
#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    /// The model
    pub(crate) model: String,
    /// Files of records, images, or folders of images [default: standard input]
    pub(crate) files: Vec<PathBuf>,
    /// Format of the records [default: by the file names: .json, .csv, .parquet, .png, .jpg, .jpeg, .webp, else
    /// JSON lines]
    #[arg(long, value_enum)]
    pub(crate) format: Option<RecordFormat>,
    /// The field or column that feeds an input; just FIELD for a model with one input; for CSV also the
    /// columns FIRST..LAST, one element each [default: the input's name]
    #[arg(long, value_name = "INPUT=FIELD")]
    pub(crate) input: Vec<String>,
    /// The field that holds the true class, to report accuracy
    #[arg(long, value_name = "FIELD")]
    pub(crate) label: Option<String>,
    /// Destination of all predictions: FILE.parquet, FILE.jsonl, or - for JSON lines on standard output
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// The version [default: by the model's split; without one the newest]
    #[arg(long)]
    pub(crate) version: Option<u64>,
    /// Most records per request; fewer if the model takes fewer
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) batch_rows: u32,
    /// Concurrent requests
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) in_flight: u32,
    /// The model server
    #[command(flatten)]
    pub(crate) server: ServerArgs,
    /// Image conversion
    #[command(flatten)]
    pub(crate) images: ImageArgs,
}

/// `millrace pipe`
#[derive(Debug, Args)]
pub(crate) struct PipeArgs {
    /// A pipe of the configuration file, by name
    #[arg(long, conflicts_with_all = ["from", "to", "model", "name"])]
    pub(crate) pipe: Option<String>,
    /// Topic to read
    #[arg(long, required_unless_present = "pipe")]
    pub(crate) from: Option<String>,
    /// Topic to write predictions to
    #[arg(long, required_unless_present = "pipe")]
    pub(crate) to: Option<String>,
    /// The model
    #[arg(long, required_unless_present = "pipe")]
    pub(crate) model: Option<String>,
    /// Name of the pipe; a pipe with a new name begins at the first record [default: FROM-to-TO]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Volume that holds the bundle and the pipe's progress
    #[arg(long)]
    pub(crate) volume: Name,
    /// The record's field that holds the input [default: the fields of the model's training, or else input]
    #[arg(long, value_name = "FIELD")]
    pub(crate) input: Option<String>,
    /// Run until stopped, not just to the current end of the topic
    #[arg(long)]
    pub(crate) follow: bool,
    /// Make dead letters of all records where no record of the first batch fits the model, instead of an error; --follow
    /// always does
    #[arg(long)]
    pub(crate) allow_unfit: bool,
}
