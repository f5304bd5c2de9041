//! Publication of a finished run as a model bundle: exactly once, despite crashes.
//!
//! The identity of a publication is the run, its step and the model name; the key is
//! `trainer/<job>/published/<identity>`. One transaction adds the bundle's files and the key, and expects the
//! key as it was read. One identity therefore never becomes two versions. Only if the version that the key
//! names was deleted, the state is published again as a new version. The transaction also expects the owner
//! key (`checkpoint.rs`): a deposed coordinator publishes no model.
//!
//! Programs of checkpoint format 1 used the run's former id as the identity; such keys are read, too.
use std::collections::BTreeMap;
use std::ops::ControlFlow;

use millrace_bundle::{Bundle, Lineage, MixedDataset, Statistics, VERSION_MAX};
use millrace_datafs::{Publish, View};
use millrace_streams::dataset::{SourceSpec, TopicSpec};
use millrace_streams::feed::MixedSpec;
use object_store::ObjectStore;
use prost::Message;
use serde::{Deserialize, Serialize};
use tokio::runtime::Handle;

use crate::checkpoint::{Checkpoints, stage};
use crate::engine::{Engine, Loss};
use crate::error::{Error, Result};
use crate::job::{JobFile, digest_of};
use crate::labels::LABELS_FILE;
use crate::metrics;
use crate::replica::check_weights;
use crate::source::DataFacts;
use crate::state::RunState;
use crate::validation::{self, Evaluation};

/// Attempts at a publish that conflicts with another version of the same model.
const ATTEMPTS: usize = 16;
/// Application keys of ingested offsets: `ingest/<job>/<topic>/<partition>`.
const OFFSETS_PREFIX: &str = "ingest/";

/// A published model version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Published {
    pub(crate) version: u64,
    pub(crate) model_sha256: String,
}

/// The provenance in a run's bundle.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) run: String,
    /// The run's id in format 1.
    pub(crate) former_run: String,
    pub(crate) offsets: BTreeMap<String, BTreeMap<i32, i64>>,
    pub(crate) facts: DataFacts,
    /// The columns of each input, unless one column feeds the only input of the model.
    pub(crate) fields: BTreeMap<String, Vec<String>>,
}

/// The next offset of every partition that was ingested into a volume at a snapshot.
///
/// # Errors
/// The volume's, and a damaged offset: without it, the lineage would lack a partition.
pub(crate) fn offsets(dataset: &View) -> Result<BTreeMap<String, BTreeMap<i32, i64>>> {
    let keys = dataset
        .key_scan(OFFSETS_PREFIX)
        .map_err(|e| Error::volume(format!("read landed offsets of {}", dataset.spec()), e))?;
    let mut offsets: BTreeMap<String, BTreeMap<i32, i64>> = BTreeMap::new();
    for (key, value) in keys {
        let mut parts = key.strip_prefix(OFFSETS_PREFIX).unwrap_or_default().splitn(3, '/');
        let (Some(_), Some(topic), Some(partition)) = (parts.next(), parts.next(), parts.next()) else {
            continue;
        };
        let partition: Option<i32> = partition.parse().ok();
        let offset: Option<i64> = std::str::from_utf8(&value).ok().and_then(|v| v.parse().ok());
        let (Some(partition), Some(offset)) = (partition, offset) else {
            let (what, reason) =
                (format!("key {key} of ingest"), "it is no offset of a partition".to_owned());
            let damaged = millrace_datafs::Error::Corrupt { what, reason };
            return Err(Error::volume(format!("read landed offsets of {}", dataset.spec()), damaged));
        };
        // Two ingest jobs of one topic: the lower offset, up to which both have landed records.
        let known = offsets.entry(topic.to_owned()).or_default().entry(partition);
        known.and_modify(|next| *next = offset.min(*next)).or_insert(offset);
    }
    Ok(offsets)
}

/// The next offset of every partition of a range of a topic.
pub(crate) fn offsets_of_topic(topic: &TopicSpec) -> BTreeMap<String, BTreeMap<i32, i64>> {
    let ranges = topic.range.iter().flat_map(|range| range.partitions());
    let partitions = (0..).zip(ranges.map(|range| range.next)).collect();
    BTreeMap::from([(topic.topic.clone(), partitions)])
}

/// Adds the offsets of another dataset. Of a partition that both have, the lower one counts, up to which both have its
/// records.
pub(crate) fn add_offsets(
    offsets: &mut BTreeMap<String, BTreeMap<i32, i64>>,
    others: BTreeMap<String, BTreeMap<i32, i64>>,
) {
    for (topic, partitions) in others {
        let known = offsets.entry(topic).or_default();
        for (partition, offset) in partitions {
            known.entry(partition).and_modify(|next| *next = offset.min(*next)).or_insert(offset);
        }
    }
}

