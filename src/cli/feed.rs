//! Flags of the feed commands.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use millrace_datafs::VolumeSpec;
use millrace_streams::dataset::{DatasetSpec, SourceSpec};
use millrace_streams::feed::{
    BucketOptions, EpochRows, FeedError, MixedSpec, TokenLabels, TokenOptions, Until, Weight,
};

/// `millrace feed`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct FeedArgs {
    #[command(subcommand)]
    pub(crate) command: Option<FeedCommand>,
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    #[command(flatten)]
    pub(crate) order: OrderArgs,
    #[command(flatten)]
    pub(crate) epochs: EpochArgs,
    #[command(flatten)]
    pub(crate) columns: ColumnsArgs,
    /// This reader's number
    #[arg(long, default_value_t = 0)]
    pub(crate) rank: u32,
    /// Number of readers that share the dataset
    #[arg(long, default_value_t = 1)]
    pub(crate) world: u32,
    /// First global batch
    #[arg(long, default_value_t = 0)]
    pub(crate) step: u64,
    /// Number of batches [default: 1, or the rows of one epoch with --dry]
    #[arg(long)]
    pub(crate) batches: Option<u64>,
    /// Read this epoch, from 0: exactly its rows, so that its first and last batch can have fewer
    #[arg(long, conflicts_with_all = ["step", "batches"])]
    pub(crate) epoch: Option<u64>,
    /// Read without printing and show the rate
    #[arg(long)]
    pub(crate) dry: bool,
}

/// Commands about a dataset. The root of a volume that is named like one is written with a colon: `plan:/`.
#[derive(Debug, Subcommand)]
pub(crate) enum FeedCommand {
    /// Show what a training run will read: rows, files, lanes, memory, steps, and each reader's part
    #[command(
        after_help = "Examples:\n  millrace feed plan digits@monday:/train --batch-rows 256 --world 4\n  millrace feed plan digits@monday:/train --where 'label != 3' --json\n  millrace feed plan web@v1:/tokens --tokens ids --length 2048 --eos 2"
    )]
    Plan(FeedPlanArgs),
    /// Print the first rows in training order
    #[command(after_help = "Example:\n  millrace feed head digits@monday:/train --rows 5 --columns label,id")]
    Head(FeedHeadArgs),
    /// Describe each column: type, nulls, range, mean, distinct and frequent values
    #[command(
        after_help = "Reads all rows once, in memory that does not grow with them. The deviation is over all rows, not of a\nsample.\n\nExample:\n  millrace feed stats digits@monday:/train --columns label"
    )]
    Stats(FeedStatsArgs),
    /// Read one epoch with several readers, and prove that every row comes exactly once
    #[command(
        after_help = "Prints the SHA-256 of the global row numbers in order, which is the same for any number of readers.\n\nExample:\n  millrace feed verify digits@monday:/train --readers 4"
    )]
    Verify(FeedVerifyArgs),
    /// Measure how fast rows come
    #[command(
        after_help = "Example:\n  millrace feed bench digits@monday:/train --batch-rows 1024 --columns pixels,label"
    )]
    Bench(FeedBenchArgs),
    /// Call a Python function with each row group, and write what it returns to a new folder, exactly once
    #[command(
        after_help = "FUNCTION gets the rows of one row group as a pyarrow.RecordBatch, and returns a table, several of them, or\nNone. Each row group has its output once, as one Parquet file: a command that was killed goes on when it\nis run again. Needs Python with pyarrow and the package millrace.\n\nWith --reduce, the rows that FUNCTION returns are split by a hash of --key into parts and sorted. The reduce\nfunction is called once for each key, with the key and an iterator of record batches. The output folder\nappears when all parts are done.\n\nExamples:\n  millrace feed map digits@monday:/train clean.py:clean --to digits:/clean\n  millrace feed map digits@latest:/train clean.py:clean --to digits:/clean --argument limit=0.5\n  millrace feed map corpus@v1:/texts words.py:words --key word --reduce count --to corpus:/counts"
    )]
    Map(FeedMapArgs),
    /// Serve batches to other machines over Arrow Flight, until a signal stops it
    #[command(
        after_help = "Any Flight client reads what --volume and --dataset name, at snapshots. Several servers of the same\nvolumes share the work: start each with the others as --peer. A client whose server ends goes on at another\none, with no row missing or repeated. TLS and tokens are set in [feed] of millrace.toml. On a signal the\nserver takes no more calls, lets streams run for feed.drain_ms_max, and ends the others.\n\nExamples:\n  millrace feed serve --dataset digits:/train\n  millrace feed serve --volume digits --grpc 127.0.0.1:8815 --peer grpc://127.0.0.1:8816"
    )]
    Serve(FeedServeArgs),
}

