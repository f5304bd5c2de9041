//! Rounds of a script job: a pure state machine that decides when nodes start, stop and start again.
//!
//! A round goes through *gathering* (nodes join), *forming* (they offer ports), *running* and *stopping*. A failure, or
//! a node that is lost, stops all processes; the next round has the nodes that are there then. Events come in as
//! method calls with the time, orders come out of [`Rounds::take_actions`]; there is no clock and no connection here.
//!
//! Invariants:
//! - No process starts before every process of the round before has ended, or its node was dropped.
//! - At most `max_restarts` rounds follow a failure; nodes that join or leave in order cost none.
//! - No round follows a failure that a later one would have, too.
//! - Every phase but *running* has a deadline.
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::layout::{Framework, Layout, NodeLayout, Place, Role, ports_needed, share};
use super::messages::{Ended, Order};

/// A node, in the order in which they joined.
pub(crate) type NodeId = u64;

/// Limits of a job.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) nodes_min: usize,
    pub(crate) nodes_max: usize,
    pub(crate) max_restarts: u32,
    /// How long fewer than `nodes_min` nodes are waited for.
    pub(crate) join_timeout: Duration,
    /// How long more nodes are waited for once there are `nodes_min`.
    pub(crate) last_call: Duration,
    /// How long a node may take to offer ports.
    pub(crate) answer_timeout: Duration,
    /// How long a node may take to end its processes.
    pub(crate) stop_timeout: Duration,
    /// Whether a node that joins starts a new round at once.
    pub(crate) restart_on_join: bool,
    pub(crate) framework: Framework,
    /// Parameter servers of all nodes.
    pub(crate) servers: u32,
    pub(crate) run: String,
    pub(crate) job: String,
}

/// A node that may take part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) host: String,
    pub(crate) workers: u32,
}

/// The first failure of a round.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    Process { node: String, ended: Ended },
    NodeLost { node: String, reason: String },
}

impl Failure {
    /// Which process or node failed, and how.
    pub(crate) fn describe(&self) -> String {
        match self {
            Failure::Process { node, ended } => {
                // A process that was not started has no number.
                let process = match ended.pid {
                    0 => String::new(),
                    pid => format!(" (process {pid})"),
                };
                format!("{} on {node}{process} {}", ended.place, ended.exit.describe())
            }
            Failure::NodeLost { node, reason } => format!("node {node} was lost: it {reason}"),
        }
    }

    /// The last lines of the process.
    pub(crate) fn lines(&self) -> &[String] {
        match self {
            Failure::Process { ended, .. } => &ended.lines,
            Failure::NodeLost { .. } => &[],
        }
    }

    /// Order of failures: a process that dies makes others fail soon after.
    fn at_ms(&self) -> u64 {
        match self {
            Failure::Process { ended, .. } => ended.at_ms,
            Failure::NodeLost { .. } => u64::MAX,
        }
    }
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// All workers ended with code 0.
    Succeeded,
    /// It was asked to stop.
    Stopped,
    /// A round failed, and no restart was left, or none would help.
    Failed(Failure),
    /// Too few nodes came.
    Missing {
        here: Vec<String>,
        /// Nodes that were there and are gone.
        gone: Vec<String>,
        waited: Duration,
        /// Why the last node that could not run the script was refused, and the failure before.
        causes: Vec<String>,
    },
}

/// An order for a node, or the end of its connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Tell(NodeId, Order),
    /// The node does not answer: close its connection.
    Drop(NodeId, String),
}

enum Phase {
    Gathering { since: Instant, enough: Option<Instant> },
    Forming { members: Vec<NodeId>, ports: BTreeMap<NodeId, Vec<u16>>, until: Instant },
    Running { members: Vec<NodeId>, live: BTreeMap<NodeId, BTreeSet<Place>> },
    Stopping { then: Then, waiting: BTreeSet<NodeId>, until: Instant },
    Over(Verdict),
}

/// What follows when all processes have ended.
enum Then {
    Again,
    End(Verdict),
}

