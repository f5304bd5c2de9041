//! The holder: a small process that mounts, and keeps each mount while its servers come and go.
//!
//! A holder keeps, per mount: the FUSE device, the INIT exchange, the journal, and the locked session files of
//! its servers. A server gets the first three over a SEQPACKET Unix socket, so the death of a server ends
//! nothing. A mount has one server at a time: a connection becomes the server when the connection of the one
//! before has closed, which the kernel does after the last thread of that process.
//!
//! Permitted are root, the holder's own user and the user given at the start, within the rules of
//! [`authority`](super::authority). A client may send
//! [`MESSAGE_BYTES_MAX`](super::wire::MESSAGE_BYTES_MAX) bytes a request; a holder serves [`MOUNTS_MAX`] mounts. Trusted
//! users and the user given at the start each have their share of the connections.
//!
//! A mount whose path was detached while files are open is set aside: its server serves those files to their end, and
//! the path is free for another mount.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use millrace_leaf::error_chain;
use nix::fcntl::OFlag;
use nix::sys::socket::{Backlog, bind, listen};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::authority::{Authority, Rights, Share};
use super::device;
use super::journal::Journal;
use super::peer::{self, Peer};
use super::place::{self, Place, check_plain, is_at, resolved};
use super::protocol::{Attached, HeldMount, MountWish, REQUEST, VolumeIdentity, WITHDRAWAL, check_identity};
use super::wire::{Wire, seqpacket, with_address};
use crate::error::{Error, Result};
use crate::mount::fuse::point::{self, Attach};

mod admission;
mod backing;

/// Most mounts of a holder.
const MOUNTS_MAX: usize = 1_024;
/// How long a planned handover waits for the running server. Then the holder kills it, as in a crash.
const HANDOVER_MAX: Duration = Duration::from_secs(60);
/// How long a request waits for another one for the same path.
const TURN_MAX: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 30 });
/// How long the kernel has to end a killed server.
const KILLED_MAX: Duration = Duration::from_secs(10);

/// Options of [`Holder::start`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HolderOptions {
    /// A user that may connect, besides root and the holder's own.
    pub uid: Option<u32>,
    /// Folders below which mount points lie, for all users. Default: none; then trusted users mount anywhere, and
    /// [`HolderOptions::uid`] on folders that it owns.
    pub below: Vec<PathBuf>,
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
    pub(super) authority: Authority,
    roots: Vec<(PathBuf, OwnedFd)>,
    state: Mutex<State>,
    /// Paths at which a mount is being made or unmounted. One that does not answer delays no other.
    busy: Mutex<BTreeSet<PathBuf>>,
    /// Signals that a path is busy no more.
    freed: Condvar,
    /// Signals the end of a connection.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    mounts: BTreeMap<PathBuf, Held>,
    /// Served mounts without a path, by the connection of the server.
    aside: BTreeMap<u64, Held>,
    /// The share that each connection takes a place of.
    connections: BTreeMap<u64, Share>,
    next: u64,
}

/// The turn to mount or unmount at a path.
struct Turn<'a> {
    shared: &'a Shared,
    target: PathBuf,
}

/// One mount.
#[derive(Debug)]
struct Held {
    wish: MountWish,
    /// The user that has made the mount.
    owner: u32,
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
    /// An earlier holder may have opened backing files that this one does not know.
    was_adopted: bool,
    /// The connection that has had this mount made, until a server attaches.
    made_by: Option<u64>,
    server: Option<Server>,
}

