//! Rendering of decoded pixels: scaled, cropped, flipped and converted into one row of the tensor.

use fast_image_resize::images::{TypedCroppedImage, TypedImage, TypedImageRef};
use fast_image_resize::pixels::{U8, U8x3};
use fast_image_resize::{FilterType, PixelTrait, ResizeAlg, ResizeOptions, Resizer};

use super::decode::Pixels;
use super::error::ImageError;
use super::geometry::{Geometry, Rect};
use super::{Channels, Filter, ImageOptions, Layout, Values};

/// Most bytes that scaling one image takes beside the pixels and the result.
const SCRATCH_BYTES_MAX: u64 = 512 << 20;
/// Bytes of weights for each row and column of the source: four as floating point, and four as integers.
const WEIGHT_BYTES: u64 = 48;

/// The conversion of one column, made once.
pub(super) struct Renderer {
    options: ImageOptions,
    /// For float values, the value of each byte, by channel.
    tables: Vec<Vec<f32>>,
}

impl Renderer {
    pub(super) fn new(options: ImageOptions) -> Self {
        let of = |values: &[f32], channel: usize, absent: f32| match values {
            [] => absent,
            [one] => *one,
            several => several[channel],
        };
        let table = |channel: usize| {
            let (mean, std) = (of(&options.mean, channel, 0.0), of(&options.std, channel, 1.0));
            (0..=u8::MAX).map(|byte| (f32::from(byte) / 255.0 - mean) / std).collect()
        };
        let tables = match options.values() {
            Values::Uint8 => Vec::new(),
            Values::Float32 => (0..options.channels.count()).map(table).collect(),
        };
        Self { options, tables }
    }

    pub(super) fn options(&self) -> &ImageOptions {
        &self.options
    }

    /// Bytes that rendering an image of a width and a height takes at most beside the pixels and the tensor.
    pub(super) fn scratch_bytes(&self, size: (u32, u32)) -> Result<u64, ImageError> {
        let [height, width] = self.options.size;
        check_scratch(size, (width, height), self.options.filter, self.options.channels)
    }

    /// Bytes of the tensor of one image.
    pub(super) fn row_bytes(&self) -> usize {
        self.options.width()
            * match self.options.values() {
                Values::Uint8 => 1,
                Values::Float32 => size_of::<f32>(),
            }
    }

    /// Writes the tensor of one image to `out`, which has its size.
    pub(super) fn render(
        &self,
        resizer: &mut Resizer,
        pixels: &Pixels,
        geometry: &Geometry,
        out: &mut [u8],
    ) -> Result<(), String> {
        let [height, width] = self.options.size;
        let source = &geometry.source;
        // Only the pixels of the tensor are computed, not those that a crop would remove.
        let (left, across) = span(source.width, geometry.scaled.0, geometry.corner.0, width);
        let (top, down) = span(source.height, geometry.scaled.1, geometry.corner.1, height);
        let ImageOptions { filter, channels, .. } = self.options;
        let part = (left, top, across, down);
        let scaled = resize(resizer, pixels, source, part, filter, channels, [width, height])
            .map_err(|e| format!("the image cannot be scaled ({e})"))?;
        self.convert(&scaled, geometry, out);
        Ok(())
    }

    /// Flips pixels, and brings them to the element type and the order of the tensor.
    fn convert(&self, pixels: &[u8], geometry: &Geometry, out: &mut [u8]) {
        let Renderer { options, tables } = self;
        let channels = options.channels.count();
        let [height, width] = options.size.map(|side| side as usize);
        let row_of = |y: usize| {
            let y = if geometry.flip_vertical { height - 1 - y } else { y };
            &pixels[y * width * channels..(y + 1) * width * channels]
        };
        // Values of the tensor in a run: those of one row of one channel, or of one row.
        let runs: Vec<(usize, usize)> = match options.layout {
            Layout::Chw => (0..channels).flat_map(|c| (0..height).map(move |y| (c, y))).collect(),
            Layout::Hwc => (0..height).map(|y| (0, y)).collect(),
        };
        let each = out.len() / runs.len().max(1);
        for ((channel, y), run) in runs.into_iter().zip(out.chunks_exact_mut(each.max(1))) {
            let row = row_of(y);
            match (options.layout, geometry.flip) {
                (Layout::Chw, false) => {
                    write(run, row[channel..].iter().step_by(channels).map(|v| (channel, *v)), tables);
                }
                (Layout::Chw, true) => {
                    write(run, row[channel..].iter().step_by(channels).rev().map(|v| (channel, *v)), tables);
                }
                (Layout::Hwc, false) => write(run, of_pixels(row.chunks_exact(channels)), tables),
                (Layout::Hwc, true) => write(run, of_pixels(row.chunks_exact(channels).rev()), tables),
            }
        }
    }
}