/// The key of the publication of a run's state after `step` steps.
pub(crate) fn key_of(job: &JobFile, run: &str, step: u64) -> String {
    let root = job.output.path.trim_matches('/');
    let identity = digest_of(&[run, &step.to_string(), root, job.model_name().as_str()]);
    prefix_of(job) + &identity
}

/// What the keys of a job's publications begin with.
pub(crate) fn prefix_of(job: &JobFile) -> String {
    format!("trainer/{}/published/", job.name)
}

/// The version that a key names, with the key's value.
pub(crate) fn recorded(output: &View, key: &str) -> Result<Option<(Vec<u8>, Published)>> {
    let value =
        output.key_get(key).map_err(|e| Error::volume(format!("read key {key} of {}", output.spec()), e))?;
    let Some(value) = value else { return Ok(None) };
    let published = published(output, key, &value)?;
    Ok(Some((value, published)))
}

/// The value of the key of a publication.
pub(crate) fn published(output: &View, key: &str, value: &[u8]) -> Result<Published> {
    serde_json::from_slice(value).map_err(|e| Error::Bundle {
        what: format!("read key {key} of {}", output.spec()),
        source: Box::new(e),
    })
}

/// Whether the bundle of a published version still exists.
fn bundle_exists(
    store: &dyn ObjectStore,
    root: &str,
    name: &str,
    published: &Published,
    runtime: &Handle,
) -> Result<bool> {
    let listing =
        runtime.block_on(millrace_bundle::scan_model(store, root, name)).map_err(|e| Error::Bundle {
            what: format!("look for model {name} version {}", published.version),
            source: Box::new(e),
        })?;
    Ok(listing.complete.iter().any(|found| {
        found.version == published.version && found.manifest.model_sha256() == published.model_sha256
    }))
}

