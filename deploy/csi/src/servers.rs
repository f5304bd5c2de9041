//! The servers of published volumes: one `millrace mount` process for each target, started again whenever it dies.
//!
//! With a holder (`millrace holder`), a second start for a target is a planned handover, and a start after a crash
//! takes the mount over: pods see neither. Without one, the mount command supervises its own daemon.
//!
//! A driver that ends leaves the servers alone. Its successor finds their records, adopts those that run, and starts
//! the others again.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use millrace_leaf::backoff::Backoff;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader};
use tokio::process::{Child, ChildStdout, Command};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::metrics::{self, Source};
use crate::publication::{Locked, Process, Publication, Publications};
use crate::refusal::refused;
use crate::target;

/// Longest wait until a server has mounted: for a metadata server and a store that answer slowly.
const START_MAX: Duration = Duration::from_secs(60);
/// Longest wait for the end of a server whose mount is gone, before SIGTERM and before SIGKILL.
const END_MAX: Duration = Duration::from_millis(1_500);
/// Longest wait for `millrace umount`.
const UNMOUNT_MAX: Duration = Duration::from_secs(3);
/// First and longest pause between restarts. Short, because the programs of a held mount wait meanwhile.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// After this uptime, the end of a server counts as the first again.
const WELL_AFTER: Duration = Duration::from_secs(10);
/// Interval at which the driver looks whether an adopted server runs.
const LOOK: Duration = Duration::from_secs(1);
/// Interval of attempts to write the record of a restarted server that could not be written, as on a full disk.
const RECORD_EVERY: Duration = Duration::from_secs(2);
/// How long a new driver tries to take over the mounts of an earlier one, and the pause between its attempts.
const RECOVERY: (Duration, Duration) = (Duration::from_secs(120), Duration::from_secs(1));
/// Most mounts that a new driver takes over at the same time. One whose metadata server is silent takes one place.
const RECOVERED_TOGETHER: usize = 16;
/// Longest announcement of a server, in bytes.
const ANNOUNCEMENT_BYTES_MAX: u64 = 64 * 1024;
/// Variables that the server of a tenant's volume gets. Others may be credentials of the driver.
const VARIABLES: [&str; 7] =
    ["HOME", "PATH", "RUST_BACKTRACE", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ"];

/// How servers are started.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    /// The `millrace` program.
    pub(crate) program: PathBuf,
    /// The socket of the holder: `unix:///PATH`.
    pub(crate) holder: Option<String>,
    /// The log filter of the servers.
    pub(crate) log: Option<String>,
    /// Folder of the homes of tenants, whose servers get none of the driver's variables.
    pub(crate) tenants: PathBuf,
    /// Whether servers export their metrics to this driver.
    pub(crate) metrics: bool,
}

/// The servers of this driver.
#[derive(Debug)]
pub(crate) struct Servers {
    launch: Launch,
    /// The number of this driver process.
    driver: String,
    publications: Publications,
    keepers: Mutex<HashMap<PathBuf, Keeper>>,
    /// Cancelled when the driver ends.
    stop: CancellationToken,
}

/// The task that watches a server.
#[derive(Debug)]
struct Keeper {
    stop: CancellationToken,
    /// Cancelled when a server that dies shall have no successor.
    last: CancellationToken,
    /// The server that it watches. Changed only while the state of the target is locked.
    serving: Arc<Mutex<Process>>,
    task: tokio::task::JoinHandle<()>,
}

/// A server that was started after the death of another one.
#[derive(Debug)]
struct Successor {
    server: Server,
    /// The server that the record names: an earlier one, if the record could not be written.
    recorded: Process,
}

/// Kills a process that is still starting when the start is given up.
struct Starting(Option<u32>);

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            killpg(Pid::from_raw(pid as i32), Signal::SIGKILL).ok();
        }
    }
}

