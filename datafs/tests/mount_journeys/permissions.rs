//! Journeys with permissions while another mount creates, replaces and removes the same names.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::unistd::{Uid, setfsuid};

use super::extended::{acl, remove, set};
use super::sharing::Stop;
use super::{Home, errno, eventually, mount_of};

const OWNER: u32 = 1_001;
const OTHER: u32 = 1_002;

/// Two mounts of one volume with a folder that every user may write. Needs root, to become other users.
fn two_mounts(mode: u32, test: impl FnOnce(&Path, &Path)) {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root can become another user");
    }
    let Some(home) = Home::new() else { return };
    let (one, two) = (home.mount("data"), mount_of(&home.again(), "data", &home.at("other")));
    for folder in [home.dir.path(), one.path(), two.path()] {
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    }
    fs::create_dir(one.path().join("shared")).unwrap();
    fs::set_permissions(one.path().join("shared"), Permissions::from_mode(mode)).unwrap();
    test(&one.path().join("shared"), &two.path().join("shared"));
}

/// Runs `body` as a user: the kernel checks the file-system user of the thread, and drops root's capabilities
/// with it.
fn by<T>(user: u32, body: impl FnOnce() -> T) -> T {
    setfsuid(Uid::from_raw(user));
    let result = body();
    setfsuid(Uid::from_raw(0));
    result
}

fn create(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).mode(mode).open(path)
}

#[test]
fn creation_opens_no_file_that_another_user_has_made_meanwhile() {
    two_mounts(0o777, |one, two| {
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for name in ["a", "b"] {
                let (path, done) = (two.join(name), &done);
                scope.spawn(move || {
                    by(OWNER, || {
                        while !done.load(Ordering::Relaxed) {
                            let mut options = OpenOptions::new();
                            drop(options.write(true).create_new(true).mode(0o600).open(&path));
                            let _ = fs::remove_file(&path);
                        }
                    })
                });
            }
            let _done = Stop(&done);
            let opened: Vec<u32> = by(OTHER, || {
                let opens = (0..6_000).filter_map(|round| {
                    let path = one.join(if round % 2 == 0 { "a" } else { "b" });
                    let opened = create(&path, 0o666);
                    let _ = fs::remove_file(&path);
                    match opened {
                        Ok(file) => Some(file.metadata().unwrap().uid()),
                        Err(error) if error.raw_os_error() == Some(libc::EACCES) => None,
                        Err(error) => panic!("round {round}: {error}"),
                    }
                });
                opens.collect()
            });
            let foreign = opened.iter().filter(|user| **user != OTHER).count();
            assert_eq!(foreign, 0, "of {} files that were opened", opened.len());
            assert!(!opened.is_empty());
        });
    });
}

/// Threads of several users on both mounts create and remove one name.
fn by_many_threads(users: [u32; 4], open: impl Fn(&Path, u32) -> io::Result<File> + Sync) {
    two_mounts(0o777, |one, two| {
        std::thread::scope(|scope| {
            for (thread, user) in users.into_iter().enumerate() {
                let path = if thread % 2 == 0 { one.join("f") } else { two.join("f") };
                let open = &open;
                scope.spawn(move || {
                    by(user, || {
                        for round in 0..1_000 {
                            open(&path, round)
                                .unwrap_or_else(|error| panic!("thread {thread}, round {round}: {error}"));
                            let _ = fs::remove_file(&path);
                        }
                    })
                });
            }
        });
    });
}

#[test]
fn creation_by_many_threads_on_two_mounts_opens_a_file_every_time() {
    by_many_threads([OTHER; 4], |path, round| {
        let truncate = round % 3 == 0;
        OpenOptions::new().read(true).write(true).create(true).truncate(truncate).open(path)
    });
}

#[test]
fn creation_by_users_who_may_read_each_others_files_opens_a_file_every_time() {
    by_many_threads([OWNER, OTHER, OTHER, OWNER], |path, _| {
        OpenOptions::new().read(true).custom_flags(libc::O_CREAT).mode(0o644).open(path)
    });
}

