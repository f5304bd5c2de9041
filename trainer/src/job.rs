//! The job file: dataset, model, optimizer, stopping rule and output of a training job.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

use millrace_datafs::{Name, VolumeSpec};
use millrace_leaf::bounded_file;
use millrace_leaf::suggestion::in_plain_words;
use millrace_streams::dataset::SourceSpec;
use millrace_streams::feed::{EpochRows, ImageOptions, Until};
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::engine::{Device, Distillation, Loss, Objective};
use crate::error::{Error, Result};
use crate::init::{InitError, ModelSpec};
use crate::optim::{EmaConfig, OptimError, OptimizerConfig};
use crate::precision::Precision;
use crate::strategy::{Backend, Strategy};
use crate::teacher;

mod computation;
mod dataset;
mod features;
mod selection;
#[cfg(test)]
mod tests;

pub(crate) use computation::digest_of;
pub use dataset::JobDataset;
pub use features::Features;
pub use selection::Splits;

/// Largest job file.
const JOB_BYTES_MAX: u64 = 1 << 20;
/// Most virtual shards of a batch.
pub const VIRTUAL_SHARDS_MAX: usize = 4096;
/// Most rows of a global batch.
pub const BATCH_ROWS_MAX: usize = 1 << 22;
/// Most columns with inputs, and most bytes of their names: the bundle's manifest lists them.
const FEATURES_MAX: u64 = 4096;
const FEATURE_BYTES_MAX: usize = 1 << 18;
/// Most epochs a job may run.
pub const EPOCHS_MAX: u64 = 100_000;

