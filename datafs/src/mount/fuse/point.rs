//! The mount point: lookup in the mount table, attaching and detaching. With privilege it uses `mount(2)`,
//! without it `fusermount3`.
//!
//! This module opens `/dev/fuse` instead of the FUSE library. The library unmounts its path once more when a
//! session ends, even if another file system is mounted there by then.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, umount2};

use super::fusermount;
use crate::error::{Error, Result};
use crate::mount::options::MountOptions;

/// The kernel's device for FUSE.
pub(in crate::mount) const DEVICE: &str = "/dev/fuse";
/// File-system type of the mounts of this crate, as `/proc/self/mountinfo` shows it.
const FS_TYPE: &str = "fuse.millrace";
/// Bit of CAP_SYS_ADMIN in a capability mask.
const CAP_SYS_ADMIN: u32 = 21;
/// Most mounts that an error names.
const MOUNTS_SHOWN_MAX: usize = 8;
/// Read-ahead window of a mount, in KiB: 1 MiB instead of the kernel's 128 KiB.
const READ_AHEAD_KIB: u32 = 1024;

/// Largest read request of the kernel. A read of 1 MiB then becomes four requests, which two threads serve at
/// the same time. Direct I/O on two cores: 3.0 to 4.8 GiB/s, against 2.3 as one request.
pub(in crate::mount) const READ_BYTES_MAX: u32 = 256 * 1024;

/// A mount of this crate as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::mount) struct Entry {
    /// The mount point.
    pub(in crate::mount) at: PathBuf,
    /// `major:minor` of its device; the minor is also the number of its FUSE connection.
    pub(in crate::mount) device: String,
}

/// The mount that a file is on, of any file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::mount) struct On {
    /// The mount point.
    pub(in crate::mount) at: PathBuf,
    /// `major:minor` of its device.
    pub(in crate::mount) device: String,
    /// It is a mount of this crate.
    pub(in crate::mount) is_ours: bool,
    /// The source that the kernel lists: for a mount of this crate the volume or snapshot.
    pub(in crate::mount) source: String,
}

/// Parameters of [`attach`].
#[derive(Debug, Clone)]
pub(in crate::mount) struct Attach<'a> {
    /// The source that `mount` and `df` show: the volume.
    pub(in crate::mount) source: &'a str,
    /// The kernel refuses writes.
    pub(in crate::mount) read_only: bool,
    /// Further options of the mount.
    pub(in crate::mount) options: &'a MountOptions,
}

/// An error of the system. Not [`Error::io`], whose advice is about the home folder.
pub(in crate::mount) fn refused(operation: &'static str, at: impl Into<PathBuf>, source: io::Error) -> Error {
    Error::Io { operation, path: at.into(), source }
}

/// Whether this process may mount. Otherwise the reason and the remedy, in one line.
pub(in crate::mount) fn can_mount() -> Result<(), String> {
    match OpenOptions::new().read(true).write(true).open(DEVICE) {
        Ok(_) => {}
        Err(e) if matches!(e.kind(), ErrorKind::NotFound) => {
            return Err(format!(
                "{DEVICE} does not exist: load the kernel module (modprobe fuse) or start the \
                 container with --device {DEVICE}"
            ));
        }
        Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {
            return Err(format!("the kernel has no FUSE ({DEVICE}: {e}): run modprobe fuse"));
        }
        Err(e) => {
            let user = nix::unistd::geteuid();
            return Err(format!(
                "user {user} cannot open {DEVICE} ({e}): start the container with \
                 --device {DEVICE} or join the group that owns it"
            ));
        }
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if has_mount_privilege(&status) {
        return Ok(());
    }
    if nix::unistd::geteuid().is_root() {
        return Err("root lacks CAP_SYS_ADMIN here, so it cannot mount: start the container with \
                    --cap-add SYS_ADMIN"
            .into());
    }
    if fusermount::program().is_none() {
        return Err("fusermount3, which mounts for unprivileged users, is not installed: install \
                    the package fuse3"
            .into());
    }
    if status_field(&status, "NoNewPrivs") == Some("1") {
        return Err("no_new_privs is set for this process, so fusermount3 cannot gain the right to \
                    mount: start it without that restriction"
            .into());
    }
    Ok(())
}

fn status_field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
}

fn has_mount_privilege(status: &str) -> bool {
    status_field(status, "CapEff")
        .and_then(|mask| u64::from_str_radix(mask, 16).ok())
        .is_some_and(|mask| mask >> CAP_SYS_ADMIN & 1 == 1)
}

