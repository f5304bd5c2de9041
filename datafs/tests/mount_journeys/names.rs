//! Journeys with names that another mount has just given to other nodes, and changes through a mount that does
//! not know it yet.
#![allow(unsafe_code)]
#![allow(clippy::unwrap_used)]

use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown, fchown, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::coherence::two_mounts;
use super::extended::{remove, set};
use super::{Home, eventually};

const ROUNDS: usize = 40;
/// Number of replacements of a file while others change it.
const REPLACED: u32 = 5_000;
const ATTRIBUTE: &CStr = c"user.mark";
/// A user that is not the one of the tests.
const USER: u32 = 1_001;

fn exchange(one: &Path, other: &Path) {
    let [one, other] = [one, other].map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
    let here = libc::AT_FDCWD;
    // SAFETY: the paths are terminated.
    let returned =
        unsafe { libc::renameat2(here, one.as_ptr(), here, other.as_ptr(), libc::RENAME_EXCHANGE) };
    assert_eq!(returned, 0, "{}", io::Error::last_os_error());
}

/// Creates a folder with a file of this content.
fn make_folder(at: &Path, content: &str) {
    fs::create_dir(at).unwrap();
    fs::write(at.join("file"), content).unwrap();
}

fn content(folder: &Path) -> String {
    fs::read_to_string(folder.join("file")).unwrap()
}

#[test]
fn a_rename_or_removal_never_concerns_what_another_mount_has_moved_away() {
    two_mounts(|one, two| {
        for round in 0..ROUNDS {
            let [one, two] = [one, two].map(|mount| mount.join(round.to_string()));
            fs::create_dir(&one).unwrap();
            // Moves the folder away through the first mount, and gives the name to a new folder.
            let replace = |name: &str, to: &str| {
                fs::rename(one.join(name), one.join(to)).unwrap();
                make_folder(&one.join(name), "new");
            };
            // The first mount notifies its kernel of a removal soon.
            let gone = |name: &str| eventually(name, || !one.join(name).exists());

            make_folder(&one.join("moved"), "kept");
            assert_eq!(content(&two.join("moved")), "kept");
            replace("moved", "moved.kept");
            fs::rename(two.join("moved"), two.join("to")).unwrap();
            fs::remove_dir_all(two.join("to")).unwrap();
            assert_eq!(content(&one.join("moved.kept")), "kept", "renamed, round {round}");
            gone("moved");

            for name in ["exchanged", "other"] {
                make_folder(&one.join(name), name);
                assert_eq!(content(&two.join(name)), name);
            }
            replace("exchanged", "exchanged.kept");
            exchange(&two.join("exchanged"), &two.join("other"));
            fs::remove_dir_all(two.join("other")).unwrap();
            assert_eq!(content(&one.join("exchanged.kept")), "exchanged", "exchanged, round {round}");
            assert_eq!(content(&two.join("exchanged")), "other", "exchanged, round {round}");

            symlink("kept", one.join("link")).unwrap();
            assert_eq!(fs::read_link(two.join("link")).unwrap(), Path::new("kept"));
            fs::rename(one.join("link"), one.join("link.kept")).unwrap();
            symlink("new", one.join("link")).unwrap();
            fs::rename(two.join("link"), two.join("link.to")).unwrap();
            assert_eq!(fs::read_link(two.join("link.to")).unwrap(), Path::new("new"), "round {round}");
            assert_eq!(fs::read_link(two.join("link.kept")).unwrap(), Path::new("kept"), "round {round}");

            fs::create_dir(one.join("empty")).unwrap();
            let held = File::open(two.join("empty")).unwrap();
            fs::rename(one.join("empty"), one.join("empty.kept")).unwrap();
            fs::create_dir(one.join("empty")).unwrap();
            fs::remove_dir(two.join("empty")).unwrap();
            // A kernel that has removed the wrong folder would create nothing in it any more.
            fs::write(two.join("empty.kept/file"), b"x").unwrap();
            gone("empty");
            drop(held);

            fs::write(one.join("file"), b"kept").unwrap();
            let held = File::open(two.join("file")).unwrap();
            fs::rename(one.join("file"), one.join("file.kept")).unwrap();
            fs::write(one.join("file"), b"new").unwrap();
            fs::remove_file(two.join("file")).unwrap();
            gone("file");
            assert_eq!(fs::read(two.join("file.kept")).unwrap(), b"kept", "round {round}");
            assert_eq!(held.metadata().unwrap().nlink(), 1, "round {round}");

            // The removed file has one more name, which the kernel knows.
            fs::write(one.join("old"), b"old").unwrap();
            fs::write(one.join("new"), b"new").unwrap();
            fs::hard_link(one.join("new"), one.join("linked")).unwrap();
            let links = || fs::metadata(two.join("linked")).unwrap().nlink();
            assert!(two.join("old").exists() && links() == 2);
            fs::rename(one.join("new"), one.join("old")).unwrap();
            fs::remove_file(two.join("old")).unwrap();
            assert_eq!(links(), 1, "round {round}");
        }
    });
}

