//! Mounts that lose their path while files are open: the path is mounted anew, and never a plain folder meanwhile.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use millrace_datafs::mount;
use nix::mount::{MntFlags, umount2};

use super::Held;

/// Mounts, opens a file, has the path detached, and mounts again.
fn mount_again_after(detach: impl FnOnce(&Held)) {
    let Some(held) = Held::new() else { return };
    let first = held.server("data");
    let at = held.at();
    let file = File::options().read(true).write(true).create_new(true).open(at.join("open")).unwrap();
    file.write_all_at(b"first", 0).unwrap();
    detach(&held);
    assert!(!mount::is_mounted(&at).unwrap());
    assert!(!held.holder.borrow().as_ref().unwrap().is_attached(&at).unwrap());

    let second = held.server("data");
    assert!(mount::is_mounted(&at).unwrap(), "a server says that it serves, and nothing is mounted");
    fs::write(at.join("new"), b"in the volume").unwrap();
    let view = held.datafs.view(&"data".parse().unwrap()).unwrap();
    assert_eq!(view.stat("new").unwrap().size, 13);
    // The open file has its server still, which ends with it.
    file.write_all_at(b"later", 4).unwrap();
    file.sync_all().unwrap();
    assert_eq!(view.stat("open").unwrap().size, 9);
    drop(file);
    first.ends();
    let mounts = held.mounts();
    assert!(mounts.len() == 1 && mounts[0].is_served && mounts[0].servers == 1, "{mounts:?}");
    held.unmount();
    second.ends();
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0, "files were written to the folder below the mount");
}

#[test]
fn a_path_that_another_program_detached_is_mounted_again() {
    mount_again_after(|held| umount2(&held.at(), MntFlags::MNT_DETACH).unwrap());
}

#[test]
fn a_path_that_the_holder_unmounted_is_mounted_again() {
    mount_again_after(|held| mount::umount_held(&held.at(), &held.socket()).unwrap());
}
