//! The local cache of objects in a remote store: one image file per object, filled as far as it was read, and
//! shared by all processes of the machine. The cache is optional: reads continue whatever happens to it.
//!
//! Below the cache directory, `AA/ID` is the image. It is sparse; for a small object it is the whole object,
//! checksums included. `AA/ID.map` records for each frame of a large object whether the image holds it.
//! Format of a map: 8 bytes magic, `u64` inode of its image, 16 bytes boot id (see below), `u64` length of
//! the trailer, `u64` length of the object's frames, one byte per frame (1: present), the trailer (the
//! object's table of checksums, as the store has it).
//!
//! Nothing is synced. Reads from the cache are verified like any others, so that data torn by a power failure
//! is fetched again. The kernel verifies nothing. So an image is handed to it only if the image is complete,
//! and was filled or verified since the machine was booted.

use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use millrace_leaf::error_chain;
use millrace_leaf::private;
use parking_lot::Mutex;

use super::access_time;
use super::deleted::is_deleted;
use super::error::{ObjectError, Result};
use super::evict::{Bounds, Evictor, MAP_SUFFIX};
use super::image::Image;
use crate::metrics;
use crate::object::ObjectId;

const MAGIC: &[u8; 8] = b"MRmap\x00v1";
const HEADER_BYTES: usize = 48;
/// Most queued blocks: at 4 MiB each, this bounds the memory that waits for a slow disk.
const QUEUE_MAX: usize = 16;
/// Above this queue length the disk does not keep up. Blocks then go through the page cache, so that a burst
/// is kept instead of skipped.
const WAITING_MAX: usize = QUEUE_MAX / 2;
/// Pause in which nothing is queued after a write to the disk has failed.
const REST: Duration = Duration::from_secs(5);
/// The time of use is updated when it is older than this.
const USE_NOTED_EVERY: Duration = Duration::from_secs(60);

/// The cache handle of one process; all processes of the machine share the files.
#[derive(Debug)]
pub(super) struct Cache {
    root: PathBuf,
    queue: SyncSender<Write>,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// Time of the last failed write.
    refused: Mutex<Option<Instant>>,
    /// Blocks and small objects in the queue.
    waiting: AtomicUsize,
    boot: [u8; 16],
}

/// The cached part of one large object.
#[derive(Debug)]
pub(super) struct Entry {
    id: ObjectId,
    image: Image,
    map: File,
    frames: u64,
    trailer: Bytes,
    frames_bytes: u64,
}

#[derive(Debug)]
enum Write {
    Frames {
        entry: Arc<Entry>,
        frames: Range<u64>,
        at: u64,
        bytes: Bytes,
    },
    Whole {
        id: ObjectId,
        bytes: Bytes,
    },
    /// No write: the writer thread answers when it reaches this entry.
    Mark(SyncSender<()>),
}

impl Cache {
    /// A cache in `root`, created with the first write.
    pub(super) fn open(root: &Path, bounds: Bounds) -> io::Result<Cache> {
        let state =
            Arc::new(State { refused: Mutex::new(None), waiting: AtomicUsize::new(0), boot: boot_id() });
        let (queue, writes) = sync_channel(QUEUE_MAX);
        let writer =
            Writer { root: root.to_owned(), state: Arc::clone(&state), evictor: Evictor::new(root, bounds) };
        std::thread::Builder::new().name("datafs-cache".into()).spawn(move || {
            let mut writer = writer;
            // Ends when the cache is dropped.
            writes.into_iter().for_each(|write| writer.run(write));
        })?;
        Ok(Cache { root: root.to_owned(), queue, state })
    }

