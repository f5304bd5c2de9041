//! Flags of the volume commands: volume, snapshot, cp, restore, fsck.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use millrace_datafs::{Compression, Name, VolumeSpec};

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
        /// Compression of file data: none, lz4, zstd or zstd:LEVEL (1 to 19)
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
    /// Use another key for new data of an encrypted volume
    #[command(
        name = "set-key",
        after_help = "KEY is the name of a key in [datafs.encryption_keys]. Existing data keeps its key, so the old key must\nstay in the configuration for as long as that data is needed. Mounts and services that have the volume\nopen continue with the old key until they are restarted.\n\nExample:\n  millrace volume set-key logs main-2027"
    )]
    SetKey {
        /// The volume
        name: Name,
        /// Name of the key
        key: String,
    },
    /// Delete a volume, its snapshots and its files permanently
    #[command(after_help = "Example:\n  millrace volume delete digits --yes")]
    Delete {
        /// The volume
        name: Name,
        /// Confirm: this cannot be undone
        #[arg(long)]
        yes: bool,
    },
}

/// `millrace snapshot …`
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotCommand {
    /// Freeze a volume under a name, in constant time
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
    /// Delete a snapshot and free the data that only it held
    #[command(after_help = "Example:\n  millrace snapshot delete digits@monday")]
    Delete {
        /// VOLUME@NAME
        spec: VolumeSpec,
    },
}

/// `millrace ls`
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// VOLUME or VOLUME@SNAPSHOT, with :/PATH for a folder or file in it
    pub(crate) what: String,
    /// List folders with everything in them
    #[arg(short, long)]
    pub(crate) recursive: bool,
}

/// `millrace cp`
#[derive(Debug, Args)]
pub(crate) struct CopyArgs {
    /// The source
    #[arg(value_name = "SRC")]
    pub(crate) from: String,
    /// The destination
    #[arg(value_name = "DST")]
    pub(crate) to: String,
    /// Copy folders with everything in them
    #[arg(short, long)]
    pub(crate) recursive: bool,
    /// Number of files to copy concurrently
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(crate) parallel: u16,
}

/// `millrace restore`
#[derive(Debug, Args)]
pub(crate) struct RestoreArgs {
    /// The folder of the backup
    #[arg(value_name = "DIR")]
    pub(crate) from: PathBuf,
    /// Confirm replacing all volumes: changes since the backup are lost
    #[arg(long)]
    pub(crate) yes: bool,
    /// Take over the object store from a home that no longer exists; that home is rejected from now on
    #[arg(long)]
    pub(crate) take_store: bool,
}

/// `millrace fsck`
#[derive(Debug, Args)]
pub(crate) struct FsckArgs {
    /// Also read all file data against its checksums
    #[arg(long)]
    pub(crate) scrub: bool,
    /// Repair what can be repaired
    #[arg(long)]
    pub(crate) repair: bool,
}
