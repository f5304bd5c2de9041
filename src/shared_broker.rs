//! The temporary broker of a home: a separate process that commands share while no service runs.
//!
//! Every command that uses the embedded broker holds a shared lock on `topics.lock`. The first one starts the
//! broker process, which ends once no command holds that lock. No command waits for another.
#![allow(unsafe_code)]

use std::fs::{File, TryLockError};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use millrace_leaf::private;
use millrace_streams::broker::{self, Broker};
use tokio::io::AsyncBufReadExt as _;
use tokio_util::sync::CancellationToken;

use crate::context::Context;
use crate::failure::{Exit, fail};
use crate::output;

/// Interval at which a command checks whether a broker answers or has ended.
const POLL: Duration = Duration::from_millis(50);
/// Checks before a command tries again to start a broker.
const POLLS: u32 = 20;
/// Deadline for a broker to start or to end: both may read or flush large logs.
const WAIT_MAX: Duration = Duration::from_secs(60);
/// Interval at which a command checks for the successor of a broker.
const REJOIN_POLL: Duration = Duration::from_millis(200);
/// After this time, a command reports what it waits for.
const SILENT_MAX: Duration = Duration::from_secs(2);
/// Size at which the log of temporary brokers is truncated.
const LOG_BYTES_MAX: u64 = 1 << 20;

/// The log file of temporary brokers.
fn log_path(home: &Path) -> std::path::PathBuf {
    home.join("broker.log")
}

/// A command's share in the broker of its home; released when dropped, or when the process dies.
#[derive(Debug)]
pub(crate) struct BrokerShare {
    _lock: File,
}

/// The message of a broker process on its standard output.
enum BrokerReply {
    Ready,
    /// Another process holds the broker's lock.
    Held,
    Failed(Exit, String),
}

/// A wait with a deadline that reports its purpose after a while.
struct ReportedWait<'a> {
    context: &'a Context,
    what: &'a str,
    started: Instant,
    reported: bool,
}

impl<'a> ReportedWait<'a> {
    fn new(context: &'a Context, what: &'a str) -> Self {
        Self { context, what, started: Instant::now(), reported: false }
    }

    /// Waits for one interval; fails after [`WAIT_MAX`] or a signal.
    async fn step(&mut self) -> Result<()> {
        let waited = self.started.elapsed();
        if waited >= WAIT_MAX {
            return fail(
                Exit::Conflict,
                format!(
                    "waited {} s for {}; find the process that holds it, or use another home",
                    waited.as_secs(),
                    self.what
                ),
            );
        }
        if waited >= SILENT_MAX && !std::mem::replace(&mut self.reported, true) {
            self.context.out.note(&format!("waiting for {}", self.what));
        }
        match self.context.stop.run_until_cancelled(tokio::time::sleep(POLL)).await {
            Some(()) => Ok(()),
            None => fail(Exit::Failed, format!("interrupted while waiting for {}", self.what)),
        }
    }
}

/// Joins the broker of the home, and starts one if none runs.
pub(crate) async fn join(context: &Context) -> Result<(SocketAddr, BrokerShare)> {
    let home = context.home.root();
    let share = share(context, &home.join("topics.lock")).await?;
    let dir = broker::dir(home);
    let mut wait = ReportedWait::new(context, "the broker of this home to begin");
    loop {
        for _ in 0..POLLS {
            if let Some(address) = broker::running_address(&dir) {
                return Ok((address, share));
            }
            if !broker::is_held(&dir) {
                break;
            }
            wait.step().await?;
        }
        match start(context).await? {
            BrokerReply::Ready => {}
            // The other process may be about to publish its address.
            BrokerReply::Held => wait.step().await?,
            BrokerReply::Failed(exit, message) => return fail(exit, message),
        }
    }
}

/// Joins the successor of a lost broker. After a broker `of_service`, waits for another service as long as
/// necessary, since a temporary broker would keep it from starting. None when a signal ended the wait.
pub(crate) async fn rejoin(context: &Context, of_service: bool) -> Result<Option<(SocketAddr, BrokerShare)>> {
    let dir = broker::dir(context.home.root());
    let mut reported = false;
    loop {
        let is_running = broker::running_address(&dir).is_some();
        let is_there = match context.home.service() {
            // A service exists: wait for its broker, not for the temporary one whose end it awaits.
            Some(service) => is_running && broker::running_pid(&dir) == Some(service),
            None => is_running || !of_service,
        };
        if is_there {
            return join(context).await.map(Some);
        }
        if !std::mem::replace(&mut reported, true) {
            context
                .out
                .note("waiting for a service of this home (millrace up or millrace broker) and its broker");
        }
        if context.stop.run_until_cancelled(tokio::time::sleep(REJOIN_POLL)).await.is_none() {
            return Ok(None);
        }
    }
}

/// Whether the broker of the home still answers at that address.
pub(crate) fn answers_at(home: &Path, address: SocketAddr) -> bool {
    broker::running_address(&broker::dir(home)) == Some(address)
}