    /// The cache directory.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    fn image_path(&self, id: ObjectId) -> PathBuf {
        image_path(&self.root, id)
    }

    /// The file of a small object, if the cache has it.
    pub(super) fn whole(&self, id: ObjectId) -> Option<(PathBuf, File)> {
        let path = self.image_path(id);
        let file = File::open(&path).ok()?;
        note_use(&file);
        Some((path, file))
    }

    /// Queues a small object; skips it while the queue is full or after a failed write.
    pub(super) fn put_whole(&self, id: ObjectId, bytes: Bytes) {
        self.enqueue(Write::Whole { id, bytes });
    }

    /// The entry of a large object, if the cache has one.
    pub(super) fn entry(&self, id: ObjectId) -> Option<Arc<Entry>> {
        let image_path = self.image_path(id);
        let map = File::options().read(true).write(true).open(map_path(&image_path)).ok()?;
        let image = File::options().read(true).write(true).open(&image_path).ok()?;
        let entry = Entry::read(id, image, map)?;
        note_use(&entry.map);
        Some(Arc::new(entry))
    }

    /// Creates the entry of a large object; `frames_bytes` is the total length of its stored frames.
    pub(super) fn create(
        &self,
        id: ObjectId,
        frames: u64,
        frames_bytes: u64,
        trailer: &Bytes,
    ) -> Option<Arc<Entry>> {
        if self.is_resting() {
            return None;
        }
        match self.try_create(id, frames, frames_bytes, trailer) {
            // Another process was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => self.entry(id),
            Err(error) => {
                self.state.refuse("creating a file of the cache", &self.root, &error);
                None
            }
            Ok(()) => self.entry(id),
        }
    }

    fn try_create(&self, id: ObjectId, frames: u64, frames_bytes: u64, trailer: &Bytes) -> io::Result<()> {
        let path = self.image_path(id);
        make_directory(&self.root, &path)?;
        // An old map whose image is gone or replaced. If it cannot be removed, the rename below replaces it.
        let _ = fs::remove_file(map_path(&path));
        let image = temporary(&path)?;
        image.1.set_len(frames_bytes)?;
        let map = temporary(&path)?;
        let mut bytes = vec![0; HEADER_BYTES + frames as usize];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..16].copy_from_slice(&image.1.metadata()?.ino().to_le_bytes());
        bytes[16..32].copy_from_slice(&self.state.boot);
        bytes[32..40].copy_from_slice(&(trailer.len() as u64).to_le_bytes());
        bytes[40..48].copy_from_slice(&frames_bytes.to_le_bytes());
        bytes.extend_from_slice(trailer);
        let filled = map.1.write_all_at(&bytes, 0);
        // A map names its image by inode: when two processes race here, no reader accepts a map for another
        // image.
        let named = filled
            .and_then(|()| fs::rename(&image.0, &path))
            .and_then(|()| fs::rename(&map.0, map_path(&path)));
        if named.is_err() {
            // Eviction removes a file that stays by its age, see `evict.rs`.
            let _ = fs::remove_file(&image.0);
            let _ = fs::remove_file(&map.0);
        }
        named
    }

    /// Queues frames of an object; skips them when the queue is full. With `wait` it blocks for room instead.
    pub(super) fn put(&self, entry: &Arc<Entry>, frames: Range<u64>, at: u64, bytes: Bytes, wait: bool) {
        let write = Write::Frames { entry: Arc::clone(entry), frames, at, bytes };
        if !wait {
            return self.enqueue(write);
        }
        self.state.waiting.fetch_add(1, Ordering::Relaxed);
        // If the thread has panicked, `settle` returns the error.
        let _ = self.queue.send(write);
    }

    fn enqueue(&self, write: Write) {
        if self.is_resting() {
            return;
        }
        self.state.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.queue.try_send(write) {
            self.state.waiting.fetch_sub(1, Ordering::Relaxed);
            metrics::CACHE_SKIPPED.inc();
        }
    }

    fn is_resting(&self) -> bool {
        self.state.refused.lock().is_some_and(|at| at.elapsed() < REST)
    }

    /// Waits until every queued write is done or has failed. Fails when the writer thread has panicked.
    pub(super) fn settle(&self) -> Result<()> {
        let (mark, turn) = sync_channel(1);
        // When the thread ends, it drops the queue, and the mark with it.
        let settled = self.queue.send(Write::Mark(mark)).is_ok() && turn.recv().is_ok();
        let ended = || io::Error::other("its thread has panicked: start the process anew");
        if settled { Ok(()) } else { Err(ObjectError::io("write to the cache", &self.root, ended())) }
    }

    /// Removes an object from the cache.
    pub(super) fn discard(&self, id: ObjectId) {
        let path = self.image_path(id);
        // A file that stays is verified at each read and evicted later.
        let _ = fs::remove_file(map_path(&path));
        let _ = fs::remove_file(path);
    }

    /// Opens the image of an object for the kernel, which verifies nothing. Calls `verify` unless this boot
    /// of the machine has filled or verified the image. `None` when the image is incomplete, replaced or
    /// wrong.
    pub(super) fn image(&self, entry: &Entry, verify: impl FnOnce() -> bool) -> io::Result<Option<File>> {
        if !entry.is_complete()? {
            return Ok(None);
        }
        let file = File::open(self.image_path(entry.id))?;
        if file.metadata()?.ino() != entry.image.file().metadata()?.ino() {
            return Ok(None);
        }
        let mut boot = [0; 16];
        entry.map.read_exact_at(&mut boot, 16)?;
        if boot != self.state.boot {
            if !verify() {
                return Ok(None);
            }
            entry.map.write_all_at(&self.state.boot, 16)?;
        }
        Ok(Some(file))
    }
}

