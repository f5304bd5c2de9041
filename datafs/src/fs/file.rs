//! Open files: reads, buffered writes, flush and fsync.

use std::borrow::Cow;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::MutexGuard;

use super::View;
use super::content::{self, FILE_BYTES_MAX, INLINE_BYTES_MAX, Layout, Referral};
use super::dirty::Dirty;
use super::open_table::{Naming, OpenInode, Unflushed};
use super::shared::Shared;
use super::tree;
use super::types::{OpenFlags, SetAttr};
use super::xattr::drop_pending;
use crate::data::{ObjectError, Packed};
use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::engine::Durability;
use crate::meta::inode::{Inode, Timestamp};
use crate::meta::keys;
use crate::meta::references::References;
use crate::meta::versioned::{Reader, Writer};
use crate::node::{Attr, FileKind, Node};
use crate::object::{Extent, ObjectId};

/// Attempts of a read whose objects are overwritten and collected meanwhile.
const READ_ATTEMPTS: u32 = 5;
/// Most extents of a snapshot's file whose layout stays in memory while it is open.
const CACHED_EXTENTS_MAX: usize = 4_096;
/// Most scattered pieces of one file that stay unflushed: in memory before they move to an object, and in
/// objects before the commit.
const PIECES_MAX: usize = 65_536;
/// When the unflushed bytes of all open files exceed their limit, only files with more than this move theirs
/// to an object.
const SEAL_BYTES_MIN: usize = 1 << 20;
/// Sequential writes of at least this size are answered before their bytes are in the object: the writer
/// prepares the next one meanwhile.
const EARLY_BYTES_MIN: usize = 64 << 10;

/// Ages at which write-back commits the unflushed data of an open file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WriteAges {
    /// Of data in memory or in several pieces.
    pub(crate) scattered: Duration,
    /// Of data that is written from front to back. A commit ends its object, and only a file in one object
    /// can be passed to the kernel.
    pub(crate) sequential: Duration,
}

/// An open regular file. Reads and writes carry their offset, so any number of threads may share it.
///
/// With [`OpenFlags::append`] writes go to the end of the file. Appends of several processes are all kept, in
/// the order in which the processes flush them.
///
/// Writes are kept in memory (see [`crate::Config::write_buffer_bytes_max`]), visible at once to every handle
/// of this process. [`OpenFile::flush`] commits them, [`OpenFile::fsync`] makes them durable. When either
/// fails, the writes are kept and the next call tries again. Dropping the handle flushes too, but only logs
/// an error, so flush first.
#[derive(Debug)]
pub struct OpenFile {
    view: View,
    node: Node,
    flags: OpenFlags,
    /// Set in the live tree, where other handles may change the file.
    live: Option<Arc<OpenInode>>,
    /// In a snapshot: the layout of the whole file; `Some(None)` when it has too many extents to keep.
    fixed: OnceLock<Option<Layout>>,
}

impl View {
    /// Opens a regular file. Everything else is [`Error::IsADirectory`] or [`Error::Invalid`].
    pub fn open(&self, node: Node, flags: OpenFlags) -> Result<OpenFile> {
        self.open_with_attr(node, flags).map(|(file, _)| file)
    }

    /// [`View::open`], with the attributes that the file had before truncation.
    pub(crate) fn open_with_attr(&self, node: Node, flags: OpenFlags) -> Result<(OpenFile, Attr)> {
        if flags.write {
            self.writable(node)?;
        }
        if flags.truncate && !flags.write {
            return Err(Error::Invalid("truncating needs an open file for writing".into()));
        }
        if self.is_snapshots_dir(node) {
            return Err(Error::IsADirectory { what: tree::SNAPSHOTS_NAME.into() });
        }
        let file = OpenFile::register(self, node, flags);
        let inode = self.read(node, |reader| tree::inode(reader, node.ino))?;
        check_file(node, &inode)?;
        if let Some(open) = &file.live {
            if inode.nlink > 0 {
                open.has_name();
            } else if !open.is_orphan() && !open.had_name() {
                return Err(Error::not_found(format!("inode {}", node.ino)));
            }
        }
        if flags.truncate {
            file.set_len(0)?;
        }
        let attr = self.attr_of(node, &inode);
        Ok((file, attr))
    }
}

