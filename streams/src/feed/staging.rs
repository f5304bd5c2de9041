//! Staging of batches: a ring of slots that threads of the feed fill ahead of the reader, handed over without a copy.
//!
//! A batch is gathered as for any reader, and then copied into its slot, which on a GPU is the copy to pinned memory that
//! a transfer beside computation needs. Both run on threads of the feed.
//!
//! A slot holds the columns of one batch whose rows have a fixed number of bytes: numbers, times, flags as bytes, and
//! lists of a fixed size. Its memory is that of the host, or pinned memory with as much memory of a GPU behind it
//! (feature `cuda`). The reader gets addresses in the slot, and holds the slot until it drops the last of them.
//!
//! Invariants:
//! - A slot has one owner: the ring, a task that fills it, or the reader. It is filled again only when the reader has let
//!   go of all its columns, and on a GPU only behind the work that the reader's streams had queued by then.
//! - Memory is bounded. The ring begins with the batches ahead and one more. It grows by a slot while the reader holds
//!   batches, up to [`SLOTS_MAX`] slots and [`RING_BYTES_MAX`] bytes.
//! - A wait for a slot ends after [`HELD_MAX`] with [`FeedError::SlotsHeld`], and loses no batch.

mod fill;
mod memory;
mod ring;
mod stream;
#[cfg(test)]
mod tests;

#[cfg(feature = "cuda")]
mod cuda;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arrow::array::ArrayRef;
use arrow::datatypes::{DataType, SchemaRef};
use parking_lot::Mutex;

use crate::feed::any::check_places;
use crate::feed::error::{FeedError, Result};
use crate::feed::order::PLACES_MAX;
use crate::feed::{AnyFeed, Shard};
use memory::{HostMemory, SlotMemory};
use ring::{Lease, Ring};

pub use stream::StagedStream;

/// Most slots of a ring.
pub const SLOTS_MAX: usize = 64;
/// Most bytes of the slots of a ring, if more than those that a ring begins with.
pub const RING_BYTES_MAX: u64 = 4 << 30;
/// Largest slot.
pub const SLOT_BYTES_MAX: u64 = 1 << 30;
/// Longest wait for a reader that holds all slots.
pub const HELD_MAX: Duration = Duration::from_secs(5);

/// Batches that are filled ahead of the reader, and their bytes.
const AHEAD_MAX: usize = 4;
const AHEAD_BYTES_MAX: u64 = 512 << 20;
/// Columns begin at multiples of this in a slot, as vector instructions and GPUs like them.
const ALIGNMENT: usize = 256;

/// A device on which batches are staged. Clones are the same device.
#[derive(Clone)]
pub struct Device(Kind);

#[derive(Clone)]
enum Kind {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Arc<cuda::Gpu>),
}

impl Device {
    /// The memory of the host.
    pub const CPU: Device = Device(Kind::Cpu);

    /// Opens `cpu`, `cuda:N`, or `cuda`, which is `cuda:0`.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for another name, [`FeedError::Device`] for a GPU that cannot be used.
    pub fn open(name: &str) -> Result<Self> {
        let number = match name {
            "cpu" => return Ok(Self::CPU),
            "cuda" => Some(0),
            name => name.strip_prefix("cuda:").and_then(|number| number.parse::<u16>().ok()),
        };
        let Some(number) = number else {
            return Err(FeedError::invalid(format!(
                "device is {name:?}; it must be \"cpu\", \"cuda\" or \"cuda:N\" with the number N of a GPU"
            )));
        };
        Self::gpu(number)
    }

    #[cfg(feature = "cuda")]
    fn gpu(number: u16) -> Result<Self> {
        Ok(Self(Kind::Cuda(Arc::new(cuda::Gpu::open(number)?))))
    }

    #[cfg(not(feature = "cuda"))]
    fn gpu(number: u16) -> Result<Self> {
        Err(FeedError::Device {
            device: format!("cuda:{number}"),
            reason:
                "this build has no CUDA; build the wheel with make wheel FEATURES=cuda, or leave device out"
                    .to_owned(),
        })
    }

