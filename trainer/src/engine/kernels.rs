//! Kernels of the engine's own for the processor: convolution, max pooling and normalisation by channels of f32.
//!
//! A convolution lays rows of an image out as columns and multiplies. The backend's own convolutions cost about
//! twice as much, most of all the gradient of the weights. Images are computed in parallel, and sums over images
//! are added in groups of a fixed size: the same bits for any number of threads.
#![allow(unsafe_code)]

use burn_backend::ops::{ConvOptions, ModuleOps};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::channels::{self, Planes};
use crate::precision::Half;

/// Elements of the columns that are laid out at a time: they stay in the second-level cache.
const COLUMNS_MAX: usize = 1 << 16;
/// Columns of a product that keep its kernel busy: images with smaller planes are multiplied several at a time.
const COLUMNS_WANTED: usize = 64;
/// Fewest parts of a batch, so that several threads have work.
const PARTS_MIN: usize = 4;
/// Fewest images whose weight gradients one thread adds up, and most such sums.
const GROUP: usize = 8;
const GROUPS_MAX: usize = 64;
/// Elements of a weight gradient of which there are as few sums as possible.
const SUM_LARGE: usize = 1 << 19;
/// Rows and columns that a transposition moves at a time.
const TRANSPOSED: usize = 32;
/// Most elements of a row of columns; larger ones are left to the backend.
const ROW_MAX: usize = 1 << 26;

/// A backend, with kernels of the engine's own where it has any.
pub(super) trait Kernels: Backend {
    /// The f32 elements of `x` rounded to `half`, as products of that format take them.
    fn narrow(x: FloatTensor<Self>, half: Half) -> FloatTensor<Self> {
        let kind = match half {
            Half::Bf16 => FloatDType::BF16,
            Half::Fp16 => FloatDType::F16,
        };
        Self::float_cast(x, kind)
    }

    /// The f32 elements of a product of the format `half`.
    fn widen(x: FloatTensor<Self>, _half: Half) -> FloatTensor<Self> {
        Self::float_cast(x, FloatDType::F32)
    }

    /// The transpose of the matrix `x` with its rows one after another; none if products of this backend read a view as
    /// fast.
    fn transpose(_x: &FloatTensor<Self>) -> Option<FloatTensor<Self>> {
        None
    }

    /// The convolution of `x`.
    fn convolution(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
        options: ConvOptions<2>,
    ) -> FloatTensor<Self> {
        Self::conv2d(x, weight, bias, options)
    }

    /// The gradient of a convolution's input.
    fn convolution_x_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: ConvOptions<2>,
    ) -> FloatTensor<Self> {
        Self::conv2d_x_backward(x, weight, grad, options)
    }

    /// The gradient of a convolution's weights.
    fn convolution_weight_backward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        options: ConvOptions<2>,
    ) -> FloatTensor<Self> {
        Self::conv2d_weight_backward(x, weight, grad, options)
    }

    /// Mean and population variance of each channel of `[outer, channels, inner]`, as `[1, channels, 1]`.
    fn channel_moments(values: FloatTensor<Self>) -> [FloatTensor<Self>; 2] {
        channels::moments::<Self>(values)
    }

    /// `(values - mean) * factor + bias` of `[outer, channels, inner]`, by channel.
    fn normalized(values: FloatTensor<Self>, by: [FloatTensor<Self>; 3]) -> FloatTensor<Self> {
        channels::normalized::<Self>(values, by)
    }

    /// The gradients of scale and bias of a normalisation by `mean` and `inverse`, as `[1, channels, 1]`.
    fn normalized_sums(
        values: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        by: [FloatTensor<Self>; 2],
    ) -> [FloatTensor<Self>; 2] {
        channels::normalized_sums::<Self>(values, grad, by)
    }

    /// `(grad - of_bias - (values - mean) * inverse * of_scale) * factor`, by channel: `by` has `mean`, `inverse`,
    /// `of_scale`, `of_bias` and `factor`.
    fn normalized_backward(
        values: FloatTensor<Self>,
        grad: FloatTensor<Self>,
        by: [FloatTensor<Self>; 5],
    ) -> FloatTensor<Self> {
        channels::normalized_backward::<Self>(values, grad, by)
    }

    /// The largest element of each window, the first one of equals, and its place in its plane.
    fn max_pool(x: FloatTensor<Self>, windows: Windows) -> (FloatTensor<Self>, IntTensor<Self>) {
        let Windows { kernel, strides, padding, dilations } = windows;
        let found = Self::max_pool2d_with_indices(x, kernel, strides, padding, dilations, false);
        (found.output, found.indices)
    }
}

