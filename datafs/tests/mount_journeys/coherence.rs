//! Journeys with the kernel's cache of a live volume while others change it.
#![allow(clippy::unwrap_used)]

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use millrace_datafs::{OpenFlags, Owner};

use super::{Home, eventually, mount_of, names};

/// Two mounts with separate sessions, as in two processes.
pub(super) fn two_mounts(test: impl FnOnce(&Path, &Path)) {
    let Some(home) = Home::new() else { return };
    let other = home.again();
    let (one, two) = (home.mount("data"), mount_of(&other, "data", &home.at("other")));
    test(one.path(), two.path());
}

#[test]
pub(super) fn an_open_is_never_stale() {
    two_mounts(|one, two| {
        for round in 0..200 {
            let text = format!("round {round}");
            let (writer, reader) = if round % 2 == 0 { (one, two) } else { (two, one) };
            match round % 5 {
                0 => fs::write(writer.join("f"), &text).unwrap(),
                1 => {
                    fs::write(writer.join("new"), &text).unwrap();
                    fs::rename(writer.join("new"), writer.join("f")).unwrap();
                }
                2 => {
                    fs::rename(writer.join("f"), writer.join("old")).unwrap();
                    fs::write(writer.join("f"), &text).unwrap();
                }
                3 => {
                    let _ = fs::remove_file(writer.join("link"));
                    fs::hard_link(writer.join("f"), writer.join("link")).unwrap();
                    fs::remove_file(writer.join("f")).unwrap();
                    fs::write(writer.join("f"), &text).unwrap();
                }
                _ => {
                    let mut file = File::create(writer.join("f")).unwrap();
                    file.write_all(text.as_bytes()).unwrap();
                    file.sync_all().unwrap();
                }
            }
            assert_eq!(fs::read_to_string(reader.join("f")).unwrap(), text, "round {round}");
            assert_eq!(fs::read_to_string(writer.join("f")).unwrap(), text, "round {round}");
        }
    });
}

#[test]
pub(super) fn a_file_that_the_library_names_is_found_whole_where_it_was_missing() {
    let Some(home) = Home::new() else { return };
    let (mount, other) = (home.mount("data"), home.again());
    let view = other.view(&"data".parse().unwrap()).unwrap();
    for round in 0..50 {
        let name = round.to_string();
        let (owner, flags) = (Owner { uid: 0, gid: 0 }, OpenFlags::READ_WRITE);
        let (_, file) = view.create_unnamed(view.root(), 0o644, owner, flags).unwrap();
        file.write_at(0, name.repeat(10_000).as_bytes()).unwrap();
        assert!(File::open(mount.path().join(&name)).is_err());
        file.link(view.root(), name.as_ref()).unwrap();
        assert_eq!(fs::read_to_string(mount.path().join(&name)).unwrap(), name.repeat(10_000));
        // A reader on the mount keeps the file after its name is removed.
        let reader = File::open(mount.path().join(&name)).unwrap();
        view.remove_file(&name).unwrap();
        drop(file);
        home.datafs.gc().unwrap();
        other.gc().unwrap();
        assert_eq!(std::io::read_to_string(reader).unwrap(), name.repeat(10_000));
    }
}

#[test]
pub(super) fn a_name_that_was_missing_is_found_once_it_is_there() {
    two_mounts(|one, two| {
        for round in 0..50 {
            let name = round.to_string();
            assert!(File::open(two.join(&name)).is_err());
            fs::write(one.join(&name), &name).unwrap();
            assert_eq!(fs::read_to_string(two.join(&name)).unwrap(), name);
            assert!(names(two).contains(&name));
        }
    });
}

#[test]
pub(super) fn what_others_do_is_soon_seen_without_opening() {
    two_mounts(|one, two| {
        fs::write(one.join("f"), b"x").unwrap();
        fs::create_dir(one.join("d")).unwrap();
        fs::write(one.join("d/in"), b"x").unwrap();
        assert_eq!(fs::metadata(two.join("f")).unwrap().len(), 1);
        assert_eq!(fs::metadata(two.join("d/in")).unwrap().len(), 1);
        fs::set_permissions(one.join("f"), fs::Permissions::from_mode(0o600)).unwrap();
        eventually("the mode", || fs::metadata(two.join("f")).unwrap().mode() & 0o777 == 0o600);
        fs::write(one.join("f"), b"longer").unwrap();
        eventually("the size", || fs::metadata(two.join("f")).unwrap().len() == 6);
        fs::rename(one.join("d"), one.join("e")).unwrap();
        eventually("the old name", || fs::metadata(two.join("d/in")).is_err());
        assert_eq!(fs::metadata(two.join("e/in")).unwrap().len(), 1);
        fs::remove_file(one.join("f")).unwrap();
        eventually("the removal", || fs::metadata(two.join("f")).is_err());
    });
}

