//! A worker's session: its end of the stream to the coordinator.
//!
//! A task on the worker's runtime reads and writes the stream, so that heartbeats continue while the training
//! thread computes. The training thread blocks here at barriers only. When the stream breaks, the task ends
//! the process of a launched worker, which never outlives its coordinator. A worker that joined over the network
//! ([`super::joining`]) notices at its next exchange or barrier, and joins again.
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::transport::Endpoint;

use super::membership::{Peer, Reason};
use super::proto::coordinator_client::CoordinatorClient;
use super::proto::{self, from_worker, to_worker};
use crate::collective;
use crate::error::{Error, Result};
use crate::launch::WorkerEnv;
use crate::outage::Outage;
use crate::spent::Spent;
use crate::validation::Evaluation;

/// Deadline for the coordinator's answer to the greeting. Long, because the coordinator may be stopped for a
/// while (Ctrl-Z); if it is gone, the connection breaks at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(600);
/// How long the training thread may take to notice that the coordinator is gone.
const VANISH_GRACE: Duration = Duration::from_secs(2);
/// Largest message accepted from the coordinator, which launched this process. A plan names every file and
/// row group of its dataset.
const MESSAGE_BYTES_MAX: usize = 2 << 30;
/// How long a worker waits for the coordinator's answer when it leaves or fails. The coordinator also reads what it
/// has been sent after that.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
const FAIL_TIMEOUT: Duration = Duration::from_secs(10);
const LEAVE_POLL: Duration = Duration::from_millis(5);
/// Exit code of a worker that lost its coordinator.
const EXIT_COORDINATOR_LOST: i32 = 3;

/// A formed membership epoch, as this worker sees it.
#[derive(Debug)]
pub(crate) struct EpochMembership {
    pub(crate) epoch: u64,
    pub(crate) rank: usize,
    pub(crate) peers: Vec<Peer>,
    /// Whether the coordinator had told the stop before this epoch formed: its members save their state and compute no
    /// step. The coordinator tells all members before, and its messages arrive in order, so that all ranks agree.
    pub(crate) is_last: bool,
    /// Cancelled when the epoch is over.
    pub(crate) abort: CancellationToken,
}

/// The outcome of waiting at the barrier.
#[derive(Debug)]
pub(crate) enum Barrier {
    Formed(EpochMembership),
    Done,
    /// This worker was asked to leave.
    Preempted,
    /// Too few workers are here: make the state durable, then wait on ([`Session::wait`]).
    Save,
}

/// The outcome of waiting after the last step.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The job is over.
    Done,
    /// A member was lost before the end was durable: go back to the barrier.
    Broken,
}

/// A progress report of rank 0. Only the newest is sent.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Report {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
    pub(crate) loss: f64,
    pub(crate) rows: u64,
    pub(crate) evaluation: Option<Evaluation>,
    pub(crate) spent: Spent,
}

enum Notice {
    Formed(EpochMembership),
    Broken(u64),
    Done,
    Preempted,
    Save,
    Lost(String),
}

/// Whom an error of a worker concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// Perhaps this worker alone.
    Worker,
    /// The whole job: every worker would meet it.
    Job,
    /// The volumes, which did not take a checkpoint for too long. The coordinator finds out whose.
    Volumes,
}

impl Scope {
    pub(crate) fn of(error: &Error) -> Scope {
        match error {
            Error::Outage { .. } => Scope::Volumes,
            error if error.is_local() => Scope::Worker,
            _ => Scope::Job,
        }
    }
}

/// An exchange between workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exchange {
    Formation = 1,
    State,
    Gradients,
    Evaluation,
}

impl Exchange {
    /// The exchange of a number in [`Flags`], for messages.
    fn name(number: u8) -> &'static str {
        const NAMES: [(Exchange, &str); 4] = [
            (Exchange::Formation, "the formation of the ring"),
            (Exchange::State, "the transfer of the state"),
            (Exchange::Gradients, "the sum of the gradients"),
            (Exchange::Evaluation, "the sum of an evaluation"),
        ];
        NAMES.iter().find(|(exchange, _)| *exchange as u8 == number).map_or("", |(_, name)| name)
    }
}