/// The windows of a pooling.
#[derive(Debug, Clone, Copy)]
pub(super) struct Windows {
    pub(super) kernel: [usize; 2],
    pub(super) strides: [usize; 2],
    pub(super) padding: [usize; 2],
    pub(super) dilations: [usize; 2],
}

impl Kernels for Flex {
    /// Keeps f32: the processor has faster products for it, and their sums have 32 bits.
    fn narrow(x: FlexTensor, half: Half) -> FlexTensor {
        let mut x = x.to_contiguous();
        half.round(x.storage_mut());
        x
    }

    fn widen(x: FlexTensor, half: Half) -> FlexTensor {
        Self::narrow(x, half)
    }

    /// The matrix kernels pack a right factor whose columns are apart element by element, which takes longer than a
    /// product with few rows.
    fn transpose(x: &FlexTensor) -> Option<FlexTensor> {
        let [height, width] = *x.layout().shape().as_slice() else { return None };
        if x.dtype() != DType::F32 || height * width == 0 {
            return None;
        }
        let x = x.to_contiguous();
        let values = transposed(x.storage(), width);
        Some(FlexTensor::from_data(TensorData::new(values, Shape::from(vec![width, height]))))
    }

    fn convolution(
        x: FlexTensor,
        weight: FlexTensor,
        bias: Option<FlexTensor>,
        options: ConvOptions<2>,
    ) -> FlexTensor {
        let Some(plan) = Plan::of(&x, &weight, &options) else {
            return Flex::conv2d(x, weight, bias, options);
        };
        let (x, weight) = (x.to_contiguous(), weight.to_contiguous());
        let bias = bias.map(|bias| bias.to_contiguous());
        let bias = bias.as_ref().map(FlexTensor::storage::<f32>);
        plan.tensor(plan.output(), plan.forward(x.storage(), weight.storage(), bias))
    }

    fn convolution_x_backward(
        x: FlexTensor,
        weight: FlexTensor,
        grad: FlexTensor,
        options: ConvOptions<2>,
    ) -> FlexTensor {
        let Some(plan) = Plan::of(&x, &weight, &options) else {
            return Flex::conv2d_x_backward(x, weight, grad, options);
        };
        let (weight, grad) = (weight.to_contiguous(), grad.to_contiguous());
        plan.tensor(plan.input(), plan.x_backward(weight.storage(), grad.storage()))
    }

    fn convolution_weight_backward(
        x: FlexTensor,
        weight: FlexTensor,
        grad: FlexTensor,
        options: ConvOptions<2>,
    ) -> FlexTensor {
        let Some(plan) = Plan::of(&x, &weight, &options) else {
            return Flex::conv2d_weight_backward(x, weight, grad, options);
        };
        let (x, grad) = (x.to_contiguous(), grad.to_contiguous());
        plan.tensor(plan.weight(), plan.weight_backward(x.storage(), grad.storage()))
    }

    fn channel_moments(values: FlexTensor) -> [FlexTensor; 2] {
        let Some(planes) = Planes::of(&values) else { return channels::moments::<Self>(values) };
        let [mean, variance] = planes.moments(values.to_contiguous().storage());
        [planes.by_channel(mean), planes.by_channel(variance)]
    }

    fn normalized(values: FlexTensor, by: [FlexTensor; 3]) -> FlexTensor {
        let Some(planes) = Planes::of(&values) else { return channels::normalized::<Self>(values, by) };
        let by = by.map(|by| by.to_contiguous());
        let by = by.each_ref().map(FlexTensor::storage::<f32>);
        planes.tensor(planes.normalized(values.to_contiguous().storage(), by))
    }

    fn normalized_sums(values: FlexTensor, grad: FlexTensor, by: [FlexTensor; 2]) -> [FlexTensor; 2] {
        let Some(planes) = Planes::of(&values) else {
            return channels::normalized_sums::<Self>(values, grad, by);
        };
        let (values, grad, by) =
            (values.to_contiguous(), grad.to_contiguous(), by.map(|by| by.to_contiguous()));
        let by = by.each_ref().map(FlexTensor::storage::<f32>);
        planes.normalized_sums(values.storage(), grad.storage(), by).map(|sums| planes.by_channel(sums))
    }

