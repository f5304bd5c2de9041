//! The lifecycle of one mount: attach, serve, detach, flush.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{Notifier, Session, SessionACL};
use millrace_leaf::error_chain;
use parking_lot::{Condvar, Mutex};

use super::answer::Adapter;
use super::instrumented::InstrumentedFs;
use super::passthrough::{self, Registrar};
use super::point::{self, Attach};
use super::write_back::WriteBack;
use crate::error::{Error, Result};
use crate::fs::View;
use crate::mount::coherence::{Coherence, Doubt};
use crate::mount::convert::Inodes;
use crate::mount::handles::Handles;
use crate::mount::handover::Held;
use crate::mount::locks::Locks;
use crate::mount::observe::control::{self, Control};
use crate::mount::observe::exported::export;
use crate::mount::observe::stats::MountStats;
use crate::mount::observe::watch::Watch;
use crate::mount::opening::{self, Open, Opening};
use crate::mount::options::MountOptions;

/// Grace period for open files after an unmount; then the mount aborts the connection.
const GRACE: Duration = Duration::from_secs(3);
/// Most serving threads of one mount.
const THREADS_MAX: usize = 64;

/// A mounted view. Dropping it unmounts like [`Mount::unmount`] and logs errors.
#[derive(Debug)]
pub struct Mount {
    at: PathBuf,
    device: String,
    handles: Arc<Handles>,
    locks: Arc<Locks>,
    coherence: Arc<Coherence>,
    write_back: Arc<WriteBack>,
    watch: Arc<Watch>,
    /// The control socket for other processes; `None` if it could not be created.
    control: Option<Control>,
    opening: Opening,
    ended: Arc<Ended>,
    thread: Option<JoinHandle<io::Result<()>>>,
    held: Option<Arc<Held>>,
}

/// How a mount has ended for this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It is unmounted.
    Unmounted,
    /// Everything is committed, and another process waits for the end of this one to serve the mount. End the
    /// process now, without dropping the [`Mount`]: `std::process::exit`.
    HandedOver,
    /// [`Stopper::stop`] asked for the end. [`Mount::cut_off`] ends what is left.
    Stopped,
}

/// Ends the wait of [`Mount::wait`], from any thread.
#[derive(Debug, Clone)]
pub struct Stopper(Arc<Ended>);

impl Stopper {
    /// Has [`Mount::wait`] return [`End::Stopped`], unless the mount has ended already.
    pub fn stop(&self) {
        let _flag = self.0.flag.lock();
        *self.0.stopped.lock() = true;
        self.0.changed.notify_all();
    }
}

/// Whether the threads of a mount have ended, or have handed over.
#[derive(Debug, Default)]
struct Ended {
    flag: Mutex<bool>,
    handed_over: Mutex<bool>,
    stopped: Mutex<bool>,
    changed: Condvar,
}

impl Ended {
    fn set(&self) {
        *self.flag.lock() = true;
        self.changed.notify_all();
    }

    fn hand_over(&self) {
        let _flag = self.flag.lock();
        *self.handed_over.lock() = true;
        self.changed.notify_all();
    }

    fn wait_for_end(&self) -> End {
        let mut flag = self.flag.lock();
        loop {
            if *self.handed_over.lock() {
                return End::HandedOver;
            }
            if *flag {
                return End::Unmounted;
            }
            if *self.stopped.lock() {
                return End::Stopped;
            }
            self.changed.wait(&mut flag);
        }
    }

    fn wait(&self, at_most: Duration) -> bool {
        let until = Instant::now() + at_most;
        let mut flag = self.flag.lock();
        while !*flag {
            if self.changed.wait_until(&mut flag, until).timed_out() {
                return *flag;
            }
        }
        true
    }
}

/// Sets the flag however the thread ends.
struct SetAtEnd(Arc<Ended>);

impl Drop for SetAtEnd {
    fn drop(&mut self) {
        self.0.set();
    }
}

