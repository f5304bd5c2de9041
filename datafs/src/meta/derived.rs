//! Derived data of snapshots: a bounded table of what programs have computed from them, beside the volumes.
//!
//! It is a cache that all processes on one metadata share. It is not versioned: no snapshot, listing of application
//! keys or backup holds it. Each volume has a list with the oldest entry first, and one slot for each entry. Slots are
//! numbered below [`ENTRIES_MAX`], so that a volume never has more of them, whatever its list says.
//!
//! Only damage to the metadata itself is an error. A damaged list counts as empty, a damaged slot as missing. What a
//! newer program has written is neither read nor replaced.

use sha2::{Digest as _, Sha256};

use super::codec::{Decoder, Encoder};
use super::engine::{ReadTxn, WriteTxn};
use super::keys;
use crate::error::Result;

/// Most entries of a volume.
pub(crate) const ENTRIES_MAX: usize = 64;
/// Format of lists and slots.
const FORMAT: u8 = 1;

/// An entry in the list of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    snapshot: u64,
    /// SHA-256 of its name.
    name: [u8; 32],
    slot: u8,
}

/// The list of a volume.
enum List {
    Known(Vec<Entry>),
    /// A newer program has written it.
    Newer,
}

impl List {
    fn get(txn: &mut dyn ReadTxn, volume: u64) -> Result<List> {
        let Some(value) = txn.get(&keys::derived_list(volume))? else { return Ok(List::Known(Vec::new())) };
        if value.first().is_some_and(|format| *format > FORMAT) {
            tracing::debug!(volume, "a newer program has written the list of derived data");
            return Ok(List::Newer);
        }
        Ok(List::Known(decode_list(&value).unwrap_or_else(|error| {
            tracing::debug!(volume, %error, "the list of derived data begins anew");
            Vec::new()
        })))
    }

    fn put(txn: &mut dyn WriteTxn, volume: u64, entries: &[Entry]) -> Result<()> {
        let key = keys::derived_list(volume);
        if entries.is_empty() {
            return txn.delete(&key);
        }
        let list = Encoder::default().u8(FORMAT).u32(entries.len() as u32);
        let list = entries.iter().fold(list, |list, entry| {
            let list = list.u64(entry.snapshot).u8(entry.slot);
            entry.name.iter().fold(list, |list, byte| list.u8(*byte))
        });
        txn.put(&key, &list.finish())
    }
}

fn decode_list(value: &[u8]) -> Result<Vec<Entry>> {
    let mut from = Decoder::new("list of derived data", value);
    if from.u8()? != FORMAT {
        return Err(from.damaged("it has an unknown format"));
    }
    let count = from.u32()? as usize;
    if count > ENTRIES_MAX {
        return Err(from.damaged("it has too many entries"));
    }
    let mut entries: Vec<Entry> = Vec::with_capacity(count);
    for _ in 0..count {
        let entry = Entry { snapshot: from.u64()?, slot: from.u8()?, name: from.array()? };
        if usize::from(entry.slot) >= ENTRIES_MAX || entries.iter().any(|other| other.slot == entry.slot) {
            return Err(from.damaged("its slots are wrong"));
        }
        entries.push(entry);
    }
    from.finish()?;
    Ok(entries)
}

fn digest_of_name(name: &str) -> [u8; 32] {
    Sha256::digest(name.as_bytes()).into()
}

/// The value of a slot: format, snapshot, name, SHA-256 of these three and of the content, content.
fn encode_slot(snapshot: u64, name: &str, content: &[u8]) -> Vec<u8> {
    let head = Encoder::default().u8(FORMAT).u64(snapshot).bytes(name.as_bytes()).finish();
    let digest = Sha256::new().chain_update(&head).chain_update(content).finalize();
    [&head, &digest[..], content].concat()
}

/// The content of a slot, if it is whole and that of this name.
fn decode_slot<'a>(value: &'a [u8], snapshot: u64, name: &str) -> Option<&'a [u8]> {
    let head = Encoder::default().u8(FORMAT).u64(snapshot).bytes(name.as_bytes()).finish();
    let (digest, content) = value.strip_prefix(&*head)?.split_at_checked(32)?;
    let right = Sha256::new().chain_update(&head).chain_update(content).finalize();
    (right[..] == *digest).then_some(content)
}

