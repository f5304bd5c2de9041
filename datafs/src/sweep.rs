//! The sweep: passes over the listing of the store, in slices with a durable position.
//!
//! One pass serves two tasks, a page of the listing and one transaction at a time:
//!  - it deletes what dead sessions have left in a local store: objects that no extent references, and unfinished
//!    files. A session's cleanup ends once the pass has come round to where it was when the cleanup began;
//!  - it finds packs that are mostly dead, for compaction.
//!
//! In a bucket, the objects of a session have a prefix, so that its cleanup lists only these, with a position of its
//! own. All positions are in the metadata: a process that is elected goes on where the last one was.
//!
//! Objects that belong to no known session are left to `fsck`: other programs may have put them there.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use crate::compact::Hollow;
use crate::data::{ListPage, Listed, Part};
use crate::deletion::{Deletions, Failure, Unneeded};
use crate::error::Result;
use crate::failpoint;
use crate::fs::lock;
use crate::fs::shared::Shared;
use crate::meta::codec::{Decoder, Encoder};
use crate::meta::engine::{Durability, ReadTxn, WriteTxn};
use crate::meta::keys;
use crate::object::ObjectId;
use crate::slice::Slice;

/// Files of the store in a page, which is checked in one transaction.
pub(crate) const PAGE_FILES: usize = 1_000;
/// Age at which unfinished files are removed when their session is neither known to live nor known to be
/// dead.
const ABANDONED_AGE: Duration = Duration::from_secs(24 * 3600);
/// Packs that wait for their compaction, at most: the pass waits for it.
const HOLLOW_MAX: usize = 256;
/// Locks that one transaction reads.
const LOCKS_BATCH: usize = 1_000;
/// Format of the records of positions.
const FORMAT: u8 = 1;

/// A position of the sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    /// Passes that have ended.
    pub(crate) passes: u64,
    /// The last file of the store that was seen in this pass; empty at the start.
    pub(crate) after: String,
}

impl Position {
    /// The position in the metadata; the start if there is none, or none that this program understands.
    pub(crate) fn get(txn: &mut dyn ReadTxn) -> Result<Position> {
        Ok(txn.get(keys::UPKEEP)?.as_deref().and_then(Position::decode).unwrap_or_default())
    }

    pub(crate) fn put(&self, txn: &mut dyn WriteTxn) -> Result<()> {
        let row = Encoder::default().u8(FORMAT).u64(self.passes).bytes(self.after.as_bytes());
        txn.put(keys::UPKEEP, &row.finish())
    }

    fn decode(value: &[u8]) -> Option<Position> {
        let mut from = Decoder::new("position of the sweep", value);
        if from.u8().ok()? != FORMAT {
            return None;
        }
        Some(Position { passes: from.u64().ok()?, after: from.string().ok()? })
    }

    /// The part of the pass that is done, if the names of files are spread evenly.
    pub(crate) fn fraction(&self) -> f64 {
        let digits: String =
            self.after.chars().filter(|c| *c != '/').take(8).take_while(char::is_ascii_hexdigit).collect();
        let scale = 16_f64.powi(digits.len() as i32);
        u32::from_str_radix(&digits, 16).map_or(0.0, |number| f64::from(number) / scale)
    }
}

/// How far the cleanup of a dead session has come: the value of its row. Earlier versions write an empty value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Cleanup {
    /// Its locks are gone.
    unlocked: bool,
    /// In a local store, the position of the sweep when the cleanup began; in a bucket, the last object that was
    /// seen.
    since: Option<Position>,
    /// In a bucket: an object that was seen since the beginning could not be deleted.
    has_failed: bool,
    /// In a bucket: it came to the end, and an object could not be deleted. It begins again with the next pass.
    waits: bool,
}

impl Cleanup {
    fn encode(&self) -> Vec<u8> {
        let since = self.since.clone().unwrap_or_default();
        let flags = u8::from(self.unlocked)
            | u8::from(self.since.is_some()) << 1
            | u8::from(self.has_failed) << 2
            | u8::from(self.waits) << 3;
        Encoder::default().u8(FORMAT).u8(flags).u64(since.passes).bytes(since.after.as_bytes()).finish()
    }

    fn decode(value: &[u8]) -> Option<Cleanup> {
        let mut from = Decoder::new("record of a cleanup", value);
        if from.u8().ok()? != FORMAT {
            return None;
        }
        let flags = from.u8().ok()?;
        let since = Position { passes: from.u64().ok()?, after: from.string().ok()? };
        Some(Cleanup {
            unlocked: flags & 1 != 0,
            since: (flags & 2 != 0).then_some(since),
            has_failed: flags & 4 != 0,
            waits: flags & 8 != 0,
        })
    }
}