/// Takes a shared lock on the file. A broker that is ending holds it exclusively until it has ended.
async fn share(context: &Context, path: &Path) -> Result<BrokerShare> {
    let file = open(path)?;
    let mut wait = ReportedWait::new(context, "the temporary broker of this home to end");
    loop {
        match file.try_lock_shared() {
            Ok(()) => return Ok(BrokerShare { _lock: file }),
            Err(TryLockError::WouldBlock) => wait.step().await?,
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("cannot lock {}", path.display()));
            }
        }
    }
}

fn open(path: &Path) -> Result<File> {
    private::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {}", path.display()))
}

/// Starts a broker process and waits for its one line of output.
async fn start(context: &Context) -> Result<BrokerReply> {
    let home = context.home.root();
    // The running program, also after an upgrade has replaced its file.
    let mut command = std::process::Command::new("/proc/self/exe");
    command.arg("--home").arg(home).args(["--log", &context.log]);
    if let Some(file) = context.loaded.file_to_share()? {
        command.arg("--config").arg(file);
    }
    command
        .args(["broker", "--temporary"])
        // Terminal signals are for the command, not for the broker that other commands may use.
        .process_group(0)
        .current_dir(home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log(home).map_or_else(Stdio::null, Stdio::from));
    // SAFETY: close_range is a plain system call that touches no memory.
    unsafe {
        command.pre_exec(|| {
            // The broker outlives this command, so it must not inherit locks or pipes of the caller. Kernels
            // before 5.11 reject this call; inherited descriptors then stay open.
            nix::libc::syscall(nix::libc::SYS_close_range, 3u32, u32::MAX, nix::libc::CLOSE_RANGE_CLOEXEC);
            Ok(())
        });
    }
    let mut child = tokio::process::Command::from(command)
        .kill_on_drop(false)
        .spawn()
        .context("cannot start the process of the temporary broker")?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        let mut lines = tokio::io::BufReader::new(stdout);
        match context.stop.run_until_cancelled(lines.read_line(&mut line)).await {
            Some(read) => read.context("cannot read the output of the temporary broker")?,
            None => return fail(Exit::Failed, "interrupted while the temporary broker begins"),
        };
    }
    match line.trim_end() {
        "ready" => Ok(BrokerReply::Ready),
        "held" => Ok(BrokerReply::Held),
        message => {
            let exit = child.wait().await?.code().map_or(Exit::Failed, Exit::from_code);
            let message = match message {
                "" => format!("the temporary broker ended; its log is {}", log_path(home).display()),
                message => message.to_owned(),
            };
            Ok(BrokerReply::Failed(exit, message))
        }
    }
}

/// Opens the log file of the broker process; None when the disk is full.
fn log(home: &Path) -> Option<File> {
    let path = log_path(home);
    let begin_anew = path.metadata().is_ok_and(|found| found.len() > LOG_BYTES_MAX);
    let file = private::options().create(true).append(true).open(&path).ok()?;
    if begin_anew {
        file.set_len(0).ok()?;
    }
    Some(file)
}

/// Runs the broker process until no command uses it.
pub(crate) async fn serve(context: &Context) -> Result<()> {
    let home = context.home.root();
    let users = open(&home.join("topics.lock"))?;
    let mut config = context.loaded.settings.streams.broker.clone();
    config.listen.set_port(0);
    let broker = match Broker::start(config, &broker::dir(home), CancellationToken::new()).await {
        Ok(broker) => broker,
        Err(millrace_streams::Error::HeldByAnother { .. }) => return context.out.raw("held\n"),
        Err(error) => {
            let error = anyhow::Error::from(error);
            // The command that started this process reports the error, unless it has ended.
            context.out.raw(&format!("{}\n", output::one_line(&error))).ok();
            return Err(error);
        }
    };
    // The command that started this process may have ended; others may use the broker.
    context.out.raw("ready\n").ok();
    // Locked when no command holds it, until the broker has stopped.
    let (sender, alone) = tokio::sync::oneshot::channel();
    std::thread::Builder::new().name("users".into()).spawn(move || {
        let locked = users.lock();
        sender.send((users, locked)).ok();
    })?;
    // A signal does not end the broker while commands use it; a second one does. The sender cannot know the
    // users.
    let alone = alone.await;
    broker.stop().await?;
    drop(alone);
    Ok(())
}

/// Starts the broker of a service once no command uses the temporary one.
pub(crate) async fn start_for_service(context: &Context, config: broker::Config) -> Result<Broker> {
    let dir = broker::dir(context.home.root());
    let mut wait = ReportedWait::new(context, "commands of this home that use its temporary broker");
    loop {
        match Broker::start(config.clone(), &dir, CancellationToken::new()).await {
            Err(millrace_streams::Error::HeldByAnother { .. }) => wait.step().await?,
            other => return Ok(other?),
        }
    }
}
