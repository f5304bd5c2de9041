//! Snapshots: creating one writes a few small rows; deleting one frees the versions that only it held.
//!
//! A version that died while snapshot L was the newest is on L's dead list, youngest first. Deleting snapshot
//! S with predecessor P frees, from S's lists, the versions written after P. The lists then become P's. The
//! work runs in batches, so that it may stop and go on anywhere.

use super::codec::{Decoder, Encoder};
use super::derived;
use super::engine::{Order, ReadTxn, WriteTxn};
use super::inode::Timestamp;
use super::keys;
use super::references::forget_version;
use super::versioned::VolumeRow;
use crate::error::{Error, Result};
use crate::node::SNAPSHOT_MAX;

/// Versions that one transaction frees.
pub(crate) const FREE_BATCH: usize = 1_000;
/// Names that an error lists.
pub(crate) const NAMES_TOLD: usize = 8;

/// A snapshot's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotRow {
    pub(crate) name: String,
    pub(crate) created: Timestamp,
    /// The dead lists of this snapshot: its own and those of deleted successors.
    pub(crate) lists: Vec<u64>,
    /// The snapshot is being deleted: its name is free again and its versions are being freed.
    pub(crate) deleting: bool,
}

impl SnapshotRow {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let (seconds, nanos) = self.created.parts();
        let mut to = Encoder::default()
            .u8(u8::from(self.deleting))
            .i64(seconds)
            .u32(nanos)
            .bytes(self.name.as_bytes())
            .u32(self.lists.len() as u32);
        for list in &self.lists {
            to = to.u64(*list);
        }
        to.finish()
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<SnapshotRow> {
        let mut from = Decoder::new("snapshot record", bytes);
        let deleting = from.u8()? != 0;
        let created = Timestamp::from_parts(from.i64()?, from.u32()?);
        let name = from.string()?;
        let count = from.u32()?;
        let lists = (0..count).map(|_| from.u64()).collect::<Result<_>>()?;
        from.finish()?;
        Ok(SnapshotRow { name, created, lists, deleting })
    }

    /// The row of a snapshot that is not being deleted.
    pub(crate) fn get(txn: &mut dyn ReadTxn, volume: u64, snapshot: u64) -> Result<SnapshotRow> {
        let stale = || Error::Stale { what: format!("snapshot number {snapshot}") };
        let value = txn.get(&keys::snapshot(volume, snapshot))?.ok_or_else(stale)?;
        let row = SnapshotRow::decode(&value)?;
        if row.deleting { Err(stale()) } else { Ok(row) }
    }
}

/// All snapshots of a volume by number, also those being deleted.
pub(crate) fn all(txn: &mut dyn ReadTxn, volume: u64) -> Result<Vec<(u64, SnapshotRow)>> {
    let prefix = keys::snapshots(volume);
    let pairs = txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, usize::MAX)?;
    pairs
        .into_iter()
        .map(|(key, value)| {
            let number = Decoder::new("snapshot key", &key[9..]).u64()?;
            Ok((number, SnapshotRow::decode(&value)?))
        })
        .collect()
}

/// The snapshots of a volume that are not being deleted, oldest first.
pub(crate) fn list(txn: &mut dyn ReadTxn, volume: u64) -> Result<Vec<(u64, SnapshotRow)>> {
    Ok(all(txn, volume)?.into_iter().filter(|(_, row)| !row.deleting).collect())
}

/// The number of a snapshot by name.
pub(crate) fn find(txn: &mut dyn ReadTxn, volume: u64, name: &str) -> Result<Option<u64>> {
    match txn.get(&keys::snapshot_name(volume, name))? {
        Some(value) => Ok(Some(Decoder::new("snapshot name record", &value).u64()?)),
        None => Ok(None),
    }
}

/// The error for a snapshot that does not exist. It names the newest ones that do.
pub(crate) fn not_found(txn: &mut dyn ReadTxn, volume: u64, volume_name: &str, name: &str) -> Result<Error> {
    let names = list(txn, volume)?.into_iter().rev().map(|(_, row)| row.name).take(NAMES_TOLD + 1);
    let hint = match named_some(names.collect()) {
        Some(names) => format!("; volume {volume_name} has {names}"),
        None => format!("; volume {volume_name} has no snapshots yet"),
    };
    Ok(Error::not_found_hinted(format!("snapshot {volume_name}@{name}"), hint))
}

/// Names for an error, at most [`NAMES_TOLD`]; none if there are none.
pub(crate) fn named_some(mut names: Vec<String>) -> Option<String> {
    let more = if names.len() > NAMES_TOLD { " and others" } else { "" };
    names.truncate(NAMES_TOLD);
    (!names.is_empty()).then(|| format!("{}{more}", names.join(", ")))
}

