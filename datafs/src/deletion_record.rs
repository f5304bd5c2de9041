//! Records of deletions that were decided and may not have been carried out: see `deletion.rs`.
//!
//! *Late records*. Names of objects are random, so only a restore writes a name again, or gives an object new references.
//! A request to a bucket may have left its process and may not have arrived: the process gave it up and repeated it, or was
//! killed. When its record would go, it becomes a late record: the same objects, under no session. It stays for
//! [`LATE_MAX`]. Until then, a restore that needs one of its objects fails. So no request that arrives within that time
//! deletes an object that a restore relies on.
//!
//! The bound holds where a store refuses an old request. S3 and Azure refuse a signature whose time is more than 15 minutes
//! from their clock, and tokens of Google are good for an hour. It does not hold for requests without a signature. The
//! clocks of the machines must agree within minutes. Deletions in a folder need none of this: they end with their process.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};
use crate::meta::codec::Decoder;
use crate::meta::engine::{Durability, Order, Pair, WriteTxn};
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::object::ObjectId;

/// Set in the number of a record whose objects are in a bucket. Earlier versions do not set it.
pub(crate) const OF_BUCKET: u64 = 1 << 63;
/// The longest time between the sending of a request and its arrival.
const LATE_MAX: Duration = Duration::from_secs(3_600);
/// The session of late records, which no process has. Their numbers are the time at which they go, in seconds, and
/// [`COUNT_BITS`] that tell them apart.
const LATE: u64 = 0;
const COUNT_BITS: u32 = 16;
/// Late records that one transaction removes, at most.
const REMOVED_TOGETHER: usize = 16;

/// The value of a record.
pub(crate) fn encode(objects: &[ObjectId]) -> Vec<u8> {
    objects.iter().flat_map(|id| id.to_bytes()).collect()
}

/// Ends the deletion records of a session whose process sends no request any more.
pub(crate) fn forget(txn: &mut dyn WriteTxn, session: u64) -> Result<()> {
    end(txn, &keys::deletions_of(session))
}

/// Removes the records below a prefix. Those of a bucket become late records.
fn end(txn: &mut dyn WriteTxn, prefix: &[u8]) -> Result<()> {
    let records = txn.scan(prefix, &keys::after_prefix(prefix), Order::Ascending, usize::MAX)?;
    for (key, objects) in records {
        let (session, number) = owner(&key)?;
        if session == LATE {
            continue;
        }
        txn.delete(&key)?;
        if number & OF_BUCKET != 0 {
            keep_late(txn, &objects)?;
        }
    }
    Ok(())
}

/// Writes a late record of objects, and removes some of those whose time is over.
pub(crate) fn keep_late(txn: &mut dyn WriteTxn, objects: &[u8]) -> Result<()> {
    let now = seconds();
    let prefix = keys::deletions_of(LATE);
    // The first ones are the oldest.
    let oldest = txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, REMOVED_TOGETHER)?;
    for (key, _) in oldest {
        if end_of(owner(&key)?.1) <= now {
            txn.delete(&key)?;
        }
    }
    let mut number = (now + LATE_MAX.as_secs()) << COUNT_BITS;
    while txn.get(&keys::deletion(LATE, number))?.is_some() {
        number += 1;
    }
    txn.put(&keys::deletion(LATE, number), objects)
}

/// The session and the number of a record.
fn owner(key: &[u8]) -> Result<(u64, u64)> {
    let mut numbers = Decoder::new("deletion record", &key[1..]);
    Ok((numbers.u64()?, numbers.u64()?))
}

/// The time at which a late record goes.
fn end_of(number: u64) -> u64 {
    number >> COUNT_BITS
}

/// The time of this machine, in seconds since 1970.
fn seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// The deletion records of other processes that may still run, and the late records.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    records: Vec<Pair>,
    /// The session and the number of the record of each object.
    owners: BTreeMap<ObjectId, (u64, u64)>,
}

impl Pending {
    /// Reads the records after a hold was taken: no other transaction adds one until the hold ends. The other
    /// sessions must be dead.
    pub(crate) fn read(meta: &Metadata) -> Result<Pending> {
        if !meta.has_leases()? {
            // The lock of its file proves the end of a process.
            let prefix = keys::deletions();
            let first =
                meta.view(|txn| txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, 1))?;
            if !first.is_empty() {
                meta.transact_making_room(Durability::Durable, |txn| end(txn, &prefix))?;
            }
        }
        let (mut pending, now) = (Pending::default(), seconds());
        meta.each(&keys::deletions(), |key, value| {
            let (session, number) = owner(key)?;
            if session == LATE && end_of(number) <= now {
                return Ok(());
            }
            let (objects, []) = value.as_chunks() else {
                return Err(Error::corrupt("deletion record", "it is of no whole object numbers"));
            };
            // Sessions come after the late records: the owner that may still run is the one that is told.
            pending.owners.extend(objects.iter().map(|id| (ObjectId::from_bytes(*id), (session, number))));
            pending.records.push((key.to_vec(), value.to_vec()));
            Ok(())
        })?;
        Ok(pending)
    }

    /// The records, which stay.
    pub(crate) fn records(&self) -> &[Pair] {
        &self.records
    }

    /// Fails if a restore needs one of the objects.
    pub(crate) fn check(&self, needs: impl Fn(ObjectId) -> Result<bool>) -> Result<()> {
        // The number of the last one to go, and its object.
        let mut late: Option<(u64, ObjectId)> = None;
        for (object, (session, number)) in &self.owners {
            if !needs(*object)? {
                continue;
            }
            if *session == LATE {
                late = late.max(Some((*number, *object)));
                continue;
            }
            return Err(Error::Invalid(format!(
                "cannot restore: the backup needs object {object}, and a process that has not answered since (session \
                 {session:016x}) may still delete it; end that process cleanly, let it resume or, if it was killed, \
                 open its home on its machine once more, then restore again; if that is gone or has started anew, \
                 restore with --take-store"
            )));
        }
        let Some((number, object)) = late else { return Ok(()) };
        let minutes = end_of(number).saturating_sub(seconds()).div_ceil(60).max(1);
        Err(Error::Invalid(format!(
            "cannot restore: the backup needs object {object}, and a request to delete it that had no answer may still \
             reach the bucket; restore again in {minutes} min, or with --take-store if none can be on its way"
        )))
    }
}

#[cfg(test)]
mod tests;