#[derive(Default)]
struct Flags {
    leave: AtomicBool,
    stop: AtomicBool,
    preempted: AtomicBool,
    /// Incremented when a step begins and when it ends: odd while the training thread computes one.
    steps: AtomicU64,
    /// The step that the training thread is at, and its [`Exchange`]; 0 outside of one.
    step: AtomicU64,
    exchange: AtomicU8,
    /// The checkpoint that the volumes do not take, and the rows that they do not give.
    outages: OnceLock<[Arc<Outage>; 2]>,
}

impl Flags {
    /// For how long the volumes take no checkpoint, in milliseconds.
    fn unsaved_ms(&self) -> u64 {
        self.outages.get().map_or(0, |[unsaved, _]| millis(unsaved.elapsed()))
    }

    /// For how long the volumes give no rows, in milliseconds. An outage outlasts the ring in which it began.
    fn unread_ms(&self) -> u64 {
        self.outages.get().map_or(0, |[_, unread]| millis(unread.elapsed()))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Measures for the heartbeat how long the current step has taken.
#[derive(Default)]
struct StepClock {
    seen: u64,
    computing: Duration,
}

impl StepClock {
    /// The time spent on the step that `steps` counts; `passed` is the time since the last call. Of a gap
    /// longer than twice `every`, the rest does not count, because this process was stopped.
    fn tick(&mut self, steps: u64, passed: Duration, every: Duration) -> Duration {
        self.computing = match steps % 2 == 1 && steps == self.seen {
            true => self.computing + passed.min(2 * every),
            false => Duration::ZERO,
        };
        self.seen = steps;
        self.computing
    }
}

/// The stream to the coordinator; owned by the training thread.
pub(crate) struct Session {
    address: String,
    outgoing: mpsc::Sender<proto::FromWorker>,
    notices: mpsc::UnboundedReceiver<Notice>,
    flags: Arc<Flags>,
    reports: watch::Sender<Option<Report>>,
    epoch: u64,
    /// Whether the coordinator has said that the job is over.
    is_done: bool,
    _over: DropGuard,
}

/// Timings of a session, from [`crate::config::Config`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timing {
    pub(crate) heartbeat: Duration,
    pub(crate) progress: Duration,
    /// Whether the process goes on when the coordinator is lost.
    pub(crate) outlives_coordinator: bool,
}

impl Session {
    /// Connects to the coordinator and says hello; returns the session and the assignment as JSON.
    ///
    /// [`AcceptedSession::start`] begins the heartbeats, since the assignment sets their interval.
    pub(crate) fn connect(
        runtime: &Handle,
        worker_env: &WorkerEnv,
        ring: String,
    ) -> Result<(AcceptedSession, String)> {
        let lost =
            |reason: String| Error::CoordinatorLost { address: worker_env.coordinator.clone(), reason };
        let (outgoing, messages) = mpsc::channel(64);
        let hello = proto::Hello {
            token: worker_env.token.clone(),
            slot: worker_env.slot as u32,
            launch: worker_env.launch,
            pid: std::process::id(),
            ring_address: ring,
            join: None,
        };
        let greet = async {
            let channel = Endpoint::from_shared(format!("http://{}", worker_env.coordinator))
                .map_err(|e| lost(e.to_string()))?
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .connect()
                .await
                .map_err(|e| lost(format!("cannot connect ({e})")))?;
            let mut client = CoordinatorClient::new(channel).max_decoding_message_size(MESSAGE_BYTES_MAX);
            let hello = proto::FromWorker { message: Some(from_worker::Message::Hello(hello)) };
            outgoing.send(hello).await.map_err(|_| lost("cannot greet".to_owned()))?;
            let mut incoming = client
                .session(ReceiverStream::new(messages))
                .await
                .map_err(|status| lost(format!("refused this worker ({})", status.message())))?
                .into_inner();
            let first = incoming.message().await.map_err(|s| lost(s.message().to_owned()))?;
            match first.and_then(|first| first.message) {
                Some(to_worker::Message::Welcome(welcome)) => Ok((incoming, welcome.assignment)),
                _ => Err(lost("did not welcome this worker".to_owned())),
            }
        };
        let (incoming, assignment) = runtime
            .block_on(async { tokio::time::timeout(CONNECT_TIMEOUT, greet).await })
            .map_err(|_| lost("did not answer in time".to_owned()))??;
        Ok((AcceptedSession::new(worker_env.coordinator.clone(), outgoing, incoming), assignment))
    }

