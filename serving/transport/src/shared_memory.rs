//! System shared memory: regions of POSIX shared memory objects that clients on the same machine register to
//! pass tensors without sending them.
//!
//! The server never maps a region: the object's owner may truncate it at any time, and touching a mapping
//! beyond the end kills the process (SIGBUS). Positional reads and writes with the server's own buffers
//! return an error instead.

mod region;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use nix::sys::resource::{Resource, getrlimit};
use parking_lot::RwLock;

use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::parameters::{ParameterOwner, Parameters};
pub(crate) use region::Span;
use region::{Region, check_key};

/// Most registered regions.
const REGIONS_MAX: usize = 4096;
/// Longest name of a region, in bytes.
const NAME_BYTES_MAX: usize = 255;

/// The regions by name.
type Regions = BTreeMap<String, Arc<Region>>;

/// The regions of a server. Cheap to clone; all clones share them.
#[derive(Debug, Clone)]
pub(crate) struct SharedMemory {
    /// `None` if clients may not use shared memory.
    regions: Option<Arc<RwLock<Regions>>>,
    regions_max: usize,
    read_bytes_max: u64,
}

/// A registered region, in the clients' terms.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) name: String,
    pub(crate) key: String,
    pub(crate) offset: u64,
    pub(crate) byte_size: u64,
}

impl SharedMemory {
    /// Without regions yet. `read_bytes_max` bounds the bytes of one request's inputs in regions, as the
    /// message limit bounds those that are sent.
    pub(crate) fn new(on: bool, read_bytes_max: usize) -> SharedMemory {
        // Each region holds a file descriptor; three quarters stay for connections and models.
        let descriptors = getrlimit(Resource::RLIMIT_NOFILE).map_or(1024, |(soft, _)| soft);
        let regions_max = usize::try_from(descriptors / 4).unwrap_or(REGIONS_MAX).clamp(1, REGIONS_MAX);
        SharedMemory {
            regions: on.then(Arc::default),
            regions_max,
            read_bytes_max: u64::try_from(read_bytes_max).unwrap_or(u64::MAX),
        }
    }

    /// Whether clients may use shared memory.
    pub(crate) fn is_on(&self) -> bool {
        self.regions.is_some()
    }

    fn regions(&self) -> Result<&RwLock<Regions>, InferError> {
        self.regions.as_deref().ok_or_else(|| InferError::Unsupported {
            reason: "shared memory is off: set [serving] shared_memory = true where every client that reaches the server may read and write what the server may".into(),
        })
    }

    /// Registers `byte_size` bytes of the object `key`, beginning at `offset`. The region keeps the object
    /// alive until it is unregistered, even if the key is removed.
    ///
    /// # Errors
    /// [`InferError::Exists`], [`InferError::Invalid`], [`InferError::Unavailable`] for too many regions.
    pub(crate) fn register(
        &self,
        name: &str,
        key: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<(), InferError> {
        let regions = self.regions()?;
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(InferError::invalid(format!(
                "the name of a shared memory region has 1 to {NAME_BYTES_MAX} bytes, {} has {}",
                quote(name),
                name.len()
            )));
        }
        let room = |regions: &Regions| {
            if regions.contains_key(name) {
                return Err(InferError::Exists {
                    reason: format!(
                        "shared memory region {} is registered already: unregister it first",
                        quote(name)
                    ),
                });
            }
            if regions.len() >= self.regions_max {
                return Err(InferError::Unavailable {
                    reason: format!(
                        "{} shared memory regions are registered, the limit is {} (at most {REGIONS_MAX}, and a quarter of the open files of the process): unregister some",
                        regions.len(),
                        self.regions_max
                    ),
                });
            }
            Ok(())
        };
        room(&regions.read())?;
        let region = Region::open(name, check_key(name, key)?, key, offset, byte_size)?;
        let mut regions = regions.write();
        room(&regions)?;
        regions.insert(name.to_owned(), Arc::new(region));
        Ok(())
    }

