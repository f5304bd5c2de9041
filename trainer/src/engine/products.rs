//! Gradients of weight matrices as the two factors of which each is the product.
//!
//! The gradient of a matrix that one matrix product reads is `leftᵀ · right`, where both factors have a row for each row
//! that was multiplied. A shard of few rows has factors far smaller than the gradient. An exact sum of many shards takes
//! the gradients tile by tile, so that none of them is ever in memory as a whole.

use std::ops::Range;

use super::matrices::multiply;
use crate::graph::{Dim, Graph, Node, Op, ValueId};

/// Fewest elements of a matrix whose gradient leaves as factors; a smaller one fits the first-level cache.
const ELEMENTS_MIN: usize = 1 << 12;

/// A weight matrix whose gradient leaves as factors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Factored {
    /// Its place in the flat vector.
    pub(super) range: Range<usize>,
    /// The product reads its transpose.
    pub(super) is_turned: bool,
}

/// The gradient of a weight matrix, as factors with elements `E`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Product<E> {
    range: Range<usize>,
    /// Rows of both factors.
    rows: usize,
    left: Vec<E>,
    right: Vec<E>,
}

impl<E> Product<E> {
    /// The gradient of `matrix`, for a product of `input` with it (or with its transpose) whose output has the gradient
    /// `grad`; both have `rows` rows, row-major.
    pub(super) fn new(matrix: &Factored, rows: usize, input: Vec<E>, grad: Vec<E>) -> Product<E> {
        let (left, right) = if matrix.is_turned { (grad, input) } else { (input, grad) };
        Product { range: matrix.range.clone(), rows, left, right }
    }

    /// The place of the matrix in the flat vector.
    pub(crate) fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// Elements of both factors.
    pub(crate) fn elements(&self) -> usize {
        self.left.len() + self.right.len()
    }

    /// Elements of a row of the matrix; at least 1.
    pub(crate) fn width(&self) -> usize {
        (self.right.len() / self.rows.max(1)).max(1)
    }
}

#[cfg(test)]
impl<E> Product<E> {
    /// The gradient `leftᵀ · right` of the matrix at `range`.
    pub(crate) fn of(range: Range<usize>, rows: usize, left: Vec<E>, right: Vec<E>) -> Product<E> {
        Product { range, rows, left, right }
    }
}

impl Product<f32> {
    /// Multiplies the gradient by a power of two.
    pub(super) fn multiply(&mut self, factor: f32) {
        super::multiply(&mut self.right, factor);
    }

    /// Computes the rows of the gradient from `first_row` on that fill `values`, on this thread. The bits of a row depend
    /// on how many rows are computed with it.
    pub(crate) fn rows_into(&self, first_row: usize, values: &mut [f32]) {
        let (height, width) = (self.left.len() / self.rows.max(1), self.width());
        let count = values.len() / width;
        if self.rows == 0 || count == 0 {
            values.fill(0.0);
            return;
        }
        multiply(
            [count, width, self.rows],
            (values, [width, 1]),
            (&self.left[first_row..], [1, height]),
            (&self.right, [width, 1]),
        );
    }
}

/// For each node, the weight matrix whose gradient it alone gives; `place_of` is the place of a value in the flat vector,
/// if it is a parameter that trains.
pub(super) fn factored(
    graph: &Graph,
    place_of: impl Fn(ValueId) -> Option<Range<usize>>,
) -> Vec<Option<Factored>> {
    let mut readers = vec![0usize; graph.values().len()];
    // The transposed value of each value that is one.
    let mut turned = vec![None; graph.values().len()];
    for node in graph.nodes() {
        for input in &node.inputs {
            readers[*input] += 1;
        }
        if let (Op::Permute(axes), [input]) = (&node.op, &node.inputs[..])
            && axes[..] == [1, 0]
        {
            turned[node.output] = Some(*input);
        }
    }
    readers[graph.output()] += 1;
    let is_matrix = |value: ValueId| graph.values()[value].dims.len() == 2;
    let find = |node: &Node| {
        let [left, right] = node.inputs[..] else { return None };
        if node.op != Op::MatMul || !is_matrix(left) || !is_matrix(right) || readers[right] != 1 {
            return None;
        }
        let (matrix, is_turned) = match turned[right] {
            Some(original) => (original, true),
            None => (right, false),
        };
        let [Dim::Fixed(height), Dim::Fixed(width)] = graph.values()[matrix].dims[..] else { return None };
        let range = place_of(matrix)?;
        let is_alone = readers[matrix] == 1 && range.len() == height * width;
        (is_alone && range.len() >= ELEMENTS_MIN).then_some(Factored { range, is_turned })
    };
    graph.nodes().iter().map(find).collect()
}
