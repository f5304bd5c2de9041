//! Memory of a slot: the interface of all kinds, and that of the host.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::slice;

use crate::feed::error::{FeedError, Result};
use crate::feed::staging::{ALIGNMENT, ReaderStream};

/// The memory of one slot. Its states: filled by the feed, handed to readers, released.
pub(crate) trait SlotMemory: Send + Sync {
    /// The bytes to fill, on the host. Waits until an earlier copy out of them is done.
    fn host(&mut self) -> Result<&mut [u8]>;

    /// Begins to bring the first `bytes` bytes to the readers, behind all that read what was there before.
    fn filled(&mut self, bytes: usize) -> Result<()>;

    /// The address at which readers find the first byte.
    fn address(&self) -> usize;

    /// Makes a reader's stream wait until the bytes are there.
    fn read_on(&self, stream: ReaderStream) -> Result<()>;

    /// The last reader has let go, on any thread. Never waits.
    fn released(&mut self);
}

/// Plain memory of the host.
pub(crate) struct HostMemory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the memory belongs to this value alone; methods of `&self` do not touch it.
unsafe impl Send for HostMemory {}
// SAFETY: as above.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Memory of at least one byte, all zero.
    pub(crate) fn allocate(bytes: usize) -> Result<Self> {
        let refused = || FeedError::Device {
            device: "cpu".to_owned(),
            reason: format!(
                "{bytes} bytes of memory for a slot are not to be had; use a smaller batch_rows or fewer columns"
            ),
        };
        let layout = Layout::from_size_align(bytes.max(1), ALIGNMENT).map_err(|_| refused())?;
        // SAFETY: the layout has at least one byte.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(refused)?;
        Ok(Self { start, layout })
    }
}

impl SlotMemory for HostMemory {
    fn host(&mut self) -> Result<&mut [u8]> {
        // SAFETY: the memory is this value's, initialized and of this size. Readers hold the lease of the slot, without
        // which nothing has it exclusively.
        Ok(unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) })
    }

    fn filled(&mut self, _bytes: usize) -> Result<()> {
        Ok(())
    }

    fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    fn read_on(&self, _stream: ReaderStream) -> Result<()> {
        Ok(())
    }

    fn released(&mut self) {}
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
