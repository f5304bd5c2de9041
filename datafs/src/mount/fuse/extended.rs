//! Handlers of the less common requests: extended attributes, allocation, holes, copies, privileges, and
//! directory listings with attributes.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{Errno, Generation, ReplyDirectoryPlus, ReplyEmpty, ReplyLseek, ReplyWrite, ReplyXattr, Request};

use super::answer::{Adapter, ENTRIES_PLUS_MAX, Listing, NOT_AT_ALL, lifetime_of};
use crate::error::{Error, Result};
use crate::fs::acl::{self, is_acl};
use crate::fs::{Allocate, OpenFile, OpenFlags, SetAttr, SetXattr};
use crate::mount::caller::is_in_group;
use crate::mount::coherence::inode_table::{NO_LIST, list_stamp};
use crate::mount::coherence::lifetime::{FOREVER, name_lifetime};
use crate::mount::coherence::stale_retry::{Arrival, Found};
use crate::mount::coherence::{Kept, Telling};
use crate::mount::handover::resent::completing;
use crate::mount::outcome;
use crate::node::{Attr, Node};

/// Most bytes that one request copies: the reply has 32 bits for the length.
const COPY_BYTES_MAX: u64 = 1 << 30;
/// A listing replies with its first entries after this time, however few they are. In a huge directory the
/// kernel asks for 780 entries with attributes, each in another page of the database: 14 to 48 ms.
const FIRST_ENTRIES_MAX: Duration = Duration::from_millis(2);

/// Whether the caller may change a file without clearing its set-user-ID and set-group-ID bits.
pub(in crate::mount) fn is_privileged(request: &Request) -> bool {
    request.uid() == 0
}

impl Adapter {
    pub(in crate::mount) fn set_xattr(
        &self,
        request: &Request,
        (node, held): (Node, Option<Arc<Found>>),
        name: &OsStr,
        value: &[u8],
        flags: i32,
        reply: ReplyEmpty,
    ) {
        let by = (request.pid(), node);
        if is_acl(name) {
            // If this process may not inspect the thread, the group counts as not its own.
            let in_group = |group| is_in_group(request, group).unwrap_or(false);
            let keeps_group = is_privileged(request)
                || self.handles.view.getattr(node).is_ok_and(|attr| in_group(attr.gid));
            let set = self.handles.view.acl_set(node, name, value, keeps_group);
            self.coherence.drops_list(node);
            return self.changed_by_path("setxattr", by, held, set, reply);
        }
        let how = match flags {
            0 => SetXattr::Any,
            libc::XATTR_CREATE => SetXattr::Create,
            libc::XATTR_REPLACE => SetXattr::Replace,
            _ => return reply.error(outcome::refusal(Errno::EINVAL)),
        };
        let set = completing(&self.handles, request).xattr_set(node, name, value, how);
        self.changed_by_path("setxattr", by, held, set, reply);
    }

    pub(in crate::mount) fn get_xattr(&self, node: Node, name: &OsStr, size: u32, reply: ReplyXattr) {
        let found = self.handles.view.xattr_get(node, name);
        if name == acl::ACCESS
            && node.is_live()
            && let Some(list) = stamp_of(&found)
        {
            // The kernel caches the list and checks access by it.
            self.coherence.tells_list(node, list);
        }
        match found {
            Ok(value) => answer_xattr(&value, size, reply),
            Err(Error::NoAttribute { .. }) => reply.error(outcome::refusal(Errno::ENODATA)),
            Err(Error::Unsupported(_)) => reply.error(outcome::refusal(Errno::EOPNOTSUPP)),
            Err(_) if self.coherence.removed(node).is_some() => {
                reply.error(outcome::refusal(Errno::ENODATA));
            }
            Err(error) => reply.error(self.failed("getxattr", node, &error)),
        }
    }

