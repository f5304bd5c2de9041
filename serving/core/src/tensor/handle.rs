//! Tensor ownership between runs: tensors owned by one request, tensors shared without copies, and tensors in the
//! memory of a device.

use std::ops::Range;
use std::sync::Arc;

use millrace_bundle::Datatype;
use ort::session::SessionInputValue;

use super::resident::Resident;
use super::{Tensor, onnx};
use crate::config::Memory;
use crate::error::InferError;

/// A tensor, or a reference to a shared one.
#[derive(Debug)]
pub enum TensorHandle {
    /// The only owner.
    Alone(Tensor),
    /// Shared with others.
    Together(Arc<Tensor>),
    /// In the memory where a run left it, under a name; may be shared.
    Resident(String, Arc<Resident>),
}

impl TensorHandle {
    /// The tensor under a name, shared if it has several takers.
    pub fn named(self, name: &str, takers: usize) -> TensorHandle {
        let mut tensor = match self {
            TensorHandle::Alone(tensor) => tensor,
            TensorHandle::Together(tensor) => Arc::unwrap_or_clone(tensor),
            TensorHandle::Resident(_, tensor) => return TensorHandle::Resident(name.to_owned(), tensor),
        };
        name.clone_into(&mut tensor.name);
        if takers > 1 { TensorHandle::Together(Arc::new(tensor)) } else { TensorHandle::Alone(tensor) }
    }

    /// Another reference to the tensor; `None` if it is not shared.
    pub fn share(&self) -> Option<TensorHandle> {
        match self {
            TensorHandle::Alone(_) => None,
            TensorHandle::Together(tensor) => Some(TensorHandle::Together(Arc::clone(tensor))),
            TensorHandle::Resident(name, tensor) => {
                Some(TensorHandle::Resident(name.clone(), Arc::clone(tensor)))
            }
        }
    }

    /// The tensor with its elements in the processor's memory. A tensor on a device is copied once for all its
    /// owners, and the result does not have the name of this reference.
    ///
    /// # Errors
    /// [`InferError::Internal`] when a device fails.
    pub fn read(&self) -> Result<&Tensor, InferError> {
        match self {
            TensorHandle::Alone(tensor) => Ok(tensor),
            TensorHandle::Together(tensor) => Ok(tensor),
            TensorHandle::Resident(_, tensor) => tensor.read(),
        }
    }

    /// The tensor by value; copied only if it is shared or on a device.
    ///
    /// # Errors
    /// [`InferError::Internal`] when a device fails.
    pub fn into_tensor(self) -> Result<Tensor, InferError> {
        match self {
            TensorHandle::Alone(tensor) => Ok(tensor),
            TensorHandle::Together(tensor) => Ok(Arc::unwrap_or_clone(tensor)),
            TensorHandle::Resident(name, tensor) => {
                let tensor = match Arc::try_unwrap(tensor) {
                    Ok(tensor) => tensor.into_read()?,
                    Err(tensor) => tensor.read()?.clone(),
                };
                Ok(Tensor { name, ..tensor })
            }
        }
    }

    /// A view for what needs no elements, and for runs.
    pub fn view(&self) -> View<'_> {
        match self {
            TensorHandle::Alone(tensor) => View::Here(tensor),
            TensorHandle::Together(tensor) => View::Here(tensor),
            TensorHandle::Resident(name, tensor) => View::There(name, tensor),
        }
    }
}

/// A borrowed tensor in any memory.
#[derive(Debug, Clone, Copy)]
pub enum View<'a> {
    /// In the processor's memory.
    Here(&'a Tensor),
    /// In the memory where a run left it, under a name.
    There(&'a str, &'a Resident),
}

impl<'a> View<'a> {
    /// Name of the tensor.
    pub fn name(self) -> &'a str {
        match self {
            View::Here(tensor) => &tensor.name,
            View::There(name, _) => name,
        }
    }

    /// Type of the elements.
    pub fn datatype(self) -> Datatype {
        match self {
            View::Here(tensor) => tensor.data.datatype(),
            View::There(_, tensor) => tensor.datatype(),
        }
    }

    /// Extents of all dimensions.
    pub fn shape(self) -> &'a [i64] {
        match self {
            View::Here(tensor) => &tensor.shape,
            View::There(_, tensor) => tensor.shape(),
        }
    }

    /// Number of elements.
    pub fn elements(self) -> usize {
        match self {
            View::Here(tensor) => tensor.data.len(),
            View::There(_, tensor) => tensor.elements(),
        }
    }

    /// Bytes of the elements in raw form.
    pub fn bytes(self) -> usize {
        match self {
            View::Here(tensor) => tensor.data.raw_len(),
            View::There(_, tensor) => tensor.bytes(),
        }
    }

    /// The input for runs that have their tensors in `memory`: without a copy, unless it is in another device's
    /// memory.
    ///
    /// # Errors
    /// [`InferError::Invalid`] for strings that ONNX Runtime cannot represent; [`InferError::Internal`] when a device
    /// fails.
    pub fn value(self, memory: Memory) -> Result<SessionInputValue<'a>, InferError> {
        self.value_or(memory, onnx::value)
    }

    /// Like [`View::value`] for a binding, but copies what is in the processor's memory. If the graph needs a
    /// borrowed value there, ort would copy it itself, and block forever in doing so.
    ///
    /// # Errors
    /// As [`View::value`].
    pub fn value_to_bind(self, memory: Memory) -> Result<SessionInputValue<'a>, InferError> {
        self.value_or(memory, onnx::copy)
    }

    fn value_or(
        self,
        memory: Memory,
        here: fn(&'a Tensor) -> Result<SessionInputValue<'a>, InferError>,
    ) -> Result<SessionInputValue<'a>, InferError> {
        match self {
            View::Here(tensor) => here(tensor),
            View::There(_, tensor) => match tensor.value(memory) {
                Some(value) => Ok(value.into()),
                None => here(tensor.read()?),
            },
        }
    }

    /// The address range of the elements, if they are in the processor's memory and not owned by ONNX Runtime.
    pub fn lent(self) -> Option<Range<usize>> {
        match self {
            View::Here(tensor) => Some(tensor.data.range()),
            // An output with the same value keeps it alive as well.
            View::There(..) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(values: &[f32]) -> Tensor {
        Tensor::fp32("x", vec![values.len() as i64], values.to_vec()).unwrap()
    }

    fn place(held: &TensorHandle) -> usize {
        held.read().unwrap().data.range().start
    }

    #[test]
    fn shared_elements_are_not_copied() {
        for takers in 0..4 {
            let alone = TensorHandle::Alone(tensor(&[1.0, 2.0, 3.0]));
            let at = place(&alone);
            let held = alone.named("y", takers);
            assert_eq!(held.share().is_some(), takers > 1);
            if let Some(other) = held.share() {
                assert_eq!(place(&other), at);
            }
            // The last owner takes the elements without a copy.
            let own = held.into_tensor().unwrap();
            assert_eq!(own.name, "y");
            assert_eq!(place(&TensorHandle::Alone(own)), at);
        }
    }

    #[test]
    fn taking_a_shared_tensor_copies_it() {
        let held = TensorHandle::Alone(tensor(&[1.0])).named("x", 2);
        let other = held.share().unwrap();
        let own = held.into_tensor().unwrap();
        assert_eq!(own, *other.read().unwrap());
        assert_ne!(place(&TensorHandle::Alone(own)), place(&other));
    }
}
