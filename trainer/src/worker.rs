//! The worker process: a replica of the model that computes its share of every step.
//!
//! Between barriers every worker does the same: gradients of its virtual shards, one exact sum over the ring,
//! one identical update. After step `s` all workers hold the same state, so a worker that is behind takes the
//! state of one that is ahead.
use std::path::PathBuf;
use std::time::Duration;

use millrace_datafs::Datafs;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::collective::{Collective, Options, Ring};
use crate::config::Config;
use crate::elastic::membership::{Reason, formation, has_state_of, source};
use crate::elastic::session::{Barrier, Ending, EpochMembership, Exchange, Report, Scope, Session, Timing};
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::join::host_port;
use crate::launch::WorkerEnv;
use crate::reader::Wishes;
use crate::replica::Replica;
use crate::source::{DataFacts, Sources};
use crate::validation::Partial;

mod joined;

pub use joined::{JoinEnd, join};

/// The parameters of a run's workers, sent as JSON.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Assignment {
    pub(crate) job: JobFile,
    /// The volumes of a launched worker. A worker of another machine opens its own way to them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) volumes: Option<VolumesSetup>,
    pub(crate) config: Config,
    /// The run's id.
    pub(crate) run: String,
    /// The token that permits writing checkpoints; see [`crate::checkpoint`].
    pub(crate) owner: String,
    /// The number of the coordinator's lease; 0 of a program without leases.
    #[serde(default)]
    pub(crate) fence: u64,
    /// What the workers read from the volume has these digests.
    pub(crate) models: ModelDigests,
    /// The plan of the first dataset.
    pub(crate) plan: millrace_streams::feed::Plan,
    /// The plans of the other datasets of a mixture.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) other_plans: Vec<millrace_streams::feed::Plan>,
    /// The order of the validation data.
    pub(crate) validation_plan: Option<millrace_streams::feed::Plan>,
    /// What the training data has told.
    #[serde(rename = "labels")]
    pub(crate) facts: DataFacts,
    /// Whether rings are encrypted, as they may leave the machine.
    #[serde(default)]
    pub(crate) encrypt_ring: bool,
}

/// SHA-256 of the files of a run's model and of its teacher, which other programs may change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ModelDigests {
    pub(crate) model: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) teacher: Option<String>,
}

/// The home and the settings with which a launched worker opens the volumes and topics.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct VolumesSetup {
    pub(crate) home: PathBuf,
    pub(crate) datafs: millrace_datafs::Config,
    /// The brokers of topics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kafka: Option<millrace_streams::KafkaConfig>,
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
    outlive_stop_signals(&runtime)?;
    let result = serve(&worker_env, &runtime, &exit_code);
    // Prefetches and heartbeats need no orderly end.
    runtime.shutdown_timeout(Duration::from_millis(100));
    result
}

/// Ignores the signals with which a service manager or a terminal ends all processes of a job at once. The
/// coordinator gets them as well, and its stop needs the workers for the last checkpoint. A worker ends with its
/// stream to the coordinator.
fn outlive_stop_signals(runtime: &Runtime) -> Result<()> {
    let _context = runtime.enter();
    for kind in [SignalKind::terminate(), SignalKind::hangup(), SignalKind::interrupt()] {
        // The handler stays when the stream of signals is dropped.
        drop(signal(kind).map_err(|e| Error::io("handle signals", e))?);
    }
    Ok(())
}

fn serve(worker_env: &WorkerEnv, runtime: &Runtime, exit_code: &impl Fn(&Error) -> u8) -> Result<()> {
    let coordinator: std::net::SocketAddr =
        worker_env.coordinator.parse().map_err(|_| Error::CoordinatorLost {
            address: worker_env.coordinator.clone(),
            reason: "is not ip:port".to_owned(),
        })?;
    let options = Options::new(worker_env.token.clone());
    let listen = worker_env.ring.as_ref().map_or(coordinator.ip(), |ring| ring.listen);
    let mut collective = Collective::bind(listen, options.clone())?;
    let address = match &worker_env.ring {
        Some(ring) => host_port(&ring.advertise, collective.address().port()),
        None => collective.address().to_string(),
    };
    let (greeted, assignment) = Session::connect(runtime.handle(), worker_env, address)?;
    let assignment = Assignment::read(&assignment)?;
    let timing = assignment.apply(options, &mut collective, false);
    let mut session = greeted.start(runtime.handle(), timing, CancellationToken::new());
    let result = open_volumes(&assignment)
        .and_then(|sources| Replica::load(assignment, sources, runtime.handle().clone()))
        .and_then(|mut replica| train(&mut replica, &mut session, &collective));
    match result {
        Err(error @ Error::CoordinatorLost { .. }) => Err(error),
        Err(error) => session.fail(error.one_line(), exit_code(&error), Scope::of(&error)),
        Ok(_) => Ok(()),
    }
}

