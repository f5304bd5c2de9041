//! `millrace mount --supervise`: a supervisor process that restarts the daemon of a mount whenever it dies.
//!
//! The supervisor is the holder of the mount (`datafs/src/mount/handover.rs`): programs wait while no daemon
//! lives, and open files go on with the next one. SIGUSR1 replaces the daemon by one of the program that is now
//! at the path of this one. The supervisor holds no state of the volume.
//!
//! Before Linux 6.9, and where the holder's socket cannot be made, the daemon mounts without a holder. The mount
//! point stays then: until the new daemon has removed the dead mount, programs get ENOTCONN.
//!
//! The supervisor must open nothing below the mount: without a daemon such a call blocks.

use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use millrace_datafs::mount::{self, Holder, HolderOptions};
use millrace_leaf::backoff::Backoff;
use millrace_leaf::private;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::signal::unix::SignalKind;

use super::mount::{OWN_PROGRAM, announce, error_of, metrics_of, same_command, tell_error};
use crate::cli::MountArgs;
use crate::context::Context;
use crate::failure::{Exit, fail, failure};
use crate::output;
use crate::ready;

/// First pause before a restart; doubled for each that follows.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Longest pause before a restart.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// After this uptime, a daemon's end counts as the first failure again.
const WELL_AFTER: Duration = Duration::from_secs(60);
/// Failures in a row before the supervisor gives up, after about a minute and a half of pauses.
const FAILURES_MAX: u32 = 10;
/// Folder of the holder's socket in the home, and how the name of the socket begins; the process ID follows. The
/// sockets that end in `.sock` there answer statistics.
const SOCKET_FOLDER: &str = "run";
const SOCKET_PREFIX: &str = "holder-";

/// The outcome of one daemon.
struct DaemonOutcome {
    status: ExitStatus,
    /// Whether it had mounted.
    was_ready: bool,
}

/// A daemon.
struct Daemon {
    child: Child,
    /// The daemon ends when this is closed, as at the end of the supervisor.
    _alive: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

/// The supervisor of a mount.
struct Supervisor<'a> {
    context: &'a Context,
    args: &'a MountArgs,
    /// Absolute path of the mount point.
    at: PathBuf,
    /// The holder of the mount; `None` where the daemon mounts.
    holder: Option<Holder>,
    /// The program that SIGUSR1 has switched to; that of this process before.
    program: Option<File>,
    /// The path of this program, where an upgrade puts the next one.
    program_path: io::Result<PathBuf>,
    /// Where the next daemon serves metrics.
    metrics: Option<SocketAddr>,
    /// A daemon has mounted.
    announced: bool,
}

/// Runs the command.
pub(super) async fn run(context: &Context, args: &MountArgs) -> Result<()> {
    let mut upgrades = tokio::signal::unix::signal(SignalKind::user_defined1())?;
    let holder = start_holder(context)
        .inspect_err(|error| {
            let reason = output::one_line(error);
            tracing::warn!(
                reason,
                "open files of this mount do not outlive its daemon: programs get ENOTCONN until the restart"
            );
        })
        .ok();
    let mut supervisor = Supervisor {
        context,
        args,
        at: std::path::absolute(&args.path)?,
        holder,
        program: None,
        program_path: std::env::current_exe(),
        metrics: args.metrics,
        announced: false,
    };
    supervisor.run(&mut upgrades).await
}

/// Starts the holder of the mount in this process.
fn start_holder(context: &Context) -> Result<Holder> {
    mount::can_hand_over().map_err(|reason| failure(Exit::Unavailable, reason))?;
    let folder = std::path::absolute(context.home.root().join(SOCKET_FOLDER))?;
    private::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
    remove_dead_sockets(&folder);
    let socket = folder.join(format!("{SOCKET_PREFIX}{}", std::process::id()));
    Ok(Holder::start(&socket, &HolderOptions::default())?)
}

/// Removes the sockets that killed supervisors have left. Those that cannot be tried stay.
fn remove_dead_sockets(folder: &Path) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let is_holder = entry.file_name().to_str().is_some_and(|name| name.starts_with(SOCKET_PREFIX));
        // A holder that lives has a socket of another type, which is another error.
        let is_dead = || {
            UnixStream::connect(entry.path())
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
        };
        if is_holder
            && is_dead()
            && let Err(error) = std::fs::remove_file(entry.path())
        {
            tracing::debug!(%error, socket = %entry.path().display(), "a socket of a killed supervisor stays");
        }
    }
}

