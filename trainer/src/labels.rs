//! Text labels: the classes of a column of strings.
//!
//! The classes are the distinct texts of the dataset in sorted order, so that they depend on the rows alone. A
//! published model keeps them in `labels.json` beside its graph: output `i` belongs to text `i`.
use std::collections::BTreeSet;

use arrow::array::{ArrayRef, AsArray, StringArray};
use arrow::compute::cast;
use arrow::datatypes::DataType;
use arrow::error::ArrowError;
use millrace_streams::dataset::OpenDataset;
use millrace_streams::feed::Selection;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::source;

#[cfg(test)]
mod tests;

/// The file of a bundle with the texts of its classes.
pub const LABELS_FILE: &str = "labels.json";
/// Most distinct labels of a column.
const LABELS_MAX: usize = 1 << 16;
/// Longest label, in bytes.
const LABEL_BYTES_MAX: usize = 1024;
/// Labels that a message lists.
const LISTED: usize = 8;

/// The texts of a model's classes, sorted and distinct.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Dictionary {
    texts: Vec<String>,
}

/// The content of [`LABELS_FILE`].
#[derive(Serialize)]
struct LabelsFile<'a> {
    format_version: u32,
    /// The dataset's column.
    column: &'a str,
    /// The text of each class.
    labels: &'a [String],
}

impl Dictionary {
    pub(crate) fn len(&self) -> usize {
        self.texts.len()
    }

    /// The class of a text.
    pub(crate) fn class_of(&self, text: &str) -> Option<i64> {
        self.texts.binary_search_by(|known| known.as_str().cmp(text)).ok().map(|class| class as i64)
    }

    /// The first text that `other` does not have.
    pub(crate) fn first_missing_in(&self, other: &Dictionary) -> Option<&str> {
        self.texts.iter().map(String::as_str).find(|text| other.class_of(text).is_none())
    }

    /// Whether these are its texts, in order.
    pub(crate) fn is(&self, texts: &[String]) -> bool {
        self.texts == texts
    }

    /// The content of [`LABELS_FILE`].
    pub(crate) fn file(&self, column: &str) -> Vec<u8> {
        let file = LabelsFile { format_version: 1, column, labels: &self.texts };
        serde_json::to_vec_pretty(&file).unwrap_or_default()
    }

    /// The first labels, for messages.
    pub(crate) fn listed(&self) -> String {
        let first: Vec<String> = self.texts.iter().take(LISTED).map(|text| format!("{text:?}")).collect();
        let more = if self.texts.len() > LISTED { ", …" } else { "" };
        first.join(", ") + more
    }

    fn of(texts: BTreeSet<String>) -> Dictionary {
        Dictionary { texts: texts.into_iter().collect() }
    }
}

/// Whether a column holds texts.
pub(crate) fn is_text(kind: &DataType) -> bool {
    match kind {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => true,
        DataType::Dictionary(_, values) => is_text(values),
        _ => false,
    }
}

/// The texts of a column for which [`is_text`] holds.
pub(crate) fn texts(column: &ArrayRef) -> Result<StringArray, ArrowError> {
    Ok(cast(column, &DataType::Utf8)?.as_string::<i32>().clone())
}

/// Reads the labels of the selected rows of some datasets in the column `label` and sorts the distinct ones.
pub(crate) async fn read(
    datasets: &[OpenDataset],
    selection: Option<&Selection>,
    label: &str,
) -> Result<Dictionary> {
    let mut distinct = BTreeSet::new();
    for dataset in datasets {
        add_labels(&mut distinct, dataset, selection, label).await?;
    }
    Ok(Dictionary::of(distinct))
}

async fn add_labels(
    distinct: &mut BTreeSet<String>,
    dataset: &OpenDataset,
    selection: Option<&Selection>,
    label: &str,
) -> Result<()> {
    let bad = |reason: String| Error::Data { dataset: dataset.spec().to_string(), reason };
    source::read_column(dataset, selection, label, |_, batch| {
        let column = batch.batch.column_by_name(label).ok_or_else(|| bad(format!("no column {label:?}")))?;
        let texts = texts(column).map_err(|e| bad(format!("column {label:?} cannot be read as text ({e})")))?;
        // A row without a label is named when it is decoded.
        for text in texts.iter().flatten() {
            if distinct.contains(text) {
                continue;
            }
            if text.len() > LABEL_BYTES_MAX {
                let bytes = text.len();
                return Err(bad(format!(
                    "column {label:?} has a label of {bytes} bytes; labels have at most {LABEL_BYTES_MAX}"
                )));
            }
            distinct.insert(text.to_owned());
            if distinct.len() > LABELS_MAX {
                return Err(bad(format!(
                    "column {label:?} has more than {LABELS_MAX} different labels: is it the column of labels?"
                )));
            }
        }
        Ok(())
    })
    .await
}
