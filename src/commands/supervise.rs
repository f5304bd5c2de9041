//! `millrace mount --supervise`: a supervisor process that restarts the daemon of a mount whenever it dies.
//!
//! The supervisor holds no state of the volume. The mount point stays: until the new daemon has removed the
//! dead mount, programs get ENOTCONN.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use millrace_datafs::mount;
use millrace_leaf::backoff::Backoff;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use super::mount::{announce, error_of, metrics_of, same_command, tell_error};
use crate::cli::MountArgs;
use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::ready;

/// First pause before a restart; doubled for each that follows.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause before a restart.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// After this uptime, a daemon's end counts as the first failure again.
const WELL_AFTER: Duration = Duration::from_secs(60);
/// Failures in a row before the supervisor gives up, after about a minute and a half of pauses.
const FAILURES_MAX: u32 = 10;

/// The outcome of one daemon.
struct DaemonOutcome {
    status: ExitStatus,
    /// Whether it had mounted.
    was_ready: bool,
}

/// Runs the command.
pub(super) async fn run(context: &Context, args: &MountArgs) -> Result<()> {
    let at = std::path::absolute(&args.path)?;
    let (mut failures, mut announced) = (0, false);
    let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
    let mut metrics = args.metrics;
    loop {
        let started = Instant::now();
        let mut daemon = start(context, args, metrics)?;
        let served = serve(context, &mut daemon, |announcement| {
            if let Some(error) = error_of(announcement) {
                if !announced {
                    tell_error(context.out, error);
                }
                return Ok(());
            }
            // Keep the announced address, also if the system chose the port.
            metrics = metrics_of(announcement);
            if !std::mem::replace(&mut announced, true) {
                let at = Path::new(announcement["mount"].as_str().unwrap_or_default());
                announce(
                    context.out,
                    &args.spec.to_string(),
                    at,
                    std::process::id(),
                    metrics_of(announcement),
                )?;
                ready::notify_systemd();
            }
            Ok(())
        });
        let DaemonOutcome { status, was_ready } = served.await?;
        if status.success() {
            return Ok(());
        }
        let stops = context.stop.is_cancelled();
        if stops {
            unmount(&at);
        }
        if stops || !announced || (was_ready && !mount::is_mounted(&at)?) {
            // The daemon has already reported its error.
            std::process::exit(status.code().unwrap_or(Exit::Failed as i32));
        }
        if !was_ready {
            // Another process may use the port that the system had chosen.
            metrics = args.metrics;
        }
        let elapsed = started.elapsed();
        if elapsed >= WELL_AFTER {
            failures = 0;
            backoff.reset();
        }
        failures += 1;
        if failures > FAILURES_MAX {
            unmount(&at);
            let message = format!(
                "the daemon of the mount at {} has ended {failures} times in a row, last with {status}; \
                 its log says why",
                at.display()
            );
            return fail(Exit::Failed, message);
        }
        let pause = backoff.pause();
        tracing::error!(
            volume = %args.spec, path = %at.display(), %status, failures,
            elapsed_ms = elapsed.as_millis() as u64, pause_ms = pause.as_millis() as u64,
            "the daemon of a mount died; restarting it"
        );
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = context.stop.cancelled() => {
                unmount(&at);
                return Ok(());
            }
        }
        if was_ready && !mount::is_mounted(&at)? {
            // Unmounted by `millrace umount` meanwhile.
            return Ok(());
        }
    }
}

/// Starts the unsupervised command in its own process group: a Ctrl-C in this terminal reaches this process,
/// which forwards it once. The daemon ends whenever this process ends.
fn start(context: &Context, args: &MountArgs, metrics: Option<SocketAddr>) -> Result<Child> {
    use std::os::unix::process::CommandExt;
    let mut command = same_command(context, args, metrics)?;
    command.arg("--supervised");
    if args.tell_errors {
        command.arg("--tell-errors");
    }
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).env_remove(ready::SOCKET);
    tokio::process::Command::from(command).spawn().context("cannot start the process that serves the mount")
}

/// Waits for the end of a daemon, and passes its first message to `hear`: that it serves, or why it cannot.
/// Terminates the daemon on a stop signal, or if `hear` fails.
async fn serve(
    context: &Context,
    daemon: &mut Child,
    hear: impl FnOnce(&serde_json::Value) -> Result<()>,
) -> Result<DaemonOutcome> {
    // Waiting for a child closes its input, which the daemon takes for the end of its supervisor.
    let _alive = daemon.stdin.take();
    let stdout = daemon.stdout.take().ok_or_else(|| io::Error::other("the daemon has no output"))?;
    let mut said = BufReader::new(stdout).lines();
    let mut was_ready = false;
    let announced = tokio::select! {
        line = said.next_line() => match line {
            Ok(None) => Ok(()),
            Ok(Some(line)) => {
                serde_json::from_str(&line).map_err(anyhow::Error::from).and_then(|announcement| {
                    was_ready = error_of(&announcement).is_none();
                    hear(&announcement)
                })
            }
            Err(error) => Err(error.into()),
        },
        () = context.stop.cancelled() => Ok(()),
    };
    if announced.is_ok() {
        tokio::select! {
            status = daemon.wait() => return Ok(DaemonOutcome { status: status?, was_ready }),
            () = context.stop.cancelled() => {}
        }
    }
    if let Some(pid) = daemon.id() {
        // The daemon may have just ended.
        let _ = kill(Pid::from_raw(pid as i32), Signal::SIGTERM);
    }
    let status = daemon.wait().await?;
    announced.map(|()| DaemonOutcome { status, was_ready })
}

/// Unmounts a dead mount.
fn unmount(at: &Path) {
    if mount::is_mounted(at).is_ok_and(|mounted| mounted)
        && let Err(error) = mount::umount(at)
    {
        tracing::warn!(%error, path = %at.display(), "cannot unmount a dead mount; remove it with millrace umount");
    }
}
