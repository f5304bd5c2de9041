//! The models that are served: found in a volume or a directory, loaded, looked through again for new
//! versions. A bad version is named and left out; it never takes the others down.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_bundle::{Manifest, Signature};
use millrace_datafs::{Datafs, View};
use object_store::ObjectStore;
use parking_lot::RwLock;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::config::{Config, VOLUME_ROOT};
use crate::error::{Error, InferError, Result, quote};
use crate::metrics::{MODELS, ModelMetrics, REFRESHES};
use crate::session::Pool;

/// A version that failed to load is tried again after this time, or at once when its manifest changed.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Where models are found.
#[derive(Debug, Clone)]
pub struct Source {
    store: Arc<dyn ObjectStore>,
    root: String,
}

impl Source {
    /// Models below `root` of any store.
    pub fn new(store: Arc<dyn ObjectStore>, root: impl Into<String>) -> Source {
        Source { store, root: root.into() }
    }

    /// The source that a configuration names: its volume or its directory. Blocks on metadata.
    ///
    /// # Errors
    /// [`Error::Config`] when both or none are named; [`Error::Datafs`] when the volume or snapshot does
    /// not exist; [`Error::Directory`].
    pub fn configured(config: &Config, datafs: &Datafs) -> Result<Source> {
        match (&config.volume, &config.directory) {
            (Some(volume), None) => Ok(Source::volume(&datafs.view(volume)?)),
            (None, Some(directory)) => Source::directory(directory),
            (Some(_), Some(_)) => {
                Err(Error::Config { reason: "names both a volume and a directory of models".into() })
            }
            (None, None) => Err(Error::Config {
                reason: "names neither a volume nor a directory of models".into(),
            }),
        }
    }

    /// Models in the `models/` directory of a volume or a snapshot.
    pub fn volume(view: &View) -> Source {
        Source::new(view.object_store(), VOLUME_ROOT)
    }

    /// Models in a directory of the local file system: `<directory>/<name>/<version>/`.
    ///
    /// # Errors
    /// [`Error::Directory`] when it is not a readable directory.
    pub fn directory(path: &Path) -> Result<Source> {
        let failed = |reason: String| Error::Directory { path: path.to_path_buf(), reason };
        std::fs::read_dir(path).map_err(|error| failed(error.to_string()))?;
        let store = object_store::local::LocalFileSystem::new_with_prefix(path)
            .map_err(|error| failed(error.to_string()))?;
        Ok(Source::new(Arc::new(store), ""))
    }
}

/// One model version that is ready. Requests hold it, so it outlives its removal from the repository.
#[derive(Debug)]
pub struct Model {
    manifest: Manifest,
    pub(crate) pool: Pool,
    pub(crate) metrics: ModelMetrics,
}

impl Model {
    /// Model name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// Version.
    pub fn version(&self) -> u64 {
        self.manifest.version
    }

    /// The manifest: digests, lineage, metrics.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Inputs and outputs.
    pub fn signature(&self) -> &Signature {
        &self.manifest.signature
    }
}

/// What became of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It answers requests.
    Ready,
    /// It cannot be served, for this reason.
    Failed(String),
}

/// A version and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionStatus {
    /// Model name; for a directory that is no version, its path.
    pub model: String,
    /// Version; `None` for a directory that is none.
    pub version: Option<u64>,
    /// What became of it.
    pub state: State,
}

#[derive(Debug, Clone)]
struct Failure {
    manifest: Option<Manifest>,
    reason: String,
    at: Instant,
}

#[derive(Debug, Clone, Default)]
struct Versions {
    ready: BTreeMap<u64, Arc<Model>>,
    failed: BTreeMap<u64, Failure>,
}

#[derive(Debug, Default)]
struct Models {
    models: HashMap<String, Versions>,
    /// Directories that are no version, with the reason.
    other: Vec<(String, String)>,
}

#[derive(Debug)]
struct Inner {
    source: Source,
    config: Config,
    models: RwLock<Arc<Models>>,
    /// One look through at a time.
    refreshing: tokio::sync::Mutex<()>,
    changes: watch::Sender<u64>,
}

/// The models that are served. Cheap to clone; all clones are one.
#[derive(Debug, Clone)]
pub struct Repository {
    inner: Arc<Inner>,
}

