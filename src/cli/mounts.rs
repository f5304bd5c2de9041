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
    /// Return once it is mounted; a background process serves the mount
    #[arg(long)]
    pub(crate) detach: bool,
    /// Restart the process that serves the mount whenever it dies; files stay open (Linux 6.9). SIGUSR1 moves
    /// the mount to the program's present file
    #[arg(long)]
    pub(crate) supervise: bool,
    /// Mount through the holder at this socket (see millrace holder), or take the mount over from the
    /// process that serves it now
    #[arg(long, value_name = "unix:///SOCKET", value_parser = socket, conflicts_with = "supervise")]
    pub(crate) holder: Option<PathBuf>,
    /// Stop when standard input ends; the supervisor holds it open
    #[arg(long, hide = true)]
    pub(crate) supervised: bool,
    /// Report an error on standard output as well, for the process that waits for the mount
    #[arg(long, hide = true)]
    pub(crate) tell_errors: bool,
    /// How files are opened. auto: by the mean size of a snapshot's files; passthrough: the kernel reads
    /// large files of snapshots directly; pages: all reads use the kernel's page cache, and files of a
    /// snapshot are opened without a request
    #[arg(long, value_name = "auto|passthrough|pages", default_value_t)]
    pub(crate) open: Open,
    /// Reject changes, also of a live volume
    #[arg(long)]
    pub(crate) read_only: bool,
    /// Let other users access the mount, subject to owners and modes [default: if root mounts]
    #[arg(long)]
    pub(crate) allow_other: bool,
    /// Honor set-user-ID and set-group-ID bits and capabilities of programs (root only)
    #[arg(long)]
    pub(crate) suid: bool,
    /// Honor device nodes (root only)
    #[arg(long)]
    pub(crate) dev: bool,
    /// Do not allow running programs
    #[arg(long)]
    pub(crate) noexec: bool,
    /// Serve Prometheus metrics at this address, under /metrics
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics: Option<SocketAddr>,
    /// Write the metrics to every process of this user that connects to this Unix socket; millrace csi collects them
    #[arg(long, value_name = "PATH")]
    pub(crate) metrics_socket: Option<PathBuf>,
    /// Trace each request to this file (see millrace trace)
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Size in MiB at which a trace file is renamed to FILE.1
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    pub(crate) trace_file_mib: u64,
}

/// `millrace umount`
#[derive(Debug, Args)]
pub(crate) struct UmountArgs {
    /// The mount point: the folder, not the name of the volume
    pub(crate) path: PathBuf,
    /// Have the holder at this socket unmount (see millrace holder), as a process without privilege must
    #[arg(long, value_name = "unix:///SOCKET", value_parser = socket)]
    pub(crate) holder: Option<PathBuf>,
}

/// `millrace holder`
#[derive(Debug, Args)]
pub(crate) struct HolderArgs {
    /// The socket, replaced if it is left from a holder that has died
    #[arg(long, value_name = "unix:///SOCKET", value_parser = socket)]
    pub(crate) socket: PathBuf,
    /// A user whose processes may mount, besides root and the holder's own: without --suid and --dev, and only
    /// its own mounts
    #[arg(long, value_name = "UID")]
    pub(crate) allow_uid: Option<u32>,
    /// A folder below which all mount points lie, also those of root; may be repeated [default: root mounts
    /// anywhere, and the user of --allow-uid on folders that it owns]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) allow_below: Vec<PathBuf>,
    /// A folder of objects from which processes without privilege may have the kernel read directly; may be
    /// repeated
    #[arg(long, value_name = "FOLDER")]
    pub(crate) objects: Vec<PathBuf>,
}

/// Parses the address of a holder's socket: `unix:///PATH`, or an absolute path.
fn socket(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text.strip_prefix("unix://").unwrap_or(text));
    if path.is_absolute() { Ok(path) } else { Err("takes unix:///PATH, with an absolute path".to_owned()) }
}

/// `millrace stats`
#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// A mount point, or the name of a volume [default: all mounts of this home]
    pub(crate) mount: Option<String>,
    /// Show totals since the volume was mounted, once
    #[arg(long)]
    pub(crate) once: bool,
    /// Seconds between updates
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, value_parser = seconds)]
    pub(crate) interval: f64,
}

/// Parses a number of seconds, from a tenth of a second to a day.
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
    /// The trace file; new lines are appended. Must not be on the mount itself
    pub(crate) file: Option<PathBuf>,
    /// Stop tracing
    #[arg(long, conflicts_with = "file")]
    pub(crate) off: bool,
    /// Size in MiB at which the file is renamed to FILE.1
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1_048_576))]
    pub(crate) file_mib: u64,
}
