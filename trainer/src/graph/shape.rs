//! Shapes with a dynamic number of rows, in checked arithmetic.

use super::GraphError;
use super::builder::NodeRef;

/// Most elements a value may have per row of the batch.
pub(super) const ELEMENTS_MAX: usize = 1 << 30;

/// Most dimensions a value may have.
pub(super) const RANK_MAX: usize = 8;

/// One dimension of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    /// The same for every batch; above 0.
    Fixed(usize),
    /// This many times the rows of the batch; above 0.
    Rows(usize),
}

impl Dim {
    /// The dimension for a batch of `rows`.
    pub fn at(self, rows: usize) -> usize {
        match self {
            Dim::Fixed(size) => size,
            Dim::Rows(factor) => factor * rows,
        }
    }

    fn is_rows(self) -> bool {
        matches!(self, Dim::Rows(_))
    }
}

impl std::fmt::Display for Dim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Dim::Fixed(size) => write!(f, "{size}"),
            Dim::Rows(1) => f.write_str("rows"),
            Dim::Rows(factor) => write!(f, "{factor}·rows"),
        }
    }
}

/// `[rows, 64]`
pub(super) fn display(dims: &[Dim]) -> String {
    let parts: Vec<String> = dims.iter().map(Dim::to_string).collect();
    format!("[{}]", parts.join(", "))
}

/// Elements for a batch of `rows`; shapes in a graph were checked, so this does not overflow.
pub(super) fn elements_at(dims: &[Dim], rows: usize) -> usize {
    dims.iter().map(|dim| dim.at(rows)).product()
}

/// Position of the dimension that grows with the batch.
pub(super) fn rows_axis(dims: &[Dim]) -> Option<usize> {
    dims.iter().position(|dim| dim.is_rows())
}

/// Elements per row of the batch, refusing shapes beyond the limits or with two row dimensions.
pub(super) fn check(dims: &[Dim], site: &NodeRef) -> Result<usize, GraphError> {
    if dims.len() > RANK_MAX {
        return Err(site.shape(format!("{} dimensions, the limit is {RANK_MAX}", dims.len())));
    }
    if dims.iter().filter(|dim| dim.is_rows()).count() > 1 {
        return Err(site.mixes_rows(format!("its output {} pairs rows with rows", display(dims))));
    }
    let mut total = 1usize;
    for dim in dims {
        let size = dim.at(1);
        if size == 0 {
            return Err(site.shape(format!("{} is empty", display(dims))));
        }
        total = total.checked_mul(size).filter(|total| *total <= ELEMENTS_MAX).ok_or_else(|| {
            site.shape(format!("{} has more than {ELEMENTS_MAX} elements per row", display(dims)))
        })?;
    }
    Ok(total)
}

/// The shape that two shapes broadcast to.
pub(super) fn broadcast(a: &[Dim], b: &[Dim], site: &NodeRef) -> Result<Vec<Dim>, GraphError> {
    let rank = a.len().max(b.len());
    let at = |dims: &[Dim], axis: usize| {
        (axis + dims.len()).checked_sub(rank).map_or(Dim::Fixed(1), |axis| dims[axis])
    };
    (0..rank)
        .map(|axis| match (at(a, axis), at(b, axis)) {
            (x, y) if x == y => Ok(x),
            (Dim::Fixed(1), other) | (other, Dim::Fixed(1)) => Ok(other),
            _ => Err(site.shape(format!("{} and {} do not broadcast", display(a), display(b)))),
        })
        .collect()
}

/// An axis given by a model, counted from the end when negative.
pub(super) fn axis(value: i64, rank: usize, site: &NodeRef) -> Result<usize, GraphError> {
    let signed = if value < 0 { value.checked_add(rank as i64) } else { Some(value) };
    signed
        .and_then(|axis| usize::try_from(axis).ok())
        .filter(|axis| *axis < rank)
        .ok_or_else(|| site.shape(format!("axis {value} of a value with {rank} dimensions")))
}

/// Distinct axes given by a model, in ascending order.
pub(super) fn axes(values: &[i64], rank: usize, site: &NodeRef) -> Result<Vec<usize>, GraphError> {
    let mut found = values.iter().map(|value| axis(*value, rank, site)).collect::<Result<Vec<_>, _>>()?;
    found.sort_unstable();
    if found.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(site.shape(format!("axes {values:?} name one axis twice")));
    }
    Ok(found)
}

/// The target of a reshape: one dimension may be open, and rows stay outermost.
pub(super) fn reshape(from: &[Dim], to: &[Option<Dim>], site: &NodeRef) -> Result<Vec<Dim>, GraphError> {
    let per_row = check(from, site)?;
    let open = to.iter().filter(|dim| dim.is_none()).count();
    let known: Vec<Dim> = to.iter().copied().flatten().collect();
    let known_elements = check(&known, site)?;
    let target = |dims: &[Option<Dim>]| {
        let parts: Vec<String> =
            dims.iter().map(|dim| dim.map_or_else(|| "-1".to_owned(), |dim| dim.to_string())).collect();
        format!("[{}]", parts.join(", "))
    };
    let mismatch = || {
        site.shape(format!(
            "{} cannot take the shape {} (write -1 for the dimension that holds the rows)",
            display(from),
            target(to)
        ))
    };
    let has_rows = rows_axis(from).is_some();
    let rows_known = rows_axis(&known).is_some();
    let dims = match open {
        0 if per_row == known_elements && has_rows == rows_known => known,
        1 if per_row % known_elements == 0 && (has_rows || !rows_known) => {
            let rest = per_row / known_elements;
            let filler = if has_rows && !rows_known { Dim::Rows(rest) } else { Dim::Fixed(rest) };
            to.iter().map(|dim| dim.unwrap_or(filler)).collect()
        }
        _ => return Err(mismatch()),
    };
    for side in [from, &dims] {
        let outer = rows_axis(side).map_or(&[][..], |axis| &side[..axis]);
        if outer.iter().any(|dim| *dim != Dim::Fixed(1)) {
            return Err(site.mixes_rows(format!(
                "reshaping {} to {} interleaves them",
                display(from),
                display(&dims)
            )));
        }
    }
    Ok(dims)
}