/// Creates a snapshot of the live tree as this transaction sees it.
pub(crate) fn create(txn: &mut dyn WriteTxn, volume: u64, name: &str) -> Result<(u64, SnapshotRow)> {
    let mut volume_row = VolumeRow::get(txn.as_read(), volume)?;
    let name_key = keys::snapshot_name(volume, name);
    if txn.get(&name_key)?.is_some() {
        return Err(Error::Exists { what: format!("snapshot {}@{name}", volume_row.name) });
    }
    let number = volume_row.epoch;
    if number > SNAPSHOT_MAX {
        return Err(Error::TooLarge { what: "number of snapshots ever made", max: SNAPSHOT_MAX });
    }
    let row = SnapshotRow {
        name: name.to_owned(),
        created: Timestamp::now(),
        lists: vec![number],
        deleting: false,
    };
    volume_row.epoch += 1;
    volume_row.last_snapshot = number;
    txn.put(&keys::volume(volume), &volume_row.encode())?;
    txn.put(&keys::snapshot(volume, number), &row.encode())?;
    txn.put(&name_key, &number.to_be_bytes())?;
    Ok((number, row))
}

/// Hides a snapshot; [`free_batch`] then frees the versions that only it held.
pub(crate) fn begin_delete(txn: &mut dyn WriteTxn, volume: u64, name: &str) -> Result<u64> {
    let mut volume_row = VolumeRow::get(txn.as_read(), volume)?;
    let Some(number) = find(txn.as_read(), volume, name)? else {
        return Err(not_found(txn.as_read(), volume, &volume_row.name, name)?);
    };
    let mut row = SnapshotRow::get(txn.as_read(), volume, number)?;
    row.deleting = true;
    txn.put(&keys::snapshot(volume, number), &row.encode())?;
    txn.delete(&keys::snapshot_name(volume, name))?;
    let newest = list(txn.as_read(), volume)?.last().map_or(0, |(number, _)| *number);
    volume_row.last_snapshot = newest;
    txn.put(&keys::volume(volume), &volume_row.encode())?;
    Ok(number)
}

/// Frees a batch of the versions that only a snapshot in deletion held. Returns whether nothing is left to
/// do.
pub(crate) fn free_batch(txn: &mut dyn WriteTxn, volume: u64, snapshot: u64) -> Result<bool> {
    match VolumeRow::get(txn.as_read(), volume) {
        // Another process is removing the volume, this snapshot with it.
        Err(Error::Stale { .. }) => return Ok(true),
        other => drop(other?),
    }
    let rows = all(txn.as_read(), volume)?;
    let Some(position) = rows.iter().position(|(number, _)| *number == snapshot) else {
        return Ok(true);
    };
    let (_, row) = &rows[position];
    if !row.deleting {
        return Ok(true);
    }
    let before = position.checked_sub(1).map(|i| &rows[i]);
    let predecessor = before.map_or(0, |(number, _)| *number);
    let mut budget = FREE_BATCH;
    for list in &row.lists {
        budget -= free_list(txn, volume, *list, predecessor, budget)?;
        if budget == 0 {
            return Ok(false);
        }
    }
    if let Some((number, before)) = before {
        let mut before = before.clone();
        for list in &row.lists {
            let prefix = keys::dead_list(volume, *list);
            let some = txn.scan(&prefix, &keys::after_prefix(&prefix), Order::Ascending, 1)?;
            if !some.is_empty() {
                before.lists.push(*list);
            }
        }
        txn.put(&keys::snapshot(volume, *number), &before.encode())?;
    }
    derived::forget_snapshot(txn, volume, snapshot)?;
    txn.delete(&keys::snapshot(volume, snapshot))?;
    Ok(true)
}

/// Frees at most `budget` versions of a dead list that were written after `predecessor`.
fn free_list(
    txn: &mut dyn WriteTxn,
    volume: u64,
    list: u64,
    predecessor: u64,
    budget: usize,
) -> Result<usize> {
    let start = keys::dead_list(volume, list);
    // Youngest first: stop at the versions that the predecessor holds as well.
    let end = keys::dead(volume, list, predecessor, &[]);
    let entries = txn.scan(&start, &end, Order::Ascending, budget)?;
    for (key, _) in &entries {
        let record = key.get(25..).unwrap_or_default();
        let version_key = keys::history_version(volume, record, list);
        let Some(version) = txn.get(&version_key)? else {
            return Err(Error::corrupt("dead list", "the version that it names is missing"));
        };
        forget_version(txn, record, &version)?;
        txn.delete(&version_key)?;
        txn.delete(key)?;
    }
    Ok(entries.len())
}
