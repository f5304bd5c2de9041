//! The gRPC transport: the calls of the Open Inference Protocol and Triton's additions. This module alone
//! maps errors to gRPC statuses.

mod control;
mod deadline;
mod front;
mod guard;
mod messages;
mod shared_memory;
mod stream;
mod unary;

pub(crate) use front::Front;
pub(crate) use guard::AuthLayer;
pub(crate) use messages::DecodeLayer;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use tonic::codec::CompressionEncoding::{Deflate, Gzip};
use tonic::{Request, Response, Status, Streaming};

use crate::access::{self, AccessLogLayer};
use crate::bodies::Bodies;
use crate::connections::peer;
use crate::control::{Controls, SERVER_NAME, extensions};
use crate::output_target::{Output, OutputTarget, deliver, read_output_targets, write_regions};
use crate::shared_memory::{Inputs, SharedMemory, cuda_refused};
use crate::tokens::{Caller, Guard};
use millrace_serving_core::blocking::{COPIED_BYTES, READ_BYTES, in_place};
use millrace_serving_core::config::Limits;
use millrace_serving_core::error::InferError;
use millrace_serving_core::parameters::{ParameterOwner, Parameters, Schedule, check_request, peek_step};
use millrace_serving_core::tensor::TENSORS_MAX;
use millrace_serving_core::wire::inference as pb;
use millrace_serving_core::wire::inference::grpc_inference_service_server::{
    GrpcInferenceService, GrpcInferenceServiceServer,
};
use millrace_serving_core::wire::{Form, read_inputs, write_response};
use millrace_serving_repository::infer::{self, AdmittedRequest, Inference};
use millrace_serving_repository::model::Model;
use millrace_serving_repository::repository::VersionSelector;
use millrace_serving_repository::sequence::SequencePosition;

/// The service for a tonic server. A message above the limit is refused while it is read.
pub(crate) fn service(
    inference: Inference,
    controls: Controls,
    memory: SharedMemory,
    guard: Guard,
    limits: &Limits,
    bodies: Bodies,
) -> AccessLogLayer<AuthLayer<DecodeLayer<unary::Unary>>> {
    let service =
        Arc::new(Service { inference, controls, memory, guard: guard.clone(), bodies: bodies.clone() });
    let others = GrpcInferenceServiceServer::from_arc(Arc::clone(&service))
        .max_decoding_message_size(limits.message_bytes_max)
        .max_encoding_message_size(usize::MAX)
        .accept_compressed(Gzip)
        .accept_compressed(Deflate)
        .send_compressed(Gzip)
        .send_compressed(Deflate);
    AccessLogLayer::new(AuthLayer::new(
        DecodeLayer::new(unary::Unary::new(service, others), *limits, bodies),
        guard,
    ))
}

/// The handlers of the calls. Cheap to clone; all clones share one state.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    inference: Inference,
    controls: Controls,
    memory: SharedMemory,
    guard: Guard,
    bodies: Bodies,
}

impl Service {
    fn caller<T>(&self, request: &Request<T>) -> Caller {
        self.guard.caller(request.extensions())
    }

    fn find(&self, name: &str, version: &str) -> Result<Arc<Model>, InferError> {
        self.inference.find_selected(name, VersionSelector::parse(version)?)
    }

    /// Admits a request of a call or a stream, and finds the version that answers it. Requests of a sequence
    /// run in the order in which they were admitted.
    fn admit(&self, caller: &Caller, request: &pb::ModelInferRequest) -> Result<AdmittedCall, InferError> {
        let entered = self.inference.enter()?;
        caller.may_use(&request.model_name)?;
        let asked = VersionSelector::parse(&request.model_version)?;
        let step = peek_step(&request.parameters);
        let (model, place) = self.inference.admit(&request.model_name, asked, &request.id, step)?;
        Ok(AdmittedCall { model, place, entered })
    }