    /// Lists the names of extended attributes; `trusted.` names for root only.
    pub(in crate::mount) fn list_xattrs(&self, request: &Request, node: Node, size: u32, reply: ReplyXattr) {
        match self.handles.view.xattr_list(node) {
            Ok(names) => {
                let mut list = Vec::new();
                for name in names.iter().map(|name| name.as_bytes()) {
                    if request.uid() == 0 || !name.starts_with(b"trusted.") {
                        list.extend_from_slice(name);
                        list.push(0);
                    }
                }
                answer_xattr(&list, size, reply);
            }
            Err(_) if self.coherence.removed(node).is_some() => answer_xattr(&[], size, reply),
            Err(error) => reply.error(self.failed("listxattr", node, &error)),
        }
    }

    pub(in crate::mount) fn allocate(
        &self,
        request: &Request,
        number: u64,
        (offset, length): (u64, u64),
        mode: i32,
    ) -> Result<()> {
        let handle = self.handles.get(number)?;
        if !handle.writes {
            return Err(Error::BadHandle("writing"));
        }
        handle.check_writes()?;
        let zero_keep = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let how = match mode {
            0 => Allocate::Extend,
            libc::FALLOC_FL_KEEP_SIZE => Allocate::KeepSize,
            libc::FALLOC_FL_ZERO_RANGE => Allocate::Zero,
            mode if mode == zero_keep => Allocate::ZeroKeepSize,
            mode if mode == punch => Allocate::PunchHole,
            _ => return Err(Error::Unsupported("this way of allocating")),
        };
        self.handles.view.allocate(handle.node, offset, length, how)?;
        self.drop_privileges(request, handle.node)
    }

    pub(in crate::mount) fn seek(&self, node: Node, offset: i64, whence: i32, reply: ReplyLseek) {
        let Ok(from) = u64::try_from(offset) else { return reply.error(outcome::refusal(Errno::ENXIO)) };
        let found = match whence {
            libc::SEEK_DATA => self.handles.view.seek_data(node, from),
            libc::SEEK_HOLE => self.handles.view.seek_hole(node, from),
            _ => return reply.error(outcome::refusal(Errno::EINVAL)),
        };
        match found.map(|found| found.and_then(|at| i64::try_from(at).ok())) {
            Ok(Some(at)) => reply.offset(at),
            Ok(None) => reply.error(outcome::refusal(Errno::ENXIO)),
            Err(error) => reply.error(self.failed("lseek", node, &error)),
        }
    }

    pub(in crate::mount) fn copy_range(
        &self,
        request: &Request,
        (from, offset): (u64, u64),
        (to, target_offset): (u64, u64),
        len: u64,
        reply: ReplyWrite,
    ) {
        let copy = || -> Result<(u64, Node)> {
            let (source, target) = (self.handles.get(from)?, self.handles.get(to)?);
            target.check_writes()?;
            self.handles.writes_through(to, &target);
            let copied = source.file.copy_to(offset, &target.file, target_offset, len.min(COPY_BYTES_MAX))?;
            self.drop_privileges(request, target.node)?;
            Ok((copied, target.node))
        };
        match copy() {
            // At most COPY_BYTES_MAX.
            Ok((copied, _)) => {
                outcome::moved(copied as usize);
                reply.written(copied as u32);
            }
            Err(error) => reply.error(self.failed("copy_file_range", self.handles.view.root(), &error)),
        }
    }

    /// Clears set-user-ID and set-group-ID bits after a change by an unprivileged user, where the kernel leaves
    /// that to the mount.
    fn drop_privileges(&self, request: &Request, node: Node) -> Result<()> {
        if is_privileged(request) || self.handles.view.getattr(node)?.mode & 0o6000 == 0 {
            return Ok(());
        }
        let set = SetAttr { drop_privileges: true, ..SetAttr::default() };
        self.handles.view.setattr(node, &set)?;
        self.coherence.drops_privileges(node);
        Ok(())
    }

