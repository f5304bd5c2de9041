//! The coordinator of a script job: feeds events to [`Rounds`] and passes its orders to the nodes.
//!
//! The own machine's node and joined ones differ in their connection only: a channel, or a stream. The port for other
//! machines, its bounds and the proof of the token are those of native jobs.
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::layout::Framework;
use super::messages::{Assignment, Order, Program, Report, decode, encode};
use super::node::{self, Ending, KILL_TIMEOUT, NodeSettings};
use super::rounds::{Action, Node, NodeId, Rounds, Rules, Verdict};
use crate::config::Config;
use crate::elastic::coordinator::{Admission, CoordinatorService, Event, admit};
use crate::elastic::joining::send_welcome;
use crate::elastic::proto::{self, from_worker, to_worker};
use crate::error::{Error, Result};
use crate::join::{Listen, host_name};

/// Interval at which deadlines are checked.
const TICK: Duration = Duration::from_millis(50);
/// How long more nodes are waited for once there are enough: machines rarely start at the same moment.
const LAST_CALL: Duration = Duration::from_secs(3);
/// How long a node may take to say whether it can run the script, and to offer ports.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long nodes may take to end their part after the job's end.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Orders that wait for one node. It gets a handful in each round.
const ORDERS_MAX: usize = 64;
/// The node of this machine.
const LOCAL: NodeId = 0;

/// What a job's coordinator does.
pub(crate) struct Params<'a> {
    pub(crate) job: String,
    pub(crate) run: String,
    pub(crate) program: Program,
    pub(crate) framework: Framework,
    pub(crate) workers: u32,
    /// Workers of this machine; 0 when it only coordinates.
    pub(crate) workers_local: u32,
    pub(crate) servers: u32,
    pub(crate) nodes_min: usize,
    pub(crate) nodes_max: usize,
    pub(crate) max_restarts: u32,
    pub(crate) join_timeout: Duration,
    pub(crate) restart_on_join: bool,
    pub(crate) listen: Option<&'a Listen>,
    pub(crate) config: &'a Config,
    pub(crate) node: NodeSettings,
}

/// What can be told of a running job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScriptProgress {
    /// Where nodes join.
    pub listening: Option<SocketAddr>,
    /// Nodes that have to join before the processes start.
    pub nodes_missing: usize,
    /// Number of the round, from 1; 0 before the first one.
    pub round: u64,
    /// Workers of the round, while it runs.
    pub world: Option<u32>,
    /// Rounds that have followed a failure.
    pub restarts: u32,
    /// The newest failure.
    pub failure: Option<String>,
    /// The last lines of the process that failed first.
    pub lines: Vec<String>,
    /// Why a machine that wanted to join may not.
    pub refused: Option<String>,
}

/// How the rounds of a job ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) verdict: Verdict,
    pub(crate) rounds: u64,
    pub(crate) restarts: u32,
    pub(crate) world: u32,
}

/// The way to a node.
enum Link {
    Local(mpsc::Sender<Order>),
    Joined(Box<Joined>),
}

struct Joined {
    outbox: mpsc::Sender<Result<proto::ToWorker, Status>>,
    node: Node,
    since: Instant,
    /// Whether it has said if it can run the script.
    has_answered: bool,
}

struct Coordinator<'a> {
    params: &'a Params<'a>,
    rounds: Rounds,
    links: BTreeMap<NodeId, Link>,
    next: NodeId,
    progress: ScriptProgress,
}

