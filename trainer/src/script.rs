//! Script jobs: a Python script, or any program, on the processes of one machine or of several.
//!
//! The coordinator starts the processes in *rounds*. When one fails, or a machine is lost, all processes of the round
//! end, and the next round begins with the machines that are there. The script goes on from its own checkpoint; the
//! trainer does not know what the processes compute.
//!
//! Contents, each using those before it only:
//! - `layout`: the places of a round and the environment of each process (pure);
//! - `messages`: orders and reports, with their seals;
//! - `rounds`: when processes start and stop (a pure state machine);
//! - `program`, `keeper`, `process`, `node`: the processes of one machine;
//! - `joined`, `coordinator`: nodes of other machines and of this one;
//! - `record`: the run in a volume.
//!
//! No process is left behind, whichever process of a node is killed: see `keeper`.
use std::path::PathBuf;
use std::time::{Duration, Instant};

use millrace_datafs::{Datafs, Name, VolumeSpec};
use millrace_leaf::{blocking, random};
use millrace_streams::dataset::DatasetSpec;
use serde::Serialize;
use tokio_util::sync::CancellationToken;

mod coordinator;
pub(crate) mod joined;
mod keeper;
mod launch;
mod layout;
mod messages;
mod node;
mod process;
mod program;
pub(crate) mod record;
mod rounds;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::join::Listen;
use crate::lock::JobLock;
pub use coordinator::ScriptProgress;
use coordinator::{Outcome, Params};
pub use keeper::{is_keeper, keep};
use launch::Launch;
pub use layout::Framework;
use messages::Program;
pub use node::{NodeSettings, OutputSink};
pub use process::{OutputLine, Stream};
use program::Runnable;
pub use record::{ScriptRecord, ScriptVersion};
use rounds::Verdict;

/// Variables that the processes of a script get from this crate and from its caller. They set no configuration keys: a
/// script may call the program.
pub const ENVIRONMENT: [&str; 10] = [
    layout::ENV_RUN,
    "MILLRACE_JOB",
    "MILLRACE_ROUND",
    "MILLRACE_ROLE",
    "MILLRACE_RUN_VOLUME",
    "MILLRACE_DATASET",
    launch::ENV_LAUNCH,
    "MILLRACE_PROGRAM",
    keeper::ENV_MARK,
    keeper::ENV_KEEP,
];

/// What the lock of a script job calls its run.
const HOLDER: &str = "script run ";
/// Most processes of one node.
const WORKERS_MAX: u32 = 256;

/// What a job runs.
#[derive(Debug, Clone)]
pub struct ScriptJob {
    /// The job's name.
    pub name: Name,
    /// The script, relative to the folder in which each node was started, or absolute. `.py` files run in Python,
    /// other files are executed as they are.
    pub script: PathBuf,
    /// Its arguments.
    pub args: Vec<String>,
    /// The Python interpreter; `MILLRACE_PYTHON` of a node comes first, `python3` last.
    pub python: Option<String>,
    /// Workers of each node, from 1.
    pub workers_per_node: u32,
    /// Fewest and most nodes of a round.
    pub nodes: (u32, u32),
    /// Parameter servers of all nodes.
    pub servers: u32,
    /// The framework whose environment the processes get.
    pub framework: Framework,
    /// Rounds that may follow a failure.
    pub max_restarts: u32,
    /// How long nodes may take to join.
    pub join_timeout: Duration,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Whether a node that joins starts a new round at once.
    pub restart_on_join: bool,
    /// The dataset that the script reads: checked, recorded, and passed on as `MILLRACE_DATASET`.
    pub dataset: Option<DatasetSpec>,
    /// The volume with the run's record; created if it does not exist.
    pub volume: Name,
}

/// The environment of a script job.
#[derive(Debug, Clone)]
pub struct ScriptSetup {
    /// The open volumes.
    pub datafs: Datafs,
    /// The home folder, in which one job of a name runs at a time.
    pub home: PathBuf,
    /// The time after which a silent node counts as lost.
    pub config: Config,
    /// How nodes of other machines join. `workers_local` are the workers of this machine.
    pub listen: Option<Listen>,
    /// What this machine's node needs.
    pub node: NodeSettings,
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScriptEnd {
    /// All workers ended with code 0.
    Succeeded,
    /// It was asked to stop, and all processes have ended.
    Stopped,
}

/// A job that has not failed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ScriptReport {
    /// The job's name.
    pub job: String,
    /// The run's id.
    pub run: String,
    /// How it ended.
    pub end: ScriptEnd,
    /// Rounds that were begun.
    pub rounds: u64,
    /// Rounds that followed a failure.
    pub restarts: u32,
    /// Workers of the last round.
    pub world: u32,
    /// Versions that the script has published.
    pub versions: Vec<ScriptVersion>,
    /// Time from the first check to the end.
    pub seconds: f64,
}