/// How far a cleanup has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reached {
    /// Nothing is left.
    End,
    /// The end, and an object could not be deleted.
    EndWithRest,
    /// The rest is left for a later slice, or until a backup has ended.
    Part,
}

/// Dead sessions in cleanup.
pub(crate) type Cleanups = BTreeMap<u64, Cleanup>;

/// The sweep of the elected process.
#[derive(Debug, Default)]
pub(crate) struct Sweep {
    pub(crate) position: Position,
    /// Packs that are mostly dead.
    pub(crate) hollow: Hollow,
}

/// What a step has changed, to be committed together with a renewal.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Cleanups that have ended.
    pub(crate) ended: Vec<u64>,
    changed: Vec<(u64, Cleanup)>,
}

impl Progress {
    pub(crate) fn is_empty(&self) -> bool {
        self.ended.is_empty() && self.changed.is_empty()
    }

    /// Writes the changes of the cleanups.
    pub(crate) fn put(&self, txn: &mut dyn WriteTxn) -> Result<()> {
        for id in &self.ended {
            txn.delete(&keys::session_in_cleanup(*id))?;
        }
        for (id, cleanup) in &self.changed {
            let key = keys::session_in_cleanup(*id);
            // Another process may have completed it.
            if txn.get(&key)?.is_some() {
                txn.put(&key, &cleanup.encode())?;
            }
        }
        Ok(())
    }
}

impl Sweep {
    /// Goes on as far as `slice` permits. Begins a pass only if one is `due`, or if a cleanup needs it. `living` are
    /// the sessions that have rows.
    pub(crate) fn step(
        &mut self,
        shared: &Shared,
        slice: &mut Slice<'_>,
        living: &BTreeSet<u64>,
        due: bool,
        progress: &mut Progress,
    ) -> Result<()> {
        let mut cleanups = shared.cleanups()?;
        let before = cleanups.clone();
        shared.forget_locks(&mut cleanups, slice)?;
        let mut swept = Ok(());
        if shared.pool.is_local() {
            for cleanup in cleanups.values_mut() {
                cleanup.since.get_or_insert_with(|| self.position.clone());
            }
        } else {
            swept = shared.clean_up_bucket(&mut cleanups, slice, due, &mut progress.ended);
        }
        let waiting = shared.pool.is_local() && !cleanups.is_empty();
        if due || waiting || !self.position.after.is_empty() {
            swept = swept.and(self.pass(shared, slice, living, &mut cleanups));
        }
        if shared.pool.is_local() {
            let come_round = |since: &Position| {
                (self.position.passes, &self.position.after) >= (since.passes.saturating_add(1), &since.after)
            };
            let done = cleanups.iter().filter(|(_, cleanup)| cleanup.since.as_ref().is_some_and(come_round));
            progress.ended.extend(done.map(|(id, _)| *id));
        }
        let changed =
            |(id, cleanup): &(u64, Cleanup)| before.get(id) != Some(cleanup) && !progress.ended.contains(id);
        progress.changed = cleanups.into_iter().filter(changed).collect();
        swept
    }

    fn pass(
        &mut self,
        shared: &Shared,
        slice: &mut Slice<'_>,
        living: &BTreeSet<u64>,
        cleanups: &mut Cleanups,
    ) -> Result<()> {
        let mut result = Ok(());
        while slice.listings_left() > 0 && self.hollow.packs.len() < HOLLOW_MAX && slice.transaction() {
            shared.collector.go_on(&shared.home)?;
            let limit = slice.listings_left().min(PAGE_FILES);
            let page = shared.pool.list_page(&self.position.after, limit)?;
            slice.listed(&page, limit);
            let done = shared.clean_up_page(&page.files, cleanups, living, slice)?;
            if done.is_held || done.is_cut {
                return result;
            }
            let mut failed = BTreeSet::new();
            if let Some(Failure { objects, error }) = done.failed {
                failed = objects.into_iter().map(ObjectId::session).collect();
                result = result.and(Err(error));
            }
            let data = |file: &Listed| (file.part == Part::Data).then_some((file.object, file.bytes));
            let data: Vec<_> = page.files.iter().filter_map(data).collect();
            shared.weigh_in_background(&data, &mut self.hollow)?;
            failpoint::hit("gc-page-swept");
            let is_last = page.next.is_none();
            self.position = match page.next {
                Some(after) => Position { after, ..self.position },
                None => Position { passes: self.position.passes.saturating_add(1), after: String::new() },
            };
            // A whole round from here on for these sessions, this page included; the pass goes on.
            for cleanup in cleanups.iter_mut().filter(|(id, _)| failed.contains(*id)).map(|(_, one)| one) {
                cleanup.since = Some(self.position.clone());
            }
            if is_last {
                break;
            }
        }
        result
    }
}

