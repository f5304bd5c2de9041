//! Decoding of one image file to 8-bit pixels, within a number of pixels and what the caller admits.

use std::io::Cursor;

use ::image::metadata::Orientation;
use ::image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, Limits};
use parking_lot::{Condvar, Mutex};

use super::Channels;
use super::error::ImageError;
use super::jpeg::Jpeg;

/// Bytes of memory for each pixel of a JPEG file while it is decoded: 6 of coefficients in progressive files, 3 of
/// samples, 3 of samples in full resolution, 3 of the result, and tables.
const JPEG_PIXEL_BYTES: u64 = 16;
/// Sides of a JPEG file are decoded in units of up to this many pixels: 4 blocks of 8.
const JPEG_UNIT: u32 = 32;

/// Bytes of one row of a PNG file together with its chunks beside the pixels. A colour profile of a few kilobytes may
/// grow to any size; one beyond this is left out, as no pixel depends on it.
const CHUNK_BYTES_MAX: u64 = 64 << 20;

/// Pixels of one image, row by row, the channels of a pixel together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pixels {
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) data: Vec<u8>,
}

/// What decoding an image will take, known before any of its pixels is decoded.
#[derive(Debug, Clone, Copy)]
pub(super) struct Demand {
    /// Width and height in pixels, after the orientation.
    pub(super) size: (u32, u32),
    /// Bytes of memory.
    pub(super) bytes: u64,
}

/// Memory of the images that are decoded at a time. An image that alone needs more than all of it takes all.
pub(super) struct Budget {
    bytes_max: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// A part of a budget, given back when it is dropped.
pub(super) struct Share<'b> {
    budget: &'b Budget,
    bytes: u64,
}

impl Budget {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, used: Mutex::new(0), freed: Condvar::new() }
    }

    /// Waits until other images have given back enough. Only for threads that may block.
    pub(super) fn take(&self, bytes: u64) -> Share<'_> {
        let bytes = bytes.min(self.bytes_max);
        let mut used = self.used.lock();
        while *used + bytes > self.bytes_max {
            self.freed.wait(&mut used);
        }
        *used += bytes;
        Share { budget: self, bytes }
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        *self.budget.used.lock() -= self.bytes;
        self.budget.freed.notify_all();
    }
}

/// Decodes an image, applies its orientation, and brings it to the channels of the tensor. `admit` may wait or refuse
/// before any pixel is decoded; what it gives is returned with the pixels.
///
/// # Panics
/// Where a decoder has a defect. The caller catches that.
pub(super) fn decode<S>(
    content: &[u8],
    channels: Channels,
    pixels_max: u64,
    admit: impl FnOnce(Demand) -> Result<S, ImageError>,
) -> Result<(Pixels, S), ImageError> {
    if content.is_empty() {
        return Err(ImageError::Empty);
    }
    let mut reader =
        ImageReader::new(Cursor::new(content)).with_guessed_format().map_err(ImageError::damaged)?;
    let format = match reader.format() {
        Some(format @ (ImageFormat::Jpeg | ImageFormat::Png | ImageFormat::WebP)) => format,
        _ => return Err(ImageError::Unknown),
    };
    if format == ImageFormat::Jpeg {
        if !has_end(content) {
            return Err(ImageError::damaged("the file ends before the end of the image"));
        }
        if let Some(jpeg) = Jpeg::new(content).map_err(ImageError::damaged)? {
            let (width, height) = jpeg.size();
            check_size(width, height, pixels_max)?;
            let orientation = jpeg.orientation();
            let demand =
                Demand { size: upright(width, height, orientation), bytes: jpeg_bytes(width, height) };
            let admitted = admit(demand)?;
            let image = jpeg.decode().map_err(ImageError::damaged)?;
            return Ok((pixels_of(image, orientation, channels), admitted));
        }
    }
    let mut limits = Limits::no_limits();
    // Of PNG only: the other decoders allocate no more than the file has bytes before the pixels are counted.
    limits.max_alloc = Some(CHUNK_BYTES_MAX);
    reader.limits(limits);
    let mut decoder = reader.into_decoder().map_err(ImageError::damaged)?;
    let (width, height) = decoder.dimensions();
    check_size(width, height, pixels_max)?;
    let bytes = match format {
        ImageFormat::Jpeg => jpeg_bytes(width, height),
        _ => decoder.total_bytes().saturating_mul(2) + u64::from(width) * u64::from(height) * 4,
    };
    // Without readable metadata there is no rotation.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let admitted = admit(Demand { size: upright(width, height, orientation), bytes })?;
    let image = DynamicImage::from_decoder(decoder).map_err(ImageError::damaged)?;
    Ok((pixels_of(image, orientation, channels), admitted))
}