/// The state of a job's rounds.
pub(crate) struct Rounds {
    rules: Rules,
    nodes: BTreeMap<NodeId, Node>,
    /// Nodes that leave in order and have not closed their connections.
    departing: BTreeSet<NodeId>,
    phase: Phase,
    actions: Vec<Action>,
    round: u64,
    restarts: u32,
    /// The first failure of the current round, then of the last one.
    failure: Option<Failure>,
    /// Whether that failure belongs to the round that stops.
    is_failing: bool,
    /// Names of nodes of the last rounds that are gone.
    gone: BTreeSet<String>,
    unfit: Option<String>,
    world: u32,
}

impl Rounds {
    pub(crate) fn new(rules: Rules, now: Instant) -> Rounds {
        Rounds {
            rules,
            nodes: BTreeMap::new(),
            departing: BTreeSet::new(),
            phase: Phase::Gathering { since: now, enough: None },
            actions: Vec::new(),
            round: 0,
            restarts: 0,
            failure: None,
            is_failing: false,
            gone: BTreeSet::new(),
            unfit: None,
            world: 0,
        }
    }

    pub(crate) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    pub(crate) fn verdict(&self) -> Option<&Verdict> {
        match &self.phase {
            Phase::Over(verdict) => Some(verdict),
            _ => None,
        }
    }

    pub(crate) fn restarts(&self) -> u32 {
        self.restarts
    }

    pub(crate) fn round(&self) -> u64 {
        self.round
    }

    /// Workers of the newest round.
    pub(crate) fn world(&self) -> u32 {
        self.world
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(self.phase, Phase::Running { .. })
    }

    /// Nodes that have to join before a round can form.
    pub(crate) fn missing(&self) -> usize {
        match self.phase {
            Phase::Gathering { .. } => self.rules.nodes_min.saturating_sub(self.nodes.len()),
            _ => 0,
        }
    }

    /// The newest failure.
    pub(crate) fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// A node that can run the script has joined.
    pub(crate) fn join(&mut self, id: NodeId, node: Node, now: Instant) {
        self.gone.remove(&node.name);
        self.nodes.insert(id, node);
        if let Phase::Running { members, .. } = &self.phase
            && self.rules.restart_on_join
            && members.len() < self.rules.nodes_max
        {
            self.begin_stop(Then::Again, now);
        }
        self.advance(now);
    }

    /// A node cannot run the script.
    pub(crate) fn unfit(&mut self, name: &str, reason: &str) {
        self.unfit = Some(format!("node {name} cannot run the script: {reason}"));
    }

    /// A node begins to leave in order: its processes end, and it says so.
    pub(crate) fn leaving(&mut self, id: NodeId, now: Instant) {
        let Some(node) = self.nodes.remove(&id) else { return };
        self.gone.insert(node.name);
        self.departing.insert(id);
        match &self.phase {
            Phase::Forming { members, .. } if members.contains(&id) => {
                self.phase = Phase::Gathering { since: now, enough: None };
            }
            Phase::Running { live, .. } if live.get(&id).is_some_and(|places| !places.is_empty()) => {
                self.begin_stop(Then::Again, now);
            }
            _ => {}
        }
        self.advance(now);
    }

    /// The connection of a node is gone.
    pub(crate) fn lose(&mut self, id: NodeId, reason: &str, now: Instant) {
        if let Phase::Stopping { waiting, .. } = &mut self.phase {
            waiting.remove(&id);
        }
        if !self.departing.remove(&id)
            && let Some(node) = self.nodes.remove(&id)
        {
            self.gone.insert(node.name.clone());
            let had_work = match &mut self.phase {
                Phase::Forming { members, .. } if members.contains(&id) => {
                    self.phase = Phase::Gathering { since: now, enough: None };
                    false
                }
                Phase::Running { live, .. } => live.remove(&id).is_some_and(|places| !places.is_empty()),
                _ => false,
            };
            // Nothing is lost with a node whose processes are done.
            if had_work {
                self.fail(Failure::NodeLost { node: node.name, reason: reason.to_owned() });
                self.begin_stop(Then::Again, now);
            }
        }
        self.advance(now);
    }