    fn normalized_backward(values: FlexTensor, grad: FlexTensor, by: [FlexTensor; 5]) -> FlexTensor {
        let Some(planes) = Planes::of(&values) else {
            return channels::normalized_backward::<Self>(values, grad, by);
        };
        let (values, grad, by) =
            (values.to_contiguous(), grad.to_contiguous(), by.map(|by| by.to_contiguous()));
        let by = by.each_ref().map(FlexTensor::storage::<f32>);
        planes.tensor(planes.normalized_backward(values.storage(), grad.storage(), by))
    }

    fn max_pool(x: FlexTensor, windows: Windows) -> (FlexTensor, FlexTensor) {
        let Windows { kernel, strides, padding, dilations } = windows;
        let shape = x.layout().shape().as_slice().to_vec();
        let fits = |size: &[usize]| size[0] >= kernel[0] && size[1] >= kernel[1];
        if x.dtype() != DType::F32 || padding != [0, 0] || dilations != [1, 1] || !fits(&shape[2..]) {
            let found = Flex::max_pool2d_with_indices(x, kernel, strides, padding, dilations, false);
            return (found.output, found.indices);
        }
        let out = [0, 1].map(|axis| (shape[2 + axis] - kernel[axis]) / strides[axis] + 1);
        let (values, places) =
            maxima(x.to_contiguous().storage(), [shape[2], shape[3]], kernel, strides, out);
        let shape = Shape::from(vec![shape[0], shape[1], out[0], out[1]]);
        let values = FlexTensor::from_data(TensorData::new(values, shape.clone()));
        (values, FlexTensor::from_data(TensorData::new(places, shape)))
    }
}

