//! Check of the objects: joins extents, reference counts, the garbage list and the content of the store,
//! object by object.

use std::collections::BTreeSet;

use super::fix::Fix;
use super::report::{Findings, ProblemKind};
use super::scan::object_fact;
use super::sorter::{Sorted, Sorter};
use crate::error::{Error, Result};
use crate::fs::shared::Shared;
use crate::meta::inode::decode_extent;
use crate::meta::keys;
use crate::meta::references::References;
use crate::meta::versioned::{VolumeRow, record_of};
use crate::object::{ExpectedKeys, ObjectId};

/// Most extents of an object that are kept, to report whose data it holds.
const WITNESSES_MAX: usize = 16;
/// Bytes that a scrub reads at a time.
const SCRUB_BYTES: u64 = 4 << 20;

/// Adds a fact for each object and checksum sidecar in the store.
pub(super) fn list(shared: &Shared, facts: &mut Sorter, findings: &mut Findings<'_>) -> Result<()> {
    findings.stage("objects");
    if !shared.pool.is_local() {
        // Sends the packs in this process's memory to the store, because the picture may reference them.
        shared.meta.sync()?;
    }
    let mut failed = None;
    shared.pool.survey(&mut |id, is_data, bytes| {
        let report = findings.report();
        report.objects += u64::from(is_data);
        report.object_bytes += bytes;
        let fact = if is_data { object_fact::DATA } else { object_fact::SUMS };
        if let Err(error) = facts.push(&[&id.to_bytes(), &[fact], &bytes.to_be_bytes()]) {
            failed.get_or_insert(error);
        }
        findings.step(1);
    })?;
    failed.map_or(Ok(()), Err)
}

/// A version of an extent that references an object.
struct Witness {
    key: Vec<u8>,
    offset: u64,
    len: u64,
}

impl Witness {
    fn parse(payload: &[u8]) -> Option<Witness> {
        let number = |at: usize| Some(u64::from_be_bytes(payload.get(at..at + 8)?.try_into().ok()?));
        let key = payload.get(17..17 + usize::from(*payload.get(16)?))?;
        Some(Witness { key: key.to_vec(), offset: number(0)?, len: number(8)? })
    }

    fn record(&self) -> &[u8] {
        if self.key.first() == Some(&keys::HISTORY) { record_of(&self.key) } else { &self.key[9..] }
    }

    fn volume(&self) -> u64 {
        self.key.get(1..9).and_then(keys::number).unwrap_or(0)
    }

    fn place(&self) -> String {
        let volume = self.volume();
        let ino = keys::node_of(self.record()).map_or(0, |(ino, _)| ino);
        let at = keys::extent_offset(self.record()).unwrap_or_default();
        let held = if self.key.first() == Some(&keys::HISTORY) { ", held by a snapshot" } else { "" };
        format!("inode {ino} of volume number {volume} at byte {at}{held}")
    }

    /// Whether it still references the object.
    fn holds(&self, shared: &Shared, object: ObjectId) -> Result<bool> {
        let Some(version) = shared.meta.view(|txn| txn.get(&self.key))? else { return Ok(false) };
        let offset = keys::extent_offset(self.record()).unwrap_or_default();
        let extent = decode_extent(offset, version.get(8..).unwrap_or_default());
        Ok(extent.is_ok_and(|extent| extent.object == object))
    }
}

/// All facts about one object.
struct Group {
    id: ObjectId,
    references: Option<Vec<u8>>,
    garbage: bool,
    data_bytes: Option<u64>,
    sums: bool,
    extents: u64,
    /// Sum of their lengths.
    bytes: u64,
    /// End of the last extent, in the object.
    end: u64,
    scrubbed_to: u64,
    damaged: bool,
    witnesses: Vec<Witness>,
}

/// The options of the object check.
pub(super) struct Check {
    /// Sessions that may have objects that are not committed yet.
    pub(super) sessions: BTreeSet<u64>,
    /// Extents may be among the unreadable records. An object may then have more references than were found,
    /// so no object is given up.
    pub(super) hidden_extents: bool,
    /// Read and verify all data in use.
    pub(super) scrub: bool,
    /// The picture was taken in batches.
    pub(super) batched: bool,
}

