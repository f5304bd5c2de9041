//! Scan of the metadata: turns all records into facts in sorters (the picture).
//!
//! The trees of snapshots, which never change, are read page by page, each in a transaction of its own. So are all
//! other records in a [`Scan::Batched`] picture, so that records which change meanwhile may not fit together. In a
//! [`Scan::Whole`] picture, one read transaction covers the live records, the history and the counts.
//!
//! Unreadable records are reported, and the check of the rest goes on. Volumes are found by their records as
//! well as by their rows. The data of a volume is in use even if its row cannot be read.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::catalog;
use super::fix::{Fix, version_of};
use super::report::{Findings, ProblemKind};
use super::sorter::Sorter;
use super::table::{PAGE, each};
use super::tree::TreeScan;
use crate::error::{Error, Result};
use crate::meta::engine::{Order, Pair, ReadTxn};
use crate::meta::inode::decode_extent;
use crate::meta::keys;
use crate::meta::metadata::Metadata;
use crate::meta::versioned::{At, Reader, VolumeRow, parts_of, record_of};
use crate::node::FIRST_INO;
use crate::object::ObjectId;

/// Shortest key of a version in the history: table, volume and last snapshot.
const HISTORY_KEY_BYTES_MIN: usize = 17;

/// A volume as the check knows it.
#[derive(Debug)]
pub(super) struct VolumeFacts {
    pub(super) name: String,
    /// The next inode number that is given out.
    pub(super) next_ino: u64,
    /// Names of its snapshots by number.
    pub(super) snapshots: BTreeMap<u64, String>,
    /// Snapshots that were deleted while their trees were read.
    pub(super) gone: BTreeSet<u64>,
}

/// How a picture is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// In many short transactions. Concurrent changes may look like problems.
    Batched,
    /// In one read transaction, except for the trees of snapshots.
    Whole,
}

/// Reads in a separate transaction each.
struct Batches<'m>(&'m Metadata);

impl ReadTxn for Batches<'_> {
    fn get(&mut self, key: &[u8]) -> Result<Option<Vec<u8>>> {
        self.0.view(|txn| txn.get(key))
    }

    fn scan(&mut self, start: &[u8], end: &[u8], order: Order, limit: usize) -> Result<Vec<Pair>> {
        self.0.view(|txn| txn.scan(start, end, order, limit))
    }
}

/// The tree of a snapshot.
struct SnapshotTree {
    volume: u64,
    number: u64,
    /// `VOLUME@SNAPSHOT`.
    name: String,
}

/// The input of the checks of one pass.
pub(super) struct Picture {
    /// Facts about inodes and names, as `tree` writes them.
    pub(super) names: Sorter,
    /// Facts about objects: see [`object_fact`].
    pub(super) objects: Sorter,
    pub(super) volumes: BTreeMap<u64, VolumeFacts>,
    /// Sessions that may have objects that are not committed yet: live ones, and dead ones in cleanup.
    pub(super) sessions: BTreeSet<u64>,
    /// Extents may be among the unreadable records, so that objects may have more references than were found.
    pub(super) hidden_extents: bool,
    /// Snapshots whose trees are still to be read.
    trees: Vec<SnapshotTree>,
}

/// The tags of the facts about an object in the sorter; facts come in this order.
pub(super) mod object_fact {
    /// The count of references: the value of its row.
    pub(in crate::fsck) const REFERENCES: u8 = 0;
    /// It is on the garbage list.
    pub(in crate::fsck) const GARBAGE: u8 = 1;
    /// Its data is in the store: `u64` bytes.
    pub(in crate::fsck) const DATA: u8 = 2;
    /// The sidecar of its checksums is in the store.
    pub(in crate::fsck) const SUMS: u8 = 3;
    /// An extent: `u64` offset in the object, `u64` length, `u8` length of the key, key of the
    /// version, its value.
    pub(in crate::fsck) const EXTENT: u8 = 4;
}