/// Runs the rounds of a job until its end. A stop is passed on to all processes.
///
/// # Errors
/// [`Error::Io`] when the port cannot be opened, and the error with which this machine's own node cannot run the
/// script. A job that fails is an [`Outcome`].
pub(crate) async fn run(
    params: Params<'_>,
    cancel: CancellationToken,
    mut on_progress: impl FnMut(&ScriptProgress),
) -> Result<Outcome> {
    let (events, mut inbox) = mpsc::channel(1024);
    let shutdown = CancellationToken::new();
    let _shutdown_on_drop = shutdown.clone().drop_guard();
    let listening = match params.listen {
        Some(listen) => {
            let admission = Admission::Joining {
                token: listen.token.clone(),
                silence_max: params.config.heartbeat_lost(),
            };
            let service = CoordinatorService { admission, events: events.clone() };
            Some(admit(listen, service, params.config, shutdown.clone()).await?)
        }
        None => None,
    };
    let rules = Rules {
        nodes_min: params.nodes_min,
        nodes_max: params.nodes_max,
        max_restarts: params.max_restarts,
        join_timeout: params.join_timeout,
        last_call: LAST_CALL,
        answer_timeout: ANSWER_TIMEOUT,
        // Processes that are killed, and what they have left behind, take a while as well.
        stop_timeout: Duration::from_millis(params.program.grace_ms) + 2 * KILL_TIMEOUT + EXIT_TIMEOUT,
        restart_on_join: params.restart_on_join,
        framework: params.framework,
        servers: params.servers,
        run: params.run.clone(),
        job: params.job.clone(),
    };
    let mut state = Coordinator {
        params: &params,
        rounds: Rounds::new(rules, Instant::now()),
        links: BTreeMap::new(),
        next: LOCAL + 1,
        progress: ScriptProgress { listening, ..ScriptProgress::default() },
    };
    let (told, mut local_reports) = mpsc::channel::<Report>(ORDERS_MAX);
    let leave = CancellationToken::new();
    let _leave_on_drop = leave.clone().drop_guard();
    let mut local = None;
    if params.workers_local > 0 {
        let (orders, own) = mpsc::channel(ORDERS_MAX);
        state.links.insert(LOCAL, Link::Local(orders));
        local = Some(tokio::spawn(node::serve(params.node.clone(), own, told, leave.clone())));
        state.tell(LOCAL, Order::Introduce(Box::new(params.program.clone())));
    } else {
        drop(told);
    }
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut is_stopping = false;
    let mut own_end = None;
    let verdict = loop {
        state.act();
        state.show(&mut on_progress);
        if let Some(verdict) = state.rounds.verdict() {
            break verdict.clone();
        }
        tokio::select! {
            Some(event) = inbox.recv() => state.on_event(event),
            Some(report) = local_reports.recv() => state.on_report(LOCAL, report),
            _ = ticks.tick() => state.tick(Instant::now()),
            () = cancel.cancelled(), if !is_stopping => {
                is_stopping = true;
                state.rounds.stop(Instant::now());
            }
            ended = async { match &mut local { Some(task) => task.await, None => std::future::pending().await } } => {
                local = None;
                state.links.remove(&LOCAL);
                own_end = Some(match ended {
                    Ok(Ok(Ending::Unfit(error)) | Err(error)) => error,
                    Ok(Ok(_)) => Error::Io {
                        what: "run the processes of this machine".to_owned(),
                        source: std::io::Error::other("the node ended before the job"),
                    },
                    Err(error) => Error::Io {
                        what: "run the processes of this machine".to_owned(),
                        source: std::io::Error::other(error),
                    },
                });
                state.rounds.lose(LOCAL, "has ended", Instant::now());
                // Without this machine's processes the job is not the one that was asked for.
                state.rounds.stop(Instant::now());
            }
        }
    };
    let error = match (&own_end, &verdict) {
        (Some(error), _) => Some(error.one_line()),
        (None, Verdict::Succeeded | Verdict::Stopped) => None,
        (None, verdict) => Some(explain(&params.job, verdict)),
    };
    state.dismiss(error.as_deref());
    let farewell = async {
        while state.links.values().any(|link| matches!(link, Link::Joined(_))) {
            match inbox.recv().await {
                Some(Event::Disconnected { member, .. }) => drop(state.links.remove(&member)),
                Some(_) => {}
                None => break,
            }
        }
    };
    if tokio::time::timeout(EXIT_TIMEOUT, farewell).await.is_err() {
        tracing::warn!(job = params.job, "joined nodes did not take note of the end in time");
    }
    if let Some(task) = local {
        let limit = Duration::from_millis(params.program.grace_ms) + 2 * KILL_TIMEOUT;
        // Its reports are of no use any more, and must not block it.
        let drain = async { while local_reports.recv().await.is_some() {} };
        let ended = async { tokio::join!(task, drain).0 };
        if tokio::time::timeout(limit, ended).await.is_err() {
            tracing::warn!(job = params.job, "the processes of this machine did not end in time");
        }
    }
    if let Some(error) = own_end {
        return Err(error);
    }
    Ok(Outcome {
        verdict,
        rounds: state.rounds.round(),
        restarts: state.rounds.restarts(),
        world: state.rounds.world(),
    })
}