/// A running server.
#[derive(Debug)]
enum Server {
    /// A child of this process. Its output stays open, since it may write there.
    Own(Box<Child>, #[expect(dead_code, reason = "held open")] Option<BufReader<ChildStdout>>),
    /// A child of an earlier driver.
    Adopted(Process),
}

impl Server {
    /// Waits for its end.
    async fn ended(&mut self) -> Option<ExitStatus> {
        match self {
            Server::Own(child, _) => child.wait().await.ok(),
            Server::Adopted(process) => {
                while process.is_alive() {
                    tokio::time::sleep(LOOK).await;
                }
                None
            }
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = match self {
            // None once it was waited for.
            Server::Own(child, _) => child.id(),
            Server::Adopted(process) => process.is_alive().then_some(process.pid),
        };
        if let Some(pid) = pid {
            let pid = Pid::from_raw(pid as i32);
            // Each server leads a process group, with its supervised daemon in another one.
            let sent = if signal == Signal::SIGKILL { killpg(pid, signal) } else { kill(pid, signal) };
            if let Err(error) = sent {
                tracing::debug!(%pid, %error, "cannot signal the server of a mount");
            }
        }
    }

    /// Ends it: its mount is gone already, so that it usually ends without a signal.
    async fn end(&mut self) {
        for signal in [Signal::SIGTERM, Signal::SIGKILL] {
            if timeout(END_MAX, self.ended()).await.is_ok() {
                return;
            }
            self.signal(signal);
        }
        if timeout(END_MAX, self.ended()).await.is_err() {
            tracing::warn!(server = ?self, "the server of a mount does not end");
        }
    }
}

impl Servers {
    /// The servers of the targets in `publications`.
    ///
    /// # Errors
    /// Those of drawing a random number.
    pub(crate) fn new(
        launch: Launch,
        publications: Publications,
        stop: CancellationToken,
    ) -> std::io::Result<Arc<Servers>> {
        let driver = format!("{:016x}", millrace_leaf::random::id()?);
        Ok(Arc::new(Servers { launch, driver, publications, keepers: Mutex::default(), stop }))
    }

    /// The state of published volumes.
    pub(crate) fn publications(&self) -> &Publications {
        &self.publications
    }

    /// Whether a new server takes over from an old one without a trace.
    pub(crate) fn hands_over(&self) -> bool {
        self.launch.holder.is_some()
    }

    /// The published volumes of this driver, for a scrape. Reads files.
    pub(crate) fn sources(&self) -> Vec<Source> {
        let own = self.publications.all().into_iter().filter(|publication| publication.driver == self.driver);
        own.map(|publication| Source {
            is_serving: publication.server.is_some_and(Process::is_alive),
            socket: self.publications.metrics_socket(&publication.target),
            volume_id: publication.volume_id,
            target: publication.target,
        })
        .collect()
    }

    /// Whether a server for a target runs, or is being started again.
    pub(crate) fn is_kept(&self, target: &Path) -> bool {
        self.keepers.lock().get(target).is_some_and(|keeper| !keeper.task.is_finished())
    }

    /// The record of a target with the server that runs. The record of a restarted server may not have been written.
    pub(crate) fn current(&self, found: Publication) -> Publication {
        if found.driver != self.driver {
            return found;
        }
        let keepers = self.keepers.lock();
        let keeper = keepers.get(&found.target).filter(|keeper| !keeper.task.is_finished());
        let serving = keeper.map(|keeper| *keeper.serving.lock());
        Publication { server: serving.or(found.server), ..found }
    }

    /// Whether the server of a target runs and its mount is there.
    ///
    /// # Errors
    /// `UNAVAILABLE` while the server is being started again and nothing is mounted: a pod would get the bare folder.
    pub(crate) async fn is_serving(&self, at: &Path) -> Result<bool, Status> {
        if !self.is_kept(at) {
            return Ok(false);
        }
        if blocking(at, target::is_mounted).await? {
            return Ok(true);
        }
        Err(refused(
            Code::Unavailable,
            format!("the server of {} died and is being started again: retry", at.display()),
        ))
    }