/// Reads all records.
pub(super) fn take(
    meta: &Metadata,
    directory: &Path,
    scan: Scan,
    findings: &mut Findings<'_>,
) -> Result<Picture> {
    let mut records = |txn: &mut dyn ReadTxn| {
        findings.restart();
        let mut picture = Picture {
            names: Sorter::new(directory),
            objects: Sorter::new(directory),
            volumes: BTreeMap::new(),
            sessions: BTreeSet::new(),
            hidden_extents: false,
            trees: Vec::new(),
        };
        for prefix in [keys::sessions(), keys::sessions_in_cleanup()] {
            each(txn, &prefix, |_, page| {
                for (key, _) in page {
                    match keys::number(&key[1..]) {
                        Some(id) => drop(picture.sessions.insert(id)),
                        None => findings.misplaced("sessions", &key),
                    }
                }
                Ok(())
            })?;
        }
        let rows = catalog::volumes(txn, findings)?;
        for (id, row) in &rows {
            findings.stage("records");
            match row {
                Some(row) => volume(txn, &mut picture, directory, findings, (*id, row))?,
                None => without_row(txn, &mut picture, findings, *id)?,
            }
        }
        findings.stage("reference counts");
        for (prefix, fact) in
            [(keys::all_references(), object_fact::REFERENCES), (keys::all_garbage(), object_fact::GARBAGE)]
        {
            each(txn, &prefix, |_, page| {
                findings.step(page.len() as u64);
                page.iter().try_for_each(|(key, value)| match <&[u8; 16]>::try_from(&key[1..]) {
                    Ok(object) => picture.objects.push(&[object, &[fact], value]),
                    Err(_) => {
                        findings.misplaced("objects", key);
                        Ok(())
                    }
                })
            })?;
        }
        Ok(picture)
    };
    let mut picture = match scan {
        Scan::Batched => records(&mut Batches(meta))?,
        Scan::Whole => meta.view(records)?,
    };
    for tree in std::mem::take(&mut picture.trees) {
        match snapshot(meta, &mut picture, findings, &tree) {
            Ok(()) => {}
            // It was deleted meanwhile.
            Err(Error::Stale { .. }) => {
                if let Some(volume) = picture.volumes.get_mut(&tree.volume) {
                    volume.gone.insert(tree.number);
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(picture)
}

/// Reads the tree of a snapshot. Fails with [`Error::Stale`] when the snapshot is gone.
fn snapshot(
    meta: &Metadata,
    picture: &mut Picture,
    findings: &mut Findings<'_>,
    of: &SnapshotTree,
) -> Result<()> {
    findings.stage("snapshots");
    let mut tree = TreeScan::new(of.volume, of.number, of.name.clone());
    let mut start = keys::nodes();
    let end = keys::after_prefix(&start);
    loop {
        let page = meta.view(|txn| {
            Reader::open(txn, of.volume, At::Snapshot(of.number))?.scan_stored(&start, &end, PAGE)
        })?;
        findings.step(page.len() as u64);
        for (record, version) in &page {
            match parts_of(version) {
                Some((since, value)) if since <= of.number => {
                    tree.record(record, value, &mut picture.names, findings)?;
                }
                Some(_) => {}
                // Reported where it is stored, once for all snapshots.
                None => tree.unreadable(record, &mut picture.names, findings)?,
            }
        }
        match page.last() {
            Some((last, _)) if page.len() == PAGE => start = [last.as_slice(), &[0]].concat(),
            _ => break,
        }
    }
    tree.finish(&mut picture.names, findings)
}

fn volume(
    txn: &mut dyn ReadTxn,
    picture: &mut Picture,
    directory: &Path,
    findings: &mut Findings<'_>,
    (id, row): (u64, &VolumeRow),
) -> Result<()> {
    let (snapshots, whole) = catalog::snapshots(txn, findings, (id, row))?;
    if !row.deleting {
        findings.report().volumes += 1;
        let next_ino = match txn.get(&keys::next_ino(id))? {
            // An unreadable counter is as wrong as one that is too low.
            Some(value) => keys::number(&value).unwrap_or(0),
            None => FIRST_INO,
        };
        let kept = snapshots.iter().filter(|(_, row)| !row.deleting);
        let snapshots = kept.map(|(number, row)| (*number, row.name.clone())).collect();
        picture
            .volumes
            .insert(id, VolumeFacts { name: row.name.clone(), next_ino, snapshots, gone: BTreeSet::new() });
    }
    live(txn, picture, findings, (id, row))?;
    let lists = snapshots.values().flat_map(|row| row.lists.iter().copied()).collect();
    // The lists of an unreadable snapshot are not known.
    let lists = whole.then_some(lists);
    history(txn, picture, directory, findings, (id, row), lists.as_ref())?;
    if row.deleting {
        return Ok(());
    }
    for (number, snapshot) in snapshots.iter().filter(|(_, row)| !row.deleting) {
        findings.report().snapshots += 1;
        let name = format!("{}@{}", row.name, snapshot.name);
        picture.trees.push(SnapshotTree { volume: id, number: *number, name });
    }
    Ok(())
}

/// Reads a volume whose row is missing or unreadable, which was reported: its data counts as in use.
fn without_row(
    txn: &mut dyn ReadTxn,
    picture: &mut Picture,
    findings: &mut Findings<'_>,
    id: u64,
) -> Result<()> {
    for prefix in [keys::live(id, &[]), keys::history(id, &[])] {
        let is_history = prefix[0] == keys::HISTORY;
        each(txn, &prefix, |_, page| {
            findings.step(page.len() as u64);
            for (key, version) in &page {
                let record = if is_history { record_of(key) } else { &key[keys::LIVE_PREFIX_BYTES..] };
                match parts_of(version) {
                    Some((_, value)) if !record.is_empty() => {
                        reference(picture, findings, key, record, value)?;
                    }
                    _ => picture.hidden_extents = true,
                }
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Reads the live tree: its names, and its extents as references.
fn live(
    txn: &mut dyn ReadTxn,
    picture: &mut Picture,
    findings: &mut Findings<'_>,
    (id, row): (u64, &VolumeRow),
) -> Result<()> {
    let mut tree = (!row.deleting).then(|| TreeScan::new(id, 0, row.name.clone()));
    each(txn, &keys::live(id, &[]), |_, page| {
        findings.step(page.len() as u64);
        for (key, version) in &page {
            let record = &key[keys::LIVE_PREFIX_BYTES..];
            let Some((_, value)) = parts_of(version) else {
                picture.hidden_extents |= keys::is_extent(record);
                let place = place_of(record, &row.name);
                findings.problem(ProblemKind::DamagedRecord, place, too_short(version), None);
                if let Some(tree) = &mut tree {
                    tree.unreadable(record, &mut picture.names, findings)?;
                }
                continue;
            };
            reference(picture, findings, key, record, value)?;
            if let Some(tree) = &mut tree {
                tree.record(record, value, &mut picture.names, findings)?;
            }
        }
        Ok(())
    })?;
    let Some(tree) = tree else { return Ok(()) };
    tree.finish(&mut picture.names, findings)?;
    each(txn, &keys::orphans(id), |_, page| {
        page.iter().try_for_each(|(key, _)| match keys::number(&key[9..]) {
            Some(ino) => super::tree::orphan(&mut picture.names, id, ino),
            None => {
                findings.misplaced("unlinked files", key);
                Ok(())
            }
        })
    })
}

/// Reads the history that snapshots hold: its extents as references, and each version against the dead list
/// of its last snapshot. `lists` are the dead lists that snapshots have, if that is known.
fn history(
    txn: &mut dyn ReadTxn,
    picture: &mut Picture,
    directory: &Path,
    findings: &mut Findings<'_>,
    (id, row): (u64, &VolumeRow),
    lists: Option<&BTreeSet<u64>>,
) -> Result<()> {
    let place = || format!("history of volume {}", row.name);
    let mut expected = Sorter::new(directory);
    each(txn, &keys::history(id, &[]), |_, page| {
        findings.step(page.len() as u64);
        for (key, version) in &page {
            let Some(until) = key.last_chunk().filter(|_| key.len() >= HISTORY_KEY_BYTES_MIN) else {
                let detail = format!(
                    "the key of a version has {} bytes, at least {HISTORY_KEY_BYTES_MIN} belong there",
                    key.len()
                );
                findings.problem(ProblemKind::DamagedRecord, place(), detail, None);
                picture.hidden_extents = true;
                continue;
            };
            let (record, until) = (record_of(key), u64::from_be_bytes(*until));
            let Some((since, value)) = parts_of(version) else {
                let place = format!("{}, up to epoch {until}", place_of(record, &row.name));
                findings.problem(ProblemKind::DamagedRecord, place, too_short(version), None);
                picture.hidden_extents |= keys::is_extent(record);
                continue;
            };
            reference(picture, findings, key, record, value)?;
            expected.push(&[&keys::dead(id, until, since, record)])?;
            if since > until || (!row.deleting && lists.is_some_and(|lists| !lists.contains(&until))) {
                let detail = format!("a version of epochs {since} to {until} that no snapshot holds");
                findings.problem(ProblemKind::WrongHistory, place(), detail, None);
            }
        }
        Ok(())
    })?;
    if row.deleting {
        return Ok(());
    }
    let mut expected = expected.finish()?;
    let missing = |findings: &mut Findings<'_>, key: Vec<u8>| {
        let detail = "a version is on no list, so that nothing would free it";
        findings.problem(ProblemKind::WrongHistory, place(), detail, Some(Fix::AddDead { volume: id, key }));
    };
    each(txn, &keys::dead_lists(id), |txn, page| {
        for (key, _) in page {
            while expected.peek().is_some_and(|next| next < key.as_slice()) {
                if let Some(key) = expected.next()? {
                    missing(findings, key);
                }
            }
            if expected.peek() == Some(key.as_slice()) {
                expected.next()?;
            } else if !names_damage(txn, id, &key)? {
                let detail = "a list names a version that is not there";
                let fix = Fix::RemoveDead { volume: id, key };
                findings.problem(ProblemKind::WrongHistory, place(), detail, Some(fix));
            }
        }
        Ok(())
    })?;
    while let Some(key) = expected.next()? {
        missing(findings, key);
    }
    Ok(())
}

/// Whether an entry of a dead list names an existing version that is too short to have its epoch.
fn names_damage(txn: &mut dyn ReadTxn, volume: u64, dead: &[u8]) -> Result<bool> {
    let Some((version, _)) = version_of(volume, dead) else { return Ok(false) };
    Ok(txn.get(&version)?.is_some_and(|version| parts_of(&version).is_none()))
}

/// Description of a record for the report.
fn place_of(record: &[u8], volume: &str) -> String {
    let key = keys::application_name(record).filter(|name| keys::application(name) == record);
    match (keys::node_of(record), key) {
        (Some((ino, tag)), _) => format!("inode {ino} of {volume} ({tag:?})"),
        (None, Some(name)) => format!("application key {name:?} of {volume}"),
        (None, None) => format!("a record of volume {volume}"),
    }
}

fn too_short(version: &[u8]) -> String {
    format!("the record has {} bytes, at least 8 belong there", version.len())
}

/// Adds a fact for the object that a version of an extent references.
fn reference(
    picture: &mut Picture,
    findings: &mut Findings<'_>,
    key: &[u8],
    record: &[u8],
    value: &[u8],
) -> Result<()> {
    let Some(offset) = keys::extent_offset(record) else { return Ok(()) };
    findings.report().extents += 1;
    // The scan of the tree reports an unreadable value.
    let Ok(extent) = decode_extent(offset, value) else {
        picture.hidden_extents = true;
        return Ok(());
    };
    let object: ObjectId = extent.object;
    picture.objects.push(&[
        &object.to_bytes(),
        &[object_fact::EXTENT],
        &extent.object_offset.to_be_bytes(),
        &extent.len.to_be_bytes(),
        &[key.len() as u8],
        key,
        value,
    ])
}
