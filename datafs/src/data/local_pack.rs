//! Packs of a local store: files that grow, whose newest bytes are collected in memory.
//!
//! An append does no I/O: a write that extends a file waits for the file system's journal whenever another thread
//! syncs, and other files are synced all the time. Appended bytes can be read at once: a reader in this process
//! first has them written to the file ([`GrowingPacks::write_out`]). They survive a power failure after
//! [`LocalPack::sync`], which every commit that points at them waits for.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use millrace_leaf::error_chain;
use parking_lot::Mutex;

use super::backend::Backend;
use super::deleted::is_deleted;
use super::error::{ObjectError, Result};
use super::pack::append_pieces;
use super::pack_reader::OpenPacks;
use crate::failpoint;
use crate::metrics;
use crate::object::{Extent, Layout, ObjectId};

/// Above this many bytes in memory, the next append first writes them out. As many again can be in memory
/// while they are being written.
pub(super) const GATHER_BYTES: usize = 4 << 20;

/// A pack in a local file. Dropping one that no transaction has referred to deletes it.
#[derive(Debug)]
pub(crate) struct LocalPack {
    backend: Backend,
    open: Arc<OpenPacks>,
    id: ObjectId,
    path: PathBuf,
    file: File,
    tail: Mutex<Tail>,
    /// Locked while the tail is written to the file; reused as the next tail's buffer.
    writing: Mutex<Vec<u8>>,
    synced: Mutex<Synced>,
    referenced: AtomicBool,
}

/// The end of the pack that is not in the file yet.
#[derive(Debug, Default)]
struct Tail {
    /// Bytes that are in the file.
    written: u64,
    /// Bytes that are being written to it.
    leaving: u64,
    /// Bytes after those.
    bytes: Vec<u8>,
}

impl Tail {
    fn end(&self) -> u64 {
        self.written + self.leaving + self.bytes.len() as u64
    }
}

#[derive(Debug, Default)]
struct Synced {
    end: u64,
    named: bool,
    lost: bool,
}

impl LocalPack {
    pub(super) fn begin(backend: &Backend, open: &Arc<OpenPacks>) -> Result<LocalPack> {
        let id = backend.new_id(Layout::Pack);
        let (path, file) = backend.create_local(&id.data_name())?;
        failpoint::hit("pack-begun");
        metrics::OBJECTS_WRITTEN.inc();
        Ok(LocalPack {
            backend: backend.clone(),
            open: Arc::clone(open),
            id,
            path,
            file,
            tail: Mutex::default(),
            writing: Mutex::default(),
            synced: Mutex::default(),
            referenced: AtomicBool::new(false),
        })
    }

    /// The object id of the pack.
    pub(super) fn id(&self) -> ObjectId {
        self.id
    }

    /// Records that a transaction is going to refer to the pack. Returns whether an earlier one already did.
    pub(super) fn refer(&self) -> bool {
        self.referenced.swap(true, Ordering::AcqRel)
    }

    /// Appends runs (by file offset, disjoint, in order) as pieces; adjacent runs share one.
    pub(super) fn append<'a>(
        &self,
        (volume, ino): (u64, u64),
        runs: impl Iterator<Item = (u64, &'a [u8])>,
    ) -> Vec<Extent> {
        let mut tail = self.tail.lock();
        let base = tail.written + tail.leaving;
        append_pieces(&mut tail.bytes, (self.id, base), (volume, ino), runs)
    }

    /// Where the next append begins.
    pub(super) fn end(&self) -> u64 {
        self.tail.lock().end()
    }

    /// Bytes of appends that are in memory and not being written.
    pub(super) fn gathered_bytes(&self) -> usize {
        self.tail.lock().bytes.len()
    }

    /// Whether the file has been unlinked.
    pub(super) fn is_deleted(&self) -> bool {
        is_deleted(&self.file)
    }

    /// Writes all earlier appends to the file, where readers find them. Bytes that could not be written stay
    /// in memory for the next call.
    pub(super) fn write_out(&self) -> Result<()> {
        let mut writing = self.writing.lock();
        let at = {
            let mut tail = self.tail.lock();
            if tail.bytes.is_empty() {
                return Ok(());
            }
            std::mem::swap(&mut tail.bytes, &mut *writing);
            tail.leaving = writing.len() as u64;
            tail.written
        };
        let written = self.file.write_all_at(&writing, at);
        let mut tail = self.tail.lock();
        tail.leaving = 0;
        match written {
            Ok(()) => {
                tail.written += writing.len() as u64;
                drop(tail);
                writing.clear();
                if writing.capacity() > GATHER_BYTES / 4 {
                    *writing = Vec::new();
                }
                failpoint::hit("pack-written");
                Ok(())
            }
            Err(e) => {
                writing.append(&mut tail.bytes);
                std::mem::swap(&mut tail.bytes, &mut *writing);
                Err(ObjectError::io("append to pack", &self.path, e))
            }
        }
    }

    /// Writes the bytes before `end` to the file.
    pub(super) fn write_out_to(&self, end: u64) -> Result<()> {
        if self.tail.lock().written >= end { Ok(()) } else { self.write_out() }
    }

    /// Makes all earlier appends survive a power failure.
    pub(crate) fn sync(&self) -> Result<()> {
        self.write_out()?;
        let end = self.tail.lock().written;
        let mut synced = self.synced.lock();
        if synced.end < end {
            if synced.lost {
                return Err(ObjectError::Io {
                    operation: "sync again, after it failed, pack",
                    path: self.path.clone(),
                    source: std::io::Error::other("an earlier write was lost"),
                });
            }
            if let Err(e) = self.file.sync_data() {
                // The kernel reports a lost write once: a later sync that succeeds proves nothing.
                synced.lost = true;
                return Err(ObjectError::io("sync pack", &self.path, e));
            }
            failpoint::hit("pack-synced");
            synced.end = end;
        }
        if !synced.named {
            self.backend.make_name_durable(self.id)?;
            failpoint::hit("pack-durable");
            synced.named = true;
        }
        Ok(())
    }
}

impl Drop for LocalPack {
    fn drop(&mut self) {
        if self.referenced.load(Ordering::Acquire) {
            return;
        }
        self.open.forget(self.id);
        if let Err(error) = self.backend.delete(self.id) {
            tracing::warn!(
                object = %self.id, error = error_chain::one_line(&error),
                "deleting a pack that nothing points at"
            );
            self.backend.leave_behind();
        }
    }
}

/// The packs that this process appends to.
#[derive(Debug, Default)]
pub(super) struct GrowingPacks(Mutex<Vec<(ObjectId, Weak<LocalPack>)>>);

impl GrowingPacks {
    /// Registers a pack.
    pub(super) fn add(&self, pack: &Arc<LocalPack>) {
        let mut growing = self.0.lock();
        growing.retain(|(_, pack)| pack.strong_count() > 0);
        growing.push((pack.id(), Arc::downgrade(pack)));
    }

    /// Writes out the bytes before `end` that this process appended to a pack and still holds in memory.
    pub(super) fn write_out(&self, id: ObjectId, end: u64) -> Result<()> {
        let pack = {
            let growing = self.0.lock();
            growing.iter().find(|(known, _)| *known == id).and_then(|(_, pack)| pack.upgrade())
        };
        pack.map_or(Ok(()), |pack| pack.write_out_to(end))
    }
}