/// The mount notifies the kernel of names that another process has made, and repeats that later. Neither
/// removes a folder from the kernel's tree.
#[test]
fn a_folder_in_use_keeps_its_path_while_others_change_the_volume() {
    let Some(home) = Home::new() else { return };
    let (mount, other) = (home.mount("data"), home.again());
    let view = other.view(&"data".parse().unwrap()).unwrap();
    let (x, y) = (mount.path().join("x"), mount.path().join("y"));
    assert_eq!(names(mount.path()), Vec::<String>::new());
    for folder in ["x", "y", "y/z"] {
        view.create_dir_all(folder).unwrap();
    }
    let open = [File::open(&x).unwrap(), File::open(y.join("z")).unwrap()];
    let path = |file: &File| fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    let until = Instant::now() + Duration::from_millis(500);
    for i in 0.. {
        assert_eq!(path(&open[0]), x);
        assert_eq!(path(&open[1]), y.join("z"));
        if Instant::now() >= until {
            break;
        }
        view.write_file(&format!("y/{i}"), b"x").unwrap();
    }
    view.rename_path("y", "moved").unwrap();
    eventually("the old name", || fs::metadata(&y).is_err());
    assert!(fs::metadata(mount.path().join("moved")).unwrap().is_dir());
    assert_eq!(path(&open[1]), mount.path().join("moved/z"), "it is where the folder is now");
}

/// A notification may overtake the reply that it revokes, so the mount repeats it once.
#[test]
fn a_name_that_others_have_made_is_soon_kept_by_the_kernel() {
    let Some(home) = Home::new() else { return };
    let (mount, other) = (home.mount("data"), home.again());
    let view = other.view(&"data".parse().unwrap()).unwrap();
    assert_eq!(names(mount.path()), Vec::<String>::new());
    view.write_file("f", b"x").unwrap();
    let lookups = || {
        let operations = mount.stats().operations;
        operations.iter().filter(|of| of.op == "lookup").map(|of| of.latency.count()).sum::<u64>()
    };
    let before = lookups();
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        fs::metadata(mount.path().join("f")).unwrap();
    }
    let asked = lookups() - before;
    assert!((1..=4).contains(&asked), "{asked} times in a second");
}

#[test]
pub(super) fn a_reader_with_an_open_file_sees_it_grow() {
    two_mounts(|one, two| {
        let mut writer = File::create(one.join("log")).unwrap();
        writer.write_all(b"one\n").unwrap();
        writer.sync_all().unwrap();
        let reader = File::open(two.join("log")).unwrap();
        let shown = || {
            let mut bytes = [0; 100];
            let len = std::os::unix::fs::FileExt::read_at(&reader, &mut bytes, 0).unwrap();
            bytes[..len].to_vec()
        };
        assert_eq!(shown(), b"one\n");
        writer.write_all(b"two\n").unwrap();
        writer.sync_all().unwrap();
        eventually("the second line", || shown() == b"one\ntwo\n");
    });
}

#[test]
pub(super) fn what_the_library_publishes_beside_a_mount_is_seen_through_it() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let view = home.datafs.view(&"data".parse().unwrap()).unwrap();
    for round in 0..50u32 {
        view.write_file("pointer", round.to_string().as_bytes()).unwrap();
        assert_eq!(fs::read_to_string(mount.path().join("pointer")).unwrap(), round.to_string());
    }
    view.remove_file("pointer").unwrap();
    eventually("the removal", || fs::metadata(mount.path().join("pointer")).is_err());
}

#[test]
fn own_changes_are_seen_at_once_by_every_way() {
    let Some(home) = Home::new() else { return };
    let mount = home.mount("data");
    let path = mount.path().join("f");
    let stat = || fs::metadata(&path).unwrap();
    fs::write(&path, b"12345").unwrap();
    assert_eq!(stat().len(), 5);
    let file = File::options().append(true).open(&path).unwrap();
    (&file).write_all(b"678").unwrap();
    assert_eq!((stat().len(), fs::read(&path).unwrap().len()), (8, 8));
    let before = stat();
    drop(file);
    let after = stat();
    assert_eq!((before.ctime_nsec(), before.mtime_nsec()), (after.ctime_nsec(), after.mtime_nsec()));
    let link = mount.path().join("link");
    fs::hard_link(&path, &link).unwrap();
    assert_eq!((stat().nlink(), fs::metadata(&link).unwrap().nlink()), (2, 2));
    fs::remove_file(&path).unwrap();
    assert_eq!(fs::metadata(&link).unwrap().nlink(), 1);
    fs::rename(&link, &path).unwrap();
    // Opens the file without a path lookup.
    let file = File::open(&path).unwrap();
    fs::rename(&path, &link).unwrap();
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    assert_eq!(fs::read(again).unwrap(), b"12345678");
}
