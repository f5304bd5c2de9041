//! Open datasets: the store behind a specification, and a cache of descriptions in the metadata and the home.

use std::sync::Arc;
use std::time::UNIX_EPOCH;

use millrace_datafs::{Datafs, Publish, SnapshotId, View, VolumeSpec};
use object_store::ObjectStore;
use object_store::path::Path;

use super::FileFormat;
use super::confined::ConfinedStore;
use super::folder::FolderCache;
use super::listing::Listing;
use super::pinned::PinnedStore;
use super::shared_cache::SharedCache;
use super::topic::OpenTopic;
use super::{DatasetCache, DatasetSpec, SourceSpec};
use crate::feed::error::{FeedError, Result};
use crate::feed::{Plan, PlanOptions, Selection};

/// A dataset of a volume or of a topic, ready to be planned and read.
#[derive(Clone)]
pub struct OpenDataset {
    spec: SourceSpec,
    /// Path and format of the files inside the store.
    files: (String, Option<FileFormat>),
    /// The topic, whose list of files has to be found before a plan.
    topic: Option<Arc<OpenTopic>>,
    identity: String,
    /// Number and time of creation of the snapshot; none of a live volume or a topic.
    made: Option<String>,
    store: Arc<dyn ObjectStore>,
    cache: Option<Arc<dyn DatasetCache>>,
    /// The view of a snapshot; none of a live volume or a topic, whose content changes.
    snapshot: Option<View>,
    /// The identity of the snapshot, if processes of this node share its decoded row groups.
    shared: Option<SnapshotId>,
}

impl DatasetSpec {
    /// Opens the volume at its snapshot (or live). Reads no file. Each file of a live volume is read in the
    /// state that was listed; a later change is [`FeedError::Changed`].
    ///
    /// # Errors
    /// [`FeedError::Volume`], for example when the snapshot does not exist.
    pub async fn open(&self, datafs: &Datafs) -> Result<OpenDataset> {
        self.open_in(datafs, None).await
    }

    /// As [`DatasetSpec::open`], of a snapshot, with a store that refuses every file outside of `folder`, an absolute path
    /// of the volume: also those that a symbolic link inside of the folder, or the name of an image file, leads to.
    ///
    /// # Errors
    /// Those of [`DatasetSpec::open`]; [`FeedError::Invalid`] for a live volume.
    pub async fn open_confined(&self, datafs: &Datafs, folder: &str) -> Result<OpenDataset> {
        if self.source.snapshot.is_none() {
            return Err(FeedError::invalid(format!(
                "{self} is a live volume, which changes while it is read; create a snapshot and name it, for example \
                 {}@v1:{}",
                self.source.volume, self.path
            )));
        }
        let folder = Path::parse(folder.trim_matches('/'))
            .map_err(|error| FeedError::invalid(format!("folder {folder:?}: {error}")))?;
        self.open_in(datafs, Some(folder)).await
    }

    async fn open_in(&self, datafs: &Datafs, folder: Option<Path>) -> Result<OpenDataset> {
        let (datafs, mut spec) = (datafs.clone(), self.clone());
        let opened = tokio::task::spawn_blocking(move || {
            let view = datafs.view(&spec.source)?;
            // The newest snapshot may be another one soon.
            spec.source = view.spec().clone();
            let store = view.object_store();
            let (identity, made) = identity(&datafs, &spec.source)?;
            if spec.source.snapshot.is_none() {
                let store = Arc::new(PinnedStore::new(store));
                return Ok(OpenDataset::of_volume(spec, identity, store));
            }
            if let Err(error) = forget_keys(&datafs, &spec.source) {
                tracing::warn!(volume = %spec.source.volume, %error, "cannot remove old dataset descriptions from the volume");
            }
            let home = FolderCache::new(datafs.home(), format!("snapshot/{identity}"));
            let cache = SharedCache::new(home, view.clone());
            // Links cannot leave a volume.
            let store = match folder.filter(|folder| !folder.as_ref().is_empty()) {
                Some(folder) => Arc::new(ConfinedStore::new(store, view.clone(), folder)),
                None => store,
            };
            Ok(OpenDataset {
                made,
                cache: Some(Arc::new(cache)),
                snapshot: Some(view),
                ..OpenDataset::of_volume(spec, identity, store)
            })
        });
        let stopped = |_| FeedError::Stopped { file: self.to_string() };
        let failed = |source| FeedError::Volume { spec: self.to_string(), source: Arc::new(source) };
        opened.await.map_err(stopped)?.map_err(failed)
    }
}

impl OpenDataset {
    fn of_volume(spec: DatasetSpec, identity: String, store: Arc<dyn ObjectStore>) -> Self {
        let files = (spec.path.clone(), spec.format);
        let spec = spec.into();
        Self {
            spec,
            files,
            topic: None,
            identity,
            made: None,
            store,
            cache: None,
            snapshot: None,
            shared: None,
        }
    }

