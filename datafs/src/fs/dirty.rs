//! Unflushed writes of one open inode: bytes in memory and in objects. Bytes move to an object when too many
//! are in memory, and a sequential writer streams into one.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use millrace_leaf::error_chain;

use super::content::INLINE_BYTES_MAX;
use super::fresh_object::FreshObject;
use super::shared::Shared;
use crate::data::{Codec, ObjectWriter, PIECE_BYTES_MAX};
use crate::error::Result;
use crate::meta::engine::Prerequisite;
use crate::object::{Extent, ObjectId};

/// Longest run of bytes in memory; bounds what splitting a run copies.
const RUN_BYTES_MAX: usize = 1 << 20;

/// Sequential writes of more bytes in all than this, without a gap, stream into an object. Their bytes no
/// longer stay in memory.
const STREAM_BYTES_MIN: u64 = 2 << 20;
/// Overwritten bytes that one file's unflushed objects may hold before a new object is begun. Above four
/// times this plus the bytes in use, the bytes in use are copied.
const DEAD_BYTES_MAX: u64 = 64 << 20;
/// The flush of an object of at least this size syncs it, so that no other commit waits for that.
const OWN_SYNC_BYTES_MIN: u64 = 8 << 20;

/// Unflushed writes. Bytes in memory take precedence over bytes in objects, and those over the committed
/// content.
#[derive(Debug, Default)]
pub(crate) struct Dirty {
    /// Disjoint runs by file offset.
    runs: BTreeMap<u64, Vec<u8>>,
    bytes: usize,
    /// Disjoint extents by file offset, in `open` or in an object of `objects`.
    sealed: BTreeMap<u64, Extent>,
    /// Their total length.
    sealed_bytes: u64,
    /// The object that is being written.
    open: Option<ObjectWriter>,
    objects: Vec<FreshObject>,
    /// Bytes appended to objects since the last sweep.
    unswept_bytes: u64,
    /// The last writes without a gap between them.
    sequence: Sequence,
    /// The outcome of an earlier commit is unknown.
    may_have_landed: bool,
}

/// A range that was written from front to back.
#[derive(Debug, Default, Clone, Copy)]
struct Sequence {
    start: u64,
    end: u64,
}

impl Dirty {
    pub(crate) fn is_empty(&self) -> bool {
        self.runs.is_empty() && self.sealed.is_empty()
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes in memory and in objects; bytes of the file that are in both count twice.
    pub(crate) fn stored_bytes(&self) -> u64 {
        self.sealed_bytes + self.bytes as u64
    }

    /// Number of pieces in memory, and in objects: each costs memory whatever its length.
    pub(crate) fn pieces(&self) -> (usize, usize) {
        (self.runs.len(), self.sealed.len())
    }

    /// End of the last unflushed byte, 0 without any.
    pub(crate) fn end(&self) -> u64 {
        let run = self.runs.last_key_value().map_or(0, |(at, run)| at + run.len() as u64);
        let sealed = self.sealed.last_key_value().map_or(0, |(_, extent)| extent.end());
        run.max(sealed)
    }

    /// Offset of the first unflushed byte, `u64::MAX` without any.
    pub(crate) fn start(&self) -> u64 {
        let run = self.runs.first_key_value().map_or(u64::MAX, |(at, _)| *at);
        run.min(self.sealed.first_key_value().map_or(u64::MAX, |(at, _)| *at))
    }

    /// Takes a write. The caller has checked that `offset + data.len()` does not overflow. On error
    /// nothing of it was taken.
    pub(crate) fn write(
        &mut self,
        shared: &Arc<Shared>,
        codec: &Codec,
        offset: u64,
        data: &[u8],
    ) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let end = offset + data.len() as u64;
        if self.sequence.end != offset {
            self.sequence.start = offset;
        } else if end - self.sequence.start > STREAM_BYTES_MIN && !self.is_ending() {
            self.stream(shared, codec, offset, data)?;
            self.sequence.end = end;
            return Ok(());
        }
        self.sequence.end = end;
        self.keep(offset, data);
        Ok(())
    }

    /// Whether a write goes to the open object at once, with nothing in memory.
    pub(crate) fn streams(&self, offset: u64, len: usize) -> bool {
        let end = offset.saturating_add(len as u64);
        self.runs.is_empty()
            && self.sequence.end == offset
            && end - self.sequence.start > STREAM_BYTES_MIN
            && !self.is_ending()
    }

    /// Whether the open object takes no more bytes: completing it has failed, and the next flush tries again.
    /// Writes meanwhile stay in memory.
    fn is_ending(&self) -> bool {
        self.open.as_ref().is_some_and(ObjectWriter::is_ending)
    }

