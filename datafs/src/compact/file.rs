//! Compaction of files: copies scattered files, and extents in hollow objects, to a new object.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Compact, CompactReport};
use crate::data::ObjectError;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::fs::content::{self, Replacement};
use crate::fs::fresh_object::FreshObject;
use crate::fs::shared::Shared;
use crate::meta::engine::Durability;
use crate::meta::inode::decode_extent;
use crate::meta::keys;
use crate::meta::versioned::{At, Reader, Records as _, Writer};
use crate::object::{Extent, ObjectId};

/// Extents that are rewritten in one transaction, into one object.
const SEGMENT_EXTENTS: usize = 65_536;
/// Bytes that are in memory at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Counts of one file during the scan of a volume's extents.
#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    ino: u64,
    extents: usize,
    bytes: u64,
    hollow: bool,
}

impl Tally {
    fn is_due(&self, what: &Compact) -> bool {
        self.hollow || is_scattered(self.extents, self.bytes, what)
    }
}

fn is_scattered(extents: usize, bytes: u64, what: &Compact) -> bool {
    extents > what.extents_min && bytes / (extents as u64) < what.extent_bytes_min
}

/// Rewrites the files of a volume that are scattered or reference hollow objects.
pub(super) fn compact_volume(
    shared: &Arc<Shared>,
    volume: u64,
    what: &Compact,
    hollow: &HashSet<ObjectId>,
    report: &mut CompactReport,
) -> Result<()> {
    let mut tally = Tally::default();
    let rewrite = |tally: &Tally, report: &mut CompactReport| {
        if !tally.is_due(what) {
            return Ok(());
        }
        compact_file(shared, volume, tally.ino, what, hollow, report)
    };
    shared.each_live(volume, &keys::nodes(), |record, value| {
        let Some(offset) = keys::extent_offset(record) else { return Ok(()) };
        let ino = keys::node_of(record).map_or(0, |(ino, _)| ino);
        if ino != tally.ino {
            rewrite(&tally, report)?;
            tally = Tally { ino, ..Tally::default() };
        }
        let extent = decode_extent(offset, value)?;
        tally.extents += 1;
        tally.bytes = tally.bytes.saturating_add(extent.len);
        tally.hollow |= hollow.contains(&extent.object);
        Ok(())
    })?;
    rewrite(&tally, report)
}

/// Rewrites one file segment by segment: a scattered segment as a whole, of others the extents in hollow
/// objects.
pub(super) fn compact_file(
    shared: &Arc<Shared>,
    volume: u64,
    ino: u64,
    what: &Compact,
    hollow: &HashSet<ObjectId>,
    report: &mut CompactReport,
) -> Result<()> {
    let mut start = 0;
    let mut first = true;
    let mut rewritten = false;
    loop {
        let segment = shared.extents_from(volume, ino, start, SEGMENT_EXTENTS)?;
        let Some(last) = segment.last() else { break };
        start = last.end();
        let more = segment.len() >= SEGMENT_EXTENTS;
        let bytes = segment.iter().map(|extent| extent.len).fold(0, u64::saturating_add);
        let old = if is_scattered(segment.len(), bytes, what) {
            // Head bytes in the metadata that lie between the extents are copied too.
            let head = if first { shared.head_of(volume, ino)? } else { None };
            Old { head, extents: segment }
        } else {
            let hollow = segment.into_iter().filter(|extent| hollow.contains(&extent.object));
            Old { head: None, extents: hollow.collect() }
        };
        first = false;
        if !old.extents.is_empty() {
            rewritten |= rewrite(shared, volume, ino, &old, report)?;
        }
        if !more {
            break;
        }
    }
    report.files += u64::from(rewritten);
    Ok(())
}

/// The source of one copy: extents (sorted), and the head of the file if it is copied too.
pub(super) struct Old {
    pub(super) head: Option<Vec<u8>>,
    pub(super) extents: Vec<Extent>,
}

