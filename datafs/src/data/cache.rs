//! What a machine keeps of objects in the cloud: one file image per object, as far as it was read,
//! shared by all processes. It is a convenience: whatever happens to it, reads go on.
//!
//! Below the cache directory, `AA/ID` is the image (sparse; for a small object, all of it, checksums
//! included), and `AA/ID.map` says of each frame of a large one whether it is there. Format of a map: 8
//! bytes magic, `u64` inode of the image it belongs to, 16 bytes boot (see below), `u64` length of the
//! trailer, `u64` length of the object's frames, one byte per frame (1: there), the trailer (the
//! object's table of checksums, as the store has it).
//!
//! Nothing is synced. What comes back from the cache is verified like anything else, so that what a power
//! failure has torn is only fetched again. The kernel verifies nothing, so an image is handed out whole
//! only if it was filled, or verified once, since the machine was booted.

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
use parking_lot::Mutex;

use super::access_time;
use super::deleted::is_deleted;
use super::error::{ObjectError, Result};
use super::evict::Evictor;
use super::image::Image;
use super::object::ObjectId;
use crate::metrics;
use crate::private;

const MAGIC: &[u8; 8] = b"MRmap\x00v1";
const HEADER_BYTES: usize = 48;
/// Ending of a map's name.
pub(super) const MAP_SUFFIX: &str = ".map";
/// Blocks that wait to be written: at 4 MiB each, the memory that a slow disk may hold.
const QUEUE_MAX: usize = 16;
/// With more of them waiting the disk does not keep up, and the kernel's pages take what it cannot: a burst
/// is kept instead of skipped.
const WAITING_MAX: usize = QUEUE_MAX / 2;
/// After the disk has refused, nothing is written for this long.
const REST: Duration = Duration::from_secs(5);
/// The time of use is noted when the last note is older than this.
const USE_NOTED_EVERY: Duration = Duration::from_secs(60);

/// The cache of one process; the files are those of all.
#[derive(Debug)]
pub(super) struct Cache {
    root: PathBuf,
    queue: SyncSender<Write>,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    /// When the disk refused last.
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
    /// Nothing: it says when its turn comes.
    Mark(SyncSender<()>),
}

impl Cache {
    /// A cache in `root`, which is made when it is first needed. It holds at most `bytes_max` and leaves
    /// `free_bytes_min` of the disk free.
    pub(super) fn open(root: &Path, bytes_max: u64, free_bytes_min: u64) -> io::Result<Cache> {
        let state =
            Arc::new(State { refused: Mutex::new(None), waiting: AtomicUsize::new(0), boot: boot_id() });
        let (queue, writes) = sync_channel(QUEUE_MAX);
        let writer = Writer {
            root: root.to_owned(),
            state: Arc::clone(&state),
            evictor: Evictor::new(root, bytes_max, free_bytes_min),
        };
        std::thread::Builder::new().name("datafs-cache".into()).spawn(move || {
            let mut writer = writer;
            // Ends when the cache is dropped.
            writes.into_iter().for_each(|write| writer.run(write));
        })?;
        Ok(Cache { root: root.to_owned(), queue, state })
    }