/// The server of a mount.
#[derive(Debug)]
struct Server {
    connection: u64,
    rights: Rights,
    /// 0 in another PID namespace.
    pid: i32,
    process: Option<OwnedFd>,
    /// For [`REQUEST`] and [`WITHDRAWAL`].
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
        let authority = Authority::new(options.uid, &options.below).map_err(|(path, source)| Error::Io {
            operation: "open folder of mount points",
            path,
            source,
        })?;
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
            authority,
            roots,
            state: Mutex::default(),
            busy: Mutex::default(),
            freed: Condvar::new(),
            changed: Condvar::new(),
        });
        let to = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("datafs-holder".into())
            .spawn(move || admission::accept(&listener, &stop, &to))
            .map_err(failed)?;
        Ok(Holder { shared, socket: socket.to_owned(), ending: Some(ending), thread: Some(thread) })
    }

    /// The mounts, by path.
    pub fn mounts(&self) -> Vec<HeldMount> {
        self.shared.list(Rights::own())
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
        is_at(&target, &number).map_err(|source| point::refused("look for the mount at", &target, source))
    }

    /// Unmounts what this holder has mounted at a path, with or without a server. The path is free at once;
    /// open files stay usable while the server lives.
    ///
    /// # Errors
    /// [`Error::Io`] when the holder has nothing mounted there, or when the system refuses.
    pub fn unmount(&self, at: &Path) -> Result<()> {
        let failed = |reason: String| point::refused("unmount", at, io::Error::other(reason));
        self.shared.unmount(Rights::own(), at).map_err(failed)
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

impl Shared {
    /// A connection has ended, and with it the server that it was.
    pub(super) fn disconnects(&self, connection: u64) {
        let mut state = self.state.lock();
        state.connections.remove(&connection);
        if let Some(held) = state.aside.remove(&connection) {
            tracing::info!(target = %held.wish.target.display(), "the server of a detached mount has ended");
        }
        // Its client has died before it could serve: programs would wait there for no server.
        let unserved = state.mounts.extract_if(.., |_, held| held.made_by == Some(connection));
        let unserved: Vec<_> = unserved.collect();
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
        for (target, held) in unserved {
            tracing::info!(target = %target.display(), "taking off a mount whose server has not begun");
            // Another request for the path waits until it is free.
            let _turn = self.turn(&target);
            held.take_off(&target);
        }
    }

    /// The mounts that a client may use.
    pub(super) fn list(&self, rights: Rights) -> Vec<HeldMount> {
        let state = self.state.lock();
        let mounts = state.mounts.iter().filter(|(_, held)| rights.reaches(held.owner));
        mounts
            .map(|(target, held)| HeldMount {
                spec: held.wish.spec.clone(),
                target: target.clone(),
                servers: held.life,
                is_served: held.server.is_some(),
            })
            .collect()
    }

    /// The path by which a mount is known. Only for trusted clients are links followed.
    fn target_of(rights: Rights, path: &Path) -> Result<PathBuf, String> {
        let path = match rights.is_trusted && path.is_absolute() {
            true => resolved(path).map_err(|error| format!("cannot resolve {}: {error}", path.display()))?,
            false => path.components().collect(),
        };
        check_plain(&path)?;
        Ok(path)
    }

    /// Waits until no other request mounts or unmounts at a path.
    fn turn(&self, target: &Path) -> Result<Turn<'_>, String> {
        let until = Instant::now() + TURN_MAX;
        let mut busy = self.busy.lock();
        while busy.contains(target) {
            if self.freed.wait_until(&mut busy, until).timed_out() {
                return Err(format!(
                    "another request for {} has not ended for {} s: something there does not answer",
                    target.display(),
                    TURN_MAX.as_secs()
                ));
            }
        }
        busy.insert(target.to_owned());
        Ok(Turn { shared: self, target: target.to_owned() })
    }

    /// [`Shared::mount`] for a client that is about to attach. The mount is taken off if it ends before.
    pub(super) fn mount_for(&self, peer: &Peer, wish: MountWish) -> Result<PathBuf, String> {
        let target = self.mount(peer.rights, wish)?;
        if let Some(held) = self.state.lock().mounts.get_mut(&target)
            && held.life == 0
        {
            held.made_by = Some(peer.connection);
        }
        Ok(target)
    }

    /// Mounts, unless the same is mounted there. Returns the absolute path.
    pub(super) fn mount(&self, rights: Rights, wish: MountWish) -> Result<PathBuf, String> {
        let target = Shared::target_of(rights, &wish.target)?;
        let wish = MountWish { target: target.clone(), ..wish };
        self.authority.check_wish(rights, &wish, &target)?;
        // Two servers may ask for the same. Not under the lock of the state: this may wait for a disk.
        let _turn = self.turn(&target)?;
        let known = {
            let mut state = self.state.lock();
            state.drop_ended(&target);
            state.mounts.get(&target).map(|held| held.number.clone())
        };
        let is_attached = match &known {
            Some(number) => is_at(&target, number).map_err(|error| cannot_look(&target, &error))?,
            None => false,
        };
        {
            let mut state = self.state.lock();
            match state.mounts.get(&target) {
                Some(held) if is_attached && known.as_ref() == Some(&held.number) => {
                    held.check_reach(rights)?;
                    return wish.check_same(&held.wish).map(|()| target);
                }
                // Another process has unmounted it.
                Some(_) => state.set_aside(&target),
                None => {}
            }
            // The turn of this request is one of the busy paths.
            if state.mounts.len() + state.aside.len() + self.busy.lock().len() > MOUNTS_MAX {
                return Err(format!("the holder has {MOUNTS_MAX} mounts, its maximum: unmount one first"));
            }
        }
        let held = self.make(rights, wish)?;
        self.state.lock().mounts.insert(target.clone(), held);
        Ok(target)
    }

    /// Mounts on a folder that a client may use.
    fn make(&self, rights: Rights, wish: MountWish) -> Result<Held, String> {
        let target = &wish.target;
        let failed = |source| one_line(point::refused("open mount point", target, source));
        let place = match Place::open(target) {
            Err(error) if error.kind() == ErrorKind::NotFound && self.authority.creates(rights) => {
                fs::create_dir_all(target)
                    .map_err(|source| one_line(point::refused("create mount point", target, source)))?;
                Place::open(target).map_err(failed)?
            }
            opened => opened.map_err(failed)?,
        };
        self.authority.check_place(rights, target, &place)?;
        let place = place.prepare().map_err(one_line)?;
        Held::new(&place, wish, rights.uid).map_err(one_line)
    }

    /// Makes a connection the server of a mount, after the end of the one before. Returns what it gets, with the
    /// device, the journal and the read end of the control pipe. A program that would serve another volume is
    /// refused before the running server is asked to leave. The request is withdrawn when the client has gone.
    pub(super) fn attach(
        &self,
        peer: &Peer,
        target: &Path,
        volume: Option<&VolumeIdentity>,
        has_gone: &dyn Fn() -> bool,
    ) -> Result<(Attached, [OwnedFd; 3]), String> {
        let missing = || format!("nothing is mounted at {} by this holder: mount it first", target.display());
        let until = Instant::now() + HANDOVER_MAX;
        let number = self.state.lock().mounts.get(target).map(|held| held.number.clone());
        let number = number.ok_or_else(missing)?;
        if !is_at(target, &number).map_err(|error| cannot_look(target, &error))? {
            return Err(missing());
        }
        let mut state = self.state.lock();
        if state.served_by(peer.connection).is_some() {
            return Err("the connection serves a mount already".into());
        }
        let mut was_killed = false;
        loop {
            state.drop_ended(target);
            let found = state.mounts.get_mut(target).filter(|held| held.number == number);
            let held = found.ok_or_else(missing)?;
            held.check_reach(peer.rights)?;
            check_identity(held.wish.volume.as_ref(), volume)?;
            let Some(server) = &held.server else { break };
            if !held.resends {
                return Err(format!(
                    "the mount at {} is served, and the kernel cannot hand it over (it takes Linux 6.9): \
                     unmount it first",
                    target.display()
                ));
            }
            if has_gone() {
                server.tell(WITHDRAWAL);
                return Err("the program that was to serve the mount has ended".into());
            }
            let deadline = if was_killed { until + KILLED_MAX } else { until };
            if Instant::now() >= deadline {
                let may_kill = peer.rights.is_trusted || peer.rights.uid == server.rights.uid;
                let process = server.process.as_ref().filter(|_| may_kill && !was_killed);
                let Some(process) = process else {
                    server.tell(WITHDRAWAL);
                    return Err(format!(
                        "the running server of {} has not handed over within {} s: end it and try again",
                        target.display(),
                        HANDOVER_MAX.as_secs()
                    ));
                };
                tracing::warn!(target = %target.display(), pid = server.pid, "killing a server that does not hand over");
                if let Err(error) = peer::kill(process) {
                    tracing::warn!(
                        error = error_chain::one_line(&error),
                        pid = server.pid,
                        "a server that does not hand over cannot be killed"
                    );
                }
                was_killed = true;
                continue;
            }
            if !was_killed {
                server.tell(REQUEST);
            }
            self.changed.wait_until(&mut state, deadline.min(Instant::now() + Duration::from_secs(1)));
        }
        if let Some(held) = state.mounts.get_mut(target)
            && held.wish.volume.is_none()
        {
            held.wish.volume = volume.cloned();
        }
        self.begin(state, peer, target).map_err(|error| error.to_string())
    }

    fn begin(
        &self,
        mut state: MutexGuard<'_, State>,
        peer: &Peer,
        target: &Path,
    ) -> io::Result<(Attached, [OwnedFd; 3])> {
        let held = state.mounts.get_mut(target).ok_or(ErrorKind::NotFound)?;
        let (control, theirs) = pipe()?;
        let fds = [held.device.try_clone()?, held.journal.try_clone()?, theirs];
        held.server = Some(Server::new(peer, control)?);
        held.life += 1;
        held.made_by = None;
        tracing::info!(target = %target.display(), pid = peer.pid, servers = held.life, "a server attaches");
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

    /// Takes a mount from a server whose holder has died. Returns the read end of the control pipe. The process with
    /// the device of a mount is its server: a holder gives the device to no other.
    pub(super) fn adopt(
        &self,
        peer: &Peer,
        mut attached: Attached,
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
        check_plain(&target)?;
        let missing = || format!("the mount of the device is not at {}", target.display());
        let mounted = Place::open(&target).ok().and_then(|place| place.mounted().ok().flatten());
        let number = mounted.ok_or_else(missing)?;
        let is_its_device = match device::connection(&device) {
            Some(connection) => number.rsplit(':').next() == Some(connection.to_string().as_str()),
            None => peer.rights.is_trusted && number == attached.device,
        };
        if !is_its_device {
            return Err(missing());
        }
        attached.device = number;
        let mut state = self.state.lock();
        if state.served_by(peer.connection).is_some() {
            return Err("the connection serves a mount already".into());
        }
        state.drop_ended(&target);
        if state.mounts.contains_key(&target) || state.mounts.len() >= MOUNTS_MAX {
            return Err(format!("the holder has another mount at {}, or too many", target.display()));
        }
        let (control, theirs) = pipe().map_err(|error| error.to_string())?;
        let session = attached.sessions.last().copied();
        let server = Server::new(peer, control).map_err(|error| error.to_string())?;
        let held = Held {
            wish: attached.wish,
            owner: peer.rights.uid,
            number: attached.device,
            device,
            journal,
            init: attached.init,
            reply: attached.reply,
            resends: true,
            life: attached.life,
            sessions: session.map(|id| (id, fds.next())).into_iter().collect(),
            backings: BTreeSet::new(),
            was_adopted: true,
            made_by: None,
            server: Some(server),
        };
        tracing::info!(target = %target.display(), pid = peer.pid, "a server gives its mount to a new holder");
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
        let held = state.served_by(connection);
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

    /// An earlier session has ended, after everything of it was taken over.
    pub(super) fn session_ended(&self, connection: u64, own: u64, id: u64) -> Result<(), String> {
        self.with(connection, |held| {
            held.sessions.retain(|known, _| *known == own || *known != id);
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

    /// [`Shared::unmount`] for a client. The server of a mount that was detached before has nothing to unmount: its
    /// path is free, or has another mount.
    pub(super) fn unmount_for(&self, peer: &Peer, path: &Path) -> Result<(), String> {
        if self.state.lock().aside.contains_key(&peer.connection) {
            return Ok(());
        }
        self.unmount(peer.rights, path)
    }

    /// Unmounts. The path is free at once; open files stay usable while the server lives.
    fn unmount(&self, rights: Rights, path: &Path) -> Result<(), String> {
        let target = &Shared::target_of(rights, path)?;
        let _turn = self.turn(target)?;
        let (number, is_dead) = match self.state.lock().mounts.get(target) {
            Some(held) if rights.reaches(held.owner) => (held.number.clone(), held.waits_forever()),
            _ => return Err(format!("nothing is mounted at {} by this holder", target.display())),
        };
        // Not under the lock of the state: the end of a mount may wait for its server.
        place::detach(target, &number, is_dead)
            .map_err(|error| format!("cannot unmount {}: {error}", target.display()))?;
        let mut state = self.state.lock();
        if state.mounts.get(target).is_some_and(|held| held.number == number) {
            state.set_aside(target);
        }
        Ok(())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.shared.busy.lock().remove(&self.target);
        self.shared.freed.notify_all();
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

    /// Frees the path of a mount that is detached from it. Its server goes on with the open files.
    fn set_aside(&mut self, target: &Path) {
        let Some(held) = self.mounts.remove(target) else { return };
        if let Some(connection) = held.server.as_ref().map(|server| server.connection) {
            self.aside.insert(connection, held);
        }
    }

    /// The mount that a connection serves.
    fn served_by(&mut self, connection: u64) -> Option<&mut Held> {
        let aside = self.aside.get_mut(&connection);
        aside.or_else(|| self.mounts.values_mut().find(|held| held.is_served_by(connection)))
    }
}

impl Server {
    fn new(peer: &Peer, control: File) -> io::Result<Server> {
        let Peer { connection, rights, pid, .. } = *peer;
        Ok(Server { connection, rights, pid, process: peer.process()?, control })
    }

    /// Puts a byte into the control pipe.
    fn tell(&self, word: u8) {
        // A full pipe belongs to a server that does not read: it is killed in the end.
        if let Err(error) = (&self.control).write(&[word]) {
            tracing::debug!(%error, pid = self.pid, "a server is not told");
        }
    }
}

impl Held {
    fn new(place: &Place, wish: MountWish, owner: u32) -> Result<Held> {
        let target = &wish.target;
        let failed = |source| point::refused("mount on", target, source);
        let options = wish.options();
        let device =
            place.attach(&Attach { source: &wish.spec, read_only: wish.read_only, options: &options })?;
        let mounted = Place::open(target).map_err(failed)?.mounted()?;
        let number = mounted.ok_or_else(|| failed(io::Error::other("the folder was moved meanwhile")))?;
        let made = || -> io::Result<_> { Ok((device::read_init(&device)?, Journal::create()?)) };
        let (init, journal) = made().map_err(failed).inspect_err(|_: &Error| {
            if let Err(error) = place::detach(target, &number, true) {
                tracing::warn!(
                    error = error_chain::one_line(&error), path = %target.display(),
                    "a failed mount could not be taken off"
                );
            }
        })?;
        point::raise_read_ahead(&number);
        Ok(Held {
            wish,
            owner,
            number,
            device,
            journal,
            init,
            reply: None,
            resends: true,
            life: 0,
            sessions: BTreeMap::new(),
            backings: BTreeSet::new(),
            was_adopted: false,
            made_by: None,
            server: None,
        })
    }

    fn is_served_by(&self, connection: u64) -> bool {
        self.server.as_ref().is_some_and(|server| server.connection == connection)
    }

    /// Whether no server answers the requests of the mount. Not where another program has ended it: the number may be that
    /// of a later mount by now.
    fn waits_forever(&self) -> bool {
        self.server.is_none() && !device::has_ended(&self.device)
    }

    /// Refuses a client that may not use this mount.
    fn check_reach(&self, rights: Rights) -> Result<(), String> {
        match rights.reaches(self.owner) {
            true => Ok(()),
            false => Err(format!("the mount at {} belongs to another user", self.wish.target.display())),
        }
    }

    /// Ends a mount without a server.
    fn take_off(self, target: &Path) {
        if let Err(error) = place::detach(target, &self.number, self.waits_forever()) {
            tracing::warn!(
                error = error_chain::one_line(&error), path = %target.display(),
                "a mount without a server stays"
            );
        }
    }
}

fn pipe() -> io::Result<(File, OwnedFd)> {
    let (theirs, mine) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
    Ok((mine.into(), theirs))
}

fn cannot_look(target: &Path, error: &io::Error) -> String {
    format!("cannot look for the mount at {}: {error}", target.display())
}

fn one_line(error: Error) -> String {
    millrace_leaf::error_chain::one_line(&error)
}

#[cfg(test)]
mod tests;
