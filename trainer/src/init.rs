//! New models: ONNX graphs of common shape with seeded random weights.
//!
//! Every model takes `input` `[batch, inputs]` and gives `logits` `[batch, classes]`, so that one feed serves
//! all. Hidden layers start with Kaiming's uniform distribution for ReLU, the last layer with unit gain,
//! biases with zero. The weights depend on the specification and the seed only (ChaCha8), not on the machine.

pub mod edit;
mod proto;
#[cfg(test)]
mod tests;

use millrace_bundle::onnx::ModelProto;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use proto::GraphBuilder;

/// Most weights a new model may have (4 GiB of f32).
const WEIGHTS_MAX: usize = 1 << 30;

/// Most layers a new model may have.
const LAYERS_MAX: usize = 256;

/// An error of building a new model.
#[derive(Debug, Error, Clone, PartialEq)]
pub enum InitError {
    /// A setting is outside its bounds.
    #[error("model setting {setting} is {value}, expected {expected}")]
    Setting {
        /// Name of the setting.
        setting: &'static str,
        /// The value given.
        value: String,
        /// The allowed values.
        expected: &'static str,
    },
    /// The model would exceed the limit on weights.
    #[error("the model would have more than {WEIGHTS_MAX} weights")]
    TooLarge,
}

/// A model to build: the `[model]` table of a job file, selected by `kind = "mlp" | "cnn"`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ModelSpec {
    /// Fully connected layers with ReLU.
    Mlp(MlpSpec),
    /// Convolutions with ReLU and pooling, then fully connected layers.
    Cnn(CnnSpec),
}

/// Fully connected layers with ReLU between them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlpSpec {
    /// Values per row.
    pub inputs: usize,
    /// Width of each hidden layer; may be empty.
    #[serde(default)]
    pub hidden: Vec<usize>,
    /// Values per row of the output.
    pub classes: usize,
    /// Constant factor of the inputs, inside the graph.
    #[serde(default = "unit")]
    pub scale: f32,
    /// Seed of the weights.
    #[serde(default)]
    pub seed: u64,
}

/// 3×3 convolutions with ReLU and 2×2 max pooling, then fully connected layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CnnSpec {
    /// Rows of the image.
    pub height: usize,
    /// Columns of the image.
    pub width: usize,
    /// Channels of the image; a row of the batch is channel by channel.
    #[serde(default = "one")]
    pub channels: usize,
    /// Output channels of each convolution; pooling stops when a side is below 2.
    #[serde(default = "two_convolutions")]
    pub filters: Vec<usize>,
    /// Width of each hidden layer behind the convolutions.
    #[serde(default)]
    pub hidden: Vec<usize>,
    /// Values per row of the output.
    pub classes: usize,
    /// Constant factor of the inputs, inside the graph.
    #[serde(default = "unit")]
    pub scale: f32,
    /// Seed of the weights.
    #[serde(default)]
    pub seed: u64,
}

fn unit() -> f32 {
    1.0
}

fn one() -> usize {
    1
}

fn two_convolutions() -> Vec<usize> {
    vec![16, 32]
}

impl ModelSpec {
    /// Checks all settings without making weights.
    ///
    /// # Errors
    /// [`InitError::Setting`], and [`InitError::TooLarge`] for a model with too many weights.
    pub fn check(&self) -> Result<(), InitError> {
        match self {
            ModelSpec::Mlp(spec) => spec.check(),
            ModelSpec::Cnn(spec) => spec.check(),
        }
    }

    /// Builds the model.
    pub fn build(&self) -> Result<ModelProto, InitError> {
        match self {
            ModelSpec::Mlp(spec) => spec.build(),
            ModelSpec::Cnn(spec) => spec.build(),
        }
    }

    /// The same model with another seed.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> ModelSpec {
        match &mut self {
            ModelSpec::Mlp(spec) => spec.seed = seed,
            ModelSpec::Cnn(spec) => spec.seed = seed,
        }
        self
    }
}

/// An MLP without input scaling: [`MlpSpec`] has every setting.
pub fn mlp(inputs: usize, hidden: &[usize], classes: usize, seed: u64) -> Result<ModelProto, InitError> {
    MlpSpec { inputs, hidden: hidden.to_vec(), classes, scale: 1.0, seed }.build()
}

/// A CNN with two convolutions and no hidden layer: [`CnnSpec`] has every setting.
pub fn cnn(
    height: usize,
    width: usize,
    channels: usize,
    classes: usize,
    seed: u64,
) -> Result<ModelProto, InitError> {
    CnnSpec {
        height,
        width,
        channels,
        filters: two_convolutions(),
        hidden: Vec::new(),
        classes,
        scale: 1.0,
        seed,
    }
    .build()
}

fn positive(setting: &'static str, values: &[usize]) -> Result<(), InitError> {
    match values.iter().find(|value| **value == 0 || **value > WEIGHTS_MAX) {
        Some(value) => Err(InitError::Setting { setting, value: value.to_string(), expected: "1 to 2^30" }),
        None => Ok(()),
    }
}