    /// Waits at the barrier, with the state after `step` steps and its lineage, until an epoch forms. `trouble` is
    /// the error that broke the last ring.
    pub(crate) fn arrive(
        &mut self,
        (step, lineage): (u64, Vec<u8>),
        reason: Reason,
        trouble: Option<&collective::Error>,
    ) -> Result<Barrier> {
        if self.preempted() {
            return Ok(Barrier::Preempted);
        }
        self.flags.exchange.store(0, Ordering::Relaxed);
        let mut arrive = proto::Arrive {
            step,
            epoch: self.epoch,
            suspect_rank: trouble.and_then(collective::Error::suspect).map(|rank| rank as u32),
            trouble: trouble.map(ToString::to_string).unwrap_or_default(),
            lineage,
            unread_ms: self.flags.unread_ms(),
            ..Default::default()
        };
        arrive.set_reason(match reason {
            Reason::Fresh => proto::Reason::Fresh,
            Reason::Left => proto::Reason::Left,
            Reason::Broken => proto::Reason::Broken,
        });
        self.send_or_end(from_worker::Message::Arrive(arrive));
        self.wait()
    }

    /// Waits on at the barrier.
    pub(crate) fn wait(&mut self) -> Result<Barrier> {
        loop {
            match self.notice()? {
                Notice::Formed(formed) => {
                    self.epoch = formed.epoch;
                    return Ok(Barrier::Formed(formed));
                }
                Notice::Done => return Ok(Barrier::Done),
                Notice::Preempted => return Ok(Barrier::Preempted),
                Notice::Save => return Ok(Barrier::Save),
                Notice::Broken(_) | Notice::Lost(_) => {}
            }
        }
    }

    /// Reports that nothing is left to compute, and waits for the other members.
    pub(crate) fn finish(&mut self, step: u64, stopped: bool) -> Result<Ending> {
        self.send_or_end(from_worker::Message::Finished(proto::Finished { step, stopped }));
        loop {
            match self.notice()? {
                Notice::Done => return Ok(Ending::Done),
                Notice::Broken(epoch) if epoch == self.epoch => return Ok(Ending::Broken),
                _ => {}
            }
        }
    }

    /// Reports an error with which this worker cannot continue, and waits for the answer, not for long. The process
    /// should exit afterwards.
    pub(crate) fn fail(&mut self, message: String, exit_code: u8, scope: Scope) -> Result<()> {
        self.fail_within(FAIL_TIMEOUT, message, exit_code, scope)
    }

    fn fail_within(&mut self, limit: Duration, message: String, exit_code: u8, scope: Scope) -> Result<()> {
        if self.is_done {
            return Ok(());
        }
        let failed = proto::Failed {
            message,
            exit_code: u32::from(exit_code),
            alone: scope == Scope::Worker,
            outage: scope == Scope::Volumes,
        };
        // The coordinator answers with Done, or ends a worker that failed alone.
        self.send_within(limit, from_worker::Message::Failed(failed))?;
        match self.end_within(limit) {
            Some(end) => end,
            None => Err(self.lost("does not answer".to_owned())),
        }
    }

    /// Tells that this worker leaves as soon as its state after `step` steps is durable. The others go on.
    pub(crate) fn begin_to_leave(&mut self, step: u64) {
        self.send_or_end(from_worker::Message::Leaving(proto::Leaving { step, writing: true }));
    }

