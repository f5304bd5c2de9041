//! Places of the largest elements of windows, and MaxUnpool, which puts elements back there.
//!
//! ONNX counts a place from the start of the batch. The graph counts it from the start of its plane, so that a row does
//! not depend on its number; [`RowNumber::Plane`] says so, and MaxUnpool alone reads such places.

use super::arithmetic::{join_at, map};
use super::builder::{Builder, Call, NodeRef};
use super::movement::select;
use super::read::INDEX_BELOW;
use super::rows::RowNumber;
use super::spatial::{both_sides, restore, sizes, spatial};
use super::{Binary, Dim, GraphError, Op, Unary, ValueId, shape};

/// Most elements of a window whose places are read: each one becomes an operation.
const WINDOW_MAX: usize = 256;

/// The windows of a pool over two axes.
pub(super) struct Windows {
    pub(super) kernel: [usize; 2],
    pub(super) strides: [usize; 2],
    pub(super) dilations: [usize; 2],
    /// Elements added before the input.
    pub(super) before: [usize; 2],
    /// Windows along each axis.
    pub(super) out: [usize; 2],
    /// The size of the input, without what was added.
    pub(super) size: [usize; 2],
}

impl Windows {
    /// Whether no element is in two windows.
    pub(super) fn is_distinct(&self) -> bool {
        (0..2).all(|axis| self.dilations[axis] * (self.kernel[axis] - 1) < self.strides[axis])
    }
}

/// The place in its plane of the largest element of each window, the first one of equals. `padded` is the input with
/// −∞ around it.
pub(super) fn places(
    b: &mut Builder,
    site: &NodeRef,
    padded: ValueId,
    windows: &Windows,
) -> Result<ValueId, GraphError> {
    let Windows { kernel, strides, dilations, before, out, size } = *windows;
    let area = kernel[0].saturating_mul(kernel[1]);
    let plane = size[0].saturating_mul(size[1]);
    if area > WINDOW_MAX || plane > INDEX_BELOW as usize {
        return Err(site.form(format!(
            "places in windows of {area} elements of planes of {plane}; at most {WINDOW_MAX} and {INDEX_BELOW} are \
             supported"
        )));
    }
    let line = |axis: usize, at: usize| -> Vec<usize> {
        (0..out[axis]).map(|window| window * strides[axis] + at * dilations[axis]).collect()
    };
    let mut dims = b.dims(padded)[..2].to_vec();
    dims.extend(out.map(Dim::Fixed));
    dims.push(Dim::Fixed(1));
    let mut elements = Vec::with_capacity(area);
    for down in 0..kernel[0] {
        let rows = select(b, site, padded, 2, line(0, down))?;
        for across in 0..kernel[1] {
            let found = select(b, site, rows, 3, line(1, across))?;
            elements.push(b.reshape(found, dims.clone(), site)?);
        }
    }
    let first = match elements[..] {
        [single] => single,
        _ => {
            let mut wide = dims.clone();
            wide[4] = Dim::Fixed(area);
            b.push(Op::Concat(4), &elements, wide, site)?
        }
    };
    let rank = b.push(Op::Rank { axis: 4, largest: true, last: false }, &[first], dims.clone(), site)?;
    let within = |at: usize| at / kernel[1] * dilations[0] * size[1] + at % kernel[1] * dilations[1];
    let table = b.constant(&[area, 1], (0..area).map(|at| within(at) as f32).collect(), site)?;
    dims.truncate(4);
    let rank = b.reshape(rank, dims.clone(), site)?;
    let mut looked = dims.clone();
    looked.push(Dim::Fixed(1));
    let offset = b.push(Op::Lookup { fixed: None }, &[table, rank], looked, site)?;
    let offset = b.reshape(offset, dims, site)?;
    // The first element of a window may be one that was added.
    let start = |axis: usize, at: usize| (at * strides[axis]) as f32 - before[axis] as f32;
    let starts: Vec<f32> = (0..out[0])
        .flat_map(|down| (0..out[1]).map(move |across| (down, across)))
        .map(|(down, across)| start(0, down) * size[1] as f32 + start(1, across))
        .collect();
    let starts = b.constant(&out, starts, site)?;
    let found = join_at(b, site, Binary::Add, offset, starts)?;
    // A window of −∞ has no place inside.
    map(b, site, Unary::Clip(0.0, plane as f32 - 1.0), found)
}

