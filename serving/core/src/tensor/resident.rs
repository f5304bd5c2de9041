//! Resident tensors: outputs that stay in the memory where a run left them, so that the next run uses them there.
//! ONNX Runtime owns them and frees them with the last reference.

use std::sync::OnceLock;

use millrace_bundle::Datatype;
use ort::memory::AllocationDevice;
use ort::value::{DynTensor, DynTensorValueType, DynValue};

use super::onnx::{datatype, extract};
use super::{Tensor, element_count};
use crate::config::Memory;
use crate::error::{InferError, one_line};

/// A numeric tensor that a run left in its memory.
#[derive(Debug)]
pub struct Resident {
    datatype: Datatype,
    shape: Vec<i64>,
    elements: usize,
    memory: Memory,
    value: DynTensor,
    /// Copy in the processor's memory, made when the elements are first read.
    read: OnceLock<Tensor>,
}

impl Resident {
    /// Wraps an output of a run that is in `memory`.
    ///
    /// # Errors
    /// For a value that is not a tensor, and for strings, which are only ever in the processor's memory.
    pub fn new(value: DynValue, memory: Memory) -> Result<Resident, InferError> {
        let unfit =
            |error: ort::Error| InferError::internal(format!("cannot find the device of an output: {error}"));
        let value = value.downcast::<DynTensorValueType>().map_err(unfit)?;
        let ty = *value.data_type();
        let datatype = datatype(ty)
            .filter(|datatype| datatype.element_bytes().is_some())
            .ok_or_else(|| InferError::internal(format!("an output of type {ty} has no device memory")))?;
        let shape = value.shape().to_vec();
        let elements = element_count("", &shape)?;
        Ok(Resident { datatype, shape, elements, memory, value, read: OnceLock::new() })
    }

    /// Type of the elements.
    pub fn datatype(&self) -> Datatype {
        self.datatype
    }

    /// Extents of all dimensions.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.elements.saturating_mul(self.datatype.element_bytes().unwrap_or(0))
    }

    /// Address of the first element.
    pub fn address(&self) -> usize {
        self.value.data_ptr().addr()
    }

    /// The value for runs that have their tensors in `memory`; `None` if it is in another memory.
    pub fn value(&self, memory: Memory) -> Option<&DynTensor> {
        (self.memory == memory).then_some(&self.value)
    }

    /// The elements in the processor's memory, copied there on the first call.
    ///
    /// # Errors
    /// [`InferError::Internal`] when the device fails.
    pub(super) fn read(&self) -> Result<&Tensor, InferError> {
        if let Some(tensor) = self.read.get() {
            return Ok(tensor);
        }
        let copied = match self.memory {
            Memory::Host => extract(&self.value, self.datatype),
            Memory::Gpu(_) => {
                self.value.to(AllocationDevice::CPU, 0).and_then(|value| extract(&value, self.datatype))
            }
        };
        let (shape, data) = copied.map_err(|error| {
            InferError::internal(format!("cannot read an output from its device: {}", one_line(&error)))
        })?;
        Ok(self.read.get_or_init(|| Tensor { name: String::new(), shape, data }))
    }

    /// The elements in the processor's memory, by value.
    ///
    /// # Errors
    /// As [`Resident::read`].
    pub(super) fn into_read(self) -> Result<Tensor, InferError> {
        self.read()?;
        self.read.into_inner().ok_or_else(|| InferError::internal("the output was already taken"))
    }
}