/// `millrace feed plan`
#[derive(Debug, Args)]
pub(crate) struct FeedPlanArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    #[command(flatten)]
    pub(crate) order: OrderArgs,
    #[command(flatten)]
    pub(crate) epochs: EpochArgs,
    #[command(flatten)]
    pub(crate) columns: ColumnsArgs,
    /// Number of readers that share the dataset
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub(crate) world: u32,
}

/// `millrace feed head`
#[derive(Debug, Args)]
pub(crate) struct FeedHeadArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    #[command(flatten)]
    pub(crate) order: OrderArgs,
    /// Number of rows
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) rows: u32,
    #[command(flatten)]
    pub(crate) columns: ColumnsArgs,
}

/// `millrace feed stats`
#[derive(Debug, Args)]
pub(crate) struct FeedStatsArgs {
    #[command(flatten)]
    pub(crate) rows: RowsArgs,
    #[command(flatten)]
    pub(crate) columns: ColumnsArgs,
}

/// `millrace feed verify`
#[derive(Debug, Args)]
pub(crate) struct FeedVerifyArgs {
    #[command(flatten)]
    pub(crate) rows: RowsArgs,
    #[command(flatten)]
    pub(crate) order: OrderArgs,
    /// Number of readers, which read at the same time
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) readers: u32,
    #[command(flatten)]
    pub(crate) columns: ColumnsArgs,
}

/// `millrace feed bench`
#[derive(Debug, Args)]
pub(crate) struct FeedBenchArgs {
    #[command(flatten)]
    pub(crate) source: SourceArgs,
    #[command(flatten)]
    pub(crate) order: OrderArgs,
    #[command(flatten)]
    pub(crate) epochs: EpochArgs,
    /// This reader's number
    #[arg(long, default_value_t = 0)]
    pub(crate) rank: u32,
    /// Number of readers that share the dataset
    #[arg(long, default_value_t = 1)]
    pub(crate) world: u32,
    /// Number of batches [default: one epoch]
    #[arg(long)]
    pub(crate) batches: Option<u64>,
    #[command(flatten)]
    pub(crate) columns: ColumnsArgs,
    /// Row groups decoded at the same time [default: one for each processor, at most 8]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) decoders: Option<u16>,
    /// Batches assembled ahead
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) prefetch: u16,
}

/// `millrace feed map`
#[derive(Debug, Args)]
pub(crate) struct FeedMapArgs {
    /// The dataset at a snapshot: `VOLUME@SNAPSHOT:/PATH`, or `VOLUME@latest:/PATH`. A format in front overrides the names
    /// of the files, for example `folder:photos@v1:/train` for images in one folder a class. Land a topic first
    pub(crate) dataset: SourceSpec,
    #[command(flatten)]
    pub(crate) select: SelectArgs,
    /// The function: `SCRIPT.py:FUNCTION`, or `MODULE:FUNCTION` of an installed module
    pub(crate) function: String,
    /// The folder for the output, `VOLUME:/PATH`: missing, empty, or that of the same job
    #[arg(long, value_name = "VOLUME:/PATH")]
    pub(crate) to: DatasetSpec,
    /// Worker processes [default: one for each processor]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) processes: Option<u16>,
    #[command(flatten)]
    pub(crate) columns: ColumnsArgs,
    /// The form of the rows: a pyarrow.RecordBatch, or a dictionary of NumPy arrays or PyTorch tensors
    #[arg(long, default_value = "arrow", value_parser = ["arrow", "numpy", "torch"])]
    pub(crate) format: String,
    /// A named parameter of the function, as JSON or else as a text
    #[arg(long = "argument", value_name = "NAME=VALUE", value_parser = argument)]
    pub(crate) arguments: Vec<(String, serde_json::Value)>,
    /// Key columns of the rows that FUNCTION returns, by which they are reduced
    #[arg(long, value_name = "COLUMN,...", value_delimiter = ',', requires = "reduce")]
    pub(crate) key: Vec<String>,
    /// The reduce function, called once for each key: `SCRIPT.py:FUNCTION`, `MODULE:FUNCTION`, or a name in the file of
    /// FUNCTION
    #[arg(long, value_name = "FUNCTION", requires = "key")]
    pub(crate) reduce: Option<String>,
    /// A named parameter of the reduce function, as JSON or else as a text
    #[arg(long = "reduce-argument", value_name = "NAME=VALUE", value_parser = argument, requires = "reduce")]
    pub(crate) reduce_arguments: Vec<(String, serde_json::Value)>,
    /// Parts into which keys are split, each reduced as one piece and written as one file [default: 16]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=4096), requires = "reduce")]
    pub(crate) parts: Option<u16>,
    /// Go on although a function's file or arguments changed; row groups and parts that are done stay as they are
    #[arg(long)]
    pub(crate) allow_changed_function: bool,
    /// The Python interpreter
    #[arg(long, value_name = "PROGRAM", env = "MILLRACE_PYTHON", default_value = "python3")]
    pub(crate) python: PathBuf,
}

