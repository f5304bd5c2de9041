//! A slice of the background work: its bounds and the fence that its transactions check.

use std::time::Duration;

use crate::election::Turn;
use crate::error::Result;
use crate::meta::engine::{ReadTxn, WriteTxn};

/// Most deletions of a slice that the store refuses.
const REFUSED_MAX: u64 = 1_000;

/// Most work of one slice. Each number is a bound on requests to the metadata or to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Transactions, each on at most a thousand records.
    pub(crate) transactions: u64,
    /// Files of the store that are listed, in pages of at most a thousand.
    pub(crate) listed: u64,
    /// Objects that are deleted.
    pub(crate) deleted: u64,
    /// Packs that are compacted, of at most 16 MiB each.
    pub(crate) packs: u64,
}

impl Limits {
    /// The bounds of the elected process, per `datafs.gc_interval_ms`. A store of a million objects is listed in
    /// 50 minutes, at one slice each 30 s.
    pub(crate) const BACKGROUND: Limits =
        Limits { transactions: 256, listed: 10_000, deleted: 20_000, packs: 4 };
}

/// The work that a slice has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Done {
    /// Transactions.
    pub(crate) transactions: u64,
    /// Requests that list the store.
    pub(crate) lists: u64,
    /// Files that they returned.
    pub(crate) listed: u64,
    /// Objects that were deleted.
    pub(crate) deleted: u64,
    /// Objects that the store did not delete.
    pub(crate) refused: u64,
    /// Packs that were compacted.
    pub(crate) packs: u64,
}

/// A slice, or work without bounds for a caller that waits for its end.
#[derive(Debug)]
pub(crate) struct Slice<'a> {
    turn: Option<&'a Turn>,
    limits: Option<Limits>,
    pub(crate) done: Done,
}

impl<'a> Slice<'a> {
    /// Work without bounds, by a process that need not be elected.
    pub(crate) fn unbounded() -> Slice<'static> {
        Slice { turn: None, limits: None, done: Done::default() }
    }

    /// A slice of the elected process.
    pub(crate) fn new(turn: &'a Turn, limits: Limits) -> Slice<'a> {
        Slice { turn: Some(turn), limits: Some(limits), done: Done::default() }
    }

    /// Whether the work goes on in a later slice.
    pub(crate) fn is_bounded(&self) -> bool {
        self.limits.is_some()
    }

    /// Fails once another process has the turn. For the transaction that changes something.
    pub(crate) fn check(&self, txn: &mut dyn ReadTxn) -> Result<()> {
        self.turn.map_or(Ok(()), |turn| turn.check(txn))
    }

    /// Renews the turn in a transaction, which fails like [`Slice::check`].
    pub(crate) fn renew(&self, txn: &mut dyn WriteTxn) -> Result<()> {
        self.turn.map_or(Ok(()), |turn| turn.renew(txn))
    }

    /// Whether [`Slice::check`] has failed.
    pub(crate) fn is_lost(&self) -> bool {
        self.turn.is_some_and(Turn::is_lost)
    }

    /// Whether it is time for a renewal, if the next opportunity comes after `pause`.
    pub(crate) fn is_due(&self, pause: Duration) -> bool {
        self.turn.is_some_and(|turn| turn.is_due(pause))
    }

    /// Counts a transaction; false when none is left.
    pub(crate) fn transaction(&mut self) -> bool {
        let left = self.limits.is_none_or(|limits| self.done.transactions < limits.transactions);
        self.done.transactions += u64::from(left);
        left
    }

    /// Objects that may still be deleted. A store that refuses [`REFUSED_MAX`] is asked no more in this slice.
    pub(crate) fn deletions_left(&self) -> usize {
        let Some(limits) = self.limits else { return usize::MAX };
        let left = limits.deleted.saturating_sub(self.done.deleted + self.done.refused);
        left.min(REFUSED_MAX.saturating_sub(self.done.refused)) as usize
    }

    /// Counts deletions, and those that the store refused.
    pub(crate) fn count(&mut self, deleted: usize, refused: usize) {
        self.done.deleted += deleted as u64;
        self.done.refused += refused as u64;
    }

    /// Files that may still be listed.
    pub(crate) fn listings_left(&self) -> usize {
        self.limits.map_or(usize::MAX, |limits| limits.listed.saturating_sub(self.done.listed) as usize)
    }

    /// Counts a pack that is compacted; false when none is left.
    pub(crate) fn pack(&mut self) -> bool {
        let left = self.limits.is_none_or(|limits| self.done.packs < limits.packs);
        self.done.packs += u64::from(left);
        left
    }
}