    /// Starts the server of a target and waits until it serves. Then records it, and keeps it running. With a holder,
    /// a server that runs already hands its mount over and ends.
    ///
    /// # Errors
    /// What the server says, with a code for its exit code.
    pub(crate) async fn start(
        self: &Arc<Self>,
        locked: &Locked,
        publication: &Publication,
    ) -> Result<(), Status> {
        let server = self.launch(locked, publication).await?;
        self.record(locked, publication, server)
    }

    fn record(
        self: &Arc<Self>,
        locked: &Locked,
        publication: &Publication,
        server: Server,
    ) -> Result<(), Status> {
        let process = match &server {
            Server::Own(child, _) => child.id().and_then(Process::of),
            Server::Adopted(process) => Some(*process),
        };
        let Some(process) = process else {
            return Err(refused(
                Code::Unavailable,
                format!(
                    "the server of {} ended as soon as it had mounted; its log says why",
                    publication.spec
                ),
            ));
        };
        let recorded =
            Publication { server: Some(process), driver: self.driver.clone(), ..publication.clone() };
        locked.write(&recorded)?;
        let (at, stop, last) =
            (publication.target.clone(), self.stop.child_token(), CancellationToken::new());
        let serving = Arc::new(Mutex::new(process));
        let watched = Arc::clone(&serving);
        let keep = Arc::clone(self).keep(at.clone(), watched, server, stop.clone(), last.clone());
        self.keepers.lock().insert(at, Keeper { stop, last, serving, task: tokio::spawn(keep) });
        Ok(())
    }

    /// Starts a process and waits for its announcement.
    async fn launch(&self, locked: &Locked, publication: &Publication) -> Result<Server, Status> {
        let attempt = format!("mount {} at {}", publication.spec, publication.target.display());
        locked.fit_config()?;
        let mut command = Command::new(&self.launch.program);
        // What process lists show for the running program's link.
        command.arg0("millrace").args(self.arguments(locked, publication));
        if publication.home.starts_with(&self.launch.tenants) {
            command.env_clear();
            command.envs(VARIABLES.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        }
        // Signals for the driver's group do not reach it, and it outlives the driver.
        command.env_remove("NOTIFY_SOCKET").process_group(0).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| {
            let program = self.launch.program.display();
            refused(Code::Internal, format!("cannot {attempt}: cannot start {program}: {error}"))
        })?;
        let mut starting = Starting(child.id());
        let Some(stdout) = child.stdout.take() else {
            return Err(refused(Code::Internal, format!("cannot {attempt}: the server has no output")));
        };
        let mut output = BufReader::new(stdout);
        let mut line = String::new();
        let told = timeout(START_MAX, (&mut output).take(ANNOUNCEMENT_BYTES_MAX).read_line(&mut line)).await;
        let announcement: serde_json::Value = match &told {
            Ok(Ok(_)) => serde_json::from_str(&line).unwrap_or_default(),
            Ok(Err(_)) | Err(_) => serde_json::Value::Null,
        };
        if announcement["mount"].is_string() {
            starting.0 = None;
            return Ok(Server::Own(Box::new(child), Some(output)));
        }
        let mut server = Server::Own(Box::new(child), Some(output));
        if told.is_err() {
            server.signal(Signal::SIGTERM);
        }
        let status = timeout(END_MAX, server.ended()).await;
        if status.is_err() {
            server.end().await;
        }
        starting.0 = None;
        let reason = match announcement["error"].as_str() {
            Some(error) => error.to_owned(),
            None if told.is_err() => format!("the server has not mounted it for {} s", START_MAX.as_secs()),
            None => "the server ended without a word; its log says why".to_owned(),
        };
        let code = match status {
            Ok(Some(status)) if told.is_ok() => code_of(status.code()),
            _ => Code::Unavailable,
        };
        Err(refused(code, format!("cannot {attempt}: {reason}")))
    }

