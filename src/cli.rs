//! The command line: all commands, flags and examples, declared for clap. No behavior lives here.

mod access;
mod csi;
mod feed;
mod images;
mod load;
mod models;
mod mounts;
mod records;
mod render;
mod rollout;
mod scaler;
mod scripts;
#[cfg(test)]
mod tests;
mod volumes;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use millrace_datafs::Name;

pub(crate) use access::{ServerArgs, TokenArgs};
pub(crate) use csi::{CsiArgs, CsiServices};
pub(crate) use feed::{
    ColumnsArgs, FeedArgs, FeedBenchArgs, FeedCommand, FeedHeadArgs, FeedMapArgs, FeedPlanArgs,
    FeedServeArgs, FeedStatsArgs, FeedVerifyArgs, OrderArgs, RowsArgs, SelectArgs, SourceArgs,
};
pub(crate) use images::{ImageArgs, Layout, Scaling};
pub(crate) use load::BenchArgs;
pub(crate) use models::{
    DeviceArg, EditArgs, ImportArgs, ModelCommand, ModelInit, PipeArgs, PredictArgs, QuantizeArgs,
    RecordFormat, RunsCommand, ServeArgs, ServeCommand, TopArgs, TrainArgs, WeightArgs, WorkerArgs,
};
pub(crate) use mounts::{HolderArgs, MountArgs, StatsArgs, TraceArgs, UmountArgs};
pub(crate) use records::{IngestArgs, ProduceArgs, TopicCommand};
pub(crate) use render::{RenderArgs, training};
pub(crate) use rollout::{LabelArgs, RolloutCommand, ShadowArgs, SplitArgs};
pub(crate) use scaler::ScalerArgs;
pub(crate) use volumes::{CopyArgs, FsckArgs, ListArgs, RestoreArgs, SnapshotCommand, VolumeCommand};

