//! Decoded images outside of batches, with the values that feeds have.
//!
//! A model that learned from a feed must see the same values when it is asked about one image.

use std::panic::{AssertUnwindSafe, catch_unwind};

use fast_image_resize::Resizer;

use super::decode::{Pixels, decode};
use super::error::ImageError;
use super::geometry::Rect;
use super::render::{check_scratch, resize};
use super::{Channels, Filter};
use crate::feed::footer::panic_text;

/// The pixels of one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodedImage {
    pixels: Pixels,
    channels: Channels,
}

impl DecodedImage {
    /// Decodes a JPEG, PNG or WebP file of at most `pixels_max` pixels and applies its EXIF orientation. Colours become
    /// one channel as in Pillow's mode `L`; transparency is dropped; 16-bit values become 8-bit ones.
    ///
    /// # Errors
    /// Any [`ImageError`] but [`ImageError::TooLong`]. A defect of the decoder is [`ImageError::Damaged`], too.
    pub fn decode(content: &[u8], channels: Channels, pixels_max: u64) -> Result<DecodedImage, ImageError> {
        let decoded = catch_unwind(AssertUnwindSafe(|| {
            decode(content, channels, pixels_max, |_| Ok::<_, ImageError>(()))
        }));
        let (pixels, ()) = decoded.unwrap_or_else(|panic| Err(ImageError::damaged(panic_text(&*panic))))?;
        Ok(DecodedImage { pixels, channels })
    }

    /// Pixels of a row, at least 1.
    pub fn width(&self) -> u32 {
        self.pixels.width
    }

    /// Rows, at least 1.
    pub fn height(&self) -> u32 {
        self.pixels.height
    }

    /// The values, row by row, the channels of a pixel together.
    pub fn values(&self) -> &[u8] {
        &self.pixels.data
    }

    /// The whole image scaled to a height and a width, both positive. Each new pixel averages those that it covers with
    /// triangle weights, as Pillow's `BILINEAR` does.
    ///
    /// # Errors
    /// [`ImageError::TooLong`] where that would take too much memory.
    pub fn scaled(self, height: u32, width: u32) -> Result<DecodedImage, ImageError> {
        if (self.height(), self.width()) == (height, width) {
            return Ok(self);
        }
        check_scratch((self.width(), self.height()), (width, height), Filter::Bilinear, self.channels)?;
        let source = Rect { x: 0, y: 0, width: self.width(), height: self.height() };
        let part = (0.0, 0.0, f64::from(source.width), f64::from(source.height));
        let size = [width, height];
        let scale = || {
            resize(&mut Resizer::new(), &self.pixels, &source, part, Filter::Bilinear, self.channels, size)
        };
        let scaled = catch_unwind(AssertUnwindSafe(scale));
        let data = scaled
            .unwrap_or_else(|panic| Err(panic_text(&*panic).to_owned()))
            .map_err(|reason| ImageError::damaged(format_args!("it cannot be scaled: {reason}")))?;
        Ok(DecodedImage { pixels: Pixels { width, height, data }, channels: self.channels })
    }
}

#[cfg(test)]
mod tests;
