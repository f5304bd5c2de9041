//! Build script of the CSI driver: compiles the protocols to Rust without `protoc`.
use std::error::Error;

/// Messages with secrets, which must not be printable by accident.
const SECRET: [&str; 12] = [
    "CreateVolumeRequest",
    "DeleteVolumeRequest",
    "ControllerPublishVolumeRequest",
    "ControllerUnpublishVolumeRequest",
    "ValidateVolumeCapabilitiesRequest",
    "CreateSnapshotRequest",
    "DeleteSnapshotRequest",
    "ListSnapshotsRequest",
    "ControllerExpandVolumeRequest",
    "NodeStageVolumeRequest",
    "NodePublishVolumeRequest",
    "NodeExpandVolumeRequest",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(["csi.proto", "registration.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .skip_debug(SECRET.map(|message| format!(".csi.v1.{message}")))
        .compile_fds(files)?;
    Ok(())
}
