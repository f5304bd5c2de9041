//! Journeys with mount options and their effect on a volume.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use millrace_datafs::mount::{self, Mount, MountOptions};
use nix::unistd::{AccessFlags, access};

use super::{Home, errno, names};

const USER: &str = "1001";

fn mount_with(home: &Home, spec: &str, at: &str, options: MountOptions) -> Mount {
    let view = home.datafs.view(&spec.parse().unwrap()).unwrap();
    let mount = mount::mount(view, &home.at(at), options).unwrap();
    if nix::unistd::geteuid().is_root() {
        fs::set_permissions(home.dir.path(), Permissions::from_mode(0o755)).unwrap();
    }
    mount
}

#[test]
fn a_live_volume_that_is_mounted_read_only_shows_changes_and_refuses_them() {
    let Some(home) = Home::new() else { return };
    let live = home.mount("data");
    fs::write(live.path().join("f"), b"before").unwrap();
    let options = MountOptions { read_only: true, ..MountOptions::default() };
    let mount = mount_with(&home, "data", "read-only", options);
    let f = mount.path().join("f");
    assert_eq!(fs::read(&f).unwrap(), b"before");
    fs::write(live.path().join("f"), b"after").unwrap();
    fs::write(live.path().join("new"), b"x").unwrap();
    assert_eq!(fs::read(&f).unwrap(), b"after");
    assert_eq!(names(mount.path()), ["f", "new"]);
    for refused in [
        fs::write(&f, b"x"),
        fs::write(mount.path().join("other"), b"x"),
        fs::remove_file(&f),
        fs::create_dir(mount.path().join("d")),
        fs::set_permissions(&f, Permissions::from_mode(0o600)),
    ] {
        assert_eq!(errno(refused), libc::EROFS);
    }
    assert_eq!(access(&f, AccessFlags::W_OK), Err(nix::errno::Errno::EROFS));
}

#[test]
fn a_snapshot_says_that_it_cannot_be_written() {
    let Some(home) = Home::new() else { return };
    let live = home.mount("data");
    fs::write(live.path().join("f"), b"x").unwrap();
    fs::set_permissions(live.path().join("f"), Permissions::from_mode(0o666)).unwrap();
    home.snapshot("s");
    let snapshot = home.mount("data@s");
    let f = snapshot.path().join("f");
    assert_eq!(access(&f, AccessFlags::W_OK), Err(nix::errno::Errno::EROFS));
    assert_eq!(access(snapshot.path(), AccessFlags::W_OK), Err(nix::errno::Errno::EROFS));
    access(&f, AccessFlags::R_OK).unwrap();
}

/// The effective user of a program that belongs to root and has the set-user-ID bit, run by a user.
fn runs_as(program: &Path) -> std::io::Result<String> {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", USER, "--regid", USER, "--clear-groups"]).arg(program).arg("-u");
    let output = command.output()?;
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap().trim().to_owned()),
        false => Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

#[test]
fn programs_and_devices_have_the_power_that_the_mount_gives_them() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root mounts with suid and dev");
    }
    let Some(home) = Home::new() else { return };
    let default = mount_with(&home, "data", "default", MountOptions::default());
    fs::set_permissions(default.path(), Permissions::from_mode(0o755)).unwrap();
    fs::copy("/usr/bin/id", default.path().join("id")).unwrap();
    fs::set_permissions(default.path().join("id"), Permissions::from_mode(0o4755)).unwrap();
    let device = nix::sys::stat::makedev(1, 3);
    let null = default.path().join("null");
    let mode = nix::sys::stat::Mode::from_bits_truncate(0o666);
    nix::sys::stat::mknod(&null, nix::sys::stat::SFlag::S_IFCHR, mode, device).unwrap();
    assert_eq!(runs_as(&default.path().join("id")).unwrap(), USER);
    assert_eq!(errno(File::open(&null)), libc::EACCES);

    let given = MountOptions { suid: true, dev: true, ..MountOptions::default() };
    let given = mount_with(&home, "data", "given", given);
    assert_eq!(runs_as(&given.path().join("id")).unwrap(), "0");
    assert_eq!(fs::read(given.path().join("null")).unwrap(), b"");

    let taken = MountOptions { noexec: true, ..MountOptions::default() };
    let taken = mount_with(&home, "data", "taken", taken);
    let refused = runs_as(&taken.path().join("id")).unwrap_err().to_string();
    assert!(refused.contains("Permission denied"), "{refused}");
}
