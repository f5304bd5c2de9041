//! Eviction from the cache: whole objects go, least recently used first, until the cache is within its
//! bounds. A reader that has an evicted object open reads on.
//!
//! Caches that share a bound lie side by side in one folder. Each of their evictors lists all of them and removes the
//! least recently used objects of all. A link in that folder or in a cache is not followed. Only files with names of objects
//! in the folders of these names are removed: a cache may be in a folder with other files.
//!
//! A lock lets one process evict at a time. It only saves work: two evictors at once remove the same objects. So the other
//! processes ignore it once one has held it for [`HELD_MAX`], because that one was stopped or its disk hangs.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use millrace_leaf::error_chain;
use millrace_leaf::private;
use nix::fcntl::{Flock, FlockArg};

use super::space::StoreSpace;
use crate::config::Config;
use crate::metrics;
use crate::object::ObjectId;

/// Ending of a map's name.
pub(super) const MAP_SUFFIX: &str = ".map";
/// Eviction shrinks the cache to this share of its bound, so that it does not run for each block.
const LOW_PERCENT: u64 = 90;
/// The directory is scanned again after this many written bytes, or 1/16 of the bound if that is less,
/// because other processes write too.
const LOOK_BYTES_MAX: u64 = 256 << 20;
/// Unfinished files of other processes are removed after this time.
const UNFINISHED_AGE: Duration = Duration::from_secs(3600);
/// How long one process may hold the lock before the others ignore it.
const HELD_MAX: Duration = Duration::from_secs(30);
/// Bytes of the lock file that are read: the holder's process id, and the time in milliseconds at which it locked the file.
const HOLDER_BYTES: usize = 64;

/// The bounds of a cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// Most bytes in the cache.
    bytes_max: u64,
    /// Bytes of its disk that stay free.
    free_bytes_min: u64,
    /// Whether `bytes_max` bounds all caches of the parent directory together.
    is_shared: bool,
}

impl Bounds {
    /// The bounds of a configuration.
    pub(super) fn of(config: &Config) -> Bounds {
        Bounds {
            bytes_max: config.cache_bytes_max,
            free_bytes_min: config.cache_free_bytes_min,
            is_shared: config.cache_shared_bound,
        }
    }
}

/// The evictor of one cache directory.
#[derive(Debug)]
pub(super) struct Evictor {
    root: PathBuf,
    bounds: Bounds,
    /// Bytes written since the last scan.
    written: u64,
    /// No scan has run yet.
    first: bool,
    /// The process that held the lock at the last attempt.
    held: Option<Held>,
    /// [`HELD_MAX`], except in tests.
    held_max: Duration,
}

/// A process that holds the lock.
#[derive(Debug)]
struct Held {
    /// The content of the lock file.
    by: String,
    /// When this process first saw it.
    since: Instant,
    /// It is ignored, and the log says so.
    is_ignored: bool,
}

/// The files of one object.
#[derive(Debug)]
struct Kept {
    used: SystemTime,
    bytes: u64,
    image: PathBuf,
}

impl Evictor {
    pub(super) fn new(root: &Path, bounds: Bounds) -> Evictor {
        Evictor { root: root.to_owned(), bounds, written: 0, first: true, held: None, held_max: HELD_MAX }
    }

    /// The cache calls this after each write of `bytes` bytes.
    pub(super) fn after(&mut self, bytes: u64) {
        self.written += bytes;
        let look = (self.bounds.bytes_max / 16).min(LOOK_BYTES_MAX);
        let short = StoreSpace::of_disk(&self.root).map_or(0, |s| self.shortage(s.available_bytes));
        let has_waited =
            self.held.as_ref().is_some_and(|held| !held.is_ignored && held.since.elapsed() >= self.held_max);
        if self.first || self.written >= look || short > 0 || has_waited {
            self.first = false;
            self.written = 0;
            self.run(short);
        }
    }

    fn shortage(&self, available_bytes: u64) -> u64 {
        self.bounds.free_bytes_min.saturating_sub(available_bytes)
    }

