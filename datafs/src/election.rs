//! Election of the process that does the background work of a home or schema.
//!
//! One record in the metadata names the session that is elected, with a *fence*: a number that grows with each
//! election. The elected process changes the record several times within the time of its lease, together with the
//! position of its work. Another process takes over
//!  - at once, if the elected session has ended: its row or, on one machine, the lock of its file is gone;
//!  - else once the record was the same for the time of the lease, by its own clock.
//!
//! No clock of another machine is read. A process that ends gives its turn up with the row of its session.
//!
//! Every transaction of the elected process checks the fence ([`Turn::check`]). A process that was stopped and has
//! lost its turn meanwhile so changes nothing in the metadata. It may still delete the objects that its last
//! transaction had decided on: no extent references them, and the session of an unpublished object has no row any more,
//! so its commits fail. Only a restore gives such an object a reference again. The transaction has left a record for it
//! (`deletion.rs`). Programs of earlier versions know neither elections nor these records.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use millrace_leaf::lease::{Watch, boot_time};
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::codec::{Decoder, Encoder};
use crate::meta::engine::{Durability, ReadTxn, WriteTxn};
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::session::DeadSession;

/// Intervals of the background work in the time of a lease.
const INTERVALS: u32 = 3;
/// Bounds of a lease. A record beyond them is read as if it were within.
const LEASE_MIN: Duration = Duration::from_secs(3);
const LEASE_MAX: Duration = Duration::from_secs(86_400);
/// Renewals within the time of a lease.
const RENEWALS: u32 = 3;

/// The record of the election. Fields behind these may be added; programs that do not know them ignore them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Record {
    fence: u64,
    session: u64,
    renewals: u64,
    lease_ms: u64,
}

impl Record {
    fn encode(self) -> Vec<u8> {
        Encoder::default().u64(self.fence).u64(self.session).u64(self.renewals).u64(self.lease_ms).finish()
    }

    /// `None` for a record that cannot be read: it is waited for like one of an unknown process.
    fn decode(value: &[u8]) -> Option<Record> {
        let mut from = Decoder::new("record of the background work", value);
        let mut number = || from.u64().ok();
        Some(Record { fence: number()?, session: number()?, renewals: number()?, lease_ms: number()? })
    }

    fn lease(self) -> Duration {
        Duration::from_millis(self.lease_ms).clamp(LEASE_MIN, LEASE_MAX)
    }
}

/// The fence of the process that is elected, and the row of its session, if there is one.
pub(crate) fn elected(txn: &mut dyn ReadTxn) -> Result<Option<(u64, Vec<u8>)>> {
    let Some(record) = txn.get(keys::ELECTED)?.as_deref().and_then(Record::decode) else { return Ok(None) };
    Ok(txn.get(&keys::session(record.session))?.map(|row| (record.fence, row)))
}

/// A process that wants to be elected.
#[derive(Debug)]
pub(crate) struct Candidate {
    session: u64,
    lease: Duration,
    /// The shortest time that it watches a record, with some looks in it.
    watched_min: Duration,
    watch: Watch,
}

impl Candidate {
    /// A candidate of this session that looks every `interval`.
    pub(crate) fn new(session: u64, interval: Duration) -> Candidate {
        let watched_min = interval.saturating_mul(INTERVALS);
        let lease = watched_min.clamp(LEASE_MIN, LEASE_MAX);
        Candidate { session, lease, watched_min, watch: Watch::default() }
    }

    /// Takes the turn if it is free. Where the processes share a machine, `sessions_dir` has the files of their
    /// sessions. Costs no request of a metadata server while the record is in memory.
    pub(crate) fn look(&mut self, meta: &Metadata, sessions_dir: Option<&Path>) -> Result<Option<Turn>> {
        self.look_at(meta, sessions_dir, &boot_time)
    }

