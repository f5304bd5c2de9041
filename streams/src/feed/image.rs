//! Image columns of the feed: encoded images become tensors of one shape, ready for a model.
//!
//! - [`ImageOptions`]: the transform of one column.
//! - `decode`: bytes of a JPEG, PNG or WebP file to 8-bit pixels, within bounds.
//! - [`DecodedImage`]: the same for one image outside of a batch.
//! - `jpeg`: the decoder of JPEG files, with the values of libjpeg-turbo.
//! - `geometry`: crops and flips, pure arithmetic on sizes and a key.
//! - `render`: pixels to one row of the tensor.
//! - `stage`: all of it for the rows of a batch, on all processors.
//!
//! Invariants:
//! - The random draws of a row depend on the plan's seed, the epoch and the row's global index only. World size,
//!   threads and resuming have no influence. All image columns of a row share its draws, so that an image and its
//!   mask get the same crop where their sizes and options agree.
//! - Only rows of delivered slots are decoded.
//! - The number of pixels is checked before any of them is decoded.

mod decode;
mod decoded;
mod error;
pub(crate) mod fuzzing;
mod geometry;
mod jpeg;
mod key;
mod render;
mod source;
mod stage;

#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::feed::error::{FeedError, Result};

pub use decoded::DecodedImage;
pub use error::ImageError;
pub(crate) use key::{KEY_FIELD_TYPE, keys};
pub(crate) use stage::{Images, Rows, TENSOR_BYTES_AHEAD};

/// Longest side of a tensor, in pixels.
pub const IMAGE_SIDE_MAX: u32 = 16_384;
/// Most values of the tensor of one image.
const VALUES_MAX: u64 = 1 << 26;
/// Default of [`ImageOptions::pixels_max`].
pub const IMAGE_PIXELS_MAX: u64 = 64 << 20;

/// The part of an image that becomes the tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Crop {
    /// The whole image. Its aspect ratio becomes that of the tensor.
    #[default]
    Whole,
    /// The middle of the scaled image.
    Center,
    /// A random place of the scaled image.
    Random,
    /// A random part of the image with a random area ([`ImageOptions::scale`]) and aspect ratio
    /// ([`ImageOptions::ratio`]), scaled to the tensor: torchvision's `RandomResizedCrop`.
    RandomResized,
}

/// The filter that scales images. Both average all pixels that a new pixel covers (antialiasing).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Filter {
    /// Triangle weights.
    #[default]
    Bilinear,
    /// Cubic weights with a = -0.5, as Pillow has them.
    Bicubic,
}

/// The channels of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Channels {
    /// Three: red, green and blue. Grey images have the same value in each.
    #[default]
    Rgb,
    /// One: luma by ITU-R BT.601, as Pillow's mode `L`.
    Grey,
}

/// The element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Values {
    /// Bytes, 0 to 255.
    Uint8,
    /// `(byte / 255 - mean) / std`.
    Float32,
}

/// The order of a tensor's dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// Channels, height, width: PyTorch and ONNX.
    #[default]
    Chw,
    /// Height, width, channels: JAX and TensorFlow.
    Hwc,
}

/// The transform of an image column: decode, apply the EXIF orientation, scale, crop, flip, convert.
///
/// The column holds encoded images (binary, or a struct with a binary field `bytes`), or texts that name files:
/// relative to the dataset's folder, or from the volume's root with a leading `/`.
///
/// JPEG, PNG and WebP are decoded. The first frame of an animation is taken. Transparency is dropped, as Pillow's
/// `convert("RGB")` does; 16-bit values become 8-bit ones; CMYK is read by Adobe's convention.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageOptions {
    /// Height and width of the tensor, each 1 to [`IMAGE_SIDE_MAX`].
    pub size: [u32; 2],
    /// The part of the image that is taken.
    #[serde(default)]
    pub crop: Crop,
    /// For [`Crop::Center`] and [`Crop::Random`]: length of the shorter side before the crop, at least both sides of
    /// `size`. By default the image is scaled until it just covers `size`.
    #[serde(default)]
    pub resize: Option<u32>,
    /// For [`Crop::RandomResized`]: least and largest part of the image's area, above 0 and at most 1.
    #[serde(default = "default_scale")]
    pub scale: [f64; 2],
    /// For [`Crop::RandomResized`]: least and largest aspect ratio, width by height.
    #[serde(default = "default_ratio")]
    pub ratio: [f64; 2],
    /// Probability of a flip from left to right, 0 to 1.
    #[serde(default)]
    pub flip: f64,
    /// Probability of a flip from top to bottom, 0 to 1.
    #[serde(default)]
    pub flip_vertical: f64,
    /// The filter that scales.
    #[serde(default)]
    pub filter: Filter,
    /// The channels of the tensor.
    #[serde(default)]
    pub channels: Channels,
    /// The element type of the tensor. When absent, floats if `mean` or `std` is given, else bytes.
    #[serde(default)]
    pub dtype: Option<Values>,
    /// The order of the tensor's dimensions.
    #[serde(default)]
    pub layout: Layout,
    /// For floats: subtracted from values of 0 to 1; one number for each channel, or one for all.
    #[serde(default)]
    pub mean: Vec<f32>,
    /// For floats: divides what is left; one number for each channel, or one for all.
    #[serde(default)]
    pub std: Vec<f32>,
    /// Most pixels of an encoded image: a small file may claim any size.
    #[serde(default = "default_pixels_max")]
    pub pixels_max: u64,
}