    /// A node offers ports.
    pub(crate) fn prepared(&mut self, id: NodeId, round: u64, offered: Vec<u16>, now: Instant) {
        if let Phase::Forming { members, ports, .. } = &mut self.phase
            && round == self.round
            && members.contains(&id)
        {
            ports.insert(id, offered);
        }
        self.advance(now);
    }

    /// A process has ended.
    pub(crate) fn exited(&mut self, id: NodeId, round: u64, ended: Ended, now: Instant) {
        if round != self.round {
            return;
        }
        let name = self.nodes.get(&id).map(|node| node.name.clone()).unwrap_or_default();
        let has_failed = !ended.exit.is_success() && !ended.was_asked;
        match &mut self.phase {
            Phase::Running { live, .. } => {
                // A process that a leaving node has asked to end is not done.
                if !ended.was_asked
                    && let Some(places) = live.get_mut(&id)
                {
                    places.remove(&ended.place);
                }
                if has_failed {
                    let is_final = ended.is_final;
                    let failure = Failure::Process { node: name, ended };
                    self.fail(failure.clone());
                    let then = if is_final { Then::End(Verdict::Failed(failure)) } else { Then::Again };
                    self.begin_stop(then, now);
                }
            }
            // The failure that came first may be reported later.
            Phase::Stopping { then, .. } if has_failed && self.is_failing => {
                let is_final = ended.is_final;
                let failure = Failure::Process { node: name, ended };
                if is_final && matches!(then, Then::Again) {
                    *then = Then::End(Verdict::Failed(failure.clone()));
                }
                self.fail(failure);
            }
            _ => {}
        }
        self.advance(now);
    }

    /// All processes of a round have ended on a node.
    pub(crate) fn stopped(&mut self, id: NodeId, round: u64, now: Instant) {
        if let Phase::Stopping { waiting, .. } = &mut self.phase
            && round == self.round
        {
            waiting.remove(&id);
        }
        self.advance(now);
    }

    /// The job has to stop.
    pub(crate) fn stop(&mut self, now: Instant) {
        match &mut self.phase {
            Phase::Running { .. } => self.begin_stop(Then::End(Verdict::Stopped), now),
            Phase::Stopping { then: then @ Then::Again, .. } => *then = Then::End(Verdict::Stopped),
            Phase::Gathering { .. } | Phase::Forming { .. } => self.phase = Phase::Over(Verdict::Stopped),
            Phase::Stopping { .. } | Phase::Over(_) => {}
        }
        self.advance(now);
    }

    /// Checks the deadlines.
    pub(crate) fn tick(&mut self, now: Instant) {
        let silent: Vec<NodeId> = match &self.phase {
            Phase::Forming { members, ports, until } if now >= *until => {
                members.iter().copied().filter(|id| !ports.contains_key(id)).collect()
            }
            Phase::Stopping { waiting, until, .. } if now >= *until => waiting.iter().copied().collect(),
            _ => Vec::new(),
        };
        for id in silent {
            let reason = "did not answer an order in time".to_owned();
            self.actions.push(Action::Drop(id, reason.clone()));
            self.lose(id, &reason, now);
        }
        self.advance(now);
    }

    /// Records the failure unless an earlier one of this round is known.
    fn fail(&mut self, failure: Failure) {
        let is_first = match &self.failure {
            Some(known) if self.is_failing => failure.at_ms() < known.at_ms(),
            _ => true,
        };
        self.is_failing = true;
        if is_first {
            self.failure = Some(failure);
        }
    }

    /// Asks all members to end their processes.
    fn begin_stop(&mut self, then: Then, now: Instant) {
        let Phase::Running { members, .. } = &self.phase else { return };
        let waiting: BTreeSet<NodeId> = members
            .iter()
            .copied()
            .filter(|id| self.nodes.contains_key(id) || self.departing.contains(id))
            .collect();
        let round = self.round;
        self.actions.extend(waiting.iter().map(|id| Action::Tell(*id, Order::Stop { round })));
        self.phase = Phase::Stopping { then, waiting, until: now + self.rules.stop_timeout };
    }

