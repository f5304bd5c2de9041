//! Ring of slots: a bounded set of slots, each with one owner at a time.

use std::collections::VecDeque;
use std::mem;
use std::process;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::feed::error::Result;
use crate::feed::staging::ReaderStream;
use crate::feed::staging::memory::SlotMemory;

type Slot = Box<dyn SlotMemory>;

/// A bounded set of slots. The slot that was released first is leased first.
pub(crate) struct Ring {
    state: Mutex<State>,
    /// The process that has the slots.
    process: u32,
}

struct State {
    free: VecDeque<Slot>,
    /// Slots, leased ones included.
    slots: usize,
    slots_max: usize,
    /// The one task that waits for a slot.
    waiting: Option<Waker>,
}

/// A slot that is leased. Dropping it releases the slot, except in a child of a fork.
pub(crate) struct Lease {
    ring: Arc<Ring>,
    /// None once it is released.
    slot: Option<Slot>,
}

impl Ring {
    /// A ring of some slots, at least one, that may grow.
    pub(crate) fn new(first: VecDeque<Slot>, slots_max: usize) -> Arc<Self> {
        let slots = first.len();
        let state = State { free: first, slots, slots_max: slots_max.max(slots), waiting: None };
        Arc::new(Self { state: Mutex::new(state), process: process::id() })
    }

    /// A free slot, or a further one from `allocate` below the most slots. Pending while all are leased: the next
    /// release wakes the task. A ring whose memory ends stops growing.
    pub(crate) fn poll_lease(
        self: &Arc<Self>,
        cx: &mut Context<'_>,
        allocate: impl FnOnce() -> Result<Slot>,
    ) -> Poll<Lease> {
        let mut state = self.state.lock();
        let mut slot = state.free.pop_front();
        if slot.is_none() && state.slots < state.slots_max {
            match allocate() {
                Ok(further) => {
                    state.slots += 1;
                    slot = Some(further);
                }
                Err(error) => {
                    tracing::warn!(slots = state.slots, %error, "the ring of staged batches cannot grow");
                    state.slots_max = state.slots;
                }
            }
        }
        match slot {
            Some(slot) => Poll::Ready(Lease { ring: Arc::clone(self), slot: Some(slot) }),
            None => {
                state.waiting = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Slots, leased ones included.
    pub(crate) fn slots(&self) -> usize {
        self.state.lock().slots
    }
}

impl Lease {
    /// The memory, to fill it.
    pub(crate) fn memory(&mut self) -> Option<&mut dyn SlotMemory> {
        Some(&mut **self.slot.as_mut()?)
    }

    /// The address of the first byte for readers.
    pub(crate) fn address(&self) -> usize {
        self.slot.as_ref().map_or(0, |slot| slot.address())
    }

    /// Makes a reader's stream wait until the bytes are there.
    pub(crate) fn read_on(&self, stream: ReaderStream) -> Result<()> {
        self.slot.as_ref().map_or(Ok(()), |slot| slot.read_on(stream))
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let Some(mut slot) = self.slot.take() else { return };
        if self.ring.process != process::id() {
            // The lock may be held by a thread that the child does not have.
            mem::forget(slot);
            mem::forget(Arc::clone(&self.ring));
            return;
        }
        slot.released();
        let mut state = self.ring.state.lock();
        state.free.push_back(slot);
        let waiting = state.waiting.take();
        drop(state);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }
}
