//! What this process has open: a runtime, homes, feeds and files.
//!
//! Threads do not survive a fork, and locks that they held stay held. SQLite takes the locks of a parent for those of
//! the child. Before Python forks, `before_fork` therefore waits for running calls and closes everything, until the
//! metadata files are closed; both processes open it again at their next call. Files that are being written cannot be
//! closed: while there are any, the parent keeps everything open but the servers of shared row groups, whose sockets the
//! child would inherit. A child that inherits something open, also by a fork that Python does not know of,
//! finds out by its process id. It is refused every call, and never touches what it inherited.
//!
//! Calls use the engine through [`with`], which leaves the interpreter: a call that waited for the interpreter while
//! it holds the engine would block a fork for ever.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockWriteGuard, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use millrace_datafs::{Closing, Datafs, OpenFile, StagedWriter};
use millrace_home::{Home, settings};
use millrace_streams::KafkaConfig;
use pyo3::prelude::*;
use serde::{Deserialize, Serialize};
use tokio::runtime::{Builder, Runtime};
use tracing_subscriber::EnvFilter;

use crate::error::{Failure, Result};
use crate::reader::Reading;

/// How long the end of the engine waits for work that cannot be interrupted.
const PATIENCE: Duration = Duration::from_secs(30);

/// All that a process has open.
pub(crate) struct Engine {
    runtime: Option<Runtime>,
    homes: Mutex<HashMap<PathBuf, (Home, Datafs, millrace_streams::Config)>>,
    /// Open feeds, by the number of their reader.
    pub(crate) readings: Table<Mutex<Reading>>,
    /// Files open for reading.
    pub(crate) files: Table<OpenFile>,
    /// Files being written.
    pub(crate) writers: Table<Mutex<StagedWriter>>,
}

/// Things by number. A number is never used again in a process or in its children.
pub(crate) struct Table<T>(Mutex<HashMap<u64, Arc<T>>>);

/// The tables of the configuration that concern volumes and topics. The command checks the other tables.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Settings {
    datafs: millrace_datafs::Config,
    streams: millrace_streams::Config,
}

/// Something that nothing uses any more, by its number.
pub(crate) enum GivenUp {
    Reading(u64),
    File(u64),
    Writer(u64),
}

struct Process {
    pid: u32,
    engine: RwLock<Option<Engine>>,
    /// Metadata that was closed, but is open as long as a thread reads.
    closing: Mutex<Vec<Closing>>,
    given_up: Mutex<Vec<GivenUp>>,
    /// Whether the engine is open, or was when this process was forked.
    open: AtomicBool,
    inherited: bool,
}

/// The process that opened the engine: this one, or one that forked into it.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

thread_local! {
    /// Held by the thread that forks, from before the fork until it is done.
    static FORKING: RefCell<Option<RwLockWriteGuard<'static, Option<Engine>>>> = const { RefCell::new(None) };
}

/// A number for a new thing.
pub(crate) fn number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Runs a call outside of the interpreter with this process's engine, which starts if it is not running.
pub(crate) fn with<T: Send>(py: Python<'_>, call: impl FnOnce(&Engine) -> Result<T> + Send) -> PyResult<T> {
    py.detach(|| with_engine(call)).map_err(|failure| failure.raise(py))
}

fn with_engine<T>(call: impl FnOnce(&Engine) -> Result<T>) -> Result<T> {
    let process = process();
    if process.inherited {
        return Err(Failure::Inherited);
    }
    if is_forking() {
        return Err(Failure::Forking);
    }
    loop {
        if let Some(engine) = &*process.engine.read().unwrap_or_else(PoisonError::into_inner) {
            process.release(engine);
            return call(engine);
        }
        let mut engine = process.engine.write().unwrap_or_else(PoisonError::into_inner);
        if engine.is_none() {
            process.open.store(true, Ordering::Release);
            *engine = Some(Engine::start()?);
        }
    }
}

/// Closes something that nothing uses any more, and waits for nothing: while a fork waits, that closes it.
pub(crate) fn give_up(thing: GivenUp) {
    let process = process();
    if process.inherited {
        return;
    }
    lock(&process.given_up).push(thing);
    if let Ok(engine) = process.engine.try_read()
        && let Some(engine) = &*engine
    {
        process.release(engine);
    }
}

