//! Journeys that compare a mount with the local file system: the same program runs on both and must see the
//! same.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::ffi::{CStr, CString};
use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use millrace_datafs::mount::Mount;

use super::{Home, errno};

/// A user and two groups without privileges.
const USER: u32 = 65_534;
const GROUP: u32 = 4_321;
const OTHER_GROUP: u32 = 4_322;
/// CAP_NET_BIND_SERVICE, permitted and effective, as `setcap` writes it.
const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const CAPABILITY_NAME: &CStr = c"security.capability";
const ACL_NAME: &CStr = c"system.posix_acl_access";

/// A folder of the local file system, and a mount.
struct Both {
    local: PathBuf,
    mount: Mount,
    home: Home,
}

impl Both {
    /// `None`, and the reason on standard error, where mounting or changing the user is not permitted.
    fn new() -> Option<Both> {
        let home = Home::new()?;
        if !nix::unistd::geteuid().is_root() {
            millrace_testing::skip(millrace_testing::Need::Root, "only root can become another user");
            return None;
        }
        open_up(home.dir.path(), 0o755);
        let local = home.dir.path().join("local");
        fs::create_dir(&local).unwrap();
        let mount = home.mount("data");
        open_up(&local, 0o777);
        open_up(mount.path(), 0o777);
        Some(Both { local, mount, home })
    }

    /// Runs a program in both folders, and compares the results. Returns the result.
    fn same<T: Debug + PartialEq>(&self, program: impl Fn(&Path) -> T) -> T {
        let expected = program(&self.local);
        assert_eq!(program(self.mount.path()), expected);
        expected
    }
}

fn open_up(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Runs `work` on a thread that has the file-system identity of a user.
fn by_user<T: Send>(groups: &[u32], work: impl FnOnce() -> T + Send) -> T {
    let become_user = || {
        // SAFETY: system calls that change this thread alone; the list of groups lives during the call.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()), 0);
            libc::syscall(libc::SYS_setfsgid, USER);
            libc::syscall(libc::SYS_setfsuid, USER);
        }
    };
    let on_thread = || {
        become_user();
        work()
    };
    std::thread::scope(|scope| scope.spawn(on_thread).join().unwrap())
}

fn c(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn done(returned: i64) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::last_os_error())
}

fn set(path: &Path, name: &CStr, value: &[u8], flags: i32) -> io::Result<usize> {
    let path = c(path);
    // SAFETY: the strings are terminated and the value has the stated length.
    done(i64::from(unsafe {
        libc::lsetxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), flags)
    }))
}

/// Length of an attribute, or the error.
fn length(path: &Path, name: &CStr) -> Result<usize, i32> {
    let path = c(path);
    let mut value = [0u8; 256];
    // SAFETY: the strings are terminated and the buffer has the stated length.
    let len =
        unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    done(len as i64).map_err(|error| error.raw_os_error().unwrap())
}

