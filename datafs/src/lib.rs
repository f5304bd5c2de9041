//! Volumes with snapshots: POSIX semantics, metadata engines, file data as objects, the FUSE mount.
