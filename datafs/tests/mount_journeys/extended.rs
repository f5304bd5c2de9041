//! Journeys with less common operations: attributes, holes, copies, locks, exchanged names.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::process::Command;

use super::{Home, errno, names, pattern};
use crate::child;

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn done(returned: libc::c_int) -> io::Result<()> {
    if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

pub(super) fn set(path: &Path, name: &CStr, value: &[u8], flags: i32) -> io::Result<()> {
    // SAFETY: the strings are terminated and the value has the stated length.
    done(unsafe {
        libc::setxattr(c(path).as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags)
    })
}

fn get(path: &Path, name: &CStr, room: usize) -> io::Result<Vec<u8>> {
    let mut value = vec![0; room];
    // SAFETY: the strings are terminated and the buffer has the stated length.
    let len = unsafe { libc::getxattr(c(path).as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), room) };
    value.truncate(usize::try_from(len).map_err(|_| io::Error::last_os_error())?);
    Ok(value)
}

fn list(path: &Path) -> Vec<u8> {
    let mut names = vec![0; 1_000];
    // SAFETY: the path is terminated and the buffer has the stated length.
    let len = unsafe { libc::listxattr(c(path).as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    names.truncate(usize::try_from(len).unwrap());
    names
}

pub(super) fn remove(path: &Path, name: &CStr) -> io::Result<()> {
    // SAFETY: the strings are terminated.
    done(unsafe { libc::removexattr(c(path).as_ptr(), name.as_ptr()) })
}

#[test]
fn files_carry_extended_attributes() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    fs::write(&path, b"x").unwrap();
    assert_eq!(errno(get(&path, c"user.key", 10)), libc::ENODATA);
    set(&path, c"user.key", b"value", libc::XATTR_CREATE).unwrap();
    assert_eq!(errno(set(&path, c"user.key", b"", libc::XATTR_CREATE)), libc::EEXIST);
    assert_eq!(errno(set(&path, c"user.none", b"", libc::XATTR_REPLACE)), libc::ENODATA);
    assert_eq!(get(&path, c"user.key", 10).unwrap(), b"value");
    assert_eq!(errno(get(&path, c"user.key", 4)), libc::ERANGE);
    let large = pattern(65_536, 1);
    set(&path, c"user.large", &large, 0).unwrap();
    assert_eq!(get(&path, c"user.large", 65_536).unwrap(), large);
    assert_eq!(list(&path), b"user.key\0user.large\0");
    home.snapshot("s");
    remove(&path, c"user.key").unwrap();
    assert_eq!(errno(remove(&path, c"user.key")), libc::ENODATA);
    assert_eq!(list(&path), b"user.large\0");
    let kept = mount.path().join(".snapshots/s/file");
    assert_eq!(get(&kept, c"user.key", 10).unwrap(), b"value");
    assert_eq!(errno(set(&kept, c"user.key", b"", 0)), libc::EROFS);
    // A pipe accepts no attributes of users.
    let pipe = mount.path().join("pipe");
    // SAFETY: the path is terminated.
    done(unsafe { libc::mkfifo(c(&pipe).as_ptr(), 0o644) }).unwrap();
    assert!(fs::metadata(&pipe).unwrap().file_type().is_fifo());
    assert_eq!(errno(set(&pipe, c"user.key", b"", 0)), libc::EPERM);
}

fn allocate(file: &File, mode: i32, offset: i64, len: i64) -> io::Result<()> {
    // SAFETY: the descriptor is open.
    done(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, len) })
}

fn seek(file: &File, offset: i64, whence: i32) -> io::Result<i64> {
    // SAFETY: the descriptor is open.
    let at = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    if at < 0 { Err(io::Error::last_os_error()) } else { Ok(at) }
}