impl Slice<'_> {
    /// Counts a page. It counts as at least one file, so that empty ones are bounded too.
    fn listed(&mut self, page: &ListPage, limit: usize) {
        self.done.lists += page.lists;
        self.done.listed += if page.next.is_some() { limit as u64 } else { page.files.len().max(1) as u64 };
    }
}

impl Shared {
    /// The dead sessions in cleanup.
    pub(crate) fn cleanups(&self) -> Result<Cleanups> {
        let mut cleanups = Cleanups::new();
        self.meta.each(&keys::sessions_in_cleanup(), |key, value| {
            let id = Decoder::new("session key", &key[1..]).u64()?;
            cleanups.insert(id, Cleanup::decode(value).unwrap_or_default());
            Ok(())
        })?;
        Ok(cleanups)
    }

    /// Completes the cleanups of all dead sessions at once.
    pub(crate) fn clean_up_all(&self, slice: &mut Slice<'_>, living: &BTreeSet<u64>) -> Result<()> {
        let mut cleanups = self.cleanups()?;
        if cleanups.is_empty() {
            return Ok(());
        }
        self.forget_locks(&mut cleanups, slice)?;
        let (mut ended, mut failed, mut result) = (Vec::new(), BTreeSet::new(), Ok(()));
        if self.pool.is_local() {
            let mut after = String::new();
            loop {
                let page = self.pool.list_page(&after, PAGE_FILES)?;
                let done = self.clean_up_page(&page.files, &cleanups, living, slice)?;
                if done.is_held || done.is_cut {
                    return result;
                }
                if let Some(Failure { objects, error }) = done.failed {
                    failed.extend(objects.into_iter().map(ObjectId::session));
                    result = result.and(Err(error));
                }
                match page.next {
                    Some(next) => after = next,
                    None => break,
                }
            }
            failpoint::hit("gc-abandoned-removed");
            ended.extend(cleanups.into_keys().filter(|id| !failed.contains(id)));
        } else {
            cleanups.values_mut().for_each(|cleanup| (cleanup.since, cleanup.has_failed) = (None, false));
            result = self.clean_up_bucket(&mut cleanups, slice, true, &mut ended);
        }
        for few in ended.chunks(PAGE_FILES) {
            self.meta.transact_making_room(Durability::Relaxed, |txn| {
                few.iter().try_for_each(|id| txn.delete(&keys::session_in_cleanup(*id)))
            })?;
        }
        failpoint::hit("gc-session-cleaned");
        result
    }

    /// Removes the locks of ended sessions. They block no other session, but their records take space.
    fn forget_locks(&self, cleanups: &mut Cleanups, slice: &mut Slice<'_>) -> Result<()> {
        let ended: BTreeSet<u64> =
            cleanups.iter().filter(|(_, cleanup)| !cleanup.unlocked).map(|(id, _)| *id).collect();
        if ended.is_empty() {
            return Ok(());
        }
        let mut last: Option<Vec<u8>> = None;
        while slice.transaction() {
            self.collector.go_on(&self.home)?;
            let bounds = &*slice;
            last = self.meta.transact_making_room(Durability::Relaxed, |txn| {
                bounds.check(txn.as_read())?;
                lock::forget_sessions(txn, &ended, last.as_deref(), LOCKS_BATCH)
            })?;
            if last.is_none() {
                cleanups.values_mut().for_each(|cleanup| cleanup.unlocked = true);
                break;
            }
        }
        Ok(())
    }

    /// Deletes what dead sessions have left among some files of a local store.
    fn clean_up_page(
        &self,
        files: &[Listed],
        cleanups: &Cleanups,
        living: &BTreeSet<u64>,
        slice: &mut Slice<'_>,
    ) -> Result<Deletions> {
        if !self.pool.is_local() {
            return Ok(Deletions::default());
        }
        let left = files.iter().filter(|file| !matches!(file.part, Part::Unfinished { .. }));
        let left = left.map(|file| file.object).filter(|object| cleanups.contains_key(&object.session()));
        let done = self.delete_unknown(&left.collect(), slice)?;
        if done.is_held || done.is_cut {
            return Ok(done);
        }
        // The lock of a file proves the end of its process. A lapsed lease does not.
        let certain = self.config.meta_url.is_none();
        for file in files {
            let Part::Unfinished { path, modified } = &file.part else { continue };
            let session = file.object.session();
            let age = match session {
                _ if certain && cleanups.contains_key(&session) => Duration::ZERO,
                _ if session == self.session.id() || living.contains(&session) => continue,
                _ => ABANDONED_AGE,
            };
            let aged = |at: &SystemTime| SystemTime::now().duration_since(*at).unwrap_or_default() >= age;
            if age.is_zero() || modified.as_ref().is_some_and(aged) {
                // Files that are gone already or cannot be removed are skipped.
                let _ = std::fs::remove_file(path);
            }
        }
        Ok(done)
    }

