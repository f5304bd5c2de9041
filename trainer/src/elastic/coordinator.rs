//! The coordinator: one task that feeds events to [`Membership`] and carries out its actions.
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::Stream;
use millrace_leaf::blocking;
use subtle::ConstantTimeEq as _;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::joining::{ASSIGNMENT_TIMEOUT, coordinator_proof, is_worker_proof, ring_secret};
use super::listener::{self, Standing};
use super::membership::{Action, MemberId, Membership, Message, Reason, Rules, Verdict};
use super::proto::coordinator_server::{Coordinator as Service, CoordinatorServer};
use super::proto::{self, from_worker, to_worker};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::join::{self, Listen, PROTOCOL, Token};
use crate::launch::{RingEnv, WorkerCommand, WorkerEnv, describe_exit};
use crate::lease::Lease;
use crate::metrics;
use crate::proof::{NONCE_BYTES, Nonce, nonce};
use crate::validation::Evaluation;

/// Interval at which deadlines are checked.
const TICK: Duration = Duration::from_millis(25);
/// Deadline for the first message of a connection.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long workers may take to exit after the job's end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Messages queued for one worker. A worker that lets more accumulate counts as lost.
const OUTBOX_MAX: usize = 256;
/// Largest message from a worker of another machine; none of them has long parts.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// Streams per connection of a worker of another machine; it needs one.
const STREAMS_MAX: u32 = 4;
/// Longest name of an exchange in a heartbeat.
const EXCHANGE_CHARS_MAX: usize = 60;
/// What workers of another machine are told when another coordinator goes on.
const HANDED_OVER: &str = "it hands the run over to another coordinator";
/// Longest ring address or host name that a worker may have.
const NAME_BYTES_MAX: usize = 300;

/// The latest report of rank 0, with the process ids of the current members.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Report {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) rows: u64,
    pub(crate) evaluation: Option<Evaluation>,
    pub(crate) pids: Vec<u32>,
    pub(crate) membership_epoch: u64,
    /// Workers that have to join before training can go on.
    pub(crate) missing: usize,
    /// How long the volumes have not taken a checkpoint; zero while they do.
    pub(crate) unsaved: Duration,
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