/// Publishes the finished run `state` as the next version, or finds the version that it has already. The flag
/// says whether it had one. Calls `statistics` only for a new version, and publishes nothing if that is stopped.
///
/// Blocks on `runtime`, so it must not be called from async code.
pub(crate) fn publish(
    checkpoints: &Checkpoints,
    job: &JobFile,
    origin: &Origin,
    engine: &mut Engine,
    state: &RunState,
    statistics: impl FnOnce() -> ControlFlow<(), Option<Statistics>>,
    runtime: &Handle,
) -> Result<Option<(Published, bool)>> {
    let (output, root) = (&checkpoints.view, job.output.path.trim_matches('/'));
    let name = job.model_name();
    let store = output.object_store();
    let key = key_of(job, &origin.run, state.step);
    let former_key = format!("trainer/{}/published/{}", job.name, origin.former_run);
    let standing = |key: &str| -> Result<Option<Published>> {
        let Some((_, published)) = recorded(output, key)? else { return Ok(None) };
        Ok(bundle_exists(store.as_ref(), root, name.as_str(), &published, runtime)?.then_some(published))
    };
    check_weights(engine.layout(), state.published(), state.step.saturating_sub(1))?;
    for key in [&key, &former_key] {
        if let Some(published) = standing(key)? {
            return Ok(Some((published, true)));
        }
    }
    let ControlFlow::Continue(statistics) = statistics() else { return Ok(None) };
    engine.set_weights(state.published())?;
    engine.set_states(state.published_states())?;
    // The evaluation whose weights are published instead of the last ones.
    let published_at = validation::best(&state.evaluations).filter(|_| state.best.is_some());
    let mut model = engine.export()?;
    if let Some(scale) = &origin.facts.scale {
        scale.undo(&mut model, engine.graph().output_name(), &engine.output_row());
    }
    let model = model.encode_to_vec();
    let latest_key = format!("{root}/{name}/latest");
    let mut lowest = 1;
    for _ in 0..ATTEMPTS {
        if let Some(published) = standing(&key)? {
            return Ok(Some((published, true)));
        }
        let before = recorded(output, &key)?.map(|(value, _)| value);
        let bad = |e| Error::Bundle { what: format!("publish model {name}"), source: Box::new(e) };
        let latest = output
            .key_get(&latest_key)
            .map_err(|e| Error::volume(format!("read key {latest_key} of {}", output.spec()), e))?;
        let last: u64 = latest
            .as_deref()
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .and_then(|text| text.parse().ok())
            .filter(|version| *version < VERSION_MAX)
            .unwrap_or_default();
        let free = runtime
            .block_on(millrace_bundle::next_version(store.as_ref(), root, name.as_str()))
            .map_err(bad)?;
        let version = free.max(last.saturating_add(1)).max(lowest);
        let one = job.dataset.one();
        let files = one.and_then(SourceSpec::dataset);
        let mixed = job.dataset.mixture().unwrap_or_default().iter();
        let mixture = mixed.map(|MixedSpec { dataset, weight }| MixedDataset {
            dataset: dataset.to_string(),
            weight: weight.to_string(),
        });
        let lineage = Lineage {
            volume: files.map(|files| files.source.volume.to_string()).unwrap_or_default(),
            snapshot: files
                .and_then(|files| files.source.snapshot.as_ref())
                .map(ToString::to_string)
                .unwrap_or_default(),
            path: files.map(|files| files.path.clone()).unwrap_or_default(),
            topic: one.and_then(SourceSpec::topic).map(ToString::to_string).unwrap_or_default(),
            mixture: mixture.collect(),
            selection: job.selection().ok().flatten().map(|rows| rows.to_string()).unwrap_or_default(),
            offsets: origin.offsets.clone(),
            config_sha256: origin.run.clone(),
            seed: job.seed,
            code_version: env!("CARGO_PKG_VERSION").to_owned(),
            steps: published_at.map_or(state.step, |evaluation| evaluation.step),
            epochs: published_at.map_or(state.ledger.epochs.len() as u64, |evaluation| evaluation.epoch),
            imported: None,
            quantized: None,
        };
        let bundle =
            Bundle::new(name.as_str(), version, model.clone(), lineage, figures(state, job.loss.kind()))
                .and_then(|bundle| match &statistics {
                    Some(statistics) => bundle.with_statistics(statistics),
                    None => Ok(bundle),
                })
                .and_then(|bundle| match &origin.fields {
                    fields if fields.is_empty() => Ok(bundle),
                    fields => bundle.with_fields(fields.clone()),
                })
                .and_then(|bundle| match &origin.facts.dictionary {
                    Some(dictionary) => bundle.with_file(LABELS_FILE, dictionary.file(&job.label).into()),
                    None => Ok(bundle),
                })
                .map_err(bad)?;
        let published = Published { version, model_sha256: bundle.model_sha256().to_owned() };
        let owner_key = Checkpoints::owner_key(job.name.as_str());
        let mut publish = Publish::new()
            // Also against a folder that another program makes, for example in a mount.
            .expect_absent(format!("{root}/{name}/{version}"))
            .expect_key(owner_key.clone(), Some(checkpoints.owner.clone().into_bytes()))
            .expect_key(key.clone(), before)
            .put_key(key.clone(), serde_json::to_vec(&published).unwrap_or_default())
            .expect_key(latest_key.clone(), latest)
            .put_key(latest_key.clone(), version.to_string().into_bytes());
        for (path, bytes) in bundle.files() {
            publish = publish.file(format!("{root}/{name}/{version}/{path}"), stage(output, &bytes)?);
        }
        match output.publish(publish) {
            Ok(()) => {
                metrics::model_published();
                tracing::info!(job = %job.name, model = %name, version, "model published");
                return Ok(Some((published, false)));
            }
            Err(millrace_datafs::Error::Conflict { key }) if key == owner_key => {
                return Err(checkpoints.deposed());
            }
            Err(millrace_datafs::Error::Conflict { .. }) => {}
            Err(millrace_datafs::Error::Exists { .. }) => lowest = version.saturating_add(1),
            Err(error) => {
                return Err(Error::volume(format!("publish model {name} to {}", output.spec()), error));
            }
        }
    }
    Err(Error::Busy {
        job: job.name.to_string(),
        reason: format!("other versions of model {name} are being published; try again"),
    })
}

/// Metrics of the bundle: those of the published weights, and of the last epoch of training before them.
fn figures(state: &RunState, loss: Loss) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    let epochs = &state.ledger.epochs;
    let best = validation::best(&state.evaluations).filter(|_| state.best.is_some());
    let evaluation: Option<&Evaluation> = best.or(state.evaluations.last());
    let last = match best {
        Some(best) => best.epoch.checked_sub(1).and_then(|index| epochs.get(index as usize)),
        None => epochs.last(),
    };
    if let Some(last) = last {
        figures.insert("train_loss".to_owned(), last.loss);
        if loss.counts_classes() {
            figures.insert("train_accuracy".to_owned(), last.accuracy);
        }
        figures.insert("train_rows".to_owned(), last.rows as f64);
    }
    if let Some(evaluation) = evaluation {
        let named = evaluation.figures().map(|(name, value)| (format!("validation_{name}"), value));
        figures.extend(named);
        figures.insert("validation_rows".to_owned(), evaluation.rows as f64);
        figures.insert("validation_epoch".to_owned(), evaluation.epoch as f64);
    }
    figures
}
