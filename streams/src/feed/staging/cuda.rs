//! Memory of a slot on an NVIDIA GPU: pinned memory of the host, memory of the device, and events that order copies.
//!
//! All slots of a GPU share one stream for copies, so that copies run beside the kernels of the reader. A slot has an
//! event behind its last copy, for which the reader's stream waits. When the reader lets go, an event behind the work that
//! each of its streams has queued by then is recorded, and the next copy into the slot waits for those. The host waits only
//! before it fills pinned memory whose copy is not done yet.
//!
//! The context is the primary one of the device, as PyTorch and all users of CUDA's runtime have it. Each call binds it to
//! its thread and then restores what the thread had: the reader's thread may be at work on another device.
#![allow(unsafe_code)]

use std::mem;
use std::process;
use std::ptr;
use std::slice;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError, ctx, device, event, primary_ctx, stream};
use cudarc::driver::sys;
use parking_lot::Mutex;

use crate::feed::error::{FeedError, Result};
use crate::feed::staging::ReaderStream;
use crate::feed::staging::memory::SlotMemory;

/// A GPU with its primary context, and a stream for copies.
pub(crate) struct Gpu {
    number: i32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    /// Null until it is created.
    copies: sys::CUstream,
    /// A child of a fork cannot use the driver.
    process: u32,
}

/// The memory of one slot. Handles that are null, or 0, were not made.
pub(crate) struct GpuMemory {
    gpu: Arc<Gpu>,
    host: *mut u8,
    memory: sys::CUdeviceptr,
    bytes: usize,
    /// Behind the last copy into the memory of the device.
    copied: sys::CUevent,
    readers: Mutex<Readers>,
    /// Behind what the readers of earlier batches have queued.
    consumed: Vec<sys::CUevent>,
    /// Whether an event is missing: all work of the device comes before the next copy.
    is_unordered: bool,
}

/// The streams that read the batch of a slot.
#[derive(Default)]
struct Readers {
    /// Handles, each once.
    streams: Vec<usize>,
    has_unknown: bool,
}

// SAFETY: the driver's handles may be used on any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above, and by several at once.
unsafe impl Sync for Gpu {}
// SAFETY: as above; the memory of the host belongs to this value alone.
unsafe impl Send for GpuMemory {}
// SAFETY: as above; methods of `&self` do not touch the memory of the host.
unsafe impl Sync for GpuMemory {}

/// The primary context of a GPU, bound to this thread; what was bound before comes back at the end.
pub(crate) struct Bound {
    before: sys::CUcontext,
    is_changed: bool,
}

