//! gRPC reflection: lists services and messages for clients without `.proto` files.

use tonic_reflection::server::{Builder, v1, v1alpha};

use millrace_serving_core::error::{Error, Result};
use millrace_serving_core::wire::DESCRIPTORS;

fn builder() -> Builder<'static> {
    Builder::configure()
        .register_encoded_file_descriptor_set(DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

fn failed(error: tonic_reflection::server::Error) -> Error {
    Error::Service { service: "reflection", reason: millrace_serving_core::error::chain(&error) }
}

/// The current reflection service.
pub(crate) fn v1() -> Result<v1::ServerReflectionServer<impl v1::ServerReflection>> {
    builder().build_v1().map_err(failed)
}

/// The former reflection service, which some clients still require.
pub(crate) fn v1alpha() -> Result<v1alpha::ServerReflectionServer<impl v1alpha::ServerReflection>> {
    builder().build_v1alpha().map_err(failed)
}