pub(in crate::mount) fn mount(view: View, at: &Path, options: &MountOptions) -> Result<Mount> {
    check(options)?;
    let at = point::prepare(at)?;
    let opening = opening::decide(&view, options.open)?;
    let source = view.spec().to_string();
    let read_only = options.read_only || view.is_snapshot();
    let attach = Attach { source: &source, read_only, options };
    // A separate writer ID distinguishes the mount's changes from those of other mounts and of this process.
    let handles = Arc::new(Handles::new(view.as_writer()?));
    let device = point::attach(&at, &attach)?;
    let failed = |error| {
        take_off(&at);
        point::refused("serve the mount at", &at, error)
    };
    handles.set_registrar(Registrar::Own(File::from(device.try_clone().map_err(failed)?)));
    let started = Started::new(handles, &at);
    let (thread, ended) =
        started.serve(Source::Own(device), options, (opening.way, &at), &[]).map_err(failed)?;
    let found = point::find(&at).inspect_err(|_| {
        // The session already runs; it ends when nothing is mounted any more.
        started.locks.stop();
        take_off(&at);
        ended.wait(GRACE);
        started.coherence.stop();
    });
    let device = found?.map(|entry| entry.device).unwrap_or_default();
    point::raise_read_ahead(&device);
    started.finish((at, device), options, opening, (thread, ended), None)
}

/// [`mount`] through the holder at a socket.
pub(in crate::mount) fn mount_held(
    view: View,
    at: &Path,
    options: &MountOptions,
    holder: &Path,
) -> Result<Mount> {
    check(options)?;
    // Everything that takes time comes before the attach: until the end of this function the mount has no server.
    let opening = opening::decide(&view, options.open)?;
    let handles = Arc::new(Handles::new(view.as_writer()?));
    let read_only = options.read_only || view.is_snapshot();
    let (held, left) = Held::attach(holder, &handles.view, at, read_only, options)?;
    let at = held.target();
    let failed = |error| point::refused("serve the mount at", &at, error);
    handles.set_registrar(held.registrar().map_err(failed)?);
    let started = Started::new(handles, &at);
    if held.life() > 1 {
        started.coherence.inherits();
    }
    let open = held.restore(&started.handles, &started.locks, &left)?;
    if !started.handles.view.is_snapshot() {
        held.keep(held.journal.start(started.handles.view.clone()).map_err(failed)?);
    }
    let served = started.serve(Source::Held(&held), options, (opening.way, &at), &open).map_err(failed)?;
    let device = held.number();
    let mount = started.finish((at.clone(), device), options, opening, served, Some(Arc::clone(&held)))?;
    if held.life() > 1 {
        // Removes the control socket of the server before, which has not ended its mount.
        let home = &mount.handles.view.shared.home;
        if let Err(error) = control::served(home) {
            tracing::debug!(%error, "the control sockets of earlier servers stay");
        }
    }
    let hand_over = mount.hand_over(&held);
    held.listen(hand_over).map_err(failed)?;
    Ok(mount)
}

fn check(options: &MountOptions) -> Result<()> {
    if !(1..=THREADS_MAX).contains(&options.threads) {
        return Err(Error::Invalid(format!(
            "a mount has 1 to {THREADS_MAX} threads, not {}",
            options.threads
        )));
    }
    Ok(())
}

/// The device of a mount.
enum Source<'a> {
    Own(OwnedFd),
    Held(&'a Arc<Held>),
}

/// The parts of a mount that exist before it serves.
struct Started {
    handles: Arc<Handles>,
    locks: Arc<Locks>,
    coherence: Arc<Coherence>,
    watch: Arc<Watch>,
}

impl Started {
    fn new(handles: Arc<Handles>, at: &Path) -> Started {
        let coherence = Arc::new(Coherence::new(&handles.view, Inodes::new(handles.view.root())));
        let watch = Arc::new(Watch::new(&handles.view.spec().to_string(), at, &handles));
        let locks = Arc::new(Locks::new(Arc::clone(&coherence), Arc::clone(&watch)));
        Started { handles, locks, coherence, watch }
    }