/// Whether a file has capabilities, by its list of attributes and by the attribute itself.
fn is_capable(path: &Path) -> (bool, Result<usize, i32>) {
    let terminated = c(path);
    let mut names = [0u8; 256];
    // SAFETY: the path is terminated and the buffer has the stated length.
    let len = unsafe { libc::llistxattr(terminated.as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    let listed = names[..done(len as i64).unwrap()].split(|byte| *byte == 0);
    (listed.into_iter().any(|name| name == CAPABILITY_NAME.to_bytes()), length(path, CAPABILITY_NAME))
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

fn chmod(file: &File, mode: u32) {
    file.set_permissions(fs::Permissions::from_mode(mode)).unwrap();
}

/// An access control list with the permissions of the owner, the group and the mask; another group and all
/// others may read.
fn acl(owner: u16, group: u16, mask: u16) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    let none = u32::MAX;
    for (tag, perm, id) in
        [(1, owner, none), (4, group, none), (8, 4, OTHER_GROUP), (16, mask, none), (32, 4, none)]
    {
        value.extend_from_slice(&u16::to_le_bytes(tag));
        value.extend_from_slice(&u16::to_le_bytes(perm));
        value.extend_from_slice(&u32::to_le_bytes(id));
    }
    value
}

fn append(path: &Path) -> File {
    OpenOptions::new().append(true).create(true).open(path).unwrap()
}

#[test]
fn capabilities_that_are_set_after_a_write_stay() {
    let Some(both) = Both::new() else { return };
    let seen = both.same(|dir| {
        let path = dir.join("program");
        let mut seen = Vec::new();
        let mut file = File::create(&path).unwrap();
        file.write_all(b"new").unwrap();
        set(&path, CAPABILITY_NAME, &CAPABILITY, 0).unwrap();
        seen.push(is_capable(&path));
        drop(file);
        seen.push(is_capable(&path));
        let mut file = append(&path);
        file.write_all(b"changed").unwrap();
        seen.push(is_capable(&path));
        set(&path, CAPABILITY_NAME, &CAPABILITY, libc::XATTR_CREATE).unwrap();
        file.set_times(fs::FileTimes::new().set_modified(std::time::UNIX_EPOCH)).unwrap();
        drop(file);
        seen.push(is_capable(&path));
        let mut file = append(&path);
        set(&path, CAPABILITY_NAME, &CAPABILITY, 0).unwrap();
        file.write_all(b"changed").unwrap();
        set(&path, c"user.other", b"x", 0).unwrap();
        seen.push(is_capable(&path));
        drop(file);
        seen.push(is_capable(&path));
        set(&path, CAPABILITY_NAME, &CAPABILITY, 0).unwrap();
        // SAFETY: the descriptor is open.
        let allocated = unsafe { libc::fallocate(append(&path).as_raw_fd(), 0, 0, 100_000) };
        assert_eq!(allocated, 0);
        seen.push(is_capable(&path));
        seen
    });
    let (none, some) = ((false, Err(libc::ENODATA)), (true, Ok(20)));
    assert_eq!(seen, [some, some, none, some, none, none, none]);
}

#[test]
fn copies_and_archives_keep_capabilities() {
    let Some(both) = Both::new() else { return };
    let seen = both.same(|dir| {
        let (from, to) = (dir.join("from"), dir.join("to"));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&to).unwrap();
        for (name, len) in [("small", 10), ("large", 3_000_000)] {
            fs::write(from.join(name), super::pattern(len, 1)).unwrap();
            open_up(&from.join(name), 0o6755);
            set(&from.join(name), CAPABILITY_NAME, &CAPABILITY, 0).unwrap();
        }
        let script = "set -e; cp --preserve=all from/small from/large to/
            cp --preserve=all --reflink=never --sparse=always from/large to/sparse
            tar --xattrs --xattrs-include='*' -C from -cf archive .
            mkdir out; tar --xattrs --xattrs-include='*' -C out -xpf archive";
        assert!(Command::new("sh").args(["-c", script]).current_dir(dir).status().unwrap().success());
        ["to/small", "to/large", "to/sparse", "out/small", "out/large"].map(|name| {
            let path = dir.join(name);
            (mode(&path), is_capable(&path))
        })
    });
    assert!(seen.iter().all(|seen| *seen == (0o6755, (true, Ok(20)))), "{seen:?}");
}

#[test]
fn modes_that_are_set_after_a_write_stay() {
    let Some(both) = Both::new() else { return };
    let seen = both.same(|dir| {
        let path = dir.join("program");
        let mut seen = by_user(&[], || {
            let mut seen = Vec::new();
            let mut file = append(&path);
            file.write_all(b"new").unwrap();
            chmod(&file, 0o4755);
            drop(file);
            seen.push(mode(&path));
            let mut file = append(&path);
            file.write_all(b"changed").unwrap();
            seen.push(mode(&path));
            chmod(&file, 0o6755);
            file.write_all(b"changed").unwrap();
            seen.push(mode(&path));
            drop(file);
            seen.push(mode(&path));
            // If the group may not execute the file, the set-group-ID bit is no privilege.
            let mut file = append(&path);
            chmod(&file, 0o6745);
            file.write_all(b"changed").unwrap();
            chmod(&file, mode(&path) | 0o010);
            drop(file);
            seen.push(mode(&path));
            seen
        });
        // The write clears the bit, whatever the list allows afterwards.
        let mut file = append(&path);
        chmod(&file, 0o2775);
        by_user(&[], || append(&path).write_all(b"changed").unwrap());
        seen.push(mode(&path));
        chmod(&file, 0o2775);
        let other = append(&path);
        by_user(&[], || (&other).write_all(b"changed").unwrap());
        set(&path, ACL_NAME, &acl(7, 4, 4), 0).unwrap();
        seen.push(mode(&path));
        drop(other);
        seen.push(mode(&path));
        // After a user's write, truncation by root does not restore the bit.
        chmod(&file, 0o4755);
        by_user(&[], || File::options().write(true).open(&path).unwrap().write_all(b"x").unwrap());
        file.set_len(0).unwrap();
        file.write_all(b"x").unwrap();
        drop(file);
        seen.push(mode(&path));
        seen
    });
    assert_eq!(seen[..4], [0o4755, 0o755, 0o755, 0o755]);
}

#[test]
fn a_list_keeps_set_group_id_for_members_of_the_group() {
    let Some(both) = Both::new() else { return };
    let seen = both.same(|dir| {
        let path = dir.join("file");
        let folder = dir.join("folder");
        File::create(&path).unwrap();
        fs::create_dir(&folder).unwrap();
        [&[][..], &[7, GROUP], &[GROUP]].map(|groups| {
            [&path, &folder].map(|path| {
                std::os::unix::fs::chown(path, Some(USER), Some(GROUP)).unwrap();
                open_up(path, 0o2755);
                by_user(groups, || set(path, ACL_NAME, &acl(7, 5, 5), 0).unwrap());
                mode(path)
            })
        })
    });
    assert_eq!(seen[1], [0o2754; 2]);
}

fn open_path(path: &Path) -> File {
    let path = c(path);
    // SAFETY: the path is terminated, and nothing else owns the new descriptor.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_PATH | libc::O_NOFOLLOW | libc::O_CLOEXEC);
        assert!(fd >= 0, "{}", io::Error::last_os_error());
        File::from_raw_fd(fd)
    }
}

