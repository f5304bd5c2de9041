//! A file's content in the metadata: its first bytes inline, everything else in extents.
//!
//! The *head* holds bytes from offset 0 on, at most 4 KiB. Extents take precedence over the head. Bytes up to
//! the file's size that neither covers are zeroes. So a small file costs no object, and growing it rewrites
//! nothing.

use super::dirty::slice;
use super::shared::Shared;
use crate::data::{ObjectError, Pack};
use crate::error::{Error, Result};
use crate::meta::engine::{Order, Pair};
use crate::meta::inode::{Inode, decode_extent, encode_extent};
use crate::meta::keys;
use crate::meta::references::References;
use crate::meta::versioned::{Records, Writer};
use crate::node::FileKind;
use crate::object::{Extent, ObjectId};

/// Most bytes of a file that are kept in the metadata.
pub(crate) const INLINE_BYTES_MAX: usize = 4096;
/// Largest file size: the largest offset that the kernel accepts.
pub(crate) const FILE_BYTES_MAX: u64 = i64::MAX as u64;
/// Extents read by one scan.
const PAGE: usize = 512;

/// A commit's claim to reference a pack; kept across retries of its transaction.
#[derive(Debug, Default)]
pub(crate) struct Referral {
    /// Whether this commit was the first to claim the pack.
    first: bool,
}

impl Referral {
    /// Whether no commit had claimed the pack before this one.
    pub(crate) fn is_first(&self) -> bool {
        self.first
    }

    /// Records that a transaction is going to reference a pack, and makes the pack's durability a
    /// prerequisite of the commit. Returns false when the caller must give the pack up. That is so when an
    /// earlier commit claimed it and nothing references it: the garbage collector may already be deleting it.
    /// The commit that claimed it first may always reference it: no other commit can have referenced and
    /// released it since.
    pub(crate) fn refer(&mut self, pack: &Pack, writer: &mut Writer<'_>) -> Result<bool> {
        self.first |= !pack.refer();
        let stands = self.first || References::get(writer.txn().as_read(), pack.id())?.is_some();
        if stands {
            writer.txn().require(pack.prerequisite())?;
        }
        Ok(stands)
    }
}

/// The locations of the bytes in a range of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Size of the file.
    pub(crate) size: u64,
    /// The first bytes of the file, if the range begins inside them.
    head: Vec<u8>,
    /// Extents over the head, in the range, disjoint and sorted.
    extents: Vec<Extent>,
}

impl Layout {
    /// Looks up the range `start..end` of a file, cut at the file's size.
    pub(crate) fn find(
        records: &mut dyn Records,
        ino: u64,
        inode: &Inode,
        start: u64,
        end: u64,
    ) -> Result<Layout> {
        let end = end.min(inode.size);
        let mut layout = Layout { size: inode.size, head: Vec::new(), extents: Vec::new() };
        if start >= end {
            return Ok(layout);
        }
        match sole(records, ino, inode.stored_bytes)? {
            Sole::Nothing => return Ok(layout),
            Sole::Head(head) => {
                layout.head = head;
                return Ok(layout);
            }
            Sole::Extent(extent) => {
                layout.extents.extend(slice(&extent, start, end));
                return Ok(layout);
            }
            Sole::Unknown => {}
        }
        if start < INLINE_BYTES_MAX as u64 {
            layout.head = records.get(&keys::head(ino))?.unwrap_or_default();
        }
        for_each_extent(records, ino, start, end, |extent| {
            layout.extents.extend(slice(&extent, start, end));
            Ok(())
        })?;
        Ok(layout)
    }

    /// Looks up a whole file and its inode, in one scan unless it is scattered. For snapshots, where each
    /// single lookup costs two.
    pub(crate) fn find_whole(records: &mut dyn Records, ino: u64) -> Result<(Inode, Layout)> {
        let (start, end) = (keys::attributes(ino), keys::after_prefix(&keys::extents(ino)));
        let found = records.scan(&start, &end, Order::Ascending, PAGE)?;
        let mut rest = found.iter();
        let inode = match rest.next() {
            Some((record, value)) if *record == start => Inode::decode(value)?,
            _ => return Err(Error::not_found(format!("inode {ino}"))),
        };
        // Only a regular file has content; the records of a directory include its entries.
        if found.len() == PAGE || inode.kind != FileKind::File {
            let layout = Layout::find(records, ino, &inode, 0, u64::MAX)?;
            return Ok((inode, layout));
        }
        let (mut head, mut extents) = (&[][..], Vec::new());
        for pair in rest {
            match keys::node_of(&pair.0) {
                Some((_, keys::NodeTag::Head)) => head = &pair.1,
                Some((_, keys::NodeTag::Extent)) => extents.push(pair),
                _ => {}
            }
        }
        let layout = Layout::of_records(inode.size, head, extents)?;
        Ok((inode, layout))
    }

