//! The state of published volumes: one private file for each target, which outlives the driver, with a lock that
//! excludes other processes.
//!
//! `ID.json` says what is published where, `ID.toml` is the configuration of the mount's server and holds secrets,
//! the folder `ID.keys` holds encryption keys that came with a secret, `ID.lock` is locked during a call, and at
//! `ID.metrics` the server writes its metrics. ID is a digest of the target. During an upgrade two drivers of one node
//! share the folder: the one that wrote the record last is responsible for the server.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use millrace_datafs::VolumeSpec;
use millrace_leaf::{atomic_file, private};
use nix::unistd::geteuid;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use tonic::{Code, Status};

use crate::check::MountFlags;
use crate::keys::{self, Keys};
use crate::refusal::{busy, refused};
use crate::server_config;

/// The newest format of records that this build reads.
pub(crate) const FORMAT: u32 = 1;
/// Attempts to lock a file that others remove meanwhile.
const LOCK_ATTEMPTS: usize = 16;

/// A published volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Publication {
    pub(crate) format: u32,
    pub(crate) volume_id: String,
    /// What is mounted.
    pub(crate) spec: VolumeSpec,
    pub(crate) target: PathBuf,
    pub(crate) flags: MountFlags,
    /// The folder of the home.
    pub(crate) home: PathBuf,
    /// The digest of the home's configuration, which changes with its secrets.
    pub(crate) config_digest: String,
    /// The driver process that is responsible for the server: a random number.
    pub(crate) driver: String,
    /// The server, once it serves.
    pub(crate) server: Option<Process>,
}

/// A process, told apart from later ones with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// Its start, in clock ticks since the start of the system.
    pub(crate) started: u64,
}

impl Process {
    /// The process of an id.
    pub(crate) fn of(pid: u32) -> Option<Process> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        // The name, in parentheses, may hold any characters; the start is the 20th field after it.
        let started = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
        Some(Process { pid, started })
    }

    /// Whether it runs.
    pub(crate) fn is_alive(self) -> bool {
        Process::of(self.pid) == Some(self)
    }

    /// The server that a driver of this user started with a configuration file, if one runs. Its record may be missing: a
    /// driver writes it after the start. Reads the command lines of all processes.
    pub(crate) fn serving(config: &Path) -> Option<Process> {
        let entries = fs::read_dir("/proc").ok()?.flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| is_server(*pid, config)).find_map(Process::of)
    }
}

/// Whether a process of this user is the server with a configuration file. The daemon that it supervises is not.
fn is_server(pid: u32, config: &Path) -> bool {
    let folder = format!("/proc/{pid}");
    // Processes of other users may have any command line.
    if !fs::metadata(&folder).is_ok_and(|found| found.uid() == geteuid().as_raw()) {
        return false;
    }
    let Ok(line) = fs::read(format!("{folder}/cmdline")) else { return false };
    let arguments: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    let config = config.as_os_str().as_encoded_bytes();
    let has_config = arguments.windows(2).any(|pair| pair == [b"--config".as_slice(), config]);
    has_config && arguments.iter().any(|argument| matches!(*argument, b"--supervise" | b"--holder"))
}

/// The folder with the state of all targets.
#[derive(Debug, Clone)]
pub(crate) struct Publications {
    folder: PathBuf,
}

/// The state of one target, locked.
#[derive(Debug)]
pub(crate) struct Locked {
    folder: PathBuf,
    id: String,
    /// Unlocks when it is closed.
    _lock: File,
}

fn failed(attempt: &str, path: &Path, error: impl std::fmt::Display) -> Status {
    refused(Code::Internal, format!("cannot {attempt} {}: {error}", path.display()))
}

/// The name of a target's files.
fn id(target: &Path) -> String {
    hex::encode(&Sha256::digest(target.as_os_str().as_encoded_bytes())[..16])
}

impl Publications {
    /// The state in a folder, which is created when it is missing.
    ///
    /// # Errors
    /// Those of creating it.
    pub(crate) fn open(folder: PathBuf) -> io::Result<Publications> {
        // A configuration's relative paths begin at its own folder.
        let folder = std::path::absolute(folder)?;
        private::create_dir_all(&folder)?;
        Ok(Publications { folder })
    }