    /// Leaves in order, with the state after `step` steps; waits until the coordinator has taken note.
    pub(crate) fn leave(&mut self, step: u64) -> Result<()> {
        let left = from_worker::Message::Leaving(proto::Leaving { step, writing: false });
        self.send_within(LEAVE_TIMEOUT, left)?;
        self.end_within(LEAVE_TIMEOUT);
        Ok(())
    }

    /// How the session has ended, or does within `limit`: with the job, or with the coordinator's loss. None if
    /// it goes on. Other notices are dropped.
    pub(crate) fn end_within(&mut self, limit: Duration) -> Option<Result<()>> {
        let deadline = Instant::now() + limit;
        loop {
            match self.notices.try_recv() {
                Ok(Notice::Done) => {
                    self.is_done = true;
                    return Some(Ok(()));
                }
                Ok(Notice::Lost(reason)) => return Some(Err(self.lost(reason))),
                Ok(_) => {}
                Err(mpsc::error::TryRecvError::Empty) if Instant::now() < deadline => {
                    std::thread::sleep(LEAVE_POLL);
                }
                Err(_) => return None,
            }
        }
    }

    /// Whether this worker was asked to leave: its machine is needed elsewhere.
    pub(crate) fn preempted(&self) -> bool {
        self.flags.preempted.load(Ordering::Relaxed)
    }

    /// Reports with the heartbeats for how long the volumes do not take a checkpoint, and for how long they do not give
    /// rows. A session has one replica, so the first call counts.
    pub(crate) fn watch(&self, unsaved: Arc<Outage>, unread: Arc<Outage>) {
        self.flags.outages.get_or_init(|| [unsaved, unread]);
    }

    /// Whether this worker has begun a step in a ring that formed.
    pub(crate) fn has_trained(&self) -> bool {
        self.flags.steps.load(Ordering::Relaxed) > 0
    }

    /// Whether another worker waits to join.
    pub(crate) fn leave_wanted(&self) -> bool {
        self.flags.leave.load(Ordering::Relaxed)
    }

    /// Whether the job is stopping.
    pub(crate) fn stop_wanted(&self) -> bool {
        self.flags.stop.load(Ordering::Relaxed)
    }

    /// Notes for heartbeats which exchange of which step the training thread begins.
    pub(crate) fn enter(&self, step: u64, exchange: Exchange) {
        self.flags.step.store(step, Ordering::Relaxed);
        self.flags.exchange.store(exchange as u8, Ordering::Relaxed);
    }

    /// Runs the computation of a step, so that heartbeats report how long it takes.
    pub(crate) fn step<T>(&self, compute: impl FnOnce() -> T) -> T {
        self.flags.steps.fetch_add(1, Ordering::Relaxed);
        let result = compute();
        self.flags.steps.fetch_add(1, Ordering::Relaxed);
        result
    }

    /// Reports progress. Never blocks; only the newest report is sent.
    pub(crate) fn report(&self, report: Report) {
        self.reports.send_replace(Some(report));
    }

    /// Sends a message whose answer the caller then awaits. On a stream that has ended, the answer is the notice
    /// of that end: the coordinator may have said before that the job is over.
    fn send_or_end(&self, message: from_worker::Message) {
        if let Err(error) = self.send(message) {
            tracing::debug!(error = error.one_line(), "the stream to the coordinator has ended");
        }
    }

    /// Sends a message to a coordinator that may read none any more.
    fn send_within(&self, limit: Duration, message: from_worker::Message) -> Result<()> {
        let deadline = Instant::now() + limit;
        let mut message = proto::FromWorker { message: Some(message) };
        loop {
            message = match self.outgoing.try_send(message) {
                Ok(()) => return Ok(()),
                Err(mpsc::error::TrySendError::Full(message)) if Instant::now() < deadline => message,
                Err(_) => return Err(self.lost("closed the stream".to_owned())),
            };
            std::thread::sleep(LEAVE_POLL);
        }
    }

    fn send(&self, message: from_worker::Message) -> Result<()> {
        self.outgoing
            .blocking_send(proto::FromWorker { message: Some(message) })
            .map_err(|_| self.lost("closed the stream".to_owned()))
    }