impl Supervisor<'_> {
    async fn run(&mut self, upgrades: &mut tokio::signal::unix::Signal) -> Result<()> {
        let mut failures = 0;
        let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        loop {
            let started = Instant::now();
            let daemon = self.start(self.program.as_ref(), self.metrics)?;
            let DaemonOutcome { status, was_ready } = self.serve(daemon, upgrades).await?;
            let stops = self.context.stop.is_cancelled();
            // A daemon that hands over to another process succeeds, but the mount stays.
            if status.success() && (stops || !self.is_held()?) {
                return Ok(());
            }
            if stops || !self.announced || (was_ready && !self.is_attached()?) {
                if stops || self.holder.is_some() {
                    self.unmount();
                }
                // Removes the socket.
                drop(self.holder.take());
                // The daemon has already reported its error.
                std::process::exit(status.code().unwrap_or(Exit::Failed as i32));
            }
            if !was_ready {
                // Another process may use the port that the system had chosen.
                self.metrics = self.args.metrics;
            }
            let elapsed = started.elapsed();
            if elapsed >= WELL_AFTER {
                failures = 0;
                backoff.reset();
            }
            failures += 1;
            if failures > FAILURES_MAX {
                self.unmount();
                let message = format!(
                    "the daemon of the mount at {} has ended {failures} times in a row, last with {status}; \
                     its log says why",
                    self.at.display()
                );
                return fail(Exit::Failed, message);
            }
            let pause = backoff.pause();
            tracing::error!(
                volume = %self.args.spec, path = %self.at.display(), %status, failures,
                elapsed_ms = elapsed.as_millis() as u64, pause_ms = pause.as_millis() as u64,
                "the daemon of a mount died; restarting it"
            );
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.context.stop.cancelled() => {
                    self.unmount();
                    return Ok(());
                }
            }
            if was_ready && !self.is_attached()? {
                // Unmounted by `millrace umount` meanwhile.
                return Ok(());
            }
        }
    }

    /// Starts the unsupervised command of a program in its own process group: a Ctrl-C in this terminal reaches
    /// this process, which forwards it once. The daemon ends whenever this process ends.
    fn start(&self, program: Option<&File>, metrics: Option<SocketAddr>) -> Result<Daemon> {
        let path = program.map_or_else(
            || PathBuf::from(OWN_PROGRAM),
            |file| PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())),
        );
        let mut command = same_command(self.context, self.args, &path, metrics)?;
        command.arg("--supervised");
        if let Some(holder) = &self.holder {
            command.arg("--holder").arg(holder.socket());
        }
        // A successor reports to this process.
        if self.args.tell_errors || self.announced {
            command.arg("--tell-errors");
        }
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped()).env_remove(ready::SOCKET);
        let mut child = tokio::process::Command::from(command)
            .spawn()
            .context("cannot start the process that serves the mount")?;
        // Waiting for a child closes its input, which the daemon takes for the end of its supervisor.
        let alive = child.stdin.take();
        let stdout = child.stdout.take().ok_or_else(|| io::Error::other("the daemon has no output"))?;
        Ok(Daemon { child, _alive: alive, output: BufReader::new(stdout).lines() })
    }

    /// Waits for the end of a daemon, after its first message: that it serves, or why it cannot. Terminates the
    /// daemon on a stop signal, or if the message cannot be passed on.
    async fn serve(
        &mut self,
        mut daemon: Daemon,
        upgrades: &mut tokio::signal::unix::Signal,
    ) -> Result<DaemonOutcome> {
        let stop = self.context.stop.clone();
        let mut was_ready = false;
        let announced = tokio::select! {
            told = daemon.first_message() => told.and_then(|announcement| match announcement {
                None => Ok(()),
                Some(announcement) => {
                    was_ready = error_of(&announcement).is_none();
                    self.hear(&announcement)
                }
            }),
            () = stop.cancelled() => Ok(()),
        };
        while announced.is_ok() {
            tokio::select! {
                status = daemon.child.wait() => return Ok(DaemonOutcome { status: status?, was_ready }),
                Some(()) = upgrades.recv() => match self.replace().await {
                    Ok(Some(mut next)) => {
                        std::mem::swap(&mut daemon, &mut next);
                        was_ready = true;
                        // It has handed over, and ends.
                        let status = next.child.wait().await?;
                        tracing::info!(%status, "a daemon of the program's present file serves the mount");
                    }
                    Ok(None) => {}
                    Err(error) => {
                        let error = output::one_line(&error);
                        tracing::error!(error, "cannot replace the daemon of a mount; the present one goes on");
                    }
                },
                () = stop.cancelled() => break,
            }
        }
        daemon.terminate();
        let status = daemon.child.wait().await?;
        announced.map(|()| DaemonOutcome { status, was_ready })
    }

    /// Passes on the first message of a daemon.
    fn hear(&mut self, announcement: &serde_json::Value) -> Result<()> {
        if let Some(error) = error_of(announcement) {
            if !self.announced {
                tell_error(self.context.out, error);
            }
            return Ok(());
        }
        // Keep the announced address, also if the system chose the port.
        self.metrics = metrics_of(announcement).or(self.metrics);
        if !std::mem::replace(&mut self.announced, true) {
            let at = Path::new(announcement["mount"].as_str().unwrap_or_default());
            announce(
                self.context.out,
                &self.args.spec.to_string(),
                at,
                std::process::id(),
                metrics_of(announcement),
            )?;
            ready::notify_systemd();
        }
        Ok(())
    }

    /// Starts a daemon of the file that is at the path of this program now, and waits until it serves: the
    /// present one commits everything, hands over and ends. `None` after a stop signal.
    async fn replace(&mut self) -> Result<Option<Daemon>> {
        if self.holder.is_none() {
            return fail(
                Exit::Unavailable,
                "the mount has no holder, which takes Linux 6.9: unmount, and mount again",
            );
        }
        let path = match &self.program_path {
            Ok(path) => path.clone(),
            Err(error) => {
                return fail(Exit::Failed, format!("cannot find the file of this program: {error}"));
            }
        };
        let program = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
        let mut next = self.start(Some(&program), self.metrics)?;
        let stop = self.context.stop.clone();
        let told = tokio::select! {
            told = next.first_message() => told,
            () = stop.cancelled() => {
                next.terminate();
                next.child.wait().await?;
                return Ok(None);
            }
        };
        let refused = match told {
            Ok(Some(announcement)) => match error_of(&announcement) {
                None => {
                    self.hear(&announcement)?;
                    self.program = Some(program);
                    return Ok(Some(next));
                }
                Some(error) => error.to_owned(),
            },
            Ok(None) => "it ends without a word; its log says why".to_owned(),
            Err(error) => output::one_line(&error),
        };
        next.terminate();
        let status = next.child.wait().await?;
        fail(Exit::Failed, format!("a daemon of {} does not start ({status}): {refused}", path.display()))
    }

    /// Whether this process holds the mount.
    fn is_held(&self) -> Result<bool> {
        match &self.holder {
            Some(holder) => Ok(holder.is_attached(&self.at)?),
            None => Ok(false),
        }
    }

    /// Whether the mount is attached, with or without a daemon. Sends no request to a held mount: without a
    /// daemon that would block.
    fn is_attached(&self) -> Result<bool> {
        match &self.holder {
            Some(holder) => Ok(holder.is_attached(&self.at)?),
            None => Ok(mount::is_mounted(&self.at)?),
        }
    }

    /// Unmounts what a dead daemon has left.
    fn unmount(&self) {
        if !self.is_attached().is_ok_and(|attached| attached) {
            return;
        }
        let unmounted = match &self.holder {
            Some(holder) => holder.unmount(&self.at),
            None => mount::umount(&self.at),
        };
        if let Err(error) = unmounted {
            tracing::warn!(
                %error, path = %self.at.display(),
                "cannot unmount a dead mount; remove it with millrace umount"
            );
        }
    }
}

impl Daemon {
    /// The first message; `None` if it ends without one.
    async fn first_message(&mut self) -> Result<Option<serde_json::Value>> {
        match self.output.next_line().await? {
            Some(line) => Ok(Some(serde_json::from_str(&line)?)),
            None => Ok(None),
        }
    }

    fn terminate(&self) {
        if let Some(pid) = self.child.id() {
            // It may have just ended.
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGTERM);
        }
    }
}