impl OpenFile {
    /// Opens a file of a snapshot for reading, with its known layout.
    pub(crate) fn known(view: &View, node: Node, layout: Layout) -> OpenFile {
        let file = OpenFile::register(view, node, OpenFlags::READ);
        // No other thread has this handle yet, so the cell is empty.
        let _ = file.fixed.set(kept(layout));
        file
    }

    /// [`View::open`] of a file of a snapshot for reading. Looks up its layout along with the inode.
    pub(crate) fn of_snapshot(view: &View, node: Node) -> Result<OpenFile> {
        let find = |reader: &mut Reader<'_>| Layout::find_whole(reader, node.ino);
        let (inode, whole) = view.read(node, find)?;
        check_file(node, &inode)?;
        Ok(OpenFile::known(view, node, whole))
    }

    /// A file that an earlier process had open in the same mount. [`OpenFile::is_inherited`] has to follow once
    /// this process has taken over the files without a name.
    pub(crate) fn inherit(view: &View, node: Node, flags: OpenFlags) -> OpenFile {
        OpenFile::register(view, node, flags)
    }

    /// Whether the file of [`OpenFile::inherit`] exists. It does not if its creation was lost with the process.
    pub(crate) fn is_inherited(&self) -> Result<bool> {
        match self.view.read(self.node, |reader| tree::inode(reader, self.node.ino)) {
            Ok(inode) if inode.nlink > 0 => {
                self.has_name();
                Ok(inode.kind == FileKind::File)
            }
            Ok(inode) => {
                let Some(open) = &self.live else { return Ok(false) };
                if !open.is_orphan() {
                    // Another session has removed the last name since the takeover.
                    self.view.shared.hold_orphans()?;
                }
                Ok(open.is_orphan() && inode.kind == FileKind::File)
            }
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// A handle that is registered in the open table. The caller checks that the file exists.
    pub(super) fn register(view: &View, node: Node, flags: OpenFlags) -> OpenFile {
        OpenFile {
            // Its later writes belong to other requests.
            view: view.unmarked(),
            node,
            flags,
            live: node.is_live().then(|| view.shared.open.open(view.volume, node.ino)),
            fixed: OnceLock::new(),
        }
    }

    /// Records that the file has a name.
    pub(super) fn has_name(&self) {
        if let Some(open) = &self.live {
            open.has_name();
        }
    }

    /// The inode's entry in the open table; `None` for a file of a snapshot.
    pub(super) fn open_inode(&self) -> Option<&OpenInode> {
        self.live.as_deref()
    }

    /// The view that opened the file.
    pub(super) fn view(&self) -> &View {
        &self.view
    }

    /// The node of the file.
    pub fn node(&self) -> Node {
        self.node
    }

    /// The flags that it was opened with.
    pub fn flags(&self) -> OpenFlags {
        self.flags
    }

    /// Its attributes, also after its last name is gone.
    pub fn attr(&self) -> Result<Attr> {
        self.view.getattr(self.node)
    }

    /// Cuts the file, or extends it with a hole.
    pub fn set_len(&self, size: u64) -> Result<Attr> {
        self.live_for_writing()?;
        self.view.setattr(self.node, &SetAttr { size: Some(size), ..SetAttr::default() })
    }

    /// Reads `len` bytes from `offset` on, fewer only at the end of the file. Allocates the result.
    pub fn read_at(&self, offset: u64, len: usize) -> Result<Bytes> {
        self.read_within(offset, len, u64::MAX)
    }

    /// [`OpenFile::read_at`] by a reader of a part of the file that ends at `ahead_to`: from there on, nothing is fetched
    /// ahead from a remote store.
    pub(crate) fn read_within(&self, offset: u64, len: usize, ahead_to: u64) -> Result<Bytes> {
        let mut buffer = ReadBuffer::default();
        self.read_ahead_to(offset, len, &mut buffer, ahead_to)?;
        let ReadBuffer { mut bytes, len } = buffer;
        bytes.truncate(len);
        Ok(bytes.into())
    }

    /// [`OpenFile::read_at`] into a reusable buffer.
    pub(crate) fn read_into(&self, offset: u64, len: usize, buffer: &mut ReadBuffer) -> Result<()> {
        self.read_ahead_to(offset, len, buffer, u64::MAX)
    }

    fn read_ahead_to(&self, offset: u64, len: usize, buffer: &mut ReadBuffer, ahead_to: u64) -> Result<()> {
        if !self.flags.read {
            return Err(Error::BadHandle("reading"));
        }
        let end = offset.saturating_add(len as u64);
        let Some(open) = &self.live else { return self.read_fixed(offset, end, buffer, ahead_to) };
        let dirty = Some(open.dirty.lock()).filter(|dirty| !dirty.is_empty());
        let unflushed_end = open.unflushed().map_or(0, |unflushed| unflushed.end);
        self.read_committed(offset, end, unflushed_end, buffer, ahead_to)?;
        if let Some(mut dirty) = dirty {
            dirty.overlay(&self.view.shared, self.view.volume, offset, buffer.filled_mut())?;
        }
        Ok(())
    }

    fn read_committed(
        &self,
        offset: u64,
        end: u64,
        unflushed_end: u64,
        buffer: &mut ReadBuffer,
        ahead_to: u64,
    ) -> Result<()> {
        let mut attempts = READ_ATTEMPTS;
        loop {
            attempts -= 1;
            let layout = self.layout(offset, end)?;
            let into = buffer.take(offset, end.min(layout.size.max(unflushed_end)))?;
            match layout.read(&self.view.shared, self.view.volume, offset, into, ahead_to) {
                // Another writer replaced the object, and it was collected since the lookup: look up again.
                Err(ObjectError::Missing { .. }) if attempts > 0 => {}
                Err(error) => return Err(error.into()),
                Ok(()) => return Ok(()),
            }
        }
    }

    fn layout(&self, offset: u64, end: u64) -> Result<Layout> {
        self.view.read(self.node, |reader| {
            let inode = tree::inode(reader, self.node.ino)?;
            Layout::find(reader, self.node.ino, &inode, offset, end)
        })
    }

    /// The objects that hold its bytes, each once.
    pub(crate) fn objects(&self) -> Result<Vec<ObjectId>> {
        let mut objects: Vec<_> =
            self.layout(0, u64::MAX)?.extents().iter().map(|extent| extent.object).collect();
        objects.sort_unstable();
        objects.dedup();
        Ok(objects)
    }

    /// The local file with exactly the bytes of this file. `None` unless this file is in a snapshot and is
    /// one plain object that has a local file. Reads from it are not verified.
    pub fn image(&self) -> Result<Option<std::fs::File>> {
        if self.live.is_some() {
            return Ok(None);
        }
        let Some((layout, object)) = self.fixed()?.and_then(|l| Some((l, l.single_object()?))) else {
            return Ok(None);
        };
        let Some(image) = self.view.shared.pool.image(object)? else { return Ok(None) };
        let len = image.metadata().map_err(|e| Error::io("open the object of", "a file", e))?.len();
        Ok((len == layout.size).then_some(image))
    }

    /// The layout of a file of a snapshot; `None` when it has too many extents to keep.
    fn fixed(&self) -> Result<Option<&Layout>> {
        if self.fixed.get().is_none() {
            let find = |reader: &mut Reader<'_>| Layout::find_whole(reader, self.node.ino);
            let (_, whole) = self.view.read(self.node, find)?;
            // Another reader may have set it first, to the same value.
            let _ = self.fixed.set(kept(whole));
        }
        Ok(self.fixed.get().and_then(Option::as_ref))
    }

    /// Reads a file of a snapshot.
    fn read_fixed(&self, offset: u64, end: u64, buffer: &mut ReadBuffer, ahead_to: u64) -> Result<()> {
        let Some(layout) = self.fixed()? else {
            return self.read_committed(offset, end, 0, buffer, ahead_to);
        };
        let into = buffer.take(offset, end.min(layout.size))?;
        match layout.read(&self.view.shared, self.view.volume, offset, into, ahead_to) {
            // Either the snapshot was deleted, which `layout` reports, or the object is lost.
            Err(ObjectError::Missing { id }) => {
                self.view.catch_up()?;
                self.layout(0, 0)?;
                Err(ObjectError::Missing { id }.into())
            }
            Err(error) => Err(error.into()),
            Ok(()) => Ok(()),
        }
    }

    /// Writes bytes at an offset (with `append`: at the end). Visible in this process at once.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<usize> {
        self.write_by(offset, data, true, &mut || {})
    }

    /// [`OpenFile::write_at`] by a process without privilege: the file loses its set-user-ID and set-group-ID
    /// bits as [`SetAttr::drop_privileges`] says.
    pub fn write_at_unprivileged(&self, offset: u64, data: &[u8]) -> Result<usize> {
        self.write_by(offset, data, false, &mut || {})
    }

    /// [`OpenFile::write_at`] that may call `taken` early, when the caller can answer the write: from then on
    /// it succeeds. Bytes that then cannot be moved to an object stay in memory. The next write or flush
    /// tries again, and fails if it has to. Every other operation on the file waits for the move.
    pub(crate) fn write_by(
        &self,
        offset: u64,
        data: &[u8],
        privileged: bool,
        taken: &mut dyn FnMut(),
    ) -> Result<usize> {
        // A failed attempt took nothing, so it can run again.
        with_room(&self.view.shared, || self.write_once(offset, data, privileged, &mut *taken))
    }

    fn write_once(
        &self,
        offset: u64,
        data: &[u8],
        privileged: bool,
        taken: &mut dyn FnMut(),
    ) -> Result<usize> {
        let open = self.live_for_writing()?;
        let shared = &self.view.shared;
        let mut dirty = open.dirty.lock();
        shared.meta.check_reserve()?;
        dirty.sweep(shared, self.view.volume, self.view.codec())?;
        let (runs, extents) = dirty.pieces();
        if extents >= PIECES_MAX {
            flush_inode(&self.view, open, &mut dirty, Durability::Relaxed)?;
        }
        let unflushed = open.unflushed();
        let known_end = unflushed.map_or(0, |unflushed| unflushed.end);
        let mut append_base = None;
        let offset = if !self.flags.append {
            offset
        } else if let Some(base) = unflushed.and_then(|unflushed| unflushed.append_base) {
            append_base = Some(base);
            known_end
        } else {
            let node = self.node;
            // Another process may have appended just now.
            shared.meta.barrier()?;
            let size = self.view.read(node, |reader| tree::inode(reader, node.ino))?.size;
            append_base = unflushed.is_none().then_some(size);
            size.max(known_end)
        };
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= FILE_BYTES_MAX);
        let end = end.ok_or(Error::TooLarge { what: "file in bytes", max: FILE_BYTES_MAX })?;
        if data.is_empty() {
            return Ok(0);
        }
        let own = dirty.bytes().saturating_add(data.len());
        let all = shared.unflushed_bytes.load(Ordering::Relaxed).saturating_add(data.len());
        let config = &shared.config;
        if own > config.write_buffer_bytes_max
            || runs >= PIECES_MAX
            || (all > config.write_buffers_bytes_max && own > SEAL_BYTES_MIN)
        {
            counted(shared, &mut dirty, |dirty| dirty.spill(shared, self.view.codec()))?;
        }
        let mtime = Timestamp::now();
        let since = unflushed.map_or_else(Instant::now, |unflushed| unflushed.since);
        let drop_privileges = !privileged || unflushed.is_some_and(|unflushed| unflushed.drop_privileges);
        let own = self.view.writer();
        let writer = if unflushed.is_none_or(|unflushed| unflushed.writer == own) { own } else { 0 };
        let end = end.max(known_end);
        let note = |dirty: &Dirty| {
            let stored_bytes = dirty.stored_bytes();
            let unflushed = Unflushed {
                end,
                stored_bytes,
                writer,
                since,
                mtime,
                drop_privileges,
                drop_capabilities: true,
                append_base,
            };
            open.set_unflushed(Some(unflushed));
        };
        if data.len() >= EARLY_BYTES_MIN && dirty.streams(offset, data.len()) {
            note(&dirty);
            taken();
            counted(shared, &mut dirty, |dirty| dirty.stream_taken(shared, self.view.codec(), offset, data));
        } else {
            counted(shared, &mut dirty, |dirty| dirty.write(shared, self.view.codec(), offset, data))?;
        }
        note(&dirty);
        Ok(data.len())
    }