    fn finish(
        self,
        (at, device): (PathBuf, String),
        options: &MountOptions,
        mut opening: Opening,
        (thread, ended): Served,
        held: Option<Arc<Held>>,
    ) -> Result<Mount> {
        let Started { handles, locks, coherence, watch } = self;
        if opening.way == Open::Passthrough && !handles.has_passthrough() {
            opening = opening::without_passthrough(opening);
        }
        tracing::info!(volume = %handles.view.spec(), path = %at.display(), %opening, "mounted");
        watch.attached(&opening.to_string(), &device);
        export(&watch);
        let home = &handles.view.shared.home;
        let control = Control::start(home, &watch)
            .inspect_err(|error| {
                tracing::warn!(
                    error = error_chain::one_line(&error), home = %home.display(),
                    "statistics of this mount are not available to other processes"
                )
            })
            .ok();
        let trace = options.trace.as_ref().map(|trace| watch.trace.start(trace, watch.device()));
        let mount = Mount {
            at,
            device,
            handles,
            locks,
            coherence,
            write_back: Arc::default(),
            watch,
            control,
            opening,
            ended,
            thread: Some(thread),
            held,
        };
        if !mount.handles.view.is_snapshot() {
            // Dropping the mount detaches it.
            mount
                .write_back
                .start(&mount.handles)
                .map_err(|e| point::refused("serve the mount at", &mount.at, e))?;
        }
        match trace {
            // Dropping the mount detaches it.
            Some(Err(error)) => Err(error),
            _ => Ok(mount),
        }
    }
}

/// Detaches a mount whose start has failed.
fn take_off(at: &Path) {
    if let Err(error) = point::detach(at, true) {
        tracing::warn!(
            error = error_chain::one_line(&error), path = %at.display(),
            "a failed mount could not be taken off"
        );
    }
}

type Served = (JoinHandle<io::Result<()>>, Arc<Ended>);

impl Started {
    /// Starts the threads that serve the kernel's requests. `open` are files of which the kernel may have
    /// outdated data.
    fn serve(
        &self,
        source: Source<'_>,
        options: &MountOptions,
        (way, at): (Open, &Path),
        open: &[Doubt],
    ) -> io::Result<Served> {
        let Started { handles, locks, coherence, watch } = self;
        let mut config = fuser::Config::default();
        config.n_threads = Some(options.threads);
        // A clone of the device belongs to its process: the kernel fails the requests of a clone that is closed.
        config.clone_fd = options.threads > 1 && matches!(source, Source::Own(_));
        let acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
        config.acl = acl;
        let adapter = Adapter::new(Arc::clone(handles), Arc::clone(locks), Arc::clone(coherence), way);
        let gate = match source {
            Source::Own(_) => None,
            Source::Held(held) => Some(Arc::clone(&held.gate)),
        };
        let file_system = InstrumentedFs { adapter, watch: Arc::clone(watch), gate };
        let (session, own_device, rehearsed) = match source {
            Source::Own(device) => {
                let own_device = File::from(device.try_clone()?);
                (Session::from_fd(file_system, device, acl, config)?, own_device, None)
            }
            Source::Held(held) => {
                let (session, rehearsed) =
                    held.rehearse(|socket| Session::from_fd(file_system, socket, acl, config))?;
                (session, held.device()?, Some((held, rehearsed)))
            }
        };
        let is_own = handles.registrar().is_none_or(|registrar| matches!(**registrar, Registrar::Own(_)));
        if handles.has_passthrough() && is_own {
            match passthrough::is_permitted(&own_device) {
                Ok(permitted) => handles.set_passthrough(permitted),
                Err(error) => tracing::debug!(%error, "trying whether the kernel takes files from us"),
            }
        }
        if !handles.view.is_snapshot() {
            locks.start(handles)?;
        }
        let notifier = session.notifier();
        let Some((held, rehearsed)) = rehearsed else {
            self.attend(notifier, own_device, open);
            return run(session, at);
        };
        let served = run(session, at)?;
        held.begin(rehearsed, options.threads)?;
        self.attend(notifier, own_device, open);
        held.gate.open();
        Ok(served)
    }

