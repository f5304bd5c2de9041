//! Tests of a mount's reaction to changes reported by the metadata engine.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use std::fs;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags};

use super::*;
use crate::fs::tests::setup;
use crate::meta::changes::Changed;

fn is_mount_point(at: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().any(|line| line.split(' ').nth(4) == at.to_str())
}

#[test]
fn changes_that_are_not_known_take_no_mount_point_away() {
    if let Err(reason) = point::can_mount() {
        return millrace_testing::skip(millrace_testing::Need::Fuse, reason);
    }
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root may mount a tmpfs");
    }
    let (home, _datafs, view) = setup();
    for folder in ["over", "folder"] {
        view.create_dir_all(folder).unwrap();
    }
    view.write_file("folder/file", b"x").unwrap();
    let mount = mount(view, &home.path().join("mnt"), &MountOptions::default()).unwrap();
    let (over, file) = (mount.path().join("over"), mount.path().join("folder/file"));
    assert_eq!(fs::metadata(&file).unwrap().len(), 1);
    nix::mount::mount(Some("tmpfs"), &over, Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    fs::write(over.join("inside"), b"x").unwrap();
    let asked = || {
        let operations = mount.stats().operations;
        operations.iter().filter(|of| of.op == "getattr").map(|of| of.latency.count()).sum::<u64>()
    };
    for _ in 0..3 {
        let before = asked();
        mount.coherence.heard(&Changed { anything: true, ..Changed::default() });
        let until = Instant::now() + Duration::from_secs(10);
        while asked() == before {
            assert!(Instant::now() < until, "the kernel goes on using the attributes that it has");
            fs::metadata(&file).unwrap();
        }
        assert!(fs::metadata(over.join("inside")).is_ok() && is_mount_point(&over));
    }
    nix::mount::umount2(&over, MntFlags::empty()).unwrap();
    mount.unmount().unwrap();
}
