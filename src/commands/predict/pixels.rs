//! Image conversion: pixels as elements of a tensor, with its channel order, size and value range.

use millrace_bundle::{Datatype, TensorSpec};
use millrace_serving::tensor::Data;
use millrace_streams::feed::{Channels, DecodedImage};

use crate::cli::{ImageArgs, Layout, Scaling};

/// Most bytes of one image in a request: the default message limit of servers.
const INPUT_BYTES_MAX: u64 = 64 << 20;

/// The conversion of images to an input.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ImageConversion {
    /// `None` if the input has no channel dimension, hence one channel.
    layout: Option<Layout>,
    channels: usize,
    /// `None` if each image keeps its size.
    height: Option<u32>,
    width: Option<u32>,
    elements: Elements,
}

/// The element type and the conversion of values from 0 to 255.
#[derive(Debug, Clone, PartialEq)]
enum Elements {
    Bytes,
    /// The converted value, by channel and value.
    Floats(Vec<Vec<f32>>),
}

impl ImageConversion {
    /// Derives the conversion from the input's shape and type, and from the flags for what these leave open.
    ///
    /// # Errors
    /// A mismatch, or a property that neither the input nor a flag determines.
    pub(super) fn new(spec: &TensorSpec, args: &ImageArgs) -> Result<ImageConversion, String> {
        let name = &spec.name;
        let declared = spec.shape.get(1..).unwrap_or_default();
        let is_channels = |extent: i64| extent == 1 || extent == 3;
        let (layout, channels, height, width) = match (declared, args.layout) {
            ([height, width], None) => (None, 1, *height, *width),
            ([first, height, width], Some(Layout::Nchw)) => (args.layout, *first, *height, *width),
            ([height, width, last], Some(Layout::Nhwc)) => (args.layout, *last, *height, *width),
            ([first, second, last], None) => match (is_channels(*first), is_channels(*last)) {
                (true, false) => (Some(Layout::Nchw), *first, *second, *last),
                (false, true) => (Some(Layout::Nhwc), *last, *first, *second),
                _ => {
                    return Err(format!(
                        "the shape {declared:?} of input {name:?} does not say which extent is that of the channels: \
                         say --layout nchw or nhwc"
                    ));
                }
            },
            _ => {
                return Err(format!(
                    "input {name:?} takes shape {declared:?} behind the rows, an image has channels, height and \
                     width, or without --layout height and width"
                ));
            }
        };
        let channels = match channels {
            1 => 1,
            3 | -1 => 3,
            other => return Err(format!("input {name:?} has {other} channels, images have 1 or 3")),
        };
        let side = |extent: i64, wanted: Option<u32>, what: &str| match (u32::try_from(extent), wanted) {
            (Ok(0), _) => Err(format!("input {name:?} takes images of {what} 0")),
            (Ok(extent), Some(wanted)) if extent != wanted => {
                Err(format!("--size: input {name:?} takes images of {what} {extent}, not {wanted}"))
            }
            (Ok(extent), _) => Ok(Some(extent)),
            (Err(_), wanted) if extent == -1 => Ok(wanted),
            (Err(_), _) => Err(format!("input {name:?} takes images of {what} {extent}, which no image has")),
        };
        let height = side(height, args.size.map(|(height, _)| height), "height")?;
        let width = side(width, args.size.map(|(_, width)| width), "width")?;
        let elements = match spec.datatype {
            Datatype::Fp32 => Elements::Floats(tables(args, channels)?),
            Datatype::Uint8 if is_plain(args) => Elements::Bytes,
            Datatype::Uint8 => {
                return Err(format!(
                    "input {name:?} takes UINT8, values from 0 to 255 as they are: leave --scaling, --mean and --std \
                     out"
                ));
            }
            other => {
                return Err(format!("input {name:?} takes {other}, images become FP32 or UINT8"));
            }
        };
        Ok(ImageConversion { layout, channels, height, width, elements })
    }

    /// The channels that images are decoded to.
    pub(super) fn channels(&self) -> Channels {
        match self.channels {
            1 => Channels::Grey,
            _ => Channels::Rgb,
        }
    }

