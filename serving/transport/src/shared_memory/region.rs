//! A shared memory region: the open object, with reads and writes that stay within bounds.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use nix::fcntl::OFlag;

use super::Registration;
use millrace_serving_core::blocking::{COPIED_BYTES, in_place};
use millrace_serving_core::error::{InferError, quote};
use millrace_serving_core::parameters::ParameterOwner;
use millrace_serving_core::wire::inference::InferParameter;
use millrace_serving_core::wire::inference::infer_parameter::ParameterChoice;

/// Linux's directory of POSIX shared memory objects.
const OBJECTS: &str = "/dev/shm";
const KEY_BYTES_MAX: usize = 255;

/// A registered part of an object.
#[derive(Debug)]
pub(super) struct Region {
    registered: Registration,
    file: File,
    /// Device and inode of the object.
    identity: (u64, u64),
}

/// The path of the object with a key. A key is one file name with an optional leading slash, as for
/// `shm_open`, so it cannot lead elsewhere.
pub(super) fn check_key(region: &str, key: &str) -> Result<PathBuf, InferError> {
    let name = key.strip_prefix('/').unwrap_or(key);
    let fault = if name.is_empty() {
        "it is empty"
    } else if name.len() > KEY_BYTES_MAX {
        "it has more than 255 bytes"
    } else if name.contains('/') {
        "it has a slash inside"
    } else if name.contains('\0') {
        "it has a NUL byte"
    } else if name == "." || name == ".." {
        "it is a directory"
    } else {
        return Ok(Path::new(OBJECTS).join(name));
    };
    Err(InferError::invalid(format!(
        "shared memory region {}: key {} is no name of a shared memory object, as in \"/name\": {fault}",
        quote(region),
        quote(key)
    )))
}

impl Region {
    pub(super) fn open(
        name: &str,
        path: PathBuf,
        key: &str,
        offset: u64,
        byte_size: u64,
    ) -> Result<Region, InferError> {
        let refused = |reason: String| {
            InferError::invalid(format!(
                "shared memory region {}: key {} cannot be registered: {reason}",
                quote(name),
                quote(key)
            ))
        };
        // Does not follow links, and does not wait for the other end of a FIFO.
        let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let file = OpenOptions::new().read(true).write(true).custom_flags(flags.bits()).open(path).map_err(
            |error| match error.raw_os_error() {
                Some(nix::libc::EMFILE | nix::libc::ENFILE) => InferError::Unavailable {
                    reason: format!("shared memory region {}: {error}", quote(name)),
                },
                Some(nix::libc::ELOOP) => refused("it is a symbolic link".into()),
                _ => refused(format!("the server cannot open it to read and write: {error}")),
            },
        )?;
        let metadata = file.metadata().map_err(|error| refused(error.to_string()))?;
        if !metadata.is_file() {
            return Err(refused("it is not a regular shared memory object".into()));
        }
        if byte_size == 0 {
            return Err(refused("byte_size is 0".into()));
        }
        if offset.checked_add(byte_size).is_none_or(|end| end > metadata.len()) {
            return Err(refused(format!(
                "{byte_size} bytes from {offset} on are not inside its {} bytes",
                metadata.len()
            )));
        }
        let registered = Registration { name: name.to_owned(), key: key.to_owned(), offset, byte_size };
        Ok(Region { registered, file, identity: (metadata.dev(), metadata.ino()) })
    }

    pub(super) fn registration(&self) -> Registration {
        self.registered.clone()
    }
}

/// A part of a region that holds one tensor.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    region: Arc<Region>,
    /// From the region's start.
    offset: u64,
    /// From the object's start.
    start: u64,
    byte_size: u64,
}

impl Span {
    pub(super) fn new(
        of: ParameterOwner<'_>,
        region: Arc<Region>,
        offset: u64,
        byte_size: u64,
    ) -> Result<Span, InferError> {
        let Registration { name, offset: base, byte_size: whole, .. } = &region.registered;
        let inside = offset.checked_add(byte_size).is_some_and(|end| end <= *whole);
        match base.checked_add(offset) {
            Some(start) if inside => Ok(Span { region, offset, start, byte_size }),
            _ => Err(InferError::invalid(format!(
                "{of}: {byte_size} bytes from {offset} on are not inside shared memory region {} of {whole} bytes",
                quote(name)
            ))),
        }
    }

