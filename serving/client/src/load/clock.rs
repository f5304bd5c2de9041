//! Clock of an open loop, based on a kernel timer. Timers of the Tokio runtime have a resolution of one millisecond,
//! which is more than a small model takes.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Time since the start of a load.
pub(super) trait Clock: Clone + Send + Sync + 'static {
    /// Elapsed time.
    fn now(&self) -> Duration;

    /// Waits until that time; returns at once when it has passed. One caller at a time.
    fn until(&self, at: Duration) -> impl Future<Output = ()> + Send;
}

/// The monotonic clock of the kernel.
#[derive(Debug, Clone)]
pub(super) struct Monotonic {
    start: Instant,
    timer: Arc<AsyncFd<File>>,
}

impl Monotonic {
    /// Starts the clock.
    pub(super) fn start() -> io::Result<Monotonic> {
        // SAFETY: the call takes numbers only.
        let timer =
            unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC) };
        if timer < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new, so no other object owns it.
        let timer = File::from(unsafe { OwnedFd::from_raw_fd(timer) });
        // SAFETY: the file owns its descriptor and is never taken out.
        let timer = unsafe { AsyncFd::register_with_interest(timer, Interest::READABLE)? };
        Ok(Monotonic { start: Instant::now(), timer: Arc::new(timer) })
    }

    fn set(&self, left: Duration) -> io::Result<()> {
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // A value of zero would disarm the timer.
        let left = left.max(Duration::from_nanos(1));
        let value = libc::timespec {
            tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: libc::c_long::from(left.subsec_nanos() as i32),
        };
        let setting = libc::itimerspec { it_interval: zero, it_value: value };
        // SAFETY: the descriptor is open as long as `self` lives, `setting` outlives the call, and a null pointer
        // means that the old setting is not requested.
        let done = unsafe {
            libc::timerfd_settime(
                self.timer.get_ref().as_raw_fd(),
                0,
                &raw const setting,
                std::ptr::null_mut(),
            )
        };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

impl Clock for Monotonic {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    async fn until(&self, at: Duration) {
        loop {
            let left = at.saturating_sub(self.now());
            if left.is_zero() {
                return;
            }
            let fired = match self.set(left) {
                Ok(()) => self.timer.readable().await,
                Err(error) => Err(error),
            };
            match fired {
                // The value read is the number of expirations; the clock decides whether it is time.
                Ok(mut ready) => drop(ready.try_io(|timer| timer.get_ref().read(&mut [0; 8]))),
                // The runtime's timer is coarser, but correct.
                Err(_) => tokio::time::sleep(left).await,
            }
        }
    }
}
