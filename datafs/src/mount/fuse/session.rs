//! The lifecycle of one mount: attach, serve, detach, flush.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fuser::{Session, SessionACL};
use parking_lot::{Condvar, Mutex};

use super::answer::Adapter;
use super::instrumented::InstrumentedFs;
use super::passthrough;
use super::point::{self, Attach};
use super::write_back::WriteBack;
use crate::error::{Error, Result};
use crate::fs::View;
use crate::mount::coherence::Coherence;
use crate::mount::convert::Inodes;
use crate::mount::handles::Handles;
use crate::mount::locks::Locks;
use crate::mount::observe::control::Control;
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
    write_back: WriteBack,
    watch: Arc<Watch>,
    /// The control socket for other processes; `None` if it could not be created.
    control: Option<Control>,
    opening: Opening,
    ended: Arc<Ended>,
    thread: Option<JoinHandle<io::Result<()>>>,
}

/// Whether the threads of a mount have ended.
#[derive(Debug, Default)]
struct Ended {
    flag: Mutex<bool>,
    changed: Condvar,
}

impl Ended {
    fn set(&self) {
        *self.flag.lock() = true;
        self.changed.notify_all();
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
    if !(1..=THREADS_MAX).contains(&options.threads) {
        return Err(Error::Invalid(format!(
            "a mount has 1 to {THREADS_MAX} threads, not {}",
            options.threads
        )));
    }
    let at = point::prepare(at)?;
    let mut opening = opening::decide(&view, options.open)?;
    let source = view.spec().to_string();
    let read_only = options.read_only || view.is_snapshot();
    let attach = Attach { source: &source, read_only, options };
    // A separate writer ID distinguishes the mount's changes from those of other mounts and of this process.
    let handles = Arc::new(Handles::new(view.as_writer()?));
    let device_fd = point::attach(&at, &attach)?;
    let coherence = Arc::new(Coherence::new(&handles.view, Inodes::new(handles.view.root())));
    let watch = Arc::new(Watch::new(&source, &at, &handles));
    let locks = Arc::new(Locks::new(Arc::clone(&coherence), Arc::clone(&watch)));
    let served = serve(device_fd, &handles, (&locks, &coherence), options, (opening.way, &watch), &at);
    let (thread, ended) = match served {
        Ok(served) => served,
        Err(error) => {
            take_off(&at);
            return Err(point::refused("serve the mount at", &at, error));
        }
    };
    let found = point::find(&at).inspect_err(|_| {
        // The session already runs; it ends when nothing is mounted any more.
        locks.stop();
        take_off(&at);
        ended.wait(GRACE);
        coherence.stop();
    });
    let device = found?.map(|entry| entry.device).unwrap_or_default();
    point::raise_read_ahead(&device);
    if opening.way == Open::Passthrough && !handles.has_passthrough() {
        opening = opening::without_passthrough(opening);
    }
    tracing::info!(volume = %source, path = %at.display(), %opening, "mounted");
    watch.attached(&opening.to_string(), &device);
    export(&watch);
    let home = &handles.view.shared.home;
    let control = Control::start(home, &watch)
        .inspect_err(
            |error| tracing::warn!(%error, home = %home.display(), "a mount tells nobody what it does"),
        )
        .ok();
    let trace = options.trace.as_ref().map(|trace| watch.trace.start(trace, watch.device()));
    let mount = Mount {
        at,
        device,
        handles,
        locks,
        coherence,
        write_back: WriteBack::default(),
        watch,
        control,
        opening,
        ended,
        thread: Some(thread),
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

/// Detaches a mount whose start has failed.
fn take_off(at: &Path) {
    if let Err(error) = point::detach(at, true) {
        tracing::warn!(%error, path = %at.display(), "a failed mount could not be taken off");
    }
}

type Served = (JoinHandle<io::Result<()>>, Arc<Ended>);

fn serve(
    device: std::os::fd::OwnedFd,
    handles: &Arc<Handles>,
    (locks, coherence): (&Arc<Locks>, &Arc<Coherence>),
    options: &MountOptions,
    (way, watch): (Open, &Arc<Watch>),
    at: &Path,
) -> io::Result<Served> {
    let mut config = fuser::Config::default();
    config.n_threads = Some(options.threads);
    config.clone_fd = options.threads > 1;
    let acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.acl = acl;
    let adapter = Adapter::new(Arc::clone(handles), Arc::clone(locks), Arc::clone(coherence), way);
    let file_system = InstrumentedFs { adapter, watch: Arc::clone(watch) };
    let own_device = File::from(device.try_clone()?);
    let session = Session::from_fd(file_system, device, acl, config)?;
    if handles.has_passthrough() {
        match passthrough::is_permitted(&own_device) {
            Ok(permitted) => handles.set_passthrough(permitted),
            Err(error) => tracing::debug!(%error, "trying whether the kernel takes files from us"),
        }
    }
    if !handles.view.is_snapshot() {
        locks.start(handles)?;
        // Weak: the volumes keep the listener, and `Locks` keeps the volumes open.
        let wake = Arc::downgrade(locks);
        let wake = move || wake.upgrade().into_iter().for_each(|locks| locks.wake());
        if let Err(error) = coherence.start(&handles.view, session.notifier(), own_device, wake) {
            tracing::warn!(%error, "the kernel keeps nothing of this mount: changes cannot be listened to");
        }
    }
    let ended = Arc::new(Ended::default());
    let at_end = SetAtEnd(Arc::clone(&ended));
    let path = at.display().to_string();
    let thread = std::thread::Builder::new().name("datafs-mount".into()).spawn(move || {
        let _at_end = at_end;
        let result = session.run();
        if let Err(error) = &result {
            tracing::error!(%error, path, "a mount ended with an error");
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

    /// Waits until another process or thread ends the mount: [`crate::mount::umount`] or the `umount` command.
    ///
    /// # Errors
    /// Errors of the final commit, or a failure of the serving threads.
    pub fn join(mut self) -> Result<()> {
        self.collect()
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
        let mut result = self.detach();
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
            tracing::warn!(%error, path = %self.at.display(), "unmounting");
        }
    }
}

#[cfg(test)]
mod tests;