    /// Removes objects until the cache fits, and `short` bytes more are free.
    fn run(&mut self, short: u64) {
        // Caches that share a bound exclude each other too.
        let path = self.parent().unwrap_or(&self.root).join("evict.lock");
        let file = match private::options().read(true).write(true).create(true).truncate(false).open(&path) {
            Ok(file) => file,
            Err(error) => {
                tracing::warn!(
                    error = error_chain::one_line(&error), path = %path.display(),
                    "the cache cannot be made smaller"
                );
                return;
            }
        };
        // One process evicts at a time; the others continue.
        let _lock = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => {
                self.held = None;
                // Without it, the log of the others does not name this process.
                let _ = note_holder(&lock);
                Some(lock)
            }
            Err((file, _)) if self.is_held_too_long(&file, &path) => None,
            Err(_) => return,
        };
        let mut kept = self.list();
        let total: u64 = kept.iter().map(|kept| kept.bytes).sum();
        let target =
            if total > self.bounds.bytes_max { self.bounds.bytes_max / 100 * LOW_PERCENT } else { total };
        let target = target.min(total.saturating_sub(short));
        if total <= target {
            return;
        }
        kept.sort_by_key(|kept| kept.used);
        let mut left = total;
        for object in kept {
            if left <= target {
                break;
            }
            // The map first: readers ignore an image without a map, and a map without an image.
            let mut map = object.image.clone().into_os_string();
            map.push(MAP_SUFFIX);
            let _ = fs::remove_file(map);
            match fs::remove_file(&object.image) {
                Ok(()) => metrics::CACHE_EVICTED_BYTES.inc_by(object.bytes),
                // Another process has removed it.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    tracing::warn!(
                        error = error_chain::one_line(&error), path = %object.image.display(),
                        "the cache cannot be made smaller"
                    );
                    continue;
                }
            }
            left -= object.bytes;
        }
    }

    /// Whether the same process has held the lock since an attempt [`HELD_MAX`] ago. Logs it once.
    fn is_held_too_long(&mut self, lock: &File, path: &Path) -> bool {
        let mut text = [0; HOLDER_BYTES];
        let read = lock.read_at(&mut text, 0).unwrap_or(0);
        let by = String::from_utf8_lossy(&text[..read]).trim_end().to_owned();
        let Some(held) = self.held.as_mut().filter(|held| held.by == by) else {
            self.held = Some(Held { by, since: Instant::now(), is_ignored: false });
            return false;
        };
        let held_for = held.since.elapsed();
        if held_for < self.held_max {
            return false;
        }
        metrics::CACHE_LOCKS_IGNORED.inc();
        if !held.is_ignored {
            held.is_ignored = true;
            tracing::warn!(
                path = %path.display(), pid = held.by.split(' ').next(), held_s = held_for.as_secs(),
                "another process holds the lock of the cache and makes no progress: the cache is made smaller without it; \
                 continue or end that process (the one of this pid, or one of an earlier version, which notes none)"
            );
        }
        true
    }

    /// The directory of the caches that share the bound, if it is shared.
    fn parent(&self) -> Option<&Path> {
        self.root.parent().filter(|_| self.bounds.is_shared)
    }

    /// The caches within the bound.
    fn roots(&self) -> Vec<PathBuf> {
        let mut roots = vec![self.root.clone()];
        if let Some(parent) = self.parent() {
            let beside = directories(parent).filter(|other| {
                *other != self.root && other.file_name().is_some_and(Config::is_shared_cache_name)
            });
            roots.extend(beside);
        }
        roots
    }

    fn list(&self) -> Vec<Kept> {
        let mut kept: HashMap<PathBuf, Kept> = HashMap::new();
        let now = SystemTime::now();
        for folder in self.roots().iter().flat_map(|root| directories(root)) {
            for file in fs::read_dir(&folder).into_iter().flatten().flatten() {
                let (path, Ok(data)) = (file.path(), file.metadata()) else { continue };
                let Some(name) = path.file_name().and_then(OsStr::to_str) else { continue };
                let used = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                let (whole, is_unfinished) = match name.split_once('#') {
                    Some((whole, _)) => (whole, true),
                    None => (name, false),
                };
                // The directory may have files of other programs.
                let Some(image) = image_of(&folder, whole) else { continue };
                if is_unfinished {
                    if now.duration_since(used).is_ok_and(|age| age > UNFINISHED_AGE) {
                        // If this fails, the next scan tries again.
                        let _ = fs::remove_file(&path);
                    }
                    continue;
                }
                let object = kept.entry(image.clone());
                let object = object.or_insert(Kept { used: SystemTime::UNIX_EPOCH, bytes: 0, image });
                object.bytes += disk_bytes(&data);
                object.used = object.used.max(used);
            }
        }
        kept.into_values().collect()
    }
}