    /// The command line of a server. No secret is part of it.
    fn arguments(&self, locked: &Locked, publication: &Publication) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["--json".into()];
        if let Some(log) = &self.launch.log {
            arguments.extend(["--log".into(), log.into()]);
        }
        arguments.extend(["--home".into(), publication.home.clone().into()]);
        arguments.extend(["--config".into(), locked.config().into()]);
        arguments.extend(["mount".into(), publication.spec.to_string().into()]);
        arguments.extend([publication.target.clone().into(), "--tell-errors".into(), "--allow-other".into()]);
        match &self.launch.holder {
            Some(holder) => arguments.extend(["--holder".into(), holder.into()]),
            None => arguments.push("--supervise".into()),
        }
        let flags = &publication.flags;
        arguments.extend(flags.read_only.then(|| "--read-only".into()));
        arguments.extend(flags.noexec.then(|| "--noexec".into()));
        if let Some(open) = &flags.open {
            arguments.extend(["--open".into(), open.into()]);
        }
        if self.launch.metrics {
            arguments.extend(["--metrics-socket".into(), locked.metrics_socket().into()]);
        }
        arguments
    }

    /// Watches a server, and starts its successor, until the target is unpublished or belongs to another driver.
    async fn keep(
        self: Arc<Self>,
        at: PathBuf,
        serving: Arc<Mutex<Process>>,
        mut server: Server,
        stop: CancellationToken,
        last: CancellationToken,
    ) {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let mut recorded = *serving.lock();
        loop {
            let started = tokio::time::Instant::now();
            let process = *serving.lock();
            let status = loop {
                tokio::select! {
                    status = server.ended() => break status,
                    () = stop.cancelled() => {
                        if !self.stop.is_cancelled() {
                            server.end().await;
                        }
                        return;
                    }
                    () = tokio::time::sleep(RECORD_EVERY), if recorded != process => {
                        match self.record_again(&at, [recorded, process]) {
                            Ok(()) => recorded = process,
                            Err(refused) => tracing::debug!(
                                path = %at.display(), error = refused.message(),
                                "cannot record the restarted server of a mount yet"
                            ),
                        }
                    }
                }
            };
            if started.elapsed() >= WELL_AFTER {
                backoff.reset();
            }
            loop {
                let pause = backoff.pause();
                let restarted = tokio::select! {
                    restarted = async {
                        tokio::time::sleep(pause).await;
                        self.restart(&at, recorded, &serving).await
                    } => restarted,
                    () = stop.cancelled() => return,
                    () = last.cancelled() => return,
                };
                match restarted {
                    Ok(Some(successor)) => {
                        metrics::RESTARTS.inc();
                        tracing::error!(
                            path = %at.display(), status = ?status, pause_ms = pause.as_millis() as u64,
                            "the server of a mount died and was started again"
                        );
                        (recorded, server) = (successor.recorded, successor.server);
                        break;
                    }
                    Ok(None) => return,
                    // A call for the target is running.
                    Err(refused) if refused.code() == Code::Aborted => {}
                    Err(refused) => {
                        tracing::error!(
                            path = %at.display(), status = ?status, error = refused.message(),
                            "the server of a mount died and cannot be started again yet"
                        );
                    }
                }
            }
        }
    }

    /// Whether this driver is responsible for a target whose record names one of these servers.
    fn is_responsible(&self, publication: &Publication, known: [Process; 2]) -> bool {
        publication.driver == self.driver && publication.server.is_some_and(|server| known.contains(&server))
    }

    /// Writes the record of the second server, if this driver is still responsible for the target.
    fn record_again(&self, at: &Path, known: [Process; 2]) -> Result<(), Status> {
        let locked = self.publications.lock(at)?;
        match locked.read()? {
            Some(found) if self.is_responsible(&found, known) => {
                locked.write(&Publication { server: Some(known[1]), ..found })
            }
            _ => Ok(()),
        }
    }