    /// Commits the writes to the file of all handles of this process. Any process that opens it from now on
    /// sees them. The bytes of large writes are durable then; the commit is durable after
    /// [`OpenFile::fsync`].
    pub fn flush(&self) -> Result<()> {
        self.commit(Durability::Relaxed).map(drop)
    }

    /// [`OpenFile::flush`] that makes this and all earlier commits durable before it returns.
    pub fn fsync(&self) -> Result<()> {
        if self.live.is_none() || self.commit(Durability::Durable)? {
            return Ok(());
        }
        self.view.shared.meta.sync()
    }

    /// [`OpenFile::flush`] of data that is older than `ages`, unless the file has lost its last name. Returns
    /// whether there was any.
    pub(crate) fn write_back(&self, ages: WriteAges) -> Result<bool> {
        let Some(open) = self.live.as_ref().filter(|open| !open.is_orphan()) else { return Ok(false) };
        let Some(age) = open.unflushed().map(|unflushed| unflushed.since.elapsed()) else { return Ok(false) };
        if age < ages.scattered {
            return Ok(false);
        }
        let mut dirty = open.dirty.lock();
        if age < ages.sequential && dirty.is_sequential() {
            return Ok(false);
        }
        flush_inode(&self.view, open, &mut dirty, Durability::Relaxed)
    }

