//! A journey of an unprivileged user with a mount. The kernel accepts no backing files from that process, so
//! the daemon serves the reads, and the mount reports it.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use millrace_datafs::mount::{self, MountOptions, Open};
use millrace_datafs::{Config, Datafs};

use super::pattern;
use crate::child;

/// The unprivileged user.
const NOBODY: u32 = 65_534;

/// A script for a new mount namespace: it creates a FUSE device that every user may open, then runs a program
/// as the user.
const AS_USER: &str = r#"
set -e
mkdir "$2/dev"
mount -t tmpfs tmpfs "$2/dev"
mknod -m 666 "$2/dev/fuse" c 10 229
mount --bind "$2/dev/fuse" /dev/fuse
user=$1
shift 2
exec setpriv --reuid "$user" --regid "$user" --clear-groups --inh-caps=-all "$@"
"#;

/// The reason why the user cannot run a program in a new namespace here.
fn obstacle(program: &Path) -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("only root can become another user".into());
    }
    for tool in ["unshare", "setpriv", "fusermount3"] {
        if Command::new(tool).arg("--version").output().is_err() {
            return Some(format!("{tool} is not installed"));
        }
    }
    let closed = program
        .ancestors()
        .skip(1)
        .find(|folder| fs::metadata(folder).is_ok_and(|of| of.permissions().mode() & 0o005 != 0o005));
    closed.map(|folder| format!("others may not enter {}", folder.display()))
}

/// The child: mounts a snapshot with a file that is large enough for passthrough, and reads it twice.
#[test]
fn user() {
    let Some((dir, _)) = child::task() else { return };
    mount::can_mount().unwrap();
    let datafs = Datafs::open(&dir.join("home"), &Config::default()).unwrap();
    datafs.volume_create(&"data".parse().unwrap()).unwrap();
    let bytes = pattern(3_000_000, 6);
    datafs.view(&"data".parse().unwrap()).unwrap().write_file("large", &bytes).unwrap();
    datafs.snapshot_create(&"data".parse().unwrap(), &"s".parse().unwrap()).unwrap();
    let view = datafs.view(&"data@s".parse().unwrap()).unwrap();
    let options = MountOptions { open: Open::Passthrough, ..MountOptions::default() };
    let mount = mount::mount(view, &dir.join("mnt"), options).unwrap();
    assert_eq!(mount.opening().way, Open::Pages);
    let told = mount.opening().to_string();
    assert!(told.contains("the kernel hands no files over here") && told.contains("asked for"), "{told}");
    for _ in 0..2 {
        assert!(fs::read(mount.path().join("large")).unwrap() == bytes);
    }
    mount.unmount().unwrap();
}

#[test]
fn who_has_no_privilege_is_told_that_the_daemon_reads() {
    if let Err(reason) = mount::can_mount() {
        return millrace_testing::skip(millrace_testing::Need::Fuse, reason);
    }
    if let Some(obstacle) = obstacle(&std::env::current_exe().unwrap()) {
        return millrace_testing::skip(millrace_testing::Need::Filesystem, obstacle);
    }
    let dir = tempfile::tempdir().unwrap();
    nix::unistd::chown(dir.path(), Some(NOBODY.into()), Some(NOBODY.into())).unwrap();
    let program = child::command("mount_journeys::unprivileged::user", dir.path(), 0);
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", AS_USER, "sh", &NOBODY.to_string()]);
    command.arg(dir.path()).arg(program.get_program()).args(program.get_args());
    command.envs(program.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
}