    /// [`Candidate::look`] with a clock.
    pub(crate) fn look_at(
        &mut self,
        meta: &Metadata,
        sessions_dir: Option<&Path>,
        now: &dyn Fn() -> Duration,
    ) -> Result<Option<Turn>> {
        let began = now();
        let (value, has_row) = meta.view_recent(|txn| {
            let value = txn.get(keys::ELECTED)?;
            let session = value.as_deref().and_then(Record::decode).map(|record| record.session);
            let has_row = match session {
                Some(session) => txn.get(&keys::session(session))?.is_some(),
                None => value.is_some(),
            };
            Ok((value, has_row))
        })?;
        let record = value.as_deref().and_then(Record::decode);
        let is_free = match record {
            _ if value.is_none() || !has_row => true,
            // This process was elected, and never heard of it.
            Some(record) if record.session == self.session => true,
            Some(record) => {
                // This process may look less often than the lease of the holder takes.
                let lease = record.lease().max(self.watched_min);
                let expired =
                    self.watch.has_expired(value.as_deref().unwrap_or_default(), lease, (began, now()));
                let ended = match sessions_dir {
                    Some(directory) => DeadSession::claim_file(directory, record.session)?.is_some(),
                    None => false,
                };
                expired || ended
            }
            None => {
                let unknown = value.as_deref().unwrap_or_default();
                self.watch.has_expired(unknown, self.lease, (began, now()))
            }
        };
        if is_free { self.take(meta, value.as_deref(), now) } else { Ok(None) }
    }

    /// Takes the turn unless the record has changed.
    fn take(&self, meta: &Metadata, seen: Option<&[u8]>, now: &dyn Fn() -> Duration) -> Result<Option<Turn>> {
        let last = seen.and_then(|value| Some(u64::from_be_bytes(*value.first_chunk()?))).unwrap_or(0);
        let lease_ms = u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX);
        // The session tells two holders of one number apart.
        let fence = last.checked_add(1).unwrap_or(1);
        let record = Record { fence, session: self.session, renewals: 0, lease_ms };
        let renewed = now();
        let taken = meta.transact_making_room(Durability::Relaxed, |txn| {
            if txn.get(keys::ELECTED)?.as_deref() != seen {
                return Ok(false);
            }
            txn.put(keys::ELECTED, &record.encode())?;
            Ok(true)
        })?;
        failpoint::hit("gc-elected");
        Ok(taken.then(|| Turn {
            fence,
            session: self.session,
            lease: self.lease,
            renewals: AtomicU64::new(0),
            renewed: Mutex::new(renewed),
            lost: AtomicBool::new(false),
        }))
    }
}

/// The turn of the elected process.
#[derive(Debug)]
pub(crate) struct Turn {
    fence: u64,
    session: u64,
    lease: Duration,
    renewals: AtomicU64,
    /// When the last renewal began.
    renewed: Mutex<Duration>,
    lost: AtomicBool,
}

impl Turn {
    /// Grows with each election.
    pub(crate) fn fence(&self) -> u64 {
        self.fence
    }

    /// Fails once another process has the turn, or this process's session was declared dead. For the
    /// transaction that changes something.
    pub(crate) fn check(&self, txn: &mut dyn ReadTxn) -> Result<()> {
        let record = txn.get(keys::ELECTED)?.as_deref().and_then(Record::decode);
        let is_own =
            record.is_some_and(|record| (record.fence, record.session) == (self.fence, self.session));
        if is_own && txn.get(&keys::session(self.session))?.is_some() {
            return Ok(());
        }
        self.lost.store(true, Ordering::Release);
        Err(Error::Stale { what: "this process's turn at the background work".into() })
    }

    /// Whether [`Turn::check`] has failed.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Acquire)
    }

    /// Whether it is time for a renewal, if the next opportunity comes after `pause`.
    pub(crate) fn is_due(&self, pause: Duration) -> bool {
        boot_time() + pause >= *self.renewed.lock() + self.lease / RENEWALS
    }

    /// Renews the turn in a transaction, which fails like [`Turn::check`].
    pub(crate) fn renew(&self, txn: &mut dyn WriteTxn) -> Result<()> {
        self.check(txn.as_read())?;
        let began = boot_time();
        let renewals = self.renewals.fetch_add(1, Ordering::Relaxed) + 1;
        let lease_ms = u64::try_from(self.lease.as_millis()).unwrap_or(u64::MAX);
        let record = Record { fence: self.fence, session: self.session, renewals, lease_ms };
        txn.put(keys::ELECTED, &record.encode())?;
        *self.renewed.lock() = began;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
