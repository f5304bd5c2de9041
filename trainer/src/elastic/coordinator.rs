//! The coordinator: one task that feeds events to [`Membership`] and carries out its actions.
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_leaf::blocking;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::Status;

use super::joining::{ASSIGNMENT_TIMEOUT, ring_secret};
use super::membership::{MemberId, Membership, Rules, Verdict};
use super::proto::coordinator_server::CoordinatorServer;
use super::proto::{self, from_worker, to_worker};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::join::Listen;
use crate::launch::WorkerCommand;
use crate::lease::Lease;
use crate::metrics;
use crate::proof::{Nonce, nonce};
use crate::spent::Spent;
use crate::validation::Evaluation;

mod actor;
mod service;

pub(crate) use service::{Admission, CoordinatorService, admit};

/// Interval at which deadlines are checked.
const TICK: Duration = Duration::from_millis(25);
/// How long workers may take to exit after the job's end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// The latest report of rank 0, with the process ids of the current members.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Report {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) rows: u64,
    pub(crate) evaluation: Option<Evaluation>,
    /// Where the time of rank 0 went, over all workers that had the rank.
    pub(crate) spent: Spent,
    pub(crate) pids: Vec<u32>,
    pub(crate) membership_epoch: u64,
    /// Workers that have to join before training can go on.
    pub(crate) missing: usize,
    /// How long the volumes have not taken a checkpoint; zero while they do.
    pub(crate) unsaved: Duration,
    /// How long a worker has waited for rows that the volumes do not give; zero while they do.
    pub(crate) unread: Duration,
    /// Where workers of other machines join.
    pub(crate) listening: Option<SocketAddr>,
}

/// How the workers' part of a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) stopped: bool,
    pub(crate) workers_lost: u32,
    /// How often workers of other machines joined.
    pub(crate) workers_joined: u32,
    pub(crate) membership_epochs: u64,
    /// From the first formed epoch to the end.
    pub(crate) trained: Duration,
}

/// Parameters of a job's coordinator.
pub(crate) struct CoordinatorParams<'a> {
    pub(crate) job: &'a str,
    /// Workers that the coordinator launches.
    pub(crate) workers: usize,
    pub(crate) workers_min: usize,
    pub(crate) config: &'a Config,
    pub(crate) command: &'a WorkerCommand,
    pub(crate) token: String,
    /// The assignment as JSON, sent to every launched worker.
    pub(crate) assignment: String,
    /// How workers of other machines join; none when only launched ones may.
    pub(crate) joining: Option<Joining<'a>>,
    /// Whether a stop leaves workers of other machines to the next coordinator.
    pub(crate) hand_over: bool,
    /// The lease without which no worker of another machine is dismissed; none in tests.
    pub(crate) lease: Option<Arc<Lease>>,
}

/// How workers of other machines join a job.
pub(crate) struct Joining<'a> {
    pub(crate) listen: &'a Listen,
    /// Most of them at a time.
    pub(crate) places: usize,
    /// Their assignment as JSON.
    pub(crate) assignment: String,
}

/// What happens to a coordinator's workers.
pub(crate) enum Event {
    /// A worker of another machine has proved the token.
    Admitted {
        hello: proto::Hello,
        host: String,
        outbox: mpsc::Sender<Result<proto::ToWorker, Status>>,
        reply: oneshot::Sender<Option<MemberId>>,
    },
    Joined {
        hello: proto::Hello,
        outbox: mpsc::Sender<Result<proto::ToWorker, Status>>,
        reply: oneshot::Sender<Result<MemberId, String>>,
    },
    Message {
        member: MemberId,
        message: from_worker::Message,
    },
    Disconnected {
        member: MemberId,
        reason: String,
    },
    Exited {
        slot: usize,
        launch: u64,
        reason: String,
    },
}

