//! The home folder: holds all embedded state of one Millrace, the lock of its service and the addresses of
//! that service.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use millrace_datafs::Datafs;
use millrace_leaf::lock_file::{self, LockFile, NotTaken};
use millrace_leaf::private;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Version of the folder's layout. A newer one is rejected, an older one would be migrated here.
const FORMAT: u32 = 1;

/// Commands that run the broker of the home whose lock they hold.
const BROKER_COMMANDS: [&str; 3] = ["up", "broker", "quickstart"];

/// An opened home folder. Each process that has one open holds a shared lock on it.
#[derive(Debug, Clone)]
pub struct Home {
    root: PathBuf,
    /// None if the folder is read-only, and in the process of a temporary broker.
    in_use: Option<Arc<File>>,
}

/// Exclusive use of a home: no mount, service or other command has it open. Dropping it returns to shared
/// use.
#[derive(Debug)]
pub struct ExclusiveHome(Arc<File>);

impl Drop for ExclusiveHome {
    fn drop(&mut self) {
        // No process waits for the exclusive lock, so the change to a shared one does not block.
        self.0.lock_shared().ok();
    }
}

#[derive(Serialize, Deserialize)]
struct FormatFile {
    format: u32,
}

/// The addresses of the process that holds a home, for other commands.
#[derive(Debug, Clone, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Addresses {
    /// The embedded broker, or the bootstrap servers of a cluster.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kafka: Option<String>,
    /// Open Inference Protocol over gRPC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grpc: Option<SocketAddr>,
    /// Open Inference Protocol over HTTP.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<SocketAddr>,
    /// Prometheus metrics.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
    /// The first mounted folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount: Option<PathBuf>,
}

/// The content of the lock file.
#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    pid: u32,
    command: String,
    since: String,
    addresses: Addresses,
}

/// The lock that permits running services on a home. Released when dropped, or when the process dies.
#[derive(Debug)]
pub struct HomeLock {
    file: LockFile,
    holder: Holder,
}

impl Home {
    /// The folder from the flag, the environment or the XDG rules. Touches no disk.
    pub fn locate(flag: Option<&Path>) -> Result<PathBuf> {
        if let Some(path) = flag {
            return std::path::absolute(path).map_err(|error| Error::io("cannot resolve --home", error));
        }
        let data = match std::env::var_os("XDG_DATA_HOME") {
            Some(dir) if Path::new(&dir).is_absolute() => PathBuf::from(dir),
            _ => match std::env::home_dir() {
                Some(dir) => dir.join(".local/share"),
                None => {
                    return Err(Error::Usage("no home folder: pass --home DIR or set MILLRACE_HOME".into()));
                }
            },
        };
        Ok(data.join("millrace"))
    }