/// Why a job failed.
pub(crate) fn explain(job: &str, verdict: &Verdict) -> String {
    match verdict {
        Verdict::Succeeded => format!("job {job} succeeded"),
        Verdict::Stopped => format!("job {job} was stopped"),
        Verdict::Failed(failure) => format!("job {job}: {}", failure.describe()),
        Verdict::Missing { here, gone, waited, causes } => {
            let list = |names: &[String]| names.join(", ");
            let here = if here.is_empty() {
                "no node is there".to_owned()
            } else {
                format!("there is {}", list(here))
            };
            let gone = if gone.is_empty() { String::new() } else { format!("; gone: {}", list(gone)) };
            let causes = causes.iter().map(|cause| format!("; {cause}")).collect::<String>();
            format!(
                "job {job}: too few nodes joined within {} s (--join-timeout): {here}{gone}{causes}; start millrace \
                 worker --join on the others, or lower --nodes",
                waited.as_secs()
            )
        }
    }
}

fn message(message: to_worker::Message) -> proto::ToWorker {
    proto::ToWorker { message: Some(message) }
}

impl Coordinator<'_> {
    /// Checks the deadlines. A node that does not say whether it can run the script would hold a place.
    fn tick(&mut self, now: Instant) {
        let is_silent = |link: &Link| {
            matches!(link, Link::Joined(joined) if !joined.has_answered
                && now.saturating_duration_since(joined.since) >= ANSWER_TIMEOUT)
        };
        let silent = self.links.iter().filter(|(_, link)| is_silent(link));
        for id in silent.map(|(id, _)| *id).collect::<Vec<_>>() {
            tracing::warn!(job = self.params.job, node = id, "a node does not answer and is dropped");
            self.links.remove(&id);
        }
        self.rounds.tick(now);
    }

    fn on_event(&mut self, event: Event) {
        let now = Instant::now();
        match event {
            Event::Admitted { hello, host, outbox, reply } => {
                let admitted = self.admit(&hello, &host, outbox);
                // If the connection is gone, the end of its stream reports that.
                let _ = reply.send(admitted);
            }
            Event::Message { member, message: from_worker::Message::Script(report) } => {
                let Some(Link::Joined(joined)) = self.links.get_mut(&member) else { return };
                match decode::<Report>(&report) {
                    Ok(report) => self.on_report(member, report),
                    Err(reason) => {
                        tracing::warn!(node = joined.node.name, reason, "a node is dropped");
                        self.links.remove(&member);
                        self.rounds.lose(member, &reason, now);
                    }
                }
            }
            Event::Message { member, .. } => {
                tracing::debug!(member, "a message that is none of a script job");
            }
            Event::Disconnected { member, reason } => {
                self.links.remove(&member);
                self.rounds.lose(member, &reason, now);
            }
            // Workers that were launched here have no place in a script job.
            Event::Joined { reply, .. } => drop(reply.send(Err("this job runs a script".to_owned()))),
            Event::Exited { .. } => {}
        }
    }

    /// Gives a machine a place; none if there is none left.
    fn admit(
        &mut self,
        hello: &proto::Hello,
        host: &str,
        outbox: mpsc::Sender<Result<proto::ToWorker, Status>>,
    ) -> Option<NodeId> {
        if self.links.len() >= self.params.nodes_max {
            return None;
        }
        let id = self.next;
        self.next += 1;
        let assignment =
            Assignment { script: self.params.program.script.clone(), job: self.params.job.clone() };
        let assignment = serde_json::to_string(&assignment).ok()?;
        if !send_welcome(&outbox, id, &assignment, &[]) {
            return None;
        }
        // The service has checked that the address has a port.
        let address =
            hello.ring_address.rsplit_once(':').map_or(hello.ring_address.as_str(), |(host, _)| host);
        let node = Node {
            name: format!("{host}/{}", hello.pid),
            host: address.trim_matches(['[', ']']).to_owned(),
            workers: self.params.workers,
        };
        tracing::info!(job = self.params.job, node = node.name, "node joins");
        let since = Instant::now();
        let joined = Joined { outbox, node, since, has_answered: false };
        self.links.insert(id, Link::Joined(Box::new(joined)));
        self.tell(id, Order::Introduce(Box::new(self.params.program.clone())));
        Some(id)
    }

    fn on_report(&mut self, id: NodeId, report: Report) {
        let now = Instant::now();
        if let Some(Link::Joined(joined)) = self.links.get_mut(&id) {
            joined.has_answered = true;
        }
        match report {
            Report::Ready => {
                let node = match self.links.get(&id) {
                    Some(Link::Joined(joined)) => joined.node.clone(),
                    Some(Link::Local(_)) => self.own_node(),
                    None => return,
                };
                self.rounds.join(id, node, now);
            }
            Report::Unfit { reason } => {
                let Some(Link::Joined(joined)) = self.links.get(&id) else { return };
                let name = joined.node.name.clone();
                self.progress.refused = Some(format!("{name}: {reason}"));
                self.rounds.unfit(&name, &reason);
            }
            Report::Prepared { round, ports } => self.rounds.prepared(id, round, ports, now),
            Report::Exited { round, ended } => {
                tracing::info!(
                    round, place = %ended.place, pid = ended.pid, how = ended.exit.describe(), "a process ended"
                );
                self.rounds.exited(id, round, ended, now);
            }
            Report::Stopped { round } => self.rounds.stopped(id, round, now),
            Report::Leaving => self.rounds.leaving(id, now),
        }
    }

    /// This machine as a node. Alone, its processes meet on loopback.
    fn own_node(&self) -> Node {
        let host = self.params.listen.and_then(Listen::host);
        Node {
            name: host_name(),
            host: host.unwrap_or_else(|| "127.0.0.1".to_owned()),
            workers: self.params.workers_local,
        }
    }

    fn act(&mut self) {
        loop {
            let actions = self.rounds.take_actions();
            if actions.is_empty() {
                return;
            }
            for action in actions {
                match action {
                    Action::Tell(id, order) => self.tell(id, order),
                    Action::Drop(id, reason) => {
                        tracing::warn!(job = self.params.job, node = id, reason, "a node is dropped");
                        self.links.remove(&id);
                    }
                }
            }
        }
    }

    /// Sends an order. A node that does not take it is lost.
    fn tell(&mut self, id: NodeId, order: Order) {
        let sent = match self.links.get_mut(&id) {
            None => return,
            Some(Link::Local(orders)) => orders.try_send(order).is_ok(),
            Some(Link::Joined(joined)) => match encode(&order) {
                Ok(order) => joined.outbox.try_send(Ok(message(to_worker::Message::Script(order)))).is_ok(),
                Err(error) => {
                    tracing::error!(error, "an order cannot be sent");
                    false
                }
            },
        };
        if !sent {
            self.links.remove(&id);
            self.rounds.lose(id, "takes no orders", Instant::now());
        }
    }

    /// Tells all nodes that the job is over.
    fn dismiss(&mut self, error: Option<&str>) {
        let ids: Vec<NodeId> = self.links.keys().copied().collect();
        for id in ids {
            self.tell(id, Order::Done { error: error.map(str::to_owned) });
        }
    }

    fn show(&mut self, on_progress: &mut impl FnMut(&ScriptProgress)) {
        let shown = ScriptProgress {
            listening: self.progress.listening,
            nodes_missing: self.rounds.missing(),
            round: self.rounds.round(),
            world: self.rounds.is_running().then(|| self.rounds.world()),
            restarts: self.rounds.restarts(),
            failure: self.rounds.failure().map(super::rounds::Failure::describe),
            lines: self.rounds.failure().map(|failure| failure.lines().to_vec()).unwrap_or_default(),
            refused: self.progress.refused.clone(),
        };
        // Before this machine's node is ready, a job without others misses no one.
        let is_starting = self.params.listen.is_none() && shown.round == 0;
        if shown != self.progress && !is_starting {
            self.progress = shown;
            on_progress(&self.progress);
        }
    }
}
