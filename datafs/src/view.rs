//! A view of a volume: the live tree or a snapshot, by path, with its application keys.
//!
//! The inode level, which the mount uses, is in `fs/`.

use std::sync::Arc;

use bytes::Bytes;

use crate::data::Codec;
use crate::datafs::{Datafs, InUse, Shared};
use crate::error::{Error, Result};
use crate::fs::OpenFile;
use crate::fs::content::INLINE_BYTES_MAX;
use crate::fs::path::{components, split_last};
use crate::fs::types::OpenFlags;
use crate::meta::engine::{Durability, Order, ReadTxn};
use crate::meta::keys;
use crate::meta::versioned::{At, Reader, Records as _, Writer};
use crate::name::VolumeSpec;
use crate::node::{Attr, Node, ROOT_INO, SNAPSHOTS_INO};
use crate::publish::{Publish, check_key};
use crate::random::random_id;

/// Largest file that [`View::read_file`] reads.
pub const READ_FILE_BYTES_MAX: u64 = 1 << 30;
/// Entries that [`View::list`] reads in one transaction.
const LIST_PAGE: usize = 1_024;
/// Attempts to open a path whose file is replaced again and again before it can be read.
const OPEN_ATTEMPTS: u32 = 100;
/// Keys that [`View::key_scan`] reads per page.
const KEY_PAGE: usize = 1_024;

/// Attributes of a file, as [`View::stat`] returns them.
pub type Stat = Attr;

/// An entry of a directory, as [`View::list`] returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirEntry {
    /// Its name, without the path.
    pub name: String,
    /// Its attributes; those of a symbolic link itself.
    pub stat: Stat,
}

/// A volume, live or at a snapshot. A clone is the same view. All methods block and may be called from any
/// thread.
///
/// Paths are UTF-8, separated by `/`, relative to the root of the volume with or without a leading `/`. Empty
/// components and `.` are skipped, `..` is refused. Symbolic links are followed inside the volume. Files
/// whose names are not UTF-8 are only reachable at the inode level.
///
/// Durability: [`View::write_file`] and [`View::publish`] are durable when they return. Other changes are
/// visible to every process when they return. They survive the death of this process a few milliseconds
/// later; if it dies before, the latest ones are lost, but none before them. They become durable with the
/// next durable change or [`View::sync`].
#[derive(Debug, Clone)]
pub struct View {
    // Dropped first.
    _in_use: Arc<InUse>,
    pub(crate) shared: Arc<Shared>,
    spec: Arc<VolumeSpec>,
    pub(crate) volume: u64,
    at: At,
    /// The id of this view as a writer; see [`crate::watch`].
    writer: u64,
    /// The codec of file data that this view writes.
    codec: Arc<Codec>,
}

impl View {
    pub(crate) fn new(datafs: &Datafs, spec: VolumeSpec, volume: u64, at: At, codec: Codec) -> View {
        let shared = Arc::clone(&datafs.shared);
        let writer = shared.session.id();
        View {
            _in_use: Arc::clone(&datafs.in_use),
            shared,
            spec: Arc::new(spec),
            volume,
            at,
            writer,
            codec: Arc::new(codec),
        }
    }

    /// The same view with a separate writer id.
    pub(crate) fn as_writer(&self) -> Result<View> {
        Ok(View { writer: random_id()?, ..self.clone() })
    }

    /// The writer id, which distinguishes its changes.
    pub(crate) fn writer(&self) -> u64 {
        self.writer
    }

    /// The codec of file data that this view writes.
    pub(crate) fn codec(&self) -> &Codec {
        &self.codec
    }

    /// Most bytes of a file that are stored in the metadata; 0 for an encrypted volume, as metadata is not
    /// encrypted.
    pub(crate) fn inline_bytes_max(&self) -> usize {
        if self.codec.key.is_some() { 0 } else { INLINE_BYTES_MAX }
    }

    /// The volume and snapshot of this view.
    pub fn spec(&self) -> &VolumeSpec {
        &self.spec
    }

    /// Whether this is a view of a snapshot, whose content never changes.
    pub fn is_snapshot(&self) -> bool {
        self.at != At::Live
    }

    /// The root directory.
    pub fn root(&self) -> Node {
        match self.at {
            At::Live => Node::LIVE_ROOT,
            At::Snapshot(snapshot) => Node { snapshot, ino: ROOT_INO },
        }
    }