/// Runs a script job until its workers have ended, or `cancel` asks it to stop.
///
/// A stop sends SIGTERM to all processes and SIGKILL after the grace period. `on_progress` is called when something
/// has changed and must not block. Dropping the future kills the processes of this machine.
///
/// Needs a multi-threaded tokio runtime.
///
/// # Errors
/// [`Error::Script`] and [`Error::Launch`] for a script that cannot be run here, [`Error::Busy`] when the job runs
/// already, [`Error::ScriptFailed`] with the process that failed first, [`Error::NodesMissing`] when too few nodes
/// came, [`Error::Volume`] when the run cannot be recorded.
pub async fn run(
    job: ScriptJob,
    setup: ScriptSetup,
    cancel: CancellationToken,
    on_progress: impl FnMut(&ScriptProgress),
) -> Result<ScriptReport> {
    let began = Instant::now();
    let workers_local = check(&job, &setup)?;
    if let Some(listen) = &setup.listen {
        listen.check(workers_local as usize).await?;
    }
    let (own, datafs, home) = (job.clone(), setup.datafs.clone(), setup.home.clone());
    let prepared = on_thread(move || Prepared::new(&own, &datafs, &home, workers_local)).await?;
    let Prepared { _lock: lock, view, program, mut record } = prepared;
    let params = Params {
        job: record.job.clone(),
        run: record.run.clone(),
        program,
        framework: job.framework,
        workers: job.workers_per_node,
        workers_local,
        servers: job.servers,
        nodes_min: job.nodes.0 as usize,
        nodes_max: job.nodes.1 as usize,
        max_restarts: job.max_restarts,
        join_timeout: job.join_timeout,
        restart_on_join: job.restart_on_join,
        listen: setup.listen.as_ref(),
        config: &setup.config,
        node: setup.node.clone(),
    };
    let outcome = coordinator::run(params, cancel, on_progress).await;
    let failure = match &outcome {
        Ok(Outcome { verdict: Verdict::Succeeded | Verdict::Stopped, .. }) => None,
        Ok(Outcome { verdict, .. }) => Some(coordinator::explain(&record.job, verdict)),
        Err(error) => Some(error.one_line()),
    };
    record.ended = Some(chrono::Utc::now().timestamp());
    record.outcome = Some(match &outcome {
        Ok(Outcome { verdict: Verdict::Succeeded, .. }) => "succeeded".to_owned(),
        Ok(Outcome { verdict: Verdict::Stopped, .. }) => "stopped".to_owned(),
        _ => "failed".to_owned(),
    });
    record.failure = failure.clone();
    if let Ok(outcome) = &outcome {
        (record.restarts, record.rounds, record.world) = (outcome.restarts, outcome.rounds, outcome.world);
    }
    let (record, versions) = on_thread(move || {
        let written = record.write(&view);
        let versions = record.versions(&view);
        drop(lock);
        if let Err(error) = written {
            tracing::error!(error = error.one_line(), "the end of the run is not recorded");
        }
        Ok((record, versions.unwrap_or_default()))
    })
    .await?;
    let outcome = outcome?;
    let end = match outcome.verdict {
        Verdict::Succeeded => ScriptEnd::Succeeded,
        Verdict::Stopped => ScriptEnd::Stopped,
        Verdict::Failed(_) => return Err(Error::ScriptFailed { reason: failure.unwrap_or_default() }),
        Verdict::Missing { .. } => return Err(Error::NodesMissing { reason: failure.unwrap_or_default() }),
    };
    Ok(ScriptReport {
        job: record.job,
        run: record.run,
        end,
        rounds: outcome.rounds,
        restarts: outcome.restarts,
        world: outcome.world,
        versions,
        seconds: began.elapsed().as_secs_f64(),
    })
}

