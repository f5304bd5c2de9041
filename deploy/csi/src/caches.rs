//! The caches of tenants on a node: their folders, and the removal of those that no published volume uses.
//!
//! Each tenant has a folder of its own, so that it reads none of another's objects. All these folders lie in one, and
//! share one bound (`cache_shared_bound` of `[datafs]`): the least recently used objects of all tenants go first.
//!
//! A tenant without a published volume on the node keeps its cache for [`IDLE_MAX`], for the next pod of a job. Then
//! [`Caches::sweep`] removes it:
//!  - while it holds the lock, it reads the records of published volumes and renames the unused folders. A call writes
//!    its record under the same lock ([`Caches::hold`]). So a server that starts later begins a new folder;
//!  - it deletes the renamed folders without the lock. Those that a crash leaves are deleted by the next sweep;
//!  - it follows no link below the caches' folder, and enters no mount point;
//!  - while a record of a volume cannot be read, it removes nothing.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use millrace_datafs::{Config, mount};
use millrace_leaf::private;
use nix::libc;

use crate::publication::Publications;

/// The line of a server's configuration that says that its cache is one of those here.
const SHARED: &str = "cache_shared_bound = true";
/// How long a call waits for a sweep, which has the lock for as long as it reads records and renames folders, and a sweep
/// for calls.
const HOLD_MAX: Duration = Duration::from_secs(2);
const HOLD_PAUSE: Duration = Duration::from_millis(20);

/// How long a cache is kept that no published volume of its tenant uses.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(3_600);
/// Interval of sweeps.
pub(crate) const SWEEP_EVERY: Duration = Duration::from_secs(600);
/// What the names of folders begin with that are being deleted.
const GONE: &str = "#gone-";

/// The folders of tenants' caches.
#[derive(Debug, Clone)]
pub(crate) struct Caches {
    folder: PathBuf,
    earlier: Option<Earlier>,
    lock: PathBuf,
}

/// Where earlier programs kept caches of tenants.
#[derive(Debug, Clone)]
enum Earlier {
    /// In the homes of tenants, at a path below each.
    Homes { homes: PathBuf, below: PathBuf },
    /// In a folder of the driver's own cache, if `cache_dir` ended with a slash.
    Folder(PathBuf),
}

impl Caches {
    /// The caches of tenants beside the driver's own cache, or beside the folder with the homes of tenants if the
    /// driver's own is in its home.
    pub(crate) fn new(config: &Config, tenants: &Path) -> Caches {
        // A relative path in a configuration is one below a home. The program's folder has a path, or nothing works.
        let tenants = std::path::absolute(tenants).unwrap_or_else(|_| tenants.to_owned());
        let beside = |ending: &str| {
            let mut path = tenants.clone().into_os_string();
            path.push(ending);
            PathBuf::from(path)
        };
        let lock = beside("-caches.lock");
        if config.cache_dir.is_absolute() {
            // Without a slash at its end, which would make it a folder below.
            let mut folder = config.cache_dir.components().collect::<PathBuf>().into_os_string();
            folder.push("-tenants");
            let folder = PathBuf::from(folder);
            let below = config.cache_dir.join("-tenants");
            let earlier = (below != folder).then_some(Earlier::Folder(below));
            return Caches { folder, earlier, lock };
        }
        let parts = || config.cache_dir.components();
        let is_below = parts().next().is_some() && parts().all(|part| matches!(part, Component::Normal(_)));
        let (homes, below) = (tenants.clone(), config.cache_dir.clone());
        let earlier = is_below.then_some(Earlier::Homes { homes, below });
        Caches { folder: beside("-caches"), earlier, lock }
    }

    /// The folder with all of them.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The cache of a tenant.
    pub(crate) fn of(&self, identity: &str) -> PathBuf {
        self.folder.join(identity)
    }

    /// Keeps caches from being removed until the file is dropped. The record of a tenant's volume is written meanwhile.
    /// Blocks while a sweep renames folders, for at most [`HOLD_MAX`].
    ///
    /// # Errors
    /// Those of opening and locking the file; [`ErrorKind::WouldBlock`] when another driver was stopped during its sweep.
    pub(crate) fn hold(&self) -> io::Result<File> {
        self.lock_within(File::try_lock_shared)
    }

