//! Compaction: rewrites files that random overwrites have scattered, and objects that deletions have hollowed
//! out.
//!
//! It removes two kinds of waste, in live trees only; data that only snapshots hold stays as it is:
//!  - a file in many small extents: its bytes are copied into one object (`compact/file.rs`);
//!  - an object of which little is in use: the bytes in use are copied out of it, after which it is garbage.
//!    `compact/packs.rs` does this for the packs of small files, `compact/file.rs` for other objects.
//!
//! It runs beside writers and other compactions: a commit points a file at the copy only if the file still
//! references what was copied. A crash leaves unreferenced objects.

mod file;
mod packs;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use crate::data::{GATHER_BYTES, ObjectError, PACK_BYTES, PIECE_BYTES_MAX};
use crate::error::{Error, Result};
use crate::fs::content::{FILE_BYTES_MAX, extents_within};
use crate::fs::scattered::EXTENTS_MIN;
use crate::fs::shared::Shared;
use crate::meta::codec::Decoder;
use crate::meta::engine::Order;
use crate::meta::keys;
use crate::meta::references::References;
use crate::meta::versioned::{At, Reader, Records as _, VolumeRow};
use crate::object::{Extent, ObjectId};
use crate::slice::Slice;

/// Records that one transaction reads.
const BATCH: usize = 1_000;
/// Most hollow objects, other than packs, that one compaction remembers.
const HOLLOW_MAX: usize = 100_000;

/// The thresholds above which [`Datafs::compact`] rewrites a file or an object.
///
/// [`Datafs::compact`]: crate::Datafs::compact
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compact {
    /// Files with more extents than this, ...
    pub extents_min: usize,
    /// ... whose extents have fewer bytes than this on average.
    pub extent_bytes_min: u64,
    /// Objects of which less than this is in use, in percent.
    pub live_percent_min: u64,
}

impl Default for Compact {
    fn default() -> Compact {
        Compact { extents_min: EXTENTS_MIN, extent_bytes_min: 64 * 1024, live_percent_min: 50 }
    }
}

/// What a compaction has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct CompactReport {
    /// Files that were rewritten into new objects; files that were moved between packs are not counted.
    pub files: u64,
    /// Packs of small files that were emptied.
    pub packs: u64,
    /// Extents of the rewritten data before.
    pub extents_before: u64,
    /// Extents of the rewritten data now.
    pub extents_after: u64,
    /// Bytes that were copied.
    pub bytes: u64,
    /// Parts of files, and packs, that were left as they are: they changed meanwhile, or a key is missing.
    pub conflicts: u64,
}

/// Rewrites scattered files of one volume or of all, and mostly dead objects of all volumes.
pub(crate) fn compact(shared: &Arc<Shared>, volume: Option<u64>, what: &Compact) -> Result<CompactReport> {
    let mut report = CompactReport::default();
    let volumes = match volume {
        Some(volume) => vec![volume],
        None => shared.live_volumes()?,
    };
    let hollow = shared.hollow_objects(what, true)?;
    for volume in volumes {
        file::compact_volume(shared, volume, what, &hollow.others, &mut report)?;
    }
    for pack in hollow.packs {
        packs::compact_pack(shared, pack, true, &mut report)?;
    }
    Ok(report)
}

/// Objects of which little is in use.
#[derive(Debug, Default)]
pub(crate) struct Hollow {
    pub(crate) packs: BTreeSet<ObjectId>,
    others: HashSet<ObjectId>,
}

impl Shared {
    /// The background pass of each process: files that it has scattered and does not have open any more.
    pub(crate) fn compact_noted(self: &Arc<Self>) -> Result<()> {
        let what = Compact::default();
        let mut report = CompactReport::default();
        for (volume, ino) in self.scattered.take() {
            if self.open.get(volume, ino).is_some() {
                self.scattered.note(volume, ino);
                continue;
            }
            match file::compact_file(self, volume, ino, &what, &HashSet::new(), &mut report) {
                // The volume, or the file, is gone.
                Err(Error::Stale { .. } | Error::NotFound { .. }) => {}
                other => other?,
            }
        }
        if report != CompactReport::default() {
            tracing::debug!(?report, "compacted");
        }
        Ok(())
    }

    /// Compacts some of the packs that the sweep has found, as far as `slice` permits.
    pub(crate) fn compact_swept(&self, hollow: &mut Hollow, slice: &mut Slice<'_>) -> Result<()> {
        let mut report = CompactReport::default();
        while !hollow.packs.is_empty() && slice.pack() {
            self.collector.go_on(&self.home)?;
            if let Some(pack) = hollow.packs.pop_first() {
                packs::compact_pack(self, pack, false, &mut report)?;
            }
        }
        if report != CompactReport::default() {
            tracing::debug!(?report, "compacted");
        }
        Ok(())
    }