    fn notice(&mut self) -> Result<Notice> {
        match self.notices.blocking_recv() {
            Some(Notice::Lost(reason)) => Err(self.lost(reason)),
            Some(notice) => {
                self.is_done |= matches!(notice, Notice::Done);
                Ok(notice)
            }
            None => Err(self.lost("closed the stream".to_owned())),
        }
    }

    fn lost(&self, reason: String) -> Error {
        Error::CoordinatorLost { address: self.address.clone(), reason }
    }
}

/// A session that the coordinator has accepted but that sends no heartbeats yet.
pub(crate) struct AcceptedSession {
    address: String,
    outgoing: mpsc::Sender<proto::FromWorker>,
    incoming: tonic::Streaming<proto::ToWorker>,
}

impl AcceptedSession {
    pub(super) fn new(
        address: String,
        outgoing: mpsc::Sender<proto::FromWorker>,
        incoming: tonic::Streaming<proto::ToWorker>,
    ) -> AcceptedSession {
        AcceptedSession { address, outgoing, incoming }
    }

    /// The coordinator's address and both directions of the stream, for a job without heartbeats.
    pub(crate) fn into_parts(
        self,
    ) -> (String, mpsc::Sender<proto::FromWorker>, tonic::Streaming<proto::ToWorker>) {
        (self.address, self.outgoing, self.incoming)
    }