    /// Opens a file, unless its path is stale. Truncation by an unprivileged user also clears privilege bits.
    /// `arrival` tells how the thread reached the file, `executes` that the kernel opens it to run it.
    pub(in crate::mount) fn open_file(
        &self,
        request: &Request,
        node: Node,
        flags: OpenFlags,
        (arrival, executes): (Arrival, bool),
    ) -> Result<(OpenFile, Attr, Kept)> {
        let (file, attr) = self.handles.view.open_with_attr(node, OpenFlags { truncate: false, ..flags })?;
        let kept = match node.is_live() {
            true => {
                let list = self.list_of(&attr)?;
                let allows = || executes || !self.mode_denies(request, &attr, flags);
                self.coherence.opens((&attr, list), (request.pid(), arrival), !flags.truncate, allows)
            }
            false => Kept::Pages,
        };
        if !flags.truncate || matches!(kept, Kept::Stale | Kept::Denied) {
            return Ok((file, attr, kept));
        }
        let drop_privileges = !is_privileged(request);
        let set = SetAttr { size: Some(0), drop_privileges, ..SetAttr::default() };
        let attr = self.handles.view.setattr(node, &set)?;
        if drop_privileges {
            self.coherence.drops_privileges(node);
        }
        Ok((file, attr, kept))
    }

    /// The stamp of a file's access control list.
    fn list_of(&self, attr: &Attr) -> Result<u32> {
        if attr.xattrs == 0 {
            return Ok(NO_LIST);
        }
        let found = self.handles.view.xattr_get(attr.node, acl::ACCESS.as_ref());
        match stamp_of(&found) {
            Some(list) => Ok(list),
            None => found.map(|_| NO_LIST),
        }
    }

    /// Lists a directory with the attributes of its entries, which the kernel may then cache.
    pub(in crate::mount) fn fill_directory_plus(
        &self,
        node: Node,
        number: u64,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<()> {
        let names_kept = !self.handles.view.is_snapshots_dir(node);
        let until = (offset == 0).then(|| Instant::now() + FIRST_ENTRIES_MAX);
        let listing = Listing { node, number, offset, entries_max: ENTRIES_PLUS_MAX, attrs: true, until };
        self.each_page(&listing, |page, cursor, moment| {
            let mut answering = (names_kept && node.is_live()).then(|| self.coherence.answering(moment));
            for (entry, attr, offset) in page.with_cursors(cursor) {
                let Some(attr) = attr else { continue };
                let ino = self.inodes.ino(entry.node);
                // The kernel ignores these two entries.
                let dots = entry.name == "." || entry.name == "..";
                let lifetime = match &mut answering {
                    _ if dots || !names_kept => NOT_AT_ALL,
                    None => FOREVER,
                    Some(answering) => {
                        let kept =
                            answering.note(attr, Some(Telling::locked((node, entry.name.as_os_str()))));
                        lifetime_of(kept).min(name_lifetime(attr))
                    }
                };
                let shown = self.inodes.attr(attr);
                if reply.add(ino, offset, &entry.name, &lifetime, &shown, Generation(0)) {
                    drop(answering);
                    if attr.node.is_live() && names_kept && !dots {
                        self.coherence.untell(attr.node);
                    }
                    return true;
                }
            }
            false
        })
    }
}

/// The stamp of an access control list from a read; `None` if the read failed.
fn stamp_of(found: &Result<Vec<u8>>) -> Option<u32> {
    match found {
        Ok(value) => Some(list_stamp(value)),
        Err(Error::NoAttribute { .. }) => Some(NO_LIST),
        Err(_) => None,
    }
}

/// Replies with the size of a value, or with the value if it fits.
fn answer_xattr(bytes: &[u8], size: u32, reply: ReplyXattr) {
    // At most 64 KiB.
    let len = bytes.len() as u32;
    match size {
        0 => reply.size(len),
        size if size < len => reply.error(outcome::refusal(Errno::ERANGE)),
        _ => reply.data(bytes),
    }
}