/// Width and height after an orientation.
fn upright(width: u32, height: u32, orientation: Orientation) -> (u32, u32) {
    match orientation {
        Orientation::Rotate90
        | Orientation::Rotate270
        | Orientation::Rotate90FlipH
        | Orientation::Rotate270FlipH => (height, width),
        Orientation::NoTransforms
        | Orientation::Rotate180
        | Orientation::FlipHorizontal
        | Orientation::FlipVertical => (width, height),
    }
}

/// Checks the number of pixels that an image says it has, before any of them is decoded.
fn check_size(width: u32, height: u32, pixels_max: u64) -> Result<(), ImageError> {
    match u64::from(width) * u64::from(height) {
        0 => Err(ImageError::damaged("it has no pixels")),
        pixels if pixels > pixels_max => Err(ImageError::TooLarge { width, height, pixels_max }),
        _ => Ok(()),
    }
}

/// Bytes of memory that decoding a JPEG file of this size takes. Thin images have more samples than pixels.
pub(super) fn jpeg_bytes(width: u32, height: u32) -> u64 {
    let padded = |side: u32| u64::from(side.next_multiple_of(JPEG_UNIT));
    padded(width) * padded(height) * JPEG_PIXEL_BYTES
}

/// Applies the orientation of a decoded image and brings it to the channels of the tensor.
fn pixels_of(mut image: DynamicImage, orientation: Orientation, channels: Channels) -> Pixels {
    image.apply_orientation(orientation);
    let (width, height) = (image.width(), image.height());
    let data = match channels {
        Channels::Rgb => image.into_rgb8().into_raw(),
        Channels::Grey if !image.color().has_color() => image.into_luma8().into_raw(),
        Channels::Grey => image.into_rgb8().as_raw().chunks_exact(3).map(luma).collect(),
    };
    Pixels { width, height, data }
}

/// Luma by ITU-R BT.601 in 16-bit fixed point, as Pillow computes it.
fn luma(rgb: &[u8]) -> u8 {
    let [red, green, blue] = [rgb[0], rgb[1], rgb[2]].map(u32::from);
    ((red * 19_595 + green * 38_470 + blue * 7_471 + 0x8000) >> 16) as u8
}

/// Whether a JPEG file has its end marker: the decoder fills what is missing with grey.
fn has_end(content: &[u8]) -> bool {
    // Segments with their lengths precede the first scan. A thumbnail with markers of its own lies inside of one.
    let mut at = 2_usize;
    loop {
        match content.get(at..at.saturating_add(4)) {
            Some([0xff, 0xff, ..]) => at += 1,
            Some([0xff, marker, high, low]) => {
                let is_scan = *marker == 0xda;
                at += 2 + usize::from(u16::from_be_bytes([*high, *low]));
                if is_scan {
                    return content
                        .get(at..)
                        .is_some_and(|scans| scans.windows(2).any(|w| w == [0xff, 0xd9]));
                }
            }
            // The decoder reports what is wrong.
            Some(_) => return true,
            None => return false,
        }
    }
}
