//! The instrumented file system: the adapter with statistics and a trace around each request.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use fuser::{
    AccessFlags, BsdFileFlags, CopyFileRangeFlags, FileHandle, Filesystem, INodeNo, IoctlFlags, KernelConfig,
    LockOwner, OpenFlags, PollEvents, PollFlags, PollNotifier, RenameFlags, ReplyAttr, ReplyBmap,
    ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl,
    ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
    WriteFlags,
};

use super::adapter::REQUEST_BYTES_MAX;
use super::answer::Adapter;
use crate::mount::handover::gate::Gate;
use crate::mount::handover::rehearsal;
use crate::mount::observe::stats::Op;
use crate::mount::observe::trace;
use crate::mount::observe::watch::Watch;
use crate::mount::outcome;

/// The adapter behind statistics and the trace.
#[derive(Debug)]
pub(in crate::mount) struct InstrumentedFs {
    pub(in crate::mount) adapter: Adapter,
    pub(in crate::mount) watch: Arc<Watch>,
    /// In a held mount.
    pub(in crate::mount) gate: Option<Arc<Gate>>,
}

/// The trace record of a request for an inode.
fn asked<'a>(op: Op, request: &Request, ino: INodeNo) -> trace::Request<'a> {
    trace::Request { op, pid: request.pid(), ino: ino.0, name: None, to: None, range: None }
}

/// The trace record of a request for a name in a directory.
fn named<'a>(op: Op, request: &Request, parent: INodeNo, name: &'a OsStr) -> trace::Request<'a> {
    trace::Request { name: Some(name), ..asked(op, request, parent) }
}

/// The trace record of a request for a range of a file.
fn ranged<'a>(op: Op, request: &Request, ino: INodeNo, offset: u64, size: u64) -> trace::Request<'a> {
    trace::Request { range: Some((offset, size)), ..asked(op, request, ino) }
}

impl InstrumentedFs {
    fn watch(&self, request: trace::Request<'_>, answer: impl FnOnce(&Adapter)) {
        let _passed = self.gate.as_ref().map(|gate| gate.enter());
        self.watch.stats.begin(request.op);
        outcome::reset();
        let begun = Instant::now();
        answer(&self.adapter);
        let outcome = outcome::get();
        if !outcome.comes_later {
            self.watch.answered(&request, outcome, begun.elapsed());
        }
    }
}

/// Forwards requests to the adapter, with statistics: the method with its arguments, and the trace record.
macro_rules! watched {
    ($($method:ident($request:ident, $($arg:ident: $kind:ty),*) $described:expr;)*) => {$(
        fn $method(&self, $request: &Request, $($arg: $kind),*) {
            self.watch($described, |adapter| adapter.$method($request, $($arg),*));
        }
    )*};
}

/// Forwards every request kind, so that a kind newly added to the adapter is not refused here. Only
/// `batch_forget` is missing: its type is private to the library, which passes each of its nodes to `forget`.
impl Filesystem for InstrumentedFs {
    fn init(&mut self, request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.adapter.init(request, config)
    }

    fn destroy(&mut self) {
        self.adapter.destroy();
    }

    fn forget(&self, request: &Request, ino: INodeNo, lookups: u64) {
        self.watch(asked(Op::Forget, request, ino), |adapter| adapter.forget(request, ino, lookups));
    }

    fn ioctl(
        &self,
        request: &Request,
        ino: INodeNo,
        fh: FileHandle,
        flags: IoctlFlags,
        command: u32,
        input: &[u8],
        output_bytes: u32,
        reply: ReplyIoctl,
    ) {
        if let Some(gate) = self.gate.as_ref().filter(|gate| gate.rehearses()) {
            rehearsal::claim(input, REQUEST_BYTES_MAX);
            reply.ioctl(0, &[]);
            // The next request of the rehearsal is for another thread.
            drop(gate.enter());
            return;
        }
        self.watch(asked(Op::Ioctl, request, ino), |adapter| {
            adapter.ioctl(request, ino, fh, flags, command, input, output_bytes, reply);
        });
    }

