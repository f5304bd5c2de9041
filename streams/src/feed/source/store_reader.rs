//! Blocking reader of a file in an object store, for parsers that want `BufRead` or `Seek`.

use std::io::{self, BufRead, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use tokio::runtime::Handle;

use crate::feed::error::{FeedError, Result};

/// The first read after a seek, in bytes.
const BLOCK_BYTES_MIN: u64 = 128 << 10;
/// The following reads double up to this size.
const BLOCK_BYTES_MAX: u64 = 4 << 20;

/// Reads a file in blocks on a thread that may block. Stops when its owner is gone.
pub(crate) struct StoreReader {
    store: Arc<dyn ObjectStore>,
    path: Path,
    size: u64,
    /// Offset of the next byte that is not in `buffer`.
    position: u64,
    buffer: Bytes,
    block: u64,
    runtime: Handle,
    stop: Arc<AtomicBool>,
    failure: Failure,
}

/// The error of the store behind an I/O error.
#[derive(Clone, Default)]
pub(crate) struct Failure(Arc<Mutex<Option<FeedError>>>);

/// Stops the readers that have its flag when it is dropped: a scan does not outlive its command.
#[derive(Default)]
pub(crate) struct StopOnDrop(pub(crate) Arc<AtomicBool>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Failure {
    /// The store's error if there was one, else `otherwise`.
    pub(crate) fn or(&self, otherwise: FeedError) -> FeedError {
        self.0.lock().take().unwrap_or(otherwise)
    }
}

impl StoreReader {
    /// A reader of a file of `size` bytes. Call on a runtime.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a path that the store cannot have.
    pub(crate) fn new(
        store: &Arc<dyn ObjectStore>,
        path: &str,
        size: u64,
        stop: Arc<AtomicBool>,
    ) -> Result<Self> {
        let parsed = Path::parse(path)
            .map_err(|e| FeedError::invalid(format!("path {path:?} of the dataset: {e}")))?;
        Ok(Self {
            store: Arc::clone(store),
            path: parsed,
            size,
            position: 0,
            buffer: Bytes::new(),
            block: BLOCK_BYTES_MIN,
            runtime: Handle::current(),
            stop,
            failure: Failure::default(),
        })
    }

    pub(crate) fn failure(&self) -> Failure {
        self.failure.clone()
    }

    fn fill(&mut self) -> io::Result<()> {
        if !self.buffer.is_empty() || self.position >= self.size {
            return Ok(());
        }
        if self.stop.load(Ordering::Relaxed) {
            return Err(self.fail(FeedError::Stopped { file: self.path.to_string() }));
        }
        let end = self.position.saturating_add(self.block).min(self.size);
        let wanted = end - self.position;
        let reading = self.store.get_range(&self.path, self.position..end);
        match self.runtime.block_on(reading) {
            Ok(bytes) if bytes.len() as u64 == wanted => self.buffer = bytes,
            Ok(bytes) => {
                let what = format!("read {} of {wanted} bytes", bytes.len());
                return Err(self.fail(FeedError::Changed { file: self.path.to_string(), what }));
            }
            Err(error) => return Err(self.fail(FeedError::store(self.path.to_string(), error))),
        }
        self.position = end;
        self.block = (self.block * 2).min(BLOCK_BYTES_MAX);
        Ok(())
    }

    fn fail(&self, error: FeedError) -> io::Error {
        let text = error.to_string();
        self.failure.0.lock().get_or_insert(error);
        io::Error::other(text)
    }
}

impl Read for StoreReader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let found = self.fill_buf()?;
        let bytes = found.len().min(into.len());
        into[..bytes].copy_from_slice(&found[..bytes]);
        self.consume(bytes);
        Ok(bytes)
    }
}

impl BufRead for StoreReader {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.fill()?;
        Ok(&self.buffer)
    }

    fn consume(&mut self, bytes: usize) {
        let bytes = bytes.min(self.buffer.len());
        drop(self.buffer.split_to(bytes));
    }
}

impl Seek for StoreReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let now = self.position - self.buffer.len() as u64;
        let target = match to {
            SeekFrom::Start(target) => Some(target),
            SeekFrom::Current(delta) => now.checked_add_signed(delta),
            SeekFrom::End(delta) => self.size.checked_add_signed(delta),
        };
        let target = target.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        if (now..=self.position).contains(&target) {
            self.consume((target - now) as usize);
        } else {
            self.buffer = Bytes::new();
            self.position = target;
            self.block = BLOCK_BYTES_MIN;
        }
        Ok(target)
    }
}
