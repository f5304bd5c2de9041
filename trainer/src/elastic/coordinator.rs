//! The coordinator: one task that feeds events to [`Membership`] and carries out its actions.
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::{Duration, Instant};

use futures::Stream;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};

use super::membership::{Action, MemberId, Membership, Message, Reason, Rules, Verdict};
use super::proto::coordinator_server::{Coordinator as Service, CoordinatorServer};
use super::proto::{self, from_worker, to_worker};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::launch::{WorkerCommand, WorkerEnv, describe_exit};
use crate::metrics;

/// A worker alone may take this many times `exchange_timeout_ms` per step, since it computes all of it.
const STEP_EXCHANGES: u32 = 10;
/// Interval at which deadlines are checked.
const TICK: Duration = Duration::from_millis(25);
/// Deadline for the first message of a connection.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long workers may take to exit after the job's end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Messages queued for one worker. A worker that lets more accumulate counts as lost.
const OUTBOX_MAX: usize = 256;

/// The latest report of rank 0, with the process ids of the current members.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Report {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) rows: u64,
    pub(crate) pids: Vec<u32>,
    pub(crate) membership_epoch: u64,
}

/// How the workers' part of a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) stopped: bool,
    pub(crate) workers_lost: u32,
    pub(crate) membership_epochs: u64,
    /// From the first formed epoch to the end.
    pub(crate) trained: Duration,
}

/// Parameters of a job's coordinator.
pub(crate) struct CoordinatorParams<'a> {
    pub(crate) job: &'a str,
    pub(crate) workers: usize,
    pub(crate) config: &'a Config,
    pub(crate) command: &'a WorkerCommand,
    pub(crate) token: String,
    /// The assignment as JSON, sent to every worker that says hello.
    pub(crate) assignment: String,
}

enum Event {
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
    params: CoordinatorParams<'_>,
    cancel: CancellationToken,
    mut on_report: impl FnMut(Report),
) -> Result<Outcome> {
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
            token: params.token.clone(),
            events: events.clone(),
        }))
        .serve_with_incoming_shutdown(TcpListenerStream::new(listener), shutdown.clone().cancelled_owned());
    let mut server = tokio::spawn(server);

    let config = params.config;
    let rules = Rules {
        workers: params.workers,
        respawns_max: config.respawns_max,
        respawn_backoff: Duration::from_millis(config.respawn_backoff_ms),
        heartbeat_lost: config.heartbeat_lost(),
        start_timeout: config.start_timeout(),
        rendezvous_timeout: config.rendezvous_timeout(),
        stop_timeout: config.stop_timeout(),
        step_timeout: config.exchange_timeout().saturating_mul(STEP_EXCHANGES),
    };
    let mut state = Actor {
        membership: Membership::new(rules, Instant::now()),
        outboxes: BTreeMap::new(),
        kills: BTreeMap::new(),
        events,
        tasks: tasks.clone(),
        shutdown: shutdown.clone(),
        params: &params,
        address,
        formed: None,
        report: Report::default(),
    };
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let verdict = loop {
        tokio::select! {
            Some(event) = inbox.recv() => state.on_event(event, &mut on_report),
            _ = ticks.tick() => state.membership.tick(Instant::now()),
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
        membership_epochs: state.membership.epoch(),
        trained: state.formed.map_or(Duration::ZERO, |formed| ended - formed),
    };
    match verdict {
        Verdict::Finished { .. } => Ok(outcome),
        Verdict::Failed { message, exit_code } => Err(Error::Worker { message, exit_code }),
        Verdict::WorkersLost { reason, exit_code } => Err(Error::WorkersLost {
            job: params.job.to_owned(),
            respawns: state.membership.respawns(),
            reason,
            exit_code,
        }),
    }
}

struct Actor<'a> {
    membership: Membership,
    outboxes: BTreeMap<MemberId, mpsc::Sender<Result<proto::ToWorker, Status>>>,
    kills: BTreeMap<(usize, u64), CancellationToken>,
    events: mpsc::Sender<Event>,
    tasks: TaskTracker,
    shutdown: CancellationToken,
    params: &'a CoordinatorParams<'a>,
    address: SocketAddr,
    formed: Option<Instant>,
    report: Report,
}

