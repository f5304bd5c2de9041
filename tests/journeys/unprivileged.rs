//! Tests of a mount by a user without privileges: the kernel rejects file handover from that user, so the
//! daemon serves reads, and prints one note about it.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

use crate::support::{Home, fuse_permitted};

/// The id of the unprivileged user.
const NOBODY: u32 = 65_534;

/// In a separate mount namespace: creates a fuse device that all users may open, then runs the journey as the
/// user.
const AS_USER: &str = r#"
set -e
mkdir "$3/dev"
mount -t tmpfs tmpfs "$3/dev"
mknod -m 666 "$3/dev/fuse" c 10 229
mount --bind "$3/dev/fuse" /dev/fuse
exec setpriv --reuid "$1" --regid "$1" --clear-groups --inh-caps=-all sh -c "$2" sh "$3"
"#;

/// The journey: reads a file of a snapshot twice; a privileged mount would hand it to the kernel.
const JOURNEY: &str = r#"
set -e
cd "$1"
"$MILLRACE" volume create v
"$MILLRACE" mount v mnt >announcement 2>notes &
daemon=$!
trap 'kill $daemon 2>/dev/null || true' EXIT
while ! [ -s announcement ]; do kill -0 $daemon; sleep 0.05; done
head -c 3000000 /dev/urandom >file
cp file mnt/file
"$MILLRACE" snapshot create v@s
cmp file mnt/.snapshots/s/file
cmp file mnt/.snapshots/s/file
"$MILLRACE" umount mnt
wait $daemon
"#;

/// The reason why this machine cannot run the journey.
fn skip_reason(program: &Path) -> Option<String> {
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
        .find(|folder| std::fs::metadata(folder).is_ok_and(|of| of.permissions().mode() & 0o005 != 0o005));
    closed.map(|folder| format!("others may not enter {}", folder.display()))
}

#[test]
fn unprivileged_mount_notes_once_that_the_daemon_reads() {
    let program = Path::new(env!("CARGO_BIN_EXE_millrace"));
    if !fuse_permitted() {
        return;
    }
    if let Some(obstacle) = skip_reason(program) {
        return millrace_testing::skip(millrace_testing::Need::Filesystem, obstacle);
    }
    let home = Home::new();
    nix::unistd::chown(home.dir.path(), Some(NOBODY.into()), Some(NOBODY.into())).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", AS_USER, "sh"]);
    command.arg(NOBODY.to_string()).arg(JOURNEY).arg(home.dir.path());
    command.env("MILLRACE", program).env("MILLRACE_HOME", home.path()).env_remove("MILLRACE_CONFIG");
    let output = command.output().unwrap();
    let notes = std::fs::read_to_string(home.dir.path().join("notes")).unwrap_or_default();
    assert!(output.status.success(), "{output:?}\n{notes}");
    let open_notes: Vec<_> = notes.lines().filter(|line| line.contains("opens files by")).collect();
    assert_eq!(open_notes.len(), 1, "{notes}");
    assert!(
        open_notes[0].starts_with("v opens files by pages: the kernel hands no files over here"),
        "{notes}"
    );
}