/// Opens the volumes of a launched worker.
fn open_volumes(assignment: &Assignment) -> Result<Sources> {
    let Some(VolumesSetup { home, datafs, kafka }) = &assignment.volumes else {
        return Err(Error::Worker {
            message: "the coordinator's assignment names no volumes; is it the same program?".to_owned(),
            exit_code: 1,
        });
    };
    let datafs =
        Datafs::open(home, datafs).map_err(|e| Error::volume(format!("open {}", home.display()), e))?;
    Ok(Sources { datafs, kafka: kafka.clone() })
}

impl Assignment {
    fn read(text: &str) -> Result<Assignment> {
        serde_json::from_str(text).map_err(|e| Error::Worker {
            message: format!("the coordinator's assignment cannot be read ({e}); is it the same program?"),
            exit_code: 1,
        })
    }

    /// Sets the timeouts of rings and gives those of the session.
    fn apply(&self, options: Options, collective: &mut Collective, outlives_coordinator: bool) -> Timing {
        let config = &self.config;
        collective.set_options(Options {
            encrypt: self.encrypt_ring,
            exchange_timeout: config.exchange_timeout(),
            silence: config.heartbeat_lost(),
            ..options
        });
        Timing { heartbeat: config.heartbeat(), progress: config.progress(), outlives_coordinator }
    }
}

/// How a worker's part in a job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// The job is over.
    Done,
    /// The worker was asked to leave.
    Left,
}

/// Runs membership epochs, from barrier to barrier, until the job is over or this worker was asked to leave.
fn train(replica: &mut Replica, session: &mut Session, collective: &Collective) -> Result<Part> {
    let (mut reason, mut trouble) = (Reason::Fresh, None);
    session.watch(replica.unsaved(), replica.unread());
    loop {
        let mut barrier = session.arrive(replica.arrival(), reason, trouble.as_ref())?;
        let formed = loop {
            match barrier {
                Barrier::Formed(formed) => break formed,
                Barrier::Done => return Ok(end(replica)),
                Barrier::Save => {
                    replica.save_if_newest()?;
                    barrier = session.wait()?;
                }
                Barrier::Preempted => {
                    // The others go on meanwhile. They have this state, too, but may leave or die at any time.
                    // A worker that kept its state between two coordinators may hold the newest one.
                    if replica.position() > 0 {
                        session.begin_to_leave(replica.step());
                        replica.checkpoint_if_newest()?;
                    }
                    // A save of the first state, which any worker makes again, may try for ever.
                    replica.abandon();
                    session.leave(replica.step())?;
                    return Ok(Part::Left);
                }
            }
        };
        trouble = None;
        match epoch(replica, session, collective, &formed) {
            Ok(EpochEnd::Done) => return Ok(end(replica)),
            Ok(EpochEnd::Left) => reason = Reason::Left,
            Ok(EpochEnd::Broken) => reason = Reason::Broken,
            Err(Error::Collective(error)) if error.is_retryable() => {
                let suspect = error.suspect().and_then(|rank| formed.peers.get(rank));
                let suspect = suspect.map(ToString::to_string).unwrap_or_default();
                tracing::info!(epoch = formed.epoch, step = replica.step(), %error, suspect, "ring broke");
                reason = Reason::Broken;
                trouble = Some(error);
            }
            Err(error) => {
                if matches!(error, Error::Outage { .. }) {
                    replica.save_unread();
                }
                return Err(error);
            }
        }
    }
}

/// The job is over, with the checkpoint that it needs.
fn end(replica: &mut Replica) -> Part {
    replica.abandon();
    Part::Done
}

