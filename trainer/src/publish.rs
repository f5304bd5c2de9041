//! Publishing a finished run as a model bundle: once per run, whatever crashes in between.
//!
//! The bundle's files and the key `trainer/<job>/published/<run>` appear in one publish, and the key
//! must not have been there: the same run can never become two versions.
use std::collections::BTreeMap;

use millrace_bundle::{Bundle, Lineage, Statistics};
use millrace_datafs::{Publish, View};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::checkpoint::{Checkpoints, stage};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::job::JobFile;
use crate::metrics;
use crate::state::State;

/// How often a publish is tried again when another model of the same name was faster.
const ATTEMPTS: usize = 16;
/// Application keys of landed offsets: `ingest/<job>/<topic>/<partition>`.
const OFFSETS_PREFIX: &str = "ingest/";

/// A published model version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Published {
    pub(crate) version: u64,
    pub(crate) model_sha256: String,
}

/// What the bundle of a run says besides its model.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) run: String,
    pub(crate) offsets: BTreeMap<String, BTreeMap<i32, i64>>,
}

/// The next offset of every partition that was landed in a volume at a snapshot.
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
        if let (Some(partition), Some(offset)) = (partition, offset) {
            // Two ingests of one topic: what both have landed.
            let known = offsets.entry(topic.to_owned()).or_default().entry(partition);
            known.and_modify(|next| *next = offset.min(*next)).or_insert(offset);
        }
    }
    Ok(offsets)
}

fn run_key(job: &JobFile, run: &str) -> String {
    format!("trainer/{}/published/{run}", job.name)
}

/// The version a run was published as, if it was.
pub(crate) fn published(output: &View, job: &JobFile, run: &str) -> Result<Option<Published>> {
    let key = run_key(job, run);
    let value =
        output.key_get(&key).map_err(|e| Error::volume(format!("read key {key} of {}", output.spec()), e))?;
    Ok(value.and_then(|value| serde_json::from_slice(&value).ok()))
}

/// Publishes the finished run `state` as the next version, or finds the version it already has. Asks for the
/// statistics of its inputs where it has none.
///
/// Blocks; `runtime` must not be the caller's own thread's.
pub(crate) fn publish(
    checkpoints: &Checkpoints,
    job: &JobFile,
    origin: &Origin,
    engine: &mut Engine,
    state: &State,
    statistics: impl FnOnce() -> Option<Statistics>,
    runtime: &tokio::runtime::Handle,
) -> Result<Published> {
    if let Some(published) = published(&checkpoints.view, job, &origin.run)? {
        return Ok(published);
    }
    let statistics = statistics();
    engine.set_weights(&state.weights)?;
    let model = engine.export().encode_to_vec();
    let (output, root) = (&checkpoints.view, job.output.path.trim_matches('/'));
    let name = job.model_name();
    let latest_key = format!("{root}/{name}/latest");
    for _ in 0..ATTEMPTS {
        if let Some(published) = published(output, job, &origin.run)? {
            return Ok(published);
        }
        let bad = |e| Error::Bundle { what: format!("publish model {name}"), source: Box::new(e) };
        let latest = output
            .key_get(&latest_key)
            .map_err(|e| Error::volume(format!("read key {latest_key} of {}", output.spec()), e))?;
        let last: u64 = latest
            .as_deref()
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .and_then(|text| text.parse().ok())
            .unwrap_or_default();
        let store = output.object_store();
        let free = runtime
            .block_on(millrace_bundle::next_version(store.as_ref(), root, name.as_str()))
            .map_err(bad)?;
        let version = free.max(last + 1);
        let lineage = Lineage {
            volume: job.dataset.source.volume.to_string(),
            snapshot: job.dataset.source.snapshot.as_ref().map(ToString::to_string).unwrap_or_default(),
            offsets: origin.offsets.clone(),
            config_sha256: origin.run.clone(),
            seed: job.seed,
            code_version: env!("CARGO_PKG_VERSION").to_owned(),
            steps: state.step,
            epochs: state.ledger.epochs.len() as u64,
            imported: None,
            quantized: None,
        };
        let bundle = Bundle::new(name.as_str(), version, model.clone(), lineage, figures(state))
            .and_then(|bundle| match &statistics {
                Some(statistics) => bundle.with_statistics(statistics),
                None => Ok(bundle),
            })
            .map_err(bad)?;
        let published = Published { version, model_sha256: bundle.model_sha256().to_owned() };
        let mut publish = Publish::new()
            .expect_key(run_key(job, &origin.run), None)
            .put_key(run_key(job, &origin.run), serde_json::to_vec(&published).unwrap_or_default())
            .expect_key(latest_key.clone(), latest)
            .put_key(latest_key.clone(), version.to_string().into_bytes());
        for (path, bytes) in bundle.files() {
            publish = publish.file(format!("{root}/{name}/{version}/{path}"), stage(output, &bytes)?);
        }
        match output.publish(publish) {
            Ok(()) => {
                metrics::model_published();
                tracing::info!(job = %job.name, model = %name, version, "model published");
                return Ok(published);
            }
            Err(millrace_datafs::Error::Conflict { .. }) => {}
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

fn figures(state: &State) -> BTreeMap<String, f64> {
    let mut figures = BTreeMap::new();
    if let Some(last) = state.ledger.epochs.last() {
        figures.insert("train_loss".to_owned(), last.loss);
        figures.insert("train_accuracy".to_owned(), last.accuracy);
        figures.insert("train_rows".to_owned(), last.rows as f64);
    }
    figures
}
