//! A communicator of NCCL for one membership epoch, with its GPU, a stream and a buffer.
//!
//! The functions of the library are looked up here: cudarc 0.19 looks for `libnccl.so` alone, which only development
//! packages have, and panics without it. The types and the driver are cudarc's.
//!
//! The whole unsafe code of this module rests on the following:
//! - The library is loaded once and never unloaded, so that its functions stay.
//! - Handles belong to one [`Communicator`], which frees each once, in its drop.
//! - The GPU works on the communicator's buffers alone, never on memory of the caller. They are freed once the stream is
//!   idle, and are leaked if it does not become idle.
//! - NCCL may write the communicator's handle from a thread of its own. That handle has a fixed place on the heap.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem;
use std::ptr;
use std::slice;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use cudarc::driver::result::{self, DriverError, ctx, device, event, primary_ctx, stream};
use cudarc::driver::sys;
use cudarc::nccl::sys::{ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclUniqueId};
use tokio_util::sync::CancellationToken;

use super::refused;
use super::rendezvous::{ID_BYTES, agree};
use super::watchdog::{Cause, Progress, watch};
use crate::collective::gradients::GradientLinks;
use crate::collective::{Error, Options, Ring};

/// Names of the library: that of its packages, and that of its development packages.
const NAMES: [&CStr; 2] = [c"libnccl.so.2", c"libnccl.so"];
/// Results of NCCL's functions. Numbers, since a newer library may return others than cudarc knows.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// A setting of [`Config`] that is left to NCCL.
const UNSET: c_int = c_int::MIN;
/// How long the buffers wait for the end of aborted work.
const IDLE_LIMIT: Duration = Duration::from_secs(5);

/// `ncclConfig_t` as NCCL 2.17 to 2.26 have it. Older libraries read its beginning, later ones take it by its size.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
}

/// The functions of the library that are used. All of them have been there since NCCL 2.14.
struct Library {
    get_unique_id: unsafe extern "C" fn(*mut ncclUniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut Config) -> c_int,
    async_error: unsafe extern "C" fn(ncclComm_t, *mut c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(
        *const c_void,
        *mut c_void,
        usize,
        ncclDataType_t,
        ncclRedOp_t,
        ncclComm_t,
        sys::CUstream,
    ) -> c_int,
    abort: unsafe extern "C" fn(ncclComm_t) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    last_error: unsafe extern "C" fn(ncclComm_t) -> *const c_char,
}

impl Library {
    /// Loads the library, once in the process.
    fn get() -> Result<&'static Library, Error> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Library::load).as_ref().map_err(|reason| refused(reason))
    }

    fn load() -> Result<Library, String> {
        let open = |name: &&CStr| {
            // SAFETY: the name ends with a NUL. Loading the library runs its initializers only.
            let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
            (!handle.is_null()).then_some(handle)
        };
        let Some(handle) = NAMES.iter().find_map(open) else {
            return Err("the library of NCCL (libnccl.so.2) is not found; install NCCL 2.14 or later, or add its folder to \
                        LD_LIBRARY_PATH"
                .to_owned());
        };
        // SAFETY: the types are those of the functions in nccl.h. A result is an enum of C, which is an int.
        unsafe {
            Ok(Library {
                get_unique_id: symbol(handle, c"ncclGetUniqueId")?,
                init_rank: symbol(handle, c"ncclCommInitRankConfig")?,
                async_error: symbol(handle, c"ncclCommGetAsyncError")?,
                all_reduce: symbol(handle, c"ncclAllReduce")?,
                abort: symbol(handle, c"ncclCommAbort")?,
                error_string: symbol(handle, c"ncclGetErrorString")?,
                last_error: symbol(handle, c"ncclGetLastError")?,
            })
        }
    }

    /// The text of an error of NCCL, with the last message of a communicator, which may be null.
    fn text(&self, code: c_int, comm: ncclComm_t) -> String {
        // SAFETY: both functions return null or a text that ends with a NUL and stays until NCCL's next error.
        let texts = unsafe { [(self.error_string)(code), (self.last_error)(comm)] };
        let [error, last] = texts.map(|text| match text.is_null() {
            true => String::new(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned(),
        });
        match last.is_empty() {
            true => format!("{error} (NCCL_DEBUG=WARN shows more)"),
            false => format!("{error}: {last} (NCCL_DEBUG=WARN shows more)"),
        }
    }
}

/// A function of the library.
///
/// # Safety
/// `F` is the type of a pointer to that function.
unsafe fn symbol<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F, String> {
    // SAFETY: the handle is that of a loaded library, and the name ends with a NUL.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if found.is_null() {
        let name = name.to_string_lossy();
        return Err(format!("the library of NCCL has no {name}; install NCCL 2.14 or later"));
    }
    // SAFETY: a pointer to a function has the size of a pointer, and the caller has named its type.
    Ok(unsafe { mem::transmute_copy::<*mut c_void, F>(&found) })
}