fn target(link: &File) -> Result<Vec<u8>, i32> {
    let mut buffer = [0u8; 64];
    // SAFETY: the descriptor is open, the empty path is terminated, the buffer has the stated length.
    let len =
        unsafe { libc::readlinkat(link.as_raw_fd(), c"".as_ptr(), buffer.as_mut_ptr().cast(), buffer.len()) };
    let len = done(len as i64).map_err(|error| error.raw_os_error().unwrap())?;
    Ok(buffer[..len].to_vec())
}

#[test]
fn what_was_removed_tells_what_it_was_while_it_is_held() {
    let Some(both) = Both::new() else { return };
    let _ = both.same(|dir| {
        let make = |path: &Path, kind: u32, number: u64| {
            // SAFETY: the path is terminated.
            assert_eq!(unsafe { libc::mknod(c(path).as_ptr(), kind | 0o640, number) }, 0);
        };
        let paths = ["pipe", "device", "link", "file", "socket", "over", "folder"].map(|name| dir.join(name));
        let [pipe, device, link, file, socket, over, folder] = &paths;
        make(pipe, libc::S_IFIFO, 0);
        make(over, libc::S_IFIFO, 0);
        make(device, libc::S_IFCHR, libc::makedev(1, 3));
        symlink("leads nowhere", link).unwrap();
        fs::write(file, b"x").unwrap();
        drop(UnixListener::bind(socket).unwrap());
        fs::create_dir(folder).unwrap();
        let held = paths.each_ref().map(|path| open_path(path));
        for path in [pipe, device, link, socket] {
            fs::remove_file(path).unwrap();
        }
        fs::rename(file, over).unwrap();
        fs::remove_file(over).unwrap();
        fs::remove_dir(folder).unwrap();
        let seen: Vec<_> = (held.iter())
            .map(|held| {
                let told = held.metadata().map_err(|error| error.raw_os_error());
                // The sizes of folders differ between file systems.
                told.map(|told| {
                    (told.mode(), told.nlink(), told.uid(), told.rdev(), told.is_dir() || told.len() < 20)
                })
            })
            .collect();
        (seen, target(&held[2]))
    });
}

#[test]
fn a_removed_working_directory_is_empty() {
    let Some(both) = Both::new() else { return };
    for user in [0, USER] {
        both.same(|dir| {
            let script =
                "mkdir sub && cd sub && rmdir ../sub && ls -a && ls -la . && stat -c '%F %h' . && test -d .
                echo $?; ls missing; echo $?; : > new; echo $?; mkdir new; echo $?; cd ..; echo $?";
            let mut sh = Command::new("sh");
            let output = sh.args(["-c", script]).current_dir(dir).uid(user).gid(user).output().unwrap();
            let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
            (text(output.stdout), text(output.stderr))
        });
    }
}