    /// The shape of an image of [`Self::channels`] without the batch dimension, and its elements.
    ///
    /// # Errors
    /// The image would take too many bytes of a request, or of memory.
    pub(super) fn elements(&self, image: DecodedImage) -> Result<(Vec<i64>, Data), String> {
        let (height, width) = (self.height.unwrap_or(image.height()), self.width.unwrap_or(image.width()));
        let each = if self.elements == Elements::Bytes { 1 } else { 4 };
        let bytes =
            u64::from(height).saturating_mul(u64::from(width)).saturating_mul(self.channels as u64 * each);
        if bytes > INPUT_BYTES_MAX {
            return Err(format!(
                "{width} by {height} pixels are {bytes} bytes of a request, at most {INPUT_BYTES_MAX} are sent: --size \
                 scales it down where the model leaves the size open"
            ));
        }
        let scaled = image.scaled(height, width).map_err(|error| format!("{error}: scale it down first"))?;
        let samples = scaled.values();
        let (channels, height, width) = (self.channels as i64, i64::from(height), i64::from(width));
        let shape = match self.layout {
            None => vec![height, width],
            Some(Layout::Nchw) => vec![channels, height, width],
            Some(Layout::Nhwc) => vec![height, width, channels],
        };
        let data = match &self.elements {
            Elements::Bytes => Data::Uint8(self.ordered(samples, |_, value| value)),
            Elements::Floats(tables) => {
                Data::Fp32(self.ordered(samples, |channel, value| tables[channel][usize::from(value)]))
            }
        };
        Ok((shape, data))
    }

    /// Orders samples, which come pixel by pixel, as the input requires.
    fn ordered<T>(&self, samples: &[u8], element: impl Fn(usize, u8) -> T) -> Vec<T> {
        let channels = self.channels;
        if self.layout != Some(Layout::Nchw) {
            return samples.iter().enumerate().map(|(at, value)| element(at % channels, *value)).collect();
        }
        let mut elements = Vec::with_capacity(samples.len());
        for channel in 0..channels {
            elements
                .extend(samples.iter().skip(channel).step_by(channels).map(|value| element(channel, *value)));
        }
        elements
    }
}

/// Whether values stay unchanged.
fn is_plain(args: &ImageArgs) -> bool {
    matches!(args.scaling, None | Some(Scaling::None)) && args.mean.is_empty() && args.std.is_empty()
}

/// The value table of each channel: divided, minus a mean, divided by a deviation.
fn tables(args: &ImageArgs, channels: usize) -> Result<Vec<Vec<f32>>, String> {
    let each = |values: &[f32], flag: &str, absent: f32| match values {
        [] => Ok(vec![absent; channels]),
        [one] => Ok(vec![*one; channels]),
        several if several.len() == channels => Ok(several.to_vec()),
        several => Err(format!("{flag} has {} values, the model takes {channels} channels", several.len())),
    };
    let explicit = !(args.mean.is_empty() && args.std.is_empty());
    let (range, means, deviations) = match (explicit, args.scaling.unwrap_or(Scaling::None)) {
        (true, _) => (255.0, each(&args.mean, "--mean", 0.0)?, each(&args.std, "--std", 1.0)?),
        (_, Scaling::None) => (1.0, vec![0.0; channels], vec![1.0; channels]),
        (_, Scaling::Unit) => (255.0, vec![0.0; channels], vec![1.0; channels]),
        (_, Scaling::Inception) => (127.5, vec![1.0; channels], vec![1.0; channels]),
        (_, Scaling::Vgg) if channels == 1 => (1.0, vec![128.0], vec![1.0]),
        (_, Scaling::Vgg) => (1.0, vec![123.0, 117.0, 104.0], vec![1.0; channels]),
        (_, Scaling::Imagenet) if channels == 1 => {
            return Err(
                "--scaling imagenet is of three channels, the model takes one: give --mean and --std".into(),
            );
        }
        (_, Scaling::Imagenet) => (255.0, vec![0.485, 0.456, 0.406], vec![0.229, 0.224, 0.225]),
    };
    let table = |(mean, deviation): (&f32, &f32)| {
        (0..=u8::MAX).map(|value| (f32::from(value) / range - mean) / deviation).collect::<Vec<f32>>()
    };
    Ok(means.iter().zip(&deviations).map(table).collect())
}

#[cfg(test)]
mod tests;