    /// Returns whether there was something to commit.
    fn commit(&self, durability: Durability) -> Result<bool> {
        match &self.live {
            None => Ok(false),
            Some(open) => flush_inode(&self.view, open, &mut open.dirty.lock(), durability),
        }
    }

    fn live_for_writing(&self) -> Result<&OpenInode> {
        if !self.flags.write {
            return Err(Error::BadHandle("writing"));
        }
        self.live.as_deref().ok_or_else(|| Error::ReadOnly { what: "a snapshot".into() })
    }
}

/// Fails unless the inode is a regular file.
pub(super) fn check_file(node: Node, inode: &Inode) -> Result<()> {
    match inode.kind {
        // No name of the snapshot leads to it.
        _ if inode.nlink == 0 && !node.is_live() => Err(Error::not_found(format!("inode {}", node.ino))),
        FileKind::File => Ok(()),
        FileKind::Directory => Err(Error::IsADirectory { what: format!("inode {}", node.ino) }),
        _ => Err(Error::Invalid(format!("inode {} is no regular file", node.ino))),
    }
}

/// The layout, if it is small enough to keep in memory.
fn kept(layout: Layout) -> Option<Layout> {
    (layout.extents().len() <= CACHED_EXTENTS_MAX).then_some(layout)
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let Some(open) = &self.live else { return };
        let shared = &self.view.shared;
        let may_be_read =
            || open.naming() != Naming::Unnamed && (!open.is_orphan() || shared.others_may_have_open());
        if self.flags.write
            && may_be_read()
            && let Err(error) = self.flush()
        {
            tracing::error!(
                volume = %self.view.spec().volume, inode = open.ino, %error,
                "closing a file lost what was written to it"
            );
        }
        shared.close_inode(open);
    }
}