impl Gpu {
    /// Opens a GPU by the number that the driver gives it under `CUDA_VISIBLE_DEVICES`.
    pub(crate) fn open(number: u16) -> Result<Self> {
        let number = i32::from(number);
        let refused = |reason: String| FeedError::Device { device: format!("cuda:{number}"), reason };
        let failed = |what: &'static str| {
            move |error: DriverError| refused(format!("{what}: {error}; check the driver with nvidia-smi"))
        };
        // SAFETY: looks for the library of the driver, which runs its initializers.
        if !unsafe { sys::is_culib_present() } {
            let reason = "the library of NVIDIA's driver (libcuda) is not found; install the driver, or leave device out";
            return Err(refused(reason.to_owned()));
        }
        result::init().map_err(failed(
            "CUDA cannot be initialized, as in a process that was forked after it was used",
        ))?;
        let count = device::get_count().map_err(failed("count the GPUs"))?;
        if number >= count {
            return Err(refused(format!("there are {count} GPUs, numbered from 0; see nvidia-smi -L")));
        }
        let device = device::get(number).map_err(failed("open the GPU"))?;
        // SAFETY: the device is one of the driver's.
        let context =
            unsafe { primary_ctx::retain(device) }.map_err(failed("open the context of the GPU"))?;
        // From here on, a drop releases the context.
        let mut gpu = Self { number, device, context, copies: ptr::null_mut(), process: process::id() };
        let bound = gpu.bind()?;
        gpu.copies = stream::create(stream::StreamKind::NonBlocking).map_err(failed("create a stream"))?;
        drop(bound);
        Ok(gpu)
    }

    pub(crate) fn number(&self) -> i32 {
        self.number
    }

    pub(crate) fn bind(&self) -> Result<Bound> {
        let bind = || -> Result<Bound, DriverError> {
            let before = ctx::get_current()?.unwrap_or(ptr::null_mut());
            let is_changed = before != self.context;
            if is_changed {
                // SAFETY: this value retains the context.
                unsafe { ctx::set_current(self.context) }?;
            }
            Ok(Bound { before, is_changed })
        };
        bind().map_err(|error| self.error("bind the context", error))
    }

    fn error(&self, what: &str, error: DriverError) -> FeedError {
        FeedError::Device {
            device: format!("cuda:{}", self.number),
            reason: format!("{what}: {error}; restart the process from its last checkpoint"),
        }
    }

    fn no_memory(&self, what: &str, bytes: usize, error: DriverError) -> FeedError {
        FeedError::Device {
            device: format!("cuda:{}", self.number),
            reason: format!(
                "{bytes} bytes of {what} for a slot are not to be had: {error}; use a smaller batch_rows or fewer columns, or \
                 leave device out"
            ),
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.process != process::id() {
            return;
        }
        if !self.copies.is_null()
            && let Ok(_bound) = self.bind()
        {
            // SAFETY: created by `open`, and destroyed once; slots, which use it, hold this value. Errors of the end
            // are ignored: the driver may have ended first.
            unsafe { stream::destroy(self.copies) }.ok();
        }
        // SAFETY: retained by `open`, and released once.
        unsafe { primary_ctx::release(self.device) }.ok();
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.is_changed {
            // SAFETY: the context was bound to this thread before, or null, which unbinds.
            unsafe { ctx::set_current(self.before) }.ok();
        }
    }
}

impl GpuMemory {
    /// Pinned memory of the host, and as much of the device.
    pub(crate) fn allocate(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        let _bound = gpu.bind()?;
        // From here on, a drop frees what was made.
        let mut slot = Self {
            gpu: Arc::clone(gpu),
            host: ptr::null_mut(),
            memory: 0,
            bytes,
            copied: ptr::null_mut(),
            readers: Mutex::default(),
            consumed: Vec::new(),
            is_unordered: false,
        };
        // SAFETY: the memory is initialized below, before anything reads it.
        let host = unsafe { result::malloc_host(bytes, 0) };
        slot.host = host.map_err(|error| gpu.no_memory("pinned memory of the host", bytes, error))?.cast();
        // SAFETY: the driver has just allocated that many bytes.
        unsafe { slot.host.write_bytes(0, bytes) };
        // SAFETY: readers get only bytes that a copy has written.
        let memory = unsafe { result::malloc_sync(bytes) };
        slot.memory = memory.map_err(|error| gpu.no_memory("memory of the GPU", bytes, error))?;
        slot.copied = new_event().map_err(|error| gpu.error("create an event", error))?;
        Ok(slot)
    }

    /// Begins the copy, behind the events of earlier readers.
    fn copy(&mut self, bytes: usize) -> Result<(), DriverError> {
        while let Some(consumed) = self.consumed.last().copied() {
            // SAFETY: stream and event exist. The stream keeps its wait when the event is destroyed.
            unsafe {
                stream::wait_event(
                    self.gpu.copies,
                    consumed,
                    sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT,
                )?;
                self.consumed.pop();
                event::destroy(consumed)?;
            }
        }
        if bytes > 0 {
            // SAFETY: both memories have at least that many bytes, see `filled`. That of the host stays as it is until
            // `host` has waited for the event below.
            unsafe {
                result::memcpy_htod_async(
                    self.memory,
                    slice::from_raw_parts(self.host, bytes),
                    self.gpu.copies,
                )?
            };
        }
        // SAFETY: event and stream exist.
        unsafe { event::record(self.copied, self.gpu.copies) }
    }

