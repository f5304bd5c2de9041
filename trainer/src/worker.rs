//! The worker process: a replica of the model that computes its share of every step.
//!
//! Between barriers every worker does the same: gradients of its virtual shards, one exact sum over the ring,
//! one identical update. After step `s` all workers hold the same state, so a worker that is behind takes the
//! state of one that is ahead.
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::collective::{Collective, Options};
use crate::config::Config;
use crate::elastic::membership::{Reason, formation, source};
use crate::elastic::session::{Barrier, Ending, EpochMembership, Report, Session, Timing};
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::launch::WorkerEnv;
use crate::replica::Replica;

/// The parameters of a run's workers, sent as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Assignment {
    pub(crate) job: JobFile,
    pub(crate) home: PathBuf,
    pub(crate) datafs: millrace_datafs::Config,
    pub(crate) config: Config,
    /// The run's id.
    pub(crate) run: String,
    /// The token that permits writing checkpoints; see [`crate::checkpoint`].
    pub(crate) owner: String,
    pub(crate) plan: millrace_streams::feed::Plan,
}

/// Why a membership epoch ended without an error.
enum EpochEnd {
    /// All members agreed to let another worker join.
    Left,
    /// A member was lost after the last step.
    Broken,
    /// The job is over.
    Done,
}

/// Runs this process as a worker of the coordinator that its environment names
/// ([`crate::launch`]), until the job is over.
///
/// Blocks; must be called from a plain thread, usually the main one. The worker reports an error to the
/// coordinator, which ends the job with it. If the error may be local to this worker, the coordinator starts
/// a replacement instead. `exit_code` gives the exit code of such an error, with which the job may end. This
/// function fails only if the coordinator was lost or never reached. The process should exit afterwards; it
/// exits by itself if the coordinator vanishes during a long computation.
pub fn run(exit_code: impl Fn(&Error) -> u8) -> Result<()> {
    let worker_env = WorkerEnv::from_env()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(4)
        .thread_name("worker")
        .enable_all()
        .build()
        .map_err(|e| Error::io("start the worker's runtime", e))?;
    let result = serve(&worker_env, &runtime, &exit_code);
    // Prefetches and heartbeats need no orderly end.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

fn serve(worker_env: &WorkerEnv, runtime: &Runtime, exit_code: &impl Fn(&Error) -> u8) -> Result<()> {
    let coordinator: std::net::SocketAddr =
        worker_env.coordinator.parse().map_err(|_| Error::CoordinatorLost {
            address: worker_env.coordinator.clone(),
            reason: "is not ip:port".to_owned(),
        })?;
    let mut options = Options::new(worker_env.token.clone());
    let mut collective = Collective::bind(coordinator.ip(), options.clone())?;
    let (greeted, assignment) = Session::connect(runtime.handle(), worker_env, collective.address())?;
    let assignment: Assignment = serde_json::from_str(&assignment).map_err(|e| Error::Worker {
        message: format!("the coordinator's assignment cannot be read ({e}); is it the same program?"),
        exit_code: 1,
    })?;
    let config = &assignment.config;
    let timing = Timing { heartbeat: config.heartbeat(), progress: config.progress() };
    options.exchange_timeout = config.exchange_timeout();
    collective.set_options(options);
    let mut session = greeted.start(runtime.handle(), timing);
    let result = Replica::load(assignment, runtime.handle().clone())
        .and_then(|mut replica| train(&mut replica, &mut session, &collective));
    match result {
        Err(error @ Error::CoordinatorLost { .. }) => Err(error),
        Err(error) => session.fail(error.one_line(), exit_code(&error), error.is_local()),
        Ok(()) => Ok(()),
    }
}

/// Runs membership epochs, from barrier to barrier, until the job is over.
fn train(replica: &mut Replica, session: &mut Session, collective: &Collective) -> Result<()> {
    let (mut reason, mut suspect) = (Reason::Fresh, None);
    loop {
        let formed = match session.arrive(replica.step(), reason, suspect)? {
            Barrier::Formed(formed) => formed,
            Barrier::Done => return replica.close(),
        };
        suspect = None;
        match epoch(replica, session, collective, &formed) {
            Ok(EpochEnd::Done) => return replica.close(),
            Ok(EpochEnd::Left) => reason = Reason::Left,
            Ok(EpochEnd::Broken) => reason = Reason::Broken,
            Err(Error::Collective(error)) if error.is_retryable() => {
                tracing::info!(epoch = formed.epoch, step = replica.step(), %error, "ring broke");
                reason = Reason::Broken;
                suspect = error.suspect();
            }
            Err(error) => return Err(error),
        }
    }
}

/// One membership epoch: form the ring, catch up, train until an event ends it.
fn epoch(
    replica: &mut Replica,
    session: &mut Session,
    collective: &Collective,
    formed: &EpochMembership,
) -> Result<EpochEnd> {
    let shape = formation(formed.epoch, formed.rank, &formed.peers);
    let mut ring = collective.form(&shape, formed.abort.clone())?;
    let step = formed.peers.iter().map(|peer| peer.step).max().unwrap_or_default();
    if let Some(source) = source(&formed.peers) {
        if source == formed.rank {
            let state = replica.export()?;
            ring.broadcast(step, source, Some(&state), replica.state_bytes_max())?;
        } else {
            let state = ring.broadcast(step, source, None, replica.state_bytes_max())?;
            if let Some(state) = state.filter(|_| replica.step() < step) {
                replica.import(&state)?;
            }
        }
    }
    let lead = formed.rank == 0;
    loop {
        if let Some(finish) = replica.finish() {
            if lead {
                replica.checkpoint(Some(finish))?;
            }
            return Ok(session.finish(replica.step(), false)?.into());
        }
        let (leave, stop) = (session.leave_wanted(), session.stop_wanted());
        let done = session.step(|| replica.step_once(&mut ring, leave, stop))?;
        if lead {
            session.report(Report {
                step: replica.step(),
                epoch: replica.epochs(),
                loss: done.loss,
                rows: replica.rows(),
            });
            replica.checkpoint_when_due()?;
        }
        if done.stop && replica.finish().is_none() {
            if lead {
                replica.checkpoint(None)?;
            }
            return Ok(session.finish(replica.step(), true)?.into());
        }
        if done.leave && replica.finish().is_none() {
            return Ok(EpochEnd::Left);
        }
    }
}

impl From<Ending> for EpochEnd {
    fn from(ending: Ending) -> EpochEnd {
        match ending {
            Ending::Done => EpochEnd::Done,
            Ending::Broken => EpochEnd::Broken,
        }
    }
}