    /// Starts to tell the kernel of changes by others. `open` are files of which it may have outdated data.
    fn attend(&self, notifier: Notifier, device: File, open: &[Doubt]) {
        let Started { handles, locks, coherence, .. } = self;
        if handles.view.is_snapshot() {
            return;
        }
        // Weak: the volumes keep the listener, and `Locks` keeps the volumes open.
        let wake = Arc::downgrade(locks);
        let wake = move || wake.upgrade().into_iter().for_each(|locks| locks.wake());
        if let Err(error) = coherence.start(&handles.view, notifier, device, wake) {
            tracing::warn!(
                error = error_chain::one_line(&error),
                "the kernel keeps nothing of this mount: changes cannot be listened to"
            );
        }
        if !open.is_empty() {
            coherence.doubts(&handles.view, open);
        }
    }
}

/// Runs the threads of a session until the mount ends.
fn run(session: Session<InstrumentedFs>, at: &Path) -> io::Result<Served> {
    let ended = Arc::new(Ended::default());
    let at_end = SetAtEnd(Arc::clone(&ended));
    let path = at.display().to_string();
    let thread = std::thread::Builder::new().name("datafs-mount".into()).spawn(move || {
        let _at_end = at_end;
        let result = session.run();
        if let Err(error) = &result {
            tracing::error!(error = error_chain::one_line(&error), path, "a mount ended with an error");
        }
        result
    })?;
    Ok((thread, ended))
}

impl Mount {
    /// The absolute path of the mount point.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// How the mount opens files, and why, as text for people.
    pub fn opening(&self) -> &Opening {
        &self.opening
    }

    /// Statistics since the mount began. Other processes request them through [`crate::mount::served`].
    pub fn stats(&self) -> MountStats {
        self.watch.stats()
    }

    /// Unmounts and waits until all writes are committed. While files are open the path is freed at once.
    /// Programs have three seconds to close them, then they get errors.
    ///
    /// # Errors
    /// Errors of the final commit, or the system's refusal to unmount. The mount has ended nevertheless.
    pub fn unmount(mut self) -> Result<()> {
        self.end()
    }

    /// A function for another thread that detaches this mount from its path, so that [`Mount::join`] returns. It
    /// leaves another mount alone that is at the path by then, where a holder keeps this one.
    pub fn detacher(&self) -> impl FnOnce() -> Result<()> + Send + use<> {
        let (held, at) = (self.held.clone(), self.at.clone());
        move || match held {
            Some(held) => held.unmount(),
            None => crate::mount::umount(&at),
        }
    }

    /// Waits until another process or thread ends the mount: [`crate::mount::umount`] or the `umount` command.
    ///
    /// # Errors
    /// Errors of the final commit, or a failure of the serving threads.
    pub fn join(mut self) -> Result<()> {
        self.collect()
    }

    /// Ends a mount that is unmounted already while programs may still use it: an open file or a current folder keeps
    /// the kernel's connection. Programs have three seconds, then they get errors. Waits until all writes are
    /// committed.
    ///
    /// # Errors
    /// Errors of the final commit, or a failure of the serving threads.
    pub fn cut_off(mut self) -> Result<()> {
        // A thread that waits for a lock would keep the mount busy.
        self.locks.stop();
        self.end_within_grace(Ok(()))
    }