    /// Opens the folder, creating it when it is missing. Rejects one of a newer format, one of another user,
    /// and a new one that cannot be written. Removes access rights of other users, with a note.
    pub fn open(root: PathBuf, shares: bool, note: impl Fn(&str)) -> Result<Home> {
        let remedy = "choose another with --home DIR or MILLRACE_HOME";
        if let Err(error) = private::create_dir_all(&root) {
            return Err(Error::Unavailable(format!(
                "cannot create home folder {}: {error} ({remedy})",
                root.display()
            )));
        }
        let format = root.join("format.json");
        match fs::read_to_string(&format) {
            Ok(text) => {
                let found: FormatFile = match serde_json::from_str(&text) {
                    Ok(found) => found,
                    Err(error) => {
                        return Err(Error::Corrupt(format!(
                            "{} is not a format file: {error} ({remedy})",
                            format.display()
                        )));
                    }
                };
                if found.format > FORMAT {
                    return Err(Error::Conflict(format!(
                        "home folder {} has format {}, this program knows up to {FORMAT}: \
                             use a newer millrace, or {remedy}",
                        root.display(),
                        found.format
                    )));
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let text = json(&FormatFile { format: FORMAT })?;
                if let Err(error) = write_private(&format, text.as_bytes()) {
                    return Err(Error::Unavailable(format!(
                        "cannot write in home folder {}: {error} ({remedy})",
                        root.display()
                    )));
                }
            }
            Err(error) => {
                return Err(Error::Unavailable(format!(
                    "cannot read {}: {error} ({remedy})",
                    format.display()
                )));
            }
        }
        refuse_foreign("home folder", &root, &root, &format, remedy)?;
        if let Some(owner) = foreign_owner(&root) {
            note(&format!(
                "home folder {} belongs to user {owner}, who cannot open what this user adds; run Millrace as that user",
                root.display()
            ));
        }
        match close_to_others(&root) {
            Ok(None) => {}
            Ok(Some(mode)) => note(&format!(
                "home folder {} was open to other users (mode {mode:o}); now only its owner can enter it",
                root.display()
            )),
            Err(error) => note(&format!(
                "home folder {} is open to other users and cannot be closed: {error}",
                root.display()
            )),
        }
        let in_use = if shares { share(&root)? } else { None };
        Ok(Home { root, in_use })
    }

    /// Gets exclusive use of this home, for work that removes data in use. Fails while another process has
    /// the home open.
    pub fn lock_exclusively(&self, purpose: &str) -> Result<ExclusiveHome> {
        let root = self.root.display();
        let Some(in_use) = &self.in_use else {
            return Err(Error::Unavailable(format!(
                "cannot {purpose} of home folder {root}: it is read-only"
            )));
        };
        match in_use.try_lock() {
            Ok(()) => Ok(ExclusiveHome(Arc::clone(in_use))),
            Err(TryLockError::WouldBlock) => Err(Error::Conflict(format!(
                "cannot {purpose} of home folder {root}: a mount, a service or another command uses it; \
                     stop it first (millrace umount PATH ends a mount)"
            ))),
            Err(TryLockError::Error(error)) => {
                Err(Error::io(format!("cannot lock home folder {root}"), error))
            }
        }
    }

    /// Rejects a local store or metadata file that another user created. That user could not open files that
    /// this process adds, nor this process the existing ones.
    pub fn check_store(&self, config: &millrace_datafs::Config) -> Result<()> {
        let remedy = "set [datafs] store_dir and meta_file to places of this user";
        if config.store_url.is_none() {
            let store = self.root.join(&config.store_dir);
            refuse_foreign("local store", &store, &store, &store.join(STORE_MARKER), remedy)?;
        }
        if config.meta_url.is_none() {
            let meta = self.root.join(&config.meta_file);
            let folder = meta.parent().unwrap_or(&self.root);
            refuse_foreign("metadata file", &meta, folder, &meta, remedy)?;
        }
        Ok(())
    }

    /// Opens the volumes of this home, as the configuration places them.
    pub fn volumes(&self, config: &millrace_datafs::Config) -> Result<Datafs> {
        self.check_store(config)?;
        Ok(Datafs::open(&self.root, config)?)
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    fn lock_path(&self) -> PathBuf {
        self.root.join("holder.lock")
    }

    /// Locks the home for `command`; an error names the process that holds it.
    pub fn lock(&self, command: &str) -> Result<HomeLock> {
        let path = self.lock_path();
        let file = match LockFile::take(&path) {
            Ok(file) => file,
            Err(NotTaken::Held { holder }) => {
                let who = match serde_json::from_str::<Holder>(&holder) {
                    Ok(holder) => format!(
                        "process {} (millrace {}, since {})",
                        holder.pid, holder.command, holder.since
                    ),
                    Err(_) => "another process".to_owned(),
                };
                return Err(Error::Conflict(format!(
                    "home folder {} is held by {who}: stop it, or choose another with --home DIR",
                    self.root.display()
                )));
            }
            Err(NotTaken::Io(error)) => {
                return Err(Error::io(format!("cannot lock {}", path.display()), error));
            }
        };
        let mut lock = HomeLock {
            file,
            holder: Holder {
                pid: std::process::id(),
                command: command.to_owned(),
                since: chrono::Utc::now().to_rfc3339_opts(chrono::SecondsFormat::Secs, true),
                addresses: Addresses::default(),
            },
        };
        lock.write()?;
        Ok(lock)
    }

    /// The addresses of the process that holds this home; None without one.
    pub fn running(&self) -> Option<Addresses> {
        self.holder().map(|holder| holder.addresses)
    }

    /// The process id of the service that runs, or is about to run, the broker of this home; None without
    /// one.
    pub fn service(&self) -> Option<u32> {
        let holder = self.holder()?;
        BROKER_COMMANDS.contains(&holder.command.as_str()).then_some(holder.pid)
    }

    fn holder(&self) -> Option<Holder> {
        serde_json::from_str(&lock_file::holder(&self.lock_path())?).ok()
    }
}

impl HomeLock {
    /// Announces the addresses of this process to other commands.
    pub fn announce(&mut self, addresses: Addresses) -> Result<()> {
        self.holder.addresses = addresses;
        self.write()
    }

    fn write(&mut self) -> Result<()> {
        // A reader that sees a torn text finds no holder.
        let described = self.file.describe(&json(&self.holder)?);
        described.map_err(|error| Error::io("cannot write the lock of the home folder", error))
    }
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::io("cannot write JSON", error.into()))
}

/// Takes the shared lock of all processes that have the home open. None if the folder is read-only: such a
/// process has nothing in it to lose.
fn share(root: &Path) -> Result<Option<Arc<File>>> {
    let path = root.join("in-use.lock");
    let file = match private::options().append(true).create(true).open(&path) {
        Ok(file) => file,
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::PermissionDenied | std::io::ErrorKind::ReadOnlyFilesystem
            ) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(Error::io(format!("cannot open {}", path.display()), error)),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(Some(Arc::new(file))),
        Err(TryLockError::WouldBlock) => Err(Error::Conflict(format!(
            "home folder {} is being emptied by another command: try again",
            root.display()
        ))),
        Err(TryLockError::Error(error)) => Err(Error::io(format!("cannot lock {}", path.display()), error)),
    }
}

