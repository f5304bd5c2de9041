//! Live sequences of one model version: their states, their limits, and the queue of requests of each.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::{Declaration, Plan, SequencePosition};
use millrace_serving_core::config::Limits;
use millrace_serving_core::error::InferError;
use millrace_serving_core::parameters::{SequenceId, Step};
use millrace_serving_core::tensor::TensorHandle;
use millrace_serving_core::wire::inference as pb;

/// Counts starts in all versions, so that of two versions that know an id, the one that started it last is found.
static STARTS: AtomicU64 = AtomicU64::new(0);

/// The sequences of a version.
#[derive(Debug)]
pub struct Sequences {
    pub(super) model: String,
    pub(super) version: u64,
    plan: Plan,
    shown: pb::ModelSequenceBatching,
    pub(super) idle: Duration,
    pub(super) sequences_max: usize,
    limits: Limits,
    pub(super) live: Mutex<Live>,
}

#[derive(Debug, Default)]
pub(super) struct Live {
    pub(super) entries: HashMap<SequenceId, Entry>,
    /// Number of sequences with a state, and of those whose first request runs.
    pub(super) held: usize,
    /// Bytes of all states, including growth claimed by running requests.
    pub(super) bytes: usize,
    /// Number of requests that wait for the one before them; below, the bytes of their inputs.
    pub(super) waiting: usize,
    pub(super) waiting_bytes: usize,
    /// Number of the next request.
    pub(super) number: u64,
    /// Time before which no sequence can become idle.
    pub(super) quiet_until: Option<Instant>,
    /// Whether a task drops idle sequences periodically.
    pub(super) swept: bool,
}

/// A sequence that has a state or requests.
#[derive(Debug, Default)]
pub(super) struct Entry {
    /// Number of its last start among all starts.
    pub(super) order: u64,
    pub(super) kept: Option<SavedState>,
    /// Requests in order of arrival; the first one runs.
    pub(super) line: VecDeque<Waiter>,
}

/// State that a request left for the next one.
#[derive(Debug)]
pub(super) struct SavedState {
    pub(super) tensors: Arc<Vec<TensorHandle>>,
    pub(super) bytes: usize,
    /// End of the last request.
    pub(super) last: Instant,
}

#[derive(Debug)]
pub(super) struct Waiter {
    number: u64,
    /// Fires when the request is the first in the queue.
    turn: Option<oneshot::Sender<()>>,
}

/// Capacity that a request claims while it runs.
#[derive(Debug, Default)]
pub(super) struct Claim {
    /// One sequence: its sequence was not live before.
    pub(super) sequence: bool,
    /// Bytes by which the state of its sequence grows.
    pub(super) bytes: usize,
}

impl Sequences {
    pub(crate) fn new(
        plan: Plan,
        declaration: &Declaration,
        limits: Limits,
        model: &str,
        version: u64,
    ) -> Sequences {
        let sequences_max = declaration.sequences_max.unwrap_or(usize::MAX).min(limits.sequences_max);
        Sequences {
            model: model.to_owned(),
            version,
            plan,
            shown: declaration.shown.clone(),
            idle: declaration.idle,
            sequences_max,
            limits,
            live: Mutex::default(),
        }
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The configuration of sequences as shown to clients.
    pub fn shown(&self) -> pb::ModelSequenceBatching {
        self.shown.clone()
    }

    /// Number of live sequences.
    pub fn live(&self) -> usize {
        self.sweep();
        self.live.lock().held
    }

    /// Number of requests that wait for the one before them.
    pub fn waiting(&self) -> usize {
        self.live.lock().waiting
    }

    /// Number of the sequence's start among all starts, if it is live here or about to be.
    pub fn start_order(&self, id: &SequenceId) -> Option<u64> {
        let live = self.live.lock();
        let entry = live.entries.get(id)?;
        let is_live = entry.kept.is_some() && !entry.is_idle(Instant::now(), self.idle);
        (is_live || !entry.line.is_empty()).then_some(entry.order)
    }

    /// Takes a place behind the queued requests of the same sequence.
    pub fn queue(self: &Arc<Self>, step: Step) -> Box<SequencePosition> {
        let mut guard = self.live.lock();
        let live = &mut *guard;
        let number = live.number;
        live.number += 1;
        let entry = live.entries.entry(step.id.clone()).or_default();
        let mut lapsed = None;
        if entry.line.is_empty() && entry.is_idle(Instant::now(), self.idle) {
            lapsed = entry.kept.take();
            live.held -= 1;
            live.bytes -= lapsed.as_ref().map_or(0, |kept| kept.bytes);
        }
        // Without a start, a request takes no id from another version that has its sequence.
        if step.start {
            entry.order = STARTS.fetch_add(1, Ordering::Relaxed) + 1;
        }
        let (sender, receiver) = match entry.line.is_empty() {
            true => (None, None),
            false => {
                let (sender, receiver) = oneshot::channel();
                (Some(sender), Some(receiver))
            }
        };
        entry.line.push_back(Waiter { number, turn: sender });
        drop(guard);
        // Its tensors may be large: they are freed outside the lock.
        drop(lapsed);
        Box::new(SequencePosition::new(Arc::clone(self), step, number, receiver))
    }

    /// Counts a waiting request with `bytes` bytes of input, until the guard is dropped.
    pub(super) fn wait(&self, bytes: usize) -> Result<Waiting<'_>, InferError> {
        let (requests_max, bytes_max) = (self.limits.requests_waiting_max, self.limits.waiting_bytes_max);
        let mut live = self.live.lock();
        let (requests, total) = (live.waiting + 1, live.waiting_bytes.saturating_add(bytes));
        if requests > requests_max || total > bytes_max {
            let (requests, total) = (live.waiting, live.waiting_bytes);
            drop(live);
            return Err(InferError::Overloaded {
                reason: format!(
                    "{requests} requests with {total} bytes wait for the one before them of their sequence and this one \
                     has {bytes}; the limits are {requests_max} and {bytes_max} (limits.requests_waiting_max, \
                     limits.waiting_bytes_max)"
                ),
            });
        }
        live.waiting = requests;
        live.waiting_bytes = total;
        Ok(Waiting { sequences: self, bytes })
    }

