//! Datasets in volumes: the store behind a specification, and a cache of footers in the volume.

use std::sync::Arc;

use millrace_datafs::{Datafs, Publish, View, VolumeSpec};
use object_store::ObjectStore;
use sha2::{Digest, Sha256};

use super::{DatasetCache, DatasetSpec};
use crate::feed::error::{FeedError, Result};
use crate::feed::{Plan, PlanOptions};

/// Bytes of one part of an entry; a volume bounds the values of its application keys.
const PART_BYTES: usize = 512 << 10;
/// Most parts of an entry that are believed.
const PARTS_MAX: usize = 1024;

/// A dataset of a volume, ready to be planned and read.
#[derive(Clone)]
pub struct OpenDataset {
    spec: DatasetSpec,
    identity: String,
    store: Arc<dyn ObjectStore>,
    cache: Option<Arc<dyn DatasetCache>>,
}

impl DatasetSpec {
    /// Opens the volume at its snapshot (or live). Reads no file.
    ///
    /// # Errors
    /// [`FeedError::Volume`], for example when the snapshot does not exist.
    pub async fn open(&self, datafs: &Datafs) -> Result<OpenDataset> {
        let (datafs, spec) = (datafs.clone(), self.clone());
        let opened = tokio::task::spawn_blocking(move || {
            let store = datafs.view(&spec.source)?.object_store();
            let identity = identity(&datafs, &spec.source)?;
            let cache = VolumeCache::of(&datafs, &spec.source, &identity)?;
            let cache = cache.map(|c| Arc::new(c) as Arc<dyn DatasetCache>);
            Ok(OpenDataset { spec, identity, store, cache })
        });
        let stopped = |_| FeedError::Stopped { file: self.to_string() };
        let failed = |source| FeedError::Volume { spec: self.to_string(), source: Arc::new(source) };
        opened.await.map_err(stopped)?.map_err(failed)
    }
}

impl OpenDataset {
    /// What was opened.
    pub fn spec(&self) -> &DatasetSpec {
        &self.spec
    }

    /// The view of the volume as an object store: what [`crate::feed::Feed::open`] reads from.
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// What the plan takes as its source: the volume and snapshot with the snapshot's number, for
    /// example `digits@v1#7`. A snapshot that was deleted and made again under its name has another.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Plans the dataset; `options.source` is replaced by [`OpenDataset::identity`]. The footers of
    /// a snapshot are read once and kept in the volume.
    ///
    /// # Errors
    /// Those of [`Plan::build`].
    pub async fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        let options = PlanOptions { source: self.identity.clone(), ..options.clone() };
        match &self.cache {
            Some(cache) => {
                let cache = Arc::clone(cache);
                Plan::build_cached(&self.store, &self.spec.path, &options, cache).await
            }
            None => Plan::build(&self.store, &self.spec.path, &options).await,
        }
    }
}

fn identity(datafs: &Datafs, source: &VolumeSpec) -> millrace_datafs::Result<String> {
    let Some(name) = &source.snapshot else {
        return Ok(source.to_string());
    };
    let snapshots = datafs.snapshot_list(&source.volume)?;
    let number = snapshots.iter().find(|s| s.name == *name).map(|s| s.id);
    // Deleted since the view was opened: its reads will say so.
    Ok(format!("{source}#{}", number.unwrap_or(0)))
}

/// Descriptions of a snapshot's datasets in the application keys of its live volume.
struct VolumeCache {
    live: View,
    scope: String,
}

impl VolumeCache {
    /// None for a live volume, whose listing is another one with every write.
    fn of(datafs: &Datafs, source: &VolumeSpec, identity: &str) -> millrace_datafs::Result<Option<Self>> {
        if source.snapshot.is_none() {
            return Ok(None);
        }
        let live = VolumeSpec::live(source.volume.clone());
        Ok(Some(Self { live: datafs.view(&live)?, scope: format!("snapshot/{identity}") }))
    }

    fn part(&self, key: &str, part: usize) -> String {
        format!("{}/{key}/{part:04}", self.scope)
    }

    fn head(&self, key: &str) -> String {
        format!("{}/{key}", self.scope)
    }
}

impl DatasetCache for VolumeCache {
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, String> {
        let get = |key: &str| self.live.key_get(key).map_err(|e| e.to_string());
        let Some(head) = get(&self.head(key))? else {
            return Ok(None);
        };
        let head = String::from_utf8_lossy(&head).into_owned();
        let (parts, digest) = head.split_once(' ').unwrap_or(("0", ""));
        let parts = parts.parse::<usize>().ok().filter(|&n| n <= PARTS_MAX);
        let mut value = Vec::new();
        for part in 0..parts.unwrap_or(0) {
            let Some(bytes) = get(&self.part(key, part))? else {
                return Ok(None);
            };
            value.extend_from_slice(&bytes);
        }
        // Parts are read one by one: a writer in between shows here.
        Ok((hex::encode(Sha256::digest(&value)) == digest).then_some(value))
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        let parts: Vec<&[u8]> = value.chunks(PART_BYTES).collect();
        if parts.len() > PARTS_MAX {
            return Ok(());
        }
        let head = format!("{} {}", parts.len(), hex::encode(Sha256::digest(value)));
        let mut publish = Publish::new().put_key(self.head(key), head);
        for (i, part) in parts.into_iter().enumerate() {
            publish = publish.put_key(self.part(key, i), part);
        }
        self.live.publish(publish).map_err(|e| e.to_string())
    }
}