    /// A handle that ends [`Mount::wait`].
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.ended))
    }

    /// Waits until the mount ends for this process, and tells how. After [`End::Unmounted`], [`Mount::join`]
    /// returns the result. Only a mount of [`crate::mount::mount_held`] is ever handed over.
    pub fn wait(&self) -> End {
        self.ended.wait_for_end()
    }

    /// The work of a planned handover. It asks whether the handover is still wanted once everything is committed,
    /// goes on serving if not, and returns whether it has handed over.
    fn hand_over(&self, held: &Arc<Held>) -> impl FnMut(&dyn Fn() -> bool) -> bool + Send + use<> {
        let (held, ended) = (Arc::clone(held), Arc::clone(&self.ended));
        let (handles, locks) = (Arc::clone(&self.handles), Arc::clone(&self.locks));
        let write_back = Arc::clone(&self.write_back);
        move |is_wanted| {
            held.gate.close();
            write_back.stop();
            let flushed = handles.flush_all();
            // Everything that was answered survives, also what no program has synced.
            let synced = match handles.view.is_snapshot() {
                true => Ok(()),
                false => handles.view.sync().and_then(|()| held.journal.settle(&handles.view)),
            };
            match flushed.and(synced) {
                Ok(()) => held.journal.clear_overflow(),
                Err(error) => {
                    tracing::error!(%error, "a handover loses writes; programs get an error for them");
                }
            }
            if !is_wanted() {
                if !handles.view.is_snapshot()
                    && let Err(error) = write_back.start(&handles)
                {
                    tracing::error!(
                        error = error_chain::one_line(&error),
                        "open files are committed when they are closed or synced only"
                    );
                }
                held.gate.open();
                return false;
            }
            locks.abandon();
            ended.hand_over();
            true
        }
    }

    /// Whether the mount still serves; `false` once it is unmounted and its last file is closed.
    pub fn is_serving(&self) -> bool {
        !*self.ended.flag.lock()
    }

    fn end(&mut self) -> Result<()> {
        if self.thread.is_none() {
            return Ok(());
        }
        // A thread that waits for a lock would keep the mount busy.
        self.locks.stop();
        let detached = self.detach();
        self.end_within_grace(detached)
    }

    /// Waits for the programs that use a detached mount, at most [`GRACE`], and ends it. Returns the first error.
    fn end_within_grace(&mut self, mut result: Result<()>) -> Result<()> {
        if !self.ended.wait(GRACE) {
            tracing::warn!(path = %self.at.display(), "files are still open: cutting them off");
            if !point::abort(&self.device) || !self.ended.wait(GRACE) {
                // The threads keep serving those files until they are closed or the process ends.
                let flushed = self.handles.flush_all();
                self.thread = None;
                return result.and(flushed);
            }
        }
        let collected = self.collect();
        if result.is_ok() {
            result = collected;
        }
        result
    }

    /// Detaches the mount from its path, unless it is detached already (and perhaps replaced by another mount).
    fn detach(&self) -> Result<()> {
        if let Some(held) = &self.held {
            // Mostly files are open.
            let flushed = self.handles.flush_all();
            return held.unmount().and(flushed);
        }
        if !self.is_attached()? {
            return Ok(());
        }
        if point::detach(&self.at, false).is_ok() {
            return Ok(());
        }
        // Mostly because files are open.
        let flushed = self.handles.flush_all();
        match point::detach(&self.at, true) {
            Err(error) if self.is_attached()? => Err(point::refused("unmount", &self.at, error)),
            _ => flushed,
        }
    }

    fn is_attached(&self) -> Result<bool> {
        let there = point::find(&self.at)?;
        Ok(there.is_some_and(|entry| entry.device == self.device))
    }

    fn collect(&mut self) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        let served = thread.join();
        if let Some(held) = &self.held {
            held.stop();
            self.handles.view.shared.open.end_journal();
        }
        self.control = None;
        self.watch.trace.stop();
        self.write_back.stop();
        self.locks.stop();
        self.coherence.stop();
        let flushed = self.handles.flush_all();
        self.handles.clear();
        let flushed = flushed.and(self.handles.view.shared.meta.settle());
        match served {
            Ok(Ok(())) => flushed,
            Ok(Err(error)) => Err(point::refused("serve the mount at", &self.at, error)),
            Err(_) => Err(point::refused(
                "serve the mount at",
                &self.at,
                io::Error::other("a serving thread panicked"),
            )),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::warn!(error = error_chain::one_line(&error), path = %self.at.display(), "unmounting");
        }
    }
}

#[cfg(test)]
mod tests;
