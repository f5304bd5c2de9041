//! Cache of dataset descriptions, so that the footers of a snapshot with a million files are read once.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Conflict, DataFile, Dataset, decode_schema, encode_schema};
use crate::feed::buckets::{BucketOptions, Buckets};
use crate::feed::error::Result;
use crate::feed::select::RowSet;
use crate::feed::tokens::UnitTokens;
use crate::feed::{FeedError, Plan, Selection};

/// A small key-value store for dataset descriptions.
///
/// An entry records the listing that it belongs to, so a stale one is never used. Entries may vanish at any
/// time.
pub trait DatasetCache: Send + Sync {
    /// The value under `key`, if there is one.
    ///
    /// # Errors
    /// Any text; it is logged and the footers are read instead.
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, String>;

    /// Stores `value` under `key`, replacing any older value.
    ///
    /// # Errors
    /// Any text; it is logged and nothing else happens.
    fn put(&self, key: &str, value: &[u8]) -> Result<(), String>;
}

/// Largest entry in bytes; larger descriptions are not cached.
pub(super) const ENTRY_BYTES_MAX: usize = 16 << 20;

/// The stored form of a dataset, also part of the stored form of a plan.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DatasetRecord {
    path: String,
    schema: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    conflicts: Vec<Conflict>,
    files: Vec<DataFile>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    listing: String,
    dataset: DatasetRecord,
}

impl TryFrom<&Dataset> for DatasetRecord {
    type Error = FeedError;
    fn try_from(d: &Dataset) -> Result<Self> {
        let schema = encode_schema(&d.schema)?;
        Ok(Self { path: d.path.clone(), schema, conflicts: d.conflicts.clone(), files: d.files.clone() })
    }
}

impl TryFrom<DatasetRecord> for Dataset {
    type Error = FeedError;
    fn try_from(r: DatasetRecord) -> Result<Self> {
        Dataset::new(r.path, Arc::new(decode_schema(&r.schema)?), r.conflicts, r.files)
    }
}

impl Serialize for Dataset {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        DatasetRecord::try_from(self).map_err(serde::ser::Error::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Dataset {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let record = DatasetRecord::deserialize(deserializer)?;
        Dataset::try_from(record).map_err(serde::de::Error::custom)
    }
}

/// Version of the rules by which files have one schema: descriptions of earlier programs lack columns and metadata.
const SCHEMA_RULES: &str = "2";

/// One entry per path: a newer state of the same path replaces the older one.
fn key(path: &str) -> String {
    format!("feed/dataset/{}", digest(&[path, SCHEMA_RULES]))
}

fn digest(texts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for (at, text) in texts.iter().enumerate() {
        // Between texts only, as in keys of earlier releases.
        if at > 0 {
            hash.update([0]);
        }
        hash.update(text.as_bytes());
    }
    hex::encode(&hash.finalize()[..16])
}

/// The description of the dataset at `path`, if its listing still has this digest.
pub(super) async fn lookup(cache: &Arc<dyn DatasetCache>, path: &str, digest: &str) -> Option<Dataset> {
    let entry: Entry = load(cache, key(path)).await?;
    (entry.listing == digest).then(|| Dataset::try_from(entry.dataset).ok()).flatten()
}

/// Stores the description in the cache; returns once it is stored or the attempt failed.
pub(super) async fn remember(cache: Arc<dyn DatasetCache>, digest: String, dataset: &Dataset) {
    match DatasetRecord::try_from(dataset) {
        Ok(record) => store(cache, key(&dataset.path), Entry { listing: digest, dataset: record }).await,
        Err(error) => tracing::warn!(%error, "a dataset cannot be cached"),
    }
}

/// The rows that a selection selects from the dataset of a listing, in the cache.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CachedRows {
    listing: String,
    rows: String,
}

/// Version of the rules by which conditions and splits select rows.
const SELECTION_RULES: &str = "3";

impl CachedRows {
    fn key(path: &str, selection: &Selection) -> String {
        format!("feed/selection/{}", digest(&[path, SELECTION_RULES, &selection.to_string()]))
    }

    /// The selected rows, if the dataset's listing still has this digest.
    pub(crate) async fn lookup(
        cache: &Arc<dyn DatasetCache>,
        dataset: &Dataset,
        listing: &str,
        selection: &Selection,
    ) -> Option<RowSet> {
        let found: CachedRows = load(cache, Self::key(dataset.path(), selection)).await?;
        (found.listing == listing).then(|| RowSet::decode(&found.rows, dataset.rows())).flatten()
    }

