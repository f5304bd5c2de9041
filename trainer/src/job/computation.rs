//! The identity of a run: the part of a job file that decides what is computed, in the form that is hashed.
use std::borrow::Cow;
use std::collections::BTreeMap;

use millrace_datafs::Name;
use millrace_streams::dataset::SourceSpec;
use millrace_streams::feed::{EpochRows, ImageOptions, Selection, Until};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{Features, JobDataset, JobFile, ModelSource, Output, Shuffle, Validation, is_first, is_one};
use crate::engine::{Device, Objective};
use crate::init::ModelSpec;
use crate::optim::{EmaConfig, OptimizerConfig};
use crate::precision::Precision;
use crate::strategy::Strategy;

impl JobFile {
    /// SHA-256, in hex, of what the job computes: `Computation`, the first model's digest `model_sha256`, and
    /// `data`, which identifies the rows and their order, and the teacher.
    ///
    /// The budget (`epochs_max`, `loss_target`, `validation.early_stopping`), the workers, the checkpoints, the job's name and its
    /// output are not part of it.
    pub fn digest(&self, model_sha256: &str, data: &str) -> String {
        let text = serde_json::to_string(&self.computation()).unwrap_or_default();
        digest_of(&["millrace computation 2", &text, model_sha256, data])
    }

    // Exhaustive, so that the compiler rejects a new key until it is classified here.
    fn computation(&self) -> Computation<'_> {
        let JobFile {
            name: _,
            dataset,
            until,
            // Represented by `JobFile::selection`.
            filter: _,
            splits: _,
            split: _,
            split_by: _,
            rows_per_epoch,
            features,
            inputs,
            images,
            label,
            // Represented by the digest of the first model.
            model: _,
            loss_output,
            loss,
            optimizer,
            ema,
            standardize_labels,
            freeze,
            no_decay,
            batch_rows,
            virtual_shards,
            accumulate_steps,
            strategy,
            precision,
            validation,
            epochs_max: _,
            loss_target: _,
            seed,
            device,
            workers: _,
            workers_min: _,
            workers_max: _,
            checkpoint_every_steps: _,
            shuffle,
            output: _,
        } = self;
        Computation {
            dataset,
            until: *until,
            // A job is checked before it has an identity.
            selection: self.selection().ok().flatten(),
            rows_per_epoch: *rows_per_epoch,
            features,
            label,
            inputs,
            images,
            loss_output: loss_output.as_deref(),
            loss: loss.without_place(),
            optimizer,
            batch_rows: *batch_rows,
            virtual_shards: *virtual_shards,
            accumulate_steps: *accumulate_steps,
            ema: *ema,
            seed: *seed,
            device: *device,
            shuffle,
            standardize_labels: *standardize_labels,
            freeze,
            no_decay,
            strategy: *strategy,
            precision: *precision,
            validation: validation.as_ref().map(|validation| {
                // The patience is part of the budget.
                let Validation {
                    dataset,
                    // Represented by `JobFile::validation_selection`.
                    filter: _,
                    split: _,
                    every_epochs,
                    early_stopping: _,
                    best,
                    top_k,
                    auc,
                } = validation;
                ValidationComputation {
                    dataset: dataset.as_ref().or(self.dataset.one()),
                    selection: self.validation_selection().ok().flatten(),
                    every_epochs: *every_epochs,
                    best: *best,
                    top_k: *top_k,
                    auc: *auc,
                }
            }),
        }
    }

    /// The run's id in checkpoints and bundles of format 1, which included the budget and the output.
    pub(crate) fn former_digest(&self, model_sha256: &str, data: &str) -> String {
        let former = FormerJob {
            name: &self.name,
            dataset: &self.dataset,
            features: &self.features,
            label: &self.label,
            model: match &self.model {
                ModelSource::File(_) => FormerModel::File(""),
                ModelSource::Init(spec) => FormerModel::Init(spec),
            },
            loss: &self.loss,
            optimizer: &self.optimizer,
            batch_rows: self.batch_rows,
            virtual_shards: self.virtual_shards,
            epochs_max: self.epochs_max,
            loss_target: self.loss_target,
            seed: self.seed,
            device: self.device,
            workers: None,
            checkpoint_every_steps: 0,
            shuffle: &self.shuffle,
            output: &self.output,
            standardize_labels: self.standardize_labels,
            freeze: &self.freeze,
            no_decay: &self.no_decay,
            accumulate_steps: self.accumulate_steps,
            ema: self.ema,
            strategy: self.strategy,
            precision: self.precision,
            images: &self.images,
            inputs: &self.inputs,
            loss_output: self.loss_output.as_deref(),
            selection: self.selection().ok().flatten(),
            rows_per_epoch: self.rows_per_epoch,
        };
        let text = serde_json::to_string(&former).unwrap_or_default();
        digest_of(&["millrace job 1", &text, model_sha256, data])
    }
}