impl Actor<'_> {
    fn stopping(&self) -> bool {
        self.membership.stopping()
    }

    fn stop(&mut self) {
        tracing::info!(job = self.params.job, "stopping after the current step");
        self.membership.stop(Instant::now());
    }

    fn on_event(&mut self, event: Event, on_report: &mut impl FnMut(Report)) {
        let now = Instant::now();
        match event {
            Event::Joined { hello, outbox, reply } => {
                let joined = self.join(&hello, outbox, now);
                // If the connection is gone, the end of its stream reports that.
                let _ = reply.send(joined);
            }
            Event::Message { member, message } => self.on_message(member, message, now, on_report),
            Event::Disconnected { member, reason } => {
                self.outboxes.remove(&member);
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
        let ring: SocketAddr = hello
            .ring_address
            .parse()
            .map_err(|_| format!("ring address {:?} is not ip:port", hello.ring_address))?;
        let member = self.membership.joined(hello.slot as usize, hello.launch, hello.pid, ring, now)?;
        tracing::info!(job = self.params.job, worker = hello.slot, pid = hello.pid, "worker joined");
        let welcome = proto::Welcome { member, assignment: self.params.assignment.clone() };
        if outbox.try_send(Ok(to_worker_message(to_worker::Message::Welcome(welcome)))).is_ok() {
            self.outboxes.insert(member, outbox);
        }
        Ok(member)
    }

    fn on_message(
        &mut self,
        member: MemberId,
        message: from_worker::Message,
        now: Instant,
        on_report: &mut impl FnMut(Report),
    ) {
        match message {
            from_worker::Message::Hello(_) => {
                self.membership.lost(member, "introduced itself twice", now);
            }
            from_worker::Message::Heartbeat(beat) => {
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
                    tracing::info!(
                        epoch = arrive.epoch,
                        step = arrive.step,
                        rank,
                        "ring broke: rank missing"
                    );
                }
                self.membership.arrived(member, arrive.step, reason, now);
            }
            from_worker::Message::Progress(progress) => {
                self.membership.record_contact(member, now);
                self.membership.record_progress(progress.step);
                let before = (self.report.step, self.report.rows);
                self.report = Report {
                    step: progress.step,
                    epoch: progress.epoch,
                    loss: progress.loss,
                    rows: progress.rows,
                    pids: self.membership.pids(),
                    membership_epoch: self.membership.epoch(),
                };
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
                if failed.alone {
                    self.membership.failed_alone(member, &failed.message, exit_code, now);
                } else {
                    self.membership.failed(member, failed.message, exit_code);
                }
            }
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
                    Action::Send { member, message } => self.send(member, message),
                    Action::End(ended) => verdict = Some(ended),
                }
            }
        }
    }

    fn send(&mut self, member: MemberId, message: Message) {
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
                    ring_address: peer.address.to_string(),
                    step: peer.step,
                    pid: peer.pid,
                })
                .collect(),
        }),
        Message::Broken { epoch } => to_worker::Message::Broken(proto::Broken { epoch }),
        Message::Reform { epoch } => to_worker::Message::Reform(proto::Reform { epoch }),
        Message::Stop => to_worker::Message::Stop(proto::Stop {}),
        Message::Done => to_worker::Message::Done(proto::Done {}),
    }
}

/// The gRPC service that admits workers with the right token.
struct CoordinatorService {
    token: String,
    events: mpsc::Sender<Event>,
}

#[tonic::async_trait]
impl Service for CoordinatorService {
    type SessionStream = Pin<Box<dyn Stream<Item = Result<proto::ToWorker, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<proto::FromWorker>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut messages = request.into_inner();
        let first = tokio::time::timeout(HELLO_TIMEOUT, messages.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no greeting"))??;
        let Some(from_worker::Message::Hello(hello)) = first.and_then(|first| first.message) else {
            return Err(Status::invalid_argument("the first message must be a greeting"));
        };
        if hello.token != self.token {
            return Err(Status::permission_denied("wrong token"));
        }
        let gone = || Status::unavailable("the job is over");
        let (outbox, outgoing) = mpsc::channel(OUTBOX_MAX);
        let (reply, answer) = oneshot::channel();
        let events = self.events.clone();
        events.send(Event::Joined { hello, outbox, reply }).await.map_err(|_| gone())?;
        let member = answer.await.map_err(|_| gone())?.map_err(Status::failed_precondition)?;
        tokio::spawn(async move {
            let reason = loop {
                match messages.next().await {
                    Some(Ok(proto::FromWorker { message: Some(message) })) => {
                        if events.send(Event::Message { member, message }).await.is_err() {
                            return;
                        }
                    }
                    Some(Ok(proto::FromWorker { message: None })) => {
                        break "sent an unknown message".to_owned();
                    }
                    Some(Err(status)) => break format!("lost its connection ({})", status.message()),
                    None => break "closed its connection".to_owned(),
                }
            };
            // Once the job is over, the inbox is closed.
            let _ = events.send(Event::Disconnected { member, reason }).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(outgoing))))
    }
}