    /// Attributes of the entry that a path leads to; symbolic links are followed.
    pub fn stat(&self, path: &str) -> Result<Stat> {
        self.resolve(path)
    }

    /// The entries of a directory, sorted by name, without `.` and `..`. All are in memory, about 250 bytes
    /// each. For a large directory, [`View::readdir_attrs`] returns pages, in another order.
    pub fn list(&self, path: &str) -> Result<Vec<DirEntry>> {
        let directory = self.resolve(path)?;
        let mut entries = Vec::new();
        let mut cursor = 0;
        loop {
            let page = self.readdir_attrs(directory.node, cursor, LIST_PAGE)?;
            let Some((last, _)) = page.last() else { break };
            cursor = last.cursor;
            for (entry, stat) in page {
                match entry.name.into_string() {
                    Ok(name) if name != "." && name != ".." => entries.push(DirEntry { name, stat }),
                    _ => {}
                }
            }
        }
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(entries)
    }

    /// Reads a whole file, at most [`READ_FILE_BYTES_MAX`].
    pub fn read_file(&self, path: &str) -> Result<Bytes> {
        self.with_file(path, |file| {
            let size = file.attr()?.size;
            if size > READ_FILE_BYTES_MAX {
                return Err(Error::TooLarge { what: "file read at once", max: READ_FILE_BYTES_MAX });
            }
            file.read_at(0, size as usize)
        })
    }

    /// Opens the file that a path leads to and runs `work` with it. Retries when the file was replaced
    /// between the two, so that an atomic replacement is never seen as a missing file.
    pub(crate) fn with_file<T>(&self, path: &str, mut work: impl FnMut(OpenFile) -> Result<T>) -> Result<T> {
        for _ in 0..OPEN_ATTEMPTS {
            let node = self.resolve(path)?.node;
            match self.open(node, OpenFlags::READ).and_then(&mut work) {
                Err(Error::NotFound { .. }) => {}
                other => return other.map_err(|e| name_it(e, path)),
            }
        }
        Err(Error::Stale { what: format!("each version of {path} that was looked up") })
    }

    /// Writes a whole file atomically: a reader of the path sees the old or the new file. Missing parent
    /// directories are created. Durable when it returns.
    pub fn write_file(&self, path: &str, bytes: &[u8]) -> Result<()> {
        let mut staged = self.stage()?;
        staged.append(bytes)?;
        self.publish(Publish::new().file(path, staged.finish()?))
    }

    /// Creates a directory and its missing parents.
    pub fn create_dir_all(&self, path: &str) -> Result<()> {
        let parts = components(path)?;
        let spare = self.spare_inos(parts.len() as u64)?;
        self.write(Durability::Relaxed, |writer| {
            let mut spare = spare.clone();
            crate::publish::make_directories(writer, &parts, &mut spare).map(drop)
        })
    }

    /// Removes a file or symbolic link (the link itself).
    pub fn remove_file(&self, path: &str) -> Result<()> {
        let (parent, name) = split_last(path)?;
        let parent = self.resolve(parent)?;
        self.unlink(parent.node, name.as_ref()).map_err(|e| name_it(e, path))
    }

    /// Removes an empty directory.
    pub fn remove_dir(&self, path: &str) -> Result<()> {
        let (parent, name) = split_last(path)?;
        let parent = self.resolve(parent)?;
        self.rmdir(parent.node, name.as_ref()).map_err(|e| name_it(e, path))
    }

    /// Moves a file or directory atomically, replacing a file or an empty directory at the target.
    /// The target's parent must exist.
    pub fn rename_path(&self, from: &str, to: &str) -> Result<()> {
        let (from_parent, from_name) = split_last(from)?;
        let (to_parent, to_name) = split_last(to)?;
        let from_parent = self.resolve(from_parent)?.node;
        let to_parent = self.resolve(to_parent)?.node;
        self.rename(from_parent, from_name.as_ref(), to_parent, to_name.as_ref(), false)
            .map_err(|e| name_it(e, from))
    }

    /// Makes all earlier changes durable.
    pub fn sync(&self) -> Result<()> {
        self.shared.meta.sync()
    }

