//! The errors of this crate: [`Error`] for starting or loading, [`InferError`] for one request.

use std::net::SocketAddr;
use std::path::PathBuf;

pub use millrace_leaf::error_chain::one_line as chain;
pub use millrace_leaf::quoting::quote;

/// Result of starting or loading something.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Error of starting or running a server or a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// ONNX Runtime was not found.
    #[error(
        "ONNX Runtime was not found ({searched}): run make install in a checkout, or set ORT_DYLIB_PATH or [serving] onnxruntime to libonnxruntime.so version 1.{} or newer",
        ort::MINOR_VERSION
    )]
    RuntimeMissing {
        /// The places that were searched.
        searched: String,
    },
    /// The library cannot be used as ONNX Runtime.
    #[error(
        "{} cannot be used as ONNX Runtime: {reason}; set ORT_DYLIB_PATH or [serving] onnxruntime to libonnxruntime.so version 1.{} or newer in a place that only root and this user can write",
        path.display(), ort::MINOR_VERSION
    )]
    RuntimeUnusable {
        /// The library.
        path: PathBuf,
        /// The fault of the library.
        reason: String,
    },
    /// The configured device is missing, and `allow_fallback` is not set.
    #[error(
        "device {device} is not available: {reason}; choose another with --device or [serving] device, or let models run on the processor with [serving] allow_fallback = true"
    )]
    DeviceUnavailable {
        /// The device.
        device: String,
        /// The error from ONNX Runtime.
        reason: String,
    },
    /// The server cannot listen on an address.
    #[error(
        "cannot listen on {address} for {service}: {reason}; choose another address with --{flag} or [serving] {flag} (port 0 takes a free one)"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The service for that address.
        service: &'static str,
        /// Flag and configuration key that set it.
        flag: &'static str,
        /// The operating system's error.
        reason: String,
        /// Whether another process has the port, which it may release.
        is_taken: bool,
    },
    /// The directory of models cannot be opened.
    #[error("cannot open the model directory {}: {reason}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// The operating system's error.
        reason: String,
    },
    /// A setting is invalid.
    #[error("[serving] {reason}")]
    Config {
        /// The setting and the reason.
        reason: String,
    },
    /// A model version cannot be served.
    #[error("model {model} version {version} cannot be served: {reason}")]
    Model {
        /// Model name.
        model: String,
        /// Version.
        version: u64,
        /// The reason.
        reason: String,
    },
    /// The model repository cannot be read.
    #[error("the model repository cannot be read")]
    Repository(#[from] millrace_bundle::Error),
    /// The volume that holds models failed.
    #[error("the volume failed")]
    Datafs(#[from] millrace_datafs::Error),
    /// A server task ended with an error.
    #[error("the {service} service failed: {reason}")]
    Service {
        /// The service.
        service: &'static str,
        /// The reason.
        reason: String,
    },
}

impl Error {
    /// True if the same call may succeed later without any change.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Repository(source) => source.is_retryable(),
            Error::Datafs(source) => source.is_retryable(),
            _ => false,
        }
    }
}

/// Error of a request. Transports map each variant to one status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InferError {
    /// The model, or its version, does not exist.
    #[error("{reason}")]
    NotFound {
        /// The missing object.
        reason: String,
    },
    /// The name is already in use.
    #[error("{reason}")]
    Exists {
        /// The existing object.
        reason: String,
    },
    /// The request is invalid; a retry cannot succeed.
    #[error("{reason}")]
    Invalid {
        /// The fault.
        reason: String,
    },
    /// The request is larger than the limit.
    #[error("the message has at least {bytes} bytes, the limit is {bytes_max} (limits.message_bytes_max)")]
    TooLarge {
        /// Size of the message after decompression, as far as it is known.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// The answer cannot be represented in the requested form.
    #[error("{reason}")]
    NotRepresentable {
        /// The reason, and the form to ask for instead.
        reason: String,
    },
    /// The server is overloaded.
    #[error("{reason}")]
    Overloaded {
        /// The load, and the limit.
        reason: String,
    },
    /// The call has no token, or an unknown one.
    #[error("{reason}")]
    Unauthenticated {
        /// The expected credentials.
        reason: String,
    },
    /// The call's token does not permit it.
    #[error("{reason}")]
    Denied {
        /// The denied action.
        reason: String,
    },
    /// The request could not start in time.
    #[error("{reason}")]
    DeadlineExceeded {
        /// The time that it waited, and the origin of its deadline.
        reason: String,
    },
    /// The server cannot answer now: it is draining, or the version could not be loaded.
    #[error("{reason}")]
    Unavailable {
        /// The reason.
        reason: String,
    },
    /// The protocol defines it, but this server does not support it.
    #[error("{reason}")]
    Unsupported {
        /// The unsupported feature.
        reason: String,
    },
    /// ONNX Runtime failed on a valid request.
    #[error("{reason}")]
    Internal {
        /// The error from ONNX Runtime.
        reason: String,
    },
}

impl InferError {
    /// An [`InferError::Invalid`].
    pub fn invalid(reason: impl Into<String>) -> InferError {
        InferError::Invalid { reason: reason.into() }
    }

    /// An [`InferError::Internal`].
    pub fn internal(reason: impl Into<String>) -> InferError {
        InferError::Internal { reason: reason.into() }
    }

    /// The error for requests that arrive while the server drains.
    pub fn stopping() -> InferError {
        InferError::Unavailable { reason: "the server is stopping: send the request to another one".into() }
    }

    /// The same error with the named part of the request before its reason.
    pub fn within(mut self, part: &dyn std::fmt::Display) -> InferError {
        match &mut self {
            InferError::NotFound { reason }
            | InferError::Exists { reason }
            | InferError::Invalid { reason }
            | InferError::NotRepresentable { reason }
            | InferError::Overloaded { reason }
            | InferError::Unauthenticated { reason }
            | InferError::Denied { reason }
            | InferError::DeadlineExceeded { reason }
            | InferError::Unavailable { reason }
            | InferError::Unsupported { reason }
            | InferError::Internal { reason } => *reason = format!("{part}: {reason}"),
            // Concerns the whole message, which has no parts.
            InferError::TooLarge { .. } => {}
        }
        self
    }

    /// True if the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            InferError::Unavailable { .. }
                | InferError::Overloaded { .. }
                | InferError::DeadlineExceeded { .. }
        )
    }

    /// Name of the variant, as a metric label.
    pub fn label(&self) -> &'static str {
        match self {
            InferError::NotFound { .. } => "not_found",
            InferError::Exists { .. } => "exists",
            InferError::Invalid { .. } => "invalid",
            InferError::TooLarge { .. } => "too_large",
            InferError::NotRepresentable { .. } => "not_representable",
            InferError::Unauthenticated { .. } => "unauthenticated",
            InferError::Denied { .. } => "denied",
            InferError::Unavailable { .. } => "unavailable",
            InferError::Overloaded { .. } => "overloaded",
            InferError::DeadlineExceeded { .. } => "deadline_exceeded",
            InferError::Unsupported { .. } => "unsupported",
            InferError::Internal { .. } => "internal",
        }
    }
}

/// An error of ONNX Runtime in one line of at most 600 characters.
pub fn one_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((cut, _)) = line.char_indices().nth(600) {
        line.truncate(cut);
    }
    line
}