    /// Starts the successor of a server that died, if this driver is still responsible for it. The record names the server
    /// that died, or `recorded`.
    async fn restart(
        &self,
        at: &Path,
        recorded: Process,
        serving: &Mutex<Process>,
    ) -> Result<Option<Successor>, Status> {
        let locked = self.publications.lock(at)?;
        let Some(publication) = locked.read()? else { return Ok(None) };
        let known = [recorded, *serving.lock()];
        if !self.is_responsible(&publication, known) {
            return Ok(None);
        }
        let server = self.launch(&locked, &publication).await?;
        let Server::Own(child, _) = &server else { return Ok(None) };
        let Some(process) = child.id().and_then(Process::of) else {
            return Err(refused(Code::Unavailable, "the server ended as soon as it had mounted".into()));
        };
        *serving.lock() = process;
        let recorded = match locked.write(&Publication { server: Some(process), ..publication }) {
            Ok(()) => process,
            Err(refused) => {
                // The server serves. Another attempt would leave one more, as long as the disk is full.
                tracing::error!(path = %at.display(), error = refused.message(), "cannot record the server of a mount yet");
                // The record may be written, and its name not durable.
                locked.read().ok().flatten().and_then(|found| found.server).unwrap_or(recorded)
            }
        };
        Ok(Some(Successor { server, recorded }))
    }

    /// Gives up a restart that is under way for a target, which would keep it locked while its metadata server does not
    /// answer.
    pub(crate) fn restart_no_more(&self, at: &Path) {
        if let Some(keeper) = self.keepers.lock().get(at) {
            keeper.last.cancel();
        }
    }

    /// Removes the mount of a target and ends its server, within 5 seconds.
    ///
    /// # Errors
    /// When the mount cannot be removed; the server then goes on.
    pub(crate) async fn end(&self, at: &Path, recorded: Option<Process>) -> Result<(), Status> {
        self.unmount(at).await?;
        let keeper = self.keepers.lock().remove(at);
        match keeper {
            Some(keeper) => {
                keeper.stop.cancel();
                if let Err(error) = keeper.task.await {
                    tracing::warn!(%error, "the task of a mount's server ended early");
                }
            }
            None => {
                if let Some(process) = recorded.filter(|process| process.is_alive()) {
                    Server::Adopted(process).end().await;
                }
            }
        }
        Ok(())
    }

    /// Removes the mounts at a target. With a holder, this process may not unmount, and the holder does.
    async fn unmount(&self, at: &Path) -> Result<(), Status> {
        let Some(holder) = &self.launch.holder else { return blocking(at, target::detach).await };
        if !blocking(at, target::is_mounted).await? {
            return Ok(());
        }
        let mut command = Command::new(&self.launch.program);
        command.arg("umount").arg(at).arg("--holder").arg(holder);
        let ran = timeout(UNMOUNT_MAX, command.stdin(Stdio::null()).kill_on_drop(true).output()).await;
        if !blocking(at, target::is_mounted).await? {
            return Ok(());
        }
        let reason = match ran {
            Ok(Ok(output)) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("the holder has not answered for {} s", UNMOUNT_MAX.as_secs()),
        };
        Err(refused(Code::Internal, format!("cannot unmount {}: {reason}", at.display())))
    }

