//! Integers that are known while a model is read: shapes, axes, positions and masks.
//!
//! Only the number of rows is unknown, so each integer is a multiple of it plus a constant.

use std::cmp::Ordering;

use millrace_bundle::onnx::tensor_proto::DataType;

use super::builder::NodeRef;
use super::{Dim, GraphError, shape, types};

/// Most integers in one tensor.
const ELEMENTS_MAX: usize = 1 << 20;

/// An integer: `rows` times the rows of the batch, plus `plain`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) rows: i64,
    pub(super) plain: i64,
}

impl Size {
    pub(super) fn plain(plain: i64) -> Size {
        Size { rows: 0, plain }
    }

    /// The value, if it does not depend on the rows.
    pub(super) fn known(self) -> Option<i64> {
        (self.rows == 0).then_some(self.plain)
    }

    /// The dimension that has this size; above 0.
    pub(super) fn dim(self) -> Option<Dim> {
        match (usize::try_from(self.rows).ok()?, usize::try_from(self.plain).ok()?) {
            (0, plain) if plain > 0 => Some(Dim::Fixed(plain)),
            (rows, 0) if rows > 0 => Some(Dim::Rows(rows)),
            _ => None,
        }
    }

    pub(super) fn add(self, other: Size) -> Option<Size> {
        Some(Size { rows: self.rows.checked_add(other.rows)?, plain: self.plain.checked_add(other.plain)? })
    }

    pub(super) fn sub(self, other: Size) -> Option<Size> {
        self.add(other.mul(Size::plain(-1))?)
    }

    pub(super) fn mul(self, other: Size) -> Option<Size> {
        let (sized, factor) = match (self.known(), other.known()) {
            (_, Some(factor)) => (self, factor),
            (Some(factor), None) => (other, factor),
            (None, None) => return None,
        };
        Some(Size { rows: sized.rows.checked_mul(factor)?, plain: sized.plain.checked_mul(factor)? })
    }

    /// The quotient, rounded towards 0.
    pub(super) fn div(self, other: Size) -> Option<Size> {
        let exact = |a: i64, b: i64| a.checked_rem(b).filter(|rest| *rest == 0).and(a.checked_div(b));
        match other.known() {
            Some(divisor) if self.rows == 0 => Some(Size::plain(self.plain.checked_div(divisor)?)),
            Some(divisor) => {
                Some(Size { rows: exact(self.rows, divisor)?, plain: exact(self.plain, divisor)? })
            }
            None => {
                let factor = Size::plain(exact(self.rows, other.rows)?);
                (other.mul(factor)? == self).then_some(factor)
            }
        }
    }

    /// The power with a known exponent that is not negative.
    pub(super) fn pow(self, exponent: Size) -> Option<Size> {
        match (self.known(), exponent.known()?) {
            (_, 1) => Some(self),
            (Some(base), exponent) => base.checked_pow(u32::try_from(exponent).ok()?).map(Size::plain),
            (None, _) => None,
        }
    }

    /// The remainder with the dividend's sign.
    pub(super) fn remainder(self, other: Size) -> Option<Size> {
        match (self.known(), other.known()?) {
            (Some(value), divisor) => value.checked_rem(divisor).map(Size::plain),
            (None, _) => self.div(other).map(|_| Size::plain(0)),
        }
    }

    /// The remainder with the divisor's sign.
    pub(super) fn modulo(self, other: Size) -> Option<Size> {
        let divisor = other.known()?;
        match self.known() {
            Some(value) => {
                let rest = value.checked_rem(divisor)?;
                let turned = rest != 0 && (rest < 0) != (divisor < 0);
                Some(Size::plain(if turned { rest + divisor } else { rest }))
            }
            None => self.div(other).map(|_| Size::plain(0)),
        }
    }

    /// The order, if it is the same for every number of rows from 1 on.
    pub(super) fn compare(self, other: Size) -> Option<Ordering> {
        if let (Some(value), Some(other)) = (self.known(), other.known()) {
            return Some(value.cmp(&other));
        }
        let difference = self.sub(other)?;
        let least = difference.rows.checked_add(difference.plain)?;
        match difference.rows.cmp(&0) {
            Ordering::Equal => Some(difference.plain.cmp(&0)),
            Ordering::Greater => (least > 0).then_some(Ordering::Greater),
            Ordering::Less => (least < 0).then_some(Ordering::Less),
        }
    }
}

/// A tensor of known integers, row-major. Truth values are 0 and 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Ints {
    pub(super) dims: Vec<usize>,
    pub(super) elements: Vec<Size>,
}

impl Ints {
    pub(super) fn new(dims: Vec<usize>, elements: Vec<Size>) -> Ints {
        Ints { dims, elements }
    }

    pub(super) fn of(dims: Vec<usize>, values: &[i64]) -> Ints {
        Ints { dims, elements: values.iter().copied().map(Size::plain).collect() }
    }

    pub(super) fn list(elements: Vec<Size>) -> Ints {
        Ints { dims: vec![elements.len()], elements }
    }

    /// The values, if none depends on the rows.
    pub(super) fn known(&self) -> Option<Vec<i64>> {
        self.elements.iter().map(|size| size.known()).collect()
    }

