//! A gRPC client of the Open Inference Protocol, for `millrace predict` and for tests. It works with any
//! server that speaks the protocol.

mod credentials;
mod hints;
mod remote;

use std::sync::Arc;

use millrace_bundle::{Signature, TensorSpec};
use millrace_leaf::error_chain;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

pub use credentials::Connector;
pub use credentials::Credentials;
use millrace_serving_core::error::InferError;
use millrace_serving_core::tensor::Tensor;
use millrace_serving_core::wire::inference as pb;
use millrace_serving_core::wire::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use millrace_serving_core::wire::{Form, read_outputs, write_request};
pub(crate) use remote::Remote;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The address is malformed.
    #[error("{address:?} is not the address of a server (host:port, http://host:port or https://host:port)")]
    Address {
        /// The address as given.
        address: String,
    },
    /// The credentials cannot be used.
    #[error("{reason}")]
    Credentials {
        /// The credential and the reason.
        reason: String,
    },
    /// No server answers at the address.
    #[error(
        "no inference server answers at {address}: start one with millrace serve, or name another with --grpc"
    )]
    Unreachable {
        /// The address.
        address: String,
        /// The failure.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// TLS fails: only one side uses it, or one side does not accept the other's certificate.
    #[error("cannot talk to the inference server at {address}: {reason}")]
    Tls {
        /// The address.
        address: String,
        /// The mismatch, and how to fix it.
        reason: String,
    },
    /// The server refused.
    #[error("the server answered {code:?}: {message}")]
    Refused {
        /// gRPC status code.
        code: Code,
        /// The server's message.
        message: String,
    },
    /// The server's answer violates the protocol.
    #[error("the server's answer breaks the protocol: {0}")]
    Protocol(InferError),
}

impl ClientError {
    /// True when the same call may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            ClientError::Unreachable { .. } => true,
            ClientError::Refused { code, .. } => *code == Code::Unavailable,
            ClientError::Address { .. }
            | ClientError::Credentials { .. }
            | ClientError::Tls { .. }
            | ClientError::Protocol(_) => false,
        }
    }
}

impl From<Status> for ClientError {
    fn from(status: Status) -> Self {
        if was_not_accepted(&status) {
            let message = "the server closed the connection and did not accept the request".into();
            return ClientError::Refused { code: Code::Unavailable, message };
        }
        ClientError::Refused { code: status.code(), message: status.message().to_owned() }
    }
}

/// Whether the connection closed before the request was sent, or behind the last request that the server
/// accepted; a stopping server does so. tonic reports CANCELLED or INTERNAL, on which clients do not retry.
fn was_not_accepted(status: &Status) -> bool {
    error_chain::causes(status).any(|error| {
        let sent = error.downcast_ref::<hyper::Error>().is_none_or(|error| !error.is_canceled());
        let taken = error.downcast_ref::<h2::Error>().is_none_or(|error| {
            // RFC 9113, 6.8: the server did not process streams behind the last one that a GOAWAY names.
            !(error.is_go_away() && error.is_remote() && error.reason() == Some(h2::Reason::NO_ERROR))
        });
        !(sent && taken)
    })
}

/// The outputs of a model, and the version that answered.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    /// Model name.
    pub model: String,
    /// Version that answered.
    pub version: String,
    /// The outputs.
    pub outputs: Vec<Tensor>,
}

impl Prediction {
    /// An output by its name.
    pub fn output(&self, name: &str) -> Option<&Tensor> {
        self.outputs.iter().find(|output| output.name == name)
    }
}

/// A connection to a server. Cheap to clone; clones share the connection and may call concurrently.
#[derive(Debug, Clone)]
pub struct Client {
    inner: GrpcInferenceServiceClient<Channel>,
    remote: Arc<Remote>,
}

impl Client {
    /// Connects to `host:port`, `http://host:port`, `https://host:port` or `dnssrv+NAME` without credentials.
    ///
    /// # Errors
    /// As [`Client::connect_with`].
    pub async fn connect(address: &str) -> Result<Client, ClientError> {
        Client::connect_with(address, &Credentials::default()).await
    }