/// `millrace feed serve`
#[derive(Debug, Args)]
pub(crate) struct FeedServeArgs {
    /// A volume, or a snapshot of one, that clients may read whole; may be repeated [default: feed.volumes]
    #[arg(long = "volume", value_name = "VOLUME[@SNAPSHOT]")]
    pub(crate) volumes: Vec<VolumeSpec>,
    /// A folder that clients may read, at all snapshots or at one; may be repeated [default: feed.datasets]
    #[arg(long = "dataset", value_name = "VOLUME[@SNAPSHOT]:/PATH")]
    pub(crate) datasets: Vec<DatasetSpec>,
    /// Flight address [default: feed.grpc]
    #[arg(long, value_name = "ADDR")]
    pub(crate) grpc: Option<SocketAddr>,
    /// Metrics address [default: feed.metrics]
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<SocketAddr>,
    /// URI under which clients reach this server [default: feed.advertise, else its address]
    #[arg(long, value_name = "URI")]
    pub(crate) advertise: Option<String>,
    /// URI of another server that exposes the same; may be repeated [default: feed.peers]
    #[arg(long = "peer", value_name = "URI")]
    pub(crate) peers: Vec<String>,
    /// Most streams at a time [default: feed.limits.streams_max]
    #[arg(long, value_name = "N")]
    pub(crate) streams: Option<usize>,
}

/// All that decides the order of rows, beside the rows.
#[derive(Debug, Args)]
pub(crate) struct OrderArgs {
    /// Rows of a global batch
    #[arg(long, default_value_t = 128)]
    pub(crate) batch_rows: usize,
    /// Seed of the order
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) tokens: TokenArgs,
    /// Make batches of rows whose lists in this column have like lengths: up to each of these, or longer
    #[arg(long, value_name = "COLUMN=LENGTH,...", value_parser = buckets, conflicts_with = "tokens")]
    pub(crate) buckets: Option<BucketOptions>,
}

/// Arguments that exclude the packing of tokens, and so all of its arguments.
const UNPACKED: [&str; 2] = ["columns", "buckets"];

/// The packing of a column of tokens into sequences of one length, which are the rows then.
#[derive(Debug, Args)]
pub(crate) struct TokenArgs {
    /// Pack the token lists of this column into sequences of one length; the rows are sequences then
    #[arg(long, value_name = "COLUMN", requires = "length", conflicts_with = "columns")]
    tokens: Option<String>,
    /// Tokens of a sequence
    #[arg(long, value_name = "TOKENS", requires = "tokens", conflicts_with_all = UNPACKED)]
    length: Option<u32>,
    /// Token to put in front of each document
    #[arg(long, value_name = "TOKEN", requires = "tokens", conflicts_with_all = UNPACKED)]
    bos: Option<i64>,
    /// Token to put behind each document
    #[arg(long, value_name = "TOKEN", requires = "tokens", conflicts_with_all = UNPACKED)]
    eos: Option<i64>,
    /// Token that fills the last sequence of a row group [default: 0]
    #[arg(long, value_name = "TOKEN", requires = "tokens", conflicts_with_all = UNPACKED)]
    pad: Option<i64>,
    /// Add labels: "next", the token after each one, or "same", the token itself
    #[arg(long, value_name = "next|same", requires = "tokens", conflicts_with_all = UNPACKED, value_parser = labels)]
    labels: Option<TokenLabels>,
}

impl TokenArgs {
    /// The packing, if a column is given.
    pub(crate) fn options(&self) -> Option<TokenOptions> {
        let column = self.tokens.clone()?;
        Some(TokenOptions {
            column,
            // Required with the column.
            length: self.length.unwrap_or(0),
            bos: self.bos,
            eos: self.eos,
            pad: self.pad.unwrap_or(0),
            labels: self.labels,
        })
    }
}

/// A column of lists with the bounds of its buckets.
fn buckets(text: &str) -> Result<BucketOptions, String> {
    let hint = "write COLUMN=LENGTH,LENGTH,..., for example ids=64,128,256";
    let (column, bounds) = text.rsplit_once('=').ok_or(hint)?;
    let bounds =
        bounds.split(',').map(str::parse::<u32>).collect::<Result<Vec<u32>, _>>().map_err(|_| hint)?;
    Ok(BucketOptions { column: column.to_owned(), bounds })
}