    /// The states for the first request in the queue of its sequence.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for a sequence that is not live; [`InferError::Overloaded`] at the limit of live
    /// sequences.
    pub(super) fn begin(&self, step: &Step, claim: &mut Claim) -> Result<Arc<Vec<TensorHandle>>, InferError> {
        let mut guard = self.live.lock();
        let live = &mut *guard;
        let kept = live.entries.get(&step.id).and_then(|entry| entry.kept.as_ref());
        match kept {
            Some(kept) if !step.start => return Ok(Arc::clone(&kept.tensors)),
            Some(_) => return Ok(self.plan.initial()),
            None if !step.start => {
                drop(guard);
                return Err(self.unknown(&step.id));
            }
            None => {}
        }
        let mut lapsed = Vec::new();
        if live.held >= self.sequences_max {
            lapsed = live.sweep(self.idle);
        }
        claim.sequence = live.held < self.sequences_max;
        live.held += usize::from(claim.sequence);
        drop(guard);
        drop(lapsed);
        if claim.sequence { Ok(self.plan.initial()) } else { Err(self.full()) }
    }

    /// Claims capacity for the state that a run left.
    ///
    /// # Errors
    /// [`InferError::Overloaded`] if the states would exceed their limit.
    pub(super) fn claim(&self, step: &Step, bytes: usize, claim: &mut Claim) -> Result<(), InferError> {
        let bytes_max = self.limits.sequence_bytes_max;
        let mut guard = self.live.lock();
        let live = &mut *guard;
        let kept = live.entries.get(&step.id).and_then(|entry| entry.kept.as_ref());
        let more = bytes.saturating_sub(kept.map_or(0, |kept| kept.bytes));
        let mut lapsed = Vec::new();
        if live.bytes.saturating_add(more) > bytes_max {
            lapsed = live.sweep(self.idle);
        }
        let total = live.bytes.saturating_add(more);
        let fits = total <= bytes_max;
        if fits {
            live.bytes = total;
            claim.bytes = more;
        }
        drop(guard);
        drop(lapsed);
        if fits {
            return Ok(());
        }
        Err(InferError::Overloaded {
            reason: format!(
                "the states of the sequences of this model would have {total} bytes with this one, the limit is \
                 {bytes_max} (limits.sequence_bytes_max): end others with sequence_end, or wait until they are idle"
            ),
        })
    }

    /// Makes a new state current, or drops the state after the last request of a sequence.
    pub(super) fn commit(
        self: &Arc<Self>,
        step: &Step,
        claim: Claim,
        tensors: Vec<TensorHandle>,
        bytes: usize,
    ) {
        let mut guard = self.live.lock();
        let live = &mut *guard;
        // The request is in the queue, so the entry exists.
        let Some(entry) = live.entries.get_mut(&step.id) else { return };
        let old = entry.kept.take();
        live.bytes -= claim.bytes + old.as_ref().map_or(0, |kept| kept.bytes);
        let mut begin_to_sweep = false;
        // If false, another version started the sequence anew meanwhile, and it ends here.
        let is_live = claim.sequence || old.is_some();
        if step.end {
            live.held -= usize::from(is_live);
        } else if is_live {
            entry.kept = Some(SavedState { tensors: Arc::new(tensors), bytes, last: Instant::now() });
            live.bytes += bytes;
            begin_to_sweep = !live.swept;
            live.swept = true;
        }
        drop(guard);
        drop(old);
        if begin_to_sweep {
            self.sweep_from_time_to_time();
        }
    }

    /// Drops the state of a sequence.
    pub(super) fn forget(&self, id: &SequenceId) {
        let mut guard = self.live.lock();
        let live = &mut *guard;
        let Some(entry) = live.entries.get_mut(id) else { return };
        let old = entry.kept.take();
        if let Some(old) = &old {
            live.held -= 1;
            live.bytes -= old.bytes;
        }
        if entry.line.is_empty() {
            live.entries.remove(id);
        }
        drop(guard);
        drop(old);
    }

    /// Removes a request from its queue, releases its claim, and wakes the request that is now first.
    pub(super) fn leave(&self, step: &Step, number: u64, claim: &Claim) {
        let mut guard = self.live.lock();
        let live = &mut *guard;
        live.held -= usize::from(claim.sequence);
        live.bytes -= claim.bytes;
        let Some(entry) = live.entries.get_mut(&step.id) else { return };
        if let Ok(place) = entry.line.binary_search_by_key(&number, |waiter| waiter.number) {
            entry.line.remove(place);
        }
        if let Some(kept) = &mut entry.kept {
            kept.last = Instant::now();
        }
        let first = entry.line.front_mut().and_then(|first| first.turn.take());
        if entry.line.is_empty() && entry.kept.is_none() {
            live.entries.remove(&step.id);
        }
        drop(guard);
        if let Some(turn) = first {
            // A waiter that was just dropped leaves the queue itself.
            let _ = turn.send(());
        }
    }
}

/// A request that waits for the one before it; counted until this is dropped.
#[derive(Debug)]
pub(super) struct Waiting<'a> {
    sequences: &'a Sequences,
    bytes: usize,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut live = self.sequences.live.lock();
        live.waiting -= 1;
        live.waiting_bytes -= self.bytes;
    }
}