/// A `train.toml`.
///
/// Unknown keys are rejected. Keys belong to one of three groups: the computation ([`JobFile::digest`]), its
/// budget (`epochs_max`, `loss_target`, `validation.early_stopping`), and how it runs.
///
/// ```
/// let job = millrace_trainer::job::JobFile::parse(r#"
///     name = "digits"
///     dataset = "digits@v1:/train"
///     features = "pixels"
///     label = "label"
///     model = { kind = "mlp", inputs = 64, hidden = [64], classes = 10 }
///     optimizer = { kind = "adamw", learning_rate = 0.003 }
///     batch_rows = 64
///     epochs_max = 30
///     loss_target = 0.05
/// "#)?;
/// assert_eq!(job.virtual_shards, 12);
/// # Ok::<(), millrace_trainer::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JobFile {
    /// Name of the job, of its checkpoints and (unless `output.name` sets another) of its model.
    pub name: Name,
    /// `volume@snapshot:/path`; the snapshot is required, since a run must be repeatable. `volume@latest` is the newest
    /// one when the run begins. Or `topic:name@until`, a topic up to a time or a number of records; `topic:name@latest` is
    /// what has arrived when the run begins. Or a mixture: a list of such datasets with their weights, as in
    /// `["web@v3:/train=0.7", "books@v1:/train=0.3"]`.
    pub dataset: JobDataset,
    /// The end of an epoch of a mixture: `"first"`, when a dataset has delivered all its rows, or `"every"`, when all have.
    #[serde(default, skip_serializing_if = "is_first")]
    pub until: Until,
    /// Trains on the rows for which this condition is true, such as `"label != 3 and score >= 0.5"`; on all rows when
    /// absent.
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// Parts into which a hash splits the rows, with their fractions: `{ train = 0.8, test = 0.2 }`. The order of the
    /// parts and their fractions decide the rows of each.
    #[serde(default, skip_serializing_if = "Splits::is_empty")]
    pub splits: Splits,
    /// The part of `splits` to train on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// The column whose values decide the part of a row, or a list of columns: rows with equal values are in one part.
    /// When absent, the file and the number of the row decide.
    #[serde(default, skip_serializing_if = "Features::is_empty")]
    pub split_by: Features,
    /// Rows of an epoch, a whole number, or a fraction of the rows with a point, such as `0.1`. Each epoch goes on with
    /// the rows that follow those of the one before, so that all rows come before any comes again. All rows when absent.
    #[serde(default, deserialize_with = "selection::epoch_rows", skip_serializing_if = "Option::is_none")]
    pub rows_per_epoch: Option<EpochRows>,
    /// The column with the inputs: a list of numbers, or one number, or true and false. Several columns, as in
    /// `["age", "income", "history"]`, follow one another in the last dimension of the model's input.
    #[serde(default, skip_serializing_if = "Features::is_empty")]
    pub features: Features,
    /// The column of each input of a model that has several, or its columns, instead of `features`: a table such as
    /// `inputs = { input_ids = "tokens", attention_mask = "mask" }`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub inputs: BTreeMap<String, Features>,
    /// Columns of the inputs that hold images (bytes, or names of files of the volume), with what they become: a table
    /// such as `images.photo = { size = [224, 224], crop = "random_resized", flip = 0.5 }`. The model gets floats, in
    /// planes unless `layout` says otherwise. Validation takes the middle of each image and flips none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub images: BTreeMap<String, ImageOptions>,
    /// The column with the labels: for `cross_entropy` whole class numbers, true and false, or texts; otherwise
    /// a number, a list of numbers, or true and false.
    pub label: String,
    /// An ONNX file (relative to the job file), which may keep its weights in files beside it, or a table
    /// that describes a built-in model.
    pub model: ModelSource,
    /// The model's output that the loss reads. When absent, the only one that suits the loss. The published model keeps
    /// its other outputs; what these alone depend on is not trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_output: Option<String>,
    /// The loss to minimize: `"cross_entropy"`, `"mse"`, `"bce"`, `"l1"`, `"huber"`, or a table with `kind` and
    /// the settings of that loss. `{ kind = "kl", teacher = "models:/models/big/3" }` learns from another model.
    #[serde(default = "default_loss")]
    pub loss: Objective,
    /// The optimizer and its settings.
    #[serde(default)]
    pub optimizer: OptimizerConfig,
    /// An exponential moving average of the weights. Evaluations judge it, and the published model has it: the
    /// average at the end, or with `validation.best` that of the best evaluation. When absent, none is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ema: Option<EmaConfig>,
    /// Trains on labels that are shifted and scaled to mean 0 and deviation 1, and publishes a model that gives the
    /// original numbers; for `mse`, `l1` and `huber`. Losses are those of the scaled labels.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub standardize_labels: bool,
    /// Parameters and running statistics that stay as they are: patterns of their names, in which `*` stands for any
    /// characters. A batch normalisation whose running statistics both stay normalises by them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub freeze: Vec<String>,
    /// Parameters without weight decay: patterns of their names, such as `"*.bias"`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub no_decay: Vec<String>,
    /// Rows of a global batch, 1 to [`BATCH_ROWS_MAX`], independent of the number of workers.
    #[serde(default = "default_batch_rows")]
    pub batch_rows: usize,
    /// Number of fixed parts of a batch, 1 to [`VIRTUAL_SHARDS_MAX`] and at most `batch_rows`; when absent 12, or
    /// `batch_rows` if that is less. A job never
    /// uses more workers than this. A batch normalisation in training mode takes the statistics of each part, which
    /// should then have 16 rows or more.
    #[serde(default = "default_virtual_shards")]
    pub virtual_shards: usize,
    /// Batches whose gradients make one step of the optimizer, 1 when absent. A step is then one of
    /// `accumulate_steps` · `batch_rows` rows, while workers hold the rows of one batch at a time. The products of
    /// this number with `batch_rows` and with `virtual_shards` stay within the bounds of these keys.
    #[serde(default = "default_accumulate_steps", skip_serializing_if = "is_one")]
    pub accumulate_steps: usize,
    /// How gradients become one update: `"strict"`, the same model for any number of workers, or `"allreduce"`, one
    /// pass per worker and float sums, which is faster. A table with `name` says the same; its `collective` is `"tcp"` or
    /// `"nccl"` (unproven: no NVIDIA GPU has run it).
    #[serde(default, skip_serializing_if = "Strategy::is_default")]
    pub strategy: Strategy,
    /// The numbers of matrix products and convolutions in training: `"fp32"`, `"bf16"` or `"fp16"`. Weights, optimizer,
    /// other operations and evaluations have 32 bits. With `"fp16"` the loss is scaled; a batch whose gradients overflow
    /// is computed again with half the scale.
    #[serde(default, skip_serializing_if = "Precision::is_default")]
    pub precision: Precision,
    /// Rows on which the weights are evaluated, and what follows from that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validation: Option<Validation>,
    /// The job ends after this many epochs, 1 to [`EPOCHS_MAX`].
    #[serde(default = "default_epochs_max")]
    pub epochs_max: u64,
    /// The job ends as converged when an epoch's mean training loss is at most this.
    #[serde(default)]
    pub loss_target: Option<f64>,
    /// Seed of the row order, of dropouts and of a built-in model's first weights.
    #[serde(default)]
    pub seed: u64,
    /// The device on which workers compute.
    #[serde(default)]
    pub device: Device,
    /// Worker processes; `trainer.workers` when absent.
    #[serde(default)]
    pub workers: Option<usize>,
    /// Workers without which the job waits, 1 when absent. Above `workers` only where workers of other machines
    /// join (`millrace train --listen`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers_min: Option<usize>,
    /// The most workers, including those of other machines; `virtual_shards` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workers_max: Option<usize>,
    /// Steps between checkpoints, at least 1; the job always writes one at its end.
    #[serde(default = "default_checkpoint_every_steps")]
    pub checkpoint_every_steps: u64,
    /// How the dataset is shuffled.
    #[serde(default)]
    pub shuffle: Shuffle,
    /// The destination of the bundle.
    #[serde(default)]
    pub output: Output,
}