    /// [`Dirty::write`] of bytes whose write was already answered; [`Dirty::streams`] must be true. They stay
    /// in memory when the object does not take them. The next write tries that again first, and reports an
    /// error.
    pub(crate) fn stream_taken(&mut self, shared: &Shared, codec: &Codec, offset: u64, data: &[u8]) {
        if let Err(error) = self.append(shared, codec, offset, data) {
            tracing::warn!(
                error = error_chain::one_line(&error),
                "a write that was answered is kept in memory until the next write or flush"
            );
            self.keep(offset, data);
        }
        self.sequence.end = offset + data.len() as u64;
    }

    /// Appends a sequential write to the open object, after the bytes in memory.
    fn stream(&mut self, shared: &Arc<Shared>, codec: &Codec, offset: u64, data: &[u8]) -> Result<()> {
        if !self.runs.is_empty() {
            self.spill(shared, codec)?;
        }
        self.append(shared, codec, offset, data)
    }

    /// Moves the bytes in memory to the open object, which is not durable yet. On error the rest is still in
    /// memory.
    pub(crate) fn spill(&mut self, shared: &Arc<Shared>, codec: &Codec) -> Result<()> {
        if self.is_ending() {
            self.complete(shared)?;
        }
        while let Some((at, run)) = self.runs.pop_first() {
            if let Err(error) = self.append(shared, codec, at, &run) {
                self.runs.insert(at, run);
                return Err(error);
            }
            self.bytes -= run.len();
        }
        Ok(())
    }

    fn append(&mut self, shared: &Shared, codec: &Codec, file_offset: u64, data: &[u8]) -> Result<()> {
        let writer = match &mut self.open {
            Some(writer) => writer,
            none => none.insert(shared.pool.writer(codec)?),
        };
        let (object, object_offset) = (writer.id(), writer.len());
        writer.append(data)?;
        self.unswept_bytes += data.len() as u64;
        let extent = Extent { file_offset, len: data.len() as u64, object, object_offset };
        self.sealed_bytes += lay_over(&mut self.sealed, extent);
        Ok(())
    }

    /// Bytes in objects that were overwritten since they were appended.
    fn dead_bytes(&self) -> u64 {
        let written = self.objects.iter().map(|object| object.object().len).sum::<u64>();
        (written + self.open.as_ref().map_or(0, ObjectWriter::len)).saturating_sub(self.sealed_bytes)
    }

    /// Bounds the space that overwritten bytes take in the store. Deletes objects that are overwritten as a
    /// whole, and begins another object when the open one holds too much. Copies the bytes in use when that
    /// is too little. Cheap unless much was written since the last sweep.
    pub(crate) fn sweep(&mut self, shared: &Arc<Shared>, volume: u64, codec: &Codec) -> Result<()> {
        if self.unswept_bytes < DEAD_BYTES_MAX || self.dead_bytes() < DEAD_BYTES_MAX {
            return Ok(());
        }
        let used: HashSet<ObjectId> = self.sealed.values().map(|extent| extent.object).collect();
        self.objects.retain(|object| used.contains(&object.object().id));
        if self.dead_bytes() >= DEAD_BYTES_MAX {
            self.complete_unsynced(shared)?;
        }
        if self.dead_bytes() >= 4 * DEAD_BYTES_MAX + self.sealed_bytes
            && let Err(error) = self.copy_used(shared, volume, codec)
        {
            tracing::debug!(%error, "copying what is in use of unflushed objects; it is tried again later");
        }
        self.unswept_bytes = 0;
        Ok(())
    }

    /// Copies the bytes in use to a new object, and deletes the old objects. No object may be open for
    /// writing.
    fn copy_used(&mut self, shared: &Arc<Shared>, volume: u64, codec: &Codec) -> Result<()> {
        let mut writer = shared.pool.writer(codec)?;
        let id = writer.id();
        let mut copied = BTreeMap::new();
        let mut buffer = Vec::new();
        for extent in self.sealed.values() {
            let new = Extent { object: id, object_offset: writer.len(), ..*extent };
            let mut done = 0;
            while done < extent.len {
                let len = (extent.len - done).min(RUN_BYTES_MAX as u64);
                buffer.resize(len as usize, 0);
                let at = extent.object_offset + done;
                shared.read_part(volume, extent.object, extent.object_offset, at, &mut buffer)?;
                writer.append(&buffer)?;
                done += len;
            }
            lay_over(&mut copied, new);
        }
        self.objects = vec![shared.complete(&mut writer)?];
        self.sealed = copied;
        Ok(())
    }