/// The canonical form of what a job computes, version 2; its JSON is hashed.
///
/// Fields of version 2 are always written, in this order. A later option must not change the digests of
/// existing jobs. Omit it (`skip_serializing_if`) at the value that means the former behavior. The same holds
/// for the tables inside.
#[derive(Serialize)]
struct Computation<'a> {
    dataset: &'a JobDataset,
    #[serde(skip_serializing_if = "Features::is_empty")]
    features: &'a Features,
    label: &'a str,
    loss: Cow<'a, Objective>,
    optimizer: &'a OptimizerConfig,
    batch_rows: usize,
    virtual_shards: usize,
    seed: u64,
    device: Device,
    shuffle: &'a Shuffle,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    standardize_labels: bool,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    freeze: &'a [String],
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    no_decay: &'a [String],
    #[serde(skip_serializing_if = "is_one")]
    accumulate_steps: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ema: Option<EmaConfig>,
    #[serde(skip_serializing_if = "Strategy::is_default")]
    strategy: Strategy,
    #[serde(skip_serializing_if = "Precision::is_default")]
    precision: Precision,
    #[serde(skip_serializing_if = "Option::is_none")]
    validation: Option<ValidationComputation<'a>>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    inputs: &'a BTreeMap<String, Features>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    images: &'a BTreeMap<String, ImageOptions>,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_output: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    selection: Option<Selection>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows_per_epoch: Option<EpochRows>,
    #[serde(skip_serializing_if = "is_first")]
    until: Until,
}

/// What decides the evaluations of a run, which are part of its state.
#[derive(Serialize)]
struct ValidationComputation<'a> {
    // None in no job that was checked.
    dataset: Option<&'a SourceSpec>,
    #[serde(skip_serializing_if = "Option::is_none")]
    selection: Option<Selection>,
    every_epochs: u64,
    best: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_k: Option<usize>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    auc: bool,
}

/// The form that format 1 hashed. It must never change.
#[derive(Serialize)]
struct FormerJob<'a> {
    name: &'a Name,
    dataset: &'a JobDataset,
    #[serde(skip_serializing_if = "Features::is_empty")]
    features: &'a Features,
    label: &'a str,
    model: FormerModel<'a>,
    loss: &'a Objective,
    optimizer: &'a OptimizerConfig,
    batch_rows: usize,
    virtual_shards: usize,
    epochs_max: u64,
    loss_target: Option<f64>,
    seed: u64,
    device: Device,
    workers: Option<usize>,
    checkpoint_every_steps: u64,
    shuffle: &'a Shuffle,
    output: &'a Output,
    // Jobs of that format had no such keys: with one of them, no former run is this one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    standardize_labels: bool,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    freeze: &'a [String],
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    no_decay: &'a [String],
    #[serde(skip_serializing_if = "is_one")]
    accumulate_steps: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    ema: Option<EmaConfig>,
    #[serde(skip_serializing_if = "Strategy::is_default")]
    strategy: Strategy,
    #[serde(skip_serializing_if = "Precision::is_default")]
    precision: Precision,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    inputs: &'a BTreeMap<String, Features>,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_output: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    selection: Option<Selection>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows_per_epoch: Option<EpochRows>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    images: &'a BTreeMap<String, ImageOptions>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum FormerModel<'a> {
    File(&'a str),
    Init(&'a ModelSpec),
}

/// SHA-256, in hex, of texts, each with its length.
pub(crate) fn digest_of(parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part.as_bytes());
    }
    hex::encode(digest.finalize())
}
