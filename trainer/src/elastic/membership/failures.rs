//! Members that fail, are lost or exit, and the processes that replace them.
use std::time::Instant;

use super::{MemberId, Membership, Slot, Verdict};

impl Membership {
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
        // A machine that is cut off fails again with another worker, and says nothing of the other machines.
        let is_second = self.unsaved.as_ref().is_some_and(|(at, host)| {
            let is_recent = now < *at + self.rules.step_timeout.saturating_mul(2);
            is_recent && (*host != member.host || self.members.values().all(|other| other.host == *host))
        });
        let is_common = is_everywhere || is_second || self.members.len() == 1;
        if is_common && !is_leaving {
            return self.end(Verdict::Outage { message: message.to_owned() });
        }
        if !is_leaving {
            self.unsaved = Some((now, member.host.clone()));
        }
        self.lost_alone(id, message, exit_code, now);
    }

    pub(super) fn lost_alone(&mut self, id: MemberId, message: &str, exit_code: u8, now: Instant) {
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
        let holds_state = self.in_epoch.contains(&id)
            || member.leaving.is_some()
            || member.arrived.is_some_and(|step| step > 0);
        if self.stopping.is_some() && holds_state {
            self.lost_state = Some(format!("{who} {}", self.last_loss));
        }
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
    pub(super) fn respawn(&mut self, slot: usize, now: Instant) {
        if self.respawns_spent >= self.rules.respawns_max || self.stopping.is_some() {
            return;
        }
        self.respawns += 1;
        self.respawns_spent += 1;
        let factor = 1 << self.failures[slot].min(6);
        self.failures[slot] += 1;
        self.slots[slot] = Slot::Waiting { at: now + self.rules.respawn_backoff * factor };
    }
}