    /// Takes a write into memory.
    fn keep(&mut self, offset: u64, data: &[u8]) {
        let end = offset + data.len() as u64;
        if let Some((at, run)) = self.runs.range_mut(..=offset).next_back() {
            let inside = (offset - at) as usize;
            if end <= at + run.len() as u64 {
                run[inside..inside + data.len()].copy_from_slice(data);
                return;
            }
        }
        self.cut_runs(offset, end);
        self.bytes += data.len();
        let mut rest = data;
        let mut at = offset;
        if let Some((start, run)) = self.runs.range_mut(..offset).next_back()
            && start + run.len() as u64 == offset
            && run.len() < RUN_BYTES_MAX
        {
            let (now, later) = rest.split_at(rest.len().min(RUN_BYTES_MAX - run.len()));
            run.extend_from_slice(now);
            at += now.len() as u64;
            rest = later;
        }
        for piece in rest.chunks(RUN_BYTES_MAX) {
            self.runs.insert(at, piece.to_vec());
            at += piece.len() as u64;
        }
    }

    /// Removes the bytes of a range from memory.
    fn cut_runs(&mut self, start: u64, end: u64) {
        if let Some((at, run)) = self.runs.range_mut(..start).next_back() {
            let run_end = *at + run.len() as u64;
            if run_end > start {
                let tail = (run_end > end).then(|| run[(end - at) as usize..].to_vec());
                self.bytes -= (run_end.min(end) - start) as usize;
                run.truncate((start - at) as usize);
                if let Some(tail) = tail {
                    self.runs.insert(end, tail);
                }
            }
        }
        while let Some((at, len)) = self.runs.range(start..end).next().map(|(at, r)| (*at, r.len())) {
            let Some(mut run) = self.runs.remove(&at) else { return };
            let cut = len.min((end - at) as usize);
            self.bytes -= cut;
            if cut < len {
                run.drain(..cut);
                self.runs.insert(end, run);
            }
        }
    }

    /// Copies unflushed bytes over `buffer`, which holds the file from `offset` on.
    pub(crate) fn overlay(
        &mut self,
        shared: &Arc<Shared>,
        volume: u64,
        offset: u64,
        buffer: &mut [u8],
    ) -> Result<()> {
        let end = offset + buffer.len() as u64;
        if self.open.as_ref().is_some_and(|open| !open.is_readable())
            && clip(&self.sealed, offset, end).next().is_some()
        {
            self.complete(shared)?;
        }
        let open = self.open.as_mut().map(|open| (open.id(), open));
        for extent in clip(&self.sealed, offset, end) {
            let at = (extent.file_offset - offset) as usize;
            let part = &mut buffer[at..at + extent.len as usize];
            match &open {
                Some((id, open)) if *id == extent.object => open.read_into(extent.object_offset, part)?,
                _ => {
                    let at = extent.object_offset;
                    shared.read_part(volume, extent.object, at, at, part)?;
                }
            }
        }
        let first = self.runs.range(..=offset).next_back().map_or(offset, |(at, _)| *at);
        for (at, run) in self.runs.range(first..end) {
            let from = offset.max(*at);
            let to = end.min(at + run.len() as u64);
            if from < to {
                buffer[(from - offset) as usize..(to - offset) as usize]
                    .copy_from_slice(&run[(from - at) as usize..(to - at) as usize]);
            }
        }
        Ok(())
    }

    /// Whether all unflushed bytes are one piece of an object, as a sequential writer leaves them. Further
    /// sequential writes go to the same object.
    pub(crate) fn is_sequential(&self) -> bool {
        self.runs.is_empty() && self.sealed.len() == 1
    }

    /// Whether all unflushed bytes are in memory and near the start of the file, so that a commit can put
    /// them into the metadata.
    pub(crate) fn fits_inline(&self) -> bool {
        self.sealed.is_empty() && self.end() <= INLINE_BYTES_MAX as u64
    }

    /// Whether all unflushed bytes are in memory and few enough to share an object with other files.
    pub(crate) fn fits_pack(&self) -> bool {
        self.sealed.is_empty() && self.bytes <= PIECE_BYTES_MAX
    }

    /// Moves the bytes in memory to an object and completes it. A large object is durable then, others once
    /// [`Dirty::prerequisites`] are. On error the bytes that were not moved are still in memory, and nothing
    /// is lost.
    pub(crate) fn seal(&mut self, shared: &Arc<Shared>, codec: &Codec) -> Result<()> {
        if self.is_ending() {
            self.complete(shared)?;
        }
        if self.open.is_none() && !self.runs.is_empty() {
            // All at once, so that a small object needs no sidecar.
            let mut writer = shared.pool.writer(codec)?;
            let mut extents: Vec<(u64, u64, u64)> = Vec::new();
            for (at, run) in &self.runs {
                let position = writer.len();
                writer.append(run)?;
                extents.push((*at, run.len() as u64, position));
            }
            let object = shared.complete(&mut writer)?;
            let id = object.object().id;
            self.objects.push(object);
            self.sync_if_large()?;
            for (file_offset, len, object_offset) in extents {
                let extent = Extent { file_offset, len, object: id, object_offset };
                self.sealed_bytes += lay_over(&mut self.sealed, extent);
            }
            self.runs.clear();
            self.bytes = 0;
            return Ok(());
        }
        self.spill(shared, codec)?;
        self.complete(shared)
    }