/// Bytes that scaling takes beside the pixels and the result: those between the two passes, and the weights. An image of one
/// row can be millions of pixels wide.
pub(super) fn scratch_bytes(source: (u32, u32), out: (u32, u32), filter: Filter, channels: Channels) -> u64 {
    let (width, height) = (u64::from(source.0), u64::from(source.1));
    let between = match filter {
        // Columns first.
        Filter::Bilinear => width * u64::from(out.1),
        Filter::Bicubic => height * u64::from(out.0),
    };
    between.saturating_mul(channels.count() as u64).saturating_add((width + height) * WEIGHT_BYTES)
}

/// Refuses to scale where [`scratch_bytes`] are too many. Sizes are width and height.
pub(super) fn check_scratch(
    source: (u32, u32),
    out: (u32, u32),
    filter: Filter,
    channels: Channels,
) -> Result<u64, ImageError> {
    match scratch_bytes(source, out, filter, channels) {
        bytes if bytes <= SCRATCH_BYTES_MAX => Ok(bytes),
        _ => Err(ImageError::TooLong {
            width: source.0,
            height: source.1,
            out_width: out.0,
            out_height: out.1,
        }),
    }
}

/// Scales a part (left, top, width, height) of the pixels of `source` to `size` (width, height).
pub(super) fn resize(
    resizer: &mut Resizer,
    pixels: &Pixels,
    source: &Rect,
    part: (f64, f64, f64, f64),
    filter: Filter,
    channels: Channels,
    size: [u32; 2],
) -> Result<Vec<u8>, String> {
    let filter = match filter {
        Filter::Bilinear => FilterType::Bilinear,
        Filter::Bicubic => FilterType::CatmullRom,
    };
    let (left, top, across, down) = part;
    let [width, height] = size;
    let of = |crop: (f64, f64, f64, f64)| {
        ResizeOptions::new()
            .resize_alg(ResizeAlg::Convolution(filter))
            .crop(crop.0, crop.1, crop.2, crop.3)
            .use_alpha(false)
    };
    let mut run = |pixels: &Pixels, source: &Rect, crop, size: [u32; 2]| {
        let mut scaled = vec![0; size[0] as usize * size[1] as usize * channels.count()];
        match channels {
            Channels::Rgb => scale::<U8x3>(resizer, pixels, source, &of(crop), size, &mut scaled),
            Channels::Grey => scale::<U8>(resizer, pixels, source, &of(crop), size, &mut scaled),
        }
        .map_err(|error| error.to_string())?;
        Ok::<_, String>(scaled)
    };
    if matches!(filter, FilterType::Bilinear) {
        return run(pixels, source, part, size);
    }
    // Cubic weights overshoot, and each pass limits its results to bytes. Pillow scales rows first, the resizer columns.
    let rows = (left, 0.0, across, f64::from(source.height));
    let data = run(pixels, source, rows, [width, source.height])?;
    let narrow = Pixels { width, height: source.height, data };
    let whole = Rect { x: 0, y: 0, width, height: source.height };
    run(&narrow, &whole, (0.0, top, f64::from(width), down), [width, height])
}

/// Scales the part `source` of an image to `size` (width, height) into the bytes of `out`.
///
/// With types: the dynamic functions of the crate compile each of their 26 kinds of pixels here, two thirds of the code of
/// `millrace-streams`.
fn scale<P: PixelTrait>(
    resizer: &mut Resizer,
    pixels: &Pixels,
    source: &Rect,
    options: &ResizeOptions,
    size: [u32; 2],
    out: &mut [u8],
) -> Result<(), Box<dyn std::error::Error>> {
    let image = TypedImageRef::<P>::from_buffer(pixels.width, pixels.height, &pixels.data)?;
    let view = TypedCroppedImage::from_ref(&image, source.x, source.y, source.width, source.height)?;
    let mut scaled = TypedImage::<P>::from_buffer(size[0], size[1], out)?;
    resizer.resize_typed(&view, &mut scaled, options)?;
    Ok(())
}

/// The values of pixels, each with its channel.
fn of_pixels<'p>(pixels: impl Iterator<Item = &'p [u8]>) -> impl Iterator<Item = (usize, u8)> {
    pixels.flat_map(|pixel| pixel.iter().copied().enumerate())
}

/// Writes values with their channels, as bytes or as floats in the byte order of the machine.
fn write(run: &mut [u8], values: impl Iterator<Item = (usize, u8)>, tables: &[Vec<f32>]) {
    if tables.is_empty() {
        for (out, (_, value)) in run.iter_mut().zip(values) {
            *out = value;
        }
        return;
    }
    for (out, (channel, value)) in run.chunks_exact_mut(size_of::<f32>()).zip(values) {
        out.copy_from_slice(&tables[channel][usize::from(value)].to_ne_bytes());
    }
}

/// The part of `source` pixels that becomes `out` of the `scaled` ones from `corner` on: its begin and its length.
fn span(source: u32, scaled: u64, corner: u64, out: u32) -> (f64, f64) {
    let each = f64::from(source) / scaled as f64;
    let begin = (corner as f64 * each).min(f64::from(source));
    (begin, (f64::from(out) * each).min(f64::from(source) - begin))
}