    /// Answers a call.
    async fn answer(
        &self,
        client: Option<SocketAddr>,
        request: Request<pb::ModelInferRequest>,
    ) -> Result<Response<pb::ModelInferResponse>, Status> {
        let origin = CallOrigin { client, deadline: deadline::read(&request) };
        let caller = self.caller(&request);
        let request = request.into_inner();
        let admitted = self.admit(&caller, &request)?;
        let (message, model) = self.infer(admitted, origin, request).await?;
        let mut reply = Response::new(message);
        access::record_model(reply.extensions_mut(), model.name(), model.version());
        Ok(reply)
    }

    /// Answers a request; also returns the version that answered.
    async fn infer(
        &self,
        admitted: AdmittedCall,
        origin: CallOrigin,
        mut request: pb::ModelInferRequest,
    ) -> Result<(pb::ModelInferResponse, Arc<Model>), InferError> {
        let AdmittedCall { model, place, entered: _entered } = admitted;
        let id = std::mem::take(&mut request.id);
        let decode = self.decode(request, origin);
        let encode = |response: infer::Response, reply: Reply| {
            in_place(response.bytes() >= COPIED_BYTES, || {
                let outputs = deliver(model.signature(), response.outputs, reply.deliveries)?;
                write_regions(&outputs)?;
                let outputs = outputs.into_iter().map(Output::into_message).collect();
                Ok(write_response(response.model, response.version, id, outputs, reply.form))
            })
        };
        let message = self.inference.answer_in(place, &model, decode, encode).await?;
        Ok((message, model))
    }

    /// Decodes the tensors of a message; large ones wait for a turn on the decoding threads.
    async fn decode(
        &self,
        request: pb::ModelInferRequest,
        origin: CallOrigin,
    ) -> Result<(infer::Request, Reply), InferError> {
        let DecodeCosts { read, copied, placed } = DecodeCosts::of(&request);
        if read < READ_BYTES && copied.saturating_add(placed) < COPIED_BYTES {
            return decode(request, origin, &self.memory);
        }
        let (mut in_body, memory) = (self.bodies.begin(), self.memory.clone());
        in_body.grow(read.saturating_add(copied))?;
        let work = move || {
            let _in_body = in_body;
            decode(request, origin, &memory)
        };
        self.bodies.read_limit().run(true, work).await?
    }
}

