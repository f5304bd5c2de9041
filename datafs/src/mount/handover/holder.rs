//! The holder: a small process that mounts, and keeps each mount while its servers come and go.
//!
//! A holder keeps, per mount: the FUSE device, the INIT exchange, the journal, and the locked session files of
//! its servers. A server gets the first three over a SEQPACKET Unix socket, so the death of a server ends
//! nothing. A mount has one server at a time: a connection becomes the server when the connection of the one
//! before has closed, which the kernel does after the last thread of that process.
//!
//! Permitted are root, the holder's own user and the user given at the start. A client may send
//! [`MESSAGE_BYTES_MAX`](super::wire::MESSAGE_BYTES_MAX) bytes a request; a holder serves [`CONNECTIONS_MAX`]
//! connections and [`MOUNTS_MAX`] mounts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{Backlog, bind, listen};
use nix::unistd::{Pid, geteuid};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::connection;
use super::device;
use super::journal::Journal;
use super::protocol::{Attached, HeldMount, MountWish, VolumeIdentity, check_identity};
use super::wire::{Wire, seqpacket, with_address};
use crate::error::{Error, Result};
use crate::mount::fuse::passthrough::{close_backing, open_backing};
use crate::mount::fuse::point::{self, Attach};

/// Most mounts of a holder.
const MOUNTS_MAX: usize = 1_024;
/// Most connections at a time.
pub(super) const CONNECTIONS_MAX: usize = 2 * MOUNTS_MAX;
/// Most backing files of a mount.
const BACKINGS_MAX: usize = 65_536;
/// How long a planned handover waits for the running server. Then the holder kills it, as in a crash.
const HANDOVER_MAX: Duration = Duration::from_secs(60);
/// How long the kernel has to end a killed server.
const KILLED_MAX: Duration = Duration::from_secs(10);

/// Options of [`Holder::start`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HolderOptions {
    /// A user that may connect, besides root and the holder's own.
    pub uid: Option<u32>,
    /// Folders of object stores and caches, from which servers without privilege may have backing files opened.
    /// Default: none.
    pub objects: Vec<PathBuf>,
}