#[test]
fn one_tree_is_removed_twice_at_once() {
    let Some(both) = Both::new() else { return };
    let other = both.home.again();
    let second = super::mount_of(&other, "data", &both.home.at("second"));
    for (round, at) in (0..4).flat_map(|round| [(round, both.mount.path()), (round, second.path())]) {
        let tree = both.mount.path().join(format!("tree-{round}"));
        for (i, j) in (0..8).flat_map(|i| (0..8).map(move |j| (i, j))) {
            let folder = tree.join(format!("{i}/{j}"));
            fs::create_dir_all(&folder).unwrap();
            for name in 0..8 {
                fs::write(folder.join(name.to_string()), b"x").unwrap();
            }
        }
        let remove =
            |tree: PathBuf| Command::new("rm").arg("-rf").arg(tree).stderr(Stdio::piped()).spawn().unwrap();
        let removers = [remove(tree.clone()), remove(at.join(tree.file_name().unwrap()))];
        for remover in removers {
            let output = remover.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "round {round}, {}: {said}", at.display());
        }
        assert_eq!(errno(fs::metadata(&tree)), libc::ENOENT);
    }
}

#[test]
fn dates_before_1970_are_exact() {
    let Some(both) = Both::new() else { return };
    let times = [
        (-1, 500_000_000),
        (-1, 0),
        (-1, 1),
        (-2, 999_999_999),
        (-86_400, 123_456_789),
        (i64::from(i32::MIN) + 1, 250_000_000),
        (0, 0),
        (0, 1),
        (1, 999_999_999),
    ];
    let seen = both.same(|dir| {
        times.map(|(seconds, nanos)| {
            let path = dir.join(format!("{seconds}.{nanos}"));
            File::create(&path).unwrap();
            let time = libc::timespec { tv_sec: seconds, tv_nsec: nanos };
            // SAFETY: the path is terminated and there are two times.
            let set = unsafe { libc::utimensat(libc::AT_FDCWD, c(&path).as_ptr(), [time; 2].as_ptr(), 0) };
            assert_eq!(set, 0);
            let told = fs::metadata(&path).unwrap();
            assert_eq!((told.atime(), told.atime_nsec()), (told.mtime(), told.mtime_nsec()));
            (told.mtime(), told.mtime_nsec())
        })
    });
    assert_eq!(seen, times);
}

/// Waits until the clock of a file system shows a later time than the changes of a path.
fn tick(dir: &Path, path: &Path) {
    let changed = |path: &Path| fs::metadata(path).map(|of| (of.ctime(), of.ctime_nsec())).unwrap();
    let (scratch, before) = (dir.join("scratch"), changed(path));
    loop {
        fs::write(&scratch, b"x").unwrap();
        if changed(&scratch) > before {
            break;
        }
    }
}

#[test]
fn times_change_as_on_a_local_disk() {
    let Some(both) = Both::new() else { return };
    both.same(|dir| {
        let (sub, path, other) = (dir.join("sub"), dir.join("sub/file"), dir.join("sub/other"));
        fs::create_dir(&sub).unwrap();
        fs::write(&path, b"some bytes").unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let allocate = |mode: i32, len: i64| {
            // SAFETY: the descriptor is open.
            assert_eq!(unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, len) }, 0);
        };
        let keep = libc::FALLOC_FL_KEEP_SIZE;
        let steps: [(&str, &Path, &dyn Fn()); 19] = [
            ("chmod", &path, &|| chmod(&file, 0o600)),
            ("link", &path, &|| fs::hard_link(&path, &other).unwrap()),
            ("unlink", &path, &|| fs::remove_file(&other).unwrap()),
            ("truncate to the same size", &path, &|| file.set_len(10).unwrap()),
            ("truncate", &path, &|| file.set_len(20).unwrap()),
            ("open and empty", &path, &|| drop(File::create(&path).unwrap())),
            ("open and empty what is empty", &path, &|| drop(File::create(&path).unwrap())),
            ("write", &path, &|| (&file).write_all(b"bytes").unwrap()),
            ("write nothing", &path, &|| assert_eq!((&file).write(b"").unwrap(), 0)),
            ("sync", &path, &|| file.sync_all().unwrap()),
            ("set an attribute", &path, &|| assert!(set(&path, c"user.a", b"x", 0).is_ok())),
            ("allocate and keep the size", &path, &|| allocate(keep, 100_000)),
            ("allocate", &path, &|| allocate(0, 10_000)),
            ("punch", &path, &|| allocate(libc::FALLOC_FL_PUNCH_HOLE | keep, 4_096)),
            ("create", &sub, &|| drop(File::create(&other).unwrap())),
            ("write inside", &sub, &|| fs::write(&other, b"x").unwrap()),
            ("rename over", &sub, &|| fs::rename(&other, &path).unwrap()),
            ("make a folder", &sub, &|| fs::create_dir(&other).unwrap()),
            ("remove a folder", &sub, &|| fs::remove_dir(&other).unwrap()),
        ];
        steps.map(|(what, path, step)| {
            let times = || {
                let of = fs::metadata(path).unwrap();
                [(of.atime(), of.atime_nsec()), (of.mtime(), of.mtime_nsec()), (of.ctime(), of.ctime_nsec())]
            };
            let before = times();
            tick(dir, path);
            step();
            let after = times();
            (what, [0, 1, 2].map(|i| before[i] != after[i]))
        })
    });
}

