//! Shared reply code of the request handlers: replies and errors, lifetimes of entries and attributes in the
//! kernel, and backing files for passthrough.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{Errno, Generation, INodeNo, ReplyData, ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyWrite};
use millrace_leaf::error_chain;

use super::passthrough::Backing;
use crate::error::{Error, Result};
use crate::fs::{OpenFlags, Page, ReadBuffer};
use crate::metrics;
use crate::mount::coherence::lifetime::{FOREVER, name_lifetime};
use crate::mount::coherence::stale_retry::{Found, Refused};
use crate::mount::coherence::{Coherence, Telling};
use crate::mount::convert::{Inodes, file_type};
use crate::mount::errno::errno;
use crate::mount::handles::{Handle, Handles, NO_HANDLE};
use crate::mount::locks::Locks;
use crate::mount::opening::Open;
use crate::mount::outcome;
use crate::node::{Attr, Node};

/// Lifetime of data that other mounts may just have changed, or that the mount cannot revoke.
pub(in crate::mount) const NOT_AT_ALL: Duration = Duration::ZERO;
/// Entries that one call of the view lists for `readdir`.
const ENTRIES_MAX: usize = 512;
/// The same for `readdirplus`, whose entries are larger by their attributes.
pub(in crate::mount) const ENTRIES_PLUS_MAX: usize = 160;
/// Smallest file that is handed to the kernel: for smaller ones the setup costs more than reading them.
const PASSTHROUGH_BYTES_MIN: u64 = 256 * 1024;

thread_local! {
    /// Read buffer of a serving thread: at most 256 KiB, the kernel's largest read.
    static READ_BUFFER: RefCell<ReadBuffer> = RefCell::default();
}

/// Parameters of one directory listing.
#[derive(Debug)]
pub(in crate::mount) struct Listing {
    pub(in crate::mount) node: Node,
    /// The handle of the open directory.
    pub(in crate::mount) number: u64,
    /// The listing begins behind this cursor.
    pub(in crate::mount) offset: u64,
    /// Most entries of a page.
    pub(in crate::mount) entries_max: usize,
    /// Whether the entries carry attributes.
    pub(in crate::mount) attrs: bool,
    /// The listing reads no further page after this moment.
    pub(in crate::mount) until: Option<Instant>,
}

/// The FUSE file system over a view.
#[derive(Debug)]
pub(in crate::mount) struct Adapter {
    pub(in crate::mount) handles: Arc<Handles>,
    pub(in crate::mount) locks: Arc<Locks>,
    pub(in crate::mount) coherence: Arc<Coherence>,
    pub(in crate::mount) inodes: Inodes,
    /// The mount requests passthrough from the kernel.
    pub(in crate::mount) asks_for_passthrough: bool,
    /// The kernel opens and closes files and directories without requests; reads carry no handle.
    pub(in crate::mount) without_messages: bool,
    /// The kernel can map files that are open with direct I/O.
    pub(in crate::mount) direct: bool,
}

impl Adapter {
    pub(in crate::mount) fn new(
        handles: Arc<Handles>,
        locks: Arc<Locks>,
        coherence: Arc<Coherence>,
        way: Open,
    ) -> Adapter {
        let inodes = Inodes::new(handles.view.root());
        let without_messages = way == Open::Pages && handles.view.is_snapshot();
        let asks_for_passthrough = way == Open::Passthrough;
        Adapter { handles, locks, coherence, inodes, asks_for_passthrough, without_messages, direct: false }
    }

    pub(in crate::mount) fn node(&self, ino: INodeNo) -> Node {
        self.inodes.node(ino)
    }

    /// How long the kernel may cache attributes that were read since a moment. With `named`, notes that the
    /// kernel knows the node by this name.
    pub(in crate::mount) fn lifetime(
        &self,
        attr: &Attr,
        moment: u64,
        named: Option<Telling<'_>>,
    ) -> Duration {
        if !attr.node.is_live() {
            return FOREVER;
        }
        let kept = self.coherence.answers(attr, moment, named);
        // Snapshots are created and deleted without a change notification for `.snapshots`.
        lifetime_of(kept && !self.handles.view.is_snapshots_dir(attr.node))
    }

    /// Makes later reads see every change that another process has reported as committed.
    pub(in crate::mount) fn catch_up(&self, node: Node) -> Result<()> {
        if node.is_live() { self.handles.view.catch_up() } else { Ok(()) }
    }