/// The `[validation]` table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Validation {
    /// `volume@snapshot:/path` or `topic:name@until` of rows with the columns of the inputs and of the label that are not
    /// trained on. When absent, `split` names a part of the job's dataset. A job on a mixture needs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dataset: Option<SourceSpec>,
    /// Evaluates on the rows for which this condition is true. When absent, that of the job holds for its own dataset.
    #[serde(default, rename = "where", skip_serializing_if = "Option::is_none")]
    pub filter: Option<String>,
    /// The part of the job's `splits` to evaluate on, by its `split_by`; all rows when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    /// Epochs between evaluations, at least 1 and at most `epochs_max`.
    #[serde(default = "default_every_epochs")]
    pub every_epochs: u64,
    /// The job ends after this many evaluations in a row without a lower loss, at least 1. When absent, it runs
    /// to its other limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early_stopping: Option<u64>,
    /// Publishes the weights of the evaluation with the lowest loss instead of the last weights.
    #[serde(default)]
    pub best: bool,
    /// Counts rows whose label is among this many classes with the largest outputs; for `cross_entropy` and
    /// `kl`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<usize>,
    /// Measures the area under the ROC curve of two classes: for `cross_entropy` and `kl` with two outputs and `bce`
    /// with one. Workers keep 8 bytes per validation row meanwhile, so that at most 16,777,216 rows are allowed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub auc: bool,
}

/// The `[shuffle]` table; the defaults suit most datasets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Shuffle {
    /// Largest number of places in the dataset from which a batch takes rows.
    pub lanes: u32,
    /// Rows shuffled together within a lane.
    pub window_rows: u64,
    /// Bound for the decoded row groups that all lanes need at a time, in bytes; 512 MiB when absent. More
    /// gives a better shuffle of datasets with large row groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_set_bytes_max: Option<u64>,
}

impl Default for Shuffle {
    fn default() -> Shuffle {
        Shuffle { lanes: 64, window_rows: 16_384, working_set_bytes_max: None }
    }
}

/// The `[output]` table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Output {
    /// The volume for checkpoints and bundles; the dataset's volume when absent, of a mixture that of its first dataset.
    /// Required for a topic.
    pub volume: Option<Name>,
    /// The directory of models in that volume.
    pub path: String,
    /// The model's name; the job's name when absent.
    pub name: Option<Name>,
}

impl Default for Output {
    fn default() -> Output {
        Output { volume: None, path: "models".to_owned(), name: None }
    }
}

/// The source of the graph.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ModelSource {
    /// An ONNX file.
    File(PathBuf),
    /// A built-in model. A `seed` of 0, the default, means the job's seed.
    Init(ModelSpec),
}

// Written by hand because an untagged enum would not report which key is wrong.
impl<'de> Deserialize<'de> for ModelSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ModelSource, D::Error> {
        struct Source;
        impl<'de> Visitor<'de> for Source {
            type Value = ModelSource;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the path of an ONNX file or a table such as { kind = \"mlp\", inputs = 64, hidden = [64], classes = 10 }")
            }

            fn visit_str<E>(self, path: &str) -> Result<ModelSource, E> {
                Ok(ModelSource::File(PathBuf::from(path)))
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<ModelSource, A::Error> {
                ModelSpec::deserialize(MapAccessDeserializer::new(map)).map(ModelSource::Init)
            }
        }
        deserializer.deserialize_any(Source)
    }
}

