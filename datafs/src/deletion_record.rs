//! Records of deletions that were decided and may not have been carried out: see `deletion.rs`.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::meta::codec::Decoder;
use crate::meta::engine::{Order, Pair, WriteTxn};
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::object::ObjectId;

/// Removes the deletion records of a session whose process deletes nothing any more.
pub(crate) fn forget(txn: &mut dyn WriteTxn, session: u64) -> Result<()> {
    let prefix = keys::deletions_of(session);
    let records = txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, usize::MAX)?;
    records.iter().try_for_each(|(key, _)| txn.delete(key))
}

/// The deletion records of other processes that may still run.
#[derive(Debug, Default)]
pub(crate) struct Pending {
    records: Vec<Pair>,
    sessions: BTreeMap<ObjectId, u64>,
}

impl Pending {
    /// Reads the records after a hold was taken: no other transaction adds one until the hold ends. The other
    /// sessions must be dead.
    pub(crate) fn read(meta: &Metadata) -> Result<Pending> {
        let mut pending = Pending::default();
        if !meta.has_leases()? {
            // The lock of its file proves the end of a process.
            return Ok(pending);
        }
        meta.each(&keys::deletions(), |key, value| {
            let session = Decoder::new("deletion record", &key[1..]).u64()?;
            let (objects, []) = value.as_chunks() else {
                return Err(Error::corrupt("deletion record", "it is of no whole object numbers"));
            };
            pending.sessions.extend(objects.iter().map(|id| (ObjectId::from_bytes(*id), session)));
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
        for (object, session) in &self.sessions {
            if needs(*object)? {
                return Err(Error::Invalid(format!(
                    "cannot restore: the backup needs object {object}, and a process that has not answered since (session \
                     {session:016x}) may still delete it; end that process cleanly, let it resume or, if it was killed, \
                     open its home on its machine once more, then restore again; if that is gone or has started anew, \
                     restore with --take-store"
                )));
            }
        }
        Ok(())
    }
}
