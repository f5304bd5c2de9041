//! Compute devices: their names, and loading a graph onto one.
#![allow(unsafe_code)]

use std::sync::Arc;

use burn_flex::{Flex, FlexDevice};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::EngineError;
use super::run::{Compute, Interpreter};
use crate::graph::Graph;

/// A compute device: `cpu`, `cuda` (the first GPU) or `cuda:N`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// The processor, with as many threads as the process may use.
    #[default]
    Cpu,
    /// An NVIDIA GPU by ordinal; needs a build with the `cuda` feature and a driver.
    Cuda(usize),
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// A device name that is not one of `cpu`, `cuda` and `cuda:N`.
#[derive(Debug, Error, Clone, PartialEq, Eq)]
#[error("device {0:?} is not cpu, cuda or cuda:N")]
pub struct UnknownDevice(String);

impl std::str::FromStr for Device {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Device, UnknownDevice> {
        match text {
            "cpu" => Ok(Device::Cpu),
            "cuda" => Ok(Device::Cuda(0)),
            _ => text
                .strip_prefix("cuda:")
                .and_then(|ordinal| ordinal.parse().ok())
                .map(Device::Cuda)
                .ok_or_else(|| UnknownDevice(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Device {
    type Error = UnknownDevice;

    fn try_from(text: String) -> Result<Device, UnknownDevice> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> String {
        device.to_string()
    }
}

/// Loads a graph onto a device; the caller sets the weights afterwards.
pub(super) fn open(device: Device, graph: &Graph) -> Result<Box<dyn Compute>, EngineError> {
    let graph = Arc::new(graph.clone());
    match device {
        Device::Cpu => Ok(Box::new(Interpreter::<Flex, f32>::new(graph, FlexDevice, device))),
        Device::Cuda(ordinal) => cuda::open(ordinal, device, graph),
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use super::{Arc, Compute, Device, EngineError, Graph};

    pub(super) fn open(
        _ordinal: usize,
        device: Device,
        _graph: Arc<Graph>,
    ) -> Result<Box<dyn Compute>, EngineError> {
        Err(EngineError::Device {
            device,
            reason: "this build has no CUDA (build with --features cuda, or use device = \"cpu\")".to_owned(),
        })
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use burn_cuda::{Cuda, CudaDevice};

    use super::super::kernels::Kernels;
    use super::super::tensor::{download, upload};
    use super::{Arc, Compute, Device, EngineError, Graph, Interpreter};

    impl Kernels for Cuda {}

    pub(super) fn open(
        ordinal: usize,
        device: Device,
        graph: Arc<Graph>,
    ) -> Result<Box<dyn Compute>, EngineError> {
        let refuse = |reason: String| EngineError::Device { device, reason };
        if !driver_present() {
            return Err(refuse(
                "the NVIDIA driver (libcuda.so.1) is not installed here (use device = \"cpu\")".to_owned(),
            ));
        }
        // The backend panics if the driver fails; the first transfer reveals that.
        let opened = catch_unwind(AssertUnwindSafe(|| {
            let card = CudaDevice::new(ordinal);
            let probe = upload::<Cuda, f32>(vec![1.0], &[1], &card);
            let mut back = Vec::new();
            download::<Cuda, f32>(probe, &mut back)?;
            Ok(Interpreter::<Cuda, f32>::new(graph, card, device))
        }));
        match opened {
            Ok(Ok(interpreter)) => Ok(Box::new(interpreter)),
            Ok(Err(reason)) => Err(refuse(reason)),
            Err(panic) => {
                let reason = panic
                    .downcast_ref::<String>()
                    .cloned()
                    .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
                    .unwrap_or_else(|| "the driver refused it".to_owned());
                Err(refuse(reason))
            }
        }
    }

    fn driver_present() -> bool {
        // SAFETY: the name is a NUL-terminated literal; loading the driver library runs only its own
        // initializers, and the backend loads the same library right after. The handle is never
        // closed, so nothing that was loaded can go away.
        unsafe { !libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY).is_null() }
    }
}