fn default_loss() -> Objective {
    Objective::from(Loss::CrossEntropy)
}

fn default_batch_rows() -> usize {
    64
}

fn default_virtual_shards() -> usize {
    12
}

fn default_accumulate_steps() -> usize {
    1
}

fn is_one(value: &usize) -> bool {
    *value == 1
}

fn is_first(until: &Until) -> bool {
    *until == Until::First
}

fn default_every_epochs() -> u64 {
    1
}

fn default_epochs_max() -> u64 {
    20
}

fn default_checkpoint_every_steps() -> u64 {
    500
}

impl JobFile {
    /// Reads and checks a job file; a relative model path starts at the file's folder.
    pub fn load(path: &Path) -> Result<JobFile> {
        JobFile::of_file(path, &JobFile::read(path)?)
    }

    /// The text of a job file, or of a pipe, which can be read only once.
    ///
    /// # Errors
    /// [`Error::JobFile`]: it cannot be read, or has more than 1 MiB.
    pub fn read(path: &Path) -> Result<String> {
        bounded_file::read_text(path, JOB_BYTES_MAX)
            .map_err(|e| Error::JobFile { path: path.to_owned(), reason: format!("cannot be read ({e})") })
    }

    /// Checks the text of the file at `path`; a relative model path starts at the file's folder.
    ///
    /// # Errors
    /// [`Error::JobFile`]: what is wrong.
    pub fn of_file(path: &Path, text: &str) -> Result<JobFile> {
        let mut job = parse(text).map_err(|reason| Error::JobFile { path: path.to_owned(), reason })?;
        if let (ModelSource::File(model), Some(folder)) = (&mut job.model, path.parent()) {
            *model = folder.join(&*model);
        }
        if let (Objective::Kl(Distillation { teacher, .. }), Some(folder)) = (&mut job.loss, path.parent())
            && !teacher::is_in_volume(teacher)
        {
            *teacher = folder.join(&*teacher).to_string_lossy().into_owned();
        }
        Ok(job)
    }

    /// Reads and checks the text of a job file; a relative model path stays relative.
    pub fn parse(text: &str) -> Result<JobFile> {
        parse(text).map_err(|reason| Error::JobFile { path: PathBuf::from("(text)"), reason })
    }

    /// Sets what depends on the text of the file: defaults by other keys, the order of the splits. Then checks all bounds as
    /// [`JobFile::check`].
    ///
    /// # Errors
    /// A message that begins with the key that violates a bound.
    pub fn complete(&mut self, text: &str) -> Result<(), String> {
        let says_shards = text.parse::<toml::Table>().is_ok_and(|table| table.contains_key("virtual_shards"));
        if !says_shards {
            self.virtual_shards = self.virtual_shards.min(self.batch_rows.max(1));
        }
        self.splits.restore_order(text);
        self.check()
    }