/// Whether this thread forks at the moment. It would wait for itself for the engine.
fn is_forking() -> bool {
    FORKING.with_borrow(Option::is_some)
}

impl Process {
    /// Closes everything. Waits for the last commits, at most `limit`, and at most [`PATIENCE`] for calls that still run.
    /// What is not closed by then counts as open, and is closed later.
    fn close(&self, engine: &mut Option<Engine>, limit: Duration) {
        let until = Instant::now() + PATIENCE;
        let mut closing = lock(&self.closing);
        if let Some(engine) = engine.take() {
            closing.extend(lock(&engine.homes).values().map(|(_, volumes, _)| volumes.closing()));
            let (done, ended) = mpsc::channel::<()>();
            // The last commit may wait for another process for longer. Without a thread, the engine ends in the call.
            let ending = thread::Builder::new().name("millrace-close".into()).spawn(move || {
                drop(engine);
                drop(done);
            });
            if ending.is_ok() {
                // Disconnected at the end.
                ended.recv_timeout(limit).ok();
            }
        }
        closing.retain(|home| !home.wait(until.saturating_duration_since(Instant::now())));
        if !closing.is_empty() {
            let seconds = PATIENCE.as_secs();
            tracing::warn!(
                homes = closing.len(),
                "calls keep volumes open for longer than {seconds} s: a child that is \
                forked now cannot use Millrace"
            );
        }
        self.open.store(self.inherited || !closing.is_empty(), Ordering::Release);
    }

    /// Closes what was given up.
    fn release(&self, engine: &Engine) {
        let given_up = std::mem::take(&mut *lock(&self.given_up));
        for thing in given_up {
            match thing {
                GivenUp::Reading(number) => drop(engine.readings.take(number)),
                GivenUp::File(number) => drop(engine.files.take(number)),
                GivenUp::Writer(number) => drop(engine.writers.take(number)),
            }
        }
    }
}

fn process() -> &'static Process {
    let pid = std::process::id();
    let found = PROCESS.load(Ordering::Acquire);
    // SAFETY: the pointer is null or came from `Box::leak` below, and nothing frees it.
    if let Some(process) = unsafe { found.as_ref() }
        && process.pid == pid
    {
        return process;
    }
    // SAFETY: as above.
    let inherited = unsafe { found.as_ref() }.is_some_and(|parent| parent.open.load(Ordering::Acquire));
    let new: &'static mut Process = Box::leak(Box::new(Process {
        pid,
        engine: RwLock::new(None),
        closing: Mutex::default(),
        given_up: Mutex::default(),
        open: AtomicBool::new(inherited),
        inherited,
    }));
    match PROCESS.compare_exchange(found, new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above; the exclusive reference above is not used again.
        Ok(_) => unsafe { &*PROCESS.load(Ordering::Acquire) },
        // Another thread of this process was faster. SAFETY: as above.
        Err(other) => unsafe { &*other },
    }
}

/// Waits for running calls, and closes everything before Python forks.
#[pyfunction]
pub(crate) fn before_fork(py: Python<'_>) {
    py.detach(|| {
        // The hooks of a module that was loaded twice.
        if is_forking() {
            return;
        }
        let process = process();
        let mut engine = process.engine.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(engine) = &*engine {
            process.release(engine);
        }
        match &*engine {
            Some(open) if !open.writers.is_empty() => open.pause_serving(),
            // Also waits for what an earlier close has left open.
            _ => process.close(&mut engine, PATIENCE),
        }
        FORKING.set(Some(engine));
    });
}

/// Lets calls of the parent go on.
#[pyfunction]
pub(crate) fn after_fork_in_parent() {
    if let Some(engine) = FORKING.take()
        && let Some(engine) = &*engine
    {
        engine.resume_serving();
    }
}

/// Forgets the parent's lock: other threads that waited for it are not here.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    std::mem::forget(FORKING.take());
    millrace_datafs::close_inherited_locks();
}

/// Closes all homes, feeds and files of this process. What is used again is opened again, except for files that are
/// being written, which are lost.
#[pyfunction]
pub(crate) fn close(py: Python<'_>) {
    py.detach(|| {
        // In a fork hook: the fork has closed it, or the parent must keep it open.
        if is_forking() {
            return;
        }
        let process = process();
        // A commit waits as long as the configuration allows.
        process.close(&mut process.engine.write().unwrap_or_else(PoisonError::into_inner), Duration::MAX);
    });
}

