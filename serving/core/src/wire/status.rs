//! gRPC status of each error of a request.

use tonic::{Code, Status};

use crate::error::InferError;

impl From<InferError> for Status {
    fn from(error: InferError) -> Status {
        let code = match &error {
            InferError::NotFound { .. } => Code::NotFound,
            InferError::Exists { .. } => Code::AlreadyExists,
            InferError::Invalid { .. } | InferError::NotRepresentable { .. } => Code::InvalidArgument,
            InferError::TooLarge { .. } | InferError::Overloaded { .. } => Code::ResourceExhausted,
            InferError::Unauthenticated { .. } => Code::Unauthenticated,
            InferError::Denied { .. } => Code::PermissionDenied,
            // Triton answers UNAVAILABLE, on which its clients retry although they no longer wait.
            InferError::DeadlineExceeded { .. } => Code::DeadlineExceeded,
            InferError::Unavailable { .. } => Code::Unavailable,
            InferError::Unsupported { .. } => Code::Unimplemented,
            InferError::Internal { .. } => Code::Internal,
        };
        Status::new(code, error.to_string())
    }
}
