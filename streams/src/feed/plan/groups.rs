//! Input groups of a plan: its units of reading in the dataset's own order, for work on whole groups.

use crate::feed::Plan;

/// A row group of a file, or a part of a large one, with the rows of it that the plan has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InputGroup {
    /// Path of the file inside the store.
    pub file: String,
    /// Row group (or record batch) of the file, from 0.
    pub row_group: u32,
    /// First row inside the row group that is decoded.
    pub first_row: u32,
    /// Rows that [`crate::feed::Feed::read_group`] returns, never 0.
    pub rows: u32,
}

impl Plan {
    /// Number of input groups. Groups without a selected row are left out.
    pub fn input_groups(&self) -> u32 {
        self.units()
    }

    /// An input group by its number, from 0; `None` beyond the last one. Each row of the plan is in one group.
    pub fn input_group(&self, number: u32) -> Option<InputGroup> {
        let group = self.groups.get(number as usize)?;
        Some(InputGroup {
            file: self.group_file(number).path.clone(),
            row_group: group.address.index,
            first_row: group.address.first,
            rows: group.rows,
        })
    }
}