    /// The layout of a whole file, from its head and the records of its extents, in order.
    pub(crate) fn of_records<'a>(
        size: u64,
        head: &[u8],
        extents: impl IntoIterator<Item = &'a Pair>,
    ) -> Result<Layout> {
        let mut layout = Layout { size, head: head.to_vec(), extents: Vec::new() };
        for (record, value) in extents {
            layout.extents.extend(slice(&parse(record, value)?, 0, size));
        }
        Ok(layout)
    }

    /// The extents in the range.
    pub(crate) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The object whose bytes are exactly those of the whole file, according to the metadata.
    pub(crate) fn single_object(&self) -> Option<ObjectId> {
        match self.extents.as_slice() {
            [all] if all.file_offset == 0 && all.object_offset == 0 && all.len == self.size => {
                Some(all.object)
            }
            _ => None,
        }
    }

    /// Fills `buffer` with the file's bytes from `offset` on, and with zeroes in holes and beyond the end.
    /// The range must lie within that of the layout. From `ahead_to` of the file on, nothing is fetched ahead.
    pub(crate) fn read(
        &self,
        shared: &Shared,
        volume: u64,
        offset: u64,
        buffer: &mut [u8],
        ahead_to: u64,
    ) -> Result<(), ObjectError> {
        let end = offset.saturating_add(buffer.len() as u64).min(self.size);
        let head_end = end.min(self.head.len() as u64);
        // `buffer[..filled]` is written.
        let mut filled = 0;
        if offset < head_end {
            filled = (head_end - offset) as usize;
            buffer[..filled].copy_from_slice(&self.head[offset as usize..head_end as usize]);
        }
        let first = self.extents.partition_point(|extent| extent.end() <= offset);
        for extent in &self.extents[first..] {
            let Some(part) = slice(extent, offset, end) else { break };
            let at = (part.file_offset - offset) as usize;
            let part_end = at + part.len as usize;
            if filled < at {
                buffer[filled..at].fill(0);
            }
            let into = &mut buffer[at..part_end];
            let ahead_to = part.object_offset.saturating_add(ahead_to.saturating_sub(part.file_offset));
            let start = extent.object_offset;
            shared.read_part_ahead(volume, part.object, start, part.object_offset, into, ahead_to)?;
            filled = filled.max(part_end);
        }
        buffer[filled..].fill(0);
        Ok(())
    }
}

/// The content of a file that has at most one content record.
enum Sole {
    Nothing,
    Head(Vec<u8>),
    Extent(Extent),
    /// There may be more than one record.
    Unknown,
}

/// Finds the content of a file without a scan, if it is one record at the beginning, as for most files. A
/// record that holds all `stored_bytes` is the only one.
fn sole(records: &mut dyn Records, ino: u64, stored_bytes: u64) -> Result<Sole> {
    if stored_bytes == 0 {
        return Ok(Sole::Nothing);
    }
    if stored_bytes <= INLINE_BYTES_MAX as u64
        && let Some(head) = records.get(&keys::head(ino))?
        && head.len() as u64 == stored_bytes
    {
        return Ok(Sole::Head(head));
    }
    if let Some(value) = records.get(&keys::extent(ino, 0))? {
        let extent = decode_extent(0, &value)?;
        if extent.len == stored_bytes {
            return Ok(Sole::Extent(extent));
        }
    }
    Ok(Sole::Unknown)
}

/// The key of a file's only content record, `Some(None)` for a file without content. `None` when only a scan
/// can tell.
pub(crate) fn sole_record(
    records: &mut dyn Records,
    ino: u64,
    stored_bytes: u64,
) -> Result<Option<Option<Vec<u8>>>> {
    Ok(match sole(records, ino, stored_bytes)? {
        Sole::Nothing => Some(None),
        Sole::Head(_) => Some(Some(keys::head(ino))),
        Sole::Extent(_) => Some(Some(keys::extent(ino, 0))),
        Sole::Unknown => None,
    })
}