/// Copies bytes to a new object and points the file at it. Returns false when the file changed meanwhile or
/// its key is missing.
fn rewrite(
    shared: &Arc<Shared>,
    volume: u64,
    ino: u64,
    old: &Old,
    report: &mut CompactReport,
) -> Result<bool> {
    let Some(copied) = copy(shared, volume, old)? else {
        report.conflicts += 1;
        return Ok(false);
    };
    put_in_place(shared, volume, ino, old, copied, report)
}

/// Points the file at the copy. Returns false when the file was changed since its bytes were copied.
pub(super) fn put_in_place(
    shared: &Arc<Shared>,
    volume: u64,
    ino: u64,
    old: &Old,
    (mut object, new): (FreshObject, Vec<Extent>),
    report: &mut CompactReport,
) -> Result<bool> {
    object.sync()?;
    failpoint::hit("compact-file-copied");
    let committed = shared.meta.transact(Durability::Relaxed, |txn| {
        Writer::run(txn, volume, shared.session.id(), |writer| {
            let (old, head) = (&old.extents, old.head.as_deref());
            content::replace_extents(writer, ino, Replacement { old, head, new: &new })
        })
    });
    match committed {
        Ok(true) => {
            failpoint::hit("compact-file-committed");
            report.bytes += object.object().len;
            object.settle();
            report.extents_before += old.extents.len() as u64;
            report.extents_after += new.len() as u64;
            Ok(true)
        }
        Ok(false) => {
            report.conflicts += 1;
            Ok(false)
        }
        Err(error) => {
            if !error.is_definite() {
                object.abandon();
            }
            Err(error)
        }
    }
}

/// Copies bytes to a new object. `None` when a source object is gone (the file was changed), or when a key is
/// missing.
pub(super) fn copy(
    shared: &Arc<Shared>,
    volume: u64,
    old: &Old,
) -> Result<Option<(FreshObject, Vec<Extent>)>> {
    let codec = match shared.codec_of_volume(volume) {
        Err(Error::WrongKey { .. }) => return Ok(None),
        other => other?,
    };
    let mut writer = shared.pool.writer(&codec)?;
    let mut new: Vec<Extent> = Vec::new();
    let mut buffer = Vec::new();
    let head = old.head.as_deref().unwrap_or_default();
    let push = |new: &mut Vec<Extent>, extent: Extent| match new.last_mut() {
        Some(last) if last.end() == extent.file_offset => last.len += extent.len,
        _ => new.push(extent),
    };
    let mut from = 0;
    for extent in &old.extents {
        let gap_end = extent.file_offset.min(head.len() as u64);
        if from < gap_end {
            let bytes = &head[from as usize..gap_end as usize];
            let (len, object_offset) = (bytes.len() as u64, writer.len());
            push(&mut new, Extent { file_offset: from, len, object_offset, ..*extent });
            writer.append(bytes)?;
        }
        from = extent.end();
        let at = writer.len();
        let mut done = 0;
        while done < extent.len {
            let len = (extent.len - done).min(PIECE_BYTES);
            buffer.resize(len as usize, 0);
            let from = extent.object_offset + done;
            match shared.read_part(volume, extent.object, extent.object_offset, from, &mut buffer) {
                Err(ObjectError::Missing { .. } | ObjectError::Key { .. }) => return Ok(None),
                other => other?,
            }
            writer.append(&buffer)?;
            done += len;
        }
        push(&mut new, Extent { object_offset: at, ..*extent });
    }
    let object = shared.complete(&mut writer)?;
    let id = object.object().id;
    new.iter_mut().for_each(|extent| extent.object = id);
    Ok(Some((object, new)))
}

impl Shared {
    /// The bytes of a live file that are in the metadata.
    pub(super) fn head_of(&self, volume: u64, ino: u64) -> Result<Option<Vec<u8>>> {
        self.meta.view(|txn| Reader::open(txn, volume, At::Live)?.get(&keys::head(ino)))
    }
}