    /// Checks all bounds; the error names the key that violates one.
    pub fn check(&self) -> Result<(), String> {
        let within = |key: &str, value: u64, most: u64| match value {
            0 => Err(format!("{key} = 0: allowed are 1 to {most}")),
            value if value > most => Err(format!("{key} = {value}: allowed are 1 to {most}")),
            _ => Ok(()),
        };
        within("batch_rows", self.batch_rows as u64, BATCH_ROWS_MAX as u64)?;
        let shards_max = VIRTUAL_SHARDS_MAX.min(self.batch_rows) as u64;
        within("virtual_shards", self.virtual_shards as u64, shards_max)?;
        let together = (BATCH_ROWS_MAX / self.batch_rows).min(VIRTUAL_SHARDS_MAX / self.virtual_shards);
        within("accumulate_steps", self.accumulate_steps as u64, together as u64).map_err(|e| {
            format!(
                "{e} (a step has at most {BATCH_ROWS_MAX} rows and {VIRTUAL_SHARDS_MAX} parts, and each of its batches \
                 has batch_rows = {} and virtual_shards = {})",
                self.batch_rows, self.virtual_shards
            )
        })?;
        within("epochs_max", self.epochs_max, EPOCHS_MAX)?;
        within("checkpoint_every_steps", self.checkpoint_every_steps, u64::MAX)?;
        within("shuffle.lanes", u64::from(self.shuffle.lanes), 1 << 16)?;
        within("shuffle.window_rows", self.shuffle.window_rows, 1 << 32)?;
        within("shuffle.working_set_bytes_max", self.shuffle.working_set_bytes_max.unwrap_or(1), 1 << 40)?;
        let counts =
            [("workers", self.workers), ("workers_min", self.workers_min), ("workers_max", self.workers_max)];
        for (key, count) in counts {
            let Some(count) = count else { continue };
            within(key, count as u64, self.virtual_shards as u64).map_err(|e| match count {
                0 => e,
                _ => format!("{e} (a worker needs a virtual shard; raise virtual_shards)"),
            })?;
            if let Some(max) = self.workers_max.filter(|max| count > *max) {
                return Err(format!("{key} = {count} is above workers_max = {max}"));
            }
        }
        if self.loss_target.is_some_and(|target| !target.is_finite() || target < 0.0) {
            return Err("loss_target must be a number of at least 0".to_owned());
        }
        if self.strategy == Strategy::Allreduce(Backend::Nccl) && self.device == Device::Cpu {
            return Err(
                "strategy.collective = \"nccl\" sums on GPUs, and device = \"cpu\": set device = \"cuda\", or collective = \
                 \"tcp\""
                    .to_owned(),
            );
        }
        self.loss.check()?;
        if self.standardize_labels && self.loss.kind().counts_classes() {
            let loss = self.loss.kind();
            return Err(format!("standardize_labels = true needs loss mse, l1 or huber, not {loss}"));
        }
        self.check_columns()?;
        if let Some(ema) = self.ema.filter(|ema| !(0.0..1.0).contains(&ema.decay)) {
            return Err(format!("ema.decay = {}: allowed are 0 to below 1", ema.decay));
        }
        self.optimizer.check().map_err(|error| match error {
            OptimError::Setting { setting, value, expected } => {
                format!("optimizer.{setting} is {value}, expected {expected}")
            }
            other => format!("optimizer: {other}"),
        })?;
        if self.optimizer.needs_validation() && self.validation.is_none() {
            return Err(
                "optimizer.schedule of kind \"plateau\" follows the validation loss: add a [validation] table, or choose \
                 another schedule"
                    .to_owned(),
            );
        }
        self.dataset.check(self.until)?;
        for dataset in self.dataset.sources() {
            has_snapshot("dataset", dataset)?;
        }
        if self.dataset.volume().is_none() && self.output.volume.is_none() {
            return Err(format!(
                "dataset = \"{}\" has no volume for checkpoints and models: set output.volume",
                self.dataset
            ));
        }
        self.check_selection()?;
        if let Some(validation) = &self.validation {
            if let Some(dataset) = &validation.dataset {
                has_snapshot("validation.dataset", dataset)?;
            }
            within("validation.every_epochs", validation.every_epochs, self.epochs_max)
                .map_err(|e| format!("{e} (epochs_max), or no evaluation would take place"))?;
            within("validation.early_stopping", validation.early_stopping.unwrap_or(1), EPOCHS_MAX)?;
            if validation.auc && !self.loss.kind().counts_classes() {
                let loss = self.loss.kind();
                return Err(format!("validation.auc = true needs loss cross_entropy, bce or kl, not {loss}"));
            }
            if let Some(top) = validation.top_k {
                within("validation.top_k", top as u64, u64::MAX)?;
                if !self.loss.kind().takes_classes() {
                    return Err(format!(
                        "validation.top_k needs loss cross_entropy or kl, not {}",
                        self.loss.kind()
                    ));
                }
            }
        }
        let plain = |part: &str| !part.is_empty() && part != "." && part != "..";
        if !self.output.path.trim_matches('/').split('/').all(plain) {
            return Err(format!(
                "output.path = {:?}: name a directory, such as \"models\"",
                self.output.path
            ));
        }
        // Last: a job has no default model, so a check of all bounds ends with a wrong one.
        self.check_model()
    }

    /// Checks the settings of a built-in model.
    fn check_model(&self) -> Result<(), String> {
        let ModelSource::Init(spec) = &self.model else { return Ok(()) };
        spec.check().map_err(|error| match error {
            InitError::Setting { setting, value, expected } => {
                format!("model.{setting} is {value}, expected {expected}")
            }
            InitError::TooLarge => format!("model: {error}"),
        })
    }

