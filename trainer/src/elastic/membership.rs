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

pub(crate) type MemberId = u64;

/// A gap of this length between two ticks means that the coordinator itself did not run: it was stopped
/// (SIGSTOP, Ctrl-Z), or its machine was suspended. Ticks are 25 ms apart.
const PAUSE_MIN: Duration = Duration::from_millis(500);
/// Training time that restores one respawn.
const RESPAWN_REFILL: Duration = Duration::from_secs(30);

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
    /// When a member was lost that could not write its checkpoint.
    unsaved: Option<Instant>,
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
            actions: Vec::new(),
        }
    }

    /// Takes the actions decided since the last call.
    pub(crate) fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
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
        };
        self.members.insert(id, member);
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

    /// A member met an error that every other member would meet, too.
    ///
    /// Others that hold the state go on without a member that has not reached the barrier yet, as they need not read
    /// what it could not. They also go on without a member that leaves.
    pub(crate) fn failed(&mut self, id: MemberId, message: String, exit_code: u8, now: Instant) {
        let Some(member) = self.members.get(&id) else { return };
        let is_spare = !member.has_arrived && self.holds_state();
        if is_spare || member.leaving.is_some() {
            return self.lost_alone(id, &message, exit_code, now);
        }
        self.end(Verdict::Failed { message, exit_code });
    }

    /// A member met an error that may be local to it: the coordinator replaces the process.
    pub(crate) fn failed_alone(&mut self, id: MemberId, message: &str, exit_code: u8, now: Instant) {
        // A stopping job replaces no process, so the error of its last member is the job's error.
        if self.stopping.is_some() && self.members.len() == 1 {
            return self.failed(id, message.to_owned(), exit_code, now);
        }
        self.lost_alone(id, message, exit_code, now);
    }

    /// The volumes did not take a member's checkpoint for too long. `is_everywhere` says that they do not answer the
    /// coordinator either.
    ///
    /// One member of several may be cut off from the volumes, and the next one writes the checkpoint. If that one
    /// fails as well, a third would, too.
    pub(crate) fn unsaved(
        &mut self,
        id: MemberId,
        message: &str,
        exit_code: u8,
        is_everywhere: bool,
        now: Instant,
    ) {
        let Some(member) = self.members.get(&id) else { return };
        let is_leaving = member.leaving.is_some();
        let is_second = self.unsaved.is_some_and(|at| now < at + self.rules.step_timeout.saturating_mul(2));
        let is_common = is_everywhere || is_second || self.members.len() == 1;
        if is_common && !is_leaving {
            return self.end(Verdict::Outage { message: message.to_owned() });
        }
        if !is_leaving {
            self.unsaved = Some(now);
        }
        self.lost_alone(id, message, exit_code, now);
    }

    fn lost_alone(&mut self, id: MemberId, message: &str, exit_code: u8, now: Instant) {
        if self.members.contains_key(&id) {
            self.lost(id, message, now);
            self.last_exit_code = exit_code;
        }
    }

    /// A member is lost: its stream broke, or the coordinator has to kill it.
    pub(crate) fn lost(&mut self, id: MemberId, reason: &str, now: Instant) {
        if self.ended {
            return;
        }
        let Some(member) = self.members.remove(&id) else { return };
        let place = match &member.place {
            Some((step, exchange)) if exchange.is_empty() => format!(", last heard of at step {step}"),
            Some((step, exchange)) => format!(", last heard of at step {step} in {exchange}"),
            None => String::new(),
        };
        let who = member.peer().to_string();
        tracing::warn!(
            worker = member.slot,
            pid = member.pid,
            host = member.host,
            "worker lost: {who} {reason}{place}"
        );
        self.lost += 1;
        self.last_loss = format!("{reason}{place}");
        self.last_exit_code = 1;
        self.release(id, &member, reason, true);
        self.close_epoch_of(id, now);
        self.settle(now);
    }

    /// A worker process has exited.
    pub(crate) fn exited(&mut self, slot: usize, launch: u64, reason: &str, now: Instant) {
        if self.ended {
            return;
        }
        match self.slots.get(slot) {
            Some(Slot::Live { launch: started, member }) if *started == launch => {
                let member = *member;
                self.lost(member, reason, now);
            }
            Some(Slot::Starting { launch: started, .. }) if *started == launch => {
                self.last_loss = reason.to_owned();
                self.last_exit_code = 1;
            }
            // Killed by the coordinator, which has recorded the reason.
            Some(Slot::Ending { launch: started }) if *started == launch => {}
            _ => return,
        }
        self.slots[slot] = Slot::GivenUp;
        self.respawn(slot, now);
        self.settle(now);
    }

    /// Schedules a restart of a slot after a pause, within the limit of respawns.
    fn respawn(&mut self, slot: usize, now: Instant) {
        if self.respawns_spent >= self.rules.respawns_max || self.stopping.is_some() {
            return;
        }
        self.respawns += 1;
        self.respawns_spent += 1;
        let factor = 1 << self.failures[slot].min(6);
        self.failures[slot] += 1;
        self.slots[slot] = Slot::Waiting { at: now + self.rules.respawn_backoff * factor };
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

    /// Starts processes that are due and gives up on members that are overdue.
    pub(crate) fn tick(&mut self, now: Instant) {
        if self.ended {
            return;
        }
        self.pass_time(now);
        for slot in 0..self.slots.len() {
            match self.slots[slot] {
                Slot::Waiting { .. } if self.stopping.is_some() => {
                    self.slots[slot] = Slot::GivenUp;
                }
                Slot::Waiting { at } if at <= now => {
                    let launch = self.launch_next;
                    self.launch_next += 1;
                    self.slots[slot] = Slot::Starting { launch, since: now };
                    self.actions.push(Action::Spawn { slot, launch });
                }
                Slot::Starting { launch, since } if since + self.rules.start_timeout <= now => {
                    self.last_loss = "did not start in time".to_owned();
                    self.last_exit_code = 1;
                    self.slots[slot] = Slot::Ending { launch };
                    self.actions.push(Action::Kill { slot, launch });
                }
                _ => {}
            }
        }
        let silent: Vec<MemberId> = self
            .members
            .iter()
            .filter(|(_, member)| member.heard + self.silence_max(member) <= now)
            .map(|(id, _)| *id)
            .collect();
        for id in silent {
            self.lost(id, "fell silent", now);
        }
        let late: Vec<(MemberId, String)> = self
            .members
            .iter()
            .filter_map(|(id, member)| self.late(member, now).map(|reason| (*id, reason)))
            .collect();
        for (id, reason) in late {
            self.lost(id, &reason, now);
        }
        if self.closing.is_some_and(|since| since + self.rules.rendezvous_timeout <= now) {
            let missing: Vec<MemberId> = self
                .in_epoch
                .iter()
                .filter(|id| self.members.get(id).is_some_and(|m| m.arrived.is_none()))
                .copied()
                .collect();
            for id in missing {
                self.lost(id, "did not reach the barrier in time", now);
            }
        }
        if self.stopping.is_some_and(|since| since + self.rules.stop_timeout <= now) {
            tracing::warn!("workers did not stop in time; the last checkpoint remains valid");
            self.end(Verdict::Finished { stopped: true });
        }
        self.settle(now);
    }

    /// How long a member may send nothing. A worker of another machine sends its first heartbeat once it has
    /// received its assignment, which takes its time on a slow link.
    fn silence_max(&self, member: &Member) -> Duration {
        match self.is_place(member.slot) && member.spoke.is_none() {
            true => self.rules.heartbeat_lost.max(self.rules.assignment_timeout),
            false => self.rules.heartbeat_lost,
        }
    }

    /// Why a member is overdue that sends heartbeats and is in no epoch, if it is.
    fn late(&self, member: &Member, now: Instant) -> Option<String> {
        if let Some(since) = member.leaving {
            let is_over = since + self.rules.step_timeout <= now;
            return is_over.then(|| "did not leave in time".to_owned());
        }
        let limit = match self.is_place(member.slot) {
            true => self.rules.start_timeout.max(self.rules.assignment_timeout),
            false => self.rules.start_timeout,
        };
        let is_over = !member.has_arrived && member.spoke.is_some_and(|since| since + limit <= now);
        is_over.then(|| format!("did not reach the barrier within {} s (start_timeout_ms)", limit.as_secs()))
    }

    /// Accounts for the time since the last tick. If the coordinator itself did not run, this moves all
    /// deadlines, because no message of the workers was read meanwhile.
    fn pass_time(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.ticked);
        self.ticked = now;
        if passed >= PAUSE_MIN {
            tracing::info!(ms = passed.as_millis() as u64, "the coordinator was stopped; deadlines move");
            let moved = |since: Instant| (since + passed).min(now);
            self.started = moved(self.started);
            self.closing = self.closing.map(moved);
            self.stopping = self.stopping.map(moved);
            self.unsaved = self.unsaved.map(moved);
            for member in self.members.values_mut() {
                member.heard = moved(member.heard);
                member.spoke = member.spoke.map(moved);
                member.leaving = member.leaving.map(moved);
            }
            for slot in &mut self.slots {
                if let Slot::Starting { since, .. } = slot {
                    *since = moved(*since);
                }
            }
            return;
        }
        if self.closing.is_some() || self.in_epoch.is_empty() {
            return;
        }
        self.trained += passed;
        // Time without progress restores nothing: a job that repeats the same steps has to end.
        if self.trained < RESPAWN_REFILL || self.furthest <= self.refilled_at {
            return;
        }
        (self.trained, self.refilled_at) = (Duration::ZERO, self.furthest);
        self.respawns_spent = self.respawns_spent.saturating_sub(1);
        if let Some(slot) = self.slots.iter().position(|slot| matches!(slot, Slot::GivenUp)) {
            self.respawn(slot, now);
        }
    }

    fn by_rank(&self) -> impl Iterator<Item = (MemberId, &Member)> {
        let mut ranked: Vec<_> =
            self.in_epoch.iter().filter_map(|id| self.members.get(id).map(|member| (*id, member))).collect();
        ranked.sort_by_key(|(_, member)| member.slot);
        ranked.into_iter()
    }

    /// Tells the members that still compute in the epoch that it is over.
    fn send_broken(&mut self) {
        let epoch = self.epoch;
        let busy: Vec<MemberId> =
            self.by_rank().filter(|(_, m)| m.arrived.is_none()).map(|(id, _)| id).collect();
        for id in busy {
            self.send(id, Message::Broken { epoch });
        }
    }

    /// Ends the job, forms an epoch or asks members to leave the current one, as the state requires.
    fn settle(&mut self, now: Instant) {
        if self.ended {
            return;
        }
        let running = self.closing.is_none() && !self.in_epoch.is_empty();
        if running {
            let verdicts: Option<Vec<bool>> = self.by_rank().map(|(_, m)| m.finished).collect();
            if let Some(stopped) = verdicts {
                self.end(Verdict::Finished { stopped: stopped.contains(&true) });
                return;
            }
            let joiner = self
                .members
                .iter()
                .any(|(id, member)| member.arrived.is_some() && !self.in_epoch.contains(id));
            if joiner && !self.reform_told {
                self.reform_told = true;
                let epoch = self.epoch;
                let ids: Vec<MemberId> = self.in_epoch.iter().copied().collect();
                for id in ids {
                    self.send(id, Message::Reform { epoch });
                }
            }
            return;
        }
        // Without places for others, those that are left may be too few for ever.
        let usable = self.slots.iter().filter(|slot| !matches!(slot, Slot::GivenUp)).count();
        if usable == 0 || (usable < self.rules.workers_min && self.stopping.is_none()) {
            let verdict = match self.stopping {
                Some(_) => Verdict::Finished { stopped: true },
                None => {
                    let mut reason = self.last_loss.clone();
                    if usable > 0 {
                        reason += &format!("; {usable} left of workers_min = {}", self.rules.workers_min);
                    }
                    Verdict::WorkersLost { reason, exit_code: self.last_exit_code }
                }
            };
            if self.in_epoch.is_empty() {
                self.end(verdict);
            } else {
                // The survivors hold the state: they write it before the job ends.
                self.shortage = Some(verdict);
                self.stop(now);
            }
            return;
        }
        // No member has a state, so the last durable checkpoint is all there is to keep.
        if self.stopping.is_some() && !self.holds_state() {
            self.end(Verdict::Finished { stopped: true });
            return;
        }
        self.form(now);
    }

    /// Whether a member may hold a state that no checkpoint has. Workers keep theirs between two coordinators, so that
    /// one may arrive with it before the first epoch of this one.
    fn holds_state(&self) -> bool {
        let holds = |member: &Member| member.leaving.is_some() || member.arrived.is_some_and(|step| step > 0);
        !self.in_epoch.is_empty() || self.members.values().any(holds)
    }

    fn form(&mut self, now: Instant) {
        let absent = self.by_rank().any(|(_, member)| member.arrived.is_none());
        let ready = self.members.values().filter(|member| member.arrived.is_some()).count();
        // A job that stops needs an epoch for its last checkpoint, with as many as there are.
        let needed = if self.stopping.is_some() { 1 } else { self.rules.workers_min.max(1) };
        if absent || ready < needed {
            if !absent && self.holds_state() {
                self.save();
            }
            return;
        }
        // The first epoch waits for all workers; later ones wait only for the survivors.
        let everyone = self.slots.iter().all(|slot| match slot {
            Slot::Live { member, .. } => {
                self.members.get(member).is_some_and(|member| member.arrived.is_some())
            }
            Slot::GivenUp | Slot::Free => true,
            _ => false,
        });
        let may_wait = self.epoch == 0 && self.stopping.is_none();
        if may_wait && !everyone && now < self.started + self.rules.start_timeout {
            return;
        }
        if let Some(id) = self.take_blamed() {
            let reason = "broke two rings in succession: other workers do not reach its ring port, or it does not \
                          reach theirs; check --advertise and firewalls";
            return self.lost(id, reason, now);
        }
        self.epoch += 1;
        self.closing = None;
        self.reform_told = false;
        self.saving = None;
        self.in_epoch =
            self.members.iter().filter(|(_, member)| member.arrived.is_some()).map(|(id, _)| *id).collect();
        let ranked: Vec<MemberId> = self.by_rank().map(|(id, _)| id).collect();
        self.formed = self.by_rank().map(|(id, member)| (id, member.peer())).collect();
        let peers: Vec<Peer> = self.formed.iter().map(|(_, peer)| peer.clone()).collect();
        for (rank, id) in ranked.into_iter().enumerate() {
            if let Some(member) = self.members.get_mut(&id) {
                member.arrived = None;
                self.failures[member.slot] = 0;
            }
            let epoch = self.epoch;
            self.send(id, Message::Formed { epoch, rank, peers: peers.clone() });
        }
    }

    /// Lets a member that is ahead make its state durable while too few wait at the barrier: none of them may be
    /// there when the others come.
    fn save(&mut self) {
        if self.saving.is_some_and(|id| self.members.contains_key(&id)) {
            return;
        }
        let waiting = self.members.iter();
        let ahead = waiting.filter_map(|(id, member)| Some((member.arrived?, std::cmp::Reverse(*id)))).max();
        self.saving = ahead.map(|(_, std::cmp::Reverse(id))| id);
        if let Some(id) = self.saving {
            self.send(id, Message::Save);
        }
    }

    /// The worker of another machine that keeps rings from forming: the one that reports of two successive
    /// epochs without progress blame most, the newest of several.
    fn take_blamed(&mut self) -> Option<MemberId> {
        let suspects = std::mem::take(&mut self.suspects);
        let before = std::mem::take(&mut self.blamed);
        let began = self.formed.iter().map(|(_, peer)| peer.step).max();
        if self.by_rank().filter_map(|(_, member)| member.arrived).max() > began {
            return None;
        }
        let mut blamed = BTreeMap::new();
        for (reporter, suspect) in &suspects {
            let mutual = suspects.get(suspect) == Some(reporter);
            if let Some(id) = self.blame(*reporter, *suspect, mutual) {
                *blamed.entry(id).or_insert(0) += 1;
            }
        }
        let twice = blamed.iter().filter_map(|(id, now)| before.get(id).map(|then| (now + then, *id)));
        let worst = twice.max().map(|(_, id)| id);
        if worst.is_none() {
            self.blamed = blamed;
        }
        worst
    }

    /// The end of a broken connection that is blamed. A launched worker never is: it is not the one whose
    /// network may be another.
    fn blame(&self, reporter: MemberId, suspect: MemberId, mutual: bool) -> Option<MemberId> {
        let in_place = |id: &MemberId| self.members.get(id).is_some_and(|member| self.is_place(member.slot));
        match (in_place(&reporter), in_place(&suspect)) {
            (true, true) if mutual => Some(reporter.max(suspect)),
            (_, true) => Some(suspect),
            (true, false) => Some(reporter),
            (false, false) => None,
        }
    }

    fn end(&mut self, verdict: Verdict) {
        if self.ended {
            return;
        }
        self.ended = true;
        // A job that was stopped for want of workers is not finished.
        let verdict = match (verdict, self.shortage.take()) {
            (Verdict::Finished { stopped: true }, Some(shortage)) => shortage,
            (verdict, _) => verdict,
        };
        let all: Vec<MemberId> = self.members.keys().copied().collect();
        for id in all {
            self.send(id, Message::Done);
        }
        self.actions.push(Action::End(verdict));
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
