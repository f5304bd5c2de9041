//! Job membership: the coordinator's decisions as a pure state machine over events and time.
//!
//! A worker *slot* is waiting, starting, live, ending or given up. Slots beyond those of launched workers are
//! places for workers of other machines: free or live. A live member computes in the current
//! membership epoch or waits at the barrier. An epoch ends when a member is lost, a ring breaks, or all
//! members agree to leave for a new one to join. The next epoch forms as soon as every surviving member of
//! the old one waits at the barrier; all other workers at the barrier join it. Survivors never restart and
//! never wait for a replacement.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::{Duration, Instant};

use crate::collective::Formation;

mod deadlines;
mod failures;
mod forming;

pub(crate) type MemberId = u64;

/// Limits and deadlines of the state machine; see [`crate::config::Config`].
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    /// Workers that the coordinator launches.
    pub(crate) workers: usize,
    /// Workers of other machines that may be members at a time.
    pub(crate) places: usize,
    /// Members without which no epoch forms.
    pub(crate) workers_min: usize,
    pub(crate) respawns_max: u32,
    pub(crate) respawn_backoff: Duration,
    pub(crate) heartbeat_lost: Duration,
    /// How long a worker of another machine may take to receive its assignment.
    pub(crate) assignment_timeout: Duration,
    pub(crate) start_timeout: Duration,
    pub(crate) rendezvous_timeout: Duration,
    pub(crate) stop_timeout: Duration,
    pub(crate) step_timeout: Duration,
}

/// The coordinator's next actions, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Action {
    Spawn {
        slot: usize,
        launch: u64,
    },
    Kill {
        slot: usize,
        launch: u64,
    },
    /// End the stream of a worker of another machine.
    Close {
        member: MemberId,
        reason: String,
        lost: bool,
    },
    Send {
        member: MemberId,
        message: Message,
    },
    End(Verdict),
}

/// A message to a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Message {
    Formed {
        epoch: u64,
        rank: usize,
        peers: Vec<Peer>,
    },
    Broken {
        epoch: u64,
    },
    Reform {
        epoch: u64,
    },
    /// Make the state with which the member waits at the barrier durable.
    Save,
    Stop,
    Done,
}

/// A member of a formed epoch. [`Message::Formed`] lists them in rank order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    /// The ring's address, `HOST:PORT`.
    pub(crate) address: String,
    pub(crate) step: u64,
    /// Which steps made its state; see [`crate::lineage`].
    pub(crate) lineage: Vec<u8>,
    pub(crate) pid: u32,
    /// The machine's name; empty for the coordinator's own.
    pub(crate) host: String,
}

impl fmt::Display for Peer {
    /// The process and its machine, for messages.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = if self.host.is_empty() { "the coordinator's machine" } else { &self.host };
        write!(f, "process {} on {host} ({})", self.pid, self.address)
    }
}

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    Finished {
        stopped: bool,
    },
    Failed {
        message: String,
        exit_code: u8,
    },
    WorkersLost {
        reason: String,
        exit_code: u8,
    },
    /// The volumes did not take a checkpoint for too long.
    Outage {
        message: String,
    },
}

/// A member's reason to be at the barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reason {
    Fresh,
    Left,
    Broken,
}

#[derive(Debug)]
enum Slot {
    Waiting {
        at: Instant,
    },
    Starting {
        launch: u64,
        since: Instant,
    },
    Live {
        launch: u64,
        member: MemberId,
    },
    Ending {
        launch: u64,
    },
    GivenUp,
    /// A place for a worker of another machine.
    Free,
}

#[derive(Debug)]
struct Member {
    slot: usize,
    launch: u64,
    pid: u32,
    address: String,
    host: String,
    heard: Instant,
    /// When it sent its first message since it was admitted.
    spoke: Option<Instant>,
    /// Whether it has ever reached the barrier.
    has_arrived: bool,
    /// Since when it leaves. It is in no epoch any more and makes its state durable.
    leaving: Option<Instant>,
    arrived: Option<u64>,
    /// The lineage of the state with which it arrived last.
    lineage: Vec<u8>,
    finished: Option<bool>,
    /// The step and the exchange of its last heartbeat, for messages.
    place: Option<(u64, String)>,
    /// How long the volumes have taken no checkpoint of it.
    unsaved: Duration,
    /// How long the volumes have not given it the rows of its step.
    unread: Duration,
    /// Whether it has tried in vain to read rows in the present ring.
    read_in_vain: bool,
}

impl Member {
    fn hear(&mut self, now: Instant) {
        self.heard = now;
        self.spoke.get_or_insert(now);
    }

    fn peer(&self) -> Peer {
        Peer {
            address: self.address.clone(),
            step: self.arrived.unwrap_or_default(),
            lineage: self.lineage.clone(),
            pid: self.pid,
            host: self.host.clone(),
        }
    }
}