    /// Name of the region.
    pub(crate) fn region(&self) -> &str {
        &self.region.registered.name
    }

    /// The parameters of an output of `bytes` bytes in the span.
    pub(crate) fn parameters(&self, bytes: usize) -> HashMap<String, InferParameter> {
        // Sizes and offsets lie inside a file, so they fit into 63 bits.
        let count = |value: u64| ParameterChoice::Int64Param(i64::try_from(value).unwrap_or(i64::MAX));
        let mut parameters = vec![
            ("shared_memory_region", ParameterChoice::StringParam(self.region().to_owned())),
            ("shared_memory_byte_size", count(bytes as u64)),
        ];
        if self.offset > 0 {
            parameters.push(("shared_memory_offset", count(self.offset)));
        }
        let entry =
            |(name, choice): (&str, _)| (name.to_owned(), InferParameter { parameter_choice: Some(choice) });
        parameters.into_iter().map(entry).collect()
    }

    /// Offset of the first byte in the region.
    pub(crate) fn offset(&self) -> u64 {
        self.offset
    }

    /// Number of bytes.
    pub(crate) fn byte_size(&self) -> u64 {
        self.byte_size
    }

    /// Identity of the object, first byte and end; orders spans, and shows whether two of them overlap.
    pub(crate) fn place(&self) -> ((u64, u64), u64, u64) {
        // Does not overflow: registration checked that the span lies inside an object of 63-bit size.
        (self.region.identity, self.start, self.start.saturating_add(self.byte_size))
    }

    /// All current bytes.
    ///
    /// # Errors
    /// [`InferError::Invalid`] if the object was truncated since it was registered.
    pub(crate) fn read(&self) -> Result<Bytes, InferError> {
        self.check_size()?;
        let too_large =
            |_| InferError::invalid(format!("{} bytes are more than memory holds", self.byte_size));
        let mut bytes = vec![0; usize::try_from(self.byte_size).map_err(too_large)?];
        let read = || self.region.file.read_exact_at(&mut bytes, self.start);
        in_place(self.byte_size >= COPIED_BYTES as u64, read).map_err(|error| self.failed("read", &error))?;
        Ok(bytes.into())
    }

    /// Writes to the beginning of the span.
    ///
    /// # Errors
    /// [`InferError::Invalid`] if the bytes do not fit or the object was truncated,
    /// [`InferError::Unavailable`] if memory is short.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<(), InferError> {
        if bytes.len() as u64 > self.byte_size {
            return Err(InferError::invalid(format!(
                "{} bytes for {} of shared memory region {}",
                bytes.len(),
                self.byte_size,
                quote(self.region())
            )));
        }
        // A write beyond the end would extend the object. If the owner truncates it between the check and the
        // write, the write extends it again, at most to the registered end.
        self.check_size()?;
        self.region.file.write_all_at(bytes, self.start).map_err(|error| self.failed("written", &error))
    }

    /// Checks that the object still reaches to the end of the span.
    ///
    /// # Errors
    /// [`InferError::Invalid`] if it was truncated.
    pub(crate) fn check_size(&self) -> Result<(), InferError> {
        let size = self.region.file.metadata().map_err(|error| self.failed("examined", &error))?.len();
        let (_, _, end) = self.place();
        if end > size { Err(self.cut(size)) } else { Ok(()) }
    }

    fn cut(&self, size: u64) -> InferError {
        InferError::invalid(format!(
            "shared memory region {}: bytes {} to {} of the object {} are wanted, it has been cut to {size}",
            quote(self.region()),
            self.start,
            self.start.saturating_add(self.byte_size),
            quote(&self.region.registered.key)
        ))
    }

    fn failed(&self, done: &str, error: &Error) -> InferError {
        if error.kind() == ErrorKind::UnexpectedEof {
            return self.cut(self.region.file.metadata().map_or(0, |metadata| metadata.len()));
        }
        InferError::Unavailable {
            reason: format!("shared memory region {} cannot be {done}: {error}", quote(self.region())),
        }
    }
}
