//! Addresses of single rows: the slot that the order gives a row, and the file position where it is stored.

use crate::feed::error::{FeedError, Result};
use crate::feed::order::PLACES_MAX;
use crate::feed::plan::Plan;

/// Storage location of a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowAddress {
    /// Path of the file inside the store.
    pub file: String,
    /// Row group (or record batch) of the file, from 0.
    pub row_group: u32,
    /// Row inside the row group, from 0.
    pub row: u32,
}

impl Plan {
    /// The global row index and the epoch in one slot of one global batch. O(row groups) for the
    /// layout of the epoch; batches are read through [`crate::feed::Feed`].
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a slot or step out of bounds, and for a plan with buckets.
    pub fn row_at(&self, step: u64, slot: usize) -> Result<(u64, u64)> {
        self.check_step(step)?;
        self.check_has_slots()?;
        self.check_slots(&(slot..slot.saturating_add(1)))?;
        let (epoch, virtual_row) = self.order.virtual_row(step, slot as u64);
        let layout = self.layout(epoch);
        let place = layout.place_of(virtual_row);
        let group = layout.groups[place];
        let number = self.bases[group as usize] + virtual_row - layout.starts[place];
        Ok((self.dataset_row(number, group), epoch))
    }

    /// Rows of a plan with buckets change their slots within a block of batches.
    fn check_has_slots(&self) -> Result<()> {
        match self.buckets() {
            None => Ok(()),
            Some(_) => Err(FeedError::invalid("the slots of single rows are those of plans without buckets")),
        }
    }

    /// The step and slot at which `epoch` delivers the row with global index `row`: the inverse of
    /// [`Plan::row_at`].
    ///
    /// # Errors
    /// [`FeedError::Invalid`] for a row or an epoch out of bounds, for a row that is not selected, and for a plan with
    /// buckets.
    pub fn slot_of(&self, epoch: u64, row: u64) -> Result<(u64, usize)> {
        self.check_has_slots()?;
        let rows = self.row_indices();
        if row >= rows {
            return Err(FeedError::invalid(format!("row {row} of a dataset of {rows} rows")));
        }
        if epoch >= PLACES_MAX / self.rows() {
            return Err(FeedError::invalid(format!("epoch {epoch} is beyond the order")));
        }
        let number = match self.selected_rows() {
            None => row,
            Some(selected) if selected.rows.contains(row) => selected.rows.rank(row),
            Some(selected) => {
                return Err(FeedError::invalid(format!(
                    "row {row} is not selected by {}",
                    selected.selection
                )));
            }
        };
        let layout = self.layout(epoch);
        let group = self.bases.partition_point(|&b| b <= number) - 1;
        let place = layout.groups.iter().position(|&g| g as usize == group).unwrap_or(0);
        let virtual_row = layout.starts[place] + number - self.bases[group];
        let (step, slot) = self.order.place_of(epoch, virtual_row);
        Ok((step, slot as usize))
    }

    /// Storage location of the row with a global index; `None` beyond the dataset. O(row groups). For a sequence of
    /// tokens, its row group and the first row of that which is read.
    pub fn address_of(&self, row: u64) -> Option<RowAddress> {
        if self.packing.is_some() {
            let group =
                u32::try_from(self.bases.partition_point(|&base| base <= row).checked_sub(1)?).ok()?;
            let address = self.groups.get(group as usize)?.address;
            let file = self.group_file(group).path.clone();
            return Some(RowAddress { file, row_group: address.index, row: address.first });
        }
        let mut left = row;
        for file in self.dataset.files() {
            for (index, group) in file.row_groups.iter().enumerate() {
                if left < group.rows {
                    let (row_group, row) = (u32::try_from(index).ok()?, u32::try_from(left).ok()?);
                    return Some(RowAddress { file: file.path.clone(), row_group, row });
                }
                left -= group.rows;
            }
        }
        None
    }
}