    /// Completes the open object, and syncs it where it is large.
    fn complete(&mut self, shared: &Arc<Shared>) -> Result<()> {
        if self.open.is_none() {
            return Ok(());
        }
        self.complete_unsynced(shared)?;
        self.sync_if_large()
    }

    /// Completes the open object.
    fn complete_unsynced(&mut self, shared: &Arc<Shared>) -> Result<()> {
        let Some(writer) = &mut self.open else { return Ok(()) };
        let object = shared.complete(writer)?;
        self.open = None;
        self.sequence = Sequence::default();
        self.objects.push(object);
        Ok(())
    }

    /// Syncs the newest object where it is large.
    fn sync_if_large(&self) -> Result<()> {
        match self.objects.last() {
            Some(object) if object.object().len >= OWN_SYNC_BYTES_MIN => object.sync(),
            _ => Ok(()),
        }
    }

    /// What has to be durable before a commit references the objects.
    pub(crate) fn prerequisites(&self) -> impl Iterator<Item = Arc<dyn Prerequisite>> {
        self.objects.iter().filter_map(FreshObject::prerequisite)
    }

    /// The bytes in memory, by file offset.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.runs.iter().map(|(at, run)| (*at, run.as_slice()))
    }

    /// The extents in objects, by file offset.
    pub(crate) fn sealed(&self) -> Vec<Extent> {
        self.sealed.values().copied().collect()
    }

    /// Clears the state after a commit. The objects that the commit references are released; those that were
    /// overwritten as a whole before it are deleted. Returns how many bytes of memory were freed.
    pub(crate) fn committed(&mut self) -> usize {
        let used: HashSet<ObjectId> = self.sealed.values().map(|extent| extent.object).collect();
        for object in self.objects.drain(..) {
            if used.contains(&object.object().id) {
                object.settle();
            }
        }
        self.sealed.clear();
        self.sealed_bytes = 0;
        self.unswept_bytes = 0;
        self.runs.clear();
        self.sequence = Sequence::default();
        self.may_have_landed = false;
        std::mem::take(&mut self.bytes)
    }

    /// Records that the outcome of a commit is unknown: the objects must stay. The next commit references the
    /// ones that have not landed again, and they may not be durable yet.
    pub(crate) fn outcome_unknown(&mut self) {
        self.objects.iter_mut().for_each(FreshObject::abandon);
        self.may_have_landed = true;
    }

    /// Whether an earlier commit of these writes may have taken place.
    pub(crate) fn may_have_landed(&self) -> bool {
        self.may_have_landed
    }
}

/// Puts an extent over disjoint ones and cuts those that it overlaps. Returns by how many bytes they are
/// longer together.
pub(crate) fn lay_over(extents: &mut BTreeMap<u64, Extent>, new: Extent) -> u64 {
    let (start, end) = (new.file_offset, new.end());
    let first = extents.range(..start).next_back().map_or(start, |(at, _)| *at);
    let overlapped: Vec<Extent> =
        extents.range(first..end).map(|(_, e)| *e).filter(|e| e.end() > start).collect();
    let mut added = new.len;
    for old in overlapped {
        added -= slice(&old, start, end).map_or(0, |part| part.len);
        extents.remove(&old.file_offset);
        for part in [slice(&old, old.file_offset, start), slice(&old, end, old.end())] {
            part.map(|part| extents.insert(part.file_offset, part));
        }
    }
    // An extent that continues the one before, in the file and in the object, is merged with it.
    if let Some((_, last)) = extents.range_mut(..start).next_back()
        && last.end() == start
        && last.object == new.object
        && last.object_offset + last.len == new.object_offset
    {
        last.len += new.len;
        return added;
    }
    extents.insert(start, new);
    added
}

/// The part of an extent that lies in a range.
pub(crate) fn slice(extent: &Extent, start: u64, end: u64) -> Option<Extent> {
    let from = extent.file_offset.max(start);
    let to = extent.end().min(end);
    (from < to).then(|| Extent {
        file_offset: from,
        len: to - from,
        object: extent.object,
        object_offset: extent.object_offset + (from - extent.file_offset),
    })
}

fn clip(extents: &BTreeMap<u64, Extent>, start: u64, end: u64) -> impl Iterator<Item = Extent> {
    let first = extents.range(..=start).next_back().map_or(start, |(at, _)| *at);
    extents.range(first..end.max(first)).filter_map(move |(_, extent)| slice(extent, start, end))
}
