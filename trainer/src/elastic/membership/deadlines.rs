//! Deadlines of members: silence, barriers, ends, and time in which the coordinator itself did not run.
use std::time::{Duration, Instant};

use super::{Action, Member, MemberId, Membership, Slot, Verdict};

/// A gap of this length between two ticks means that the coordinator itself did not run: it was stopped
/// (SIGSTOP, Ctrl-Z), or its machine was suspended. Ticks are 25 ms apart.
const PAUSE_MIN: Duration = Duration::from_millis(500);

/// Training time that restores one respawn.
const RESPAWN_REFILL: Duration = Duration::from_secs(30);

impl Membership {
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
        let silent: Vec<(MemberId, Duration)> = self
            .members
            .iter()
            .map(|(id, member)| (*id, member.heard, self.silence_max(member)))
            .filter(|(_, heard, limit)| *heard + *limit <= now)
            .map(|(id, _, limit)| (id, limit))
            .collect();
        for (id, limit) in silent {
            let key = if limit == self.rules.heartbeat_lost { " (heartbeat_lost_ms)" } else { "" };
            self.lost(id, &format!("did not answer for {} ms{key}", limit.as_millis()), now);
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
            let limit = self.rules.stop_timeout.as_secs();
            let outage = self.members.values().map(|member| member.unsaved).max().unwrap_or_default();
            let cause = match outage.is_zero() {
                true => String::new(),
                false => format!(", as the volumes have taken no checkpoint for {} s", outage.as_secs()),
            };
            self.lost_state = Some(format!("no worker did so within {limit} s (stop_timeout_ms){cause}"));
            self.end(self.stopped());
        }
        self.settle(now);
    }

    /// The end of a job that stops without a last checkpoint: in order only if there was nothing to save.
    pub(super) fn stopped(&self) -> Verdict {
        match &self.lost_state {
            Some(reason) if self.furthest > 0 => Verdict::Outage {
                message: format!(
                    "the job was stopped, but its state after step {} was not saved: {reason}; start the job again, and \
                     it goes on from the last checkpoint",
                    self.furthest
                ),
            },
            _ => Verdict::Finished { stopped: true },
        }
    }

    /// How long a member may send nothing. A worker of another machine sends its first heartbeat once it has
    /// received its assignment, which takes its time on a slow link.
    pub(super) fn silence_max(&self, member: &Member) -> Duration {
        match self.is_place(member.slot) && member.spoke.is_none() {
            true => self.rules.heartbeat_lost.max(self.rules.assignment_timeout),
            false => self.rules.heartbeat_lost,
        }
    }

    /// Why a member is overdue that sends heartbeats and is in no epoch, if it is.
    pub(super) fn late(&self, member: &Member, now: Instant) -> Option<String> {
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
    pub(super) fn pass_time(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.ticked);
        self.ticked = now;
        if passed >= PAUSE_MIN {
            tracing::info!(ms = passed.as_millis() as u64, "the coordinator was stopped; deadlines move");
            let moved = |since: Instant| (since + passed).min(now);
            self.started = moved(self.started);
            self.closing = self.closing.map(moved);
            self.stopping = self.stopping.map(moved);
            self.unsaved = self.unsaved.take().map(|(at, host)| (moved(at), host));
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
}
