//! JPEG files of one or three components, decoded to the values of libjpeg-turbo.
//!
//! Pillow and torchvision decode with libjpeg-turbo. Its inverse cosine transform (`islow`), its triangle filter for
//! subsampled colours and its colour conversion are integer arithmetic, so that another decoder can give the same values.
//!
//! Files of four components (CMYK) are left to the `image` crate, as are those of other depths and the lossless ones. The
//! decoder panics on frames of four components with unusual sampling factors.

use ::image::metadata::Orientation;
use ::image::{DynamicImage, GrayImage, RgbImage};
use libjpeg_turbo_rs::{DecodeLimits, Decoder, JpegError, PixelFormat};

/// Most scans of a file. Each costs time for all pixels, whatever the bytes it has; encoders write 10.
const SCANS_MAX: usize = 100;

/// A JPEG file of one or three components whose header was read.
pub(super) struct Jpeg<'f> {
    decoder: Decoder<'f>,
    format: PixelFormat,
}

impl<'f> Jpeg<'f> {
    /// Reads the header. `None` for kinds of files that this decoder is not used for.
    pub(super) fn new(content: &'f [u8]) -> Result<Option<Self>, JpegError> {
        let limits = DecodeLimits { max_scans: SCANS_MAX, ..DecodeLimits::default() };
        let decoder = Decoder::new_with_limits(content, limits)?;
        let header = decoder.header();
        let format = match header.components.len() {
            _ if header.precision != 8 || header.is_lossless => return Ok(None),
            1 => PixelFormat::Grayscale,
            3 => PixelFormat::Rgb,
            _ => return Ok(None),
        };
        // Smoothing is what libjpeg-turbo does where a progressive file has no scan for some coefficients.
        let decoder = decoder.with_output_format(format).with_block_smoothing(true);
        Ok(Some(Self { decoder, format }))
    }

    /// Width and height in pixels, as the header has them.
    pub(super) fn size(&self) -> (u32, u32) {
        let header = self.decoder.header();
        (u32::from(header.width), u32::from(header.height))
    }

    /// The orientation of the EXIF metadata. Without readable metadata there is no rotation.
    pub(super) fn orientation(&self) -> Orientation {
        self.decoder.exif_orientation().and_then(Orientation::from_exif).unwrap_or(Orientation::NoTransforms)
    }

    /// Decodes all pixels. Damaged or missing data is an error: nothing is filled with grey.
    pub(super) fn decode(self) -> Result<DynamicImage, JpegError> {
        let (width, height) = self.size();
        let data = self.decoder.decode_image()?.data;
        let image = match self.format {
            PixelFormat::Grayscale => GrayImage::from_raw(width, height, data).map(DynamicImage::from),
            _ => RgbImage::from_raw(width, height, data).map(DynamicImage::from),
        };
        image.ok_or_else(|| JpegError::CorruptData("the pixels are fewer than the header says".to_owned()))
    }
}

#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod tests;