/// Runs the workers of a job until it is finished, stopped by `cancel` or lost.
///
/// Dropping the future kills the worker processes.
pub(crate) async fn run(
    mut params: CoordinatorParams<'_>,
    cancel: CancellationToken,
    mut on_report: impl FnMut(Report),
) -> Result<Outcome> {
    let ring_nonce = nonce()?;
    if let Some(joining) = &params.joining {
        // Workers that join derive the same secret.
        params.token = ring_secret(&joining.listen.token, &ring_nonce);
    }
    let listener = TcpListener::bind((params.config.listen, 0))
        .await
        .map_err(|e| Error::io(format!("listen on {}", params.config.listen), e))?;
    let address = listener.local_addr().map_err(|e| Error::io("find the coordinator's address", e))?;
    let (events, mut inbox) = mpsc::channel(1024);
    let shutdown = CancellationToken::new();
    let _shutdown_on_drop = shutdown.clone().drop_guard();
    let tasks = TaskTracker::new();
    let server = tonic::transport::Server::builder()
        .add_service(CoordinatorServer::new(CoordinatorService {
            admission: Admission::Launched { token: params.token.clone() },
            events: events.clone(),
        }))
        .serve_with_incoming_shutdown(TcpListenerStream::new(listener), shutdown.clone().cancelled_owned());
    let mut server = tokio::spawn(server);
    let listening = match &params.joining {
        Some(joining) => {
            let service = CoordinatorService {
                admission: Admission::Joining {
                    token: joining.listen.token.clone(),
                    silence_max: params.config.heartbeat_lost(),
                },
                events: events.clone(),
            };
            Some(admit(joining.listen, service, params.config, shutdown.clone()).await?)
        }
        None => None,
    };

    let config = params.config;
    let rules = Rules {
        workers: params.workers,
        places: params.joining.as_ref().map_or(0, |joining| joining.places),
        workers_min: params.workers_min,
        respawns_max: config.respawns_max,
        respawn_backoff: Duration::from_millis(config.respawn_backoff_ms),
        heartbeat_lost: config.heartbeat_lost(),
        assignment_timeout: ASSIGNMENT_TIMEOUT,
        start_timeout: config.start_timeout(),
        rendezvous_timeout: config.rendezvous_timeout(),
        stop_timeout: config.stop_timeout(),
        step_timeout: config.step_timeout(),
    };
    let mut state = Actor {
        membership: Membership::new(rules, Instant::now()),
        outboxes: BTreeMap::new(),
        joined: BTreeSet::new(),
        kills: BTreeMap::new(),
        events,
        tasks: tasks.clone(),
        shutdown: shutdown.clone(),
        params: &params,
        address,
        formed: None,
        report: Report { listening, ..Report::default() },
        spent: Spent::default(),
        unsaved: None,
        dismissed: Vec::new(),
        ring_nonce,
    };
    if listening.is_some() {
        on_report(state.report.clone());
    }
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let verdict = loop {
        tokio::select! {
            Some(event) = inbox.recv() => state.on_event(event, &mut on_report),
            _ = ticks.tick() => state.tick(&mut on_report),
            () = cancel.cancelled(), if !state.stopping() => state.stop(),
            ended = &mut server => {
                let reason = match ended {
                    Ok(Ok(())) => "ended".to_owned(),
                    Ok(Err(error)) => error.to_string(),
                    Err(error) => error.to_string(),
                };
                return Err(Error::CoordinatorLost { address: address.to_string(), reason });
            }
        }
        if let Some(verdict) = state.act() {
            break verdict;
        }
    };
    let ended = Instant::now();
    metrics::workers_alive(0);
    state.end_launches();
    if !state.dismissed.is_empty() {
        let reason = match state.keeps_joined(&verdict) {
            Some(reason) => Some(reason.to_owned()),
            None => doubt(params.lease.clone(), config.stop_timeout()).await,
        };
        state.dismiss(reason.as_deref());
    }
    // Without its last message, a worker of another machine would wait for the coordinator to come back.
    let farewell = async {
        while !state.joined.is_empty() {
            match inbox.recv().await {
                Some(Event::Disconnected { member, .. }) => drop(state.joined.remove(&member)),
                Some(_) => {}
                None => break,
            }
        }
    };
    if tokio::time::timeout(EXIT_TIMEOUT, farewell).await.is_err() {
        tracing::warn!(job = params.job, "workers of other machines did not take note of the end in time");
    }
    // Workers exit on `Done`. One that does not is killed when its task is cancelled.
    tasks.close();
    let exits = async {
        loop {
            tokio::select! {
                () = tasks.wait() => break,
                // A greeting is refused when its event is dropped.
                Some(_) = inbox.recv() => {}
            }
        }
    };
    if tokio::time::timeout(EXIT_TIMEOUT, exits).await.is_err() {
        tracing::warn!(job = params.job, "workers did not exit in time and are killed");
    }
    shutdown.cancel();
    tasks.wait().await;
    let outcome = Outcome {
        stopped: matches!(verdict, Verdict::Finished { stopped: true }),
        workers_lost: state.membership.lost_total(),
        workers_joined: state.membership.admitted_total(),
        membership_epochs: state.membership.epoch(),
        trained: state.formed.map_or(Duration::ZERO, |formed| ended - formed),
    };
    match verdict {
        Verdict::Finished { .. } => Ok(outcome),
        Verdict::Failed { message, exit_code } => Err(Error::Worker { message, exit_code }),
        Verdict::Outage { message } => Err(Error::Outage { reason: message }),
        Verdict::WorkersLost { reason, exit_code } => Err(Error::WorkersLost {
            job: params.job.to_owned(),
            respawns: state.membership.respawns(),
            reason,
            exit_code,
        }),
    }
}

/// Why this process may not say that the job is over; none if the metadata says now that it has the lease.
async fn doubt(lease: Option<Arc<Lease>>, limit: Duration) -> Option<String> {
    let lease = lease?;
    let confirmed = blocking::run(move || lease.confirm());
    match tokio::time::timeout(limit, confirmed).await {
        Ok(Ok(Ok(()))) => None,
        Ok(Ok(Err(error))) => Some(error.one_line()),
        Ok(Err(stopping)) => Some(stopping.to_string()),
        Err(_) => Some("the metadata does not answer it".to_owned()),
    }
}

struct Actor<'a> {
    membership: Membership,
    outboxes: BTreeMap<MemberId, mpsc::Sender<Result<proto::ToWorker, Status>>>,
    /// Members of other machines whose streams are open.
    joined: BTreeSet<MemberId>,
    kills: BTreeMap<(usize, u64), CancellationToken>,
    events: mpsc::Sender<Event>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    params: &'a CoordinatorParams<'a>,
    address: SocketAddr,
    formed: Option<Instant>,
    report: Report,
    /// The last total that rank 0 has told.
    spent: Spent,
    /// The member whose checkpoint the volumes do not take.
    unsaved: Option<MemberId>,
    /// Members of other machines for which the job is over. They are told once it is certain that this process may.
    dismissed: Vec<MemberId>,
    ring_nonce: Nonce,
}

fn to_worker_message(message: to_worker::Message) -> proto::ToWorker {
    proto::ToWorker { message: Some(message) }
}

#[cfg(test)]
mod tests;