/// Whether this process has the privilege to mount, and to open backing files.
pub(in crate::mount) fn is_privileged() -> bool {
    has_mount_privilege(&fs::read_to_string("/proc/self/status").unwrap_or_default())
}

/// Makes `at` an empty directory without a mount: creates it if missing, and detaches a mount of this crate
/// whose process has died. Returns the absolute path.
pub(in crate::mount) fn prepare(at: &Path) -> Result<PathBuf> {
    let absolute = absolute(at)?;
    // For a dead process the kernel still serves cached attributes, but not `statvfs`.
    let alive = nix::sys::statvfs::statvfs(&absolute).map_err(io::Error::from);
    match alive.and_then(|_| fs::metadata(&absolute)) {
        Err(e) if e.raw_os_error() == Some(libc::ENOTCONN) => {
            if find(&absolute)?.is_none() {
                let reason = "a dead mount of another program is there: unmount it first";
                return Err(refused("mount on", &absolute, io::Error::other(reason)));
            }
            tracing::info!(path = %absolute.display(), "taking off a mount whose process has died");
            detach(&absolute, true).map_err(|e| refused("take off the dead mount at", &absolute, e))?;
        }
        Err(e) if e.kind() == ErrorKind::NotFound => {
            fs::create_dir_all(&absolute).map_err(|e| refused("create mount point", &absolute, e))?;
        }
        Err(e) => return Err(refused("open mount point", &absolute, e)),
        Ok(metadata) if !metadata.is_dir() => {
            return Err(Error::NotADirectory { what: absolute.display().to_string() });
        }
        Ok(_) => {}
    }
    if find(&absolute)?.is_some() {
        return Err(Error::Exists { what: format!("a mount at {}", absolute.display()) });
    }
    let mut entries = fs::read_dir(&absolute).map_err(|e| refused("open mount point", &absolute, e))?;
    if entries.next().is_some() {
        return Err(Error::NotEmpty { what: absolute.display().to_string() });
    }
    Ok(absolute)
}

/// `at` with symbolic links resolved, as the mount table lists it. The last component may be a dead mount: if
/// it cannot be resolved, only its parent is.
pub(in crate::mount) fn absolute(at: &Path) -> Result<PathBuf> {
    let failed = |e| refused("open mount point", at, e);
    match fs::canonicalize(at) {
        Ok(path) => return Ok(path),
        Err(e) if matches!(e.raw_os_error(), Some(libc::ENOTCONN | libc::ENOENT)) => {}
        Err(e) => return Err(failed(e)),
    }
    let whole = std::path::absolute(at).map_err(failed)?;
    let (Some(parent), Some(name)) = (whole.parent(), whole.file_name()) else { return Ok(whole) };
    match fs::canonicalize(parent) {
        Ok(parent) => Ok(parent.join(name)),
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(whole),
        Err(e) => Err(failed(e)),
    }
}

/// The topmost mount of this crate at exactly this absolute path.
pub(in crate::mount) fn find(at: &Path) -> Result<Option<Entry>> {
    let table = "/proc/self/mountinfo";
    let table = fs::read(table).map_err(|e| refused("read", table, e))?;
    Ok(parse_mountinfo(&table).into_iter().rfind(|entry| entry.at == at))
}

/// The mount points that this process sees, of any file system.
///
/// # Errors
/// That of reading the kernel's table.
pub fn mount_points() -> Result<Vec<PathBuf>> {
    let table = "/proc/self/mountinfo";
    let table = fs::read(table).map_err(|e| refused("read", table, e))?;
    Ok(parse_lines(&table).map(|(_, on)| on.at).collect())
}

/// What to name instead of `named`, where no volume is mounted: the folders of the volume of this name, else all.
pub(in crate::mount) fn other_mounts(named: &Path) -> Result<String> {
    let table = "/proc/self/mountinfo";
    let table = fs::read(table).map_err(|e| refused("read", table, e))?;
    Ok(named_instead(named, &table))
}

fn named_instead(named: &Path, table: &[u8]) -> String {
    let is_volume = |source: &str| {
        let volume = source.split_once('@').map_or(source, |(volume, _)| volume);
        named.to_str().is_some_and(|name| name == source || name == volume)
    };
    let ours: Vec<On> = parse_lines(table).map(|(_, on)| on).filter(|on| on.is_ours).collect();
    let of_volume: Vec<&On> = ours.iter().filter(|on| is_volume(&on.source)).collect();
    let (which, shown) = match (ours.is_empty(), of_volume.is_empty()) {
        (true, _) => return ": no volume is mounted here".to_owned(),
        (false, true) => ("mounted are".to_owned(), ours.iter().collect()),
        (false, false) => (format!("volume {} is mounted at", named.display()), of_volume),
    };
    let mut folders: Vec<String> = shown
        .iter()
        .take(MOUNTS_SHOWN_MAX)
        .map(|on| format!("{} ({})", on.at.display(), on.source))
        .collect();
    if shown.len() > folders.len() {
        folders.push(format!("{} more", shown.len() - folders.len()));
    }
    format!(": name the folder of a mount; {which} {}", folders.join(", "))
}

