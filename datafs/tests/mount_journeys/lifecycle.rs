//! Journeys with the start and the end of mounts: refused, replaced, unmounted while in use, and on full disks.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use millrace_datafs::mount::{self, MountOptions};
use millrace_datafs::{Config, Datafs, Error};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::{Home, errno, eventually, mount_of, names, pattern};
use crate::child;
use crate::small_disk::SmallDisk;

#[test]
fn a_full_disk_is_said_so_and_loses_nothing_old() {
    let Some(home) = Home::new() else { return };
    let Some(disk) = SmallDisk::new(12) else { return };
    let datafs = Datafs::open(&disk.path().join("home"), &Config::default()).unwrap();
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    let mount = mount_of(&datafs, "data", &home.at("full"));
    let old = pattern(2_000_000, 1);
    fs::write(mount.path().join("old"), &old).unwrap();
    let mut file = File::create(mount.path().join("new")).unwrap();
    let full = file.write_all(&pattern(20_000_000, 2)).and_then(|()| file.sync_all());
    assert_eq!(errno(full), libc::ENOSPC);
    assert!(fs::read(mount.path().join("old")).unwrap() == old);
    drop(file);
    // The kernel reports the close later. The mount then tries once more to save the file, which takes the free
    // space for a moment.
    eventually("the file goes", || fs::remove_file(mount.path().join("new")).is_ok());
    eventually("there is room again", || {
        File::create(mount.path().join("small"))
            .and_then(|mut file| file.write_all(&pattern(100_000, 3)).and_then(|()| file.sync_all()))
            .is_ok()
    });
    assert!(fs::read(mount.path().join("small")).unwrap() == pattern(100_000, 3));
    mount.unmount().unwrap();
}

#[test]
fn an_unmounted_volume_is_closed() {
    let Some(home) = Home::new() else { return };
    let datafs = home.again();
    let mount = mount_of(&datafs, "data", &home.at("closed"));
    fs::write(mount.path().join("file"), "text").unwrap();
    mount.unmount().unwrap();
    drop(datafs);
    let sessions = home.dir.path().join("home/datafs/meta.sqlite-sessions");
    // On PostgreSQL sessions have no files. The collector may hold the volumes for a moment longer.
    eventually("the session of the mount has ended", || {
        fs::read_dir(&sessions).is_ok_and(|files| files.count() <= 1)
    });
}

#[test]
fn an_unmount_with_open_files_keeps_what_was_written() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let at = mount.path().to_owned();
    let mut file = File::create(at.join("open")).unwrap();
    file.write_all(b"written, not closed").unwrap();
    let unmounting = std::thread::spawn(move || mount.unmount());
    eventually("the path is free although a file is open", || names(&at).is_empty());
    drop(file);
    unmounting.join().unwrap().unwrap();
    let stored = home.datafs.view(&"data".parse().unwrap()).unwrap().read_file("open").unwrap();
    assert_eq!(stored, b"written, not closed".as_slice());
    let again = mount_of(&home.datafs, "data", &at);
    assert_eq!(names(again.path()), ["open"]);
}

#[test]
fn dropping_a_mount_and_unmounting_its_path_end_it() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let at = mount.path().to_owned();
    fs::write(at.join("file"), b"x").unwrap();
    drop(mount);
    assert_eq!(names(&at), Vec::<String>::new());

    let mount = home.mount("data");
    assert!(mount.is_serving());
    mount::umount(&at).unwrap();
    mount.join().unwrap();
    assert_eq!(names(&at), Vec::<String>::new());
    assert!(matches!(mount::umount(&at), Err(Error::NotFound { .. })));
}

#[test]
fn a_place_that_cannot_be_mounted_on_is_refused() {
    let Some(home) = Home::new() else { return };
    let view = || home.datafs.view(&"data".parse().unwrap()).unwrap();
    let mount = home.mount("data");
    let again = mount::mount(view(), mount.path(), MountOptions::default());
    assert!(matches!(again, Err(Error::Exists { .. })), "{again:?}");
    let full = home.dir.path().join("full");
    fs::create_dir(&full).unwrap();
    fs::write(full.join("file"), b"x").unwrap();
    let refused = mount::mount(view(), &full, MountOptions::default());
    assert!(matches!(refused, Err(Error::NotEmpty { .. })), "{refused:?}");
    let options = MountOptions { threads: 0, ..MountOptions::default() };
    let refused = mount::mount(view(), &home.at("none"), options);
    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
}

