//! A node: starts the processes of its rounds as the coordinator orders, and ends them.
//!
//! The same code runs in the coordinator's process, for its own machine, and in `millrace worker --join`. When the
//! coordinator is lost, or the node is asked to leave, its processes end first: SIGTERM, then SIGKILL after the grace
//! period, then all that they have started and left behind.
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use millrace_leaf::{blocking, random};
use nix::sys::signal::Signal;
use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::keeper::{ENV_MARK, Keeper, sweep, sweep_earlier};
use super::launch::ENV_LAUNCH;
use super::layout::{Layout, Place, is_of_other_launcher};
use super::messages::{Ended, Exit, Order, Program, Report};
use super::process::{Destination, Groups, Launcher, OutputLine, kill_left, lock, signal, start};
use super::program::Runnable;
use crate::error::{Error, Result};
use crate::launch::WorkerCommand;

/// Lines of output that wait for a slow terminal before the processes do.
const LINES_QUEUED: usize = 1024;
/// How long no line may be printed at the end, and how long the last lines may take together: a terminal or a program
/// behind a pipe may be slow.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);
const OUTPUT_TIME_MAX: Duration = Duration::from_secs(20);
/// How long processes may take to end after SIGKILL.
pub(crate) const KILL_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a round waits for output of processes that were left behind, after they were killed.
const LATE_OUTPUT: Duration = Duration::from_millis(250);
/// How long the keeper may take to end.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(3);
/// Keepers that are started again for one node.
const KEEPERS_MAX: u32 = 100;
/// Ports that a round may ask for.
const PORTS_MAX: usize = 4096;

/// Takes the output of the processes, line by line. It may block.
pub type OutputSink = Arc<dyn Fn(OutputLine) + Send + Sync>;

/// What a node needs of its own machine.
#[derive(Clone)]
pub struct NodeSettings {
    /// The command that starts a keeper; must end in [`crate::script::keep`].
    pub keeper: WorkerCommand,
    /// Variables for the processes, beside those that they inherit.
    pub environment: Vec<(String, String)>,
    /// The folder of log files; without one, output goes to `output`.
    pub log_dir: Option<PathBuf>,
    /// Where lines of output go.
    pub output: OutputSink,
}

impl fmt::Debug for NodeSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NodeSettings").field("log_dir", &self.log_dir).finish_non_exhaustive()
    }
}

/// How a node's part ended.
#[derive(Debug)]
pub(crate) enum Ending {
    /// The job is over: in order, or with this error.
    Done(Option<String>),
    /// This node was asked to leave.
    Left,
    /// The coordinator is gone.
    Lost,
    /// This node cannot run the script.
    Unfit(Error),
}

/// Takes part in a job until it is over, `leave` is cancelled or the coordinator is gone.
///
/// # Errors
/// [`Error::Io`] when no keeper or thread can be started.
pub(crate) async fn serve(
    settings: NodeSettings,
    orders: mpsc::Receiver<Order>,
    reports: mpsc::Sender<Report>,
    leave: CancellationToken,
) -> Result<Ending> {
    let secret = random::bytes::<16>().map_err(|e| Error::io(format!("read {}", random::SOURCE), e))?;
    let mark = hex::encode(secret);
    let keeper = Keeper::start(&settings.keeper, &mark)?;
    let launcher = Launcher::start(tokio::runtime::Handle::current())
        .map_err(|e| Error::io("start the thread that starts processes", e))?;
    let (sink, mut lines) = mpsc::channel::<OutputLine>(LINES_QUEUED);
    let (told, printed) = oneshot::channel::<()>();
    let output = Arc::clone(&settings.output);
    let count = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&count);
    let printer = move || {
        while let Some(line) = lines.blocking_recv() {
            output(line);
            counted.fetch_add(1, Ordering::Relaxed);
        }
        drop(told);
    };
    std::thread::Builder::new()
        .name("output".to_owned())
        .spawn(printer)
        .map_err(|e| Error::io("start the thread for output", e))?;
    let mut node = Agent {
        settings,
        mark,
        keeper,
        keepers: 1,
        launcher,
        sink,
        reports,
        program: None,
        group: None,
        late: Vec::new(),
        ending: None,
    };
    let ending = node.run(orders, &leave).await;
    let Agent { keeper, sink, launcher, late, .. } = node;
    drop(sink);
    let all = all_printed(printed, &count);
    if !matches!(tokio::time::timeout(OUTPUT_TIME_MAX, all).await, Ok(true)) {
        tracing::warn!("the wait for output is over: lines may be missing");
    }
    for task in late {
        task.abort();
    }
    keeper.end(KEEPER_TIMEOUT).await;
    drop(launcher);
    Ok(ending)
}