/// The image that a file of a cache belongs to, by the file's name in its folder; `None` if it is no file of a cache.
fn image_of(folder: &Path, name: &str) -> Option<PathBuf> {
    let object: ObjectId = name.strip_suffix(MAP_SUFFIX).unwrap_or(name).parse().ok()?;
    let image = folder.parent()?.join(object.data_name());
    (image.parent() == Some(folder)).then_some(image)
}

/// Notes this process in the lock file that it has locked.
fn note_holder(lock: &File) -> io::Result<()> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    lock.set_len(0)?;
    lock.write_all_at(format!("{} {}\n", std::process::id(), since.as_millis()).as_bytes(), 0)
}

/// The directories in a directory, without links. Entries that cannot be listed or are gone by now are skipped.
fn directories(of: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(of).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path())
}

/// Disk space of a file; images are sparse.
fn disk_bytes(data: &Metadata) -> u64 {
    data.blocks() * 512
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(number: u8) -> ObjectId {
        format!("{number:032x}").parse().unwrap()
    }

    #[test]
    fn files_of_other_programs_stay() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join(object(1).data_name());
        let folder = image.parent().unwrap().to_owned();
        let beside = |name: &str| folder.join(name);
        let photos = dir.path().join("photos");
        let strangers = [
            photos.join("wedding.jpg"),
            photos.join(format!("{}", object(1))),
            photos.join("notes#1.txt"),
            beside("wedding.jpg"),
            beside("notes#1.txt"),
            beside("wedding.map"),
        ];
        let left_over = beside(&format!("{}.map#7.0", object(1)));
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir(&photos).unwrap();
        let long_ago = SystemTime::now() - UNFINISHED_AGE * 2;
        for path in strangers.iter().chain([&image, &left_over]) {
            fs::write(path, [1_u8; 65_536]).unwrap();
            File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
        }
        let bounds = Bounds { bytes_max: 4_096, free_bytes_min: 0, is_shared: false };
        Evictor::new(dir.path(), bounds).run(0);
        assert!(!image.exists() && !left_over.exists());
        assert!(strangers.iter().all(|path| path.exists()));
    }

    #[test]
    fn a_lock_that_a_stopped_process_holds_does_not_stop_eviction() {
        let dir = tempfile::tempdir().unwrap();
        let lock = dir.path().join("evict.lock");
        let images = [1, 2].map(|number| dir.path().join(object(number).data_name()));
        let fill = || {
            for image in &images {
                fs::create_dir_all(image.parent().unwrap()).unwrap();
                fs::write(image, [1_u8; 65_536]).unwrap();
            }
        };
        let left = || images.iter().filter(|image| image.exists()).count();
        let bounds = Bounds { bytes_max: 4_096, free_bytes_min: 0, is_shared: false };
        let mut evictor = Evictor { held_max: Duration::ZERO, ..Evictor::new(dir.path(), bounds) };
        fill();
        let file = private::options().read(true).write(true).create(true).truncate(true).open(&lock).unwrap();
        let held = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        // Two processes in turn, then the second one for too long.
        for (holder, expected) in [("1 100", 2), ("2 200", 2), ("2 200", 0)] {
            held.write_all_at(holder.as_bytes(), 0).unwrap();
            evictor.after(1);
            assert_eq!(left(), expected, "{holder}");
        }
        fill();
        evictor.run(0);
        assert_eq!(left(), 0, "the lock stays ignored");
        assert!(evictor.held.as_ref().unwrap().is_ignored && metrics::CACHE_LOCKS_IGNORED.get() >= 2);
        drop(held);
        fill();
        evictor.run(0);
        assert!(left() == 0 && evictor.held.is_none());
        assert!(fs::read_to_string(&lock).unwrap().starts_with(&format!("{} ", std::process::id())));
    }
}
