//! Tests of a home on a disk without a free byte.

use std::io::Write;
use std::path::Path;

use crate::support::{Home, Tmpfs, failure, fuse_permitted, until};

/// Fills the disk completely.
fn fill(disk: &Path) {
    for (name, piece) in [("ballast", 4_096), ("last-ballast", 1)] {
        let mut file = std::fs::File::create(disk.join(name)).unwrap();
        while file.write_all(&vec![1; piece]).is_ok() {}
    }
}

#[test]
fn detached_mount_on_a_full_disk_serves_or_reports_the_reason() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "only root can mount a tmpfs");
    }
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let root = home.path();
    let _disk = Tmpfs::mount(&root, "24m");
    home.ok(["volume", "create", "v"]);
    for (name, text) in [("kept", "kept"), ("removed", ""), ("--supervise", "")] {
        let file = home.file(name, text);
        home.ok(["cp", file.to_str().unwrap(), &format!("v:/{name}")]);
    }
    let at = home.dir.path().join("mnt");
    let detach = |volume: &'static str| ["--log", "debug", "mount", "--detach", volume, at.to_str().unwrap()];
    // Ends a mount and waits for all its processes, which free and take space while they end.
    let end = || {
        home.ok(["umount", at.to_str().unwrap()]);
        until("the processes have ended", || home.processes() == 0);
    };
    for supervise in [None, Some("--supervise")] {
        fill(&root);
        // The log file cannot grow.
        let (code, line) = home.fails(detach("missing").into_iter().chain(supervise));
        assert_eq!(code, 3, "{line}");
        assert!(line.contains("missing"), "{line}");
        home.json(detach("v").into_iter().chain(supervise));
        assert_eq!(std::fs::read(at.join("kept")).unwrap(), b"kept");
        std::fs::remove_file(at.join(supervise.unwrap_or("removed"))).unwrap();
        end();
    }
    // Without the reserve file, a process that opens the volumes has no space. The kernel may free some of ended
    // processes later; a mount that finds it must serve.
    for supervise in [None, Some("--supervise")] {
        until("a mount finds no space", || {
            std::fs::remove_file(root.join("datafs/meta.sqlite-reserve")).ok();
            fill(&root);
            let output = home.run(detach("v").into_iter().chain(supervise));
            if output.status.success() {
                assert_eq!(std::fs::read(at.join("kept")).unwrap(), b"kept");
                end();
                return false;
            }
            let (code, line) = failure(&output, "the mount");
            assert_eq!(code, 7, "{line}");
            assert!(line.contains("space"), "{line}");
            assert!(!millrace_datafs::mount::is_mounted(&at).unwrap());
            true
        });
    }
    std::fs::remove_file(root.join("ballast")).unwrap();
    home.json(detach("v"));
    assert_eq!(std::fs::read(at.join("kept")).unwrap(), b"kept");
    end();
}