#[tonic::async_trait]
impl GrpcInferenceService for Service {
    async fn server_live(
        &self,
        _: Request<pb::ServerLiveRequest>,
    ) -> Result<Response<pb::ServerLiveResponse>, Status> {
        Ok(Response::new(pb::ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _: Request<pb::ServerReadyRequest>,
    ) -> Result<Response<pb::ServerReadyResponse>, Status> {
        Ok(Response::new(pb::ServerReadyResponse { ready: self.inference.is_ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<pb::ModelReadyRequest>,
    ) -> Result<Response<pb::ModelReadyResponse>, Status> {
        let caller = self.caller(&request);
        let request = request.into_inner();
        caller.may_use(&request.name)?;
        let asked = VersionSelector::parse(&request.version)?;
        let repository = self.inference.repository();
        let found =
            repository.find(&request.name, asked).and_then(|model| repository.check_steps(&model)).is_ok();
        Ok(Response::new(pb::ModelReadyResponse { ready: found && !self.inference.is_draining() }))
    }

    async fn server_metadata(
        &self,
        _: Request<pb::ServerMetadataRequest>,
    ) -> Result<Response<pb::ServerMetadataResponse>, Status> {
        Ok(Response::new(pb::ServerMetadataResponse {
            name: SERVER_NAME.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            extensions: extensions(&self.controls, &self.memory).into_iter().map(str::to_owned).collect(),
        }))
    }

    async fn model_metadata(
        &self,
        request: Request<pb::ModelMetadataRequest>,
    ) -> Result<Response<pb::ModelMetadataResponse>, Status> {
        let caller = self.caller(&request);
        let request = request.into_inner();
        caller.may_use(&request.name)?;
        let model = self.find(&request.name, &request.version)?;
        let versions = self.inference.repository().versions(model.name()).unwrap_or_default();
        let tensors = |specs: &[millrace_bundle::TensorSpec]| {
            specs
                .iter()
                .map(|spec| pb::model_metadata_response::TensorMetadata {
                    name: spec.name.clone(),
                    datatype: spec.datatype.as_str().to_owned(),
                    shape: spec.shape.clone(),
                })
                .collect()
        };
        Ok(Response::new(pb::ModelMetadataResponse {
            name: model.name().to_owned(),
            versions: versions.iter().map(u64::to_string).collect(),
            platform: model.platform().to_owned(),
            inputs: tensors(&model.signature().inputs),
            outputs: tensors(&model.signature().outputs),
        }))
    }

    async fn model_infer(
        &self,
        request: Request<pb::ModelInferRequest>,
    ) -> Result<Response<pb::ModelInferResponse>, Status> {
        self.answer(peer(request.extensions()), request).await
    }

    type ModelStreamInferStream = stream::Answers;

    async fn model_stream_infer(
        &self,
        request: Request<Streaming<pb::ModelInferRequest>>,
    ) -> Result<Response<stream::Answers>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(stream::answers(self.clone(), caller, request)))
    }

    async fn system_shared_memory_status(
        &self,
        request: Request<pb::SystemSharedMemoryStatusRequest>,
    ) -> Result<Response<pb::SystemSharedMemoryStatusResponse>, Status> {
        self.caller(&request).may_control_all()?;
        Ok(Response::new(shared_memory::status(&self.memory, &request.into_inner())?))
    }

    async fn system_shared_memory_register(
        &self,
        request: Request<pb::SystemSharedMemoryRegisterRequest>,
    ) -> Result<Response<pb::SystemSharedMemoryRegisterResponse>, Status> {
        self.caller(&request).may_control_all()?;
        Ok(Response::new(shared_memory::register(&self.memory, &request.into_inner())?))
    }

    async fn system_shared_memory_unregister(
        &self,
        request: Request<pb::SystemSharedMemoryUnregisterRequest>,
    ) -> Result<Response<pb::SystemSharedMemoryUnregisterResponse>, Status> {
        self.caller(&request).may_control_all()?;
        Ok(Response::new(shared_memory::unregister(&self.memory, &request.into_inner())?))
    }

    async fn cuda_shared_memory_status(
        &self,
        request: Request<pb::CudaSharedMemoryStatusRequest>,
    ) -> Result<Response<pb::CudaSharedMemoryStatusResponse>, Status> {
        Ok(Response::new(shared_memory::cuda_status(&request.into_inner())?))
    }

    async fn cuda_shared_memory_register(
        &self,
        request: Request<pb::CudaSharedMemoryRegisterRequest>,
    ) -> Result<Response<pb::CudaSharedMemoryRegisterResponse>, Status> {
        Err(cuda_refused(&request.into_inner().name).into())
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _: Request<pb::CudaSharedMemoryUnregisterRequest>,
    ) -> Result<Response<pb::CudaSharedMemoryUnregisterResponse>, Status> {
        // Always succeeds: clients unregister before they register, and CUDA regions never exist.
        Ok(Response::new(pb::CudaSharedMemoryUnregisterResponse {}))
    }

    async fn model_config(
        &self,
        request: Request<pb::ModelConfigRequest>,
    ) -> Result<Response<pb::ModelConfigResponse>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(control::model_config(&self.controls, &caller, &request.into_inner())?))
    }

    async fn model_statistics(
        &self,
        request: Request<pb::ModelStatisticsRequest>,
    ) -> Result<Response<pb::ModelStatisticsResponse>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(control::model_statistics(&self.controls, &caller, &request.into_inner())?))
    }

    async fn repository_index(
        &self,
        request: Request<pb::RepositoryIndexRequest>,
    ) -> Result<Response<pb::RepositoryIndexResponse>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(control::repository_index(&self.controls, &caller, &request.into_inner()).await?))
    }

    async fn repository_model_load(
        &self,
        request: Request<pb::RepositoryModelLoadRequest>,
    ) -> Result<Response<pb::RepositoryModelLoadResponse>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(
            control::repository_model_load(&self.controls, &caller, request.into_inner()).await?,
        ))
    }

    async fn repository_model_unload(
        &self,
        request: Request<pb::RepositoryModelUnloadRequest>,
    ) -> Result<Response<pb::RepositoryModelUnloadResponse>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(
            control::repository_model_unload(&self.controls, &caller, request.into_inner()).await?,
        ))
    }

    async fn trace_setting(
        &self,
        request: Request<pb::TraceSettingRequest>,
    ) -> Result<Response<pb::TraceSettingResponse>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(control::trace_setting(&self.controls, &caller, &request.into_inner())?))
    }

    async fn log_settings(
        &self,
        request: Request<pb::LogSettingsRequest>,
    ) -> Result<Response<pb::LogSettingsResponse>, Status> {
        let caller = self.caller(&request);
        Ok(Response::new(control::log_settings(&self.controls, &caller, request.into_inner())?))
    }
}

