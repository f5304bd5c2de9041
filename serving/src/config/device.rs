//! Where models run: on the processor, or on one or several GPUs.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Where one session runs. There is no fallback from one to the other but by
/// [`Config::allow_fallback`](super::Config::allow_fallback).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Device {
    /// The processor.
    #[default]
    Cpu,
    /// A CUDA device by its ordinal.
    Cuda(u8),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Devices::from(*self).fmt(f)
    }
}

/// Where the sessions of a model run: on the processor, or on GPUs, on each as many. Written `cpu`, `cuda`,
/// `cuda:1` or `cuda:0,1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Devices {
    /// Ordinals of GPUs; the processor where there are none.
    gpus: BTreeSet<u8>,
}

impl Devices {
    /// The processor.
    pub const CPU: Devices = Devices { gpus: BTreeSet::new() };

    /// GPUs by their ordinals; `None` when there are none.
    pub fn gpus(ordinals: impl IntoIterator<Item = u8>) -> Option<Devices> {
        let gpus: BTreeSet<u8> = ordinals.into_iter().collect();
        (!gpus.is_empty()).then_some(Devices { gpus })
    }

    /// Each of them, ascending; at least one.
    pub fn each(&self) -> Vec<Device> {
        if self.gpus.is_empty() {
            return vec![Device::Cpu];
        }
        self.gpus.iter().map(|ordinal| Device::Cuda(*ordinal)).collect()
    }

    /// Whether it is the processor.
    pub fn is_cpu(&self) -> bool {
        self.gpus.is_empty()
    }
}

impl Default for Devices {
    fn default() -> Self {
        Devices::CPU
    }
}

impl From<Device> for Devices {
    fn from(device: Device) -> Self {
        match device {
            Device::Cpu => Devices::CPU,
            Device::Cuda(ordinal) => Devices { gpus: BTreeSet::from([ordinal]) },
        }
    }
}

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut gpus = self.gpus.iter();
        match gpus.next() {
            None => f.write_str("cpu"),
            Some(0) if self.gpus.len() == 1 => f.write_str("cuda"),
            Some(first) => {
                write!(f, "cuda:{first}")?;
                gpus.try_for_each(|ordinal| write!(f, ",{ordinal}"))
            }
        }
    }
}

/// Devices that are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a device: use cpu, cuda, cuda:N, or cuda:N,M for several, each once and up to 255")]
pub struct UnknownDevice(String);

impl FromStr for Devices {
    type Err = UnknownDevice;

    fn from_str(text: &str) -> Result<Self, UnknownDevice> {
        let gpus = |ordinals: &str| {
            let parsed = ordinals.split(',').map(|it| it.parse::<u8>().ok()).collect::<Option<Vec<_>>>()?;
            let devices = Devices::gpus(parsed.iter().copied())?;
            (devices.gpus.len() == parsed.len()).then_some(devices)
        };
        let found = match text.split_once(':') {
            None if text == "cpu" => Some(Devices::CPU),
            None if text == "cuda" => Some(Device::Cuda(0).into()),
            Some(("cuda", ordinals)) => gpus(ordinals),
            _ => None,
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
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn devices_have_one_spelling() {
        for text in ["cpu", "cuda", "cuda:1", "cuda:255", "cuda:0,1", "cuda:2,7,9"] {
            assert_eq!(text.parse::<Devices>().unwrap().to_string(), text);
        }
        assert_eq!("cuda:0".parse::<Devices>().unwrap(), Device::Cuda(0).into());
        assert_eq!("cuda:1,0".parse::<Devices>().unwrap().each(), [Device::Cuda(0), Device::Cuda(1)]);
        assert_eq!(Devices::CPU.each(), [Device::Cpu]);
        for text in [
            "", "gpu", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:256", "cpu:0", "cuda:0,", "cuda:0,0",
            "cpu,cuda",
        ] {
            assert!(text.parse::<Devices>().is_err(), "{text}");
        }
    }
}