/// A running holder. The drop closes the socket, and unmounts the mounts that no server serves.
#[derive(Debug)]
pub struct Holder {
    shared: Arc<Shared>,
    socket: PathBuf,
    /// The write end of a pipe; closing it ends the thread.
    ending: Option<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

/// The state of a holder.
#[derive(Debug)]
pub(super) struct Shared {
    uid: Option<u32>,
    roots: Vec<(PathBuf, OwnedFd)>,
    state: Mutex<State>,
    /// Held while a mount is made.
    mounting: Mutex<()>,
    /// Signals the end of a connection.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    mounts: BTreeMap<PathBuf, Held>,
    connections: usize,
    next: u64,
}

/// One mount.
#[derive(Debug)]
struct Held {
    wish: MountWish,
    /// `major:minor`.
    number: String,
    device: OwnedFd,
    journal: OwnedFd,
    init: Vec<u8>,
    reply: Option<Vec<u8>>,
    resends: bool,
    life: u64,
    sessions: BTreeMap<u64, Option<OwnedFd>>,
    backings: BTreeSet<u32>,
    server: Option<Server>,
}

/// The server of a mount.
#[derive(Debug)]
struct Server {
    connection: u64,
    /// 0 in another PID namespace.
    pid: i32,
    /// A byte asks the server to hand over.
    control: File,
}

impl Holder {
    /// Starts to serve a socket. Replaces the socket of a holder that has died.
    ///
    /// # Errors
    /// [`Error::Exists`] when another holder serves the socket, [`Error::Io`] when the socket or an object
    /// folder cannot be opened.
    pub fn start(socket: &Path, options: &HolderOptions) -> Result<Holder> {
        let failed = |source| Error::Io { operation: "listen on", path: socket.to_owned(), source };
        let mut roots = Vec::new();
        for root in &options.objects {
            let failed = |source| Error::Io { operation: "open object folder", path: root.clone(), source };
            let path = fs::canonicalize(root).map_err(failed)?;
            roots.push((path.clone(), File::open(&path).map_err(failed)?.into()));
        }
        if Wire::connect(socket).is_ok() {
            return Err(Error::Exists { what: format!("a holder at {}", socket.display()) });
        }
        match fs::symlink_metadata(socket) {
            Ok(found) if found.file_type().is_socket() => fs::remove_file(socket).map_err(failed)?,
            Ok(_) => {
                return Err(Error::Exists { what: format!("{}, which is no socket,", socket.display()) });
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let listener = seqpacket().map_err(failed)?;
        with_address(socket, |address| Ok(bind(listener.as_raw_fd(), address)?)).map_err(failed)?;
        // Whether a peer is permitted is decided by its credentials, which every peer has.
        let mode = if options.uid.is_some() { 0o666 } else { 0o600 };
        fs::set_permissions(socket, fs::Permissions::from_mode(mode)).map_err(failed)?;
        listen(&listener, Backlog::MAXCONN).map_err(|errno| failed(errno.into()))?;
        let (stop, ending) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|errno| failed(errno.into()))?;
        let shared = Arc::new(Shared {
            uid: options.uid,
            roots,
            state: Mutex::default(),
            mounting: Mutex::default(),
            changed: Condvar::new(),
        });
        let to = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("datafs-holder".into())
            .spawn(move || accept(&listener, &stop, &to))
            .map_err(failed)?;
        Ok(Holder { shared, socket: socket.to_owned(), ending: Some(ending), thread: Some(thread) })
    }

    /// The mounts, by path.
    pub fn mounts(&self) -> Vec<HeldMount> {
        self.shared.list()
    }

    /// The path of the socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Whether a mount of this holder is attached at a path, with or without a server. Sends no request to the
    /// mount, so that it never waits for a server.
    ///
    /// # Errors
    /// [`Error::Io`] when the path or the system's table of mounts cannot be read.
    pub fn is_attached(&self, at: &Path) -> Result<bool> {
        let target = resolved(at).map_err(|source| point::refused("resolve", at, source))?;
        let number = {
            let mut state = self.shared.state.lock();
            state.drop_ended(&target);
            let Some(held) = state.mounts.get(&target) else { return Ok(false) };
            held.number.clone()
        };
        Ok(point::find(&target)?.is_some_and(|entry| entry.device == number))
    }

    /// Unmounts what this holder has mounted at a path, with or without a server. The path is free at once;
    /// open files stay usable while the server lives.
    ///
    /// # Errors
    /// [`Error::Io`] when the holder has nothing mounted there, or when the system refuses.
    pub fn unmount(&self, at: &Path) -> Result<()> {
        let failed = |reason: String| point::refused("unmount", at, io::Error::other(reason));
        self.shared.unmount(at).map_err(failed)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.ending.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of a holder has panicked");
        }
        if let Err(error) = fs::remove_file(&self.socket) {
            tracing::debug!(%error, socket = %self.socket.display(), "the socket of a holder is gone");
        }
        // Servers keep the device too, so their mounts go on.
        let mounts = std::mem::take(&mut self.shared.state.lock().mounts);
        for (target, held) in mounts {
            if held.server.is_none() {
                held.take_off(&target);
            }
        }
    }
}

fn accept(listener: &OwnedFd, stop: &OwnedFd, shared: &Arc<Shared>) {
    loop {
        let mut ready =
            [PollFd::new(listener.as_fd(), PollFlags::POLLIN), PollFd::new(stop.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::NONE) {
            Err(Errno::EINTR) => continue,
            Err(error) => {
                tracing::error!(%error, "a holder accepts no more connections");
                return;
            }
            // The other end of the pipe is closed.
            Ok(_) if ready[1].revents().is_some_and(|events| !events.is_empty()) => return,
            Ok(_) => {}
        }
        let wire = match connection::accept(listener) {
            Ok(wire) => wire,
            Err(error) => {
                tracing::debug!(%error, "a connection to a holder was not accepted");
                continue;
            }
        };
        let Some(number) = shared.connects() else {
            tracing::warn!(connections = CONNECTIONS_MAX, "too many connections to a holder");
            continue;
        };
        let to = Arc::clone(shared);
        let thread = std::thread::Builder::new().name("datafs-holder-of".into());
        if let Err(error) = thread.spawn(move || connection::serve(&to, number, &wire)) {
            tracing::warn!(%error, "a connection to a holder is not served");
            shared.disconnects(number);
        }
    }
}

impl Shared {
    fn connects(&self) -> Option<u64> {
        let mut state = self.state.lock();
        if state.connections >= CONNECTIONS_MAX {
            return None;
        }
        state.connections += 1;
        state.next += 1;
        Some(state.next)
    }

    /// A connection has ended, and with it the server that it was.
    pub(super) fn disconnects(&self, connection: u64) {
        let mut state = self.state.lock();
        state.connections -= 1;
        let served = state.mounts.iter_mut().find(|(_, held)| held.is_served_by(connection));
        if let Some((target, held)) = served {
            let target = target.clone();
            held.server = None;
            let ended = device::has_ended(&held.device);
            tracing::info!(target = %target.display(), unmounted = ended, "the server of a mount has ended");
            if ended {
                state.mounts.remove(&target);
            } else if !held.resends
                && let Some(held) = state.mounts.remove(&target)
            {
                // A next server could not answer the requests that this one has read.
                held.take_off(&target);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Whether a user may use this holder.
    pub(super) fn permits(&self, uid: u32) -> bool {
        uid == 0 || uid == geteuid().as_raw() || Some(uid) == self.uid
    }

    pub(super) fn list(&self) -> Vec<HeldMount> {
        let state = self.state.lock();
        let mounts = state.mounts.iter();
        mounts
            .map(|(target, held)| HeldMount {
                spec: held.wish.spec.clone(),
                target: target.clone(),
                servers: held.life,
                is_served: held.server.is_some(),
            })
            .collect()
    }

    /// Mounts, unless the same is mounted there. Returns the absolute path.
    pub(super) fn mount(&self, wish: MountWish) -> Result<PathBuf, String> {
        if !wish.target.is_absolute() {
            return Err(format!("the mount point {} is no absolute path", wish.target.display()));
        }
        // Two servers may ask for the same. Not under the lock of the state: this may wait for a disk.
        let _mounting = self.mounting.lock();
        let target = resolved(&wish.target).map_err(|error| format!("{}: {error}", wish.target.display()))?;
        {
            let mut state = self.state.lock();
            state.drop_ended(&target);
            if let Some(held) = state.mounts.get(&target) {
                return wish.check_same(&held.wish).map(|()| target);
            }
            if state.mounts.len() >= MOUNTS_MAX {
                return Err(format!("the holder has {MOUNTS_MAX} mounts, its maximum: unmount one first"));
            }
        }
        let held = Held::new(&target, wish).map_err(one_line)?;
        let target = held.wish.target.clone();
        self.state.lock().mounts.insert(target.clone(), held);
        Ok(target)
    }

    /// Makes a connection the server of a mount, after the end of the one before. Returns what it gets, with the
    /// device, the journal and the read end of the control pipe. A program that would serve another volume is
    /// refused before the running server is asked to leave.
    pub(super) fn attach(
        &self,
        (connection, pid): (u64, i32),
        target: &Path,
        volume: Option<&VolumeIdentity>,
    ) -> Result<(Attached, [OwnedFd; 3]), String> {
        let missing = || format!("nothing is mounted at {} by this holder: mount it first", target.display());
        let until = Instant::now() + HANDOVER_MAX;
        let mut state = self.state.lock();
        if state.mounts.values().any(|held| held.is_served_by(connection)) {
            return Err("the connection serves a mount already".into());
        }
        let mut was_killed = false;
        loop {
            state.drop_ended(target);
            let held = state.mounts.get_mut(target).ok_or_else(missing)?;
            check_identity(held.wish.volume.as_ref(), volume)?;
            let Some(server) = &mut held.server else { break };
            if !held.resends {
                return Err(format!(
                    "the mount at {} is served, and the kernel cannot hand it over (it takes Linux 6.9): \
                     unmount it first",
                    target.display()
                ));
            }
            let deadline = if was_killed { until + KILLED_MAX } else { until };
            if Instant::now() >= deadline {
                if was_killed || server.pid <= 0 {
                    return Err(format!(
                        "the running server of {} has not handed over within {} s: end it and try again",
                        target.display(),
                        HANDOVER_MAX.as_secs()
                    ));
                }
                tracing::warn!(target = %target.display(), pid = server.pid, "killing a server that does not hand over");
                // Its connection is open, so the process lives and the number is its own.
                let _ = kill(Pid::from_raw(server.pid), Signal::SIGKILL);
                was_killed = true;
                continue;
            }
            if !was_killed {
                // A full pipe has the request already.
                let _ = server.control.write(&[1]);
            }
            self.changed.wait_until(&mut state, deadline.min(Instant::now() + Duration::from_secs(1)));
        }
        if let Some(held) = state.mounts.get_mut(target)
            && held.wish.volume.is_none()
        {
            held.wish.volume = volume.cloned();
        }
        self.begin(state, (connection, pid), target).map_err(|error| error.to_string())
    }

    fn begin(
        &self,
        mut state: MutexGuard<'_, State>,
        (connection, pid): (u64, i32),
        target: &Path,
    ) -> io::Result<(Attached, [OwnedFd; 3])> {
        let held = state.mounts.get_mut(target).ok_or(ErrorKind::NotFound)?;
        let (control, theirs) = pipe()?;
        let fds = [held.device.try_clone()?, held.journal.try_clone()?, theirs];
        held.life += 1;
        held.server = Some(Server { connection, pid, control });
        tracing::info!(target = %target.display(), pid, servers = held.life, "a server attaches");
        let attached = Attached {
            wish: held.wish.clone(),
            device: held.number.clone(),
            init: held.init.clone(),
            reply: held.reply.clone(),
            life: held.life,
            sessions: held.sessions.keys().copied().collect(),
            backs: !self.roots.is_empty(),
        };
        Ok((attached, fds))
    }

    /// Takes a mount from a server whose holder has died. Returns the read end of the control pipe.
    pub(super) fn adopt(
        &self,
        (connection, pid): (u64, i32),
        attached: Attached,
        fds: Vec<OwnedFd>,
    ) -> Result<OwnedFd, String> {
        let mut fds = fds.into_iter();
        let (Some(device), Some(journal)) = (fds.next(), fds.next()) else {
            return Err("the device or the journal is missing".into());
        };
        if !device::is_fuse(&device) || device::has_ended(&device) {
            return Err("the descriptor is not the device of a mount that lives".into());
        }
        let target = attached.wish.target.clone();
        let mut state = self.state.lock();
        state.drop_ended(&target);
        if state.mounts.contains_key(&target) || state.mounts.len() >= MOUNTS_MAX {
            return Err(format!("the holder has another mount at {}, or too many", target.display()));
        }
        let (control, theirs) = pipe().map_err(|error| error.to_string())?;
        let session = attached.sessions.last().copied();
        let held = Held {
            wish: attached.wish,
            number: attached.device,
            device,
            journal,
            init: attached.init,
            reply: attached.reply,
            resends: true,
            life: attached.life,
            sessions: session.map(|id| (id, fds.next())).into_iter().collect(),
            backings: BTreeSet::new(),
            server: Some(Server { connection, pid, control }),
        };
        tracing::info!(target = %target.display(), pid, "a server gives its mount to a new holder");
        state.mounts.insert(target, held);
        Ok(theirs)
    }

    /// Runs `work` with the mount that a connection serves.
    fn with<T>(
        &self,
        connection: u64,
        work: impl FnOnce(&mut Held) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut state = self.state.lock();
        let held = state.mounts.values_mut().find(|held| held.is_served_by(connection));
        held.map_or_else(|| Err("the connection serves no mount: attach first".into()), work)
    }

    pub(super) fn negotiated(&self, connection: u64, reply: Vec<u8>, resends: bool) -> Result<(), String> {
        self.with(connection, |held| {
            held.reply.get_or_insert(reply);
            held.resends = resends;
            Ok(())
        })
    }

    pub(super) fn session(&self, connection: u64, id: u64, file: Option<OwnedFd>) -> Result<(), String> {
        self.with(connection, |held| {
            if held.sessions.len() >= 64 && !held.sessions.contains_key(&id) {
                return Err("too many servers have died before they took over".into());
            }
            held.sessions.insert(id, file);
            Ok(())
        })
    }

    /// The newest session is the only one from now on.
    pub(super) fn took_over(&self, connection: u64, own: u64) -> Result<(), String> {
        self.with(connection, |held| {
            held.sessions.retain(|id, _| *id == own);
            Ok(())
        })
    }

    /// Opens a regular file below one of the object folders as a backing file.
    pub(super) fn open_backing(&self, connection: u64, path: &Path) -> Result<u32, String> {
        let refused = |what: &str| Err(format!("{} {what}", path.display()));
        let below = |(root, folder)| path.strip_prefix::<&PathBuf>(root).ok().map(|path| (path, folder));
        let Some((beneath, folder)) = self.roots.iter().map(|(root, folder)| (root, folder)).find_map(below)
        else {
            return refused("is in none of the holder's object folders");
        };
        let how = OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        );
        let file = match openat2(folder, beneath, how) {
            Ok(file) => File::from(file),
            Err(errno) => return refused(&format!("cannot be opened: {errno}")),
        };
        if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            return refused("is no regular file");
        }
        self.with(connection, |held| {
            if held.backings.len() >= BACKINGS_MAX {
                return Err(format!("the mount has {BACKINGS_MAX} backing files, its maximum"));
            }
            let device = held.device.try_clone().map_err(|error| error.to_string())?;
            let id = open_backing(&device.into(), &file).map_err(|error| error.to_string())?;
            held.backings.insert(id);
            Ok(id)
        })
    }

    pub(super) fn close_backing(&self, connection: u64, id: u32) -> Result<(), String> {
        self.with(connection, |held| {
            if !held.backings.remove(&id) {
                return Err(format!("the mount has no backing file {id}"));
            }
            let device = held.device.try_clone().map_err(|error| error.to_string())?;
            close_backing(&device.into(), id).map_err(|error| error.to_string())
        })
    }

    /// Unmounts. The path is free at once; open files stay usable while the server lives.
    pub(super) fn unmount(&self, target: &Path) -> Result<(), String> {
        let target = &resolved(target).map_err(|e| format!("cannot resolve {}: {e}", target.display()))?;
        let mut state = self.state.lock();
        let Some(held) = state.mounts.get(target) else {
            return Err(format!("nothing is mounted at {} by this holder", target.display()));
        };
        held.detach(target)?;
        state.mounts.remove(target);
        Ok(())
    }
}

impl State {
    /// Forgets a mount that another process has unmounted.
    fn drop_ended(&mut self, target: &Path) {
        let is_over = |held: &Held| held.server.is_none() && device::has_ended(&held.device);
        if self.mounts.get(target).is_some_and(is_over) {
            self.mounts.remove(target);
        }
    }
}

impl Held {
    fn new(target: &Path, wish: MountWish) -> Result<Held> {
        let target = point::prepare(target)?;
        let failed = |source| point::refused("mount on", &target, source);
        let options = wish.options();
        let attach = Attach { source: &wish.spec, read_only: wish.read_only, options: &options };
        let device = point::attach(&target, &attach)?;
        let made = || {
            let init = device::read_init(&device).map_err(failed)?;
            let number = point::find(&target)?.map(|entry| entry.device).unwrap_or_default();
            Ok((init, number, Journal::create().map_err(failed)?))
        };
        let (init, number, journal) = made().inspect_err(|_: &Error| {
            if let Err(error) = point::detach(&target, true) {
                tracing::warn!(%error, path = %target.display(), "a failed mount could not be taken off");
            }
        })?;
        point::raise_read_ahead(&number);
        Ok(Held {
            wish: MountWish { target, ..wish },
            number,
            device,
            journal,
            init,
            reply: None,
            resends: true,
            life: 0,
            sessions: BTreeMap::new(),
            backings: BTreeSet::new(),
            server: None,
        })
    }

    fn is_served_by(&self, connection: u64) -> bool {
        self.server.as_ref().is_some_and(|server| server.connection == connection)
    }

    /// Detaches the mount from its path, unless another one is there by now.
    fn detach(&self, target: &Path) -> Result<(), String> {
        let is_there =
            point::find(target).map_err(one_line)?.is_some_and(|entry| entry.device == self.number);
        if !is_there || point::detach(target, false).is_ok() {
            return Ok(());
        }
        point::detach(target, true).map_err(|error| format!("cannot unmount {}: {error}", target.display()))
    }

    /// Ends a mount without a server.
    fn take_off(self, target: &Path) {
        if let Err(error) = self.detach(target) {
            tracing::warn!(error, "a mount without a server stays");
        }
    }
}

/// The absolute path of a mount point. Sends no request to a mount there: it may have no server.
fn resolved(target: &Path) -> io::Result<PathBuf> {
    if fs::read_link(target).is_ok() {
        return fs::canonicalize(target);
    }
    match (target.parent(), target.file_name()) {
        (Some(parent), Some(name)) => match fs::canonicalize(parent) {
            Ok(parent) => Ok(parent.join(name)),
            // It is created with its parents.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(target.to_owned()),
            Err(error) => Err(error),
        },
        _ => Ok(target.to_owned()),
    }
}

fn pipe() -> io::Result<(File, OwnedFd)> {
    let (theirs, mine) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    Ok((mine.into(), theirs))
}

fn one_line(error: Error) -> String {
    millrace_leaf::error_chain::one_line(&error)
}
