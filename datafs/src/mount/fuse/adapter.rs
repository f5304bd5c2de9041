//! The FUSE request handlers of a mount: each kernel request becomes one call of the view, whose result becomes
//! the reply.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::SystemTime;

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier,
    RenameFlags, ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use millrace_leaf::error_chain;

use super::answer::{Adapter, NOT_AT_ALL};
use super::extended::is_privileged;
use super::passthrough::stack_depth;
use super::retry::{Created, Creation};
use crate::error::Error;
use crate::fs::acl::is_acl;
use crate::fs::{FileLock, LOCK_END_MAX, LockFamily, Owner, SetAttr};
use crate::metrics;
use crate::mount::coherence::lifetime::name_lifetime;
use crate::mount::coherence::stale_retry::Refused;
use crate::mount::coherence::{Kept, Telling};
use crate::mount::convert::{is_execution, kind_of_mode, open_flags, set_time};
use crate::mount::handles::{Handle, Kept as KeptHandle, Registered};
use crate::mount::handover::resent::{completing, is_completed, number_of, resent};
use crate::mount::locks::Wish;
use crate::mount::locks::request::is_flock;
use crate::mount::outcome;

/// Largest write request of the kernel.
const WRITE_BYTES_MAX: u32 = 1024 * 1024;
/// Most bytes of a request, with the kernel's allowance for its header. Only a list of nodes to forget may be longer.
pub(super) const REQUEST_BYTES_MAX: usize = WRITE_BYTES_MAX as usize + 4096;
/// Background requests (read-ahead) that the kernel may have in flight.
const BACKGROUND_MAX: u16 = 64;

fn owner(request: &Request) -> Owner {
    Owner { uid: request.uid(), gid: request.gid() }
}

/// The lock that a request names.
fn wanted(request: &Request, owner: LockOwner, (start, end): (u64, u64), kind: i32, pid: u32) -> FileLock {
    let family = if is_flock(request, owner.0) { LockFamily::Flock } else { LockFamily::Fcntl };
    let owner = crate::fs::LockOwner { family, id: owner.0 };
    FileLock { owner, exclusive: kind == libc::F_WRLCK, start, end: end.min(LOCK_END_MAX), pid }
}

