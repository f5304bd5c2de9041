//! Products and transposes of matrices of f32 in memory, for the processor.
#![allow(unsafe_code)]

use rayon::prelude::*;

/// Rows and columns that a transposition moves at a time.
const TRANSPOSED: usize = 32;

/// The transpose of a matrix with rows of `width` elements.
pub(super) fn transposed(matrix: &[f32], width: usize) -> Vec<f32> {
    let height = matrix.len() / width;
    let mut turned = vec![0.0; matrix.len()];
    turned.par_chunks_mut(TRANSPOSED * height).enumerate().for_each(|(block, turned)| {
        let first_column = block * TRANSPOSED;
        let columns = first_column..(first_column + TRANSPOSED).min(width);
        // A block of rows and columns stays in the first-level cache.
        for first_row in (0..height).step_by(TRANSPOSED) {
            for row in first_row..(first_row + TRANSPOSED).min(height) {
                let places = turned[row..].iter_mut().step_by(height);
                places
                    .zip(&matrix[row * width..][columns.clone()])
                    .for_each(|(place, value)| *place = *value);
            }
        }
    });
    turned
}

/// Elements of a matrix, with the steps between its rows and between its columns.
pub(super) type Matrix<'a> = (&'a [f32], [usize; 2]);
pub(super) type MatrixMut<'a> = (&'a mut [f32], [usize; 2]);

/// Adds the product of an `m × k` and a `k × n` matrix to an `m × n` matrix, on this thread.
pub(super) fn multiply_add(sizes: [usize; 3], sum: MatrixMut<'_>, left: Matrix<'_>, right: Matrix<'_>) {
    product(sizes, sum, true, left, right);
}

/// Writes the product of an `m × k` and a `k × n` matrix to an `m × n` matrix, on this thread.
pub(super) fn multiply(sizes: [usize; 3], into: MatrixMut<'_>, left: Matrix<'_>, right: Matrix<'_>) {
    product(sizes, into, false, left, right);
}

fn product(
    [m, n, k]: [usize; 3],
    (into, steps): MatrixMut<'_>,
    adds: bool,
    left: Matrix<'_>,
    right: Matrix<'_>,
) {
    let holds = |elements: usize, rows: usize, columns: usize, steps: [usize; 2]| {
        rows == 0 || columns == 0 || (rows - 1) * steps[0] + (columns - 1) * steps[1] < elements
    };
    assert!(holds(into.len(), m, n, steps), "the result is too short for {m} × {n}");
    assert!(holds(left.0.len(), m, k, left.1), "the left matrix is too short for {m} × {k}");
    assert!(holds(right.0.len(), k, n, right.1), "the right matrix is too short for {k} × {n}");
    let [row, column] = steps.map(|step| step as isize);
    let [[left_row, left_column], [right_row, right_column]] =
        [left.1, right.1].map(|steps| steps.map(|step| step as isize));
    // SAFETY: the assertions bound each element that the three matrices name by its slice, and `into` is borrowed
    // mutably, so that it overlaps neither of the others.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            into.as_mut_ptr(),
            column,
            row,
            adds,
            left.0.as_ptr(),
            left_column,
            left_row,
            right.0.as_ptr(),
            right_column,
            right_row,
            1.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn transposes_of_any_size_have_rows_for_columns() {
        for [height, width] in [[1, 1], [1, 70], [70, 1], [32, 64], [33, 95]] {
            let matrix: Vec<f32> = (0..height * width).map(|at| at as f32).collect();
            let turned = transposed(&matrix, width);
            for (at, value) in turned.iter().enumerate() {
                let (column, row) = (at / height, at % height);
                assert_eq!(*value, matrix[row * width + column], "{height} × {width}: {row}, {column}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

        /// Fractions, in every layout that the convolutions use: within the rounding of f32 of the exact product.
        #[test]
        fn products_are_those_of_f64(
            [m, n, k] in [1usize..70, 1usize..70, 1usize..70],
            turned in [any::<bool>(), any::<bool>(), any::<bool>()],
            seed in 0usize..1000,
        ) {
            let steps = |turned: bool, rows: usize, columns: usize| if turned { [1, rows] } else { [columns, 1] };
            let values = |count: usize, by: usize| -> Vec<f32> {
                (0..count).map(|at| ((at * by + seed) as f32 * 0.7391).sin()).collect()
            };
            let (left, right) = (values(m * k, 31), values(k * n, 17));
            let [sums, lefts, rights] =
                [steps(turned[0], m, n), steps(turned[1], m, k), steps(turned[2], k, n)];
            let mut sum = values(m * n, 7);
            let before = sum.clone();
            multiply_add([m, n, k], (&mut sum, sums), (&left, lefts), (&right, rights));
            for row in 0..m {
                for column in 0..n {
                    let at = row * sums[0] + column * sums[1];
                    let exact = (0..k).fold(f64::from(before[at]), |total, step| {
                        let left = left[row * lefts[0] + step * lefts[1]];
                        total + f64::from(left) * f64::from(right[step * rights[0] + column * rights[1]])
                    });
                    let rounding = 1e-6 * (k as f64 + 1.0);
                    prop_assert!((f64::from(sum[at]) - exact).abs() < rounding, "{row} {column}: {} {exact}", sum[at]);
                }
            }
        }
    }
}
