//! AffineGrid: the places that affine maps give to the elements of an image, as a product with their coordinates.

use super::builder::{Builder, Call};
use super::{Dim, GraphError, Op, ValueId, shape};

pub(super) fn affine_grid(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let theta = call.float(b, 0)?;
    let wanted = call.needed_numbers(b, 1)?.elements.clone();
    let aligned = call.int("align_corners", 0)? != 0;
    call.finish(2)?;
    let site = call.site;
    let given = wanted.iter().map(|size| size.dim()).collect::<Option<Vec<_>>>();
    let (rows, size) = match (b.dims(theta), given.as_deref()) {
        ([rows, Dim::Fixed(2), Dim::Fixed(3)], Some([same, _, Dim::Fixed(height), Dim::Fixed(width)]))
            if rows == same =>
        {
            (*rows, vec![*height, *width])
        }
        (
            [rows, Dim::Fixed(3), Dim::Fixed(4)],
            Some([same, _, Dim::Fixed(depth), Dim::Fixed(height), Dim::Fixed(width)]),
        ) if rows == same => (*rows, vec![*depth, *height, *width]),
        (theta, given) => {
            return Err(site.shape(format!(
                "maps {} for an image {}; [rows, 2, 3] for [rows, channels, height, width] and [rows, 3, 4] for \
                 [rows, channels, depth, height, width] are supported",
                shape::display(theta),
                given.map_or_else(|| "of unknown sizes".to_owned(), shape::display)
            )));
        }
    };
    if aligned && size.contains(&1) {
        return Err(site.form(
            "align_corners with an axis of one element: PyTorch and ONNX Runtime give it different places (export with \
             align_corners=False)",
        ));
    }
    let rank = size.len();
    let mut dims = vec![rows];
    dims.extend(size.iter().copied().map(Dim::Fixed));
    dims.push(Dim::Fixed(rank));
    let elements = shape::check(&dims, &site)?;
    let count = elements / rank;
    b.budget.check(count.saturating_mul(rank + 1), &site)?;
    let axes: Vec<Vec<f32>> = size.iter().map(|size| coordinates(*size, aligned)).collect();
    let mut base = Vec::with_capacity(count * (rank + 1));
    for place in 0..count {
        // The last axis comes first, then the constant part of the map.
        let mut rest = place;
        for (axis, size) in axes.iter().zip(&size).rev() {
            base.push(axis[rest % size]);
            rest /= size;
        }
        base.push(1.0);
    }
    let base = b.constant(&[1, count, rank + 1], base, &site)?;
    let maps = b.permute(theta, vec![0, 2, 1], &site)?;
    let places = vec![rows, Dim::Fixed(count), Dim::Fixed(rank)];
    let places = b.push(Op::MatMul, &[base, maps], places, &site)?;
    b.reshape(places, dims, &site)
}

/// The places of an axis from −1 to 1: the centres of the outer ones are the ends if `aligned`, else their edges are.
fn coordinates(size: usize, aligned: bool) -> Vec<f32> {
    let length = size as f64;
    let place = |at: usize| match aligned {
        true => 2.0 * at as f64 / (length - 1.0) - 1.0,
        false => (2.0 * at as f64 + 1.0) / length - 1.0,
    };
    (0..size).map(|at| place(at) as f32).collect()
}
