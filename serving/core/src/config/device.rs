//! Devices for models: the processor, or one or several GPUs.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The device of one session. Only [`Config::allow_fallback`](super::Config::allow_fallback) lets the server
/// replace it by another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// A CUDA device by its ordinal.
    Cuda(u8),
    /// A CUDA device through TensorRT, which compiles the graph; CUDA runs the nodes that TensorRT cannot
    /// compile.
    TensorRt(u8),
}

impl Device {
    /// The memory that holds the tensors of its runs.
    pub fn memory(self) -> Memory {
        match self {
            Device::Cpu => Memory::Host,
            Device::Cuda(ordinal) | Device::TensorRt(ordinal) => Memory::Gpu(ordinal),
        }
    }
}

/// The memory that holds the tensors of runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// Main memory.
    Host,
    /// The memory of a GPU, by its ordinal.
    Gpu(u8),
}

impl Memory {
    /// ONNX Runtime's name of the arena in which sessions keep GPU memory between runs; `None` for main
    /// memory.
    pub fn arena(self) -> Option<String> {
        match self {
            Memory::Host => None,
            Memory::Gpu(ordinal) => Some(format!("gpu:{ordinal}")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Devices::from(*self).fmt(f)
    }
}

/// The execution provider for GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// NVIDIA CUDA.
    Cuda,
    /// TensorRT, beside CUDA for what it cannot compile.
    TensorRt,
}

impl Engine {
    const ALL: [Engine; 2] = [Engine::Cuda, Engine::TensorRt];

    /// Its name in configurations.
    pub fn name(self) -> &'static str {
        match self {
            Engine::Cuda => "cuda",
            Engine::TensorRt => "tensorrt",
        }
    }

    fn on(self, ordinal: u8) -> Device {
        match self {
            Engine::Cuda => Device::Cuda(ordinal),
            Engine::TensorRt => Device::TensorRt(ordinal),
        }
    }
}

/// The devices of a model: the processor, or GPUs with the same number of sessions each. Written `cpu`,
/// `cuda`, `cuda:1` or `cuda:0,1`, or with `tensorrt` in place of `cuda`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devices(DeviceList);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
enum DeviceList {
    #[default]
    Cpu,
    /// GPU ordinals, at least one.
    Gpus(Engine, BTreeSet<u8>),
}

impl Devices {
    /// The processor.
    pub const CPU: Devices = Devices(DeviceList::Cpu);

    /// GPUs by their ordinals; `None` if there are no ordinals.
    pub fn gpus(engine: Engine, ordinals: impl IntoIterator<Item = u8>) -> Option<Devices> {
        let gpus: BTreeSet<u8> = ordinals.into_iter().collect();
        (!gpus.is_empty()).then_some(Devices(DeviceList::Gpus(engine, gpus)))
    }

    /// All devices, in ascending order; at least one.
    pub fn each(&self) -> Vec<Device> {
        match &self.0 {
            DeviceList::Cpu => vec![Device::Cpu],
            DeviceList::Gpus(engine, gpus) => gpus.iter().map(|ordinal| engine.on(*ordinal)).collect(),
        }
    }

    /// Whether it is the processor.
    pub fn is_cpu(&self) -> bool {
        self.0 == DeviceList::Cpu
    }

    /// The memory that all of them share; `None` for several GPUs.
    pub fn memory(&self) -> Option<Memory> {
        match &self.0 {
            DeviceList::Cpu => Some(Memory::Host),
            DeviceList::Gpus(_, gpus) if gpus.len() == 1 => gpus.first().copied().map(Memory::Gpu),
            DeviceList::Gpus(..) => None,
        }
    }

    /// The execution provider; `None` for the processor.
    pub fn engine(&self) -> Option<Engine> {
        match &self.0 {
            DeviceList::Cpu => None,
            DeviceList::Gpus(engine, _) => Some(*engine),
        }
    }
}

impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        Devices(match device {
            Device::Cpu => DeviceList::Cpu,
            Device::Cuda(ordinal) => DeviceList::Gpus(Engine::Cuda, BTreeSet::from([ordinal])),
            Device::TensorRt(ordinal) => DeviceList::Gpus(Engine::TensorRt, BTreeSet::from([ordinal])),
        })
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DeviceList::Gpus(engine, gpus) = &self.0 else { return f.write_str("cpu") };
        f.write_str(engine.name())?;
        if gpus.iter().eq(&[0]) {
            return Ok(());
        }
        let mut separators = std::iter::once(':').chain(std::iter::repeat(','));
        gpus.iter()
            .zip(&mut separators)
            .try_for_each(|(ordinal, separator)| write!(f, "{separator}{ordinal}"))
    }
}

/// Error: a text that names no device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a device: use cpu, cuda, cuda:N, or cuda:N,M for several, each once and up to 255, or tensorrt in the \
     place of cuda"
)]
pub struct UnknownDevice(String);

impl FromStr for Devices {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let gpus = |name: &str, ordinals: &str| {
            let engine = Engine::ALL.into_iter().find(|engine| engine.name() == name)?;
            let parsed = ordinals.split(',').map(|it| it.parse::<u8>().ok()).collect::<Option<Vec<_>>>()?;
            let devices = Devices::gpus(engine, parsed.iter().copied())?;
            (devices.each().len() == parsed.len()).then_some(devices)
        };
        let found = match text.split_once(':') {
            None if text == "cpu" => Some(Devices::CPU),
            None => gpus(text, "0"),
            Some((name, ordinals)) => gpus(name, ordinals),
        };
        found.ok_or_else(|| UnknownDevice(text.chars().take(40).collect()))
    }
}

impl Serialize for Devices {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_have_one_spelling() {
        for text in [
            "cpu",
            "cuda",
            "cuda:1",
            "cuda:255",
            "cuda:0,1",
            "cuda:2,7,9",
            "tensorrt",
            "tensorrt:1",
            "tensorrt:0,3",
        ] {
            assert_eq!(text.parse::<Devices>().unwrap().to_string(), text);
        }
        assert_eq!("cuda:0".parse::<Devices>().unwrap(), Device::Cuda(0).into());
        assert_eq!("cuda:1,0".parse::<Devices>().unwrap().each(), [Device::Cuda(0), Device::Cuda(1)]);
        assert_eq!("tensorrt:2".parse::<Devices>().unwrap().each(), [Device::TensorRt(2)]);
        assert_eq!(Devices::from(Device::TensorRt(0)).to_string(), "tensorrt");
        assert_eq!(Devices::CPU.each(), [Device::Cpu]);
        for (text, memory) in [
            ("cpu", Some(Memory::Host)),
            ("cuda:3", Some(Memory::Gpu(3))),
            ("tensorrt:3", Some(Memory::Gpu(3))),
            ("cuda:3,4", None),
        ] {
            assert_eq!(text.parse::<Devices>().unwrap().memory(), memory, "{text}");
        }
        for text in [
            "",
            "gpu",
            "CPU",
            "cuda:",
            "cuda:x",
            "cuda:-1",
            "cuda:256",
            "cpu:0",
            "cuda:0,",
            "cuda:0,0",
            "cpu,cuda",
            "tensorrt:",
            "tensorrt:0,0",
            "tensorRT",
            "cuda:0,tensorrt:1",
            "cpu:",
        ] {
            assert!(text.parse::<Devices>().is_err(), "{text}");
        }
    }
}
