//! Filling of a slot with the columns of a batch.

use std::sync::Arc;

use arrow::array::{Array, ArrayRef, AsArray};
use arrow::datatypes::DataType;

use crate::feed::FeedBatch;
use crate::feed::error::{FeedError, Result};
use crate::feed::staging::ring::Lease;
use crate::feed::staging::{Place, SlotBytes, StagedBatch, StagedColumn, Staging, row_bytes};

impl Staging {
    /// Copies the columns of a batch that have a place into a slot, and begins to bring them to the device.
    pub(super) fn fill(&self, mut lease: Lease, batch: FeedBatch) -> Result<StagedBatch> {
        let FeedBatch { step, batch, .. } = batch;
        let rows = batch.num_rows();
        let stopped = || FeedError::Stopped { file: format!("step {step}") };
        let memory = lease.memory().ok_or_else(stopped)?;
        let host = memory.host()?;
        let (mut used, mut end) = (Vec::with_capacity(self.places.len()), 0);
        for (place, column) in self.places.iter().zip(batch.columns()) {
            let mut placed = None;
            if let Some(place) = place.filter(|place| rows <= place.rows_max)
                && let Some(target) = host.get_mut(place.offset..)
                && copy(column, place.row_bytes, target)
            {
                end = place.offset + place.bytes(rows);
                placed = Some(place);
            }
            used.push(placed);
        }
        memory.filled(end)?;
        let lease = Arc::new(lease);
        let columns = used.into_iter().zip(batch.columns()).map(|(place, column)| match place {
            Some(place) => StagedColumn::Slot(SlotBytes {
                lease: Arc::clone(&lease),
                device: self.device.clone(),
                offset: place.offset,
                bytes: place.bytes(rows),
            }),
            None => StagedColumn::Array(Arc::clone(column)),
        });
        Ok(StagedBatch { step, rows, columns: columns.collect() })
    }
}

impl Place {
    pub(super) fn bytes(&self, rows: usize) -> usize {
        self.row_bytes * rows
    }
}

/// Copies the rows of a column to the beginning of `target`. False for a column with a null, or one that does not have
/// `row_bytes` bytes per row.
fn copy(column: &ArrayRef, bytes_per_row: usize, target: &mut [u8]) -> bool {
    let Some(target) = target.get_mut(..bytes_per_row * column.len()) else { return false };
    if row_bytes(column.data_type()) != Some(bytes_per_row) {
        return false;
    }
    let mut items = Arc::clone(column);
    loop {
        if items.null_count() > 0 {
            return false;
        }
        let Some(inner) = items.as_fixed_size_list_opt().map(|list| Arc::clone(list.values())) else { break };
        items = inner;
    }
    if let Some(flags) = items.as_boolean_opt() {
        if flags.len() != target.len() {
            return false;
        }
        for (byte, flag) in target.iter_mut().zip(flags.values()) {
            *byte = u8::from(flag);
        }
        return true;
    }
    let data = items.to_data();
    let width = match data.data_type() {
        DataType::FixedSizeBinary(width) => usize::try_from(*width).unwrap_or(0),
        other => other.primitive_width().unwrap_or(0),
    };
    let start = data.offset() * width;
    let bytes = data.buffers().first().and_then(|buffer| buffer.get(start..start + target.len()));
    match bytes {
        Some(bytes) => target.copy_from_slice(bytes),
        // An empty array may have no memory.
        None => return target.is_empty(),
    }
    true
}
