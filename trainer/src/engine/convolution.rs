//! Convolutions of f32 on the processor, with their gradients.
//!
//! A convolution lays rows of an image out as columns and multiplies. The backend's own convolutions cost about
//! twice as much, most of all the gradient of the weights. Images are computed in parallel, and sums over images
//! are added in groups of a fixed size: the same bits for any number of threads.

use burn_backend::ops::ConvOptions;
use burn_backend::{DType, Shape, TensorData};
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::matrices::{multiply_add, transposed};

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
/// Most elements of a row of columns; larger ones are left to the backend.
const ROW_MAX: usize = 1 << 26;

/// The sizes of a convolution of f32 without groups.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
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
    pub(super) fn of(x: &FlexTensor, weight: &FlexTensor, options: &ConvOptions<2>) -> Option<Plan> {
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

    pub(super) fn input(&self) -> [usize; 4] {
        [self.images, self.channels, self.size[0], self.size[1]]
    }

    pub(super) fn weight(&self) -> [usize; 4] {
        [self.filters, self.channels, self.kernel[0], self.kernel[1]]
    }

    pub(super) fn output(&self) -> [usize; 4] {
        [self.images, self.filters, self.out[0], self.out[1]]
    }

    pub(super) fn tensor(&self, shape: [usize; 4], values: Vec<f32>) -> FlexTensor {
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

    pub(super) fn forward(&self, x: &[f32], weight: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
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

    pub(super) fn x_backward(&self, weight: &[f32], grad: &[f32]) -> Vec<f32> {
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

    pub(super) fn weight_backward(&self, x: &[f32], grad: &[f32]) -> Vec<f32> {
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

#[cfg(test)]
mod tests {
    use burn_backend::ops::ModuleOps;
    use burn_flex::Flex;
    use proptest::prelude::*;

    use super::super::kernels::Kernels;
    use super::*;

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
