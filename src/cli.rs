//! The command line: every command, flag and example, as clap reads them. No behaviour lives here.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use millrace_datafs::mount::Open;
use millrace_datafs::{Compression, Name, VolumeSpec};
use millrace_streams::dataset::DatasetSpec;

/// Topics and files into snapshotted volumes, into trainers, into servers.
#[derive(Debug, Parser)]
#[command(
    name = "millrace",
    version,
    arg_required_else_help = true,
    after_help = "Start here:\n  millrace quickstart          the whole pipeline on 1,797 handwritten digits\n  millrace up                  run what ./millrace.toml or HOME/millrace.toml declares\n\nExit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 not found,\n4 in use or in conflict, 5 a prerequisite is missing, 6 data is corrupt, 7 no space left,\n8 damage was found and repaired."
)]
pub(crate) struct Cli {
    /// Folder that holds all embedded state [default: the XDG data folder]
    #[arg(long, global = true, env = "MILLRACE_HOME", value_name = "DIR")]
    pub(crate) home: Option<PathBuf>,
    /// Configuration file [default: ./millrace.toml, else HOME/millrace.toml, else built-in defaults]
    #[arg(long, global = true, env = "MILLRACE_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print one JSON object (or one per line) instead of tables
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// What to log to standard error, as in `info` or `millrace_ingest=debug`
    #[arg(long, global = true, env = "MILLRACE_LOG", default_value = "warn", value_name = "FILTER")]
    pub(crate) log: String,
    /// What to do
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the whole pipeline on real data and show that nothing was lost
    #[command(after_help = "Example:\n  millrace quickstart --workers 3 --keep")]
    Quickstart(QuickstartArgs),
    /// Run everything that millrace.toml declares, in one process
    #[command(after_help = "Example:\n  millrace --config millrace.toml up")]
    Up,
    /// Create, list, show and delete volumes
    #[command(subcommand, after_help = "Example:\n  millrace volume create digits")]
    Volume(VolumeCommand),
    /// Create, list and delete snapshots
    #[command(subcommand, after_help = "Example:\n  millrace snapshot create digits@monday")]
    Snapshot(SnapshotCommand),
    /// Mount a volume or a snapshot as a folder, until Ctrl-C or `millrace umount`
    #[command(
        after_help = "Examples:\n  millrace mount digits /mnt/digits\n  millrace mount --detach digits@monday /mnt/monday\n  millrace mount --supervise --detach digits /mnt/digits"
    )]
    Mount(MountArgs),
    /// Unmount a folder
    #[command(after_help = "Example:\n  millrace umount /mnt/digits")]
    Umount {
        /// The mount point
        path: PathBuf,
    },
    /// Copy files and folders between this machine, volumes and buckets
    #[command(
        name = "cp",
        after_help = "SRC and DST are a path of this machine, VOLUME[@SNAPSHOT]:/PATH, or a URL: s3://BUCKET/PATH,\ngs://, az://, file:// (credentials, region and endpoint from AWS_…, GOOGLE_… and AZURE_… variables).\n\nDST becomes a copy of SRC: folders are merged, files that differ in size or time are replaced, nothing\nis deleted. A file appears only when it is complete, and one that is there already is not copied again,\nso an interrupted copy goes on when it is run again. Modes, times, links, extended attributes and\nholes are kept where both sides have them.\n\nExamples:\n  millrace cp -r ./images digits:/images\n  millrace cp digits@monday:/train/part-0.parquet .\n  millrace cp -r s3://bucket/images digits:/images --parallel 16"
    )]
    Copy(CopyArgs),
    /// Check volumes: names, inodes, reference counts, objects, snapshots
    #[command(
        after_help = "Runs beside live mounts; reads metadata and lists the store. --scrub also reads all file data\nagainst its checksums. --repair mends what can be mended without losing what was written: files\nwithout a name appear in lost+found, wrong counts are counted anew, objects that nothing points at\nare left to the next collection. Data that is gone is named with the inode that it belonged to\n(find MOUNT -inum INODE shows the path); restore it from a snapshot or a copy.\n\nExit codes: 0 sound, 8 all damage repaired, 6 damage is left.\n\nExamples:\n  millrace fsck\n  millrace fsck --scrub --json\n  millrace fsck --repair"
    )]
    Fsck(FsckArgs),
    /// Rewrite files in many small pieces, and objects of which little is in use
    #[command(
        after_help = "Random overwrites scatter a file over many extents, and deletions leave objects mostly empty.\nMounts compact in the background; this does all of it at once, beside whoever works. The space comes\nfree with the next `millrace gc` after datafs.garbage_grace_ms. Snapshots keep what they hold.\n\nExamples:\n  millrace compact\n  millrace compact digits"
    )]
    Compact {
        /// The volume [default: all]
        volume: Option<Name>,
    },
    /// Fetch files of a store in the cloud into this machine's cache before they are needed
    #[command(
        after_help = "Fetches what the file, or all files below the folder, consist of, so far as the cache has room\n(datafs.cache_bytes_max). All processes of the machine share the cache. With a store in a local folder\nthere is nothing to fetch.\n\nExamples:\n  millrace warmup digits@monday\n  millrace warmup digits:/train"
    )]
    Warmup {
        /// VOLUME or VOLUME@SNAPSHOT, with :/PATH for a part of it
        what: String,
    },
    /// Show what mounts do: rates, latencies, caches, commits
    #[command(
        after_help = "A line for each kind of request since the line above: how often, how long (mean, median, 99 of\n100), bytes, failures. Times are those of the daemon: what the kernel serves from its own pages does\nnot show. Shares of caches and commits are those of the whole process. With --json, one object per\ninterval.\n\nExamples:\n  millrace stats\n  millrace stats /mnt/digits --interval 5\n  millrace stats digits --once --json"
    )]
    Stats(StatsArgs),
    /// Write down each request that a mount answers, while it runs
    #[command(
        after_help = "One line for each request: when, what, whose thread, inode and name, offset and size, result,\nmicroseconds. The file is bounded: full, it becomes FILE.1 in the place of the one before. Lines that\ncome faster than the disk takes them are counted as lost (lost=N). Without FILE or --off, says\nwhether the mount is traced. Mounts can begin traced: millrace mount --trace FILE.\n\nExamples:\n  millrace trace digits /tmp/digits.trace\n  millrace trace /mnt/digits\n  millrace trace digits --off"
    )]
    Trace(TraceArgs),
    /// Delete what nothing points at any more, now instead of in the background
    #[command(
        after_help = "Every process that has volumes open collects garbage in the background; this does it at once and\nsays what went: objects of deleted and overwritten files (once datafs.garbage_grace_ms has passed),\nsnapshots and volumes in deletion, what killed processes left behind. Runs beside live mounts and\nmay be stopped anywhere.\n\nExample:\n  millrace gc"
    )]
    Gc,
    /// Write lines of a file (or of standard input) to a topic, one record each
    #[command(after_help = "Example:\n  millrace produce digits examples/digits/digits.jsonl")]
    Produce(ProduceArgs),
    /// Land a topic in a volume as Parquet, exactly once
    #[command(
        after_help = "Examples:\n  millrace ingest --topic digits --volume digits --path /train\n  millrace ingest --job digits --follow"
    )]
    Ingest(IngestArgs),
    /// Read a dataset in training order: print batches, or with --dry the rate
    #[command(
        after_help = "Examples:\n  millrace feed digits@monday:/train --batches 2\n  millrace feed digits@monday:/train --rank 1 --world 4 --dry"
    )]
    Feed(FeedArgs),
    /// Make and inspect models
    #[command(
        subcommand,
        after_help = "Example:\n  millrace model init mlp --inputs 64 --hidden 128 --classes 10 digits.onnx"
    )]
    Model(ModelCommand),
    /// Train what a job file describes and publish the result as a bundle
    #[command(after_help = "Example:\n  millrace train train.toml --workers 2")]
    Train(TrainArgs),
    /// Serve models over gRPC and HTTP (Open Inference Protocol)
    #[command(
        after_help = "Examples:\n  millrace serve --volume digits\n  millrace serve --models ./models --grpc 127.0.0.1:9001"
    )]
    Serve(ServeArgs),
    /// Send records to a model server and show what it predicts
    #[command(
        after_help = "Example:\n  millrace predict digits examples/digits/digits-test.jsonl --input pixels --label label"
    )]
    Predict(PredictArgs),
    /// Predict from topic to topic (at least once)
    #[command(
        after_help = "Example:\n  millrace pipe --from digits-test --to digits-predictions --volume digits --model digits --input pixels"
    )]
    Pipe(PipeArgs),
    /// Run the embedded broker alone
    #[command(after_help = "Example:\n  millrace broker --listen 127.0.0.1:9092")]
    Broker {
        /// Address to listen on [default: streams.broker.listen]
        #[arg(long)]
        listen: Option<SocketAddr>,
    },
    /// Print the configuration in force
    #[command(after_help = "Example:\n  MILLRACE_SERVING__GRPC=127.0.0.1:9001 millrace config")]
    Config,
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  millrace completions bash > /etc/bash_completion.d/millrace")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// A training worker: started by `train`, never by hand
    #[command(hide = true)]
    Worker,
}