/// Visits the extents that overlap a range, in order.
fn for_each_extent(
    records: &mut dyn Records,
    ino: u64,
    start: u64,
    end: u64,
    mut visit: impl FnMut(Extent) -> Result<()>,
) -> Result<()> {
    let from = keys::extents(ino);
    let before = records.scan(&from, &keys::extent(ino, start), Order::Descending, 1)?;
    for (record, value) in before {
        let extent = parse(&record, &value)?;
        if extent.end() > start {
            visit(extent)?;
        }
    }
    let mut next = start;
    while next < end {
        let (from, to) = (keys::extent(ino, next), keys::extent(ino, end));
        let page = records.scan(&from, &to, Order::Ascending, PAGE)?;
        for (record, value) in &page {
            let extent = parse(record, value)?;
            next = extent.end();
            visit(extent)?;
        }
        if page.len() < PAGE {
            break;
        }
    }
    Ok(())
}

fn parse(record: &[u8], value: &[u8]) -> Result<Extent> {
    let offset = keys::extent_offset(record)
        .ok_or_else(|| Error::corrupt("extent record", "its key has no offset"))?;
    decode_extent(offset, value)
}

/// Removes the extents of a range; those that reach beyond it are cut.
fn cut_extents(writer: &mut Writer<'_>, ino: u64, start: u64, end: u64) -> Result<()> {
    let mut overlapped = Vec::new();
    for_each_extent(writer, ino, start, end, |extent| {
        overlapped.push(extent);
        Ok(())
    })?;
    for old in overlapped {
        // Writes the remaining parts first, so that the object never counts zero references in between.
        if let Some(right) = slice(&old, end, old.end()) {
            writer.put(&keys::extent(ino, right.file_offset), &encode_extent(&right))?;
        }
        match slice(&old, old.file_offset, start) {
            Some(left) => writer.put(&keys::extent(ino, left.file_offset), &encode_extent(&left))?,
            None => writer.delete(&keys::extent(ino, old.file_offset))?,
        }
    }
    Ok(())
}

/// Writes an extent over the content that the file has there. The caller sets the size.
pub(crate) fn write_extent(writer: &mut Writer<'_>, ino: u64, inode: &Inode, extent: &Extent) -> Result<()> {
    write_extents(writer, ino, inode, std::slice::from_ref(extent))
}

/// Writes extents (disjoint, sorted by offset) over the content that the file has there. `inode` is the inode
/// from before the transaction. The caller sets the size. Reads the overlapped extents in pages, whatever
/// their number.
pub(crate) fn write_extents(
    writer: &mut Writer<'_>,
    ino: u64,
    inode: &Inode,
    extents: &[Extent],
) -> Result<()> {
    let [first, ..] = extents else { return Ok(()) };
    if writer.stored_bytes(ino, inode) == 0 {
        for extent in extents {
            writer.put_new(&keys::extent(ino, extent.file_offset), &encode_extent(extent))?;
        }
        return Ok(());
    }
    let mut later = extents;
    for old in overlapped(writer, ino, extents)? {
        while later.first().is_some_and(|new| new.end() <= old.file_offset) {
            later = &later[1..];
        }
        // The parts of the old extent between the new ones stay.
        let mut from = old.file_offset;
        let mut replaced = false;
        for new in later.iter().take_while(|new| new.file_offset < old.end()) {
            replaced |= new.file_offset == old.file_offset;
            if let Some(part) = slice(&old, from, new.file_offset) {
                writer.put(&keys::extent(ino, part.file_offset), &encode_extent(&part))?;
                replaced |= part.file_offset == old.file_offset;
            }
            from = new.end();
        }
        if let Some(part) = slice(&old, from, old.end()) {
            writer.put(&keys::extent(ino, part.file_offset), &encode_extent(&part))?;
        }
        if !replaced {
            writer.delete(&keys::extent(ino, old.file_offset))?;
        }
    }
    for extent in extents {
        writer.put(&keys::extent(ino, extent.file_offset), &encode_extent(extent))?;
    }
    if first.file_offset == 0 {
        let head = writer.get(&keys::head(ino))?;
        if head.is_some_and(|head| head.len() as u64 <= first.end()) {
            writer.delete(&keys::head(ino))?;
        }
    }
    Ok(())
}