#[test]
fn names_of_others_in_a_sticky_folder_stay_however_lately_they_were_made() {
    two_mounts(0o1777, |one, two| {
        let (at, theirs) = (one.join("name"), one.join("theirs"));
        let (seen, mine, moved) = (two.join("name"), two.join("mine"), two.join("moved"));
        for round in 0..600 {
            by(OTHER, || create(&seen, 0o666).and(create(&mine, 0o666))).unwrap();
            by(OWNER, || create(&theirs, 0o666)).unwrap();
            fs::metadata(&at).unwrap();
            let together = Barrier::new(2);
            // The kernel of one mount may not know that the other replaces the name.
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    by(OTHER, || {
                        together.wait();
                        // The change succeeds before the replacement, and fails after it.
                        let _ = match round % 3 {
                            0 => fs::remove_file(&seen),
                            1 => fs::rename(&seen, &moved),
                            _ => fs::rename(&mine, &seen),
                        };
                    })
                });
                together.wait();
                fs::rename(&theirs, &at).unwrap();
            });
            let left = fs::metadata(&at).map(|attr| attr.uid());
            assert!(left.as_ref().is_ok_and(|user| *user == OWNER), "round {round}: {left:?}");
            for name in ["name", "mine", "moved"] {
                let _ = fs::remove_file(one.join(name));
            }
        }
    });
}

#[test]
fn permissions_taken_away_through_one_mount_hold_at_the_next_open_through_the_other() {
    two_mounts(0o777, |one, two| {
        fs::write(one.join("f"), b"x").unwrap();
        for round in 0..40 {
            let owner = [0, OWNER][round % 2];
            std::os::unix::fs::chown(one.join("f"), Some(owner), Some(0)).unwrap();
            fs::set_permissions(one.join("f"), Permissions::from_mode(0o644)).unwrap();
            let open = || by(OTHER, || File::open(two.join("f")));
            eventually("what was given", || open().is_ok());
            fs::set_permissions(one.join("f"), Permissions::from_mode(0o600)).unwrap();
            assert_eq!(errno(open()), libc::EACCES, "round {round}");
        }
    });
}

#[test]
fn an_access_control_list_changed_through_one_mount_holds_at_the_next_open_through_the_other() {
    const LIST: &CStr = c"system.posix_acl_access";
    const NONE: u32 = u32::MAX;
    // A group that no user of the test is in.
    const GROUP: u32 = 1_003;
    two_mounts(0o777, |one, two| {
        // The mode stays the same whatever a user is allowed: its group bits are those of the mask.
        let allow = |name: &str, (user, perm): (u32, u16), others: u16| {
            let list = [(1, 6, NONE), (2, perm, user), (4, others, NONE), (16, 4, NONE), (32, others, NONE)];
            set(&one.join(name), LIST, &acl(&list), 0).unwrap();
        };
        let open = |name: &str| by(OTHER, || File::open(two.join(name)));
        for (name, mode) in [("granted", 0o640), ("refused", 0o644)] {
            fs::write(one.join(name), b"x").unwrap();
            std::os::unix::fs::chown(one.join(name), Some(0), Some(GROUP)).unwrap();
            fs::set_permissions(one.join(name), Permissions::from_mode(mode)).unwrap();
        }
        for round in 0..42 {
            allow("granted", (OTHER, 4), 0);
            eventually("what was given", || open("granted").is_ok());
            match round % 3 {
                0 => allow("granted", (OWNER, 4), 0),
                1 => allow("granted", (OTHER, 0), 0),
                _ => remove(&one.join("granted"), LIST).unwrap(),
            }
            assert_eq!(errno(open("granted")), libc::EACCES, "granted, round {round}");

            eventually("what all have", || open("refused").is_ok());
            allow("refused", (OTHER, 0), 4);
            assert_eq!(errno(open("refused")), libc::EACCES, "refused, round {round}");
            remove(&one.join("refused"), LIST).unwrap();
            for name in ["granted", "refused"] {
                let mode = fs::metadata(one.join(name)).unwrap().mode() & 0o777;
                assert_eq!(mode, if name == "granted" { 0o640 } else { 0o644 }, "the mode tells nothing");
            }
        }
    });
}