/// The state of one job's membership.
#[derive(Debug)]
pub(crate) struct Membership {
    rules: Rules,
    slots: Vec<Slot>,
    failures: Vec<u32>,
    members: BTreeMap<MemberId, Member>,
    epoch: u64,
    in_epoch: BTreeSet<MemberId>,
    /// The members of the newest epoch as it formed, in rank order.
    formed: Vec<(MemberId, Peer)>,
    /// Members of the newest epoch that reported a missing rank, with the member that has it.
    suspects: BTreeMap<MemberId, MemberId>,
    /// How many reports blamed a member when the epoch before broke without progress.
    blamed: BTreeMap<MemberId, usize>,
    /// Since when the current epoch is over; none once the next one has formed.
    closing: Option<Instant>,
    reform_told: bool,
    /// The member that was told to make its state durable, as too few wait at the barrier.
    saving: Option<MemberId>,
    stopping: Option<Instant>,
    /// The verdict of a job that stops because too few workers are left.
    shortage: Option<Verdict>,
    ended: bool,
    started: Instant,
    ticked: Instant,
    member_next: MemberId,
    launch_next: u64,
    respawns: u32,
    /// Respawns that count against the limit.
    respawns_spent: u32,
    /// Training time since a respawn was last restored.
    trained: Duration,
    /// The furthest step that a member reported, and its value when a respawn was last restored.
    furthest: u64,
    refilled_at: u64,
    lost: u32,
    admitted: u32,
    last_loss: String,
    /// The exit code that the last lost member reported; 1 if it reported none.
    last_exit_code: u8,
    /// When a member was lost that could not write its checkpoint, and its host.
    unsaved: Option<(Instant, String)>,
    /// How a member with a state was lost while the job stopped.
    lost_state: Option<String>,
    actions: Vec<Action>,
}

impl Membership {
    pub(crate) fn new(rules: Rules, now: Instant) -> Membership {
        Membership {
            slots: (0..rules.workers)
                .map(|_| Slot::Waiting { at: now })
                .chain((0..rules.places).map(|_| Slot::Free))
                .collect(),
            failures: vec![0; rules.workers + rules.places],
            rules,
            members: BTreeMap::new(),
            epoch: 0,
            in_epoch: BTreeSet::new(),
            formed: Vec::new(),
            suspects: BTreeMap::new(),
            blamed: BTreeMap::new(),
            closing: None,
            reform_told: false,
            saving: None,
            stopping: None,
            shortage: None,
            ended: false,
            started: now,
            ticked: now,
            member_next: 1,
            launch_next: 1,
            respawns: 0,
            respawns_spent: 0,
            trained: Duration::ZERO,
            furthest: 0,
            refilled_at: 0,
            lost: 0,
            admitted: 0,
            last_loss: "never started".to_owned(),
            last_exit_code: 1,
            unsaved: None,
            lost_state: None,
            actions: Vec::new(),
        }
    }

    /// Takes the actions decided since the last call.
    pub(crate) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// The slot and the launch of each started process that has not said hello.
    pub(crate) fn starting(&self) -> Vec<(usize, u64)> {
        let launch = |(slot, state): (usize, &Slot)| match state {
            Slot::Starting { launch, .. } => Some((slot, *launch)),
            _ => None,
        };
        self.slots.iter().enumerate().filter_map(launch).collect()
    }

    /// Process ids of the members of the current epoch, in rank order.
    pub(crate) fn pids(&self) -> Vec<u32> {
        self.by_rank().map(|(_, member)| member.pid).collect()
    }

    pub(crate) fn is_member(&self, id: MemberId) -> bool {
        self.members.contains_key(&id)
    }