/// `millrace quickstart`
#[derive(Debug, Args)]
pub(crate) struct QuickstartArgs {
    /// Training worker processes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) workers: u32,
    /// Seed of the weights and of the shuffle
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
    /// Where to train and serve
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    pub(crate) device: DeviceArg,
    /// Leave everything running and say what to try
    #[arg(long)]
    pub(crate) keep: bool,
    /// Delete what an earlier run left in this home and start anew
    #[arg(long)]
    pub(crate) clean: bool,
    /// Listen on free ports instead of the usual ones of Kafka (9092) and Triton (8000 to 8002)
    #[arg(long)]
    pub(crate) free_ports: bool,
}

/// Where a model runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    /// The processor
    Cpu,
    /// The first NVIDIA GPU; never the processor in silence
    Cuda,
}

impl DeviceArg {
    /// The word that configuration files use.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            DeviceArg::Cpu => "cpu",
            DeviceArg::Cuda => "cuda",
        }
    }
}

/// `millrace volume …`
#[derive(Debug, Subcommand)]
pub(crate) enum VolumeCommand {
    /// Create an empty volume
    #[command(
        after_help = "Examples:\n  millrace volume create digits\n  millrace volume create logs --compression zstd:9 --encrypt main"
    )]
    Create {
        /// Letters, digits, '.', '_' and '-', at most 128
        name: Name,
        /// How file data is compressed: none, lz4, zstd or zstd:LEVEL (1 to 19)
        #[arg(long, value_name = "HOW", default_value_t)]
        compression: Compression,
        /// Encrypt file data with this key of [datafs.encryption_keys]; names and sizes stay readable
        #[arg(long, value_name = "KEY")]
        encrypt: Option<String>,
    },
    /// List volumes
    #[command(after_help = "Example:\n  millrace volume list --json")]
    List,
    /// Show one volume and its snapshots
    #[command(after_help = "Example:\n  millrace volume show digits")]
    Show {
        /// The volume
        name: Name,
    },
    /// Encrypt what is written to an encrypted volume from now on with another key
    #[command(
        name = "set-key",
        after_help = "KEY is the name of a key in [datafs.encryption_keys]. What is there already keeps the key that it was\nwritten with, so that one must stay in the configuration for as long as any of it is wanted. Mounts\nand services that have the volume open go on with the old key: start them anew.\n\nExample:\n  millrace volume set-key logs main-2027"
    )]
    SetKey {
        /// The volume
        name: Name,
        /// Name of the key
        key: String,
    },
    /// Delete a volume, its snapshots and its files for good
    #[command(after_help = "Example:\n  millrace volume delete digits --yes")]
    Delete {
        /// The volume
        name: Name,
        /// Really delete: there is no way back
        #[arg(long)]
        yes: bool,
    },
}