/// Waits until the printer has ended. False when it has not, and prints nothing any more.
async fn all_printed(mut printed: oneshot::Receiver<()>, count: &AtomicU64) -> bool {
    loop {
        let before = count.load(Ordering::Relaxed);
        if tokio::time::timeout(OUTPUT_TIMEOUT, &mut printed).await.is_ok() {
            return true;
        }
        if count.load(Ordering::Relaxed) == before {
            return false;
        }
    }
}

/// The processes of a round.
struct Group {
    round: u64,
    processes: JoinSet<(Ended, Vec<JoinHandle<()>>)>,
    groups: Groups,
    /// When they were asked to end.
    asked: Arc<OnceLock<std::time::Instant>>,
    /// When they are killed, and then when the wait for them ends.
    deadline: Option<Instant>,
    is_killed: bool,
    /// Tasks that pass on output of processes that were left behind.
    late: Vec<JoinHandle<()>>,
}

impl Group {
    /// The process of a place could not be started.
    fn fail(&mut self, place: Place, reason: &str, is_final: bool, began: std::time::Instant) {
        let exit = Exit::Failed(format!("could not be started: {reason}"));
        let at_ms = began.elapsed().as_millis() as u64;
        let ended = Ended { place, pid: 0, exit, at_ms, was_asked: false, is_final, lines: Vec::new() };
        self.processes.spawn(async move { (ended, Vec::new()) });
    }
}

struct Agent {
    settings: NodeSettings,
    mark: String,
    keeper: Keeper,
    keepers: u32,
    launcher: Launcher,
    sink: mpsc::Sender<OutputLine>,
    reports: mpsc::Sender<Report>,
    program: Option<Program>,
    group: Option<Group>,
    /// Tasks of rounds that have ended, which still pass on output to a slow terminal.
    late: Vec<JoinHandle<()>>,
    /// What follows when the processes have ended.
    ending: Option<Ending>,
}

impl Agent {
    async fn run(&mut self, mut orders: mpsc::Receiver<Order>, leave: &CancellationToken) -> Ending {
        loop {
            if self.group.is_none()
                && let Some(ending) = self.ending.take()
            {
                return ending;
            }
            let (processes, deadline) = match &mut self.group {
                Some(group) => (Some(&mut group.processes).filter(|all| !all.is_empty()), group.deadline),
                None => (None, None),
            };
            let is_asked = deadline.is_some();
            tokio::select! {
                order = orders.recv(), if self.ending.is_none() => match order {
                    Some(order) => self.obey(order).await,
                    None => self.end(Ending::Lost),
                },
                Some(ended) = async { match processes { Some(all) => all.join_next().await, None => std::future::pending().await } } => {
                    self.ended(ended).await;
                }
                () = async { match deadline { Some(at) => tokio::time::sleep_until(at).await, None => std::future::pending().await } }, if is_asked => {
                    self.kill();
                }
                () = leave.cancelled(), if self.ending.is_none() => {
                    // The other nodes end their processes at the same time.
                    self.report(Report::Leaving).await;
                    self.end(Ending::Left);
                }
                status = self.keeper.died() => self.replace_keeper(&status),
            }
            self.finish_round().await;
        }
    }

    /// Ends the processes, then the part of this node.
    fn end(&mut self, ending: Ending) {
        self.ending = Some(ending);
        self.ask();
    }