/// The file's extents that overlap new ones (disjoint, sorted).
fn overlapped(records: &mut dyn Records, ino: u64, new: &[Extent]) -> Result<Vec<Extent>> {
    let Some(last) = new.last() else { return Ok(Vec::new()) };
    let mut found: Vec<Extent> = Vec::new();
    let mut page = std::collections::VecDeque::new();
    // Every extent that begins before this offset was seen.
    let mut known = 0;
    for new in new {
        if found.last().is_some_and(|old| old.end() >= new.end()) {
            continue;
        }
        loop {
            while let Some(old) = page.front().copied() {
                let old: Extent = old;
                if old.file_offset >= new.end() {
                    break;
                }
                page.pop_front();
                if old.end() > new.file_offset {
                    found.push(old);
                }
            }
            if !page.is_empty() || known >= new.end() {
                break;
            }
            if known <= new.file_offset {
                // Nothing was read here yet: first the extent that reaches into the range, then those that
                // begin in it.
                let at = keys::extent(ino, new.file_offset);
                let before = records.scan(&keys::extents(ino), &at, Order::Descending, 1)?;
                for (record, value) in before {
                    let old = parse(&record, &value)?;
                    let seen = found.last().is_some_and(|last| last.file_offset >= old.file_offset);
                    if old.end() > new.file_offset && !seen {
                        found.push(old);
                    }
                }
                known = new.file_offset;
            }
            let next = records.scan(
                &keys::extent(ino, known),
                &keys::extent(ino, last.end()),
                Order::Ascending,
                PAGE,
            )?;
            for (record, value) in &next {
                page.push_back(parse(record, value)?);
            }
            known = match page.back() {
                Some(last) if next.len() >= PAGE => last.file_offset + 1,
                _ => u64::MAX,
            };
        }
    }
    Ok(found)
}

/// Writes bytes into the head; `offset + bytes.len()` is at most [`INLINE_BYTES_MAX`]. `inode` is the inode
/// from before the transaction. The caller sets the size.
pub(crate) fn write_head(
    writer: &mut Writer<'_>,
    ino: u64,
    inode: &Inode,
    offset: u64,
    bytes: &[u8],
) -> Result<()> {
    if bytes.is_empty() {
        return Ok(());
    }
    let end = offset + bytes.len() as u64;
    if writer.stored_bytes(ino, inode) == 0 {
        let mut head = vec![0; offset as usize];
        head.extend_from_slice(bytes);
        return writer.put_new(&keys::head(ino), &head);
    }
    cut_extents(writer, ino, offset, end)?;
    let mut head = writer.get(&keys::head(ino))?.unwrap_or_default();
    if head.len() < end as usize {
        head.resize(end as usize, 0);
    }
    head[offset as usize..end as usize].copy_from_slice(bytes);
    writer.put(&keys::head(ino), &head)
}

/// Removes all content from `size` on. `inode` is the inode from before the transaction. The caller sets the
/// size.
pub(crate) fn truncate(writer: &mut Writer<'_>, ino: u64, inode: &Inode, size: u64) -> Result<()> {
    writer.txn().makes_room();
    if writer.stored_bytes(ino, inode) == 0 {
        return Ok(());
    }
    cut_extents(writer, ino, size, u64::MAX)?;
    if let Some(head) = writer.get(&keys::head(ino))?
        && head.len() as u64 > size
    {
        match &head[..size as usize] {
            [] => writer.delete(&keys::head(ino))?,
            rest => writer.put(&keys::head(ino), rest)?,
        }
    }
    Ok(())
}

/// Makes a range read as zeroes and take no space. `inode` is the inode from before the transaction. The
/// caller sets the size.
pub(crate) fn zero(writer: &mut Writer<'_>, ino: u64, inode: &Inode, start: u64, end: u64) -> Result<()> {
    if writer.stored_bytes(ino, inode) == 0 {
        return Ok(());
    }
    cut_extents(writer, ino, start, end)?;
    let Some(mut head) = writer.get(&keys::head(ino))? else { return Ok(()) };
    if start >= end || start >= head.len() as u64 {
        return Ok(());
    }
    if end < head.len() as u64 {
        head[start as usize..end as usize].fill(0);
    } else {
        head.truncate(start as usize);
    }
    match head.as_slice() {
        [] => writer.delete(&keys::head(ino)),
        rest => writer.put(&keys::head(ino), rest),
    }
}

