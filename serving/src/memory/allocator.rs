//! Where the allocator of the C library (glibc) puts large blocks while versions are loaded, and otherwise.
//!
//! It cuts blocks from heaps, or maps pages for one. A mapped one is given back when it is freed, but costs a
//! page fault for every page each time: right for weights, wrong for the buffers of runs. By itself it cuts all
//! blocks up to 32 MiB from heaps as soon as it has seen one of that size, so that weights lie between buffers
//! and what was around them stays when they go. Hence blocks from 1 MiB on are mapped while a version is loaded,
//! also for others that run meanwhile, and not otherwise; and of what is free at the end of a heap less is kept.
//!
//! Measured in MiB, without pages of files. A model of 24 MiB loaded and unloaded 12 times: 45 after the third and
//! 55 after the last time without this, 12 and 13 with it. Before, at and after a peak of load: 43, 313 to 384 and
//! 88 to 106 without, 27, 282 to 317 and 52 to 67 with it. To map the buffers of runs as well would leave less after
//! a peak, and a run of MobileNetV2 would take 22 ms of processor time instead of 17.
//!
//! Who sets `MALLOC_…` or `GLIBC_TUNABLES` has the allocator as he says.

/// While there is one, large blocks are mapped.
#[derive(Debug)]
pub(crate) struct Mapping(());

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod glibc {
    use std::sync::LazyLock;

    use libc::c_int;
    use parking_lot::Mutex;

    use super::Mapping;

    /// Blocks from here on are mapped while versions are loaded.
    const LOADING: c_int = 1 << 20;
    /// And otherwise: the most that can be set.
    const RUNNING: c_int = 32 << 20;
    /// What is kept of a heap's end.
    const KEPT: c_int = 16 << 20;

    /// Versions that are being loaded.
    static COUNT: Mutex<usize> = Mutex::new(0);

    /// Whether somebody has said how the allocator shall be.
    static IS_SET: LazyLock<bool> = LazyLock::new(|| {
        std::env::vars_os()
            .any(|(name, _)| name == "GLIBC_TUNABLES" || name.to_string_lossy().starts_with("MALLOC_"))
    });

    fn set(param: c_int, value: c_int) {
        if *IS_SET {
            return;
        }
        // SAFETY: it takes two numbers, under the locks of the allocator.
        if unsafe { libc::mallopt(param, value) } == 0 {
            tracing::debug!(param, value, "the allocator stays as it is");
        }
    }

    impl Mapping {
        pub(crate) fn begin() -> Mapping {
            let mut count = COUNT.lock();
            if *count == 0 {
                set(libc::M_MMAP_THRESHOLD, LOADING);
                set(libc::M_TRIM_THRESHOLD, KEPT);
            }
            *count += 1;
            Mapping(())
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            let mut count = COUNT.lock();
            *count -= 1;
            if *count == 0 {
                set(libc::M_MMAP_THRESHOLD, RUNNING);
            }
        }
    }
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
impl Mapping {
    /// Other allocators are left as they are.
    pub(crate) fn begin() -> Mapping {
        Mapping(())
    }
}
