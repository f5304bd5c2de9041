//! Options of a mount.

use super::observe::trace::TraceOptions;
use super::opening::Open;

/// Options of [`mount`](super::mount).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountOptions {
    /// Gives users other than the mounting one access, subject to owners and modes. Unprivileged users need
    /// `user_allow_other` in `/etc/fuse.conf` for it. Default: on for root only.
    pub allow_other: bool,
    /// Makes the kernel refuse every change, also of a live volume. A snapshot is always mounted read-only.
    pub read_only: bool,
    /// Makes the kernel honor set-user-ID and set-group-ID bits and capabilities of programs. For root only.
    pub suid: bool,
    /// Makes the kernel open device nodes. For root only.
    pub dev: bool,
    /// Makes the kernel refuse to run programs.
    pub noexec: bool,
    /// Threads that serve the kernel's requests, 1 to 64. Default 8: requests that wait (for a commit, the
    /// disk, the network) then wait in parallel.
    pub threads: usize,
    /// How the mount opens files. Default: [`Open::Auto`].
    pub open: Open,
    /// Trace file for requests. Default: no trace.
    pub trace: Option<TraceOptions>,
}

impl Default for MountOptions {
    fn default() -> Self {
        let allow_other = nix::unistd::geteuid().is_root();
        Self {
            allow_other,
            read_only: false,
            suid: false,
            dev: false,
            noexec: false,
            threads: 8,
            open: Open::Auto,
            trace: None,
        }
    }
}