/// An admitted request.
struct AdmittedCall {
    model: Arc<Model>,
    place: Option<Box<SequencePosition>>,
    entered: AdmittedRequest,
}

/// Client and deadline of a request.
#[derive(Debug, Clone)]
struct CallOrigin {
    client: Option<SocketAddr>,
    /// An error is reported only after admission, so that a stopping server answers with UNAVAILABLE first.
    deadline: Result<Option<Instant>, InferError>,
}

/// The part of a request that its response needs, besides the outputs.
struct Reply {
    form: Form,
    deliveries: Vec<OutputTarget>,
}

/// Amounts of work to decode the tensors of a request.
struct DecodeCosts {
    /// Approximate bytes that are decoded element by element.
    read: usize,
    /// Bytes of raw contents that are copied.
    copied: usize,
    /// Bytes that the request declares to lie in shared memory.
    placed: usize,
}

impl DecodeCosts {
    fn of(request: &pb::ModelInferRequest) -> DecodeCosts {
        let (mut elements, mut placed, mut has_strings) = (0, 0_usize, false);
        for input in &request.inputs {
            has_strings |= input.datatype == "BYTES";
            if let Some(typed) = &input.contents {
                elements += typed.bool_contents.len()
                    + typed.int_contents.len()
                    + typed.int64_contents.len()
                    + typed.uint_contents.len()
                    + typed.uint64_contents.len()
                    + typed.fp32_contents.len()
                    + typed.fp64_contents.len()
                    + typed.bytes_contents.len();
            }
            if !input.parameters.is_empty() {
                let size =
                    input.parameters.count(&ParameterOwner("input", &input.name), "shared_memory_byte_size");
                // Reading the inputs refuses an invalid size.
                let size = size.ok().flatten().unwrap_or(0);
                placed = placed.saturating_add(usize::try_from(size).unwrap_or(usize::MAX));
            }
        }
        let read = elements.saturating_mul(8);
        let copied = request.raw_input_contents.iter().map(Bytes::len).sum::<usize>();
        // Byte strings are decoded one at a time.
        if has_strings {
            DecodeCosts { read: read.saturating_add(copied), copied: 0, placed }
        } else {
            DecodeCosts { read, copied, placed }
        }
    }
}

fn decode(
    mut request: pb::ModelInferRequest,
    origin: CallOrigin,
    memory: &SharedMemory,
) -> Result<(infer::Request, Reply), InferError> {
    let Schedule { priority, timeout } = check_request(&request.parameters)?;
    let deadline = origin.deadline?;
    if request.outputs.len() > TENSORS_MAX {
        return Err(InferError::invalid(format!(
            "{} outputs, the limit is {TENSORS_MAX}",
            request.outputs.len()
        )));
    }
    let wanted = request.outputs.iter().map(|output| (output.name.as_str(), &output.parameters));
    let deliveries = read_output_targets(wanted, memory)?;
    let mut regions = Inputs::of(memory);
    let (inputs, form) = read_inputs(&mut request, |input| regions.read(&input.name, &input.parameters))?;
    let outputs = request.outputs.into_iter().map(|output| output.name).collect();
    let client = origin.client;
    let request =
        infer::Request { inputs, outputs, priority, timeout, deadline, client, ..Default::default() };
    Ok((request, Reply { form, deliveries }))
}