impl Check {
    /// Joins all facts.
    pub(super) fn run(&self, shared: &Shared, mut facts: Sorted, findings: &mut Findings<'_>) -> Result<()> {
        findings.stage(if self.scrub { "scrub" } else { "references" });
        let mut group: Option<Group> = None;
        while let Some(record) = facts.next()? {
            let (Some(id), Some(&fact)) = (record.first_chunk::<16>(), record.get(16)) else { continue };
            let id = ObjectId::from_bytes(*id);
            let payload = &record[17..];
            if group.as_ref().is_none_or(|group| group.id != id)
                && let Some(group) = group.replace(Group::new(id))
            {
                group.finish(shared, self, findings)?;
            }
            let Some(group) = &mut group else { continue };
            match fact {
                object_fact::REFERENCES => group.references = Some(payload.to_vec()),
                object_fact::GARBAGE => group.garbage = true,
                object_fact::DATA => group.data_bytes = payload.try_into().ok().map(u64::from_be_bytes),
                object_fact::SUMS => group.sums = true,
                _ => {
                    let Some(witness) = Witness::parse(payload) else { continue };
                    group.extent(shared, witness, self.scrub, findings)?;
                }
            }
            if !self.scrub {
                findings.step(1);
            }
        }
        group.map_or(Ok(()), |group| group.finish(shared, self, findings))
    }

    /// A repair that gives up references; `None` when unreadable extents may exist.
    fn gives_up(&self, fix: Fix) -> Option<Fix> {
        (!self.hidden_extents).then_some(fix)
    }
}

impl Group {
    fn new(id: ObjectId) -> Group {
        Group {
            id,
            references: None,
            garbage: false,
            data_bytes: None,
            sums: false,
            extents: 0,
            bytes: 0,
            end: 0,
            scrubbed_to: 0,
            damaged: false,
            witnesses: Vec::new(),
        }
    }

    fn place(&self) -> String {
        format!("object {}", self.id)
    }

    fn extent(
        &mut self,
        shared: &Shared,
        witness: Witness,
        scrub: bool,
        findings: &mut Findings<'_>,
    ) -> Result<()> {
        self.extents += 1;
        self.bytes = self.bytes.saturating_add(witness.len);
        let end = witness.offset.saturating_add(witness.len);
        self.end = self.end.max(end);
        if scrub && self.data_bytes.is_some() && !self.damaged {
            self.scrub(shared, &witness, findings)?;
        }
        if self.witnesses.len() < WITNESSES_MAX {
            self.witnesses.push(witness);
        }
        Ok(())
    }

    /// Reads and verifies the bytes that no earlier extent has covered; extents come in order of their offset
    /// in the object.
    fn scrub(&mut self, shared: &Shared, witness: &Witness, findings: &mut Findings<'_>) -> Result<()> {
        let end = witness.offset.saturating_add(witness.len);
        let mut at = self.scrubbed_to.max(witness.offset);
        if at >= end {
            return Ok(());
        }
        // The row of a volume that is being deleted, or is damaged, does not tell the expected keys.
        let row = shared.meta.view(|txn| VolumeRow::get(txn, witness.volume()));
        let expected = row.map_or(ExpectedKeys::Unknown, |row| row.expected_keys());
        while at < end {
            let len = (end - at).min(SCRUB_BYTES);
            let mut buffer = vec![0; len as usize];
            let read = shared.pool.read_part(&expected, self.id, witness.offset, at, &mut buffer);
            match read.map_err(Error::from) {
                Ok(()) => {}
                // The store is unavailable, which says nothing about the data.
                Err(error) if !is_about_data(&error) => return Err(error),
                Err(error) if witness.holds(shared, self.id)? => {
                    let detail = format!("{error}; it holds {}", witness.place());
                    findings.problem(ProblemKind::DamagedObject, self.place(), detail, None);
                    self.damaged = true;
                    return Ok(());
                }
                Err(_) => return Ok(()),
            }
            findings.report().scrubbed_bytes += len;
            findings.step(len);
            at += len;
        }
        self.scrubbed_to = self.scrubbed_to.max(end);
        Ok(())
    }