    /// Whether the job is stopping.
    pub(crate) fn stopping(&self) -> bool {
        self.stopping.is_some()
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Members lost so far.
    pub(crate) fn lost_total(&self) -> u32 {
        self.lost
    }

    /// How often workers of other machines were admitted.
    pub(crate) fn admitted_total(&self) -> u32 {
        self.admitted
    }

    pub(crate) fn respawns(&self) -> u32 {
        self.respawns
    }

    /// A started process has said hello.
    pub(crate) fn joined(
        &mut self,
        slot: usize,
        launch: u64,
        pid: u32,
        address: String,
        now: Instant,
    ) -> Result<MemberId, String> {
        if self.ended {
            return Err("the job is over".to_owned());
        }
        match self.slots.get(slot) {
            Some(Slot::Starting { launch: started, .. }) if *started == launch => {}
            _ => return Err(format!("no worker is expected in slot {slot} with launch {launch}")),
        }
        Ok(self.add(slot, launch, pid, address, String::new(), now))
    }

    /// A worker of another machine has proved the token. None if all places are taken.
    pub(crate) fn admitted(
        &mut self,
        pid: u32,
        address: String,
        host: String,
        now: Instant,
    ) -> Option<MemberId> {
        let free = self.slots.iter().position(|slot| matches!(slot, Slot::Free));
        let slot = free.filter(|_| !self.ended)?;
        let launch = self.launch_next;
        self.launch_next += 1;
        self.admitted += 1;
        Some(self.add(slot, launch, pid, address, host, now))
    }

    fn add(
        &mut self,
        slot: usize,
        launch: u64,
        pid: u32,
        address: String,
        host: String,
        now: Instant,
    ) -> MemberId {
        let id = self.member_next;
        self.member_next += 1;
        self.slots[slot] = Slot::Live { launch, member: id };
        let member = Member {
            slot,
            launch,
            pid,
            address,
            host,
            heard: now,
            spoke: None,
            has_arrived: false,
            leaving: None,
            arrived: None,
            lineage: Vec::new(),
            finished: None,
            place: None,
            unsaved: Duration::ZERO,
            unread: Duration::ZERO,
            read_in_vain: false,
        };
        self.members.insert(id, member);
        // Before any epoch that it is in: such an epoch only saves the state.
        if self.stopping.is_some() {
            self.send(id, Message::Stop);
        }
        id
    }

    /// Whether a slot is a place for workers of other machines.
    fn is_place(&self, slot: usize) -> bool {
        slot >= self.rules.workers
    }

    /// The member that has that rank in the newest epoch, for messages.
    pub(crate) fn describe(&self, epoch: u64, rank: u32) -> Option<Peer> {
        self.formed_as(epoch, rank).map(|(_, peer)| peer.clone())
    }

    fn formed_as(&self, epoch: u64, rank: u32) -> Option<&(MemberId, Peer)> {
        if epoch == self.epoch { self.formed.get(rank as usize) } else { None }
    }

    /// Workers that have to join before the next epoch can form; 0 while one runs. Launched workers that are
    /// starting count as there.
    pub(crate) fn missing(&self) -> usize {
        let running = self.closing.is_none() && !self.in_epoch.is_empty();
        if running || self.ended || self.stopping.is_some() {
            return 0;
        }
        let starting = |slot: &&Slot| matches!(slot, Slot::Waiting { .. } | Slot::Starting { .. });
        let there = self.members.len() + self.slots.iter().filter(starting).count();
        self.rules.workers_min.saturating_sub(there)
    }

    /// A member leaves as soon as its state is durable: the others go on without it.
    pub(crate) fn leaving(&mut self, id: MemberId, now: Instant) {
        if self.ended {
            return;
        }
        let Some(member) = self.members.get_mut(&id) else { return };
        member.hear(now);
        member.arrived = None;
        member.leaving.get_or_insert(now);
        self.close_epoch_of(id, now);
        self.settle(now);
    }

    /// A member leaves in order: its place is free at once.
    pub(crate) fn left(&mut self, id: MemberId, now: Instant) {
        if self.ended {
            return;
        }
        let Some(member) = self.members.remove(&id) else { return };
        tracing::info!(worker = member.slot, pid = member.pid, host = member.host, "worker leaves");
        self.last_loss = "left".to_owned();
        self.lost_state = None;
        self.release(id, &member, "left in order", false);
        self.close_epoch_of(id, now);
        self.settle(now);
    }

    /// Ends a removed member's process or stream, and frees its place.
    fn release(&mut self, id: MemberId, member: &Member, reason: &str, lost: bool) {
        if self.is_place(member.slot) {
            self.slots[member.slot] = Slot::Free;
            self.actions.push(Action::Close { member: id, reason: reason.to_owned(), lost });
        } else {
            self.slots[member.slot] = Slot::Ending { launch: member.launch };
            self.actions.push(Action::Kill { slot: member.slot, launch: member.launch });
        }
    }

    /// Ends the current epoch if a removed member was part of it.
    fn close_epoch_of(&mut self, id: MemberId, now: Instant) {
        if self.in_epoch.remove(&id) {
            self.closing.get_or_insert(now);
            self.send_broken();
        }
    }

    pub(crate) fn record_contact(&mut self, id: MemberId, now: Instant) {
        if let Some(member) = self.members.get_mut(&id) {
            member.hear(now);
        }
    }

    /// Where a member is, for messages.
    pub(crate) fn record_place(&mut self, id: MemberId, step: u64, exchange: String) {
        if let Some(member) = self.members.get_mut(&id) {
            member.place = Some((step, exchange));
        }
    }

    /// The volumes have taken no checkpoint of a member for `unsaved`, and not given it rows for `unread`.
    pub(crate) fn record_outages(&mut self, id: MemberId, unsaved: Duration, unread: Duration) {
        self.record_unread(id, unread);
        if let Some(member) = self.members.get_mut(&id) {
            member.unsaved = unsaved;
        }
    }

    /// The volumes have not given a member rows for `unread`.
    pub(crate) fn record_unread(&mut self, id: MemberId, unread: Duration) {
        let Some(member) = self.members.get_mut(&id) else { return };
        if member.unread.is_zero() != unread.is_zero() {
            let who = member.peer().to_string();
            match unread.is_zero() {
                false => {
                    tracing::warn!(
                        "the volumes or brokers give no rows to {who}, which tries again: its step waits"
                    )
                }
                true => tracing::info!("{who} reads rows again"),
            }
        }
        member.read_in_vain |= member.arrived.is_none() && unread > member.unread;
        member.unread = unread;
    }

    /// Whether the job ends without a checkpoint of its last step.
    pub(crate) fn has_lost_state(&self) -> bool {
        self.lost_state.is_some() && self.furthest > 0
    }

    /// How long a member has waited for its rows.
    pub(crate) fn unread(&self) -> Duration {
        self.members.values().map(|member| member.unread).max().unwrap_or_default()
    }

    /// A member has computed its current step, or written its last checkpoint, for `computing` so far.
    ///
    /// In a ring, the neighbors wait for a late member and report it. A member that trains alone, or for which all
    /// others wait at the end, has no such neighbors, so it has a deadline here.
    pub(crate) fn computing(&mut self, id: MemberId, computing: Duration, now: Instant) {
        self.record_contact(id, now);
        let alone = self.in_epoch.contains(&id)
            && self.by_rank().all(|(other, member)| other == id || member.finished.is_some());
        if alone && computing > self.rules.step_timeout {
            self.lost(id, &format!("did not complete a step for {} s", computing.as_secs()), now);
        }
    }

    /// The job has reached a step.
    pub(crate) fn record_progress(&mut self, step: u64) {
        self.furthest = self.furthest.max(step);
    }

    /// A member waits at the barrier with the state after `step` steps, which has that lineage. `suspect` is the
    /// epoch and the rank that broke its ring.
    pub(crate) fn arrived(
        &mut self,
        id: MemberId,
        (step, lineage): (u64, Vec<u8>),
        reason: Reason,
        suspect: Option<(u64, u32)>,
        now: Instant,
    ) {
        let suspect = suspect.and_then(|(epoch, rank)| self.formed_as(epoch, rank)).map(|(id, _)| *id);
        let Some(member) = self.members.get_mut(&id) else { return };
        member.hear(now);
        member.arrived = Some(step);
        member.lineage = lineage;
        member.has_arrived = true;
        member.finished = None;
        self.furthest = self.furthest.max(step);
        if self.in_epoch.contains(&id) {
            self.closing.get_or_insert(now);
            if reason == Reason::Broken {
                self.suspects.extend(suspect.map(|suspect| (id, suspect)));
                self.send_broken();
            }
        }
        self.settle(now);
    }

    /// A member has nothing left to compute in this epoch.
    pub(crate) fn finished(&mut self, id: MemberId, stopped: bool, now: Instant) {
        let Some(member) = self.members.get_mut(&id) else { return };
        member.hear(now);
        member.finished = Some(stopped);
        self.settle(now);
    }

    /// Stops the job after the current step.
    pub(crate) fn stop(&mut self, now: Instant) {
        if self.stopping.is_some() || self.ended {
            return;
        }
        self.stopping = Some(now);
        let all: Vec<MemberId> = self.members.keys().copied().collect();
        for id in all {
            self.send(id, Message::Stop);
        }
        self.settle(now);
    }

    fn send(&mut self, member: MemberId, message: Message) {
        self.actions.push(Action::Send { member, message });
    }
}

/// The ring that a `Formed` message describes.
pub(crate) fn formation(epoch: u64, rank: usize, peers: &[Peer]) -> Formation {
    Formation { epoch, rank, addresses: peers.iter().map(|peer| peer.address.clone()).collect() }
}

/// The rank that sends its state to those that have another one: the most advanced, the lowest of several. None if
/// all ranks have the same state.
pub(crate) fn source(peers: &[Peer]) -> Option<usize> {
    let ahead = peers.iter().map(|peer| peer.step).max()?;
    let rank = peers.iter().position(|peer| peer.step == ahead)?;
    peers.iter().any(|peer| !has_state_of(peer, &peers[rank])).then_some(rank)
}

/// Whether two members have the same state.
pub(crate) fn has_state_of(peer: &Peer, other: &Peer) -> bool {
    peer.step == other.step && peer.lineage == other.lineage
}