/// Writes warnings to standard error, as the command does; `MILLRACE_LOG` is the filter.
pub(crate) fn start_log() {
    let filter = std::env::var("MILLRACE_LOG").ok().and_then(|filter| EnvFilter::try_new(filter).ok());
    let filter = filter.unwrap_or_else(|| EnvFilter::new("warn"));
    // Fails where the process has another log.
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init()
        .ok();
}

/// The home that an argument, `MILLRACE_HOME` or the XDG rules name, as for the command.
pub(crate) fn locate(home: Option<PathBuf>) -> Result<PathBuf> {
    let home = home.or_else(|| std::env::var_os("MILLRACE_HOME").map(PathBuf::from));
    Ok(Home::locate(home.as_deref())?)
}

impl Engine {
    fn start() -> Result<Engine> {
        let runtime = Builder::new_multi_thread().thread_name("millrace").enable_all().build();
        Ok(Engine {
            runtime: Some(runtime.map_err(Failure::Threads)?),
            homes: Mutex::default(),
            readings: Table::default(),
            files: Table::default(),
            writers: Table::default(),
        })
    }

    /// The volumes of a home, opened once.
    pub(crate) fn volumes(&self, root: &Path) -> Result<Datafs> {
        Ok(self.open_home(root)?.0)
    }

    /// The brokers of a home.
    pub(crate) fn kafka(&self, root: &Path) -> Result<KafkaConfig> {
        Ok(self.open_home(root)?.1.kafka(root)?)
    }

    /// The volumes of a home and its settings of topics.
    fn open_home(&self, root: &Path) -> Result<(Datafs, millrace_streams::Config)> {
        let mut homes = lock(&self.homes);
        if let Some((_, volumes, streams)) = homes.get(root) {
            return Ok((volumes.clone(), streams.clone()));
        }
        let file = std::env::var_os("MILLRACE_CONFIG").map(PathBuf::from);
        let is_key =
            |name: &str| name.starts_with("MILLRACE_DATAFS__") || name.starts_with("MILLRACE_STREAMS__");
        let loaded = settings::load::<Settings>(file.as_deref(), root, is_key)?;
        let home = Home::open(root.to_owned(), true, |note| tracing::warn!("{note}"))?;
        let Settings { datafs, streams } = loaded.settings;
        let volumes = home.volumes(&datafs)?;
        homes.insert(root.to_owned(), (home, volumes.clone(), streams.clone()));
        Ok((volumes, streams))
    }

    /// Ends the servers of shared row groups. No call runs meanwhile.
    fn pause_serving(&self) {
        for reading in self.readings.all() {
            self.block_on(lock(&reading).feed().pause_serving());
        }
    }

    fn resume_serving(&self) {
        for reading in self.readings.all() {
            lock(&reading).feed().resume_serving();
        }
    }

    /// Runs a future on the calling thread; what it spawns runs on the threads of the engine.
    pub(crate) fn block_on<F: Future>(&self, future: F) -> Option<F::Output> {
        self.runtime.as_ref().map(|runtime| runtime.block_on(future))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.readings.clear();
        self.files.clear();
        self.writers.clear();
        // Decoding that has begun still reads the volumes.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(PATIENCE);
        }
    }
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table(Mutex::default())
    }
}

impl<T> Table<T> {
    pub(crate) fn get(&self, number: u64) -> Option<Arc<T>> {
        lock(&self.0).get(&number).cloned()
    }

    pub(crate) fn put(&self, number: u64, thing: T) -> Arc<T> {
        let thing = Arc::new(thing);
        lock(&self.0).insert(number, Arc::clone(&thing));
        thing
    }

    pub(crate) fn take(&self, number: u64) -> Option<Arc<T>> {
        lock(&self.0).remove(&number)
    }

    fn all(&self) -> Vec<Arc<T>> {
        lock(&self.0).values().cloned().collect()
    }

    fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }

    fn clear(&self) {
        let things = std::mem::take(&mut *lock(&self.0));
        drop(things);
    }
}

/// Locks; a panic of another call has left nothing half-done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