impl Repository {
    /// Loads every complete version once. Versions that cannot be loaded are in [`Repository::status`].
    ///
    /// # Errors
    /// [`Error::RuntimeMissing`], [`Error::RuntimeUnusable`], [`Error::DeviceUnavailable`];
    /// [`Error::Repository`] when the source cannot be read.
    pub async fn open(source: Source, config: &Config) -> Result<Repository> {
        let device = config.device;
        blocking(move || crate::session::check_device(device)).await?;
        let inner = Inner {
            source,
            config: config.clone(),
            models: RwLock::default(),
            refreshing: tokio::sync::Mutex::new(()),
            changes: watch::Sender::new(0),
        };
        let repository = Repository { inner: Arc::new(inner) };
        repository.refresh().await?;
        Ok(repository)
    }

    /// Looks through the source: loads new versions, drops the ones that are gone, tries failed ones
    /// again after a while. Answers go on meanwhile. Cancel safe: what was not loaded is loaded by the
    /// next call.
    ///
    /// # Errors
    /// [`Error::Repository`] when the source cannot be read; the models stay as they are.
    pub async fn refresh(&self) -> Result<()> {
        let _one = self.inner.refreshing.lock().await;
        let outcome = self.refresh_now().await;
        REFRESHES.with_label_values(&[if outcome.is_ok() { "ok" } else { "failed" }]).inc();
        outcome
    }

    /// Runs [`Repository::refresh`] every `poll_ms` until cancelled; returns at once when that is 0.
    pub async fn poll(&self, cancel: CancellationToken) {
        if self.inner.config.poll_ms == 0 {
            return;
        }
        let period = Duration::from_millis(self.inner.config.poll_ms);
        while cancel.run_until_cancelled(tokio::time::sleep(period)).await.is_some() {
            match cancel.run_until_cancelled(self.refresh()).await {
                Some(Err(error)) => {
                    tracing::warn!(error = %chain(&error), "the model repository cannot be read");
                }
                Some(Ok(())) | None => {}
            }
        }
    }

