//! Writer lock between processes (the *turn*): only the process that holds it may write.
//!
//! A process holds the lock while it has uncommitted batches, and longer while no other process wants it. It
//! is a lock on the file `…-turn` beside the metadata file, which the kernel drops when the process dies. The
//! file also holds a page of shared numbers. Batches have numbers. `started` is the newest batch of which an
//! operation may have been acknowledged. All batches up to `finished` are committed, or lost with a process
//! that was killed before their commit.
//!
//! The newest batch in the metadata file is never older than `finished` and never newer than `started`.
//! Otherwise another file has replaced it, such as an older copy. The next process that opens it then resets
//! the numbers and raises `generation`. Processes that still have the previous file open refuse to go on.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use millrace_leaf::private;

use super::change_log::ChangeLog;
use super::reserve::allocate;
use super::shared_page::{self, PAGE_BYTES, SharedPage, Words};
use crate::error::{Error, Result};
use crate::inherited::Held;

/// Marks a page of this format.
const MAGIC: u64 = u64::from_be_bytes(*b"mlrturn1");
/// Longest sleep of a process that waits for the lock before it asks again: a killed holder wakes no waiter.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// How long a process that released the lock on request leaves it to the others.
const LEAVE_TO_OTHERS: Duration = Duration::from_millis(2);

/// This process's handle of the lock.
#[derive(Debug)]
pub(crate) struct WriterLock {
    path: PathBuf,
    /// Of the file and of its copy for the log; dropped before both.
    _held: [Held; 2],
    file: File,
    page: SharedPage,
    log: ChangeLog,
    /// `wants` when this process took the lock.
    wants_before: AtomicU32,
    /// `taken` when this process last released the lock on request.
    given_up_at: AtomicU64,
    /// The page's `generation` when this process opened it.
    generation: u64,
}

impl WriterLock {
    /// Opens the file beside the metadata file, and creates it if it is missing. `committed` returns the
    /// number of the newest batch in the metadata.
    pub(crate) fn open(
        metadata: &Path,
        lock_wait: Duration,
        committed: &mut dyn FnMut() -> Result<u64>,
    ) -> Result<WriterLock> {
        let mut path = metadata.to_owned().into_os_string();
        path.push("-turn");
        let path = PathBuf::from(path);
        let file = private::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(|e| Error::io("open", &path, e))?;
        let fail = |e| Error::io("prepare", &path, e);
        // Several processes may extend it at once; none shortens it. A copy of it may have holes.
        allocate(&file, PAGE_BYTES).map_err(fail)?;
        let page = SharedPage::map(&file).map_err(|e| Error::io("map", &path, e))?;
        let copy = file.try_clone().map_err(fail)?;
        let held = [&file, &copy].map(Held::new);
        let log = ChangeLog::new(copy);
        let mut turn = WriterLock {
            path,
            _held: held,
            file,
            page,
            log,
            wants_before: AtomicU32::new(0),
            given_up_at: AtomicU64::new(u64::MAX),
            generation: 0,
        };
        if !turn.agrees(committed)? {
            turn.take(lock_wait)?;
            if !turn.agrees(committed)? {
                turn.initialize(committed()?);
            }
            turn.release();
        }
        turn.generation = turn.words().generation.load(Ordering::Acquire);
        Ok(turn)
    }

    pub(crate) fn words(&self) -> &Words {
        self.page.words()
    }

    pub(crate) fn log(&self) -> &ChangeLog {
        &self.log
    }

    /// Whether the page belongs to this boot and this metadata file.
    fn agrees(&self, committed: &mut dyn FnMut() -> Result<u64>) -> Result<bool> {
        if !self.is_of_this_boot() {
            return Ok(false);
        }
        // The order of these reads matters, because other processes commit meanwhile.
        let finished = self.finished();
        let committed = committed()?;
        let started = self.started();
        if (finished..=started).contains(&committed) {
            return Ok(true);
        }
        tracing::warn!(
            path = %self.path.display(), committed, finished, started,
            "the metadata file was replaced: its newest batch is not one of those that were counted last"
        );
        Ok(false)
    }

    /// Whether another process has found that another file replaced the metadata file that this process has
    /// open.
    pub(crate) fn is_outdated(&self) -> bool {
        self.words().generation.load(Ordering::Acquire) != self.generation
    }

    fn is_of_this_boot(&self) -> bool {
        let words = self.words();
        let [high, low] = boot_id();
        words.magic.load(Ordering::Acquire) == MAGIC
            && words.boot[0].load(Ordering::Acquire) == high
            && words.boot[1].load(Ordering::Acquire) == low
    }

    /// Initializes the page for this boot and this file. The caller holds the lock.
    fn initialize(&self, committed: u64) {
        let words = self.words();
        words.magic.store(0, Ordering::Release);
        words.generation.fetch_add(1, Ordering::AcqRel);
        words.started.store(committed, Ordering::Release);
        words.finished.store(committed, Ordering::Release);
        // Data of an earlier boot is on the disk or lost.
        words.synced.store(committed, Ordering::Release);
        words.log_reserved.store(words.log_end.load(Ordering::Acquire), Ordering::Release);
        for (word, half) in words.boot.iter().zip(boot_id()) {
            word.store(half, Ordering::Release);
        }
        words.magic.store(MAGIC, Ordering::Release);
    }