/// Runs an operation that may find no space, and once more if a garbage collection has freed some.
fn with_room<T>(shared: &Shared, mut run: impl FnMut() -> Result<T>) -> Result<T> {
    match run() {
        Err(Error::NoSpace { .. }) if shared.make_room() => run(),
        done => done,
    }
}

/// Commits the unflushed writes of an inode, whose dirty state the caller has locked. Returns whether there
/// were any. On error the writes are kept and the call may be repeated.
pub(super) fn flush_inode(
    view: &View,
    open: &OpenInode,
    dirty: &mut MutexGuard<'_, Dirty>,
    durability: Durability,
) -> Result<bool> {
    with_room(&view.shared, || flush_once(view, open, dirty, durability))
}

fn flush_once(
    view: &View,
    open: &OpenInode,
    dirty: &mut MutexGuard<'_, Dirty>,
    durability: Durability,
) -> Result<bool> {
    let Some(unflushed) = open.unflushed().filter(|_| !dirty.is_empty()) else { return Ok(false) };
    view.shared.meta.check_reserve()?;
    let mut inline = true;
    let committed = loop {
        let placed = place(view, open, dirty, inline, durability)?;
        match commit(view, open.ino, dirty, &placed, unflushed, durability) {
            Ok(true) => {
                failpoint::hit("write-committed");
                open.scatter(placed.extents().len());
                break Ok(());
            }
            // The bytes have to be placed elsewhere.
            Ok(false) => match &placed {
                Placed::Packed(packed) => {
                    view.shared.packs.give_up(&packed.pack);
                    // A commit that was to reference the pack has failed, so the pack may be in the store
                    // unreferenced.
                    view.shared.session.leave_unclean();
                }
                Placed::Inline | Placed::Sealed(_) => inline = false,
            },
            Err(error) => break Err(error),
        }
    };
    match committed {
        Ok(()) => {
            counted(&view.shared, dirty, Dirty::committed);
            open.set_unflushed(None);
            Ok(true)
        }
        Err(error) => {
            if !error.is_definite() {
                dirty.outcome_unknown();
                // The next attempt writes the same bytes to the same place, and appends nothing twice.
                open.set_unflushed(Some(Unflushed { append_base: None, ..unflushed }));
            }
            Err(error)
        }
    }
}