/// Checks numbers that do not fit together; gives the workers of this machine.
fn check(job: &ScriptJob, setup: &ScriptSetup) -> Result<u32> {
    let wrong = |reason: String| Err(Error::Job { job: job.name.to_string(), reason });
    let (min, max) = job.nodes;
    let local = setup.listen.as_ref().and_then(|listen| listen.workers_local);
    let local = local.map_or(job.workers_per_node, |count| count as u32);
    if min == 0 || max < min {
        return wrong(format!("--nodes {min}:{max} is no range of node counts; name MIN:MAX, from 1"));
    }
    if local > WORKERS_MAX || !(1..=WORKERS_MAX).contains(&job.workers_per_node) {
        return wrong(format!("a node has 1 to {WORKERS_MAX} processes; lower --nproc-per-node"));
    }
    if setup.listen.is_none() && min > 1 {
        return wrong(format!("{min} nodes are wanted (--nodes), and none can join; add --listen ADDR:PORT"));
    }
    if job.servers > 0 && job.framework == Framework::Torch {
        return wrong("--servers is for parameter servers; add --framework tensorflow or mxnet".to_owned());
    }
    if job.servers == 0 && job.framework == Framework::Mxnet {
        return wrong("MXNet's kvstore needs parameter servers; add --servers 1 or more".to_owned());
    }
    Ok(local)
}

/// A job that was checked, with its record written.
struct Prepared {
    _lock: JobLock,
    view: millrace_datafs::View,
    program: Program,
    record: ScriptRecord,
}

impl Prepared {
    fn new(job: &ScriptJob, datafs: &Datafs, home: &std::path::Path, workers_local: u32) -> Result<Prepared> {
        let Some(script) = job.script.to_str() else {
            return Err(Error::Script {
                script: job.script.display().to_string(),
                reason: "its path is not text (UTF-8); rename it".to_owned(),
            });
        };
        let name = job.name.as_str();
        let mut lock = JobLock::take(home, name)?;
        let dataset = job.dataset.clone().map(|dataset| resolved(datafs, name, dataset)).transpose()?;
        let run = random::bytes::<32>().map_err(|e| Error::io(format!("read {}", random::SOURCE), e))?;
        let run = hex::encode(run);
        let launch = Launch::next(home, name)?;
        let program = Program {
            script: script.to_owned(),
            sha256: program::digest(script)?,
            args: job.args.clone(),
            python: job.python.clone(),
            dataset: dataset.map(|dataset| dataset.to_string()),
            volume: job.volume.to_string(),
            grace_ms: job.grace.as_millis() as u64,
            launch,
        };
        if workers_local > 0 {
            Runnable::of(&program)?;
        }
        match datafs.volume_create(&job.volume) {
            Ok(_) | Err(millrace_datafs::Error::Exists { .. }) => {}
            Err(error) => {
                return Err(Error::volume(format!("job {name}: create volume {}", job.volume), error));
            }
        }
        let view = datafs
            .view(&VolumeSpec::live(job.volume.clone()))
            .map_err(|e| Error::volume(format!("job {name}: open volume {}", job.volume), e))?;
        let mut record = ScriptRecord::new(run.clone(), name.to_owned(), &program);
        record.framework = job.framework;
        record.workers_per_node = job.workers_per_node;
        record.nodes = job.nodes;
        record.servers = job.servers;
        record.max_restarts = job.max_restarts;
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        record.environment = names.take(record::NAMES_MAX).collect();
        record.environment.sort();
        record.write(&view)?;
        lock.name(&format!("{HOLDER}{run}"))?;
        Ok(Prepared { _lock: lock, view, program, record })
    }
}

/// The dataset at its snapshot: `@latest` becomes the newest one. Fails if the folder does not exist.
fn resolved(datafs: &Datafs, job: &str, mut dataset: DatasetSpec) -> Result<DatasetSpec> {
    let failed =
        |dataset: &DatasetSpec, error| Error::volume(format!("job {job}: open dataset {dataset}"), error);
    let (source, _) = datafs.resolve(&dataset.source).map_err(|e| failed(&dataset, e))?;
    dataset.source = source;
    let view = datafs.view(&dataset.source).map_err(|e| failed(&dataset, e))?;
    view.stat(&dataset.path).map_err(|e| failed(&dataset, e))?;
    Ok(dataset)
}

async fn on_thread<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let stopped = |error| Error::io("run on a blocking thread", std::io::Error::other(error));
    blocking::run(work).await.map_err(stopped)?
}
