//! The gRPC calls that register, list and unregister shared memory regions.

use crate::shared_memory::{self, SharedMemory};
use millrace_serving_core::error::InferError;
use millrace_serving_core::wire::inference as pb;

pub(super) fn status(
    memory: &SharedMemory,
    request: &pb::SystemSharedMemoryStatusRequest,
) -> Result<pb::SystemSharedMemoryStatusResponse, InferError> {
    let regions = memory.status(&request.name)?.into_iter().map(|region| {
        let status = pb::system_shared_memory_status_response::RegionStatus {
            name: region.name.clone(),
            key: region.key,
            offset: region.offset,
            byte_size: region.byte_size,
        };
        (region.name, status)
    });
    Ok(pb::SystemSharedMemoryStatusResponse { regions: regions.collect() })
}

pub(super) fn register(
    memory: &SharedMemory,
    request: &pb::SystemSharedMemoryRegisterRequest,
) -> Result<pb::SystemSharedMemoryRegisterResponse, InferError> {
    memory.register(&request.name, &request.key, request.offset, request.byte_size)?;
    Ok(pb::SystemSharedMemoryRegisterResponse {})
}

pub(super) fn unregister(
    memory: &SharedMemory,
    request: &pb::SystemSharedMemoryUnregisterRequest,
) -> Result<pb::SystemSharedMemoryUnregisterResponse, InferError> {
    memory.unregister(&request.name)?;
    Ok(pb::SystemSharedMemoryUnregisterResponse {})
}

pub(super) fn cuda_status(
    request: &pb::CudaSharedMemoryStatusRequest,
) -> Result<pb::CudaSharedMemoryStatusResponse, InferError> {
    shared_memory::cuda_status(&request.name)?;
    Ok(pb::CudaSharedMemoryStatusResponse::default())
}