    fn live_volumes(&self) -> Result<Vec<u64>> {
        let mut volumes = Vec::new();
        self.meta.each(&keys::volumes(), |key, value| {
            // The collector and fsck report a row that cannot be read.
            if VolumeRow::decode(value).is_ok_and(|row| !row.deleting) {
                volumes.push(Decoder::new("volume key", &key[1..]).u64()?);
            }
            Ok(())
        })?;
        Ok(volumes)
    }

    /// Surveys the whole store. With `exact`, reads the data size of packs that may be compressed; otherwise
    /// their stored size counts.
    fn hollow_objects(&self, what: &Compact, exact: bool) -> Result<Hollow> {
        let mut hollow = Hollow::default();
        let mut waiting = Vec::with_capacity(BATCH);
        let mut result = Ok(());
        self.pool.survey(&mut |object, is_data, len| {
            if is_data && result.is_ok() {
                waiting.push((object, len));
                if waiting.len() == BATCH {
                    result = self.weigh(&waiting, what, exact, &mut hollow);
                    waiting.clear();
                }
            }
        })?;
        result.and_then(|()| self.weigh(&waiting, what, exact, &mut hollow)).map(|()| hollow)
    }

    /// Adds those of the objects to `hollow` that the background compaction empties.
    pub(crate) fn weigh_in_background(&self, objects: &[(ObjectId, u64)], hollow: &mut Hollow) -> Result<()> {
        self.weigh(objects, &Compact::default(), false, hollow)?;
        hollow.others.clear();
        Ok(())
    }

    /// Adds those of the objects to `hollow` of which little is in use. They come with their stored bytes. One
    /// transaction looks at all of them.
    fn weigh(
        &self,
        objects: &[(ObjectId, u64)],
        what: &Compact,
        exact: bool,
        hollow: &mut Hollow,
    ) -> Result<()> {
        if objects.is_empty() {
            return Ok(());
        }
        let wanted: Vec<_> = objects.iter().map(|(object, _)| keys::references(*object)).collect();
        let references = self.meta.view(|txn| {
            txn.prefetch(&wanted)?;
            objects.iter().map(|(object, _)| References::get(txn, *object)).collect::<Result<Vec<_>>>()
        })?;
        for ((object, stored), references) in objects.iter().zip(references) {
            let Some(references) = references else { continue };
            let is_full =
                |len: u64| references.bytes.saturating_mul(100) >= len.saturating_mul(what.live_percent_min);
            let mut len = *stored;
            if exact
                && object.is_pack()
                && object.is_encoded()
                && !is_full((GATHER_BYTES + PIECE_BYTES_MAX) as u64)
            {
                len = match self.pool.data_bytes(*object) {
                    // Deleted meanwhile, or the key is missing.
                    Err(ObjectError::Missing { .. } | ObjectError::Key { .. }) => continue,
                    other => other?,
                };
            }
            if is_full(len) {
                continue;
            }
            if object.is_pack() {
                // A live session may be filling it, unless it was stored at once.
                let filled = len >= PACK_BYTES || object.is_encoded();
                let session = keys::session(object.session());
                if filled || self.meta.view_recent(|txn| txn.get(&session))?.is_none() {
                    hollow.packs.insert(*object);
                }
            } else if hollow.others.len() < HOLLOW_MAX {
                hollow.others.insert(*object);
            }
        }
        Ok(())
    }

    /// The extents of a live file from an offset on.
    fn extents_from(&self, volume: u64, ino: u64, start: u64, limit: usize) -> Result<Vec<Extent>> {
        self.meta.view(|txn| {
            let mut reader = Reader::open(txn, volume, At::Live)?;
            extents_within(&mut reader, ino, start, FILE_BYTES_MAX, limit)
        })
    }

    /// The records of a volume's live tree in a range of record keys, in pages.
    fn each_live(
        &self,
        volume: u64,
        prefix: &[u8],
        mut visit: impl FnMut(&[u8], &[u8]) -> Result<()>,
    ) -> Result<()> {
        let end = keys::after_prefix(prefix);
        let mut start = prefix.to_vec();
        loop {
            let page = self.meta.view(|txn| {
                Reader::open(txn, volume, At::Live)?.scan(&start, &end, Order::Ascending, BATCH)
            })?;
            for (record, value) in &page {
                visit(record, value)?;
            }
            match page.last() {
                Some((last, _)) if page.len() == BATCH => start = [last.as_slice(), &[0]].concat(),
                _ => return Ok(()),
            }
        }
    }
}