    async fn obey(&mut self, order: Order) {
        match order {
            Order::Introduce(program) => {
                let own = program.clone();
                let checked = blocking::run(move || {
                    let left = sweep_earlier(&own.launch);
                    if left > 0 {
                        tracing::warn!(
                            left,
                            "killed processes of an earlier run of the job: its keeper was killed, too"
                        );
                    }
                    Runnable::of(&own)
                });
                let checked = checked.await;
                match checked {
                    Ok(Ok(_)) => {
                        self.program = Some(*program);
                        self.report(Report::Ready).await;
                    }
                    Ok(Err(error)) => {
                        self.report(Report::Unfit { reason: error.one_line() }).await;
                        self.end(Ending::Unfit(error));
                    }
                    Err(_) => self.end(Ending::Lost),
                }
            }
            Order::Prepare { round, ports } => {
                let ports = free_ports(ports.min(PORTS_MAX)).unwrap_or_else(|error| {
                    tracing::error!(%error, "no free port");
                    Vec::new()
                });
                if !ports.is_empty() {
                    self.report(Report::Prepared { round, ports }).await;
                }
            }
            Order::Start { layout, node } if self.group.is_none() => self.start(&layout, node).await,
            Order::Start { layout, .. } => {
                tracing::error!(round = layout.round, "a round starts before the last one has ended");
                self.end(Ending::Lost);
            }
            Order::Stop { round } => match &self.group {
                Some(group) if group.round == round => self.ask(),
                _ => self.report(Report::Stopped { round }).await,
            },
            Order::Done { error } => self.end(Ending::Done(error)),
        }
    }

    async fn start(&mut self, layout: &Layout, node: usize) {
        let Some(program) = self.program.clone() else { return self.end(Ending::Lost) };
        // The file may have changed since the round before.
        let own = program.clone();
        let Ok(runnable) = blocking::run(move || Runnable::again(&own)).await else {
            return self.end(Ending::Lost);
        };
        let mut group = Group {
            round: layout.round,
            processes: JoinSet::new(),
            groups: Groups::default(),
            asked: Arc::default(),
            deadline: None,
            is_killed: false,
            late: Vec::new(),
        };
        let began = std::time::Instant::now();
        let places = layout.places(node);
        let workers = layout.nodes.get(node).map_or(1, |own| own.workers.max(1) as usize);
        for place in places {
            let runnable = match &runnable {
                Ok(runnable) => runnable,
                Err(unstartable) => {
                    group.fail(place, &unstartable.reason, unstartable.is_final, began);
                    break;
                }
            };
            let mut command = runnable.command();
            for (name, _) in std::env::vars_os() {
                if name.to_str().is_some_and(is_of_other_launcher) {
                    command.env_remove(name);
                }
            }
            if workers > 1 && std::env::var_os("OMP_NUM_THREADS").is_none() {
                let processors = std::thread::available_parallelism().map_or(1, usize::from);
                command.env("OMP_NUM_THREADS", (processors / workers).max(1).to_string());
            }
            command
                .envs(self.settings.environment.iter().map(|(name, value)| (name, value)))
                .envs(layout.environment(node, place))
                .env("MILLRACE_RUN_VOLUME", &program.volume)
                .env(ENV_LAUNCH, program.launch.value())
                .env(ENV_MARK, &self.mark);
            if let Some(dataset) = &program.dataset {
                command.env("MILLRACE_DATASET", dataset);
            }
            let destination = match &self.settings.log_dir {
                None => Ok(Destination::Lines(self.sink.clone())),
                Some(folder) => log_file(folder, layout, &place.label()).map(Destination::File),
            };
            let started = match destination {
                Ok(destination) => start(&self.launcher, command, place, destination, &group.groups).await,
                Err(error) => Err(error),
            };
            match started {
                Ok(started) => {
                    self.keeper.add(started.pid);
                    group.processes.spawn(started.wait(
                        began,
                        Arc::clone(&group.asked),
                        Arc::clone(&group.groups),
                    ));
                }
                Err(error) => {
                    group.fail(place, &error.to_string(), false, began);
                    break;
                }
            }
        }
        self.group = Some(group);
    }

    async fn ended(
        &mut self,
        ended: std::result::Result<(Ended, Vec<JoinHandle<()>>), tokio::task::JoinError>,
    ) {
        let Some(group) = &mut self.group else { return };
        match ended {
            Ok((ended, late)) => {
                group.late.extend(late);
                if ended.pid > 0 && !lock(&group.groups).has(ended.pid as i32) {
                    self.keeper.remove(ended.pid);
                }
                let round = group.round;
                self.report(Report::Exited { round, ended }).await;
            }
            // The wait was given up.
            Err(error) if error.is_cancelled() => {}
            Err(error) => {
                tracing::error!(%error, "the wait for a process failed");
                self.end(Ending::Lost);
            }
        }
    }