/// `millrace snapshot …`
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Freeze a volume under a name; takes the same time whatever its size
    #[command(after_help = "Example:\n  millrace snapshot create digits@monday")]
    Create {
        /// VOLUME@NAME
        spec: VolumeSpec,
    },
    /// List the snapshots of a volume
    #[command(after_help = "Example:\n  millrace snapshot list digits")]
    List {
        /// The volume
        volume: Name,
    },
    /// Delete a snapshot and free what only it held
    #[command(after_help = "Example:\n  millrace snapshot delete digits@monday")]
    Delete {
        /// VOLUME@NAME
        spec: VolumeSpec,
    },
}

/// `millrace mount`
#[derive(Debug, Args)]
pub(crate) struct MountArgs {
    /// VOLUME, or VOLUME@SNAPSHOT (read-only)
    pub(crate) spec: VolumeSpec,
    /// An empty folder, created when it is missing
    pub(crate) path: PathBuf,
    /// Return once it is mounted; a background process serves it
    #[arg(long)]
    pub(crate) detach: bool,
    /// Start the process that serves the mount again whenever it dies
    #[arg(long)]
    pub(crate) supervise: bool,
    /// auto: by the mean size of a snapshot's files; passthrough: large files of snapshots are handed to
    /// the kernel; pages: everything goes through the kernel's pages, and a snapshot's files are opened
    /// without a message
    #[arg(long, value_name = "auto|passthrough|pages", default_value_t)]
    pub(crate) open: Open,
    /// Serve Prometheus metrics here, at /metrics
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Write each request to this file (see millrace trace)
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Size at which a trace file is put aside as FILE.1
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    pub(crate) trace_file_mib: u64,
}