fn default_scale() -> [f64; 2] {
    [0.08, 1.0]
}

fn default_ratio() -> [f64; 2] {
    [3.0 / 4.0, 4.0 / 3.0]
}

fn default_pixels_max() -> u64 {
    IMAGE_PIXELS_MAX
}

impl ImageOptions {
    /// Whole images scaled to a height and a width, as bytes in three planes.
    pub fn new(height: u32, width: u32) -> Self {
        Self {
            size: [height, width],
            crop: Crop::default(),
            resize: None,
            scale: default_scale(),
            ratio: default_ratio(),
            flip: 0.0,
            flip_vertical: 0.0,
            filter: Filter::default(),
            channels: Channels::default(),
            dtype: None,
            layout: Layout::default(),
            mean: Vec::new(),
            std: Vec::new(),
            pixels_max: IMAGE_PIXELS_MAX,
        }
    }

    /// The same transform without random draws, for validation: random crops become centre crops, and nothing is
    /// flipped.
    #[must_use]
    pub fn without_augmentation(&self) -> Self {
        let crop = match self.crop {
            Crop::Whole => Crop::Whole,
            Crop::Center | Crop::Random | Crop::RandomResized => Crop::Center,
        };
        Self { crop, flip: 0.0, flip_vertical: 0.0, ..self.clone() }
    }

    /// The element type of the tensor.
    pub fn values(&self) -> Values {
        match self.dtype {
            Some(values) => values,
            None if self.mean.is_empty() && self.std.is_empty() => Values::Uint8,
            None => Values::Float32,
        }
    }

    /// The shape of the tensor.
    pub fn shape(&self) -> [usize; 3] {
        let [height, width] = self.size.map(|side| side as usize);
        match self.layout {
            Layout::Chw => [self.channels.count(), height, width],
            Layout::Hwc => [height, width, self.channels.count()],
        }
    }

    /// Values of the tensor of one image.
    pub(crate) fn width(&self) -> usize {
        self.shape().iter().product()
    }

    /// Checks the bounds of every option.
    ///
    /// # Errors
    /// [`FeedError::Invalid`] that names the column, the option and what it may be.
    pub fn check(&self, column: &str) -> Result<()> {
        let wrong = |what: String| Err(FeedError::invalid(format!("image column {column:?}: {what}")));
        let [height, width] = self.size;
        for (name, side) in [("height", height), ("width", width)] {
            if !(1..=IMAGE_SIDE_MAX).contains(&side) {
                return wrong(format!("the {name} in size is {side}; it must be 1 to {IMAGE_SIDE_MAX}"));
            }
        }
        if self.width() as u64 > VALUES_MAX {
            return wrong(format!(
                "size {height} x {width} makes {} values of each image; the limit is {VALUES_MAX}",
                self.width()
            ));
        }
        match (self.resize, self.crop) {
            (Some(_), Crop::Whole | Crop::RandomResized) => {
                return wrong(
                    "resize is the shorter side before a centre or random crop; leave it out, or set crop"
                        .into(),
                );
            }
            (Some(side), _) if side < height.max(width) || side > IMAGE_SIDE_MAX => {
                return wrong(format!(
                    "resize is {side}; it must be at least {}, the longer side of size, and at most {IMAGE_SIDE_MAX}",
                    height.max(width)
                ));
            }
            _ => {}
        }
        let [least, most] = self.scale;
        if !(least > 0.0 && least <= most && most <= 1.0) {
            return wrong(format!("scale is {least} to {most}; it must be above 0, rising, and at most 1"));
        }
        let [least, most] = self.ratio;
        if !(least >= 1e-3 && least <= most && most <= 1e3) {
            return wrong(format!("ratio is {least} to {most}; it must be rising, from 0.001 to 1000"));
        }
        for (name, chance) in [("flip", self.flip), ("flip_vertical", self.flip_vertical)] {
            if !(0.0..=1.0).contains(&chance) {
                return wrong(format!("{name} is {chance}; it is a probability, 0 to 1"));
            }
        }
        for (name, values) in [("mean", &self.mean), ("std", &self.std)] {
            if !values.is_empty() && self.values() == Values::Uint8 {
                return wrong(format!("{name} needs dtype float32; bytes are delivered as they are"));
            }
            let channels = self.channels.count();
            if ![0, 1, channels].contains(&values.len()) {
                return wrong(format!("{name} has {} numbers; give 1 or {channels}", values.len()));
            }
            if let Some(bad) = values.iter().find(|v| !v.is_finite() || (name == "std" && **v <= 0.0)) {
                return wrong(format!("{name} has {bad}; means are finite, deviations are above 0"));
            }
        }
        if !(1..=1 << 30).contains(&self.pixels_max) {
            return wrong(format!("pixels_max is {}; it must be 1 to {}", self.pixels_max, 1 << 30));
        }
        Ok(())
    }
}

impl Channels {
    fn count(self) -> usize {
        match self {
            Channels::Rgb => 3,
            Channels::Grey => 1,
        }
    }
}