/// Checks that the library of NCCL can be loaded.
pub(super) fn check() -> Result<(), Error> {
    Library::get()?;
    Ok(())
}

/// A GPU with its primary context, which the engine on that GPU has, too.
struct Gpu {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

/// A context that is bound to this thread; what was bound before comes back at the end.
struct Bound {
    before: sys::CUcontext,
}

impl Gpu {
    fn open(ordinal: usize) -> Result<Gpu, Error> {
        // SAFETY: looks for the library of the driver, which runs its initializers.
        if !unsafe { sys::is_culib_present() } {
            return Err(refused("the library of NVIDIA's driver (libcuda) is not found; install the driver"));
        }
        let open = || -> Result<Gpu, DriverError> {
            result::init()?;
            let device = device::get(c_int::try_from(ordinal).unwrap_or(c_int::MAX))?;
            // SAFETY: the device is one of the driver's.
            Ok(Gpu { device, context: unsafe { primary_ctx::retain(device) }? })
        };
        open().map_err(|error| {
            refused(&format!("device \"cuda:{ordinal}\" cannot be opened ({error}); see nvidia-smi -L"))
        })
    }

    fn bind(&self) -> Result<Bound, DriverError> {
        let before = ctx::get_current()?.unwrap_or(ptr::null_mut());
        // SAFETY: this value retains the context.
        unsafe { ctx::set_current(self.context) }?;
        Ok(Bound { before })
    }

    /// A number that GPUs of all machines have different: of its UUID.
    fn identity(&self) -> Result<i64, DriverError> {
        let bytes = device::get_uuid(self.device)?.bytes.map(|byte| byte.to_ne_bytes()[0]);
        let half =
            |at: usize| bytes[at..at + 8].iter().fold(0u64, |half, byte| (half << 8) | u64::from(*byte));
        Ok((half(0) ^ half(8)) as i64)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: retained by `open`, and released once. An error is ignored: the driver may have ended first.
        unsafe { primary_ctx::release(self.device) }.ok();
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // SAFETY: the context was bound to this thread before, or null, which unbinds.
        unsafe { ctx::set_current(self.before) }.ok();
    }
}

/// The ranks of a membership epoch, connected by NCCL. Handles that are null, or 0, were not made.
pub(super) struct Communicator {
    library: &'static Library,
    gpu: Gpu,
    /// The place of NCCL's handle, which is null before the connection and after an abort.
    comm: *mut ncclComm_t,
    stream: sys::CUstream,
    /// Behind the last work of the stream.
    done: sys::CUevent,
    /// Pinned memory of the host and memory of the GPU, of `capacity` elements each.
    host: *mut f32,
    memory: sys::CUdeviceptr,
    capacity: usize,
    /// Whether the stream may have work.
    is_busy: bool,
    epoch: u64,
    exchange_timeout: Duration,
    abort: CancellationToken,
}

// SAFETY: the handles of the driver and of NCCL may be used on any thread, by one at a time, and the memory belongs to
// this value alone.
unsafe impl Send for Communicator {}

impl Communicator {
    /// Connects this rank's GPU with those of the other ranks.
    pub(super) fn connect(
        ring: &mut Ring<'_>,
        ordinal: usize,
        options: &Options,
        abort: &CancellationToken,
    ) -> Result<Communicator, Error> {
        let (epoch, world, rank) = (ring.epoch(), ring.world(), ring.rank());
        let failed = |cause: Cause| cause.into_error(epoch, "connect the ranks".to_owned());
        let driver = |error: DriverError| failed(of_driver(error));
        let library = Library::get()?;
        let gpu = Gpu::open(ordinal)?;
        let _bound = gpu.bind().map_err(driver)?;
        let own = match rank {
            0 => Some(unique_id(library).map_err(failed)?),
            _ => None,
        };
        let id = agree(ring, own.as_ref(), gpu.identity().map_err(driver)?)?;
        // From here on, a drop frees what was made.
        let mut links = Communicator {
            library,
            gpu,
            comm: Box::into_raw(Box::new(ptr::null_mut())),
            stream: ptr::null_mut(),
            done: ptr::null_mut(),
            host: ptr::null_mut(),
            memory: 0,
            capacity: 0,
            is_busy: false,
            epoch,
            exchange_timeout: options.exchange_timeout,
            abort: abort.clone(),
        };
        links.stream = stream::create(stream::StreamKind::NonBlocking).map_err(driver)?;
        links.done = event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING).map_err(driver)?;
        links.init(&id, world, rank, options.form_timeout).map_err(failed)?;
        Ok(links)
    }