/// The transpose of a matrix with rows of `width` elements.
fn transposed(matrix: &[f32], width: usize) -> Vec<f32> {
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

/// The largest element of each window of planes of `size`, and its place in its plane.
fn maxima(
    planes: &[f32],
    [height, width]: [usize; 2],
    kernel: [usize; 2],
    strides: [usize; 2],
    out: [usize; 2],
) -> (Vec<f32>, Vec<i64>) {
    let (size, windows) = (height * width, out[0] * out[1]);
    let mut values = vec![0.0; planes.len() / size * windows];
    let mut places = vec![0; values.len()];
    let outputs = values.par_chunks_exact_mut(windows).zip(places.par_chunks_exact_mut(windows));
    planes.par_chunks_exact(size).zip(outputs).for_each(|(plane, (values, places))| {
        let corners = (0..out[0])
            .flat_map(|row| (0..out[1]).map(move |column| row * strides[0] * width + column * strides[1]));
        for (first, (value, place)) in corners.zip(values.iter_mut().zip(places)) {
            let (mut largest, mut at) = (plane[first], first);
            for row in 0..kernel[0] {
                let start = first + row * width;
                for (offset, found) in plane[start..start + kernel[1]].iter().enumerate() {
                    if *found > largest {
                        (largest, at) = (*found, start + offset);
                    }
                }
            }
            (*value, *place) = (largest, at as i64);
        }
    });
    (values, places)
}

/// The sizes of a convolution of f32 without groups.
#[derive(Debug, Clone, Copy)]
struct Plan {
    images: usize,
    channels: usize,
    filters: usize,
    size: [usize; 2],
    kernel: [usize; 2],
    out: [usize; 2],
    strides: [usize; 2],
    padding: [usize; 2],
    dilations: [usize; 2],
}

/// Rows of an output image that are computed at a time.
#[derive(Debug, Clone, Copy)]
struct Tile {
    first: usize,
    rows: usize,
}

impl Plan {
    /// None for what is left to the backend: groups and other types.
    fn of(x: &FlexTensor, weight: &FlexTensor, options: &ConvOptions<2>) -> Option<Plan> {
        if options.groups != 1 || x.dtype() != DType::F32 {
            return None;
        }
        let [images, channels, height, width] = *x.layout().shape().as_slice() else { return None };
        let [filters, _, kernel_height, kernel_width] = *weight.layout().shape().as_slice() else {
            return None;
        };
        let (size, kernel) = ([height, width], [kernel_height, kernel_width]);
        let out = |axis: usize| {
            let reach = options.dilation[axis] * (kernel[axis] - 1) + 1;
            let padded = size[axis] + 2 * options.padding[axis];
            Some(padded.checked_sub(reach)? / options.stride[axis] + 1)
        };
        let out = [out(0)?, out(1)?];
        let (strides, padding, dilations) = (options.stride, options.padding, options.dilation);
        let row = channels.checked_mul(kernel_height)?.checked_mul(kernel_width)?.checked_mul(out[1])?;
        if row > ROW_MAX {
            return None;
        }
        Some(Plan { images, channels, filters, size, kernel, out, strides, padding, dilations })
    }

    fn input(&self) -> [usize; 4] {
        [self.images, self.channels, self.size[0], self.size[1]]
    }

    fn weight(&self) -> [usize; 4] {
        [self.filters, self.channels, self.kernel[0], self.kernel[1]]
    }

    fn output(&self) -> [usize; 4] {
        [self.images, self.filters, self.out[0], self.out[1]]
    }

    fn tensor(&self, shape: [usize; 4], values: Vec<f32>) -> FlexTensor {
        FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec())))
    }

    /// Elements of an image, of a filter and of an output image's plane.
    fn image(&self) -> usize {
        self.channels * self.size[0] * self.size[1]
    }

    fn taps(&self) -> usize {
        self.channels * self.kernel[0] * self.kernel[1]
    }

    fn plane(&self) -> usize {
        self.out[0] * self.out[1]
    }

    fn tiles(&self) -> impl Iterator<Item = Tile> + use<> {
        let most = (COLUMNS_MAX / (self.taps() * self.out[1]).max(1)).max(1);
        let rows = self.out[0];
        (0..rows).step_by(most).map(move |first| Tile { first, rows: most.min(rows - first) })
    }

    /// The columns of the output row `row` that read column `inside + kernel offset` of an image: their range, and
    /// the first column that the first of them reads.
    fn span(&self, tap: usize) -> (std::ops::Range<usize>, usize) {
        let (stride, offset) = (self.strides[1], tap * self.dilations[1]);
        let first = self.padding[1].saturating_sub(offset).div_ceil(stride).min(self.out[1]);
        let end = (self.size[1] + self.padding[1]).saturating_sub(offset).div_ceil(stride).min(self.out[1]);
        (first..end.max(first), first * stride + offset - self.padding[1].min(first * stride + offset))
    }

    /// Images whose columns are laid out side by side. One, unless their planes are small; depends on sizes alone.
    fn together(&self) -> usize {
        let wanted = COLUMNS_WANTED.div_ceil(self.plane().max(1));
        wanted.min(self.images.div_ceil(PARTS_MIN)).max(1)
    }

    /// The images of a chunk of a batch, in parts whose columns are laid out side by side: the place of the first image,
    /// and their number. One image is cut into tiles.
    fn parts(&self, images: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let together = self.together();
        (0..images).step_by(together).map(move |first| (first, together.min(images - first)))
    }

    /// Calls `visit` for each run of elements of an image that a tile of columns holds: the place of the run in the
    /// columns, its length, and its place in the image, if it is not padding. The columns of a tap begin `pitch` behind
    /// those of the tap before, and those of this image at `first`.
    fn runs(
        &self,
        tile: Tile,
        (first, pitch): (usize, usize),
        mut visit: impl FnMut(usize, usize, Option<usize>),
    ) {
        let [height, width] = self.size;
        let row_length = self.out[1];
        let spans: Vec<_> = (0..self.kernel[1]).map(|tap| self.span(tap)).collect();
        let mut tap_first = first;
        for channel in 0..self.channels {
            for tap_row in 0..self.kernel[0] {
                for (inside, from) in &spans {
                    let mut at = tap_first;
                    tap_first += pitch;
                    for row in tile.first..tile.first + tile.rows {
                        let read = (row * self.strides[0] + tap_row * self.dilations[0])
                            .checked_sub(self.padding[0])
                            .filter(|read| *read < height && !inside.is_empty());
                        match read {
                            None => visit(at, row_length, None),
                            Some(read) => {
                                visit(at, inside.start, None);
                                let place = (channel * height + read) * width + from;
                                visit(at + inside.start, inside.len(), Some(place));
                                visit(at + inside.end, row_length - inside.end, None);
                            }
                        }
                        at += row_length;
                    }
                }
            }
        }
    }

    /// Lays a tile of an image out as columns: for each tap, the elements that the tile's outputs read.
    fn columns(&self, image: &[f32], tile: Tile, place: (usize, usize), columns: &mut [f32]) {
        let stride = self.strides[1];
        self.runs(tile, place, |at, length, place| {
            let run = &mut columns[at..at + length];
            match place {
                None => run.fill(0.0),
                Some(place) if stride == 1 => run.copy_from_slice(&image[place..place + length]),
                Some(place) => {
                    for (value, from) in run.iter_mut().zip(image[place..].iter().step_by(stride)) {
                        *value = *from;
                    }
                }
            }
        });
    }

    /// Adds columns to the image that they were laid out from.
    fn add_columns(&self, columns: &[f32], tile: Tile, place: (usize, usize), image: &mut [f32]) {
        let stride = self.strides[1];
        self.runs(tile, place, |at, length, place| {
            let Some(place) = place else { return };
            let run = &columns[at..at + length];
            if stride == 1 {
                for (sum, value) in image[place..place + length].iter_mut().zip(run) {
                    *sum += value;
                }
            } else {
                for (sum, value) in image[place..].iter_mut().step_by(stride).zip(run) {
                    *sum += value;
                }
            }
        });
    }

    /// The whole of an output image.
    fn whole(&self) -> Tile {
        Tile { first: 0, rows: self.out[0] }
    }

    /// Lays several images out as columns side by side.
    fn columns_of(&self, images: &[f32], columns: &mut Vec<f32>) {
        let plane = self.plane();
        let pitch = images.len() / self.image() * plane;
        columns.resize(self.taps() * pitch, 0.0);
        for (at, image) in images.chunks_exact(self.image()).enumerate() {
            self.columns(image, self.whole(), (at * plane, pitch), columns);
        }
    }

    /// The planes of several output images side by side, filter by filter.
    fn side_by_side(&self, outputs: &[f32], into: &mut Vec<f32>) {
        let (plane, filters) = (self.plane(), self.filters);
        let pitch = outputs.len() / filters;
        into.resize(outputs.len(), 0.0);
        for (at, output) in outputs.chunks_exact(filters * plane).enumerate() {
            for (filter, output) in output.chunks_exact(plane).enumerate() {
                into[filter * pitch + at * plane..][..plane].copy_from_slice(output);
            }
        }
    }

    fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let (taps, plane, together) = (self.taps(), self.plane(), self.together());
        let mut output = vec![0.0; self.images * self.filters * plane];
        let images =
            x.par_chunks(self.image() * together).zip(output.par_chunks_mut(self.filters * plane * together));
        images.for_each_init(
            Default::default,
            |(columns, wide): &mut (Vec<f32>, Vec<f32>), (image, output)| {
                if let Some(bias) = bias {
                    for output in output.chunks_exact_mut(self.filters * plane) {
                        for (output, bias) in output.chunks_exact_mut(plane).zip(bias) {
                            output.fill(*bias);
                        }
                    }
                }
                if together > 1 {
                    self.columns_of(image, columns);
                    self.side_by_side(output, wide);
                    let count = wide.len() / self.filters;
                    multiply_add(
                        [self.filters, count, taps],
                        (wide, [count, 1]),
                        (weight, [taps, 1]),
                        (columns, [count, 1]),
                    );
                    for (at, output) in output.chunks_exact_mut(self.filters * plane).enumerate() {
                        for (filter, output) in output.chunks_exact_mut(plane).enumerate() {
                            output.copy_from_slice(&wide[filter * count + at * plane..][..plane]);
                        }
                    }
                    return;
                }
                for tile in self.tiles() {
                    let count = tile.rows * self.out[1];
                    columns.resize(taps * count, 0.0);
                    self.columns(image, tile, (0, count), columns);
                    let output = &mut output[tile.first * self.out[1]..];
                    multiply_add(
                        [self.filters, count, taps],
                        (output, [plane, 1]),
                        (weight, [taps, 1]),
                        (columns, [count, 1]),
                    );
                }
            },
        );
        output
    }

    fn x_backward(&self, weight: &[f32], grad: &[f32]) -> Vec<f32> {
        let (taps, plane, together) = (self.taps(), self.plane(), self.together());
        let mut result = vec![0.0; self.images * self.image()];
        let images = grad
            .par_chunks(self.filters * plane * together)
            .zip(result.par_chunks_mut(self.image() * together));
        images.for_each_init(
            Default::default,
            |(columns, wide): &mut (Vec<f32>, Vec<f32>), (grad, image)| {
                let multiply = |columns: &mut Vec<f32>, count: usize, grad: &[f32], pitch: usize| {
                    columns.clear();
                    columns.resize(taps * count, 0.0);
                    multiply_add(
                        [taps, count, self.filters],
                        (columns, [count, 1]),
                        (weight, [1, taps]),
                        (grad, [pitch, 1]),
                    );
                };
                if together > 1 {
                    self.side_by_side(grad, wide);
                    let count = wide.len() / self.filters;
                    multiply(columns, count, wide, count);
                    for (at, image) in image.chunks_exact_mut(self.image()).enumerate() {
                        self.add_columns(columns, self.whole(), (at * plane, count), image);
                    }
                    return;
                }
                for tile in self.tiles() {
                    let count = tile.rows * self.out[1];
                    multiply(columns, count, &grad[tile.first * self.out[1]..], plane);
                    self.add_columns(columns, tile, (0, count), image);
                }
            },
        );
        result
    }

    fn weight_backward(&self, x: &[f32], grad: &[f32]) -> Vec<f32> {
        let (taps, plane, filters) = (self.taps(), self.plane(), self.filters);
        let group = match taps * filters < SUM_LARGE {
            true => GROUP.max(self.images.div_ceil(GROUPS_MAX)),
            false => GROUP.max(self.images.div_ceil(PARTS_MIN)),
        };
        let images = x.par_chunks(self.image() * group).zip(grad.par_chunks(filters * plane * group));
        // Sums with the filters side by side, so that the columns need no transpose.
        let parts: Vec<Vec<f32>> = images
            .map_init(Default::default, |(columns, wide): &mut (Vec<f32>, Vec<f32>), (x, grad)| {
                let mut sum = vec![0.0; taps * filters];
                for (first, images) in self.parts(x.len() / self.image()) {
                    let x = &x[first * self.image()..][..images * self.image()];
                    let grad = &grad[first * filters * plane..][..images * filters * plane];
                    let mut multiply = |count: usize, (grad, pitch): (&[f32], usize), columns: &[f32]| {
                        multiply_add(
                            [filters, taps, count],
                            (&mut sum, [1, filters]),
                            (grad, [pitch, 1]),
                            (columns, [1, count]),
                        );
                    };
                    if images > 1 {
                        self.columns_of(x, columns);
                        self.side_by_side(grad, wide);
                        let count = images * plane;
                        multiply(count, (wide, count), columns);
                        continue;
                    }
                    for tile in self.tiles() {
                        let count = tile.rows * self.out[1];
                        columns.resize(taps * count, 0.0);
                        self.columns(x, tile, (0, count), columns);
                        multiply(count, (&grad[tile.first * self.out[1]..], plane), columns);
                    }
                }
                sum
            })
            .collect();
        let mut parts = parts.into_iter();
        let mut sum = parts.next().unwrap_or_else(|| vec![0.0; taps * filters]);
        for part in parts {
            for (sum, value) in sum.iter_mut().zip(part) {
                *sum += value;
            }
        }
        transposed(&sum, filters)
    }
}

