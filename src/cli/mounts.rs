//! Flags of mounts: mount, stats, trace.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use millrace_datafs::VolumeSpec;
use millrace_datafs::mount::Open;

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
    /// End when standard input ends, which the supervisor holds open
    #[arg(long, hide = true)]
    pub(crate) supervised: bool,
    /// Tell an error on standard output as well, for the process that waits for the mount
    #[arg(long, hide = true)]
    pub(crate) tell_errors: bool,
    /// auto: by the mean size of a snapshot's files; passthrough: large files of snapshots are handed to
    /// the kernel; pages: everything goes through the kernel's pages, and a snapshot's files are opened
    /// without a message
    #[arg(long, value_name = "auto|passthrough|pages", default_value_t)]
    pub(crate) open: Open,
    /// Refuse changes, also of a live volume
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Let other users in, subject to owners and modes [default: where root mounts]
    #[arg(long)]
    pub(crate) allow_other: bool,
    /// Honour set-user-ID and set-group-ID bits and capabilities of programs (root only)
    #[arg(long)]
    pub(crate) suid: bool,
    /// Honour device nodes (root only)
    #[arg(long)]
    pub(crate) dev: bool,
    /// Refuse to run programs
    #[arg(long)]
    pub(crate) noexec: bool,
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
pub(super) fn seconds(text: &str) -> Result<f64, String> {
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