    /// Begins to connect the ranks, and waits for that.
    fn init(&mut self, id: &[u8; ID_BYTES], world: usize, rank: usize, limit: Duration) -> Result<(), Cause> {
        let began = Instant::now();
        let id = ncclUniqueId { internal: id.map(|byte| c_char::from_ne_bytes([byte])) };
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 21_700,
            blocking: 0,
            cga_cluster_size: UNSET,
            min_ctas: UNSET,
            max_ctas: UNSET,
            net_name: ptr::null(),
            split_share: UNSET,
            traffic_class: UNSET,
        };
        // A ring has at most `WORLD_MAX` ranks.
        let (world, rank) = (world as c_int, rank as c_int);
        // SAFETY: the place of the handle stays until the communicator is dropped, and the configuration is read during
        // the call.
        let code = unsafe { (self.library.init_rank)(self.comm, world, id, rank, &mut config) };
        self.accepted(code, began, limit)
    }

    /// NCCL's handle.
    fn handle(&self) -> ncclComm_t {
        // SAFETY: the place is valid until the drop. NCCL writes it during `init` only, before that call returns or not
        // at all; this read is behind that call.
        unsafe { *self.comm }
    }

    /// Waits until NCCL has taken a call that returned `code`, for `limit` after `began` at most.
    fn accepted(&self, code: c_int, began: Instant, limit: Duration) -> Result<(), Cause> {
        match code {
            SUCCESS => Ok(()),
            IN_PROGRESS => watch(began, limit, &self.abort, || self.progress()),
            code => Err(Cause::Failed(self.library.text(code, self.handle()))),
        }
    }

    /// Whether NCCL is still at work on a call.
    fn progress(&self) -> Result<Progress, String> {
        let mut state = SUCCESS;
        // SAFETY: the communicator exists: each caller has checked the result of the call that made it or used it.
        let code = unsafe { (self.library.async_error)(self.handle(), &mut state) };
        match (code, state) {
            (SUCCESS, SUCCESS) => Ok(Progress::Done),
            (SUCCESS, IN_PROGRESS) => Ok(Progress::Pending),
            (SUCCESS, error) | (error, _) => Err(self.library.text(error, self.handle())),
        }
    }

    /// Whether the stream has done its work; an error of NCCL comes first.
    fn stream_progress(&self) -> Result<Progress, String> {
        self.progress()?;
        // SAFETY: the event exists.
        match unsafe { event::query(self.done) } {
            Ok(()) => Ok(Progress::Done),
            Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(Progress::Pending),
            Err(error) => Err(format!("the driver reports {error}")),
        }
    }

    fn sum(&mut self, values: &mut [f32]) -> Result<(), Cause> {
        let began = Instant::now();
        let _bound = self.gpu.bind().map_err(of_driver)?;
        self.reserve(values.len()).map_err(of_driver)?;
        let elements = values.len();
        self.is_busy = true;
        // SAFETY: both buffers have at least so many elements, and the stream is idle, so that the host's is not in use.
        // It stays as it is until the stream is idle again.
        unsafe {
            ptr::copy_nonoverlapping(values.as_ptr(), self.host, elements);
            result::memcpy_htod_async(self.memory, slice::from_raw_parts(self.host, elements), self.stream)
        }
        .map_err(of_driver)?;
        // SAFETY: the communicator exists, and the sum may take the place of the values. The stream belongs to the GPU of
        // the communicator, whose context is bound.
        let code = unsafe {
            (self.library.all_reduce)(
                self.memory as *const c_void,
                self.memory as *mut c_void,
                elements,
                ncclDataType_t::ncclFloat32,
                ncclRedOp_t::ncclSum,
                self.handle(),
                self.stream,
            )
        };
        // The stream takes later work once NCCL has put its own there.
        self.accepted(code, began, self.exchange_timeout)?;
        // SAFETY: as above; the copy goes to pinned memory, so that the call does not wait for the sum.
        unsafe {
            let host = slice::from_raw_parts_mut(self.host, elements);
            result::memcpy_dtoh_async(host, self.memory, self.stream).map_err(of_driver)?;
            event::record(self.done, self.stream).map_err(of_driver)?;
        }
        watch(began, self.exchange_timeout, &self.abort, || self.stream_progress())?;
        self.is_busy = false;
        // SAFETY: the stream is idle.
        unsafe { ptr::copy_nonoverlapping(self.host, values.as_mut_ptr(), elements) };
        Ok(())
    }

    /// Makes the buffers large enough. The stream is idle, and the context is bound.
    fn reserve(&mut self, elements: usize) -> Result<(), DriverError> {
        if elements <= self.capacity {
            return Ok(());
        }
        self.free()?;
        let bytes = elements * size_of::<f32>();
        // SAFETY: the memory is written before it is read; any bits are a float.
        unsafe {
            self.host = result::malloc_host(bytes, 0)?.cast();
            self.memory = result::malloc_sync(bytes)?;
        }
        self.capacity = elements;
        Ok(())
    }

    /// Frees the buffers. The stream is idle, and the context is bound.
    fn free(&mut self) -> Result<(), DriverError> {
        self.capacity = 0;
        let (host, memory) = (mem::replace(&mut self.host, ptr::null_mut()), mem::take(&mut self.memory));
        // SAFETY: each was allocated by `reserve`, and is freed once, when no work uses it.
        unsafe {
            if memory != 0 {
                result::free_sync(memory)?;
            }
            if !host.is_null() {
                result::free_host(host.cast())?;
            }
        }
        Ok(())
    }

    /// Aborts the communicator: what waits in the stream ends, and so do the calls of the other ranks.
    fn close(&mut self) {
        let comm = self.handle();
        if !comm.is_null() {
            let _bound = self.gpu.bind().ok();
            // SAFETY: the communicator exists, and its place becomes null, so that it is aborted once. The result is
            // ignored: nothing can be done about it.
            unsafe {
                (self.library.abort)(comm);
                *self.comm = ptr::null_mut();
            }
        }
    }

    /// Waits a bounded time until aborted work has left the stream.
    fn is_idle(&self) -> bool {
        // SAFETY: event and stream exist: work began only after both were made.
        if unsafe { event::record(self.done, self.stream) }.is_err() {
            return false;
        }
        let poll = || {
            // SAFETY: the event exists.
            match unsafe { event::query(self.done) } {
                Ok(()) => Ok(Progress::Done),
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => Ok(Progress::Pending),
                Err(error) => Err(error.to_string()),
            }
        };
        watch(Instant::now(), IDLE_LIMIT, &CancellationToken::new(), poll).is_ok()
    }
}