    /// Locks the state of a target.
    ///
    /// # Errors
    /// `ABORTED` while another call has it.
    pub(crate) fn lock(&self, target: &Path) -> Result<Locked, Status> {
        let id = id(target);
        let path = self.folder.join(format!("{id}.lock"));
        for _ in 0..LOCK_ATTEMPTS {
            let opened = private::options().write(true).create(true).truncate(false).open(&path);
            let file = opened.map_err(|error| failed("open", &path, error))?;
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(busy(&format!("target {}", target.display()))),
                Err(TryLockError::Error(error)) => return Err(failed("lock", &path, error)),
            }
            // The call before may have removed the file, and another call may have locked its successor.
            let (ours, there) = (file.metadata(), fs::symlink_metadata(&path));
            if let (Ok(ours), Ok(there)) = (ours, there)
                && (ours.dev(), ours.ino()) == (there.dev(), there.ino())
            {
                return Ok(Locked { folder: self.folder.clone(), id, _lock: file });
            }
        }
        Err(busy(&format!("target {}", target.display())))
    }

    /// The record of a target, without its lock.
    pub(crate) fn find(&self, target: &Path) -> Result<Option<Publication>, Status> {
        read(&self.folder.join(format!("{}.json", id(target))))
    }

    /// The socket at which the server of a target exports its metrics.
    pub(crate) fn metrics_socket(&self, target: &Path) -> PathBuf {
        self.folder.join(format!("{}.metrics", id(target)))
    }

    /// The records of all targets, each with the configuration of its server, if that can be read.
    ///
    /// # Errors
    /// That of the folder or of the first record that cannot be read.
    pub(crate) fn try_all(&self) -> Result<Vec<(Publication, Option<String>)>, Status> {
        let entries = fs::read_dir(&self.folder).map_err(|error| failed("list", &self.folder, error))?;
        let mut all = Vec::new();
        for entry in entries {
            let path = entry.map_err(|error| failed("list", &self.folder, error))?.path();
            if path.extension().is_some_and(|ending| ending == "json")
                && let Some(found) = read(&path)?
            {
                all.push((found, fs::read_to_string(path.with_extension("toml")).ok()));
            }
        }
        Ok(all)
    }

    /// The records of all targets. A file that cannot be read is logged and left out.
    pub(crate) fn all(&self) -> Vec<Publication> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) => {
                tracing::error!(folder = %self.folder.display(), %error, "cannot read the state of published volumes");
                return Vec::new();
            }
        };
        let paths = entries.flatten().map(|entry| entry.path());
        let records = paths.filter(|path| path.extension().is_some_and(|ending| ending == "json"));
        records
            .filter_map(|path| match read(&path) {
                Ok(found) => found,
                Err(refused) => {
                    tracing::error!(
                        error = refused.message(),
                        "cannot read the record of a published volume"
                    );
                    None
                }
            })
            .collect()
    }
}

fn read(path: &Path) -> Result<Option<Publication>, Status> {
    let text = match fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("read", path, error)),
    };
    let found: Publication =
        serde_json::from_slice(&text).map_err(|error| failed("read the record", path, error))?;
    if found.format > FORMAT {
        let reason =
            format!("format {} is newer than this program, which reads up to {FORMAT}", found.format);
        return Err(failed("read the record", path, reason));
    }
    Ok(Some(found))
}

impl Locked {
    fn path(&self, ending: &str) -> PathBuf {
        self.folder.join(format!("{}.{ending}", self.id))
    }

    /// The configuration file of the server.
    pub(crate) fn config(&self) -> PathBuf {
        self.path("toml")
    }

    /// The folder with the server's encryption keys that came with a secret.
    pub(crate) fn keys(&self) -> PathBuf {
        self.path("keys")
    }

    /// The socket at which the server exports its metrics.
    pub(crate) fn metrics_socket(&self) -> PathBuf {
        self.path("metrics")
    }

    /// The record, if the target is published.
    pub(crate) fn read(&self) -> Result<Option<Publication>, Status> {
        read(&self.path("json"))
    }

    /// Whether this is the configuration of the server, and these are its encryption keys from a secret.
    pub(crate) fn has_config(&self, text: &str, keys: &Keys) -> bool {
        fs::read(self.config()).is_ok_and(|found| found == text.as_bytes()) && keys.are_in(&self.keys())
    }

    /// Removes what this program does not know and may leave out from a configuration that a later one wrote.
    pub(crate) fn fit_config(&self) -> Result<(), Status> {
        // The server says what is wrong with a file that cannot be read.
        let Ok(text) = fs::read_to_string(self.config()) else { return Ok(()) };
        let Some((text, unknown)) = server_config::without_unknown(&text) else { return Ok(()) };
        tracing::warn!(
            path = %self.config().display(), keys = %unknown.join(" "),
            "a later program wrote the configuration of a mount's server: its optional keys are left out"
        );
        self.write_text(&text)
    }

    /// Writes the configuration of the server, with its encryption keys from a secret. Earlier keys are removed.
    pub(crate) fn write_config(&self, text: &str, keys: &Keys) -> Result<(), Status> {
        let folder = self.keys();
        keys.write(&folder).map_err(|error| failed("write encryption keys to", &folder, error))?;
        self.write_text(text)?;
        keys.remove_others(&folder).map_err(|error| failed("remove old encryption keys from", &folder, error))
    }