#[test]
fn holes_are_punched_and_found() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    let mut expected = pattern(1_000_000, 2);
    fs::write(&path, &expected).unwrap();
    // Reads first, so that the kernel has pages to drop.
    assert_eq!(fs::read(&path).unwrap(), expected);
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let blocks = || file.metadata().unwrap().blocks();
    assert_eq!(blocks(), 1_954);
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    allocate(&file, punch, 100_000, 300_000).unwrap();
    expected[100_000..400_000].fill(0);
    assert_eq!(blocks(), 1_368);
    assert_eq!(fs::metadata(&path).unwrap().blocks(), 1_368);
    let mut read = vec![1; expected.len()];
    file.read_exact_at(&mut read, 0).unwrap();
    assert_eq!(read, expected);
    assert_eq!(seek(&file, 0, libc::SEEK_HOLE).unwrap(), 100_000);
    assert_eq!(seek(&file, 100_000, libc::SEEK_DATA).unwrap(), 400_000);
    assert_eq!(seek(&file, 400_000, libc::SEEK_HOLE).unwrap(), 1_000_000);
    assert_eq!(errno(seek(&file, 1_000_000, libc::SEEK_DATA)), libc::ENXIO);
    // SAFETY: the descriptor is open.
    assert_eq!(unsafe { libc::isatty(file.as_raw_fd()) }, 0);
    assert_eq!(io::Error::last_os_error().raw_os_error(), Some(libc::ENOTTY));
    allocate(&file, libc::FALLOC_FL_ZERO_RANGE, 999_000, 2_000).unwrap();
    expected.resize(1_001_000, 0);
    expected[999_000..].fill(0);
    allocate(&file, libc::FALLOC_FL_KEEP_SIZE, 0, 2_000_000).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1_001_000);
    allocate(&file, 0, 0, 2_000_000).unwrap();
    expected.resize(2_000_000, 0);
    for unsupported in [
        libc::FALLOC_FL_COLLAPSE_RANGE,
        libc::FALLOC_FL_INSERT_RANGE,
        libc::FALLOC_FL_UNSHARE_RANGE,
        libc::FALLOC_FL_PUNCH_HOLE,
    ] {
        assert_eq!(errno(allocate(&file, unsupported, 0, 4096)), libc::EOPNOTSUPP, "{unsupported}");
    }
    let keep = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    allocate(&file, keep, 500_000, 2_000_000).unwrap();
    expected[500_000..].fill(0);
    assert_eq!(errno(allocate(&file, 0, 0, 0)), libc::EINVAL);
    assert_eq!(errno(allocate(&file, 0, i64::MAX - 10, 100)), libc::EFBIG);
    assert_eq!(fs::read(&path).unwrap(), expected);
    assert_eq!(errno(allocate(&File::open(&path).unwrap(), 0, 0, 1)), libc::EBADF);
}

#[test]
fn large_files_are_copied_by_reference() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let bytes = pattern(3_000_000, 3);
    fs::write(mount.path().join("one"), &bytes).unwrap();
    let stored = || {
        let objects = home.dir.path().join("home/datafs/objects");
        let folders = fs::read_dir(objects).unwrap();
        let files = folders.flat_map(|folder| fs::read_dir(folder.unwrap().path()).into_iter().flatten());
        files.map(|file| file.unwrap().metadata().unwrap().len()).sum::<u64>()
    };
    let before = stored();
    let copied = fs::copy(mount.path().join("one"), mount.path().join("two")).unwrap();
    assert_eq!(copied, 3_000_000);
    assert!(stored() < before + 100_000, "shared, not copied");
    let two = OpenOptions::new().write(true).open(mount.path().join("two")).unwrap();
    two.write_all_at(b"changed", 1_000_000).unwrap();
    drop(two);
    let mut expected = bytes.clone();
    expected[1_000_000..1_000_007].copy_from_slice(b"changed");
    assert_eq!(fs::read(mount.path().join("two")).unwrap(), expected);
    assert_eq!(fs::read(mount.path().join("one")).unwrap(), bytes);
}

#[test]
fn names_are_exchanged_in_one_step() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let (one, two) = (mount.path().join("one"), mount.path().join("two"));
    fs::create_dir(&one).unwrap();
    fs::write(one.join("inside"), b"1").unwrap();
    fs::write(&two, b"2").unwrap();
    let exchange = |a: &Path, b: &Path, flags| {
        let (a, b) = (c(a), c(b));
        // SAFETY: the paths are terminated.
        done(unsafe { libc::renameat2(libc::AT_FDCWD, a.as_ptr(), libc::AT_FDCWD, b.as_ptr(), flags) })
    };
    exchange(&one, &two, libc::RENAME_EXCHANGE).unwrap();
    assert_eq!(fs::read(&one).unwrap(), b"2");
    assert_eq!(fs::read(two.join("inside")).unwrap(), b"1");
    assert_eq!(errno(exchange(&one, &mount.path().join("no"), libc::RENAME_EXCHANGE)), libc::ENOENT);
    assert_eq!(errno(exchange(&two, &two.join("inside"), libc::RENAME_EXCHANGE)), libc::EINVAL);
    assert_eq!(errno(exchange(&one, &two, libc::RENAME_NOREPLACE)), libc::EEXIST);
    assert_eq!(errno(exchange(&one, &mount.path().join("no"), libc::RENAME_WHITEOUT)), libc::EINVAL);
}

#[test]
fn a_snapshot_lists_names_with_attributes() {
    let Some(home) = Home::new() else { return };
    let live = home.mount("data");
    let expected: Vec<String> = (0..700).map(|n| format!("{n:04}")).collect();
    for name in &expected {
        fs::write(live.path().join(name), name).unwrap();
    }
    fs::create_dir(live.path().join("dir")).unwrap();
    home.snapshot("s");
    let mount = home.mount("data@s");
    for entry in fs::read_dir(mount.path()).unwrap() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        assert!(if metadata.is_dir() { entry.file_name() == "dir" } else { metadata.len() == 4 });
    }
    assert_eq!(names(mount.path()).len(), 701);
    assert_eq!(names(mount.path())[..700], expected);
    assert_eq!(fs::read(mount.path().join("0042")).unwrap(), b"0042");
}

const KINDS: [&str; 2] = ["flock", "fcntl"];

