//! Identity of the object store and the encryption keys that a metadata belongs to.
//!
//! A store's marker holds the store's id. The metadata records this id when both are first opened together. A
//! process is refused before it writes if its configuration leads to another store, or has another key under
//! a name that the metadata knows.

use std::fmt;

use millrace_leaf::error_chain;
use serde::{Deserialize, Serialize};

use crate::data::ObjectPool;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::codec::{Decoder, Encoder};
use crate::meta::engine::{Durability, Order, Pair, ReadTxn, WriteTxn};
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::meta::versioned::VolumeRow;
use crate::random::random_id;

/// The check value that distinguishes keys of one name.
pub(crate) type KeyCheck = [u8; 8];

/// The id of a store.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreId(u128);

impl fmt::Display for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for StoreId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[derive(Serialize, Deserialize)]
struct Marker {
    store: String,
}

impl StoreId {
    pub(crate) fn draw() -> Result<StoreId> {
        Ok(StoreId(u128::from(random_id()?) << 64 | u128::from(random_id()?)))
    }

    /// The id in the marker of a pool's store; `None` without a marker.
    pub(crate) fn of(pool: &ObjectPool) -> Result<Option<StoreId>> {
        let Some(text) = pool.backend().read_marker()? else { return Ok(None) };
        let marker: Option<Marker> = serde_json::from_slice(&text).ok();
        let id = marker.and_then(|marker| u128::from_str_radix(&marker.store, 16).ok());
        let damaged = || {
            Error::corrupt(format!("the marker of the object store at {}", pool.place()), "it has no number")
        };
        id.map(StoreId).map(Some).ok_or_else(damaged)
    }

    /// Writes this id into the marker of a pool's store.
    pub(crate) fn mark(self, pool: &ObjectPool) -> Result<()> {
        let text = serde_json::json!(Marker { store: self.to_string() }).to_string() + "\n";
        Ok(pool.backend().write_marker(text.as_bytes())?)
    }
}

/// The metadata's record of its store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StoreRow {
    pub(crate) id: StoreId,
    /// The store has a marker with this id; before that, only the metadata has the id.
    pub(crate) marked: bool,
}

impl StoreRow {
    pub(crate) fn get(txn: &mut dyn ReadTxn) -> Result<Option<StoreRow>> {
        txn.get(keys::STORE)?.map(|value| StoreRow::decode(&value)).transpose()
    }

    pub(crate) fn decode(value: &[u8]) -> Result<StoreRow> {
        let mut from = Decoder::new("record of the object store", value);
        let row = StoreRow { marked: from.u8()? != 0, id: StoreId(u128::from_be_bytes(from.array()?)) };
        from.finish()?;
        Ok(row)
    }

    pub(crate) fn encode(self) -> Vec<u8> {
        let id = self.id.0;
        Encoder::default().u8(u8::from(self.marked)).u64((id >> 64) as u64).u64(id as u64).finish()
    }

    fn put(self, txn: &mut dyn WriteTxn) -> Result<()> {
        txn.put(keys::STORE, &self.encode())
    }
}

/// Refuses a store or keys that do not belong to the metadata; records them the first time.
pub(crate) fn check(meta: &Metadata, pool: &ObjectPool) -> Result<()> {
    check_keys(meta, pool)?;
    match check_store(meta, pool) {
        // While it is unreachable, nothing can be written there, and reads come from the cache.
        Err(error) if error.is_store_trouble() => {
            tracing::warn!(
                error = error_chain::one_line(&error),
                "it is not checked that the object store is the metadata's own"
            );
            Ok(())
        }
        // Opening must work on a full disk, so that files can be removed.
        Err(Error::NoSpace { place, .. } | Error::NoSpaceToCommit { place, .. }) => {
            tracing::warn!(%place, "no space to record which object store belongs to the metadata");
            Ok(())
        }
        other => other,
    }
}