    fn write_text(&self, text: &str) -> Result<(), Status> {
        let path = self.config();
        atomic_file::replace(&path, &self.path("toml-new"), text.as_bytes())
            .map_err(|error| failed("write", &path, error))
    }

    /// Writes the record.
    pub(crate) fn write(&self, publication: &Publication) -> Result<(), Status> {
        let path = self.path("json");
        let text = serde_json::to_vec(publication).map_err(|error| failed("write", &path, error))?;
        atomic_file::replace(&path, &self.path("json-new"), &text)
            .and_then(|()| File::open(&self.folder)?.sync_all())
            .map_err(|error| failed("write", &path, error))
    }

    /// Forgets the target, the lock included.
    pub(crate) fn remove(self) -> Result<(), Status> {
        // The record last: until it is gone, the rest is found again.
        let keys = self.keys();
        keys::remove_all(&keys).map_err(|error| failed("remove", &keys, error))?;
        for ending in ["metrics-new", "metrics", "toml-new", "json-new", "toml", "json", "lock"] {
            let path = self.path(ending);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(failed("remove", &path, error));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publication(target: &Path) -> Publication {
        Publication {
            format: FORMAT,
            volume_id: "digits@monday".into(),
            spec: "digits@monday".parse().unwrap(),
            target: target.to_owned(),
            flags: MountFlags::default(),
            home: "/home".into(),
            config_digest: "d".into(),
            driver: "me".into(),
            server: Process::of(std::process::id()),
        }
    }

    #[test]
    fn a_record_outlives_the_driver_and_a_second_call_is_aborted() {
        let dir = tempfile::tempdir().unwrap();
        let all = Publications::open(dir.path().join("state")).unwrap();
        let target = Path::new("/a/mount");
        let locked = all.lock(target).unwrap();
        assert_eq!(locked.read().unwrap(), None);
        let mut keys = Keys::default();
        keys.insert("mine", "k");
        locked.write_config("secret", &keys).unwrap();
        assert!(locked.has_config("secret", &keys) && locked.keys().exists());
        locked.write(&publication(target)).unwrap();
        assert_eq!(all.lock(target).unwrap_err().code(), Code::Aborted);
        assert!(all.lock(Path::new("/b/mount")).is_ok());
        drop(locked);
        let locked = Publications::open(dir.path().join("state")).unwrap().lock(target).unwrap();
        assert_eq!(locked.read().unwrap(), Some(publication(target)));
        assert_eq!(all.all(), [publication(target)]);
        let mode = fs::metadata(locked.config()).unwrap().mode();
        assert_eq!(mode & 0o077, 0);
        let keys = locked.keys();
        locked.remove().unwrap();
        assert!(all.all().is_empty() && !keys.exists());
        assert!(all.lock(target).unwrap().read().unwrap().is_none());
    }

    #[test]
    fn a_configuration_of_a_later_program_loses_its_optional_keys() {
        let dir = tempfile::tempdir().unwrap();
        let locked = Publications::open(dir.path().to_owned()).unwrap().lock(Path::new("/a")).unwrap();
        locked.fit_config().unwrap();
        let none = Keys::default();
        assert!(!locked.has_config("", &none));
        let later = "# optional: of_tomorrow\n[datafs]\nmeta_schema = \"s\"\nof_tomorrow = 1\n";
        locked.write_config(later, &none).unwrap();
        assert!(locked.has_config(later, &none));
        locked.fit_config().unwrap();
        assert!(locked.has_config("[datafs]\nmeta_schema = \"s\"\n", &none));
    }

    #[test]
    fn damaged_and_newer_records_are_reported_and_do_not_hide_others() {
        let dir = tempfile::tempdir().unwrap();
        let all = Publications::open(dir.path().to_owned()).unwrap();
        let (one, two) = (Path::new("/1"), Path::new("/2"));
        all.lock(one).unwrap().write(&publication(one)).unwrap();
        let locked = all.lock(two).unwrap();
        fs::write(locked.path("json"), "{").unwrap();
        assert!(locked.read().unwrap_err().message().contains("cannot read the record"));
        assert_eq!(all.all().len(), 1);
        locked.write(&Publication { format: 99, ..publication(two) }).unwrap();
        assert!(locked.read().unwrap_err().message().contains("newer"));
    }

    #[test]
    fn a_process_is_told_from_a_later_one_of_the_same_id() {
        let me = Process::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!Process { started: me.started + 1, ..me }.is_alive());
        assert_eq!(Process::of(0), None);
    }
}
