//! gRPC reflection: which services and messages there are, for clients that have no `.proto` files.

use tonic_reflection::server::{Builder, v1, v1alpha};

use crate::error::{Error, Result};

/// The inference service and its messages, as the build compiled them.
pub(crate) const INFERENCE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/inference.bin"));

fn builder() -> Builder<'static> {
    Builder::configure()
        .register_encoded_file_descriptor_set(INFERENCE)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

fn failed(error: tonic_reflection::server::Error) -> Error {
    Error::Service { service: "reflection", reason: crate::error::chain(&error) }
}

/// The reflection service that today's clients ask.
pub(crate) fn v1() -> Result<v1::ServerReflectionServer<impl v1::ServerReflection>> {
    builder().build_v1().map_err(failed)
}

/// The reflection service of before, which some clients still ask alone.
pub(crate) fn v1alpha() -> Result<v1alpha::ServerReflectionServer<impl v1alpha::ServerReflection>> {
    builder().build_v1alpha().map_err(failed)
}
