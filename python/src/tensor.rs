//! DLPack: the memory of an array as a tensor of another library, without a copy.
//!
//! The structures are those of <https://github.com/dmlc/dlpack>, `include/dlpack/dlpack.h`, without a version, which
//! all libraries read.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_void};
use std::ptr;

use pyo3::ffi;
use pyo3::prelude::*;

use crate::columns::Values;

/// The device type of the processor's memory.
pub(crate) const CPU: i32 = 1;

/// Names of a capsule before and after its consumer has taken the tensor.
const NAME: &CStr = c"dltensor";

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: i32,
    device_id: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// A tensor with what its pointers lead to.
struct Owned {
    managed: ManagedTensor,
    shape: Vec<i64>,
    _values: Py<Values>,
}

/// A capsule of the tensor over the memory of `values`.
pub(crate) fn capsule(values: Bound<'_, Values>) -> PyResult<Bound<'_, PyAny>> {
    let py = values.py();
    let found = values.get();
    let code = match found.element.kind {
        'i' => 0,
        // Flags are bytes: older libraries have no flags in DLPack.
        'u' | 'b' => 1,
        'f' => 2,
        _ => {
            let message = format!("DLPack has no type for {}", found.element.kind);
            return Err(pyo3::exceptions::PyBufferError::new_err(message));
        }
    };
    let (device, device_id) = found.device();
    let mut owned = Box::new(Owned {
        managed: ManagedTensor {
            tensor: Tensor {
                data: found.address() as *mut c_void,
                device,
                device_id,
                dimensions: found.shape.len() as i32,
                code,
                bits: (found.element.bytes * 8) as u8,
                lanes: 1,
                shape: ptr::null_mut(),
                // None: row-major and compact.
                strides: ptr::null_mut(),
                byte_offset: 0,
            },
            context: ptr::null_mut(),
            deleter: Some(delete),
        },
        shape: found.shape.iter().map(|size| *size as i64).collect(),
        _values: values.unbind(),
    });
    owned.managed.tensor.shape = owned.shape.as_mut_ptr();
    let owned = Box::into_raw(owned);
    // SAFETY: `owned` is a valid box, to which nothing else points.
    let managed = unsafe {
        (*owned).managed.context = owned.cast();
        &raw mut (*owned).managed
    };
    // SAFETY: the pointer is not null, the name lives for ever, and the interpreter is attached.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(destroy)) };
    // SAFETY: a new reference, or null with an exception set.
    let made = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if made.is_err() {
        // SAFETY: no capsule has taken the tensor.
        unsafe { delete(managed) };
    }
    made
}

/// Called by the consumer of a tensor, on any thread.
unsafe extern "C" fn delete(tensor: *mut ManagedTensor) {
    // SAFETY: the context is the box that `capsule` made, and each tensor is deleted once.
    let owned = unsafe { Box::from_raw((*tensor).context.cast::<Owned>()) };
    // At the end of the interpreter there is nothing left to free, and the reference is left as it is.
    let mut owned = Some(owned);
    Python::try_attach(|_| drop(owned.take()));
    std::mem::forget(owned);
}

/// Deletes a tensor that no consumer has taken: a consumer renames the capsule.
unsafe extern "C" fn destroy(capsule: *mut ffi::PyObject) {
    // SAFETY: the interpreter calls this with the capsule that `capsule` made, whose pointer is that of the tensor as
    // long as it has this name.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