/// Topics and files into snapshotted volumes, into trainers, into servers.
#[derive(Debug, Parser)]
#[command(
    name = "millrace",
    version,
    arg_required_else_help = true,
    after_help = "Start here:\n  millrace quickstart          the whole pipeline on 1,797 handwritten digits\n  millrace up                  run what ./millrace.toml or HOME/millrace.toml declares\n\nExit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 not found,\n4 in use or in conflict, 5 a prerequisite is missing, 6 data is corrupt, 7 no space left,\n8 damage was found and repaired, 9 past a limit that was set."
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
    /// Log filter for standard error, as in `info` or `millrace_ingest=debug`
    #[arg(long, global = true, env = "MILLRACE_LOG", default_value = "warn", value_name = "FILTER")]
    pub(crate) log: String,
    /// The command to run
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
    /// Keep mounts while the processes that serve them are replaced, until SIGTERM
    #[command(
        after_help = "Each mount is served by a process of its own: millrace mount --holder. When that process dies or a\nnewer one takes its place, programs see no error (Linux 6.9). The end of the holder ends no mount.\n\nExamples:\n  millrace holder --socket unix:///run/millrace/holder.sock\n  millrace mount --holder unix:///run/millrace/holder.sock digits /mnt/digits"
    )]
    Holder(HolderArgs),
    /// Unmount a folder
    #[command(after_help = "Example:\n  millrace umount /mnt/digits")]
    Umount(UmountArgs),
    /// Serve volumes to Kubernetes as a driver of the Container Storage Interface
    #[command(
        after_help = "Serves identity, controller and node services on a unix socket, and the kubelet's registration on\nanother one. The Helm chart runs it (csi.enabled). Volumes are in this home, or where the secrets of a call\nsay: meta_url, meta_schema, store_url, store_options.OPTION, encryption_keys.NAME. Each published volume has\na `millrace mount` process of its own, which outlives this command: the next one takes it over.\n\nExamples:\n  millrace csi --endpoint unix:///run/csi.sock --services controller\n  millrace csi --endpoint unix:///var/lib/kubelet/plugins/csi.millrace.io/csi.sock --services node \\\n    --registration-socket /var/lib/kubelet/plugins_registry/csi.millrace.io-reg.sock --node-id node-1"
    )]
    Csi(CsiArgs),
    /// List a folder of a volume or snapshot
    #[command(
        name = "ls",
        after_help = "Shows mode, bytes, time of the last change (UTC) and name, sorted by name; a folder of more than 100,000\nentries is sorted in parts. With --json, one object per entry.\n\nExamples:\n  millrace ls digits\n  millrace ls digits@latest:/train\n  millrace ls -r digits@monday --json"
    )]
    List(ListArgs),
    /// Copy files and folders between this machine, volumes and buckets
    #[command(
        name = "cp",
        after_help = "SRC and DST are a path of this machine, VOLUME[@SNAPSHOT]:/PATH, or a URL: s3://BUCKET/PATH,\ngs://, az://, file:// (credentials, region and endpoint from AWS_…, GOOGLE_… and AZURE_… variables).\n\nDST becomes a copy of SRC: folders are merged, files that differ in size or time are replaced, nothing\nis deleted. A file appears only when it is complete, and an unchanged file is not copied again,\nso an interrupted copy continues when it is run again. Modes, times, links, extended attributes and\nholes are kept where both sides have them.\n\nExamples:\n  millrace cp -r ./images digits:/images\n  millrace cp digits@monday:/train/part-0.parquet .\n  millrace cp -r s3://bucket/images digits:/images --parallel 16"
    )]
    Copy(CopyArgs),
    /// Back up all volumes and snapshots of this home into a folder
    #[command(
        after_help = "Copies the metadata, as of one moment, and every object that it points at. Runs beside live mounts; while\nit runs, no process deletes objects. A folder with an earlier backup of the same store is brought up\nto date: only new objects are copied. If it is killed, the earlier backup or the new one remains.\nTopics, the configuration and encryption keys are not part of it.\n\nExamples:\n  millrace backup /backups/volumes\n  millrace backup /backups/volumes --json"
    )]
    Backup {
        /// The folder of the backup: missing, empty, or one with an earlier backup
        #[arg(value_name = "DIR")]
        to: PathBuf,
    },
    /// Replace all volumes of this home with those of a backup
    #[command(
        after_help = "Brings objects that are missing or damaged (in a bucket: of another length) back into the store, then\nreplaces all metadata in one step: if it is killed, the old volumes or those of the backup remain.\nEnd all mounts and services of the home first. The metadata engine and the store may differ from those\nof the backup. Objects that are newer than the backup stay in the store until `millrace fsck --repair` and\n`millrace gc`.\n\nExample:\n  millrace restore /backups/volumes --yes"
    )]
    Restore(RestoreArgs),
    /// Check volumes: names, inodes, reference counts, objects, snapshots
    #[command(
        after_help = "Runs beside live mounts; reads metadata and lists the store. --scrub also reads all file data\nagainst its checksums. --repair repairs damage without losing data: files without a name appear in\nlost+found, wrong counts are corrected, unreferenced objects are left to the next collection. Lost\ndata is reported with its inode (find MOUNT -inum INODE shows the path); restore it from a snapshot\nor a copy.\n\nExit codes: 0 sound, 8 all damage repaired, 6 damage is left.\n\nExamples:\n  millrace fsck\n  millrace fsck --scrub --json\n  millrace fsck --repair"
    )]
    Fsck(FsckArgs),
    /// Rewrite files that consist of many small extents, and objects that are mostly unused
    #[command(
        after_help = "Random overwrites scatter a file over many extents, and deletions leave objects mostly empty.\nMounts compact in the background; this command compacts everything at once, beside running mounts.\nThe next `millrace gc` after datafs.garbage_grace_ms frees the space. Snapshots keep their data.\n\nExamples:\n  millrace compact\n  millrace compact digits"
    )]
    Compact {
        /// The volume [default: all]
        volume: Option<Name>,
    },
    /// Prefetch files of a remote object store into this machine's cache
    #[command(
        after_help = "Fetches the data of the file, or of all files below the folder, as far as the cache has space\n(datafs.cache_bytes_max). All processes of the machine share the cache. With a store in a local folder\nthere is nothing to fetch.\n\nExamples:\n  millrace warmup digits@monday\n  millrace warmup digits:/train"
    )]
    Warmup {
        /// VOLUME or VOLUME@SNAPSHOT, with :/PATH for a part of it
        what: String,
    },
    /// Show statistics of mounts: rates, latencies, caches, commits
    #[command(
        after_help = "A line for each kind of request since the previous line: count, time (mean, median, 99th percentile),\nbytes, failures. Times are those of the daemon: requests that the kernel serves from its page cache\nare not included. Shares of caches and commits are those of the whole process. With --json, one object per\ninterval.\n\nExamples:\n  millrace stats\n  millrace stats /mnt/digits --interval 5\n  millrace stats digits --once --json"
    )]
    Stats(StatsArgs),
    /// Trace the requests of a running mount to a file
    #[command(
        after_help = "One line for each request: time, operation, thread, inode and name, offset and size, result,\nmicroseconds. The file is bounded: a full file replaces FILE.1. Lines that the disk cannot take in\ntime are counted as lost (lost=N). Without FILE or --off, shows whether the mount is traced. Mounts\ncan start with a trace: millrace mount --trace FILE.\n\nExamples:\n  millrace trace digits /tmp/digits.trace\n  millrace trace /mnt/digits\n  millrace trace digits --off"
    )]
    Trace(TraceArgs),
    /// Delete unreferenced objects now instead of in the background
    #[command(
        after_help = "Every process that has volumes open collects garbage in the background; this command collects at\nonce and reports the removed data: objects of deleted and overwritten files (once\ndatafs.garbage_grace_ms has passed), snapshots and volumes in deletion, leftovers of killed\nprocesses. Runs beside live mounts and can be stopped at any time.\n\nExample:\n  millrace gc"
    )]
    Gc,
    /// Write lines of a file (or of standard input) to a topic, one record each
    #[command(
        after_help = "An empty line is no record: such lines are skipped, and the result counts them (empty_lines\nwith --json).\n\nExample:\n  millrace produce digits examples/digits/digits.jsonl"
    )]
    Produce(ProduceArgs),
    /// List and delete topics
    #[command(
        subcommand,
        after_help = "Examples:\n  millrace topic list\n  millrace topic delete digits --yes"
    )]
    Topic(TopicCommand),
    /// Write a topic to a volume as Parquet, exactly once
    #[command(
        after_help = "Examples:\n  millrace ingest --topic digits --volume digits --path /train\n  millrace ingest --job digits --follow"
    )]
    Ingest(IngestArgs),
    /// Read a dataset in training order: print batches, or measure the rate with --dry
    #[command(
        after_help = "Examples:\n  millrace feed digits@monday:/train --batches 2\n  millrace feed digits@monday:/train --rank 1 --world 4 --dry\n  millrace feed digits@monday:/train --where 'label != 3' --splits train=0.9,test=0.1 --split train --split-by id"
    )]
    Feed(Box<FeedArgs>),
    /// Make, import, quantize and inspect models
    #[command(
        subcommand,
        after_help = "Example:\n  millrace model init mlp --inputs 64 --hidden 128 --classes 10 digits.onnx"
    )]
    Model(ModelCommand),
    /// Train the model of a job file and publish the result as a bundle, or run a training script
    #[command(
        after_help = "With --listen, workers of other machines join and leave while the job runs. The published model is the\nsame, bit for bit, whatever joins, leaves or dies. Each machine needs the same version of millrace and\nthe same [datafs] metadata and store. The token is never sent: both sides prove that they know it.\nConnections between machines are always encrypted, except by NCCL. Without the --ca of a worker, only the\ntoken proves who the coordinator is.\n\nExamples:\n  millrace train train.toml --workers 2\n  (umask 077; openssl rand -hex 32 > token)\n  millrace train train.toml --listen 0.0.0.0:7100 --advertise a.example.org --token-file token\n  millrace train train.toml --listen 10.0.0.1:7100 --token-file token --workers-local 0 --workers-min 2\n  millrace train train.toml --render kubernetes --image IMAGE --token-secret NAME | kubectl apply -f -\n\nWith --script, a Python script runs on all processes of a node, with the environment of torchrun. When one\nfails, or a node is lost, all of them end, and a new round begins; the script goes on from its own\ncheckpoint. Nodes join with the same `millrace worker --join`. Connections to the coordinator are always\nencrypted; those between the processes are up to the framework. Exit codes: 0 all processes ended with 0, 1 a\nprocess failed and no restart was left (its rank, its end and its last lines are printed), 5 too few nodes joined.\n\nExamples:\n  millrace train --script train.py --nproc-per-node 4 -- --lr 0.1\n  millrace train --script train.py --nodes 2:4 --listen 0.0.0.0:7100 --advertise a.example.org --token-file token\n  millrace train --script ps.py --framework tensorflow --nproc-per-node 2 --servers 1"
    )]
    Train(Box<TrainArgs>),
    /// List, show and compare the runs of training jobs
    #[command(
        subcommand,
        after_help = "Runs are read from the checkpoints in a volume. A job keeps the checkpoints of its current run and of a\nfew finished and unfinished ones. RUN is the first digits of a run's id, the name of a job for its\nnewest run, or JOB/DIGITS.\n\nExamples:\n  millrace runs list --volume digits\n  millrace runs show digits --volume digits --svg loss.svg\n  millrace runs compare 3f2a 90bc --volume digits"
    )]
    Runs(RunsCommand),
    /// Serve models over gRPC and HTTP (Open Inference Protocol)
    #[command(
        after_help = "Examples:\n  millrace serve --volume digits\n  millrace serve --models ./models --grpc 127.0.0.1:9001\n  millrace serve --volume digits --control explicit --load digits\n  millrace serve bench digits\n  millrace serve top\n  millrace serve token ci --models digits >> tokens.txt"
    )]
    Serve(ServeArgs),
    /// Send records to a model server and show its predictions
    #[command(
        after_help = "Values are converted to the types of the model's inputs: numbers must fit, lists must have the shape\nof the input without its first extent, or be flat. A record that does not fit is reported with its file\nand position, and no file is written. Without options the first records are shown; --json gives all as\none object, --output writes them in the model's own types, in the order of the records.\n\nA cell of a CSV file is one element, a JSON list of them, or one of the columns FIRST..LAST that --input\nnames. It is read as the type of the input: true, false, 1, 0 for BOOL; nan and inf are floats, too.\n\nImages (JPEG, PNG, WebP, folders of them) are for models with one input. Its number of channels selects grey or\nRGB, and images are scaled to its height and width; values stay from 0 to 255 unless --scaling, or --mean\nand --std are set. Answers name the files.\n\nExamples:\n  millrace predict digits examples/digits/digits-test.jsonl --input pixels --label label\n  millrace predict digits rows.parquet --input input=pixels --output predictions.parquet\n  echo '{\"pixels\": [[…]]}' | millrace predict digits --format json --input pixels --output -\n  millrace predict iris iris.csv --input features=sepal_length..petal_width --label species\n  millrace predict resnet photos/ cat.jpg --scaling imagenet --output classes.jsonl\n  millrace predict digits rows.jsonl --grpc models.example.org:8001 --in-flight 16"
    )]
    Predict(PredictArgs),
    /// Predict from topic to topic (at least once)
    #[command(
        after_help = "Example:\n  millrace pipe --from digits-test --to digits-predictions --volume digits --model digits --input pixels"
    )]
    Pipe(PipeArgs),
    /// Tell KEDA the lag of ingest jobs and pipes and the queue time of models, until a signal stops it
    #[command(
        after_help = "Answers KEDA's gRPC calls of an external scaler. The metadata of a trigger says what to measure:\n\n  kind: ingest   job: NAME or pipe: NAME, lagThreshold, activationLagThreshold, allowIdleConsumers\n  kind: model    model: NAME, metrics: HOST:PORT[,…], queueTimeMs, activationQueueTimeMs, windowSeconds\n\nJobs and pipes that this configuration does not declare also need topic and volume, pipes output and model.\nThe lag is the ends of the topic less the offsets in the volume, so no consumer has to run.\n\nExamples:\n  millrace scaler --listen 0.0.0.0:9300\n  millrace scaler --listen 0.0.0.0:9300 --tls-cert tls.crt --tls-key tls.key --tls-client-ca ca.pem"
    )]
    Scaler(ScalerArgs),
    /// Run the embedded broker alone
    #[command(after_help = "Example:\n  millrace broker --listen 127.0.0.1:9092")]
    Broker {
        /// Address to listen on [default: streams.broker.listen]
        #[arg(long)]
        listen: Option<SocketAddr>,
        /// Serve on a free port until no command uses the broker: started by commands, never by hand
        #[arg(long, hide = true, conflicts_with = "listen")]
        temporary: bool,
    },
    /// Print the effective configuration, or check a file
    #[command(
        after_help = "Examples:\n  MILLRACE_SERVING__GRPC=127.0.0.1:9001 millrace config\n  millrace config --all | grep serving.tls\n  millrace config --all --json\n  millrace config check millrace.toml"
    )]
    Config(ConfigArgs),
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  millrace completions bash > /etc/bash_completion.d/millrace")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Join a training job of another machine as one of its workers, or as a node of its script
    #[command(
        after_help = "The worker opens the volumes with its own home and [datafs] settings, which must lead to the metadata\nand the store of the coordinator (PostgreSQL and a bucket, or a shared folder). It computes its share\nuntil the job is over. SIGTERM and Ctrl-C make it finish its step and leave; the others go on. If the\ncoordinator is lost, it waits and goes on with it after it was started again. With --job, a worker that\ncomes after the end of the job ends at once, and one that has waited for a run that failed ends with its\nerror.\n\nExit codes: 0 the job is over or complete, or this worker left (see --exit-on-leave), 5 no coordinator answered\nwithin --wait.\n\nExamples:\n  millrace worker --join a.example.org:7100 --token-file token\n  millrace worker --join a.example.org:7100 --token-file token --ca ca.pem --advertise b.example.org\n  millrace worker --join a.example.org:7100 --token-file token --job train.toml"
    )]
    Worker(WorkerArgs),
}

