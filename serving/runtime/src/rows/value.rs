//! Abstract values of the row proof: dependence on the rows, extents, and the elements of small tensors.

use std::sync::Arc;

use super::Dependence;
use super::extent::{Entry, Extent};

/// Maximum number of elements of a tensor whose elements are tracked.
pub(super) const CONTENT_MAX: usize = 64;

/// How a value depends on the rows of a run.
#[derive(Debug, Clone)]
pub(super) enum Kind {
    /// Not at all: the value is the same in a run of several requests as in a run of each.
    Free,
    /// Only by the number of rows. Its integers are tracked and may be used as a shape.
    Sized,
    /// The concatenation, along an axis, of its values in a run of each request. The extent of that axis is `outer`
    /// times the number of rows times the remaining factors, in this order. `outer` is not 1 if an axis before the
    /// rows was merged with theirs.
    Rows {
        /// The axis.
        axis: usize,
        /// The factor of the extent that varies more slowly than the rows.
        outer: Extent,
    },
    /// In a way that is not known to keep rows apart.
    Mixed(Arc<Dependence>),
}

/// Elements of a small tensor of rank 0 or 1.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Content {
    Unknown,
    Integers(Vec<Entry>),
    Floats(Vec<f32>),
}

/// An abstract value.
#[derive(Debug, Clone)]
pub(super) struct Value {
    pub(super) kind: Kind,
    /// Extents, always known for [`Kind::Rows`]; `None` if the rank is unknown.
    pub(super) dims: Option<Vec<Extent>>,
    pub(super) content: Content,
    /// Whether its integers have 32 bits.
    pub(super) narrow: bool,
}

impl Value {
    pub(super) fn free(dims: Option<Vec<Extent>>) -> Value {
        Value { kind: Kind::Free, dims, content: Content::Unknown, narrow: false }
    }

    pub(super) fn rows(axis: usize, outer: Extent, dims: Vec<Extent>) -> Value {
        Value { kind: Kind::Rows { axis, outer }, dims: Some(dims), content: Content::Unknown, narrow: false }
    }

    pub(super) fn mixed(why: Arc<Dependence>) -> Value {
        Value { kind: Kind::Mixed(why), dims: None, content: Content::Unknown, narrow: false }
    }

    /// Integers of rank 0 or 1.
    pub(super) fn integers(entries: Vec<Entry>, rank: usize) -> Value {
        let kind = if entries.iter().any(Entry::is_of_rows) { Kind::Sized } else { Kind::Free };
        let dims = (0..rank).map(|_| Extent::known(entries.len() as i64)).collect();
        Value { kind, dims: Some(dims), content: Content::Integers(entries), narrow: false }
    }

    /// The value after a conversion to 32-bit integers.
    pub(super) fn narrowed(self) -> Value {
        let content = match self.content {
            Content::Integers(entries) => {
                Content::Integers(entries.into_iter().map(Entry::narrowed).collect())
            }
            content => content,
        };
        Value { content, narrow: true, ..self }
    }

    /// The axis of the rows and their outer factor, if the value has rows.
    pub(super) fn axis(&self) -> Option<(usize, &Extent)> {
        match &self.kind {
            Kind::Rows { axis, outer } => Some((*axis, outer)),
            _ => None,
        }
    }

    pub(super) fn is_free(&self) -> bool {
        matches!(self.kind, Kind::Free)
    }

    pub(super) fn entries(&self) -> Option<&[Entry]> {
        match &self.content {
            Content::Integers(entries) => Some(entries),
            _ => None,
        }
    }

    /// Its integers, if all are known numbers.
    pub(super) fn numbers(&self) -> Option<Vec<i64>> {
        self.entries()?.iter().map(Entry::as_number).collect()
    }

    pub(super) fn rank(&self) -> Result<usize, String> {
        Ok(self.extents()?.len())
    }

    pub(super) fn extents(&self) -> Result<&[Extent], String> {
        self.dims.as_deref().ok_or_else(|| "the rank of an input is not known".to_owned())
    }

    /// Whether it has one element.
    pub(super) fn is_single(&self) -> bool {
        self.dims.as_ref().is_some_and(|dims| dims.iter().all(Extent::is_one))
    }

    /// A value with other elements and the same dependence on the rows, which are along `axis` of the extents `dims`.
    pub(super) fn like(&self, axis: usize, dims: Vec<Extent>) -> Value {
        match &self.kind {
            Kind::Rows { outer, .. } => Value::rows(axis, outer.clone(), dims),
            _ => Value::free(Some(dims)),
        }
    }

    /// A value with other elements and the same shape.
    pub(super) fn same_shape(&self) -> Value {
        Value { kind: self.kind.clone(), dims: self.dims.clone(), content: Content::Unknown, narrow: false }
    }
}

/// Known extents from a constant's dimensions.
pub(super) fn extents_of(dims: &[i64]) -> Vec<Extent> {
    dims.iter().map(|extent| Extent::known(*extent)).collect()
}