#[test]
fn own_renames_are_not_repeated() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let at = |name: &str, number: usize| mount.path().join(format!("{name}-{number}"));
    fs::write(at("file", 0), b"x").unwrap();
    for name in ["folder", "other"] {
        fs::create_dir(at(name, 0)).unwrap();
    }
    let requests = || {
        let operations = mount.stats().operations;
        ["rename", "open", "setattr", "unlink", "rmdir"]
            .map(|op| operations.iter().filter(|of| of.op == op).map(|of| of.latency.count()).sum::<u64>())
    };
    let before = requests();
    for round in 0..ROUNDS {
        for name in ["file", "folder", "other"] {
            fs::rename(at(name, round), at(name, round + 1)).unwrap();
        }
        exchange(&at("folder", round + 1), &at("other", round + 1));
        drop(File::open(at("file", round + 1)).unwrap());
        fs::set_permissions(at("file", round + 1), Permissions::from_mode(0o600 + round as u32 % 8)).unwrap();
    }
    fs::remove_file(at("file", ROUNDS)).unwrap();
    for name in ["folder", "other"] {
        fs::remove_dir(at(name, ROUNDS)).unwrap();
    }
    let rounds = ROUNDS as u64;
    let expected = [4 * rounds, rounds, rounds, 1, 2];
    let made = || {
        let now = requests();
        std::array::from_fn::<u64, 5, _>(|of| now[of] - before[of])
    };
    // The mount counts a request just after its reply.
    eventually("all are counted", || made().iter().zip(expected).all(|(made, expected)| *made >= expected));
    assert_eq!(made(), expected);
}

/// The state of a file that the changes below modify.
#[derive(Debug, PartialEq)]
struct State {
    len: u64,
    mode: u32,
    user: u32,
    modified: SystemTime,
    mark: Option<Vec<u8>>,
}

fn state(file: &File) -> State {
    let attr = file.metadata().unwrap();
    let mut mark = vec![0; 100];
    // SAFETY: the name is terminated and the buffer has the stated length.
    let len = unsafe {
        libc::fgetxattr(file.as_raw_fd(), ATTRIBUTE.as_ptr(), mark.as_mut_ptr().cast(), mark.len())
    };
    let mark = usize::try_from(len).ok().map(|len| mark[..len].to_vec());
    State { len: attr.len(), mode: attr.mode(), user: attr.uid(), modified: attr.modified().unwrap(), mark }
}

fn done(returned: libc::c_int) {
    assert_eq!(returned, 0, "{}", io::Error::last_os_error());
}

/// The same change by path and by descriptor.
type Change<'a> = (&'a str, &'a dyn Fn(&Path), &'a dyn Fn(&File));

#[test]
fn a_change_by_path_never_concerns_a_replaced_file_that_is_open() {
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000);
    let changes: [Change<'_>; 6] = [
        ("truncate", &|path| nix::unistd::truncate(path, 1).unwrap(), &|file| file.set_len(1).unwrap()),
        ("chmod", &|path| fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap(), &|file| {
            file.set_permissions(Permissions::from_mode(0o600)).unwrap()
        }),
        (
            "utimensat",
            &|path| {
                let path = CString::new(path.as_os_str().as_bytes()).unwrap();
                let times = [libc::timespec { tv_sec: 1_000, tv_nsec: 0 }; 2];
                // SAFETY: the path is terminated, and there are two times.
                done(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), times.as_ptr(), 0) });
            },
            &|file| file.set_modified(long_ago).unwrap(),
        ),
        ("setxattr", &|path| set(path, ATTRIBUTE, b"changed", 0).unwrap(), &|file| {
            let value = b"changed";
            // SAFETY: the name is terminated and the value has the stated length.
            done(unsafe {
                let value = (value.as_ptr().cast(), value.len());
                libc::fsetxattr(file.as_raw_fd(), ATTRIBUTE.as_ptr(), value.0, value.1, 0)
            });
        }),
        (
            "removexattr",
            &|path| remove(path, ATTRIBUTE).unwrap(),
            // SAFETY: the name is terminated.
            &|file| done(unsafe { libc::fremovexattr(file.as_raw_fd(), ATTRIBUTE.as_ptr()) }),
        ),
        ("chown", &|path| chown(path, Some(USER), None).unwrap(), &|file| {
            fchown(file, Some(USER), None).unwrap()
        }),
    ];
    // Only root may give files away.
    let permitted = if nix::unistd::geteuid().is_root() { 6 } else { 5 };
    two_mounts(|one, two| {
        for (what, by_path, by_descriptor) in &changes[..permitted] {
            for round in 0..ROUNDS {
                let name = format!("{what}-{round}");
                for (name, len) in [(name.as_str(), 1_000), ("new", 2_000)] {
                    fs::write(one.join(name), vec![7; len]).unwrap();
                    fs::set_permissions(one.join(name), Permissions::from_mode(0o644)).unwrap();
                    set(&one.join(name), ATTRIBUTE, b"as it was", 0).unwrap();
                }
                let old = OpenOptions::new().read(true).write(true).open(two.join(&name)).unwrap();
                let before = state(&old);
                let new_before = state(&File::open(one.join("new")).unwrap());
                fs::rename(one.join("new"), one.join(&name)).unwrap();

                by_path(&two.join(&name));
                assert_eq!(state(&old), before, "{what} by path, round {round}");
                let new = File::open(two.join(&name)).unwrap();
                let changed = state(&new);
                assert_ne!(changed, new_before, "{what} by path, round {round}");

                by_descriptor(&old);
                assert_ne!(state(&old), before, "{what} by descriptor, round {round}");
                assert_eq!(state(&new), changed, "{what} by descriptor, round {round}");
            }
        }
    });
}