enum Event {
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
                admission: Admission::Joining { token: joining.listen.token.clone() },
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
    if !state.dismissed.is_empty() {
        let reason = match state.keeps_joined(&verdict) {
            Some(reason) => Some(reason.to_owned()),
            None => confirm(params.lease.clone(), config.stop_timeout()).await.err(),
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
    if tokio::time::timeout(EXIT_TIMEOUT, tasks.wait()).await.is_err() {
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

/// Fails unless the metadata says now that this process has the lease.
async fn confirm(lease: Option<Arc<Lease>>, limit: Duration) -> Result<(), String> {
    let Some(lease) = lease else { return Ok(()) };
    let confirmed = blocking::run(move || lease.confirm());
    match tokio::time::timeout(limit, confirmed).await {
        Ok(Ok(Ok(()))) => Ok(()),
        Ok(Ok(Err(error))) => Err(error.one_line()),
        Ok(Err(stopping)) => Err(stopping.to_string()),
        Err(_) => Err("the metadata does not answer it".to_owned()),
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
    /// The member whose checkpoint the volumes do not take.
    unsaved: Option<MemberId>,
    /// Members of other machines for which the job is over. They are told once it is certain that this process may.
    dismissed: Vec<MemberId>,
    ring_nonce: Nonce,
}

impl Actor<'_> {
    fn stopping(&self) -> bool {
        self.membership.stopping()
    }

    /// Checks deadlines, and reports when workers are missing or no longer are.
    fn tick(&mut self, on_report: &mut impl FnMut(Report)) {
        self.membership.tick(Instant::now());
        let missing = self.membership.missing();
        if missing != self.report.missing {
            self.report.missing = missing;
            if missing > 0 {
                tracing::info!(job = self.params.job, missing, "waiting for workers to join");
            }
            on_report(self.report.clone());
        }
    }

    fn stop(&mut self) {
        tracing::info!(job = self.params.job, "stopping after the current step");
        self.membership.stop(Instant::now());
    }

    fn on_event(&mut self, event: Event, on_report: &mut impl FnMut(Report)) {
        let now = Instant::now();
        match event {
            Event::Admitted { hello, host, outbox, reply } => {
                let admitted = self.admit(hello, host, outbox, now);
                // If the connection is gone, the end of its stream reports that.
                let _ = reply.send(admitted);
            }
            Event::Joined { hello, outbox, reply } => {
                let joined = self.join(&hello, outbox, now);
                // If the connection is gone, the end of its stream reports that.
                let _ = reply.send(joined);
            }
            Event::Message { member, message } => self.on_message(member, message, now, on_report),
            Event::Disconnected { member, reason } => {
                self.outboxes.remove(&member);
                self.joined.remove(&member);
                self.record_unsaved(member, Duration::ZERO, on_report);
                self.membership.lost(member, &reason, now);
            }
            Event::Exited { slot, launch, reason } => {
                self.kills.remove(&(slot, launch));
                self.membership.exited(slot, launch, &reason, now);
            }
        }
    }

    fn join(
        &mut self,
        hello: &proto::Hello,
        outbox: mpsc::Sender<Result<proto::ToWorker, Status>>,
        now: Instant,
    ) -> Result<MemberId, String> {
        let (slot, ring) = (hello.slot as usize, hello.ring_address.clone());
        let member = self.membership.joined(slot, hello.launch, hello.pid, ring, now)?;
        tracing::info!(job = self.params.job, worker = hello.slot, pid = hello.pid, "worker joined");
        let welcome =
            proto::Welcome { member, assignment: self.params.assignment.clone(), ring_nonce: Vec::new() };
        if outbox.try_send(Ok(to_worker_message(to_worker::Message::Welcome(welcome)))).is_ok() {
            self.outboxes.insert(member, outbox);
        }
        Ok(member)
    }

    /// Gives a worker of another machine its place and its assignment; none if no place is free.
    fn admit(
        &mut self,
        hello: proto::Hello,
        host: String,
        outbox: mpsc::Sender<Result<proto::ToWorker, Status>>,
        now: Instant,
    ) -> Option<MemberId> {
        let joining = self.params.joining.as_ref()?;
        let pid = hello.pid;
        let member = self.membership.admitted(pid, hello.ring_address, host.clone(), now)?;
        tracing::info!(job = self.params.job, host, pid, "worker of another machine joined");
        let welcome = proto::Welcome {
            member,
            assignment: joining.assignment.clone(),
            ring_nonce: self.ring_nonce.to_vec(),
        };
        if outbox.try_send(Ok(to_worker_message(to_worker::Message::Welcome(welcome)))).is_ok() {
            self.outboxes.insert(member, outbox);
            self.joined.insert(member);
        }
        Some(member)
    }

    fn on_message(
        &mut self,
        member: MemberId,
        message: from_worker::Message,
        now: Instant,
        on_report: &mut impl FnMut(Report),
    ) {
        match message {
            from_worker::Message::Hello(_) | from_worker::Message::Proof(_) => {
                self.membership.lost(member, "introduced itself twice", now);
            }
            from_worker::Message::Leaving(proto::Leaving { writing: true, .. }) => {
                self.membership.leaving(member, now);
            }
            from_worker::Message::Leaving(_) => self.membership.left(member, now),
            from_worker::Message::Heartbeat(beat) => {
                if let Some(step) = beat.step {
                    let exchange = beat.exchange.chars().filter(|c| !c.is_control()).take(EXCHANGE_CHARS_MAX);
                    self.membership.record_place(member, step, exchange.collect());
                }
                self.record_unsaved(member, Duration::from_millis(beat.unsaved_ms), on_report);
                let computing = Duration::from_millis(beat.computing_ms);
                self.membership.computing(member, computing, now);
            }
            from_worker::Message::Arrive(arrive) => {
                let reason = match arrive.reason() {
                    proto::Reason::Left => Reason::Left,
                    proto::Reason::Broken => Reason::Broken,
                    proto::Reason::Fresh | proto::Reason::Unspecified => Reason::Fresh,
                };
                if let Some(rank) = arrive.suspect_rank {
                    let suspect = self.membership.describe(arrive.epoch, rank);
                    let suspect = suspect.map_or_else(String::new, |peer| peer.to_string());
                    tracing::warn!(
                        epoch = arrive.epoch,
                        step = arrive.step,
                        rank,
                        suspect,
                        trouble = arrive.trouble,
                        "ring broke: rank missing"
                    );
                }
                let suspect = arrive.suspect_rank.map(|rank| (arrive.epoch, rank));
                let state = (arrive.step, arrive.lineage);
                self.membership.arrived(member, state, reason, suspect, now);
            }
            // A member that was removed may have sent it before.
            from_worker::Message::Progress(_) if !self.membership.is_member(member) => {}
            from_worker::Message::Progress(progress) => {
                self.membership.record_contact(member, now);
                self.membership.record_progress(progress.step);
                let before = (self.report.step, self.report.rows);
                self.report = Report {
                    step: progress.step,
                    epoch: progress.epoch,
                    loss: progress.loss,
                    rows: progress.rows,
                    evaluation: progress.evaluation.map(Into::into),
                    pids: self.membership.pids(),
                    membership_epoch: self.membership.epoch(),
                    missing: self.report.missing,
                    unsaved: self.report.unsaved,
                    listening: self.report.listening,
                };
                if let Some(evaluation) = &self.report.evaluation {
                    metrics::record_evaluation(evaluation.loss, evaluation.accuracy);
                }
                if before.0 > 0 {
                    metrics::record_progress(
                        progress.step.saturating_sub(before.0),
                        progress.rows.saturating_sub(before.1),
                    );
                }
                on_report(self.report.clone());
            }
            from_worker::Message::Finished(finished) => {
                self.membership.finished(member, finished.stopped, now);
            }
            from_worker::Message::Failed(failed) => {
                let exit_code = u8::try_from(failed.exit_code).unwrap_or(1);
                if failed.outage {
                    // Without a lease that is renewed, the metadata does not answer here either.
                    let is_everywhere = self.params.lease.as_ref().is_some_and(|lease| !lease.is_fresh());
                    self.membership.unsaved(member, &failed.message, exit_code, is_everywhere, now);
                } else if failed.alone {
                    self.membership.failed_alone(member, &failed.message, exit_code, now);
                } else {
                    self.membership.failed(member, failed.message, exit_code, now);
                }
            }
        }
    }

    /// Takes note of how long the volumes have not taken a member's checkpoint.
    fn record_unsaved(&mut self, member: MemberId, time: Duration, on_report: &mut impl FnMut(Report)) {
        let is_known = self.unsaved == Some(member);
        match (is_known, time.is_zero()) {
            (false, true) => return,
            (true, true) => {
                tracing::info!(job = self.params.job, "the volumes take checkpoints again");
                self.unsaved = None;
            }
            (false, false) if self.unsaved.is_some() => return,
            (false, false) => {
                tracing::warn!(
                    job = self.params.job,
                    "the volumes take no checkpoint: training goes on, and the worker tries again"
                );
                self.unsaved = Some(member);
            }
            (true, false) => {}
        }
        self.report.unsaved = time;
        on_report(self.report.clone());
    }

    /// Why workers of other machines stay after this verdict, and look for the next coordinator; none if the job is
    /// over for them.
    fn keeps_joined(&self, verdict: &Verdict) -> Option<&'static str> {
        match verdict {
            Verdict::Outage { .. } => Some("the volumes take no checkpoint, so keep the state"),
            Verdict::WorkersLost { .. } if self.params.hand_over => Some(HANDED_OVER),
            _ if self.params.hand_over && self.stopping() => Some(HANDED_OVER),
            _ => None,
        }
    }

    /// Tells the workers of other machines that the job is over or, for a reason why this process may not say so,
    /// to look for the coordinator that may.
    fn dismiss(&mut self, reason: Option<&str>) {
        if let Some(reason) = reason {
            tracing::info!(
                job = self.params.job,
                reason,
                "workers of other machines look for another coordinator"
            );
        }
        for member in std::mem::take(&mut self.dismissed) {
            // Without it, the stream ends.
            let Some(outbox) = self.outboxes.remove(&member) else { continue };
            // A full outbox belongs to a worker that finds the next coordinator without this message.
            let _ = outbox.try_send(match reason {
                Some(reason) => Err(Status::unavailable(reason)),
                None => Ok(to_worker_message(to_worker::Message::Done(proto::Done {}))),
            });
        }
    }

    /// Carries out the decided actions; returns the verdict when the job is over.
    fn act(&mut self) -> Option<Verdict> {
        let mut verdict = None;
        loop {
            let actions = self.membership.take_actions();
            if actions.is_empty() {
                return verdict;
            }
            for action in actions {
                match action {
                    Action::Spawn { slot, launch } => self.spawn(slot, launch),
                    Action::Kill { slot, launch } => {
                        metrics::worker_lost();
                        if let Some(kill) = self.kills.get(&(slot, launch)) {
                            kill.cancel();
                        }
                    }
                    Action::Close { member, reason, lost } => {
                        if lost {
                            metrics::worker_lost();
                        }
                        self.joined.remove(&member);
                        if let Some(outbox) = self.outboxes.remove(&member) {
                            // A full outbox belongs to a worker that reads nothing anyway.
                            let _ = outbox.try_send(Err(Status::aborted(reason)));
                        }
                    }
                    Action::Send { member, message } => self.send(member, message),
                    Action::End(ended) => verdict = Some(ended),
                }
            }
        }
    }

    fn send(&mut self, member: MemberId, message: Message) {
        if message == Message::Done && self.joined.contains(&member) {
            self.dismissed.push(member);
            return;
        }
        if let Message::Formed { epoch, rank: 0, peers } = &message {
            self.formed.get_or_insert_with(Instant::now);
            metrics::epoch_formed();
            metrics::workers_alive(peers.len());
            tracing::info!(job = self.params.job, epoch, workers = peers.len(), "membership epoch formed");
        }
        let sent = self
            .outboxes
            .get(&member)
            .is_some_and(|outbox| outbox.try_send(Ok(to_worker_message(encode(message)))).is_ok());
        if !sent {
            self.outboxes.remove(&member);
            self.membership.lost(member, "does not read its messages", Instant::now());
        }
    }

    fn spawn(&mut self, slot: usize, launch: u64) {
        let worker_env = WorkerEnv {
            coordinator: self.address.to_string(),
            token: self.params.token.clone(),
            slot,
            launch,
            ring: self.params.joining.as_ref().and_then(|joining| RingEnv::of(joining.listen)),
        };
        let mut child = match self.params.command.spawn(&worker_env, self.params.workers) {
            Ok(child) => child,
            Err(error) => {
                tracing::error!(job = self.params.job, worker = slot, %error, "worker did not start");
                self.membership.exited(slot, launch, &error.to_string(), Instant::now());
                return;
            }
        };
        tracing::debug!(job = self.params.job, worker = slot, pid = child.id(), "worker started");
        let kill = self.shutdown.child_token();
        self.kills.insert((slot, launch), kill.clone());
        let (events, shutdown) = (self.events.clone(), self.shutdown.clone());
        self.tasks.spawn(async move {
            let status = tokio::select! {
                status = child.wait() => status,
                () = kill.cancelled() => {
                    // An error means that the process has exited already.
                    let _ = child.start_kill();
                    child.wait().await
                }
            };
            // A full inbox must not lose an exit; once the job is over, the inbox is not read any more.
            let exited = Event::Exited { slot, launch, reason: describe_exit(status) };
            if let Err(mpsc::error::TrySendError::Full(exited)) = events.try_send(exited) {
                shutdown.run_until_cancelled(events.send(exited)).await;
            }
        });
    }
}

fn to_worker_message(message: to_worker::Message) -> proto::ToWorker {
    proto::ToWorker { message: Some(message) }
}

fn encode(message: Message) -> to_worker::Message {
    match message {
        Message::Formed { epoch, rank, peers } => to_worker::Message::Formed(proto::Formed {
            epoch,
            rank: rank as u32,
            members: peers
                .into_iter()
                .map(|peer| proto::Peer {
                    ring_address: peer.address,
                    step: peer.step,
                    lineage: peer.lineage,
                    pid: peer.pid,
                    host: peer.host,
                })
                .collect(),
        }),
        Message::Broken { epoch } => to_worker::Message::Broken(proto::Broken { epoch }),
        Message::Reform { epoch } => to_worker::Message::Reform(proto::Reform { epoch }),
        Message::Save => to_worker::Message::Save(proto::Save {}),
        Message::Stop => to_worker::Message::Stop(proto::Stop {}),
        Message::Done => to_worker::Message::Done(proto::Done {}),
    }
}

/// Listens for workers of other machines until `shutdown`; returns the address.
async fn admit(
    listen: &Listen,
    service: CoordinatorService,
    config: &Config,
    shutdown: CancellationToken,
) -> Result<SocketAddr> {
    let what = || format!("listen on {} for workers of other machines", listen.address);
    let listener = TcpListener::bind(listen.address).await.map_err(|e| Error::io(what(), e))?;
    let address = listener.local_addr().map_err(|e| Error::io(what(), e))?;
    let half = config.heartbeat_lost() / 2;
    let server = tonic::transport::Server::builder()
        .http2_keepalive_interval(Some(half))
        .http2_keepalive_timeout(Some(half))
        .max_concurrent_streams(STREAMS_MAX)
        .add_service(CoordinatorServer::new(service).max_decoding_message_size(MESSAGE_BYTES_MAX))
        .serve_with_incoming_shutdown(
            listener::accept(listener, listen.tls.clone(), listener::PROOF_TIMEOUT),
            shutdown.cancelled_owned(),
        );
    tokio::spawn(async move {
        if let Err(error) = server.await {
            tracing::error!(%address, %error, "the port for workers of other machines failed");
        }
    });
    Ok(address)
}

/// Which workers a port admits.
#[derive(Clone)]
enum Admission {
    /// Those that the coordinator launched; the token reached them in their environment.
    Launched { token: String },
    /// Those of other machines; the token is never sent.
    Joining { token: Token },
}

/// The gRPC service that admits workers with the right token.
struct CoordinatorService {
    admission: Admission,
    events: mpsc::Sender<Event>,
}

type Outbox = mpsc::Sender<Result<proto::ToWorker, Status>>;

fn gone() -> Status {
    Status::unavailable("the job is over")
}

#[tonic::async_trait]
impl Service for CoordinatorService {
    type SessionStream = Pin<Box<dyn Stream<Item = Result<proto::ToWorker, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<proto::FromWorker>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let standing = request.extensions().get::<Standing>().cloned().unwrap_or_default();
        let mut messages = request.into_inner();
        let first = tokio::time::timeout(HELLO_TIMEOUT, messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no greeting"))??;
        let Some(from_worker::Message::Hello(hello)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message must be a greeting"));
        };
        let (outbox, outgoing) = mpsc::channel(OUTBOX_MAX);
        let events = self.events.clone();
        match &self.admission {
            Admission::Launched { token } => {
                if !bool::from(hello.token.as_bytes().ct_eq(token.as_bytes())) {
                    return Err(Status::permission_denied("wrong token"));
                }
                let (reply, answer) = oneshot::channel();
                events.send(Event::Joined { hello, outbox, reply }).await.map_err(|_| gone())?;
                let member = answer.await.map_err(|_| gone())?.map_err(Status::failed_precondition)?;
                tokio::spawn(relay(member, messages, events));
            }
            Admission::Joining { token } => {
                // The worker reads the challenge from the reply, so the reply begins before the proof.
                let token = token.clone();
                tokio::spawn(async move {
                    let refuse = outbox.clone();
                    match challenge(&token, hello, &mut messages, outbox, &standing, &events).await {
                        Ok(member) => {
                            // The stream closes when the coordinator drops its end.
                            drop(refuse);
                            relay(member, messages, events).await;
                        }
                        Err(status) => {
                            tracing::warn!(reason = status.message(), "a worker was not admitted");
                            let _ = refuse.send(Err(status)).await;
                        }
                    }
                });
            }
        }
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }
}

/// Lets a worker of another machine prove the token, and makes it a member.
async fn challenge(
    token: &Token,
    hello: proto::Hello,
    messages: &mut Streaming<proto::FromWorker>,
    outbox: Outbox,
    standing: &Standing,
    events: &mpsc::Sender<Event>,
) -> Result<MemberId, Status> {
    let Some(join) = &hello.join else {
        return Err(Status::invalid_argument("this port is for workers that join with --join"));
    };
    if join.protocol != PROTOCOL {
        return Err(Status::failed_precondition(format!(
            "the coordinator is millrace {} with protocol {PROTOCOL}, this is millrace {:.20} with protocol {}: install \
             the same version on both machines",
            env!("CARGO_PKG_VERSION"),
            join.version,
            join.protocol
        )));
    }
    if join.nonce.len() != NONCE_BYTES || hello.ring_address.len() > NAME_BYTES_MAX {
        return Err(Status::invalid_argument("the greeting is not one of a millrace worker"));
    }
    let own = nonce().map_err(|error| Status::internal(error.one_line()))?;
    let asked = to_worker::Message::Challenge(proto::Challenge {
        protocol: PROTOCOL,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        nonce: own.to_vec(),
        proof: coordinator_proof(token, &join.nonce, &own),
    });
    outbox.send(Ok(to_worker_message(asked))).await.map_err(|_| gone())?;
    let answer = tokio::time::timeout(HELLO_TIMEOUT, messages.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no proof of the token"))??;
    let proof = match answer.and_then(|answer| answer.message) {
        Some(from_worker::Message::Proof(proof)) => proof.proof,
        _ => return Err(Status::invalid_argument("no proof of the token")),
    };
    if !is_worker_proof(token, &join.nonce, &own, &hello.ring_address, &proof) {
        return Err(Status::permission_denied(
            "the worker has another token than the coordinator: copy the coordinator's token file",
        ));
    }
    standing.prove();
    if !join::has_port(&hello.ring_address) {
        return Err(Status::invalid_argument("the worker's ring address is not HOST:PORT"));
    }
    // Other workers have to find this one. A name server that does not know it may do so soon.
    join::resolve("--advertise", &hello.ring_address).await.map_err(|error| {
        Status::unavailable(format!("the coordinator's machine does not find the worker: {error}"))
    })?;
    let host: String = join.host.chars().filter(|c| !c.is_control()).take(NAME_BYTES_MAX).collect();
    let (reply, admitted) = oneshot::channel();
    events.send(Event::Admitted { hello, host, outbox, reply }).await.map_err(|_| gone())?;
    admitted.await.map_err(|_| gone())?.ok_or_else(|| {
        Status::resource_exhausted("the job has all the workers that it may have (workers_max)")
    })
}

/// Hands a member's messages to the coordinator until its stream ends.
async fn relay(member: MemberId, mut messages: Streaming<proto::FromWorker>, events: mpsc::Sender<Event>) {
    let reason = loop {
        match messages.next().await {
            Some(Ok(proto::FromWorker { message: Some(message) })) => {
                if events.send(Event::Message { member, message }).await.is_err() {
                    return;
                }
            }
            Some(Ok(proto::FromWorker { message: None })) => break "sent an unknown message".to_owned(),
            Some(Err(status)) => break format!("lost its connection ({})", status.message()),
            None => break "closed its connection".to_owned(),
        }
    };
    // Once the job is over, the inbox is closed.
    let _ = events.send(Event::Disconnected { member, reason }).await;
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::super::proto::coordinator_client::CoordinatorClient;
    use super::*;
    use crate::proof::prove;

    /// What a worker says, and the coordinator's last answer to it.
    async fn told(hello: proto::Hello, proof: impl Fn(&proto::Challenge) -> Vec<u8>) -> Status {
        let listen = Listen {
            address: "127.0.0.1:0".parse().unwrap(),
            advertise: None,
            token: Token::of("0123456789abcdef"),
            tls: None,
            workers_local: Some(0),
        };
        let (events, _inbox) = mpsc::channel(8);
        let service =
            CoordinatorService { admission: Admission::Joining { token: listen.token.clone() }, events };
        let shutdown = CancellationToken::new();
        let _stop = shutdown.clone().drop_guard();
        let address = admit(&listen, service, &Config::default(), shutdown).await.unwrap();
        let mut client = CoordinatorClient::connect(format!("http://{address}")).await.unwrap();
        let (outgoing, messages) = mpsc::channel(8);
        let send = |message| outgoing.try_send(proto::FromWorker { message: Some(message) }).unwrap();
        send(from_worker::Message::Hello(hello));
        let mut answers = match client.session(ReceiverStream::new(messages)).await {
            Ok(answers) => answers.into_inner(),
            Err(status) => return status,
        };
        loop {
            match answers.message().await {
                Ok(Some(proto::ToWorker { message: Some(to_worker::Message::Challenge(challenge)) })) => {
                    let proof = proof(&challenge);
                    send(from_worker::Message::Proof(proto::Proof { proof }));
                }
                Ok(other) => panic!("admitted with {other:?}"),
                Err(status) => return status,
            }
        }
    }

    fn hello(protocol: u32) -> proto::Hello {
        let join =
            proto::Join { protocol, version: "9.9.9".into(), host: "b".into(), nonce: vec![3; NONCE_BYTES] };
        proto::Hello { ring_address: "127.0.0.1:1".into(), join: Some(join), ..Default::default() }
    }

    #[tokio::test]
    async fn workers_without_the_protocol_or_the_token_are_refused() {
        let no_proof = |_: &proto::Challenge| Vec::new();
        let status = told(hello(PROTOCOL + 1), no_proof).await;
        assert_eq!(status.code(), Code::FailedPrecondition);
        assert!(status.message().contains("9.9.9") && status.message().contains("same version"), "{status}");
        // A worker of this machine, which came to the wrong port.
        let status = told(proto::Hello::default(), no_proof).await;
        assert_eq!(status.code(), Code::InvalidArgument);
        let status = told(hello(PROTOCOL), no_proof).await;
        assert_eq!(status.code(), Code::PermissionDenied);
        // The coordinator's own proof, sent back.
        let status = told(hello(PROTOCOL), |challenge| challenge.proof.clone()).await;
        assert_eq!(status.code(), Code::PermissionDenied);
        // The right token for another ring address.
        let elsewhere = |challenge: &proto::Challenge| {
            let parts: [&[u8]; 3] = [&[3; NONCE_BYTES], &challenge.nonce, b"10.0.0.9:1"];
            prove(b"0123456789abcdef", "millrace worker", &parts).to_vec()
        };
        assert_eq!(told(hello(PROTOCOL), elsewhere).await.code(), Code::PermissionDenied);
    }

    #[tokio::test]
    async fn a_worker_that_others_do_not_find_may_come_again() {
        let told_of = async |address: &str| {
            let greeting = proto::Hello { ring_address: address.to_owned(), ..hello(PROTOCOL) };
            let proof = |challenge: &proto::Challenge| {
                let parts: [&[u8]; 3] = [&[3; NONCE_BYTES], &challenge.nonce, address.as_bytes()];
                prove(b"0123456789abcdef", "millrace worker", &parts).to_vec()
            };
            told(greeting, proof).await
        };
        // As of a name server that does not answer for a moment.
        let status = told_of("no.such.invalid:1").await;
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("no.such.invalid:1"), "{status}");
        for never in ["no.such.invalid", ":1", "a:b"] {
            assert_eq!(told_of(never).await.code(), Code::InvalidArgument, "{never}");
        }
    }

    /// The coordinator of a job without launched workers.
    fn actor<'a>(params: &'a CoordinatorParams<'a>, now: Instant) -> Actor<'a> {
        let rules = Rules { places: 2, ..super::super::tests::rules(0) };
        Actor {
            membership: Membership::new(rules, now),
            outboxes: BTreeMap::new(),
            joined: BTreeSet::new(),
            kills: BTreeMap::new(),
            events: mpsc::channel(1).0,
            tasks: TaskTracker::new(),
            shutdown: CancellationToken::new(),
            params,
            address: "127.0.0.1:1".parse().unwrap(),
            formed: None,
            report: Report::default(),
            unsaved: None,
            dismissed: Vec::new(),
            ring_nonce: nonce().unwrap(),
        }
    }

    fn params<'a>(config: &'a Config, command: &'a WorkerCommand) -> CoordinatorParams<'a> {
        CoordinatorParams {
            job: "j",
            workers: 0,
            workers_min: 1,
            config,
            command,
            token: String::new(),
            assignment: String::new(),
            joining: None,
            hand_over: false,
            lease: None,
        }
    }

    #[tokio::test]
    async fn a_coordinator_without_its_lease_dismisses_no_worker() {
        let (config, command) = (Config::default(), WorkerCommand::current_exe(["worker"]));
        let params = params(&config, &command);
        let now = Instant::now();
        for reason in [None, Some("another process has the lease")] {
            let mut actor = actor(&params, now);
            let member = actor.membership.admitted(1, "b:1".into(), "b".into(), now).unwrap();
            let (outbox, mut told) = mpsc::channel(4);
            actor.outboxes.insert(member, outbox);
            actor.joined.insert(member);
            let failed = proto::Failed { message: "loss is NaN".into(), exit_code: 6, ..Default::default() };
            actor.on_message(member, from_worker::Message::Failed(failed), now, &mut |_| {});
            let verdict = actor.act().unwrap();
            assert!(matches!(verdict, Verdict::Failed { .. }) && actor.keeps_joined(&verdict).is_none());
            assert!(told.try_recv().is_err(), "told before the lease was looked at");
            actor.dismiss(reason);
            match (reason, told.try_recv().unwrap()) {
                (None, Ok(proto::ToWorker { message: Some(to_worker::Message::Done(_)) })) => {}
                (Some(_), Err(status)) => assert_eq!(status.code(), Code::Unavailable),
                (_, other) => panic!("{other:?}"),
            }
        }
        // After an outage, the state in the workers' memory is all there may be.
        let verdict = Verdict::Outage { message: String::new() };
        assert!(actor(&params, now).keeps_joined(&verdict).is_some());
    }

    #[tokio::test]
    async fn the_time_without_a_checkpoint_is_reported_until_it_ends() {
        let (config, command) = (Config::default(), WorkerCommand::current_exe(["worker"]));
        let params = params(&config, &command);
        let now = Instant::now();
        let mut actor = actor(&params, now);
        let [first, second] =
            [1, 2].map(|pid| actor.membership.admitted(pid, "b:1".into(), "b".into(), now).unwrap());
        let mut seen = Vec::new();
        for (member, unsaved_ms) in [(first, 0), (second, 70), (first, 0), (second, 90), (second, 0)] {
            let beat = proto::Heartbeat { unsaved_ms, ..Default::default() };
            let message = from_worker::Message::Heartbeat(beat);
            actor.on_message(member, message, now, &mut |report| seen.push(report.unsaved.as_millis()));
        }
        assert_eq!(seen, [70, 90, 0]);
    }

    #[tokio::test]
    async fn late_progress_of_a_removed_member_changes_no_report() {
        let (config, command) = (Config::default(), WorkerCommand::current_exe(["worker"]));
        let params = params(&config, &command);
        let now = Instant::now();
        let mut actor = actor(&params, now);
        let [old, new] =
            [1, 2].map(|pid| actor.membership.admitted(pid, "b:1".into(), "b".into(), now).unwrap());
        let mut seen = Vec::new();
        let mut progress = |actor: &mut Actor<'_>, member, step| {
            let progress = proto::Progress { step, ..Default::default() };
            let message = from_worker::Message::Progress(progress);
            actor.on_message(member, message, now, &mut |report| seen.push(report.step));
        };
        progress(&mut actor, old, 5);
        actor.membership.lost(old, "died", now);
        progress(&mut actor, new, 9);
        progress(&mut actor, old, 6);
        assert_eq!((actor.report.step, seen), (9, vec![5, 9]));
    }
}