impl Entry {
    /// `None` when the map is malformed or belongs to another image.
    fn read(id: ObjectId, image: File, map: File) -> Option<Entry> {
        let mut header = [0; HEADER_BYTES];
        map.read_exact_at(&mut header, 0).ok()?;
        let u64_at = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap_or([0; 8]));
        let (length, image_data) = (map.metadata().ok()?.len(), image.metadata().ok()?);
        let (trailer_bytes, frames_bytes) = (u64_at(32), u64_at(40));
        let frames = length.checked_sub(HEADER_BYTES as u64)?.checked_sub(trailer_bytes)?;
        if &header[..8] != MAGIC || u64_at(8) != image_data.ino() || frames_bytes != image_data.len() {
            return None;
        }
        let mut trailer = vec![0; usize::try_from(trailer_bytes).ok()?];
        map.read_exact_at(&mut trailer, HEADER_BYTES as u64 + frames).ok()?;
        Some(Entry { id, image: Image::new(image), map, frames, trailer: trailer.into(), frames_bytes })
    }

    /// The object's table of checksums, as the store has it.
    pub(super) fn trailer(&self) -> &Bytes {
        &self.trailer
    }

    /// Total length of the stored frames.
    pub(super) fn frames_bytes(&self) -> u64 {
        self.frames_bytes
    }

    /// Number of frames in the map.
    pub(super) fn frames(&self) -> u64 {
        self.frames
    }

    /// For each of these frames, whether the image holds it.
    pub(super) fn present(&self, frames: Range<u64>) -> Vec<bool> {
        let mut bytes = vec![0; (frames.end - frames.start) as usize];
        match self.map.read_exact_at(&mut bytes, HEADER_BYTES as u64 + frames.start) {
            Ok(()) => bytes.into_iter().map(|byte| byte == 1).collect(),
            Err(_) => vec![false; bytes.len()],
        }
    }

    fn is_complete(&self) -> io::Result<bool> {
        let mut bytes = vec![0; self.frames as usize];
        self.map.read_exact_at(&mut bytes, HEADER_BYTES as u64)?;
        Ok(bytes.into_iter().all(|byte| byte == 1))
    }

    /// Reads stored bytes from `at` on, of frames that are present; not verified.
    pub(super) fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.image.file().read_exact_at(buffer, at)
    }

    /// Whether the image was evicted or discarded: its file has been unlinked.
    pub(super) fn is_deleted(&self) -> bool {
        is_deleted(self.image.file())
    }

    /// Marks a frame as not present.
    pub(super) fn forget(&self, frame: u64) {
        // If this fails, each reader detects the damage and fetches the frame again.
        let _ = self.map.write_all_at(&[0], HEADER_BYTES as u64 + frame);
    }
}

