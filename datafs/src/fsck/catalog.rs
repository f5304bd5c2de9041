//! Check of the catalog: volumes and snapshots by their rows, their names and their records.

use std::collections::BTreeMap;

use super::fix::Fix;
use super::report::{Findings, ProblemKind};
use super::table::each;
use crate::error::Result;
use crate::meta::engine::{Order, ReadTxn};
use crate::meta::keys;
use crate::meta::snapshot::SnapshotRow;
use crate::meta::versioned::VolumeRow;

/// The rows of a table by number; `None` for one that cannot be read.
type Rows<T> = BTreeMap<u64, Option<T>>;

/// A table of names, with the rows that they lead to.
struct Names<'r> {
    /// Description for the report.
    what: String,
    /// The prefix of their keys.
    prefix: Vec<u8>,
    row_key: &'r dyn Fn(u64) -> Vec<u8>,
    /// The name in each row, and whether the row is in deletion, in which case no name leads to it.
    rows: Rows<(&'r str, bool)>,
}

/// Reads a table whose keys end with numbers.
fn rows<T>(
    txn: &mut dyn ReadTxn,
    findings: &mut Findings<'_>,
    (table, prefix): (&str, &[u8]),
    place: impl Fn(u64) -> String,
    decode: impl Fn(&[u8]) -> Result<T>,
) -> Result<Rows<T>> {
    let mut rows = Rows::new();
    each(txn, prefix, |_, page| {
        for (key, value) in page {
            let Some(number) = keys::number(&key[prefix.len()..]) else {
                findings.misplaced(table, &key);
                continue;
            };
            let row = decode(&value);
            if let Err(error) = &row {
                kept(findings, place(number), &format!("its row cannot be read: {error}"));
            }
            rows.insert(number, row.ok());
        }
        Ok(())
    })?;
    Ok(rows)
}

/// Reports a volume or snapshot that has no readable row.
fn kept(findings: &mut Findings<'_>, place: String, why: &str) {
    findings.problem(ProblemKind::DamagedRecord, place, format!("{why}; what it holds is kept"), None);
}

/// All volumes, including those that have records but no row.
pub(super) fn volumes(txn: &mut dyn ReadTxn, findings: &mut Findings<'_>) -> Result<Rows<VolumeRow>> {
    let place = |id| format!("volume number {id}");
    let mut rows = rows(txn, findings, ("volumes", &keys::volumes()), place, VolumeRow::decode)?;
    for id in with_records(txn)? {
        rows.entry(id).or_insert_with(|| {
            kept(findings, place(id), "it has no row");
            None
        });
    }
    let names = Names {
        what: "volumes".to_owned(),
        prefix: keys::volume_names(),
        row_key: &keys::volume,
        rows: rows
            .iter()
            .map(|(id, row)| (*id, row.as_ref().map(|row| (&*row.name, row.deleting))))
            .collect(),
    };
    names.check(txn, findings)?;
    if let Some((largest, _)) = rows.last_key_value() {
        let was = txn.get(keys::LAST_VOLUME)?;
        let last = was.as_deref().and_then(keys::number).unwrap_or(0);
        if last < *largest {
            let detail = format!("{largest} is in use, {last} is said to be the last one");
            let is = Some(largest.to_be_bytes().to_vec());
            let fix = Fix::Replace { key: keys::LAST_VOLUME.to_vec(), was, is, beside: None };
            let place = "numbers of volumes".to_owned();
            findings.problem(ProblemKind::WrongCounter, place, detail, Some(fix));
        }
    }
    Ok(rows)
}

/// The volumes that have records, live or held by snapshots.
fn with_records(txn: &mut dyn ReadTxn) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    for table in [keys::live as fn(u64, &[u8]) -> Vec<u8>, keys::history] {
        let end = keys::after_prefix(&table(0, &[])[..1]);
        let mut next = Some(0_u64);
        while let Some(id) = next {
            let first = txn.scan(&table(id, &[]), &end, Order::Ascending, 1)?;
            let Some((key, _)) = first.first() else { break };
            let Some(id) = key.get(1..9).and_then(keys::number) else { break };
            found.push(id);
            next = id.checked_add(1);
        }
    }
    Ok(found)
}