    pub(crate) fn of_topic(open: OpenTopic) -> Self {
        let open = Arc::new(open);
        Self {
            spec: SourceSpec::Topic(open.spec().clone()),
            files: (format!("/{}", open.spec().topic), Some(FileFormat::JsonLines)),
            identity: open.identity(),
            made: None,
            store: open.store(),
            cache: open.cache().cloned(),
            topic: Some(open),
            snapshot: None,
            shared: None,
        }
    }

    /// This dataset, whose plans make feeds that share decoded row groups: those of the processes of one user on one
    /// machine, which read the same row groups and columns of the same snapshot, decode each row group once.
    ///
    /// Only a snapshot is shared: a live volume and a topic stay as they are. One of the processes serves the others, and
    /// holds up to [`crate::feed::FeedOptions::cache_bytes_max`] more bytes for them.
    pub async fn shared(mut self) -> Self {
        let Some(view) = self.snapshot.clone() else { return self };
        let error: Box<dyn std::error::Error> =
            match tokio::task::spawn_blocking(move || view.snapshot_id()).await {
                Ok(Ok(id)) => {
                    self.shared = id;
                    return self;
                }
                Ok(Err(error)) => error.into(),
                Err(error) => error.into(),
            };
        tracing::warn!(dataset = %self.spec, %error, "row groups are not shared: the snapshot has no identity");
        self
    }

    /// The specification that was opened: the newest snapshot has its name, and a topic its offsets.
    pub fn spec(&self) -> &SourceSpec {
        &self.spec
    }

    /// The view of the volume or of the topic as an object store, for [`crate::feed::Feed::open`].
    pub fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// The source of the plan: the volume and snapshot with the snapshot's number, for example `digits@v1#7`.
    /// A snapshot that was deleted and created again under its name has another number. A topic has a digest of its range,
    /// for example `topic:clicks#9f86…`.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// What tells the content from that of another dataset with the same [`OpenDataset::identity`], sizes and numbers of rows:
    /// of a snapshot also when its volume was deleted and made again, of a live volume when a file was written again. A home
    /// that was moved or restored gives the same. None of a snapshot that was deleted meanwhile.
    ///
    /// # Errors
    /// Those of listing the files of a live volume.
    pub async fn content(&self) -> Result<Option<String>> {
        if self.topic.is_some() {
            return Ok(Some(self.identity.clone()));
        }
        if self.snapshot.is_some() {
            return Ok(self.made.clone());
        }
        let listing = Listing::read(&self.store, &self.files.0, self.files.1).await?;
        Ok(Some(listing.digest()))
    }

    /// Plans the dataset; `options.source` is replaced by [`OpenDataset::identity`], and `options.format` by the
    /// format of the specification. The description of a snapshot is made once for all machines with the same metadata,
    /// that of a range once for the home.
    ///
    /// # Errors
    /// Those of [`Plan::build`]; [`FeedError::Topic`] for a topic.
    pub async fn plan(&self, options: &PlanOptions) -> Result<Plan> {
        let mut options =
            PlanOptions { source: self.identity.clone(), format: self.files.1, ..options.clone() };
        if let (Some(open), SourceSpec::Topic(spec)) = (&self.topic, &self.spec) {
            options.selection = options.selection.map(Selection::of_records).transpose()?;
            open.prepare().await.map_err(|error| FeedError::topic(&spec.topic, error))?;
        }
        match &self.cache {
            Some(cache) => {
                let cache = Arc::clone(cache);
                let (plan, listing) = Plan::build_listed(&self.store, &self.files.0, &options, cache).await?;
                Ok(match &self.shared {
                    Some(snapshot) => plan.sharing(snapshot, &listing),
                    None => plan,
                })
            }
            None => Plan::build(&self.store, &self.files.0, &options).await,
        }
    }
}

/// The source of plans, and number and time of creation of the snapshot.
fn identity(datafs: &Datafs, source: &VolumeSpec) -> millrace_datafs::Result<(String, Option<String>)> {
    let Some(name) = &source.snapshot else {
        return Ok((source.to_string(), None));
    };
    let snapshots = datafs.snapshot_list(&source.volume)?;
    let found = snapshots.iter().find(|s| s.name == *name);
    let made = found.map(|s| {
        let time = s.created_at.duration_since(UNIX_EPOCH).unwrap_or_default();
        format!("{} {}", s.id, time.as_nanos())
    });
    // 0 when the snapshot was deleted since the view was opened: reads will fail then.
    Ok((format!("{source}#{}", found.map_or(0, |s| s.id)), made))
}

/// Removes the descriptions that earlier releases kept in the live volume.
fn forget_keys(datafs: &Datafs, source: &VolumeSpec) -> millrace_datafs::Result<()> {
    let live = datafs.view(&VolumeSpec::live(source.volume.clone()))?;
    // `snapshot/VOLUME@NAME#NUMBER/…`; other programs have keys that begin so.
    let left = live.key_scan(&format!("snapshot/{}@", source.volume))?;
    if left.is_empty() {
        return Ok(());
    }
    let forget = left.into_iter().fold(Publish::new(), |publish, (key, _)| publish.delete_key(key));
    live.publish(forget)
}