/// What was derived from a snapshot under a name; `None` also for what is damaged.
pub(crate) fn get(txn: &mut dyn ReadTxn, volume: u64, snapshot: u64, name: &str) -> Result<Option<Vec<u8>>> {
    let List::Known(entries) = List::get(txn, volume)? else { return Ok(None) };
    let digest = digest_of_name(name);
    let Some(entry) = entries.iter().find(|entry| (entry.snapshot, entry.name) == (snapshot, digest)) else {
        return Ok(None);
    };
    let Some(value) = txn.get(&keys::derived_slot(volume, entry.slot))? else { return Ok(None) };
    let content = decode_slot(&value, snapshot, name).map(<[u8]>::to_vec);
    if content.is_none() {
        tracing::debug!(
            volume,
            snapshot,
            name,
            "derived data is damaged, or of another program; it is ignored"
        );
    }
    Ok(content)
}

/// Keeps what was derived from a snapshot under a name, in the place of the oldest entry if the volume has
/// [`ENTRIES_MAX`]. The caller has checked that the snapshot exists. Returns false where a newer program keeps the list.
pub(crate) fn put(
    txn: &mut dyn WriteTxn,
    volume: u64,
    snapshot: u64,
    name: &str,
    content: &[u8],
) -> Result<bool> {
    let List::Known(mut entries) = List::get(txn.as_read(), volume)? else { return Ok(false) };
    let (digest, value) = (digest_of_name(name), encode_slot(snapshot, name, content));
    let known = entries.iter().position(|entry| (entry.snapshot, entry.name) == (snapshot, digest));
    if let Some(at) = known
        && txn.get(&keys::derived_slot(volume, entries[at].slot))?.as_ref() == Some(&value)
    {
        return Ok(true);
    }
    let full = (entries.len() >= ENTRIES_MAX).then_some(0);
    let slot = match known.or(full) {
        Some(at) => entries.remove(at).slot,
        // Below `ENTRIES_MAX` entries one of these is free.
        None => {
            (0..=u8::MAX).find(|slot| entries.iter().all(|entry| entry.slot != *slot)).unwrap_or_default()
        }
    };
    entries.push(Entry { snapshot, name: digest, slot });
    txn.put(&keys::derived_slot(volume, slot), &value)?;
    List::put(txn, volume, &entries)?;
    Ok(true)
}

/// The snapshots in the list of a volume that have no row any more.
pub(crate) fn outdated(txn: &mut dyn ReadTxn, volume: u64) -> Result<Vec<u64>> {
    let List::Known(entries) = List::get(txn, volume)? else { return Ok(Vec::new()) };
    let mut snapshots: Vec<u64> = entries.iter().map(|entry| entry.snapshot).collect();
    snapshots.sort_unstable();
    snapshots.dedup();
    let mut outdated = Vec::new();
    for snapshot in snapshots {
        if txn.get(&keys::snapshot(volume, snapshot))?.is_none() {
            outdated.push(snapshot);
        }
    }
    Ok(outdated)
}

/// Removes what was derived from a snapshot.
pub(crate) fn forget_snapshot(txn: &mut dyn WriteTxn, volume: u64, snapshot: u64) -> Result<()> {
    let List::Known(entries) = List::get(txn.as_read(), volume)? else { return Ok(()) };
    let (gone, kept): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| entry.snapshot == snapshot);
    if gone.is_empty() {
        return Ok(());
    }
    gone.iter().try_for_each(|entry| txn.delete(&keys::derived_slot(volume, entry.slot)))?;
    List::put(txn, volume, &kept)
}

/// Removes what was derived from the snapshots of a volume, whatever its list says.
pub(crate) fn forget_volume(txn: &mut dyn WriteTxn, volume: u64) -> Result<()> {
    (0..ENTRIES_MAX as u8).try_for_each(|slot| txn.delete(&keys::derived_slot(volume, slot)))?;
    txn.delete(&keys::derived_list(volume))
}