/// The snapshots of a volume by number, including those in deletion, and whether all rows could be read.
pub(super) fn snapshots(
    txn: &mut dyn ReadTxn,
    findings: &mut Findings<'_>,
    (id, volume): (u64, &VolumeRow),
) -> Result<(BTreeMap<u64, SnapshotRow>, bool)> {
    let place = |number| format!("snapshot number {number} of {}", volume.name);
    let mut rows = rows(txn, findings, ("snapshots", &keys::snapshots(id)), place, SnapshotRow::decode)?;
    // The newest snapshot has no row. If an older one counted as the newest, no more versions would be kept
    // for this one.
    if (1..volume.epoch).contains(&volume.last_snapshot) && !volume.deleting {
        rows.entry(volume.last_snapshot).or_insert_with(|| {
            kept(findings, place(volume.last_snapshot), "it has no row");
            None
        });
    }
    let whole = rows.values().all(Option::is_some);
    if !volume.deleting {
        let names = Names {
            what: format!("snapshots of {}", volume.name),
            prefix: keys::snapshot_names(id),
            row_key: &|number| keys::snapshot(id, number),
            rows: rows
                .iter()
                .map(|(id, row)| (*id, row.as_ref().map(|row| (&*row.name, row.deleting))))
                .collect(),
        };
        names.check(txn, findings)?;
        epochs(findings, (id, volume), &rows);
    }
    Ok((rows.into_iter().filter_map(|(number, row)| Some((number, row?))).collect(), whole))
}

/// Checks that the epoch of a volume is later than all its snapshots, and that its row names the newest of
/// them.
fn epochs(findings: &mut Findings<'_>, (id, volume): (u64, &VolumeRow), rows: &Rows<SnapshotRow>) {
    let newest = rows.last_key_value().map_or(0, |(number, _)| *number);
    let kept = rows.iter().rfind(|(_, row)| row.as_ref().is_none_or(|row| !row.deleting));
    // A snapshot with an unreadable row may or may not be in deletion.
    let unsure = kept.is_some_and(|(_, row)| row.is_none());
    let mut right = volume.clone();
    right.epoch = right.epoch.max(newest.saturating_add(1));
    if !unsure {
        right.last_snapshot = kept.map_or(0, |(number, _)| *number);
    }
    if right == *volume {
        return;
    }
    let detail = format!(
        "it writes epoch {} after snapshot {}; its newest snapshots are {} and, kept, {}",
        volume.epoch, volume.last_snapshot, newest, right.last_snapshot
    );
    let (was, is) = (Some(volume.encode()), Some(right.encode()));
    let fix = Fix::Replace { key: keys::volume(id), was, is, beside: None };
    findings.problem(ProblemKind::WrongCounter, format!("epochs of {}", volume.name), detail, Some(fix));
}

impl Names<'_> {
    /// Checks that each name leads to the row with that name, and that a name leads to each row that is not
    /// in deletion.
    fn check(self, txn: &mut dyn ReadTxn, findings: &mut Findings<'_>) -> Result<()> {
        let Names { what, prefix, row_key, mut rows } = self;
        let place = || format!("names of {what}");
        let mut wrong = BTreeMap::new();
        each(txn, &prefix, |_, page| {
            for (key, value) in page {
                let name = &key[prefix.len()..];
                let leads = keys::number(&value);
                match leads.and_then(|id| Some((id, rows.get(&id)?))) {
                    // The name in an unreadable row is not known.
                    Some((_, None)) => {}
                    Some((id, Some((right, false)))) if right.as_bytes() == name => {
                        rows.remove(&id);
                    }
                    _ => drop(wrong.insert(key, value)),
                }
            }
            Ok(())
        })?;
        for (id, row) in rows {
            let Some((name, false)) = row else { continue };
            let key = [prefix.as_slice(), name.as_bytes()].concat();
            let was = wrong.remove(&key);
            // A volume or snapshot with an unreadable row may have this name.
            let taken = was.is_none() && txn.get(&key)?.is_some();
            let is = Some(id.to_be_bytes().to_vec());
            let row_key = row_key(id);
            let beside = txn.get(&row_key)?.map(|row| (row_key, row));
            let fix = Fix::Replace { key, was, is, beside };
            let detail = format!("number {id} is {name:?}, but this name does not lead to it");
            findings.problem(ProblemKind::WrongCatalog, place(), detail, (!taken).then_some(fix));
        }
        for (key, value) in wrong {
            let name = key[prefix.len()..].escape_ascii();
            let detail = match keys::number(&value) {
                Some(id) => format!("\"{name}\" leads to number {id}, which has not this name"),
                None => format!("\"{name}\" leads to something that is no number"),
            };
            let fix = Fix::Replace { key, was: Some(value), is: None, beside: None };
            findings.problem(ProblemKind::WrongCatalog, place(), detail, Some(fix));
        }
        Ok(())
    }
}