    /// The type and the number of the device in DLPack.
    pub fn dlpack(&self) -> (i32, i32) {
        match &self.0 {
            Kind::Cpu => (1, 0),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => (2, gpu.number()),
        }
    }

    /// Whether this is the memory of the host.
    pub fn is_cpu(&self) -> bool {
        matches!(self.0, Kind::Cpu)
    }

    fn allocate(&self, bytes: usize) -> Result<Box<dyn SlotMemory>> {
        match &self.0 {
            Kind::Cpu => Ok(Box::new(HostMemory::allocate(bytes)?)),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => Ok(Box::new(cuda::GpuMemory::allocate(gpu, bytes)?)),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Cpu => f.write_str("cpu"),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => write!(f, "cuda:{}", gpu.number()),
        }
    }
}

/// The stream of a GPU on which a reader uses a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReaderStream {
    /// The handle of a stream of the driver, which must live as long as the batch; 1 is the default stream.
    Handle(usize),
    /// A stream that is not named: the batch is complete when it is handed over, and its slot waits for all work of the
    /// device.
    Unknown,
}

/// The slots of the batches of one reader.
pub struct Staging {
    device: Device,
    /// The place of each column in a slot; none for a column that stays an array.
    places: Vec<Option<Place>>,
    slot_bytes: usize,
    ahead: usize,
    slots_max: usize,
    held_max: Duration,
    ring: Mutex<Option<Arc<Ring>>>,
}

/// Where the rows of a column lie in a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Place {
    offset: usize,
    row_bytes: usize,
    rows_max: usize,
}

/// A batch in a slot.
pub struct StagedBatch {
    /// Number of the global batch.
    pub step: u64,
    /// Rows of the batch.
    pub rows: usize,
    /// The columns, in the order of the schema.
    pub columns: Vec<StagedColumn>,
}

/// A column of a staged batch.
pub enum StagedColumn {
    /// The rows one after the other, without nulls.
    Slot(SlotBytes),
    /// A column without a fixed number of bytes per row, or with a null.
    Array(ArrayRef),
}

/// Some bytes of a slot. The slot is filled again once all of these are dropped. In a child of a fork they are left as
/// they are: the slots belong to the parent.
pub struct SlotBytes {
    lease: Arc<Lease>,
    device: Device,
    offset: usize,
    bytes: usize,
}

impl Staging {
    /// The slots for batches of at most `rows` rows of a schema. Allocates nothing yet.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] if no column has a fixed number of bytes per row, if one has not and the device is a GPU, or
    /// if a slot is beyond [`SLOT_BYTES_MAX`].
    pub fn new(schema: &SchemaRef, rows: usize, device: Device) -> Result<Arc<Self>> {
        let mut places = Vec::with_capacity(schema.fields().len());
        let mut bytes = 0_u64;
        for field in schema.fields() {
            let Some(row_bytes) = row_bytes(field.data_type()) else {
                if !device.is_cpu() {
                    return Err(FeedError::invalid(format!(
                        "column {:?} is {}, and only numbers, flags and lists of them with a fixed size are staged on {device}; \
                         leave the column out, or read it without device",
                        field.name(),
                        field.data_type()
                    )));
                }
                places.push(None);
                continue;
            };
            let size = (row_bytes as u64).saturating_mul(rows as u64);
            let end = bytes.saturating_add(size);
            if end > SLOT_BYTES_MAX {
                return Err(FeedError::invalid(format!(
                    "stage batches on {device}: {rows} rows take more than {SLOT_BYTES_MAX} bytes at column {:?}; use a smaller \
                     batch_rows, or fewer columns",
                    field.name()
                )));
            }
            places.push(Some(Place { offset: bytes as usize, row_bytes, rows_max: rows }));
            bytes = end.next_multiple_of(ALIGNMENT as u64);
        }
        if places.iter().all(Option::is_none) {
            return Err(FeedError::invalid(format!(
                "stage batches on {device}: no column has numbers, flags or lists of them with a fixed size; leave device out"
            )));
        }
        // A rank may have no row.
        let bytes = bytes.max(ALIGNMENT as u64);
        let ahead = usize::try_from(AHEAD_BYTES_MAX / bytes).unwrap_or(AHEAD_MAX).clamp(1, AHEAD_MAX);
        let slots_max =
            usize::try_from(RING_BYTES_MAX / bytes).unwrap_or(SLOTS_MAX).clamp(ahead + 1, SLOTS_MAX);
        Ok(Arc::new(Self {
            device,
            places,
            slot_bytes: bytes as usize,
            ahead,
            slots_max,
            held_max: HELD_MAX,
            ring: Mutex::new(None),
        }))
    }