/// `millrace stats`
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// A mount point, or the name of a volume [default: all mounts of this home]
    pub(crate) mount: Option<String>,
    /// Show once what was done since the volume was mounted
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds from one look to the next
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub(crate) interval: f64,
}

/// From a tenth of a second to a day.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("takes seconds from 0.1 to 86400".to_owned()),
    }
}

/// `millrace trace`
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// A mount point, or the name of a volume
    pub(crate) mount: String,
    /// Where to write; lines are added to a file that is there. Not on the mount itself
    pub(crate) file: Option<PathBuf>,
    /// End the trace
    #[arg(long, conflicts_with = "file")]
    pub(crate) off: bool,
    /// Size at which the file is put aside as FILE.1
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    pub(crate) file_mib: u64,
}

/// `millrace cp`
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// What to copy
    #[arg(value_name = "SRC")]
    pub(crate) from: String,
    /// What it becomes
    #[arg(value_name = "DST")]
    pub(crate) to: String,
    /// Copy folders with everything in them
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Files copied at the same time
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) parallel: u16,
}

/// `millrace fsck`
#[derive(Debug, Args)]
pub(crate) struct FsckArgs {
    /// Also read all file data against its checksums
    #[arg(long)]
    pub(crate) scrub: bool,
    /// Mend what can be mended
    #[arg(long)]
    pub(crate) repair: bool,
}

/// `millrace produce`
#[derive(Debug, Args)]
pub(crate) struct ProduceArgs {
    /// The topic; created when it does not exist
    pub(crate) topic: String,
    /// A file with one record per line [default: standard input]
    pub(crate) file: Option<PathBuf>,
    /// Partitions of a topic that is created
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=10_000))]
    pub(crate) partitions: i32,
    /// JSON field that becomes the record's key (and so its partition)
    #[arg(long, value_name = "FIELD")]
    pub(crate) key: Option<String>,
}

/// `millrace ingest`
#[derive(Debug, Args)]
pub(crate) struct IngestArgs {
    /// A job of the configuration file, by name
    #[arg(long, conflicts_with_all = ["topic", "volume", "path"])]
    pub(crate) job: Option<String>,
    /// The topic to land
    #[arg(long, required_unless_present = "job")]
    pub(crate) topic: Option<String>,
    /// The volume to land it in; created when it does not exist
    #[arg(long, required_unless_present = "job")]
    pub(crate) volume: Option<Name>,
    /// Folder in the volume [default: the topic's name]
    #[arg(long)]
    pub(crate) path: Option<String>,
    /// Go on for ever instead of stopping where the topic ends now
    #[arg(long)]
    pub(crate) follow: bool,
}

/// `millrace feed`
#[derive(Debug, Args)]
pub(crate) struct FeedArgs {
    /// What to read: `VOLUME@SNAPSHOT:/PATH`, or `VOLUME:/PATH` for the live volume
    pub(crate) dataset: DatasetSpec,
    /// Rows of a global batch
    #[arg(long, default_value_t = 128)]
    pub(crate) batch_rows: usize,
    /// Seed of the order
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// This reader's number
    #[arg(long, default_value_t = 0)]
    pub(crate) rank: u32,
    /// How many readers share the dataset
    #[arg(long, default_value_t = 1)]
    pub(crate) world: u32,
    /// First global batch
    #[arg(long, default_value_t = 0)]
    pub(crate) step: u64,
    /// How many batches [default: 1, or one epoch with --dry]
    #[arg(long)]
    pub(crate) batches: Option<u64>,
    /// Read without printing and show the rate
    #[arg(long)]
    pub(crate) dry: bool,
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
    /// Show a model's inputs, outputs, operators and parameters, or a bundle's lineage
    #[command(
        after_help = "Examples:\n  millrace model show mlp.onnx\n  millrace model show digits --volume digits"
    )]
    Show {
        /// An ONNX file, or with --volume the name of a model
        model: String,
        /// Volume that holds the bundle
        #[arg(long)]
        volume: Option<VolumeSpec>,
        /// Which version [default: the newest]
        #[arg(long, requires = "volume")]
        version: Option<u64>,
    },
}