    /// Starts the tasks for heartbeats and incoming messages on `runtime`. `preempt` asks this worker to
    /// leave.
    pub(crate) fn start(self, runtime: &Handle, timing: Timing, preempt: CancellationToken) -> Session {
        let (notify, notices) = mpsc::unbounded_channel();
        let (reports, latest) = watch::channel(None);
        let flags = Arc::new(Flags::default());
        let over = CancellationToken::new();
        // The tasks end with the session, so that the stream closes.
        let spawn = |task: Pin<Box<dyn Future<Output = ()> + Send>>| {
            let over = over.clone();
            runtime.spawn(async move { over.run_until_cancelled(task).await });
        };
        spawn(Box::pin(heartbeat(self.outgoing.clone(), timing.heartbeat, Arc::clone(&flags))));
        spawn(Box::pin(report(self.outgoing.clone(), latest, timing.progress)));
        let (own, told) = (Arc::clone(&flags), notify.clone());
        spawn(Box::pin(async move {
            preempt.cancelled().await;
            own.preempted.store(true, Ordering::Relaxed);
            // Wakes a training thread that waits at a barrier.
            let _ = told.send(Notice::Preempted);
        }));
        let listen = listen(self.incoming, notify, Arc::clone(&flags), timing.outlives_coordinator);
        // Also after the session's end, this task ends the process of a launched worker.
        match timing.outlives_coordinator {
            true => spawn(Box::pin(listen)),
            false => drop(runtime.spawn(listen)),
        }
        Session {
            address: self.address,
            outgoing: self.outgoing,
            notices,
            flags,
            reports,
            epoch: 0,
            is_done: false,
            _over: over.drop_guard(),
        }
    }
}

async fn heartbeat(outgoing: mpsc::Sender<proto::FromWorker>, every: Duration, flags: Arc<Flags>) {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let (mut clock, mut ticked) = (StepClock::default(), Instant::now());
    loop {
        ticks.tick().await;
        let computing = clock.tick(flags.steps.load(Ordering::Relaxed), ticked.elapsed(), every);
        ticked = Instant::now();
        let beat = proto::Heartbeat {
            computing_ms: computing.as_millis() as u64,
            step: Some(flags.step.load(Ordering::Relaxed)),
            exchange: Exchange::name(flags.exchange.load(Ordering::Relaxed)).to_owned(),
            unsaved_ms: flags.unsaved_ms(),
            unread_ms: flags.unread_ms(),
        };
        let beat = from_worker::Message::Heartbeat(beat);
        if outgoing.send(proto::FromWorker { message: Some(beat) }).await.is_err() {
            return;
        }
    }
}

async fn report(
    outgoing: mpsc::Sender<proto::FromWorker>,
    mut latest: watch::Receiver<Option<Report>>,
    every: Duration,
) {
    while latest.changed().await.is_ok() {
        let Some(report) = *latest.borrow_and_update() else { continue };
        let progress = from_worker::Message::Progress(proto::Progress {
            step: report.step,
            epoch: report.epoch,
            loss: report.loss,
            rows: report.rows,
            feed_us: report.spent.feed_us,
            compute_us: report.spent.compute_us,
            communication_us: report.spent.communication_us,
            checkpoint_us: report.spent.checkpoint_us,
            evaluation: report.evaluation.map(Into::into),
        });
        if outgoing.send(proto::FromWorker { message: Some(progress) }).await.is_err() {
            return;
        }
        tokio::time::sleep(every).await;
    }
}

async fn listen(
    mut incoming: tonic::Streaming<proto::ToWorker>,
    notify: mpsc::UnboundedSender<Notice>,
    flags: Arc<Flags>,
    outlives_coordinator: bool,
) {
    let (mut epoch, mut abort) = (0, CancellationToken::new());
    let reason = loop {
        let message = match incoming.message().await {
            Ok(Some(proto::ToWorker { message: Some(message) })) => message,
            Ok(Some(_)) => break "sent an unknown message".to_owned(),
            Ok(None) => break "closed the stream".to_owned(),
            Err(status) => break status.message().to_owned(),
        };
        // If the training thread has ended, it needs no notices.
        match message {
            to_worker::Message::Formed(formed) => match decode(formed, flags.stop.load(Ordering::Relaxed)) {
                Ok(formed) => {
                    flags.leave.store(false, Ordering::Relaxed);
                    (epoch, abort) = (formed.epoch, formed.abort.clone());
                    let _ = notify.send(Notice::Formed(formed));
                }
                Err(reason) => break reason,
            },
            to_worker::Message::Broken(broken) => {
                if epoch == broken.epoch {
                    abort.cancel();
                }
                let _ = notify.send(Notice::Broken(broken.epoch));
            }
            to_worker::Message::Reform(reform) => {
                if epoch == reform.epoch {
                    flags.leave.store(true, Ordering::Relaxed);
                }
            }
            to_worker::Message::Save(_) => {
                let _ = notify.send(Notice::Save);
            }
            to_worker::Message::Stop(_) => flags.stop.store(true, Ordering::Relaxed),
            to_worker::Message::Done(_) => {
                abort.cancel();
                let _ = notify.send(Notice::Done);
                return;
            }
            to_worker::Message::Welcome(_)
            | to_worker::Message::Challenge(_)
            | to_worker::Message::Part(_)
            | to_worker::Message::Script(_) => {
                break "welcomed this worker twice".to_owned();
            }
        }
    };
    abort.cancel();
    if outlives_coordinator {
        let _ = notify.send(Notice::Lost(reason));
        return;
    }
    tracing::info!(reason, "coordinator lost; this worker exits");
    let _ = notify.send(Notice::Lost(reason));
    // The training thread exits at its next exchange or barrier; a long computation is aborted.
    tokio::time::sleep(VANISH_GRACE).await;
    std::process::exit(EXIT_COORDINATOR_LOST);
}

fn decode(formed: proto::Formed, is_last: bool) -> Result<EpochMembership, String> {
    let peers: Vec<Peer> = formed
        .members
        .into_iter()
        .map(|peer| Peer {
            address: peer.ring_address,
            step: peer.step,
            lineage: peer.lineage,
            pid: peer.pid,
            host: peer.host,
        })
        .collect();
    if formed.rank as usize >= peers.len() {
        return Err(format!("rank {} of {} members", formed.rank, peers.len()));
    }
    Ok(EpochMembership {
        epoch: formed.epoch,
        rank: formed.rank as usize,
        peers,
        is_last,
        abort: CancellationToken::new(),
    })
}

#[cfg(test)]
mod tests;