    /// Goes on to the next phase as far as possible.
    fn advance(&mut self, now: Instant) {
        match &mut self.phase {
            Phase::Gathering { since, enough } => {
                let here = self.nodes.len();
                if here < self.rules.nodes_min {
                    *enough = None;
                    let waited = now.saturating_duration_since(*since);
                    if waited >= self.rules.join_timeout {
                        let causes = self.unfit.iter().cloned();
                        let failure = self.failure.as_ref().map(Failure::describe);
                        self.phase = Phase::Over(Verdict::Missing {
                            here: self.nodes.values().map(|node| node.name.clone()).collect(),
                            gone: self.gone.iter().cloned().collect(),
                            waited,
                            causes: causes.chain(failure).collect(),
                        });
                    }
                    return;
                }
                let since = *enough.get_or_insert(now);
                if here >= self.rules.nodes_max
                    || now.saturating_duration_since(since) >= self.rules.last_call
                {
                    self.form(now);
                }
            }
            Phase::Forming { members, ports, .. } => {
                if members.iter().all(|id| ports.contains_key(id)) {
                    self.start();
                }
            }
            Phase::Running { live, .. } => {
                let trains = |places: &BTreeSet<Place>| places.iter().any(|place| place.role == Role::Worker);
                if !live.values().any(trains) {
                    self.begin_stop(Then::End(Verdict::Succeeded), now);
                }
            }
            Phase::Stopping { then, waiting, .. } => {
                if waiting.is_empty() {
                    let then = std::mem::replace(then, Then::Again);
                    self.end_round(then, now);
                }
            }
            Phase::Over(_) => {}
        }
    }

    fn form(&mut self, now: Instant) {
        self.round += 1;
        let members: Vec<NodeId> = self.nodes.keys().copied().take(self.rules.nodes_max).collect();
        for (id, servers) in members.iter().zip(share(self.rules.servers, members.len())) {
            let workers = self.nodes.get(id).map_or(0, |node| node.workers);
            let ports = ports_needed(self.rules.framework, workers, servers);
            self.actions.push(Action::Tell(*id, Order::Prepare { round: self.round, ports }));
        }
        self.phase =
            Phase::Forming { members, ports: BTreeMap::new(), until: now + self.rules.answer_timeout };
    }

    fn start(&mut self) {
        let Phase::Forming { members, ports, .. } = &mut self.phase else { return };
        let (members, mut ports) = (std::mem::take(members), std::mem::take(ports));
        let shares = share(self.rules.servers, members.len());
        let nodes = members.iter().zip(shares).filter_map(|(id, servers)| {
            let node = self.nodes.get(id)?;
            Some(NodeLayout {
                name: node.name.clone(),
                host: node.host.clone(),
                workers: node.workers,
                servers,
                ports: ports.remove(id).unwrap_or_default(),
            })
        });
        let layout = Layout {
            round: self.round,
            restarts: self.restarts,
            max_restarts: self.rules.max_restarts,
            run: self.rules.run.clone(),
            job: self.rules.job.clone(),
            framework: self.rules.framework,
            nodes: nodes.collect(),
        };
        self.world = layout.world();
        self.is_failing = false;
        let mut live = BTreeMap::new();
        for (node, id) in members.iter().enumerate() {
            live.insert(*id, layout.places(node).into_iter().collect());
            let layout = Box::new(layout.clone());
            self.actions.push(Action::Tell(*id, Order::Start { layout, node }));
        }
        self.phase = Phase::Running { members, live };
    }

    fn end_round(&mut self, then: Then, now: Instant) {
        self.phase = match then {
            Then::End(verdict) => Phase::Over(verdict),
            Then::Again => match self.failure.clone().filter(|_| self.is_failing) {
                Some(failure) if self.restarts >= self.rules.max_restarts => {
                    Phase::Over(Verdict::Failed(failure))
                }
                failure => {
                    self.restarts += u32::from(failure.is_some());
                    self.is_failing = false;
                    Phase::Gathering { since: now, enough: None }
                }
            },
        };
        self.advance(now);
    }
}

#[cfg(test)]
mod tests;