    /// Where it is.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    fn image_path(&self, id: ObjectId) -> PathBuf {
        image_path(&self.root, id)
    }

    /// The file of a small object, if it is there.
    pub(super) fn whole(&self, id: ObjectId) -> Option<(PathBuf, File)> {
        let path = self.image_path(id);
        let file = File::open(&path).ok()?;
        note_use(&file);
        Some((path, file))
    }

    /// Keeps a small object, unless the disk is too slow.
    pub(super) fn put_whole(&self, id: ObjectId, bytes: Bytes) {
        self.enqueue(Write::Whole { id, bytes });
    }

    /// What is there of a large object.
    pub(super) fn entry(&self, id: ObjectId) -> Option<Arc<Entry>> {
        let image_path = self.image_path(id);
        let map = File::options().read(true).write(true).open(map_path(&image_path)).ok()?;
        let image = File::options().read(true).write(true).open(&image_path).ok()?;
        let entry = Entry::read(id, image, map)?;
        note_use(&entry.map);
        Some(Arc::new(entry))
    }

    /// Begins to keep a large object; `frames_bytes` is how long its stored frames are together.
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
        // What is left of an entry whose map is gone or belongs to another image; what cannot be removed is
        // replaced below.
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
        // A map names its image by inode: whatever two processes do here at the same time, no map is
        // believed of an image that it does not describe.
        let named = filled
            .and_then(|()| fs::rename(&image.0, &path))
            .and_then(|()| fs::rename(&map.0, map_path(&path)));
        if named.is_err() {
            // What stays is found by its age, see `evict.rs`.
            let _ = fs::remove_file(&image.0);
            let _ = fs::remove_file(&map.0);
        }
        named
    }

    /// Keeps frames of an object, unless too many are waiting to be written already. `wait` waits
    /// instead.
    pub(super) fn put(&self, entry: &Arc<Entry>, frames: Range<u64>, at: u64, bytes: Bytes, wait: bool) {
        let write = Write::Frames { entry: Arc::clone(entry), frames, at, bytes };
        if !wait {
            return self.enqueue(write);
        }
        self.state.waiting.fetch_add(1, Ordering::Relaxed);
        // If the thread has panicked, `settle` says so.
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

    /// Waits until everything that was queued is written or given up. Fails when nothing is written any
    /// more, because the thread that does so has panicked.
    pub(super) fn settle(&self) -> Result<()> {
        let (mark, turn) = sync_channel(1);
        // Whatever ends the thread drops the queue, and the mark with it.
        let settled = self.queue.send(Write::Mark(mark)).is_ok() && turn.recv().is_ok();
        let ended = || io::Error::other("its thread has panicked: start the process anew");
        if settled { Ok(()) } else { Err(ObjectError::io("write to the cache", &self.root, ended())) }
    }

    /// Forgets an object.
    pub(super) fn discard(&self, id: ObjectId) {
        let path = self.image_path(id);
        // What stays is verified whenever it is read, and goes when room is needed.
        let _ = fs::remove_file(map_path(&path));
        let _ = fs::remove_file(path);
    }

    /// Opens the image of an object anew, for readers that verify nothing. `verify` is asked whether the
    /// image is right if that is not known since the machine was booted.
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
    /// `None` for what is no map, or not that of the image.
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

    /// How long the stored frames are together.
    pub(super) fn frames_bytes(&self) -> u64 {
        self.frames_bytes
    }

    /// How many frames the map knows.
    pub(super) fn frames(&self) -> u64 {
        self.frames
    }

    /// Of each of these frames, whether it is there.
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

    /// Stored bytes from `at` on, of frames that are there; not verified.
    pub(super) fn read_at(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.image.file().read_exact_at(buffer, at)
    }

    /// Whether it makes room for others: its files have no names any more.
    pub(super) fn is_deleted(&self) -> bool {
        is_deleted(self.image.file())
    }

    /// Says that a frame is not there after all.
    pub(super) fn forget(&self, frame: u64) {
        // If it cannot be said, each reader finds out and fetches it again.
        let _ = self.map.write_all_at(&[0], HEADER_BYTES as u64 + frame);
    }
}

/// What the thread of the cache has.
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
                // The bytes first: whoever sees the mark sees them.
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
                // Who waited for it may have gone.
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
            // What stays is found by its age, see `evict.rs`.
            let _ = fs::remove_file(&temporary);
        }
        named
    }
}

impl State {
    fn refuse(&self, what: &'static str, root: &Path, error: &io::Error) {
        let mut refused = self.refused.lock();
        if refused.is_none_or(|at| at.elapsed() >= REST) {
            tracing::warn!(%error, root = %root.display(), "{what}: reads go on without it");
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

/// Makes the directory that `path` is in, and the cache itself where that is gone or not there yet.
fn make_directory(root: &Path, path: &Path) -> io::Result<()> {
    let directory = path.parent().unwrap_or(root);
    if directory.is_dir() {
        return Ok(());
    }
    private::create_dir_all(root)?;
    access_time::leave_out(root);
    private::create_dir_all(directory)
}

/// A new file beside `path`, under a name that nobody else has.
fn temporary(path: &Path) -> io::Result<(PathBuf, File)> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut name = path.to_owned().into_os_string();
    name.push(format!("#{}.{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed)));
    let path = PathBuf::from(name);
    let open = || private::options().read(true).write(true).create_new(true).open(&path);
    let file = match open() {
        // Of a dead process with the same number.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(&path)?;
            open()?
        }
        other => other?,
    };
    Ok((path, file))
}

/// Notes that a file is in use, for the choice of what goes first.
fn note_use(file: &File) {
    let now = SystemTime::now();
    let noted = file.metadata().and_then(|m| m.modified());
    if noted.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > USE_NOTED_EVERY)) {
        // Then it goes sooner than it would have.
        let _ = file.set_modified(now);
    }
}

/// What tells this run of the machine from others. Where it is not known, every process has its own.
fn boot_id() -> [u8; 16] {
    let read = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let digits: String = read.unwrap_or_default().chars().filter(char::is_ascii_hexdigit).collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(id) if digits.len() == 32 => id.to_be_bytes(),
        _ => (u128::from(std::process::id()) << 64 | 1).to_be_bytes(),
    }
}