    /// A receiver that wakes whenever the set of ready versions changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.changes.subscribe()
    }

    /// A ready version; the latest ready one when `version` is `None`.
    ///
    /// # Errors
    /// [`InferError::NotFound`]; [`InferError::Unavailable`] when it is there and failed to load.
    pub fn get(&self, model: &str, version: Option<u64>) -> Result<Arc<Model>, InferError> {
        let models = self.inner.models.read().clone();
        let Some(versions) = models.models.get(model) else {
            return Err(InferError::NotFound { reason: format!("there is no model {}", quote(model)) });
        };
        let found = match version {
            Some(version) => versions.ready.get(&version),
            None => versions.ready.values().next_back(),
        };
        if let Some(model) = found {
            return Ok(model.clone());
        }
        let failed = match version {
            Some(version) => versions.failed.get_key_value(&version),
            None => versions.failed.iter().next_back(),
        };
        match (failed, version) {
            (Some((version, failure)), _) => Err(InferError::Unavailable {
                reason: format!("model {model:?} version {version} cannot be served: {}", failure.reason),
            }),
            (None, Some(version)) => Err(InferError::NotFound {
                reason: format!("model {model:?} has no version {version}"),
            }),
            (None, None) => {
                Err(InferError::NotFound { reason: format!("model {model:?} has no version") })
            }
        }
    }

    /// Ready versions of a model, ascending; `None` when there is no such model.
    pub fn versions(&self, model: &str) -> Option<Vec<u64>> {
        let models = self.inner.models.read().clone();
        models.models.get(model).map(|versions| versions.ready.keys().copied().collect())
    }

    /// Every version that was found and what became of it, by name and version.
    pub fn status(&self) -> Vec<VersionStatus> {
        let models = self.inner.models.read().clone();
        let mut status: Vec<VersionStatus> = Vec::new();
        for (model, versions) in &models.models {
            let ready = versions.ready.keys().map(|version| (*version, State::Ready));
            let failed = versions
                .failed
                .iter()
                .map(|(version, failure)| (*version, State::Failed(failure.reason.clone())));
            status.extend(ready.chain(failed).map(|(version, state)| VersionStatus {
                model: model.clone(),
                version: Some(version),
                state,
            }));
        }
        status.extend(models.other.iter().map(|(path, reason)| VersionStatus {
            model: path.clone(),
            version: None,
            state: State::Failed(reason.clone()),
        }));
        status.sort_by(|a, b| (&a.model, a.version).cmp(&(&b.model, b.version)));
        status
    }

    async fn refresh_now(&self) -> Result<()> {
        let inner = &self.inner;
        let listing = millrace_bundle::scan(inner.source.store.as_ref(), &inner.source.root).await?;
        let before = inner.models.read().clone();
        let mut next = Models::default();
        let mut changed = false;

        for skipped in listing.skipped {
            let reason = chain(&skipped.reason);
            match self.version_of(&skipped.path) {
                Some((model, version)) => {
                    let failures = before.models.get(&model).map(|versions| &versions.failed);
                    let known = failures.and_then(|failed| failed.get(&version));
                    if known.is_none_or(|failure| failure.reason != reason) {
                        tracing::warn!(model, version, error = reason, "a model version is not served");
                    }
                    let failure = Failure { manifest: None, reason, at: Instant::now() };
                    next.models.entry(model).or_default().failed.insert(version, failure);
                }
                None => {
                    if !before.other.iter().any(|(path, _)| *path == skipped.path) {
                        tracing::warn!(path = skipped.path, error = reason, "a directory is not served");
                    }
                    next.other.push((skipped.path, reason));
                }
            }
        }

        let mut found: BTreeMap<String, Vec<Manifest>> = BTreeMap::new();
        for version in listing.complete {
            found.entry(version.name).or_default().push(version.manifest);
        }
        for (model, mut manifests) in found {
            let old = manifests.len().saturating_sub(inner.config.limits.versions_max.max(1));
            manifests.drain(..old);
            for manifest in manifests {
                let known = before.models.get(&model);
                let ready = known.and_then(|versions| versions.ready.get(&manifest.version));
                let failed = known.and_then(|versions| versions.failed.get(&manifest.version));
                let entry = next.models.entry(model.clone()).or_default();
                match (ready, failed) {
                    (Some(ready), _) if ready.manifest == manifest => {
                        entry.ready.insert(manifest.version, ready.clone());
                        continue;
                    }
                    (_, Some(failure))
                        if failure.manifest.as_ref() == Some(&manifest)
                            && failure.at.elapsed() < RETRY_AFTER =>
                    {
                        entry.failed.insert(manifest.version, failure.clone());
                        continue;
                    }
                    _ => {}
                }
                let version = manifest.version;
                match self.load(&manifest).await {
                    Ok(loaded) => {
                        tracing::info!(model, version, "a model version is ready");
                        entry.ready.insert(version, Arc::new(loaded));
                        changed = true;
                    }
                    Err(error) => {
                        let reason = chain(&error);
                        tracing::warn!(model, version, error = reason, "a model version is not served");
                        let manifest = Some(manifest);
                        let failure = Failure { manifest, reason, at: Instant::now() };
                        entry.failed.insert(version, failure);
                    }
                }
            }
        }

        for (model, versions) in &before.models {
            for version in versions.ready.keys() {
                let kept = next.models.get(model).is_some_and(|now| now.ready.contains_key(version));
                if !kept {
                    tracing::info!(model, version, "a model version is gone");
                    changed = true;
                }
            }
        }
        let count = |f: fn(&Versions) -> usize| next.models.values().map(f).sum::<usize>() as i64;
        MODELS.with_label_values(&["ready"]).set(count(|versions| versions.ready.len()));
        MODELS.with_label_values(&["failed"]).set(count(|versions| versions.failed.len()));
        *inner.models.write() = Arc::new(next);
        if changed {
            inner.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
        Ok(())
    }

    async fn load(&self, manifest: &Manifest) -> Result<Model> {
        let inner = &self.inner;
        let limits = millrace_bundle::Limits { model_bytes_max: inner.config.limits.model_bytes_max };
        let bundle = millrace_bundle::load_with(
            inner.source.store.as_ref(),
            &inner.source.root,
            &manifest.name,
            manifest.version,
            &limits,
        )
        .await?;
        let config = inner.config.clone();
        blocking(move || {
            let pool = Pool::build(&bundle, &config)?;
            let manifest = bundle.manifest().clone();
            let metrics = ModelMetrics::new(&manifest.name, manifest.version);
            Ok(Model { manifest, pool, metrics })
        })
        .await
    }

    /// Name and version of a path in the store, when it has the form of a version's path.
    fn version_of(&self, path: &str) -> Option<(String, u64)> {
        let root = self.inner.source.root.trim_matches('/');
        let relative = path.strip_prefix(root)?.trim_start_matches('/');
        let (model, version) = relative.split_once('/')?;
        Some((model.to_owned(), version.parse().ok().filter(|version| *version > 0)?))
    }
}

/// Runs blocking work beside the asynchronous tasks.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(Error::Service { service: "model loading", reason: "it was aborted".into() }),
        },
    }
}

/// An error and what caused it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        line.push_str(": ");
        line.push_str(&cause.to_string());
        source = cause.source();
    }
    line
}