impl GradientLinks for Communicator {
    fn sum_bucket(&mut self, step: u64, bucket: usize, values: &mut [f32]) -> Result<(), Error> {
        if self.handle().is_null() || self.abort.is_cancelled() {
            self.close();
            return Err(Error::Aborted { epoch: self.epoch });
        }
        if values.is_empty() {
            return Ok(());
        }
        self.sum(values).map_err(|cause| {
            self.close();
            cause.into_error(self.epoch, format!("sum bucket {bucket} of step {step}"))
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // Without its context nothing can be freed.
        let Ok(_bound) = self.gpu.bind() else { return };
        self.close();
        if self.is_busy && !self.is_idle() {
            tracing::warn!(epoch = self.epoch, "aborted work of NCCL has not left the GPU; its buffers stay");
            return;
        }
        // Errors of the end are ignored: the driver may have ended first.
        self.free().ok();
        // SAFETY: event and stream were made by `connect`, and nothing uses them any more. NCCL has ended, so that it does
        // not write the place of its handle, which `connect` took from a box.
        unsafe {
            if !self.done.is_null() {
                event::destroy(self.done).ok();
            }
            if !self.stream.is_null() {
                stream::destroy(self.stream).ok();
            }
            drop(Box::from_raw(self.comm));
        }
    }
}

/// An id for a communicator, made by its rank 0.
fn unique_id(library: &Library) -> Result<[u8; ID_BYTES], Cause> {
    let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: the library writes an id.
    let code = unsafe { (library.get_unique_id)(&mut id) };
    match code {
        SUCCESS => Ok(id.internal.map(|byte| byte.to_ne_bytes()[0])),
        code => Err(Cause::Failed(library.text(code, ptr::null_mut()))),
    }
}

fn of_driver(error: DriverError) -> Cause {
    Cause::Failed(format!("the driver reports {error}"))
}