/// One membership epoch: form the ring, catch up, train until an event ends it.
fn epoch(
    replica: &mut Replica,
    session: &mut Session,
    collective: &Collective,
    formed: &EpochMembership,
) -> Result<EpochEnd> {
    let shape = formation(formed.epoch, formed.rank, &formed.peers);
    session.enter(replica.step(), Exchange::Formation);
    let mut ring = collective.form(&shape, formed.abort.clone())?;
    let peers = &formed.peers;
    if let Some((source, from)) = source(peers).and_then(|rank| Some((rank, peers.get(rank)?))) {
        session.enter(replica.step(), Exchange::State);
        if source == formed.rank {
            let state = replica.export()?;
            ring.broadcast(from.step, source, Some(&state), replica.state_bytes_max())?;
        } else {
            let state = ring.broadcast(from.step, source, None, replica.state_bytes_max())?;
            let is_same = peers.get(formed.rank).is_some_and(|own| has_state_of(own, from));
            if let Some(state) = state.filter(|_| !is_same) {
                replica.import(&state, &from.lineage)?;
            }
        }
    }
    replica.enter(formed.epoch);
    let lead = formed.rank == 0;
    if formed.is_last && replica.finish().is_none() {
        // All ranks hold the state after the last complete step, and the rows of the next one may be away. The first
        // state, which any worker makes again, is not saved.
        if lead && replica.position() > 0 {
            session.step(|| replica.checkpoint_if_newest())?;
        }
        return Ok(session.finish(replica.step(), true)?.into());
    }
    if lead {
        replica.check_last_due()?;
    }
    replica.connect(collective, &mut ring, &formed.abort)?;
    loop {
        if replica.evaluation_due()
            && let Some(end) = evaluate(replica, session, &mut ring, lead)?
        {
            return Ok(end);
        }
        if let Some(finish) = replica.finish() {
            if lead {
                session.step(|| replica.checkpoint(Some(finish)))?;
            }
            return Ok(session.finish(replica.step(), false)?.into());
        }
        let wishes = Wishes {
            leave: session.leave_wanted() || session.preempted(),
            stop: session.stop_wanted(),
            asked_to_end: &|| session.preempted() || session.stop_wanted(),
        };
        session.enter(replica.step(), Exchange::Gradients);
        let done = session.step(|| replica.step_once(&mut ring, wishes))?;
        replica.poll_writer()?;
        if lead {
            session.report(report(replica, done.loss));
            replica.checkpoint_when_due()?;
        }
        if done.stop && replica.finish().is_none() {
            if lead {
                session.step(|| replica.checkpoint(None))?;
            }
            return Ok(session.finish(replica.step(), true)?.into());
        }
        if done.leave && replica.finish().is_none() {
            return Ok(EpochEnd::Left);
        }
    }
}

/// Evaluates the weights. `Some` when the membership epoch ends before that is done; the evaluation then begins
/// again in another one.
fn evaluate(
    replica: &mut Replica,
    session: &mut Session,
    ring: &mut Ring<'_>,
    lead: bool,
) -> Result<Option<EpochEnd>> {
    let mut partial = Partial::default();
    session.enter(replica.step(), Exchange::Evaluation);
    loop {
        // A worker that joins waits for the end: each new membership epoch begins the evaluation again.
        let wishes = Wishes {
            leave: session.preempted(),
            stop: session.stop_wanted(),
            asked_to_end: &|| session.preempted() || session.stop_wanted(),
        };
        let round = session.step(|| replica.evaluate(&mut partial, ring, wishes))?;
        if round.complete {
            if lead {
                session.report(report(replica, replica.last_loss()));
            }
            return Ok(None);
        }
        if round.stop {
            if lead {
                session.step(|| replica.checkpoint(None))?;
            }
            return Ok(Some(session.finish(replica.step(), true)?.into()));
        }
        if round.leave {
            return Ok(Some(EpochEnd::Left));
        }
    }
}

fn report(replica: &Replica, loss: f64) -> Report {
    Report {
        step: replica.step(),
        epoch: replica.epochs(),
        loss,
        rows: replica.rows(),
        evaluation: replica.last_evaluation(),
        spent: replica.spent(),
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
