//! What can go wrong: [`Error`] when something is started or loaded, [`InferError`] for one request.

use std::net::SocketAddr;
use std::path::PathBuf;

/// Result of starting or loading something.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a server, a model or a pipe could not be started or went down.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// ONNX Runtime was not found.
    #[error(
        "ONNX Runtime was not found ({searched}): run make install in a checkout, or set ORT_DYLIB_PATH or [serving] onnxruntime to libonnxruntime.so version 1.{} or newer",
        ort::MINOR_VERSION
    )]
    RuntimeMissing {
        /// Where it was looked for.
        searched: String,
    },
    /// The library that was found cannot be used.
    #[error(
        "{} cannot be used as ONNX Runtime: {reason}; set ORT_DYLIB_PATH or [serving] onnxruntime to libonnxruntime.so version 1.{} or newer in a place that only root and this user can write",
        path.display(), ort::MINOR_VERSION
    )]
    RuntimeUnusable {
        /// The library.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The configured device is not there, and `allow_fallback` is not set.
    #[error(
        "device {device} is not available: {reason}; choose another with --device or [serving] device, or let models run on the processor with [serving] allow_fallback = true"
    )]
    DeviceUnavailable {
        /// The device.
        device: crate::config::Device,
        /// What ONNX Runtime says.
        reason: String,
    },
    /// An address cannot be listened on.
    #[error(
        "cannot listen on {address} for {service}: {reason}; choose another address with --{flag} or [serving] {flag} (port 0 takes a free one)"
    )]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What should listen there.
        service: &'static str,
        /// Flag and configuration key that set it.
        flag: &'static str,
        /// What the operating system says.
        reason: String,
    },
    /// The directory of models cannot be opened.
    #[error("cannot open the model directory {}: {reason}", path.display())]
    Directory {
        /// The directory.
        path: PathBuf,
        /// What the operating system says.
        reason: String,
    },
    /// A setting makes no sense.
    #[error("[serving] {reason}")]
    Config {
        /// Which one, and why.
        reason: String,
    },
    /// A model version cannot be served.
    #[error("model {model} version {version} cannot be served: {reason}")]
    Model {
        /// Model name.
        model: String,
        /// Version.
        version: u64,
        /// Why.
        reason: String,
    },
    /// The model repository cannot be read.
    #[error("the model repository cannot be read")]
    Repository(#[from] millrace_bundle::Error),
    /// The volume that holds models or progress failed.
    #[error("the volume failed")]
    Datafs(#[from] millrace_datafs::Error),
    /// Topics failed.
    #[error("the topics failed")]
    Streams(#[from] millrace_streams::Error),
    /// A request of a pipe failed in a way that is not the record's fault.
    #[error("inference failed")]
    Infer(#[from] InferError),
    /// Another process runs the same pipe.
    #[error(
        "pipe {name} is run by another process, which committed {topic} partition {partition} in between: give this one another name"
    )]
    PipeFenced {
        /// Name of the pipe.
        name: String,
        /// Input topic.
        topic: String,
        /// Partition.
        partition: i32,
    },
    /// The input of a pipe is not the topic that the pipe has read before, or lacks records that it has not read.
    #[error(
        "pipe {name}: topic {topic} partition {partition} does not go on where the pipe was: {reason}; if the topic \
         was deleted and created again, or its records removed on purpose, give the pipe another name (--name of \
         millrace pipe, name in [[serving.pipes]]), under which it begins at the first record"
    )]
    PipeInputChanged {
        /// Name of the pipe.
        name: String,
        /// Input topic.
        topic: String,
        /// Partition.
        partition: i32,
        /// What differs.
        reason: String,
    },
    /// A server task ended with an error.
    #[error("the {service} service failed: {reason}")]
    Service {
        /// Which one.
        service: &'static str,
        /// Why.
        reason: String,
    },
}

impl Error {
    /// True when the same call may succeed later without anybody changing anything.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Repository(source) => source.is_retryable(),
            Error::Datafs(source) => source.is_retryable(),
            Error::Streams(source) => source.is_retryable(),
            Error::Infer(source) => source.is_retryable(),
            _ => false,
        }
    }
}

/// Why a request has no answer. Transports map each variant to one status.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InferError {
    /// There is no such model, or no such version of it.
    #[error("{reason}")]
    NotFound {
        /// What was not found.
        reason: String,
    },
    /// The name is taken.
    #[error("{reason}")]
    Exists {
        /// What is there already.
        reason: String,
    },
    /// The request is wrong and stays wrong.
    #[error("{reason}")]
    Invalid {
        /// What is wrong.
        reason: String,
    },
    /// The request is larger than the server takes.
    #[error("the message has at least {bytes} bytes, the limit is {bytes_max} (limits.message_bytes_max)")]
    TooLarge {
        /// Size of the message, without compression, as far as it is known.
        bytes: u64,
        /// The limit.
        bytes_max: u64,
    },
    /// The answer cannot be written in the form that was asked for.
    #[error("{reason}")]
    NotRepresentable {
        /// Why, and what to ask for instead.
        reason: String,
    },
    /// More waits already than may.
    #[error("{reason}")]
    Overloaded {
        /// What waits, and the limits.
        reason: String,
    },
    /// The call shows no token, or one that is not known.
    #[error("{reason}")]
    Unauthenticated {
        /// What is expected.
        reason: String,
    },
    /// The call's token does not allow it.
    #[error("{reason}")]
    Denied {
        /// What is not allowed.
        reason: String,
    },
    /// It could not begin to run in time.
    #[error("{reason}")]
    DeadlineExceeded {
        /// How long it waited, and what its time was bounded by.
        reason: String,
    },
    /// The server cannot answer now: it drains, or the version could not be loaded.
    #[error("{reason}")]
    Unavailable {
        /// Why.
        reason: String,
    },
    /// The protocol has it, this server does not.
    #[error("{reason}")]
    Unsupported {
        /// What.
        reason: String,
    },
    /// ONNX Runtime failed on a valid request.
    #[error("{reason}")]
    Internal {
        /// What it says.
        reason: String,
    },
}

impl InferError {
    pub(crate) fn invalid(reason: impl Into<String>) -> InferError {
        InferError::Invalid { reason: reason.into() }
    }

    pub(crate) fn internal(reason: impl Into<String>) -> InferError {
        InferError::Internal { reason: reason.into() }
    }

    /// The same of a part of a request, which is named before the reason.
    pub(crate) fn within(mut self, part: &dyn std::fmt::Display) -> InferError {
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
            // Of the message as a whole, which has no parts.
            InferError::TooLarge { .. } => {}
        }
        self
    }

    /// True when the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            InferError::Unavailable { .. }
                | InferError::Overloaded { .. }
                | InferError::DeadlineExceeded { .. }
        )
    }

    /// Name of the variant, as a metric label.
    pub(crate) fn label(&self) -> &'static str {
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

/// At most 120 characters of text from outside, quoted, for messages.
pub(crate) fn quote(text: &str) -> String {
    let mut short: String = text.chars().take(120).collect();
    if short.len() < text.len() {
        short.push('…');
    }
    format!("{short:?}")
}

/// An error of ONNX Runtime in one line, which is not too long.
pub(crate) fn one_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let mut line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((cut, _)) = line.char_indices().nth(600) {
        line.truncate(cut);
    }
    line
}

/// An error and what caused it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line.push_str(": ");
        line.push_str(&cause.to_string());
        source = cause.source();
    }
    line
}