/// The location of the bytes that a commit is going to reference.
enum Placed {
    /// In the metadata, written by the commit.
    Inline,
    /// In a pack.
    Packed(Packed),
    /// In objects of this file alone.
    Sealed(Vec<Extent>),
}

impl Placed {
    fn extents(&self) -> &[Extent] {
        match self {
            Placed::Inline => &[],
            Placed::Packed(packed) => &packed.extents,
            Placed::Sealed(extents) => extents,
        }
    }
}

fn place(
    view: &View,
    open: &OpenInode,
    dirty: &mut Dirty,
    inline: bool,
    durability: Durability,
) -> Result<Placed> {
    if inline && dirty.fits_inline() && dirty.end() <= view.inline_bytes_max() as u64 {
        return Ok(Placed::Inline);
    }
    if dirty.fits_pack() && view.shared.packs.serve(view.codec()) {
        let packs = &view.shared.packs;
        let packed = packs.append(view.codec(), open.volume, open.ino, dirty.runs())?;
        if durability == Durability::Durable {
            // An unavailable store then fails this call, and no commit has to wait for it.
            packed.pack.send()?;
        }
        return Ok(Placed::Packed(packed));
    }
    counted(&view.shared, dirty, |dirty| dirty.seal(&view.shared, view.codec()))?;
    Ok(Placed::Sealed(dirty.sealed()))
}

/// Returns false when the bytes have to be placed elsewhere: the pack has to be given up, or the file has
/// grown too large for the metadata.
fn commit(
    view: &View,
    ino: u64,
    dirty: &Dirty,
    placed: &Placed,
    unflushed: Unflushed,
    durability: Durability,
) -> Result<bool> {
    failpoint::hit("write-placed");
    let mut referral = Referral::default();
    let result = view.write(durability, |writer| {
        let mut inode = tree::inode(writer, ino).map_err(|error| match error {
            Error::NotFound { what, .. } => Error::Stale { what },
            other => other,
        })?;
        // Appends go to the file's current end, which another process may have moved.
        let base = unflushed.append_base.unwrap_or(inode.size);
        let moved = |offset: u64| (offset - base).saturating_add(inode.size);
        let moves = base != inode.size;
        let end = if moves { moved(dirty.end()) } else { dirty.end() };
        if end > FILE_BYTES_MAX {
            return Err(Error::TooLarge { what: "file in bytes", max: FILE_BYTES_MAX });
        }
        let extents: Cow<'_, [Extent]> = if moves {
            let extents = placed.extents().iter();
            extents.map(|extent| Extent { file_offset: moved(extent.file_offset), ..*extent }).collect()
        } else {
            placed.extents().into()
        };
        match placed {
            Placed::Inline if end > INLINE_BYTES_MAX as u64 => return Ok(false),
            Placed::Inline => {
                for (offset, run) in dirty.runs() {
                    let offset = if moves { moved(offset) } else { offset };
                    content::write_head(writer, ino, &inode, offset, run)?;
                }
            }
            Placed::Packed(packed) => {
                if !referral.refer(&packed.pack, writer)? {
                    return Ok(false);
                }
            }
            Placed::Sealed(_) => {
                for prerequisite in dirty.prerequisites() {
                    writer.txn().require(prerequisite)?;
                }
            }
        }
        let extents = match placed {
            Placed::Sealed(_) if dirty.may_have_landed() => {
                not_landed(&view.shared, writer, &extents)?.into()
            }
            _ => extents,
        };
        content::write_extents(writer, ino, &inode, &extents)?;
        drop_pending(writer, ino, &mut inode, Some(unflushed))?;
        writer.settle(ino, &mut inode);
        inode.size = inode.size.max(end);
        // The writer does not know the offset of moved appends, so they count as written by another writer.
        inode.written_by(if moves { 0 } else { unflushed.writer });
        inode.mtime = unflushed.mtime;
        // Attributes have shown this time since the write, so that the flush changes nothing that a reader
        // has seen.
        inode.ctime = inode.ctime.max(unflushed.mtime);
        tree::put_inode(writer, ino, &inode)?;
        Ok(true)
    });
    if result.is_err() && matches!(placed, Placed::Packed(_)) {
        // A pack that was created for this commit may stay in the store unreferenced.
        view.shared.session.leave_unclean();
    }
    result
}