    /// An event behind all that a stream has queued.
    fn behind(stream: usize) -> Result<sys::CUevent, DriverError> {
        let event = new_event()?;
        // SAFETY: the event is new; the reader has promised that its stream lives as long as the batch.
        match unsafe { event::record(event, stream as sys::CUstream) } {
            Ok(()) => Ok(event),
            Err(error) => {
                // SAFETY: nothing else has the event.
                unsafe { event::destroy(event) }.ok();
                Err(error)
            }
        }
    }
}

impl SlotMemory for GpuMemory {
    fn host(&mut self) -> Result<&mut [u8]> {
        let _bound = self.gpu.bind()?;
        let wait = || -> Result<(), DriverError> {
            if self.is_unordered {
                ctx::synchronize()?;
            }
            // SAFETY: the event exists. One that was never recorded is over.
            unsafe { event::synchronize(self.copied) }
        };
        wait().map_err(|error| self.gpu.error("wait for the copy of an earlier batch", error))?;
        self.is_unordered = false;
        // SAFETY: the memory is this value's, initialized and of this size, and no copy reads it any more.
        Ok(unsafe { slice::from_raw_parts_mut(self.host, self.bytes) })
    }

    fn filled(&mut self, bytes: usize) -> Result<()> {
        let _bound = self.gpu.bind()?;
        self.copy(bytes.min(self.bytes)).map_err(|error| {
            self.is_unordered = true;
            self.gpu.error("copy a batch", error)
        })
    }

    fn address(&self) -> usize {
        self.memory as usize
    }

    fn read_on(&self, stream: ReaderStream) -> Result<()> {
        let _bound = self.gpu.bind()?;
        // Noted first: a slot must not be reused too early because a call has failed.
        let mut readers = self.readers.lock();
        let handed = match stream {
            ReaderStream::Handle(handle) => {
                if !readers.streams.contains(&handle) {
                    readers.streams.push(handle);
                }
                drop(readers);
                let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
                // SAFETY: the reader has given the handle of a stream, and the event exists.
                unsafe { stream::wait_event(handle as sys::CUstream, self.copied, flags) }
            }
            ReaderStream::Unknown => {
                readers.has_unknown = true;
                drop(readers);
                // SAFETY: the event exists.
                unsafe { event::synchronize(self.copied) }
            }
        };
        handed.map_err(|error| self.gpu.error("hand a batch to a stream", error))
    }

    fn released(&mut self) {
        let readers = mem::take(self.readers.get_mut());
        self.is_unordered |= readers.has_unknown;
        if readers.streams.is_empty() {
            return;
        }
        let Ok(_bound) = self.gpu.bind() else {
            self.is_unordered = true;
            return;
        };
        for stream in readers.streams {
            match Self::behind(stream) {
                Ok(event) => self.consumed.push(event),
                Err(_) => self.is_unordered = true,
            }
        }
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        if self.gpu.process != process::id() {
            return;
        }
        let Ok(_bound) = self.gpu.bind() else { return };
        // SAFETY: each handle was made by `allocate` or `behind`, and is freed once, after all that uses it is done. Errors
        // of the end are ignored: the driver may have ended first.
        unsafe {
            if self.is_unordered {
                ctx::synchronize().ok();
            }
            for consumed in self.consumed.drain(..) {
                event::synchronize(consumed).ok();
                event::destroy(consumed).ok();
            }
            if !self.copied.is_null() {
                event::synchronize(self.copied).ok();
                event::destroy(self.copied).ok();
            }
            if self.memory != 0 {
                result::free_sync(self.memory).ok();
            }
            if !self.host.is_null() {
                result::free_host(self.host.cast()).ok();
            }
        }
    }
}

/// An event that orders work and takes no times.
fn new_event() -> Result<sys::CUevent, DriverError> {
    event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)
}