/// The state of the writer thread.
struct Writer {
    root: PathBuf,
    state: Arc<State>,
    evictor: Evictor,
}

impl Writer {
    fn run(&mut self, write: Write) {
        let (len, done) = match write {
            Write::Frames { entry, frames, at, bytes } => {
                let keeps_up = self.state.waiting.fetch_sub(1, Ordering::Relaxed) <= WAITING_MAX;
                let mark = || vec![1; (frames.end - frames.start) as usize];
                // The bytes first: a reader that sees the mark also sees the bytes.
                let done = entry
                    .image
                    .write(&bytes, at, keeps_up)
                    .and_then(|_| entry.map.write_all_at(&mark(), HEADER_BYTES as u64 + frames.start));
                (bytes.len(), done)
            }
            Write::Whole { id, bytes } => {
                self.state.waiting.fetch_sub(1, Ordering::Relaxed);
                (bytes.len(), self.put_whole(id, &bytes))
            }
            Write::Mark(turn) => {
                // Fails when the caller no longer waits.
                let _ = turn.send(());
                return;
            }
        };
        match done {
            Ok(()) => metrics::CACHE_WRITTEN_BYTES.inc_by(len as u64),
            Err(error) => self.state.refuse("writing to the cache", &self.root, &error),
        }
        self.evictor.after(len as u64);
    }

    fn put_whole(&self, id: ObjectId, bytes: &[u8]) -> io::Result<()> {
        let path = image_path(&self.root, id);
        make_directory(&self.root, &path)?;
        let (temporary, file) = temporary(&path)?;
        let named = file.write_all_at(bytes, 0).and_then(|()| fs::rename(&temporary, &path));
        if named.is_err() {
            // Eviction removes a file that stays by its age, see `evict.rs`.
            let _ = fs::remove_file(&temporary);
        }
        named
    }
}

impl State {
    fn refuse(&self, what: &'static str, root: &Path, error: &io::Error) {
        let mut refused = self.refused.lock();
        if refused.is_none_or(|at| at.elapsed() >= REST) {
            tracing::warn!(
                error = error_chain::one_line(&error), root = %root.display(),
                "{what}: reads go on without it"
            );
        }
        *refused = Some(Instant::now());
    }
}

fn image_path(root: &Path, id: ObjectId) -> PathBuf {
    root.join(id.data_name())
}

fn map_path(image: &Path) -> PathBuf {
    let mut path = image.to_owned().into_os_string();
    path.push(MAP_SUFFIX);
    PathBuf::from(path)
}

/// Creates the directory of `path`, and the cache directory if it is missing.
fn make_directory(root: &Path, path: &Path) -> io::Result<()> {
    let directory = path.parent().unwrap_or(root);
    if directory.is_dir() {
        return Ok(());
    }
    private::create_dir_all(root)?;
    access_time::leave_out(root);
    private::create_dir_all(directory)
}

/// Creates a file beside `path` under a unique name.
fn temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.to_owned().into_os_string();
    name.push(format!("#{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let path = PathBuf::from(name);
    let open = || private::options().read(true).write(true).create_new(true).open(&path);
    let file = match open() {
        // Left by a dead process with the same process id.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(&path)?;
            open()?
        }
        other => other?,
    };
    Ok((path, file))
}

/// Updates the time of use, which decides the order of eviction.
fn note_use(file: &File) {
    let now = SystemTime::now();
    let noted = file.metadata().and_then(|m| m.modified());
    if noted.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > USE_NOTED_EVERY)) {
        // If this fails, eviction removes the object sooner.
        let _ = file.set_modified(now);
    }
}

/// The id of this boot of the machine. If the kernel does not tell it, an id of this process.
fn boot_id() -> [u8; 16] {
    boot_of_machine().unwrap_or_else(|| (u128::from(std::process::id()) << 64 | 1).to_be_bytes())
}

/// The id of this boot of the machine, if the kernel tells it.
pub(crate) fn boot_of_machine() -> Option<[u8; 16]> {
    let read = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let digits: String = read.unwrap_or_default().chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 32)?;
    Some(id.to_be_bytes())
}
