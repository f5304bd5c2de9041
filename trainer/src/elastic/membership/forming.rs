//! Formation of membership epochs, and the end of the job.
use std::collections::BTreeMap;
use std::time::Instant;

use super::{Action, Member, MemberId, Membership, Message, Peer, Slot, Verdict};

impl Membership {
    pub(super) fn by_rank(&self) -> impl Iterator<Item = (MemberId, &Member)> {
        let mut ranked: Vec<_> =
            self.in_epoch.iter().filter_map(|id| self.members.get(id).map(|member| (*id, member))).collect();
        ranked.sort_by_key(|(_, member)| member.slot);
        ranked.into_iter()
    }

    /// Tells the members that still compute in the epoch that it is over.
    pub(super) fn send_broken(&mut self) {
        let epoch = self.epoch;
        let busy: Vec<MemberId> =
            self.by_rank().filter(|(_, m)| m.arrived.is_none()).map(|(id, _)| id).collect();
        for id in busy {
            self.send(id, Message::Broken { epoch });
        }
    }

    /// Ends the job, forms an epoch or asks members to leave the current one, as the state requires.
    pub(super) fn settle(&mut self, now: Instant) {
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
                Some(_) => self.stopped(),
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
            self.end(self.stopped());
            return;
        }
        self.form(now);
    }

    /// Whether a member may hold a state that no checkpoint has. Workers keep theirs between two coordinators, so that
    /// one may arrive with it before the first epoch of this one.
    pub(super) fn holds_state(&self) -> bool {
        let holds = |member: &Member| member.leaving.is_some() || member.arrived.is_some_and(|step| step > 0);
        !self.in_epoch.is_empty() || self.members.values().any(holds)
    }

    pub(super) fn form(&mut self, now: Instant) {
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
        let mut ranked: Vec<(bool, MemberId, Peer)> = self
            .by_rank()
            .map(|(id, member)| (self.stopping.is_some() && !member.unread.is_zero(), id, member.peer()))
            .collect();
        // Rank 0 writes the last checkpoint. A member whose rows are away may be cut off from the volumes.
        ranked.sort_by_key(|(is_without_rows, ..)| *is_without_rows);
        self.formed = ranked.into_iter().map(|(_, id, peer)| (id, peer)).collect();
        let ranked: Vec<MemberId> = self.formed.iter().map(|(id, _)| *id).collect();
        let peers: Vec<Peer> = self.formed.iter().map(|(_, peer)| peer.clone()).collect();
        for (rank, id) in ranked.into_iter().enumerate() {
            if let Some(member) = self.members.get_mut(&id) {
                (member.arrived, member.read_in_vain) = (None, false);
                self.failures[member.slot] = 0;
            }
            let epoch = self.epoch;
            self.send(id, Message::Formed { epoch, rank, peers: peers.clone() });
        }
    }

    /// Lets a member that is ahead make its state durable while too few wait at the barrier: none of them may be
    /// there when the others come.
    pub(super) fn save(&mut self) {
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
    pub(super) fn take_blamed(&mut self) -> Option<MemberId> {
        let suspects = std::mem::take(&mut self.suspects);
        let before = std::mem::take(&mut self.blamed);
        let began = self.formed.iter().map(|(_, peer)| peer.step).max();
        if self.by_rank().filter_map(|(_, member)| member.arrived).max() > began {
            return None;
        }
        let mut blamed = BTreeMap::new();
        for (reporter, suspect) in &suspects {
            // It has waited for the volumes in this ring, not for the others.
            if self.members.get(suspect).is_some_and(|member| member.read_in_vain) {
                continue;
            }
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
    pub(super) fn blame(&self, reporter: MemberId, suspect: MemberId, mutual: bool) -> Option<MemberId> {
        let in_place = |id: &MemberId| self.members.get(id).is_some_and(|member| self.is_place(member.slot));
        match (in_place(&reporter), in_place(&suspect)) {
            (true, true) if mutual => Some(reporter.max(suspect)),
            (_, true) => Some(suspect),
            (true, false) => Some(reporter),
            (false, false) => None,
        }
    }

    pub(super) fn end(&mut self, verdict: Verdict) {
        if self.ended {
            return;
        }
        self.ended = true;
        // A job that was stopped for want of workers is not finished.
        let verdict = match (verdict, self.shortage.take()) {
            (Verdict::Finished { stopped: true } | Verdict::Outage { .. }, Some(shortage)) => shortage,
            (verdict, _) => verdict,
        };
        let all: Vec<MemberId> = self.members.keys().copied().collect();
        for id in all {
            self.send(id, Message::Done);
        }
        self.actions.push(Action::End(verdict));
    }
}