    /// The errno of an error, counted in the statistics. Failures of the mount (EIO, ENOSPC, EDQUOT) are
    /// logged; errors caused by the user are not.
    pub(in crate::mount) fn failed(&self, operation: &'static str, node: Node, error: &Error) -> Errno {
        let errno = errno(error);
        if errno == Errno::ENOENT {
            return outcome::refusal(errno);
        }
        outcome::failure(errno);
        metrics::MOUNT_ERRORS.inc();
        if [Errno::EIO, Errno::ENOSPC, Errno::EDQUOT].contains(&errno) {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            let volume = self.handles.view.spec();
            tracing::error!(
                error = error_chain::one_line(&error), cause, %volume, node = node.to_u64(), operation,
                "mount"
            );
        }
        errno
    }

    /// Counts and logs an error that came after the reply, so that the caller does not learn of it.
    fn failed_late(&self, operation: &'static str, node: Node, error: &Error) {
        outcome::failure(errno(error));
        metrics::MOUNT_ERRORS.inc();
        let cause = std::error::Error::source(error).map(ToString::to_string);
        let volume = self.handles.view.spec();
        tracing::error!(
            error = error_chain::one_line(&error), cause, %volume, node = node.to_u64(), operation,
            "a request failed after its reply"
        );
    }

    /// [`Adapter::failed`] for a request that names a node from an earlier lookup. When the node is gone,
    /// ESTALE makes the kernel look the path up again and find its replacement.
    pub(in crate::mount) fn failed_on(&self, operation: &'static str, node: Node, error: &Error) -> Errno {
        if error.is_not_found() {
            outcome::refusal(Errno::ESTALE)
        } else {
            self.failed(operation, node, error)
        }
    }

    pub(in crate::mount) fn entry(
        &self,
        operation: &'static str,
        (parent, name): (Node, &OsStr),
        moment: u64,
        result: Result<Attr>,
        reply: ReplyEntry,
    ) {
        match result {
            Ok(attr) => {
                let believed = !self.handles.view.is_snapshots_dir(parent);
                self.found_entry(Telling::locked((parent, name)), &attr, moment, believed, reply);
            }
            Err(error) => reply.error(self.failed(operation, parent, &error)),
        }
    }

    /// Replies with the entry of a name; `believed` tells whether the kernel may cache the name as well.
    pub(in crate::mount) fn found_entry(
        &self,
        named: Telling<'_>,
        attr: &Attr,
        moment: u64,
        believed: bool,
        reply: ReplyEntry,
    ) {
        let lifetime = self.lifetime(attr, moment, Some(named));
        let name_lifetime = if believed { lifetime.min(name_lifetime(attr)) } else { NOT_AT_ALL };
        reply.entry_with_ttls(&lifetime, &name_lifetime, &self.inodes.attr(attr), Generation(0));
    }

