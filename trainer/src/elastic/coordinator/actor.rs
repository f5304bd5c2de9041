//! The coordinator's reaction to events, and to the decisions of its membership.
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use tonic::Status;

use super::{Actor, Event, Report, to_worker_message};
use crate::elastic::joining::send_welcome;
use crate::elastic::membership::{Action, MemberId, Message, Reason, Verdict};
use crate::elastic::proto::{self, from_worker, to_worker};
use crate::error::Result;
use crate::launch::{RingEnv, WorkerEnv, describe_exit};
use crate::metrics;
use crate::spent::Spent;

/// Longest name of an exchange in a heartbeat.
const EXCHANGE_CHARS_MAX: usize = 60;
/// What workers of another machine are told when another coordinator goes on.
const HANDED_OVER: &str = "it hands the run over to another coordinator";

impl Actor<'_> {
    pub(super) fn stopping(&self) -> bool {
        self.membership.stopping()
    }

    /// Checks deadlines, and reports when workers are missing or no longer are.
    pub(super) fn tick(&mut self, on_report: &mut impl FnMut(Report)) {
        self.membership.tick(Instant::now());
        let missing = self.membership.missing();
        if missing != self.report.missing {
            self.report.missing = missing;
            if missing > 0 {
                tracing::info!(job = self.params.job, missing, "waiting for workers to join");
            }
            on_report(self.report.clone());
        }
        let unread = self.membership.unread();
        if unread.as_secs() != self.report.unread.as_secs() {
            self.report.unread = unread;
            on_report(self.report.clone());
        }
    }

    pub(super) fn stop(&mut self) {
        tracing::info!(job = self.params.job, "stopping after the current step");
        self.membership.stop(Instant::now());
    }

    pub(super) fn on_event(&mut self, event: Event, on_report: &mut impl FnMut(Report)) {
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

    pub(super) fn join(
        &mut self,
        hello: &proto::Hello,
        outbox: mpsc::Sender<Result<proto::ToWorker, Status>>,
        now: Instant,
    ) -> Result<MemberId, String> {
        let (slot, ring) = (hello.slot as usize, hello.ring_address.clone());
        let member = self.membership.joined(slot, hello.launch, hello.pid, ring, now)?;
        tracing::info!(job = self.params.job, worker = hello.slot, pid = hello.pid, "worker joined");
        let assignment = self.params.assignment.clone();
        // A launched worker has its secret from its environment, on this machine.
        let welcome = proto::Welcome { member, assignment, ..Default::default() };
        if outbox.try_send(Ok(to_worker_message(to_worker::Message::Welcome(welcome)))).is_ok() {
            self.outboxes.insert(member, outbox);
        }
        Ok(member)
    }

    /// Gives a worker of another machine its place and its assignment; none if no place is free.
    pub(super) fn admit(
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
        if send_welcome(&outbox, member, &joining.assignment, &self.ring_nonce) {
            self.outboxes.insert(member, outbox);
            self.joined.insert(member);
        }
        Some(member)
    }

    pub(super) fn on_message(
        &mut self,
        member: MemberId,
        message: from_worker::Message,
        now: Instant,
        on_report: &mut impl FnMut(Report),
    ) {
        match message {
            from_worker::Message::Hello(_)
            | from_worker::Message::Proof(_)
            | from_worker::Message::Script(_) => {
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
                let unsaved = Duration::from_millis(beat.unsaved_ms);
                self.membership.record_outages(member, unsaved, Duration::from_millis(beat.unread_ms));
                self.record_unsaved(member, unsaved, on_report);
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
                self.membership.record_unread(member, Duration::from_millis(arrive.unread_ms));
                let state = (arrive.step, arrive.lineage);
                self.membership.arrived(member, state, reason, suspect, now);
            }
            // A member that was removed may have sent it before.
            from_worker::Message::Progress(_) if !self.membership.is_member(member) => {}
            from_worker::Message::Progress(progress) => {
                self.membership.record_contact(member, now);
                self.membership.record_progress(progress.step);
                let before = (self.report.step, self.report.rows);
                let total = Spent {
                    feed_us: progress.feed_us,
                    compute_us: progress.compute_us,
                    communication_us: progress.communication_us,
                    checkpoint_us: progress.checkpoint_us,
                };
                let spent = total.since(self.spent);
                self.spent = total;
                metrics::record_time(spent);
                let spent = self.report.spent.plus(spent);
                self.report = Report {
                    step: progress.step,
                    epoch: progress.epoch,
                    loss: progress.loss,
                    rows: progress.rows,
                    evaluation: progress.evaluation.map(Into::into),
                    spent,
                    pids: self.membership.pids(),
                    membership_epoch: self.membership.epoch(),
                    missing: self.report.missing,
                    unsaved: self.report.unsaved,
                    unread: self.report.unread,
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
    pub(super) fn record_unsaved(
        &mut self,
        member: MemberId,
        time: Duration,
        on_report: &mut impl FnMut(Report),
    ) {
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
    pub(super) fn keeps_joined(&self, verdict: &Verdict) -> Option<&'static str> {
        match verdict {
            Verdict::Outage { .. } => Some("the state of the last step was not saved, so keep it"),
            Verdict::WorkersLost { .. } if self.params.hand_over => Some(HANDED_OVER),
            Verdict::WorkersLost { .. } if self.membership.has_lost_state() => {
                Some("the state of the last step was not saved, so keep it")
            }
            _ if self.params.hand_over && self.stopping() => Some(HANDED_OVER),
            _ => None,
        }
    }

    /// Tells the workers of other machines that the job is over or, for a reason why this process may not say so,
    /// to look for the coordinator that may.
    pub(super) fn dismiss(&mut self, reason: Option<&str>) {
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

    /// Ends the started processes that have not greeted, once the job is over: they hold no state and would get no answer.
    pub(super) fn end_launches(&mut self) {
        for launch in self.membership.starting() {
            if let Some(kill) = self.kills.get(&launch) {
                kill.cancel();
            }
        }
    }

    /// Carries out the decided actions; returns the verdict when the job is over.
    pub(super) fn act(&mut self) -> Option<Verdict> {
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

    pub(super) fn send(&mut self, member: MemberId, message: Message) {
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

    pub(super) fn spawn(&mut self, slot: usize, launch: u64) {
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

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use tokio_util::sync::CancellationToken;
    use tokio_util::task::TaskTracker;
    use tonic::Code;

    use super::super::CoordinatorParams;
    use super::*;
    use crate::config::Config;
    use crate::elastic::membership::{Membership, Rules};
    use crate::launch::WorkerCommand;
    use crate::proof::nonce;

    /// The coordinator of a job without launched workers.
    fn actor<'a>(params: &'a CoordinatorParams<'a>, now: Instant) -> Actor<'a> {
        let rules = Rules { places: 2, ..crate::elastic::tests::rules(0) };
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
            spent: Spent::default(),
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