    /// Connects with credentials.
    ///
    /// # Errors
    /// [`ClientError::Address`], [`ClientError::Unreachable`], [`ClientError::Tls`];
    /// [`ClientError::Credentials`] for files that cannot be used.
    pub async fn connect_with(address: &str, credentials: &Credentials) -> Result<Client, ClientError> {
        let remote = Arc::new(Remote::find(address, credentials).await?);
        let inner = GrpcInferenceServiceClient::new(remote.connect().await?)
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX);
        Ok(Client { inner, remote })
    }

    /// A call with the token.
    fn call<T>(&self, message: T) -> Request<T> {
        self.remote.call(message)
    }

    /// Whether the server is running.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn server_live(&mut self) -> Result<bool, ClientError> {
        let request = self.call(pb::ServerLiveRequest {});
        Ok(self.remote.answer(self.inner.server_live(request)).await?.live)
    }

    /// Whether the server accepts requests.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn server_ready(&mut self) -> Result<bool, ClientError> {
        let request = self.call(pb::ServerReadyRequest {});
        Ok(self.remote.answer(self.inner.server_ready(request)).await?.ready)
    }

    /// Whether a model version (the latest when empty) accepts requests.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn model_ready(&mut self, model: &str, version: &str) -> Result<bool, ClientError> {
        let request = pb::ModelReadyRequest { name: model.to_owned(), version: version.to_owned() };
        let request = self.call(request);
        Ok(self.remote.answer(self.inner.model_ready(request)).await?.ready)
    }

    /// Name, version and extensions of the server.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn server_metadata(&mut self) -> Result<pb::ServerMetadataResponse, ClientError> {
        let request = self.call(pb::ServerMetadataRequest {});
        self.remote.answer(self.inner.server_metadata(request)).await
    }

    /// Versions, inputs and outputs of a model.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn model_metadata(
        &mut self,
        model: &str,
        version: &str,
    ) -> Result<pb::ModelMetadataResponse, ClientError> {
        let request = pb::ModelMetadataRequest { name: model.to_owned(), version: version.to_owned() };
        let request = self.call(request);
        self.remote.answer(self.inner.model_metadata(request)).await
    }

    /// The configuration of a model; a Triton extension of the protocol.
    ///
    /// # Errors
    /// [`ClientError::Refused`], with the code Unimplemented from servers without this call.
    pub async fn model_config(&mut self, model: &str, version: &str) -> Result<pb::ModelConfig, ClientError> {
        let request = pb::ModelConfigRequest { name: model.to_owned(), version: version.to_owned() };
        let request = self.call(request);
        let config = self.remote.answer(self.inner.model_config(request)).await?.config;
        config.ok_or_else(|| ClientError::Protocol(InferError::invalid("it has no configuration")))
    }

    /// Every version in the repository and its state; a Triton extension of the protocol.
    ///
    /// # Errors
    /// As [`Client::model_config`].
    pub async fn repository_index(
        &mut self,
    ) -> Result<Vec<pb::repository_index_response::ModelIndex>, ClientError> {
        let request = pb::RepositoryIndexRequest { repository_name: String::new(), ready: false };
        let request = self.call(request);
        Ok(self.remote.answer(self.inner.repository_index(request)).await?.models)
    }

    /// Statistics of all ready versions, each since it was loaded; a Triton extension of the protocol.
    ///
    /// # Errors
    /// As [`Client::model_config`].
    pub async fn statistics(&mut self) -> Result<Vec<pb::ModelStatistics>, ClientError> {
        let request = pb::ModelStatisticsRequest { name: String::new(), version: String::new() };
        let request = self.call(request);
        Ok(self.remote.answer(self.inner.model_statistics(request)).await?.model_stats)
    }

    /// Inputs and outputs of a model, as a bundle's signature.
    ///
    /// # Errors
    /// [`ClientError::Refused`], [`ClientError::Protocol`] for an unknown datatype.
    pub async fn signature(&mut self, model: &str, version: &str) -> Result<Signature, ClientError> {
        let metadata = self.model_metadata(model, version).await?;
        let specs = |tensors: Vec<pb::model_metadata_response::TensorMetadata>| {
            tensors
                .into_iter()
                .map(|tensor| {
                    let datatype = tensor
                        .datatype
                        .parse()
                        .map_err(|error| ClientError::Protocol(InferError::invalid(format!("{error}"))))?;
                    Ok(TensorSpec { name: tensor.name, datatype, shape: tensor.shape })
                })
                .collect::<Result<Vec<_>, ClientError>>()
        };
        Ok(Signature { inputs: specs(metadata.inputs)?, outputs: specs(metadata.outputs)? })
    }

    /// Runs a model, the latest version when `version` is `None`.
    ///
    /// # Errors
    /// [`ClientError::Refused`], [`ClientError::Protocol`].
    pub async fn infer(
        &mut self,
        model: &str,
        version: Option<u64>,
        inputs: Vec<Tensor>,
        form: Form,
    ) -> Result<Prediction, ClientError> {
        let response = self.infer_message(write_request(model, version, inputs, form)).await?;
        let (model, version) = (response.model_name.clone(), response.model_version.clone());
        let outputs = read_outputs(response).map_err(ClientError::Protocol)?;
        Ok(Prediction { model, version, outputs })
    }

    /// Sends a request message and returns the response message.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub async fn infer_message(
        &mut self,
        request: pb::ModelInferRequest,
    ) -> Result<pb::ModelInferResponse, ClientError> {
        Ok(self.inner.model_infer(self.call(request)).await?.into_inner())
    }
}