/// The mount that an open file is on. Asks the kernel only, also with O_PATH: no request is sent to the mount.
/// `None` if it is in no path of this process any more.
pub(in crate::mount) fn mount_of(file: BorrowedFd<'_>) -> Result<Option<On>> {
    let of_file = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
    let told = fs::read_to_string(&of_file).map_err(|e| refused("read", &of_file, e))?;
    let Some(id) = told.lines().find_map(|line| line.strip_prefix("mnt_id:")) else { return Ok(None) };
    let table = "/proc/self/mountinfo";
    let table = fs::read(table).map_err(|e| refused("read", table, e))?;
    Ok(parse_lines(&table).find(|(number, _)| *number == id.trim().as_bytes()).map(|(_, on)| on))
}

fn parse_mountinfo(table: &[u8]) -> Vec<Entry> {
    let ours = parse_lines(table).filter(|(_, on)| on.is_ours);
    ours.map(|(_, On { at, device, .. })| Entry { at, device }).collect()
}

/// The mounts of a table, each with its number.
fn parse_lines(table: &[u8]) -> impl Iterator<Item = (&[u8], On)> {
    table.split(|&b| b == b'\n').filter_map(|line| {
        let fields: Vec<&[u8]> = line.split(|&b| b == b' ').collect();
        let dash = fields.iter().position(|f| f == b"-")?;
        let (number, device, at) = (fields.first()?, fields.get(2)?, fields.get(4)?);
        let on = On {
            at: PathBuf::from(unescape(at)),
            device: String::from_utf8_lossy(device).into_owned(),
            is_ours: *fields.get(dash + 1)? == FS_TYPE.as_bytes(),
            source: unescape(fields.get(dash + 2)?).to_string_lossy().into_owned(),
        };
        Some((*number, on))
    })
}

