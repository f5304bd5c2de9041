//! Flags of `millrace predict` for images.

use clap::{Args, ValueEnum};

/// Conversion of images to a model input
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// Scaling of values from 0 to 255 for models that take floats [default: none]
    #[arg(long, value_enum, help_heading = "Images")]
    pub(crate) scaling: Option<Scaling>,
    /// Mean to subtract from values from 0 to 1, one for all channels or one for each
    #[arg(long, value_name = "MEAN,…", value_delimiter = ',', value_parser = finite, allow_hyphen_values = true, conflicts_with = "scaling", help_heading = "Images")]
    pub(crate) mean: Vec<f32>,
    /// Divisor to apply next, one for all channels or one for each
    #[arg(long, value_name = "STD,…", value_delimiter = ',', value_parser = divisor, conflicts_with = "scaling", help_heading = "Images")]
    pub(crate) std: Vec<f32>,
    /// Position of the input's channels [default: as its shape says]
    #[arg(long, value_enum, help_heading = "Images")]
    pub(crate) layout: Option<Layout>,
    /// Size to scale images to if the model leaves it open [default: the size of each image]
    #[arg(long, value_name = "HEIGHTxWIDTH", value_parser = size, help_heading = "Images")]
    pub(crate) size: Option<(u32, u32)>,
}

impl ImageArgs {
    /// The first of these flags that was given.
    pub(crate) fn first_given(&self) -> Option<&'static str> {
        [
            ("--scaling", self.scaling.is_some()),
            ("--mean", !self.mean.is_empty()),
            ("--std", !self.std.is_empty()),
            ("--layout", self.layout.is_some()),
            ("--size", self.size.is_some()),
        ]
        .into_iter()
        .find_map(|(flag, given)| given.then_some(flag))
    }
}

/// Scaling of values from 0 to 255.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scaling {
    /// Unchanged: 0 to 255
    None,
    /// Divided by 255: 0 to 1
    Unit,
    /// Divided by 127.5, minus 1: -1 to 1
    Inception,
    /// Minus 123, 117 and 104; minus 128 for one channel
    Vgg,
    /// Divided by 255, minus 0.485, 0.456 and 0.406, divided by 0.229, 0.224 and 0.225, as torchvision does
    Imagenet,
}

/// Position of the channels in an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Layout {
    /// Channels, height, width
    Nchw,
    /// Height, width, channels
    Nhwc,
}

fn finite(text: &str) -> Result<f32, String> {
    let value = text.trim().parse::<f32>().ok().filter(|value| value.is_finite());
    value.ok_or_else(|| "a number is expected, or one for each channel: 0.485,0.456,0.406".to_owned())
}

fn divisor(text: &str) -> Result<f32, String> {
    let value = finite(text).ok().filter(|value| *value > 0.0);
    value.ok_or_else(|| "a number above 0 is expected, or one for each channel: 0.229,0.224,0.225".to_owned())
}

fn size(text: &str) -> Result<(u32, u32), String> {
    let side = |text: &str| text.parse::<u32>().ok().filter(|side| *side > 0);
    let sides = text.split_once('x').and_then(|(height, width)| Some((side(height)?, side(width)?)));
    sides.ok_or_else(|| "a size is height and width in pixels, as in 224x224".to_owned())
}
