//! Tensors that stay where a run left them, in the memory of its device, so that the next run takes them from
//! there: of ONNX Runtime, which frees them when the last one lets go.

use std::sync::OnceLock;

use millrace_bundle::Datatype;
use ort::memory::AllocationDevice;
use ort::value::{DynTensor, DynTensorValueType, DynValue};

use super::onnx::{datatype, extract};
use super::{Tensor, element_count};
use crate::config::Memory;
use crate::error::{InferError, one_line};

/// A tensor of numbers that a run left.
#[derive(Debug)]
pub(crate) struct Resident {
    datatype: Datatype,
    shape: Vec<i64>,
    elements: usize,
    memory: Memory,
    value: DynTensor,
    /// The same for those who look at its elements, once somebody has.
    read: OnceLock<Tensor>,
}

impl Resident {
    /// An output of a run that is in that memory.
    ///
    /// # Errors
    /// For what is no tensor, and for one of texts, which are nowhere but in the processor's memory.
    pub(crate) fn new(value: DynValue, memory: Memory) -> Result<Resident, InferError> {
        let unfit = |error: ort::Error| InferError::internal(format!("an output stays nowhere: {error}"));
        let value = value.downcast::<DynTensorValueType>().map_err(unfit)?;
        let ty = *value.data_type();
        let datatype = datatype(ty)
            .filter(|datatype| datatype.element_bytes().is_some())
            .ok_or_else(|| InferError::internal(format!("an output of {ty} stays nowhere")))?;
        let shape = value.shape().to_vec();
        let elements = element_count("", &shape)?;
        Ok(Resident { datatype, shape, elements, memory, value, read: OnceLock::new() })
    }

    pub(crate) fn datatype(&self) -> Datatype {
        self.datatype
    }

    pub(crate) fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Number of elements.
    pub(crate) fn elements(&self) -> usize {
        self.elements
    }

    /// Bytes of the elements.
    pub(crate) fn bytes(&self) -> usize {
        self.elements.saturating_mul(self.datatype.element_bytes().unwrap_or(0))
    }

    /// Where its elements begin.
    pub(crate) fn address(&self) -> usize {
        self.value.data_ptr().addr()
    }

    /// As runs take it that have their tensors in `memory`; `None` where that is another one.
    pub(crate) fn value(&self, memory: Memory) -> Option<&DynTensor> {
        (self.memory == memory).then_some(&self.value)
    }

    /// The elements in the processor's memory: copied there by the first one who asks.
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
            InferError::internal(format!(
                "what a run left on its device cannot be read: {}",
                one_line(&error)
            ))
        })?;
        Ok(self.read.get_or_init(|| Tensor { name: String::new(), shape, data }))
    }

    /// The same, taken along.
    ///
    /// # Errors
    /// As [`Resident::read`].
    pub(super) fn into_read(self) -> Result<Tensor, InferError> {
        self.read()?;
        self.read.into_inner().ok_or_else(|| InferError::internal("what was read is gone"))
    }
}