impl Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Both values are within the bounds that these setters check.
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        if let Err(most) = config.set_max_readahead(WRITE_BYTES_MAX) {
            let _ = config.set_max_readahead(most);
        }
        // Optional optimizations: the kernel may support any of them or none.
        for wish in [
            InitFlags::FUSE_ATOMIC_O_TRUNC,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_CACHE_SYMLINKS,
            // Without it the kernel requests an extended attribute before each write.
            InitFlags::FUSE_HANDLE_KILLPRIV_V2,
            InitFlags::FUSE_DO_READDIRPLUS | InitFlags::FUSE_READDIRPLUS_AUTO,
            // A directory's default access control list replaces the umask, so the view applies the umask, not
            // the kernel.
            InitFlags::FUSE_POSIX_ACL | InitFlags::FUSE_DONT_MASK,
        ] {
            let _ = config.add_capabilities(wish);
        }
        let wish = if self.handles.view.is_snapshot() {
            // The kernel splits a large direct read into several requests, which several threads serve at once.
            // Not for writable mounts: after an asynchronous direct write the kernel keeps pages that a reader
            // has filled during the write.
            InitFlags::FUSE_ASYNC_DIO
        } else {
            InitFlags::FUSE_POSIX_LOCKS | InitFlags::FUSE_FLOCK_LOCKS
        };
        let _ = config.add_capabilities(wish);
        if self.asks_for_passthrough {
            let granted = config.add_capabilities(InitFlags::FUSE_PASSTHROUGH).is_ok()
                && config.set_max_stack_depth(stack_depth(&self.handles.view)).is_ok();
            self.handles.set_passthrough(granted);
        }
        let expires = config.add_capabilities(InitFlags::FUSE_HAS_EXPIRE_ONLY).is_ok();
        self.coherence.set_expires(expires);
        self.direct = config.add_capabilities(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP).is_ok();
        if self.without_messages {
            let wish = InitFlags::FUSE_NO_OPEN_SUPPORT | InitFlags::FUSE_NO_OPENDIR_SUPPORT;
            self.without_messages = config.add_capabilities(wish).is_ok();
        }
        Ok(())
    }

    fn destroy(&mut self) {
        if let Err(error) = self.handles.flush_all() {
            tracing::error!(error = error_chain::one_line(&error), "flushing at the end of a mount");
        }
    }

    fn lookup(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let parent = self.node(parent);
        let moment = self.coherence.moment();
        if self.without_messages {
            let found = self.handles.lookup_stateless(parent, name);
            return self.entry("lookup", (parent, name), moment, found, reply);
        }
        if !parent.is_live() {
            let found = self.handles.view.lookup(parent, name);
            return self.entry("lookup", (parent, name), moment, found, reply);
        }
        match self.find(request.pid(), parent, name) {
            Ok(Some((attr, believed))) => {
                let believed = believed && !self.handles.view.is_snapshots_dir(parent);
                let named = Telling::looked_up((parent, name), request.pid());
                self.found_entry(named, &attr, moment, believed, reply);
            }
            Ok(None) => reply.error(outcome::refusal(Errno::ENOENT)),
            Err(error) => {
                reply.error(self.failed_for("lookup", (request.pid(), Refused::Name, parent), &error))
            }
        }
    }

    fn forget(&self, _request: &Request, ino: INodeNo, lookups: u64) {
        let node = self.node(ino);
        if node.is_live() {
            self.coherence.forget(node, lookups);
        }
    }

    fn getattr(&self, request: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        let node = self.node(ino);
        let moment = self.coherence.moment();
        match self.handles.view.getattr(node) {
            Ok(attr) => reply.attr(&self.lifetime(&attr, moment, None), &self.inodes.attr(&attr)),
            Err(error) => {
                let removed = || self.coherence.removed(node).map(|removed| removed.attr);
                let found = self.coherence.retries.found(request.pid(), node).map(|found| found.attr);
                match found.or_else(removed) {
                    Some(attr) => reply.attr(&NOT_AT_ALL, &self.inodes.attr(&attr)),
                    None => {
                        let wanted = (request.pid(), Refused::Node, node);
                        reply.error(self.failed_for("getattr", wanted, &error));
                    }
                }
            }
        }
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let node = self.node(ino);
        let set = SetAttr {
            mode: mode.map(|m| m & 0o7777),
            uid,
            gid,
            size,
            atime: atime.map(set_time),
            mtime: mtime.map(set_time),
            drop_privileges: size.is_some() && !is_privileged(request),
        };
        let held = match fh {
            Some(_) => None,
            None => match self.check_named("setattr", request.pid(), node, true) {
                Ok(held) => held,
                Err(errno) => return reply.error(errno),
            },
        };
        let moment = self.coherence.moment();
        match self.handles.view.setattr(node, &set) {
            Ok(attr) => {
                let lifetime = self.lifetime(&attr, moment, None);
                self.coherence.changes_attributes(node);
                reply.attr(&lifetime, &self.inodes.attr(&attr));
            }
            Err(error) => match held.filter(|_| error.is_not_found()) {
                Some(found) => reply.attr(&NOT_AT_ALL, &self.inodes.attr(&found.attr)),
                None => reply.error(self.failed_for("setattr", (request.pid(), Refused::Node, node), &error)),
            },
        }
    }

    fn readlink(&self, request: &Request, ino: INodeNo, reply: ReplyData) {
        let node = self.node(ino);
        let wanted = (request.pid(), Refused::Node, node);
        match self.handles.view.readlink(node) {
            Ok(target) => reply.data(target.as_bytes()),
            Err(error) => {
                let removed = || self.coherence.removed(node)?.target;
                let found = self.coherence.retries.found(request.pid(), node);
                match found.and_then(|found| found.target.clone()).or_else(removed) {
                    Some(target) => reply.data(target.as_bytes()),
                    None => reply.error(self.failed_for("readlink", wanted, &error)),
                }
            }
        }
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let parent = self.node(parent);
        let moment = self.coherence.moment();
        let made = match kind_of_mode(mode) {
            Some(_) if is_completed(&self.handles, request) => self.handles.view.lookup(parent, name),
            Some(kind) => {
                let mode = (mode & 0o7777, umask);
                completing(&self.handles, request).mknod_masked(
                    parent,
                    name,
                    kind,
                    mode,
                    rdev,
                    owner(request),
                )
            }
            None => Err(Error::Invalid(format!("mode {mode:o} is of no kind of file"))),
        };
        self.entry("mknod", (parent, name), moment, made, reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let parent = self.node(parent);
        let moment = self.coherence.moment();
        let made = match is_completed(&self.handles, request) {
            true => self.handles.view.lookup(parent, name),
            false => {
                let view = completing(&self.handles, request);
                view.mkdir_masked(parent, name, mode & 0o7777, umask, owner(request))
            }
        };
        self.entry("mkdir", (parent, name), moment, made, reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.unlink_name(request, (self.node(parent), name), reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.rmdir_name(request, (self.node(parent), name), reply);
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let parent = self.node(parent);
        let moment = self.coherence.moment();
        let made = match is_completed(&self.handles, request) {
            true => self.handles.view.lookup(parent, name),
            false => {
                let view = completing(&self.handles, request);
                view.symlink(parent, name, target.as_os_str(), owner(request))
            }
        };
        self.entry("symlink", (parent, name), moment, made, reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let (from, to) = ((self.node(parent), name), (self.node(new_parent), new_name));
        self.rename_name(request, from, to, flags, reply);
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let (node, parent) = (self.node(ino), self.node(new_parent));
        if is_completed(&self.handles, request) {
            let moment = self.coherence.moment();
            let made = self.handles.view.lookup(parent, new_name);
            return self.entry("link", (parent, new_name), moment, made, reply);
        }
        let held = match self.check_named("link", request.pid(), node, false) {
            Ok(held) => held,
            Err(errno) => return reply.error(errno),
        };
        let moment = self.coherence.moment();
        match completing(&self.handles, request).link(node, parent, new_name) {
            Ok(attr) => self.found_entry(Telling::locked((parent, new_name)), &attr, moment, true, reply),
            // As on a local disk, a file that has lost its last name gets no new one.
            Err(error) if held.is_some() => reply.error(self.failed("link", parent, &error)),
            Err(error) => reply.error(self.failed_for("link", (request.pid(), Refused::Node, node), &error)),
        }
    }

    fn open(&self, request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if self.without_messages {
            // After ENOSYS the kernel sends no more opens: it opens files without a request and keeps their
            // pages.
            return reply.error(outcome::refusal(Errno::ENOSYS));
        }
        if let Some(number) = resent(request) {
            self.handles.opens_again(number);
        }
        let node = self.node(ino);
        let executes = is_execution(flags.0);
        let flags = open_flags(flags.0);
        // The kernel checks this only when it opens the file for writing.
        if flags.truncate && self.handles.is_executed(node) {
            return reply.error(outcome::failure(Errno::ETXTBSY));
        }
        let wanted = (request.pid(), Refused::Node, node);
        let (arrival, found) = self.coherence.retries.arrive(request.pid(), node);
        let opened =
            self.catch_up(node).and_then(|()| self.open_file(request, node, flags, (arrival, executes)));
        drop(found);
        let (file, attr, kept) = match opened {
            Ok((_, _, Kept::Stale)) => return reply.error(self.sent_again()),
            Ok((_, _, Kept::Denied)) => return reply.error(outcome::failure(Errno::EACCES)),
            Ok(opened) => opened,
            Err(error) => return reply.error(self.failed_for("open", wanted, &error)),
        };
        if arrival.again {
            self.coherence.retries.forget(request.pid());
        }
        let mut answer = FopenFlags::empty();
        answer.set(FopenFlags::FOPEN_KEEP_CACHE, kept == Kept::Pages);
        // A file opened only for reading needs no flush request at close, unless it has locks to release.
        answer.set(FopenFlags::FOPEN_NOFLUSH, !flags.write && !self.locks.has(node));
        if kept == Kept::Pages {
            outcome::kernel_serves();
        }
        let (writes, streams) = (flags.write, flags.truncate && self.streams(flags));
        let kept = KeptHandle::of(number_of(request));
        let handle = Handle { file, node, writes, executes, data_version: attr.data_version, streams, kept };
        let Registered { number, backing, direct } =
            self.handles.insert(handle, |handle| self.backing(handle, attr.size));
        answer.set(FopenFlags::FOPEN_DIRECT_IO, direct);
        match backing {
            Some(backing) => {
                metrics::PASSTHROUGH_OPENS.inc();
                outcome::kernel_serves();
                answer.remove(FopenFlags::FOPEN_KEEP_CACHE);
                backing.answer(reply, FileHandle(number), answer);
            }
            None => reply.opened(FileHandle(number), answer),
        }
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        if let Some(number) = resent(request) {
            self.handles.opens_again(number);
        }
        let parent = self.node(parent);
        let flags = open_flags(flags);
        let moment = self.coherence.moment();
        let mode = (mode & 0o7777, umask);
        let created = match is_completed(&self.handles, request) {
            true => self.open_created((parent, name), flags),
            false => self.create_new(request, (parent, name), mode, flags),
        };
        match created {
            Ok(Creation::Exists) => reply.error(outcome::refusal(Errno::ESTALE)),
            Ok(Creation::Denied) => reply.error(outcome::failure(Errno::EACCES)),
            Ok(Creation::Opened(created)) => {
                let Created { attr, file, is_new } = *created;
                let (node, data_version) = (attr.node, attr.data_version);
                let (writes, streams) = (flags.write, is_new && self.streams(flags));
                let kept = KeptHandle::of(number_of(request));
                let handle = Handle { file, node, writes, executes: false, data_version, streams, kept };
                let Registered { number, direct, .. } = self.handles.insert(handle, |_| None);
                let named = Telling::locked((parent, name));
                let lifetime = self.lifetime(&attr, moment, Some(named)).min(name_lifetime(&attr));
                if is_new {
                    self.coherence.creates(&attr);
                }
                let attr = self.inodes.attr(&attr);
                let mut answer = FopenFlags::empty();
                answer.set(FopenFlags::FOPEN_DIRECT_IO, direct);
                reply.created(&lifetime, &attr, Generation(0), FileHandle(number), answer);
            }
            Err(error) => reply.error(self.failed("create", parent, &error)),
        }
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.read_bytes(ino, fh.0, offset, size, reply);
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let privileged = !write_flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        self.write_bytes((ino, fh.0), offset, data, privileged, reply);
    }

    fn flush(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        if self.without_messages {
            return reply.error(outcome::refusal(Errno::ENOSYS));
        }
        let flushed = self.handles.get(fh.0).and_then(|handle| {
            handle.check_writes()?;
            self.handles.flush(&handle)
        });
        self.locks.flushed(&self.handles, self.node(ino), fh.0, lock_owner.0);
        self.empty("flush", self.node(ino), flushed, reply);
    }

    fn release(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.locks.released(&self.handles, self.node(ino), fh.0, lock_owner.map(|owner| owner.0));
        let node = self.node(ino);
        if node.is_live()
            && let Ok(handle) = self.handles.get(fh.0)
        {
            self.coherence.closes(node, handle.data_version);
        }
        self.handles.release(fh.0);
        reply.ok();
    }

    fn fsync(&self, _request: &Request, ino: INodeNo, fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let handle = match self.handles.get(fh.0) {
            Ok(handle) => handle,
            Err(error) => return self.empty("fsync", self.node(ino), Err(error), reply),
        };
        let synced = self.handles.sync(&handle);
        let tells = matches!(synced, Err(Error::LostWrites { .. }));
        self.empty("fsync", self.node(ino), synced, reply);
        if tells {
            self.handles.has_told(fh.0, &handle);
        }
    }

    fn opendir(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.without_messages {
            return reply.error(outcome::refusal(Errno::ENOSYS));
        }
        let node = self.node(ino);
        let answer = if node.is_live() {
            FopenFlags::empty()
        } else {
            FopenFlags::FOPEN_CACHE_DIR | FopenFlags::FOPEN_KEEP_CACHE
        };
        reply.opened(FileHandle(self.handles.open_directory()), answer);
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.handles.release_directory(fh.0);
        reply.ok();
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let node = self.node(ino);
        match self.fill_directory(node, fh.0, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.failed("readdir", node, &error)),
        }
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let node = self.node(ino);
        let view = &self.handles.view;
        let unchanging = !node.is_live() || view.is_snapshots_dir(node);
        let synced = if unchanging { Ok(()) } else { view.fsync_dir(node) };
        self.empty("fsyncdir", node, synced, reply);
    }

    fn statfs(&self, _request: &Request, ino: INodeNo, reply: ReplyStatfs) {
        match self.handles.view.statfs() {
            Ok(s) => reply.statfs(
                s.blocks,
                s.blocks_free,
                s.blocks_available,
                s.files,
                s.files_free,
                s.block_bytes,
                s.name_bytes_max,
                s.block_bytes,
            ),
            Err(error) => reply.error(self.failed("statfs", self.node(ino), &error)),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let node = self.node(ino);
        match self.fill_directory_plus(node, fh.0, offset, &mut reply) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(self.failed("readdirplus", node, &error)),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let node = self.node(ino);
        if is_completed(&self.handles, request) {
            return reply.ok();
        }
        match self.check_named("setxattr", request.pid(), node, true) {
            Ok(held) => self.set_xattr(request, (node, held), name, value, flags, reply),
            Err(errno) => reply.error(errno),
        }
    }

    fn getxattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        self.get_xattr(self.node(ino), name, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.list_xattrs(request, self.node(ino), size, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let node = self.node(ino);
        if is_completed(&self.handles, request) {
            return reply.ok();
        }
        let held = match self.check_named("removexattr", request.pid(), node, true) {
            Ok(held) => held,
            Err(errno) => return reply.error(errno),
        };
        let removed = completing(&self.handles, request).xattr_remove(node, name);
        if is_acl(name) {
            self.coherence.drops_list(node);
        }
        self.changed_by_path("removexattr", (request.pid(), node), held, removed, reply);
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let done = self.allocate(request, fh.0, (offset, length), mode);
        self.empty("fallocate", self.node(ino), done, reply);
    }

    fn lseek(
        &self,
        _request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        self.seek(self.node(ino), offset, whence, reply);
    }

    fn copy_file_range(
        &self,
        request: &Request,
        _ino_in: INodeNo,
        fh_in: FileHandle,
        offset_in: u64,
        _ino_out: INodeNo,
        fh_out: FileHandle,
        offset_out: u64,
        len: u64,
        _flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        self.copy_range(request, (fh_in.0, offset_in), (fh_out.0, offset_out), len, reply);
    }

    fn getlk(
        &self,
        request: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        reply: ReplyLock,
    ) {
        let lock = wanted(request, lock_owner, (start, end), typ, pid);
        self.locks.get(&self.handles, self.node(ino), lock, reply);
    }

    fn setlk(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        lock_owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
        sleep: bool,
        reply: ReplyEmpty,
    ) {
        let wish = Wish {
            node: self.node(ino),
            ino: ino.0,
            handle: fh.0,
            lock: wanted(request, lock_owner, (start, end), typ, pid),
            gives_up: typ == libc::F_UNLCK,
            waits: sleep,
            pid: request.pid(),
        };
        self.locks.set(&self.handles, wish, reply);
    }

    // Unsupported requests. They are not counted as failures: programs test every file for being a terminal.

    fn ioctl(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _flags: IoctlFlags,
        _cmd: u32,
        _in_data: &[u8],
        _out_size: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(outcome::refusal(Errno::ENOTTY));
    }

    fn poll(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _fh: FileHandle,
        _notifier: PollNotifier,
        _events: PollEvents,
        _flags: PollFlags,
        reply: ReplyPoll,
    ) {
        // After ENOSYS the kernel reports files as always ready.
        reply.error(outcome::refusal(Errno::ENOSYS));
    }

    fn bmap(&self, _request: &Request, _ino: INodeNo, _block_bytes: u32, _index: u64, reply: ReplyBmap) {
        reply.error(outcome::refusal(Errno::ENOSYS));
    }
}