    /// Asks the processes to end.
    fn ask(&mut self) {
        let Some(group) = &mut self.group else { return };
        if group.deadline.is_none() {
            let grace = self.program.as_ref().map_or(0, |program| program.grace_ms);
            let _ = group.asked.set(std::time::Instant::now());
            group.deadline = Some(Instant::now() + Duration::from_millis(grace));
            signal(&group.groups, Signal::SIGTERM);
        }
    }

    /// The deadline has passed.
    fn kill(&mut self) {
        let Some(group) = &mut self.group else { return };
        if group.is_killed {
            tracing::error!(round = group.round, "processes have not ended after SIGKILL and are left");
            group.processes.abort_all();
            group.deadline = Some(Instant::now() + KILL_TIMEOUT);
            return;
        }
        tracing::warn!(round = group.round, "processes did not end within the grace period and are killed");
        signal(&group.groups, Signal::SIGKILL);
        group.is_killed = true;
        group.deadline = Some(Instant::now() + KILL_TIMEOUT);
    }

    /// Ends a round whose processes were asked to end and have ended.
    async fn finish_round(&mut self) {
        match &self.group {
            Some(group) if group.deadline.is_some() && group.processes.is_empty() => {}
            _ => return,
        }
        let Some(group) = self.group.take() else { return };
        kill_left(&group.groups);
        let mark = self.mark.clone();
        match blocking::run(move || sweep(&mark)).await {
            Ok(0) | Err(_) => {}
            Ok(left) => tracing::info!(round = group.round, left, "killed processes that were left behind"),
        }
        self.keeper.clear();
        let until = Instant::now() + LATE_OUTPUT;
        for mut task in group.late {
            if tokio::time::timeout_at(until, &mut task).await.is_err() {
                self.late.push(task);
            }
        }
        self.report(Report::Stopped { round: group.round }).await;
    }

    /// A coordinator that is gone needs no report.
    async fn report(&self, report: Report) {
        drop(self.reports.send(report).await);
    }

    fn replace_keeper(&mut self, status: &std::io::Result<std::process::ExitStatus>) {
        self.keepers += 1;
        if self.keepers > KEEPERS_MAX {
            tracing::error!(?status, "the keeper of this node's processes dies again and again");
            return self.end(Ending::Lost);
        }
        tracing::warn!(?status, "the keeper of this node's processes died and is started again");
        match Keeper::start(&self.settings.keeper, &self.mark) {
            Ok(keeper) => {
                self.keeper = keeper;
                if let Some(group) = &self.group {
                    for leader in lock(&group.groups).all() {
                        self.keeper.add(leader as u32);
                    }
                }
            }
            Err(error) => {
                tracing::error!(error = error.one_line(), "no keeper for this node's processes");
                self.end(Ending::Lost);
            }
        }
    }
}

/// The log file of a process: `DIR/JOB-RUN/round-N/LABEL.log`.
fn log_file(folder: &std::path::Path, layout: &Layout, label: &str) -> std::io::Result<PathBuf> {
    let run: String = layout.run.chars().take(12).collect();
    let folder = folder.join(format!("{}-{run}", layout.job)).join(format!("round-{}", layout.round));
    std::fs::create_dir_all(&folder)
        .map_err(|e| std::io::Error::new(e.kind(), format!("create {}: {e}", folder.display())))?;
    Ok(folder.join(format!("{label}.log")))
}

/// Ports of this machine that are free now. Another program may take one before a process of the round does, which
/// then fails, and the next round has others.
fn free_ports(count: usize) -> std::io::Result<Vec<u16>> {
    let any = |ip: std::net::IpAddr| TcpListener::bind(SocketAddr::new(ip, 0));
    let bind = || any(Ipv6Addr::UNSPECIFIED.into()).or_else(|_| any(Ipv4Addr::UNSPECIFIED.into()));
    // All are held until the last one is known: no port is offered twice.
    let held: Vec<TcpListener> = (0..count).map(|_| bind()).collect::<std::io::Result<_>>()?;
    held.iter().map(|listener| Ok(listener.local_addr()?.port())).collect()
}

#[cfg(test)]
mod tests;
