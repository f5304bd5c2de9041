//! The handle of a volume's tree: what the operations of this folder, on inodes and on paths, are methods of.

use std::sync::Arc;

use super::content::INLINE_BYTES_MAX;
use super::shared::{InUse, Shared};
use super::takeover::RequestMark;
use crate::data::Codec;
use crate::error::{Error, Result};
use crate::failpoint;
use crate::meta::engine::{Durability, ReadTxn};
use crate::meta::versioned::{At, Reader, Writer};
use crate::name::VolumeSpec;
use crate::node::{Node, ROOT_INO, SNAPSHOTS_INO};
use crate::random::random_id;

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
    /// The id of this view as a writer; see [`super::watch`].
    writer: u64,
    /// The codec of file data that this view writes.
    codec: Arc<Codec>,
    /// The request that each write transaction completes.
    request: Option<RequestMark>,
}

impl View {
    pub(crate) fn new(
        in_use: &Arc<InUse>,
        shared: &Arc<Shared>,
        spec: VolumeSpec,
        volume: u64,
        at: At,
        codec: Codec,
    ) -> View {
        let writer = shared.session.id();
        View {
            _in_use: Arc::clone(in_use),
            shared: Arc::clone(shared),
            spec: Arc::new(spec),
            volume,
            at,
            writer,
            codec: Arc::new(codec),
            request: None,
        }
    }

    /// The same view for one request of the kernel, whose change is one write transaction.
    pub(crate) fn completing(&self, request: RequestMark) -> View {
        View { request: Some(request), ..self.clone() }
    }

    /// The same view, for no request.
    pub(super) fn unmarked(&self) -> View {
        View { request: None, ..self.clone() }
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
                    if let Some(request) = self.request {
                        request.complete(writer.txn(), session)?;
                    }
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
        if self.request.is_some() && result.is_ok() {
            // With the commit in the metadata file, and without an answer.
            failpoint::hit_after("request-completed", || drop(self.shared.meta.settle()));
        }
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