    pub(in crate::mount) fn empty(
        &self,
        operation: &'static str,
        node: Node,
        result: Result<()>,
        reply: ReplyEmpty,
    ) {
        match result {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.failed(operation, node, &error)),
        }
    }

    /// Answers a change of a node by its path, whose name was checked before. The node may have gone since: what
    /// the second walk has found (`held`) existed during the call and counts as changed, else the kernel walks
    /// the path again.
    pub(in crate::mount) fn changed_by_path(
        &self,
        operation: &'static str,
        (thread, node): (u32, Node),
        held: Option<Arc<Found>>,
        result: Result<()>,
        reply: ReplyEmpty,
    ) {
        match result {
            Err(error) if held.is_none() || !error.is_not_found() => {
                reply.error(self.failed_for(operation, (thread, Refused::Node, node), &error));
            }
            _ => reply.ok(),
        }
    }

    /// The backing file for passthrough of this open file, if it is a large file of a snapshot.
    pub(in crate::mount) fn backing(&self, handle: &Handle, size: u64) -> Option<Backing> {
        let registrar = self.handles.registrar()?;
        if !self.handles.has_passthrough() || handle.node.is_live() || size < PASSTHROUGH_BYTES_MIN {
            return None;
        }
        let image = match handle.file.image() {
            Ok(image) => image?,
            Err(error) => {
                tracing::warn!(
                    error = error_chain::one_line(&error),
                    node = handle.node.to_u64(),
                    "looking for a file's image"
                );
                return None;
            }
        };
        match Backing::open(registrar, &image) {
            Ok(backing) => Some(backing),
            Err(error) => {
                tracing::debug!(%error, "the kernel takes no file from us; reading for it");
                None
            }
        }
    }

    /// Replies with the bytes of a file in a range.
    pub(in crate::mount) fn read_bytes(
        &self,
        ino: INodeNo,
        number: u64,
        offset: u64,
        size: u32,
        reply: ReplyData,
    ) {
        READ_BUFFER.with_borrow_mut(|buffer| {
            let len = size as usize;
            let read = if number == NO_HANDLE {
                self.handles.stateless(self.node(ino)).and_then(|file| file.read_into(offset, len, buffer))
            } else {
                self.handles.get(number).and_then(|handle| {
                    handle.check_file()?;
                    handle.file.read_into(offset, len, buffer)
                })
            };
            match read {
                Ok(()) => {
                    outcome::moved(buffer.filled().len());
                    reply.data(buffer.filled());
                }
                Err(error) => reply.error(self.failed_on("read", self.node(ino), &error)),
            }
        });
    }

    /// Whether the kernel may write through to a file that is empty, without caching pages. That saves one copy
    /// of each byte, and the memory.
    pub(in crate::mount) fn streams(&self, flags: OpenFlags) -> bool {
        self.direct && flags.write && !flags.read && !flags.append
    }

    /// Writes, and replies as soon as the writer may continue.
    pub(in crate::mount) fn write_bytes(
        &self,
        (ino, number): (INodeNo, u64),
        offset: u64,
        data: &[u8],
        privileged: bool,
        reply: ReplyWrite,
    ) {
        let mut reply = Some(reply);
        // At most WRITE_BYTES_MAX.
        let len = data.len() as u32;
        let node = self.node(ino);
        let mut answer = || {
            if let Some(reply) = reply.take() {
                if !privileged {
                    self.coherence.drops_privileges(node);
                }
                outcome::moved(data.len());
                reply.written(len);
            }
        };
        let handle = self.handles.get(number);
        let written = handle.and_then(|handle| {
            handle.check_writes()?;
            self.handles.writes_through(number, &handle);
            handle.file.write_by(offset, data, privileged, &mut answer)?;
            Ok(handle.streams && self.handles.is_shared(handle.node))
        });
        match written {
            Ok(others) => {
                answer();
                if others {
                    self.coherence.outdates(self.node(ino));
                }
            }
            Err(error) => match reply {
                Some(reply) => reply.error(self.failed("write", node, &error)),
                None => self.failed_late("write", node, &error),
            },
        }
    }

    pub(in crate::mount) fn fill_directory(
        &self,
        node: Node,
        number: u64,
        offset: u64,
        reply: &mut ReplyDirectory,
    ) -> Result<()> {
        let listing = Listing { node, number, offset, entries_max: ENTRIES_MAX, attrs: false, until: None };
        self.each_page(&listing, |page, cursor, _| {
            page.with_cursors(cursor).any(|(entry, _, offset)| {
                reply.add(self.inodes.ino(entry.node), offset, file_type(entry.kind), &entry.name)
            })
        })
    }

    /// Passes a directory to `show` page by page, until `show` returns that no more fits. Each page comes with
    /// the cursor before it and a moment before it was read.
    pub(in crate::mount) fn each_page(
        &self,
        listing: &Listing,
        mut show: impl FnMut(&Page, u64, u64) -> bool,
    ) -> Result<()> {
        let Listing { node, number, offset, entries_max, attrs, until } = *listing;
        if self.handles.is_at_end(number, offset) {
            return Ok(());
        }
        let mut cursor = offset;
        loop {
            let moment = self.coherence.moment();
            let page = self.handles.view.read_page(node, cursor, entries_max, attrs)?;
            if show(&page, cursor, moment) {
                return Ok(());
            }
            if let Some((last, _)) = page.entries.last() {
                cursor = last.cursor;
            }
            if page.is_last {
                self.handles.ends_at(number, cursor);
            }
            let is_late = until.is_some_and(|until| Instant::now() >= until);
            if page.is_last || page.entries.is_empty() || is_late {
                return Ok(());
            }
        }
    }
}

/// The lifetime of attributes that the kernel may cache, or may not.
pub(in crate::mount) fn lifetime_of(kept: bool) -> Duration {
    if kept { FOREVER } else { NOT_AT_ALL }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io;
    use std::path::Path;

    use parking_lot::Mutex;

    use super::*;
    use crate::fs::tests::setup;
    use crate::mount::observe::watch::Watch;

    /// Collects log lines.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn an_error_after_the_reply_is_counted_and_logged() {
        let (_home, _datafs, view) = setup();
        let handles = Arc::new(Handles::new(view.clone()));
        let coherence = Arc::new(Coherence::new(&view, Inodes::new(view.root())));
        let watch = Arc::new(Watch::new("v", Path::new("/none"), &handles));
        let locks = Arc::new(Locks::new(Arc::clone(&coherence), watch));
        let adapter = Adapter::new(handles, locks, coherence, Open::Pages);
        let lines = Lines::default();
        let writer = lines.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone()).finish();
        outcome::reset();
        tracing::subscriber::with_default(subscriber, || {
            adapter.failed_late(
                "write",
                view.root(),
                &Error::Busy { place: "a server".into(), waited_ms: 7 },
            );
        });
        let text = String::from_utf8(lines.0.lock().clone()).unwrap();
        assert!(
            text.contains("ERROR") && text.contains("a server") && text.contains("after its reply"),
            "{text}"
        );
        assert!(outcome::get().failed);
    }
}