/// Undoes mountinfo's octal escapes (`\040` for a space).
fn unescape(field: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let digits = tail.get(..3).filter(|_| *first == b'\\').and_then(|d| std::str::from_utf8(d).ok());
        match digits.and_then(|d| u8::from_str_radix(d, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &tail[3..];
            }
            None => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    OsString::from_vec(out)
}

/// Mounts on a prepared directory. Returns the descriptor that delivers the kernel's requests.
pub(in crate::mount) fn attach(at: &Path, how: &Attach<'_>) -> Result<OwnedFd> {
    attach_through(at, at, how)
}

/// [`attach`], where `through` leads to the folder as well, for this process only.
pub(in crate::mount) fn attach_through(at: &Path, through: &Path, how: &Attach<'_>) -> Result<OwnedFd> {
    let failed = |e| refused("mount on", at, e);
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    if !has_mount_privilege(&status) {
        return fusermount::attach(at, how).map_err(failed);
    }
    let device: File = OpenOptions::new().read(true).write(true).open(DEVICE).map_err(failed)?;
    let mode = fs::metadata(through).map_err(failed)?.mode();
    let mut data = format!(
        "fd={},rootmode={mode:o},user_id={},group_id={},default_permissions,max_read={READ_BYTES_MAX}",
        device.as_raw_fd(),
        nix::unistd::geteuid(),
        nix::unistd::getegid(),
    );
    if how.options.allow_other {
        data.push_str(",allow_other");
    }
    let mut flags = MsFlags::empty();
    flags.set(MsFlags::MS_RDONLY, how.read_only);
    flags.set(MsFlags::MS_NOSUID, !how.options.suid);
    flags.set(MsFlags::MS_NODEV, !how.options.dev);
    flags.set(MsFlags::MS_NOEXEC, how.options.noexec);
    nix::mount::mount(Some(how.source), through, Some(FS_TYPE), flags, Some(data.as_str()))
        .map_err(|e| failed(e.into()))?;
    Ok(device.into())
}

/// Unmounts. With `lazy` the path is free at once, and open files stay usable until they are closed. Otherwise
/// fails with EBUSY while a file is open.
pub(in crate::mount) fn detach(at: &Path, lazy: bool) -> io::Result<()> {
    let flags = if lazy { MntFlags::MNT_DETACH } else { MntFlags::empty() };
    match umount2(at, flags | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(nix::errno::Errno::EPERM) => fusermount::detach(at, lazy),
        Err(e) => Err(e.into()),
    }
}

/// Raises the kernel's read-ahead. Needs privilege; without it reads are only slower.
pub(in crate::mount) fn raise_read_ahead(device: &str) {
    let setting = format!("/sys/class/bdi/{device}/read_ahead_kb");
    if let Err(error) = fs::write(&setting, READ_AHEAD_KIB.to_string()) {
        tracing::debug!(%error, setting, "read-ahead stays at the kernel's default");
    }
}

/// Aborts the FUSE connection: every waiting or new request gets an error. `false` when the system does not
/// support it.
pub(in crate::mount) fn abort(device: &str) -> bool {
    let Some((_, minor)) = device.split_once(':') else { return false };
    fs::write(format!("/sys/fs/fuse/connections/{minor}/abort"), "1").is_ok()
}

/// The path of a program in `PATH`.
pub(in crate::mount) fn in_path(program: &OsStr) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|p| p.is_file())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn mountinfo_lists_only_our_mounts() {
        let table = b"22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n\
            40 22 0:36 / /mnt/a\\040b rw,nosuid,nodev - fuse.millrace digits@v1 rw,user_id=0\n\
            41 22 0:37 / /mnt/c rw shared:7 master:2 - fuse.sshfs host:/ rw\n\
            garbage\n";
        let entries = parse_mountinfo(table);
        assert_eq!(entries, [Entry { at: "/mnt/a b".into(), device: "0:36".into() }]);
        let all: Vec<_> = parse_lines(table).map(|(number, on)| (number, on.device, on.is_ours)).collect();
        let of =
            |number: &'static str, device: &str, is_ours| (number.as_bytes(), device.to_owned(), is_ours);
        assert_eq!(all, [of("22", "254:0", false), of("40", "0:36", true), of("41", "0:37", false)]);
    }

    #[test]
    fn name_of_a_volume_is_answered_with_the_folders_of_its_mounts() {
        let table = b"40 22 0:36 / /mnt/a\\040b rw,nosuid,nodev - fuse.millrace digits@v1 rw,user_id=0\n\
            41 22 0:37 / /mnt/c rw shared:7 master:2 - fuse.sshfs host:/ rw\n\
            42 22 0:38 / /mnt/d rw - fuse.millrace digits rw\n\
            43 22 0:39 / /mnt/e rw - fuse.millrace other rw\n";
        let instead = |named: &str| named_instead(Path::new(named), table);
        assert_eq!(
            instead("digits"),
            ": name the folder of a mount; volume digits is mounted at /mnt/a b (digits@v1), /mnt/d (digits)"
        );
        assert!(instead("digits@v1").ends_with("is mounted at /mnt/a b (digits@v1)"));
        assert!(
            instead("/mnt/x").ends_with("mounted are /mnt/a b (digits@v1), /mnt/d (digits), /mnt/e (other)")
        );
        assert_eq!(named_instead(Path::new("digits"), b""), ": no volume is mounted here");
    }

    #[test]
    fn the_mount_of_an_open_file_is_found() {
        let proc = File::open("/proc/self/status").unwrap();
        let on = mount_of(std::os::fd::AsFd::as_fd(&proc)).unwrap().unwrap();
        assert!(on.at == Path::new("/proc") && !on.is_ours, "{on:?}");
    }

    #[test]
    fn escapes_are_undone() {
        assert_eq!(unescape(b"a\\134b\\011c\\"), OsStr::from_bytes(b"a\\b\tc\\"));
        assert_eq!(unescape(b"\\999"), OsStr::from_bytes(b"\\999"));
    }

    #[test]
    fn privilege_is_read_from_the_capability_mask() {
        assert!(has_mount_privilege("Name:\tx\nCapEff:\t000001ffffffffff\n"));
        assert!(!has_mount_privilege("CapEff:\t00000000a80425fb\n"));
        assert!(!has_mount_privilege(""));
    }

    #[test]
    fn a_full_directory_and_a_file_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), b"x").unwrap();
        assert!(matches!(prepare(dir.path()), Err(Error::NotEmpty { .. })));
        assert!(matches!(prepare(&dir.path().join("file")), Err(Error::NotADirectory { .. })));
        let made = prepare(&dir.path().join("new/deep")).unwrap();
        assert!(made.is_dir());
    }
}