/// Unmounts an overlay on drop.
struct Overlay(PathBuf);

impl Drop for Overlay {
    fn drop(&mut self) {
        nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn an_overlay_lies_above_a_mount() {
    let Some(both) = Both::new() else { return };
    let stacked = nix::sys::statfs::statfs(both.home.dir.path()).unwrap().filesystem_type();
    if stacked == nix::sys::statfs::OVERLAYFS_SUPER_MAGIC {
        return millrace_testing::skip(
            millrace_testing::Need::Filesystem,
            "the folder for temporary files is an overlay",
        );
    }
    let large = super::pattern(3_000_000, 4);
    for dir in [&both.local, both.mount.path()] {
        fs::create_dir(dir.join("folder")).unwrap();
        fs::write(dir.join("folder/small"), b"small").unwrap();
        fs::write(dir.join("large"), &large).unwrap();
    }
    both.home.snapshot("s");
    let kept = both.home.mount("data@s");
    let run = |lower: &Path, name: &str| {
        let at = |part: &str| both.home.dir.path().join(format!("{name}-{part}"));
        for part in ["upper", "work", "merged"] {
            fs::create_dir(at(part)).unwrap();
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            at("upper").display(),
            at("work").display()
        );
        let merged = at("merged");
        let flags = nix::mount::MsFlags::empty();
        nix::mount::mount(Some("overlay"), &merged, Some("overlay"), flags, Some(options.as_str())).unwrap();
        let _overlay = Overlay(merged.clone());
        assert!(fs::read(merged.join("large")).unwrap() == large);
        append(&merged.join("folder/small")).write_all(b" and changed").unwrap();
        fs::remove_file(merged.join("large")).unwrap();
        fs::write(merged.join("new"), b"new").unwrap();
        (super::names(&merged), fs::read(merged.join("folder/small")).unwrap())
    };
    let expected = run(&both.local, "local");
    assert_eq!(run(both.mount.path(), "live"), expected);
    assert_eq!(run(kept.path(), "snapshot"), expected);
    assert!(fs::read(kept.path().join("large")).unwrap() == large);
}

#[test]
fn times_at_the_ends_of_their_range_are_taken_and_leave_the_mount_alive() {
    let Some(both) = Both::new() else { return };
    let seconds = [i64::MIN, i64::MIN + 1, -1, 0, 1 << 34, i64::MAX];
    both.same(|dir| {
        by_user(&[], || {
            let path = dir.join("timed");
            File::create(&path).unwrap();
            let path = CString::new(path.as_os_str().as_bytes()).unwrap();
            seconds.map(|tv_sec| {
                [0, 5, 999_999_999].map(|tv_nsec| {
                    let times = [libc::timespec { tv_sec, tv_nsec }; 2];
                    // SAFETY: the path and both times live during the call.
                    unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), 0) }
                })
            })
        })
    });
    // More calls than the mount has serving threads.
    for round in 0..64 {
        fs::write(both.mount.path().join(format!("after-{round}")), b"alive").unwrap();
    }
}
