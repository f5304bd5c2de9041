//! Flags of the record commands: produce, topic, ingest.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use millrace_datafs::Name;

/// `millrace produce`
#[derive(Debug, Args)]
pub(crate) struct ProduceArgs {
    /// The topic; created when it does not exist
    pub(crate) topic: String,
    /// A file with one record per line; empty lines are skipped [default: standard input]
    pub(crate) file: Option<PathBuf>,
    /// Partitions of a topic that is created
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=10_000))]
    pub(crate) partitions: i32,
    /// JSON field that becomes the record's key (and so its partition)
    #[arg(long, value_name = "FIELD")]
    pub(crate) key: Option<String>,
}

/// `millrace topic`
#[derive(Debug, Subcommand)]
pub(crate) enum TopicCommand {
    /// List the topics with their partitions and offsets
    #[command(after_help = "Examples:\n  millrace topic list\n  millrace topic list --json")]
    List,
    /// Delete a topic with all of its records
    #[command(
        after_help = "Works on a full disk, too. The offsets of ingest jobs stay in their volumes.\n\nExample:\n  millrace topic delete trips --yes"
    )]
    Delete {
        /// The topic
        name: String,
        /// Confirm: its records are lost
        #[arg(long)]
        yes: bool,
    },
}

/// `millrace ingest`
#[derive(Debug, Args)]
pub(crate) struct IngestArgs {
    /// A job of the configuration file, by name
    #[arg(long, conflicts_with_all = ["topic", "volume", "path"])]
    pub(crate) job: Option<String>,
    /// The topic to ingest
    #[arg(long, required_unless_present = "job")]
    pub(crate) topic: Option<String>,
    /// The volume to write to; created when it does not exist
    #[arg(long, required_unless_present = "job")]
    pub(crate) volume: Option<Name>,
    /// Folder in the volume [default: the topic's name]
    #[arg(long)]
    pub(crate) path: Option<String>,
    /// Run until stopped, not just to the current end of the topic
    #[arg(long)]
    pub(crate) follow: bool,
}