/// The files that Millrace itself writes to a home.
const OWN: [&str; 11] = [
    "datafs",
    "broker",
    "broker.log",
    "feed",
    "trainer",
    "run",
    "format.json",
    "holder.lock",
    "in-use.lock",
    "topics.lock",
    "mount.log",
];

/// The first file that Millrace writes to a local store.
const STORE_MARKER: &str = "store.json";

/// Fails if another user created Millrace's file `made` in `folder`; a missing file passes. The folder itself
/// may have any owner, like the mount point of a disk.
fn refuse_foreign(what: &str, path: &Path, folder: &Path, made: &Path, remedy: &str) -> Result<()> {
    let own = nix::unistd::geteuid().as_raw();
    let owner = match fs::symlink_metadata(made) {
        Ok(metadata) => metadata.uid(),
        // Opening the file reports the error.
        Err(_) => return Ok(()),
    };
    if owner == own || !is_foreign(owner, owner_of_new(folder)) {
        return Ok(());
    }
    let path = path.display();
    Err(Error::Unavailable(format!(
        "{what} {path} belongs to user {}, who could not open what user {} adds: run millrace as its owner \
             (sudo -u '#{owner}' millrace ...), or give it to this user (chown -R {own} {path}), or {remedy}",
        user(owner),
        user(own)
    )))
}

/// A user's id, with the name if it has one.
fn user(id: u32) -> String {
    match nix::unistd::User::from_uid(id.into()) {
        Ok(Some(user)) => format!("{id} ({})", user.name),
        Ok(None) | Err(_) => id.to_string(),
    }
}

/// The owner that the file system gives to a new file in a folder. It is not this user on NFS with
/// root_squash and on file systems without owners (vfat, CIFS with `uid=`, sshfs).
fn owner_of_new(folder: &Path) -> std::io::Result<u32> {
    Ok(tempfile::tempfile_in(folder)?.metadata()?.uid())
}