    /// The newest batch that is committed or lost.
    pub(crate) fn finished(&self) -> u64 {
        self.words().finished.load(Ordering::Acquire)
    }

    /// The newest batch of which an operation may have been acknowledged.
    pub(crate) fn started(&self) -> u64 {
        self.words().started.load(Ordering::Acquire)
    }

    /// Records that an operation of a batch is about to be acknowledged. The caller holds the lock.
    pub(crate) fn start(&self, batch: u64) {
        self.words().started.store(batch, Ordering::Release);
    }

    /// Records that a batch is committed or lost, and wakes its waiters. The caller holds the lock.
    pub(crate) fn finish(&self, batch: u64) {
        let words = self.words();
        words.finished.store(batch, Ordering::Release);
        words.finish_bell.fetch_add(1, Ordering::AcqRel);
        shared_page::wake(&words.finish_bell);
    }

    /// Records that all batches up to `batch` survive a power failure.
    pub(crate) fn synced(&self, batch: u64) {
        self.words().synced.fetch_max(batch, Ordering::AcqRel);
    }

    /// Whether all batches up to `batch` survive a power failure.
    pub(crate) fn is_synced(&self, batch: u64) -> bool {
        self.words().synced.load(Ordering::Acquire) >= batch
    }

    /// Whether another process has asked for the lock since this process took it.
    pub(crate) fn is_wanted(&self) -> bool {
        self.words().wants.load(Ordering::Acquire) != self.wants_before.load(Ordering::Relaxed)
    }

    /// Asks the process that holds the lock to commit its pending batch.
    pub(crate) fn ask_for_flush(&self) {
        self.ring(&self.words().flushes);
    }

    fn ring(&self, request: &AtomicU32) {
        request.fetch_add(1, Ordering::AcqRel);
        let bell = &self.words().bell;
        bell.fetch_add(1, Ordering::AcqRel);
        shared_page::wake(bell);
    }

    /// Wakes all threads that wait for another process.
    pub(crate) fn wake_all(&self) {
        for bell in [&self.words().bell, &self.words().finish_bell] {
            bell.fetch_add(1, Ordering::AcqRel);
            shared_page::wake(bell);
        }
    }

    /// Waits until all batches up to `batch` are finished, at most `limit`; may return early. Returns whether
    /// they are.
    pub(crate) fn wait_finished(&self, batch: u64, limit: Duration) -> bool {
        let words = self.words();
        let seen = words.finish_bell.load(Ordering::Acquire);
        if self.finished() < batch {
            shared_page::wait(&words.finish_bell, seen, Some(limit));
        }
        self.finished() >= batch
    }

    /// Takes the lock if it is free. This process must not hold it.
    pub(crate) fn try_take(&self) -> Result<bool> {
        let wants = self.words().wants.load(Ordering::Acquire);
        match flock(&self.file, libc::LOCK_EX | libc::LOCK_NB) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EWOULDBLOCK) => return Ok(false),
            Err(e) => return Err(Error::io("lock", &self.path, e)),
        }
        self.wants_before.store(wants, Ordering::Relaxed);
        self.words().taken.fetch_add(1, Ordering::AcqRel);
        shared_page::wake(&self.words().taken);
        Ok(true)
    }

    /// Takes the lock; waits at most `lock_wait` for other processes.
    pub(crate) fn take(&self, lock_wait: Duration) -> Result<()> {
        let begin = Instant::now();
        let words = self.words();
        // A process that released the lock on request lets the others go first.
        let taken = words.taken.load(Ordering::Acquire);
        if self.given_up_at.swap(u64::MAX, Ordering::Relaxed) == u64::from(taken) {
            shared_page::wait(&words.taken, taken, Some(LEAVE_TO_OTHERS));
        }
        loop {
            let seen = words.released.load(Ordering::Acquire);
            if self.try_take()? {
                return Ok(());
            }
            let waited = begin.elapsed();
            if waited >= lock_wait {
                let waited_ms = u64::try_from(waited.as_millis()).unwrap_or(u64::MAX);
                return Err(Error::Busy { place: self.path.display().to_string(), waited_ms });
            }
            self.ring(&words.wants);
            shared_page::wait(&words.released, seen, Some(ASK_AGAIN.min(lock_wait - waited)));
        }
    }

    /// Releases the lock. All batches of this process must be finished.
    pub(crate) fn release(&self) {
        let words = self.words();
        if self.is_wanted() {
            self.given_up_at.store(u64::from(words.taken.load(Ordering::Acquire)), Ordering::Relaxed);
        }
        if let Err(error) = flock(&self.file, libc::LOCK_UN) {
            tracing::error!(path = %self.path.display(), %error, "unlocking; others wait until this process ends");
        }
        words.released.fetch_add(1, Ordering::AcqRel);
        shared_page::wake(&words.released);
    }
}

fn flock(file: &File, operation: libc::c_int) -> std::io::Result<()> {
    loop {
        if shared_page::flock(file.as_raw_fd(), operation) == 0 {
            return Ok(());
        }
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The boot id of this machine; zeroes if the system does not provide it.
fn boot_id() -> [u64; 2] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let half = |range| digits.get(range).and_then(|half| u64::from_str_radix(half, 16).ok()).unwrap_or(0);
    [half(0..16), half(16..32)]
}