    /// Takes over what an earlier driver published: adopts servers that run, and starts the others again. What fails
    /// is tried again, since the holder may be replaced at the same time.
    pub(crate) async fn recover(self: Arc<Self>) {
        let until = tokio::time::Instant::now() + RECOVERY.0;
        let mut waiting = self.publications.all();
        loop {
            let (places, mut tries) = (Arc::new(Semaphore::new(RECOVERED_TOGETHER)), JoinSet::new());
            for publication in waiting {
                let (servers, places) = (Arc::clone(&self), Arc::clone(&places));
                tries.spawn(async move {
                    // The semaphore is never closed.
                    let _place = places.acquire().await;
                    if servers.stop.is_cancelled() {
                        return None;
                    }
                    let recovered = servers.recover_one(&publication.target).await;
                    Some((publication, recovered))
                });
            }
            let mut failed = Vec::new();
            while let Some(tried) = tries.join_next().await {
                let (publication, recovered) = match tried {
                    Ok(Some(tried)) => tried,
                    Ok(None) => continue,
                    Err(error) => {
                        tracing::error!(%error, "the work of taking over a published volume ended early");
                        continue;
                    }
                };
                let at = publication.target.display().to_string();
                match recovered {
                    Ok(()) => {
                        tracing::info!(path = %at, volume = %publication.volume_id, "a published volume was taken over")
                    }
                    Err(refused) => {
                        tracing::error!(path = %at, error = refused.message(), "cannot take over a published volume yet");
                        failed.push(publication);
                    }
                }
            }
            if failed.is_empty() || self.stop.is_cancelled() {
                return;
            }
            if tokio::time::Instant::now() >= until {
                // The kubelet's next call for each of them does it.
                tracing::error!(
                    volumes = failed.len(),
                    "some published volumes were not taken over: their errors are above"
                );
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(RECOVERY.1) => {}
                () = self.stop.cancelled() => return,
            }
            waiting = failed;
        }
    }

    async fn recover_one(self: &Arc<Self>, at: &Path) -> Result<(), Status> {
        if self.is_kept(at) {
            return Ok(());
        }
        let locked = self.publications.lock(at)?;
        let Some(publication) = locked.read()? else { return Ok(()) };
        self.resume(&locked, &publication).await
    }

    /// Takes over one published volume.
    pub(crate) async fn resume(
        self: &Arc<Self>,
        locked: &Locked,
        publication: &Publication,
    ) -> Result<(), Status> {
        let is_mounted = blocking(&publication.target, target::is_mounted).await?;
        let alive = match publication.server.filter(|process| process.is_alive()) {
            // The driver before may not have written the record of the server.
            None if is_mounted => blocking(&locked.config(), |config| Ok(Process::serving(config))).await?,
            alive => alive,
        };
        match alive {
            Some(process) if is_mounted => self.record(locked, publication, Server::Adopted(process)),
            alive => {
                if let Some(process) = alive {
                    // It serves nothing.
                    Server::Adopted(process).end().await;
                }
                if !self.hands_over() {
                    // Without space for the record, each attempt would leave one more server.
                    locked.write(publication)?;
                }
                self.start(locked, publication).await
            }
        }
    }
}

#[cfg(test)]
impl Servers {
    /// Pretends that a server of a target runs. The token is cancelled when it shall have no successor.
    pub(crate) fn keep_none(&self, at: &Path) -> CancellationToken {
        let last = CancellationToken::new();
        let task = tokio::spawn(std::future::pending());
        let serving = Arc::new(Mutex::new(Process { pid: 0, started: 0 }));
        let keeper = Keeper { stop: CancellationToken::new(), last: last.clone(), serving, task };
        self.keepers.lock().insert(at.to_owned(), keeper);
        last
    }
}

/// Runs a check of a path that may block on a dead mount.
async fn blocking<T: Send + 'static>(
    at: &Path,
    work: impl FnOnce(&Path) -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    let at = at.to_owned();
    let done = tokio::task::spawn_blocking(move || work(&at)).await;
    done.map_err(|error| refused(Code::Internal, format!("the work of the call ended early: {error}")))?
}

/// The code for the exit code of `millrace mount`, which its help documents.
fn code_of(exit: Option<i32>) -> Code {
    match exit {
        Some(2 | 4) => Code::FailedPrecondition,
        Some(3) => Code::NotFound,
        Some(5) => Code::Unavailable,
        Some(6) => Code::DataLoss,
        Some(7) => Code::ResourceExhausted,
        _ => Code::Internal,
    }
}

#[cfg(test)]
mod tests;