    /// Deletes what dead sessions have left in a bucket. Adds those of which nothing is left to `ended`. One with an object
    /// that cannot be deleted begins again when a pass is `due`, and keeps no other from its cleanup.
    fn clean_up_bucket(
        &self,
        cleanups: &mut Cleanups,
        slice: &mut Slice<'_>,
        due: bool,
        ended: &mut Vec<u64>,
    ) -> Result<()> {
        let mut first = Ok(());
        for (id, cleanup) in cleanups {
            if cleanup.waits && cleanup.since.is_none() && !due {
                continue;
            }
            self.collector.go_on(&self.home)?;
            match self.clean_up_session(*id, cleanup, slice, &mut first) {
                Ok(Reached::End) => ended.push(*id),
                Ok(Reached::EndWithRest) => {
                    *cleanup = Cleanup { since: None, has_failed: false, waits: true, ..*cleanup };
                }
                Ok(Reached::Part) => break,
                Err(error) if error.is_retryable() || slice.is_lost() => return first.and(Err(error)),
                Err(error) => first = first.and(Err(error)),
            }
        }
        first
    }

    /// Deletes what a dead session has left in a bucket. The error of an object that cannot be deleted goes to `first`,
    /// unless there is one.
    fn clean_up_session(
        &self,
        id: u64,
        cleanup: &mut Cleanup,
        slice: &mut Slice<'_>,
        first: &mut Result<()>,
    ) -> Result<Reached> {
        let since = match &mut cleanup.since {
            Some(since) => since,
            None => {
                if slice.listings_left() == 0 {
                    return Ok(Reached::Part);
                }
                slice.done.lists += 1;
                slice.done.listed += 1;
                slice.done.lists += self.pool.abort_uploads(id)?;
                cleanup.since.get_or_insert_default()
            }
        };
        loop {
            if slice.listings_left() == 0 || !slice.transaction() {
                return Ok(Reached::Part);
            }
            self.collector.go_on(&self.home)?;
            let limit = slice.listings_left().min(PAGE_FILES);
            let page = self.pool.list_session_page(id, &since.after, limit)?;
            slice.listed(&page, limit);
            let objects = page.files.iter().map(|file| file.object).collect();
            let done = self.delete_unknown(&objects, slice)?;
            if let Some(failure) = done.failed {
                cleanup.has_failed = true;
                if first.is_ok() {
                    *first = Err(failure.error);
                }
            }
            if done.is_held || done.is_cut {
                return Ok(Reached::Part);
            }
            match page.next {
                Some(next) => since.after = next,
                None if cleanup.has_failed => return Ok(Reached::EndWithRest),
                None => return Ok(Reached::End),
            }
        }
    }

    /// Deletes those objects of dead sessions that no extent references and that are not listed as garbage. One
    /// transaction looks at all of them.
    fn delete_unknown(&self, objects: &BTreeSet<ObjectId>, slice: &mut Slice<'_>) -> Result<Deletions> {
        if objects.is_empty() {
            return Ok(Deletions::default());
        }
        let wanted: Vec<_> =
            objects.iter().flat_map(|id| [keys::references(*id), keys::garbage(*id)]).collect();
        let mut unknown = self.meta.view(|txn| {
            txn.prefetch(&wanted)?;
            let mut unknown = Vec::new();
            for object in objects {
                let known = txn.get(&keys::references(*object))?.is_some()
                    || txn.get(&keys::garbage(*object))?.is_some();
                unknown.extend((!known).then_some(*object));
            }
            Ok(unknown)
        })?;
        if unknown.is_empty() {
            return Ok(Deletions::default());
        }
        let is_cut = unknown.len() > slice.deletions_left();
        unknown.truncate(slice.deletions_left());
        // While a restore may be about to reference them, the session stays in cleanup.
        let done = self.garbage().delete_unneeded(&unknown, Unneeded::Left, slice)?;
        failpoint::hit("gc-session-object-deleted");
        slice.count(done.objects, done.refused());
        Ok(Deletions { is_cut: is_cut || done.is_cut, ..done })
    }
}