/// The first extents that overlap a range, cut to it; at most `limit`.
pub(crate) fn extents_within(
    records: &mut dyn Records,
    ino: u64,
    start: u64,
    end: u64,
    limit: usize,
) -> Result<Vec<Extent>> {
    let mut found: Vec<Extent> = Vec::new();
    let first = records.scan(&keys::extents(ino), &keys::extent(ino, start), Order::Descending, 1)?;
    for (record, value) in first {
        found.extend(slice(&parse(&record, &value)?, start, end));
    }
    let room = limit.saturating_sub(found.len());
    let rest = records.scan(&keys::extent(ino, start), &keys::extent(ino, end), Order::Ascending, room)?;
    for (record, value) in rest {
        found.extend(slice(&parse(&record, &value)?, start, end));
    }
    Ok(found)
}

/// The extents that overlap a range, not cut to it.
pub(crate) fn whole_extents_within(
    records: &mut dyn Records,
    ino: u64,
    start: u64,
    end: u64,
) -> Result<Vec<Extent>> {
    let mut found = Vec::new();
    for_each_extent(records, ino, start, end, |extent| {
        found.push(extent);
        Ok(())
    })?;
    Ok(found)
}

/// A copy of a file's bytes in new extents, with the source of the copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Replacement<'a> {
    /// The extents that were copied, disjoint and sorted.
    pub(crate) old: &'a [Extent],
    /// The head, if its bytes were copied too.
    pub(crate) head: Option<&'a [u8]>,
    /// The copy, disjoint and sorted. It covers `old`, and only `head` in the gaps of `old`.
    pub(crate) new: &'a [Extent],
}

/// Points a file at a copy of its bytes. Returns false and changes nothing unless the copied range is
/// unchanged: it has exactly the extents `old`, whole, and the same `head`.
pub(crate) fn replace_extents(
    writer: &mut Writer<'_>,
    ino: u64,
    Replacement { old, head, new }: Replacement<'_>,
) -> Result<bool> {
    // Overlapping extents are damage, which a copy would hide from fsck.
    let are_disjoint = old.windows(2).all(|pair| pair[0].end() <= pair[1].file_offset);
    if !are_disjoint || overlapped(writer, ino, new)? != old {
        return Ok(false);
    }
    if let Some(head) = head {
        if writer.get(&keys::head(ino))?.as_deref() != Some(head) {
            return Ok(false);
        }
        let covered = new.first().filter(|new| new.file_offset == 0).map_or(0, Extent::end);
        if covered >= head.len() as u64 {
            writer.delete(&keys::head(ino))?;
        }
    }
    let kept: std::collections::HashSet<u64> = new.iter().map(|extent| extent.file_offset).collect();
    for extent in old.iter().filter(|extent| !kept.contains(&extent.file_offset)) {
        writer.delete(&keys::extent(ino, extent.file_offset))?;
    }
    for extent in new {
        writer.put(&keys::extent(ino, extent.file_offset), &encode_extent(extent))?;
    }
    Ok(true)
}

/// The first byte at or after `offset` that is in the head or in an extent.
pub(crate) fn find_data(records: &mut dyn Records, ino: u64, offset: u64) -> Result<Option<u64>> {
    if records.get(&keys::head(ino))?.is_some_and(|head| offset < head.len() as u64) {
        return Ok(Some(offset));
    }
    let next = extents_within(records, ino, offset, FILE_BYTES_MAX, 1)?;
    Ok(next.first().map(|extent| extent.file_offset))
}

/// The first byte at or after `offset` that is neither in the head nor in an extent. It may lie beyond the
/// end of the file.
pub(crate) fn find_hole(records: &mut dyn Records, ino: u64, offset: u64) -> Result<u64> {
    let head = records.get(&keys::head(ino))?.map_or(0, |head| head.len() as u64);
    let mut hole = offset.max(head);
    loop {
        let page = extents_within(records, ino, hole, FILE_BYTES_MAX, PAGE)?;
        for extent in &page {
            if extent.file_offset > hole {
                return Ok(hole);
            }
            hole = extent.end();
        }
        if page.len() < PAGE {
            return Ok(hole);
        }
    }
}