    /// Refuses integers that the element type does not hold.
    pub(super) fn fit(&self, element: DataType, site: &NodeRef) -> Result<(), GraphError> {
        let Some((low, high)) = types::range(element) else { return Ok(()) };
        let known = self.elements.iter().filter_map(|size| size.known());
        match known.map(i128::from).find(|value| !(low..=high).contains(value)) {
            None => Ok(()),
            Some(value) => {
                Err(site.form(format!("its result {value} does not fit {}", element.as_str_name())))
            }
        }
    }

    /// Elements of a shape, within the limit. An empty dimension does not hide the size of another one.
    pub(super) fn count(dims: &[usize], site: &NodeRef) -> Result<usize, GraphError> {
        if dims.len() > shape::RANK_MAX {
            return Err(site.shape(format!("{} dimensions, the limit is {}", dims.len(), shape::RANK_MAX)));
        }
        dims.iter()
            .try_fold(1usize, |count, size| count.checked_mul((*size).max(1)))
            .filter(|count| *count <= ELEMENTS_MAX)
            .map(|count| if dims.contains(&0) { 0 } else { count })
            .ok_or_else(|| {
                site.form(format!("integers of the shape {dims:?}, at most {ELEMENTS_MAX} are supported"))
            })
    }

    /// A tensor whose elements are those of this one at positions that `source` computes from the indices.
    pub(super) fn pick(
        &self,
        dims: Vec<usize>,
        site: &NodeRef,
        source: impl Fn(&[usize]) -> usize,
    ) -> Result<Ints, GraphError> {
        let count = Ints::count(&dims, site)?;
        let mut index = vec![0; dims.len()];
        let mut elements = Vec::with_capacity(count);
        for _ in 0..count {
            elements.push(self.elements[source(&index)]);
            step(&mut index, &dims);
        }
        Ok(Ints { dims, elements })
    }

    /// Steps between neighbours along each axis.
    pub(super) fn strides(&self) -> Vec<usize> {
        strides(&self.dims)
    }

    /// The elements repeated to a shape that this one broadcasts to.
    pub(super) fn expand(&self, dims: &[usize], site: &NodeRef) -> Result<Ints, GraphError> {
        if self.dims == dims {
            return Ok(self.clone());
        }
        let lead = dims.len().checked_sub(self.dims.len());
        let fits = lead.is_some_and(|lead| {
            self.dims.iter().zip(&dims[lead..]).all(|(from, to)| from == to || *from == 1)
        });
        let Some(lead) = lead.filter(|_| fits) else {
            return Err(site.shape(format!("{:?} does not broadcast to {dims:?}", self.dims)));
        };
        let strides = self.strides();
        self.pick(dims.to_vec(), site, |index| {
            (0..strides.len())
                .filter(|axis| self.dims[*axis] != 1)
                .map(|axis| index[lead + axis] * strides[axis])
                .sum()
        })
    }

    /// Combines two tensors element by element, with broadcasting.
    pub(super) fn zip(
        &self,
        other: &Ints,
        site: &NodeRef,
        combine: impl Fn(Size, Size) -> Option<Size>,
    ) -> Result<Ints, GraphError> {
        let dims = broadcast(&self.dims, &other.dims, site)?;
        Ints::count(&dims, site)?;
        let (a, b) = (self.expand(&dims, site)?, other.expand(&dims, site)?);
        let elements =
            a.elements.iter().zip(&b.elements).map(|(a, b)| combine(*a, *b)).collect::<Option<_>>();
        let elements = elements.ok_or_else(|| depends_on_rows(site))?;
        Ok(Ints { dims, elements })
    }
}

/// The refusal of a computation that is not known before the batch is.
pub(super) fn depends_on_rows(site: &NodeRef) -> GraphError {
    site.form("its integers cannot be computed: they divide by 0, overflow, or it depends on the number of rows in a form that is not supported")
}

/// Steps between neighbours along each axis of a shape, row-major.
pub(super) fn strides(dims: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; dims.len()];
    for axis in (1..dims.len()).rev() {
        strides[axis - 1] = strides[axis] * dims[axis];
    }
    strides
}

/// Moves an index to the next element, row-major.
pub(super) fn step(index: &mut [usize], dims: &[usize]) {
    for axis in (0..dims.len()).rev() {
        index[axis] += 1;
        if index[axis] < dims[axis] {
            return;
        }
        index[axis] = 0;
    }
}

/// The shape that two shapes of known integers broadcast to.
pub(super) fn broadcast(a: &[usize], b: &[usize], site: &NodeRef) -> Result<Vec<usize>, GraphError> {
    let rank = a.len().max(b.len());
    if rank > shape::RANK_MAX {
        return Err(site.shape(format!("{rank} dimensions, the limit is {}", shape::RANK_MAX)));
    }
    let at = |dims: &[usize], axis: usize| (axis + dims.len()).checked_sub(rank).map_or(1, |axis| dims[axis]);
    (0..rank)
        .map(|axis| match (at(a, axis), at(b, axis)) {
            (x, y) if x == y => Ok(x),
            (1, other) | (other, 1) => Ok(other),
            _ => Err(site.shape(format!("{a:?} and {b:?} do not broadcast"))),
        })
        .collect()
}