fn check_store(meta: &Metadata, pool: &ObjectPool) -> Result<()> {
    loop {
        let (row, first_reference) = meta.view(|txn| {
            let (start, end) = (keys::all_references(), keys::after_prefix(&keys::all_references()));
            let row = StoreRow::get(txn)?;
            // Not needed once the row exists.
            let first = if row.is_none() { txn.scan(&start, &end, Order::Ascending, 1)? } else { Vec::new() };
            Ok((row, !first.is_empty()))
        })?;
        // Read after the row, because the store is marked before its row says so.
        let marker = StoreId::of(pool)?;
        match row {
            Some(StoreRow { id, marked: true }) if marker == Some(id) => return Ok(()),
            Some(StoreRow { id, marked: true }) => return Err(refused(pool, id, marker)),
            None if marker.is_none() && first_reference && is_blank(pool)? => {
                return Err(Error::Invalid(format!(
                    "[datafs] the object store at {} is empty, and the metadata refers to objects: see that its disk \
                     is mounted, and that store_url or store_dir lead to the store that has them",
                    pool.place()
                )));
            }
            _ => {}
        }
        // The metadata comes first, so that concurrent processes mark the store with the same id.
        let drawn = StoreId::draw()?;
        let row = meta.transact(Durability::Durable, |txn| {
            let row = match StoreRow::get(txn.as_read())? {
                Some(row) if row.marked => return Ok(row),
                Some(row) => StoreRow { id: marker.unwrap_or(row.id), marked: false },
                None => StoreRow { id: marker.unwrap_or(drawn), marked: false },
            };
            row.put(txn)?;
            Ok(row)
        })?;
        failpoint::hit("store-named");
        if row.marked {
            continue;
        }
        if marker.is_none() {
            row.id.mark(pool)?;
        }
        failpoint::hit("store-marked");
        meta.transact(Durability::Durable, |txn| match StoreRow::get(txn.as_read())? {
            Some(now) if now == row => StoreRow { marked: true, ..row }.put(txn),
            _ => Ok(()),
        })?;
    }
}

fn is_blank(pool: &ObjectPool) -> Result<bool> {
    let mut blank = true;
    pool.survey(&mut |_, _, _| blank = false)?;
    Ok(blank)
}

fn refused(pool: &ObjectPool, wanted: StoreId, found: Option<StoreId>) -> Error {
    let found = found.map_or("has no number".to_owned(), |id| format!("has the number {id}"));
    Error::Invalid(format!(
        "[datafs] the object store at {} {found}, and the metadata belongs to the store {wanted}: set store_url or \
         store_dir to that store and see that its disk is mounted (a copied store needs its file store.json)",
        pool.place()
    ))
}

/// Records a key that a volume uses; refuses another key of a recorded name.
pub(crate) fn note_key(txn: &mut dyn WriteTxn, name: &str, check: &KeyCheck) -> Result<()> {
    let key = keys::encryption_key(name);
    match txn.get(&key)? {
        Some(known) if known == check => Ok(()),
        Some(_) => Err(other_key(name)),
        None => txn.put(&key, check),
    }
}

fn other_key(name: &str) -> Error {
    Error::wrong_key("data of these volumes".into(), name, false)
}

fn check_keys(meta: &Metadata, pool: &ObjectPool) -> Result<()> {
    // The store's row is the newer record: without it, the keys may not have been recorded yet.
    let noted = meta.view(|txn| Ok(txn.get(keys::STORE)?.is_some()))?;
    if !noted {
        note_keys_of_volumes(meta)?;
    }
    let prefix = keys::encryption_keys();
    let known =
        |txn: &mut dyn ReadTxn| txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, usize::MAX);
    check_known_keys(meta.view(known)?, pool)
}

/// Refuses a key that differs from the recorded one of its name. A missing key is accepted: only volumes
/// encrypted with it cannot be opened.
pub(crate) fn check_known_keys(known: Vec<Pair>, pool: &ObjectPool) -> Result<()> {
    for (key, check) in known {
        let name = String::from_utf8_lossy(&key[1..]).into_owned();
        if pool.keys().get(&name).is_some_and(|key| key.check()[..] != check[..]) {
            return Err(other_key(&name));
        }
    }
    Ok(())
}

/// Records the keys of all volumes, for metadata that has no such records yet.
fn note_keys_of_volumes(meta: &Metadata) -> Result<()> {
    let rows = meta.view(|txn| {
        let prefix = keys::volumes();
        txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, usize::MAX)
    })?;
    for (_, value) in rows {
        // Operations on the volume report a damaged row.
        let Ok(VolumeRow { key: Some((name, check)), .. }) = VolumeRow::decode(&value) else { continue };
        let noted = meta.transact(Durability::Relaxed, |txn| note_key(txn, &name, &check));
        if let Err(Error::WrongKey { .. }) = noted {
            tracing::warn!(key = name, "volumes have different encryption keys of one name");
        } else {
            noted?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