/// Whether a file's owner is another user, given the owner of a new file beside it.
fn is_foreign(owner: u32, new: std::io::Result<u32>) -> bool {
    match new {
        Ok(new) => new != owner,
        // On a read-only file system, this process can add no file that the owner could not open.
        Err(error) => error.kind() != std::io::ErrorKind::ReadOnlyFilesystem,
    }
}

/// The owner of a home, if it is another user. A folder that users share by design, such as /tmp, counts as
/// having none.
fn foreign_owner(root: &Path) -> Option<u32> {
    let metadata = fs::metadata(root).ok()?;
    let (owner, own) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    let is_own = metadata.mode() & 0o1000 != 0 || owner == own;
    (!is_own && is_foreign(owner, owner_of_new(root))).then_some(owner)
}

/// Removes other users' rights from a home of an earlier version; returns the former mode if that was
/// necessary. A folder that users share by design, such as /tmp, keeps its mode.
fn close_to_others(root: &Path) -> std::io::Result<Option<u32>> {
    let metadata = fs::metadata(root)?;
    let mode = metadata.mode() & 0o7777;
    let is_shared = mode & 0o1000 != 0 || root.parent().is_none();
    let mut closed = !is_shared && close(root, &metadata)?;
    for name in OWN {
        closed |= close_tree(&root.join(name), metadata.dev())?;
    }
    Ok(closed.then_some(mode))
}

/// Removes other users' rights from a file or folder. If a folder was open to them, continues below it on the
/// same file system.
fn close_tree(path: &Path, device: u64) -> std::io::Result<bool> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        other => other?,
    };
    if metadata.is_symlink() || metadata.dev() != device || !close(path, &metadata)? {
        return Ok(false);
    }
    if metadata.is_dir() {
        for entry in fs::read_dir(path)? {
            close_tree(&entry?.path(), device)?;
        }
    }
    Ok(true)
}

/// Removes other users' rights from one file or folder of this user. By name: opening and closing a file
/// would drop this process's SQLite locks on it.
fn close(path: &Path, metadata: &fs::Metadata) -> std::io::Result<bool> {
    let mode = metadata.mode() & 0o7777;
    if mode & 0o077 == 0 || metadata.uid() != nix::unistd::geteuid().as_raw() {
        return Ok(false);
    }
    match fs::set_permissions(path, fs::Permissions::from_mode(mode & !0o077)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
        other => other.map(|()| true),
    }
}

/// Replaces a file atomically: after a crash it holds the old bytes or the new ones. The umask applies, as
/// for any new file.
pub fn write_atomically(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    replace(path, bytes, 0o666)
}

/// [`write_atomically`] for a file of the home that only its owner may read.
pub fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    replace(path, bytes, 0o600)
}

fn replace(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    // The parent of a bare name is an empty path.
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut staged =
        tempfile::Builder::new().permissions(fs::Permissions::from_mode(mode)).tempfile_in(parent)?;
    staged.write_all(bytes)?;
    staged.as_file().sync_all()?;
    staged.persist(path).map_err(|error| error.error)?;
    File::open(parent)?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind};

    use super::is_foreign;

    #[test]
    fn file_is_foreign_only_if_a_new_file_gets_another_owner() {
        assert!(!is_foreign(65_534, Ok(65_534)), "NFS with root_squash");
        assert!(is_foreign(1000, Ok(0)));
        assert!(is_foreign(1000, Err(Error::from(ErrorKind::PermissionDenied))));
        assert!(!is_foreign(1000, Err(Error::from(ErrorKind::ReadOnlyFilesystem))));
    }

    #[test]
    fn new_file_reveals_owner_assigned_by_file_system() {
        let dir = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
        let own = nix::unistd::geteuid().as_raw();
        assert_eq!(super::owner_of_new(dir.path()).ok(), Some(own));
        assert!(super::owner_of_new(&dir.path().join("missing")).is_err());
    }
}