    fn finish(self, shared: &Shared, check: &Check, findings: &mut Findings<'_>) -> Result<()> {
        if self.extents == 0 {
            return self.unreferenced(shared, check, findings);
        }
        let object = self.id;
        let there =
            References { extents: u32::try_from(self.extents).unwrap_or(u32::MAX), bytes: self.bytes };
        // An unreadable row counts as no references.
        let recorded = self.references.as_deref().and_then(|row| References::decode(row).ok());
        let recorded = recorded.unwrap_or_default();
        let is_wrong = recorded != there && !(check.batched && self.was_changed(shared)?);
        if is_wrong {
            let detail = format!(
                "{} references to {} bytes are recorded, {} to {} are there",
                recorded.extents, recorded.bytes, there.extents, there.bytes
            );
            let (was, is) = (self.references.clone(), Some(there.encode()));
            let fix = Fix::Replace { key: keys::references(object), was, is, beside: None };
            let fewer = there.extents < recorded.extents || there.bytes < recorded.bytes;
            let fix = if fewer { check.gives_up(fix) } else { Some(fix) };
            findings.problem(ProblemKind::WrongReferences, self.place(), detail, fix);
        }
        if self.garbage {
            let fix = Fix::NoGarbage { object };
            findings.problem(ProblemKind::GarbageInUse, self.place(), "it would be deleted", Some(fix));
        }
        let reason = match self.data_bytes {
            None => Some("it is not in the store".to_owned()),
            Some(_) if object.has_sums_beside() && !self.sums => Some("its checksums are missing".to_owned()),
            Some(bytes) if object.is_stored_as_it_is() && bytes < self.end => {
                Some(format!("{bytes} bytes are in the store, {} belong there", self.end))
            }
            Some(_) => None,
        };
        let Some(reason) = reason else { return Ok(()) };
        // It may have been released and collected since the picture was taken.
        let mut holders = Vec::new();
        for witness in &self.witnesses {
            if witness.holds(shared, object)? {
                holders.push(witness.place());
            }
        }
        if !holders.is_empty() && !self.damaged {
            let more = self.extents.saturating_sub(WITNESSES_MAX as u64);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let detail = format!("{reason}; it holds {}{more}", holders.join(", "));
            findings.problem(ProblemKind::MissingObject, self.place(), detail, None);
        }
        Ok(())
    }

    /// Whether its references have changed since their count was read. Then they need not fit to the extents.
    fn was_changed(&self, shared: &Shared) -> Result<bool> {
        Ok(shared.meta.view(|txn| txn.get(&keys::references(self.id)))? != self.references)
    }

    fn unreferenced(self, shared: &Shared, check: &Check, findings: &mut Findings<'_>) -> Result<()> {
        let object = self.id;
        if check.batched && self.was_changed(shared)? {
            return Ok(());
        }
        if let Some(was) = self.references.clone() {
            let detail = "references are recorded, none is there";
            let fix = check.gives_up(Fix::Discard { object, was: Some(was) });
            findings.problem(ProblemKind::WrongReferences, self.place(), detail, fix);
            return Ok(());
        }
        let known = self.garbage || check.sessions.contains(&object.session()) || known_now(shared, object)?;
        if known {
            findings.report().unclaimed_objects += u64::from(self.data_bytes.is_some());
        } else if self.data_bytes.is_some() || self.sums {
            let fix = check.gives_up(Fix::Discard { object, was: None });
            findings.problem(ProblemKind::LostObject, self.place(), "nothing would delete it", fix);
        }
        Ok(())
    }
}

/// Whether an object is now in use, garbage, or of a session that has a row or is in cleanup.
pub(super) fn known_now(shared: &Shared, object: ObjectId) -> Result<bool> {
    shared.meta.view(|txn| {
        Ok(txn.get(&keys::references(object))?.is_some()
            || txn.get(&keys::garbage(object))?.is_some()
            || txn.get(&keys::session(object.session()))?.is_some()
            || txn.get(&keys::session_in_cleanup(object.session()))?.is_some())
    })
}

/// Whether an error says that the data is gone or damaged, not that the store cannot be reached.
fn is_about_data(error: &Error) -> bool {
    use crate::data::ObjectError;
    match error {
        Error::Corrupt { .. } => true,
        Error::Object(source) => matches!(source.downcast_ref(), Some(ObjectError::Missing { .. })),
        _ => false,
    }
}