/// Elements of a matrix, with the steps between its rows and between its columns.
type Matrix<'a> = (&'a [f32], [usize; 2]);
type MatrixMut<'a> = (&'a mut [f32], [usize; 2]);

/// Adds the product of an `m × k` and a `k × n` matrix to an `m × n` matrix, on this thread.
fn multiply_add(sizes: [usize; 3], sum: MatrixMut<'_>, left: Matrix<'_>, right: Matrix<'_>) {
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

    fn tensor(shape: [usize; 4], seed: usize) -> FlexTensor {
        let values: Vec<f32> =
            (0..shape.iter().product()).map(|at: usize| ((at * 31 + seed * 17) % 23) as f32 - 11.0).collect();
        FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec())))
    }

    fn assert_equal(ours: &FlexTensor, theirs: &FlexTensor) {
        assert_eq!(ours.layout().shape(), theirs.layout().shape());
        // Whole numbers: every order of summation is exact.
        assert_eq!(ours.to_contiguous().storage::<f32>(), theirs.to_contiguous().storage::<f32>());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

        #[test]
        fn convolutions_and_their_gradients_equal_the_backends(
            (images, channels, filters) in (1usize..20, 1usize..4, 1usize..5),
            size in [1usize..12, 1usize..12],
            kernel in [1usize..4, 1usize..4],
            strides in [1usize..4, 1usize..4],
            padding in [0usize..3, 0usize..3],
            dilations in [1usize..3, 1usize..3],
        ) {
            let fits = (0..2).all(|a| size[a] + 2 * padding[a] > dilations[a] * (kernel[a] - 1));
            prop_assume!(fits);
            let x = tensor([images, channels, size[0], size[1]], 1);
            let weight = tensor([filters, channels, kernel[0], kernel[1]], 2);
            let bias = FlexTensor::from_data(TensorData::new((0..filters).map(|f| f as f32).collect(), [filters]));
            let options = || ConvOptions::new(strides, padding, dilations, 1);
            let plan = Plan::of(&x, &weight, &options()).unwrap();
            let grad = tensor(plan.output(), 3);
            for bias in [None, Some(bias)] {
                let ours = Flex::convolution(x.clone(), weight.clone(), bias.clone(), options());
                assert_equal(&ours, &Flex::conv2d(x.clone(), weight.clone(), bias, options()));
            }
            let arguments = || (x.clone(), weight.clone(), grad.clone(), options());
            let (x, w, g, o) = arguments();
            let ours = Flex::convolution_x_backward(x, w, g, o);
            let (x, w, g, o) = arguments();
            assert_equal(&ours, &Flex::conv2d_x_backward(x, w, g, o));
            let (x, w, g, o) = arguments();
            let ours = Flex::convolution_weight_backward(x, w, g, o);
            let (x, w, g, o) = arguments();
            assert_equal(&ours, &Flex::conv2d_weight_backward(x, w, g, o));
        }
    }

    proptest! {
        #[test]
        fn maxima_equal_the_backends(
            shape in [1usize..4, 1usize..4, 1usize..12, 1usize..12],
            kernel in [1usize..4, 1usize..4],
            strides in [1usize..4, 1usize..4],
            nan in 0usize..40,
        ) {
            prop_assume!(shape[2] >= kernel[0] && shape[3] >= kernel[1]);
            let mut values: Vec<f32> =
                (0..shape.iter().product()).map(|at: usize| ((at * 31) % 7) as f32 - 3.0).collect();
            if let Some(value) = values.get_mut(nan) {
                *value = f32::NAN;
            }
            let x = FlexTensor::from_data(TensorData::new(values, Shape::from(shape.to_vec())));
            for (padding, dilations) in [([0, 0], [1, 1]), ([kernel[0] / 2, kernel[1] / 2], [1, 1])] {
                let windows = Windows { kernel, strides, padding, dilations };
                let (values, places) = Flex::max_pool(x.clone(), windows);
                let found = Flex::max_pool2d_with_indices(x.clone(), kernel, strides, padding, dilations, false);
                prop_assert_eq!(values.layout().shape(), found.output.layout().shape());
                let bits = |tensor: &FlexTensor| -> Vec<u32> {
                    tensor.storage::<f32>().iter().map(|value| value.to_bits()).collect()
                };
                prop_assert_eq!(bits(&values), bits(&found.output));
                prop_assert_eq!(places.storage::<i64>(), found.indices.storage::<i64>());
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

    /// Columns in several tiles, and sums over several groups of images.
    #[test]
    fn large_images_are_computed_in_tiles() {
        let (x, weight) = (tensor([17, 8, 70, 66], 1), tensor([4, 8, 3, 3], 2));
        let options = || ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
        let plan = Plan::of(&x, &weight, &options()).unwrap();
        assert!(plan.tiles().count() > 1);
        let grad = tensor(plan.output(), 3);
        let ours = Flex::convolution(x.clone(), weight.clone(), None, options());
        assert_equal(&ours, &Flex::conv2d(x.clone(), weight.clone(), None, options()));
        let ours = Flex::convolution_x_backward(x.clone(), weight.clone(), grad.clone(), options());
        let theirs = Flex::conv2d_x_backward(x.clone(), weight.clone(), grad.clone(), options());
        assert_equal(&ours, &theirs);
        let ours = Flex::convolution_weight_backward(x.clone(), weight.clone(), grad.clone(), options());
        assert_equal(&ours, &Flex::conv2d_weight_backward(x, weight, grad, options()));
    }
}