fn layers(setting: &'static str, count: usize) -> Result<(), InitError> {
    if count <= LAYERS_MAX {
        return Ok(());
    }
    Err(InitError::Setting { setting, value: format!("{count} layers"), expected: "at most 256 layers" })
}

fn finite(scale: f32) -> Result<(), InitError> {
    if scale.is_finite() && scale != 0.0 {
        return Ok(());
    }
    Err(InitError::Setting {
        setting: "scale",
        value: scale.to_string(),
        expected: "a finite number other than 0",
    })
}

/// The weights of a model so far.
#[derive(Debug, Default)]
struct WeightCount(usize);

impl WeightCount {
    /// Adds the weights of a layer, whose number it returns, and its biases.
    fn add(&mut self, dims: &[usize], biases: usize) -> Result<usize, InitError> {
        let count = dims
            .iter()
            .try_fold(1usize, |total, size| total.checked_mul(*size))
            .ok_or(InitError::TooLarge)?;
        self.0 = self.0.saturating_add(count).saturating_add(biases);
        if self.0 > WEIGHTS_MAX { Err(InitError::TooLarge) } else { Ok(count) }
    }

    /// Adds the layers of [`dense`].
    fn add_dense(&mut self, mut inputs: usize, hidden: &[usize], classes: usize) -> Result<(), InitError> {
        for outputs in hidden.iter().chain([&classes]) {
            self.add(&[inputs, *outputs], *outputs)?;
            inputs = *outputs;
        }
        Ok(())
    }
}

/// The product of the sides of an image.
fn volume(sides: [usize; 3]) -> Result<usize, InitError> {
    sides
        .into_iter()
        .try_fold(1usize, usize::checked_mul)
        .filter(|total| *total <= WEIGHTS_MAX)
        .ok_or(InitError::TooLarge)
}

impl MlpSpec {
    fn check(&self) -> Result<(), InitError> {
        positive("inputs", &[self.inputs])?;
        positive("hidden", &self.hidden)?;
        layers("hidden", self.hidden.len())?;
        positive("classes", &[self.classes])?;
        finite(self.scale)?;
        WeightCount::default().add_dense(self.inputs, &self.hidden, self.classes)
    }

    /// Builds the model.
    pub fn build(&self) -> Result<ModelProto, InitError> {
        self.check()?;
        let mut builder = GraphBuilder::new("mlp", self.inputs, self.classes, self.seed);
        let scaled = builder.scale("input", self.scale);
        dense(&mut builder, scaled, self.inputs, &self.hidden, self.classes)?;
        Ok(builder.finish())
    }
}

/// Hidden layers with ReLU, then the layer that produces the logits.
fn dense(
    builder: &mut GraphBuilder,
    mut value: String,
    mut inputs: usize,
    hidden: &[usize],
    classes: usize,
) -> Result<(), InitError> {
    for (index, outputs) in hidden.iter().enumerate() {
        let layer = format!("dense{}", index + 1);
        value = builder.gemm(&layer, &value, inputs, *outputs, 6.0)?;
        value = builder.relu(&layer, &value);
        inputs = *outputs;
    }
    builder.logits(&value, inputs, classes)
}

impl CnnSpec {
    fn check(&self) -> Result<(), InitError> {
        positive("channels", &[self.channels])?;
        positive("height", &[self.height])?;
        positive("width", &[self.width])?;
        positive("filters", &self.filters)?;
        positive("hidden", &self.hidden)?;
        layers("filters", self.filters.len())?;
        layers("hidden", self.hidden.len())?;
        positive("classes", &[self.classes])?;
        finite(self.scale)?;
        let [mut channels, mut height, mut width] = self.image();
        volume([channels, height, width])?;
        let mut weights = WeightCount::default();
        for filters in &self.filters {
            weights.add(&[*filters, channels, 3, 3], *filters)?;
            channels = *filters;
            if height >= 2 && width >= 2 {
                (height, width) = (height / 2, width / 2);
            }
        }
        weights.add_dense(volume([channels, height, width])?, &self.hidden, self.classes)
    }

    /// The sides of an image: channels, rows and columns.
    fn image(&self) -> [usize; 3] {
        [self.channels, self.height, self.width]
    }

    /// Builds the model.
    pub fn build(&self) -> Result<ModelProto, InitError> {
        self.check()?;
        let image = self.image();
        let inputs = volume(image)?;
        let mut builder = GraphBuilder::new("cnn", inputs, self.classes, self.seed);
        let scaled = builder.scale("input", self.scale);
        let mut value = builder.image(&scaled, image);
        let [mut channels, mut height, mut width] = image;
        for (index, filters) in self.filters.iter().enumerate() {
            let layer = format!("conv{}", index + 1);
            value = builder.conv3x3(&layer, &value, channels, *filters)?;
            value = builder.relu(&layer, &value);
            channels = *filters;
            if height >= 2 && width >= 2 {
                value = builder.pool2x2(&layer, &value);
                (height, width) = (height / 2, width / 2);
            }
        }
        let flat = volume([channels, height, width])?;
        value = builder.flatten(&value);
        dense(&mut builder, value, flat, &self.hidden, self.classes)?;
        Ok(builder.finish())
    }
}