fn take(file: &File, kind: &str, wait: bool) -> io::Result<()> {
    // SAFETY: a lock record is plain numbers; the descriptor is open and the record lives.
    unsafe {
        if kind == "flock" {
            let wait = if wait { 0 } else { libc::LOCK_NB };
            return done(libc::flock(file.as_raw_fd(), libc::LOCK_EX | wait));
        }
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = libc::F_WRLCK as i16;
        lock.l_len = 10;
        done(libc::fcntl(file.as_raw_fd(), if wait { libc::F_SETLKW } else { libc::F_SETLK }, &lock))
    }
}

/// The child: takes a lock, reports it, and holds it until it is killed.
#[test]
fn lock_holder() {
    let Some((path, kind)) = child::task() else { return };
    let file = OpenOptions::new().write(true).open(path).unwrap();
    take(&file, KINDS[kind as usize], true).unwrap();
    io::stdout().write_all(b"locked 1\n").unwrap();
    loop {
        std::thread::park();
    }
}

#[test]
fn locks_exclude_wait_and_end_with_their_holder() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("file");
    fs::write(&path, b"x").unwrap();
    for (number, kind) in KINDS.into_iter().enumerate() {
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        let mut holder = child::spawn("mount_journeys::extended::lock_holder", &path, number as u64);
        assert!(child::reports(&mut holder).any(|(word, _)| word == "locked"));
        assert_eq!(errno(take(&file, kind, false)), libc::EAGAIN, "{kind}");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| take(&file, kind, true));
            assert!(!waiting.is_finished());
            // A killed process does not close the file itself.
            holder.kill().unwrap();
            holder.wait().unwrap();
            waiting.join().unwrap().unwrap();
        });
        // A close releases the lock as well.
        drop(file);
        let file = OpenOptions::new().write(true).open(&path).unwrap();
        take(&file, kind, false).unwrap();
    }
}

/// An access control list in the kernel's format: tag, permissions and ID of each entry.
pub(super) fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&perm.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

#[test]
fn access_control_lists_let_in_and_are_passed_on() {
    let Some(home) = Home::new() else { return };
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    const NOBODY: u32 = 65_534;
    const NONE: u32 = u32::MAX;
    let mount = home.mount("data");
    fs::set_permissions(home.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = mount.path().join("secret");
    fs::write(&path, b"x").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    let reads = |path: &Path| {
        use std::os::unix::process::CommandExt as _;
        let mut cat = Command::new("cat");
        cat.arg(path).stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
        cat.uid(NOBODY).gid(NOBODY).status().unwrap().success()
    };
    assert!(!reads(&path));
    let list = [(1, 6, NONE), (2, 4, NOBODY), (4, 0, NONE), (16, 4, NONE), (32, 0, NONE)];
    set(&path, c"system.posix_acl_access", &acl(&list), 0).unwrap();
    assert!(reads(&path));
    assert_eq!(get(&path, c"system.posix_acl_access", 100).unwrap(), acl(&list));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(!reads(&path), "chmod takes it from the mask");
    assert_eq!(errno(set(&path, c"system.posix_acl_access", &acl(&list[..2]), 0)), libc::EINVAL);
    assert_eq!(errno(set(&path, c"system.posix_acl_default", &acl(&list), 0)), libc::EACCES);
    // The default list of a directory, which replaces the umask of the process.
    let dir = mount.path().join("dir");
    fs::create_dir(&dir).unwrap();
    set(&dir, c"system.posix_acl_default", &acl(&list), 0).unwrap();
    let make = |name: &str| {
        let script = format!("umask 077; : > {0}/{name}; mkdir {0}/{name}.d", dir.display());
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        fs::metadata(dir.join(name)).unwrap().mode() & 0o777
    };
    assert_eq!(make("passed-on"), 0o640);
    assert_eq!(get(&dir.join("passed-on.d"), c"system.posix_acl_default", 100).unwrap(), acl(&list));
    assert!(reads(&dir.join("passed-on")));
    remove(&dir, c"system.posix_acl_default").unwrap();
    assert_eq!(make("masked"), 0o600);
}

#[test]
fn a_program_that_is_changed_loses_its_privileges() {
    let Some(home) = Home::new() else { return };
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let mount = home.mount("data");
    fs::set_permissions(home.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = mount.path().join("program");
    let mode = || fs::metadata(&path).unwrap().mode() & 0o7777;
    let by_nobody = |command: &str| {
        let script = format!("{command} {}", path.display());
        use std::os::unix::process::CommandExt as _;
        assert!(Command::new("sh").args(["-c", &script]).uid(65_534).gid(65_534).status().unwrap().success());
    };
    fs::write(&path, b"x").unwrap();
    for change in ["echo more >>", "echo new >", "truncate -s 1"] {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
        by_nobody(change);
        assert_eq!(mode(), 0o777, "{change}");
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o6777)).unwrap();
    File::options().append(true).open(&path).unwrap().write_all(b"x").unwrap();
    assert_eq!(mode(), 0o6777, "root keeps them");
    std::os::unix::fs::chown(&path, Some(7), None).unwrap();
    assert_eq!(mode(), 0o777);
}
