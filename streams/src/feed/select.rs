//! Selection of rows of a dataset: a filter, and a part of a stable split.
//!
//! The selection is made once, with the plan: the columns that it needs are read, and one bit a row is kept. The
//! order then counts the selected rows alone, so each of them comes once per epoch for any number of readers.

mod decimal;
mod filter;
mod parse;
mod rows;
mod scan;
mod split;
#[cfg(test)]
mod tests;
mod token;
pub(crate) mod value;

pub use filter::Filter;
pub use split::Split;

pub(crate) use rows::{RowSet, SELECTABLE_ROWS_MAX};
pub(crate) use scan::scan;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::dataset::Dataset;
use crate::feed::error::{FeedError, Result};

/// Rows of a dataset to plan: those that a filter selects and that belong to a part of a split.
///
/// ```
/// use millrace_streams::feed::Selection;
/// let parts = [("train".into(), "0.8".into()), ("test".into(), "0.2".into())];
/// let selection = Selection::new(Some("label != 3"), &parts, Some("train"), &["id".into()])?;
/// assert!(selection.is_some());
/// # Ok::<(), millrace_streams::feed::FeedError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "SelectionRecord", into = "SelectionRecord")]
pub struct Selection {
    filter: Option<Filter>,
    split: Option<Split>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectionRecord {
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    filter: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    splits: Vec<(String, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    split: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    split_by: Vec<String>,
}

impl Selection {
    /// The selection of the parameters of a feed: the condition of a [`Filter`], and the parts, the taken part and
    /// the key columns of a [`Split`]. `None` when neither is given.
    ///
    /// # Errors
    /// Those of [`Filter`] and [`Split::new`]; [`FeedError::Invalid`] when a parameter needs another one.
    pub fn new(
        filter: Option<&str>,
        splits: &[(String, String)],
        split: Option<&str>,
        split_by: &[String],
    ) -> Result<Option<Self>> {
        let filter = filter.map(str::parse).transpose()?;
        let split = match split {
            Some(split) if splits.is_empty() => {
                return Err(FeedError::invalid(format!(
                    "split {split:?} needs splits, the parts with their fractions, for example train=0.8,test=0.2"
                )));
            }
            Some(split) => Some(Split::new(splits, split, split_by)?),
            None if !splits.is_empty() => {
                let names: Vec<&str> = splits.iter().map(|(name, _)| name.as_str()).collect();
                let names = names.join(", ");
                return Err(FeedError::invalid(format!(
                    "splits needs split, the part to read: one of {names}"
                )));
            }
            None if !split_by.is_empty() => {
                return Err(FeedError::invalid(
                    "split_by needs splits and split, the parts and the part to read",
                ));
            }
            None => None,
        };
        let is_any = filter.is_some() || split.is_some();
        Ok(is_any.then_some(Self { filter, split }))
    }

    /// The selection of a topic: without key columns, its split goes by partition and offset. The names of its blocks change
    /// with the end of the range.
    pub(crate) fn of_records(self) -> Result<Self> {
        let by = ["_partition".to_owned(), "_offset".to_owned()];
        let split = match self.split {
            Some(split) if split.by().is_empty() => Some(Split::new(&split.parts(), split.taken(), &by)?),
            split => split,
        };
        Ok(Self { filter: self.filter, split })
    }

    /// The condition, in canonical form.
    pub fn filter(&self) -> Option<String> {
        self.filter.as_ref().map(Filter::to_string)
    }
}

impl From<Selection> for SelectionRecord {
    fn from(selection: Selection) -> Self {
        let split = selection.split.as_ref();
        Self {
            filter: selection.filter(),
            splits: split.map(Split::parts).unwrap_or_default(),
            split: split.map(|split| split.taken().to_owned()),
            split_by: split.map(|split| split.by().to_vec()).unwrap_or_default(),
        }
    }
}

impl TryFrom<SelectionRecord> for Selection {
    type Error = FeedError;

    fn try_from(r: SelectionRecord) -> Result<Self> {
        let selection = Selection::new(r.filter.as_deref(), &r.splits, r.split.as_deref(), &r.split_by)?;
        selection.ok_or_else(|| FeedError::invalid("a selection has a filter or a split"))
    }
}

/// The canonical text. Part of the plan id.
impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Selection { filter, split } = self;
        match (filter, split) {
            (Some(filter), Some(split)) => write!(f, "where {filter}; {split}"),
            (Some(filter), None) => write!(f, "where {filter}"),
            (None, Some(split)) => write!(f, "{split}"),
            (None, None) => Ok(()),
        }
    }
}

/// A selection with the rows that it selects from one dataset.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Selected {
    pub(crate) selection: Selection,
    pub(crate) rows: RowSet,
}

impl Selected {
    /// # Errors
    /// [`FeedError::NothingSelected`] for a selection without rows.
    pub(crate) fn new(selection: Selection, rows: RowSet, dataset: &Dataset) -> Result<Self> {
        if rows.len() == 0 {
            let (path, selection) = (dataset.path().to_owned(), selection.to_string());
            return Err(FeedError::NothingSelected { path, rows: dataset.rows(), selection });
        }
        Ok(Self { selection, rows })
    }

    /// How many rows of a range are selected.
    pub(crate) fn count(&self, rows: Range<u64>) -> u64 {
        self.rows.rank(rows.end) - self.rows.rank(rows.start)
    }
}