    /// Locks the file of the caches, for at most [`HOLD_MAX`].
    fn lock_within(&self, attempt: fn(&File) -> Result<(), TryLockError>) -> io::Result<File> {
        let (file, begin) = (self.open_lock()?, Instant::now());
        loop {
            match attempt(&file) {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if begin.elapsed() < HOLD_MAX => std::thread::sleep(HOLD_PAUSE),
                Err(TryLockError::WouldBlock) => {
                    let reason = format!(
                        "another driver has had {} locked for {} s: continue or end it",
                        self.lock.display(),
                        HOLD_MAX.as_secs()
                    );
                    return Err(io::Error::new(ErrorKind::WouldBlock, reason));
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }

    fn open_lock(&self) -> io::Result<File> {
        if let Some(folder) = self.lock.parent() {
            private::create_dir_all(folder)?;
        }
        private::options().write(true).create(true).truncate(false).open(&self.lock)
    }

    /// Removes the caches of tenants that have had no published volume for `idle`, as far as sweeps have seen; returns how
    /// many. Several drivers may sweep at the same time. Blocks for as long as the deletion takes.
    ///
    /// # Errors
    /// The first error. Other folders are removed nevertheless.
    pub(crate) fn sweep(&self, publications: &Publications, idle: Duration) -> io::Result<usize> {
        let renamed = self.rename_unused(publications, idle);
        let mut failed = Ok(());
        let mut found = folders(&self.folder)?;
        if let Some(Earlier::Folder(earlier)) = &self.earlier {
            found.extend(folders(earlier)?);
        }
        for (name, path) in found {
            if name.as_encoded_bytes().starts_with(GONE.as_bytes()) {
                // Links in it are removed, and not followed.
                match refuse_mounts(&path).and_then(|()| fs::remove_dir_all(&path)) {
                    // Another driver is as fast.
                    Err(error) if error.kind() != ErrorKind::NotFound => failed = failed.and(Err(error)),
                    _ => {}
                }
            }
        }
        let renamed = renamed?;
        failed.map(|()| renamed)
    }

    /// Takes unused caches out of use.
    fn rename_unused(&self, publications: &Publications, idle: Duration) -> io::Result<usize> {
        let all = self.all()?;
        if all.is_empty() {
            return Ok(0);
        }
        let _lock = self.lock_within(File::try_lock)?;
        let published =
            publications.try_all().map_err(|refused| io::Error::other(refused.message().to_owned()))?;
        // Servers of earlier programs have their caches elsewhere.
        let (mut used, mut used_earlier) = (HashSet::new(), HashSet::new());
        for (found, config) in published {
            let Some(identity) = found.home.file_name().map(OsStr::to_owned) else { continue };
            if config.is_none_or(|text| self.is_earlier(&text)) {
                used_earlier.insert(identity.clone());
            }
            used.insert(identity);
        }
        let (mut renamed, mut failed) = (0, Ok(()));
        for (identity, path) in all {
            let is_earlier = !path.starts_with(&self.folder);
            let used = if is_earlier { &used_earlier } else { &used };
            let done = match used.contains(&identity) {
                true => mark_used(&path).map(|()| false),
                false => self.rename_idle(&identity, &path, idle),
            };
            match done {
                Ok(is_renamed) => renamed += usize::from(is_renamed),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => failed = failed.and(Err(error)),
            }
        }
        failed.map(|()| renamed)
    }

    /// Whether a server with this configuration has its cache where earlier programs kept it.
    fn is_earlier(&self, config: &str) -> bool {
        let Some(Earlier::Folder(folder)) = &self.earlier else {
            return !config.lines().any(|line| line.trim() == SHARED);
        };
        let Ok(file) = toml::from_str::<toml::Table>(config) else { return true };
        let dir = file.get("datafs").and_then(|datafs| datafs.get("cache_dir")).and_then(toml::Value::as_str);
        dir.is_some_and(|dir| Path::new(dir).starts_with(folder))
    }

    /// Renames a cache that was not used for `idle`.
    fn rename_idle(&self, identity: &OsStr, path: &Path, idle: Duration) -> io::Result<bool> {
        let used = fs::symlink_metadata(path)?.modified()?;
        match SystemTime::now().duration_since(used) {
            Ok(age) if age < idle => return Ok(false),
            Ok(_) => {}
            // The clock was set back: its age counts from now.
            Err(_) => return mark_used(path).map(|()| false),
        }
        refuse_mounts(path)?;
        let mut gone = OsString::from(GONE);
        gone.push(identity);
        gone.push(format!(".{:016x}", millrace_leaf::random::id()?));
        // Another file system may begin at the driver's own cache.
        let folder = match &self.earlier {
            Some(Earlier::Folder(folder)) if path.starts_with(folder) => folder,
            _ => &self.folder,
        };
        private::create_dir_all(folder)?;
        fs::rename(path, folder.join(gone))?;
        Ok(true)
    }

    /// All caches, by identity of their tenant.
    fn all(&self) -> io::Result<Vec<(OsString, PathBuf)>> {
        let mut all = folders(&self.folder)?;
        match &self.earlier {
            Some(Earlier::Homes { homes, below }) => {
                for (identity, home) in folders(homes)? {
                    let mut path = home;
                    let is_reached = below.components().all(|part| {
                        path.push(part);
                        fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir())
                    });
                    if is_reached {
                        all.push((identity, path));
                    }
                }
            }
            Some(Earlier::Folder(folder)) => all.append(&mut folders(folder)?),
            None => {}
        }
        all.retain(|(identity, _)| Config::is_shared_cache_name(identity));
        Ok(all)
    }
}

/// The folders in a folder, without links. A missing folder has none.
fn folders(of: &Path) -> io::Result<Vec<(OsString, PathBuf)>> {
    let entries = match fs::read_dir(of) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let entries = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    Ok(entries.map(|entry| (entry.file_name(), entry.path())).collect())
}

/// Fails if something is mounted below a folder: what is removed there may be of others.
fn refuse_mounts(folder: &Path) -> io::Result<()> {
    let folder = fs::canonicalize(folder)?;
    let mounted = mount::mount_points().map_err(io::Error::other)?;
    match mounted.into_iter().find(|point| point.starts_with(&folder)) {
        Some(point) => Err(io::Error::other(format!(
            "the cache {} stays, because of the mount at {}: unmount it",
            folder.display(),
            point.display()
        ))),
        None => Ok(()),
    }
}

/// Notes that a cache is in use.
fn mark_used(path: &Path) -> io::Result<()> {
    let folder = File::options().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_DIRECTORY).open(path)?;
    folder.set_modified(SystemTime::now())
}

#[cfg(test)]
mod tests;