/// Elements at the places of a MaxPool, and 0 elsewhere.
pub(super) fn max_unpool(b: &mut Builder, mut call: Call<'_>) -> Result<ValueId, GraphError> {
    let input = call.float(b, 0)?;
    let site = call.site.clone();
    let places = call.value_id(b, 1);
    let plane = places.and_then(|places| Some((places, *b.row_numbers.get(&places)?)));
    let Some((places, RowNumber::Plane { size, is_distinct })) = plane else {
        return Err(site.form(
            "its places are not the second output of a MaxPool (unpool at those, or write zeros with ScatterElements)",
        ));
    };
    if !is_distinct {
        return Err(site.form(
            "the windows of its MaxPool overlap, and an element may be put in one place twice (pool with strides of at \
             least the size of a window)",
        ));
    }
    let kernel = call.ints("kernel_shape")?.ok_or_else(|| site.form("kernel_shape is missing"))?;
    let (strides, pads) = (call.ints("strides")?, call.ints("pads")?);
    // The rows and channels of the output are those of the input.
    let target = match call.numbers(b, 2)? {
        Some(ints) => {
            let spatial = ints.elements.iter().skip(2).map(|size| usize::try_from(size.known()?).ok());
            let spatial: Option<Vec<usize>> = spatial.collect();
            Some(spatial.filter(|spatial| spatial.len() + 2 == b.dims(input).len()).ok_or_else(|| {
                site.shape("output_shape has no constant size for each axis behind the channels")
            })?)
        }
        None => None,
    };
    call.finish(3)?;
    if b.dims(input) != b.dims(places) {
        return Err(site.shape(format!(
            "{} elements for places {}",
            shape::display(b.dims(input)),
            shape::display(b.dims(places))
        )));
    }
    let (input, [rows, channels, height, width], line) = spatial(b, &site, input)?;
    let out = match target {
        Some(out) if !line => [out[0], out.get(1).copied().unwrap_or(1)],
        Some(out) => [out[0], 1],
        None => {
            let kernel: [usize; 2] = sizes(&site, "kernel_shape", Some(kernel), line, 1, 1)?;
            let strides: [usize; 2] = sizes(&site, "strides", strides, line, 1, 1)?;
            let (before, after) = match pads {
                Some(pads) => both_sides::<2>(&site, &pads, line)?,
                None => ([0; 2], [0; 2]),
            };
            let inner = [height, width].map(|dim| dim.at(1));
            std::array::from_fn(|axis| {
                ((inner[axis] - 1) * strides[axis] + kernel[axis]).saturating_sub(before[axis] + after[axis])
            })
        }
    };
    if out != size {
        return Err(site.shape(format!(
            "a plane of {out:?}, its places are those of one of {size:?} (give it output_shape)"
        )));
    }
    let count = Dim::Fixed(height.at(1) * width.at(1));
    let flat = vec![rows, channels, count];
    let elements = b.reshape(input, flat.clone(), &site)?;
    let places = b.reshape(places, flat, &site)?;
    let dims = vec![rows, channels, Dim::Fixed(size[0] * size[1])];
    let zero = b.scalar(0.0, &site)?;
    let zeros = b.expand(zero, dims.clone(), &site)?;
    let found = b.push(Op::Put(2), &[zeros, places, elements], dims, &site)?;
    let dims = vec![rows, channels, Dim::Fixed(size[0]), Dim::Fixed(size[1])];
    let found = b.reshape(found, dims, &site)?;
    restore(b, &site, found, line)
}
