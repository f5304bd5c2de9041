//! csi-sanity, the conformance suite of the Container Storage Interface, against the driver with real mounts.

use std::process::Command;

use crate::support::{Home, fuse_permitted, program, project, until};

#[test]
#[ignore = "needs csi-sanity: run make conformance"]
fn csi_sanity_passes() {
    if !nix::unistd::geteuid().is_root() {
        return millrace_testing::skip(millrace_testing::Need::Root, "the driver's mounts need root");
    }
    if !fuse_permitted() {
        return;
    }
    let home = Home::new();
    let (endpoint, kubelet) = (home.dir.path().join("csi.sock"), home.dir.path().join("kubelet"));
    std::fs::create_dir(&kubelet).unwrap();
    let service = home.start([
        "csi",
        "--endpoint",
        &format!("unix://{}", endpoint.display()),
        "--node-id",
        "node",
        "--kubelet-dir",
        kubelet.to_str().unwrap(),
    ]);
    until("the driver serves", || endpoint.exists());
    // Its specs for groups of snapshots, health, staging and so on are skipped: the driver does not claim them.
    program(
        Command::new(project().join(".local/bin/csi-sanity"))
            .arg(format!("--csi.endpoint=unix:{}", endpoint.display()))
            .arg(format!("--csi.mountdir={}", kubelet.join("mount").display()))
            .arg(format!("--csi.stagingdir={}", kubelet.join("staging").display())),
    );
    assert_eq!(service.stop(), 0);
}