/// `millrace model init …`
#[derive(Debug, Subcommand)]
pub(crate) enum ModelInit {
    /// Fully connected layers
    #[command(
        after_help = "Example:\n  millrace model init mlp --inputs 64 --hidden 128,64 --classes 10 mlp.onnx"
    )]
    Mlp {
        /// Where to write the graph
        file: PathBuf,
        /// Width of the input
        #[arg(long)]
        inputs: usize,
        /// Widths of the hidden layers
        #[arg(long, value_delimiter = ',', default_value = "128")]
        hidden: Vec<usize>,
        /// What all architectures have
        #[command(flatten)]
        weights: WeightArgs,
    },
    /// Convolutions with pooling, then a classifier
    #[command(
        after_help = "Example:\n  millrace model init cnn --height 8 --width 8 --filters 8,16 --classes 10 cnn.onnx"
    )]
    Cnn {
        /// Where to write the graph
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
        /// What all architectures have
        #[command(flatten)]
        weights: WeightArgs,
    },
}

/// What all architectures of `millrace model init` have.
#[derive(Debug, Args)]
pub(crate) struct WeightArgs {
    /// Number of classes
    #[arg(long)]
    pub(crate) classes: usize,
    /// Seed of the weights
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
    /// Factor on the inputs, part of the graph: 1 over their usual size helps training
    #[arg(long, default_value_t = 1.0)]
    pub(crate) scale: f32,
}

/// `millrace train`
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// The job file
    pub(crate) job: PathBuf,
    /// Worker processes [default: as the job file says]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) workers: Option<u32>,
    /// Seed of the weights and the order [default: as the job file says]
    #[arg(long)]
    pub(crate) seed: Option<u64>,
    /// Where to train [default: as the job file says]
    #[arg(long, value_enum)]
    pub(crate) device: Option<DeviceArg>,
}

/// `millrace serve`
#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Volume that holds bundles under models/
    #[arg(long, conflicts_with = "models")]
    pub(crate) volume: Option<VolumeSpec>,
    /// Folder that holds bundles
    #[arg(long, value_name = "DIR", required_unless_present = "volume")]
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
    /// Where to run the models [default: serving.device]
    #[arg(long, value_enum)]
    pub(crate) device: Option<DeviceArg>,
}

/// `millrace predict`
#[derive(Debug, Args)]
pub(crate) struct PredictArgs {
    /// The model
    pub(crate) model: String,
    /// A file with one JSON record per line [default: standard input]
    pub(crate) file: Option<PathBuf>,
    /// The record's field that holds the input
    #[arg(long, default_value = "input", value_name = "FIELD")]
    pub(crate) input: String,
    /// The record's field that holds the true class, to report accuracy
    #[arg(long, value_name = "FIELD")]
    pub(crate) label: Option<String>,
    /// The model server [default: the one of this home, else serving.grpc]
    #[arg(long)]
    pub(crate) grpc: Option<SocketAddr>,
    /// Which version [default: the newest]
    #[arg(long)]
    pub(crate) version: Option<u64>,
    /// Records of a request
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) batch_rows: u32,
}

/// `millrace pipe`
#[derive(Debug, Args)]
pub(crate) struct PipeArgs {
    /// A pipe of the configuration file, by name
    #[arg(long, conflicts_with_all = ["from", "to", "model"])]
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
    /// Volume that holds the bundle and the pipe's progress
    #[arg(long)]
    pub(crate) volume: Name,
    /// The record's field that holds the input
    #[arg(long, default_value = "input", value_name = "FIELD")]
    pub(crate) input: String,
    /// Go on for ever instead of stopping where the topic ends now
    #[arg(long)]
    pub(crate) follow: bool,
}