    /// The ring, whose first slots are allocated at the first call.
    fn ring(&self) -> Result<Arc<Ring>> {
        let mut ring = self.ring.lock();
        if let Some(ring) = &*ring {
            return Ok(Arc::clone(ring));
        }
        let first = (0..=self.ahead).map(|_| self.device.allocate(self.slot_bytes));
        let made = Ring::new(first.collect::<Result<_>>()?, self.slots_max);
        Ok(Arc::clone(ring.insert(made)))
    }

    /// A free slot, or a further one; pending while the reader holds as many as there may be.
    fn poll_lease(&self, ring: &Arc<Ring>, cx: &mut Context<'_>) -> Poll<Lease> {
        ring.poll_lease(cx, || self.device.allocate(self.slot_bytes))
    }

    fn held(&self, ring: &Ring) -> FeedError {
        FeedError::SlotsHeld {
            slots: ring.slots(),
            bytes: self.slot_bytes as u64,
            seconds: self.held_max.as_secs(),
            device: self.device.to_string(),
        }
    }
}

impl SlotBytes {
    /// The address of the first byte, in the memory of the device. The holder may write to it.
    pub fn address(&self) -> usize {
        self.lease.address() + self.offset
    }

    /// Number of bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The device whose memory it is.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Hands the bytes to a reader's stream, which waits until they are there. On the host they are.
    ///
    /// # Errors
    /// [`FeedError::Device`] if the driver refuses.
    pub fn read_on(&self, stream: ReaderStream) -> Result<()> {
        self.lease.read_on(stream)
    }
}

impl AnyFeed {
    /// As [`AnyFeed::stream_places`], with batches in slots. One stream at a time should use a staging: two of them would
    /// wait for each other's slots.
    ///
    /// # Errors
    /// Those of [`AnyFeed::stream_places`], and [`FeedError::Device`] if the slots cannot be allocated.
    pub fn stream_staged(
        &self,
        shard: Shard,
        places: Range<u64>,
        stride: u64,
        staging: &Arc<Staging>,
    ) -> Result<StagedStream> {
        check_places(&places, stride, PLACES_MAX)?;
        StagedStream::new(self.clone(), shard, places, stride, Arc::clone(staging))
    }
}

/// Bytes of a row of a column in a slot; none for a column without a fixed number of them.
fn row_bytes(data_type: &DataType) -> Option<usize> {
    match data_type {
        // A flag is a byte.
        DataType::Boolean => Some(1),
        DataType::FixedSizeBinary(width) => usize::try_from(*width).ok(),
        DataType::FixedSizeList(item, width) => {
            row_bytes(item.data_type())?.checked_mul(usize::try_from(*width).ok()?)
        }
        // Arrays have days in 64 bits, and their readers convert them.
        DataType::Date32 => None,
        DataType::Int8
        | DataType::Int16
        | DataType::Int32
        | DataType::Int64
        | DataType::UInt8
        | DataType::UInt16
        | DataType::UInt32
        | DataType::UInt64
        | DataType::Float16
        | DataType::Float32
        | DataType::Float64
        | DataType::Date64
        | DataType::Timestamp(..)
        | DataType::Duration(_) => data_type.primitive_width(),
        _ => None,
    }
}