    /// Unregisters a region, or all of them when the name is empty. Unknown names are not an error: clients
    /// unregister before they register. Running requests keep their regions.
    ///
    /// # Errors
    /// [`InferError::Unsupported`] if shared memory is off.
    pub(crate) fn unregister(&self, name: &str) -> Result<(), InferError> {
        let regions = self.regions()?;
        if name.is_empty() {
            // The files close after the lock is released.
            let _all = std::mem::take(&mut *regions.write());
        } else {
            let _one = regions.write().remove(name);
        }
        Ok(())
    }

    /// A registered region, or all of them when the name is empty.
    ///
    /// # Errors
    /// [`InferError::NotFound`].
    pub(crate) fn status(&self, name: &str) -> Result<Vec<Registration>, InferError> {
        let regions = self.regions()?.read();
        if name.is_empty() {
            return Ok(regions.values().map(|region| region.registration()).collect());
        }
        let region = regions.get(name).ok_or_else(|| unknown(name))?;
        Ok(vec![region.registration()])
    }

    /// The span of a region that the parameters of an input or output name; `None` if they name none.
    ///
    /// # Errors
    /// [`InferError::Invalid`], [`InferError::NotFound`], [`InferError::Unsupported`].
    pub(crate) fn span(
        &self,
        of: ParameterOwner<'_>,
        parameters: &impl Parameters,
    ) -> Result<Option<Span>, InferError> {
        let Some(name) = parameters.text(&of, "shared_memory_region")? else {
            return Ok(None);
        };
        let regions = self.regions()?;
        let byte_size = parameters.count(&of, "shared_memory_byte_size")?.ok_or_else(|| {
            InferError::invalid(format!("{of}: shared_memory_region needs shared_memory_byte_size"))
        })?;
        let offset = parameters.count(&of, "shared_memory_offset")?.unwrap_or(0);
        let region = regions.read().get(name).cloned().ok_or_else(|| unknown(name))?;
        Span::new(of, region, offset, byte_size).map(Some)
    }
}

/// The refusal to register CUDA shared memory, which is not supported: tensors live in host memory, and the
/// sessions transfer them.
pub(crate) fn cuda_refused(name: &str) -> InferError {
    InferError::Unsupported {
        reason: format!(
            "CUDA shared memory region {} cannot be registered: the server takes system shared memory only",
            quote(name)
        ),
    }
}

/// Status of a CUDA region; all regions if the name is empty.
///
/// # Errors
/// [`InferError::NotFound`] for any name, because there are none.
pub(crate) fn cuda_status(name: &str) -> Result<(), InferError> {
    if name.is_empty() {
        return Ok(());
    }
    Err(InferError::NotFound { reason: format!("there is no CUDA shared memory region {}", quote(name)) })
}

fn unknown(name: &str) -> InferError {
    InferError::NotFound {
        reason: format!("shared memory region {} is not registered: register it first", quote(name)),
    }
}

/// Reads the inputs of one request from regions, within the limit on their sum.
#[derive(Debug)]
pub(crate) struct Inputs<'a> {
    memory: &'a SharedMemory,
    bytes: u64,
}

impl<'a> Inputs<'a> {
    /// For a request to a server.
    pub(crate) fn of(memory: &'a SharedMemory) -> Inputs<'a> {
        Inputs { memory, bytes: 0 }
    }

    /// The raw bytes of an input in a region; `None` if its parameters name no region.
    ///
    /// # Errors
    /// As [`SharedMemory::span`], and [`InferError::TooLarge`].
    pub(crate) fn read(
        &mut self,
        input: &str,
        parameters: &impl Parameters,
    ) -> Result<Option<Bytes>, InferError> {
        let Some(span) = self.memory.span(ParameterOwner("input", input), parameters)? else {
            return Ok(None);
        };
        self.bytes = self.bytes.saturating_add(span.byte_size());
        if self.bytes > self.memory.read_bytes_max {
            return Err(InferError::TooLarge { bytes: self.bytes, bytes_max: self.memory.read_bytes_max });
        }
        span.read().map(Some)
    }
}

#[cfg(test)]
mod tests;