/// The variable with the home for [`mounts_until_killed`]; only the test that starts it sets it.
const CHILD_HOME: &str = "MILLRACE_TEST_MOUNT_HOME";

#[test]
fn a_mount_whose_process_died_is_replaced() {
    let Some(home) = Home::new() else { return };
    let at = home.at("dead");
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "mount_journeys::lifecycle::mounts_until_killed", "--nocapture"])
        .env(CHILD_HOME, home.dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(output.any(|line| line.unwrap().contains("is mounted")));
    assert_eq!(fs::read(at.join("file")).unwrap(), b"before the kill");
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the mount is dead", || {
        fs::read_dir(&at).is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN))
    });
    let mount = mount_of(&home.datafs, "data", &at);
    assert_eq!(fs::read(mount.path().join("file")).unwrap(), b"before the kill");
}

/// The child that the test above kills.
#[test]
#[allow(clippy::print_stdout)]
fn mounts_until_killed() {
    let Some(dir) = std::env::var_os(CHILD_HOME).map(PathBuf::from) else { return };
    let datafs = Datafs::open(&dir.join("home"), &Config::default()).unwrap();
    let mount = mount_of(&datafs, "data", &dir.join("mnt-dead"));
    fs::write(mount.path().join("file"), b"before the kill").unwrap();
    // Data that is not synced may be lost with its process.
    fs::File::open(mount.path().join("file")).unwrap().sync_all().unwrap();
    println!("is mounted");
    io::stdout().flush().unwrap();
    let _ = io::stdin().read_line(&mut String::new());
}

/// Spare descriptors that are enough for every step of a mount.
const DESCRIPTORS_ENOUGH: u64 = 60;

#[test]
fn a_mount_that_fails_half_way_leaves_nothing_mounted() {
    let Some(home) = Home::new() else { return };
    let function = "mount_journeys::lifecycle::mounts_with_few_descriptors";
    let output = child::command(function, home.dir.path(), 0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The child whose descriptor limit the test above lowers. Each mount gets one step further before it has no
/// descriptor left.
#[test]
fn mounts_with_few_descriptors() {
    let Some((dir, _)) = child::task() else { return };
    let at = dir.join("mnt-starved");
    let is_mounted = || fs::read_to_string("/proc/self/mountinfo").unwrap().contains("mnt-starved");
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    for spare in 0..DESCRIPTORS_ENOUGH {
        let config = Config { gc_interval_ms: 0, ..Config::default() };
        let datafs = Datafs::open(&dir.join("home"), &config).unwrap();
        let view = datafs.view(&"data".parse().unwrap()).unwrap();
        let open = fs::read_dir("/proc/self/fd").unwrap();
        let highest = open.filter_map(|e| e.ok()?.file_name().to_str()?.parse::<i32>().ok()).max().unwrap();
        // Leaves only the spare numbers free below the limit.
        let fill = || File::open("/dev/null").unwrap();
        let _filled: Vec<File> =
            std::iter::repeat_with(fill).take_while(|f| f.as_raw_fd() <= highest).collect();
        setrlimit(Resource::RLIMIT_NOFILE, highest as u64 + 1 + spare, hard).unwrap();
        let mounted = mount::mount(view, &at, MountOptions { threads: 1, ..MountOptions::default() });
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        match mounted {
            Ok(mount) => {
                assert!(spare > 2, "only {spare} mounts have failed");
                return mount.unmount().unwrap();
            }
            Err(error) => assert!(!is_mounted(), "with {spare}: {error}"),
        }
    }
    panic!("{DESCRIPTORS_ENOUGH} descriptors are not enough");
}

#[test]
fn unmounting_twice_at_once_is_harmless() {
    let Some(home) = Home::new() else { return };
    for _ in 0..5 {
        let mount = home.mount("data");
        let at = mount.path().to_owned();
        let other = std::thread::spawn(move || mount::umount(&at));
        mount.unmount().unwrap();
        let other = other.join().unwrap();
        assert!(matches!(other, Ok(()) | Err(Error::NotFound { .. })), "{other:?}");
    }
}