    fn check_columns(&self) -> Result<(), String> {
        if self.inputs.is_empty() && self.features.is_empty() {
            return Err(
                "features is missing: name a column of the dataset, or the columns of each input of the model in a table \
                 [inputs]"
                    .to_owned(),
            );
        }
        if !self.inputs.is_empty() && !self.features.is_empty() {
            return Err("features and inputs are both given: write the columns of features into the table [inputs], by the \
                        name of the model's input"
                .to_owned());
        }
        if self.label.is_empty() {
            return Err("label is empty: name a column of the dataset".to_owned());
        }
        let features = (!self.features.is_empty()).then(|| ("features".to_owned(), &self.features));
        let inputs = self.inputs.iter().map(|(input, columns)| (format!("inputs.{input}"), columns));
        let (mut total, mut bytes) = (0, 0);
        for (key, columns) in features.into_iter().chain(inputs) {
            let names = columns.names();
            total += names.len() as u64;
            bytes += key.len() + names.iter().map(String::len).sum::<usize>();
            if names.is_empty() || names.iter().any(String::is_empty) {
                return Err(format!("{key} is empty: name a column of the dataset"));
            }
            if names.contains(&self.label) {
                return Err(format!("{key} and label are both {:?}", self.label));
            }
            let mut distinct = BTreeSet::new();
            if let Some(twice) = names.iter().find(|name| !distinct.insert(*name)) {
                return Err(format!("{key} has column {twice:?} twice"));
            }
        }
        let columns = self.columns();
        for (column, options) in &self.images {
            if *column == self.label || !columns.contains(column) {
                return Err(format!(
                    "images.{column}: no input has a column {column:?}; add it to features or inputs"
                ));
            }
            options.check(column).map_err(|error| format!("images.{column}: {error}"))?;
        }
        if total > FEATURES_MAX {
            return Err(format!("the inputs have {total} columns, at most {FEATURES_MAX} are allowed"));
        }
        if bytes > FEATURE_BYTES_MAX {
            return Err(format!(
                "the names of the inputs and their columns have {bytes} bytes, at most {FEATURE_BYTES_MAX} are allowed"
            ));
        }
        Ok(())
    }

    /// The columns that the job reads, each once: those of the inputs, then the label.
    pub(crate) fn columns(&self) -> Vec<String> {
        let inputs = self.features.names().iter().chain(self.inputs.values().flat_map(Features::names));
        let mut columns: Vec<String> = Vec::new();
        let mut seen = BTreeSet::new();
        for name in inputs.chain([&self.label]).filter(|name| seen.insert(*name)) {
            columns.push(name.clone());
        }
        columns
    }

    /// Rows of a step of the optimizer.
    pub(crate) fn step_rows(&self) -> usize {
        self.batch_rows * self.accumulate_steps
    }

    /// Parts of a step of the optimizer: its virtual shards.
    pub(crate) fn step_shards(&self) -> usize {
        self.virtual_shards * self.accumulate_steps
    }

    /// The volume of checkpoints and bundles.
    pub fn output_volume(&self) -> VolumeSpec {
        // A job on a topic without this volume is refused before.
        let volume = self.output.volume.as_ref().or(self.dataset.volume()).unwrap_or(&self.name);
        VolumeSpec { volume: volume.clone(), snapshot: None }
    }

    /// The model's name.
    pub fn model_name(&self) -> &Name {
        self.output.name.as_ref().unwrap_or(&self.name)
    }
}

/// Rejects a dataset without a snapshot.
fn has_snapshot(key: &str, dataset: &SourceSpec) -> Result<(), String> {
    let Some(dataset) = dataset.dataset() else { return Ok(()) };
    if dataset.source.snapshot.is_some() {
        return Ok(());
    }
    let volume = &dataset.source.volume;
    Err(format!(
        "{key} = \"{dataset}\" names no snapshot, so the run could not be repeated: run millrace snapshot create {volume}@NAME and write \"{volume}@NAME:{}\"",
        dataset.path
    ))
}

fn parse(text: &str) -> Result<JobFile, String> {
    let mut job: JobFile = toml::from_str(text).map_err(|error| {
        let line = error.span().map(|span| {
            let before = text.as_bytes().get(..span.start).unwrap_or_default();
            1 + before.iter().filter(|byte| **byte == b'\n').count()
        });
        let message = in_plain_words(error.message());
        match line {
            Some(line) => format!("line {line}: {message}"),
            None => message,
        }
    })?;
    job.complete(text)?;
    Ok(job)
}