    /// Stores the selected rows; returns once they are stored or the attempt failed.
    pub(crate) async fn remember(
        cache: Arc<dyn DatasetCache>,
        dataset: &Dataset,
        listing: String,
        selection: &Selection,
        rows: &RowSet,
    ) {
        match rows.encode() {
            Ok(rows) => {
                store(cache, Self::key(dataset.path(), selection), CachedRows { listing, rows }).await
            }
            Err(error) => tracing::warn!(%error, "selected rows cannot be cached"),
        }
    }
}

/// The tokens of a column in each unit of reading of a plan, in the cache.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CachedTokens {
    listing: String,
    units: Vec<UnitTokens>,
}

/// Version of the rules by which lists are counted as documents.
const TOKEN_RULES: &str = "1";

impl CachedTokens {
    /// The path, the selection and the size of parts decide the units; the listing is that of an entry.
    fn key(plan: &Plan, column: &str) -> String {
        let selection = plan.selection().map(ToString::to_string).unwrap_or_default();
        let parts = plan.part_bytes().to_string();
        let path = plan.dataset().path();
        format!("feed/tokens/{}", digest(&[path, TOKEN_RULES, SELECTION_RULES, &selection, &parts, column]))
    }

    /// The counts for a plan of rows, if the dataset's listing still has this digest.
    pub(crate) async fn lookup(
        cache: &Arc<dyn DatasetCache>,
        plan: &Plan,
        listing: &str,
        column: &str,
    ) -> Option<Vec<UnitTokens>> {
        let found: CachedTokens = load(cache, Self::key(plan, column)).await?;
        (found.listing == listing && found.units.len() == plan.units() as usize).then_some(found.units)
    }

    /// Stores the counts; returns once they are stored or the attempt failed.
    pub(crate) async fn remember(
        cache: Arc<dyn DatasetCache>,
        plan: &Plan,
        listing: String,
        column: &str,
        units: &[UnitTokens],
    ) {
        store(cache, Self::key(plan, column), CachedTokens { listing, units: units.to_vec() }).await;
    }
}

/// The bucket of each row of a plan, in the cache.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CachedBuckets {
    listing: String,
    rows: String,
}

impl CachedBuckets {
    fn key(plan: &Plan, options: &BucketOptions) -> String {
        let selection = plan.selection().map(ToString::to_string).unwrap_or_default();
        let BucketOptions { column, bounds } = options;
        let (path, bounds) = (plan.dataset().path(), format!("{bounds:?}"));
        format!("feed/buckets/{}", digest(&[path, SELECTION_RULES, &selection, column, &bounds]))
    }

    /// The buckets for a plan of rows, if the dataset's listing still has this digest.
    pub(crate) async fn lookup(
        cache: &Arc<dyn DatasetCache>,
        plan: &Plan,
        listing: &str,
        options: &BucketOptions,
    ) -> Option<Vec<u8>> {
        let found: CachedBuckets = load(cache, Self::key(plan, options)).await?;
        (found.listing == listing).then(|| Buckets::decode_rows(&found.rows, plan.rows())).flatten()
    }

    /// Stores the buckets; returns once they are stored or the attempt failed.
    pub(crate) async fn remember(
        cache: Arc<dyn DatasetCache>,
        plan: &Plan,
        listing: String,
        options: &BucketOptions,
        of_rows: &[u8],
    ) {
        match Buckets::encode_rows(of_rows) {
            Ok(rows) => store(cache, Self::key(plan, options), CachedBuckets { listing, rows }).await,
            Err(error) => tracing::warn!(%error, "buckets cannot be cached"),
        }
    }
}

/// Reads the cache on a thread that may block, because an implementation may do file or network I/O.
async fn load<T: DeserializeOwned + Send + 'static>(cache: &Arc<dyn DatasetCache>, key: String) -> Option<T> {
    let cache = Arc::clone(cache);
    let found = tokio::task::spawn_blocking(move || {
        let bytes = match cache.get(&key) {
            Ok(bytes) => bytes?,
            Err(error) => {
                tracing::warn!(key, error, "dataset cache cannot be read; reading the files");
                return None;
            }
        };
        match serde_json::from_slice(&bytes) {
            Ok(entry) => Some(entry),
            Err(error) => {
                tracing::warn!(key, %error, "dataset cache entry is unreadable; reading the files");
                None
            }
        }
    });
    found.await.ok().flatten()
}

async fn store<T: Serialize + Send + 'static>(cache: Arc<dyn DatasetCache>, key: String, entry: T) {
    let stored = tokio::task::spawn_blocking(move || {
        let bytes = serde_json::to_vec(&entry).map_err(|e| e.to_string())?;
        if bytes.len() > ENTRY_BYTES_MAX {
            return Ok(());
        }
        cache.put(&key, &bytes)
    });
    match stored.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::warn!(error, "dataset cache cannot be written"),
        Err(error) => tracing::warn!(%error, "dataset cache cannot be written"),
    }
}