/// The kind of labels of sequences.
fn labels(text: &str) -> Result<TokenLabels, &'static str> {
    match text {
        "next" => Ok(TokenLabels::Next),
        "same" => Ok(TokenLabels::Same),
        _ => Err("write next, the token after each one, or same, the token itself"),
    }
}

/// The length of an epoch.
#[derive(Debug, Args)]
pub(crate) struct EpochArgs {
    /// Rows of an epoch, or a fraction of the rows with a point, for example 0.1 [default: all]. Each epoch goes on where
    /// the one before ended
    #[arg(long, value_name = "ROWS|FRACTION")]
    pub(crate) rows_per_epoch: Option<EpochRows>,
}

/// A dataset, or several by weight, and the rows of them to read.
#[derive(Debug, Args)]
pub(crate) struct SourceArgs {
    /// The dataset: `VOLUME@SNAPSHOT:/PATH`, or `VOLUME:/PATH` for the live volume. Or a topic up to what has arrived, a
    /// time or a number of records: `topic:NAME@latest`, `topic:NAME@2026-11-28T06:00:00Z`, `topic:NAME@100000`
    #[arg(required_unless_present = "mix", conflicts_with = "mix")]
    pub(crate) dataset: Option<SourceSpec>,
    /// Read several datasets in proportion to their weights, for example web@v1:/train=0.7; repeat it for each
    #[arg(long, value_name = "DATASET=WEIGHT", value_parser = mixed)]
    pub(crate) mix: Vec<(SourceSpec, Weight)>,
    /// The end of an epoch of a mixture: "first", when a dataset has delivered all its rows, or "every", when all have
    #[arg(
        long,
        value_name = "first|every",
        default_value = "first",
        requires = "mix",
        conflicts_with = "dataset"
    )]
    pub(crate) until: Until,
    #[command(flatten)]
    pub(crate) select: SelectArgs,
}

/// The dataset and the rows of it to read.
#[derive(Debug, Args)]
pub(crate) struct RowsArgs {
    /// The dataset: `VOLUME@SNAPSHOT:/PATH`, or `VOLUME:/PATH` for the live volume. A format in front overrides the
    /// names of the files, for example `folder:photos@v1:/train` for images in one folder a class. Or a topic up to what has
    /// arrived, a time or a number of records, for example `topic:clicks@latest`
    pub(crate) dataset: SourceSpec,
    #[command(flatten)]
    pub(crate) select: SelectArgs,
}

/// The rows of a dataset to read.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    /// Read only rows for which this condition is true, for example "label != 3 and score >= 0.5"
    #[arg(long = "where", value_name = "CONDITION")]
    pub(crate) filter: Option<String>,
    /// Parts into which the rows are split by a hash, for example train=0.8,val=0.1,test=0.1
    #[arg(long, value_name = "PART=FRACTION,...", value_delimiter = ',', value_parser = part)]
    pub(crate) splits: Vec<(String, String)>,
    /// The part to read
    #[arg(long, value_name = "PART")]
    pub(crate) split: Option<String>,
    /// Columns whose values decide the part of a row [default: its file and number]
    #[arg(long, value_name = "COLUMN,...", value_delimiter = ',')]
    pub(crate) split_by: Vec<String>,
}

/// The columns to read.
#[derive(Debug, Args)]
pub(crate) struct ColumnsArgs {
    /// Columns to read [default: all]
    #[arg(long, value_name = "COLUMN,...", value_delimiter = ',')]
    pub(crate) columns: Vec<String>,
}

/// A named parameter with its value.
fn argument(text: &str) -> Result<(String, serde_json::Value), &'static str> {
    let (name, value) = text.split_once('=').ok_or("write NAME=VALUE, for example limit=0.5")?;
    let value = serde_json::from_str(value).unwrap_or_else(|_| serde_json::Value::from(value));
    Ok((name.to_owned(), value))
}

/// A dataset of a mixture with its weight.
fn mixed(text: &str) -> Result<(SourceSpec, Weight), String> {
    let source: MixedSpec = text.parse().map_err(|error: FeedError| error.to_string())?;
    Ok((source.dataset, source.weight))
}

/// A part of a split with its fraction.
fn part(text: &str) -> Result<(String, String), &'static str> {
    let (name, fraction) = text.split_once('=').ok_or("write PART=FRACTION, for example train=0.8")?;
    Ok((name.to_owned(), fraction.to_owned()))
}