#[test]
fn a_descriptor_of_a_replaced_file_changes_that_file_at_once() {
    two_mounts(|one, two| {
        for round in 0..ROUNDS {
            let name = round.to_string();
            fs::write(one.join(&name), b"old").unwrap();
            let old = OpenOptions::new().read(true).write(true).open(two.join(&name)).unwrap();
            fs::write(one.join("new"), b"new").unwrap();
            fs::rename(one.join("new"), one.join(&name)).unwrap();
            old.set_permissions(Permissions::from_mode(0o604)).unwrap();
            old.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(round as u64)).unwrap();
            assert_eq!(old.metadata().unwrap().mode() & 0o777, 0o604, "round {round}");
            let new = fs::metadata(one.join(&name)).unwrap();
            assert_ne!(new.mode() & 0o777, 0o604, "round {round}");
        }
    });
}

#[test]
fn an_old_name_never_leads_to_a_file_that_was_looked_up_under_its_new_name() {
    two_mounts(|one, two| {
        for round in 0..5 * ROUNDS {
            // The first mount renames a file, and the second one then looks it up by the new name.
            let rotate = |what: &str| {
                let name = format!("{what}-{round}");
                let kept = format!("{name}.1");
                fs::write(one.join(&name), b"old").unwrap();
                assert_eq!(fs::read(two.join(&name)).unwrap(), b"old");
                fs::rename(one.join(&name), one.join(&kept)).unwrap();
                fs::write(one.join(&name), b"new one").unwrap();
                assert_eq!(fs::read(two.join(&kept)).unwrap(), b"old");
                [two.join(name), one.join(kept)]
            };
            let [log, kept] = rotate("read");
            assert_eq!(fs::read(log).unwrap(), b"new one", "round {round}");
            assert_eq!(fs::read(kept).unwrap(), b"old", "round {round}");
            let [log, kept] = rotate("truncated");
            nix::unistd::truncate(&log, 0).unwrap();
            assert_eq!(fs::read(kept).unwrap(), b"old", "truncated, round {round}");
            assert_eq!(fs::read(log).unwrap(), b"", "truncated, round {round}");
            let [log, kept] = rotate("written");
            fs::write(&log, b"written").unwrap();
            assert_eq!(fs::read(kept).unwrap(), b"old", "written, round {round}");
            assert_eq!(fs::read(log).unwrap(), b"written", "written, round {round}");
        }
    });
}

#[test]
fn a_change_by_path_never_fails_while_the_file_is_replaced() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let [path, new] = ["file", "new"].map(|name| mount.path().join(name));
    fs::write(&path, b"first").unwrap();
    std::thread::scope(|scope| {
        let replacing = scope.spawn(|| {
            for round in 0..REPLACED {
                fs::write(&new, round.to_string()).unwrap();
                fs::rename(&new, &path).unwrap();
            }
        });
        while !replacing.is_finished() {
            set(&path, ATTRIBUTE, b"mark", 0).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            nix::unistd::truncate(&path, 0).unwrap();
        }
    });
}

#[test]
fn a_change_by_path_never_concerns_a_replaced_folder() {
    two_mounts(|one, two| {
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        for round in 0..ROUNDS {
            let [one, two] = [one, two].map(|mount| mount.join(round.to_string()));
            fs::create_dir(&one).unwrap();
            fs::create_dir(one.join("folder")).unwrap();
            fs::set_permissions(one.join("folder"), Permissions::from_mode(0o755)).unwrap();
            let held = File::open(two.join("folder")).unwrap();
            fs::rename(one.join("folder"), one.join("kept")).unwrap();
            fs::create_dir(one.join("folder")).unwrap();
            fs::set_permissions(two.join("folder"), Permissions::from_mode(0o700)).unwrap();
            assert_eq!([mode(&two.join("folder")), mode(&two.join("kept"))], [0o700, 0o755], "round {round}");
            held.set_permissions(Permissions::from_mode(0o711)).unwrap();
            assert_eq!([mode(&two.join("folder")), mode(&two.join("kept"))], [0o700, 0o711], "round {round}");
        }
    });
}
