//! The FUSE file system: requests of the kernel into calls of a view, and the life of a mount.

pub(super) mod adapter;
pub(super) mod answer;
mod extended;
mod fusermount;
mod instrumented;
mod names;
pub(super) mod passthrough;
pub(super) mod point;
mod retry;
pub(super) mod session;
mod write_back;