/// The extents whose objects no earlier commit has referenced. An object belongs to one file, so only a
/// commit of unknown outcome can have referenced it. Another process may have cut or replaced its extents
/// since, and collected the object.
fn not_landed(shared: &Shared, writer: &mut Writer<'_>, extents: &[Extent]) -> Result<Vec<Extent>> {
    let own = shared.pool.list_session(shared.session.id())?;
    let mut left = Vec::new();
    for extent in extents {
        let txn = writer.txn().as_read();
        let known = References::get(txn, extent.object)?.is_some()
            || txn.get(&keys::garbage(extent.object))?.is_some();
        // The collector deletes the object before its garbage record.
        if !known && own.binary_search(&extent.object).is_ok() {
            left.push(*extent);
        }
    }
    Ok(left)
}

/// Drops the unflushed writes of an inode, whose dirty state the caller has locked.
pub(super) fn discard(shared: &Shared, open: &OpenInode, dirty: &mut Dirty) {
    let discarded = std::mem::take(dirty);
    shared.unflushed_bytes.fetch_sub(discarded.bytes(), Ordering::Relaxed);
    open.set_unflushed(None);
}

/// Runs a change, and updates the count of this process's unflushed bytes in memory.
fn counted<T>(shared: &Shared, dirty: &mut Dirty, change: impl FnOnce(&mut Dirty) -> T) -> T {
    let before = dirty.bytes();
    let result = change(dirty);
    let after = dirty.bytes();
    if after >= before {
        shared.unflushed_bytes.fetch_add(after - before, Ordering::Relaxed);
    } else {
        shared.unflushed_bytes.fetch_sub(before - after, Ordering::Relaxed);
    }
    result
}

/// A reusable read buffer: allocating a new megabyte for each read costs as much as the read.
#[derive(Debug, Default)]
pub(crate) struct ReadBuffer {
    /// As large as the largest read so far.
    bytes: Vec<u8>,
    /// Bytes of the last read.
    len: usize,
}

impl ReadBuffer {
    /// The bytes of the last read.
    pub(crate) fn filled(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn filled_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.len]
    }

    /// The buffer for `offset..end`, empty if that is no range. Old bytes are not cleared.
    fn take(&mut self, offset: u64, end: u64) -> Result<&mut [u8]> {
        let too_large = || Error::TooLarge { what: "read in bytes", max: isize::MAX as u64 };
        self.len = 0;
        let len = usize::try_from(end.saturating_sub(offset)).map_err(|_| too_large())?;
        if len > self.bytes.len() {
            let more = len - self.bytes.len();
            self.bytes.try_reserve_exact(more).map_err(|_| too_large())?;
            self.bytes.resize(len, 0);
        }
        self.len = len;
        Ok(self.filled_mut())
    }
}
