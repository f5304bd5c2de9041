//! Flags of `millrace predict` for images.

use clap::{Args, ValueEnum};

/// How images become what a model takes
#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// What becomes of values from 0 to 255 where the model takes floats [default: none]
    #[arg(long, value_enum, help_heading = "Images")]
    pub(crate) scaling: Option<Scaling>,
    /// Means to take off values from 0 to 1, one for all channels or one each
    #[arg(long, value_name = "MEAN,…", value_delimiter = ',', value_parser = finite, allow_hyphen_values = true, conflicts_with = "scaling", help_heading = "Images")]
    pub(crate) mean: Vec<f32>,
    /// What to divide by then, one for all channels or one each
    #[arg(long, value_name = "STD,…", value_delimiter = ',', value_parser = divisor, conflicts_with = "scaling", help_heading = "Images")]
    pub(crate) std: Vec<f32>,
    /// Where the input has its channels [default: as its shape says]
    #[arg(long, value_enum, help_heading = "Images")]
    pub(crate) layout: Option<Layout>,
    /// Size that images become where the model leaves it open [default: each keeps its own]
    #[arg(long, value_name = "HEIGHTxWIDTH", value_parser = size, help_heading = "Images")]
    pub(crate) size: Option<(u32, u32)>,
}

impl ImageArgs {
    /// A flag that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
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

/// What becomes of values from 0 to 255.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Scaling {
    /// Nothing: 0 to 255
    None,
    /// Divided by 255: 0 to 1
    Unit,
    /// Divided by 127.5, less 1: -1 to 1
    Inception,
    /// Less 123, 117 and 104; less 128 in one channel
    Vgg,
    /// Divided by 255, less 0.485, 0.456 and 0.406, divided by 0.229, 0.224 and 0.225: as torchvision has it
    Imagenet,
}

/// Where an input has its channels.
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