/// `millrace config`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ConfigCommand>,
    /// List every key, set or not, with value, default and type; `--json` adds the meanings
    #[arg(long)]
    pub(crate) all: bool,
}

/// The commands of `millrace config`.
#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Report all problems of a configuration file or a training job file, with their lines
    #[command(
        after_help = "Checks every key, type and bound, names and addresses, settings that contradict each other, and that files\nof secrets and certificates can be read. It connects to nothing, starts nothing and changes nothing. A file\nwith dataset, model or loss at its top is a job file. Warnings are settings that are accepted, but are\nprobably not what was meant: they do not change the exit code.\n\nExit codes: 0 no errors, 2 errors, 3 the file does not exist.\n\nExamples:\n  millrace config check\n  millrace config check millrace.toml --json\n  millrace config check train.toml"
    )]
    Check {
        /// The file [default: the one that the other commands read]
        file: Option<PathBuf>,
    },
}

/// Virtual shards of the job of the quickstart. Each worker needs at least one of them.
pub(crate) const QUICKSTART_SHARDS: i64 = 12;

/// `millrace quickstart`
#[derive(Debug, Args)]
pub(crate) struct QuickstartArgs {
    /// Training worker processes
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=QUICKSTART_SHARDS))]
    pub(crate) workers: u32,
    /// Seed of the weights and of the shuffle
    #[arg(long, default_value_t = 7)]
    pub(crate) seed: u64,
    /// The device to train and serve on
    #[arg(long, value_enum, default_value_t = DeviceArg::Cpu)]
    pub(crate) device: DeviceArg,
    /// Keep everything running and print commands to try
    #[arg(long)]
    pub(crate) keep: bool,
    /// Delete the volume and the topics of earlier quickstart runs in this home and start over
    #[arg(long)]
    pub(crate) clean: bool,
    /// Listen on free ports instead of the standard ones of Kafka (9092) and Triton (8000 to 8002)
    #[arg(long)]
    pub(crate) free_ports: bool,
}
