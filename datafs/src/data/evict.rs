//! Keeps the cache within its bounds: what was used least recently goes first, whole objects at a time.
//! A reader that has one open reads on.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::fcntl::{Flock, FlockArg};

use super::cache::MAP_SUFFIX;
use super::store::StoreSpace;
use crate::metrics;
use crate::private;

/// Eviction goes on until the cache is this share of its bound, so that it does not run for each block.
const LOW_PERCENT: u64 = 90;
/// The disk is looked at again after so many bytes, or this share of the bound, whatever is less: other
/// processes write as well.
const LOOK_BYTES_MAX: u64 = 256 << 20;
/// Half-written files of other processes are left alone for this long.
const UNFINISHED_AGE: Duration = Duration::from_secs(3600);

/// Looks after the size of one cache directory.
#[derive(Debug)]
pub(super) struct Evictor {
    root: PathBuf,
    bytes_max: u64,
    free_bytes_min: u64,
    /// Written since the directory was looked through.
    written: u64,
    /// Nothing is known of the directory yet.
    first: bool,
}

/// The files of one object.
#[derive(Debug)]
struct Kept {
    used: SystemTime,
    bytes: u64,
    image: PathBuf,
}

impl Evictor {
    pub(super) fn new(root: &Path, bytes_max: u64, free_bytes_min: u64) -> Evictor {
        Evictor { root: root.to_owned(), bytes_max, free_bytes_min, written: 0, first: true }
    }

    /// To be called after so many bytes were written.
    pub(super) fn after(&mut self, bytes: u64) {
        self.written += bytes;
        let look = (self.bytes_max / 16).min(LOOK_BYTES_MAX);
        let short = StoreSpace::of_disk(&self.root).map_or(0, |s| self.shortage(s.available_bytes));
        if self.first || self.written >= look || short > 0 {
            self.first = false;
            self.written = 0;
            self.run(short);
        }
    }

    fn shortage(&self, available_bytes: u64) -> u64 {
        self.free_bytes_min.saturating_sub(available_bytes)
    }

    /// Removes objects until the cache fits, and `short` bytes more are free.
    fn run(&self, short: u64) {
        let path = self.root.join("evict.lock");
        let lock = match private::options().write(true).create(true).truncate(true).open(&path) {
            Ok(lock) => lock,
            Err(error) => {
                tracing::warn!(%error, path = %path.display(), "the cache cannot be made smaller");
                return;
            }
        };
        // One process at a time is enough; the others go on.
        let Ok(_lock) = Flock::lock(lock, FlockArg::LockExclusiveNonblock) else { return };
        let mut kept = self.list();
        let total: u64 = kept.iter().map(|kept| kept.bytes).sum();
        let target = if total > self.bytes_max { self.bytes_max / 100 * LOW_PERCENT } else { total };
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
            // The map first: an image without a map is nothing. One that stays without an image is as little.
            let mut map = object.image.clone().into_os_string();
            map.push(MAP_SUFFIX);
            let _ = fs::remove_file(map);
            if let Err(error) = fs::remove_file(&object.image)
                && error.kind() != std::io::ErrorKind::NotFound
            {
                tracing::warn!(%error, path = %object.image.display(), "the cache cannot be made smaller");
                continue;
            }
            left -= object.bytes;
            metrics::CACHE_EVICTED_BYTES.inc_by(object.bytes);
        }
    }

    fn list(&self) -> Vec<Kept> {
        let mut kept: HashMap<PathBuf, Kept> = HashMap::new();
        let now = SystemTime::now();
        // What cannot be listed, or is gone by now, is not counted and not removed.
        for folder in fs::read_dir(&self.root).into_iter().flatten().flatten() {
            for file in fs::read_dir(folder.path()).into_iter().flatten().flatten() {
                let (path, Ok(data)) = (file.path(), file.metadata()) else { continue };
                let Some(name) = path.to_str() else { continue };
                let used = data.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                if name.contains('#') {
                    if now.duration_since(used).is_ok_and(|age| age > UNFINISHED_AGE) {
                        // Tried again at the next look.
                        let _ = fs::remove_file(&path);
                    }
                    continue;
                }
                let image = PathBuf::from(name.strip_suffix(MAP_SUFFIX).unwrap_or(name));
                let object = kept.entry(image.clone());
                let object = object.or_insert(Kept { used: SystemTime::UNIX_EPOCH, bytes: 0, image });
                object.bytes += disk_bytes(&data);
                object.used = object.used.max(used);
            }
        }
        kept.into_values().collect()
    }
}

/// What a file takes of the disk: images are sparse.
fn disk_bytes(data: &Metadata) -> u64 {
    data.blocks() * 512
}