    /// The value of an application key; in a snapshot as of the snapshot.
    pub fn key_get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check_key(key)?;
        self.read(self.root(), |reader| reader.get(&keys::application(key)))
    }

    /// All application keys with a prefix and their values, in order, read in one transaction.
    pub fn key_scan(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>> {
        let start = keys::applications(prefix);
        let end = keys::after_prefix(&start);
        self.read(self.root(), |reader| {
            let mut found = Vec::new();
            let mut start = start.clone();
            loop {
                let page = reader.scan(&start, &end, Order::Ascending, KEY_PAGE)?;
                let more = page.len() == KEY_PAGE;
                for (record, value) in page {
                    let key = keys::application_name(&record)
                        .ok_or_else(|| Error::corrupt("application key", "it is not UTF-8"))?;
                    found.push((key.to_owned(), value));
                    start = record;
                }
                if !more {
                    return Ok(found);
                }
                start.push(0);
            }
        })
    }

    /// Waits until reads see every change that any process was answered before the call.
    pub(crate) fn catch_up(&self) -> Result<()> {
        self.shared.meta.barrier()
    }

    /// The tree that a node is in.
    fn at_of(&self, node: Node) -> Result<At> {
        let at = if node.is_live() { At::Live } else { At::Snapshot(node.snapshot) };
        if self.at == At::Live || self.at == at {
            Ok(at)
        } else {
            Err(Error::not_found(format!("node {}", node.to_u64())))
        }
    }

    /// Whether a node is the `.snapshots` directory.
    pub(crate) fn is_snapshots_dir(&self, node: Node) -> bool {
        self.at == At::Live && node == Node { snapshot: 0, ino: SNAPSHOTS_INO }
    }

    /// Runs `body` in a read transaction in the tree of a node.
    pub(crate) fn read<T>(
        &self,
        node: Node,
        mut body: impl FnMut(&mut Reader<'_>) -> Result<T>,
    ) -> Result<T> {
        let at = self.at_of(node)?;
        let mut body = |txn: &mut dyn ReadTxn| body(&mut Reader::open(txn, self.volume, at)?);
        if at != At::Live {
            // A snapshot does not change, so read without waiting for other processes, unless it is too new
            // for that.
            match self.shared.meta.view_recent(&mut body) {
                Err(Error::Stale { .. }) => {}
                read => return read,
            }
        }
        self.shared.meta.view(body)
    }

    /// Runs `body` in a write transaction of the live tree.
    pub(crate) fn write<T>(
        &self,
        durability: Durability,
        mut body: impl FnMut(&mut Writer<'_>) -> Result<T>,
    ) -> Result<T> {
        if self.is_snapshot() {
            return Err(Error::ReadOnly { what: format!("snapshot {}", self.spec) });
        }
        let session = self.shared.session.id();
        let watched = self.shared.watchers.want(self.volume, self.writer);
        let mut changed = Vec::new();
        let mut run = || {
            self.shared.meta.transact(durability, |txn| {
                Writer::run(txn, self.volume, session, |writer| {
                    writer.act_as(self.writer, watched);
                    let result = body(writer)?;
                    changed = writer.take_changed();
                    Ok(result)
                })
            })
        };
        let result = match run() {
            // Collecting removed files may free space for new names.
            Err(Error::NoSpace { .. }) if self.shared.make_room() => run(),
            done => done,
        };
        // A commit with unknown outcome may have taken place.
        if watched && result.as_ref().err().is_none_or(|error| !error.is_definite()) {
            self.shared.watchers.tell(self.volume, self.writer, changed);
        }
        result
    }

    /// The inode number of a node that may be changed; an error for a read-only node.
    pub(crate) fn writable(&self, node: Node) -> Result<u64> {
        if self.is_snapshot() || !node.is_live() {
            return Err(Error::ReadOnly { what: format!("a snapshot of volume {}", self.spec.volume) });
        }
        if self.is_snapshots_dir(node) {
            return Err(Error::ReadOnly { what: "directory .snapshots".into() });
        }
        Ok(node.ino)
    }

    /// Reserves inode numbers for a transaction that may create `count` inodes.
    pub(crate) fn spare_inos(&self, count: u64) -> Result<std::ops::Range<u64>> {
        self.writable(self.root())?;
        self.shared.allocate_inos(self.volume, count)
    }
}

/// Puts the path into an error that only knows a name or number.
pub(crate) fn name_it(error: Error, path: &str) -> Error {
    let what = path.to_owned();
    match error {
        Error::NotFound { .. } => Error::NotFound { what },
        Error::IsADirectory { .. } => Error::IsADirectory { what },
        Error::NotADirectory { .. } => Error::NotADirectory { what },
        Error::NotEmpty { .. } => Error::NotEmpty { what },
        other => other,
    }
}