    watched! {
        lookup(r, parent: INodeNo, name: &OsStr, reply: ReplyEntry) named(Op::Lookup, r, parent, name);
        getattr(r, ino: INodeNo, fh: Option<FileHandle>, reply: ReplyAttr) asked(Op::Getattr, r, ino);
        setattr(
            r, ino: INodeNo, mode: Option<u32>, uid: Option<u32>, gid: Option<u32>, size: Option<u64>,
            atime: Option<TimeOrNow>, mtime: Option<TimeOrNow>, ctime: Option<SystemTime>,
            fh: Option<FileHandle>, crtime: Option<SystemTime>, chgtime: Option<SystemTime>,
            bkuptime: Option<SystemTime>, flags: Option<BsdFileFlags>, reply: ReplyAttr
        ) trace::Request { range: size.map(|size| (0, size)), ..asked(Op::Setattr, r, ino) };
        access(r, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) asked(Op::Access, r, ino);
        readlink(r, ino: INodeNo, reply: ReplyData) asked(Op::Readlink, r, ino);
        mknod(r, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry)
            named(Op::Mknod, r, parent, name);
        mkdir(r, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry)
            named(Op::Mkdir, r, parent, name);
        unlink(r, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) named(Op::Unlink, r, parent, name);
        rmdir(r, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) named(Op::Rmdir, r, parent, name);
        symlink(r, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry)
            named(Op::Symlink, r, parent, name);
        rename(
            r, parent: INodeNo, name: &OsStr, to: INodeNo, to_name: &OsStr, flags: RenameFlags,
            reply: ReplyEmpty
        ) trace::Request { to: Some((to.0, to_name)), ..named(Op::Rename, r, parent, name) };
        link(r, ino: INodeNo, to: INodeNo, to_name: &OsStr, reply: ReplyEntry)
            trace::Request { to: Some((to.0, to_name)), ..asked(Op::Link, r, ino) };
        create(r, parent: INodeNo, name: &OsStr, mode: u32, umask: u32, flags: i32, reply: ReplyCreate)
            named(Op::Create, r, parent, name);
        open(r, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) asked(Op::Open, r, ino);
        read(
            r, ino: INodeNo, fh: FileHandle, offset: u64, size: u32, flags: OpenFlags,
            owner: Option<LockOwner>, reply: ReplyData
        ) ranged(Op::Read, r, ino, offset, size.into());
        write(
            r, ino: INodeNo, fh: FileHandle, offset: u64, data: &[u8], how: WriteFlags, flags: OpenFlags,
            owner: Option<LockOwner>, reply: ReplyWrite
        ) ranged(Op::Write, r, ino, offset, data.len() as u64);
        flush(r, ino: INodeNo, fh: FileHandle, owner: LockOwner, reply: ReplyEmpty) asked(Op::Flush, r, ino);
        release(
            r, ino: INodeNo, fh: FileHandle, flags: OpenFlags, owner: Option<LockOwner>, flush: bool,
            reply: ReplyEmpty
        ) asked(Op::Release, r, ino);
        fsync(r, ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty) asked(Op::Fsync, r, ino);
        opendir(r, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) asked(Op::Opendir, r, ino);
        readdir(r, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectory)
            asked(Op::Readdir, r, ino);
        readdirplus(r, ino: INodeNo, fh: FileHandle, offset: u64, reply: ReplyDirectoryPlus)
            asked(Op::Readdirplus, r, ino);
        releasedir(r, ino: INodeNo, fh: FileHandle, flags: OpenFlags, reply: ReplyEmpty)
            asked(Op::Releasedir, r, ino);
        fsyncdir(r, ino: INodeNo, fh: FileHandle, datasync: bool, reply: ReplyEmpty)
            asked(Op::Fsyncdir, r, ino);
        statfs(r, ino: INodeNo, reply: ReplyStatfs) asked(Op::Statfs, r, ino);
        setxattr(
            r, ino: INodeNo, name: &OsStr, value: &[u8], flags: i32, position: u32, reply: ReplyEmpty
        ) named(Op::Setxattr, r, ino, name);
        getxattr(r, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr)
            named(Op::Getxattr, r, ino, name);
        listxattr(r, ino: INodeNo, size: u32, reply: ReplyXattr) asked(Op::Listxattr, r, ino);
        removexattr(r, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) named(Op::Removexattr, r, ino, name);
        getlk(
            r, ino: INodeNo, fh: FileHandle, owner: LockOwner, start: u64, end: u64, kind: i32, pid: u32,
            reply: ReplyLock
        ) ranged(Op::Getlk, r, ino, start, end.saturating_sub(start).saturating_add(1));
        setlk(
            r, ino: INodeNo, fh: FileHandle, owner: LockOwner, start: u64, end: u64, kind: i32, pid: u32,
            sleep: bool, reply: ReplyEmpty
        ) ranged(Op::Setlk, r, ino, start, end.saturating_sub(start).saturating_add(1));
        bmap(r, ino: INodeNo, block_bytes: u32, index: u64, reply: ReplyBmap) asked(Op::Bmap, r, ino);
        poll(
            r, ino: INodeNo, fh: FileHandle, notifier: PollNotifier, events: PollEvents, flags: PollFlags,
            reply: ReplyPoll
        ) asked(Op::Poll, r, ino);
        fallocate(
            r, ino: INodeNo, fh: FileHandle, offset: u64, length: u64, mode: i32, reply: ReplyEmpty
        ) ranged(Op::Fallocate, r, ino, offset, length);
        lseek(r, ino: INodeNo, fh: FileHandle, offset: i64, whence: i32, reply: ReplyLseek)
            ranged(Op::Lseek, r, ino, offset as u64, 0);
        copy_file_range(
            r, ino: INodeNo, fh: FileHandle, offset: u64, to: INodeNo, to_fh: FileHandle, to_offset: u64,
            len: u64, flags: CopyFileRangeFlags, reply: ReplyWrite
        ) ranged(Op::CopyFileRange, r, to, to_offset, len);
    }
}
